"""Loops and branches that carry Refs: their values are operands and results.

Transforms, stage 2, above ``core/programs/refs.py``. In: functions that write cells from outside. Out: the same
control flow of functions that take and return the values of these cells as well. Cells that they only read are
constants of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.trace import state
from blufunc.core.programs.refs import Ref, bound, written_back


def _values(refs: Sequence[Ref]) -> list[Any]:
    return [r.value for r in refs]


def _explicit(fun: Callable, refs: Sequence[Ref]) -> Callable:
    """``(values, *args) -> (result, values)``."""
    outside = state.trace

    def explicit(values: Any, *args: Any) -> Any:
        with bound(refs, values, outside):
            out = fun(*args)
            return out, _values(refs)

    explicit.__name__ = getattr(fun, "__name__", "function")
    return explicit


def scan_with(
    control: Callable, refs: Sequence[Ref], f: Callable, init: Any, *rest: Any, **options: Any
) -> Any:
    """``scan`` with values of cells in its carry."""
    step = _explicit(f, refs)

    def body(carry: Any, x: Any) -> Any:
        (new, y), values = step(carry[1], carry[0], x)
        return (new, values), y

    (carry, values), ys = control(body, (init, _values(refs)), *rest, **options)
    written_back(refs, values)
    return carry, ys


def while_with(
    control: Callable,
    refs: Sequence[Ref],
    cond_fun: Callable,
    body_fun: Callable,
    init_val: Any,
    **options: Any,
) -> Any:
    """``while_loop`` with values of cells in its carry."""
    step, outside = _explicit(body_fun, refs), state.trace

    def test(carry: Any) -> Any:
        with bound(refs, carry[1], outside) as frame:
            out = cond_fun(carry[0])
        if any(frame.is_written(r) for r in refs):
            raise errors.UnsupportedError(
                "cond_fun of while_loop writes a Ref.",
                where=source.here(),
                why="a condition has no results besides the flag.",
                fix="write it in body_fun",
            )
        return out

    out, values = control(test, lambda c: step(c[1], c[0]), (init_val, _values(refs)), **options)
    written_back(refs, values)
    return out


def cond_with(
    control: Callable,
    refs: Sequence[Ref],
    pred: Any,
    true_fun: Any,
    false_fun: Any,
    *operands: Any,
    **options: Any,
) -> Any:
    """``cond`` with values of cells as an operand."""
    if not callable(true_fun):  # cond(pred, x, true_fun, y, false_fun)
        (y, on_false), x, on_true = operands, true_fun, false_fun
        return cond_with(control, refs, pred, lambda: on_true(x), lambda: on_false(y))
    given = [options["operand"]] if "operand" in options else operands
    branches = [_explicit(f, refs) for f in (true_fun, false_fun)]
    out, values = control(pred, *branches, _values(refs), *given)
    written_back(refs, values)
    return out


def switch_with(
    control: Callable,
    refs: Sequence[Ref],
    index: Any,
    branches: Sequence[Callable],
    *operands: Any,
    **options: Any,
) -> Any:
    """``switch`` with values of cells as an operand."""
    given = [options["operand"]] if "operand" in options else operands
    out, values = control(index, [_explicit(f, refs) for f in branches], _values(refs), *given)
    written_back(refs, values)
    return out
