"""Plans within a memory budget: equal results, peaks within it, and prices."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.programs.simplify import simplify
from blufunc.kernels import pipeline as steps
from blufunc.kernels.backends.cpu.planning import HOST
from blufunc.kernels.backends.cuda import program as cuda_program
from blufunc.kernels.cost import cost_of, plan_seconds
from blufunc.kernels.memory.verify import check_plan
from blufunc.kernels.recompute import budget
from blufunc.kernels.recompute.budget_cuts import Cuts
from blufunc.kernels.schedule import OpaqueStep
from examples.gpt import model
from tests.kernels import random_networks
from tests.kernels.differential import LIKE_A_GPU, SMALL, case

TARGETS = {"as compiled": HOST, "rows in chunks": SMALL, "as for a GPU": LIKE_A_GPU}


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """Every plan is replayed on labelled bytes."""
    made = steps.plan

    def plan(plan_steps, values, **options):
        found = made(plan_steps, values, **options)
        check_plan(found, plan_steps, values)
        return found

    monkeypatch.setattr(steps, "plan", plan)


def budget_of(made, share):
    """The planned peak with a share of the arena."""
    return made.plan.peak_bytes - int(made.plan.arena_bytes * (1 - share))


def within(c, share):
    """The same case with a share of the arena; None where there is no plan."""
    tight = dataclasses.replace(c, budget=budget_of(c.schedule, share), _schedule=[])
    try:
        assert tight.schedule.plan.peak_bytes <= tight.budget
    except errors.MemoryBudgetError:
        return None
    return tight


def assert_same(c, tight):
    for found, expected in zip(tight.interpreted(), c.interpreted(), strict=True):
        np.testing.assert_array_equal(found, expected)


def layers(seed, n):
    return random.Random(seed).choices(list(random_networks.LAYERS), k=n)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("seed", range(4))
def test_random_training_steps(seed, target):
    """Results are bitwise equal with 90% and 70% of the arena."""
    names = layers(seed, 9)
    c = case(random_networks.network(names), *random_networks.arguments(9), target=TARGETS[target])
    found = [tight for share in (0.9, 0.7) if (tight := within(c, share))]
    assert found, f"no plan at all for {names}"
    for tight in found:
        assert tight.schedule.bought.dropped
        assert_same(c, tight)


@pytest.mark.slow
@given(hs.lists(hs.sampled_from(list(random_networks.LAYERS)), min_size=3, max_size=7), hs.floats(0.4, 0.95))
@settings(max_examples=12, deadline=None)
def test_random_training_steps_found_by_hypothesis(names, share):
    c = case(random_networks.network(names), *random_networks.arguments(len(names)), target=SMALL)
    tight = within(c, share)
    if tight is not None:
        for found, expected in zip(tight.interpreted(), c.interpreted(), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


# -- what is chosen -------------------------------------------------------------------------------------

N, WIDTH = 256, 128


def chain():
    """The gradient of a chain of matmuls with tanh."""

    def loss(x, weights):
        for w in weights:
            x = bnp.tanh(x @ w)
        return x.sum()

    weights = [from_numpy(np.full((WIDTH, WIDTH), 1 / WIDTH, np.float32)) for _ in range(8)]
    step = lambda x, *weights: bf.grad(loss, argnums=(0, 1))(x, weights)
    return case(step, from_numpy(np.ones((N, WIDTH), np.float32)), *weights, target=LIKE_A_GPU, name="chain")


def test_a_budget_at_the_default_peak_changes_nothing():
    c = chain()
    same = dataclasses.replace(c, budget=c.schedule.plan.peak_bytes, _schedule=[])
    assert same.schedule.bought is None
    describe = lambda made: [
        s.eqn.prim.name if isinstance(s, OpaqueStep) else str(s.kernel) for s in made.steps
    ]
    assert describe(same.schedule) == describe(c.schedule)
    assert same.schedule.plan.placement == c.schedule.plan.placement


def test_a_budget_that_is_missed_by_little():
    c = chain()
    made = dataclasses.replace(c, budget=c.schedule.plan.peak_bytes - 1, _schedule=[]).schedule
    assert made.plan.peak_bytes < c.schedule.plan.peak_bytes and made.bought.dropped


def test_a_smaller_budget_serves_where_none_is_found_for_the_larger_one(monkeypatch):
    """Another budget leads to other choices."""
    c = chain()
    peak = int(0.9 * c.schedule.plan.peak_bytes)
    descend, asked = budget.Search.descend, []

    def first_fails(search, aim):
        asked.append(aim)
        return search.start if len(asked) == 1 else descend(search, aim)

    monkeypatch.setattr(budget.Search, "descend", first_fails)
    made = dataclasses.replace(c, budget=peak, _schedule=[]).schedule
    assert asked == [peak, int(0.95 * peak)]
    assert made.plan.peak_bytes <= asked[1] and made.bought.dropped


def test_whole_products_are_computed_again_and_less_costs_more():
    c = chain()
    prices = []
    for share in (0.9, 0.8, 0.7):
        bought = within(c, share).schedule.bought
        prices.append(bought.flops)
        assert bought.flops == cost_of(bought.made).flops - cost_of(c.schedule).flops
    assert 0 < prices[0] <= prices[1] <= prices[2]
    products = 2 * N * WIDTH * WIDTH
    assert prices[2] >= products  # a layer saves only its tanh, so its matmul is repeated
    assert prices[2] <= 8 * products * 1.5  # none more than once


def test_cheap_values_go_first():
    """A wide value of a concatenation is recomputed, not a matmul of the same size."""

    def loss(x, w, v):
        wide = bnp.concatenate([x, x], 1) * 2.0
        y = wide @ w
        for _ in range(3):
            y = bnp.sin(y @ v)
        return (y.sum(1, keepdims=True) * y).sum()

    args = [from_numpy(np.ones(s, np.float32)) for s in [(N, WIDTH), (2 * WIDTH, WIDTH), (WIDTH, WIDTH)]]
    c = case(bf.grad(loss, argnums=(0, 1, 2)), *args, target=LIKE_A_GPU)
    bought = within(c, 0.95).schedule.bought
    assert not any("dot_general" in d.label for d in bought.dropped)
    assert bought.flops < 2 * N * WIDTH * WIDTH


@pytest.mark.parametrize("what", ["barrier", "loop", "donated"])
def test_what_lies_between_is_respected(what):
    """Results stay equal with barriers, loops and donated arguments."""

    def loss(x, weights):
        for w in weights:
            x = bnp.tanh(x @ w)
            if what == "barrier":
                x, w = lax.optimization_barrier((x, w))
            if what == "loop":
                x, _ = lax.scan(lambda c, w: (bnp.tanh(c @ w), None), x, bnp.stack([w, w]))
        return x.sum()

    def step(x, *weights):
        gx, gw = bf.grad(loss, argnums=(0, 1))(x, weights)
        return x - gx, [w - g for w, g in zip(weights, gw, strict=True)]

    args = [from_numpy(np.ones((N, 32), np.float32) / 4)]
    args += [from_numpy(np.eye(32, dtype=np.float32) / (1 + i)) for i in range(6)]
    donate = range(len(args)) if what == "donated" else ()
    c = case(step, *args, donate=donate, target=LIKE_A_GPU)
    tight = within(c, 0.9)
    assert tight is not None
    assert_same(c, tight)


def test_the_error_names_a_budget_that_does_and_what_is_alive():
    c = chain()
    with pytest.raises(errors.MemoryBudgetError) as caught:
        _ = dataclasses.replace(c, budget=1 << 16, _schedule=[]).schedule
    error = caught.value
    assert "memory_budget=64.0 KiB (65536 bytes)" in error.what
    assert (
        "without a budget it is" in error.why and "test_budget.py" in error.why and "dot_general" in error.why
    )
    enough = int(error.fix.split("=")[1].split(",")[0])
    assert 1 << 16 < enough < c.schedule.plan.peak_bytes
    made = dataclasses.replace(c, budget=enough, _schedule=[]).schedule
    assert made.plan.peak_bytes <= enough


def test_the_report_says_what_and_at_which_price():
    bought = within(chain(), 0.8).schedule.bought
    text = str(bought)
    assert f"instead of {bought.default_peak_bytes / 2**20:.1f} MiB" in text
    assert "test_budget.py" in text and "f32[256,128]" in text and "estimated for" in text
    assert bought.peak_bytes <= bought.budget < bought.default_peak_bytes
    assert bought.seconds == pytest.approx(
        plan_seconds(bought.made, bought.machine) - plan_seconds(bought.default, bought.machine)
    )
    sizes = [d.nbytes for d in bought.dropped]
    assert sizes == sorted(sizes, reverse=True)


def test_choices_by_rate():
    """Segments cover everything before the peak; the rate decides what is repeated."""
    c = chain()
    planning = steps.Planning(c.jaxpr, c.donated, c.target, lambda e: e.prim is dot_general_p)
    made = planning.schedule(planning.jaxpr, estimate=True)
    cuts = Cuts(made, budget_of(made, 0.6), c.target.machine)
    for segments in cuts.levels:
        assert [i for r in segments for i in r] == list(range(len(cuts.nodes)))
        choices = [cuts.choose(segments, rate) for rate in (1e-15, 1e-11, 1e-9, 1e-3)]
        assert not choices[0].recomputed and choices[0].freed == 0
        assert choices[-1].recomputed and choices[-1].freed > 0
        assert [x.seconds for x in choices] == sorted(x.seconds for x in choices)
        assert not any(x.kept & x.recomputed.keys() for x in choices)
        assert all(cuts.results.isdisjoint(x.recomputed) for x in choices)
    assert len(cuts.levels[0]) == 1 and len(cuts.levels[-1]) > 4


# -- what must not be repeated --------------------------------------------------------------------------


@pytest.mark.slow
def test_effects_happen_once_and_keys_give_the_same_numbers():
    seen = []

    def loss(x, weights, key):
        for i, w in enumerate(weights):
            x = bnp.tanh(x @ w)
            bf.debug.callback(seen.append, x.sum())
            x = bnp.where(bf.random.bernoulli(bf.random.fold_in(key, i), 0.5, x.shape), x, 0)
        return x.sum()

    step = lambda x, weights, key: bf.grad(loss, argnums=(0, 1))(x, weights, key)
    args = (
        from_numpy(np.ones((N, 64), np.float32)),
        [from_numpy(np.eye(64, dtype=np.float32))] * 6,
        bf.random.key(3),
    )
    plain = bf.jit(step)
    expected = bf.tree.leaves(plain(*args))
    count = len(seen)
    peak = plain.lower(*args).memory.peak_bytes
    tight = bf.jit(step, memory_budget=int(peak * 0.85))
    assert tight.lower(*args).memory.bought.dropped
    found = bf.tree.leaves(tight(*args))
    assert count == 6 and len(seen) == 12
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


# -- a training step of a GPU, planned without one ------------------------------------------------------


def transformer(batch):
    """A training step in bfloat16 as a function of a budget: its schedule for a GPU."""
    config = model.Config(4, 4, 256, 256, 512)
    loss = bf.autocast(lambda params, tokens: model.loss(params, tokens, config))
    params = bf.eval_shape(lambda key: model.init(key, config), bf.random.key(0))
    traced = bf.jit(bf.grad(loss)).trace(params, bf.ShapeDtypeStruct((batch, 257), np.int32))
    jaxpr = simplify(traced.jaxpr)
    return lambda budget: cuda_program.planned(jaxpr, (False,) * len(jaxpr.invars), "sm_90", budget)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [32, 64, 128])
def test_a_transformer_planned_for_a_gpu(batch):
    """Half of the memory costs less than a forward pass; less memory costs more.

    For batches of up to 64, kernels compute GELU, and memory is not scarce. The default program saves its derivative.
    To write and read that takes longer than to recompute it, which a budget finds.
    """
    plan = transformer(batch)
    default = plan(None)
    gain = 0.0 if batch > 64 else 0.1  # of the default program's time; 0.08 of it is saved
    before, peak = -gain * cost_of(default).seconds(cuda_program.TARGET.machine), default.plan.peak_bytes
    for share in (0.8, 0.6, 0.45):
        made = plan(int(peak * share))
        assert made.plan.peak_bytes <= peak * share
        assert made.bought.seconds >= before
        before = made.bought.seconds
    assert 0 < made.bought.flops < 0.34 * cost_of(default).flops
    assert sum(d.nbytes for d in made.bought.dropped) >= 0.5 * peak
