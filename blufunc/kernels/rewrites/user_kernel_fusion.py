"""Elementwise prologues and epilogues fused into users' CUDA kernels.

Kernels, a rewrite of the CUDA path. In: a jaxpr with calls of ``cuda_kernel`` whose authors allow fusion
(``elementwise=``). Out: the jaxpr without the arrays between such an argument and the elementwise operations that
compute it for this kernel only, and between such a result and its only elementwise readers.
``backends/cuda/render/user_accessors.py`` writes the code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Atom, DropVar, Eqn, Jaxpr, Literal, Var
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p, broadcast_in_dim_p
from blufunc.core.programs.simplify import Origins
from blufunc.core.programs.stage import stage
from blufunc.kernels.fusion.iteration_space import sort_of
from blufunc.kernels.ops.fused_user_kernel import FusedUserKernel, Points, fused_user_kernel_p

_MOST = 16
"""Operations of a prologue or epilogue, at most: every access recomputes them."""


def with_fused_user_kernels(jaxpr: Jaxpr, origins: Origins) -> Jaxpr:
    """The jaxpr with the prologues and epilogues of users' kernels in the kernels; ``origins`` is kept up."""
    kernels = [e for e in jaxpr.eqns if getattr(e.params.get("kernel"), "elementwise", None)]
    if not kernels:
        return jaxpr
    found = _Fusing(jaxpr)
    for eqn in kernels:
        found.fuse(eqn, origins)
    return jaxpr.replace(eqns=[found.replaced.get(id(e), e) for e in jaxpr.eqns if id(e) not in found.gone])


class _Fusing:
    """What is fused of one jaxpr."""

    def __init__(self, jaxpr: Jaxpr):
        self.makers = {v: e for e in jaxpr.eqns for v in e.outvars if v.__class__ is not DropVar}
        self.position = {id(e): n for n, e in enumerate(jaxpr.eqns)}
        self.reads = Counter(a for e in jaxpr.eqns for a in e.invars if a.__class__ is not Literal)
        self.reads.update(a for a in jaxpr.outvars if a.__class__ is not Literal)
        self.readers = {a: e for e in jaxpr.eqns for a in e.invars if a.__class__ is not Literal}
        self.results = frozenset(a for a in jaxpr.outvars if a.__class__ is not Literal)
        self.gone: set[int] = set()
        self.replaced: dict[int, Eqn] = {}

    def fuse(self, eqn: Eqn, origins: Origins) -> None:
        """Fuse what can be of one kernel's arguments and results."""
        arguments, results = eqn.params["kernel"].elementwise
        operands: list[Atom] = []
        readers: dict[int, Points] = {}
        eqns: list[Eqn] = []
        for n, atom in enumerate(eqn.invars):
            chain = self.prologue(eqn, atom) if n in arguments else []
            if chain:
                leaves = _leaves(chain)
                readers[n] = Points(_scalar(chain, leaves, [atom]), tuple(_repeated(a, atom) for a in leaves))
                operands += leaves
                eqns += chain
            else:
                operands.append(atom)
        outvars, writers, after = list(eqn.outvars), {}, []
        for n in results:
            chain = self.epilogue(eqn, eqn.outvars[n])
            if chain:
                value, out = eqn.outvars[n], chain[-1].outvars[0]
                leaves = [a for a in _leaves(chain) if a is not value]
                writers[n] = Points(
                    _scalar(chain, [value, *leaves], [out]), tuple(_repeated(a, value) for a in leaves)
                )
                operands += leaves
                outvars[n] = out
                after += chain
        if not readers and not writers:
            return
        inside = sorted({id(e): e for e in (*eqns, eqn, *after)}.values(), key=lambda e: self.position[id(e)])
        ins = list(dict.fromkeys(a for a in operands if isinstance(a, Var)))
        body = Jaxpr(ins, inside, outvars, name=eqn.prim.name)
        places = tuple([ins.index(a) if isinstance(a, Var) else None for a in operands])
        kernel = FusedUserKernel(eqn.prim, eqn.params["kernel"], readers, writers, body, places)
        fused = Eqn(fused_user_kernel_p, operands, outvars, {"kernel": kernel}, eqn.source)
        self.gone |= {id(e) for e in (*eqns, *after)}
        self.replaced[id(eqn)] = fused
        if eqn in origins:
            origins[fused] = origins[eqn]

    def prologue(self, eqn: Eqn, atom: Atom) -> list[Eqn]:
        """The operations that make an argument for this kernel alone, in order."""
        chain: list[Eqn] = []
        pending = [atom]
        while pending:
            a = pending.pop()
            maker = self.makers.get(a) if a.__class__ is Var else None
            if maker is None or id(maker) in self.gone or maker in chain or len(chain) == _MOST:
                continue
            if not _is_pointwise(maker, atom.aval.shape):
                continue
            inside = sum(x is a for e in chain for x in e.invars) + (eqn.invars.count(a) if a is atom else 0)
            if a in self.results or self.reads[a] != inside or (a is atom and self.reads[a] != 1):
                continue
            chain.append(maker)
            pending += maker.invars
        return sorted(chain, key=lambda e: self.position[id(e)])

    def epilogue(self, eqn: Eqn, value: Var) -> list[Eqn]:
        """The operations, one after the other, that alone read a result, each with what is there before the kernel."""
        chain: list[Eqn] = []
        last = value
        while (
            last.__class__ is Var
            and self.reads[last] == 1
            and last not in self.results
            and len(chain) < _MOST
        ):
            reader = self.readers[last]
            if not _is_pointwise(reader, value.aval.shape) or reader.invars.count(last) != 1:
                break
            others = [self.makers.get(a) for a in reader.invars if a is not last and a.__class__ is Var]
            if any(m is not None and self.position[id(m)] > self.position[id(eqn)] for m in others):
                break
            chain.append(reader)
            last = reader.outvars[0]
        return chain


