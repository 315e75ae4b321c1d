"""Matmuls with an elementwise epilogue.

Kernels, below the rewrites; ``rewrites/pointwise_epilogue`` makes them. An epilogue is a jaxpr of scalars, which any
backend can lower to a function. The definition evaluates it on arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p, reshape_p
from blufunc.core.primitives.primitive import Primitive
from blufunc.kernels.ops.gemm import dot_bias_p


@dataclass(frozen=True)
class Epilogue:
    """Elementwise operations on the result of a matmul.

    Attributes:
      jaxpr: from scalars (an element of the matmul and one of each further operand) to the results. An operand has the
        size of the matmul, is a vector along its columns, or a scalar.
      bias: whether a vector is added before the matmul is rounded. It is the first operand, but not of the jaxpr.
      summed: the index of the result whose float32 column sums are an additional result; default None.
      rows: rows of each of these partial sums.
    """

    jaxpr: Jaxpr
    bias: bool = False
    summed: int | None = None
    rows: int = 0

    @property
    def stored(self) -> int | None:
        """The index of the result that is the matmul itself, if any."""
        return next((i for i, a in enumerate(self.jaxpr.outvars) if a is self.jaxpr.invars[0]), None)

    def why_not(self) -> str | None:
        """The reason that it is not a valid epilogue, or None."""
        for eqn in self.jaxpr.eqns:
            if not isinstance(eqn.prim, Elementwise) and eqn.prim is not add_any_p:
                return f"{eqn.prim.name} is not elementwise"
        for a in (*self.jaxpr.invars, *self.jaxpr.outvars):
            if a.aval.ndim:
                return f"it is of arrays, such as {a.aval}"
        return None


class _DotPointwise(Primitive):
    """lhs, rhs, (bias,) operands -> the results of the epilogue, then its column sums."""

    name, kind, fresh, multiple_results = "dot_general+pointwise", "contract", True, True

    def impl(self, lhs, rhs, *operands, epilogue: Epilogue, **matmul):
        if epilogue.bias:
            tile, operands = dot_bias_p.impl(lhs, rhs, operands[0], **matmul), operands[1:]
        else:
            tile = dot_general_p.impl(lhs, rhs, **matmul)
        n = columns_of(rhs.shape, matmul["dimension_numbers"])
        flat = tile.reshape(-1, n)
        shapes = {1: (), flat.size: flat.shape}
        arrays = [x.reshape(shapes.get(x.size, (1, n))) for x in operands]
        env: dict[Any, Any] = dict(zip(epilogue.jaxpr.invars, (flat, *arrays), strict=True))
        read = lambda a: a.value if a.__class__ is Literal else env[a]
        for eqn in epilogue.jaxpr.eqns:
            env[eqn.outvars[0]] = eqn.prim.impl(*map(read, eqn.invars), **eqn.params)
        outs = [read(a) for a in epilogue.jaxpr.outvars]
        results = [x.reshape(tile.shape) for x in outs]
        if epilogue.summed is not None:
            bands = outs[epilogue.summed].astype(dtypes.float32).reshape(-1, epilogue.rows, n)
            results.append(bands.sum(1))
        return results

    def abstract(self, lhs, rhs, *operands, epilogue: Epilogue, **matmul) -> list[ShapedArray]:
        tile = dot_general_p.abstract(lhs, rhs, **matmul)
        results = [tile.with_dtype(a.aval.dtype) for a in epilogue.jaxpr.outvars]
        if epilogue.summed is not None:
            n = columns_of(rhs.shape, matmul["dimension_numbers"])
            results.append(ShapedArray((tile.size // (n * epilogue.rows), n), dtypes.float32))
        return results

    @staticmethod
    def flops(lhs, rhs, *operands, dimension_numbers, **params) -> int:
        return 2 * lhs.size * columns_of(rhs.shape, dimension_numbers)


dot_pointwise_p = _DotPointwise()


def columns_of(shape: Sequence[int], dimension_numbers: Any) -> int:
    """The columns of a matmul without batch axes; ``shape`` is that of its rhs."""
    (_, contracted), _ = dimension_numbers
    return math.prod(n for d, n in enumerate(shape) if d not in contracted)


def scalar(v: Any) -> Var:
    """A scalar of the dtype of a variable."""
    return Var(v.aval.with_shape(()).strong())


def equations_at(shape: tuple[int, ...], eqns: Sequence[Eqn], env: dict[Any, Any]) -> list[Eqn]:
    """Elementwise equations at another shape; ``env`` maps variables to those values."""
    made = []
    for e in eqns:
        (v,) = e.outvars
        if e.prim is reshape_p:
            env[v] = env[e.invars[0]]
            continue
        ins = [a if a.__class__ is Literal else env[a] for a in e.invars]
        env[v] = Var(v.aval.with_shape(shape).strong())
        made.append(Eqn(e.prim, ins, [env[v]], e.params, None))
    return made
