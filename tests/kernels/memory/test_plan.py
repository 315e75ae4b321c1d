"""Memory plans: sound on all programs, near the bound on realistic ones."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from blufunc import errors
from blufunc.kernels.memory.plan import plan
from blufunc.kernels.memory.types import Placement, Step, Value
from blufunc.kernels.memory.verify import check_plan, simulate

KIB = 1024


class Program:
    """Writes a list of steps and values."""

    def __init__(self):
        self.steps, self.values = [], []

    def value(self, nbytes, kind="temp", label="", alias_of=None):
        self.values.append(Value(nbytes, kind, label, alias_of))
        return len(self.values) - 1

    def step(self, reads, *sizes, kind="temp", over=None, scratch=0, label=""):
        """A step with a result of each size, the first in place of ``over``; the ids."""
        outs = [self.value(size, kind, label) for size in sizes]
        pairs = ((outs[0], over),) if over is not None else ()
        self.steps.append(Step(tuple(reads), tuple(outs), pairs, scratch))
        return outs[0] if len(outs) == 1 else outs

    def plan(self, **options):
        p = plan(self.steps, self.values, **options)
        check_plan(p, self.steps, self.values, alignment=options.get("alignment", 256))
        return p


def training_step(layers=4, width=64, tokens=512, vocab=1000, casts=True, donate=True, updates="last"):
    """A training step of a transformer with AdamW, one launch per region, in bytes.

    ``updates`` is "last" (one launch for each parameter, after the backward pass) or "one" (for all).
    """
    p = Program()
    kind = "donated" if donate else "argument"
    act, wide = 2 * tokens * width, 8 * tokens * width  # bfloat16
    stats = 4 * tokens
    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    sizes = [4 * vocab * width] + [4 * m * n for _ in range(layers) for m, n in shapes]
    state = [[p.value(size, kind, f"{what}{i}") for what in "wmv"] for i, size in enumerate(sizes)]
    batch = p.value(4 * tokens, "argument", "batch")
    w = [p.step([s[0]], size // 2) if casts else s[0] for s, size in zip(state, sizes)]

    x = p.step([w[0], batch], act, label="embed")
    saved = []
    for layer in range(layers):
        qkv_w, out_w, up_w, down_w = w[1 + 4 * layer : 5 + 4 * layer]
        h, s1 = p.step([x], act, stats)
        qkv = p.step([h, qkv_w], 3 * act, scratch=32 * KIB)
        att, lse = p.step([qkv], act, stats)
        y = p.step([att, out_w, x], act)
        g, s2 = p.step([y], act, stats)
        u = p.step([g, up_w], wide, scratch=32 * KIB)
        f = p.step([u], wide)
        z = p.step([f, down_w, y], act)
        saved.append((x, s1, h, qkv, att, lse, y, s2, g, u, f))
        x = z
    logits = p.step([x, w[0]], 2 * tokens * vocab, label="logits")
    loss, lse = p.step([logits, batch], 256, stats)
    p.values[loss] = dataclasses.replace(p.values[loss], kind="output")
    d = p.step([logits, lse, batch], 2 * tokens * vocab, over=logits, label="dlogits")
    grads = {0: p.step([d, x], sizes[0], label="grad embed")}
    dx = p.step([d, w[0]], act)
    for layer in reversed(range(layers)):
        x, s1, h, qkv, att, lse, y, s2, g, u, f = saved[layer]
        first = 1 + 4 * layer
        grads[first + 3] = p.step([dx, f], sizes[first + 3])
        df = p.step([dx, w[first + 3]], wide)
        du = p.step([df, u], wide, over=df)
        grads[first + 2] = p.step([du, g], sizes[first + 2])
        dg = p.step([du, w[first + 2]], act)
        dy = p.step([dg, y, s2, dx], act, over=dx)
        grads[first + 1] = p.step([dy, att], sizes[first + 1])
        da = p.step([dy, w[first + 1]], act)
        dqkv = p.step([da, qkv, att, lse], 3 * act, scratch=stats)
        grads[first] = p.step([dqkv, h], sizes[first])
        dh = p.step([dqkv, w[first]], act)
        dx = p.step([dh, x, s1, dy], act, over=dy)
    grads[0] = p.step([dx, batch, grads[0]], sizes[0], over=grads[0])
    for group in [list(grads)] if updates == "one" else [[i] for i in grads]:
        old = [v for i in group for v in state[i]]
        new = [p.value(p.values[v].nbytes, "output", "new " + p.values[v].label) for v in old]
        p.steps.append(Step((*old, *(grads[i] for i in group)), tuple(new), tuple(zip(new, old))))
    return p


def bound(p, made):
    """Peak bytes of temporaries and scratch in the plan's order, from its text."""
    worst = 0
    for at, i in enumerate(made.order):
        places = {
            (made.placement[v].offset, p.values[v].nbytes)
            for v, (start, end) in made.spans.items()
            if start <= at <= end and made.placement[v].space == "arena"
        }
        scratch = p.steps[i].scratch if made.scratch.get(i, Placement("", 0, 0)).space == "arena" else 0
        worst = max(worst, sum(n for _, n in places) + scratch)
    return worst


