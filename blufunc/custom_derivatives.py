"""Helpers for custom derivative rules, under JAX's names.

A face, upon ``transforms``.
"""

from typing import Any

from blufunc.core.pytree import tree
from blufunc.transforms.autodiff.linear_transpose import linear_transpose as linear_transpose
from blufunc.transforms.autodiff.symbolic_zeros import CustomVJPPrimal as CustomVJPPrimal
from blufunc.transforms.autodiff.symbolic_zeros import SymbolicZero as SymbolicZero
from blufunc.transforms.autodiff.symbolic_zeros import instantiate as instantiate
from blufunc.transforms.autodiff.symbolic_zeros import zero_from_primal as zero_from_primal
from blufunc.transforms.custom_rules.closure_convert import closure_convert as closure_convert
from blufunc.transforms.custom_rules.custom_gradient import custom_gradient as custom_gradient
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp as custom_jvp
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp_call_p as custom_jvp_call_p
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp as custom_vjp
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp_call_p as custom_vjp_call_p

__all__ = [
    "CustomVJPPrimal",
    "SymbolicZero",
    "closure_convert",
    "custom_vjp_primal_tree_values",
    "custom_gradient",
    "custom_jvp",
    "custom_jvp_call_p",
    "custom_vjp",
    "custom_vjp_call_p",
    "instantiate",
    "linear_transpose",
    "zero_from_primal",
]


def custom_vjp_primal_tree_values(tree_of_primals: Any) -> Any:
    """The values in a tree of ``CustomVJPPrimal``, which forward rules receive.

    Args:
      tree_of_primals: a pytree.
    Returns:
      the pytree, with the value in place of each ``CustomVJPPrimal``.
    """
    is_primal = lambda x: isinstance(x, CustomVJPPrimal)
    return tree.map(lambda x: x.value if is_primal(x) else x, tree_of_primals, is_leaf=is_primal)
