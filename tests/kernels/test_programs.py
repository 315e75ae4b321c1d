"""Whole programs on every CPU executor: operations, control flow, random programs.

``differential.py`` runs them. ``BLUFUNC_SWEEP=1`` runs many more random programs.
"""

import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

import blufunc.numpy as bnp
from blufunc import lax, random
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from blufunc.kernels import pipeline as steps
from blufunc.kernels.backends.cpu import planning, renderer, toolchain
from blufunc.kernels.backends.cpu import program as host_program
from blufunc.kernels.fusion import iteration_space
from blufunc.transforms.autodiff.grad import grad
from tests.kernels import random_graphs, random_networks
from tests.kernels.differential import LIKE_A_GPU, SMALL, as_body, case, compile_all, differences
from tests.kernels.test_kernel_counts import adamw, draw
from tests.op_table.rows import OPS
from tests.transforms.programs import LAX, PROGRAMS, loss_of

SWEEP = os.environ.get("BLUFUNC_SWEEP") == "1"
compiled = pytest.mark.skipif(toolchain.find() is None, reason="this machine has no C++ compiler")


def chunks(items, size):
    """Lists of at most ``size`` items."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def assert_agrees(cases, exact, kernels=None):
    """Each case gives what NumPy gives, run by the interpreter or by compiled kernels."""
    wrong = []
    for i, c in enumerate(cases):
        got = c.interpreted() if kernels is None else c.run(kernels[i])
        wrong += [f"{c.name}: {d}" for d in differences(got, c.expected(), exact)]
    assert not wrong, "\n".join(wrong)


# -- operations --------------------------------------------------------------------------------------

ROWS = [(op, d) for op in OPS for d in op.dtypes if not op.prim.opaque]


def case_of_row(op, dtype):
    """An operation on its row's arguments, applied twice in one program."""
    args = [from_numpy(np.asarray(x)) for x in op.sample(dtype)]
    return case(op.apply, *args, target=SMALL, name=f"{op.id} of {dtype}")


def fused(c):
    """Whether some kernel is made for it."""
    return bool(c.schedule.kernels)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rows", chunks(ROWS, 120), ids=lambda rows: f"from-{rows[0][0].id}-{rows[0][1]}")
def test_operations_interpreted(rows):
    cases = [c for row in rows if fused(c := case_of_row(*row))]
    assert_agrees(cases, exact=False)


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("rows", chunks(ROWS, 400), ids=lambda rows: f"from-{rows[0][0].id}-{rows[0][1]}")
def test_operations_compiled(rows):
    cases = [c for row in rows if fused(c := case_of_row(*row))]
    assert_agrees(cases, False, compile_all(cases))


# -- control flow ------------------------------------------------------------------------------------


WAYS = [(name, way) for name, p in PROGRAMS.items() for way in ("values", "gradients")[: 1 + p.reverse]]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name, way", WAYS)
def test_control_flow_interpreted(name, way, monkeypatch):
    """Bodies of loops and branches too."""
    monkeypatch.setattr(host_program, "compile_program", as_body)
    program = PROGRAMS[name]
    for i in range(2):
        args = program.args(i)
        if way == "gradients":
            loss, args = loss_of(program, LAX, args)
            fun = lambda *xs, loss=loss: grad(loss)(list(xs))
        else:
            fun = lambda *args: program.run(LAX, *args)
        assert_agrees([case(fun, *args, name=name)], exact=False)


# -- random graphs -----------------------------------------------------------------------------------

KINDS = "float32", "int32"
SETTINGS = {
    "rows in chunks": (SMALL, iteration_space.ONE_ROW),
    "totals in chunks": (SMALL, 16),
    "as compiled": (planning.HOST, iteration_space.ONE_ROW),
    "as for a GPU": (LIKE_A_GPU, 16),
}


@pytest.fixture
def target(request, monkeypatch):
    """The target; a small ``ONE_ROW`` makes full reductions of small arrays."""
    made, one_row = SETTINGS[request.param]
    monkeypatch.setattr(iteration_space, "ONE_ROW", one_row)
    monkeypatch.setattr(steps, "_LEAST_SAVING", 1)  # bytes saved by rematerialization
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", SETTINGS, indirect=True
)  # all targets of some programs one after the other
@pytest.mark.parametrize("first", range(0, 20_000 if SWEEP else 600, 100))
def test_random_graphs_interpreted(first, target):
    """Equal to NumPy, with any donation, and all kernels obey the rules."""
    for seed in range(first, first + 100):
        assert_agrees([random_graphs.from_seed(seed, target, 12 + seed % 3 * 9)], exact=True)


