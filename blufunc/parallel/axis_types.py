"""Types of the values of a ``shard_map`` body over the axes of its mesh, and the casts that they need.

Parallel, at the end of stage 1 and in stage 2. In come the equations of a body, with collectives as the user wrote
them; out come equations with the typed collectives of ``mesh_collectives``, in which a cast stands wherever values of
two types meet. A value has one letter for each axis, as said there: V varying, I invariant, U unreduced, R reduced.

Casts are what makes transposes right: the transpose of I->V is a sum over the ranks, so that the cotangent of what all
ranks share is the sum of what each of them adds. So they must be there before anything is differentiated:

- ``TypedTrace`` stages the function of a ``shard_map`` and types each equation as it is made;
- ``typed`` does the same for a jaxpr, such as the body of a loop;
- a function that is differentiated inside of the body is staged and typed before it is (``TypedTrace.typed``).

Literals, and values without derivatives, need no casts. Over each axis operands are joined: V with I or R is V, R with
I is R. Only what is linear takes U: sums of U alone, products of one U with I or R.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from blufunc import errors
from blufunc.core import dtypes, source
from blufunc.core.jaxpr import Atom, Eqn, Jaxpr, Literal, Var, eval_jaxpr, subjaxprs
from blufunc.core.ops import elementwise
from blufunc.core.stage import StagedTracer, StageTrace
from blufunc.core.structure import (
    broadcast_in_dim_p,
    reshape_p,
    transpose_p,
)
from blufunc.core.trace import Tracer, new_trace
from blufunc.parallel import collectives as named
from blufunc.parallel import mesh_collectives as mesh_ops
from blufunc.parallel.linearity import linear_in
from blufunc.parallel.mesh import AbstractMesh
from blufunc.transforms.batch import BatchTracer
from blufunc.transforms.calls import jit_p
from blufunc.transforms.checkpoint import checkpoint_p
from blufunc.transforms.cond import cond_p
from blufunc.transforms.custom_vjp import custom_vjp_call_p
from blufunc.transforms.jvp import JVPTracer
from blufunc.transforms.scan import scan_p
from blufunc.transforms.while_loop import while_p

Types = tuple[str, ...]
"""One letter for each axis of the mesh."""

_KEEPS_ZEROS = (
    broadcast_in_dim_p, reshape_p, transpose_p, elementwise.convert_p, elementwise.copy_p, elementwise.select_p,
)  # fmt: skip


def invariant(mesh: AbstractMesh) -> Types:
    """The type of what is the same everywhere."""
    return ("I",) * len(mesh.axis_names)


def typed(
    jaxpr: Jaxpr, mesh: AbstractMesh, in_types: Sequence[Types], out_types: Sequence[Types] | None = None
) -> tuple[Jaxpr, tuple[Types, ...]]:
    """A jaxpr with typed collectives and casts.

    Args:
      jaxpr: without collectives over axes of the mesh, or with those that an earlier pass typed.
      mesh: the axes.
      in_types: the types of its parameters.
      out_types: the types that its results must have; those that they have, by default.
    Returns:
      the jaxpr, and the types of its results.
    Raises:
      ShardingError: an operation cannot take the types of its operands; a result cannot have the type it must have.
    """
    key = ("axis types", mesh.axis_names, mesh.axis_sizes, tuple(in_types), tuple(out_types or ()))
    return jaxpr.memoised(key, lambda: _typed(jaxpr, mesh, in_types, out_types, ()))


def _typed(
    jaxpr: Jaxpr,
    mesh: AbstractMesh,
    in_types: Sequence[Types],
    out_types: Sequence[Types] | None,
    zeros: Sequence[bool],
) -> tuple[Jaxpr, tuple[Types, ...]]:
    """``typed``, where some parameters are known to be ``zeros``."""
    typer = Typer(mesh)
    typer.types.update(zip(jaxpr.invars, in_types, strict=True))
    typer.zeros.update(v for v, z in zip(jaxpr.invars, zeros, strict=False) if z)
    for eqn in jaxpr.eqns:
        typer.step(eqn)
    outs: list[Atom] = list(jaxpr.outvars)
    found = [typer.type_of(v) for v in outs]
    if out_types is not None:
        outs = [typer.cast(v, t) for v, t in zip(outs, out_types, strict=True)]
        found = list(out_types)
    return jaxpr.replace(eqns=typer.eqns, outvars=outs), tuple(found)


class TypedTrace(StageTrace):
    """Stages operations as equations and types them; its tracers have types.

    Args:
      mesh: the axes.
    """

    __slots__ = ("mesh", "typer")

    def __init__(self, mesh: AbstractMesh, name: str = "shard_map"):
        super().__init__(name)
        self.mesh = mesh
        self.typer = Typer(mesh)
        self.eqns = self.typer.eqns

    def typed_parameter(self, aval, types: Types, label: str | None = None) -> StagedTracer:
        """A new parameter of the jaxpr, of given types."""
        tracer = self.parameter(aval, label)
        self.typer.types[tracer.variable] = types
        return tracer

    def tracer_of(self, atom: Atom) -> Any:
        """The value that an atom of this trace stands for."""
        if atom.__class__ is Literal:
            return atom.array  # type: ignore[union-attr]
        return StagedTracer(self, atom, source.current())  # type: ignore[arg-type]

    def process(self, prim, args, params):
        out = super().process(prim, args, params)
        self.typer.step(self.eqns.pop())
        return out

    def atom(self, x):
        found = super().atom(x)
        if found.__class__ is not Literal and found not in self.typer.types:
            self.typer.types[found] = types_of(x, self.mesh) or invariant(self.mesh)
        return found

    def typed(self, fun: Callable, primals: Sequence[Any]) -> Callable:
        """``fun`` with casts, to be differentiated at ``primals`` while this trace is current."""
        types = [types_of(p, self.mesh) or invariant(self.mesh) for p in primals]
        trace = TypedTrace(self.mesh, self.name)
        with new_trace(trace):
            ins = [trace.typed_parameter(p.aval, t) for p, t in zip(primals, types, strict=True)]
            jaxpr = trace.finish(fun(*ins), self.name)
        return lambda *xs: eval_jaxpr(jaxpr, xs)


def types_of(x: Any, mesh: AbstractMesh) -> Types | None:
    """The types of a value in the body of a ``shard_map``; None for values from outside of it."""
    while isinstance(x, Tracer):
        if isinstance(x, StagedTracer):
            return x.trace.typer.types[x.variable] if isinstance(x.trace, TypedTrace) else None
        if isinstance(x, JVPTracer):
            x = x.primal
        elif isinstance(x, BatchTracer):
            x = x.value
        else:
            return None
    return None


class Typer:
    """Types equations one by one, and writes them down with the casts that they need.

    Attributes:
      types: of each variable.
      zeros: variables that are known to be zeros everywhere.
      eqns: what was written.
    """

    def __init__(self, mesh: AbstractMesh):
        self.mesh = mesh
        self.types: dict[Any, Types] = {}
        self.zeros: set[Any] = set()
        self.eqns: list[Eqn] = []
        self._casts: dict[tuple[Any, Types], Var] = {}
        self._broadcasts: dict[Any, Eqn] = {}
        self._n = len(mesh.axis_names)

    def type_of(self, atom: Atom) -> Types:
        """The types of a variable; what is not known comes from outside and is the same everywhere."""
        return self.types.get(atom) or invariant(self.mesh)

    def step(self, eqn: Eqn) -> None:
        """Type one equation and write it down."""
        before, source.replay.line = source.replay.line, eqn.source
        try:
            rule = _RULES.get(eqn.prim)
            if rule is not None:
                rule(self, eqn)
            elif isinstance(eqn.prim, mesh_ops.MeshCollective):
                self._mesh_collective(eqn)
            elif isinstance(eqn.prim, named.Collective) and any(
                a in self.mesh.axis_names for a in eqn.params["axes"]
            ):
                self._named_collective(eqn)
            else:
                self._operation(eqn)
        finally:
            source.replay.line = before

    # -- writing -------------------------------------------------------------------------------

    def write(self, prim: Any, invars: Sequence[Atom], params: dict, outvars: Sequence[Var], types) -> None:
        """Write an equation whose results have ``types``."""
        self.eqns.append(
            Eqn(prim, list(invars), list(outvars), params, source.replay.line or source.current())
        )
        for v, t in zip(outvars, types, strict=True):
            self.types[v] = t

    def new(self, prim: Any, x: Atom, params: dict, types: Types) -> Var:
        """Write an equation of one operand; its result."""
        out = Var(prim.typed((x.aval,), params))
        self.write(prim, [x], params, [out], [types])
        return out

    def over(self, axes: Sequence[str]) -> dict[str, Any]:
        """Axes and their sizes, as collectives take them."""
        sizes = dict(zip(self.mesh.axis_names, self.mesh.axis_sizes, strict=True))
        return {"axes": tuple(axes), "sizes": tuple(sizes[a] for a in axes)}

    def cast(self, atom: Atom, wanted: Types) -> Atom:
        """An atom under other types; it is cast once, however often it is used.

        What is broadcast is cast before it is: the transpose then sums over ranks what is summed on each already.
        """
        have = self.type_of(atom)
        if atom.__class__ is Literal and "U" in wanted and not self.is_zero(atom):
            atom = self.new(elementwise.copy_p, atom, {}, have)
        if have == wanted or atom.__class__ is Literal:
            return atom
        known = self._casts.get((atom, wanted))
        if known is not None:
            return known
        x: Any = atom
        if made := self._broadcasts.get(atom):
            x = self.new(made.prim, self.cast(made.invars[0], wanted), made.params, wanted)
        for src, dst, prim in _STEPS:
            axes = [
                a
                for a, h, w in zip(self.mesh.axis_names, self.type_of(x), wanted, strict=True)
                if h == src and w != h and dst == _towards(h, w)
            ]
            if axes:
                x = self.new(prim, x, {**self.over(axes), "src": src, "dst": dst}, self.changed(x, axes, dst))
        if self.type_of(x) != wanted:
            raise _no_cast(self.mesh, have, wanted)
        self._casts[atom, wanted] = x
        if atom in self.zeros:
            self.zeros.add(x)
        return x

    def changed(self, atom: Atom, axes: Sequence[str], letter: str) -> Types:
        """The types of ``atom`` with ``letter`` over some axes."""
        return tuple(
            letter if a in axes else t for a, t in zip(self.mesh.axis_names, self.type_of(atom), strict=True)
        )

    def is_zero(self, atom: Atom) -> bool:
        """Whether a value is known to be zero."""
        return not atom.value if atom.__class__ is Literal else atom in self.zeros  # type: ignore[union-attr]

    # -- operations ----------------------------------------------------------------------------

    def _operation(self, eqn: Eqn) -> None:
        """Whatever computes on each rank by itself: operands are cast to one type."""
        if any(_collective_axes(j, self.mesh) for j in subjaxprs(eqn.params)):
            raise errors.UnsupportedError(
                f"a collective over an axis of a mesh inside of a {eqn.prim.name}.",
                where=source.here(),
                why="its derivative is given by a rule, which says nothing of the types of values over that axis.",
                fix="move the collective out of it",
            )
        wanted, result = [], []
        for i in range(self._n):
            letters = [self.type_of(a)[i] for a in eqn.invars]
            ins, out = self._over_axis(eqn, letters, self.mesh.axis_names[i])
            wanted.append(ins)
            result.append(out)
        invars = [
            self.cast(a, tuple(w[k] for w in wanted)) if dtypes.is_inexact(a.aval.dtype) else a
            for k, a in enumerate(eqn.invars)
        ]
        self.write(eqn.prim, invars, eqn.params, eqn.outvars, [tuple(result)] * len(eqn.outvars))
        if eqn.prim is broadcast_in_dim_p and eqn.invars[0].__class__ is not Literal:
            self._broadcasts[eqn.outvars[0]] = eqn
        values = eqn.invars[1:] if eqn.prim is elementwise.select_p else eqn.invars
        if eqn.prim in _KEEPS_ZEROS and all(map(self.is_zero, values)):
            self.zeros.update(eqn.outvars)

    def _over_axis(self, eqn: Eqn, letters: list[str], axis: str) -> tuple[list[str], str]:
        """What the operands must be over one axis, and what the results are."""
        if "U" not in letters:
            out = _join(letters)
            return [out] * len(letters), out
        unreduced = {k for k, t in enumerate(letters) if t == "U"}
        terms = next((s for s in linear_in(eqn) if unreduced <= s), None)
        if terms is None:
            raise _unreduced(eqn, axis, unreduced)
        ins = []
        for k, t in enumerate(letters):
            if k in terms:
                if t != "U" and not self.is_zero(eqn.invars[k]):
                    raise _unequal(eqn, axis, k, t)
                ins.append("U")
            elif t == "V":
                raise _unreduced(eqn, axis, unreduced, k)
            else:
                ins.append("R")
        return ins, "U"

    # -- collectives ---------------------------------------------------------------------------

    def _mesh_collective(self, eqn: Eqn) -> None:
        """A collective that is typed already."""
        params = eqn.params
        if eqn.prim is mesh_ops.mesh_axis_index_p:
            self._axis_index(eqn.outvars, params)
            return
        (x,) = eqn.invars
        src = params["src"]
        x = self.cast(x, self.changed(x, params["axes"], src))
        self.write(eqn.prim, [x], params, eqn.outvars, [self.changed(x, params["axes"], params["dst"])])

    def _named_collective(self, eqn: Eqn) -> None:
        """A collective as the user wrote it."""
        axes = eqn.params["axes"]
        absent = [a for a in axes if a not in self.mesh.axis_names]
        if absent:
            raise errors.UnsupportedError(
                f"{eqn.prim.name} over {', '.join(map(repr, axes))}: axes of a vmap around and of the mesh at once.",
                where=source.here(),
                fix=f"use two: one over {absent[0]!r}, one over the axes of the mesh",
            )
        _NAMED[eqn.prim](self, eqn)

    def _varying(self, eqn: Eqn) -> Atom:
        """The operand of a collective that takes varying values."""
        (x,) = eqn.invars
        for a, t in zip(self.mesh.axis_names, self.type_of(x), strict=True):
            if t == "U" and a in eqn.params["axes"]:
                raise _unreduced(eqn, a, {0})
        return self.cast(x, self.changed(x, eqn.params["axes"], "V"))

    def _psum(self, eqn: Eqn) -> None:
        axes, (x,) = eqn.params["axes"], eqn.invars
        owed = {a for a in axes if self._letter(x, a) == "U"}
        varying = [a for a in axes if a not in owed]
        if varying:
            x = self.cast(x, self.changed(x, varying, "V"))
        if varying and owed:  # one sum over all of them
            x = self.new(
                mesh_ops.pcast_p,
                x,
                {**self.over(varying), "src": "V", "dst": "U"},
                self.changed(x, varying, "U"),
            )
        params = {**self.over(axes), "src": "U" if owed else "V", "dst": "I"}
        self.write(mesh_ops.psum_invariant_p, [x], params, eqn.outvars, [self.changed(x, axes, "I")])

    def _extremum(self, eqn: Eqn, prim: Any) -> None:
        x: Any = self._varying(eqn)
        for a, t in zip(self.mesh.axis_names, self.type_of(x), strict=True):
            if t == "U":
                raise _unreduced(eqn, a, {0})
        axes = eqn.params["axes"]
        params = {**self.over(axes), "src": "V", "dst": "I"}
        self.write(prim, [x], params, eqn.outvars, [self.changed(x, axes, "I")])

    def _all_gather(self, eqn: Eqn) -> None:
        x, dim = self._varying(eqn), eqn.params["dim"]
        n = x.aval.shape
        x = self._reshape(x, (*n[:dim], 1, *n[dim:]))
        params = {**self.over(eqn.params["axes"]), "src": "V", "dst": "V", "dim": dim}
        self.write(mesh_ops.mesh_all_gather_p, [x], params, eqn.outvars, [self.type_of(x)])

    def _psum_scatter(self, eqn: Eqn) -> None:
        (x,), axes, dim = eqn.invars, eqn.params["axes"], eqn.params["dim"]
        src = "U" if all(self._letter(x, a) == "U" for a in axes) else "V"
        x = self._varying(eqn) if src == "V" else x
        params = {**self.over(axes), "src": src, "dst": "V", "dim": dim}
        x = self.new(mesh_ops.mesh_psum_scatter_p, x, params, self.changed(x, axes, "V"))
        self._reshaped(eqn, x)

    def _all_to_all(self, eqn: Eqn) -> None:
        x, split, join = self._varying(eqn), eqn.params["split"], eqn.params["join"]
        n = x.aval.shape
        place = join if join <= split else join + 1  # of the new dimension, before the other goes
        x = self._reshape(x, (*n[:place], 1, *n[place:]))
        dims = {"split_dim": split + (place <= split), "concat_dim": place}
        params = {**self.over(eqn.params["axes"]), "src": "V", "dst": "V", **dims}
        x = self.new(mesh_ops.mesh_all_to_all_p, x, params, self.type_of(x))
        self._reshaped(eqn, x)

    def _ppermute(self, eqn: Eqn) -> None:
        x = self._varying(eqn)
        params = {**self.over(eqn.params["axes"]), "src": "V", "dst": "V", "perm": eqn.params["perm"]}
        self.write(mesh_ops.mesh_ppermute_p, [x], params, eqn.outvars, [self.type_of(x)])

    def _axis_index(self, outvars: Sequence[Var], params: dict) -> None:
        types = tuple("V" if a in params["axes"] else "I" for a in self.mesh.axis_names)
        self.write(mesh_ops.mesh_axis_index_p, [], params, outvars, [types])

    def _cast_to(self, eqn: Eqn) -> None:
        x, axes, to = eqn.invars[0], eqn.params["axes"], eqn.params["to"]
        varying = [a for a in axes if to == "U" and self._letter(x, a) == "V"]
        if varying:
            params = {**self.over(varying), "src": "V", "dst": "U"}
            x = self.new(mesh_ops.pcast_p, x, params, self.changed(x, varying, "U"))
        self._reshaped(eqn, self.cast(x, self.changed(x, axes, to)))  # to its own shape: nothing moves

    def _letter(self, x: Atom, axis: str) -> str:
        return self.type_of(x)[self.mesh.axis_names.index(axis)]

    def _reshape(self, x: Atom, shape: tuple[int, ...]) -> Atom:
        return self.new(reshape_p, x, {"shape": shape}, self.type_of(x))

    def _reshaped(self, eqn: Eqn, x: Atom) -> None:
        """Write ``x``, in the shape of the result of ``eqn``, as that result."""
        params = {"shape": eqn.outvars[0].aval.shape}
        self.write(reshape_p, [x], params, eqn.outvars, [self.type_of(x)])

    # -- calls and control flow ----------------------------------------------------------------

    def _custom_vjp(self, eqn: Eqn) -> None:
        """A function with rules of its own. Typed collectives in its body take what varies to what varies.

        So do those in its rules, which are not seen here: the library's own, as in ``spmd.context_parallel``.
        Collectives as users write them would have no types there, and are refused.
        """
        body = eqn.params["jaxpr"]
        over = sorted(_collective_axes(body, self.mesh))
        if not over or not _typed_varying(body):
            self._operation(eqn)
            return
        types = functools.reduce(self._joined, [self.changed(a, over, "V") for a in eqn.invars])
        if "U" in types:
            axis = types.index("U")
            owed = {k for k, a in enumerate(eqn.invars) if self.type_of(a)[axis] == "U"}
            raise _unreduced(eqn, self.mesh.axis_names[axis], owed)
        invars = [self.cast(a, types) for a in eqn.invars]
        self.write(eqn.prim, invars, eqn.params, eqn.outvars, [types] * len(eqn.outvars))

    def _call(self, eqn: Eqn) -> None:
        body, ins = eqn.params["jaxpr"], [self.type_of(a) for a in eqn.invars]
        ins = self._cast_outside(body, ins, None, range(len(ins)))
        jaxpr, types = typed(body, self.mesh, ins)
        invars = [self.cast(a, t) for a, t in zip(eqn.invars, ins, strict=True)]
        self.write(eqn.prim, invars, {**eqn.params, "jaxpr": jaxpr}, eqn.outvars, types)

    def _cast_outside(
        self, body: Jaxpr, ins: Sequence[Types], outs: Sequence[Types] | None, which: Iterable[int]
    ) -> list[Types]:
        """The types of the parameters of a body, of those in ``which`` after the casts that it would begin with.

        What a body does nothing with but let it vary had better come in varying: the transpose of the cast is a sum
        over the ranks, and outside of a loop it is made once.
        """
        jaxpr, _ = typed(body, self.mesh, ins, outs)
        found = list(ins)
        for i in which:
            var = jaxpr.invars[i]
            uses = [e for e in jaxpr.eqns if var in e.invars]
            if len(uses) != 1 or uses[0].prim is not mesh_ops.pcast_p or var in jaxpr.outvars:
                continue
            p = uses[0].params
            written = any(e.prim is mesh_ops.pcast_p and var in e.invars for e in body.eqns)
            if (p["src"], p["dst"]) == ("I", "V") and not written:
                pairs = zip(self.mesh.axis_names, ins[i], strict=True)
                found[i] = tuple("V" if a in p["axes"] else t for a, t in pairs)
        return found

    def _scan(self, eqn: Eqn) -> None:
        params = eqn.params
        m, k = params["n_consts"], params["n_carry"]
        operands = [self.type_of(a) for a in eqn.invars]
        zeros = [False] * m + [self.is_zero(a) for a in eqn.invars[m : m + k]]
        carry = operands[m : m + k]
        while True:
            ins = [*operands[:m], *carry, *operands[m + k :]]
            _, outs = _typed(params["jaxpr"], self.mesh, ins, None, zeros)
            joined = [self._joined(c, o) for c, o in zip(carry, outs, strict=False)]
            if joined == carry:
                break
            carry = joined
        # The zeros helped to find the types; from here on they are the types of the carry of every step.
        ends = [*carry, *outs[k:]]
        ins = self._cast_outside(params["jaxpr"], ins, ends, range(m))
        jaxpr, types = typed(params["jaxpr"], self.mesh, ins, ends)
        invars = [self._cast_operand(a, t) for a, t in zip(eqn.invars, ins, strict=True)]
        self.write(eqn.prim, invars, {**params, "jaxpr": jaxpr}, eqn.outvars, types)

    def _while(self, eqn: Eqn) -> None:
        params = eqn.params
        a, b = params["n_cond"], params["n_body"]
        operands = [self.type_of(x) for x in eqn.invars]
        zeros = [False] * b + [self.is_zero(x) for x in eqn.invars[a + b :]]
        consts, carry = operands[: a + b], operands[a + b :]
        while True:
            cond, (verdict,) = typed(params["cond"], self.mesh, [*consts[:a], *carry])
            # where ranks stop at steps of their own, what comes out varies
            chosen = [self._among_ways(t, verdict) for t in [*consts, *carry]]
            _, outs = _typed(params["body"], self.mesh, chosen[a:], None, zeros)
            joined = [self._joined(c, o) for c, o in zip(chosen[a + b :], outs, strict=True)]
            if joined == carry and chosen[: a + b] == consts:
                break
            consts, carry = chosen[: a + b], joined
        ins = [*consts[a:], *carry]
        ins = self._cast_outside(params["body"], ins, carry, range(b))
        consts = [*consts[:a], *ins[:b]]
        body, types = typed(params["body"], self.mesh, ins, carry)
        self._check_predicate("while_loop", verdict, [cond, body])
        invars = [self._cast_operand(x, t) for x, t in zip(eqn.invars, [*consts, *carry], strict=True)]
        self.write(eqn.prim, invars, {**params, "cond": cond, "body": body}, eqn.outvars, types)

    def _cond(self, eqn: Eqn) -> None:
        index, *operands = eqn.invars
        branches, verdict = eqn.params["branches"], self.type_of(index)
        ins = [self._among_ways(self.type_of(a), verdict) for a in operands]
        found = [typed(b, self.mesh, ins)[1] for b in branches]
        outs = [
            functools.reduce(self._joined, types, self._among_ways(invariant(self.mesh), verdict))
            for types in zip(*found, strict=True)
        ]
        bodies = tuple([typed(b, self.mesh, ins, outs)[0] for b in branches])
        self._check_predicate("cond", verdict, bodies)
        invars = [index, *(self.cast(a, t) for a, t in zip(operands, ins, strict=True))]
        self.write(eqn.prim, invars, {**eqn.params, "branches": bodies}, eqn.outvars, outs)

    def _among_ways(self, types: Types, verdict: Types) -> Types:
        """The types of what goes into, or comes out of, one of several ways that ranks may take.

        Where ranks differ in the way they take, values are cast before: the transpose of a cast is a collective, to
        which all ranks must come.
        """
        return self._joined(types, tuple("V" if t == "V" else "I" for t in verdict))

    def _cast_operand(self, atom: Atom, types: Types) -> Atom:
        """The first carry of a loop; a literal that must be more than invariant becomes a variable."""
        if atom.__class__ is Literal and types != invariant(self.mesh):
            atom = self.new(elementwise.copy_p, atom, {}, invariant(self.mesh))
        return self.cast(atom, types)

    def _joined(self, one: Types, other: Types) -> Types:
        """The types of what comes from two places."""
        joined = []
        for axis, pair in zip(self.mesh.axis_names, zip(one, other, strict=True), strict=True):
            if "U" in pair and "V" in pair:
                raise errors.ShardingError(
                    f"a value is unreduced over {axis!r} on one path and varying on the other.",
                    where=source.here(),
                    fix=f"lax.psum the one, or lax.pcast(x, {axis!r}, to='unreduced') the other",
                )
            joined.append("U" if "U" in pair else _join(pair))
        return tuple(joined)

    def _check_predicate(self, name: str, types: Types, bodies: Sequence[Jaxpr]) -> None:
        """Ranks that go ways of their own must not meet in a collective on one of them: they would wait for ever."""
        used = set().union(*[_collective_axes(b, self.mesh) for b in bodies])
        for axis, t in zip(self.mesh.axis_names, types, strict=True):
            if t in "VU" and axis in used:
                raise errors.ShardingError(
                    f"the predicate of a {name} varies over {axis!r}, and a collective inside is over that axis.",
                    where=source.here(),
                    why="ranks that take another way would not come to the collective.",
                    fix=f"make the predicate the same everywhere, as by lax.pmax(p, {axis!r})",
                )


_STEPS: tuple[tuple[str, str, Any], ...] = (
    ("R", "I", mesh_ops.pcast_p),
    ("R", "V", mesh_ops.pcast_p),
    ("I", "R", mesh_ops.pcast_p),
    ("I", "V", mesh_ops.pcast_p),
    ("I", "U", mesh_ops.keep_first_p),
)
"""The casts that come without asking, in the order in which they are put in: none of them changes what a value is."""


def _towards(have: str, wanted: str) -> str:
    """The next type on the way."""
    return "I" if (have, wanted) == ("R", "U") else wanted


def _join(letters: Sequence[str]) -> str:
    """The type of the result of an operation on operands that are not unreduced."""
    return "V" if "V" in letters else "R" if "R" in letters else "I"


def _collective_axes(jaxpr: Jaxpr, mesh: AbstractMesh) -> set[str]:
    """The axes of the mesh over which ranks meet in a jaxpr."""
    found: set[str] = set()
    for e in jaxpr.eqns:
        if mesh_ops.meets(e) or isinstance(e.prim, named.Collective):
            found.update(a for a in e.params["axes"] if a in mesh.axis_names)
        for body in subjaxprs(e.params):
            found |= _collective_axes(body, mesh)
    return found


def _typed_varying(jaxpr: Jaxpr) -> bool:
    """Whether all collectives of a jaxpr are typed already, and take what varies to what varies."""
    for e in jaxpr.eqns:
        if isinstance(e.prim, named.Collective):
            return False
        if mesh_ops.meets(e) and (e.params["src"], e.params["dst"]) != ("V", "V"):
            return False
        if not all(map(_typed_varying, subjaxprs(e.params))):
            return False
    return True


_WORDS = {"V": "varying", "I": "invariant", "U": "unreduced", "R": "reduced"}


def _unreduced(eqn: Eqn, axis: str, operands: set[int], other: int | None = None) -> errors.ShardingError:
    which = ", ".join(map(str, sorted(operands)))
    with_other = f" and a varying operand {other}" if other is not None else ""
    return errors.ShardingError(
        f"{eqn.prim.name} of what is unreduced over {axis!r} (operand {which}){with_other}.",
        where=source.here(),
        why="the value is a sum that is still owed: only what is linear in it can be done to its terms.",
        fix=f"sum it first: lax.psum(x, {axis!r})",
    )


def _unequal(eqn: Eqn, axis: str, operand: int, letter: str) -> errors.ShardingError:
    return errors.ShardingError(
        f"{eqn.prim.name} of what is unreduced over {axis!r} and what is {_WORDS[letter]} (operand {operand}).",
        where=source.here(),
        why="the one is a sum that is still owed, the other is not: every rank would add it.",
        fix=f"lax.psum(x, {axis!r}) the one, or lax.pcast(x, {axis!r}, to='unreduced') the other",
    )


def _no_cast(mesh: AbstractMesh, have: Types, wanted: Types) -> errors.ShardingError:
    axis, h, w = next((a, h, w) for a, h, w in zip(mesh.axis_names, have, wanted, strict=True) if h != w)
    fix = f"lax.psum(x, {axis!r})" if w in "IR" or h == "U" else f"lax.pcast(x, {axis!r}, to={_WORDS[w]!r})"
    return errors.ShardingError(
        f"a value that is {_WORDS[h]} over {axis!r} is not {_WORDS[w]}.", where=source.here(), fix=fix
    )


_RULES: dict[Any, Callable[[Typer, Eqn], None]] = {
    jit_p: Typer._call,
    checkpoint_p: Typer._call,
    custom_vjp_call_p: Typer._custom_vjp,
    scan_p: Typer._scan,
    while_p: Typer._while,
    cond_p: Typer._cond,
}
_NAMED: dict[Any, Callable[[Typer, Eqn], None]] = {
    named.psum_p: Typer._psum,
    named.pmax_p: lambda typer, eqn: typer._extremum(eqn, mesh_ops.pmax_invariant_p),
    named.pmin_p: lambda typer, eqn: typer._extremum(eqn, mesh_ops.pmin_invariant_p),
    named.all_gather_p: Typer._all_gather,
    named.psum_scatter_p: Typer._psum_scatter,
    named.all_to_all_p: Typer._all_to_all,
    named.ppermute_p: Typer._ppermute,
    named.axis_index_p: lambda typer, eqn: typer._axis_index(eqn.outvars, eqn.params),
    named.cast_to_p: Typer._cast_to,
}
