"""Overlap of collectives with matmuls, in an order that respects dependencies."""

import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import blufunc as bf
from blufunc import lax, nn
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir.jaxpr import communicates
from blufunc.core.programs.simplify import simplify
from blufunc.core.programs.stage import stage
from blufunc.kernels.backends.cuda import overlap
from blufunc.kernels.backends.cuda import program as cuda_program
from blufunc.kernels.backends.cuda.overlap import MOST, SOON, overlapped_matmuls
from blufunc.kernels.fusion.fuse import Opaque
from blufunc.kernels.schedule import OpaqueStep
from blufunc.parallel.collectives import primitives as mc
from blufunc.parallel.collectives.lowering import lower_collectives
from tests.parallel import divided_mlp


@pytest.fixture
def seconds(monkeypatch):
    """Use the durations of the stand-in equations."""
    monkeypatch.setattr(overlap, "_product", lambda s: s.eqn.product)
    monkeypatch.setattr(overlap, "_exchanged", lambda s: s.eqn.exchanged)
    monkeypatch.setattr(overlap, "_seconds", lambda s: s.eqn.product + s.eqn.exchanged)


def steps_of(rows):
    """Steps from rows of name, inputs, matmul seconds and collective seconds.

    Collectives are ordered, as on all ranks. So are steps without duration whose name begins with ``!``.
    """
    made, last = {}, None
    for name, reads, product, exchanged in rows:
        prim = SimpleNamespace(name=name)
        eqn = SimpleNamespace(prim=prim, outvars=[name], product=product, exchanged=exchanged, name=name)
        made[name] = Opaque(eqn, list(reads))
        if exchanged or name.startswith("!"):
            made[name].after, last = last, made[name]
    return list(made.values())


def ancestors(steps, step, ordered=True):
    """Steps that a step depends on, by operands or, if ``ordered``, by order."""
    makers = {s.outputs[0]: s for s in steps}
    found, pending = set(), [step]
    while pending:
        s = pending.pop()
        for m in (
            *(makers[v] for v in s.inputs if v in makers),
            *[s.after] * (ordered and s.after is not None),
        ):
            if m not in found:
                found.add(m)
                pending.append(m)
    return found


KIND = st.sampled_from(
    [("!", 0, 0), ("k", 0, 0), ("p", 1e-3, 0), ("p", 4e-3, 0), ("e", 0, 5e-3), ("e", 0, 1e-2)]
)
ROW = st.tuples(KIND, st.lists(st.integers(1, 9), max_size=2))
CHAIN = st.lists(st.tuples(KIND, st.just([1])), max_size=6)
PIECES = st.lists(CHAIN | st.lists(ROW, max_size=1), max_size=9)


@pytest.mark.slow
@pytest.mark.usefixtures("seconds")
@given(PIECES, st.integers(0, 3))
@settings(max_examples=400)
def test_steps_come_after_what_they_need_and_stay_in_order(pieces, soon):
    names = []
    table = []
    for n, ((kind, product, exchanged), back) in enumerate(itertools.chain(*pieces)):
        table.append((f"{kind}{n}", [names[-b] for b in back if b <= n], product, exchanged))
        names.append(f"{kind}{n}")
    steps = steps_of(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "SOON", soon)
        out = overlapped_matmuls(steps)
    assert len(out) == len(steps) and set(out) == set(steps)
    at = {s: n for n, s in enumerate(out)}
    needs = {s: ancestors(steps, s) for s in steps}
    late = {s for s in steps if s.overlapped is not None}
    for s in steps:
        assert all(at[m] < at[s] for m in needs[s])
    for s in late:
        assert s.eqn.product and s.overlapped.eqn.exchanged and at[s.overlapped] < at[s]
        assert s not in needs[s.overlapped] and s.overlapped not in ancestors(steps, s, ordered=False)
    for e in {s.overlapped for s in late}:
        overlaps = [s for s in late if s.overlapped is e]
        assert len(overlaps) <= MOST and sum(s.eqn.product for s in overlaps) <= e.eqn.exchanged
    on_time = [s for s in steps if s not in late and not needs[s] & late]
    assert on_time == sorted(on_time, key=at.get)
    exchanges = [s for s in steps if s.eqn.exchanged]
    assert exchanges == sorted(exchanges, key=at.get)