@pytest.mark.slow
@given(hs.data())
@settings(max_examples=500 if SWEEP else 40)
def test_random_graphs_found_by_hypothesis(data):
    """The same with examples that shrink."""
    choose = lambda xs: data.draw(hs.sampled_from(list(xs)))
    args = [from_numpy(x) for x in random_graphs.inputs(np.random.default_rng(0), choose, *KINDS)]
    donate = [i for i in range(len(args)) if choose([True, False])]
    fun = lambda *args: random_graphs.graph(args, choose, choose(range(1, 9)), *KINDS)
    assert_agrees([case(fun, *args, donate=donate, target=SMALL, name="a random graph")], exact=True)


def training_step(seed, room):
    """A random network, some parameters donated, with keeps for a row or a few values."""
    names = list(np.random.default_rng(seed).choice(list(random_networks.LAYERS), 4 + seed % 5))
    network, args = random_networks.network(names), random_networks.arguments(len(names))

    def step(x, key, *weights):
        _, (gradient, gradients) = network(x, key, *weights)
        return [w - 0.1 * g for w, g in zip((x, *weights), (gradient, *gradients), strict=True)]

    donate = [i for i in range(len(args)) if i != 1 and i % 3]
    target = replace(LIKE_A_GPU, keep_bytes=room)
    return case(step, *args, donate=donate, target=target, name=f"{seed}, {', '.join(names)}")


@pytest.mark.parametrize("room", [8, LIKE_A_GPU.keep_bytes])
@pytest.mark.parametrize("first", range(0, 1_000 if SWEEP else 16, 8))
def test_random_training_steps(first, room, monkeypatch):
    """With much rematerialization, and few kernels in groups."""
    monkeypatch.setattr(steps, "_LEAST_SAVING", 1)
    monkeypatch.setattr(steps, "_LARGE", 1 << 10)
    monkeypatch.setattr(iteration_space, "ONE_ROW", 16)
    cases = [training_step(seed, room) for seed in range(first, first + 8)]
    assert_agrees(cases, exact=False)
    regions = [r for c in cases for r in c.schedule.fusion.regions]
    assert any(r.recomputed for r in regions)


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("target", SETTINGS, indirect=True)
@pytest.mark.parametrize("first", range(0, 4_000 if SWEEP else 80, 80))
def test_random_graphs_compiled(first, target):
    cases = [random_graphs.from_seed(seed, target, 14) for seed in range(first, first + 80)]
    assert_agrees(cases, True, compile_all(cases))


@pytest.mark.slow
@compiled
def test_random_graphs_compiled_for_threads(monkeypatch):
    """All loops over points on threads, strip-mined if possible; keeps are per thread."""
    for name, value in {
        "PARALLEL_WORK": 1,
        "_BLOCK": 4,
        "_POINTS_FOR_THREADS": 3,
        "_STACK_BYTES": 64,
    }.items():
        monkeypatch.setattr(renderer, name, value)
    cases = [random_graphs.from_seed(seed, SMALL, 14) for seed in range(7000, 7600 if SWEEP else 7050)]
    assert_agrees(cases, True, compile_all(cases))


@pytest.mark.slow
def test_random_graphs_reach_what_they_are_for(monkeypatch):
    """They alias results with arguments, and rematerialize values."""
    monkeypatch.setattr(steps, "_LEAST_SAVING", 1)
    planned = lambda e: False
    over = repeats = 0
    for seed in range(50):
        c = random_graphs.from_seed(seed, LIKE_A_GPU, 30)
        made = steps.schedule(c.jaxpr, c.donated, LIKE_A_GPU, planned)
        over += sum(p.space == "argument" and p.owner != i for i, p in made.plan.placement.items())
        repeats += len(made.jaxpr.eqns) > len(steps.schedule(c.jaxpr, c.donated, SMALL, planned).jaxpr.eqns)
    assert over >= 20 and repeats >= 3, (over, repeats)


