"""Arithmetic on pytrees of arrays, under the names of ``optax.tree_utils``.

A face, above ``optim.base``. Combined trees have one structure and the same shapes; factors are scalars.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import blufunc.numpy as bnp
from blufunc import errors, random
from blufunc.core.ir import source
from blufunc.core.ir.axes import static_int
from blufunc.core.pytree import tree
from blufunc.optim import base
from blufunc.optim.base import PyTree, aligned
from blufunc.optim.transforms import global_norm

__all__ = [
    "tree_add", "tree_sub", "tree_mul", "tree_div", "tree_scale",
    "tree_add_scale", "tree_where", "tree_clip", "tree_vdot", "tree_sum",
    "tree_max", "tree_min", "tree_size", "tree_norm", "tree_zeros_like",
    "tree_ones_like", "tree_full_like", "tree_cast", "tree_cast_like", "tree_update_moment",
    "tree_update_infinity_moment", "tree_bias_correction", "tree_split_key_like", "tree_random_like",
]  # fmt: skip


def _combined(f: Callable, *trees: PyTree) -> PyTree:
    treedef, *columns = aligned({f"tree {i}": t for i, t in enumerate(trees)})
    return tree.unflatten(treedef, [f(*leaves) for leaves in zip(*columns, strict=True)])


def tree_add(tree_x: PyTree, tree_y: PyTree, *other_trees: PyTree) -> PyTree:
    """The sum of trees, leaf by leaf."""
    return _combined(lambda *xs: sum(xs[1:], xs[0]), tree_x, tree_y, *other_trees)


def tree_sub(tree_x: PyTree, tree_y: PyTree) -> PyTree:
    """``x - y``, leaf by leaf."""
    return _combined(operator.sub, tree_x, tree_y)


def tree_mul(tree_x: PyTree, tree_y: PyTree) -> PyTree:
    """``x * y``, leaf by leaf."""
    return _combined(operator.mul, tree_x, tree_y)


def tree_div(tree_x: PyTree, tree_y: PyTree) -> PyTree:
    """``x / y``, leaf by leaf."""
    return _combined(operator.truediv, tree_x, tree_y)


def tree_scale(scalar: Any, tree_x: PyTree) -> PyTree:
    """Scale every leaf."""
    scalar = base.real_number(scalar, "tree_scale: the scalar")
    return _combined(lambda x: x * scalar, tree_x)


def tree_add_scale(tree_x: PyTree, scalar: Any, tree_y: PyTree) -> PyTree:
    """``x + scalar * y``, leaf by leaf."""
    scalar = base.real_number(scalar, "tree_add_scale: the scalar")
    return _combined(lambda x, y: x + y * scalar, tree_x, tree_y)


def tree_where(condition: Any, tree_x: PyTree, tree_y: PyTree) -> PyTree:
    """``where(condition, x, y)``, leaf by leaf."""
    return _combined(lambda x, y: bnp.where(condition, x, y), tree_x, tree_y)


def tree_clip(tree_x: PyTree, min_value: Any = None, max_value: Any = None) -> PyTree:
    """Every leaf limited to [min_value, max_value]."""
    return _combined(lambda x: bnp.clip(x, min_value, max_value), tree_x)


def tree_vdot(tree_x: PyTree, tree_y: PyTree) -> Any:
    """The sum of the inner products of leaves; the first of each is conjugated."""
    return tree_sum(_combined(bnp.vdot, tree_x, tree_y))


def tree_sum(tree_x: PyTree) -> Any:
    """The sum of all elements of all leaves; 0 for a tree without leaves."""
    return sum([bnp.sum(x) for x in _leaves(tree_x)], bnp.zeros(()))


def tree_max(tree_x: PyTree) -> Any:
    """The largest of all elements; minus infinity for a tree without leaves."""
    return _extreme(bnp.max, bnp.maximum, tree_x, -bnp.inf)


def tree_min(tree_x: PyTree) -> Any:
    """The smallest of all elements; infinity for a tree without leaves."""
    return _extreme(bnp.min, bnp.minimum, tree_x, bnp.inf)


def _extreme(of_leaf: Callable, of_two: Callable, tree_x: PyTree, none: float) -> Any:
    found = [of_leaf(x) for x in _leaves(tree_x) if x.size]
    if not found:
        return bnp.asarray(none)
    result = found[0]
    for x in found[1:]:
        result = of_two(result, x)
    return result


def tree_size(tree_x: PyTree) -> int:
    """The number of elements of all leaves."""
    return sum([x.size for x in _leaves(tree_x)])


def tree_norm(tree_x: PyTree, ord: Any = None, squared: bool = False) -> Any:
    """The norm of all leaves together, as one vector.

    Args:
      tree_x: a pytree of arrays.
      ord: 2 or None, 1, or infinity.
      squared: return its square.
    """
    if ord in (None, 2):
        norm = global_norm(tree_x)
    elif ord == 1:
        norm = tree_sum(_combined(bnp.abs, tree_x))
    elif ord in (float("inf"), "inf"):
        norm = tree_max(_combined(bnp.abs, tree_x))
    else:
        raise errors.ValueRangeError(
            f"tree_norm: there is no norm of order {ord!r:.60}.",
            where=source.here(),
            fix="ord is None, 1, 2 or inf",
        )
    return bnp.square(norm) if squared else norm


def tree_zeros_like(tree_x: PyTree, dtype: Any = None) -> PyTree:
    """Zeros like the leaves."""
    return tree_full_like(tree_x, 0, dtype)


def tree_ones_like(tree_x: PyTree, dtype: Any = None) -> PyTree:
    """Ones like the leaves."""
    return tree_full_like(tree_x, 1, dtype)


def tree_full_like(tree_x: PyTree, fill_value: Any, dtype: Any = None) -> PyTree:
    """Arrays like the leaves, filled with a number."""
    return _combined(lambda x: bnp.full(x.shape, fill_value, dtype or x.dtype), tree_x)


def tree_cast(tree_x: PyTree, dtype: Any) -> PyTree:
    """Cast every leaf to a dtype; None for no cast."""
    return tree_x if dtype is None else _combined(lambda x: x.astype(dtype), tree_x)


def tree_cast_like(tree_x: PyTree, other_tree: PyTree) -> PyTree:
    """Cast every leaf to the dtype of another tree's."""
    return _combined(lambda x, y: x.astype(y.dtype), tree_x, other_tree)


