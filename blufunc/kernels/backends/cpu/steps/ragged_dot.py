"""Native form of matmuls of groups: blocks of all groups, shared by threads.

Kernels, stage 6 on the CPU. In: ``ragged_dot`` and ``ragged_contract`` in float32 or float64. Out: their form. Sizes of
groups are read at run time; blocks are then assigned to threads, so that groups of any sizes keep all of them busy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.ragged_dot import ragged_contract_p, ragged_dot_p
from blufunc.kernels.backends.cpu.steps.form import Form, Library, bytes_of

FILE, GEMM = "backends/cpu/include/ragged_dot.h", "backends/cpu/include/gemm.h"

_REALS = {"float32": "float", "float64": "double"}

LIBRARIES = {
    f"ragged_dot_{dtype}": Library(
        FILE,
        ("ragged",),
        "ragged_dot",
        (("REAL", real),),
        before=((GEMM, ("layout", "gemm")),),
        options=("-O2",),
    )
    for dtype, real in _REALS.items()
}
"""Libraries by name; vectors are written out, so -O3 gains nothing."""

_RATE = 100
"""Bytes of products per nanosecond, as of convolutions."""


def accepts(eqn: Eqn) -> bool:
    """True for an equation of ``FORMS`` that its form computes."""
    dtype = eqn.invars[0].aval.dtype
    return dtype.name in _REALS and eqn.outvars[0].aval.dtype == dtype and eqn.outvars[0].aval.size > 0


def _ragged(eqn: Eqn) -> Form:
    lhs, rhs, bounds = (v.aval for v in eqn.invars)
    out, summed = eqn.outvars[0].aval, eqn.prim is ragged_contract_p
    stacks = lhs.shape[0] if lhs.ndim == 3 else 1
    (m, k), n, groups, size = lhs.shape[-2:], rhs.shape[-1], bounds.shape[-1] - 1, out.dtype.itemsize
    ranks = (2, 2 if summed else 3, 1)

    def strides(models: Sequence[np.ndarray]) -> list[int]:
        # of stacks, 0 for what they share; then the others
        x, y, b = (
            [0] * (rank + 1 - a.ndim) + [s // a.dtype.itemsize for s in model.strides]
            for model, a, rank in zip(models, (lhs, rhs, bounds), ranks, strict=True)
        )
        return [*x, y[0], 0 if summed else y[1], y[-2], y[-1], *b]

    time = 200 + stacks * m * k * n * size / _RATE + out.size
    sizes = (int(summed), stacks, groups, m, k, n)
    blocks = (max(1, out.size // 256),)
    scratch = bytes_of((stacks * (groups + 2), 8))
    return Form(f"ragged_dot_{out.dtype.name}", blocks, sizes, strides, time, common=scratch)


FORMS = {ragged_dot_p: _ragged, ragged_contract_p: _ragged}
"""Makers of the forms of primitives."""
