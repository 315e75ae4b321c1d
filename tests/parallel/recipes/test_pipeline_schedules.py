"""Schedules of pipelines: their tables, and each of them against one device."""

import itertools

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import P, errors, lax, nn, tree
from blufunc.config import config
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.recipes import (
    deinterleave_layers,
    interleave_layers,
    mixture_of_experts,
    pipeline_schedule,
    pipeline_value_and_grad,
    plan_pipeline,
    vocabulary_parallel_cross_entropy,
    vocabulary_parallel_embedding,
)
from blufunc.parallel.recipes.pipelines.schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    NOTHING,
    WEIGHT,
    PipelineCosts,
)
from tests.parallel.exchanged import equations, exchanged, meetings, same

LAYERS, C, V, B, T = 8, 6, 12, 2, 3
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def as_numpy_calls(monkeypatch):
    """Run loops in loops without a C++ compiler, which would take most of the time."""
    monkeypatch.setattr(config, "host_compiler", "never")


def normal(*shape):
    return (0.3 * RNG.standard_normal(shape)).astype(np.float32)


SHARED = {"tokens": normal(V, C), "positions": normal(T, C), "scale": 1 + normal(C)}
STACK = {"up": normal(LAYERS, C, 8), "bias": normal(LAYERS, 8), "down": normal(LAYERS, 8, C)}


def ids(M, b=B):
    return RNG.integers(0, V, (M, b, T + 1)).astype(np.int32)


def embed(shared, m):
    return shared["tokens"][m[:, :-1]] + shared["positions"]


def block(x, p):
    return x + bnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]


def stage(layers, x):
    return lax.scan(lambda x, p: (block(x, p), None), x, layers)[0]


def loss(shared, x, m):
    logits = (x * shared["scale"]) @ shared["tokens"].T
    return nn.softmax_cross_entropy_with_integer_labels(logits, m[:, 1:]).mean()


def expected(microbatches, shared=SHARED, layers=STACK):
    def whole(shared, layers):
        m = microbatches.reshape(-1, T + 1)
        return loss(shared, stage(layers, embed(shared, m)), m)

    return bf.value_and_grad(whole, (0, 1))(shared, layers)


# -- the tables ------------------------------------------------------------------------------------

TABLES = [
    (name, n, M, v)
    for n in (1, 2, 3, 4)
    for M in sorted({1, 2, n, 2 * n - 1, 2 * n, 4 * n, 4 * n + 1})
    for name, v in (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 3), ("gpipe", 1))
    if name != "interleaved" or n <= M
]


@pytest.mark.parametrize("name, n, M, v", TABLES)
def test_each_pass_runs_once_after_what_it_needs(name, n, M, v):
    """A result is used one tick after it was sent, so there is one buffer."""
    s = pipeline_schedule(name, n, M, v)
    at = {}  # (operation, part of the model, microbatch) -> phase
    for p, r in itertools.product(range(len(s.ops)), range(n)):
        op, chunk, m = (int(a[p, r]) for a in (s.ops, s.chunk, s.microbatch))
        if op != NOTHING:
            assert (op, chunk * n + r, m) not in at
            at[op, chunk * n + r, m] = p
    backward = INPUT if name == "zb-h1" else BACKWARD
    kinds = [FORWARD, backward, *[WEIGHT] * (name == "zb-h1")]
    assert set(at) == set(itertools.product(kinds, range(n * v), range(M)))
    tick = lambda *key: s.ticks[at[key]]
    for part, m in itertools.product(range(n * v), range(M)):
        if part:
            assert tick(FORWARD, part, m) == tick(FORWARD, part - 1, m) + 1
            assert tick(backward, part - 1, m) == tick(backward, part, m) + 1
        assert at[FORWARD, part, m] < at[backward, part, m]
        if name == "zb-h1":
            assert at[INPUT, part, m] < at[WEIGHT, part, m]
    if name != "gpipe":  # the loss and its cotangent belong to one tick
        assert all(tick(FORWARD, n * v - 1, m) == tick(backward, n * v - 1, m) for m in range(M))


