"""Matmuls of few rows that compute these rows, and that share them.

Kernels, after ``gemm_epilogue``. In: a program whose matmuls have their epilogues. Out: an equivalent one with
``dot_general+rows``, for devices with a kernel for that:

    SwiGLU               y = silu(x @ g) * (x @ u): a matmul that only the epilogue of another one of ``x`` reads
                         becomes its second weights
    a normalization      y = norm(x) @ w: reductions of rows and what is elementwise, from arrays in memory

Every block of such a kernel computes all rows, which are few, and so saves a launch on the path from token to token.
Rows are worth it only if nothing else reads them, and if no other kernel would write what they are computed of. So a
residual sum must become the addend of its matmul, which it does if normalizations that read it are no kernels:
candidates are tried together, and those whose arrays a kernel writes are given up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p, broadcast_in_dim_p, reshape_p
from blufunc.core.programs.simplify import Origins, dce
from blufunc.kernels.fusion.iteration_space import reduces, sort_of
from blufunc.kernels.loopir.access_map import moves
from blufunc.kernels.ops.gemm import SUMS
from blufunc.kernels.ops.pointwise_gemm import dot_pointwise_p, scalar
from blufunc.kernels.ops.row_gemm import PRODUCTS_OF_ROWS, REDUCED, Rows, dot_rows_p, product_params, split
from blufunc.kernels.rewrites.gemm_epilogue import with_gemm_epilogues
from blufunc.kernels.rewrites.readers import Readers
from blufunc.kernels.target import Target

MOST_WEIGHTS, _MOST_EQUATIONS = 4, 48


def with_row_gemms(jaxpr: Jaxpr, origins: Origins, target: Target) -> Jaxpr:
    """Join matmuls, and let them compute their rows."""
    if not any(
        e.prim in PRODUCTS_OF_ROWS and target.row_seconds(_rows_given(e)) is not None for e in jaxpr.eqns
    ):
        return jaxpr
    jaxpr = _Joined(jaxpr, origins, target).run()
    return _Computed(jaxpr, origins, target).run()


def _rows_given(eqn: Eqn) -> Eqn:
    """A matmul as an equation of ``dot_rows_p``, of rows in memory."""
    x, *rest = eqn.invars
    return _made(eqn, None, x.aval.shape, [x], 1, rest)


def _made(
    eqn: Eqn,
    rows: Rows | None,
    shape: tuple[int, ...],
    arrays: Sequence[Any],
    weights: int,
    rest: Sequence[Any],
) -> Eqn:
    product = eqn.params["product"] if eqn.prim is dot_rows_p else eqn.prim
    own = {"rows": rows, "shape": shape, "weights": weights, "product": product}
    params = product_params(eqn.params) | own
    return Eqn(dot_rows_p, [*arrays, *rest], eqn.outvars, params, eqn.source)


class _Joined(Readers):
    """Matmuls of the same rows, whose results the epilogue of one reads."""

    def __init__(self, jaxpr: Jaxpr, origins: Origins, target: Target):
        super().__init__(jaxpr)
        self.origins, self.target = origins, target

    def run(self) -> Jaxpr:
        replaced = {e: new for e in self.jaxpr.eqns if (new := self.joined(e)) is not None}
        if not replaced:
            return self.jaxpr
        self.origins.update({new: self.origins[e] for e, new in replaced.items() if e in self.origins})
        eqns = [replaced.get(e, e) for e in self.jaxpr.eqns]
        return dce(self.jaxpr.replace(eqns=eqns), origins=self.origins)

    def joined(self, eqn: Eqn) -> Eqn | None:
        """A matmul with others, whose results it reads, as further weights, or None."""
        if eqn.prim is not dot_pointwise_p or eqn.params["epilogue"].bias:
            return None
        x, first, *operands = eqn.invars
        found = [n for n, a in enumerate(operands) if self.is_alike(a, eqn)][: MOST_WEIGHTS - 1]
        if not found:
            return None
        others = [n for n in range(len(operands)) if n not in found]
        weights = [first, *(self.makers[operands[n]].invars[1] for n in found)]
        epilogue = eqn.params["epilogue"]
        t, *scalars = epilogue.jaxpr.invars
        turned = epilogue.jaxpr.replace(invars=[t, *(scalars[n] for n in (*found, *others))])
        params = {**eqn.params, "epilogue": _replaced(epilogue, turned)}
        given = Eqn(eqn.prim, eqn.invars, eqn.outvars, params, eqn.source)
        made = _made(given, None, x.aval.shape, [x], len(weights), [*weights, *(operands[n] for n in others)])
        return made if self.target.row_seconds(made) is not None else None

    def is_alike(self, a: Any, eqn: Eqn) -> bool:
        """True for a matmul of the same rows and layout that only ``eqn`` reads."""
        other = self.makers.get(a)
        if other is None or other.prim is not dot_general_p or self.only(a) is not eqn:
            return False
        (x, w), (own_x, own_w) = other.invars, eqn.invars[:2]
        same = all(other.params[k] == eqn.params[k] for k in ("dimension_numbers", "precision"))
        same = same and a.aval.dtype == eqn.params["preferred_element_type"] and w.aval == own_w.aval
        same = same and self.origins.get(other) == self.origins.get(eqn)
        return same and x is own_x and self.moved(w) == self.moved(own_w)

    def moved(self, w: Any) -> list[tuple]:
        """How a matrix is viewed: the movements from the array in memory."""
        chain = []
        while w in self.makers and moves(self.makers[w]) and len(self.makers[w].invars) == 1:
            maker = self.makers[w]
            chain.append((maker.prim, repr(maker.params), maker.invars[0].aval.shape))
            (w,) = maker.invars
        return chain


def _replaced(epilogue: Any, jaxpr: Jaxpr) -> Any:
    return type(epilogue)(jaxpr, epilogue.bias, epilogue.summed, epilogue.rows)


@dataclass
class _Cone:
    """The computation of rows, from arrays in memory.

    Attributes:
      x: the rows.
      eqns: of the computation, in order.
      leaves: the arrays, and their kinds in ``Rows``.
      levels: by variable, the passes over a row that precede it.
    """

    x: Var
    eqns: list[Eqn] = field(default_factory=list)
    leaves: dict[Any, str] = field(default_factory=dict)
    levels: dict[Any, int] = field(default_factory=dict)

    def rows(self) -> Rows:
        """The same as a ``Rows``."""
        reduced = [e for e in self.eqns if reduces(e.prim)]
        count = max((self.levels[e.outvars[0]] for e in reduced), default=0)
        given: dict[Any, Var] = {v: scalar(v) for v in self.leaves}
        passes, monoids = [], []
        for level in range(1, count + 1):
            own = [e for e in reduced if self.levels[e.outvars[0]] == level]
            passes.append(self.at_element(given, [e.invars[0] for e in own]))
            monoids.append(tuple(reduces(e.prim) for e in own))
            given.update({e.outvars[0]: scalar(e.outvars[0]) for e in own})
        return Rows(
            tuple(self.leaves.values()), tuple(passes), tuple(monoids), self.at_element(given, [self.x])
        )

    def at_element(self, given: dict[Any, Var], wanted: Sequence[Any]) -> Jaxpr:
        """The function of scalars that computes some variables at an element."""
        env: dict[Any, Any] = dict(given)
        eqns = []
        for e in self.eqns:
            (v,) = e.outvars
            if v in env:
                continue
            if e.prim in (broadcast_in_dim_p, reshape_p):
                (a,) = e.invars
                env[v] = a if a.__class__ is Literal else env.get(a)
            elif all(a.__class__ is Literal or env.get(a) is not None for a in e.invars) and not reduces(
                e.prim
            ):
                ins = [a if a.__class__ is Literal else env[a] for a in e.invars]
                env[v] = scalar(v)
                eqns.append(Eqn(e.prim, ins, [env[v]], e.params, None))
        return dce(Jaxpr(list(given.values()), eqns, [env[v] for v in wanted], name="rows"))


class _Computed(Readers):
    """Matmuls that compute their rows."""

    def __init__(self, jaxpr: Jaxpr, origins: Origins, target: Target):
        super().__init__(jaxpr)
        self.origins, self.target = origins, target

    def run(self) -> Jaxpr:
        found = {
            e.invars[0]: e for e in self.jaxpr.eqns if self.is_matmul(e) and e.invars[0].__class__ is Var
        }
        cones = {x: cone for x in found if (cone := self.cone(x)) is not None and self.pays(cone)}
        while cones:
            made = with_gemm_epilogues(self.replaced(cones), self.origins)
            makers = {v: e for e in made.eqns for v in e.outvars}
            lost = [x for x, cone in cones.items() if any(_is_by_kernel(v, makers) for v in cone.leaves)]
            if not lost:
                return made
            for x in lost:
                del cones[x]
        return self.jaxpr

    def is_matmul(self, eqn: Eqn) -> bool:
        return eqn.prim in PRODUCTS_OF_ROWS or (eqn.prim is dot_rows_p and eqn.params["rows"] is None)

    def replaced(self, cones: dict[Any, _Cone]) -> Jaxpr:
        """The program in which readers of some rows compute them."""
        eqns = []
        for e in self.jaxpr.eqns:
            cone = cones.get(e.invars[0]) if e.invars and self.is_matmul(e) else None
            eqns.append(e if cone is None else self.with_rows(e, cone))
        return dce(self.jaxpr.replace(eqns=eqns), origins=self.origins)

    def with_rows(self, eqn: Eqn, cone: _Cone) -> Eqn:
        given = eqn if eqn.prim is dot_rows_p else _rows_given(eqn)
        _, weights, others = split(given.invars, given.params)
        shape, rest = given.params["shape"], [*weights, *others]
        made = _made(given, cone.rows(), shape, list(cone.leaves), len(weights), rest)
        if eqn in self.origins:
            self.origins[made] = self.origins[eqn]
        return made

    def pays(self, cone: _Cone) -> bool:
        """True if the kernels that read rows compute them sooner than one kernel would."""
        inside = set(cone.eqns)
        inner = [e.outvars[0] for e in cone.eqns if e.outvars[0] is not cone.x and not moves(e)]
        if any(v in self.returned or any(r not in inside for r in self.of(v)) for v in inner):
            return False  # a kernel would compute it anyway
        seconds = 0.0
        for eqn in self.of(cone.x):
            if not self.is_matmul(eqn) or eqn.invars[0] is not cone.x or list(eqn.invars).count(cone.x) > 1:
                return False
            own = self.target.row_seconds(self.with_rows(eqn, cone))
            if own is None or self.origins.get(eqn) != self.origins.get(self.makers[cone.x]):
                return False
            seconds += own
        return cone.x not in self.returned and seconds < self.target.machine.launch

    def cone(self, x: Var) -> _Cone | None:
        """The computation of rows; None if it is no function of rows in memory."""
        if x not in self.makers or not x.aval.ndim:
            return None
        cone = _Cone(x)
        size, terms = x.aval.size, x.aval.shape[-1]
        if size == terms * terms and terms > 1:
            return None  # a vector along the terms and the numbers of rows have the same shape
        elements = lambda a: a.aval.size == size and a.aval.ndim and a.aval.shape[-1] == terms
        pending: list[Any] = [x]
        order: set[Eqn] = set()
        while pending:
            v = pending.pop()
            if v.__class__ is Literal or v in cone.leaves:
                continue
            maker = self.makers.get(v)
            if maker in order:
                continue
            kind = self.kind_of_leaf(v, maker, elements, terms)
            if kind is not None:
                cone.leaves[v] = kind
                continue
            if maker is None or len(order) == _MOST_EQUATIONS or not self.is_of_rows(maker, x):
                return None
            order.add(maker)
            pending += maker.invars
        cone.eqns = [e for e in self.jaxpr.eqns if e in order]
        for e in cone.eqns:
            level = max([cone.levels.get(a, 0) for a in e.invars if a.__class__ is not Literal], default=0)
            cone.levels[e.outvars[0]] = level + bool(reduces(e.prim))
        return cone if any(not moves(e) for e in cone.eqns) and "matrix" in cone.leaves.values() else None

    def kind_of_leaf(self, v: Any, maker: Eqn | None, elements: Any, terms: int) -> str | None:
        """The kind of an array in memory in ``Rows``; None if it is to be computed."""
        if maker is not None and not self.is_step(maker):
            return None
        if v.aval.size == 1:
            return "scalar"
        if elements(v):
            return "matrix"
        return "vector" if v.aval.shape == (terms,) else None

    def is_step(self, maker: Eqn) -> bool:
        """True if a library kernel writes the result, or may after ``gemm_epilogue``."""
        if sort_of(maker) == "opaque":
            return True
        return maker.prim in SUMS and any(map(self.is_product, maker.invars))

    def is_product(self, a: Any) -> bool:
        maker = self.makers.get(a)
        return maker is not None and maker.prim is dot_general_p and self.only(a) is not None

    def is_of_rows(self, e: Eqn, x: Var) -> bool:
        """True for an equation of elements, of numbers of each row, or of a vector."""
        (out,), lead = e.outvars, x.aval.shape[:-1]
        rows = math.prod(lead)
        if sort_of(e) == "opaque":
            return False
        if e.prim is reshape_p:
            before, after = e.invars[0].aval, out.aval
            if before.size == 1:
                return True
            whole = before.size == x.aval.size and before.ndim and before.shape[-1] == after.shape[-1:][0]
            return bool(whole) or (before.size == rows and after.size == rows)
        if e.prim is broadcast_in_dim_p:
            return self.is_repeated(e, x)
        if reduces(e.prim):
            of = e.invars[0].aval
            whole = of.size == x.aval.size and of.ndim and tuple(e.params["axes"]) == (of.ndim - 1,)
            return bool(whole) and of.dtype == dtypes.float32 and reduces(e.prim) in REDUCED
        return isinstance(e.prim, Elementwise) or e.prim is add_any_p

    def is_repeated(self, e: Eqn, x: Var) -> bool:
        """True for a repeated scalar, vector along the terms, or number of each row."""
        (a,), out = e.invars, e.outvars[0].aval
        if a.aval.size == 1:
            return True
        if not out.ndim or (out.size != x.aval.size and out.size != x.aval.size // x.aval.shape[-1]):
            return False
        axes = [(d, n) for d, n in zip(e.params["dims"], a.aval.shape, strict=True) if n > 1]
        if a.aval.ndim == 1 and axes == [(out.ndim - 1, x.aval.shape[-1])]:
            return True
        lead = [(d, n) for d, n in enumerate(out.shape[:-1]) if n > 1]
        return axes == lead


def _is_by_kernel(v: Any, makers: dict[Any, Eqn]) -> bool:
    """True if a generated kernel writes an array."""
    while v in makers and makers[v].prim is reshape_p:
        (v,) = makers[v].invars
    return v in makers and sort_of(makers[v]) != "opaque"
