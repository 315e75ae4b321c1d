"""Calls of user CUDA kernels: the primitive, and kernels for given types.

Transforms, stage 2; ``cuda_kernel.py`` is the face. One equation of a program is one launch. All rules are those of
the reference, a function of blufunc operations with the same value. Only on a CUDA device does the executor ask the
primitive for the kernel's source.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.primitives.linear_ops import move_dim
from blufunc.core.primitives.primitive import Primitive, unsupported
from blufunc.core.primitives.tangents import Zero, zero
from blufunc.core.programs import simplify
from blufunc.core.programs.stage import stage
from blufunc.core.pytree import paths, tree
from blufunc.errors import ArgumentError, DtypeError, ShapeError, TreeError, UnsupportedError, ValueRangeError
from blufunc.kernels.user_kernel import C_TYPES, Accessor, CudaSource, Dims, write
from blufunc.transforms.arguments import FlatFunction, ShapeDtypeStruct, abstract
from blufunc.transforms.autodiff.jvp import jvp_jaxpr
from blufunc.transforms.batching.batch import batch_jaxpr
from blufunc.transforms.control_flow.calls import jit_p

_MOST_THREADS = 1024  # of a block, on every device
_WORD = re.compile(r"[A-Za-z_]\w*")

RESERVED = frozenset(
    "alignas alignof and asm auto bool break case catch char class const constexpr continue decltype "
    "default delete do double else enum explicit extern false float for friend goto if inline int long "
    "mutable namespace new not operator or private protected public register return short signed sizeof "
    "static struct switch template this throw true try typedef typename union unsigned using virtual void "
    "volatile while xor i threadIdx blockIdx blockDim gridDim".split()
)
"""Words that an argument or kernel cannot be called."""


class TypedKernel:
    """A kernel for arguments of certain types; the parameter of its equations.

    Args:
      kernel: the ``CudaKernel``.
      avals: the types.

    Attributes:
      jaxpr: the reference, its constants attached.
      out_tree: the structure of the results.
      in_avals, out_avals: the types of operands and results.
      elementwise: the positions of the arguments and of the results that the body accesses by element.
    """

    def __init__(self, kernel: Any, avals: tuple[ShapedArray, ...]):
        self.kernel, self.in_avals = kernel, avals
        flat = FlatFunction(kernel.reference, tree.structure((tuple(range(len(avals))), {})))
        self.jaxpr = stage(flat, avals, kernel.__name__, kernel.inputs)
        self.out_tree = flat.out_tree
        self.out_avals = [a.strong() for a in self.jaxpr.out_avals]
        _check_reference(kernel.__name__, self.jaxpr)
        if kernel.out is not None:
            self._check_out()
        self.elementwise = self._elementwise()
        self._closed, self._consts = self.jaxpr.hoist()
        self._source: CudaSource | None = None

    def __repr__(self) -> str:
        return self.kernel.__name__

    def on_host(self, compile: Callable) -> Callable:
        """The reference as a function of NumPy arrays."""
        run, consts = compile(self._closed), [np.asarray(c) for c in self._consts]
        return lambda buffers: run([*consts, *buffers])

    def call(self, jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
        """Call what a transform made of the reference."""
        closed, consts = jaxpr.hoist()
        return jit_p.bind(*consts, *args, jaxpr=closed, name=self.kernel.__name__)

    @property
    def inputs(self) -> list[tuple[str, ShapedArray]]:
        """The names and types of arguments."""
        return list(zip(self.kernel.inputs, self.in_avals, strict=True))

    @property
    def outputs(self) -> list[tuple[str, ShapedArray]]:
        """The names and types of results."""
        return list(zip(self._out_names(), self.out_avals, strict=True))

    def cuda_source(
        self,
        accessors: Mapping[str, Accessor] | None = None,
        extras: Sequence[str] = (),
        declared: Callable[[str], str] = str,
    ) -> CudaSource:
        """The source and launch; with accessors, of the fused kernel."""
        if self._source is None or accessors:
            k = self.kernel
            block = _dims(self._of_types(k.block), f"{k.__name__}: block", _MOST_THREADS)
            if int(np.prod(block)) > _MOST_THREADS or 0 in block:
                raise ValueRangeError(
                    f"{k.__name__}: block={block} has {int(np.prod(block))} threads.",
                    where=k.where,
                    fix=f"between 1 and {_MOST_THREADS}; a grid may have any number of blocks",
                )
            grid = self._of_types(k.grid)
            if grid is None:
                grid = -(-self.out_avals[0].size // int(np.prod(block)))
            shared = self._of_types(k.shared)
            if isinstance(shared, bool) or not isinstance(shared, (int, np.integer)) or shared < 0:
                raise ArgumentError(
                    f"{k.__name__}: shared={shared!r:.60} is no number of bytes.", where=k.where
                )
            made = write(
                k.__name__,
                k.body,
                self.inputs,
                self.outputs,
                grid=_dims(grid, f"{k.__name__}: grid", 2**31 - 1),
                block=block,
                shared=int(shared),
                preamble=k.preamble,
                line=k.line,
                body_line=k.body_line,
                accessors=accessors or {},
                extras=extras,
                declared=declared,
            )
            if accessors:
                return made
            self._source = made
        return self._source

    def _of_types(self, option: Any) -> Any:
        """An option that may be a function of the arguments' types."""
        return option(*_structs(self.in_avals)) if callable(option) else option

    def _out_names(self) -> list[str]:
        """The names of the results in the body."""
        names = []
        for path in paths.leaf_paths(self.out_tree):
            word = re.sub(r"\W+", "_", path).strip("_")
            names.append("out" if not word else word if _WORD.fullmatch(word) else f"out_{word}")
        for n in names:
            if n in self.kernel.inputs or names.count(n) > 1 or n in RESERVED:
                raise ValueRangeError(
                    f"{self.kernel.__name__}: a result is called {n}, and that name is taken.",
                    where=self.kernel.where,
                    fix="rename the argument; or return a dict, whose keys are the names of the results",
                )
        return names

    def _elementwise(self) -> tuple[tuple[int, ...], ...]:
        """The positions of arguments and results that the body accesses by element."""
        names = self.kernel.elementwise
        sides = (self.kernel.inputs, self._out_names()) if names else ((), ())
        for n in names:
            if n not in (*sides[0], *sides[1]):
                raise ValueRangeError(
                    f"{self.kernel.__name__}: elementwise={n!r} is neither an argument nor a result.",
                    where=self.kernel.where,
                    fix=f"of {', '.join((*sides[0], *sides[1]))} those that the body has as x[...] alone",
                )
            self.kernel.check_elementwise(n, n in sides[1])
        return tuple(tuple(i for i, n in enumerate(side) if n in names) for side in sides)

    def _check_out(self) -> None:
        """Raise unless the reference returns what ``out`` says."""
        k, declared = self.kernel, self._of_types(self.kernel.out)
        if isinstance(declared, str):
            if declared not in k.inputs:
                raise ValueRangeError(
                    f"{k.__name__}: out={declared!r} is no argument.",
                    where=k.where,
                    fix=f"one of {', '.join(k.inputs)}; or bf.ShapeDtypeStruct(shape, dtype)",
                )
            declared = _structs(self.in_avals)[k.inputs.index(declared)]
        leaves, structure = tree.flatten(declared)
        if structure != self.out_tree:
            raise TreeError(
                f"{k.__name__}: the reference returns a different structure from out= says.",
                where=k.where,
                why="; ".join(paths.diff(structure, self.out_tree, "out", "the result")[:5]),
                fix="correct out=, or leave it out",
            )
        for path, said, found in zip(paths.leaf_paths(structure), leaves, self.out_avals, strict=True):
            if not (hasattr(said, "shape") and hasattr(said, "dtype")):
                raise ArgumentError(
                    f"{k.__name__}: out{path} is a {type(said).__name__}, which has no shape and dtype.",
                    where=k.where,
                    fix="bf.ShapeDtypeStruct(shape, dtype)",
                )
            aval = abstract(said).strong()
            if aval is not found:
                raise (ShapeError if aval.shape != found.shape else DtypeError)(
                    f"{k.__name__}: the reference returns {found}, and out{path} is {aval}.",
                    where=k.where,
                    why=f"for arguments of the types {', '.join(map(str, self.in_avals))}.",
                    fix="correct the reference or out=, which have to agree, as the kernel has to",
                )


