"""Key paths: locations of leaves in a pytree, as ``['params'][0].weight``.

Core, before tracing, on top of ``tree``. In: pytrees or their TreeDefs. Out: paths, which are tuples of keys,
and their text for error messages, argument names and checkpoints. ``nodes`` defines the keys, with the
containers that they index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import equal, exact
from blufunc.core.pytree import tree as _tree
from blufunc.core.pytree.nodes import (
    KINDS,
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    SequenceKey,
    UnsortableKeys,
)
from blufunc.core.pytree.tree import Path, PyTree, Spec, TreeDef
from blufunc.errors import ArgumentError

if TYPE_CHECKING:
    pass

T = TypeVar("T")

__all__ = [
    "DictKey",
    "FlattenedIndexKey",
    "GetAttrKey",
    "SequenceKey",
    "diff",
    "flatten_with_path",
    "keystr",
    "leaf_paths",
    "leaves_with_path",
    "map_with_path",
]

_SIMPLE: dict[type, Callable[[Any], Any]] = {
    DictKey: lambda k: k.key,
    SequenceKey: lambda k: k.idx,
    GetAttrKey: lambda k: k.name,
    FlattenedIndexKey: lambda k: k.key,
}


def keystr(path: Path, simple: bool = False, separator: str = "") -> str:
    """A path as a string: ``['a'][0].x``; simple and with separator "/": ``a/0/x``."""
    if not isinstance(path, (tuple, list)) or not isinstance(separator, str):
        raise ArgumentError(
            f"keystr takes a path, which is a tuple of keys, and a text between them, not {path!r:.60} and "
            f"{separator!r:.60}.",
            where=source.here(),
        )
    return separator.join([str(_SIMPLE.get(type(k), str)(k) if simple else k) for k in path])


def flatten_with_path(
    tree: PyTree, is_leaf: Callable[..., bool] | None = None, is_leaf_takes_path: bool = False
) -> tuple[list[tuple[Path, Any]], TreeDef]:
    """``([(path, leaf), ...], treedef)``, in the order of ``tree.flatten``.

    With ``is_leaf_takes_path``, the call is ``is_leaf(path, x)``.
    """
    if is_leaf is not None and is_leaf_takes_path:
        _tree.check_function(is_leaf, "is_leaf")
        found: list[tuple[Path, Any]] = []
        try:
            spec = _flatten_until(tree, (), is_leaf, found)
        except UnsortableKeys as error:
            raise _tree.explain_unsortable(tree, error.args[0]) from None
        return found, _tree.LEAF if spec is None else TreeDef(spec, len(found))
    leaves, treedef = _tree.flatten(tree, is_leaf)
    return list(zip(_paths(treedef.spec, (), tree), leaves, strict=True)), treedef


def _flatten_until(x: PyTree, path: Path, is_leaf: Callable[..., bool], found: list) -> Spec:
    kind = None if is_leaf(path, x) else KINDS[type(x)]
    if kind is None:
        found.append((path, x))
        return None
    children, aux = kind.split(x)
    keys = kind.keys(aux, len(children)) if kind.keys_of is None else kind.keys_of(x)
    specs = [_flatten_until(c, (*path, k), is_leaf, found) for k, c in zip(keys, children, strict=True)]
    return kind, aux, tuple(specs)


_NO_OBJECT = object()


def _paths(spec: Spec, path: Path, x: Any = _NO_OBJECT) -> Iterator[Path]:
    """The paths of the leaves of ``spec``; a live ``x`` may name its children."""
    if spec is None:
        yield path
        return
    kind, aux, specs = spec
    children: Any = (_NO_OBJECT,) * len(specs) if x is _NO_OBJECT else kind.split(x)[0]
    keys = kind.keys(aux, len(specs)) if x is _NO_OBJECT or kind.keys_of is None else kind.keys_of(x)
    for key, child_spec, child in zip(keys, specs, children, strict=True):
        yield from _paths(child_spec, (*path, key), child)


def leaves_with_path(
    tree: PyTree, is_leaf: Callable[..., bool] | None = None, is_leaf_takes_path: bool = False
) -> list[tuple[Path, Any]]:
    """The leaves of ``tree``, each as ``(path, leaf)``."""
    return flatten_with_path(tree, is_leaf, is_leaf_takes_path)[0]


def map_with_path(
    f: Callable[..., Any],
    tree: T,
    *rest: PyTree,
    is_leaf: Callable[..., bool] | None = None,
    is_leaf_takes_path: bool = False,
) -> T:
    """``tree.map`` with the path of each leaf as the first argument of ``f``."""
    _tree.check_function(f, "tree.map_with_path")
    flat, treedef = flatten_with_path(tree, is_leaf, is_leaf_takes_path)
    located: Any = _tree.unflatten(treedef, [_Located(path, x) for path, x in flat])
    mapped: Any = _tree.map(lambda first, *xs: f(first.path, first.leaf, *xs), located, *rest)
    return mapped


class _Located:
    """A leaf (or container that ``is_leaf`` named) with its path, as one leaf."""

    __slots__ = ("leaf", "path")

    def __init__(self, path: Path, leaf: Any):
        self.path, self.leaf = path, leaf


def paths_in(treedef: TreeDef) -> list[Path]:
    """The path of each leaf, with the names that classes give their children.

    A class whose constructor refuses stand-ins for its children has indices instead.
    """
    try:
        skeleton = _tree.unflatten(treedef, [object() for _ in range(treedef.num_leaves)])
        return [path for path, _ in flatten_with_path(skeleton)[0]]
    except Exception:  # the user's class raised, as anything
        return list(_paths(treedef.spec, ()))


def leaf_paths(treedef: TreeDef) -> list[str]:
    """The paths of the leaves as strings, from the structure alone."""
    return [keystr(path) for path in _paths(_tree.check_treedef(treedef, "leaf_paths").spec, ())]


def diff(a: TreeDef, b: TreeDef, a_name: str = "the first", b_name: str = "the second") -> list[str]:
    """One line for each place where two structures differ; empty if they are equal."""
    return list(_diff(a.spec, b.spec, (a_name, b_name), ()))


def _diff(a: Spec, b: Spec, names: tuple[str, str], path: Path) -> Iterator[str]:
    if equal(exact(a), exact(b)):
        return
    if a is None or b is None:
        place = keystr(path) or "at the root"
        yield f"{place}: {names[0]} has {_tree.describe(a)}, {names[1]} has {_tree.describe(b)}"
        return
    yield from _tree.node_differences(a, b, names, path, exact)
    if a[0] is b[0]:
        theirs = dict(zip(b[0].keys(b[1], len(b[2])), b[2], strict=True))
        for key, child in zip(a[0].keys(a[1], len(a[2])), a[2], strict=True):
            if key in theirs:
                yield from _diff(child, theirs[key], names, (*path, key))
