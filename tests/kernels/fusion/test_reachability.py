"""The order of steps, against reachability in a graph of edges."""

import numpy as np
import pytest

from blufunc.kernels.fusion.reachability import Reachability


def reachable(edges, n):
    """[i, j]: whether i waits for j."""
    matrix = np.zeros((n, n), bool)
    for i, j in edges:
        matrix[i, j] = True
    for k in range(n):
        matrix |= matrix[:, k, None] & matrix[None, k]
    return matrix


@pytest.mark.parametrize("seed", range(20))
def test_as_reachability(seed):
    rng = np.random.default_rng(seed)
    waits, edges, alive = Reachability(), set(), []
    for n in range(1, 25):
        step = waits.add()
        assert step == n - 1
        for other in rng.choice(alive, min(len(alive), 2), replace=False) if alive else ():
            waits.wait(step, int(other))
            edges.add((step, int(other)))
        alive.append(step)
        if len(alive) > 3 and rng.random() < 0.4:
            old, new = (int(s) for s in rng.choice(alive, 2, replace=False))
            want = reachable(edges, n)
            passes = lambda a, b: bool((want[b] & want[:, a]).any())  # noqa: B023
            assert waits.between(old, new) == passes(old, new)
            assert waits.between(new, old) == passes(new, old)
            if not (passes(old, new) or passes(new, old)):
                waits.merge(old, new)
                alive.remove(old)
                edges = {(new if a == old else a, new if b == old else b) for a, b in edges}
                edges = {(a, b) for a, b in edges if a != b}
        want = reachable(edges, n)
        for a in alive:
            for b in alive:
                assert waits.waits(a, b) == want[a, b], (seed, n, a, b)
