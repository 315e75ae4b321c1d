"""``scipy.special`` against SciPy and JAX: values, promotion, gradients."""

import itertools
import math

import numpy as np
import pytest
import scipy.special

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ops import gamma as gamma_numerics
from blufunc.scipy import special
from blufunc.transforms.autodiff.grad import grad, jvp
from blufunc.transforms.batching.vmap import vmap
from tests.transforms.common import arr, close

_P, _X, _U = (0.3, 8.0), (-3.0, 3.0), (-0.8, 0.8)

# The range of each argument, and the arguments in which there is a derivative.
FUNCTIONS = {
    "beta": ((_P, _P), (0, 1)), "betainc": ((_P, _P, (0.05, 0.95)), (2,)), "betaln": ((_P, _P), (0, 1)),
    "dawsn": ((_X,), (0,)), "digamma": ((_P,), (0,)), "entr": ((_P,), (0,)), "erf": ((_X,), (0,)),
    "erfc": ((_X,), (0,)),
    "erfcx": ((_X,), (0,)), "erfinv": (((-0.9, 0.9),), (0,)), "exp1": ((_P,), (0,)), "expi": ((_P,), (0,)),
    "expit": ((_X,), (0,)), "factorial": ((_P,), (0,)), "gamma": ((_P,), (0,)), "gammainc": ((_P, _P), (0, 1)),
    "gammaincc": ((_P, _P), (0, 1)), "gammaln": ((_P,), (0,)), "gammasgn": (((-2.9, -2.1),), ()), "i0": ((_X,), (0,)),
    "i0e": ((_P,), (0,)), "i1": ((_X,), (0,)), "i1e": ((_P,), (0,)), "kl_div": ((_P, _P), (0, 1)),
    "log_ndtr": ((_X,), (0,)), "logit": (((0.05, 0.95),), (0,)), "ndtr": ((_X,), (0,)),
    "ndtri": (((0.05, 0.95),), (0,)),
    "boxcox": ((_P, (-1, 1)), (0, 1)), "boxcox1p": ((_P, (-1, 1)), (0, 1)), "comb": (((4, 8), (0.3, 3)), (0, 1)),
    "hyp1f1": ((_P, _P, _X), (0, 1, 2)), "hyp2f1": ((_P, _P, _P, _U), (0, 1, 2, 3)), "loggamma": ((_P,), (0,)),
    "owens_t": ((_X, _X), (0, 1)),
    "poch": ((_P, _P), (0, 1)), "rel_entr": ((_P, _P), (0, 1)), "spence": ((_P,), (0,)), "xlog1py": ((_X, _P), (0, 1)),
    "xlogy": ((_X, _P), (0, 1)), "zeta": (((1.5, 8), _P), (1,)),
}  # fmt: skip


def sample(name, dtype=np.float64, n=60):
    rng = np.random.default_rng(list(name.encode()))
    return [rng.uniform(low, high, n).astype(dtype) for low, high in FUNCTIONS[name][0]]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name, dtype):
    xs = sample(name, dtype)
    got = getattr(special, name)(*map(from_numpy, xs))
    assert got.dtype == dtype
    want = getattr(scipy.special, name)(*[x.astype(np.float64) for x in xs])
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(np.asarray(got), want, rtol=300 * eps, atol=50 * eps)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives(name):
    """Against differences in differentiable arguments; the others raise an error."""
    f, xs = getattr(special, name), [arr(x) for x in sample(name)]
    for k in range(len(xs)):
        along = lambda x, k=k: f(*[x if i == k else v for i, v in enumerate(xs)])
        one = bnp.ones_like(xs[k])
        if k not in FUNCTIONS[name][1]:
            if name == "gammasgn":
                assert not np.any(np.asarray(jvp(along, (xs[k],), (one,))[1]))
                continue
            with pytest.raises(errors.GradError, match="no derivative"):
                jvp(along, (xs[k],), (one,))
            continue
        h = 1e-5
        want = (np.asarray(along(xs[k] + h)) - np.asarray(along(xs[k] - h))) / (2 * h)
        got = np.asarray(jvp(along, (xs[k],), (one,))[1])
        scale = np.maximum(np.abs(want), np.abs(np.asarray(along(xs[k]))))
        assert np.max(np.abs(got - want) / (1 + scale)) < 1e-7