@pytest.mark.parametrize("name, n, M, v", [t for t in TABLES if t[0] != "gpipe"])
def test_slots_hold_what_is_read(name, n, M, v):
    """A rank that computes on stale data overwrites nothing that is needed."""
    s = pipeline_schedule(name, n, M, v)
    assert s.written.max() < s.slots and s.kept.max() < max(1, s.kept_slots)
    for r in range(n):
        saved, kept = {}, {}
        for p in range(len(s.ops)):
            op, key, kinds = s.ops[p, r], (s.chunk[p, r], s.microbatch[p, r]), s.kinds(p)
            if op in (BACKWARD, INPUT, WEIGHT):
                assert saved[s.read[p, r]] == key
            if op == WEIGHT:
                assert kept[s.taken[p, r]] == key
            for kind, slots, where in ((FORWARD, saved, s.written[p, r]), (INPUT, kept, s.kept[p, r])):
                if op == kind:
                    slots[where] = key
                elif kinds == {kind}:
                    slots[where] = "stale"  # of several kinds, a branch writes back what it finds


@pytest.mark.parametrize("n", [2, 4, 8])
def test_bubbles_are_those_of_the_papers(n):
    costs = PipelineCosts(forward=1.0, input=1.2, weight=0.8)
    for M in (2 * n, 4 * n):
        tables = [pipeline_schedule("1f1b", n, M), pipeline_schedule("zb-h1", n, M)]
        tables += [pipeline_schedule("interleaved", n, M, v) for v in (2, 4)]
        for s in tables:
            assert s.bubble(costs) == pytest.approx(s.formula(costs))
        f, b, w = costs[:3]
        idle = [s.seconds(costs) - M * (f + b + w) for s in tables]
        assert idle == pytest.approx([(n - 1) * x for x in (3, f + b - w, 3 / 2, 3 / 4)])
    few = [pipeline_schedule(name, n, n).bubble(costs) for name in ("1f1b", "zb-h1")]
    assert few[1] < few[0]


def test_slots_that_the_design_states():
    slots = lambda *args: (pipeline_schedule(*args).slots, pipeline_schedule(*args).kept_slots)
    assert slots("1f1b", 4, 16) == (7, 0)
    assert slots("zb-h1", 4, 16) == (7, 7)
    assert slots("interleaved", 4, 16, 2) == (11, 0)  # of half as many layers
    assert slots("gpipe", 4, 16) == (19, 0)
    assert slots("1f1b", 4, 2) == (3, 0)


def test_microbatches_that_are_no_multiple_of_the_ranks_leave_a_round_partly_empty():
    seconds = [pipeline_schedule("interleaved", 4, M, 2).seconds() for M in (8, 9, 12)]
    assert seconds[0] < seconds[1] < seconds[2]


# -- against one device ----------------------------------------------------------------------------


def step(schedule, n, chunks=1, data=False, stage=stage):
    axes = ("data",) * data
    mesh = AbstractMesh((n,) + (2,) * data, ("stage", *axes))

    def local(shared, layers, microbatches):
        return pipeline_value_and_grad(
            embed, stage, loss, shared, layers, microbatches, "stage",
            schedule=schedule, chunks=chunks, data_axes=axes,
        )  # fmt: skip

    mapped = bf.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P("stage"), P(None, axes or None)),
        out_specs=(P(), (P(), P("stage"))),
    )

    def in_order(shared, layers, microbatches):
        value, (of_shared, of_layers) = mapped(shared, interleave_layers(layers, n, chunks), microbatches)
        return value, (of_shared, deinterleave_layers(of_layers, n, chunks))

    return in_order


CASES = [
    (schedule, v, n, M)
    for n in (2, 4)
    for M in (n, 2 * n, 4 * n, n + 1)
    for schedule, v in (("interleaved", 2), ("zb-h1", 1))
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("schedule, v, n, M", CASES)
def test_values_and_gradients(schedule, v, n, M, data):
    microbatches = ids(M)
    same(step(schedule, n, v, data)(SHARED, STACK, microbatches), expected(microbatches))


def with_angles(layers, x):
    """A stage with values that are the same on all ranks, as of positions."""
    ones = bnp.cos(0 * bnp.arange(C, dtype="float32"))
    return lax.scan(lambda x, p: (block(x * ones, p), None), x, layers)[0]


def unrolled(layers, x):
    for i in range(2):
        x = block(x, tree.map(lambda p, i=i: p[i], layers))
    return x


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "schedule, v, wrapped",
    [
        ("interleaved", 4, bf.checkpoint(stage)),
        ("zb-h1", 1, bf.checkpoint(stage)),
        ("zb-h1", 1, lambda layers, x: lax.scan(lambda x, p: (bf.checkpoint(block)(x, p), None), x, layers)[0]),
        ("zb-h1", 1, unrolled),
        ("zb-h1", 1, with_angles),
    ],
    ids=["interleaved", "stage", "layers", "unrolled", "angles"],
)  # fmt: skip
def test_stages_of_other_forms(schedule, v, wrapped):
    microbatches, n = ids(5), 4 if schedule == "zb-h1" else 2
    same(step(schedule, n, v, stage=wrapped)(SHARED, STACK, microbatches), expected(microbatches))


