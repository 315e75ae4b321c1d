"""``cuda_kernel``: a user's CUDA kernel as an operation.

Transforms, stages 1 and 2. A kernel is one equation of a program; what it computes is defined by a reference, a
function of blufunc operations. It gives the value on other devices, the types, the derivatives and the batches.
``kernels/user_kernel.py`` writes the source for the types of the arguments; the executor compiles and launches it.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import linecache
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import trace_scope
from blufunc.core.pytree import tree
from blufunc.errors import ArgumentError, DtypeError, ValueRangeError
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.user_kernel import C_TYPES
from blufunc.transforms.arguments import (
    abstract,
    as_values,
    name_of,
    signature_of,
)
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp
from blufunc.transforms.custom_rules.custom_vmap import custom_vmap, sequential_vmap
from blufunc.transforms.extension.kernel_call import RESERVED, TypedKernel, cuda_kernel_p

_WORD = re.compile(r"[A-Za-z_]\w*")
_CHANGES = r"\s*(?:=(?!=)|[-+*/%&|^]=|<<=|>>=|\+\+|--)"


def cuda_kernel(
    body: str,
    *,
    reference: Callable | None = None,
    out: Any = None,
    grid: Any = None,
    block: Any = 256,
    shared: Any = 0,
    name: str | None = None,
    inputs: str | Sequence[str] | None = None,
    preamble: str = "",
    elementwise: str | Sequence[str] = (),
    jvp: Callable | None = None,
    vjp: tuple[Callable, Callable] | None = None,
    vmap: Callable | str | None = None,
) -> CudaKernel:
    """A function of arrays that a CUDA kernel computes.

        def saxpy(a, x, y):
            return a * x + y

        fast = bf.cuda_kernel("if (i < out_size) out[i] = a[0] * x[i] + y[i];", reference=saxpy)
        fast(2.0, x, y), bf.jit(bf.grad(lambda x: fast(2.0, x, y).sum()))(x)

    The kernel is the body within braces. It knows each argument by its name, as a pointer to its elements (row-major
    and contiguous; of a number, one element), and the result as ``out``, or by the names that the reference gives
    several results: ``out_0``, ``out_1`` of a tuple, keys of a dict. An argument ``x`` also defines ``x_size``,
    ``x_ndim``, ``x_shape_0`` ..., constants, and the type ``x_dtype``; ``i`` is the index of the thread along x. Every
    element of every result has to be written. ``block``, ``grid`` and ``shared`` are numbers, or functions of the types
    of the arguments (``ShapeDtypeStruct``).

    On devices other than CUDA's the reference computes the value. It also gives the derivatives and the batches, unless
    ``jvp``, ``vjp`` or ``vmap`` do.

    Args:
      body: statements of CUDA C++.
      reference: a function of arrays with the same value, made of blufunc operations; required. Its
        parameters are the names of the arguments.
      out: what it returns, to be checked: a ``ShapeDtypeStruct``, a pytree of them, the name of an argument that it is
        like, or a function of the arguments' types that gives one of these. None: whatever the reference returns.
      grid: blocks: an int or up to three. None: enough for one thread for each element of the first result.
      block: threads of a block: an int or up to three.
      shared: bytes of dynamic shared memory, ``extern __shared__`` in the body.
      name: of the kernel; by default the reference's.
      inputs: names of the arguments, where those of the reference are not to be used.
      preamble: what stands before the kernel: ``__device__`` functions, includes.
      elementwise: names of arguments and results that the body has as ``x[...]``, and as ``out[...] = ...``, and in no
        other way. Elementwise operations that make such an argument, or read such a result, and are of no other use
        become part of the kernel: the array between is not stored.
      jvp: a derivative, as of ``custom_jvp``: ``jvp(primals, tangents) -> (out, out_tangent)``.
      vjp: a reverse-mode derivative, as of ``custom_vjp``: ``(fwd, bwd)``.
      vmap: a batching rule, as of ``custom_vmap``: ``vmap(axis_size, in_batched, *args) -> (out, out_batched)``; or
        ``"sequential"``, which launches the kernel for each element.
    Returns:
      a function; ``source(*args)`` is the source of its kernel, and ``compile(*args, arch=...)`` its binary, without a
      GPU.
    Raises:
      ArgumentError, ValueRangeError: an option is of the wrong kind, or a name cannot be one in CUDA.
      ShapeError, DtypeError, TreeError (when it is called): the reference does not return what ``out`` says.
      CompileError (when it first runs on a device): the body does not compile; with its line.
    """
    if not isinstance(body, str) or not isinstance(preamble, str):
        which, given = ("body", body) if not isinstance(body, str) else ("preamble", preamble)
        raise ArgumentError(
            f"cuda_kernel: the {which} is a text in CUDA C++, not {given!r:.60}.",
            where=source.here(),
            fix='bf.cuda_kernel("if (i < out_size) out[i] = 2 * x[i];", reference=lambda x: 2 * x)',
        )
    if not callable(reference):
        raise ArgumentError(
            f"cuda_kernel: the reference is a function, not {reference!r:.60}.",
            where=source.here(),
            why="it defines the kernel: its value where there is no GPU, its types, derivatives and batches.",
            fix="reference=lambda x: 2 * x, with the same value, and parameters of the names that the body uses",
        )
    if jvp is not None and vjp is not None:
        raise ArgumentError(
            "cuda_kernel was given jvp= and vjp=.",
            where=source.here(),
            why="each is the whole derivative.",
            fix="keep jvp, which serves both modes",
        )
    names = _argument_names(reference, inputs)
    name = _identifier(name_of(reference) if name is None else name, "name", chosen=name is not None)
    kernel = CudaKernel(body, reference, names, out, (grid, block, shared), name, preamble, (jvp, vjp, vmap))
    kernel.elementwise = _names_of(elementwise, "elementwise")
    for n in kernel.elementwise:
        if n in names:
            kernel.check_elementwise(n, False)
    return kernel


class CudaKernel:
    """The result of ``cuda_kernel``: call it with arrays.

    Attributes:
      body, preamble: its source.
      reference: the function that defines it.
      inputs: the names of its arguments.
    """

    def __init__(
        self,
        body: str,
        reference: Callable,
        inputs: tuple[str, ...],
        out: Any,
        launch: tuple[Any, Any, Any],
        name: str,
        preamble: str,
        rules: tuple[Any, Any, Any],
    ):
        self.body, self.preamble, self.reference, self.inputs = body, preamble, reference, inputs
        self.__name__ = self.__qualname__ = name
        self.__doc__, self.__wrapped__ = reference.__doc__, reference
        self.out, (self.grid, self.block, self.shared) = out, launch
        self.where, self.line, self.body_line = (
            source.here(),
            source.summary(source.current()),
            _line_of(body),
        )
        self.elementwise: tuple[str, ...] = ()
        self._typed: dict[Any, TypedKernel] = {}
        self._function = self._with_rules(*rules)
        signature = signature_of(reference)
        self.signature = signature or inspect.Signature(
            [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in inputs]
        )

    def __repr__(self) -> str:
        return f"<cuda_kernel {self.__name__}({', '.join(self.inputs)})>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*self._values(args, kwargs))

    def check_elementwise(self, name: str, written: bool) -> None:
        """Raise ValueRangeError if the body accesses a name other than by element."""
        code = re.sub(r"//[^\n]*|/\*.*?\*/", " ", self.body, flags=re.DOTALL)
        for use in re.finditer(rf"(?<![\w.]){name}\b(?=(.*?)(?:;|$))", code, re.DOTALL):
            rest = _after_index(use[1])
            plain = rest is not None and (
                re.match(r"\s*=(?!=)", rest) if written else not re.match(_CHANGES, rest)
            )
            if not plain or (not written and re.search(r"&\s*$", code[: use.start()])):
                how = f"{name}[...] = value" if written else f"{name}[...]"
                raise ValueRangeError(
                    f"{self.__name__}: elementwise={name!r}, and the body has it otherwise than as {how}: "
                    f"{name}{use[1].strip():.40}",
                    where=self.where,
                    why="elements are computed where the kernel reads or writes them: there is no array to point to.",
                    fix=f"use {name} as {how} alone, or leave it out of elementwise=",
                )

    def source(self, *args: Any, **kwargs: Any) -> str:
        """The source of the kernel for these types: arrays, or ``ShapeDtypeStruct``."""
        return self.typed(self._avals(args, kwargs)).cuda_source().text

    def compile(self, *args: Any, arch: str = "sm_90a", **kwargs: Any) -> bytes:
        """The cubin for arguments of these types and an architecture, without a GPU.

        Raises:
          CompileError: the body does not compile; with its line.
          UnsupportedError: NVRTC is not installed, or does not know the architecture.
        """
        return nvrtc.compile(self.source(*args, **kwargs), arch, self.__name__)

    def typed(self, avals: tuple[ShapedArray, ...]) -> TypedKernel:
        """The kernel for arguments of these types."""
        key = (avals, trace_scope())
        found = self._typed.get(key)
        if found is None:
            found = self._typed[key] = TypedKernel(self, avals)
        return found

    def _with_rules(self, jvp: Any, vjp: Any, vmap: Any) -> Callable:
        """The function of values, with the rules that the user gave around it."""

        @functools.wraps(self.reference)
        def call(*values):
            typed = self.typed(tuple([v.aval for v in values]))
            return tree.unflatten(typed.out_tree, cuda_kernel_p.bind(*values, kernel=typed))

        call.__name__, call.__signature__ = self.__name__, _positional(self.inputs)  # type: ignore[attr-defined]
        function: Any = call
        if vmap == "sequential":
            function = sequential_vmap(function)
        elif vmap is not None:
            expected = '"sequential", or a function (axis_size, in_batched, *args) -> (out, out_batched)'
            _check_option("vmap", vmap, callable(vmap), expected)
            function = custom_vmap(function)
            function.def_vmap(vmap)
        if jvp is not None:
            _check_option("jvp", jvp, callable(jvp), "a function (primals, tangents) -> (out, out_tangent)")
            function = custom_jvp(function)
            function.defjvp(jvp)
        if vjp is not None:
            pair = isinstance(vjp, (tuple, list)) and len(vjp) == 2 and all(map(callable, vjp))
            _check_option("vjp", vjp, pair, "a pair of functions (fwd, bwd)")
            function = custom_vjp(function)
            function.defvjp(*vjp)
        return function

    def _bound(self, args: tuple, kwargs: dict) -> list[Any]:
        """The arguments in the order of the parameters."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as e:
            raise ArgumentError(
                f"{self.__name__}: {e}.",
                where=source.here(),
                fix=f"{self.__name__}({', '.join(self.inputs)})",
            ) from None
        bound.apply_defaults()
        if len(bound.args) != len(self.inputs):
            raise ArgumentError(
                f"{self.__name__} takes {len(self.inputs)} arrays, it was given {len(bound.args)}.",
                where=source.here(),
                fix=f"{self.__name__}({', '.join(self.inputs)})",
            )
        return list(bound.args)

    def _values(self, args: tuple, kwargs: dict) -> list[Any]:
        values = as_values(
            self._bound(args, kwargs), lambda i: f"the argument {self.inputs[i]} of {self.__name__}"
        )
        for v, n in zip(values, self.inputs, strict=True):
            if v.aval.dtype not in C_TYPES:
                raise DtypeError(
                    f"{self.__name__}: the argument {n} is {v.aval}, which CUDA has no type for.",
                    where=source.here(),
                    fix="pass random.key_data(key) for keys",
                )
        return values

    def _avals(self, args: tuple, kwargs: dict) -> tuple[ShapedArray, ...]:
        """The types of arguments that may be types themselves."""
        bound = zip(self._bound(args, kwargs), self.inputs, strict=True)
        return tuple([abstract(x, f"the argument {n} of {self.__name__}") for x, n in bound])


