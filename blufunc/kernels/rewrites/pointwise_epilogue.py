"""Elementwise consumers of a matmul fused into its epilogue.

Kernels, before ``canonicalize`` and ``gemm_epilogue``. In: a program with all calls inlined. Out: an equivalent one, in
which a matmul and elementwise functions of its result are one equation, ``dot_pointwise``:

    bias, GELU                y = gelu(x),  x = a @ b + bias;  x is a second result if it has other readers
    its derivative            d = (a @ b) * gelu'(x),          x is already in memory
    SwiGLU, and backward      y = silu(g) * (a @ b);           du, dg = t * silu(g), t * u * silu'(g) of one t = a @ b
    squared ReLU, scales, ... anything with scalar code

Only results that must be in memory move: library calls or the caller read them. A kernel computes its own operands.
Operands are traced back to values in memory, so an epilogue may recompute values of the forward pass. A cost model
weighs the saved traffic and launches against the kernel's slowdown relative to the library. A sum alone is left to
``gemm_epilogue``, since the library adds it at no cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.elementwise import convert_p
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p, broadcast_in_dim_p, reshape_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.programs.simplify import Origins, dce
from blufunc.kernels.fusion.iteration_space import sort_of
from blufunc.kernels.loopir.access_map import moves
from blufunc.kernels.ops.gemm import SUMS
from blufunc.kernels.ops.pointwise_gemm import Epilogue, columns_of, dot_pointwise_p, equations_at, scalar
from blufunc.kernels.rewrites.gemm_epilogue import Products
from blufunc.kernels.tables import duration, line_of
from blufunc.kernels.target import Target

_MOST_RECOMPUTED = 16
"""Equations between an operand and the values in memory that it is traced to."""


def with_pointwise_epilogues(jaxpr: Jaxpr, origins: Origins, target: Target) -> tuple[Jaxpr, tuple[str, ...]]:
    """The program with elementwise epilogues, and why other matmuls have none."""
    found = _Pointwise(jaxpr, origins, target)
    return found.run(), tuple(found.notes)


class _Pointwise(Products):
    """Matmuls with elementwise epilogues.

    Attributes:
      notes: why a matmul has no epilogue.
      rank: by variable, the most equations on a path to it that are not elementwise. A value in memory whose rank is at
        most that of a matmul does not depend on it.
      stored: results of matmuls with epilogues.
      removed: equations that only such a matmul computes.
      added: the matmuls with epilogues, by the position after which they run.
    """

    def __init__(self, jaxpr: Jaxpr, origins: Origins, target: Target):
        super().__init__(jaxpr, origins)
        self.target = target
        self.notes: dict[str, None] = {}
        self.stored: set[Any] = set()
        self.removed: set[Eqn] = set()
        self.added: dict[int, list[Eqn]] = {}
        self.rank: dict[Any, int] = dict.fromkeys(jaxpr.invars, 0)
        self.of_elements = {e for e in jaxpr.eqns if _is_elementwise(e)}
        for eqn in jaxpr.eqns:
            own = eqn not in self.of_elements and not moves(eqn)
            rank = max([self.rank[a] for a in eqn.invars if a.__class__ is not Literal], default=0) + own
            self.rank.update(dict.fromkeys(eqn.outvars, rank))

    def run(self) -> Jaxpr:
        if any(is_replaced(p, "impl") for p in (dot_general_p, convert_p, broadcast_in_dim_p, reshape_p)):
            return self.jaxpr
        for eqn in self.jaxpr.eqns:
            if eqn.prim is dot_general_p and _is_matrix(eqn):
                self.consider(eqn)
        if not self.added:
            return self.jaxpr
        eqns: list[Eqn] = []
        for place, eqn in enumerate(self.jaxpr.eqns):
            eqns += [eqn] * (eqn not in self.removed)
            eqns += self.added.get(place, ())
        return dce(self.jaxpr.replace(eqns=eqns))

    def is_stored(self, v: Any) -> bool:
        return v in self.stored

    def of(self, v: Any) -> list[Eqn]:
        """The remaining equations that read a variable."""
        return [e for e in super().of(v) if e not in self.removed]

    def consider(self, matmul: Eqn) -> None:
        """Fuse results that must be in memory, if that is faster."""
        before = self.with_vector(matmul)
        tile = before[-1].outvars[0] if before else matmul.outvars[0]
        cone = self.cone(tile, matmul)
        results = [v for v in cone.results if v.aval.dtype == tile.aval.dtype and self.is_required(v)]
        while results and not self.join(matmul, before, tile, cone, results):
            results.pop()  # the last one's operands may come too late for the others

    def join(self, matmul: Eqn, before: list[Eqn], tile: Var, cone: _Cone, results: list[Var]) -> bool:
        """Fuse some results, if faster; False if they would come too late for a reader."""
        body = cone.reaching(results)
        if all(e.prim in SUMS or e.prim in (convert_p, reshape_p) for e in body):
            return True
        own = _depending_on(tile, body)
        inside = {*own, *self.sum_of(matmul, tile)}
        kept = self.kept(own, {self.makers[v] for v in results}, inside)
        stays = lambda e: e not in inside or e in kept
        stored = tile in self.returned or any(map(stays, self.of(tile)))
        results = [*results, tile][: len(results) + stored]
        joined = _joined(matmul, before, tile, body, cone.leaves(body), results)
        reads = [a for e in (*before, joined) for a in e.invars if a in self.position]
        place = max(self.position[a] for a in (*reads, matmul.outvars[0]))
        if any(self.place(e) <= place for v in results for e in self.of(v) if stays(e)):
            return False
        if (note := self.left_out(joined, tile, stored, launches=not kept)) is not None:
            self.notes[f"no epilogue for the matmul at {line_of(matmul)}: {note}"] = None
            return True
        self.removed |= {matmul, *inside} - kept
        self.add(place, [*before[:-1], *_shaped(joined, tile)], matmul)
        return True

    def add(self, place: int, eqns: Sequence[Eqn], matmul: Eqn) -> None:
        """Add equations after a position of the program."""
        self.added.setdefault(place, []).extend(eqns)
        for eqn in eqns:
            if matmul in self.origins:
                self.origins[eqn] = self.origins[matmul]
            self.stored.update(eqn.outvars)
            self.position.update(dict.fromkeys(eqn.outvars, place))
            self.read(eqn)

    # -- the bias ------------------------------------------------------------------

    def with_vector(self, matmul: Eqn) -> list[Eqn]:
        """The equations of the matmul with a bias, if it has one; the last is the sum."""
        dtype, chain = matmul.outvars[0].aval.dtype, self.alone_after(matmul.outvars[0])
        for n, total in enumerate(chain):
            after = chain[n + 1] if n + 1 < len(chain) and chain[n + 1].prim is convert_p else None
            (x,) = (total if total.outvars[0].aval.dtype == dtype or after is None else after).outvars
            if total.prim not in SUMS or x.aval.dtype != dtype or not self.same_origin(total, matmul):
                continue
            for one, other in (total.invars, total.invars[::-1]):
                if self.product(one, total) is matmul and (found := self.with_bias(matmul, other, x)):
                    return found
        return []

    def alone_after(self, v: Var) -> list[Eqn]:
        """Up to three elementwise equations, each the only reader of the one before."""
        chain: list[Eqn] = []
        while len(chain) < 3 and (eqn := self.only(v)) in self.of_elements:
            chain.append(eqn)  # type: ignore[arg-type]
            (v,) = chain[-1].outvars
        return chain

    def sum_of(self, matmul: Eqn, tile: Var) -> list[Eqn]:
        """The equations from a matmul to its sum with a bias."""
        chain = self.alone_after(matmul.outvars[0]) if tile is not matmul.outvars[0] else []
        ends = [n for n, e in enumerate(chain) if tile in e.outvars]
        return chain[: ends[0] + 1] if ends else []

    # -- its elementwise consumers --------------------------------------------------------------------------

    def cone(self, tile: Var, matmul: Eqn) -> _Cone:
        """All elementwise consumers of a matmul whose operands can be traced to memory."""
        cone = _Cone(tile)
        pending = sorted(self.of(tile), key=self.place)
        seen: set[Eqn] = set()
        while pending:
            eqn = pending.pop(0)
            if eqn in seen:
                continue
            seen.add(eqn)
            moved = eqn.prim is reshape_p
            if not (moved or eqn in self.of_elements) or not self.same_origin(eqn, matmul):
                continue
            (out,) = eqn.outvars
            if out.aval.size != tile.aval.size:
                continue
            traced = [self.traced(a, cone, matmul, _MOST_RECOMPUTED) for a in eqn.invars]
            if any(t is None for t in traced):
                continue
            for t in traced:
                cone.add(t)  # type: ignore[arg-type]
            cone.eqns[out] = eqn
            if not moved:
                cone.results.append(out)
            pending = sorted([*pending, *self.of(out)], key=self.place)
        return cone

    def place(self, eqn: Eqn) -> int:
        return self.position[eqn.outvars[0]] if eqn.outvars else len(self.jaxpr.eqns)

    def traced(self, atom: Atom, cone: _Cone, matmul: Eqn, most: int) -> _Traced | None:
        """The computation of an operand from memory; None if it depends on the matmul."""
        if atom.__class__ is Literal or atom in cone.eqns or atom is cone.tile:
            return {}, {}
        if atom not in cone.traced:
            cone.traced[atom] = self._traced(atom, cone, matmul, most)
        return cone.traced[atom]

    def _traced(self, atom: Any, cone: _Cone, matmul: Eqn, most: int) -> _Traced | None:
        rank, own, maker = self.rank[matmul.outvars[0]], self.rank[atom], self.makers.get(atom)
        if atom.aval.size == 1:
            return ({}, {atom: atom}) if own < rank else None
        if (vector := self.repeated(atom, matmul)) is not None:
            return ({}, {atom: vector}) if self.rank[vector] < rank else None
        if atom.aval.size != cone.tile.aval.size:
            return None
        if maker is None or (own <= rank and (self.is_stored(atom) or sort_of(maker) == "opaque")):
            return {}, {atom: atom}
        if own < rank and self.is_required(atom):
            return {}, {atom: atom}  # a kernel writes it
        if not most or not (maker in self.of_elements or maker.prim is reshape_p):
            return None
        eqns: dict[Any, Eqn] = {}
        leaves: dict[Any, Any] = {}
        for a in maker.invars:
            found = self.traced(a, cone, matmul, most - 1)
            if found is None:
                return None
            eqns |= found[0]
            leaves |= found[1]
        return {**eqns, atom: maker}, leaves

    def is_required(self, v: Any) -> bool:
        """True for a value that a library call or the caller reads, also through movement."""
        return v in self.returned or any(
            self.is_required(e.outvars[0]) if moves(e) else sort_of(e) == "opaque" for e in self.of(v)
        )

    def kept(self, body: Sequence[Eqn], makers: set[Eqn], inside: set[Eqn]) -> set[Eqn]:
        """The equations of a body with other readers, which stay in the program."""
        kept: set[Eqn] = set()
        for eqn in reversed(body):
            (out,) = eqn.outvars
            if eqn not in makers and (
                out in self.returned or any(e not in inside or e in kept for e in self.of(out))
            ):
                kept.add(eqn)
        return kept

    # -- cost ---------------------------------------------------------------------------------

    def left_out(self, joined: Eqn, tile: Var, stored: bool, launches: bool) -> str | None:
        """Why an epilogue is not used: no kernel, or no gain. None if it is used.

        It saves the write of the matmul's result and a kernel's read, faster if that fits in L2, and a launch.
        """
        target, nbytes = self.target, tile.aval.nbytes
        if (reason := target.pointwise_gemm(joined)) is not None:
            return reason
        rate = target.machine.bandwidth * (target.cache_speedup if nbytes <= target.cache_bytes else 1)
        saved = (nbytes + (0 if stored else nbytes)) / rate + target.machine.launch * launches
        lost = target.pointwise_seconds(joined)
        if saved > lost:
            return None
        return f"it would save {duration(saved)} and take {duration(lost)} longer than the library's matmul"


_Traced = tuple[dict[Any, Eqn], dict[Any, Any]]
"""Equations by result, in order; by operand, the value in memory that it views."""


class _Cone:
    """Elementwise equations that depend on a tile, and those of their other operands.

    Attributes:
      tile: the result of the matmul, with its bias.
      eqns: by result, in order.
      results: the results that depend on the tile.
      traced: the computations of operands, memoized.
    """

    def __init__(self, tile: Var):
        self.tile = tile
        self.eqns: dict[Any, Eqn] = {}
        self.results: list[Var] = []
        self.traced: dict[Any, _Traced | None] = {}
        self._leaves: dict[Any, Any] = {}

    def add(self, traced: _Traced) -> None:
        for v, eqn in traced[0].items():
            self.eqns.setdefault(v, eqn)
        self._leaves |= traced[1]

    def reaching(self, results: Sequence[Var]) -> list[Eqn]:
        """The equations that results need, in order."""
        needed: set[Any] = set(results)
        body = []
        for v, eqn in reversed(self.eqns.items()):
            if v in needed and v is not self.tile:
                body.append(eqn)
                needed.update(a for a in eqn.invars if a.__class__ is not Literal and a not in self._leaves)
        return body[::-1]

    def leaves(self, body: Sequence[Eqn]) -> dict[Any, Any]:
        """By operand of the equations, the value in memory that it views."""
        read = dict.fromkeys(a for e in body for a in e.invars)
        return {a: self._leaves[a] for a in read if a in self._leaves}


def _is_elementwise(eqn: Eqn) -> bool:
    scalars = isinstance(eqn.prim, Elementwise) or eqn.prim is add_any_p
    return scalars and sort_of(eqn) in ("node", "virtual") and not eqn.prim.multiple_results


def _is_matrix(matmul: Eqn) -> bool:
    """True for two matrices of the result's dtype, with a multiple of 8 columns."""
    _, (batch, _) = matmul.params["dimension_numbers"]
    lhs, rhs = (a.aval for a in matmul.invars)
    columns = columns_of(rhs.shape, matmul.params["dimension_numbers"])
    whole = bool(lhs.size and rhs.size) and not batch and not columns % 8
    return whole and lhs.dtype == rhs.dtype == matmul.outvars[0].aval.dtype


