"""Comparison of a partitioned program with one device, for tests."""

from collections import Counter

import numpy as np

from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir.jaxpr import eval_jaxpr, subjaxprs
from blufunc.core.programs.stage import stage
from blufunc.core.pytree import tree
from blufunc.parallel.collectives.lowering import lower_collectives
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.mesh.spec import P
from blufunc.parallel.partition.partition import localise
from blufunc.parallel.runtime.simulated import run_ranks

MESHES = {
    "1": AbstractMesh((1,), ("x",)),
    "2": AbstractMesh((2,), ("x",)),
    "4": AbstractMesh((4,), ("x",)),
    "2x2": AbstractMesh((2, 2), ("x", "y")),
    "2x2x2": AbstractMesh((2, 2, 2), ("x", "y", "z")),
}


def padded_shards(x, sharding):
    """The shard of each rank, with garbage in the padding."""
    x = np.asarray(x)
    shape = sharding.shard_shape(x.shape)
    found = []
    for index in sharding.indices(x.shape):
        part = x[index]
        garbage = (
            np.nan
            if np.issubdtype(x.dtype, np.inexact)
            else np.iinfo(x.dtype).max
            if x.dtype.kind in "iu"
            else 1
        )
        shard = np.full(shape, garbage, x.dtype) if x.dtype.kind != "V" else np.zeros(shape, x.dtype)
        shard[tuple(slice(0, n) for n in part.shape)] = part
        found.append(shard)
    return found


def assembled(shards, sharding, shape, dtype):
    """The whole value; all shards of one part must be equal."""
    out = np.zeros(shape, dtype)
    seen = np.zeros(shape, bool)
    for shard, index in zip(shards, sharding.indices(shape), strict=True):
        part = np.asarray(shard)[tuple(slice(0, s.stop - s.start) for s in index)]
        old = out[index]
        np.testing.assert_array_equal(part[seen[index]], old[seen[index]])
        out[index], seen[index] = part, True
    assert seen.all()
    return out


def divided(jaxpr, args, specs, mesh, outs=None):
    """The results of a global jaxpr computed by all ranks, and the local jaxpr."""
    shardings = [NamedSharding(mesh, s) for s in specs]
    ends = None if outs is None else [None if s is None else NamedSharding(mesh, s) for s in outs]
    local, results = localise(jaxpr, shardings, mesh, ends)
    parts = [padded_shards(a, s) for a, s in zip(args, shardings, strict=True)]
    plain = lower_collectives(local)
    ranks = run_ranks(mesh, lambda r: eval_jaxpr(plain, [from_numpy(p[r]) for p in parts]), deadline=60)
    whole = [
        assembled([r[i] for r in ranks], s, v.aval.shape, v.aval.dtype)
        for i, (s, v) in enumerate(zip(results, jaxpr.outvars, strict=True))
    ]
    return whole, local


def check(f, args, specs, mesh, outs=None, rtol=1e-5, atol=1e-5):
    """Compare ``f`` on all ranks with ``f`` on one device; the local jaxpr."""
    arrays = [from_numpy(np.asarray(a)) for a in args]
    jaxpr = stage(lambda *xs: tree.leaves(f(*xs)), [a.aval for a in arrays])
    expected = eval_jaxpr(jaxpr, arrays)
    got, local = divided(jaxpr, args, specs, mesh, outs)
    for g, e in zip(got, expected, strict=True):
        e = np.asarray(e)
        if np.issubdtype(e.dtype, np.floating):
            np.testing.assert_allclose(g, e, rtol=rtol, atol=atol)
        else:
            np.testing.assert_array_equal(g, e)
    return local


_LOCAL = ("mesh_axis_index", "shard_slice", "pcast", "keep_first")


def collectives(jaxpr):
    """Counts of the collectives that communicate, bodies included."""
    names = Counter()
    for eqn in jaxpr.eqns:
        if eqn.prim.kind == "collective" and eqn.prim.name not in _LOCAL:
            names[eqn.prim.name.removeprefix("mesh_")] += 1
        for sub in subjaxprs(eqn.params):
            names += collectives(sub)
    return dict(names)


__all__ = ["MESHES", "P", "check", "collectives", "divided"]