# -- options ---------------------------------------------------------------------------------------


def _argument_names(reference: Callable, inputs: Any) -> tuple[str, ...]:
    """The names of the arguments: those given, or the parameters of the reference."""
    if inputs is not None:
        names: Any = _names_of(inputs, "inputs")
    else:
        signature = signature_of(reference)
        parameters = list(signature.parameters.values()) if signature else None
        if parameters is None or any(
            p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.KEYWORD_ONLY) for p in parameters
        ):
            raise ArgumentError(
                f"cuda_kernel: the parameters of {name_of(reference)} do not name the arguments of the kernel.",
                where=source.here(),
                why="it has * or ** among them, or parameters by keyword only." if parameters else None,
                fix="inputs='x, y', or a reference with plain parameters",
            )
        names = [p.name for p in parameters]
    if len(set(names)) < len(names):
        raise ValueRangeError(f"cuda_kernel: inputs={inputs!r:.60} has a name twice.", where=source.here())
    return tuple([_identifier(n, "an argument") for n in names])


def _names_of(given: Any, option: str) -> tuple[str, ...]:
    """An option that lists names, or is one text of them."""
    names = given.replace(",", " ").split() if isinstance(given, str) else given
    if not isinstance(names, (tuple, list)) or not all(isinstance(n, str) for n in names):
        raise ArgumentError(
            f"cuda_kernel: {option}={given!r:.60} are no names.", where=source.here(), fix=f"{option}='x, y'"
        )
    return tuple(names)


