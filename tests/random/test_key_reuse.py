"""Detection of key reuse: what counts as a use, eagerly and while tracing."""

import gc

import numpy as np
import pytest

from blufunc import errors, lax, random
from blufunc.config import config, from_environment
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.control_flow.scan import scan
from blufunc.transforms.staging.jit import jit


@pytest.fixture(autouse=True)
def _checked(monkeypatch):
    monkeypatch.setattr(config, "debug_key_reuse", True)


def twice(key):
    return random.normal(key) + random.uniform(key)


def test_two_samples_of_one_key():
    key = random.key(0)
    random.normal(key)
    with pytest.raises(errors.KeyReuseError, match=r"random\.uniform got a key") as caught:
        random.uniform(key)
    assert "test_key_reuse.py" in caught.value.where and "random.normal" in caught.value.why
    assert caught.value.why.count("test_key_reuse.py") == 1 and "split" in caught.value.fix


@pytest.mark.parametrize("transform", [jit, vmap, lambda f: grad(lambda k, x: f(k) * x, 1)])
def test_traced_code_is_checked_as_it_is_traced(transform):
    f = transform(twice)
    args = (random.split(random.key(0)),) if transform is vmap else (random.key(0), 1.0)
    with pytest.raises(errors.KeyReuseError):
        f(*args[: 1 if transform in (jit, vmap) else 2])


def test_splitting_uses_a_key_and_gives_new_ones():
    key = random.key(0)
    a, b = random.split(key)
    random.normal(a)
    random.normal(b)
    with pytest.raises(errors.KeyReuseError, match=r"random\.split"):
        random.split(key)


def test_folding_and_reading_use_nothing():
    key = random.key(0)
    for i in range(3):
        random.normal(random.fold_in(key, i))
    random.key_data(key), random.key_impl(key)
    random.normal(key)


def test_a_clone_is_another_key():
    key = random.key(0)
    np.testing.assert_array_equal(random.normal(random.clone(key)), random.normal(key))
    assert jit(lambda k: random.normal(random.clone(k)) - random.normal(k))(random.key(1)) == 0


def test_a_key_is_told_by_its_identity():
    for _ in range(3):
        random.normal(random.key(0))
    gc.collect()
    keys = random.split(random.key(1), 2)
    vmap(random.normal)(keys)
    with pytest.raises(errors.KeyReuseError):
        vmap(random.uniform)(keys)


@pytest.mark.parametrize("name", sorted(set(random.__all__) & {
    "ball", "bernoulli", "beta", "binomial", "bits", "categorical", "cauchy", "chisquare", "choice", "dirichlet",
    "double_sided_maxwell", "exponential", "f", "gamma", "generalized_normal", "geometric", "gumbel", "laplace",
    "loggamma", "logistic", "lognormal", "maxwell", "multinomial", "multivariate_normal", "normal", "orthogonal",
    "pareto", "permutation", "poisson", "rademacher", "randint", "rayleigh", "split", "t", "triangular",
    "truncated_normal", "uniform", "wald", "weibull_min",
}))  # fmt: skip
def test_every_sampler_uses_its_key_once(name):
    one, vector = np.float32(0.5), np.full(2, 0.5, np.float32)
    args = {
        "ball": (3,), "beta": (one, one), "binomial": (9, one), "categorical": (vector,), "chisquare": (one,),
        "choice": (5, (2,), False, None), "dirichlet": (vector,), "double_sided_maxwell": (one, one), "f": (one, one),
        "gamma": (one,), "generalized_normal": (one,), "geometric": (one,), "loggamma": (one,),
        "multinomial": (9, vector), "multivariate_normal": (vector, np.eye(2, dtype=np.float32)), "orthogonal": (2,),
        "pareto": (one,), "permutation": (5,), "poisson": (one,), "randint": ((), 0, 5), "rayleigh": (one,),
        "t": (one,), "triangular": (one, one + 1, one + 2), "truncated_normal": (-one, one), "wald": (one,),
        "weibull_min": (one, one),
    }.get(name, ())  # fmt: skip
    key, sample = random.key(0), getattr(random, name)
    sample(key, *args)
    with pytest.raises(errors.KeyReuseError):
        sample(key, *args)


def test_loops_and_branches_trace_their_bodies_apart():
    def step(key, x):
        key, subkey = random.split(key)
        return key, random.normal(subkey)

    scan(step, random.key(0), None, 3)
    key = random.key(1)
    lax.cond(True, lambda k: random.normal(k), lambda k: random.uniform(k), key)
    closed_over = random.key(2)
    lax.cond(True, lambda: random.normal(closed_over), lambda: random.uniform(closed_over))


def test_functions_may_be_traced_again():
    key = random.key(0)
    f = jit(lambda x: x + random.normal(key))
    f(np.ones(2, np.float32))
    f(np.ones(3, np.float32))


def test_off_by_default(monkeypatch):
    assert not from_environment({}).debug_key_reuse
    assert from_environment({"BLUFUNC_DEBUG_KEY_REUSE": "1"}).debug_key_reuse
    monkeypatch.setattr(config, "debug_key_reuse", False)
    twice(random.key(0))
