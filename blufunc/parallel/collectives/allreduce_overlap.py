"""What runs beside the last sum over ranks: products whose results only earlier sums wait for.

Parallel, between stages 3 and 4, behind ``allreduce_buckets.py``. In: a local jaxpr with buckets. Out: the same, in
which products that nothing but a bucket needs come after the last bucket, as many as take about its time, with their
bucket behind them. In training the last is the gradient of the first layer, often that of an embedding as large as many
layers: links would carry it while multiprocessors idle. Where it is small nothing is gained: ranks would wait for the
larger bucket in the end. That gradients of weights can wait while those of activations cannot is known from pipelines
(Qi et al., "Zero Bubble Pipeline Parallelism", 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var, meets
from blufunc.kernels.backends.cuda.streams import product_seconds
from blufunc.parallel.collectives import primitives as mc
from blufunc.parallel.collectives.allreduce_buckets import passes_on

SUMMED = 1e11
"""Bytes a second that the GPUs of one host sum, about: four H200s without multicast made it."""

WORTH = 0.9
"""What ranks may still wait of what they did: for more of it operands are not kept in memory for longer."""


def with_cover(jaxpr: Jaxpr) -> Jaxpr:
    """The program with products behind its last bucket, if ranks wait less at its end then."""
    eqns = list(jaxpr.eqns)
    buckets = [i for i, e in enumerate(eqns) if e.prim is mc.mesh_sums_p]
    if len(buckets) < 2:
        return jaxpr
    end = buckets.pop()
    last = _summed(eqns[end])
    kept = {a for a in jaxpr.outvars if a.__class__ is Var} | _ancestors(eqns[: end + 1], eqns[end].invars)
    later: set[Eqn] = set()
    best, least = set(later), last
    work: list[tuple[float, float]] = []
    for i in reversed(buckets):
        whole = _with_readers(eqns[i:end], later)
        if whole is None or sum(products for products, _ in work) >= last:
            break
        alone = _only_for(whole, eqns[:end], later, kept)
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
    """How long ranks wait for sums when all is computed.

    Args:
      last: the seconds of the last bucket.
      work: what comes behind it: the seconds of the products of each bucket, and those of its sum.
    """
    computed, summed = 0.0, last
    for products, seconds in work:
        computed += products
        summed = max(summed, computed) + seconds
    return summed - computed


def _summed(bucket: Eqn) -> float:
    """How long links are busy with a bucket, about."""
    return sum(a.aval.nbytes for a in bucket.invars) / SUMMED


def _ancestors(eqns: Sequence[Eqn], wanted: Iterable[Any]) -> set[Any]:
    """The variables that it takes to compute some."""
    found = {a for a in wanted if a.__class__ is Var}
    for eqn in reversed(eqns):
        if not found.isdisjoint(eqn.outvars):
            found.update(a for a in eqn.invars if a.__class__ is Var)
    return found


def _with_readers(eqns: Sequence[Eqn], later: set[Eqn]) -> set[Eqn] | None:
    """The first of some equations, a bucket, and what passes its sums on; None if other things read these."""
    found = {eqns[0]}
    values = set(eqns[0].outvars)
    for e in eqns[1:]:
        if e not in later and not values.isdisjoint(_variables(e)):
            if not passes_on(e):
                return None
            found.add(e)
            values.update(e.outvars)
    return found


def _only_for(bucket: set[Eqn], eqns: Sequence[Eqn], later: set[Eqn], kept: set[Any]) -> list[Eqn]:
    """The equations whose results nothing but a bucket, and what comes later with it, reads."""
    read = set(kept)  # by others
    wanted: set[Any] = set()
    alone: list[Eqn] = []
    for eqn in reversed(eqns):
        mine = eqn in bucket or eqn in later
        if not mine and not wanted.isdisjoint(eqn.outvars) and read.isdisjoint(eqn.outvars):
            mine = not (eqn.effects or meets(eqn))  # these keep their order
            alone += [eqn] * mine
        (wanted if mine else read).update(_variables(eqn))
    return alone


def _variables(eqn: Eqn) -> set[Any]:
    return {a for a in eqn.invars if a.__class__ is Var}
