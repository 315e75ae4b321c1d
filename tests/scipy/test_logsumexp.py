"""``logsumexp`` of weighted and masked terms: the maximum of those that count."""

import numpy as np
import pytest
import scipy.special

import blufunc.numpy as bnp
from blufunc import nn
from blufunc.scipy import special
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.staging.jit import jit

INF, NAN = np.inf, np.nan

WEIGHTED = [
    # terms, weights, value, gradient
    ([1000.0, 2.0], [0.0, 1.0], 2.0, [0.0, 1.0]),
    ([-1000.0, -2.0], [1.0, 0.0], -1000.0, [1.0, 0.0]),
    ([INF, 2.0], [0.0, 1.0], 2.0, [0.0, 1.0]),
    ([NAN, 2.0], [0.0, 1.0], 2.0, [0.0, 1.0]),
    ([1000.0, -1000.0], [0.0, 2.0], -1000.0 + np.log(2), [0.0, 1.0]),
    ([1.0, 2.0], [3.0, 0.5], np.log(3 * np.e + 0.5 * np.e**2), None),
    ([1.0, 2.0], [2, 0], 1.0 + np.log(2), [1.0, 0.0]),
]


@pytest.mark.parametrize("terms, weights, value, slope", WEIGHTED)
def test_weights(terms, weights, value, slope):
    a, b = bnp.asarray(terms), bnp.asarray(weights)
    f = lambda a: special.logsumexp(a, b=b)
    signed = lambda a: special.logsumexp(a, b=b, return_sign=True)[0]
    for g in (f, signed, lambda a: special.logsumexp(a, b=b, keepdims=True)[0]):
        for h in (g, jit(g)):
            np.testing.assert_allclose(h(a), value, rtol=1e-6)
        if slope is not None:
            np.testing.assert_allclose(grad(g)(a), slope, rtol=1e-6)
            np.testing.assert_allclose(jit(grad(g))(a), slope, rtol=1e-6)


@pytest.mark.parametrize(
    "terms, weights, value, slope", [row for row in WEIGHTED if set(row[1]) <= {0.0, 1.0}]
)
def test_masks(terms, weights, value, slope):
    a, mask = bnp.asarray(terms), bnp.asarray(np.asarray(weights) != 0)
    f = lambda a: nn.logsumexp(a, where=mask)
    np.testing.assert_allclose(f(a), value, rtol=1e-6)
    np.testing.assert_allclose(jit(grad(f))(a), slope, rtol=1e-6)
    np.testing.assert_array_equal(nn.softmax(a, where=mask), slope)
    log_p = np.where(np.asarray(mask), 0, -INF)
    np.testing.assert_array_equal(nn.log_softmax(a, where=mask), log_p)


def test_nothing_counts():
    a = bnp.asarray([1.0, 2.0])
    assert special.logsumexp(a, b=bnp.zeros(2)) == -INF
    assert nn.logsumexp(a, where=bnp.zeros(2, bool)) == -INF
    value, sign = special.logsumexp(a, b=0.0, return_sign=True)
    assert value == -INF and sign == 0


def test_promotion():
    a = bnp.asarray([1.0, 2.0])
    assert special.logsumexp(a, b=bnp.asarray([1.0, 2.0], "float64")).dtype == "float64"
    assert special.logsumexp(a.astype("bfloat16"), b=2).dtype == "bfloat16"
    # weights of a higher rank than the terms
    np.testing.assert_allclose(
        special.logsumexp(a, axis=1, b=bnp.asarray([[1.0, 2.0], [3.0, 4.0]])),
        scipy.special.logsumexp([1.0, 2.0], axis=1, b=[[1.0, 2.0], [3.0, 4.0]]),
        rtol=1e-6,
    )


@pytest.mark.parametrize("terms", [[1 + 4j, 1 + 3j], [2 - 9j, -1 + 1j], [1 + 3.1j], [1000 + 7j, 999 - 7j]])
def test_complex(terms):
    a = bnp.asarray(np.asarray(terms), "complex128")
    with np.errstate(all="ignore"):
        want = np.log(np.sum(np.exp(np.asarray(terms) - 1000))) + 1000
    if max(abs(np.asarray(terms))) < 100:
        want = np.log(np.sum(np.exp(terms)))
    for f in (special.logsumexp, jit(special.logsumexp)):
        np.testing.assert_allclose(f(a), want, rtol=1e-12)
        assert -np.pi < float(bnp.imag(f(a))) <= np.pi


POINTS = [0.0, -0.0, 1.0, -1.0, 2.0, INF, -INF, NAN]


@pytest.mark.parametrize("name", ["xlogy", "xlog1py", "rel_entr", "kl_div", "entr"])
def test_special_points(name):
    """NaN and infinity as in SciPy, in every combination."""
    if name == "entr":
        points = [np.asarray(POINTS)]
    else:
        points = [x.reshape(-1) for x in np.meshgrid(POINTS, POINTS)]
    with np.errstate(all="ignore"):
        want = getattr(scipy.special, name)(*points)
    f = getattr(special, name)
    for g in (f, jit(f)):
        got = g(*[bnp.asarray(x, "float64") for x in points])
        np.testing.assert_allclose(got, want, rtol=1e-12)
