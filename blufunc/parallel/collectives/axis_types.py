"""Typing of ``shard_map`` bodies over mesh axes, with the casts that it inserts.

Parallel, at the end of stage 1 and in stage 2. In: the equations of a body, with collectives as the user wrote them.
Out: equations with the typed collectives of ``primitives``, and a cast wherever operands of two types combine. A value
has one letter per axis: V varying, I invariant, U unreduced, R reduced.

Casts make transposes right: the transpose of I->V is a sum over the ranks, so the cotangent of a replicated value is
the sum of the contributions of all ranks. So casts must be inserted before differentiation:

- ``TypedTrace`` (``typed_trace``) stages the function of a ``shard_map`` and types each equation as it is made;
- ``typed`` does the same for a jaxpr, such as the body of a loop;
- a function that is differentiated inside of the body is staged and typed before it is (``TypedTrace.typed``);
- custom derivatives are traced with the types of the call's operands (``typed_rules``).

Literals, and values without derivatives, need no casts. Over each axis operands are joined: V with I or R is V, R with
I is R. Only linear operations take U (``Primitive.linear_in``): sums of U alone, products of one U with I or R.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.jaxpr import LOCAL_TYPES, Atom, Eqn, Jaxpr, Literal, Var, subjaxprs
from blufunc.core.ops import elementwise
from blufunc.core.primitives.linear_ops import broadcast_in_dim_p, reshape_p, transpose_p
from blufunc.parallel.collectives import named
from blufunc.parallel.collectives import primitives as mesh_ops
from blufunc.parallel.collectives.axis_casts import (
    CastWriter,
    Types,
    invariant,
    join,
    unequal_error,
    unreduced_error,
)
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.transforms.checkpointing.checkpoint import checkpoint_p
from blufunc.transforms.control_flow.calls import jit_p
from blufunc.transforms.control_flow.cond import cond_p
from blufunc.transforms.control_flow.scan import scan_p
from blufunc.transforms.control_flow.while_loop import while_p

_KEEPS_ZEROS = (
    broadcast_in_dim_p, reshape_p, transpose_p, elementwise.convert_p, elementwise.copy_p, elementwise.select_p,
)  # fmt: skip


def typed(
    jaxpr: Jaxpr, mesh: AbstractMesh, in_types: Sequence[Types], out_types: Sequence[Types] | None = None
) -> tuple[Jaxpr, tuple[Types, ...]]:
    """Type the collectives of a jaxpr, and insert casts.

    Args:
      jaxpr: without collectives over mesh axes, or with typed ones from an earlier pass.
      mesh: the axes.
      in_types: the types of its parameters.
      out_types: the required types of its results; the inferred ones by default.
    Returns:
      the jaxpr, and the types of its results.
    Raises:
      ShardingError: an operation cannot take the types of its operands; a result cannot have its required type.
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
    made = jaxpr.replace(eqns=typer.eqns, outvars=outs)
    made.memoised(LOCAL_TYPES, lambda: (mesh.axis_names, typer.types))
    return made, tuple(found)


