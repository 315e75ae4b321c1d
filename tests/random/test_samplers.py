"""Random numbers: the cipher's known answers, distributions, transforms, errors."""

import math

import numpy as np
import pytest
import scipy.stats

from blufunc import errors, random
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from blufunc.core.ops.elementwise import mul
from blufunc.core.ops.random_bits import random_fold_in_p, random_seed_p, random_unwrap_p, threefry2x32
from blufunc.transforms.autodiff.grad import grad, jvp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit

KEY = random.key(42)
LOGITS = np.linspace(-1, 2, 60, dtype=np.float32).reshape(3, 4, 5)


def data(key):
    return np.asarray(random.key_data(key))


# -- the generator ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key, counter, want",
    [
        # the known answers of the Random123 distribution
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers(key, counter, want):
    assert tuple(map(int, threefry2x32(*key, *counter))) == want
    tiled = [np.full((3, 5), word, np.uint32) for word in (*key, *counter)]
    for word, expected in zip(threefry2x32(*tiled), want):
        assert (word == expected).all()


def test_long_arrays_are_enciphered_by_blocks():
    """Position i has the same bits for any count, across the cipher's blocks."""
    whole = np.asarray(random.bits(KEY, (70_001,)))
    np.testing.assert_array_equal(whole[:5], np.asarray(random.bits(KEY, (5,))))
    counters = np.arange(70_001, dtype=np.uint32)
    a, b = threefry2x32(*data(KEY), np.uint32(0), counters)
    np.testing.assert_array_equal(whole, a ^ b)


@pytest.mark.parametrize(
    "seed, want",
    [
        (0, (0, 0)),
        (42, (0, 42)),
        (-1, (0, 2**32 - 1)),
        (-(2**31), (0, 2**31)),
        (2**32 - 1, (0, 2**32 - 1)),
        (2**32 + 5, (1, 5)),
        (-(2**40), (2**32 - 256, 0)),
        (2**64 - 1, (2**32 - 1, 2**32 - 1)),
        (np.int64(7), (0, 7)),
        (np.uint8(200), (0, 200)),
        (np.array(-5, np.int8), (0, 2**32 - 5)),
    ],
)
def test_seeds(seed, want):
    assert tuple(data(random.key(seed))) == want


def test_wrapping_and_unwrapping():
    keys = random.split(KEY, (2, 3))
    assert keys.dtype == dtypes.key and keys.shape == (2, 3)
    words = random.key_data(keys)
    assert words.dtype == np.uint32 and words.shape == (2, 3, 2)
    np.testing.assert_array_equal(data(random.wrap_key_data(words)), words)


def test_names_of_the_generator():
    np.testing.assert_array_equal(data(random.PRNGKey(7)), data(random.key(7, impl="threefry2x32")))
    assert random.key_impl(random.split(KEY)) == "threefry2x32"
    np.testing.assert_array_equal(data(random.key(7, dtype=KEY.dtype)), data(random.key(7)))
    words = random.key_data(KEY)
    np.testing.assert_array_equal(data(random.wrap_key_data(words, impl="threefry2x32")), words)
    for make in (random.key, random.PRNGKey):
        with pytest.raises(errors.ValueRangeError, match="no generator 'rbg'"):
            make(0, impl="rbg")


def test_clones_are_equal():
    keys = random.split(KEY, 3)
    assert random.clone(keys) is not keys
    np.testing.assert_array_equal(data(random.clone(keys)), data(keys))


def test_frozen_values():
    """Recorded once, with JAX agreeing: these may never change."""
    assert data(random.split(KEY)).tolist() == [[1832780943, 270669613], [64467757, 2916123636]]
    assert data(random.fold_in(KEY, 7)).tolist() == [2547012911, 1371500959]
    assert int(random.bits(KEY)) == 2098992034
    assert np.asarray(random.randint(KEY, (5,), -10, 10)).tolist() == FROZEN["randint"]
    assert np.asarray(random.uniform(KEY, (3,))).tolist() == FROZEN["uniform"]
    assert np.asarray(random.permutation(KEY, 8)).tolist() == FROZEN["permutation"]
    assert np.asarray(random.bernoulli(KEY, 0.6, (6,))).tolist() == FROZEN["bernoulli"]
    np.testing.assert_allclose(random.normal(KEY, (3,)), FROZEN["normal"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(random.gumbel(KEY, (3,)), FROZEN["gumbel"], rtol=1e-6, atol=1e-6)


FROZEN = {
    "randint": [-6, 4, 1, -1, -1],
    "uniform": [0.48870956897735596, 0.6797971725463867, 0.6162714958190918],
    "permutation": [7, 4, 2, 5, 3, 6, 0, 1],
    "bernoulli": [True, False, False, True, True, True],
    "normal": [-0.02830461598932743, 0.4671318531036377, 0.2957029640674591],
    "gumbel": [0.3340933918952942, 0.952019453048706, 0.7255305647850037],
}


def test_randint_truncates_bounds_that_are_floats():
    found = random.randint(KEY, (50,), np.float32(1.7), np.array([3.9], np.float32))
    assert found.dtype == np.int32 and found.tolist() == random.randint(KEY, (50,), 1, 3).tolist()


def test_randint_reaches_the_whole_range():
    x = np.asarray(random.randint(KEY, (1000,), 0, 2**32, "uint32"))
    assert x.dtype == np.uint32 and x.min() < 2**27 and x.max() > 2**32 - 2**27
    wide = from_numpy(np.array(2**32, np.int64))
    np.testing.assert_array_equal(random.randint(KEY, (1000,), 0, wide, "uint32"), x)
    assert set(np.asarray(random.randint(KEY, (100,), 2**31 - 2, 2**31)).tolist()) == {2**31 - 2, 2**31 - 1}


# -- distributions ---------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "samples, cdf",
    [
        (lambda: random.uniform(KEY, (20_000,), minval=-1, maxval=3), scipy.stats.uniform(-1, 4).cdf),
        (lambda: random.normal(KEY, (20_000,)), scipy.stats.norm.cdf),
        (lambda: random.normal(KEY, (20_000,), "float64"), scipy.stats.norm.cdf),
        (lambda: random.exponential(KEY, (20_000,)), scipy.stats.expon.cdf),
        (lambda: random.gumbel(KEY, (20_000,)), scipy.stats.gumbel_r.cdf),
        (lambda: random.truncated_normal(KEY, -1, 2, (20_000,)), scipy.stats.truncnorm(-1, 2).cdf),
        (lambda: random.gumbel(KEY, (20_000,), mode="high"), scipy.stats.gumbel_r.cdf),
        (lambda: random.gumbel(KEY, (20_000,), mode="highest"), scipy.stats.gumbel_r.cdf),
        (lambda: random.laplace(KEY, (20_000,)), scipy.stats.laplace.cdf),
        (lambda: random.logistic(KEY, (20_000,)), scipy.stats.logistic.cdf),
        (lambda: random.cauchy(KEY, (20_000,)), scipy.stats.cauchy.cdf),
        (lambda: random.pareto(KEY, 2.5, (20_000,)), scipy.stats.pareto(2.5).cdf),
        (lambda: random.weibull_min(KEY, 2.0, 1.5, (20_000,)), scipy.stats.weibull_min(1.5, scale=2).cdf),
        (lambda: random.rayleigh(KEY, 3.0, (20_000,)), scipy.stats.rayleigh(scale=3).cdf),
        (lambda: random.triangular(KEY, -1.0, 0.0, 3.0, (20_000,)), scipy.stats.triang(0.25, -1, 4).cdf),
        (lambda: random.lognormal(KEY, 0.5, (20_000,)), scipy.stats.lognorm(0.5).cdf),
        (lambda: random.maxwell(KEY, (20_000,)), scipy.stats.maxwell.cdf),
        (
            lambda: abs(random.double_sided_maxwell(KEY, 0.0, 2.0, (20_000,))),
            scipy.stats.maxwell(scale=2).cdf,
        ),
        (lambda: random.wald(KEY, 0.7, (20_000,)), scipy.stats.invgauss(0.7).cdf),
        (lambda: random.gamma(KEY, 0.3, (20_000,)), scipy.stats.gamma(0.3).cdf),
        (lambda: random.gamma(KEY, 3.0, (20_000,), "float64"), scipy.stats.gamma(3).cdf),
        (lambda: np.exp(random.loggamma(KEY, 2.0, (20_000,))), scipy.stats.gamma(2).cdf),
        (lambda: random.beta(KEY, 0.5, 2.0, (20_000,)), scipy.stats.beta(0.5, 2).cdf),
        (lambda: random.dirichlet(KEY, np.float32([1, 2, 3]), (20_000,))[:, 1], scipy.stats.beta(2, 4).cdf),
        (lambda: random.chisquare(KEY, 3.0, (20_000,)), scipy.stats.chi2(3).cdf),
        (lambda: random.f(KEY, 3.0, 5.0, (20_000,)), scipy.stats.f(3, 5).cdf),
        (lambda: random.t(KEY, 2.5, (20_000,)), scipy.stats.t(2.5).cdf),
        (lambda: random.generalized_normal(KEY, 1.5, (20_000,)), scipy.stats.gennorm(1.5).cdf),
        # the p-norm of a point of the ball to the power of its dimension is uniform
        (lambda: (random.ball(KEY, 3, 2, (20_000,)) ** 2).sum(-1) ** 1.5, scipy.stats.uniform.cdf),
    ],
)
def test_distributions(samples, cdf):
    assert scipy.stats.kstest(np.asarray(samples(), np.float64), cdf).pvalue > 1e-3


@pytest.mark.parametrize(
    "samples, law",
    [
        (lambda: random.poisson(KEY, 2.5, (20_000,)), scipy.stats.poisson(2.5)),
        (lambda: random.poisson(KEY, 30.0, (20_000,)), scipy.stats.poisson(30)),
        (lambda: random.binomial(KEY, 12, 0.3, (20_000,)), scipy.stats.binom(12, 0.3)),
        (lambda: random.binomial(KEY, 100, 0.7, (20_000,)), scipy.stats.binom(100, 0.7)),
        (lambda: random.geometric(KEY, 0.3, (20_000,)), scipy.stats.geom(0.3)),
        (
            lambda: random.multinomial(KEY, 20, np.float32([0.2, 0.5, 0.3]), shape=(20_000, 3))[:, 1],
            scipy.stats.binom(20, 0.5),
        ),
    ],
)
def test_counts(samples, law):
    drawn = np.asarray(samples()).astype(int)
    values = np.arange(law.ppf(0.005), law.ppf(0.995) + 1)
    expected = law.pmf(values) * drawn.size
    seen = np.array([(drawn == v).sum() for v in values])
    expected, seen = (
        np.append(expected, drawn.size - expected.sum()),
        np.append(seen, drawn.size - seen.sum()),
    )
    assert scipy.stats.chisquare(seen, expected).pvalue > 1e-3


def test_categorical_frequencies():
    p = np.array([0.1, 0.6, 0.3])
    drawn = np.asarray(random.categorical(KEY, np.log(p), shape=(20_000,)))
    counts = np.bincount(drawn, minlength=3)
    assert scipy.stats.chisquare(counts, p * 20_000).pvalue > 1e-3


def test_choice_without_replacement_is_distinct():
    for p in (None, np.full(10, 0.1, np.float32)):
        drawn = np.asarray(random.choice(KEY, 10, (10,), replace=False, p=p))
        assert sorted(drawn.tolist()) == list(range(10))


def test_permutation_keeps_lines_together():
    x = np.arange(12).reshape(4, 3)
    y = np.asarray(random.permutation(KEY, x))
    np.testing.assert_array_equal(y[np.argsort(y[:, 0])], x)
    z = np.asarray(random.permutation(KEY, x, axis=1, independent=True))
    np.testing.assert_array_equal(np.sort(z, 1), x)
    keys = random.split(KEY, 5)
    assert sorted(data(random.permutation(KEY, keys)).tolist()) == sorted(data(keys).tolist())


# -- transforms ------------------------------------------------------------------------------------

SAMPLERS = {
    "gamma": lambda k: random.gamma(k, np.float32([0.3, 1, 7])),
    "loggamma": lambda k: random.loggamma(k, 0.01, (2, 2)),
    "dirichlet": lambda k: random.dirichlet(k, np.float32([0.3, 1, 7])),
    "poisson": lambda k: random.poisson(k, np.float32([0, 2, 50])),
    "binomial": lambda k: random.binomial(k, np.float32([3, 100]), 0.3),
    "multinomial": lambda k: random.multinomial(k, 30, np.float32([0.3, 0.3, 0.4])),
    "multivariate_normal": lambda k: random.multivariate_normal(k, np.zeros(2), np.eye(2), (3,)),
    "orthogonal": lambda k: random.orthogonal(k, 3),
    "categorical once": lambda k: random.categorical(k, LOGITS, shape=(2, 3, 4), replace=False),
    "gumbel highest": lambda k: random.gumbel(k, (5,), mode="highest"),
    "bits": lambda k: random.bits(k, (3, 2)),
    "split": lambda k: random.key_data(random.split(k, 3)),
    "fold_in": lambda k: random.key_data(random.fold_in(k, 3)),
    "uniform": lambda k: random.uniform(k, (3,), minval=-1.0),
    "normal": lambda k: random.normal(k, (2, 3)),
    "randint": lambda k: random.randint(k, (5,), 0, 9),
    "permutation": lambda k: random.permutation(k, np.arange(6).reshape(3, 2)),
    "categorical": lambda k: random.categorical(k, LOGITS),
    "choice": lambda k: random.choice(k, 5, (4,), p=np.full(5, 0.2, np.float32)),
    "choice once": lambda k: random.choice(k, 5, (4,), False, np.full(5, 0.2, np.float32)),
    "truncated": lambda k: random.truncated_normal(k, -1.0, 1.0, (3,)),
}


@pytest.mark.second
@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", SAMPLERS)
def test_jit_and_vmap_draw_the_same(name):
    f = SAMPLERS[name]
    keys = random.split(KEY, 4)
    each = [np.asarray(f(random.wrap_key_data(w))) for w in data(keys)]
    # compiled functions round in their own way
    np.testing.assert_allclose(jit(f)(KEY), f(KEY), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(vmap(f)(keys), each)
    np.testing.assert_allclose(jit(vmap(f))(keys), each, rtol=1e-6, atol=1e-6)
    grid = random.wrap_key_data(data(keys).reshape(2, 2, 2))
    nested = vmap(vmap(f, 0), 1)(grid)
    np.testing.assert_array_equal(np.asarray(nested)[1, 0], each[1])


def test_vmap_over_seeds_data_and_words():
    seeds = np.arange(4, dtype=np.int32)
    keys = vmap(random.key)(seeds)
    np.testing.assert_array_equal(data(keys)[:, 1], seeds)
    folded = vmap(random.fold_in, in_axes=(None, 0))(KEY, seeds)
    np.testing.assert_array_equal(data(folded)[3], data(random.fold_in(KEY, 3)))
    columns = data(keys).T  # the mapped axis after the words
    np.testing.assert_array_equal(data(vmap(random.wrap_key_data, in_axes=1)(columns)), data(keys))


def test_uniform_is_differentiable_in_its_bounds():
    u = np.asarray(random.uniform(KEY, (5,)))
    f = lambda low, high: random.uniform(KEY, (5,), minval=low, maxval=high)
    low, high = np.float32(-1), np.float32(2)
    _, t = jvp(f, (low, high), (np.float32(1), np.float32(0)))
    np.testing.assert_allclose(t, 1 - u, rtol=1e-6, atol=1e-6)
    _, t = jvp(f, (low, high), (np.float32(0), np.float32(1)))
    np.testing.assert_allclose(t, u, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_the_derivative_of_a_gamma_sample_keeps_its_quantile():
    keys, shapes, h = random.split(KEY, 3), np.array([0.5, 2.0, 9.0]), 1e-5
    slopes = [
        grad(lambda a, k=k: random.gamma(k, a, dtype="float64"))(from_numpy(a)) for k, a in zip(keys, shapes)
    ]
    for k, a, slope in zip(keys, shapes, slopes):
        q = scipy.stats.gamma.cdf(float(random.gamma(k, a, dtype="float64")), a)
        moved = (scipy.stats.gamma.ppf(q, a + h) - scipy.stats.gamma.ppf(q, a - h)) / (2 * h)
        np.testing.assert_allclose(float(slope), moved, rtol=1e-4)
    per_key = vmap(grad(lambda a, k: random.gamma(k, a, dtype="float64")))
    np.testing.assert_allclose(per_key(from_numpy(shapes), keys), slopes, rtol=1e-12)
    np.testing.assert_allclose(jit(per_key)(from_numpy(shapes), keys), slopes, rtol=1e-12)


def test_keys_have_no_derivative():
    g = grad(lambda x: mul(x, random.normal(random.fold_in(KEY, 1))))(np.float32(2))
    np.testing.assert_allclose(g, random.normal(random.fold_in(KEY, 1)))
    for prim, args in (
        (random_seed_p, (from_numpy(np.int32(1)),)),
        (random_unwrap_p, (KEY,)),
        (random_fold_in_p, (KEY, from_numpy(np.uint32(1)))),
    ):
        with pytest.raises(errors.GradError, match="no derivative"):
            prim.transpose(None, *args)


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, error, match",
    [
        (lambda: random.normal(0, (3,)), errors.ArgumentError, r"random\.key\(seed\)"),
        (lambda: random.normal(random.key_data(KEY)[:1]), errors.ArgumentError, r"u32\[1\].*"),
        (lambda: random.split(None), errors.ArgumentError, "takes a key, not a NoneType"),
        (lambda: random.key_data(np.zeros(3, np.uint32)), errors.ArgumentError, "takes a key, not a ndarray"),
        (lambda: random.normal(random.split(KEY)), errors.ShapeError, r"one key, not key<fry>\[2\]"),
        (lambda: random.key(1.5), errors.ArgumentError, "one integer"),
        (lambda: random.key(np.arange(3)), errors.ArgumentError, r"one integer, not i32\[3\]"),
        (lambda: random.key(2**64), errors.ValueRangeError, "64 bits"),
        (lambda: random.fold_in(KEY, -1), errors.ValueRangeError, "uint32"),
        (lambda: random.fold_in(KEY, 1.5), errors.ArgumentError, "one integer"),
        (lambda: random.fold_in(KEY, np.arange(3)), errors.ArgumentError, "one integer"),
        (lambda: random.wrap_key_data(np.zeros((2, 3), np.uint32)), errors.ArgumentError, r"u32\[2,3\]"),
        (lambda: random.wrap_key_data(np.zeros(2, np.int32)), errors.ArgumentError, "uint32 words"),
        (lambda: random.normal(KEY, (3, -1)), errors.ValueRangeError, "negative"),
        (lambda: random.normal(KEY, (2.5,)), errors.ArgumentError, "tuple of ints"),
        (lambda: random.normal(KEY, (3,), "int32"), errors.DtypeError, "randint"),
        (lambda: random.bits(KEY, (3,), "int32"), errors.DtypeError, "unsigned"),
        (lambda: random.uniform(KEY, (3,), minval=1j), errors.DtypeError, "real minval"),
        (lambda: random.uniform(KEY, (3,), maxval=np.ones(2)), errors.ShapeError, "does not broadcast"),
        (lambda: random.uniform(KEY, (3,), maxval=np.ones((2, 3))), errors.ShapeError, "does not broadcast"),
        (lambda: random.randint(KEY, (3,), 0j, 5), errors.DtypeError, "real minval"),
        (lambda: random.randint(KEY, (3,), 0, np.complex64(5)), errors.DtypeError, "real maxval"),
        (lambda: random.randint(KEY, (3,), 0, 5, "float32"), errors.DtypeError, "gives integers"),
        (lambda: random.randint(KEY, (3,), np.zeros(4, int), 5), errors.ShapeError, "minval"),
        (lambda: random.bernoulli(KEY, 1), errors.DtypeError, "floating probability"),
        (lambda: random.bernoulli(KEY, np.ones(3, np.float32), (2,)), errors.ShapeError, "does not broadcast"),
        (lambda: random.categorical(KEY, np.arange(3)), errors.DtypeError, "floating logits"),
        (lambda: random.categorical(KEY, LOGITS, shape=(2, 4)), errors.ShapeError, "does not broadcast"),
        (lambda: random.categorical(KEY, LOGITS, axis=3), errors.AxisRangeError, "axis 3"),
        (lambda: random.permutation(KEY, np.float32(3)), errors.ArgumentError, "an axis to permute"),
        (lambda: random.permutation(KEY, -1), errors.ValueRangeError, "-1"),
        (lambda: random.choice(KEY, 3, (4,), replace=False), errors.ValueRangeError, "without replacement"),
        (lambda: random.choice(KEY, 0, (4,)), errors.ValueRangeError, "nothing to draw"),
        (lambda: random.choice(KEY, 3, p=np.ones(4, np.float32)), errors.ShapeError, "one probability for each"),
        (lambda: random.choice(KEY, 2, p=np.array([0, 1])), errors.DtypeError, "floating probabilities"),
        (lambda: random.gumbel(KEY, mode="top"), errors.ValueRangeError, "highest, high, low"),
        (lambda: random.categorical(KEY, LOGITS, shape=(6, 3, 4), replace=False), errors.ValueRangeError, "6 of 5"),
        (lambda: random.gamma(KEY, 1j), errors.DtypeError, "real a"),
        (lambda: random.gamma(KEY, np.ones(3), (2,)), errors.ShapeError, "does not broadcast"),
        (lambda: random.beta(KEY, np.ones(3), np.ones(2)), errors.ShapeError, "do not broadcast together"),
        (lambda: random.dirichlet(KEY, 1.0), errors.ShapeError, "along an axis"),
        (lambda: random.poisson(KEY, 1.0, dtype="float32"), errors.DtypeError, "gives integers"),
        (lambda: random.multinomial(KEY, 3, 0.5), errors.ShapeError, "along an axis"),
        (lambda: random.multivariate_normal(KEY, np.zeros(2), np.eye(3)), errors.ShapeError, r"\[..., n, n\]"),
        (lambda: random.multivariate_normal(KEY, np.zeros(2), np.eye(2), method="lu"), errors.ValueRangeError, "svd"),
        (lambda: random.orthogonal(KEY, -1), errors.ValueRangeError, "-1 rows"),
        (lambda: random.rademacher(KEY, dtype="uint8"), errors.DtypeError, "with a sign"),
        (
            lambda: random.truncated_normal(KEY, np.zeros(2), np.zeros(3)),
            errors.ShapeError,
            "do not broadcast together",
        ),
    ],
)  # fmt: skip
def test_errors(call, error, match):
    with pytest.raises(error, match=match) as raised:
        call()
    assert "test_samplers.py" in (raised.value.where or "")


def test_a_traced_shape_says_so():
    with pytest.raises(errors.ConcretizationError):
        jit(lambda n: random.normal(KEY, (n,)))(3)


def test_finite_extremes():
    assert np.isfinite(np.asarray(random.normal(KEY, (100_000,), "bfloat16"), np.float32)).all()
    assert math.isfinite(float(np.asarray(random.gumbel(KEY, (100_000,))).max()))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_uniform_is_never_below_minval(dtype):
    drawn = random.uniform(KEY, (100,), dtype, minval=1.0, maxval=0.0)  # an empty interval
    assert (np.asarray(drawn) == 1).all()
