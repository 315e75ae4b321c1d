"""Search for the first operation with a NaN (``debug_nans``, ``debug_infs``).

Core, at stage 8. Eager operations are checked when done. A compiled program is checked by its results: if one
has a NaN, the jaxpr is rerun equation by equation on the same arguments. The search follows the NaN from
operand to result. It reports the equation that produced it from finite operands, if it reaches a result: a
NaN that ``where`` discards is no error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.config import config
from blufunc.core.arrays import backend
from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal, subjaxprs


@dataclass
class Origin:
    """Origin of a non-finite value.

    Attributes:
      what: ``NaN`` or ``infinity``.
      result: the array that has it, on the host.
      eqn: the equation that produced it; None if it came in with an argument.
      operands: operands of that equation, on the host.
      argument: the argument that it came with.
    """

    what: str
    result: np.ndarray
    eqn: Eqn | None = None
    operands: Sequence[np.ndarray] = ()
    argument: int | None = None


class _Found(Exception):
    """Ends the run of a body; ``args`` is the ``Origin``."""


def wrong(x: np.ndarray) -> str:
    """``NaN`` or ``infinity`` if an array has one that the flags look for, else ""."""
    if not (dtypes.is_floating(x.dtype) or dtypes.is_complex(x.dtype)):
        return ""
    if config.debug_nans and bool(np.isnan(x).any()):
        return "NaN"
    return "infinity" if config.debug_infs and bool(_isinf(x).any()) else ""


def _isinf(x: np.ndarray) -> np.ndarray:
    return ~(np.isfinite(x) | np.isnan(x))


def host(x: ConcreteArray) -> np.ndarray:
    """The values of an array on the host."""
    return np.asarray(x.device.whole(x.buffer))


# -- single operations -------------------------------------------------------------------------------


def check_operation(
    prim: Any, arrays: Sequence[ConcreteArray], params: dict, results: Sequence[ConcreteArray]
) -> None:
    """Check the results of an operation that was just computed.

    Raises:
      NanError: one of them is not finite.
    """
    values = [host(r) for r in results]
    bad = next((v for v in values if wrong(v)), None)
    if bad is None:
        return
    line = source.replay.line or source.current()
    eqn = Eqn(prim, (), (), params, line)
    operands = [host(a) for a in arrays]
    raise _error(prim.name, _deepest(Origin(wrong(bad), bad, eqn, operands)), ())


# -- programs ----------------------------------------------------------------------------------------


def check_program(
    name: str, jaxpr: Jaxpr, arrays: Sequence[ConcreteArray], results: Sequence[Any], device: Any
) -> None:
    """Check a program's results; locate the origin of the first non-finite one.

    Args:
      jaxpr: the program, with calls inlined and without reports.
      arrays: its arguments, unchanged.
      results: buffers of the device.
    Raises:
      NanError: one of the results is not finite.
    """
    bad = next((x for x in map(device.whole, results) if wrong(np.asarray(x))), None)
    if bad is None:
        return
    bad = np.asarray(bad)
    if jaxpr.effects:
        raise errors.NanError(
            f"a result of {name} has {_described(bad)}.",
            where=source.here(),
            why="which operation made it is not known: the program acts on the world, and is not run again to see.",
            fix="compute what has no effects in a function of its own under jit",
        )
    origin = _Search(device).run(jaxpr, arrays)[1]
    if origin is None:
        raise errors.NanError(
            f"a result of {name} has {_described(bad)}, and its equations one by one give none.",
            where=source.here(),
            why="the compiled program rounds or orders its sums in another way, or has a mistake.",
            fix="compare with bf.disable_jit(), and report a difference that rounding does not explain",
        )
    raise _error(name, origin if origin.eqn is None else _deepest(origin), jaxpr.arg_names)


class _Search:
    """Equation-by-equation evaluator that tracks the origin of non-finite values."""

    def __init__(self, device: Any):
        self.device = device

    def run(self, jaxpr: Jaxpr, arrays: Sequence[ConcreteArray]) -> tuple[list[ConcreteArray], Origin | None]:
        """The results, and the origin of the first that is not finite."""
        env: dict[Any, ConcreteArray] = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
        env.update(zip(jaxpr.invars, arrays, strict=True))
        origins: dict[Any, Origin] = {}
        for i, (v, x) in enumerate(zip(jaxpr.invars, arrays, strict=True)):
            if what := wrong(host(x)):
                origins[v] = Origin(what, host(x), argument=i)
        for eqn in jaxpr.eqns:
            if not eqn.outvars:
                continue  # only effects, which must not happen twice
            ins = [a.array if a.__class__ is Literal else env[a] for a in eqn.invars]
            outs = self.evaluate(eqn, ins)
            env.update(zip(eqn.outvars, outs, strict=True))
            for v, x in zip(eqn.outvars, map(host, outs), strict=True):
                if what := wrong(x):
                    known = (origins[a] for a in eqn.invars if a.__class__ is not Literal and a in origins)
                    origins[v] = next(known, None) or Origin(what, x, eqn, [host(a) for a in ins])
        results = [a.array if a.__class__ is Literal else env[a] for a in jaxpr.outvars]
        returned = (origins[a] for a in jaxpr.outvars if a.__class__ is not Literal and a in origins)
        return results, next(returned, None)

    def evaluate(self, eqn: Eqn, ins: Sequence[ConcreteArray]) -> list[ConcreteArray]:
        """The results of one equation, unchecked."""
        avals = [v.aval for v in eqn.outvars]
        buffers = [a.buffer_on(self.device) for a in ins]
        outs = self.device.backend.run(eqn.prim, buffers, eqn.params, avals)
        return [ConcreteArray(b, a, self.device) for b, a in zip(outs, avals, strict=True)]


def _deepest(origin: Origin) -> Origin:
    """The origin inside an equation's jaxprs, whose bodies are rerun on the host."""
    eqn = origin.eqn
    assert eqn is not None
    if eqn.prim.reference is None or any(e.effects for j in subjaxprs(eqn.params) for e in j.eqns):
        return origin
    if any(map(wrong, origin.operands)):
        return origin
    search = _Search(backend.host_device())

    def compile(body: Jaxpr) -> Callable[[list], list[np.ndarray]]:
        def run(values: list) -> list[np.ndarray]:
            results, found = search.run(body, [_array(v) for v in values])
            if found is not None and found.eqn is not None:
                raise _Found(found)
            return [host(r) for r in results]

        return run

    try:
        eqn.prim.reference(compile, **eqn.params)(list(origin.operands))
    except _Found as e:
        return _deepest(e.args[0])
    return origin


