"""Minimum cuts, against all cuts of small networks."""

import itertools
import random

import pytest

from blufunc.kernels.recompute.min_cut import UNLIMITED, Network


def cost(edges, side):
    """The capacity of the edges that leave a set of nodes."""
    return sum(c for a, b, c in edges if a in side and b not in side)


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_is_cheaper_and_none_as_cheap_is_nearer(seed):
    rng = random.Random(seed)
    inner = range(rng.choice([1, 3, 6]))
    nodes = ["source", *inner, "sink"]
    edges = [
        (a, b, rng.choice([0, 1, 2, 5, 9]))
        for a, b in itertools.permutations(nodes, 2)
        if rng.random() < 0.5 and (a, b) != ("source", "sink")
    ]
    sides = [
        {"source", *chosen} for n in range(len(inner) + 1) for chosen in itertools.combinations(inner, n)
    ]
    least = min(cost(edges, side) for side in sides)
    best = [side for side in sides if cost(edges, side) == least]

    def network():
        made = Network()
        for edge in edges:
            made.edge(*edge)
        return made

    assert network().near_source("source", "sink") & set(nodes) == set.intersection(*best)
    near_sink = network().near_sink("source", "sink") & set(nodes)
    assert set(nodes) - near_sink == set.union(*best)


def test_edges_between_the_same_nodes_add_up():
    made = Network()
    for a, b, capacity in [
        ("source", 1, 2),
        ("source", 1, 2),
        (1, "sink", 3),
        (1, 2, UNLIMITED),
        (2, "sink", 2),
    ]:
        made.edge(a, b, capacity)
    assert made.near_source("source", "sink") == {"source"}  # 4 in, 5 out