@pytest.mark.parametrize("schedule, v", [("interleaved", 2), ("zb-h1", 1)])
def test_collectives(schedule, v):
    n, M = 2, 4
    counts = exchanged(step(schedule, n, v), SHARED, STACK, ids(M))
    shared = sum(x.nbytes for x in tree.leaves(SHARED))
    sent = 2 * (M * v + n - 1)
    assert counts.pop("ppermute") == (sent, sent * B * T * C * 4)
    assert counts == {"psum_invariant": (2, shared + 4)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule, v", [("interleaved", 2), ("zb-h1", 1)])
def test_parameters_that_are_gathered_around_the_pipeline(schedule, v):
    """FSDP: no collective over its axis runs inside the loops."""
    mesh, microbatches = AbstractMesh((2, 2), ("stage", "fsdp")), ids(4)

    def local(shared, layers, microbatches):
        return pipeline_value_and_grad(
            embed, stage, loss, shared, layers, microbatches, "stage",
            schedule=schedule, chunks=v, data_axes="fsdp",
        )  # fmt: skip

    f = bf.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(reduced={"stage", "fsdp"}), P("stage", reduced={"fsdp"}), P(None, "fsdp")),
        out_specs=(P(), (P(unreduced={"stage", "fsdp"}), P("stage", unreduced={"fsdp"}))),
    )
    of_layers = tree.map(lambda _: P("stage", "fsdp"), STACK)
    specs = tree.map(lambda _: P(), SHARED) | {"tokens": P("fsdp")}, of_layers
    whole = bf.shard(f, mesh, (*specs, P(None, "fsdp")), (P(), specs))
    args = SHARED, interleave_layers(STACK, 2, v), microbatches
    moved = {(c.operation, c.axes) for c in bf.collectives(whole, *args)}
    assert ("all_gather", ("fsdp",)) in moved and ("reduce_scatter", ("fsdp",)) in moved
    inside = [e.params["axes"] for _, times, e in meetings(f, *args) if times > 1]
    assert set(inside) == {("stage",)}
    value, (of_shared, of_layers) = f(*args)
    same((value, (of_shared, deinterleave_layers(of_layers, 2, v))), expected(microbatches))


# -- the ends --------------------------------------------------------------------------------------


def sharded_embed(shared, m):
    return vocabulary_parallel_embedding(shared["tokens"], m[:, :-1], "stage") + shared["positions"]


def sharded_loss(shared, x, m):
    logits = (x * shared["scale"]) @ shared["tokens"].T
    return vocabulary_parallel_cross_entropy(logits, m[:, 1:], "stage").mean()


def with_sharded_ends(schedule, n, v, data=(), deferred=False):
    def local(shared, layers, microbatches):
        return pipeline_value_and_grad(
            sharded_embed, stage, sharded_loss, shared, layers, microbatches, "stage",
            schedule=schedule, chunks=v, data_axes=data, sharded_ends=True,
        )  # fmt: skip

    def specs(kind):
        over = lambda axes: {kind: axes} if deferred else {}
        whole = P(**over({"stage", *data}))
        rows = P("stage", **over(set(data)))
        return {"tokens": rows, "positions": whole, "scale": whole}, P("stage", **over(set(data)))

    return bf.shard_map(
        local,
        mesh=AbstractMesh((n,) + (2,) * len(data), ("stage", *data)),
        in_specs=(*specs("reduced"), P(None, data or None)),
        out_specs=(P(), specs("unreduced")),
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "schedule, n, v, data, deferred",
    [
        ("1f1b", 2, 1, (), False),
        ("1f1b", 4, 1, (), True),
        ("interleaved", 2, 2, ("data",), False),
        ("zb-h1", 2, 1, ("data",), True),
        ("gpipe", 2, 1, ("data",), True),
    ],
)
def test_ends_that_all_ranks_compute_together(schedule, n, v, data, deferred):
    """Ranks have rows of the table; other parameters of the ends are whole."""
    f, microbatches = with_sharded_ends(schedule, n, v, data, deferred), ids(n + 1)
    value, (of_shared, of_layers) = f(SHARED, interleave_layers(STACK, n, v), microbatches)
    same((value, (of_shared, deinterleave_layers(of_layers, n, v))), expected(microbatches))


