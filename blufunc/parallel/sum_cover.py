"""What runs beside the last sum over ranks: products whose results only earlier sums wait for.

Parallel, between stages 3 and 4, behind ``sum_buckets.py``. In: a local jaxpr with buckets. Out: the same, in which
products that nothing but a bucket needs come after the last bucket, as many as take about its time. In training that is
the gradient of the first layer, often that of an embedding as large as many layers: links would carry it while
multiprocessors idle. That gradients of weights can wait while those of activations cannot is known from pipelines (Qi
et al., "Zero Bubble Pipeline Parallelism", 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from blufunc.core.jaxpr import Eqn, Jaxpr, Var
from blufunc.kernels.cost import of_eqn
from blufunc.kernels.cuda_streams import PRODUCTS, PRODUCTS_FLOAT32
from blufunc.parallel import mesh_collectives as mc

SUMMED = 1e11
"""Bytes a second that the GPUs of one host sum, about: four H200s without multicast made it."""


def with_cover(jaxpr: Jaxpr) -> Jaxpr:
    """The program with products behind its last bucket."""
    eqns = list(jaxpr.eqns)
    buckets = [i for i, e in enumerate(eqns) if e.prim is mc.mesh_sums_p]
    if len(buckets) < 2:
        return jaxpr
    end = buckets.pop()
    wanted = sum(a.aval.nbytes for a in eqns[end].invars) / SUMMED
    kept = {a for a in jaxpr.outvars if a.__class__ is Var} | _ancestors(eqns[: end + 1], eqns[end].invars)
    later: set[Eqn] = set()
    seconds = 0.0
    for i in reversed(buckets):
        if seconds >= wanted or _is_read(eqns[i].outvars, eqns[i + 1 : end], later):
            break
        alone = _only_for(eqns[i], eqns[:end], later, kept)
        seconds += sum(map(_seconds, alone))
        later |= {*alone, eqns[i]}
    if not seconds:
        return jaxpr
    before = [e for e in eqns[: end + 1] if e not in later]
    return jaxpr.replace(eqns=[*before, *[e for e in eqns[:end] if e in later], *eqns[end + 1 :]])


def _ancestors(eqns: Sequence[Eqn], wanted: Iterable[Any]) -> set[Any]:
    """The variables that it takes to compute some."""
    found = {a for a in wanted if a.__class__ is Var}
    for eqn in reversed(eqns):
        if not found.isdisjoint(eqn.outvars):
            found.update(a for a in eqn.invars if a.__class__ is Var)
    return found


def _is_read(values: Iterable[Any], eqns: Iterable[Eqn], later: set[Eqn]) -> bool:
    """Whether equations read some of the values, other than those that come later anyway."""
    wanted = set(values)
    return any(not wanted.isdisjoint(_variables(e)) for e in eqns if e not in later)


def _only_for(bucket: Eqn, eqns: Sequence[Eqn], later: set[Eqn], kept: set[Any]) -> list[Eqn]:
    """The equations whose results nothing but a bucket, and what comes later with it, reads."""
    read = set(kept)  # by others
    wanted: set[Any] = set()
    alone: list[Eqn] = []
    for eqn in reversed(eqns):
        mine = eqn is bucket or eqn in later
        if not mine and not wanted.isdisjoint(eqn.outvars) and read.isdisjoint(eqn.outvars):
            mine = eqn.prim.kind != "collective"  # these keep their order
            alone += [eqn] * mine
        (wanted if mine else read).update(_variables(eqn))
    return alone


def _variables(eqn: Eqn) -> set[Any]:
    return {a for a in eqn.invars if a.__class__ is Var}


def _seconds(eqn: Eqn) -> float:
    """How long a product takes on a large device, about; 0 for anything else."""
    low = all(a.aval.dtype.itemsize < 4 for a in eqn.invars)
    return of_eqn(eqn, "library").products / (PRODUCTS if low else PRODUCTS_FLOAT32)
