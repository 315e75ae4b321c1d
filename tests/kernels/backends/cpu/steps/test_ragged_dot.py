"""Native matmuls of groups against the same programs as NumPy calls."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.kernels.backends.cpu import toolchain
from blufunc.kernels.backends.cpu.steps.forms import has_form
from tests.kernels.backends.cpu.two_ways import by_both

pytestmark = pytest.mark.skipif(toolchain.find() is None, reason="this machine has no C++ compiler")

CASES = {  # rows, terms, columns, sizes of groups
    "blocks": (700, 40, 600, (300, 0, 257, 143)),
    "short groups": (90, 33, 70, (1, 15, 16, 17, 3, 0, 38)),
    "few columns": (120, 20, 3, (50, 7, 63)),
    "one column": (120, 20, 1, (50, 7, 63)),
    "one term": (60, 1, 40, (10, 20, 30)),
    "rows beyond": (100, 24, 36, (20, 30, 10)),
    "more than there are": (50, 24, 36, (20, 100, 10)),
    "negative": (50, 24, 36, (20, -7, 10)),
    "no rows": (0, 24, 36, (0, 0)),
    "all in one": (64, 300, 40, (0, 64, 0)),
}


def with_gradients(x, w, sizes, ct):
    y, pullback = bf.vjp(lambda x, w: lax.ragged_dot(x, w, sizes), x, w)
    return (y, *pullback(ct))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    check(name, "float32")


def test_float64():
    check("blocks", "float64")


def check(name, dtype):
    """Values and gradients of a case."""
    m, k, n, sizes = CASES[name]
    rng = np.random.default_rng(m + k)
    x, w, ct = (rng.standard_normal(s).astype(dtype) for s in ((m, k), (len(sizes), k, n), (m, n)))
    args = x, w, np.array(sizes, np.int32), ct
    for want, got in by_both(with_gradients, *args, native=m > 0):
        np.testing.assert_allclose(got, want, rtol=0, atol=(2e-4 if dtype == "float32" else 1e-12))


def test_stacks_and_views():
    """Stacks have sizes of their own, share matrices or not, and are read as views."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 40, 50)), rng.standard_normal((4, 24, 40))
    sizes = rng.integers(0, 16, (3, 4)).astype(np.int32)

    def f(x, w, sizes):
        of_one = lambda x, w, sizes: lax.ragged_dot(x, w, sizes)
        turned = bnp.swapaxes(x, 1, 2)
        shared = bf.vmap(of_one, (0, None, 0))(turned, bnp.swapaxes(w, 1, 2), sizes)
        own = bf.vmap(of_one, (0, 0, None))(turned, bnp.stack([bnp.swapaxes(w, 1, 2)] * 3), sizes[0])
        return (
            shared,
            own,
            bf.grad(lambda w: (bf.vmap(of_one, (0, None, 0))(turned, w, sizes) ** 2).sum())(
                bnp.swapaxes(w, 1, 2)
            ),
        )

    for want, got in by_both(f, x, w, sizes, native=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-11)


def test_half_precisions_and_integers_are_numpy_calls():
    for dtype in ("bfloat16", "int32"):
        jaxpr = bf.make_jaxpr(lax.ragged_dot)(
            bnp.ones((8, 4), dtype), bnp.ones((2, 4, 3), dtype), bnp.array([3, 5], "int32")
        )
        assert not any(map(has_form, jaxpr.eqns))