def _array(x: Any) -> ConcreteArray:
    x = np.asarray(x)
    return ConcreteArray(x, ShapedArray(x.shape, x.dtype), backend.host_device())


# -- messages ----------------------------------------------------------------------------------------


def _error(name: str, origin: Origin, arg_names: Sequence[str]) -> errors.NanError:
    eqn, what = origin.eqn, origin.what
    if eqn is None:
        assert origin.argument is not None
        label = arg_names[origin.argument] if origin.argument < len(arg_names) else ""
        return errors.NanError(
            f"{name} was given {_described(origin.result)}: the argument {label or origin.argument}.",
            where=source.here(),
            fix="look at where that argument was made",
        )
    came_with = any(map(wrong, origin.operands))
    backward = source.is_backward(eqn.source)
    of = f"in the backward pass of this line, {eqn.prim.name}" if backward else eqn.prim.name
    verb = "passed on" if came_with else "made"
    return errors.NanError(
        f"{of} {verb} {_described(origin.result)}.",
        where=source.describe(eqn.source),
        why=f"its operands: {', '.join(map(_range, origin.operands)) or 'none'}.",
        fix=_FIX_PASSED if came_with else _FIX_BACKWARD if backward else _FIX[what],
    )


_FIX = {
    "NaN": "keep its operands where it has a value; bf.config.debug_nans = False ends the search",
    "infinity": "keep its operands where its value is finite; bf.config.debug_infs = False ends the search",
}
_FIX_PASSED = "look at where that operand was made"
_FIX_BACKWARD = (
    "choose the operand and not only the result: where(ok, f(where(ok, x, 1.0)), 0.0); the derivative of f is "
    "taken at every element, and 0 times an infinite one is NaN"
)


def _described(x: np.ndarray) -> str:
    """Describe an array: ``NaN: 2 of 6 elements of f32[2,3], the first at [0, 1]``."""
    what = wrong(x)
    bad = np.isnan(x) if what == "NaN" else _isinf(x)
    kind = str(ShapedArray(x.shape, x.dtype))
    if not x.ndim:
        return f"{what}: {kind}"
    first = ", ".join(map(str, np.argwhere(bad)[0].tolist()))
    return f"{what}: {int(bad.sum())} of {x.size} elements of {kind}, the first at [{first}]"


def _range(x: np.ndarray) -> str:
    """An operand and its range of values: ``f32[3] from -1 to 2``."""
    kind = str(ShapedArray(x.shape, x.dtype))
    if not x.size or dtypes.is_complex(x.dtype) or not dtypes.is_numeric(x.dtype):
        return kind
    low, high = float(np.min(x)), float(np.max(x))
    values = f"{low:.6g}" if low == high or math.isnan(low) else f"from {low:.6g} to {high:.6g}"
    return f"{kind} {values}"
