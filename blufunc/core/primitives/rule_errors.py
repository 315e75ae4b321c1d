"""Errors for mistakes in the rules of a primitive, addressed to the rule's author.

Core, on top of ``primitive``. In: the result of a rule, when a trace cannot continue with it or
``config.check`` is set. Out: a ``JaxprTypeError`` that names primitive and rule. Correct rules pay only for a
class test and an interned-type test.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import DEVICE, ShapedArray

RETURNS = {
    "impl": "the result as a NumPy array; a list of them with multiple_results = True",
    "abstract": "a ShapedArray, extend.ShapedArray(shape, dtype); a list of them with multiple_results = True",
    "jvp": "(out, out_tangent), with the tangent of the type of out; two lists with multiple_results = True",
    "linearize": "(out, out_tangent), with the tangent of the type of out; two lists with multiple_results = True",
    "derivs": "for each operand (t, ans, *operands) -> term, linear in t and of the shape of the result",
    "transpose": "nothing, and adds to each linear operand a cotangent of its type: x.add(...)",
    "batch": "(out, out_dim), where out_dim >= 0 is the batch axis of out, or None; two lists with "
    "multiple_results = True",
}
"""Return values of each rule."""


def rule_error(prim: Any, rule: str, what: str) -> errors.JaxprTypeError:
    """The error for a rule's wrong result; ``what`` completes "the jvp rule of sin"."""
    return errors.JaxprTypeError(
        f"the {rule} rule of {prim.name} {what}.",
        where=source.here(),
        why="the rule is wrong, not the program that uses the primitive.",
        fix=f"{rule} gives {RETURNS[rule]}; testing.check_primitive({prim.name}_p, ...) checks every rule",
    )


def definition_error(prim: Any, what: str, fix: str) -> errors.JaxprTypeError:
    """The error for a wrong definition; ``what`` completes "the definition ..."."""
    return errors.JaxprTypeError(
        f"the definition (lower=) of {prim.name} {what}.",
        where=source.here(),
        why=f"compilers put the definition{_place(prim.lower)} in the place of the primitive, so it must compute "
        "the same.",
        fix=fix,
    )


def _place(function: Any) -> str:
    """``, file.py:12,`` for a function written there."""
    code = getattr(function, "__code__", None)
    return f", {os.path.basename(code.co_filename)}:{code.co_firstlineno}," if code else ""


def check_definition(
    prim: Any, defined: Sequence[Any], computed: Sequence[Any], elements: Sequence[np.ndarray] = ()
) -> None:
    """Check the definition's results against those of ``impl`` on the same operands.

    Args:
      elements: of an elementwise primitive, the operands, which the error shows.
    """
    for i, (x, y) in enumerate(zip(map(np.asarray, defined), map(np.asarray, computed), strict=True)):
        inexact = dtypes.is_inexact(y.dtype)
        wide = np.complex128 if dtypes.is_complex(y.dtype) else np.float64
        a, b = (x.astype(wide), y.astype(wide)) if inexact else (x, y)
        tol = float(dtypes.finfo(y.dtype).eps) ** 0.5 if inexact else 0.0
        same = np.isclose(a, b, tol, tol, equal_nan=True) if inexact else a == b
        if not np.all(same):
            at = np.unravel_index(int(np.argmin(same)), same.shape) if same.ndim else ()
            place = f"result {i}, element {[*map(int, at)]}"
            if elements:
                place = f"for {', '.join(f'{e[at] if e.ndim else e[()]:.6g}' for e in elements)}"
            raise definition_error(
                prim,
                f"gives {a[at]} where impl gives {b[at]} ({place})",
                "correct one of them, or leave out impl: the definition is evaluated then",
            )


def check_defined_types(prim: Any, found: Sequence[ShapedArray], promised: Any) -> None:
    """Check the types of the definition's results against those of ``abstract``.

    Compilers allocate what ``abstract`` promised: results of another size would be read beyond their end.
    """
    expected = [type_of(a) for a in (promised if prim.multiple_results else (promised,))]
    got = [type_of(a) for a in found]
    if got != expected:
        raise definition_error(
            prim,
            f"returns {', '.join(got) or 'nothing'}, and abstract says {', '.join(expected)}",
            "convert with .astype or reshape in the definition, or correct abstract (out= of an elementwise one)",
        )


def type_of(aval: ShapedArray) -> str:
    """The shape and dtype of a type, without its weakness."""
    return f"{dtypes.short_name(aval.dtype)}[{','.join(map(str, aval.shape))}]"


def host_error(prim: Any, avals: Sequence[ShapedArray]) -> errors.UnsupportedError:
    """The error for an operation on an operand in the memory of the host."""
    i, aval = next((i, a) for i, a in enumerate(avals) if a.memory != DEVICE)
    return errors.UnsupportedError(
        f"{prim.name} was given operand {i} in the memory {aval.memory!r}: {aval}.",
        where=source.here(),
        why="programs compute on values in the memory of the device, and move others only where they say so.",
        fix="move it first: bf.device_put(x, bf.memory.Space.Device)",
    )


