"""``gaussian_kde`` and ``poisson.entropy`` against SciPy; samples against JAX."""

import numpy as np
import pytest
import scipy.stats

import blufunc as bf
from blufunc import errors
from blufunc.core.arrays.array import from_numpy
from blufunc.scipy.stats import gaussian_kde, poisson
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit

RNG = np.random.default_rng(0)
DATA, POINTS, WEIGHTS = RNG.normal(size=(2, 30)), RNG.normal(size=(2, 7)), RNG.uniform(0.1, 1, 30)


def same(got, want, rtol=1e-9):
    np.testing.assert_allclose(np.asarray(got), want, rtol=rtol)


@pytest.mark.parametrize(
    "method",
    [None, "silverman", 0.4, lambda k: k.neff**-0.3],
    ids=["scott", "silverman", "number", "function"],
)
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["equal", "weighted"])
@pytest.mark.parametrize("d", [1, 2])
def test_densities(d, weights, method):
    x, at = (DATA[0], POINTS[0]) if d == 1 else (DATA, POINTS)
    theirs = scipy.stats.gaussian_kde(x, method, weights)
    ours = gaussian_kde(from_numpy(x), method, None if weights is None else from_numpy(weights))
    same(jit(lambda k, x: k(x))(ours, from_numpy(at)), theirs(at))
    same(ours.pdf(from_numpy(at)), theirs.pdf(at))
    same(ours.logpdf(from_numpy(at)), theirs.logpdf(at))
    same(ours.covariance, theirs.covariance)
    same(ours.inv_cov, theirs.inv_cov)
    same(ours.neff, theirs.neff)
    assert (ours.d, ours.n) == (theirs.d, theirs.n)
    mean, cov = np.full(d, 0.3), np.eye(d) * 0.5
    same(ours.integrate_gaussian(from_numpy(mean), from_numpy(cov)), theirs.integrate_gaussian(mean, cov))
    same(ours.integrate_kde(ours), theirs.integrate_kde(theirs))
    if d == 1:
        same(ours.integrate_box_1d(-0.5, 1.0), theirs.integrate_box_1d(-0.5, 1.0), 1e-7)
    else:
        same(ours(from_numpy(at[:, 0])), theirs(at[:, 0]))


def test_the_slope_of_a_density():
    kde = gaussian_kde(from_numpy(DATA[0]))
    h, at = 1e-6, 0.3
    want = (kde(from_numpy(np.array(at + h))) - kde(from_numpy(np.array(at - h))))[0] / (2 * h)
    same(grad(lambda x: kde(x)[0])(from_numpy(np.array(at))), float(want), 1e-6)


def test_samples_have_the_covariance_of_the_data():
    kde = gaussian_kde(from_numpy(DATA), weights=from_numpy(WEIGHTS))
    x = np.asarray(kde.resample(bf.random.key(0), (4000,)))
    want = np.cov(DATA, bias=True, aweights=WEIGHTS) + np.asarray(kde.covariance)
    np.testing.assert_allclose(np.cov(x), want, atol=0.1)
    assert kde.resample(bf.random.key(0)).shape == (2,)


@pytest.mark.peer
def test_samples_are_those_of_jax():
    jax = pytest.importorskip("jax")
    x = DATA.astype(np.float32)
    got = gaussian_kde(x).resample(bf.random.key(3), (5,))
    want = jax.scipy.stats.gaussian_kde(x).resample(jax.random.key(3), (5,))
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-5)


def test_entropy_of_poisson():
    mu = np.array([0.01, 0.5, 3.0, 50.0, 99.9, 100.1, 5000.0])
    same(poisson.entropy(from_numpy(mu)), scipy.stats.poisson.entropy(mu), 1e-6)
    exact = lambda m: -sum(p * np.log(p) for p in scipy.stats.poisson.pmf(range(500), m) if p)
    same(poisson.entropy(from_numpy(mu[:6])), [exact(m) for m in mu[:6]], 1e-8)
    assert np.isnan(np.asarray(poisson.entropy(np.array([-1.0, 0.0])))).all()
    h = 1e-5
    want = [(exact(m + h) - exact(m - h)) / (2 * h) for m in mu[1:4]]
    same(vmap(grad(poisson.entropy))(from_numpy(mu[1:4])), want, 1e-6)


@pytest.mark.parametrize(
    "call",
    [
        lambda: gaussian_kde(DATA + 1j),
        lambda: gaussian_kde(DATA[None]),
        lambda: gaussian_kde(DATA, weights=np.ones(3)),
        lambda: gaussian_kde(DATA, "best"),
        lambda: gaussian_kde(DATA)(np.ones((3, 3))),
        lambda: gaussian_kde(DATA).integrate_box_1d(0, 1),
        lambda: gaussian_kde(DATA).integrate_box([0, 0], [1, 1]),
        lambda: gaussian_kde(DATA).integrate_gaussian(np.zeros(3), np.eye(3)),
        lambda: gaussian_kde(DATA).integrate_kde(gaussian_kde(DATA[0])),
        lambda: gaussian_kde(DATA).set_bandwidth(0.3),
    ],
)
def test_errors(call):
    with pytest.raises(errors.BlufuncError, match="at:"):
        call()
