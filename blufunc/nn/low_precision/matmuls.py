"""Rewriting of the matmuls of a function, each with arrays of its own.

A face, below ``float8.py`` and ``emulation.py``. In: a jaxpr, and a rule for its matmuls. Out: its results under the
current trace, with the rule in the place of each ``dot_general`` that it is for. A rule may have arrays for each
matmul, such as a history or a key; of one in a ``scan`` there is a set for each step, which the scan takes as inputs.
Bodies of ``jit``, ``checkpoint`` and ``scan`` are rewritten with them; those of ``cond``, ``while_loop`` and
``shard_map`` without. Operations with rules or definitions of their own (``custom_vjp``, attention) stay, and so do
solvers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal, line_of, map_jaxprs
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.programs.stage import stage, stage_body
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import FlatFunction, as_values, labels_of, name_of
from blufunc.transforms.checkpointing.checkpoint import checkpoint_p
from blufunc.transforms.control_flow.calls import jit_p
from blufunc.transforms.control_flow.composite import Composite
from blufunc.transforms.control_flow.platform_variants import Either
from blufunc.transforms.control_flow.scan import scan_p
from blufunc.transforms.custom_rules.custom_call import RuledCall

Where = Callable[[Any, Any], bool]
"""Which matmuls: a function of the types of both operands."""


def check_where(name: str, where: Any) -> None:
    """Raise ArgumentError unless ``where`` is None or callable."""
    if where is not None and not callable(where):
        raise errors.ArgumentError(
            f"{name}: where is {where!r:.60}.",
            where=source.here(),
            fix="where=lambda x, y: y.shape[-1] < 50000",
        )


class Rule(Protocol):
    """The replacement of a matmul; hashable, as a part of memo keys.

    Attributes:
      where: which matmuls it is for; None: all.
      avals: the types of the arrays that each matmul has.
    """

    @property
    def where(self) -> Where | None: ...

    @property
    def avals(self) -> tuple[ShapedArray, ...]: ...

    def __call__(
        self, lhs: Any, rhs: Any, params: dict, dtype: np.dtype, arrays: Sequence[Any] | None
    ) -> Any:
        """The result of a ``dot_general``, of ``dtype``.

        ``arrays`` is None in bodies that have none.
        """


class Site(NamedTuple):
    """A matmul: the lengths of the scans around it, outermost first, and its line."""

    lengths: tuple[int, ...]
    line: str


def staged(fun: Callable, args: tuple, kwargs: dict, what: str) -> tuple[Jaxpr, list[Any], tree.TreeDef]:
    """The jaxpr of a call, its operands, and the structure of its results."""
    leaves, in_tree = tree.flatten((args, kwargs))
    labels = functools.cache(lambda: labels_of(fun, in_tree))
    values = as_values(leaves, lambda i: f"the argument {labels()[i]} of a function under {what}")
    flat = FlatFunction(fun, in_tree)
    jaxpr = stage_body(flat, [v.aval for v in values], values, name_of(fun), labels())
    return jaxpr, values, flat.out_tree


def sites(jaxpr: Jaxpr, where: Where | None) -> tuple[Site, ...]:
    """The matmuls that have arrays, in the order in which ``run`` takes them."""

    def find() -> tuple[Site, ...]:
        found: list[Site] = []
        for eqn in jaxpr.eqns:
            if _is_site(eqn, where):
                found.append(Site((), line_of(eqn)))
            elif eqn.prim is scan_p:
                inner = sites(eqn.params["jaxpr"], where)
                found += [Site((eqn.params["length"], *s.lengths), s.line) for s in inner]
            elif eqn.prim in _CALLS:
                found += sites(eqn.params["jaxpr"], where)
        return tuple(found)

    return jaxpr.memoised(("sites of matmuls", where), find)


def _is_site(eqn: Eqn, where: Where | None) -> bool:
    """True for a matmul of floats without batch axes, of two operands that have rows."""
    if eqn.prim is not dot_general_p:
        return False
    x, y = (a.aval for a in eqn.invars)
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    floats = x.dtype == y.dtype and x.dtype in (dtypes.float32, dtypes.bfloat16, dtypes.float16)
    rows = min(x.ndim, y.ndim) > len(contracted) > 0 and not batch
    return floats and rows and x.size > 0 < y.size and (where is None or bool(where(x, y)))


_CALLS = (jit_p, checkpoint_p)


def run(jaxpr: Jaxpr, rule: Rule, args: Sequence[Any], arrays: Iterator[Sequence[Any]] | None) -> list[Any]:
    """Evaluate a jaxpr under the current trace, with the rule in the place of matmuls.

    Args:
      arrays: for each of ``sites``, its arrays; None: no matmul has any.
    """
    values = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    read = lambda atom: atom.array if atom.__class__ is Literal else values[atom]
    previous = source.replay.line
    try:
        for eqn in jaxpr.eqns:
            source.replay.line = eqn.source
            outs = _apply(eqn, rule, [read(a) for a in eqn.invars], arrays)
            values.update(zip(eqn.outvars, outs, strict=True))
    finally:
        source.replay.line = previous
    return [read(a) for a in jaxpr.outvars]


def _apply(eqn: Eqn, rule: Rule, ins: list[Any], arrays: Iterator[Sequence[Any]] | None) -> list[Any]:
    prim, params = eqn.prim, eqn.params
    if _is_site(eqn, rule.where):
        own = None if arrays is None else next(arrays)
        return [rule(ins[0], ins[1], params, eqn.outvars[0].aval.dtype, own)]
    if prim in _CALLS:
        body = params["jaxpr"]
        taken = _taken(body, rule, arrays)
        return prim.call(_body(body, rule, arrays is not None), [*taken, *ins], params)
    if prim is scan_p:
        return _scan(ins, params, rule, arrays)
    kept = isinstance(prim, (Composite, RuledCall, Either)) or prim.autocast_class == "exact"
    if not kept:
        params = map_jaxprs(lambda body: _body(body, rule, False), params)
    out = prim.bind(*ins, **params)
    return list(out) if prim.multiple_results else [out]


def _taken(body: Jaxpr, rule: Rule, arrays: Iterator[Sequence[Any]] | None) -> list[Any]:
    """The arrays of the matmuls of a body."""
    if arrays is None:
        return []
    return [x for _ in sites(body, rule.where) for x in next(arrays)]


def _body(jaxpr: Jaxpr, rule: Rule, has_arrays: bool) -> Jaxpr:
    """A rewritten body, whose first operands are the arrays of its matmuls."""

    def make() -> Jaxpr:
        n = len(rule.avals)
        found = sites(jaxpr, rule.where) if has_arrays else ()
        avals = [a.with_shape((*s.lengths, *a.shape)) for s in found for a in rule.avals]

        def fun(*args: Any) -> list[Any]:
            own = iter([args[n * i : n * (i + 1)] for i in range(len(found))]) if has_arrays else None
            return run(jaxpr, rule, args[len(avals) :], own)

        return stage(fun, [*avals, *jaxpr.in_avals], jaxpr.name)

    return jaxpr.memoised(("low precision", rule, has_arrays), make)


def _scan(ins: list[Any], params: dict, rule: Rule, arrays: Iterator[Sequence[Any]] | None) -> list[Any]:
    jaxpr, n = params["jaxpr"], params["n_consts"] + params["n_carry"]
    taken = _taken(jaxpr, rule, arrays)
    body = _body(jaxpr, rule, arrays is not None)
    k = len(taken)
    # arrays of matmuls come first in a body, and are inputs of the steps, which come last
    turned = body.replace(
        invars=[*body.invars[k : k + n], *body.invars[:k], *body.invars[k + n :]], arg_names=()
    )
    closed, extra = turned.hoist()
    counts = {"n_consts": params["n_consts"] + len(extra)}
    return scan_p.bind(*extra, *ins[:n], *taken, *ins[n:], **{**params, "jaxpr": closed, **counts})
