"""Typing of the collectives of a ``shard_map`` body.

Parallel, a part of ``axis_types``, which types all other operations. In: a collective over mesh axes as the user wrote
it (``named``). Out: the typed one (``primitives``), and casts of its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Atom, Eqn, Var
from blufunc.core.primitives.linear_ops import reshape_p
from blufunc.parallel.collectives import named
from blufunc.parallel.collectives import primitives as mesh_ops
from blufunc.parallel.collectives.axis_casts import CastWriter, unreduced_error


class CollectiveTyper(CastWriter):
    """Types collectives."""

    def mesh_collective(self, eqn: Eqn) -> None:
        """Type a collective of ``primitives``."""
        params = eqn.params
        if eqn.prim is mesh_ops.mesh_axis_index_p:
            self._axis_index(eqn.outvars, params)
            return
        (x,) = eqn.invars
        src = params["src"]
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
            x = self.new(
                mesh_ops.pcast_p,
                x,
                {**self.over(varying), "src": "V", "dst": "U"},
                self.changed(x, varying, "U"),
            )
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
            params = {**self.over(varying), "src": "V", "dst": "U"}
            x = self.new(mesh_ops.pcast_p, x, params, self.changed(x, varying, "U"))
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


_NAMED: dict[Any, Callable[[CollectiveTyper, Eqn], None]] = {
    named.psum_p: lambda typer, eqn: typer._typed(eqn, mesh_ops.psum_invariant_p, dst="I", sums=True),
    named.pmax_p: lambda typer, eqn: typer._extremum(eqn, mesh_ops.pmax_invariant_p),
    named.pmin_p: lambda typer, eqn: typer._extremum(eqn, mesh_ops.pmin_invariant_p),
    named.all_gather_p: lambda typer, eqn: typer._typed(
        eqn, mesh_ops.mesh_all_gather_p, new_dim=eqn.params["dim"], dim=eqn.params["dim"]
    ),
    named.psum_scatter_p: lambda typer, eqn: typer._typed(
        eqn, mesh_ops.mesh_psum_scatter_p, sums=True, dim=eqn.params["dim"]
    ),
    named.all_to_all_p: CollectiveTyper._all_to_all,
    named.ppermute_p: lambda typer, eqn: typer._typed(eqn, mesh_ops.mesh_ppermute_p, perm=eqn.params["perm"]),
    named.axis_index_p: lambda typer, eqn: typer._axis_index(eqn.outvars, eqn.params),
    named.cast_to_p: CollectiveTyper._cast_to,
}
