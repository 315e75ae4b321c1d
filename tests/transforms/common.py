"""Helpers of the tests of transforms: float64 arrays, comparison of pytrees."""

import numpy as np

from blufunc import tree
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes


def arr(x, dtype=np.float64):
    return from_numpy(np.asarray(x, dtype))


def draw(*shape, seed=0):
    return arr(np.random.default_rng((seed, *shape)).uniform(-1, 1, shape))


def close(got, want, rtol=1e-12):
    got, want = tree.flatten(got), tree.flatten(want)
    assert got[1] == want[1]
    for g, w in zip(got[0], want[0], strict=True):
        g, w = np.asarray(g), np.asarray(w)
        assert g.shape == w.shape and g.dtype == w.dtype
        if w.dtype != dtypes.float0:
            np.testing.assert_allclose(g, w, rtol=rtol, atol=rtol)
