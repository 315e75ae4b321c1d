"""Distributions and statistics against SciPy in float64, derivatives against JAX."""

import math

import numpy as np
import pytest
import scipy.stats

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.scipy import stats
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit
from tests.transforms.common import arr

X = np.array([-3.1, -1.0, -0.2, 0.0, 0.1, 0.45, 0.9, 1.0, 1.7, 2.6, 4.4, 9.3])
K = np.array([-2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 12.0])
Q = np.array([0.001, 0.02, 0.3, 0.5, 0.77, 0.999])
LOC_SCALE = (0.3, 1.7)
# name: (parameters, whether loc and scale follow, functions)
TAILS = "logpdf pdf cdf logcdf sf logsf"
DISTRIBUTIONS = {
    "bernoulli": ((0.3,), (1.0,), "logpmf pmf"),
    "beta": ((1.5, 0.8), LOC_SCALE, TAILS),
    "betabinom": ((8.0, 1.5, 0.8), (1.0,), "logpmf pmf"),
    "binom": ((8.0, 0.3), (1.0,), "logpmf pmf"),
    "cauchy": ((), LOC_SCALE, TAILS + " ppf isf"),
    "chi2": ((3.5,), LOC_SCALE, TAILS),
    "expon": ((), LOC_SCALE, TAILS + " ppf"),
    "gamma": ((2.5,), LOC_SCALE, TAILS),
    "gennorm": ((1.3,), (), "logpdf pdf cdf"),
    "geom": ((0.3,), (1.0,), "logpmf pmf"),
    "gumbel_l": ((), LOC_SCALE, TAILS + " ppf"),
    "gumbel_r": ((), LOC_SCALE, TAILS + " ppf"),
    "laplace": ((), LOC_SCALE, "logpdf pdf cdf"),
    "logistic": ((), LOC_SCALE, "logpdf pdf cdf sf ppf isf"),
    "nbinom": ((3.5, 0.3), (1.0,), "logpmf pmf"),
    "norm": ((), LOC_SCALE, TAILS + " ppf isf"),
    "pareto": ((2.5,), (0.1, 0.5), TAILS + " ppf"),
    "poisson": ((2.7,), (1.0,), "logpmf pmf cdf"),
    "t": ((2.5,), LOC_SCALE, "logpdf pdf"),
    "truncnorm": ((-0.7, 1.9), LOC_SCALE, TAILS),
    "uniform": ((), LOC_SCALE, "logpdf pdf cdf ppf"),
    "vonmises": ((1.7,), (), "logpdf pdf"),
    "wrapcauchy": ((0.4,), (), "logpdf pdf"),
}
CASES = [(name, f) for name, (_, _, functions) in DISTRIBUTIONS.items() for f in functions.split()]
CASES += [("bernoulli", "cdf"), ("bernoulli", "ppf")]


def case(name, function):
    params, loc_scale, _ = DISTRIBUTIONS[name]
    x = Q if function in ("ppf", "isf") else K if name in DISCRETE else X
    if name == "bernoulli" and function in ("cdf", "ppf"):
        loc_scale = ()
    return x, (*params, *loc_scale)


DISCRETE = {name for name, (_, _, functions) in DISTRIBUTIONS.items() if "logpmf" in functions}


@pytest.mark.parametrize("name, function", CASES)
def test_as_scipy(name, function):
    x, params = case(name, function)
    found = getattr(getattr(stats, name), function)(arr(x), *map(arr, params))
    with np.errstate(all="ignore"):
        expected = getattr(getattr(scipy.stats, name), function)(x, *params)
    assert found.dtype == np.float64
    np.testing.assert_allclose(np.asarray(found), expected, rtol=2e-10, atol=1e-13)
    single = getattr(getattr(stats, name), function)(np.float32(x), *params)
    assert single.dtype == np.float32
    np.testing.assert_allclose(np.asarray(single), np.float32(expected), rtol=2e-4, atol=2e-5)


# JAX has no derivatives of these: the Gumbel distributions there multiply an integer by a tangent
NOT_IN_JAX = {(f"gumbel_{side}", f) for side in "lr" for f in ("logpdf", "pdf", "ppf")} | {
    ("bernoulli", "ppf")
}


