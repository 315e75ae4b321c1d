"""Scatters as C++ loops against the same programs as NumPy calls."""

import numpy as np
import pytest

import blufunc as bf
from blufunc import lax, ops
from blufunc.kernels.backends.cpu import toolchain
from tests.kernels.backends.cpu.two_ways import by_both

pytestmark = pytest.mark.skipif(toolchain.find() is None, reason="this machine has no C++ compiler")

RNG = np.random.default_rng(0)
ROWS = np.array([3, 0, -1, 3, 9, -9, 2], np.int32)


def close(fun, *args, native=True):
    for want, got in by_both(fun, *args, native=native):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def draw(*shape, dtype):
    x = RNG.integers(-100, 100, shape) if np.dtype(dtype).kind in "iu" else RNG.standard_normal(shape)
    return x.astype(dtype)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint32", "uint64"])
@pytest.mark.parametrize("method", ["set", "add", "multiply", "min", "max"])
def test_updates_at_indices(method, dtype):
    x, rows = draw(6, 5, dtype=dtype), draw(7, 5, dtype=dtype)
    for mode in ("drop", "clip"):
        update = lambda x, i, u, mode=mode: getattr(x.at[i], method)(u, mode=mode)
        close(update, x, ROWS, rows)
        close(lambda x, i, u, update=update: update(x.T, i, u.T), x, ROWS, draw(6, 7, dtype=dtype))
    close(lambda x, i, u: getattr(x.at[i, 1:3], method)(u[:, 1:3]), x, ROWS, rows)
    close(
        lambda x, i, u: bf.vmap(lambda x, u: getattr(x.at[i], method)(u))(x, u),
        x,
        ROWS % 5,
        draw(6, 7, dtype=dtype),
    )


@pytest.mark.parametrize("method", ["min", "max", "multiply"])
def test_nan_and_infinities(method):
    x = np.array([0, np.nan, np.inf, -np.inf, 1, 2], np.float32)
    update = np.array([1, 2, np.nan, 3, np.nan, np.inf, 0], np.float32)
    close(lambda x, u: getattr(x.at[np.arange(7) % 6], method)(u), x, update)


def test_segments():
    x, i = draw(50, 3, dtype="float32"), RNG.integers(0, 6, 50).astype(np.int32)
    for fun in (ops.segment_max, ops.segment_min, ops.segment_prod, ops.segment_sum):
        close(lambda x, i, fun=fun: fun(x, i, 7), x, i)


def test_loops():
    def relax(x):
        """Shortest paths: the least of all edges, in each round."""
        ends, starts = ROWS[:4] % 6, np.arange(4)
        return lax.fori_loop(0, 5, lambda i, c: c.at[ends].min(c[starts] + 1), x)

    close(relax, draw(6, dtype="float32"))
    close(bf.vmap(relax), draw(2, 6, dtype="float32"))
