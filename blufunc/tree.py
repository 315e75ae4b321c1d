"""Pytrees: map, flatten, unflatten and registration of nested containers.

Face over ``core.pytree``, with the names of ``jax.tree``.
"""

from blufunc.core.pytree.nodes import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    SequenceKey,
    register_dataclass,
    register_leaf,
    register_node,
    register_static,
    static,
)
from blufunc.core.pytree.paths import flatten_with_path, keystr, leaf_paths, leaves_with_path, map_with_path
from blufunc.core.pytree.reduce import all, reduce, reduce_associative
from blufunc.core.pytree.tree import (
    TreeDef,
    broadcast,
    broadcast_prefix,
    flatten,
    flatten_up_to,
    leaves,
    map,
    structure,
    transpose,
    unflatten,
)

register_pytree_node = register_node

__all__ = [
    # whole trees
    "all",
    "flatten",
    "leaves",
    "map",
    "reduce",
    "reduce_associative",
    "structure",
    "transpose",
    "unflatten",
    # prefixes
    "broadcast",
    "broadcast_prefix",
    "flatten_up_to",
    # paths
    "DictKey",
    "FlattenedIndexKey",
    "GetAttrKey",
    "SequenceKey",
    "flatten_with_path",
    "keystr",
    "leaf_paths",
    "leaves_with_path",
    "map_with_path",
    # user classes
    "TreeDef",
    "register_dataclass",
    "register_leaf",
    "register_node",
    "register_pytree_node",
    "register_static",
    "static",
]