def test_orders_are_integers_of_either_kind():
    x = arr([0.5, 2.0, 7.0])
    for n in range(4):
        want = arr(scipy.special.polygamma(n, np.asarray(x)))
        close(special.polygamma(n, x), want)
        close(special.polygamma(bnp.asarray(n), x), want)
        close(special.expn(n, x), arr(scipy.special.expn(n, np.asarray(x))))
        slope = vmap(grad(lambda x, n=n: special.expn(n, x)))(x)
        h = 1e-6
        close(slope, (special.expn(n, x + h) - special.expn(n, x - h)) / (2 * h), 1e-8)
    close(vmap(grad(special.polygamma, argnums=1), in_axes=(None, 0))(arr(1.0), x), special.polygamma(2, x))


def test_operands_promote_and_broadcast():
    assert special.gammaln(3).dtype == "float32"
    assert special.xlogy(bnp.ones((3, 1), "int32"), bnp.ones(2, "float16")).shape == (3, 2)
    assert special.betainc(1, 2.0, arr([0.5, 0.25])).dtype == "float64"
    assert special.gammaln(bnp.ones(3, "bfloat16")).dtype == "bfloat16"
    close(special.multigammaln(arr([3.0, 5.0]), 3), arr(scipy.special.multigammaln(np.array([3.0, 5.0]), 3)))
    close(special.zeta(arr(2.0)), arr(math.pi**2 / 6))


_INF, _NAN = math.inf, math.nan

POINTS = {
    "gammaln": ([0.0, -1.0, _INF, -_INF, 1.0], [_INF, _INF, _INF, _INF, 0.0]),
    "digamma": ([0.0, -3.0, _INF], [_NAN, _NAN, _INF]),
    "gamma": ([_INF, -1.0, 5.0], [_INF, _NAN, 24.0]),
    "factorial": ([0.0, -1.0, 3.0], [1.0, 0.0, 6.0]),
    "entr": ([0.0, -1.0, 1.0], [0.0, -_INF, 0.0]),
    "ndtri": ([0.0, 1.0, 0.5], [-_INF, _INF, 0.0]),
    "log_ndtr": ([-_INF, _INF], [-_INF, 0.0]),
    "logit": ([0.0, 1.0], [-_INF, _INF]),
    "i0e": ([0.0, _INF], [1.0, 0.0]),
    "i1e": ([0.0, _INF], [0.0, 0.0]),
    "exp1": ([0.0, _INF], [_INF, 0.0]),
    "spence": ([0.0, 1.0], [math.pi**2 / 6, 0.0]),
}


@pytest.mark.parametrize("name", POINTS)
def test_points_apart(name):
    x, want = POINTS[name]
    np.testing.assert_allclose(np.asarray(getattr(special, name)(arr(x))), want, rtol=1e-15)


def test_products_with_logarithms_vanish_with_their_factor():
    x, y = arr([0.0, 0.0, 2.0]), arr([0.0, 5.0, 3.0])
    close(special.xlogy(x, y), arr([0.0, 0.0, 2 * math.log(3)]))
    slopes = vmap(grad(special.xlogy, (0, 1)))(x, y)
    close(slopes, (arr([-_INF, math.log(5), math.log(3)]), arr([0.0, 0.0, 2 / 3])))
    close(special.xlog1py(x, y - 1), special.xlogy(x, y))


def test_divergences_at_the_border():
    p, q = arr([0.0, 0.0, 1.0, -1.0, 1.0]), arr([0.0, 2.0, 0.0, 1.0, -1.0])
    close(special.rel_entr(p, q), arr([0, 0, _INF, _INF, _INF]))
    close(special.kl_div(p, q), arr([0, 2, _INF, _INF, _INF]))


def test_derivatives_at_kinks_and_ends():
    at = lambda f, x: float(grad(f)(arr(x)))
    assert at(special.i1e, 0.0) == 0.5 and at(special.i0e, 0.0) == 0
    assert at(grad(special.i1), 0.0) == 0
    assert at(special.spence, 1.0) == -1
    assert at(lambda x: special.gammainc(arr(1.0), x), 0.0) == 1
    assert at(lambda x: special.gammainc(arr(2.0), x), 0.0) == 0
    assert at(lambda x: special.betainc(arr(1.0), arr(2.0), x), 0.0) == 2
    assert math.isclose(at(lambda x: special.betainc(arr(3.0), arr(1.0), x), 1.0), 3, rel_tol=1e-14)


