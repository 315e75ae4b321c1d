"""Random numbers against JAX: the same integers, and reals to rounding."""

import math

import numpy as np
import pytest

from blufunc import random
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.staging.jit import jit
from tests.transforms.common import arr


def f32(*xs):
    return np.float32(xs[0] if len(xs) == 1 else xs)


COV = np.float32([[2, 0.5], [0.5, 1]])

LOGITS = np.linspace(-1, 2, 60, dtype=np.float32).reshape(3, 4, 5)
LOW, HIGH = np.array([[0], [-9]], np.int32), np.array([5, 1000, 2**31 - 1], np.int32)
EXACT = {
    "bits8": lambda r, k: r.bits(k, (3, 4), dtype="uint8"),
    "bits16": lambda r, k: r.bits(k, (7,), dtype="uint16"),
    "bits32": lambda r, k: r.bits(k, (2, 3, 5)),
    "scalar": lambda r, k: r.bits(k),
    "empty": lambda r, k: r.bits(k, (0, 3)),
    "uniform": lambda r, k: r.uniform(k, (1000,)),
    "uniform f16": lambda r, k: r.uniform(k, (100,), "float16"),
    "uniform bf16": lambda r, k: r.uniform(k, (100,), "bfloat16"),
    "uniform range": lambda r, k: r.uniform(k, (1000,), minval=-2.0, maxval=2.0),
    "uniform int bounds": lambda r, k: r.uniform(k, (10,), minval=1, maxval=3),
    "randint": lambda r, k: r.randint(k, (1000,), 0, 10),
    "randint wide": lambda r, k: r.randint(k, (1000,), -(2**31), 2**31 - 1),
    "randint large span": lambda r, k: r.randint(k, (1000,), -5, 100_000),
    "randint empty": lambda r, k: r.randint(k, (4,), 5, 5),
    "randint arrays": lambda r, k: r.randint(k, (2, 3), LOW, HIGH),
    "randint u8": lambda r, k: r.randint(k, (1000,), 0, 256, "uint8"),
    "randint u8 clipped": lambda r, k: r.randint(k, (100,), -7, 3000, "uint8"),
    "randint i8": lambda r, k: r.randint(k, (1000,), -128, 128, "int8"),
    "randint i16": lambda r, k: r.randint(k, (1000,), -300, 300, "int16"),
    "randint u32": lambda r, k: r.randint(k, (1000,), 3, 1000, "uint32"),
    "randint u32 bounds": lambda r, k: r.randint(k, (100,), np.uint32(3), np.uint32(2**32 - 1), "int32"),
    "bernoulli": lambda r, k: r.bernoulli(k, 0.3, (1000,)),
    "bernoulli array": lambda r, k: r.bernoulli(k, np.linspace(0, 1, 11, dtype=np.float32)),
    "bernoulli broadcast": lambda r, k: r.bernoulli(k, np.float32([0.1, 0.9]), (5, 2)),
    "permutation int": lambda r, k: r.permutation(k, 1000),
    "permutation 1": lambda r, k: r.permutation(k, 1),
    "permutation rows": lambda r, k: r.permutation(k, np.arange(12).reshape(4, 3)),
    "permutation axis": lambda r, k: r.permutation(k, np.arange(60).reshape(4, 5, 3), axis=1),
    "permutation independent": lambda r, k: r.permutation(k, np.arange(60).reshape(4, 15), -1, True),
    "choice": lambda r, k: r.choice(k, 10, (3, 4)),
    "choice array": lambda r, k: r.choice(k, np.arange(10.0, dtype=np.float32) * 2, (7,)),
    "choice axis": lambda r, k: r.choice(k, np.arange(24).reshape(2, 4, 3), (5, 2), axis=1),
    "choice once": lambda r, k: r.choice(k, 10, (2, 3), replace=False),
    "choice array once": lambda r, k: r.choice(k, np.arange(24).reshape(8, 3), (5,), replace=False),
    "choice weighted": lambda r, k: r.choice(k, 4, (50,), p=np.float32([0.1, 0.2, 0.3, 0.4])),
    "choice weighted once": lambda r, k: r.choice(k, 4, (3,), False, np.float32([0.1, 0.2, 0.3, 0.4])),
    "categorical": lambda r, k: r.categorical(k, LOGITS),
    "categorical axis": lambda r, k: r.categorical(k, LOGITS, axis=1),
    "categorical leading": lambda r, k: r.categorical(k, LOGITS, axis=0, shape=(6, 2, 4, 5)),
    "categorical broadcast": lambda r, k: r.categorical(k, LOGITS[:1], shape=(6, 3, 4)),
    "split": lambda r, k: r.key_data(r.split(k, 5)),
    "split shape": lambda r, k: r.key_data(r.split(k, (2, 3))),
    "split ()": lambda r, k: r.key_data(r.split(k, ())),
    "fold_in": lambda r, k: r.key_data(r.fold_in(k, 2**32 - 1)),
    "fold_in array": lambda r, k: r.key_data(r.fold_in(k, np.int32(-7))),
    "bernoulli high": lambda r, k: r.bernoulli(k, f32(0.3), (1000,), mode="high"),
    "categorical once": lambda r, k: r.categorical(k, LOGITS, axis=1, shape=(2, 2, 3, 5), replace=False),
    "categorical high": lambda r, k: r.categorical(k, LOGITS, mode="high"),
    "choice weighted once high": lambda r, k: r.choice(
        k, 4, (3,), False, f32(0.1, 0.2, 0.3, 0.4), mode="high"
    ),
    "geometric": lambda r, k: r.geometric(k, f32(0.1, 0.5, 0.9), (100, 3)),
    "rademacher": lambda r, k: r.rademacher(k, (100,)),
    "rademacher f32": lambda r, k: r.rademacher(k, (100,), "float32"),
    "poisson": lambda r, k: r.poisson(k, f32(0, 0.1, 3, 9.9, 10, 50, 300), (100, 7)),
    "poisson i16": lambda r, k: r.poisson(k, f32(0, 0.1, 3, 9.9, 10, 50, 300), (100, 7), "int16"),
    "poisson odd": lambda r, k: r.poisson(k, f32(-1, math.nan)),
    "binomial": lambda r, k: r.binomial(
        k, f32(0, 1, 10, 30, 100, 1e4, math.inf, -1, math.nan), f32(0.3), (99, 9)
    ),
    "binomial p": lambda r, k: r.binomial(
        k, f32(100), f32(0, 0.01, 0.3, 0.5, 0.8, 1, -1, 2, math.nan), (99, 9)
    ),
    "multinomial": lambda r, k: r.multinomial(k, f32(100), f32(0.2, 0.3, 0.5)),
    "multinomial batch": lambda r, k: r.multinomial(k, f32(100, 200), f32(0.2, 0.3, 0.5), shape=(2, 3)),
    "clone": lambda r, k: r.key_data(r.clone(r.split(k))),
}
CLOSE = {
    "uniform odd range": lambda r, k: r.uniform(k, (1000,), minval=-0.3, maxval=1.7),
    "uniform arrays": lambda r, k: r.uniform(
        k, (4, 3), minval=np.float32([1, 2, 3]), maxval=np.float32([[4], [5], [6], [7]])
    ),
    "normal": lambda r, k: r.normal(k, (1000,)),
    "normal bf16": lambda r, k: r.normal(k, (100,), "bfloat16"),
    "normal f16": lambda r, k: r.normal(k, (100,), "float16"),
    "normal c64": lambda r, k: r.normal(k, (100,), "complex64"),
    "truncated": lambda r, k: r.truncated_normal(k, -2.0, 2.0, (1000,)),
    "truncated arrays": lambda r, k: r.truncated_normal(k, np.float32([-1, 0.5]), np.float32([[0.8], [3.0]])),
    "exponential": lambda r, k: r.exponential(k, (1000,)),
    "gumbel": lambda r, k: r.gumbel(k, (1000,)),
    "gumbel high": lambda r, k: r.gumbel(k, (1000,), mode="high"),
    "gumbel highest": lambda r, k: r.gumbel(k, (1000,), mode="highest"),
    "gumbel f16 high": lambda r, k: r.gumbel(k, (100,), "float16", mode="highest"),
    "laplace": lambda r, k: r.laplace(k, (1000,)),
    "logistic": lambda r, k: r.logistic(k, (1000,)),
    "cauchy": lambda r, k: r.cauchy(k, (1000,)),
    "pareto": lambda r, k: r.pareto(k, f32(0.5, 1, 3), (100, 3)),
    "weibull_min": lambda r, k: r.weibull_min(k, f32(2), f32(3), (100,)),
    "rayleigh": lambda r, k: r.rayleigh(k, f32(2, 1)),
    "triangular": lambda r, k: r.triangular(k, f32(0), f32(1), f32(3), (100,)),
    "lognormal": lambda r, k: r.lognormal(k, f32(0.5), (100,)),
    "maxwell": lambda r, k: r.maxwell(k, (100,)),
    "double_sided_maxwell": lambda r, k: r.double_sided_maxwell(k, f32(1, 2), f32(3, 4), (50,)),
    "wald": lambda r, k: r.wald(k, f32(1, 2, 0.1), (50, 3)),
    "gamma": lambda r, k: r.gamma(k, f32(0.01, 0.3, 1, 2.5, 100), (200, 5)),
    "gamma one": lambda r, k: r.gamma(k, f32(2)),
    "gamma f16": lambda r, k: r.gamma(k, np.float16([0.5, 2]), (20, 2), "float16"),
    "loggamma": lambda r, k: r.loggamma(k, f32(0.001, 0.3, 1, 2.5, 100), (200, 5)),
    "beta": lambda r, k: r.beta(k, f32(0.1, 2), f32(3, 4), (100, 2)),
    "dirichlet": lambda r, k: r.dirichlet(k, f32(0.1, 2, 3), (100,)),
    "chisquare": lambda r, k: r.chisquare(k, f32(0.1, 2, 3), (100, 3)),
    "f": lambda r, k: r.f(k, f32(1.1, 2, 3), f32(3, 3, 4)),
    "t": lambda r, k: r.t(k, f32(1.1, 2, 3), (100, 3)),
    "generalized_normal": lambda r, k: r.generalized_normal(k, 1.5, (100,)),
    "ball": lambda r, k: r.ball(k, 3, 2, (50,)),
    "ball of p": lambda r, k: r.ball(k, 3, 1.5, (50,)),
    "multivariate_normal": lambda r, k: r.multivariate_normal(k, f32(1, 2), COV, (50,)),
    "multivariate_normal eigh": lambda r, k: r.multivariate_normal(k, f32(1, 2), COV, method="eigh"),
    "multivariate_normal svd": lambda r, k: r.multivariate_normal(
        k, f32(1, 2), COV[None], (4,), method="svd"
    ),
    "orthogonal": lambda r, k: r.orthogonal(k, 4, (2,)),
    "orthogonal c64": lambda r, k: r.orthogonal(k, 4, (2,), "complex64"),
    "orthogonal tall": lambda r, k: r.orthogonal(k, 4, (2,), m=2),
    "orthogonal flat": lambda r, k: r.orthogonal(k, 2, m=4),
}


