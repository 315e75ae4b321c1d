"""Matmuls of few rows that compute these, and share them among several weights.

Kernels, below the rewrites. The left operand is a function of rows in memory, such as a normalization: it reduces them
and computes an element from the results. Several right operands of one shape may follow; the epilogue reads an element
of each matmul. The primitive has a definition in NumPy; the backend has the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.primitives.primitive import Primitive
from blufunc.kernels.ops.gemm import dot_accumulate_p, dot_bias_p
from blufunc.kernels.ops.pointwise_gemm import columns_of, dot_pointwise_p

REDUCED = {"sum": (np.add, 0.0), "max": (np.maximum, -np.inf), "min": (np.minimum, np.inf)}
"""By monoid, the operation and its identity: reductions of rows are of float32."""


@dataclass(frozen=True)
class Rows:
    """The rows of a matmul as a function of arrays in memory.

    Attributes:
      kinds: of the arrays: 'matrix', of the rows' size; 'vector', an element per term; or 'scalar'.
      passes: for each pass over a row, the function from an element of each array, and from the results of earlier
        passes, to the numbers that it reduces.
      monoids: how each of these numbers is reduced, by pass.
      result: the same function to an element of the rows.
    """

    kinds: tuple[str, ...]
    passes: tuple[Jaxpr, ...]
    monoids: tuple[tuple[str, ...], ...]
    result: Jaxpr

    def computed(self, arrays: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        """The rows, of a shape."""
        terms = shape[-1]
        shaped = {"matrix": (-1, terms), "vector": (1, terms), "scalar": (1, 1)}
        held = [x.reshape(shaped[kind]) for x, kind in zip(arrays, self.kinds, strict=True)]
        for one, monoids in zip(self.passes, self.monoids, strict=True):
            numbers = evaluated(one, held)
            rows = math.prod(shape) // terms
            held += [
                REDUCED[m][0].reduce(np.broadcast_to(x, (rows, terms)), axis=-1, keepdims=True)
                for m, x in zip(monoids, numbers, strict=True)
            ]
        (x,) = evaluated(self.result, held)
        return np.broadcast_to(x, (math.prod(shape) // terms, terms)).reshape(shape)


def evaluated(jaxpr: Jaxpr, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """A jaxpr of scalars, at all elements of arrays that broadcast."""
    env: dict[Any, Any] = dict(zip(jaxpr.invars, arrays, strict=True))
    read = lambda a: a.value if a.__class__ is Literal else env[a]
    for eqn in jaxpr.eqns:
        env[eqn.outvars[0]] = eqn.prim.impl(*map(read, eqn.invars), **eqn.params)
    return [read(a) for a in jaxpr.outvars]


class _DotRows(Primitive):
    """Arrays of ``rows``, weights, and further operands of ``product`` -> its results.

    Parameters besides those of ``product``, the primitive of a matmul with or without an epilogue:
      rows: a ``Rows``; None: the first operand is the left one of the matmul.
      shape: of the left operand, whose terms are its last axis.
      weights: number of right operands. Of several, the epilogue reads an element of each matmul.
    """

    name, kind, fresh, multiple_results = "dot_general+rows", "contract", True, True

    def impl(self, *operands, **params):
        rows, shape = params["rows"], params["shape"]
        arrays, weights, others = split(operands, params)
        x = arrays[0] if rows is None else rows.computed(arrays, shape)
        own = product_params(params)
        first, *more = weights
        if not more:
            outs = params["product"].impl(x, first, *others, **own)
            return outs if params["product"].multiple_results else [outs]
        numbers = {k: own[k] for k in ("dimension_numbers", "precision", "preferred_element_type")}
        tiles = [dot_general_p.impl(x, w, **numbers) for w in more]
        return dot_pointwise_p.impl(x, first, *tiles, *others, **own)

    def abstract(self, *operands, **params) -> list[ShapedArray]:
        arrays, (first, *more), others = split(operands, params)
        x = ShapedArray(params["shape"], first.dtype)
        tiles = [dot_general_p.abstract(x, w, **_plain(params)) for w in more]
        outs = params["product"].abstract(x, first, *tiles, *others, **product_params(params))
        return outs if params["product"].multiple_results else [outs]

    @staticmethod
    def flops(*operands, **params) -> int:
        _, weights, _ = split(operands, params)
        n = sum(columns_of(w.shape, params["dimension_numbers"]) for w in weights)
        return 2 * math.prod(params["shape"]) * n


dot_rows_p = _DotRows()

_OWN = ("rows", "shape", "weights", "product")

PRODUCTS_OF_ROWS = (dot_general_p, dot_bias_p, dot_accumulate_p, dot_pointwise_p)
"""The primitives that ``product`` may be."""


def product_params(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the matmul."""
    return {k: v for k, v in params.items() if k not in _OWN}


def _plain(params: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in product_params(params).items() if k != "epilogue"}


def split(operands: Sequence[Any], params: dict[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """The arrays of the rows, the weights, and the further operands."""
    first = 1 if params["rows"] is None else len(params["rows"].kinds)
    after = first + params["weights"]
    return list(operands[:first]), list(operands[first:after]), list(operands[after:])


def matmul_of(eqn: Eqn) -> Eqn:
    """The matmul by the first weights of ``dot_rows_p``; other equations as they are.

    Its left operand is computed; matmuls by further weights are operands.
    """
    if eqn.prim is not dot_rows_p:
        return eqn
    arrays, (first, *more), others = split(eqn.invars, eqn.params)
    x = arrays[0] if eqn.params["rows"] is None else Var(first.aval.with_shape(eqn.params["shape"]))
    tile = dot_general_p.abstract(x.aval, first.aval, **_plain(eqn.params))
    tiles = [Var(tile) for _ in more]
    return Eqn(
        eqn.params["product"],
        [x, first, *tiles, *others],
        eqn.outvars,
        product_params(eqn.params),
        eqn.source,
    )
