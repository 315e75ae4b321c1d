"""Rows of ``ragged_dot`` and ``ragged_contract``, with definitions row by row.

``tests/op_table/rows.py`` adds ``ROWS`` to its own.
"""

from __future__ import annotations

import itertools

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ops.ragged_dot import ragged_contract_p, ragged_dot_p
from tests.op_table.row import INEXACT, INTS, KEY, Arg, Op


class Offsets(Arg):
    """Boundaries of groups: in order, the first and the last anywhere."""

    def sample(self, rng, dtype, batch=()):
        return np.sort(super().sample(rng, dtype, batch), axis=-1)


def _groups_of(offsets, row, stack):
    bounds = offsets[stack] if offsets.ndim == 2 else offsets
    return [g for g, (start, end) in enumerate(itertools.pairwise(bounds)) if start <= row < end]


def _dot(x, w, offsets):
    out = np.zeros((*x.shape[:-1], w.shape[-1]), x.dtype)
    for *stack, row in np.ndindex(x.shape[:-1]):
        for g in _groups_of(offsets, row, tuple(stack)):
            out[(*stack, row)] = x[(*stack, row)] @ w[(*stack, g) if w.ndim == 4 else g]
    return out


def _contract(x, y, offsets):
    out = np.zeros((*x.shape[:-2], offsets.shape[-1] - 1, x.shape[-1], y.shape[-1]), x.dtype)
    for *stack, row in np.ndindex(x.shape[:-1]):
        for g in _groups_of(offsets, row, tuple(stack)):
            out[(*stack, g)] += np.outer(x[(*stack, row)], y[(*stack, row)])
    return out


def _op(prim, ref, shapes, name="", preferred=None, grad=2, **kw):
    *arrays, bounds = shapes
    rows = arrays[0][-2]
    args = (*(Arg(s) for s in arrays), Offsets(bounds, 0, rows, "int32"))
    params = {"precision": None, "preferred_element_type": preferred and dtypes.as_dtype(preferred)}
    kw.setdefault("dtypes", ("float64",))
    return Op(prim, args, ref, params, name, grad, out=preferred, tol=4, **kw)


ROWS = [
    _op(ragged_dot_p, _dot, [(6, 3), (3, 3, 2), (4,)], dtypes=(*INEXACT, *INTS), refuses=("bool", KEY)),
    _op(ragged_dot_p, _dot, [(2, 5, 2), (2, 2, 2, 3), (2, 3)], "stacks"),
    _op(ragged_dot_p, _dot, [(2, 5, 2), (2, 2, 3), (3,)], "shared"),
    _op(ragged_dot_p, _dot, [(2, 4, 2), (2, 2, 2), (2, 3)], "shared-matrices"),
    _op(ragged_dot_p, _dot, [(5, 3), (2, 3, 2), (3,)], "preferred", "float32", 0, dtypes=("bfloat16", "float16")),
    _op(ragged_contract_p, _contract, [(6, 3), (6, 2), (4,)], dtypes=(*INEXACT, *INTS), refuses=("bool", KEY)),
    _op(ragged_contract_p, _contract, [(2, 5, 2), (2, 5, 3), (2, 3)], "stacks"),
    _op(ragged_contract_p, _contract, [(2, 5, 2), (2, 5, 3), (3,)], "shared"),
    _op(ragged_contract_p, _contract, [(5, 3), (5, 2), (3,)], "preferred", "float32", 0,
        dtypes=("bfloat16", "float16")),
]  # fmt: skip
