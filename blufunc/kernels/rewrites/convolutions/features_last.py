"""Features last between convolutions, whatever layout a program was written in.

Kernels, after ``canonical``. In: a jaxpr whose convolutions have transposes around them, since the program has
features second. Out: an equivalent one, in which transposes have moved past elementwise operations, reductions, windows
and pads, as far as the next convolution, where they cancel. What is left is a transpose of the program's input and of
what other operations, and its caller, read.

A variable that is *moved* is the transpose of another, which is computed instead. An elementwise result is moved if
no more elements of its operands stay than move; broadcast scalars and vectors are of any layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.elementwise import copy_p
from blufunc.core.ops.shape import pad_p, slice_p
from blufunc.core.primitives.linear_ops import broadcast_in_dim_p, transpose_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.programs.simplify import Origins, dce, rewrite
from blufunc.kernels.fusion.iteration_space import reduces

_PER_AXIS = {
    pad_p.name: ("padding_config",),
    slice_p.name: ("start_indices", "limit_indices", "strides"),
    **dict.fromkeys(
        (
            *(
                "reduce_window_sum",
                "reduce_window_max",
                "reduce_window_min",
                "window_argmax",
                "window_argmin",
            ),
            *("window_pick", "window_place"),
        ),
        ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation", "shape"),
    ),
}
"""Parameters with an entry per axis, by name of the primitive.

