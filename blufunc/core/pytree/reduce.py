"""Reductions of a pytree's leaves to one value.

Core, before tracing, on top of ``tree``. In: a pytree and a function of two values. Out: one value.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

from blufunc.core.ir import source
from blufunc.core.pytree import tree as tree_
from blufunc.core.pytree.tree import IsLeaf, PyTree
from blufunc.errors import TreeError

T = TypeVar("T")

_MISSING = object()


@overload
def reduce(f: Callable[[T, T], T], tree: PyTree, *, is_leaf: IsLeaf = None) -> T: ...
@overload
def reduce(f: Callable[[T, Any], T], tree: PyTree, initializer: Any, is_leaf: IsLeaf = None) -> T: ...


def reduce(
    f: Callable[[Any, Any], Any], tree: PyTree, initializer: Any = _MISSING, is_leaf: IsLeaf = None
) -> Any:
    """Left fold of the leaves, from ``initializer`` or else the first leaf.

    Raises:
      TreeError: there is neither a leaf nor an ``initializer``.
    """
    tree_.check_function(f, "reduce")
    flat = tree_.leaves(tree, is_leaf)
    if initializer is not _MISSING:
        return functools.reduce(f, flat, initializer)
    if not flat:
        raise _nothing("reduce", "initializer")
    return functools.reduce(f, flat)


def reduce_associative(
    operation: Callable[[T, T], T], tree: PyTree, *, identity: Any = _MISSING, is_leaf: IsLeaf = None
) -> T:
    """Tree reduction of the leaves by an associative operation, of logarithmic depth.

    Args:
      operation: from two values to one.
      tree: a pytree.
      identity: the result where there is no leaf.
      is_leaf: as in ``flatten``.
    Raises:
      TreeError: there is neither a leaf nor an ``identity``.
    """
    tree_.check_function(operation, "reduce_associative")
    values = tree_.leaves(tree, is_leaf)
    if not values:
        if identity is _MISSING:
            raise _nothing("reduce_associative", "identity")
        return identity
    while len(values) > 1:
        pairs = [operation(a, b) for a, b in zip(values[::2], values[1::2])]  # noqa: B905 - the odd one waits
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def _nothing(name: str, option: str) -> TreeError:
    return TreeError(
        f"{name} of a tree without leaves has no value.", where=source.here(), fix=f"{name}(..., {option}=0)"
    )


def all(tree: PyTree, is_leaf: IsLeaf = None) -> bool:
    """Whether all leaves are true."""
    return builtins.all(tree_.leaves(tree, is_leaf))