class _CudaKernel(Primitive):
    """A call of a kernel; its rules are those of the reference."""

    name, kind, multiple_results, fresh = "cuda_kernel", "kernel", True, True
    shard = unsupported("it is the user's, and says nothing of its dimensions")

    def reference(self, compile, *, kernel: TypedKernel):
        return kernel.on_host(compile)

    def abstract(self, *avals, kernel: TypedKernel):
        return list(kernel.out_avals)

    def cuda_source(self, *avals: ShapedArray, kernel: TypedKernel) -> CudaSource:
        """The source that the CUDA executor compiles and launches."""
        return kernel.cuda_source()

    def jvp(self, primals, tangents, *, kernel: TypedKernel):
        """The value from the kernel, the tangents from the reference."""
        outs = self.bind(*primals, kernel=kernel)
        nonzeros = tuple(t.__class__ is not Zero for t in tangents)
        derived, out_nonzeros = jvp_jaxpr(kernel.jaxpr, nonzeros, (False,) * len(outs))
        used = (*(False,) * len(outs), *(True,) * sum(out_nonzeros))
        only_tangents = derived.memoised("tangents", lambda: simplify.dce(derived, used))
        ts = iter(kernel.call(only_tangents, [*primals, *(t for t in tangents if t.__class__ is not Zero)]))
        return outs, [next(ts) if nz else zero(o.aval) for o, nz in zip(outs, out_nonzeros, strict=True)]

    def transpose(self, cts, *args, kernel: TypedKernel):
        """The reference's, of a kernel that is linear."""
        closed, consts = kernel.jaxpr.hoist()
        jit_p.transpose(cts, *consts, *args, jaxpr=closed, name=kernel.kernel.__name__)

    def batch(self, axis, args, dims, *, kernel: TypedKernel):
        jaxpr, out_batched = batch_jaxpr(kernel.jaxpr, axis, tuple(d is not None for d in dims))
        ins = [a if d is None else move_dim(a, d, 0) for a, d in zip(args, dims, strict=True)]
        return kernel.call(jaxpr, ins), [0 if b else None for b in out_batched]

    def rewrite(self, bodies, operands, *, kernel: TypedKernel):
        """Inline the transformed reference."""
        return bodies.inline(kernel.jaxpr, operands)


