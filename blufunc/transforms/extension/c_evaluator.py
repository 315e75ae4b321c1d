"""What C's operators and functions are in our operations, and the evaluation of a tree with them.

Transforms, stage 1: ``Evaluation`` runs a function of ``c_tree.py`` on traced numbers. Literals stay Python
numbers until they meet a value, whose dtype they take, so that 0.1 beside float64 is not rounded to float32 first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from blufunc.core.arrays.array import scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.trace import EVAL, Value, set_trace
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import special
from blufunc.core.ops.elementwise import convert_p
from blufunc.errors import BlufuncError, DtypeError
from blufunc.transforms.extension import c_tree as c

# -- functions of values of one dtype --------------------------------------------------------------


def _fmax(x: Any, y: Any) -> Any:
    """The larger; the other one where one is NaN."""
    return ops.select(ops.ne(x, x), y, ops.select(ops.ne(y, y), x, ops.max(x, y)))


def _fmin(x: Any, y: Any) -> Any:
    """The smaller; the other one where one is NaN."""
    return ops.select(ops.ne(x, x), y, ops.select(ops.ne(y, y), x, ops.min(x, y)))


def _round(x: Any) -> Any:
    """To the nearest integer, halves away from zero; not by adding a half, which rounds up 0.49999997."""
    down = ops.trunc(x)
    return ops.select(ops.ge(ops.abs(ops.sub(x, down)), 0.5), ops.add(down, ops.sign(x)), down)


def _copysign(x: Any, y: Any) -> Any:
    """The size of x with the sign of y, where 1 / y tells -0 from 0."""
    negative = ops.select(ops.eq(y, 0), ops.lt(ops.div(1, y), 0), ops.lt(y, 0))
    size = ops.abs(x)
    return ops.select(negative, ops.neg(size), size)


def _fdim(x: Any, y: Any) -> Any:
    return ops.select(ops.le(x, y), 0, ops.sub(x, y))


def _shift_right(x: Any, y: Any) -> Any:
    """With the sign, where there is one."""
    shift = ops.shift_right_logical if dtypes.is_unsigned(x.aval.dtype) else ops.shift_right_arithmetic
    return shift(x, y)


# Functions of floating numbers: integers become float32.
_FLOATING: dict[str, tuple[int, Callable]] = {
    **{n: (1, getattr(ops, n)) for n in (
        "exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "cbrt", "sin", "cos", "tan", "asin", "acos", "atan",
        "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "floor", "ceil", "trunc",
    )},
    "atan2": (2, ops.atan2),
    "log2": (1, lambda x: ops.mul(ops.log(x), 1.4426950408889634)),
    "log10": (1, lambda x: ops.mul(ops.log(x), 0.4342944819032518)),
    "exp10": (1, lambda x: ops.exp(ops.mul(x, 2.302585092994046))),
    "erfinv": (1, ops.erf_inv),
    "lgamma": (1, special.lgamma_p.bind),
    "tgamma": (1, special.gamma_p.bind),
    "rint": (1, ops.round),
    "nearbyint": (1, ops.round),
    "round": (1, _round),
    "fabs": (1, ops.abs),
    "pow": (2, ops.pow),
    "fmod": (2, ops.rem),
    "hypot": (2, special.hypot_p.bind),
    "copysign": (2, _copysign),
    "fdim": (2, _fdim),
    "fmax": (2, _fmax),
    "fmin": (2, _fmin),
    "fma": (3, lambda x, y, z: ops.add(ops.mul(x, y), z)),
    "isnan": (1, lambda x: ops.ne(x, x)),
    "isinf": (1, lambda x: ops.eq(ops.abs(x), float("inf"))),
    "isfinite": (1, ops.is_finite),
}  # fmt: skip

# Functions of all numbers.
_OF_NUMBERS: dict[str, tuple[int, Callable]] = {
    "abs": (1, ops.abs),
    "max": (2, ops.max),
    "min": (2, ops.min),
    "clamp": (3, lambda x, low, high: ops.min(ops.max(x, low), high)),
}

_ARITHMETIC: dict[str, Callable] = {
    "+": ops.add, "-": ops.sub, "*": ops.mul, "/": ops.div, "%": ops.rem,
    "<": ops.lt, "<=": ops.le, ">": ops.gt, ">=": ops.ge, "==": ops.eq, "!=": ops.ne,
}  # fmt: skip
_BITS: dict[str, Callable] = {
    "&": ops.bitwise_and, "|": ops.bitwise_or, "^": ops.bitwise_xor, "<<": ops.shift_left,
    ">>": _shift_right,
}  # fmt: skip
# What Python computes of two numbers as C does; the others go through our own operations.
_IN_PYTHON: dict[str, Callable] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "&": operator.and_, "|": operator.or_, "^": operator.xor,
}  # fmt: skip


def functions() -> dict[str, range]:
    """The functions that can be called, with the numbers of arguments that they take."""
    return {name: range(n, n + 1) for name, (n, _) in {**_FLOATING, **_OF_NUMBERS}.items()}


# -- evaluation ------------------------------------------------------------------------------------


class Evaluation:
    """One run of a function.

    Both sides of a condition are run, and what they leave is chosen from: the values of variables, and the result.

    Args:
      function: its tree.
      name: what the user called it, for messages.
    """

    def __init__(self, function: c.Function, name: str):
        self.function, self.name = function, name
        self.variables: dict[str, Any] = {}
        self.result: Any = None
        self.returned: Any = False  # bool, or a value: where ``result`` is the result already
        self.common: np.dtype | None = None  # what T is

    def run(self, args: dict[str, Any], out: np.dtype | None) -> Any:
        """The result as a value, for arguments that are values or Python numbers."""
        generic = [_pair(args[n]) for n, kind in self.function.inputs if kind == "T"]
        self.common = self.promoted(generic, "T")[0] if generic else None
        for name, kind in self.function.inputs:
            self.variables[name] = self.passed(name, args[name], kind)
        self.block(self.function.body)
        result = self.converted(self.result, self.function.result)
        return _as(result, *_pair(result)) if out is None else _as(result, out)

    def passed(self, name: str, x: Any, kind: str) -> Any:
        """An argument as the parameter's type, which may be wider."""
        to = self.dtype(kind)
        if to is None or kind == "T":
            return self.converted(x, kind)
        if dtypes.promote(_pair(x), (to, False))[0] != to:
            raise DtypeError(
                f"{self.name} declares {kind} {name}, and was given {_type_text(x)}.",
                where=source.here(),
                why=f"that would narrow it to {dtypes.short_name(to)} unasked.",
                fix=f"convert it first: {name}.astype({to.name!r}); or declare T {name}, which takes any dtype",
            )
        return self.converted(x, kind)

    # -- statements

    def block(self, statements: tuple[c.Statement, ...]) -> None:
        """Run statements until one has returned for certain."""
        for s in statements:
            if self.returned is True:
                return
            if isinstance(s, c.Let):
                self.variables[s.name] = self.converted(self.value(s.value), s.type)
            elif isinstance(s, c.Return):
                self.give(self.converted(self.value(s.value), self.function.result))
            else:
                self.condition(s)

    def give(self, value: Any) -> None:
        """Return ``value`` where nothing has been returned yet."""
        self.result = value if self.returned is False else self.chosen(self.returned, self.result, value)
        self.returned = True

    def condition(self, s: c.If) -> None:
        """Both sides from here, and then what each leaves where it is the one that is taken."""
        test = _truth(self.value(s.test))
        if not isinstance(test, Value):
            self.block(s.then if test else s.other)
            return
        before = self.variables, self.result, self.returned
        sides = []
        for statements in (s.then, s.other):
            self.variables = dict(before[0])
            self.result, self.returned = before[1:]
            self.block(statements)
            sides.append((self.variables, self.result, self.returned))
        (then, then_result, then_returned), (other, other_result, other_returned) = sides
        # a side that has returned leaves its variables to the other
        if then_returned is True or other_returned is True:
            self.variables = other if then_returned is True else then
        else:
            both = [n for n in then if n in other]
            self.variables = {n: self.chosen(test, then[n], other[n]) for n in both}
        if then_result is None or other_result is None:
            self.result = other_result if then_result is None else then_result
        else:
            self.result = self.chosen(test, then_result, other_result)
        self.returned = self.chosen(test, then_returned, other_returned)

    # -- expressions

    def value(self, node: c.Node) -> Any:
        """The value of an expression: a value, or what has no width yet, a Python number or a choice of numbers."""
        if isinstance(node, c.Number):
            return node.value
        if isinstance(node, c.Name):
            return self.variables[node.name]
        if isinstance(node, c.Cast):
            return self.converted(self.value(node.arg), node.type)
        args = [self.value(a) for a in node.args]
        try:
            return self.applied(node.what, args)
        except BlufuncError as e:
            types = " and ".join(map(_type_text, args))
            place, marked = c.place(self.function.text, node.at)
            what = f"{self.name}, {place}: {node.what} of {types}: {e.what}"
            raise type(e)(what, where=e.where or source.here(), why=marked, fix=e.fix) from None

    def applied(self, what: str, args: list[Any]) -> Any:
        """An operator or function of values."""
        if what == "?:":
            return self.chosen(_truth(args[0]), args[1], args[2])
        if what in ("&&", "||", "!"):
            return _logical(what, [_truth(a) for a in args])
        if not any(isinstance(a, (Value, Choice)) for a in args):
            return _constant(what, args)
        if len(args) == 1 and what in ("-", "+", "~"):
            x = _as(_number(args[0]), *_pair(_number(args[0])))
            return ops.neg(x) if what == "-" else ops.bitwise_not(x) if what == "~" else x
        if what == "pow" and _is_small_integer(args[1]):
            (base,) = self.met(args[:1], inexact=True)
            return ops.integer_pow(base, int(args[1]))
        if what in _FLOATING:
            return _FLOATING[what][1](*self.met(args, inexact=True))
        if what in _OF_NUMBERS:
            return _OF_NUMBERS[what][1](*self.met(args))
        if what in _BITS:
            return _BITS[what](*self.met(args))
        return _ARITHMETIC[what](*self.met([_number(a) for a in args] if what in "+-*/%" else args))

    def chosen(self, test: Any, x: Any, y: Any) -> Any:
        """``test ? x : y``."""
        if not isinstance(test, Value):
            return x if test else y
        if x is y:
            return x
        if x.__class__ is bool and y.__class__ is bool:  # and they differ: Python has one of each
            return test if x else ops.bitwise_not(test)
        if not isinstance(x, Value) and not isinstance(y, Value):
            return Choice(test, x, y, *self.promoted([_pair(x), _pair(y)], "?:"))
        return ops.select(test, *self.met([x, y]))

    def met(self, args: list[Any], inexact: bool = False) -> list[Any]:
        """Operands as values of one dtype."""
        dtype, weak = self.promoted([_pair(a) for a in args], "operands")
        if inexact and not dtypes.is_inexact(dtype):
            dtype = dtypes.float32
        return [_as(a, dtype, weak) for a in args]

    def promoted(self, pairs: list[tuple[np.dtype, bool]], what: str) -> tuple[np.dtype, bool]:
        """The dtype that all take, and whether it is weak."""
        if all(p == pairs[0] for p in pairs):
            return pairs[0]
        try:
            return dtypes.promote(*pairs)
        except DtypeError as e:
            raise DtypeError(
                f"{self.name}, {what}: {e.what}.", where=source.here(), why=e.why, fix=e.fix
            ) from None

    def dtype(self, kind: str) -> np.dtype | None:
        """The dtype of a type; None for that of the value."""
        return self.common if kind == "T" else c.TYPES[kind]

    def converted(self, x: Any, kind: str) -> Any:
        """``x`` as a declared type; numbers become true where they are not 0."""
        to = self.dtype(kind)
        if to is None:
            return x
        return _truth(x) if to == dtypes.bool_ else _as(x, to)