def products(f, rows, args):
    """Multiplications with the table of this number of rows, in a step of a rank."""
    jaxpr = bf.jit(f).lower(*args).jaxpr
    return sum(
        times * e.prim.flops(*[a.aval for a in e.invars], **e.params)
        for e, times in equations(jaxpr)
        if e.prim.name == "dot_general" and any(rows in v.aval.shape for v in (*e.invars, *e.outvars))
    )


def test_sharded_ends_take_a_rank_its_share_of_the_time():
    args = SHARED | {"tokens": normal(40, C)}, STACK, ids(4)
    whole = products(step("1f1b", 2), 40, args)
    assert products(with_sharded_ends("1f1b", 2, 1), 20, args) * 2 == whole > 0


# -- a loss of each stage --------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule, v", [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1)])
def test_the_balance_loss_of_experts_is_part_of_the_loss(schedule, v):
    layers = {"router": normal(LAYERS, C, 4), "experts": normal(LAYERS, 4, C, C)}
    microbatches = ids(3, 4)

    def routed(layers, x, **options):
        def layer(x, p):
            expert = lambda p, x: bnp.tanh(x @ p)
            how = {"capacity_factor": np.inf, **options}  # no token is dropped, however they are grouped
            y, balance = mixture_of_experts(expert, p["experts"], p["router"], x, **how)
            return x + y, 0.1 * balance

        x, balances = lax.scan(layer, x, layers)
        return x, balances.sum()

    def local(shared, layers, microbatches):
        return pipeline_value_and_grad(
            embed, lambda *a: routed(*a, axis="data"), loss, shared, layers, microbatches, "stage",
            schedule=schedule, chunks=v, stage_loss=True, data_axes="data",
        )  # fmt: skip

    spec = {"router": P("stage"), "experts": P("stage", "data")}
    f = bf.shard_map(
        local,
        mesh=AbstractMesh((2, 2), ("stage", "data")),
        in_specs=(P(), spec, P(None, "data")),
        out_specs=(P(), (P(), spec)),
    )

    def whole(shared, layers):
        def one(m):
            x, balance = routed(layers, embed(shared, m))
            return loss(shared, x, m) + balance

        return sum(one(m) for m in microbatches) / len(microbatches)

    value, (of_shared, of_layers) = f(SHARED, interleave_layers(layers, 2, v), microbatches)
    got = value, (of_shared, deinterleave_layers(of_layers, 2, v))
    same(got, bf.value_and_grad(whole, (0, 1))(SHARED, layers))


# -- plans -----------------------------------------------------------------------------------------


def test_a_plan_of_all_schedules():
    a = lambda *shape: bf.ShapeDtypeStruct(shape, "float32")
    shared = {"tokens": a(512, 64), "positions": a(T, 64), "scale": a(64)}
    layers = {"up": a(8, 64, 256), "bias": a(8, 256), "down": a(8, 256, 64)}
    rows = bf.ShapeDtypeStruct((16, 32, T + 1), "int32")
    device = bf.DeviceSpec(flops=1e12, bandwidth=1e13)
    plan = plan_pipeline(embed, stage, loss, shared, layers, rows, 4, device=device, chunks=(2, 3))
    by = {(p.schedule.name, p.sharded_ends): p for p in plan.planned}
    assert set(by) == {(s, d) for s in ("gpipe", "1f1b", "zb-h1", "interleaved") for d in (False, True)}
    assert by["zb-h1", False].bubble < by["1f1b", False].bubble == by["gpipe", False].bubble
    for name in ("gpipe", "1f1b", "interleaved"):
        assert by[name, False].bubble == pytest.approx(by[name, False].formula)
    # a stage saves the sum before tanh or its result, and its input: 8 of layers in a slot, and the halves' cotangents
    one_f = by["1f1b", False]
    assert one_f.residual_bytes == 7 * one_f.slot_bytes > 0 == one_f.kept_bytes * one_f.schedule.kept_slots
    assert by["zb-h1", False].residual_bytes == 7 * (one_f.slot_bytes + by["zb-h1", False].kept_bytes)
    assert by["interleaved", False].slot_bytes < one_f.slot_bytes
    ends = one_f.costs.ends
    assert one_f.seconds - by["1f1b", True].seconds == pytest.approx(16 * ends * 3 / 4)
    assert plan.fastest.sharded_ends
    assert "zb-h1" in str(plan) and "7 + 7" in str(plan)