def described(x: Any) -> str:
    """A short description of a rule's return value."""
    if isinstance(x, (list, tuple)):
        return f"a {type(x).__name__} of {len(x)}"
    aval = getattr(x, "aval", None)
    if isinstance(aval, ShapedArray):
        return str(aval)
    return "None" if x is None else f"{x!r:.60} ({type(x).__name__})"


def pair_of(prim: Any, rule: str, result: Any) -> tuple[Any, Any]:
    """The pair that a jvp, linearize or batch rule returned."""
    if isinstance(result, (tuple, list)) and len(result) == 2:
        return result[0], result[1]
    raise rule_error(prim, rule, f"returned {described(result)}, not a pair")


def checked_types(prim: Any, result: Any) -> tuple[ShapedArray, ...]:
    """The types that the abstract rule returned, unless it is a single result's type."""
    if prim.multiple_results and isinstance(result, (list, tuple)):
        if all(a.__class__ is ShapedArray for a in result):
            return tuple(result)
    raise rule_error(prim, "abstract", f"returned {described(result)}")


def check_values(prim: Any, results: Any, expected: Sequence[ShapedArray]) -> None:
    """Check what ``impl`` computed against what ``abstract`` promised."""
    if not isinstance(results, (list, tuple)):
        raise rule_error(prim, "impl", f"returned {type(results).__name__}, not a list")
    if len(results) != len(expected):
        raise rule_error(prim, "impl", f"returned {len(results)} results, and abstract says {len(expected)}")
    for r, aval in zip(results, expected, strict=True):
        shape, dtype = getattr(r, "shape", None), getattr(r, "dtype", None)
        if shape is None or dtype is None:
            raise rule_error(prim, "impl", f"returned {described(r)}")
        if shape != aval.shape or dtype != aval.dtype:
            got = f"{dtypes.short_name(dtype)}[{','.join(map(str, shape))}]"
            raise rule_error(prim, "impl", f"returned {got}, and abstract says {aval}")


def impl_of(prim: Any, params: dict, expected: Sequence[ShapedArray]) -> Callable:
    """``impl`` with its parameters; the types of a user's results are checked."""
    function = functools.partial(prim.impl, **params) if params else prim.impl
    if not prim.check_impl:
        return function

    def checked(*args: Any) -> Any:
        results = function(*args)
        check_values(prim, results if prim.multiple_results else [results], expected)
        return results

    return checked


def check_lists(prim: Any, rule: str, first: Any, second: Any) -> None:
    """Check that a rule with multiple results returned two lists of the same length."""
    for part in (first, second):
        if not isinstance(part, (list, tuple)):
            raise rule_error(prim, rule, f"returned {described(part)} in the place of a list")
    if len(first) != len(second):
        raise rule_error(prim, rule, f"returned lists of {len(first)} and of {len(second)}")


def check_tangent(prim: Any, rule: str, out: Any, tangent: Any) -> None:
    """Check that ``tangent`` has the type of tangents of ``out``."""
    for part, name in ((out, "result"), (tangent, "tangent")):
        if getattr(part, "aval", None).__class__ is not ShapedArray:
            fix = (
                " (where nothing depends on the tangents, return extend.zero(out.aval))"
                if part is None
                else ""
            )
            raise rule_error(prim, rule, f"returned {described(part)} as a {name}{fix}")
    if not tangent.aval.same_type(out.aval.tangent()):
        raise rule_error(prim, rule, f"returned a tangent {tangent.aval} for a result {out.aval}")


def check_batch(prim: Any, out: Any, dim: Any, size: int) -> None:
    """Check that the batch axis of ``out`` is where the rule says."""
    if getattr(out, "aval", None).__class__ is not ShapedArray:
        raise rule_error(prim, "batch", f"returned {described(out)} as a result")
    if dim is None:
        return
    if dim.__class__ is not int:
        raise rule_error(prim, "batch", f"returned {described(dim)} as the batch axis of {out.aval}")
    if not 0 <= dim < out.aval.ndim or out.aval.shape[dim] != size:
        raise rule_error(prim, "batch", f"says that the batch, of {size}, is axis {dim} of {out.aval}")


def check_example(prim: Any, out: Any, dim: int | None, expected: ShapedArray) -> None:
    """Check a batched result's type against the primitive's type on one example."""
    shape = out.aval.shape if dim is None else out.aval.shape[:dim] + out.aval.shape[dim + 1 :]
    if shape != expected.shape or out.aval.dtype != expected.dtype:
        got = ShapedArray(shape, out.aval.dtype)
        raise rule_error(prim, "batch", f"returned examples of {got}, and abstract says {expected}")


def misfit(prim: Any, aval: ShapedArray, ct: Any) -> errors.JaxprTypeError:
    """The error for a transpose rule that added ``ct`` to an operand of type ``aval``."""
    return rule_error(prim, "transpose", f"added {described(ct)} to an operand {aval}")