class Typer(CastWriter):
    """Types equations one by one, and writes them with the casts they need."""

    def step(self, eqn: Eqn) -> None:
        """Type one equation and write it."""
        before, source.replay.line = source.replay.line, eqn.source
        try:
            rule = RULES.get(eqn.prim)
            if rule is not None:
                rule(self, eqn)
            elif isinstance(eqn.prim, mesh_ops.MeshCollective):
                self.mesh_collective(eqn)
            elif isinstance(eqn.prim, named.Collective) and any(
                a in self.mesh.axis_names for a in eqn.params["axes"]
            ):
                self.named_collective(eqn)
            else:
                self.operation(eqn)
        finally:
            source.replay.line = before

    # -- operations ----------------------------------------------------------------------------

    def operation(self, eqn: Eqn) -> None:
        """Type an operation that runs on each rank alone: cast its operands to one type."""
        if any(_collective_axes(j, self.mesh) for j in subjaxprs(eqn.params)):
            raise errors.UnsupportedError(
                f"a collective over an axis of a mesh inside of a {eqn.prim.name}.",
                where=source.here(),
                why="its derivative is a custom rule, which has no types over that axis.",
                fix="move the collective out of it",
            )
        required, result = [], []
        for i in range(len(self.mesh.axis_names)):
            letters = [self.type_of(a)[i] for a in eqn.invars]
            ins, out = self._over_axis(eqn, letters, self.mesh.axis_names[i])
            required.append(ins)
            result.append(out)
        invars = [
            self.cast(a, tuple(w[k] for w in required)) if dtypes.is_inexact(a.aval.dtype) else a
            for k, a in enumerate(eqn.invars)
        ]
        self.write(eqn.prim, invars, eqn.params, eqn.outvars, [tuple(result)] * len(eqn.outvars))
        if eqn.prim is broadcast_in_dim_p and eqn.invars[0].__class__ is not Literal:
            self.broadcasts[eqn.outvars[0]] = eqn
        values = eqn.invars[1:] if eqn.prim is elementwise.select_p else eqn.invars
        if eqn.prim in _KEEPS_ZEROS and all(map(self.is_zero, values)):
            self.zeros.update(eqn.outvars)

    def _over_axis(self, eqn: Eqn, letters: list[str], axis: str) -> tuple[list[str], str]:
        """The required type of each operand over one axis, and the type of the results."""
        if "U" not in letters:
            out = join(letters)
            return [out] * len(letters), out
        unreduced = {k for k, t in enumerate(letters) if t == "U"}
        avals, outs = [a.aval for a in eqn.invars], [v.aval for v in eqn.outvars]
        groups = eqn.prim.linear_in(avals, outs, **eqn.params)  # of operands, linear together
        terms = next((s for s in groups if unreduced <= s), None)
        if terms is None:
            raise unreduced_error(eqn, axis, unreduced)
        ins = []
        for k, t in enumerate(letters):
            if k in terms:
                if t != "U" and not self.is_zero(eqn.invars[k]):
                    raise unequal_error(eqn, axis, k, t)
                ins.append("U")
            elif t == "V":
                raise unreduced_error(eqn, axis, unreduced, k)
            else:
                ins.append("R")
        return ins, "U"

    # -- calls and control flow ----------------------------------------------------------------

    def _call(self, eqn: Eqn) -> None:
        body, ins = eqn.params["jaxpr"], [self.type_of(a) for a in eqn.invars]
        ins = self._cast_outside(body, ins, None, range(len(ins)))
        jaxpr, types = typed(body, self.mesh, ins)
        invars = [self.cast(a, t) for a, t in zip(eqn.invars, ins, strict=True)]
        self.write(eqn.prim, invars, {**eqn.params, "jaxpr": jaxpr}, eqn.outvars, types)

    def _cast_outside(
        self, body: Jaxpr, ins: Sequence[Types], outs: Sequence[Types] | None, which: Iterable[int]
    ) -> list[Types]:
        """Types of a body's parameters; those in ``which`` after their casts.

        If a body only casts a parameter to varying, cast it outside: the transpose of the cast is a sum over the ranks,
        which then runs once, outside of a loop.
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
            joined = [self.joined(c, o) for c, o in zip(carry, outs, strict=False)]
            if joined == carry:
                break
            carry = joined
        # Zeros only helped to infer the types, which from here on hold for the carry of every step.
        ends = [*carry, *outs[k:]]
        ins = self._cast_outside(params["jaxpr"], ins, ends, range(m))
        jaxpr, types = typed(params["jaxpr"], self.mesh, ins, ends)
        invars = [self.cast_operand(a, t) for a, t in zip(eqn.invars, ins, strict=True)]
        self.write(eqn.prim, invars, {**params, "jaxpr": jaxpr}, eqn.outvars, types)

    def _while(self, eqn: Eqn) -> None:
        params = eqn.params
        a, b = params["n_cond"], params["n_body"]
        operands = [self.type_of(x) for x in eqn.invars]
        zeros = [False] * b + [self.is_zero(x) for x in eqn.invars[a + b :]]
        consts, carry = operands[: a + b], operands[a + b :]
        while True:
            cond, (verdict,) = typed(params["cond"], self.mesh, [*consts[:a], *carry])
            # ranks may stop at different steps, so the results vary
            chosen = [self.among_ways(t, verdict) for t in [*consts, *carry]]
            _, outs = _typed(params["body"], self.mesh, chosen[a:], None, zeros)
            joined = [self.joined(c, o) for c, o in zip(chosen[a + b :], outs, strict=True)]
            if joined == carry and chosen[: a + b] == consts:
                break
            consts, carry = chosen[: a + b], joined
        ins = [*consts[a:], *carry]
        ins = self._cast_outside(params["body"], ins, carry, range(b))
        consts = [*consts[:a], *ins[:b]]
        body, types = typed(params["body"], self.mesh, ins, carry)
        self._check_predicate("while_loop", verdict, [cond, body])
        invars = [self.cast_operand(x, t) for x, t in zip(eqn.invars, [*consts, *carry], strict=True)]
        self.write(eqn.prim, invars, {**params, "cond": cond, "body": body}, eqn.outvars, types)

    def _cond(self, eqn: Eqn) -> None:
        index, *operands = eqn.invars
        branches, verdict = eqn.params["branches"], self.type_of(index)
        ins = [self.among_ways(self.type_of(a), verdict) for a in operands]
        found = [typed(b, self.mesh, ins)[1] for b in branches]
        outs = [
            functools.reduce(self.joined, types, self.among_ways(invariant(self.mesh), verdict))
            for types in zip(*found, strict=True)
        ]
        bodies = tuple([typed(b, self.mesh, ins, outs)[0] for b in branches])
        self._check_predicate("cond", verdict, bodies)
        invars = [index, *(self.cast(a, t) for a, t in zip(operands, ins, strict=True))]
        self.write(eqn.prim, invars, {**eqn.params, "branches": bodies}, eqn.outvars, outs)

    def among_ways(self, types: Types, verdict: Types) -> Types:
        """Types of operands or results of branches that ranks choose independently.

        If ranks may choose differently, cast values outside: the transpose of a cast is a collective, which all ranks
        must reach.
        """
        return self.joined(types, tuple("V" if t == "V" else "I" for t in verdict))

    def joined(self, one: Types, other: Types) -> Types:
        """The types of a value that comes from two paths."""
        joined = []
        for axis, pair in zip(self.mesh.axis_names, zip(one, other, strict=True), strict=True):
            if "U" in pair and "V" in pair:
                raise errors.ShardingError(
                    f"a value is unreduced over {axis!r} on one path and varying on the other.",
                    where=source.here(),
                    fix=f"lax.psum the first, or lax.pcast(x, {axis!r}, to='unreduced') the second",
                )
            joined.append("U" if "U" in pair else join(pair))
        return tuple(joined)

    def _check_predicate(self, name: str, types: Types, bodies: Sequence[Jaxpr]) -> None:
        """Raise ShardingError if ranks could diverge at a collective and deadlock."""
        used = set().union(*[_collective_axes(b, self.mesh) for b in bodies])
        for axis, t in zip(self.mesh.axis_names, types, strict=True):
            if t in "VU" and axis in used:
                raise errors.ShardingError(
                    f"the predicate of a {name} varies over {axis!r}, and a collective inside is over that axis.",
                    where=source.here(),
                    why="ranks that take another branch would never reach the collective.",
                    fix=f"make the predicate the same everywhere, for example with lax.pmax(p, {axis!r})",
                )

    # -- collectives ---------------------------------------------------------------------------

    def mesh_collective(self, eqn: Eqn) -> None:
        """Type a collective of ``primitives``."""
        params = eqn.params
        if eqn.prim is mesh_ops.mesh_axis_index_p:
            self._axis_index(eqn.outvars, params)
            return
        (x,) = eqn.invars
        src = params["src"]
        if eqn.prim is mesh_ops.pcast_p and (src, params["dst"]) == ("I", "V"):
            if any(self._letter(x, a) == "V" for a in params["axes"]):
                # of a typed body in a branch that ranks choose: its operands were cast outside of the branch
                x = self.cast(x, self.changed(x, params["axes"], "V"))
                self._reshaped(eqn, x)  # to its own shape: a no-op
                return
        x = self.cast(x, self.changed(x, params["axes"], src))
        self.write(eqn.prim, [x], params, eqn.outvars, [self.changed(x, params["axes"], params["dst"])])

    def named_collective(self, eqn: Eqn) -> None:
        """Type a collective as the user wrote it."""
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
                raise unreduced_error(eqn, a, {0})
        return self.cast(x, self.changed(x, eqn.params["axes"], "V"))

    def _summands(self, eqn: Eqn) -> tuple[Atom, str]:
        """The operand of a sum, and its type: U if unreduced over any axis, else V."""
        axes, (x,) = eqn.params["axes"], eqn.invars
        unreduced = {a for a in axes if self._letter(x, a) == "U"}
        varying = [a for a in axes if a not in unreduced]
        if varying:
            x = self.cast(x, self.changed(x, varying, "V"))
        if varying and unreduced:  # one sum over all of them
            x = self.convert(x, varying, "V", "U")
        return x, "U" if unreduced else "V"

    def _extremum(self, eqn: Eqn, prim: Any) -> None:
        (x,) = eqn.invars
        for a, t in zip(self.mesh.axis_names, self.type_of(x), strict=True):
            if t == "U":  # over any axis: it is not linear
                raise unreduced_error(eqn, a, {0})
        self._typed(eqn, prim, dst="I")

    def _all_to_all(self, eqn: Eqn) -> None:
        split, join = eqn.params["split"], eqn.params["join"]
        place = join if join <= split else join + 1  # of the new dimension, before the other is removed
        dims = {"split_dim": split + (place <= split), "concat_dim": place}
        self._typed(eqn, mesh_ops.mesh_all_to_all_p, new_dim=place, **dims)

    def _typed(
        self,
        eqn: Eqn,
        prim: Any,
        dst: str = "V",
        sums: bool = False,
        new_dim: int | None = None,
        **params: Any,
    ) -> None:
        """Write a collective as the primitive ``prim``, whose result has type ``dst``.

        Args:
          sums: whether the operand may be unreduced.
          new_dim: a dimension of size 1 that the operand gets first.
          params: further parameters of ``prim``.
        """
        axes = eqn.params["axes"]
        x, src = self._summands(eqn) if sums else (self._varying(eqn), "V")
        if new_dim is not None:
            shape = (*x.aval.shape[:new_dim], 1, *x.aval.shape[new_dim:])
            x = self.new(reshape_p, x, {"shape": shape}, self.type_of(x))
        params = {**self.over(axes), "src": src, "dst": dst, **params}
        types, (out,) = self.changed(x, axes, dst), eqn.outvars
        if prim.typed((x.aval,), params).shape == out.aval.shape:
            self.write(prim, [x], params, [out], [types])
        else:
            self._reshaped(eqn, self.new(prim, x, params, types))

    def _axis_index(self, outvars: Sequence[Var], params: dict) -> None:
        types = tuple("V" if a in params["axes"] else "I" for a in self.mesh.axis_names)
        self.write(mesh_ops.mesh_axis_index_p, [], params, outvars, [types])

    def _cast_to(self, eqn: Eqn) -> None:
        x, axes, to = eqn.invars[0], eqn.params["axes"], eqn.params["to"]
        varying = [a for a in axes if to == "U" and self._letter(x, a) == "V"]
        if varying:
            x = self.convert(x, varying, "V", "U")
        x = self.cast_operand(x, self.changed(x, axes, to))
        self._reshaped(eqn, x)  # to its own shape: a no-op
        if self.is_zero(x):
            self.zeros.update(eqn.outvars)

    def _letter(self, x: Atom, axis: str) -> str:
        return self.type_of(x)[self.mesh.axis_names.index(axis)]

    def _reshaped(self, eqn: Eqn, x: Atom) -> None:
        """Write ``x``, in the shape of the result of ``eqn``, as that result."""
        params = {"shape": eqn.outvars[0].aval.shape}
        self.write(reshape_p, [x], params, eqn.outvars, [self.type_of(x)])


def _collective_axes(jaxpr: Jaxpr, mesh: AbstractMesh) -> set[str]:
    """The mesh axes over which ranks communicate in a jaxpr."""
    eqns = [e for e in mesh_ops.equations(jaxpr) if _is_collective(e)]
    return {a for e in eqns for a in e.params["axes"] if a in mesh.axis_names}


def _is_collective(eqn: Eqn) -> bool:
    return mesh_ops.communicates(eqn) or isinstance(eqn.prim, named.Collective)


RULES: dict[Any, Callable[[Typer, Eqn], None]] = {  # ``typed_rules`` adds those of custom derivatives
    jit_p: Typer._call,
    checkpoint_p: Typer._call,
    scan_p: Typer._scan,
    while_p: Typer._while,
    cond_p: Typer._cond,
}

_NAMED: dict[Any, Callable[[Typer, Eqn], None]] = {
    named.psum_p: lambda typer, eqn: typer._typed(eqn, mesh_ops.psum_invariant_p, dst="I", sums=True),
    named.pmax_p: lambda typer, eqn: typer._extremum(eqn, mesh_ops.pmax_invariant_p),
    named.pmin_p: lambda typer, eqn: typer._extremum(eqn, mesh_ops.pmin_invariant_p),
    named.all_gather_p: lambda typer, eqn: typer._typed(
        eqn, mesh_ops.mesh_all_gather_p, new_dim=eqn.params["dim"], dim=eqn.params["dim"]
    ),
    named.psum_scatter_p: lambda typer, eqn: typer._typed(
        eqn, mesh_ops.mesh_psum_scatter_p, sums=True, dim=eqn.params["dim"]
    ),
    named.all_to_all_p: Typer._all_to_all,
    named.ppermute_p: lambda typer, eqn: typer._typed(eqn, mesh_ops.mesh_ppermute_p, perm=eqn.params["perm"]),
    named.axis_index_p: lambda typer, eqn: typer._axis_index(eqn.outvars, eqn.params),
    named.cast_to_p: Typer._cast_to,
}