@pytest.fixture
def jax():
    """JAX, compiling quickly rather than well."""
    import jax

    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield jax
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.peer
@pytest.mark.parametrize("name", EXACT)
def test_exactly_as_jax(name, jax):
    for seed in (0, -3, 123456789):
        want = np.asarray(EXACT[name](jax.random, jax.random.key(seed)))
        got = np.asarray(EXACT[name](random, random.key(seed)))
        assert got.dtype == want.dtype and got.shape == want.shape
        np.testing.assert_array_equal(got, want)


@pytest.mark.peer
@pytest.mark.parametrize("name", CLOSE)
def test_close_to_jax(name, jax):
    want = np.asarray(CLOSE[name](jax.random, jax.random.key(7)))
    got = np.asarray(CLOSE[name](random, random.key(7)))
    assert got.dtype == want.dtype and got.shape == want.shape
    wide = np.complex128 if np.iscomplexobj(want) else np.float64
    tolerance = 2e-6 if want.dtype.itemsize >= 4 else 2e-2
    np.testing.assert_allclose(got.astype(wide), want.astype(wide), rtol=tolerance, atol=tolerance / 5)


@pytest.mark.peer
@pytest.mark.parametrize(
    "sample",
    [
        lambda r, k: r.bits(k, (7,), "uint64"),
        lambda r, k: r.uniform(k, (100,), "float64"),
        lambda r, k: r.bernoulli(k, np.float64(0.3) if r is not random else arr(0.3), (100,), "high"),
        lambda r, k: r.binomial(k, 100, np.float64(0.3) if r is not random else arr(0.3), (100,), "float64"),
        lambda r, k: r.poisson(k, 30.0, (100,), "int64"),
        lambda r, k: r.randint(k, (100,), -(2**40), 2**50, "int64"),
        lambda r, k: r.randint(k, (100,), 0, 2**32, "uint32"),
        lambda r, k: r.randint(k, (100,), -(2**31), 2**31, "int32"),
        lambda r, k: r.randint(k, (100,), 2**31 - 2, 2**31, "int32"),
        lambda r, k: r.randint(k, (100,), 5, 2**62, "uint64"),
    ],
)
def test_64_bits_as_jax_with_x64(sample, jax):
    with jax.enable_x64(True):
        want = np.asarray(sample(jax.random, jax.random.key(2**40 + 9)))
    got = np.asarray(sample(random, random.key(2**40 + 9)))
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


