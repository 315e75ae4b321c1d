"""Every primitive on a mesh with random layouts, against one device."""

import numpy as np
import pytest

import blufunc as bf
from blufunc import NamedSharding, P, make_mesh
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir.dtypes import is_inexact
from tests.op_table.rows import OPS


def some_spec(rng, ndim):
    """Some axes on some dimensions."""
    entries = [None] * ndim
    for name in ("x", "y"):
        if ndim and rng.random() < 0.7:
            d = int(rng.integers(ndim))
            entries[d] = name if entries[d] is None else (entries[d], name)
    return P(*entries)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.id)
def test_as_on_one_device(eight, op):
    rng = np.random.default_rng(len(op.id))
    mesh = make_mesh((2, 2), ("x", "y"))
    args = [from_numpy(x) for x in op.sample(op.dtypes[0])]
    want = op.apply(*args)
    for _ in range(3):
        placed = [bf.device_put(a, NamedSharding(mesh, some_spec(rng, a.ndim))) for a in args]
        got = op.apply(*placed)
        for g, w in zip(bf.tree.leaves(got), bf.tree.leaves(want), strict=True):
            assert g.aval == w.aval and (not placed or len(g.devices()) == 4)
            exact = not is_inexact(w.dtype)
            g, w = np.asarray(g), np.asarray(w)
            if exact:
                np.testing.assert_array_equal(g, w)
            else:
                tol = {16: 1e-10, 8: 1e-10, 4: 2e-5, 2: 2e-2, 1: 0.1}[w.dtype.itemsize]
                np.testing.assert_allclose(
                    g.astype(np.complex128), w.astype(np.complex128), rtol=tol, atol=tol
                )