def _depending_on(tile: Var, body: Sequence[Eqn]) -> list[Eqn]:
    """The equations that depend on a variable."""
    known: set[Any] = {tile}
    found = []
    for eqn in body:
        if not known.isdisjoint(eqn.invars):
            found.append(eqn)
            known.update(eqn.outvars)
    return found


def _shaped(joined: Eqn, tile: Var) -> list[Eqn]:
    """A matmul whose results have its own shape, and the reshapes of its results."""
    results, eqns = [], []
    for v in joined.outvars:
        same = v.aval.shape == tile.aval.shape
        results.append(v if same else Var(v.aval.with_shape(tile.aval.shape)))
        if not same:
            eqns.append(Eqn(reshape_p, [results[-1]], [v], {"shape": v.aval.shape}, joined.source))
    return [joined.with_vars(joined.invars, results), *eqns]


def _joined(
    matmul: Eqn, before: Sequence[Eqn], tile: Var, body: Sequence[Eqn], leaves: dict, results: Sequence[Var]
) -> Eqn:
    """The matmul with equations as its epilogue."""
    first = before[-1] if before else matmul
    env: dict[Any, Any] = {tile: scalar(tile)}
    operands: dict[Any, Var] = {}  # by value in memory, its scalar
    for atom, held in leaves.items():
        env[atom] = operands.setdefault(held, scalar(held))
    eqns = equations_at((), body, env)
    jaxpr = Jaxpr([env[tile], *operands.values()], eqns, [env[v] for v in results], name="epilogue")
    params = {**first.params, "preferred_element_type": tile.aval.dtype}
    params["epilogue"] = Epilogue(jaxpr, bias=bool(before))
    return Eqn(dot_pointwise_p, [*first.invars, *operands], list(results), params, matmul.source)