@pytest.mark.peer
@pytest.mark.parametrize(
    "sample",
    [
        lambda r, k: r.normal(k, (100,), "float64"),
        lambda r, k: r.normal(k, (100,), "complex128"),
        lambda r, k: r.gumbel(k, (100,), "float64", mode="high"),
        lambda r, k: r.gamma(k, 0.7, (100,), "float64"),
        lambda r, k: r.loggamma(k, 0.7, (100,), "float64"),
        lambda r, k: r.dirichlet(k, np.ones(3), (100,), "float64"),
        lambda r, k: r.t(k, 2.0, (100,), "float64"),
        lambda r, k: r.cauchy(k, (100,), "float64"),
    ],
)
def test_64_bits_close_to_jax(sample, jax):
    with jax.enable_x64(True):
        want = np.asarray(sample(jax.random, jax.random.key(5)))
    got = np.asarray(sample(random, random.key(5)))
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.peer
@pytest.mark.parametrize(
    "sample",
    [
        lambda r, k, a: r.gamma(k, a),
        lambda r, k, a: r.loggamma(k, a),
        lambda r, k, a: r.beta(k, a, 2 * a),
        lambda r, k, a: r.dirichlet(k, a)[0],
        lambda r, k, a: r.t(k, a),
        lambda r, k, a: r.pareto(k, a),
        lambda r, k, a: r.wald(k, a),
        lambda r, k, a: r.weibull_min(k, a, a + 1.0, (4,)),
        lambda r, k, a: r.triangular(k, a - 10, a, 2 * a),
    ],
)
def test_derivatives_as_jax(sample, jax):
    a = f32(0.3, 1, 2.5, 20)
    want = np.asarray(jax.grad(lambda a: sample(jax.random, jax.random.key(5), a).sum())(a))
    loss = lambda a: sample(random, random.key(5), a).sum()
    np.testing.assert_allclose(np.asarray(grad(loss)(a)), want, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(jit(grad(loss))(a)), want, rtol=2e-4, atol=1e-5)