class Choice:
    """``test ? x : y`` of numbers, which takes the dtype that it meets as they do."""

    __slots__ = ("dtype", "test", "weak", "x", "y")

    def __init__(self, test: Any, x: Any, y: Any, dtype: np.dtype, weak: bool):
        self.test, self.x, self.y, self.dtype, self.weak = test, x, y, dtype, weak


def _pair(x: Any) -> tuple[np.dtype, bool]:
    """The dtype of an operand, and whether it is weak."""
    if isinstance(x, Value):
        return x.aval.dtype, x.aval.weak_type
    if isinstance(x, Choice):
        return x.dtype, x.weak
    if isinstance(x, int) and not isinstance(x, bool):
        return (dtypes.int32 if -(2**31) <= x < 2**31 else dtypes.int64), True
    return dtypes.scalar_dtype(x)


def _type_text(x: Any) -> str:
    """A value's dtype, or the number, for messages."""
    return dtypes.short_name(_pair(x)[0]) if isinstance(x, (Value, Choice)) else repr(x)


def _is_small_integer(x: Any) -> bool:
    """Whether a power by ``x`` is a product, defined with its derivative for all numbers."""
    return not isinstance(x, (Value, Choice)) and abs(x) <= 64 and float(x).is_integer()


def _as(x: Any, dtype: np.dtype, weak: bool = False) -> Any:
    """An operand as a value of ``dtype``; numbers exactly, unless they have to be truncated."""
    if isinstance(x, Choice):
        return ops.select(x.test, _as(x.x, dtype, weak), _as(x.y, dtype, weak))
    if not isinstance(x, Value):
        own, _ = _pair(x)
        if dtypes.is_inexact(own) <= dtypes.is_inexact(dtype):
            return scalar(x, dtype, weak)
        x = scalar(x, dtypes.float64)
    if x.aval.dtype == dtype:
        return x
    return (
        convert_p.bind(x, dtype=dtype, weak=True)
        if weak and not x.aval.ndim
        else convert_p.bind(x, dtype=dtype)
    )


