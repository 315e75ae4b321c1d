"""What the ranks exchange in a program: what tests of parallel functions count."""

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
    """The collectives of ``fun(*args)``: for each the name, how often it runs, and its equation."""
    for e, times in equations(bf.jit(fun).lower(*args).jaxpr):
        if getattr(e.prim, "communicates", False):
            yield e.prim.name.removeprefix("mesh_"), times, e


def exchanged(fun, *args):
    """Of each collective of ``fun(*args)`` how often it runs, and the bytes that a rank puts in, of all together."""
    counts, sizes = Counter(), Counter()
    for name, times, e in meetings(fun, *args):
        counts[name] += times
        sizes[name] += times * sum(a.aval.size * a.aval.dtype.itemsize for a in e.invars)
    return {name: (counts[name], sizes[name]) for name in counts}


def weighted(fun):
    """A scalar of the results of ``fun``, in which each element has a weight of its own."""

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
    """What each rank exchanges in a local program, numbers left out: ``{(collective, axes): (how often, bytes)}``.

    The bytes are those of whole values and sums: what a gather makes, what another collective takes.
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
