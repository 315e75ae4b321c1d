"""What extensions are written with: the classes and helpers of primitives, rules and transforms.

Face over ``core`` and ``transforms``; ``docs/extending.md`` says how to use them, and ``blufunc.testing`` checks what
is made of them.
"""

from blufunc.core.avals import ShapedArray
from blufunc.core.kinds import Elementwise, Reduction
from blufunc.core.override import override
from blufunc.core.primitive import RULES, Primitive, unsupported
from blufunc.core.structure import add_tangents, batched_front, instantiate
from blufunc.core.tangents import Accumulator, Zero, is_linear, zero
from blufunc.transforms.transform import Transform

__all__ = [
    # primitives
    "Elementwise",
    "Primitive",
    "RULES",
    "Reduction",
    "ShapedArray",
    "unsupported",
    # what rules meet
    "Accumulator",
    "Zero",
    "add_tangents",
    "batched_front",
    "instantiate",
    "is_linear",
    "zero",
    # rules in a scope, and whole transforms
    "Transform",
    "override",
]
