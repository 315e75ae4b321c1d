"""Low-rank adapters of weights, as functions of trees of parameters.

A face. A weight [..., m, n] gets a thin pair ``a`` [..., m, r] and ``b`` [..., r, n]; it stands for
``weight + alpha / r * a @ b`` (Hu et al., arXiv:2106.09685). Adapters are a tree of their own, to differentiate and to
save, which is merged into the parameters or put in their place::

    adapters = nn.lora.init(
        key, params, 8, mask=lambda p: tree.map_with_path(is_attention, p)
    )
    loss = lambda adapters: model(
        nn.lora.apply(params, adapters, alpha=16), x
    )  # with nn.lora.matmul in the model
    params = nn.lora.merge(params, adapters, alpha=16)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import blufunc.numpy as bnp
from blufunc import errors, random
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import static_int
from blufunc.core.ops.rows import wide_dtype
from blufunc.core.pytree import tree
from blufunc.nn.reparametrize.chosen import PyTree, chosen

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.trace import Array

__all__ = ["Adapted", "Adapter", "apply", "init", "mask", "matmul", "merge", "split"]


class Adapter(NamedTuple):
    """The thin factors ``a`` [..., m, r] and ``b`` [..., r, n] of one weight."""

    a: Any
    b: Any


class Adapted(NamedTuple):
    """A weight and its adapter, in the place of the weight: see ``apply``.

    ``scale`` has the leading axes of ``a``, so that a ``scan`` over layers takes a slice of each.
    """

    weight: Any
    a: Any
    b: Any
    scale: Any


def init(
    key: ArrayLike, params: PyTree, rank: int, *, mask: PyTree = None, dtype: DTypeLike = "float32"
) -> PyTree:
    """Adapters that change nothing yet: ``a`` is uniform in ``±1 / sqrt(m)``, ``b`` 0.

    Args:
      key: a random key.
      params: a pytree of arrays, or of ``ShapeDtypeStruct``; for quantized weights, that of the original ones.
      rank: r.
      mask: which weights: a pytree of bools that is a prefix of the parameters, or a function that makes one of them,
        as for ``optim.masked``. By default all of two axes or more.
      dtype: the dtype of the adapters.
    Returns:
      a pytree like ``params``, with an ``Adapter`` for these weights, and None for others.
    Raises:
      ShapeError: a chosen parameter has fewer than two axes.
      ValueRangeError: ``rank`` is less than 1.
    """
    rank = static_int(rank, "lora.init", "rank")
    if rank < 1:
        raise errors.ValueRangeError(
            f"lora.init: adapters of rank {rank}.", where=source.here(), fix="rank=8"
        )
    leaves, flags, treedef = chosen("lora.init", params, mask, 2)
    keys = random.split(key, max(len(leaves), 1))

    def one(key: Any, w: Any) -> Adapter:
        *stack, m, n = w.shape
        limit = 1 / math.sqrt(max(m, 1))
        a = random.uniform(key, (*stack, m, rank), dtype, -limit, limit)
        return Adapter(a, bnp.zeros((*stack, rank, n), dtype))

    found = [one(k, w) if flag else None for k, w, flag in zip(keys, leaves, flags, strict=False)]
    return tree.unflatten(treedef, found)


def apply(params: PyTree, adapters: PyTree, *, alpha: float | None = None) -> PyTree:
    """``params`` with an ``Adapted`` in the place of each weight that has an adapter.

    A model that multiplies by ``lora.matmul`` then computes with thin matmuls: neither ``a @ b`` nor the gradient of a
    weight becomes an array. A weight may be a subtree, such as a quantized one.

    Args:
      params: a pytree.
      adapters: what ``init`` returned, or updates made of it.
      alpha: the size of the adapters: products are scaled by ``alpha / r``; None for r.
    Raises:
      TreeError: the structures do not match.
    """
    weights, given, treedef = _pairs(params, adapters)
    new = [
        w if x is None else Adapted(w, x.a, x.b, bnp.full(x.a.shape[:-2], _scale(x, alpha), dtypes.float32))
        for w, x in zip(weights, given, strict=True)
    ]
    return tree.unflatten(treedef, new)


def split(params: PyTree) -> tuple[PyTree, PyTree]:
    """The parameters and the adapters of what ``apply`` returned.

    Args:
      params: a pytree with ``Adapted`` weights.
    """
    leaves, treedef = tree.flatten(params, is_leaf=lambda x: isinstance(x, Adapted))
    is_adapted = [isinstance(x, Adapted) for x in leaves]
    weights = [x.weight if own else x for x, own in zip(leaves, is_adapted, strict=True)]
    adapters = [Adapter(x.a, x.b) if own else None for x, own in zip(leaves, is_adapted, strict=True)]
    return tree.unflatten(treedef, weights), tree.unflatten(treedef, adapters)


def merge(params: PyTree, adapters: PyTree, *, alpha: float | None = None) -> PyTree:
    """``params`` with ``alpha / r * a @ b`` added to the weights that have adapters.

    Args:
      params: a pytree of arrays.
      adapters: what ``init`` returned, or updates made of it.
      alpha: see ``apply``.
    Returns:
      a pytree of arrays of the same shapes and dtypes; half precisions are added to in float32.
    Raises:
      TreeError: the structures do not match.
      DtypeError: a weight is not an array of floats.
    """

    def one(w: Any, x: Adapter) -> Any:
        if len(tree.leaves(w)) != 1 or not dtypes.is_inexact(bnp.asarray(w).dtype):
            raise errors.DtypeError(
                "lora.merge: a weight that is no array of floats has an adapter.",
                where=source.here(),
                why="a quantized weight would have to be quantized again.",
                fix="merge into dequantized weights, or lora.apply",
            )
        w = bnp.asarray(w)
        wide = wide_dtype(w.dtype)
        return (w.astype(wide) + x.a.astype(wide) @ x.b.astype(wide) * _scale(x, alpha)).astype(w.dtype)

    weights, given, treedef = _pairs(params, adapters)
    return tree.unflatten(
        treedef, [w if x is None else one(w, x) for w, x in zip(weights, given, strict=True)]
    )


def matmul(x: ArrayLike, weight: Any, *, matmul: Callable[[Any, Any], Any] = bnp.matmul) -> Array:
    """``x @ weight``, of a weight with or without an adapter.

    Args:
      x: [..., m].
      weight: [m, n], an ``Adapted``, or what else ``matmul`` takes.
      matmul: the multiplication by a weight without an adapter, such as one of quantized weights.
    Returns:
      [..., n], of the dtype of ``matmul(x, weight)``; the adapter is multiplied in the dtype of ``x``.
    """
    if not callable(matmul):
        raise errors.ArgumentError(
            f"lora.matmul: matmul is a function (x, weight), not a {type(matmul).__name__}.",
            where=source.here(),
        )
    if not isinstance(weight, Adapted):
        return matmul(x, weight)
    x = bnp.asarray(x)
    out = matmul(x, weight.weight)
    low = (x @ weight.a.astype(x.dtype)) @ weight.b.astype(x.dtype)
    scale = bnp.asarray(weight.scale)
    return out + (low * (scale[..., None, None] if scale.ndim else scale).astype(low.dtype)).astype(out.dtype)


def mask(params: PyTree) -> PyTree:
    """True for the factors of adapters, for ``optim.masked`` and ``optim.freeze``.

    To train adapters in their place::

        others = lambda params: tree.map(lambda m: not m, nn.lora.mask(params))
        optimizer = optim.chain(
            optim.masked(optim.adamw(1e-4), nn.lora.mask), optim.freeze(others)
        )

    Args:
      params: what ``apply`` returned.
    Returns:
      a pytree of bools of the same structure.
    """

    def one(x: Any) -> Any:
        if not isinstance(x, Adapted):
            return False
        return Adapted(tree.map(lambda _: False, x.weight), True, True, False)

    return tree.map(one, params, is_leaf=lambda x: isinstance(x, Adapted))


# -- parts -----------------------------------------------------------------------------------------


def _pairs(params: PyTree, adapters: PyTree) -> tuple[list[Any], list[Any], tree.TreeDef]:
    """Weights, the adapter of each or None, and their structure."""
    given, treedef = tree.flatten(adapters, is_leaf=lambda x: x is None or isinstance(x, Adapter))
    for x in given:
        if x is not None and not isinstance(x, Adapter):
            raise errors.ArgumentError(
                f"lora: a tree of adapters holds a {type(x).__name__}.",
                where=source.here(),
                fix="adapters = nn.lora.init(key, params, rank)",
            )
    try:
        return tree.flatten_up_to(treedef, params), given, treedef
    except errors.TreeError as e:
        raise errors.TreeError(
            "lora: the parameters do not have the structure of the adapters.",
            where=source.here(),
            why=e.why,
            fix="adapters that lora.init made for these parameters",
        ) from None


def _scale(adapter: Adapter, alpha: float | None) -> float:
    rank = adapter.a.shape[-1]
    return 1.0 if alpha is None else float(alpha) / rank
