"""The mixture of experts, against a NumPy loop; sharded, against one device."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import P, errors, nn
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.recipes import expert_capacity, mixture_of_experts
from tests.parallel.exchanged import exchanged, same_with_gradients, weighted

E, C, HIDDEN, B, T = 8, 6, 10, 8, 5
RNG = np.random.default_rng(0)
PARAMS = {
    "up": RNG.standard_normal((E, C, HIDDEN)).astype(np.float32),
    "down": RNG.standard_normal((E, HIDDEN, C)).astype(np.float32),
}
ROUTER, X = (RNG.standard_normal(s).astype(np.float32) for s in ((C, E), (B, T, C)))
# top_k, capacity factor: with enough places for all, with too few, with hardly any
ROUTES = [(2, 8.0), (2, 1.0), (1, 1.25), (1, 0.2), (3, 0.5)]


def expert(params, x):
    return nn.gelu(x @ params["up"]) @ params["down"]


def divided(n, **options):
    return bf.shard_map(
        lambda *a: mixture_of_experts(expert, *a, axis="e", **options),
        mesh=AbstractMesh((n,), ("e",)), in_specs=(P("e"), P(), P("e")), out_specs=(P("e"), P()),
    )  # fmt: skip


def by_hand(params, router, x, top_k, capacity_factor, groups):
    """One token after another."""
    tokens = x.reshape(groups, -1, C).astype(np.float64)
    out, choices, mean = np.zeros_like(tokens), np.zeros(E), np.zeros(E)
    capacity = expert_capacity(tokens.shape[1], E, top_k, capacity_factor)
    for g, group in enumerate(tokens):
        scores = np.exp(group @ router)
        probabilities = scores / scores.sum(-1, keepdims=True)
        best = np.argsort(-probabilities, axis=-1)[:, :top_k]
        taken = np.zeros(E, int)
        for k in range(top_k):
            for t, token in enumerate(group):
                e = best[t, k]
                choices[e] += 1
                taken[e] += 1
                if taken[e] <= capacity:
                    p = probabilities[t]
                    weight = p[e] if top_k == 1 else p[e] / p[best[t]].sum()
                    one = {name: a[e] for name, a in params.items()}
                    out[g, t] += weight * np.asarray(expert(one, token[None].astype(np.float32)))[0]
        mean += probabilities.sum(0)
    return out.reshape(x.shape), E * (choices / choices.sum() * mean / mean.sum()).sum()


@pytest.mark.parametrize("top_k, factor", ROUTES)
@pytest.mark.parametrize("groups", [1, 4])
def test_one_device_against_a_loop(top_k, factor, groups):
    options = {"top_k": top_k, "capacity_factor": factor, "groups": groups}
    out, balance = mixture_of_experts(expert, PARAMS, ROUTER, bnp.asarray(X), **options)
    want, want_balance = by_hand(PARAMS, ROUTER, X, **options)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(balance, want_balance, rtol=1e-5)


@pytest.mark.parametrize("top_k, factor", ROUTES)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_divided_against_one_device(top_k, factor, n):
    options = {"top_k": top_k, "capacity_factor": factor}
    same_with_gradients(
        divided(n, **options),
        lambda *a: mixture_of_experts(expert, *a, **options, groups=n),
        (PARAMS, ROUTER, X),
    )


def test_what_is_dropped_adds_nothing():
    """If all tokens choose one expert, only the first of each group have a result."""
    tokens = np.tile(RNG.standard_normal(C).astype(np.float32), (16, 1))
    out, _ = mixture_of_experts(
        expert, PARAMS, bnp.asarray(ROUTER), bnp.asarray(tokens), top_k=1, capacity_factor=2.0, groups=2
    )
    has_result = np.abs(np.asarray(out)).sum(-1) > 0
    np.testing.assert_array_equal(has_result, ([True] * 2 + [False] * 6) * 2)


def test_more_axes_of_tokens_than_that_of_the_experts():
    """The balance counts the tokens of all ranks, with experts sharded or not."""
    mesh, tokens = AbstractMesh((2, 2), ("e", "data")), P(("e", "data"))
    for axis, others in (("e", "data"), (None, ("e", "data"))):
        mapped = bf.shard_map(
            lambda *a, axis=axis, others=others: mixture_of_experts(expert, *a, axis=axis, data_axes=others),
            mesh=mesh, in_specs=(P(axis), P(), tokens), out_specs=(tokens, P()),
        )  # fmt: skip
        whole = lambda *a: mixture_of_experts(expert, *a, groups=4)
        same_with_gradients(mapped, whole, (PARAMS, ROUTER, X))


def test_experts_have_no_more_places_than_there_are_tokens():
    assert expert_capacity(40, 8, 2, 8.0) == expert_capacity(40, 8, 2, np.inf) == 40
    assert expert_capacity(40, 8, 2, 1.25) == 13
    one_for_all = bnp.asarray(np.tile(RNG.standard_normal((C, 1)), (1, E)) * (np.arange(E) == 3), "float32")
    out, _ = mixture_of_experts(expert, PARAMS, one_for_all, np.abs(X), top_k=1, capacity_factor=np.inf)
    assert (np.abs(np.asarray(out)).sum(-1) > 0).all()  # none is dropped, wherever it goes


@pytest.mark.parametrize("n", [1, 4])
def test_among_equals_the_first_experts_and_the_earlier_tokens(n):
    """A constant router: all tokens choose the first two experts.

    Each takes the first fifth of the tokens of a group.
    """
    options = {"capacity_factor": 0.8}
    same_with_gradients(
        divided(n, **options),
        lambda *a: mixture_of_experts(expert, *a, **options, groups=n),
        (PARAMS, np.zeros_like(ROUTER), X),
    )
    out, _ = divided(n, **options)(PARAMS, np.zeros_like(ROUTER), X)
    group = B * T // n
    has_result = (np.abs(np.asarray(out)).sum(-1) > 0).reshape(n, group)
    np.testing.assert_array_equal(has_result, np.tile(np.arange(group) < group // 5, (n, 1)))


def test_balanced_routes_cost_one():
    _, balance = mixture_of_experts(expert, PARAMS, bnp.zeros((C, E)), bnp.asarray(X))
    np.testing.assert_allclose(balance, 1.0, rtol=1e-6)


def test_the_balancing_loss_spreads_the_tokens():
    def balance(router):
        return mixture_of_experts(expert, PARAMS, router, bnp.asarray(X))[1]

    router, step = bnp.asarray(ROUTER), bf.jit(bf.value_and_grad(balance))
    first, _ = step(router)
    for _ in range(20):
        router = router - 0.5 * step(router)[1]
    assert step(router)[0] < first - 0.1


@pytest.mark.parametrize("n", [2, 4])
def test_collectives(n):
    """Two all-to-alls of all slots in each direction, and sums of router statistics."""
    capacity = expert_capacity(B * T // n, E, 2, 1.25)
    places, statistics, router = E * capacity * C * 4, 2 * E * 4, ROUTER.nbytes
    f = divided(n)
    assert exchanged(f, PARAMS, ROUTER, X) == {
        "all_to_all": (2, 2 * places),
        "psum_invariant": (1, statistics),
    }
    assert exchanged(bf.value_and_grad(weighted(f), (0, 1, 2)), PARAMS, ROUTER, X) == {
        "all_to_all": (4, 4 * places),
        "psum_invariant": (2, statistics + router),
    }


def test_errors():
    x = bnp.asarray(X)
    with pytest.raises(errors.ShapeError, match=r"takes a router \[C, E\]"):
        mixture_of_experts(expert, PARAMS, ROUTER.T, X)
    for factor in (0.0, -1.0, np.nan):
        with pytest.raises(errors.ValueRangeError, match=f"a positive number, not {factor}"):
            mixture_of_experts(expert, PARAMS, ROUTER, X, capacity_factor=factor)
    for wrong, found in ((lambda p, x: x @ p["up"], r"\[13, 10\]"), (lambda p, x: x.T, r"\[6, 13\]"),
                         (lambda p, x: (x, x), r"\[13, 6\], \[13, 6\]")):  # fmt: skip
        with pytest.raises(errors.ShapeError, match=rf"takes tokens \[13, 6\] and returns {found}\.") as e:
            mixture_of_experts(wrong, PARAMS, ROUTER, X)
        assert "test_expert_parallel.py" in e.value.where
    with pytest.raises(errors.ShapeError, match="8 experts, not 4"):
        mixture_of_experts(expert, {k: v[:4] for k, v in PARAMS.items()}, bnp.asarray(ROUTER), x)
    with pytest.raises(errors.ShapeError, match="8 experts cannot be sharded over 'e', of 3 ranks"):
        bf.shard_map(
            lambda *a: mixture_of_experts(expert, *a, axis="e"),
            mesh=AbstractMesh((3,), ("e",)), in_specs=P(), out_specs=P(),
        )(PARAMS, ROUTER, X)  # fmt: skip
    with pytest.raises(errors.ValueRangeError, match="between 1 and the 8 experts, not 9"):
        mixture_of_experts(expert, PARAMS, bnp.asarray(ROUTER), x, top_k=9)
    with pytest.raises(errors.ValueRangeError, match="40 tokens do not split into 3 groups"):
        mixture_of_experts(expert, PARAMS, bnp.asarray(ROUTER), x, groups=3)
    with pytest.raises(errors.ValueRangeError, match="the tokens of each rank are one group"):
        divided(2, groups=2)(PARAMS, ROUTER, X)