@pytest.mark.peer
@pytest.mark.parametrize("name, function", [c for c in CASES if c not in NOT_IN_JAX])
def test_derivatives_as_jax(name, function):
    import jax
    import jax.numpy as jnp

    x, params = case(name, function)
    if name in DISCRETE:
        x = x[x > 0] if function != "ppf" else x
    elif function not in ("ppf", "isf"):  # inside of all supports, and away from their ends
        x = np.array([0.42, 0.9, 1.3]) if name == "beta" else np.array([0.65, 0.9, 1.3, 2.6])
        x = x[x < 1.9 * 1.7] if name == "truncnorm" else x
    wrt = [i for i in range(len(params) + 1) if not (name in DISCRETE and i in (0, len(params)))]
    if name in ("binom", "betabinom"):
        wrt.remove(1)  # the number of trials is an integer
    if name == "beta" and function not in ("logpdf", "pdf"):
        wrt = [0, 3, 4]  # JAX has no derivative in the parameters of betainc
    if name == "bernoulli" and function == "cdf":
        wrt = [1]
    ours = getattr(getattr(stats, name), function)
    with jax.enable_x64(True):
        theirs = getattr(getattr(jax.scipy.stats, name), function)
        args = [jnp.asarray(x), *[jnp.full(x.shape, p) for p in params]]
        want = jax.grad(lambda *a: theirs(*a).sum(), wrt)(*args)
        want = [np.asarray(w) for w in want]
    args = [arr(x), *[arr(np.full(x.shape, p)) for p in params]]
    loss = lambda *a: ours(*a).sum()
    for transform in (lambda f: f, jit):
        for w, g in zip(want, transform(grad(loss, tuple(wrt)))(*args), strict=True):
            np.testing.assert_allclose(np.asarray(g), w, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize(
    "name, function", [c for c in CASES if c[1] in ("logpdf", "pdf", "cdf") and c != ("truncnorm", "cdf")]
)
def test_derivatives_are_finite_outside_of_the_support(name, function):
    """A choice between two sides must not let a NaN of the other one through."""
    x, params = case(name, function)
    slopes = grad(
        lambda x: bnp.where(
            bnp.isfinite(f := getattr(getattr(stats, name), function)(x, *map(arr, params))), f, 0
        ).sum()
    )(arr(np.array([-50.0, 50.0])))
    assert not np.isnan(np.asarray(slopes)).any()


def test_under_vmap_and_by_broadcasting():
    means = arr([-1.0, 0.0, 2.0])
    x = arr([0.5, 1.5])
    table = stats.norm.logpdf(x[:, None], means)
    np.testing.assert_allclose(vmap(lambda x: stats.norm.logpdf(x, means))(x), table)
    assert stats.norm.cdf(1).dtype == np.float32 and stats.norm.cdf(1).shape == ()


def test_far_tails():
    np.testing.assert_allclose(float(stats.norm.logcdf(arr(-40.0))), scipy.stats.norm.logcdf(-40), rtol=1e-12)
    np.testing.assert_allclose(float(stats.norm.isf(arr(1e-30))), scipy.stats.norm.isf(1e-30), rtol=1e-12)
    np.testing.assert_allclose(float(stats.cauchy.cdf(arr(-1e17))), scipy.stats.cauchy.cdf(-1e17), rtol=1e-12)
    np.testing.assert_allclose(
        float(stats.truncnorm.logpdf(arr(30.5), arr(30.0), arr(31.0))),
        scipy.stats.truncnorm.logpdf(30.5, 30, 31),
        rtol=1e-10,
    )
    np.testing.assert_allclose(
        float(stats.truncnorm.logcdf(arr(-30.2), arr(-31.0), arr(-30.0))),
        scipy.stats.truncnorm.logcdf(-30.2, -31, -30),
        rtol=1e-9,
    )


# -- of vectors ------------------------------------------------------------------------------------

RNG = np.random.default_rng(3)


def test_dirichlet():
    alpha, x = np.array([0.5, 2.0, 3.0]), RNG.dirichlet([1, 2, 3], 4).T
    expected = scipy.stats.dirichlet.logpdf(x, alpha)
    np.testing.assert_allclose(stats.dirichlet.logpdf(arr(x), arr(alpha)), expected, rtol=1e-10)
    np.testing.assert_allclose(stats.dirichlet.pdf(arr(x[:2]), arr(alpha)), np.exp(expected), rtol=1e-10)
    assert float(stats.dirichlet.logpdf(arr([0.5, 0.2, 0.2]), arr(alpha))) == -math.inf
    with pytest.raises(errors.ShapeError, match=r"\[n, ...\]"):
        stats.dirichlet.logpdf(arr(x.T), arr(alpha))


def test_multinomial():
    x, p = np.array([[1, 2, 0], [0, 0, 3], [1, 1, 2]]), np.array([0.2, 0.5, 0.3])
    found = stats.multinomial.logpmf(x, 3, arr(p))
    np.testing.assert_allclose(found, scipy.stats.multinomial.logpmf(x, 3, p), rtol=1e-10)
    np.testing.assert_allclose(stats.multinomial.pmf(x, 3, arr(p)), np.exp(found))
    with pytest.raises(errors.DtypeError, match="integers"):
        stats.multinomial.logpmf(arr(x), 3, arr(p))


def test_multivariate_normal():
    root = RNG.normal(size=(3, 3))
    mean, cov, x = RNG.normal(size=3), root @ root.T + np.eye(3), RNG.normal(size=(5, 3))
    law = scipy.stats.multivariate_normal
    found = stats.multivariate_normal.logpdf(arr(x), arr(mean), arr(cov))
    np.testing.assert_allclose(found, law.logpdf(x, mean, cov), rtol=1e-10)
    np.testing.assert_allclose(stats.multivariate_normal.pdf(arr(x), arr(mean), arr(cov)), np.exp(found))
    many = stats.multivariate_normal.logpdf(arr(x), arr(mean), arr(np.stack([cov, 2 * cov])[:, None]))
    np.testing.assert_allclose(many[1], law.logpdf(x, mean, 2 * cov), rtol=1e-10)
    np.testing.assert_allclose(
        stats.multivariate_normal.logpdf(arr(x), arr(mean), arr(2.0)),
        law.logpdf(x, mean, 2 * np.eye(3)),
        rtol=1e-10,
    )
    np.testing.assert_allclose(
        stats.multivariate_normal.logpdf(arr(0.3), arr(0.1), arr(2.0)), law.logpdf(0.3, 0.1, 2), rtol=1e-10
    )
    slope = grad(lambda m: stats.multivariate_normal.logpdf(arr(x[0]), m, arr(cov)))(arr(mean))
    np.testing.assert_allclose(slope, np.linalg.solve(cov, x[0] - mean), rtol=1e-9)
    with pytest.raises(errors.ShapeError, match="do not go together"):
        stats.multivariate_normal.logpdf(arr(x), arr(mean), arr(cov[:2]))
    with pytest.raises(errors.UnsupportedError, match="allow_singular"):
        stats.multivariate_normal.logpdf(arr(x), arr(mean), arr(cov), allow_singular=True)


# -- of samples ------------------------------------------------------------------------------------

SAMPLE = np.array([[3.0, 1, 2, 2], [3, 5, 2, 1], [1, 5, 2, 2], [3, 1, 0, 1]])


@pytest.mark.parametrize("axis", [0, 1, -1, None])
@pytest.mark.parametrize("keepdims", [False, True])
def test_mode(axis, keepdims):
    found, expected = (
        stats.mode(SAMPLE, axis, keepdims=keepdims),
        scipy.stats.mode(SAMPLE, axis, keepdims=keepdims),
    )
    np.testing.assert_array_equal(found.mode, expected.mode)
    np.testing.assert_array_equal(found.count, expected.count)
    np.testing.assert_array_equal(
        jit(lambda x: stats.mode(x, axis).mode)(SAMPLE), scipy.stats.mode(SAMPLE, axis).mode
    )


@pytest.mark.parametrize("method", ["average", "min", "max", "dense", "ordinal"])
@pytest.mark.parametrize("axis", [0, 1, None])
def test_rankdata(method, axis):
    expected = scipy.stats.rankdata(SAMPLE, method, axis=axis)
    np.testing.assert_array_equal(stats.rankdata(SAMPLE, method, axis=axis), expected.reshape(expected.shape))
    np.testing.assert_array_equal(jit(lambda x: stats.rankdata(x, method, axis=axis))(SAMPLE), expected)


def test_samples_with_nan():
    x = np.array([[1.0, math.nan], [1, 2], [3, math.nan], [2, math.nan]])
    found = stats.mode(x)
    np.testing.assert_array_equal(found.mode, [1, math.nan])
    np.testing.assert_array_equal(found.count, [2, 3])
    ranks = np.asarray(stats.rankdata(x, axis=0))
    np.testing.assert_array_equal(ranks[:, 0], [1.5, 1.5, 4, 3])
    assert np.isnan(ranks[:, 1]).all()
    with pytest.raises(errors.UnsupportedError, match="nan_policy"):
        stats.rankdata(x, nan_policy="omit")


@pytest.mark.parametrize("axis", [0, 1, None])
def test_sem(axis):
    np.testing.assert_allclose(stats.sem(arr(SAMPLE), axis), scipy.stats.sem(SAMPLE, axis), rtol=1e-12)
    x = np.where(SAMPLE == 5, np.nan, SAMPLE)
    found = stats.sem(arr(x), axis, 0, "omit")
    np.testing.assert_allclose(found, scipy.stats.sem(x, axis, 0, "omit"), rtol=1e-12)
    assert stats.sem(SAMPLE, axis, keepdims=True).ndim == 2


def test_bad_arguments():
    with pytest.raises(errors.ShapeError):
        stats.norm.logpdf(np.ones(3), np.ones(2))
    with pytest.raises(errors.ArgumentError):
        stats.gamma.cdf("a", 1.0)
    with pytest.raises(errors.DtypeError, match="real"):
        stats.norm.logpdf(1j)
    with pytest.raises(errors.ValueRangeError, match="method"):
        stats.rankdata(SAMPLE, "best")
