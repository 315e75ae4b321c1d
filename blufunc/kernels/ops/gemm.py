"""Matmuls with something added: primitives that only rewrites make.

Kernels, below the rewrites. A definition in NumPy each, as of any primitive; which library or kernel computes them is
the backend's matter.
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
    """``dot_general`` with its parameters, to which a third operand is added before anything is rounded.

    Its ``preferred_element_type`` is the dtype of the result and of the third operand, which has an element for each of
    the result or, repeated, for each of the rhs's free ones.
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
"""The third operand is repeated for every row of the result."""


dot_accumulate_p = _ProductAndSum("dot_general+accumulate")
"""The third operand has the shape of the result, which may take its memory."""


class _PromotedProduct(Primitive):
    """``dot_general`` by chunks of terms, each added in float32 to those before it, or to a third operand.

    What a chunk's own sum loses where it is kept less exactly, as on tensor cores, does not grow with the number of
    terms. ``chunk`` is how many terms it has at most.
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
"""The third operand, if there is one, has the shape of the result, which may take its memory."""


PRODUCTS = (dot_general_p, dot_bias_p, dot_accumulate_p, dot_promoted_p)
"""The products of matrices: their first two operands and all parameters mean the same."""


SUMS = (add_p, add_any_p)
"""The primitives of two operands that are added."""


def overwritten_by(eqn: Eqn) -> list[tuple[int, int]]:
    """Results of an opaque step and the operands that they may be written over, unless these are other ones too."""
    if eqn.prim.kind == "collective" and eqn.invars:
        return [(n, n) for n in eqn.prim.written_over(**eqn.params)]  # type: ignore[attr-defined]
    return [(0, 2)] if eqn.prim in (dot_accumulate_p, dot_promoted_p) and len(eqn.invars) == 3 else []