def test_an_order_of_many_steps_is_found_soon():
    rows = [*idle(), *WAIT, *[kernel(f"k{n}", "p0") for n in range(20000)]]
    steps = steps_of(rows)
    steps[0].overlapped = steps[2]
    begin = time.perf_counter()
    out = overlap._delayed(steps)
    assert time.perf_counter() - begin < 2  # visiting all waiting matmuls at every step would take minutes
    assert out.index(steps[0]) == 2 and len(out) == len(steps)


@pytest.mark.usefixtures("seconds")
def test_reordering_twice_overlaps_the_same_matmuls():
    def overlaps(steps):
        return {s.eqn.name: s.overlapped.eqn.name for s in steps if s.overlapped is not None}

    rows = [row for n in range(6) for row in layer(n, f"norm{n - 1}" if n else "norm")]
    once = overlapped_matmuls(steps_of([kernel("norm"), *rows]))
    names = [s.eqn.name for s in once]
    shuffled = steps_of(sorted([kernel("norm"), *rows], key=lambda row: names.index(row[0])))
    assert overlaps(overlapped_matmuls(shuffled)) == overlaps(once) and len(overlaps(once)) == 5


def test_attention_is_work_and_does_not_wait():
    """Only library matmuls can leave SMs to a collective."""
    q = from_numpy(np.zeros((2, 512, 4, 64), np.float32)).aval
    attend = lambda q: [nn.dot_product_attention(q, q, q)]
    (eqn,) = [e for e in simplify(stage(attend, [q], "f")).eqns if e.prim.name == "attention"]
    assert overlap._seconds(Opaque(eqn)) > 0 == overlap._product(Opaque(eqn))


def test_a_loop_with_collectives_is_not_a_collective():
    """No matmul overlaps with it: its body is unknown and mostly computes."""
    psum = lambda x: mc.psum_invariant_p.bind(x, src="V", dst="I", axes=("x",), sizes=(2,))
    looped = lambda x: bf.tree.leaves(lax.scan(lambda c, row: (c + psum(row), None), x[0], x))
    x = from_numpy(np.zeros((4, 8), np.float32)).aval
    (eqn,) = [e for e in stage(looped, [x], "f").eqns if e.prim.name == "scan"]
    assert communicates(eqn) and not overlap._exchanged(Opaque(eqn)) and not overlap._product(Opaque(eqn))


def product(name, *reads, seconds=1e-3):
    return name, reads, seconds, 0


def exchange(name, *reads, seconds=2e-3):
    return name, reads, 0, seconds


def kernel(name, *reads):
    return name, reads, 0, 0


def layer(n, before):
    """Backward pass of a tensor-parallel layer."""
    return [
        exchange(f"gather{n}", before), product(f"w{n}", f"gather{n}"), product(f"d{n}", f"gather{n}"),
        exchange(f"scatter{n}", f"d{n}"), kernel(f"norm{n}", f"scatter{n}"),
    ]  # fmt: skip


WAIT = [
    product("x"),
    exchange("e", "x"),
    product("y", "e"),
    exchange("f", "y"),
    product("z", "f"),
    product("end", "z"),
]
"""Two collectives whose results are needed next."""

ONCE = WAIT[:4]
"""One such collective: no work follows the second."""


def idle(n=1, seconds=1e-3):
    return [product(f"p{i}", seconds=seconds) for i in range(n)]


def read_after(n):
    """A matmul with ``n`` other steps before its reader."""
    more = [product(f"c{i}", f"c{i - 1}" if i else "z") for i in range(n - 5)]
    return [*idle(), *WAIT[:5], *more, product("r", "p0", more[-1][0])]


def late(reader):
    """A matmul that one of two collectives reads, if any, much later."""
    first = [product(f"c{i}", f"c{i - 1}") for i in range(SOON)]
    reads = {n: ("p0",) if n == reader else () for n in ("first", "e")}
    return [
        *idle(), *first, exchange("first", *reads["first"]), product("x", first[-1][0]),
        exchange("e", "x", *reads["e"]), *WAIT[2:4],
    ]  # fmt: skip


