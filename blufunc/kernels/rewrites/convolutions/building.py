"""Equations of movement around a convolution, each made once.

Kernels, before stage 5, below ``canonical`` and ``forms``. In: variables, and what to do with them. Out: variables, and
the equations that compute them. Equal requests of one origin share a variable, so the copy of a kernel in another
layout is made once for forward and backward passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blufunc.core.arrays.array import scalar
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Atom, Eqn, Literal, Var
from blufunc.core.ops.elementwise import convert_p, copy_p
from blufunc.core.ops.shape import pad_p, rev_p, slice_p
from blufunc.core.primitives.linear_ops import reshape_p, transpose_p

Ints = tuple[int, ...]


class Builder:
    """Makes equations.

    Attributes:
      eqns: those of the current equation of the program, in order; ``begin`` empties it.
    """

    def __init__(self) -> None:
        self.eqns: list[Eqn] = []
        self._known: dict[Any, Var] = {}
        self._makers: dict[Any, Eqn] = {}
        self._origin: Any = None
        self._source: Any = None

    def begin(self, eqn: Eqn, origin: Any) -> None:
        """Begin with the equations that replace one."""
        self.eqns, self._origin, self._source = [], origin, eqn.source

    def put(self, prim: Any, *atoms: Atom, **params: Any) -> Var:
        """The result of a primitive."""
        key = (prim, atoms, tuple(sorted(params.items())), self._origin)
        found = self._known.get(key)
        if found is None:
            aval: ShapedArray = prim.abstract(*[a.aval for a in atoms], **params)
            found = self._known[key] = Var(aval)
            self._append(Eqn(prim, list(atoms), [found], params, self._source))
        return found

    def _append(self, eqn: Eqn) -> None:
        self.eqns.append(eqn)
        self._makers[eqn.outvars[0]] = eqn

    def transpose(self, x: Any, permutation: Sequence[int]) -> Any:
        """``x`` with its axes in another order; transposes compose."""
        permutation = tuple(permutation)
        if permutation == tuple(range(x.aval.ndim)):
            return x
        maker = self._makers.get(x)
        if maker is not None and maker.prim is transpose_p:
            inner = maker.params["permutation"]
            return self.transpose(maker.invars[0], [inner[d] for d in permutation])
        if maker is not None and maker.prim is reshape_p:
            before: Any = maker.invars[0]
            long, own = ([d for d, n in enumerate(v.aval.shape) if n > 1] for v in (x, before))
            if [x.aval.shape[d] for d in long] == [before.aval.shape[d] for d in own]:
                order = iter([own[long.index(d)] for d in permutation if d in long])
                moved = self.transpose(
                    before, [next(order) if d in own else d for d in range(before.aval.ndim)]
                )
                return self.reshape(moved, [x.aval.shape[d] for d in permutation])
        return self.put(transpose_p, x, permutation=permutation)

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        """``x`` in another shape."""
        if x.aval.shape == tuple(shape):
            return x
        maker = self._makers.get(x)
        if maker is not None and maker.prim is reshape_p:
            return self.reshape(maker.invars[0], shape)
        return self.put(reshape_p, x, shape=tuple(shape))

    def dense(self, x: Any) -> Any:
        """``x``, or a copy of it if it is a view whose elements are apart in memory."""
        maker = self._makers.get(x)
        while maker is not None and maker.prim is reshape_p:
            maker = self._makers.get(maker.invars[0])
        apart = maker is not None and maker.prim in (transpose_p, rev_p, slice_p)
        return self.put(copy_p, x) if apart else x

    def rev(self, x: Any, dims: Sequence[int]) -> Any:
        """``x`` with some axes reversed."""
        dims = tuple(d for d in dims if x.aval.shape[d] > 1)
        return self.put(rev_p, x, dimensions=dims) if dims else x

    def pad(self, x: Any, config: Sequence[tuple[int, int, int]]) -> Any:
        """``x`` with zeros around and between its elements; negative padding crops."""
        if not any(map(any, config)):
            return x
        if all(low <= 0 and high <= 0 and not holes for low, high, holes in config):
            starts = tuple(-low for low, _, _ in config)
            limits = tuple(n + high for n, (_, high, _) in zip(x.aval.shape, config, strict=True))
            return self.slice(x, starts, limits, (1,) * x.aval.ndim)
        zero = self.zero(x.aval.dtype)
        key = (pad_p, x, tuple(config), self._origin)
        if key not in self._known:
            self._known[key] = Var(pad_p.abstract(x.aval, zero.aval, padding_config=tuple(config)))
            params = {"padding_config": tuple(config)}
            self._append(Eqn(pad_p, [x, zero], [self._known[key]], params, self._source))
        return self._known[key]

    def zero(self, dtype: np.dtype) -> Literal:
        """The number 0."""
        return Literal(scalar(np.zeros((), dtype)[()], dtype))

    def slice(self, x: Any, starts: Ints, limits: Ints, strides: Ints) -> Any:
        """Every ``stride``-th element from ``start`` to ``limit`` of each axis."""
        if not any(starts) and limits == x.aval.shape and set(strides) <= {1}:
            return x
        return self.put(slice_p, x, start_indices=starts, limit_indices=limits, strides=strides)

    def convert(self, x: Any, dtype: np.dtype) -> Any:
        """``x`` in another dtype."""
        return x if x.aval.dtype == dtype else self.put(convert_p, x, dtype=dtype)
