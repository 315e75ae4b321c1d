"""Counts of the collectives in a program, for tests of parallel functions."""

from collections import Counter

import numpy as np

import blufunc as bf
from blufunc import tree
from blufunc.core.ir.jaxpr import subjaxprs


def equations(jaxpr, times=1):
    """All equations of a jaxpr and its bodies, each with how often it runs."""
    for e in jaxpr.eqns:
        yield e, times
        inner = times * e.params["length"] if e.prim.name == "scan" else times
        for body in subjaxprs(e.params):
            yield from equations(body, inner)


def meetings(fun, *args):
    """Name, trip count and equation of each collective of ``fun(*args)``."""
    for e, times in equations(bf.jit(fun).lower(*args).jaxpr):
        if getattr(e.prim, "communicates", False):
            yield e.prim.name.removeprefix("mesh_"), times, e


def exchanged(fun, *args):
    """Trip count, and operand bytes of a rank in total, of each collective."""
    counts, sizes = Counter(), Counter()
    for name, times, e in meetings(fun, *args):
        counts[name] += times
        sizes[name] += times * sum(a.aval.size * a.aval.dtype.itemsize for a in e.invars)
    return {name: (counts[name], sizes[name]) for name in counts}


def weighted(fun):
    """A scalar of the results of ``fun``, with a distinct weight for each element."""

    def total(*args):
        leaves = tree.leaves(fun(*args))
        return sum((x * np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)).sum() for x in leaves)

    return total


def same(got, want, **tolerance):
    """Assert that two pytrees hold the same numbers, to float32 rounding by default."""
    assert tree.structure(got) == tree.structure(want)
    tolerance = {"rtol": 2e-5, "atol": 1e-5} | tolerance
    for g, w in zip(tree.leaves(got), tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(
            np.asarray(g).astype(np.float32), np.asarray(w).astype(np.float32), **tolerance
        )


def same_with_gradients(got, want, args, **tolerance):
    """Assert that two functions have the same values and gradients of all ``args``."""
    same(got(*args), want(*args), **tolerance)
    numbers = tuple(range(len(args)))
    same(bf.grad(weighted(got), numbers)(*args), bf.grad(weighted(want), numbers)(*args), **tolerance)


def by_axes(local):
    """Collectives of a local program: ``{(collective, axes): (count, bytes)}``.

    Scalars are left out. The bytes are those of whole values and sums: the result of a gather, the operand otherwise.
    """
    counts, sizes = Counter(), Counter()
    for e, times in equations(local):
        if not getattr(e.prim, "communicates", False):
            continue
        name = e.prim.name.removeprefix("mesh_").removesuffix("_invariant")
        aval = (e.outvars if name == "all_gather" else e.invars)[0].aval
        if aval.size > 1:
            key = name, *e.params["axes"]
            counts[key] += times
            sizes[key] += times * aval.size * aval.dtype.itemsize
    return {key: (counts[key], sizes[key]) for key in counts}