def tree_update_moment(updates: PyTree, moments: PyTree, decay: Any, order: int) -> PyTree:
    """``updates**order * (1 - decay) + moments * decay``."""
    decay = base.real_number(decay, "tree_update_moment: the decay")
    order = static_int(order, "tree_update_moment", "order")
    return _combined(lambda u, m: bnp.power(u, order) * (1 - decay) + m * decay, updates, moments)


def tree_update_infinity_moment(updates: PyTree, moments: PyTree, decay: Any, eps: Any) -> PyTree:
    """``maximum(abs(updates) + eps, moments * decay)``."""
    decay, eps = (base.real_number(x, "tree_update_infinity_moment: decay or eps") for x in (decay, eps))
    return _combined(lambda u, m: bnp.maximum(bnp.abs(u) + eps, m * decay), updates, moments)


def tree_bias_correction(moment: PyTree, decay: Any, count: Any) -> PyTree:
    """Moving averages that started at 0, divided by ``1 - decay**count``."""
    correction = base.bias_correction(decay, base.steps_of(bnp.asarray(count), moment))
    return _combined(lambda m: m / correction.astype(m.dtype), moment)


def tree_split_key_like(rng_key: Any, target_tree: PyTree) -> PyTree:
    """A tree of that structure with a distinct key in each leaf."""
    leaves, treedef = tree.flatten(target_tree)
    return tree.unflatten(treedef, list(random.split(rng_key, len(leaves))))


def tree_random_like(
    rng_key: Any, target_tree: PyTree, sampler: Callable = random.normal, dtype: Any = None
) -> PyTree:
    """Random arrays of the shapes and dtypes of the leaves.

    Args:
      rng_key: one key.
      target_tree: a pytree of arrays.
      sampler: ``(key, shape, dtype) -> array``.
      dtype: instead of the leaves' own.
    """
    if not callable(sampler):
        raise errors.ArgumentError(
            f"tree_random_like: the sampler is a {type(sampler).__name__}, not a function.",
            where=source.here(),
            fix="sampler=random.normal",
        )
    leaves, treedef = _leaves(target_tree), tree.structure(target_tree)
    keys = random.split(rng_key, len(leaves))
    return tree.unflatten(
        treedef, [sampler(k, x.shape, dtype or x.dtype) for k, x in zip(keys, leaves, strict=True)]
    )


def _leaves(x: PyTree) -> list[Any]:
    return [bnp.asarray(leaf) for leaf in tree.leaves(x)]
