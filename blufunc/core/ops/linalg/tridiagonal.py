"""``tridiagonal_solve``: linear systems with tridiagonal matrices.

Core operations, above ``triangular``. The derivative is implicit, as that of ``solve``: the elimination is
never differentiated, and a transpose is a solve with the off-diagonals swapped.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.linalg.common import MatrixOp, check_matrices, each, routine
from blufunc.core.ops.linalg.triangular import batch_columns
from blufunc.core.ops.shape import pad
from blufunc.core.primitives.linear_ops import add_tangents, broadcast_in_dim
from blufunc.core.primitives.tangents import Zero, is_linear, zero


class _TridiagonalSolve(MatrixOp):
    """The solution x of ``dl[i] x[i-1] + d[i] x[i] + du[i] x[i+1] = b[i]``."""

    name = "tridiagonal_solve"

    def impl(self, dl, d, du, b):
        columns = [x[..., None] for x in (dl, d, du)]
        return each(_solve_one, *columns, b, outs=[ShapedArray(b.shape, b.dtype)])[0]

    def abstract(self, dl, d, du, b):
        check_matrices(self.name, b)
        for x in (dl, d, du):
            if x.dtype != b.dtype:
                raise errors.DtypeError(
                    f"{self.name} takes operands of one dtype, not {x} and {b}.",
                    fix="convert one of them with .astype",
                )
            if x.shape != b.shape[:-1]:
                raise errors.ShapeError(
                    f"{self.name} of diagonals {dl}, {d}, {du} and {b}: diagonals have the shape of the right hand "
                    "sides without the last axis.",
                    fix="dl, d and du are (..., n), b is (..., n, k)",
                )
        return b.strong()

    def jvp(self, primals, tangents):
        *diagonals, b = primals
        *ts, tb = tangents
        x = self.bind(*primals)
        for t, by in zip(ts, (1, 0, -1), strict=True):
            if t.__class__ is not Zero:
                moved = _shifted(x, by, x.aval.ndim - 2)
                wide = broadcast_in_dim(t, x.aval.shape, tuple(range(t.aval.ndim)))
                tb = add_tangents(tb, ew.neg(ew.mul(wide, moved)))
        return x, zero(x.aval) if tb.__class__ is Zero else self.bind(*diagonals, tb)

    def transpose(self, ct, dl, d, du, b):
        if any(map(is_linear, (dl, d, du))):
            raise errors.GradError(f"{self.name} is linear in its last operand only.", where=source.here())
        last = d.aval.ndim - 1
        b.add(self.bind(_shifted(du, 1, last), d, _shifted(dl, -1, last), ct))

    def batch(self, axis, args, dims):
        if any(d is not None for d in dims[:3]):
            return super().batch(axis, args, dims)
        return batch_columns(axis.size, args[3], dims[3], True, lambda b: self.bind(*args[:3], b))


tridiagonal_solve_p = _TridiagonalSolve()


def _solve_one(dl: np.ndarray, d: np.ndarray, du: np.ndarray, b: np.ndarray, types: Any) -> list[np.ndarray]:
    dl, d, du = dl[1:, 0], d[:, 0], du[:-1, 0]
    if len(d) == 1:
        return [b / d[:, None]]
    *_, x, info = routine("gtsv", b)(dl, d, du, b)
    return [x if not info else np.full_like(b, np.nan)]  # singular


def _shifted(x: Any, by: int, axis: int) -> Any:
    """``x[i - by]`` at position i along an axis, 0 where there is none."""
    if not by:
        return x
    config = [(0, 0, 0)] * x.aval.ndim
    config[axis] = (by, -by, 0)
    return pad(x, ew.zeros_of(x), config)
