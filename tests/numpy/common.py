"""Shared by the tests of ``blufunc.numpy``: evaluation, comparison with NumPy."""

import numpy as np

import blufunc.numpy as bnp
from blufunc.core.ir.trace import Array
from blufunc.transforms.staging.jit import jit


def arrays(*xs):
    return [bnp.asarray(x) if isinstance(x, np.ndarray) else x for x in xs]


def narrow(want):
    """NumPy's result in the dtype that blufunc's must have: 64-bit becomes 32-bit."""
    want = np.asarray(want)
    to = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"}
    return want.astype(to.get(want.dtype.name, want.dtype))


def same(got, want, rtol=1e-5, atol=1e-6, dtype=True):
    """Equal shapes, dtypes and values, for trees of lists and tuples."""
    if isinstance(want, (list, tuple)):
        assert isinstance(got, (list, tuple)) and len(got) == len(want)
        for g, w in zip(got, want):
            same(g, w, rtol, atol, dtype)
        return
    assert isinstance(got, Array), got
    want = narrow(want)
    assert got.shape == want.shape, (got.shape, want.shape)
    if dtype:
        assert got.dtype == want.dtype, (got.dtype, want.dtype)
    a, b = np.asarray(got), want
    if a.dtype.kind not in "fc" and b.dtype.kind not in "fc":
        np.testing.assert_array_equal(a, b)
    else:
        kind = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
        np.testing.assert_allclose(a.astype(kind), b.astype(kind), rtol=rtol, atol=atol)


def check(f, ref, *xs, rtol=1e-5, atol=1e-6, dtype=True, traced=True):
    """``f`` of blufunc arrays is ``ref`` of NumPy ones, eagerly and under ``jit``."""
    with np.errstate(all="ignore"):
        want = ref(*xs)
    args = arrays(*xs)
    same(f(*args), want, rtol, atol, dtype)
    if traced:
        numbers = [i for i, a in enumerate(args) if isinstance(a, Array)]

        def run(*values):
            full = list(args)
            for i, v in zip(numbers, values):
                full[i] = v
            out = f(*full)
            return tuple(out) if isinstance(out, list) else out

        same(
            jit(run)(*[args[i] for i in numbers]),
            tuple(want) if isinstance(want, list) else want,
            rtol,
            atol,
            dtype,
        )


def f32(*shape, low=-2.0, high=2.0, seed=0):
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


def i32(*shape, low=-5, high=6, seed=0):
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)


def boolean(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 2, shape).astype(bool)
