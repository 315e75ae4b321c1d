"""Matmuls with an addend or with promoted sums, which only rewrites make.

Kernels, below the rewrites. Each has a definition in NumPy; the backend chooses the library or kernel.
"""

from __future__ import annotations

import math

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.elementwise import add_p
from blufunc.core.primitives.linear_ops import add_any_p
from blufunc.core.primitives.primitive import Primitive
from blufunc.kernels.gemm_layout import chunks_of


class _ProductAndSum(Primitive):
    """``dot_general`` plus a third operand, added before rounding.

    ``preferred_element_type`` is the dtype of the result and of the addend, which has one element per element of the
    result, or per free element of the rhs: then it is broadcast.
    """

    kind, fresh, flops = "contract", True, dot_general_p.flops

    def impl(self, lhs, rhs, addend, *, preferred_element_type, **numbers):
        half = dtypes.is_floating(preferred_element_type) and preferred_element_type.itemsize == 2
        wide = np.dtype(np.float32) if half else preferred_element_type
        product = dot_general_p.impl(lhs, rhs, preferred_element_type=wide, **numbers)
        sums = product.reshape(-1, addend.size) + addend.reshape(-1).astype(wide)
        return sums.reshape(product.shape).astype(preferred_element_type)

    def abstract(self, lhs, rhs, addend, **params) -> ShapedArray:
        return dot_general_p.abstract(lhs, rhs, **params)


dot_bias_p = _ProductAndSum("dot_general+bias")
"""The third operand is broadcast to all rows of the result."""


dot_accumulate_p = _ProductAndSum("dot_general+accumulate")
"""The third operand has the shape of the result, which may overwrite it."""


class _PromotedProduct(Primitive):
    """``dot_general`` by chunks of at most ``chunk`` terms, joined in float32.

    A third operand begins the sum. The error of a chunk's own sum, less exact on tensor cores, does not grow with the
    number of terms.
    """

    name, kind, fresh, flops = "dot_general+promoted", "contract", True, dot_general_p.flops

    def impl(self, lhs, rhs, *addend, dimension_numbers, precision, preferred_element_type, chunk):
        (lc, rc), (lb, rb) = dimension_numbers
        x_free, y_free = (
            tuple(d for d in range(x.ndim) if d not in (*contract, *batch))
            for x, contract, batch in ((lhs, lc, lb), (rhs, rc, rb))
        )
        batch, terms = (math.prod(lhs.shape[d] for d in axes) for axes in (lb, lc))
        x = lhs.transpose(*lb, *x_free, *lc).reshape(batch, -1, terms)
        y = rhs.transpose(*rb, *rc, *y_free).reshape(batch, terms, -1)
        shape = [*(lhs.shape[d] for d in (*lb, *x_free)), *(rhs.shape[d] for d in y_free)]
        numbers = {"dimension_numbers": (((2,), (1,)), ((0,), (0,))), "precision": precision}
        total = [a.reshape(batch, x.shape[1], -1) for a in addend]
        for start, size in chunks_of(terms, chunk):
            part = slice(start, start + size)
            product = dot_general_p.impl(
                x[:, :, part], y[:, part], preferred_element_type=preferred_element_type, **numbers
            )
            total = [total[0] + product if total else product]
        return total[0].reshape(shape)

    def abstract(self, lhs, rhs, *addend, chunk, **params) -> ShapedArray:
        return dot_general_p.abstract(lhs, rhs, **params)


dot_promoted_p = _PromotedProduct()
"""An optional third operand has the shape of the result, which may overwrite it."""


PRODUCTS = (dot_general_p, dot_bias_p, dot_accumulate_p, dot_promoted_p)
"""Matmul primitives; their first two operands and shared parameters mean the same."""


SUMS = (add_p, add_any_p)
"""The primitives that add two operands."""


def overwritten_by(eqn: Eqn) -> list[tuple[int, int]]:
    """Results of an opaque step, and the operands that they may overwrite."""
    if eqn.prim.kind == "collective" and eqn.invars:
        return [(n, n) for n in eqn.prim.written_over(**eqn.params)]  # type: ignore[attr-defined]
    return [(0, 2)] if eqn.prim in (dot_accumulate_p, dot_promoted_p) and len(eqn.invars) == 3 else []