# -- sums of exponentials --------------------------------------------------------------------------


def test_logsumexp_with_signs():
    a, b = arr([[1.0, 2.0, 1000.0], [-_INF, -_INF, 3.0]]), arr([[1.0, -3.0, 0.0], [1.0, 1.0, -1.0]])
    value, sign = special.logsumexp(a, axis=1, b=b, return_sign=True)
    close(value, arr([math.log(3 * math.e**2 - math.e), 3.0]))
    assert sign.tolist() == [-1, -1]
    want, want_sign = scipy.special.logsumexp(np.asarray(a), axis=(0, 1), b=np.asarray(b), return_sign=True)
    value, sign = special.logsumexp(a, b=b, return_sign=True, keepdims=True)
    assert value.shape == (1, 1) and math.isclose(float(value[0, 0]), want) and float(sign[0, 0]) == want_sign
    value, sign = special.logsumexp(a, axis=0, return_sign=True, where=bnp.asarray([[False] * 3, [True] * 3]))
    assert value.tolist() == [-_INF, -_INF, 3] and sign.tolist() == [0, 0, 1]
    close(special.logsumexp(a, 1), arr(scipy.special.logsumexp(np.asarray(a), 1)))
    f = lambda a: special.logsumexp(a, b=arr([1.0, -3.0]), return_sign=True)[0]
    x = arr([0.5, 0.25])
    e = np.exp(np.asarray(x)) * [1, -3]
    close(grad(f)(x), arr(e / e.sum()))


def test_softmax():
    x = arr([[1.0, 2.0], [3.0, -1.0]])
    close(special.softmax(x), arr(scipy.special.softmax(np.asarray(x))))
    close(special.log_softmax(x, axis=0), arr(scipy.special.log_softmax(np.asarray(x), 0)))


# -- the incomplete gamma function in its parameter ------------------------------------------------


def _slope_in_a(a, x):
    """Of the function with the smaller value, by differences of order 8."""
    f = lambda s: scipy.special.gammainc(s, x) if x < a else -scipy.special.gammaincc(s, x)
    h = 0.02 * min(a, math.sqrt(a))
    weights = (4 / 5, -1 / 5, 4 / 105, -1 / 280)
    return sum(w * (f(a + (i + 1) * h) - f(a - (i + 1) * h)) for i, w in enumerate(weights)) / h


@pytest.mark.parametrize("a", [1e-3, 0.1, 0.9, 1.0, 3.0, 19.9, 20.0, 150.0, 3e3, 1e6])
def test_incomplete_gamma_in_its_parameter(a):
    for z in (-4, -2, -0.5, 0.0, 0.01, 0.5, 2, 4):
        x = a + z * math.sqrt(a) if a > 20 else a * math.exp(z / 2)
        got = float(lax.igamma_grad_a(arr(a), arr(x)))
        assert math.isclose(got, _slope_in_a(a, x), rel_tol=2e-8), (a, x)
        density = float(grad(lambda x: lax.igamma(arr(a), x))(arr(x)))
        assert math.isclose(float(lax.random_gamma_grad(arr(a), arr(x))), -got / density, rel_tol=1e-8)


def test_series_and_integral_agree():
    """On both sides of the borders between them."""
    a, x = map(np.ravel, np.meshgrid(np.linspace(0.5, 19, 23), np.linspace(1.0, 1.3, 5)))
    x = a * x + 1
    np.testing.assert_allclose(gamma_numerics._by_series(a, x), gamma_numerics._by_integral(a, x), rtol=1e-11)
    x = a * 0.7
    np.testing.assert_allclose(
        gamma_numerics._by_series(a[a > 5], x[a > 5]),
        gamma_numerics._by_integral(a[a > 5], x[a > 5]),
        rtol=1e-11,
    )


