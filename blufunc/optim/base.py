"""What an optimiser is: a pair of functions, their composition, and the step that applies their updates.

A face, the first file of ``optim``. Gradients, parameters and states go through here as pytrees and are held
against each other, so that a mismatch names the place and does not broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core import dtypes, source, tree, treepath

PyTree = Any


class GradientTransformation(NamedTuple):
    """From gradients to updates, or from updates to better ones.

    Attributes:
      init: ``params -> state``.
      update: ``(updates, state, params=None) -> (updates, state)``; the new updates have the structure, shapes and
        dtypes of the old ones.
    """

    init: Callable[..., Any]
    update: Callable[..., Any]


class EmptyState(NamedTuple):
    """The state of a transformation that remembers nothing."""


def stateless(update: Callable[[PyTree, PyTree | None], PyTree]) -> GradientTransformation:
    """A transformation without state, from ``(updates, params) -> updates``."""
    return GradientTransformation(
        lambda params: EmptyState(), lambda updates, state, params=None: (update(updates, params), state)
    )


def identity() -> GradientTransformation:
    """The transformation that leaves updates as they are."""
    return stateless(lambda updates, params: updates)


def chain(*transformations: Any) -> GradientTransformation:
    """Several transformations, one after the other; the state is the tuple of their states.

    Args:
      transformations: objects with ``init`` and ``update``, from here or elsewhere.
    Raises:
      ArgumentError: one of them has no ``init`` or no ``update``; when called, a state of another length.
    """
    for i, t in enumerate(transformations):
        if not callable(getattr(t, "init", None)) or not callable(getattr(t, "update", None)):
            raise errors.ArgumentError(
                f"argument {i} of chain is a {type(t).__name__}, not a gradient transformation.",
                where=source.here(),
                why="a transformation has two functions, init and update.",
                fix="scale_by_schedule(f) for a schedule; call the factory: clip_by_global_norm(1.0)",
            )

    def init(params):
        return tuple([t.init(params) for t in transformations])

    def update(updates, state, params=None):
        if not isinstance(state, (tuple, list)) or len(state) != len(transformations):
            raise errors.ArgumentError(
                f"a chain of {len(transformations)} transformations got the state of another optimiser: "
                f"{tree.structure(state)}.",
                where=source.here(),
                fix="pass what init, or the last update, of this very chain returned",
            )
        states = []
        for t, s in zip(transformations, state, strict=True):
            updates, s = t.update(updates, s, params)
            states.append(s)
        return updates, tuple(states)

    return GradientTransformation(init, update)


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """``params + updates``, each parameter in its own dtype.

    Raises:
      TreeError: the structures differ.
      ShapeError: the shapes of a parameter and its update differ.
    """
    treedef, ps, us = aligned({"params": params, "updates": updates})
    return tree.unflatten(treedef, [(p + u).astype(p.dtype) for p, u in zip(ps, us, strict=True)])


def aligned(trees: Mapping[str, PyTree]) -> list[Any]:
    """The common structure of pytrees, given by name, and then the leaves of each as a list of arrays.

    Raises:
      TreeError: a structure differs from the first one.
      ShapeError: the shape of a leaf differs from that in the first one.
    """
    (first, *rest), (x, *others) = trees.keys(), trees.values()
    leaves, treedef = tree.flatten(x)
    found = [[bnp.asarray(leaf) for leaf in leaves]]
    for name, other in zip(rest, others, strict=True):
        leaves, structure = tree.flatten(other)
        if structure != treedef:
            raise errors.TreeError(
                f"{first} and {name} have different structures.",
                where=source.here(),
                why="; ".join(treepath.diff(treedef, structure, first, name)[:5]),
                fix="pass gradients with respect to these parameters, and the state that init made for them",
            )
        arrays = [bnp.asarray(leaf) for leaf in leaves]
        for i, (a, b) in enumerate(zip(found[0], arrays, strict=True)):
            if tuple(a.shape) != tuple(b.shape):
                raise errors.ShapeError(
                    f"{first}{treepath.leaf_paths(treedef)[i]} has shape {tuple(a.shape)}, in {name} it has "
                    f"{tuple(b.shape)}.",
                    where=source.here(),
                )
        found.append(arrays)
    return [treedef, *found]


def required(params: PyTree | None, name: str) -> PyTree:
    """``params``, which ``name`` cannot do without.

    Raises:
      ArgumentError: they are None.
    """
    if params is None:
        raise errors.ArgumentError(
            f"{name} needs the parameters, and update was called without them.",
            where=source.here(),
            fix="updates, state = optimizer.update(grads, state, params)",
        )
    return params


def wide_dtype(dtype: Any) -> Any:
    """The dtype in which to compute with parameters of ``dtype``: float32 for the half precisions."""
    return dtypes.float32 if dtypes.is_floating(dtype) and dtype.itemsize < 4 else dtype


class Scalars:
    """A few numbers, converted once to each dtype that is asked for: arrays of one dtype share them."""

    def __init__(self, *values: Any):
        self.values = values
        self.known: dict[Any, tuple] = {}

    def of(self, dtype: Any) -> tuple:
        """The numbers in ``dtype``; Python numbers stay as they are."""
        if dtype not in self.known:
            self.known[dtype] = tuple(
                [v if isinstance(v, (int, float)) else v.astype(dtype) for v in self.values]
            )
        return self.known[dtype]
