"""Custom batching rules, under JAX's names.

A face, upon ``transforms``.
"""

from blufunc.transforms.custom_rules.custom_vmap import custom_vmap as custom_vmap
from blufunc.transforms.custom_rules.custom_vmap import sequential_vmap as sequential_vmap

__all__ = ["custom_vmap", "sequential_vmap"]
