"""Comparison of two computations, with the size of their difference.

Face, below the checks of ``blufunc.testing``. In: pytrees of arrays. Out: an ``AssertionError`` with the path, the
place and the size of the worst difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from blufunc.core.pytree import paths as treepath
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import as_values

ROUNDING = 256
"""Tolerance, in ulps, between two orders of the same operations."""


def values_of(leaves: Sequence[Any], what: str) -> list[Any]:
    """Leaves as values, named ``what`` in errors."""
    return as_values(leaves, lambda i: f"leaf {i} of {what}")


def numbers(x: Any) -> np.ndarray:
    """An array of floating or complex numbers, in double precision."""
    x = np.asarray(x)
    return x.astype(np.complex128 if dtypes.is_complex(x.dtype) else np.float64)


def eps_of(*xs: Any) -> float:
    """The largest machine epsilon of the inexact arrays of ``xs``; 0 without any."""
    return max((float(dtypes.finfo(x.dtype).eps) for x in xs if dtypes.is_inexact(x.dtype)), default=0.0)


def random_like(x: Any, rng: np.random.Generator) -> Any:
    """Normal numbers, of the shape and dtype of a floating or complex array."""
    draws = rng.standard_normal(x.shape)
    if dtypes.is_complex(x.dtype):
        draws = draws + 1j * rng.standard_normal(x.shape)
    return from_numpy(np.asarray(draws).astype(x.dtype))


def assert_same(got: Any, want: Any, what: str, rtol: float | None = None, atol: float | None = None) -> None:
    """Raise AssertionError unless two pytrees agree.

    Structures, shapes and dtypes must be equal, and values close.

    Args:
      what: how ``got`` was computed.
      rtol, atol: what values may differ by; by default some rounding errors of their dtype.
    """
    got_leaves, got_tree = tree.flatten(got)
    want_leaves, want_tree = tree.flatten(want)
    if got_tree != want_tree:
        differences = "; ".join(treepath.diff(want_tree, got_tree, "expected", "got")[:3])
        raise AssertionError(f"{what}: the result has a different structure: {differences}")
    paths = treepath.leaf_paths(want_tree)
    pairs = zip(values_of(got_leaves, what), values_of(want_leaves, what), strict=True)
    for path, (g, w) in zip(paths, pairs, strict=True):
        if not g.aval.same_type(w.aval):
            raise AssertionError(f"{what}: result{path} is {g.aval}, expected {w.aval}")
        slack = ROUNDING * eps_of(w)
        assert_close(
            g, w, f"{what}: result{path}", slack if rtol is None else rtol, slack if atol is None else atol
        )


def assert_close(got: Any, want: Any, what: str, rtol: float, atol: float, hint: str = "") -> None:
    """Raise AssertionError unless two arrays of one shape agree.

    The tolerance is ``rtol * |want| + atol * max(1, |want|.max())``.
    Integers, booleans and keys must be equal. NaNs agree with NaNs, and infinities with themselves.
    """
    got, want = np.asarray(got), np.asarray(want)
    if not dtypes.is_inexact(want.dtype):
        wrong = got != want
        size, allowed = "", ""
    else:
        got, want = numbers(got), numbers(want)
        with np.errstate(all="ignore"):
            error = np.abs(got - want)
            finite = np.abs(want[np.isfinite(want)])
            bound = rtol * np.abs(want) + atol * max(1.0, float(finite.max(initial=0.0)))
            wrong = ~((error <= bound) | (got == want) | (np.isnan(got) & np.isnan(want)))
    if not np.any(wrong):
        return
    if dtypes.is_inexact(want.dtype):
        badness = np.where(wrong, np.where(np.isfinite(error), error - bound, np.inf), -np.inf)
        place = np.unravel_index(int(np.argmax(badness)), want.shape)
        size, allowed = (
            f", off by {error[place]:.3g}",
            f" (allowed: {np.broadcast_to(bound, want.shape)[place]:.3g})",
        )
    else:
        place = np.unravel_index(int(np.argmax(wrong)), want.shape)
    where = f" at [{', '.join(map(str, place))}]" if place else ""
    raise AssertionError(
        f"{what} is wrong in {int(np.sum(wrong))} of {want.size} elements; the worst{where} is {got[place]}, "
        f"expected {want[place]}{size}{allowed}{hint}"
    )
