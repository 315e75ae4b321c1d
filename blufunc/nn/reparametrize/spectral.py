"""Spectral normalisation of trees: weights of largest singular value 1.

A face, above ``nn.spectral_norm``. The estimates of singular vectors are a tree of their own, as states of batch norm
are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import blufunc.numpy as bnp
from blufunc import random
from blufunc.core.pytree import tree
from blufunc.nn.group_norms import spectral_norm as normalized
from blufunc.nn.reparametrize.chosen import PyTree, chosen

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike


def spectral_vectors(key: ArrayLike, params: PyTree, *, mask: PyTree = None) -> PyTree:
    """First estimates of the singular vectors, random ones.

    Args:
      key: a random key.
      params: a pytree of arrays.
      mask: which weights: see ``weight_norm``.
    Returns:
      a pytree like ``params``, of vectors [features] for these weights, and None for others.
    Raises:
      ShapeError: a chosen parameter has no axis.
    """
    leaves, flags, treedef = chosen("spectral_vectors", params, mask, 2 if mask is None else 1)
    keys = random.split(key, max(len(leaves), 1))
    vectors = [
        random.normal(k, bnp.shape(x)[-1:], bnp.asarray(x).dtype) if flag else None
        for k, x, flag in zip(keys, leaves, flags, strict=False)
    ]
    return tree.unflatten(treedef, vectors)


def spectral_norm(
    params: PyTree, vectors: PyTree, *, n_steps: int = 1, eps: ArrayLike = 1e-12
) -> tuple[PyTree, PyTree]:
    """Weights divided by their largest singular value (arXiv:1802.05957), by trees.

    Args:
      params: a pytree of arrays.
      vectors: what ``spectral_vectors``, or the last call, returned.
      n_steps: steps of the iteration.
      eps: added to the squares of lengths.
    Returns:
      the parameters to compute with, and the vectors for the next call.
    """
    is_leaf = lambda x: x is None
    treedef = tree.structure(vectors, is_leaf=is_leaf)
    given, weights = tree.leaves(vectors, is_leaf=is_leaf), tree.flatten_up_to(treedef, params)
    results = [
        (w, None) if u is None else normalized(w, u, n_steps=n_steps, eps=eps)[:2]
        for w, u in zip(weights, given, strict=True)
    ]
    new, next_vectors = (tree.unflatten(treedef, [r[i] for r in results]) for i in range(2))
    return new, next_vectors