All results have the axes of the operands.
"""


class _Moved(NamedTuple):
    """A variable as a transpose of another one.

    Attributes:
      base: the other one.
      permutation: axis ``i`` is axis ``permutation[i]`` of the other one.
    """

    base: Any
    permutation: tuple[int, ...]


def with_features_last(jaxpr: Jaxpr, made: set[Var], origins: Origins) -> Jaxpr:
    """Move transposes of convolutions' results to where they cancel.

    Args:
      made: the results of convolutions, in the layout of their kernels.
    """
    if not any(e.prim is transpose_p and e.invars[0] in made for e in jaxpr.eqns):
        return jaxpr
    moving = _Moving(jaxpr, origins, made)
    result = rewrite(jaxpr, moving.step, origins)
    eqns = list(result.eqns)
    outvars = [
        moving.plain(a, eqns, None) if a in moving.moved else b
        for a, b in zip(jaxpr.outvars, result.outvars, strict=True)
    ]
    return dce(result.replace(eqns=eqns, outvars=outvars), origins=origins)


class _Moving:
    """The variables that have moved so far.

    Attributes:
      moved: by variable of the program.
    """

    def __init__(self, jaxpr: Jaxpr, origins: Origins, made: set[Var]):
        self.moved: dict[Any, _Moved] = {}
        self.origins, self.made = origins, made
        self.makers: dict[Any, Eqn] = {v: e for e in jaxpr.eqns for v in e.outvars}
        self._plain: dict[Any, Var] = {}
        self._free: dict[Any, bool] = {}
        self._aliases: dict[Any, Any] = {}
        self._views: set[Any] = set()  # bases that are views of others
        self._dense: set[Any] = set()  # variables whose transposes cancelled

    def step(self, eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        """The replacement of an equation."""
        eqns: list[Eqn] = []
        if eqn.prim is copy_p and eqn.invars[0] in self._dense:  # an operand of a convolution
            self._dense.add(eqn.outvars[0])
            self._aliases[eqn.outvars[0]] = invars[0]
            alias(eqn.outvars[0], invars[0])
            return []
        if not any(a in self.moved for a in eqn.invars):
            if (
                eqn.prim is transpose_p
                and eqn.invars[0] in self.made
                and not is_replaced(transpose_p, "impl")
            ):
                self.moved[eqn.outvars[0]] = _Moved(invars[0], eqn.params["permutation"])
                return []
            return [eqn.with_invars(invars)]
        found = None if is_replaced(eqn.prim, "impl") else self.past(eqn, invars, eqns, alias)
        if found is not None:
            return [*eqns, *found]
        plain = [
            self.plain(a, eqns, eqn) if a in self.moved else b
            for a, b in zip(eqn.invars, invars, strict=True)
        ]
        return [*eqns, eqn.with_invars(plain)]

    def plain(self, a: Any, eqns: list[Eqn], reader: Eqn | None) -> Var:
        """A moved variable in its own layout."""
        key = a, None if reader is None else self.origins.get(reader)
        if key not in self._plain:
            base, permutation = self.moved[a]
            self._plain[key] = Var(a.aval)
            line = None if reader is None else reader.source
            eqns.append(Eqn(transpose_p, [base], [self._plain[key]], {"permutation": permutation}, line))
        return self._plain[key]

    def past(self, eqn: Eqn, invars: list[Atom], eqns: list[Eqn], alias: Callable) -> list[Eqn] | None:
        """The equation with its results moved; None if transposes stay ahead of it."""
        first = self.moved.get(eqn.invars[0])
        if eqn.prim is transpose_p and first is not None:
            return self.transposed(eqn, first, alias)
        if reduces(eqn.prim) and first is not None and set(eqn.params) == {"axes"}:
            return self.reduced(eqn, first)
        if eqn.prim.name in _PER_AXIS and first is not None:
            return self.of_windows(eqn, first, invars, eqns)
        if eqn.prim.kind != "elementwise":
            return None
        return self.elementwise(eqn, invars, eqns)

    def transposed(self, eqn: Eqn, first: _Moved, alias: Callable) -> list[Eqn]:
        (out,) = eqn.outvars
        permutation = tuple(first.permutation[d] for d in eqn.params["permutation"])
        if permutation != tuple(range(len(permutation))):
            self.moved[out] = _Moved(first.base, permutation)
        else:
            self._aliases[out] = first.base
            alias(out, first.base)
            if first.base not in self._views:
                self._dense.add(out)
        return []

    def reduced(self, eqn: Eqn, first: _Moved) -> list[Eqn] | None:
        (out,) = eqn.outvars
        axes = tuple(sorted(first.permutation[d] for d in eqn.params["axes"]))
        kept = [first.permutation[d] for d in range(len(first.permutation)) if d not in eqn.params["axes"]]
        in_order = sorted(kept)
        if kept == in_order:
            return [Eqn(eqn.prim, [first.base], [out], {"axes": axes}, eqn.source)]
        shape = tuple(first.base.aval.shape[d] for d in in_order)
        base = Var(out.aval.with_shape(shape))
        self.moved[out] = _Moved(base, tuple(in_order.index(d) for d in kept))
        return [Eqn(eqn.prim, [first.base], [base], {"axes": axes}, eqn.source)]

    def of_windows(self, eqn: Eqn, first: _Moved, invars: list[Atom], eqns: list[Eqn]) -> list[Eqn] | None:
        back = _inverse(first.permutation)
        params = dict(eqn.params)
        for name in _PER_AXIS[eqn.prim.name]:
            if params.get(name) is not None:
                params[name] = tuple(params[name][d] for d in back)
        windows = [d for d, n in enumerate(eqn.params.get("window_dimensions", ())) if n > 1]
        order = [back.index(d) for d in windows]
        if order != sorted(order):
            return None  # positions of extrema count axes in their order
        if any(self.moved[a].permutation != first.permutation for a in eqn.invars if a in self.moved):
            return None
        operands = [self.operand(a, b, back, eqns, eqn) for a, b in zip(eqn.invars, invars, strict=True)]
        outs = [self.new(v, back) for v in eqn.outvars]
        if eqn.prim is slice_p:
            self._views.update(outs)
        return [Eqn(eqn.prim, operands, outs, params, eqn.source)]

    def new(self, v: Any, back: tuple[int, ...]) -> Var:
        """A variable that a result is the transpose of."""
        base = Var(v.aval.with_shape(tuple(v.aval.shape[d] for d in back)))
        self.moved[v] = _Moved(base, _inverse(back))
        return base

    def elementwise(self, eqn: Eqn, invars: list[Atom], eqns: list[Eqn]) -> list[Eqn] | None:
        rank = eqn.outvars[0].aval.ndim
        found = [self.moved[a] for a in eqn.invars if a in self.moved]
        permutation = found[0].permutation
        if any(f.permutation != permutation for f in found):
            return None
        fixed = (a for a in dict.fromkeys(eqn.invars) if a not in self.moved and a.aval.ndim == rank)
        others = [a for a in fixed if not self.is_free(a)]
        if sum(a.aval.size for a in others) > sum(f.base.aval.size for f in found):
            return None
        back = _inverse(permutation)
        operands = [self.operand(a, b, back, eqns, eqn) for a, b in zip(eqn.invars, invars, strict=True)]
        return [Eqn(eqn.prim, operands, [self.new(v, back) for v in eqn.outvars], eqn.params, eqn.source)]

    def is_free(self, a: Any) -> bool:
        """True for what is elementwise in broadcast smaller arrays: of any layout."""
        if a not in self._free:
            self._free[a] = self._is_free(a)
        return self._free[a]

    def _is_free(self, a: Any) -> bool:
        if a.__class__ is Literal or a.aval.ndim == 0:
            return True
        maker = self.makers.get(a)
        if maker is None or is_replaced(maker.prim, "impl"):
            return False
        if maker.prim is broadcast_in_dim_p:
            return maker.invars[0] not in self.moved
        one = maker.prim.kind == "elementwise" and len(maker.outvars) == 1
        return one and all(map(self.is_free, maker.invars))

    def operand(self, a: Any, now: Any, back: tuple[int, ...], eqns: list[Eqn], reader: Eqn) -> Any:
        """An operand in the layout of a moved result; ``now``: what stands for it."""
        if a in self.moved:
            return self.moved[a].base
        if a.__class__ is Literal or a.aval.ndim == 0:
            return now
        out = Var(a.aval.with_shape(tuple(a.aval.shape[d] for d in back)))
        if not self.is_free(a):
            eqns.append(Eqn(transpose_p, [now], [out], {"permutation": back}, reader.source))
            return out
        maker = self.makers[a]
        if maker.prim is broadcast_in_dim_p:
            params = {"shape": out.aval.shape, "dims": tuple(back.index(d) for d in maker.params["dims"])}
            given = [self._aliases.get(x, x) for x in maker.invars]
            eqns.append(Eqn(broadcast_in_dim_p, given, [out], params, reader.source))
            return out
        operands = [self.operand(x, self._aliases.get(x, x), back, eqns, maker) for x in maker.invars]
        eqns.append(Eqn(maker.prim, operands, [out], maker.params, maker.source))
        return out


def _inverse(permutation: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(permutation.index(d) for d in range(len(permutation)))