def test_groups_of_kernels():
    """An optimizer's step over many shapes is one in-place launch in any member order."""
    shapes = [(3, 4), (7,), (5, 5), (2, 3, 4), (9, 2), (1, 6)]
    fun = lambda *a: [adamw(*a[4 * i : 4 * i + 4]) for i in range(len(shapes))]
    args = [x for s in shapes for x in (draw(*s), draw(*s) * 2, draw(*s) + 1, draw(*s) ** 2)]
    donate = [i for i in range(len(args)) if i % 4 != 1]
    c = case(fun, *args, donate=donate, target=LIKE_A_GPU, name="AdamW")
    made = steps.schedule(c.jaxpr, c.donated, LIKE_A_GPU, lambda e: False)
    assert [type(s) for s in made.steps] == [steps.GroupStep]
    assert made.plan.output_bytes == made.plan.arena_bytes == 0
    assert_agrees([c], exact=False)


# -- positions ---------------------------------------------------------------------------------------

ONE_COLUMN = lax.GatherDimensionNumbers(
    offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(0,)
)  # of each row, named by one index, the first number
TABLE = draw(6, 6)
HUGE = {
    "uint64": np.array([2**63 + 5, 2**64 - 1, 2**62, 0, 3], np.uint64),
    "int64": np.array([-(2**63), 2**63 - 1, -(2**62) - 1, -1, 2], np.int64),
    "uint32": np.array([2**32 - 1, 2**31, 5, 0], np.uint32),
}


@pytest.mark.parametrize("target", [SMALL, LIKE_A_GPU], ids=["SMALL", "LIKE_A_GPU"])
def test_a_gather_from_other_rows(target):
    """One scalar per row, from the row that this row's argmax points to."""

    def fun(x):
        rows = bnp.argmax(x, 1)
        return x.max(1), lax.gather(x, rows[:, None], ONE_COLUMN, slice_sizes=(1, 1))

    assert_agrees([case(fun, TABLE, target=target)], exact=True)


@pytest.mark.parametrize("dtype", HUGE)
def test_positions_beyond_all_bounds(dtype):
    """They are clamped, or fill: no conversion brings them back inside."""
    i = from_numpy(HUGE[dtype])

    def fun(x, i):
        taken = [bnp.take(x, i, axis=0, mode=mode) for mode in ("clip", "fill")]
        windows = [lax.dynamic_slice(x, (i[n], i[0]), (2, 3)) for n in range(i.size)]
        return *taken, *windows, lax.dynamic_update_slice(x, x[:2, :2] + 1, (i[0], i[1]))

    assert_agrees([case(fun, TABLE, i, target=SMALL)], exact=True)


# -- random bits -------------------------------------------------------------------------------------

KEY, KEYS = random.key(7), random.split(random.key(3), 3)


def _bits(width):
    return lambda key: random.bits(key, (3, 5), dtype=f"uint{width}")


SAMPLERS = {
    **{f"{width} bits": (_bits(width), KEY) for width in (8, 16, 32, 64)},
    "bits of many keys": (lambda keys: random.bits(keys[1], (9,)), KEYS),
    "uniform": (lambda key: random.uniform(key, (70, 33)), KEY),
    "normal": (lambda key: random.normal(key, (7, 33)), KEY),
    "normal in bfloat16": (lambda key: random.normal(key, (40,), dtype="bfloat16"), KEY),
    "bernoulli": (lambda key: random.bernoulli(key, 0.3, (7, 33)), KEY),
    "integers": (lambda key: random.randint(key, (40,), -3, 900), KEY),
    "a key closed over": (lambda x: random.uniform(KEY, (3,)) + random.key_data(x)[0, 0], KEYS),
    "split": (lambda key: (random.split(key, 5), random.split(key)[1]), KEY),
    "fold_in": (lambda key: (random.fold_in(key, 77), random.fold_in(key, 2**32 - 1)), KEY),
    "words": (lambda keys: random.wrap_key_data(random.key_data(keys) * 3), KEYS),
    "reversed": (lambda keys: (keys[::-1], keys[2]), KEYS),
    "permutation": (lambda key: random.permutation(key, 10), KEY),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_random_bits_interpreted(name):
    """Bit for bit, but for what is computed of them in floating point."""
    assert_agrees([case(*SAMPLERS[name], name=name)], exact=False)


@compiled
def test_random_bits_compiled():
    cases = [case(*sampler, name=name) for name, sampler in SAMPLERS.items()]
    assert_agrees(cases, False, compile_all(cases))


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "int8"])
def test_seeds(dtype):
    seeds = from_numpy(np.array([0, 5, 127], dtypes.as_dtype(dtype)))
    fun = lambda seeds: [random.key_data(random.key(seeds[i])) for i in range(3)]
    assert_agrees([case(fun, seeds, name="seeds")], exact=True)