def _after_index(text: str) -> str | None:
    """The text after a leading ``[...]``; None without one."""
    text = text.lstrip()
    level = 0
    for k, c in enumerate(text):
        level += (c == "[") - (c == "]")
        if not level:
            return text[k + 1 :] if c == "]" else None
    return None


def _identifier(word: Any, what: str, chosen: bool = True) -> str:
    """A valid name in CUDA; ``kernel`` for an invalid default."""
    if (
        isinstance(word, str)
        and _WORD.fullmatch(word)
        and word not in RESERVED
        and not keyword.iskeyword(word)
    ):
        return word
    if not chosen:
        return "kernel"
    raise ValueRangeError(
        f"cuda_kernel: {what} is called {word!r:.60}, which cannot be a name in CUDA C++.",
        where=source.here(),
        fix="letters, digits and _, and no word of the language; inputs= renames arguments",
    )


def _check_option(name: str, given: Any, is_good: bool, expected: str) -> None:
    """Raise ArgumentError for a rule that is none."""
    if not is_good:
        raise ArgumentError(
            f"cuda_kernel: {name}={given!r:.60} is no rule.", where=source.here(), fix=f"{expected}"
        )


def _positional(names: Sequence[str]) -> inspect.Signature:
    return inspect.Signature([inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in names])


def _line_of(body: str) -> tuple[str, int] | None:
    """The file and line where the body begins literally; None if ambiguous."""
    frame = source.current()
    if frame is None:
        return None
    file = frame[0].co_filename
    text = "".join(linecache.getlines(file))
    if not body.strip() or text.count(body) != 1:
        return None
    return os.path.basename(file), text.count("\n", 0, text.index(body)) + 1
