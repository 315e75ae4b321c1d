"""Leaves of a tree of parameters that a mask chooses.

A face, below the reparametrisations and ``nn.lora``. Masks are those of ``optim.masked``.
"""

from __future__ import annotations

from typing import Any

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.pytree import paths, tree

PyTree = Any


def chosen(name: str, params: PyTree, mask: PyTree, axes: int) -> tuple[list[Any], list[bool], tree.TreeDef]:
    """The leaves, whether each is chosen, and the structure.

    Args:
      mask: a pytree of bools that is a prefix of ``params``, a function from ``params`` to one, or None for all leaves
        of at least ``axes`` axes.
    Raises:
      ShapeError: a chosen leaf has fewer axes.
    """
    leaves, treedef = tree.flatten(params)
    if mask is None:
        return leaves, [len(bnp.shape(x)) >= axes for x in leaves], treedef
    flags = [bool(m) for m in tree.broadcast_prefix(mask(params) if callable(mask) else mask, params)]
    for i, (x, flag) in enumerate(zip(leaves, flags, strict=True)):
        if flag and len(bnp.shape(x)) < axes:
            raise errors.ShapeError(
                f"{name}: params{paths.leaf_paths(treedef)[i]} of shape {tuple(bnp.shape(x))} has fewer than {axes} "
                "axes.",
                where=source.here(),
                fix="a mask that is False for it, or None for all weights of enough axes",
            )
    return leaves, flags, treedef