# ------------------------------------------------------------------------------------------------ realistic

REALISTIC = {
    "small": {},
    "deep": {"layers": 24},
    "long": {"tokens": 4096},
    "large vocabulary": {"vocab": 50304},
    "no casts": {"casts": False},
    "not donated": {"donate": False},
    "one update": {"updates": "one"},
    "wide, one update": {"width": 512, "updates": "one"},
    "GPT-2": {"layers": 12, "width": 768, "tokens": 8192, "vocab": 50304},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", REALISTIC)
def test_training_steps_are_packed_close_to_the_bound(name):
    p = training_step(**REALISTIC[name])
    for options in ({}, {"reorder": False}, {"borrow": False}):
        made = p.plan(**options)
        assert made.arena_bound >= bound(p, made) > 0
        assert made.arena_bytes <= 1.05 * bound(p, made)


@pytest.mark.parametrize("name", REALISTIC)
def test_reordering_never_costs(name):
    p = training_step(**REALISTIC[name])
    assert p.plan().peak_bytes <= p.plan(reorder=False).peak_bytes


def test_reordering_runs_each_update_as_soon_as_its_gradient_is_there():
    p = training_step(layers=8, width=512, casts=False)
    made, given_order = p.plan(), p.plan(reorder=False)
    assert made.arena_bytes < 0.7 * given_order.arena_bytes
    # Only the loss: each update waits for the last other reader of its parameter, and is made in place.
    assert made.output_bytes == given_order.output_bytes == 256


def test_reordering_puts_off_casts_until_they_are_needed():
    p = Program()
    casts = [p.step([p.value(8000, "argument")], 4000) for _ in range(10)]
    x = p.step([], 100)
    for cast in casts:
        x = p.step([x, cast], 100, over=x)
    p.step([x], 100, kind="output")
    assert p.plan(reorder=False, alignment=4).arena_bytes == 40_100
    assert p.plan(alignment=4).arena_bytes == 4_100


def test_a_donated_parameter_is_updated_after_its_last_other_reader():
    """Greedily, the update would run once the gradient is there, and need new memory."""
    p = Program()
    w = p.value(4096, "donated")
    x, dy = p.step([], 4096), p.step([], 64)
    dw = p.step([dy, x], 4096, over=x)
    dx = p.step([dy, w], 64)
    p.step([p.step([dx], 4096)], 8, kind="output")
    new = p.step([w, dw], 4096, kind="output", over=w)
    made = p.plan()
    assert made.placement[new] == Placement("argument", w, 0)
    assert made.arena_bytes < 5000 < 8192 < p.plan(reorder=False).arena_bytes


def test_random_graphs_need_half_of_the_memory_after_reordering():
    ratios = []
    for seed in range(20):
        rnd = random.Random(seed)
        p = Program()
        for i in range(60):
            recent = range(max(0, i - 15), i) if rnd.random() < 0.7 else range(i)
            p.step(rnd.sample(recent, min(rnd.randint(0, 3), len(recent))), 256 * rnd.choice([1, 50, 256]))
        for v in set(range(60)) - {v for s in p.steps for v in s.reads}:
            p.step([v], 8, kind="output")
        ratios.append(p.plan(borrow=False).arena_bytes / p.plan(borrow=False, reorder=False).arena_bytes)
    assert max(ratios) < 0.75
    assert sum(ratios) / len(ratios) < 0.52


def test_pieces_written_and_read_in_turn_stay_in_turn():
    """The right steps read a buffer refilled through a view, whatever that frees."""
    p = Program()
    big = p.step([], 9000)
    whole = p.step([], 512)
    piece = p.value(128, "temp", alias_of=whole)
    p.step([p.step([], 9000)], 8, kind="output")
    p.step([whole], 8)
    p.steps.append(Step((big,), (piece,)))  # frees most: the first to run, if nothing held it back
    p.step([whole], 8, kind="output")
    order = p.plan().order
    assert [i for i in order if i in (1, 4, 5, 6)] == [1, 4, 5, 6]
    p.steps[4] = Step((), (whole,))
    order = p.plan().order
    assert [i for i in order if i in (1, 4, 5, 6)] == [1, 4, 5, 6]


def test_effects_keep_their_order():
    p = Program()
    big = [p.step([], 1000) for _ in range(5)]
    ends = [p.step([v], 8, kind="output") for v in big]
    p.steps = [
        dataclasses.replace(s, after=(i - 1,)) if 0 < i < len(big) else s for i, s in enumerate(p.steps)
    ]
    made = p.plan()
    assert [i for i in made.order if i < len(big)] == list(range(len(big)))
    assert made.arena_bytes == 1024
    assert ends
    p.steps = [dataclasses.replace(s, after=tuple(range(i))) for i, s in enumerate(p.steps)]
    assert p.plan().order == tuple(range(10))


# ------------------------------------------------------------------------------------------- shared storage

# Each row builds a program and names two of its values: do they lie in one place?


def _result_over_dying_operand(p):
    x = p.step([], 512)
    y = p.step([x], 512, over=x)
    p.step([y], 8, kind="output")
    return x, y


def _operand_needed_later(p):
    x = p.step([], 512)
    y = p.step([x], 512, over=x)
    p.step([y, x], 8, kind="output")
    return x, y


def _other_size(p):
    x = p.step([], 512)
    y = p.step([x], 256, over=x)
    p.step([y], 8, kind="output")
    return x, y


def _read_through_a_view_as_well(p):
    x = p.step([], 512)
    turned = p.value(512, "temp", alias_of=x)
    y = p.step([x, turned], 512, over=x)
    p.step([y], 8, kind="output")
    return x, y


def _view_keeps_operand_alive(p):
    x = p.step([], 512)
    view = p.value(512, "temp", alias_of=x)
    y = p.step([x], 512, over=x)
    p.step([y, view], 8, kind="output")
    return x, y


def _caller_owns_operand(p):
    x = p.value(512, "argument")
    return x, p.step([x], 512, over=x, kind="output")


def _update_of_a_donated_argument(p):
    x = p.value(512, "donated")
    return x, p.step([x], 512, over=x, kind="output")


def _donated_but_dead_before(p):
    x = p.value(512, "donated")
    h = p.step([x], 64)
    return x, p.step([h], 512, kind="output")


def _donated_and_read_by_the_step(p):
    x = p.value(512, "donated")
    return x, p.step([x], 512, kind="output")


def _donated_and_read_later(p):
    x = p.value(512, "donated")
    y = p.step([], 512, kind="output")
    p.step([x], 8, kind="output")
    return x, y


def _view(p):
    x = p.step([], 512)
    view = p.value(128, "temp", alias_of=x)
    p.step([view], 8, kind="output")
    return x, view


def _returned_over_dying_operand(p):
    x = p.step([], 512)
    return x, p.step([x], 512, over=x, kind="output")


def _donation_goes_to_the_output_first(p):
    x = p.value(512, "donated")
    p.step([x], 512, over=x, kind="temp")
    return x, p.step([p.step([], 8)], 512, kind="output")


SHARED = {
    _result_over_dying_operand: True,
    _operand_needed_later: False,
    _other_size: False,
    _read_through_a_view_as_well: False,
    _view_keeps_operand_alive: False,
    _caller_owns_operand: False,
    _update_of_a_donated_argument: True,
    _donated_but_dead_before: True,
    _donated_and_read_by_the_step: False,
    _donated_and_read_later: False,
    _view: True,
    _returned_over_dying_operand: True,
    _donation_goes_to_the_output_first: True,
}


@pytest.mark.parametrize("build", SHARED, ids=lambda f: f.__name__.strip("_"))
def test_which_values_share_storage(build):
    p = Program()
    a, b = build(p)
    made = p.plan(reorder=False, borrow=False)
    assert (made.placement[a] == made.placement[b]) is SHARED[build]


def test_parameters_of_one_size_shift_by_one():
    """An update out of place can take the memory of the one before it."""
    p = Program()
    old = [p.value(1024, "donated") for _ in range(4)]
    for w in old:
        p.step([w], 1024, kind="output")
    made = p.plan(reorder=False)
    assert made.output_bytes == 1024
    assert sorted(made.placement[s.writes[0]].owner for s in p.steps[1:]) == old[:3]


def test_one_parameter_is_never_given_away_twice():
    p = Program()
    w = p.value(1024, "donated")
    p.step([w], 1024, 1024, kind="output", over=w)
    p.steps[0] = dataclasses.replace(p.steps[0], inplace=((1, w), (2, w)))
    made = p.plan()
    assert made.output_bytes == 1024


def test_temporaries_borrow_the_memory_of_outputs_and_donated_arguments():
    p = Program()
    dead = p.value(1000, "donated")
    x = p.step([dead], 64)
    a, b = p.step([x], 900, 4000)
    x = p.step([a, b], 64)
    out = p.step([x], 5000, kind="output")
    made = p.plan()
    assert made.placement[a] == Placement("argument", dead, 0)
    assert made.placement[b] == Placement("output", out, 0)
    assert made.arena_bytes == 256  # the second x: b and the result lie where the first did
    assert p.plan(borrow=False).arena_bytes > 4900


def test_a_returned_view_keeps_its_storage_out_of_the_arena():
    p = Program()
    x = p.step([], 512)
    view = p.value(512, "output", alias_of=x)
    p.step([x], 512, kind="output")
    made = p.plan()
    assert made.placement[x] == made.placement[view] == Placement("output", view, 0)
    assert made.allocations == {view: 512, view + 1: 512}


# ------------------------------------------------------------------------------------------------ any program

SIZES = hs.sampled_from([0, 1, 100, 256, 257, 1000, 4096])


@hs.composite
def programs(draw):
    """Programs with views, pieces, in-place pairs, donation, scratch and effects."""
    p = Program()
    for _ in range(draw(hs.integers(0, 4))):
        p.value(draw(SIZES), draw(hs.sampled_from(["argument", "donated"])))
    ready = list(range(len(p.values)))
    for i in range(draw(hs.integers(0, 14))):
        reads = draw(hs.lists(hs.sampled_from(ready), max_size=3)) if ready else []
        writes, pairs = [], []
        for _ in range(draw(hs.integers(1, 3))):
            near = [p.values[v].nbytes for v in reads]
            size = draw(hs.sampled_from(near) | SIZES) if near else draw(SIZES)
            w = p.value(size, draw(hs.sampled_from(["temp", "temp", "output"])))
            writes.append(w)
            pairs += [(w, v) for v in reads if draw(hs.booleans())]
        after = draw(hs.lists(hs.integers(0, i - 1), max_size=1)) if i else []
        p.steps.append(Step(tuple(reads), tuple(writes), tuple(pairs), draw(SIZES), tuple(after)))
        ready += writes
        if draw(hs.booleans()):
            of = draw(hs.sampled_from(ready))
            ready.append(p.value(draw(hs.integers(0, p.values[of].nbytes)), "temp", alias_of=of))
            if draw(hs.booleans()) and p.values[of].kind == "temp" and p.values[of].alias_of is None:
                p.steps.append(Step((), (ready[-1],), after=tuple(range(len(p.steps)))))
    return p


def collisions(p, made):
    """Values that overlap in time and memory, except in-place operands."""
    allowed = {pair for step in p.steps for pair in step.inplace}
    allowed |= {(b, a) for a, b in allowed}
    spans = [(v, *span) for v, span in made.spans.items() if p.values[v].nbytes]
    roots = list(range(len(p.values)))
    for v, value in enumerate(p.values):
        roots[v] = v if value.alias_of is None else roots[value.alias_of]
    allowed = {(roots[a], roots[b]) for a, b in allowed}
    for n, (v, start, end) in enumerate(spans):
        for w, begin, stop in spans[:n]:
            a, b = made.placement[v], made.placement[w]
            apart = a.offset + p.values[v].nbytes <= b.offset or b.offset + p.values[w].nbytes <= a.offset
            if (a.space, a.owner) != (b.space, b.owner) or apart or start > stop or begin > end:
                continue
            if not (a == b and (v, w) in allowed and (start == stop or begin == end)):
                yield v, w


@pytest.mark.slow
@given(p=programs(), alignment=hs.sampled_from([1, 64, 256]), reorder=hs.booleans(), borrow=hs.booleans())
@settings(max_examples=300)
def test_every_plan_is_sound(p, alignment, reorder, borrow):
    made = p.plan(alignment=alignment, reorder=reorder, borrow=borrow)
    assert list(collisions(p, made)) == []
    assert made.arena_bytes >= made.arena_bound >= bound(p, made)
    assert made.arena_bytes >= simulate(made, p.steps, p.values)
    assert made.peak_bytes <= p.plan(alignment=alignment, reorder=False, borrow=borrow).peak_bytes
    touched = {v for s in p.steps for v in (*s.reads, *s.writes)}
    assert touched <= set(made.placement)
    assert set(made.scratch) == {i for i, s in enumerate(p.steps) if s.scratch}
    made.report()


def test_planning_is_deterministic():
    p = training_step(layers=2)
    first, second = p.plan(), p.plan()
    assert (first.order, first.placement) == (second.order, second.placement)


# -------------------------------------------------------------------------------------------------- reports


def test_live_at_and_report():
    p = Program()
    w = p.value(2 << 20, "argument", "w")
    x = p.step([w], 1 << 20, label="x  model.py:3")
    y = p.step([x], 1 << 20, over=x, label="y  model.py:4", scratch=300)
    z = p.step([y], 100, label="z")
    out = p.step([z], 8, kind="output")
    made = p.plan(reorder=False, borrow=False)
    assert made.live_at(1) == [(w, 2 << 20), (y, 1 << 20)]  # x is overwritten by y
    assert made.live_at(3) == [(w, 2 << 20), (z, 100), (out, 8)]
    assert made.peak_bytes == (2 << 20) + (1 << 20) + 512 + 8
    assert made.report(1).splitlines() == [
        "planned peak 3.00 MiB: arguments 2.00 MiB, outputs 8 B, arena 1.00 MiB (1.00 MiB of it in use at once)",
        "alive at step 2 of 4, where the arena is fullest:",
        "    2.00 MiB  argument  w",
        "    1.00 MiB  in 1 smaller",
    ]
    assert "temp      y  model.py:4" in made.report()


def test_a_program_without_steps():
    made = Program().plan()
    assert (made.order, made.peak_bytes, made.peak_step) == ((), 0, None)
    assert (
        made.report() == "planned peak 0 B: arguments 0 B, outputs 0 B, arena 0 B (0 B of it in use at once)"
    )


# --------------------------------------------------------------------------------------------------- errors

T, A, O = (Value(64, kind) for kind in ("temp", "argument", "output"))
ILL_FORMED = {
    "reads value 0, which no step before it writes": ([Step((0,), ())], [T]),
    "writes value 0, which is the caller's": ([Step((), (0,))], [A]),
    "value 0 is an output, and no step writes it": ([], [O]),
    "must come after steps": ([Step((), (0,), after=(0,))], [T]),
    "in-place pairs": ([Step((0,), (1,), ((1, 2),))], [A, T, A]),
    "is a view of itself": ([], [Value(64, "temp", alias_of=0)]),
    "is a view of 64": ([], [T, Value(65, "temp", alias_of=0)]),
}


@pytest.mark.parametrize("message", ILL_FORMED)
def test_ill_formed_programs_are_refused(message):
    with pytest.raises(errors.ValueRangeError, match=message):
        plan(*ILL_FORMED[message])


def _sound():
    """A program whose plan has everything, and the ids of its values."""
    p = Program()
    kept, given_away = p.value(512, "argument"), p.value(512, "donated")
    a = p.step([kept, given_away], 512)
    b = p.step([a], 512, scratch=256)
    out = p.step([a, b], 256, kind="output")
    p.steps[1] = dataclasses.replace(p.steps[1], after=(0,))
    made = p.plan(reorder=False, borrow=False)
    return p, made, kept, a, b, out


def _moved(made, value, **changes):
    place = dataclasses.replace(made.placement[value], **changes)
    return dataclasses.replace(made, placement=made.placement | {value: place})


CORRUPT = {
    "not a permutation": lambda m, kept, a, b, out: dataclasses.replace(m, order=(0, 0, 1)),
    "runs before": lambda m, kept, a, b, out: dataclasses.replace(m, order=(1, 0, 2)),
    "not in memory": lambda m, kept, a, b, out: dataclasses.replace(m, order=(2, 0, 1)),
    "multiple of 256": lambda m, kept, a, b, out: _moved(m, a, offset=8),
    "leaves a block": lambda m, kept, a, b, out: _moved(m, a, offset=1 << 20),
    "over value": lambda m, kept, a, b, out: _moved(m, b, offset=m.placement[a].offset),
    "which is not donated": lambda m, kept, a, b, out: _moved(m, b, space="argument", owner=kept, offset=0),
    "no memory of its own": lambda m, kept, a, b, out: _moved(
        dataclasses.replace(m, arena_bytes=4096), out, space="arena", owner=-1, offset=2048
    ),
    "writes value -1 over": lambda m, kept, a, b, out: dataclasses.replace(
        m, scratch={1: dataclasses.replace(m.scratch[1], offset=m.placement[a].offset)}
    ),
}


@pytest.mark.parametrize("message", CORRUPT)
def test_the_checker_finds_what_is_wrong(message):
    p, made, *ids = _sound()
    with pytest.raises(errors.ValueRangeError, match=message):
        check_plan(CORRUPT[message](made, *ids), p.steps, p.values)


def test_the_checker_finds_a_value_overwritten_between_its_steps():
    p = Program()
    a = p.step([], 256)
    b = p.step([], 256)
    p.step([b], 8, kind="output")
    p.step([a], 8, kind="output")
    made = p.plan(reorder=False, borrow=False)
    bad = _moved(made, b, offset=made.placement[a].offset)
    with pytest.raises(errors.ValueRangeError, match="reads value 0, which is not in memory"):
        check_plan(bad, p.steps, p.values)
