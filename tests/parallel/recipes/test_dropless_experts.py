"""Experts without a capacity, against those with room for all tokens."""

import math

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import P, errors, lax, nn
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.recipes import balanced_bias, dropless_experts, mixture_of_experts
from tests.parallel.exchanged import exchanged, same, same_with_gradients
from tests.parallel.recipes.test_expert_parallel import PARAMS, ROUTER, B, C, E, T, X
from tests.parallel.recipes.test_expert_parallel import expert as one_expert


def experts(params, rows, sizes):
    return lax.ragged_dot(nn.gelu(lax.ragged_dot(rows, params["up"], sizes)), params["down"], sizes)


def alone(top_k, **options):
    def f(params, router, x):
        mixture = dropless_experts(experts, params, router, x, top_k=top_k, **options)
        return mixture.out, mixture.balance

    return f


def divided(n, top_k, **options):
    return bf.shard_map(
        alone(top_k, axis="e", **options),
        mesh=AbstractMesh((n,), ("e",)), in_specs=(P("e"), P(), P("e")), out_specs=(P("e"), P()),
    )  # fmt: skip


@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
def test_it_is_the_mixture_with_room_for_all(top_k):
    want = lambda *a: mixture_of_experts(one_expert, *a, top_k=top_k, capacity_factor=math.inf)
    same_with_gradients(alone(top_k), want, (PARAMS, ROUTER, X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n, top_k", [(2, 1), (2, 2), (4, 3), (8, 2)])
def test_divided_against_one_device(n, top_k):
    """Some ranks have more choices than experts of their own, others few."""
    same_with_gradients(divided(n, top_k), alone(top_k), (PARAMS, ROUTER, X), rtol=1e-4, atol=1e-5)


def test_rows_of_no_expert_are_ignored():
    """They are zeros, of which this expert makes NaN."""

    def normed(params, rows, sizes):
        y = lax.ragged_dot(rows, params["up"], sizes)[:, :C]
        return y / bnp.sqrt(bnp.sum(y * y, -1, keepdims=True))

    def f(**options):
        return lambda *a: dropless_experts(normed, *a, top_k=2, **options)[:2]

    specs = {"in_specs": (P("e"), P(), P("e")), "out_specs": (P("e"), P())}
    mapped = bf.shard_map(f(axis="e"), mesh=AbstractMesh((2,), ("e",)), **specs)
    same_with_gradients(mapped, f(), ({"up": PARAMS["up"]}, ROUTER, X), rtol=1e-4, atol=1e-5)


def test_all_tokens_may_choose_the_experts_of_one_rank():
    router = np.zeros_like(ROUTER)
    x = np.abs(X)
    router[:, 3] = 5.0  # of positive tokens
    got, want = divided(4, 1)(PARAMS, router, x), alone(1)(PARAMS, router, x)
    same(got, want, rtol=1e-4)
    assert np.asarray(dropless_experts(experts, PARAMS, router, x, top_k=1).counts).tolist() == [
        B * T * (e == 3) for e in range(E)
    ]


def test_with_data_parallelism():
    specs = P("e"), P(), P(("data", "e"))
    mapped = bf.shard_map(
        alone(2, axis="e", data_axes="data"),
        mesh=AbstractMesh((2, 2), ("data", "e")), in_specs=specs, out_specs=(P(("data", "e")), P()),
    )  # fmt: skip
    same_with_gradients(mapped, alone(2), (PARAMS, ROUTER, X), rtol=1e-4, atol=1e-5)


def test_a_token_travels_once_to_each_rank():
    n, k, tokens = 4, 3, B * T
    got = exchanged(divided(n, k), PARAMS, ROUTER, X)
    gathered = tokens // n * 4 * (C + 2 * k)  # tokens, choices and weights
    assert got["all_gather"] == (3, gathered)
    assert got["psum_scatter"] == (1, tokens * 4 * C)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_a_bias_selects_and_does_not_weigh(scores):
    bias = np.where(np.arange(E) == 5, 10.0, 0.0).astype(np.float32)
    mixture = dropless_experts(experts, PARAMS, ROUTER, X, top_k=1, scores=scores, bias=bias)
    assert mixture.counts[5] == B * T
    score = {"softmax": nn.softmax, "sigmoid": nn.sigmoid}[scores](X.reshape(-1, C) @ ROUTER)[:, 5]
    fifth = {name: p[5] for name, p in PARAMS.items()}
    want = one_expert(fifth, X.reshape(-1, C)) * score[:, None]
    np.testing.assert_allclose(mixture.out.reshape(-1, C), want, rtol=1e-4, atol=1e-5)
    of_bias = bf.grad(lambda b: dropless_experts(experts, PARAMS, ROUTER, X, bias=b).out.sum())(bias)
    assert not np.asarray(of_bias).any()


def test_the_bias_balances_the_load_without_a_loss():
    """A router that prefers one expert: after some steps no expert has twice the mean."""
    rng = np.random.default_rng(3)
    x, router = rng.standard_normal((256, C)).astype(np.float32), ROUTER.copy()
    x[:, 0] = 1.0
    router[0, 2] += 4.0

    @bf.jit
    def load(bias):
        return dropless_experts(
            lambda p, rows, sizes: rows, PARAMS, router, x, scores="sigmoid", bias=bias
        ).counts

    bias = bnp.zeros(E)
    first = np.asarray(load(bias))
    for _ in range(150):
        bias = balanced_bias(bias, load(bias), rate=0.01)
    last, mean = np.asarray(load(bias)), 2 * 256 / E
    assert first.max() > 3 * mean and last.max() < 1.5 * mean


def test_half_precision():
    """The same choices as of the rounded operands in float32; rounded results."""
    low = [bf.tree.map(lambda a: bnp.asarray(a, bf.dtypes.bfloat16), a) for a in (PARAMS, X)]
    params, x = (bf.tree.map(lambda a: a.astype("float32"), a) for a in low)
    got, want = (dropless_experts(experts, p, ROUTER, x) for p, x in (low, (params, x)))
    assert got.out.dtype == bf.dtypes.bfloat16 and got.balance.dtype == np.float32
    same(got.counts, want.counts)
    np.testing.assert_allclose(got.out.astype("float32"), want.out, rtol=0.05, atol=0.2)


def test_errors():
    with pytest.raises(errors.ArgumentError, match="scores are one of softmax, sigmoid, not 'max'"):
        dropless_experts(experts, PARAMS, ROUTER, X, scores="max")
    with pytest.raises(
        errors.ValueRangeError, match="dropless_experts: top_k is between 1 and the 8 experts"
    ):
        dropless_experts(experts, PARAMS, ROUTER, X, top_k=9)
    with pytest.raises(errors.ShapeError, match=r"takes rows \[80, 6\] and returns f32\[80,3\]"):
        dropless_experts(lambda p, rows, sizes: rows[:, :3], PARAMS, ROUTER, X)
    with pytest.raises(errors.ShapeError, match="one number for each of 8 experts"):
        dropless_experts(experts, PARAMS, ROUTER, X, bias=np.zeros(3, np.float32))
    with pytest.raises(
        errors.ShapeError, match="leading dimension of all parameters is the 8 experts, not 4"
    ):
        dropless_experts(experts, bf.tree.map(lambda a: a[:4], PARAMS), ROUTER, X)