def _is_pointwise(eqn: Eqn, shape: tuple[int, ...]) -> bool:
    """Whether an equation computes each element of an array of this shape from those at its place, and numbers."""
    if eqn.prim is broadcast_in_dim_p:
        return not eqn.invars[0].aval.ndim and eqn.outvars[0].aval.shape == shape
    if not (isinstance(eqn.prim, Elementwise) or eqn.prim is add_any_p) or eqn.outvars[0].aval.shape != shape:
        return False
    avals = [a.aval for a in (*eqn.invars, *eqn.outvars)]
    plain = all(not dtypes.is_complex(a.dtype) and not dtypes.is_key(a.dtype) for a in avals)
    return plain and sort_of(eqn) != "opaque" and all(a.shape in (shape, ()) for a in avals)


def _leaves(chain: Sequence[Eqn]) -> list[Var]:
    """The variables that a chain reads and does not make."""
    made = {v for e in chain for v in e.outvars}
    return list(dict.fromkeys(a for e in chain for a in e.invars if a.__class__ is Var and a not in made))


def _repeated(leaf: Atom, like: Atom) -> bool:
    """Whether a leaf is a number, which every element reads."""
    return leaf.aval.shape != like.aval.shape


def _scalar(chain: Sequence[Eqn], leaves: Sequence[Atom], results: Sequence[Atom]) -> Jaxpr:
    """A chain as a jaxpr of one point."""

    def run(*xs: Any) -> list[Any]:
        env: dict[Atom, Any] = dict(zip(leaves, xs, strict=True))
        for e in chain:
            args = [a.array if a.__class__ is Literal else env[a] for a in e.invars]  # type: ignore[union-attr]
            env[e.outvars[0]] = args[0] if e.prim is broadcast_in_dim_p else e.prim.bind(*args, **e.params)
        return [env[a] for a in results]

    return stage(run, [a.aval.with_shape(()) for a in leaves], "points")
