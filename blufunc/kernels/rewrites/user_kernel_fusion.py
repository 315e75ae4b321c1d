"""Elementwise prologues and epilogues fused into users' CUDA kernels.

Kernels, a rewrite of the CUDA path. In: a jaxpr with calls of ``cuda_kernel`` whose authors allow fusion
(``elementwise=``). Out: the jaxpr without the arrays between such an argument and the elementwise operations that
compute it for this kernel only, and between such a result and its only elementwise readers.
``backends/cuda/render/user_accessors.py`` writes the code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, Var
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p, broadcast_in_dim_p
from blufunc.core.programs.simplify import Origins, rewrite
from blufunc.core.programs.stage import stage
from blufunc.kernels.fusion.iteration_space import sort_of
from blufunc.kernels.ops.fused_user_kernel import FusedUserKernel, Points, fused_user_kernel_p
from blufunc.kernels.rewrites.readers import Readers

_MOST = 16
"""Operations of a prologue or epilogue, at most: every access recomputes them."""


def with_fused_user_kernels(jaxpr: Jaxpr, origins: Origins) -> Jaxpr:
    """Fuse the prologues and epilogues of users' kernels; ``origins`` is updated."""
    kernels = [e for e in jaxpr.eqns if getattr(e.params.get("kernel"), "elementwise", None)]
    if not kernels:
        return jaxpr
    fusing = _Fusing(jaxpr)
    replaced = {e: fusing.fused(e) for e in kernels}

    def step(eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        return [] if eqn in fusing.gone else [replaced.get(eqn, eqn)]

    return rewrite(jaxpr, step, origins)


class _Fusing(Readers):
    """Fusion into the kernels of one jaxpr.

    Attributes:
      gone: the equations that are computed in kernels.
    """

    def __init__(self, jaxpr: Jaxpr):
        super().__init__(jaxpr)
        self.gone: set[Eqn] = set()

    def in_order(self, eqns: Iterable[Eqn]) -> list[Eqn]:
        return sorted(set(eqns), key=lambda e: self.position[e.outvars[0]])

    def fused(self, eqn: Eqn) -> Eqn:
        """A kernel with the functions that can be fused into it."""
        arguments, results = eqn.params["kernel"].elementwise
        operands: list[Atom] = []
        readers: dict[int, Points] = {}
        writers: dict[int, Points] = {}
        inside: list[Eqn] = []
        for n, atom in enumerate(eqn.invars):
            chain = self.prologue(eqn, atom) if n in arguments else []
            leaves = _leaves(chain) if chain else [atom]
            if chain:
                readers[n] = Points(_scalar(chain, leaves, [atom]), tuple(_repeated(a, atom) for a in leaves))
            operands += leaves
            inside += chain
        outvars = list(eqn.outvars)
        for n in results:
            chain = self.epilogue(eqn, eqn.outvars[n])
            if chain:
                value, outvars[n] = eqn.outvars[n], chain[-1].outvars[0]
                leaves = [a for a in _leaves(chain) if a is not value]
                function = _scalar(chain, [value, *leaves], [outvars[n]])
                writers[n] = Points(function, tuple(_repeated(a, value) for a in leaves))
                operands += leaves
                inside += chain
        if not inside:
            return eqn
        self.gone.update(inside)
        ins = list(dict.fromkeys(a for a in operands if isinstance(a, Var)))
        body = Jaxpr(ins, self.in_order([*inside, eqn]), outvars, name=eqn.prim.name)
        places = tuple([ins.index(a) if isinstance(a, Var) else None for a in operands])
        kernel = FusedUserKernel(eqn.prim, eqn.params["kernel"], readers, writers, body, places)
        return Eqn(fused_user_kernel_p, operands, outvars, {"kernel": kernel}, eqn.source)

    def prologue(self, eqn: Eqn, atom: Atom) -> list[Eqn]:
        """The operations that compute an argument for this kernel only, in order."""
        chain: list[Eqn] = []
        pending = [atom]
        while pending:
            a = pending.pop()
            maker = self.makers.get(a)
            if maker is None or maker in self.gone or maker in chain or len(chain) == _MOST:
                continue
            if not _is_pointwise(maker, atom.aval.shape) or a in self.returned:
                continue
            readers = self.of(a)
            if readers != [eqn] if a is atom else not set(readers) <= set(chain):
                continue
            chain.append(maker)
            pending += maker.invars
        return self.in_order(chain)

    def epilogue(self, eqn: Eqn, value: Var) -> list[Eqn]:
        """The chain of only readers of a result, whose other operands precede the kernel."""
        chain: list[Eqn] = []
        last = value
        while len(chain) < _MOST and (reader := self.only(last)) is not None:
            if not _is_pointwise(reader, value.aval.shape):
                break
            others = [self.position.get(a, -1) for a in reader.invars if a is not last]
            if max(others, default=-1) > self.position[value]:
                break
            chain.append(reader)
            last = reader.outvars[0]
        return chain


def _is_pointwise(eqn: Eqn, shape: tuple[int, ...]) -> bool:
    """True for an elementwise equation on arrays of this shape and scalars."""
    if eqn.prim is broadcast_in_dim_p:
        return not eqn.invars[0].aval.ndim and eqn.outvars[0].aval.shape == shape
    if not (isinstance(eqn.prim, Elementwise) or eqn.prim is add_any_p) or eqn.outvars[0].aval.shape != shape:
        return False
    avals = [a.aval for a in (*eqn.invars, *eqn.outvars)]
    plain = all(not dtypes.is_complex(a.dtype) and not dtypes.is_key(a.dtype) for a in avals)
    return plain and sort_of(eqn) != "opaque" and all(a.shape in (shape, ()) for a in avals)


def _leaves(chain: Sequence[Eqn]) -> list[Var]:
    """The variables that a chain reads and does not compute."""
    made = {v for e in chain for v in e.outvars}
    return list(dict.fromkeys(a for e in chain for a in e.invars if a.__class__ is Var and a not in made))


def _repeated(leaf: Atom, like: Atom) -> bool:
    """True for a scalar, which every element reads."""
    return leaf.aval.shape != like.aval.shape


def _scalar(chain: Sequence[Eqn], leaves: Sequence[Atom], results: Sequence[Atom]) -> Jaxpr:
    """A chain as a jaxpr of scalars."""

    def run(*xs: Any) -> list[Any]:
        env: dict[Atom, Any] = dict(zip(leaves, xs, strict=True))
        for e in chain:
            args = [a.array if a.__class__ is Literal else env[a] for a in e.invars]  # type: ignore[union-attr]
            env[e.outvars[0]] = args[0] if e.prim is broadcast_in_dim_p else e.prim.bind(*args, **e.params)
        return [env[a] for a in results]

    return stage(run, [a.aval.with_shape(()) for a in leaves], "points")