def planned(layers=STACK, **options):
    device = bf.DeviceSpec(flops=800e12, bandwidth=3e12)
    return plan_pipeline(embed, stage, loss, SHARED, layers, ids(4), 2, device=device, **options)


def test_one_number_of_chunks_is_as_several():
    assert str(planned(chunks=2)) == str(planned(chunks=(2,))) and "interleaved" in str(planned(chunks=2))


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda: pipeline_schedule("zb", 2, 4), errors.ArgumentError, "1f1b, interleaved, zb-h1, gpipe, not 'zb'"),
        (lambda: pipeline_schedule("1f1b", 0, 4), errors.ArgumentError, "ranks is a positive number, not 0"),
        (lambda: pipeline_schedule("1f1b", 2, 1.5), errors.ArgumentError, "microbatches is a positive number"),
        (lambda: pipeline_schedule("1f1b", 2, 4, 2), errors.ValueRangeError, "1f1b with 2 chunks on each rank"),
        (lambda: pipeline_schedule("interleaved", 2, 4), errors.ValueRangeError, "(?s)with 1 chunk on.*chunks=2"),
        (
            lambda: pipeline_schedule("interleaved", 4, 3, 2), errors.ValueRangeError,
            '(?s)3 microbatches are too few to interleave on 4 ranks.*at least 4 microbatches.*or schedule="1f1b"',
        ),
        (lambda: interleave_layers(STACK, 3, 2), errors.ShapeError, "(?s)8 layers do not divide into 6.*12 layers"),
        (lambda: step("interleaved", 4, 2)(SHARED, STACK, ids(3)), errors.ValueRangeError, "too few to interleave"),
        (lambda: pipelined_with(stage_loss=True), errors.ArgumentError, "a stage returns an array and its loss, not"),
        (
            lambda: plan_pipeline(embed, stage, loss, SHARED, STACK, ids(4), 2, device="H100"),
            errors.ArgumentError, "device is a DeviceSpec, not 'H100'",
        ),
        (lambda: interleave_layers(STACK, 2, 0), errors.ArgumentError, "interleave_layers: chunks is a positive"),
        (lambda: deinterleave_layers(STACK, 0, 2), errors.ArgumentError, "deinterleave_layers: ranks is a positive"),
        (lambda: planned(chunks=0), errors.ArgumentError, "plan_pipeline: chunks is a positive number, not 0"),
        (lambda: planned(chunks=(2, 0)), errors.ArgumentError, "plan_pipeline: chunks is a positive number, not 0"),
        (lambda: planned(chunks="2"), errors.ArgumentError, "plan_pipeline: chunks is a positive number, not '2'"),
        (lambda: planned({}), errors.ShapeError, r"(?s)layers are arrays \[L, \.\.\.\], not \{\}.*bnp.stack"),
        (lambda: planned(np.float32(1)), errors.ShapeError, r"layers are arrays \[L, \.\.\.\]"),
    ],
)  # fmt: skip
def test_errors(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def pipelined_with(**options):
    local = lambda *a: pipeline_value_and_grad(embed, stage, loss, *a, "stage", **options)
    mapped = bf.shard_map(
        local, mesh=AbstractMesh((2,), ("stage",)), in_specs=(P(), P("stage"), P()), out_specs=P()
    )
    return mapped(SHARED, STACK, ids(2))


def test_layers_that_do_not_divide_among_the_chunks_of_a_rank():
    local = lambda *a: pipeline_value_and_grad(
        embed, stage, loss, *a, "stage", schedule="interleaved", chunks=3
    )
    mapped = bf.shard_map(
        local, mesh=AbstractMesh((2,), ("stage",)), in_specs=(P(), P("stage"), P()), out_specs=P()
    )
    with pytest.raises(errors.ShapeError, match=r"(?s)8 layers do not divide into 6 parts.*12 layers"):
        mapped(SHARED, STACK, ids(2))
