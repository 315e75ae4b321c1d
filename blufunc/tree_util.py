"""Pytrees under the older names of JAX: ``tree_util.tree_map`` is ``tree.map``.

A face over ``core.pytree``, like ``tree``. In: the names and signatures of ``jax.tree_util``. Beyond ``tree`` it has
JAX's forms of registration, ``Partial``, and inspection of structures. A class is registered once, for both.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from blufunc.core.ir import source
from blufunc.core.pytree import nodes
from blufunc.core.pytree import tree as _tree
from blufunc.core.pytree.nodes import (
    KINDS,
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    SequenceKey,
    UnsortableKeys,
    register_static,
)
from blufunc.core.pytree.paths import flatten_with_path as tree_flatten_with_path
from blufunc.core.pytree.paths import keystr
from blufunc.core.pytree.paths import leaves_with_path as tree_leaves_with_path
from blufunc.core.pytree.paths import map_with_path as tree_map_with_path
from blufunc.core.pytree.reduce import all as tree_all
from blufunc.core.pytree.reduce import reduce as tree_reduce
from blufunc.core.pytree.reduce import reduce_associative as tree_reduce_associative
from blufunc.core.pytree.tree import Path as KeyPath
from blufunc.core.pytree.tree import TreeDef as PyTreeDef
from blufunc.core.pytree.tree import broadcast as tree_broadcast
from blufunc.core.pytree.tree import flatten as tree_flatten
from blufunc.core.pytree.tree import leaves as tree_leaves
from blufunc.core.pytree.tree import map as tree_map
from blufunc.core.pytree.tree import structure as tree_structure
from blufunc.core.pytree.tree import transpose as tree_transpose
from blufunc.core.pytree.tree import tuple_of as treedef_tuple
from blufunc.core.pytree.tree import unflatten as tree_unflatten
from blufunc.errors import ArgumentError, TreeError

_C = TypeVar("_C", bound=type)
KeyEntry = Any
"""One step of a path: a ``DictKey``, ``SequenceKey``, ``GetAttrKey`` or other key."""

# -- structures ------------------------------------------------------------------------------------


def treedef_children(treedef: PyTreeDef) -> list[PyTreeDef]:
    """The structures of the children of the outermost container."""
    return _tree.check_treedef(treedef, "treedef_children").children()


def treedef_is_leaf(treedef: PyTreeDef) -> bool:
    """True for the structure of a bare leaf."""
    return _tree.check_treedef(treedef, "treedef_is_leaf") is _tree.LEAF


def build_tree(treedef: PyTreeDef, xs: Any) -> Any:
    """A tree of this structure from nested sequences of children."""
    _tree.check_treedef(treedef, "build_tree")
    leaves: list[Any] = []
    _collect(treedef, xs, leaves)
    return _tree.unflatten(treedef, leaves)


def _collect(treedef: PyTreeDef, xs: Any, leaves: list[Any]) -> None:
    if treedef is _tree.LEAF:
        leaves.append(xs)
        return
    children = treedef.children()
    xs = list(xs) if isinstance(xs, Iterable) else None
    if xs is None or len(xs) != len(children):
        raise TreeError(
            f"build_tree: {_tree.describe(treedef.spec)} is built of a sequence of {len(children)}.",
            where=source.here(),
            fix="tree_unflatten(treedef, leaves) takes the leaves as one list",
        )
    for child, x in zip(children, xs, strict=True):
        _collect(child, x, leaves)


def all_leaves(iterable: Iterable[Any], is_leaf: Callable[[Any], bool] | None = None) -> bool:
    """True if no element is a container; one that ``is_leaf`` names is none."""
    if not isinstance(iterable, Iterable):
        raise ArgumentError(
            f"all_leaves takes a sequence, not {iterable!r:.60}.", where=source.here(), fix="all_leaves([x])"
        )
    if is_leaf is not None:
        _tree.check_function(is_leaf, "is_leaf")
    return builtins.all((is_leaf is not None and is_leaf(x)) or not is_tree_node(type(x)) for x in iterable)


def is_tree_node(typ: type) -> bool:
    """True if instances of the class are containers."""
    if not isinstance(typ, type):
        raise ArgumentError(
            f"is_tree_node takes a class, not {typ!r:.60}.", where=source.here(), fix="is_tree_node(type(x))"
        )
    return KINDS[typ] is not None


def flatten_one_level(tree: Any) -> tuple[list[Any], Hashable]:
    """The direct children of a container, and its static data.

    Raises:
      TreeError: ``tree`` is a leaf.
    """
    children, aux = _split(tree, "flatten_one_level")
    return list(children), aux


def flatten_one_level_with_keys(tree: Any) -> tuple[list[tuple[KeyEntry, Any]], Hashable]:
    """The children of a container, each as ``(key, child)``, and its static data.

    Raises:
      TreeError: ``tree`` is a leaf.
    """
    children, aux = _split(tree, "flatten_one_level_with_keys")
    kind: Any = KINDS[type(tree)]
    keys = kind.keys(aux, len(children)) if kind.keys_of is None else kind.keys_of(tree)
    return list(zip(keys, children, strict=True)), aux


def _split(tree: Any, name: str) -> tuple[Sequence[Any], Hashable]:
    kind = KINDS[type(tree)]
    if kind is None:
        raise TreeError(f"{name}: a {type(tree).__name__} is a leaf, not a container.", where=source.here())
    try:
        return kind.split(tree)
    except UnsortableKeys as error:
        raise _tree.explain_unsortable(tree, error.args[0]) from None


# -- user classes ----------------------------------------------------------------------------------


def register_pytree_node(
    nodetype: type,
    flatten_func: Callable[[Any], tuple[Iterable[Any], Hashable]],
    unflatten_func: Callable[[Any, Sequence[Any]], Any],
    flatten_with_keys_func: Callable[[Any], tuple[Iterable[tuple[Any, Any]], Hashable]] | None = None,
) -> None:
    """Register a class as a node: ``tree.register_node``."""
    _check_functions("register_pytree_node", flatten_func, unflatten_func, flatten_with_keys_func)
    nodes.register_node(nodetype, flatten_func, unflatten_func, flatten_with_keys_func)


def register_pytree_node_class(cls: _C) -> _C:
    """Register a class with methods ``tree_flatten``, ``tree_unflatten``; a decorator."""
    _check_methods(cls, "register_pytree_node_class", "tree_flatten", "tree_unflatten")
    nodes.register_node(cls, lambda x: x.tree_flatten(), cls.tree_unflatten)  # type: ignore[attr-defined]
    return cls


def register_pytree_with_keys(
    nodetype: type,
    flatten_with_keys: Callable[[Any], tuple[Iterable[tuple[Any, Any]], Hashable]],
    unflatten_func: Callable[[Any, Sequence[Any]], Any],
    flatten_func: Callable[[Any], tuple[Iterable[Any], Hashable]] | None = None,
) -> None:
    """Register a class as a node with named children.

    Args:
      nodetype: the class.
      flatten_with_keys: object -> ``([(key, child), ...], aux)``.
      unflatten_func: ``(aux, children)`` -> object.
      flatten_func: object -> ``(children, aux)``, if faster without the keys.
    """
    _check_functions("register_pytree_with_keys", flatten_with_keys, unflatten_func, flatten_func)

    def without_keys(x: Any) -> tuple[Iterable[Any], Hashable]:
        pairs, aux = flatten_with_keys(x)
        return [child for _, child in pairs], aux

    nodes.register_node(nodetype, flatten_func or without_keys, unflatten_func, flatten_with_keys)


def register_pytree_with_keys_class(cls: _C) -> _C:
    """Register a class with methods ``tree_flatten_with_keys``, ``tree_unflatten``.

    A decorator. A method ``tree_flatten`` is used where keys are not needed.
    """
    _check_methods(cls, "register_pytree_with_keys_class", "tree_flatten_with_keys", "tree_unflatten")
    plain = (lambda x: x.tree_flatten()) if hasattr(cls, "tree_flatten") else None
    unflatten = cls.tree_unflatten  # type: ignore[attr-defined]
    register_pytree_with_keys(cls, lambda x: x.tree_flatten_with_keys(), unflatten, plain)
    return cls


def register_dataclass(
    nodetype: Any = None,
    data_fields: Iterable[str] | None = None,
    meta_fields: Iterable[str] | None = None,
    drop_fields: Iterable[str] = (),
) -> Any:
    """Declare a dataclass's fields as children, static (``meta_fields``) or dropped.

    ``tree.register_dataclass`` under JAX's names. Without lists, fields made by ``tree.static()`` are the static ones.
    Unregistered dataclasses are leaves.
    """
    return nodes.register_dataclass(nodetype, data_fields, meta_fields, drop_fields)


def _check_functions(name: str, *functions: Any) -> None:
    for f in functions:
        if f is not None and not callable(f):
            raise ArgumentError(f"{name} takes functions, not {f!r:.60}.", where=source.here())
    if functions[0] is None or functions[1] is None:
        raise ArgumentError(
            f"{name} needs a function that takes an object apart, and one that puts it together.",
            where=source.here(),
        )


def _check_methods(cls: Any, name: str, *methods: str) -> None:
    missing = [m for m in methods if not callable(getattr(cls, m, None))]
    if missing or not isinstance(cls, type):
        raise ArgumentError(
            f"{name} takes a class with the methods {' and '.join(methods)}, not {cls!r:.60}.",
            where=source.here(),
            fix=f"define {', '.join(missing) or 'a class'}",
        )


# -- Partial ---------------------------------------------------------------------------------------


class Partial(functools.partial):
    """``functools.partial`` as a pytree: arguments are children, the function static.

    It may be passed to, and returned from, transformed functions. The arguments of a wrapped partial belong
    to the function: they are static too.
    """

    def __new__(cls, func: Callable[..., Any], /, *args: Any, **kw: Any) -> Partial:
        """``func`` with its first arguments and keyword arguments bound."""
        if not callable(func):
            raise ArgumentError(
                f"Partial takes a function, not {func!r:.60}.", where=source.here(), fix="Partial(f, x)"
            )
        # functools would merge a wrapped partial's arguments with these
        return super().__new__(
            cls, _Whole(func) if isinstance(func, functools.partial) else func, *args, **kw
        )


class _Whole:
    """A wrapped partial, called as is; equal to others of the same one."""

    def __init__(self, func: functools.partial):
        self.func = func

    def __call__(self, *args: Any, **kw: Any) -> Any:
        return self.func(*args, **kw)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Whole) and self.func is other.func

    def __hash__(self) -> int:
        return hash(id(self.func))

    def __repr__(self) -> str:
        return repr(self.func)


nodes.register_node(
    Partial,
    lambda p: ((p.args, p.keywords), p.func),
    lambda func, children: Partial(func, *children[0], **children[1]),
    lambda p: (((GetAttrKey("args"), p.args), (GetAttrKey("keywords"), p.keywords)), p.func),
)

__all__ = [
    "tree_all", "tree_broadcast", "tree_flatten", "tree_leaves", "tree_map", "tree_reduce", "tree_reduce_associative",
    "tree_structure", "tree_transpose", "tree_unflatten",
    "KeyEntry", "KeyPath", "DictKey", "FlattenedIndexKey", "GetAttrKey", "SequenceKey", "keystr",
    "tree_flatten_with_path", "tree_leaves_with_path", "tree_map_with_path",
    "PyTreeDef", "all_leaves", "build_tree", "flatten_one_level", "flatten_one_level_with_keys", "is_tree_node",
    "treedef_children", "treedef_is_leaf", "treedef_tuple",
    "Partial", "register_dataclass", "register_pytree_node", "register_pytree_node_class",
    "register_pytree_with_keys", "register_pytree_with_keys_class", "register_static",
]  # fmt: skip
