"""Copies between memories in a plan: where they are issued, and their price."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blufunc.kernels.memory.overlap import Copy, order_with_copies, overlapped
from blufunc.kernels.memory.plan import plan
from blufunc.kernels.memory.types import Step, Value
from blufunc.kernels.memory.verify import check_plan


class Program:
    """Steps that take a second each, and copies; values have a name and a size."""

    def __init__(self):
        self.values, self.steps, self.copies = [], [], {}

    def value(self, nbytes, kind="temp", on_host=False):
        self.values.append(Value(nbytes, kind, on_host=on_host))
        return len(self.values) - 1

    def step(self, reads=(), nbytes=256, kind="temp", inplace=False):
        out = self.value(nbytes, kind)
        pairs = ((out, reads[0]),) if inplace else ()
        self.steps.append(Step(tuple(reads), (out,), pairs))
        return out

    def out(self, v, seconds=1.0):
        h = self.value(self.values[v].nbytes, on_host=True)
        self.copies[len(self.steps)] = Copy(True, v, self.values[v].nbytes, seconds)
        self.steps.append(Step((v,), (h,)))
        return h

    def into(self, h, seconds=1.0):
        d = self.value(self.values[h].nbytes)
        self.copies[len(self.steps)] = Copy(False, d, self.values[h].nbytes, seconds)
        self.steps.append(Step((h,), (d,)))
        return d

    def run(self, room=0):
        order = order_with_copies(self.steps, self.values, self.copies)
        issued, steps, price = overlapped(
            order, self.steps, self.values, self.copies, [1.0] * len(self.steps), room
        )
        made = plan(steps, self.values, reorder=False)
        check_plan(made, steps, self.values)
        return issued, steps, price, made


def waiting(gap=8, seconds=2.0, nbytes=1 << 20):
    """A large value that is read again after ``gap`` steps."""
    p = Program()
    x = p.value(256, "argument")
    v = p.step([x], nbytes)
    h = p.out(v, seconds)
    small = x
    for _ in range(gap):
        small = p.step([small])
    d = p.into(h, seconds)
    p.step([d, small], kind="output")
    return p


def test_a_copy_in_starts_early_enough_and_not_earlier():
    p = waiting()
    issued, _, price, made = p.run()
    at = issued.index(10)  # the copy in, of two seconds, is read by the tenth step
    assert issued[at + 1 :] == [8, 9, 11] and issued[:2] == [0, 1]
    assert price.exposed_seconds == 0 and price.step_seconds == 10
    assert (price.copies_out, price.bytes_in, price.seconds_in) == (1, 1 << 20, 2.0)
    assert made.host_arena_bytes == 1 << 20


def test_a_value_keeps_its_bytes_until_the_copy_is_done():
    p = waiting(seconds=3.0)
    _, steps, _, made = p.run()
    held = [n for n, s in enumerate(steps) if 1 in s.reads]
    assert held == [1, 4]  # its own copy; then the third step after it
    assert made.spans[1] == (0, 4)


def test_a_slow_link_is_waited_for():
    p = waiting(gap=4, seconds=5.0)
    _, _, price, _ = p.run()
    assert price.exposed_seconds == pytest.approx(10 + 1 - 5)


def test_a_copy_in_does_not_raise_the_peak_by_much():
    """Ten moments are read one after another, while a large value is alive."""

    def program():
        p = Program()
        big = p.step([p.value(256, "argument")], 8 << 20)
        hosts = [p.value(1 << 20, "argument", on_host=True) for _ in range(10)]
        for h in hosts:
            d = p.into(h, 3.0)
            p.step([d, big], kind="output")
        return p

    def peak(room):
        return program().run(room)

    issued, _, tight, made = peak(0)
    assert made.arena_bound <= 10 << 20
    _, _, roomy, wide = peak(16 << 20)
    assert roomy.exposed_seconds <= tight.exposed_seconds and wide.arena_bound > made.arena_bound
    assert [i for i in issued if i in program().copies] == sorted(program().copies)


def test_a_donated_argument_on_the_host_takes_its_update():
    p = Program()
    m = p.value(1 << 20, "donated", on_host=True)
    d = p.into(m)
    new = p.step([d], 1 << 20, inplace=True)
    out = p.value(1 << 20, "output", on_host=True)
    p.copies[len(p.steps)] = Copy(True, new, 1 << 20, 1.0)
    p.steps.append(Step((new,), (out,)))
    *_, made = p.run()
    assert made.placement[out] == made.placement[m] and made.placement[m].space == "argument"
    assert (made.host_argument_bytes, made.host_output_bytes, made.argument_bytes) == (1 << 20, 0, 0)
    assert made.arena_bytes == 1 << 20


@st.composite
def programs(draw):
    p = Program()
    known = [p.value(256 * draw(st.integers(1, 8)), "argument") for _ in range(2)]
    hosts = [p.value(512, "donated", on_host=True)]
    for _ in range(draw(st.integers(1, 25))):
        what = draw(st.sampled_from(["step", "step", "out", "in"]))
        if what == "out":
            hosts.append(p.out(draw(st.sampled_from(known)), draw(st.floats(0, 5))))
        elif what == "in":
            known.append(p.into(draw(st.sampled_from(hosts)), draw(st.floats(0, 5))))
        else:
            reads = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True))
            known.append(p.step(reads, 256 * draw(st.integers(1, 8)), inplace=False))
    p.step(known[-3:], kind="output")
    return p


@pytest.mark.slow
@settings(max_examples=120, deadline=None, database=None, derandomize=True)
@given(programs(), st.integers(0, 1 << 14))
def test_random_plans_are_sound(p, room):
    issued, _, price, made = p.run(room)
    assert sorted(issued) == list(range(len(p.steps)))
    assert price.exposed_seconds >= 0
    for i, value in enumerate(p.values):
        if i in made.placement and value.nbytes:
            assert (made.placement[i].space == "host" or made.placement[i].owner >= 0) >= value.on_host