LAYERS = [*layer(0, "loss"), *layer(1, "norm0"), *layer(2, "norm1")]
TWO = {"w0": "scatter0", "w1": "scatter1"}

CASES = {  # steps, and the matmuls that overlap with each collective
    "tensor parallel": (LAYERS, TWO),
    "exchanges as long as a product": ([s[:3] + (s[3] / 2,) for s in LAYERS], TWO),
    "exchanges shorter than a product": ([s[:3] + (s[3] / 3,) for s in LAYERS], {}),
    "data parallel": (
        [s for n in range(6) for s in (
            product(f"d{n}", f"d{n - 1}"), product(f"w{n}", f"d{n - 1}"), exchange(f"sum{n}", f"w{n}"))], {}),
    "gathers of parameters": (
        [s for n in range(6) for s in (
            product(f"w{n}", f"d{n - 1}"), exchange(f"all{n}"), product(f"d{n}", f"d{n - 1}", f"all{n}"))], {}),
    "nobody reads it": ([*idle(), *WAIT], {"p0": "e"}),
    "a kernel reads it": ([*idle(), kernel("k", "p0"), *WAIT], {"p0": "e"}),
    "it comes after": ([*WAIT[:3], *idle(), *WAIT[3:]], {"p0": "e"}),
    "it reads the exchange before": ([*WAIT[:2], product("p", "e"), *WAIT[2:]], {"p": "f"}),
    "it is read soon": (read_after(SOON - 1), {}),
    "it is read later": (read_after(SOON), {"p0": "e"}),
    "it is longer than the exchange": ([*idle(seconds=2.1e-3), *WAIT], {}),
    "two of which one fits": ([*idle(2, seconds=1.5e-3), *WAIT], {"p0": "e", "p1": "f"}),
    "the exchange reads it": ([*idle(), product("x", "p0"), *WAIT[1:]], {}),
    "an exchange before reads it": ([*idle(), product("x"), exchange("first", "p0"), *WAIT[1:]], {}),
    "the exchange reads it later": (late("e"), {}),
    "an exchange before reads it later": (late("first"), {}),
    "nobody of those reads it later": (late(""), {"p0": "e"}),
    "more than may wait": ([*idle(MOST + 2, seconds=1e-4), *ONCE], {f"p{n + 2}": "e" for n in range(MOST)}),
    "more that come after than may": (
        [*WAIT[:2], *idle(2 * MOST, seconds=1e-4), *WAIT[2:]], {f"p{n}": "ef"[n // MOST] for n in range(2 * MOST)}),
    "one that comes after hides no exchange": (
        [*idle(seconds=1.5e-3), product("p2", seconds=1.5e-3), *WAIT[:3], product("p1", seconds=4e-4), *WAIT[3:]],
        {"p0": "e", "p1": "e", "p2": "f"},
    ),
    "it reads one that waits": (
        [product("p0", seconds=3e-3), *[product(f"c{n}", f"c{n - 1}") for n in range(SOON + 1)],
         product("p1", "p0", seconds=1e-4), exchange("e", f"c{SOON}"), *WAIT[2:]],
        {},
    ),
    "there is one exchange": ([*idle(), *WAIT[:3]], {}),
    "it is too short": ([*idle(seconds=1e-5), *WAIT], {}),
    "the exchange is too short": ([*idle(), *(s[:3] + (s[3] / 200,) for s in WAIT)], {}),
}  # fmt: skip


@pytest.mark.usefixtures("seconds")
@pytest.mark.parametrize("name", CASES)
def test_overlapped_matmuls(name):
    rows, overlaps = CASES[name]
    steps = steps_of(rows)
    out = overlapped_matmuls(steps)
    assert {s.eqn.name: s.overlapped.eqn.name for s in out if s.overlapped} == overlaps
    done = set()
    for s in out:
        assert done >= ancestors(steps, s) and (s.overlapped is None or s.overlapped in done)
        done.add(s)
    assert overlaps or out == steps


@pytest.mark.usefixtures("seconds")
def test_a_layer_s_weights_wait_for_its_scattered_sum():
    names = [s.eqn.name for s in overlapped_matmuls(steps_of(LAYERS))]
    assert names[:5] == ["gather0", "d0", "scatter0", "w0", "norm0"]


@pytest.mark.parametrize("worth, overlaps", [(0, 2), (1, 0)])
def test_gradients_of_divided_layers(monkeypatch, rng, worth, overlaps):
    monkeypatch.setattr(overlap, "LEAST", worth)
    jaxpr, args = divided_mlp.gradients(rng)
    plain = simplify(lower_collectives(jaxpr))
    steps = cuda_program.planned(plain, (False,) * len(args), "sm_90").steps
    eqns = [s.eqn if isinstance(s, OpaqueStep) else None for s in steps]
    found = [s for s in steps if isinstance(s, OpaqueStep) and s.overlapped is not None]
    assert len(found) == overlaps
    for s in found:
        assert s.eqn.prim.name == "dot_general" and s.eqn.outvars[0].aval.shape in ((16, 32), (32, 16))
        assert s.overlapped.prim.name == "mesh_psum_scatter" and eqns.index(s.overlapped) < eqns.index(s.eqn)


class Pointwise:
    """A stand-in for a ``Region``."""

    def __init__(self, inputs, output):
        self.inputs, self.outputs = inputs, [output]


class Value:
    """A stand-in for a ``Var`` of a size."""

    def __init__(self, nbytes):
        self.aval = SimpleNamespace(nbytes=nbytes)


def late(rows, monkeypatch):
    """Steps before and after: letters (pointwise, conversion, product, collective)."""
    seconds = lambda kind: lambda s: 1e-3 if getattr(s, "kind", None) == kind else 0.0
    monkeypatch.setattr(overlap, "Region", Pointwise)
    monkeypatch.setattr(overlap, "_product", seconds("p"))
    monkeypatch.setattr(overlap, "_exchanged", seconds("e"))
    steps, values = [], []
    for kind, back in rows:
        inputs = [values[-b] for b in back if b <= len(values)]
        values.append(Value(2 if kind == "c" else 4))
        if kind in "kc":
            steps.append(Pointwise(inputs, values[-1]))
        else:
            steps.append(Work(kind, inputs, values[-1]))
    return steps, overlap._late_readers(steps)


class Work:
    """A stand-in for a matmul or a collective."""

    def __init__(self, kind, inputs, output):
        self.kind, self.inputs, self.outputs = kind, inputs, [output]


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from("kpe"), st.lists(st.integers(1, 6), max_size=3)), max_size=14))
@settings(max_examples=300)
def test_late_readers_come_after_what_they_need(rows):
    with pytest.MonkeyPatch.context() as patch:
        steps, found = late(rows, patch)
    assert sorted(map(id, found)) == sorted(map(id, steps))
    place = {s: n for n, s in enumerate(found)}
    makers = {s.outputs[0]: s for s in steps}
    assert all(place[makers[v]] < place[s] for s in steps for v in s.inputs)
    others = [s for s in found if isinstance(s, Work)]
    assert others == [s for s in steps if isinstance(s, Work)]  # only pointwise steps move


LATE = {
    "past the products of the other part": ([("e", []), ("k", [1]), ("p", []), ("p", [2])], [0, 2, 1, 3]),
    "with what reads it": ([("e", []), ("k", [1]), ("k", [1]), ("p", []), ("p", [2])], [0, 3, 1, 2, 4]),
    "not past nothing": ([("e", []), ("k", [1]), ("k", []), ("p", [2])], [0, 1, 2, 3]),
    "not if the next product reads it": ([("e", []), ("k", [1]), ("p", [1]), ("p", [])], [0, 1, 2, 3]),
    "not without a collective": ([("p", []), ("k", [1]), ("p", []), ("p", [2])], [0, 1, 2, 3]),
    "not a conversion to fewer bytes": ([("e", []), ("c", [1]), ("p", []), ("p", [2])], [0, 1, 2, 3]),
    "results last": ([("e", []), ("k", [1]), ("p", [])], [0, 2, 1]),
}


@pytest.mark.parametrize("case", LATE)
def test_late_readers(case, monkeypatch):
    rows, want = LATE[case]
    steps, found = late(rows, monkeypatch)
    assert [steps.index(s) for s in found] == want