def _number(x: Any) -> Any:
    """A boolean as the integer that it is to C's arithmetic, of no width of its own."""
    if isinstance(x, Choice):
        return x
    if isinstance(x, Value):
        return convert_p.bind(x, dtype=dtypes.int32, weak=True) if dtypes.is_bool(x.aval.dtype) else x
    return int(x) if isinstance(x, bool) else x


def _truth(x: Any) -> Any:
    """Whether a number is not 0."""
    if isinstance(x, Choice):
        x = _as(x, *_pair(x))
    if not isinstance(x, Value):
        return bool(x)
    return x if dtypes.is_bool(x.aval.dtype) else ops.ne(x, 0)


def _logical(what: str, args: list[Any]) -> Any:
    """``!``, ``&&`` and ``||`` of booleans, decided by an operand that is constant."""
    if what == "!":
        return ops.bitwise_not(args[0]) if isinstance(args[0], Value) else not args[0]
    decides = what == "||"
    values = [a for a in args if isinstance(a, Value)]
    if any(a is decides for a in args):
        return decides
    if len(values) < 2:
        return values[0] if values else not decides
    return (ops.bitwise_or if decides else ops.bitwise_and)(*values)


def _constant(what: str, args: list[Any]) -> Any:
    """An operator or function of Python numbers, in 64 bits."""
    args = [_number(a) for a in args]
    if len(args) == 1 and what in ("-", "+", "~"):
        return -args[0] if what == "-" else ~args[0] if what == "~" else args[0]
    if what in _IN_PYTHON and not (what in _BITS and any(isinstance(a, float) for a in args)):
        return _IN_PYTHON[what](*args)
    _, function = _FLOATING.get(what) or _OF_NUMBERS.get(what) or (2, {**_ARITHMETIC, **_BITS}[what])
    inexact = what in _FLOATING or any(isinstance(a, float) for a in args)
    with set_trace(EVAL):
        return function(*[scalar(a, dtypes.float64 if inexact else dtypes.int64) for a in args]).item()
