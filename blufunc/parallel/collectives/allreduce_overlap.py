"""Overlap the last all-reduce with matmuls whose results only earlier sums read.

Parallel, between stages 3 and 4, after ``allreduce_buckets.py``. In: a local jaxpr with buckets. Out: the same, with
such matmuls moved after the last bucket, about as many as it takes time, each followed by its own bucket. In training
the last bucket is the gradient of the first layer, often an embedding as large as many layers, and the SMs would idle
while links carry it. If it is small nothing moves, since ranks would then wait for a larger bucket at the end. The
idea that gradients of weights can wait comes from pipelines (Qi et al., "Zero Bubble Pipeline Parallelism", 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var, communicates
from blufunc.kernels.backends.cuda.streams import product_seconds
from blufunc.parallel.collectives import primitives as mc
from blufunc.parallel.collectives.allreduce_buckets import passes_on

SUMMED = 1e11
"""All-reduce bytes per second in one host. measured: four H200s, no multicast."""

WORTH = 0.9
"""Fraction of the wait that may remain: less is not worth longer lifetimes."""


def with_cover(jaxpr: Jaxpr) -> Jaxpr:
    """Move matmuls after the last bucket, if ranks then wait less at the end."""
    eqns = list(jaxpr.eqns)
    buckets = [i for i, e in enumerate(eqns) if e.prim is mc.mesh_sums_p]
    if len(buckets) < 2:
        return jaxpr
    end = buckets.pop()
    last = _summed(eqns[end])
    live = {a for a in jaxpr.outvars if a.__class__ is Var} | _ancestors(eqns[: end + 1], eqns[end].invars)
    later: set[Eqn] = set()
    best, least = set(later), last
    work: list[tuple[float, float]] = []
    for i in reversed(buckets):
        whole = _with_readers(eqns[i:end], later)
        if whole is None or sum(products for products, _ in work) >= last:
            break
        alone = _only_for(whole, eqns[:end], later, live)
        products = sum(map(product_seconds, alone))
        if not products:
            continue
        later |= {*alone, *whole}
        work.insert(0, (products, _summed(eqns[i])))
        if (wait := _wait(last, work)) < WORTH * least:
            best, least = set(later), wait
    if not best:
        return jaxpr
    before = [e for e in eqns[: end + 1] if e not in best]
    return jaxpr.replace(eqns=[*before, *[e for e in eqns[:end] if e in best], *eqns[end + 1 :]])


def _wait(last: float, work: Sequence[tuple[float, float]]) -> float:
    """Seconds for which ranks wait for sums after all computation.

    Args:
      last: the seconds of the last bucket.
      work: for each bucket moved after it, the seconds of its matmuls and of its sum.
    """
    computed, summed = 0.0, last
    for products, seconds in work:
        computed += products
        summed = max(summed, computed) + seconds
    return summed - computed


def _summed(bucket: Eqn) -> float:
    """Estimate of the seconds for which a bucket occupies the links."""
    return sum(a.aval.nbytes for a in bucket.invars) / SUMMED


def _ancestors(eqns: Sequence[Eqn], needed: Iterable[Any]) -> set[Any]:
    """The variables that some variables depend on."""
    found = {a for a in needed if a.__class__ is Var}
    for eqn in reversed(eqns):
        if not found.isdisjoint(eqn.outvars):
            found |= _variables(eqn)
    return found


def _with_readers(eqns: Sequence[Eqn], later: set[Eqn]) -> set[Eqn] | None:
    """A bucket, first of ``eqns``, and what passes it on; None if others read it."""
    found = {eqns[0]}
    values = set(eqns[0].outvars)
    for e in eqns[1:]:
        if e not in later and not values.isdisjoint(_variables(e)):
            if not passes_on(e):
                return None
            found.add(e)
            values.update(e.outvars)
    return found


def _only_for(bucket: set[Eqn], eqns: Sequence[Eqn], later: set[Eqn], live: set[Any]) -> list[Eqn]:
    """The equations whose results only the bucket, and what follows with it, reads."""
    read = set(live)  # by other equations
    needed: set[Any] = set()
    alone: list[Eqn] = []
    for eqn in reversed(eqns):
        mine = eqn in bucket or eqn in later
        if not mine and not needed.isdisjoint(eqn.outvars) and read.isdisjoint(eqn.outvars):
            mine = not (eqn.effects or communicates(eqn))  # these keep their order
            alone += [eqn] * mine
        (needed if mine else read).update(_variables(eqn))
    return alone


def _variables(eqn: Eqn) -> set[Any]:
    return {a for a in eqn.invars if a.__class__ is Var}
