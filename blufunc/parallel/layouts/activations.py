"""Annotations of activations: layouts of values between tensor-parallel regions.

Parallel, before stage 3, above ``groups.py``. In: a program, its lines, and for each mesh axis the lines that it
shards. Out: annotations by source line, and the program with them. A *column-parallel* contraction makes values that
are sharded along an axis from values that are not, such as hidden units from the residual stream; a *row-parallel* one
sums over the sharded dimension and makes the next values of the stream. Without annotations the stream is whole, and
each such sum an all-reduce. With the stream sharded along a dimension of its own, rows or tokens, it is a
reduce-scatter, an all-gather precedes the next region, and what is between them (norms, residual additions, their
derivatives) is computed and stored in parts (Korthikanti et al., arXiv:2205.05198).

No name is looked at: contractions, dimensions and lines say which values these are.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var, eval_jaxpr, line_of, map_jaxprs, subjaxprs
from blufunc.core.ops.elementwise import add_p
from blufunc.core.primitives.linear_ops import add_any_p
from blufunc.core.pytree import tree
from blufunc.parallel.mesh.constrain import sharding_constraint_p
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.mesh.spec import PartitionSpec
from blufunc.parallel.partition.axis_priority import Lines
from blufunc.parallel.partition.dim_groups import Node
from blufunc.parallel.partition.resharding import Axes
from blufunc.transforms.arguments import ShapeDtypeStruct, abstract, check_callable
from blufunc.transforms.staging.jit import Jitted, jit

F = TypeVar("F", bound=Callable)

Annotations = Mapping[str, PartitionSpec]
"""Specs of results, by ``file.py:12 (function): dot_general float32[4,8,16]``."""

_STREAMS = 2
"""Free dimensions of a stream that are tried: rows and tokens."""


class Boundary(NamedTuple):
    """A contraction at an end of a tensor-parallel region.

    Attributes:
      eqn: its equation.
      roots: the line of each dimension of its result.
      rows: True if it sums over a sharded dimension: its result belongs to the stream.
    """

    eqn: Eqn
    roots: tuple[Any, ...]
    rows: bool

    @property
    def nbytes(self) -> int:
        """The bytes of the result."""
        return self.eqn.outvars[0].aval.nbytes


def features(nodes: Mapping[Eqn, Node], lines: Lines, of_parameters: frozenset[Any]) -> frozenset[Any]:
    """The lines of weights.

    Weights are operands of contractions that have dimensions of parameters alone. A table of positions has tokens on a
    line of a parameter too, but it is added.
    """
    found: set[Any] = set()
    for eqn, node in nodes.items():
        operands = [a for a in eqn.invars if isinstance(a, Var)]
        if node.early or len(operands) < 2:
            continue
        for a in operands:
            roots = {lines.of(a, d) for d in range(a.aval.ndim)}
            if of_parameters.issuperset(roots):
                found |= roots
    return frozenset(found)


def boundaries(
    jaxpr: Jaxpr,
    nodes: Mapping[Eqn, Node],
    lines: Lines,
    sharded: frozenset[Any],
    weights: frozenset[Any],
) -> list[Boundary]:
    """The contractions at the ends of the regions in which ``sharded`` lines are.

    Args:
      jaxpr: the program.
      nodes: the nodes of its equations, bodies included.
      lines: the lines of all dimensions.
      sharded: the lines that the regions shard.
      weights: the lines of weights.
    """
    found: dict[Var, Boundary] = {}
    readers = Counter(_reads(jaxpr))
    for eqn, node in nodes.items():
        if len(eqn.outvars) != 1 or not isinstance(eqn.outvars[0], Var):
            continue
        operands = [a for a in eqn.invars if isinstance(a, Var)]
        roots = tuple(lines.of(eqn.outvars[0], d) for d in range(eqn.outvars[0].aval.ndim))
        if len(operands) < 2 or weights.issuperset(roots):
            continue  # no contraction, or the gradient of a parameter
        if eqn.prim in (add_p, add_any_p):  # sums over devices are added before they are reduced
            if all(a in found and found[a].rows and readers[a] == 1 for a in operands):
                for a in operands:
                    del found[a]
                found[eqn.outvars[0]] = Boundary(eqn, roots, True)
            continue
        if node.early:
            continue
        sums = any(how == "sum" and lines.of(node, f) in sharded for f, how in node.rule.reduced.items())
        if sharded.isdisjoint(roots):
            if sums and not weights.isdisjoint(roots):
                found[eqn.outvars[0]] = Boundary(eqn, roots, True)
        elif not sums and any(
            sharded.isdisjoint(own) and not weights.issuperset(own)
            for own in (tuple(lines.of(a, d) for d in range(a.aval.ndim)) for a in operands)
        ):
            found[eqn.outvars[0]] = Boundary(eqn, roots, False)
    return list(found.values())


def _reads(jaxpr: Jaxpr) -> Iterator[Any]:
    """The values that equations and results read, bodies included."""
    yield from jaxpr.outvars
    for eqn in jaxpr.eqns:
        yield from eqn.invars
        for body in subjaxprs(eqn.params):
            yield from _reads(body)


def streams(found: Sequence[Boundary], weights: frozenset[Any]) -> list[Any]:
    """The lines along which the stream may be sharded: those with the most bytes."""
    nbytes: dict[Any, int] = defaultdict(int)
    for boundary in found:
        for root in dict.fromkeys(boundary.roots) if boundary.rows else ():
            if root not in weights:
                nbytes[root] += boundary.nbytes
    return sorted(nbytes, key=lambda root: -nbytes[root])[:_STREAMS]


def annotations_of(
    found: Sequence[Boundary], mesh: AbstractMesh, axes_of: Mapping[Any, Axes], stream: Mapping[str, Any]
) -> dict[str, PartitionSpec]:
    """Specs of the results of contractions.

    Args:
      found: the boundaries.
      mesh: the mesh.
      axes_of: the mesh axes of each line, of data and of regions.
      stream: by mesh axis the line along which it shards the stream.
    Returns:
      by key; without keys of which uses on one line differ.
    """
    specs: dict[str, set[PartitionSpec]] = defaultdict(set)
    for boundary in found:
        aval = boundary.eqn.outvars[0].aval
        entries: list[Axes] = [()] * aval.ndim
        used: set[str] = set()

        def add(d: int, axis: str, entries: list[Axes] = entries, used: set[str] = used) -> None:
            axes = (*entries[d], axis)
            if axis not in used and mesh.shape[axis] > 1 and aval.shape[d] % mesh.size_of(axes) == 0:  # noqa: B023
                entries[d] = axes
                used.add(axis)

        for d, root in enumerate(boundary.roots):
            for axis in axes_of.get(root, ()):
                add(d, axis)
        for axis, root in stream.items():
            if root in boundary.roots:
                add(boundary.roots.index(root), axis)
        while entries and not entries[-1]:
            entries.pop()
        specs[key_of(boundary.eqn)].add(PartitionSpec(*[axes or None for axes in entries]))
    return {key: next(iter(several)) for key, several in specs.items() if len(several) == 1}


def key_of(eqn: Eqn) -> str:
    """The key of an equation: its line, operation and type."""
    return f"{line_of(eqn)}: {eqn.prim.name} {eqn.outvars[0].aval}"


def keys_in(jaxpr: Jaxpr) -> frozenset[str]:
    """The keys of all equations of a jaxpr, bodies included."""
    return jaxpr.memoised("keys of annotations", lambda: frozenset(_keys(jaxpr)))


def _keys(jaxpr: Jaxpr) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        if len(eqn.outvars) == 1:
            yield key_of(eqn)
        for body in subjaxprs(eqn.params):
            yield from keys_in(body)


def with_annotations(jaxpr: Jaxpr, specs: Annotations) -> Jaxpr:
    """A program, in which results that have a key are constrained to its spec."""
    done: dict[int, tuple[Jaxpr, Jaxpr]] = {}  # bodies that several equations share stay shared

    def change(body: Jaxpr) -> Jaxpr:
        if id(body) not in done:
            done[id(body)] = body, body if keys_in(body).isdisjoint(specs) else inside(body)
        return done[id(body)][1]

    def inside(body: Jaxpr) -> Jaxpr:
        eqns = []
        for eqn in body.eqns:
            params = map_jaxprs(change, eqn.params)
            spec = specs.get(key_of(eqn)) if len(eqn.outvars) == 1 else None
            if spec is None:
                eqns.append(Eqn(eqn.prim, eqn.invars, eqn.outvars, params, eqn.source))
                continue
            made = Var(eqn.outvars[0].aval)
            own = {"spec": spec.for_rank(made.aval.ndim), "mesh": None, "free": ()}
            eqns.append(Eqn(eqn.prim, eqn.invars, [made], params, eqn.source))
            eqns.append(Eqn(sharding_constraint_p, [made], eqn.outvars, own, eqn.source))
        return body.replace(eqns=eqns)

    return change(jaxpr)


def annotated(fun: F, activations: Annotations) -> F:
    """Constrain values inside ``fun`` that its author did not annotate.

    The result is that of ``fun`` with ``constrain(value, spec)`` around the operations named, in the backward pass too
    where the key says so. ``found.code()`` of a search writes such a call. To keep the annotations for good, write
    ``constrain`` on those lines.

    Args:
      fun: a function of arrays; of a ``jit`` the function is taken, without its options.
      activations: specs by ``file.py:12 (function): operation type``, as a search writes them.
    Returns:
      a function like ``fun``.
    Raises:
      ArgumentError: ``fun`` is not a function, or ``activations`` not specs by strings.
      ShardingError: no operation of ``fun`` has one of the keys.
    """
    check_callable(fun, "annotated")
    if not isinstance(activations, Mapping) or not all(
        isinstance(k, str) and isinstance(s, PartitionSpec) for k, s in activations.items()
    ):
        raise errors.ArgumentError(
            f"annotated: activations are partition specs by source lines, not {activations!r:.60}.",
            where=source.here(),
            fix='{"model.py:12 (block): dot_general float32[4,8,16]": P("data", "model")}, as found.code() writes it',
        )
    own = fun.fun if isinstance(fun, Jitted) else fun
    program = jit(own)

    @functools.wraps(own)
    def constrained(*args: Any, **kwargs: Any) -> Any:
        shapes = tree.map(_shape, (args, kwargs))
        traced = program.trace(*shapes[0], **shapes[1])
        if missing := sorted(activations.keys() - keys_in(traced.jaxpr)):
            raise errors.ShardingError(
                f"annotated: no operation of {program.name} is {missing[0]!r}.",
                where=source.here(),
                why="keys are source lines and types, and these have changed since the search.",
                fix="search again, or write bf.constrain(value, spec) in the function",
            )
        whole = with_annotations(traced.jaxpr, activations)
        outs = eval_jaxpr(whole, [*traced.entry.consts, *tree.leaves((args, kwargs))])
        return tree.unflatten(traced.entry.out_tree, outs)

    return constrained  # type: ignore[return-value]


def _shape(x: Any) -> Any:
    """The type of an argument; its placement is that of the caller."""
    if isinstance(x, (bool, int, float, complex)):
        return x
    aval = abstract(x)
    return ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