cuda_kernel_p = _CudaKernel()


def _check_reference(name: str, jaxpr: Jaxpr) -> None:
    """Raise unless a jaxpr can define a kernel.

    It cannot if it captures tracers, has effects, or returns nothing.
    """
    for const in jaxpr.consts:
        if not isinstance(const, ConcreteArray):
            raise ArgumentError(
                f"the reference of the kernel {name} closes over a traced value ({const.aval}).",
                where=source.here(),
                why="the kernel is given its arguments only.",
                fix="make it an argument of the kernel",
            )
    if jaxpr.effects or jaxpr.named_axes:
        found = ", ".join(sorted(jaxpr.effects | jaxpr.named_axes))
        raise UnsupportedError(
            f"the reference of the kernel {name} does more than compute a value: {found}.",
            where=source.here(),
            fix="do that outside of the kernel",
        )
    if not jaxpr.outvars:
        raise TreeError(f"the reference of the kernel {name} returns no array.", where=source.here())
    for aval in jaxpr.out_avals:
        if aval.dtype not in C_TYPES:
            raise DtypeError(f"the reference of the kernel {name} returns {aval}, a type that CUDA has not.",
                             where=source.here(), fix="return random.key_data(key) for keys")  # fmt: skip


def _structs(avals: Sequence[ShapedArray]) -> list[ShapeDtypeStruct]:
    return [ShapeDtypeStruct(a.shape, a.dtype) for a in avals]


def _dims(given: Any, what: str, most: int) -> Dims:
    """One to three sizes, as three."""
    sizes = given if isinstance(given, (tuple, list)) else (given,)
    good = 1 <= len(sizes) <= 3 and all(
        isinstance(n, (int, np.integer))
        and not isinstance(n, bool)
        and 0 <= n <= (most if axis == 0 else 65535)
        for axis, n in enumerate(sizes)
    )
    if not good:
        raise ValueRangeError(
            f"{what}={given!r:.60} is not one to three sizes.",
            where=source.here(),
            fix=f"ints from 0, the first up to {most}, the others up to 65535",
        )
    x, y, z = (*map(int, sizes), 1, 1)[:3]
    return x, y, z
