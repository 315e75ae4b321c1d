"""Structurally identical regions share the kernels that each would get alone."""

import random

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import nn
from blufunc.core.arrays.array import from_numpy
from blufunc.core.programs.simplify import inline_bodies, simplify
from blufunc.kernels.fusion.fuse import Region, fuse
from blufunc.kernels.loopir.launch import Scratch
from blufunc.kernels.lower.region import Lowered, lower
from tests.kernels import random_graphs
from tests.kernels.differential import SMALL


def ones(*shape, dtype=np.float32):
    return from_numpy(np.ones(shape, dtype))


X = ones(6, 8)


def lowered(fun, *args):
    """The regions of a function, and for each its launches."""
    fusion = fuse(inline_bodies(simplify(bf.jit(fun).trace(*args).jaxpr))[0])
    made = Lowered(fusion, SMALL)
    return fusion, [(r, made.launches(r)) for r in fusion.steps if isinstance(r, Region)]


def kernels(fun, *args):
    return [launch.kernel for _, launches in lowered(fun, *args)[1] for launch in launches]


def assert_as_alone(fusion, found):
    """Each region has the kernels and operands of its own lowering."""
    for region, launches in found:
        alone = lower(region, fusion, SMALL)
        assert [x.kernel.key for x in launches] == [x.kernel.key for x in alone]
        assert [x.kernel.notes for x in launches] == [x.kernel.notes for x in alone]
        memory = {}  # between the kernels of the region: from what it has to what it has alone
        for mine, theirs in zip(launches, alone, strict=True):
            for b, c in zip(mine.kernel.buffers, theirs.kernel.buffers, strict=True):
                x, y = mine.operands[b], theirs.operands[c]
                if isinstance(x, Scratch):
                    assert (x.dtype, x.size) == (y.dtype, y.size)
                    assert memory.setdefault(x, y) is y
                else:
                    assert x is y
            assert set(mine.operands) == set(mine.kernel.buffers)


def layers(n):
    """A function whose layers are a normalization after a matmul."""

    def fun(x, *weights):
        for w in weights[:n]:
            x = nn.softmax(x @ w)
        return x

    return fun


def test_layers_share_their_kernels():
    fusion, found = lowered(layers(4), X, *[ones(8, 8)] * 4)
    assert len(found) == 4
    assert len({launch.kernel for _, launches in found for launch in launches}) == 1
    assert_as_alone(fusion, found)


def test_memory_between_kernels_is_each_regions_own():
    """Sums over rows cut in chunks: regions do not share partial results."""
    fusion, found = lowered(lambda ps: [(p["w"] * 2).sum(0) for p in ps], [{"w": ones(6, 8)}] * 2)
    made = [[launch.kernel for launch in launches] for _, launches in found]
    assert len(made[0]) == 2 and made[0] == made[1]
    parts = [
        {x for launch in ls for x in launch.operands.values() if isinstance(x, Scratch)} for _, ls in found
    ]
    assert all(parts) and not parts[0] & parts[1]
    assert_as_alone(fusion, found)


DIFFERENT = {
    "operations": (lambda x, y, op: op(x), (bnp.sin, bnp.cos)),
    "numbers": (lambda x, y, n: x * n, (2, 3)),
    "signs of zero": (lambda x, y, n: bnp.arctan2(x, n), (0.0, -0.0)),
    "parameters": (lambda x, y, n: x[n : n + 4] * 2, (0, 2)),
    "operands": (lambda x, y, n: x[::-1] - (x, y)[n].T.reshape(6, 8), (0, 1)),
    "sizes": (lambda x, y, n: x[:n] * 2, (3, 4)),
    "what is read later": (lambda x, y, n: ((z := bnp.sin(x) + 1).sum(1), *[z] * n), (0, 1)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_differs_is_not_shared(what):
    """Of one line, and of arguments of one name."""
    fun, ways = DIFFERENT[what]
    each = lambda ps: [fun(*[q["w"] for q in p], way) for p, way in zip(ps, ways, strict=True)]
    fusion, found = lowered(each, [({"w": X}, {"w": X})] * 2)
    made = [launch.kernel for _, launches in found for launch in launches]
    assert len(made) == len(set(made)) == 2
    assert_as_alone(fusion, found)


def test_lines_are_not_shared():
    """Kernels say which lines they are from."""
    fusion, found = lowered(lambda p, q: (bnp.exp(p["w"]), bnp.exp(q["w"])), {"w": X}, {"w": X})
    assert len({launch.kernel for _, launches in found for launch in launches}) == 2


def test_names_are_those_of_the_arguments():
    """Of each the last of its path: parameters of one name are identical, others not."""
    update = lambda params: [bnp.sin(p) for layer in params for p in layer.values()]
    assert len(set(kernels(update, [{"weight": X}] * 3))) == 1
    assert len(set(kernels(update, [{"weight": X, "scale": X}] * 3))) == 2


@pytest.mark.second
@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", range(0, 80, 20))
def test_random_programs(first):
    """Programs of two parts, the same twice or of other operations in the same lines."""
    shared = 0
    for seed in range(first, first + 20):
        kinds = random_graphs.FLOATS[seed % 5], random_graphs.INTEGERS[seed % 4]
        args = random_graphs.inputs(np.random.default_rng(seed), random.Random(seed).choice, *kinds)
        half = [{"x": from_numpy(x)} for x in args]

        def both(halves, seed=seed, kinds=kinds):
            choices = [random.Random(seed).choice, random.Random(seed + seed % 2).choice]
            parts = [[p["x"] for p in half] for half in halves]
            return [random_graphs.graph(p, c, 14, *kinds) for p, c in zip(parts, choices, strict=True)]

        fusion, found = lowered(both, [half, half])
        assert_as_alone(fusion, found)
        made = [launch.kernel for _, launches in found for launch in launches]
        shared += len(made) - len(set(made))
    assert shared > 20
