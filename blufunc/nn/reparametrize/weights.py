"""Weight normalisation of trees: direction and length instead of a weight.

A face, above ``nn.weight_norm``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import blufunc.numpy as bnp
from blufunc.core.ir.axes import axis_in
from blufunc.core.pytree import tree
from blufunc.nn.group_norms import weight_norm as normalized
from blufunc.nn.reparametrize.chosen import PyTree, chosen

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike


class WeightNorm(NamedTuple):
    """A weight ``scale * direction / |direction|``, in its place in a tree.

    ``scale`` has one length for each feature, and size 1 along the other axes.
    """

    direction: Any
    scale: Any


def weight_norm(params: PyTree, *, mask: PyTree = None, axis: int = -1) -> PyTree:
    """``params`` with weights as direction and length (arXiv:1602.07868).

    Args:
      params: a pytree of arrays.
      mask: which: a pytree of bools that is a prefix of the parameters, or a function that makes one of them. By
        default all of two axes or more.
      axis: the axis of the features; lengths are taken over all others.
    Returns:
      a pytree with a ``WeightNorm`` for each of them, of which ``weights`` gives back the parameters.
    Raises:
      ShapeError: a chosen parameter has no axis.
    """

    def split(w: Any) -> WeightNorm:
        w = bnp.asarray(w)
        features = axis_in(axis, w.ndim, "weight_norm")
        axes = tuple([d for d in range(w.ndim) if d != features])
        return WeightNorm(w, bnp.sqrt(bnp.sum(bnp.square(w), axis=axes, keepdims=True)))

    leaves, flags, treedef = chosen("weight_norm", params, mask, 2 if mask is None else 1)
    return tree.unflatten(treedef, [split(x) if flag else x for x, flag in zip(leaves, flags, strict=True)])


def weights(params: PyTree, *, eps: ArrayLike = 1e-12) -> PyTree:
    """Plain parameters: each ``WeightNorm`` as the weight that it stands for.

    Args:
      params: a pytree that ``weight_norm`` returned.
      eps: added to the squares of the lengths.
    """

    def joined(x: Any) -> Any:
        if not isinstance(x, WeightNorm):
            return x
        # the axis of the features is one that both have whole; of several, all but one have size 1
        same = [d for d, (n, m) in enumerate(zip(x.scale.shape, x.direction.shape, strict=True)) if n == m]
        axis = max(same, key=x.scale.shape.__getitem__)
        return normalized(x.direction, x.scale.reshape(-1), axis=axis, eps=eps)

    return tree.map(joined, params, is_leaf=lambda x: isinstance(x, WeightNorm))
