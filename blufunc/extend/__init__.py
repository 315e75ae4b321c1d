"""The extension API: classes and helpers for primitives, rules and transforms.

Face over ``core`` and ``transforms``; ``docs/extending.md`` describes them, and ``blufunc.testing`` checks
extensions. ``extend.core`` has what programs that read jaxprs use, under JAX's names.
"""

from blufunc.core.ir.avals import ShapedArray
from blufunc.core.primitives.c_form import CForm
from blufunc.core.primitives.kinds import Elementwise, Reduction
from blufunc.core.primitives.linear_ops import add_tangents, batched_front, instantiate
from blufunc.core.primitives.override import override
from blufunc.core.primitives.primitive import RULES, Primitive, unsupported
from blufunc.core.primitives.sharding import Factors, Rule
from blufunc.core.primitives.tangents import Accumulator, Zero, is_linear, zero
from blufunc.extend import core
from blufunc.transforms.checkpointing.checkpoint import checkpoint_p
from blufunc.transforms.control_flow.calls import jit_p
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp_call_p
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp_call_p
from blufunc.transforms.custom_rules.custom_vmap import custom_vmap_call_p
from blufunc.transforms.extension.transform import Transform

__all__ = [
    # jaxprs
    "core",
    # primitives
    "CForm",
    "Elementwise",
    "Factors",
    "Primitive",
    "RULES",
    "Reduction",
    "Rule",
    "ShapedArray",
    "unsupported",
    # arguments of rules
    "Accumulator",
    "Zero",
    "add_tangents",
    "batched_front",
    "instantiate",
    "is_linear",
    "zero",
    # calls, for transforms with rules of their own
    "checkpoint_p",
    "custom_jvp_call_p",
    "custom_vjp_call_p",
    "custom_vmap_call_p",
    "jit_p",
    # scoped rules, and transforms
    "Transform",
    "override",
]