def test_slopes_of_samples_do_not_underflow():
    a, x = arr([1e-2, 1e-3, 500.0]), arr([1e-290, 1e-300, 5.0])
    slope = np.asarray(lax.random_gamma_grad(a, x))
    assert np.all(np.isfinite(slope)) and np.all(slope > 0)
    # for small x the distribution function is x**a / gamma(a + 1)
    want = -1e-290 / 1e-2 * (math.log(1e-290) - scipy.special.digamma(1.01))
    np.testing.assert_allclose(slope[0], want, rtol=1e-12)


def test_the_border_of_the_parameter():
    f = lambda a, x: np.asarray(lax.igamma_grad_a(arr(a), arr(x)))
    np.testing.assert_array_equal(
        f([1.0, 1.0, -1.0, 1.0, 0.0], [0.0, _INF, 1.0, -1.0, 1.0]), [0, 0, _NAN, _NAN, _NAN]
    )


# -- errors ----------------------------------------------------------------------------------------

WRONG = {
    "exact": (lambda: special.factorial(3, exact=True), errors.UnsupportedError),
    "dimension": (lambda: special.multigammaln(3.0, 0), errors.ValueRangeError),
    "complex": (lambda: special.gammaln(bnp.asarray([1j])), errors.DtypeError),
    "sign of complex": (lambda: special.logsumexp(bnp.asarray([1j]), return_sign=True), errors.DtypeError),
    "list": (lambda: special.erf([1.0]), errors.ArgumentError),
    "shapes": (lambda: special.beta(bnp.ones(2), bnp.ones(3)), errors.ShapeError),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    call, error = WRONG[name]
    with pytest.raises(error) as caught:
        call()
    assert "test_special.py" in caught.value.where and caught.value.fix


# -- functions of other kinds ----------------------------------------------------------------------


def test_pairs_of_integrals():
    x = np.array([-3.0, 0.0, 0.5, 40.0, 1e8])
    for got, want in zip(special.fresnel(arr(x)), scipy.special.fresnel(x)):
        close(got, arr(want), 1e-12)
    for got, want in zip(special.sici(arr(x)), scipy.special.sici(np.abs(x))):
        close(abs(got), arr(np.abs(want)), 1e-12)
    assert special.sici(arr(-1.0))[0] == -special.sici(arr(1.0))[0]
    slopes = [jvp(f, (arr(0.7),), (arr(1.0),))[1] for f in (special.fresnel, special.sici)]
    half_turn = math.pi * 0.7**2 / 2
    want = [math.sin(half_turn), math.cos(half_turn), math.sin(0.7) / 0.7, math.cos(0.7) / 0.7]
    np.testing.assert_allclose([float(s) for pair in slopes for s in pair], want, rtol=1e-12)
    assert grad(lambda x: special.sici(x)[0])(0.0) == 1


def test_of_complex_numbers():
    z = np.array([0.3 + 2j, -2.5 + 0.5j, -3 - 1j, 4.0 + 0j])
    close(special.wofz(from_numpy(z)), from_numpy(scipy.special.wofz(z)), 1e-12)
    close(special.loggamma(from_numpy(z)), from_numpy(scipy.special.loggamma(z)), 1e-12)
    assert special.wofz(1.0).dtype == "complex64" and special.wofz(arr([1.0])).dtype == "complex128"
    for f, slope in (
        (special.wofz, lambda z: -2 * z * scipy.special.wofz(z) + 2j / math.sqrt(math.pi)),
        (special.loggamma, scipy.special.digamma),
    ):
        t = np.full(z.shape, 1 + 1j)
        close(jvp(f, (from_numpy(z),), (from_numpy(t),))[1], from_numpy(slope(z) * t), 1e-12)
    twice = lambda z: jvp(special.loggamma, (z,), (bnp.ones_like(z),))[1]
    with pytest.raises(errors.GradError, match="loggamma"):
        jvp(twice, (from_numpy(z),), (from_numpy(z),))
    assert bnp.isnan(special.loggamma(arr([-1.5, 0.0]))).all()


def test_integer_orders():
    z = np.array([-2.0, 0.0, 1.5, 60.0])
    want = np.stack([scipy.special.jv(k, z) for k in range(4)])
    close(special.bessel_jn(arr(z), v=3), arr(want), 1e-12)
    slopes = jvp(lambda z: special.bessel_jn(z, v=3), (arr(z),), (bnp.ones(4, "float64"),))[1]
    close(slopes, arr(np.stack([scipy.special.jvp(k, z) for k in range(4)])), 1e-12)
    np.testing.assert_allclose(np.asarray(special.bernoulli(8)), scipy.special.bernoulli(8), rtol=1e-6)


def test_spherical_harmonics():
    n, m = (np.asarray(v) for v in zip(*[(n, m) for n in range(6) for m in range(-n, n + 1)]))
    theta, phi = np.random.default_rng(0).uniform(0.1, 3, (2, n.size))
    want = scipy.special.sph_harm_y(n, m, theta, phi)
    close(special.sph_harm_y(n, m, arr(theta), arr(phi)), from_numpy(want), 1e-12)
    mapped = vmap(lambda *xs: special.sph_harm_y(*xs, n_max=5))(
        bnp.asarray(n), bnp.asarray(m), arr(theta), arr(phi)
    )
    close(mapped, from_numpy(want), 1e-12)
    f = lambda t: bnp.real(special.sph_harm_y(3, -2, t, arr(0.4)))
    h = 1e-6
    slope = (scipy.special.sph_harm_y(3, -2, 1 + h, 0.4) - scipy.special.sph_harm_y(3, -2, 1 - h, 0.4)) / (
        2 * h
    )
    np.testing.assert_allclose(float(grad(f)(arr(1.0))), slope.real, rtol=1e-8)
    assert special.sph_harm_y(2, 3, 0.5, 0.5) == 0 and special.sph_harm_y(2, 1, 0.5, 0.5).dtype == "complex64"


def test_box_cox_where_the_exponent_vanishes():
    x = arr([0.5, 2.0])
    close(special.boxcox(x, 0.0), bnp.log(x), 1e-14)
    slope = vmap(grad(special.boxcox, 1), (0, None))(x, arr(0.0))
    close(slope, bnp.log(x) ** 2 / 2, 1e-12)
    assert special.boxcox(arr([0.0, 0.0]), arr([0.0, 2.0])).tolist() == [-math.inf, -0.5]
    assert bnp.isnan(special.boxcox(-1.0, 2.0))
    close(special.comb(arr([5.0, 3.0, -1.0]), arr([2.0, 5.0, 1.0])), arr([10.0, 0.0, 0.0]), 1e-12)
    close(special.comb(arr(5.0), arr(2.0), repetition=True), arr(15.0), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "x, expected", [(0.9, True), (0.9999, False), (-50.0, True)], ids=["inside", "too near to 1", "continued"]
)
def test_slopes_in_parameters_of_2f1(x, expected):
    slope = grad(special.hyp2f1)(arr(0.7), arr(1.2), arr(2.5), arr(x))
    if not expected:
        assert bnp.isnan(slope)
        return
    h = 1e-5
    f = lambda a: scipy.special.hyp2f1(a, 1.2, 2.5, x)
    np.testing.assert_allclose(float(slope), (f(0.7 + h) - f(0.7 - h)) / (2 * h), rtol=1e-7)


# -- against JAX -----------------------------------------------------------------------------------

# Where JAX's own results are less exact than the tolerance, by comparison with SciPy in 64 bits.
LESS_EXACT_IN_JAX = {"beta": 1e-4, "betaln": 1e-4, "log_ndtr": 1e-4}


@pytest.mark.peer
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", [n for n in FUNCTIONS if FUNCTIONS[n][1]])
def test_against_jax(name, dtype):
    """Values and derivatives."""
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        theirs, xs = getattr(jax.scipy.special, name), sample(name, dtype, 20)
        ours = [from_numpy(x) for x in xs]
        rtol = max(2e-4 if dtype == np.float32 else 1e-10, LESS_EXACT_IN_JAX.get(name, 0))
        same = lambda got, want: np.testing.assert_allclose(
            np.asarray(got), np.asarray(want), rtol=rtol, atol=rtol
        )
        same(getattr(special, name)(*ours), theirs(*xs))
        wrt = FUNCTIONS[name][1]
        got = vmap(grad(getattr(special, name), wrt))(*ours)
        want = jax.vmap(jax.grad(theirs, wrt))(*xs)
        for g, w, x in itertools.zip_longest(got, want, [xs[k] for k in wrt]):
            assert g.dtype == x.dtype
            same(g, w)
