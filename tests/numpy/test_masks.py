"""Products with boolean arrays: 0 where the mask is False."""

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit

INF, NAN = float("inf"), float("nan")

PRODUCTS = [
    # the other factor, the product, its dtype
    (-INF, [-INF, 0], "float32"), (NAN, [NAN, 0], "float32"), (2.0, [2, 0], "float32"),
    (np.array([INF, INF], "float32"), [INF, 0], "float32"), (np.array([NAN, NAN], "float64"), [NAN, 0], "float32"),
    (bnp.asarray([0.1, NAN], "float64"), [0.1, 0], "float64"), (bnp.asarray(-INF, "bfloat16"), [-INF, 0], "bfloat16"),
    (bnp.asarray([[1.0], [INF]]), [[1, 0], [INF, 0]], "float32"), (1j, [1j, 0], "complex64"),
    (3, [3, 0], "int32"), (bnp.asarray([5, 6], "int8"), [5, 0], "int8"), (True, [True, False], "bool"),
]  # fmt: skip


@pytest.mark.parametrize("other, want, dtype", PRODUCTS)
def test_products(other, want, dtype):
    mask = bnp.asarray([True, False])
    for f in (lambda m: m * other, lambda m: other * m, lambda m: bnp.multiply(m, other)):
        for g in (f, jit(f), lambda m, f=f: vmap(f)(m[None])[0]):
            got = g(mask)
            assert got.dtype == dtype
            np.testing.assert_array_equal(
                np.asarray(got.astype("complex128")), np.asarray(want, "complex128")
            )


def test_rank_0():
    for mask, want in ((True, -INF), (False, 0.0)):
        assert float(bnp.asarray(mask) * -INF) == float(jit(lambda m: m * -INF)(mask)) == want


def test_masked_attention_has_a_gradient():
    mask = bnp.asarray(np.tri(3) == 0)

    def loss(scores):
        weights = bnp.exp(scores + mask * -INF)
        return bnp.sum((weights / weights.sum(-1, keepdims=True)) ** 2)

    x = bnp.asarray(np.arange(9, dtype=np.float32).reshape(3, 3)) / 9
    for g in (grad(loss), jit(grad(loss))):
        assert np.isfinite(np.asarray(g(x))).all() and np.all(np.asarray(g(x))[np.tri(3) == 0] == 0)
    slope = grad(lambda x: (mask[0] * x).sum())(bnp.asarray([INF, 2.0, NAN]))
    assert slope.tolist() == [0.0, 1.0, 1.0]
