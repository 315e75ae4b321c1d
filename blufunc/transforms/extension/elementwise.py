"""``elementwise``: a function of numbers, written in C, as operations of ours.

Transforms, before stage 1. A formula in C, that of a paper or of a CUDA kernel, becomes a jaxpr of elementwise
primitives on numbers, traced once for each combination of dtypes; it is applied to arrays as it is, since these
primitives take operands of any one shape. So there is nothing that the stages after this one have to know: it runs
on every device, is mapped, and is fused with what is around it, as any primitive is.

Its derivative is that of C: of the branch that is taken. With f_i the partial derivative by input i, itself such a
function, and t_i the tangents,

    f'(x) t  =  sum_i f_i(x) t_i,

and where the branches of a condition have derivatives of their own, the choice between them is a part of f_i, made
before anything is multiplied. So ``x > 0 ? sqrt(x) : 0`` has the gradient 0 at 0, where the product of 0 with the
infinite derivative of the branch that is not taken would be NaN.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blufunc.core.arrays.array import scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr, Literal, eval_jaxpr
from blufunc.core.ir.trace import Value
from blufunc.core.ops import elementwise as ops
from blufunc.core.primitives.linear_ops import add_any, add_any_p, broadcast_to, instantiate
from blufunc.core.primitives.tangents import zero
from blufunc.core.programs.simplify import simplify
from blufunc.core.programs.stage import stage
from blufunc.errors import ArgumentError, DtypeError, ShapeError, ValueRangeError
from blufunc.transforms.arguments import as_values
from blufunc.transforms.autodiff.jvp import jvp_flat
from blufunc.transforms.autodiff.symbolic_zeros import SymbolicZero
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp
from blufunc.transforms.extension.c_evaluator import Evaluation, functions
from blufunc.transforms.extension.c_parser import parse
from blufunc.transforms.extension.c_tree import Function
from blufunc.transforms.staging.jit import jit

_Types = tuple[tuple[np.dtype, bool], ...]


def elementwise(
    text: str,
    *,
    inputs: str | Sequence[str] | None = None,
    out: Any = None,
    name: str | None = None,
    jvp: Callable | None = None,
    **constants: Any,
) -> Callable:
    """A function of arrays, element by element, from an expression in C or the definition of a C function.

        leaky_relu = bf.elementwise("x > 0 ? x : alpha * x", alpha=0.01)
        leaky_relu(x), leaky_relu(x, alpha=0.1), bf.grad(lambda x: leaky_relu(x).sum())(x)

        huber = bf.elementwise('''
            float huber(float error, float delta) {
                float size = fabs(error);
                if (size <= delta) return 0.5 * error * error;
                return delta * (size - 0.5 * delta);
            }''')

    The text becomes operations like any others: it runs on every device, is fused with what is around it, and works
    under every transform. It is a formula and has no loops, arrays or pointers. Both branches of a condition are
    computed, and the derivative is that of the branch that is taken.

    Operators and functions are those of C: ``/`` and ``%`` of integers round toward zero, ``fmax`` and ``fmin`` pass
    over NaN. Dtypes meet as in ``blufunc.numpy``: literals take the dtype that they meet, and nothing is widened to
    ``int``. A declared type is a conversion, as in C; arguments are widened to that of their parameter and never
    narrowed. ``T`` is the dtype that all arguments declared so have in common, ``auto`` that of the value.

    Args:
      text: an expression over names, or one function definition.
      inputs: the names of an expression's inputs, in the order of the parameters; by default all its names, in the
        order in which they appear, those of ``constants`` last.
      out: the dtype of an expression's result, where it is not the one that comes out.
      name: what to call it in jaxprs and messages.
      jvp: a derivative to use instead: ``jvp(primals, tangents) -> (out, out_tangent)``, given the inputs as arrays of
        one shape or rank 0.
      constants: defaults for inputs: numbers or arrays.
    Returns:
      a function of arrays and numbers, whose shapes broadcast.
    Raises:
      CompileError: the text is not C, or not of the part of C that is read; with the line and column.
      ArgumentError, ValueRangeError: an option is of the wrong kind, or names an input that there is not.
      DtypeError, ShapeError (when it is called): an argument is complex, or does not fit a declared type; shapes do not
        broadcast.
    """
    if not isinstance(text, str):
        raise ArgumentError(
            f"elementwise takes a text in C, not {text!r:.60}.",
            where=source.here(),
            fix='bf.elementwise("x > 0 ? x : alpha * x", alpha=0.01); Python functions of arrays need none',
        )
    if name is not None and not isinstance(name, str):
        raise ArgumentError(
            f"elementwise: name={name!r:.60} is no text.", where=source.here(), fix='name="f"'
        )
    function = parse(text, _names(inputs), functions())
    defaults = _defaults(function, constants)
    name = name or function.name or "elementwise"
    if jvp is not None and not callable(jvp):
        raise ArgumentError(
            f"elementwise: jvp={jvp!r:.60} is no rule.",
            where=source.here(),
            fix="a function (primals, tangents) -> (out, out_tangent)",
        )
    formula = _Formula(function, name, _out_dtype(function, out), jvp)
    return _public(formula, defaults)


def _names(inputs: Any) -> tuple[str, ...] | None:
    """The option ``inputs``, which may be one text."""
    if inputs is None:
        return None
    names = inputs.replace(",", " ").split() if isinstance(inputs, str) else inputs
    if not isinstance(names, (tuple, list)) or not all(
        isinstance(n, str) and n.isidentifier() for n in names
    ):
        raise ArgumentError(
            f"elementwise: inputs={inputs!r:.60} are no names.", where=source.here(), fix="inputs='x, alpha'"
        )
    if len(set(names)) < len(names):
        raise ValueRangeError(f"elementwise: inputs={inputs!r:.60} has a name twice.", where=source.here())
    return tuple(names)


def _defaults(function: Function, constants: dict[str, Any]) -> dict[str, Any]:
    """Defaults for inputs: Python numbers as they are, so that they stay exact, anything else as a value."""
    names = [n for n, _ in function.inputs]
    for given in constants:
        if given not in names:
            raise ValueRangeError(
                f"elementwise was given {given}=, and the text has no such input.",
                where=source.here(),
                fix=f"its inputs are {', '.join(names) or 'none'}",
            )
    numbers = {n: x for n, x in constants.items() if x.__class__ in (bool, int, float)}
    others = {n: x for n, x in constants.items() if n not in numbers}
    values = as_values(list(others.values()), lambda i: f"{list(others)[i]}= of elementwise")
    return {**numbers, **dict(zip(others, values, strict=True))}


def _out_dtype(function: Function, out: Any) -> np.dtype | None:
    if out is None:
        return None
    if function.name is not None:
        raise ArgumentError(
            f"elementwise: out={out!r:.60} of a function, which declares the type of its result.",
            where=source.here(),
            fix="leave it out",
        )
    try:
        return dtypes.as_dtype(out)
    except DtypeError as e:
        raise source.located(e) from None


def _public(formula: _Formula, defaults: dict[str, Any]) -> Callable:
    """The function that the user gets: its parameters are the inputs, those with defaults last."""
    names = [n for n, _ in formula.function.inputs]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(n, kind) for n in names if n not in defaults]
    parameters += [inspect.Parameter(n, kind, default=defaults[n]) for n in names if n in defaults]
    signature = inspect.Signature(parameters)

    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError as e:
            raise ArgumentError(
                f"{formula.name}: {e}.", where=source.here(), fix=f"call it as {formula.name}{signature}"
            ) from None
        numbers = {n: x for n, x in defaults.items() if n not in bound and not isinstance(x, Value)}
        if formula.jvp is not None:
            numbers = {}  # the user's rule is given all inputs
        given = [n for n in names if n not in numbers]
        return formula({n: bound.get(n, defaults.get(n)) for n in given}, numbers)

    function.__name__ = function.__qualname__ = formula.name
    function.__doc__ = f"Element by element, ``{' '.join(formula.function.text.split())}``."
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


class _Formula:
    """A parsed function and what was made of it for each combination of dtypes.

    Args:
      function: its tree.
      name: for jaxprs and messages.
      out: the dtype of the result, or None.
      jvp: the user's derivative, or None.
    """

    def __init__(self, function: Function, name: str, out: np.dtype | None, jvp: Callable | None):
        self.function, self.name, self.out, self.jvp = function, name, out, jvp
        self.known: dict[Any, Callable] = {}

    def __call__(self, given: dict[str, Any], numbers: dict[str, Any]) -> Any:
        """The value for arguments and for defaults that are Python numbers."""
        values = self.arguments(given)
        key = (tuple(given), tuple((n, x.__class__, repr(x)) for n, x in numbers.items()))
        compiled = self.known.get(key)
        if compiled is None:
            compiled = self.known[key] = self.compiled(tuple(given), numbers)
        return compiled(*values)

    def arguments(self, given: dict[str, Any]) -> list[Any]:
        """Arguments as values. Beside 64-bit arrays Python numbers are 64-bit, and still weak: they stay exact."""
        names = list(given)
        numbers = [i for i, x in enumerate(given.values()) if x.__class__ in (int, float)]
        lifted = as_values(
            [0 if i in numbers else x for i, x in enumerate(given.values())],
            lambda i: f"the argument {names[i]} of {self.name}",
        )
        found = {v.aval.dtype for i, v in enumerate(lifted) if i not in numbers}
        for i in numbers:
            x = given[names[i]]
            wide = dtypes.float64 if isinstance(x, float) else dtypes.int64
            if wide in found:
                lifted[i] = scalar(x, wide, weak_type=True)
            else:
                (lifted[i],) = as_values([x], lambda _: "")
        return lifted

    def compiled(self, given: tuple[str, ...], numbers: dict[str, Any]) -> Callable:
        """The function of the arguments ``given``, as one call in jaxprs."""
        of_types: dict[_Types, _Scalar] = {}

        def apply(*values):
            self.check(given, values)
            types = tuple((v.aval.dtype, v.aval.weak_type) for v in values)
            found = of_types.get(types)
            if found is None:
                found = of_types[types] = _Scalar(self.trace(given, numbers, types), self.name, self.jvp)
            shape = common_shape([v.aval.shape for v in values], self.name)
            return broadcast_to(found(*[broadcast_to(v, shape) if v.aval.ndim else v for v in values]), shape)

        apply.__name__ = self.name
        return jit(apply)

    def check(self, given: Sequence[str], values: Sequence[Any]) -> None:
        """Raise DtypeError for what is no real number."""
        for n, v in zip(given, values, strict=True):
            if dtypes.is_complex(v.aval.dtype) or not (
                dtypes.is_numeric(v.aval.dtype) or dtypes.is_bool(v.aval.dtype)
            ):
                raise DtypeError(
                    f"{self.name} takes real numbers, and its argument {n} is {v.aval}.",
                    where=source.here(),
                    fix="give it the real and the imaginary part of complex numbers",
                )

    def trace(self, given: tuple[str, ...], numbers: dict[str, Any], types: _Types) -> Jaxpr:
        """The jaxpr for arguments of ``types``, on numbers."""

        def fun(*xs):
            args = {**dict(zip(given, xs, strict=True)), **numbers}
            return [Evaluation(self.function, self.name).run(args, self.out)]

        return simplify(stage(fun, [ShapedArray((), d, weak) for d, weak in types], self.name))


class _Scalar:
    """A jaxpr of numbers as a function of arrays, with its partial derivatives, which are such functions too."""

    def __init__(self, jaxpr: Jaxpr, name: str, jvp: Callable | None = None):
        self.jaxpr, self.name = jaxpr, name

        def apply(*values):
            return self.apply(values)

        apply.__name__ = name
        self.call = custom_jvp(apply)
        self.call.defjvp(jvp or self.derivative, symbolic_zeros=jvp is None)

    def __call__(self, *values: Any) -> Any:
        return self.call(*values)

    def apply(self, values: Sequence[Any]) -> Any:
        """Equation by equation, at the user's present line rather than at the one that was traced first."""
        env: dict[Any, Any] = dict(zip(self.jaxpr.invars, values, strict=True))
        read = lambda a: a.array if a.__class__ is Literal else env[a]
        for eqn in self.jaxpr.eqns:
            prim = ops.add_p if eqn.prim is add_any_p else eqn.prim  # which takes operands of one shape only
            env[eqn.outvars[0]] = prim.bind(*map(read, eqn.invars), **eqn.params)
        return read(self.jaxpr.outvars[0])

    def derivative(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        """The jvp rule."""
        out = self(*primals)
        if not dtypes.is_inexact(out.aval.dtype):
            return out, None
        total = None
        for i, t in enumerate(tangents):
            if isinstance(t, SymbolicZero) or self.partial(i).is_zero:
                continue
            slope = self.partial(i)(*primals)
            term = broadcast_to(ops.mul(slope, ops.convert(t, out.aval.dtype)), out.aval.shape)
            total = term if total is None else add_any(total, term)
        return out, total

    @property
    def is_zero(self) -> bool:
        """Whether it is 0 for all numbers, as a derivative by what it does not depend on."""
        (out,) = self.jaxpr.outvars
        return out.__class__ is Literal and bool(out.value == 0)

    def partial(self, i: int) -> _Scalar:
        """The derivative by input ``i``, under the rules that are in force."""

        def fun(*xs):
            tangents = [scalar(1, x.aval.dtype) if j == i else zero(x.aval) for j, x in enumerate(xs)]
            _, (t,) = jvp_flat(lambda *ys: eval_jaxpr(self.jaxpr, ys), xs, tangents)
            return [instantiate(t)]

        def make():
            return _Scalar(simplify(stage(fun, self.jaxpr.in_avals, self.name)), self.name)

        return self.jaxpr.memoised(("partial derivative", i), make)


def common_shape(shapes: Sequence[tuple[int, ...]], name: str) -> tuple[int, ...]:
    """The shape that ``shapes`` broadcast to."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ShapeError(
            f"{name}: the shapes {' and '.join(map(str, dict.fromkeys(shapes)))} do not broadcast.",
            where=source.here(),
            fix="insert an axis where one is missing (x[:, None]), or reshape one of them",
        ) from None
