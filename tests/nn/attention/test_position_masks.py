"""Masks as inequalities between positions, in every spelling."""

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc.core.programs.stage import stage
from blufunc.nn.attention.point_graph import Graph, Point, places_of
from blufunc.nn.attention.position_masks import Condition, conditions, every_row_sees

T = 6
CAUSAL = [Condition(((0, 1), (1, -1)), 0)]


def index():
    i = bnp.arange(T)
    return i[:, None], i[None]


MASKS = {
    "tril": (lambda: bnp.tril(bnp.ones((T, T), bool)), CAUSAL),
    "tril of numbers": (lambda: bnp.tril(bnp.ones((T, T))) == 1, CAUSAL),
    "tril as booleans": (lambda: bnp.tril(bnp.ones((T, T))).astype(bool), CAUSAL),
    "not triu": (lambda: ~bnp.triu(bnp.ones((T, T), bool), k=1), CAUSAL),
    "no triu": (lambda: bnp.triu(bnp.ones((T, T)), k=1) == 0, CAUSAL),
    "one minus": (lambda: 1 - bnp.triu(bnp.ones((T, T)), k=1) > 0.5, CAUSAL),
    "at least": (lambda: index()[0] >= index()[1], CAUSAL),
    "at most": (lambda: index()[1] <= index()[0], CAUSAL),
    "before the next": (lambda: index()[1] < index()[0] + 1, CAUSAL),
    "difference": (lambda: index()[0] - index()[1] > -1, CAUSAL),
    "not after": (lambda: bnp.logical_not(index()[1] > index()[0]), CAUSAL),
    "floats": (lambda: index()[0].astype("float32") >= index()[1].astype("float32"), CAUSAL),
    "broadcast": (lambda: bnp.broadcast_to(index()[0], (T, T)) >= bnp.arange(T), CAUSAL),
    "transposed": (lambda: bnp.triu(bnp.ones((T, T), bool)).T, CAUSAL),
    "a part": (lambda: bnp.tril(bnp.ones((9, 9), bool))[:T, :T], CAUSAL),
    "another part": (lambda: bnp.tril(bnp.ones((9, 9), bool))[3:, :T], [Condition(((0, 1), (1, -1)), 3)]),
    "strictly": (lambda: index()[0] > index()[1], [Condition(((0, 1), (1, -1)), -1)]),
    "every second": (
        lambda: bnp.arange(2 * T)[::2, None] >= bnp.arange(T),
        [Condition(((0, 2), (1, -1)), 0)],
    ),
    "window": (
        lambda: (index()[0] >= index()[1]) & (index()[0] - index()[1] < 3),
        [*CAUSAL, Condition(((0, -1), (1, 1)), 2)],
    ),
    "not outside": (
        lambda: ~((index()[0] < index()[1]) | (index()[0] - index()[1] >= 3)),
        [*CAUSAL, Condition(((0, -1), (1, 1)), 2)],
    ),
    "columns": (lambda: bnp.broadcast_to(bnp.arange(T) < 4, (T, T)), [Condition(((1, -1),), 3)]),
    "parity": (lambda: (index()[0] + index()[1]) % 2 == 0, None),
    "distance": (lambda: abs(index()[0] - index()[1]) < 3, None),
    "one of two": (lambda: (index()[0] >= index()[1]) | (index()[1] < 2), None),
    "a table": (lambda: bnp.asarray(np.tri(T, dtype=bool)), None),
}


def found(make):
    jaxpr = stage(lambda: [make()], [])
    graph = Graph(jaxpr)
    return conditions(graph, Point(jaxpr.outvars[0], places_of(jaxpr.out_avals[0].shape)))


@pytest.mark.parametrize("name", MASKS)
def test_conditions(name):
    make, want = MASKS[name]
    got = found(make)
    assert got == want
    if want is not None:  # and they match the mask
        mask = np.asarray(make())
        for q, k in np.ndindex(T, T):
            assert mask[q, k] == all(c.holds({0: q, 1: k}) for c in want)


SEEN = [
    (CAUSAL, T, T, True),
    (CAUSAL, T, 3, True),
    (CAUSAL, 3, T, True),
    ([Condition(((0, 1), (1, -1)), -1)], T, T, False),  # the first row is fully masked
    ([*CAUSAL, Condition(((0, -1), (1, 1)), 2)], T, T, True),
    ([*CAUSAL, Condition(((0, -1), (1, 1)), 2)], T, 2, False),  # late rows have no visible key
    ([Condition(((1, -1),), 3)], T, T, True),
    ([Condition(((0, 1),), -1)], T, T, False),
    ([Condition(((2, 1), (1, -1)), 0)], T, T, False),  # nothing is known of another axis
    ([], T, T, True),
]


@pytest.mark.parametrize("conditions, rows, columns, want", SEEN)
def test_every_row_sees(conditions, rows, columns, want):
    assert every_row_sees(conditions, 0, 1, rows, columns) == want
    if want:
        for q in range(rows):
            assert any(all(c.holds({0: q, 1: k}) for c in conditions) for k in range(columns))
