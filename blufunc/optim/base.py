"""Gradient transformations: interface, composition, and ``apply_updates``.

A face, the first file of ``optim``. In: gradients, parameters and states, as pytrees. Out: updates. Pytrees are checked
against each other, so that a mismatch is an error with its path, and does not broadcast.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ops.rows import wide_dtype as wide_dtype
from blufunc.core.pytree import paths, tree

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike

    Schedule = Callable[[Any], ArrayLike]
    ScalarOrSchedule = ArrayLike | Schedule

T = TypeVar("T")

PyTree = Any


class GradientTransformation(NamedTuple):
    """Maps gradients to updates, or updates to transformed ones.

    Attributes:
      init: ``params -> state``.
      update: ``(updates, state, params=None) -> (updates, state)``; the new updates have the structure, shapes and
        dtypes of the old ones.
    """

    init: Callable[..., Any]
    update: Callable[..., Any]


class EmptyState(NamedTuple):
    """The state of a stateless transformation."""


def stateless(update: Callable[[PyTree, PyTree | None], PyTree]) -> GradientTransformation:
    """A transformation without state, from ``(updates, params) -> updates``."""
    return GradientTransformation(
        lambda params: EmptyState(), lambda updates, state, params=None: (update(updates, params), state)
    )


def identity() -> GradientTransformation:
    """The transformation that leaves updates as they are."""
    return stateless(lambda updates, params: updates)


def chain(*transformations: Any) -> GradientTransformation:
    """Several transformations, in sequence; the state is the tuple of their states.

    Keyword arguments of ``update``, such as ``value=loss``, go to those whose ``update`` takes them.

    Args:
      transformations: objects with ``init`` and ``update``, from here or elsewhere.
    Raises:
      ArgumentError: one of them has no ``init`` or no ``update``; when called, a state of another length.
    """
    for i, t in enumerate(transformations):
        check_transformation(t, f"argument {i} of chain")
    transformations = tuple([with_extra_args_support(t) for t in transformations])

    def init(params):
        return tuple([t.init(params) for t in transformations])

    def update(updates, state, params=None, **extra):
        if not isinstance(state, (tuple, list)) or len(state) != len(transformations):
            raise errors.ArgumentError(
                f"a chain of {len(transformations)} transformations got the state of another optimiser: "
                f"{tree.structure(state)}.",
                where=source.here(),
                fix="pass what init, or the last update, of this very chain returned",
            )
        states = []
        for t, s in zip(transformations, state, strict=True):
            updates, s = t.update(updates, s, params, **extra)
            states.append(s)
        return updates, tuple(states)

    return GradientTransformation(init, update)


def with_extra_args_support(tx: Any) -> GradientTransformation:
    """``tx``; if its ``update`` takes no keyword arguments, one that ignores them.

    Args:
      tx: an object with ``init`` and ``update``.
    """
    check_transformation(tx, "the argument of with_extra_args_support")
    if _takes_more(tx.update):
        return tx

    def update(updates, state, params=None, **extra):
        return tx.update(updates, state, params)

    return GradientTransformation(tx.init, update)


def _takes_more(update: Callable) -> bool:
    """True if ``update`` takes any keyword argument."""
    try:
        parameters = inspect.signature(update).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature
        return False
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def named_chain(*transformations: tuple[str, Any]) -> GradientTransformation:
    """``chain`` of pairs ``(name, transformation)``; states are a dict by name."""
    for i, pair in enumerate(transformations):
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise errors.ArgumentError(
                f"argument {i} of named_chain is not a pair of a name and a transformation: {pair!r:.60}.",
                where=source.here(),
                fix='named_chain(("clip", clip(1.0)), ("adam", adam(1e-3)))',
            )
    names = [name for name, _ in transformations]
    if len(set(names)) != len(names):
        raise errors.ArgumentError(
            f"named_chain: the names {names} are not all different.", where=source.here(), fix="rename one"
        )
    inner = chain(*[t for _, t in transformations])

    def init(params):
        return dict(zip(names, inner.init(params), strict=True))

    def update(updates, state, params=None, **extra):
        updates, states = inner.update(updates, tuple([state[name] for name in names]), params, **extra)
        return updates, dict(zip(names, states, strict=True))

    return GradientTransformation(init, update)


def apply_updates(params: T, updates: PyTree) -> T:
    """``params + updates``, each parameter in its own dtype.

    Raises:
      TreeError: the structures differ.
      ShapeError: the shapes of a parameter and its update differ.
    """
    treedef, ps, us = aligned({"params": params, "updates": updates})
    return tree.unflatten(treedef, [(p + u).astype(p.dtype) for p, u in zip(ps, us, strict=True)])


def aligned(trees: Mapping[str, PyTree]) -> list[Any]:
    """The common structure of named pytrees, then each one's leaves as arrays.

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
                why="; ".join(paths.diff(treedef, structure, first, name)[:5]),
                fix="pass gradients with respect to these parameters, and the state that init made for them",
            )
        arrays = [bnp.asarray(leaf) for leaf in leaves]
        for i, (a, b) in enumerate(zip(found[0], arrays, strict=True)):
            if tuple(a.shape) != tuple(b.shape):
                raise errors.ShapeError(
                    f"{first}{paths.leaf_paths(treedef)[i]} has shape {tuple(a.shape)}, in {name} it has "
                    f"{tuple(b.shape)}.",
                    where=source.here(),
                )
        found.append(arrays)
    return [treedef, *found]


def required(params: PyTree | None, name: str) -> PyTree:
    """``params``, which ``name`` requires.

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


class Scalars:
    """Scalars, converted once per dtype: arrays of one dtype share them."""

    def __init__(self, *values: Any):
        self.values = values
        self.known: dict[Any, tuple] = {}

    def of(self, dtype: Any) -> tuple:
        """The scalars in ``dtype``; Python scalars stay unchanged."""
        if dtype not in self.known:
            self.known[dtype] = tuple(
                [v if isinstance(v, (int, float)) else v.astype(dtype) for v in self.values]
            )
        return self.known[dtype]


# -- parts -----------------------------------------------------------------------------------------


def leafwise(f: Callable[..., tuple], n: int, trees: Mapping[str, PyTree]) -> list[PyTree]:
    """Apply ``f`` to corresponding leaves of ``trees``; the ``n`` pytrees of results."""
    treedef, *columns = aligned(trees)
    rows = [f(*leaves) for leaves in zip(*columns, strict=True)]
    return [tree.unflatten(treedef, [row[i] for row in rows]) for i in range(n)]


def zero_count() -> Any:
    """The number of steps taken before the first one."""
    return bnp.zeros((), dtypes.int32)


def next_count(count: Any) -> Any:
    """Increment, saturating at the largest int32."""
    return bnp.minimum(count, 2**31 - 2) + 1


def full_like(params: PyTree, value: Any, dtype: Any = None) -> PyTree:
    """A constant pytree like the parameters; half precisions become float32."""

    def one(p):
        p = bnp.asarray(p)
        return bnp.full(p.shape, value, dtype or wide_dtype(p.dtype))

    return tree.map(one, params)


def bias_correction(decay: Any, steps: Any) -> Any:
    """``1 - decay**steps``, without cancellation for decays close to 1."""
    if not isinstance(decay, (int, float)):
        return -bnp.expm1(bnp.log(decay) * steps)
    if not 0 <= decay < 1:
        raise errors.ValueRangeError(
            f"the decay of a moving average is in [0, 1), and one of this optimiser's is {decay}.",
            where=source.here(),
            fix="b1=0.9, b2=0.999 are the usual ones",
        )
    return -bnp.expm1(steps * math.log(decay)) if decay else bnp.ones((), steps.dtype)


def corrected_mean(mean: Any, g: Any, decay: Any, steps: Any, nesterov: bool) -> Any:
    """Bias-corrected mean of the gradients; with ``nesterov`` the next step's."""
    if not nesterov:
        return mean / bias_correction(decay, steps).astype(mean.dtype)
    ahead = bias_correction(decay, steps + 1).astype(mean.dtype)
    return mean * (decay / ahead) + g * ((1 - decay) / bias_correction(decay, steps).astype(mean.dtype))


def steps_of(count: Any, *trees: PyTree) -> Any:
    """A count as a float for formulas: float64 where the trees hold any, else float32."""
    wide = any(bnp.asarray(x).dtype == dtypes.float64 for t in trees for x in tree.leaves(t))
    return count.astype(dtypes.float64 if wide else dtypes.float32)


def number(x: Any) -> Any:
    """A Python scalar unchanged, anything else as a scalar array."""
    return x if isinstance(x, (int, float)) else bnp.asarray(x)


def real_number(x: Any, what: str) -> Any:
    """``number(x)``, checked to be a real scalar; ``what`` names it in the message."""
    value = number(x)
    if isinstance(value, (int, float)):
        return value
    if value.ndim or not (dtypes.is_floating(value.dtype) or dtypes.is_integer(value.dtype)):
        raise errors.ArgumentError(
            f"{what} is a real number, not {value.aval}.",
            where=source.here(),
            fix="pass a Python number, or an array of rank 0",
        )
    return value


def scaled(updates: PyTree, factor: Any) -> PyTree:
    """Scale all leaves; each keeps its dtype."""
    numbers = Scalars(number(factor))

    def one(u):
        u = bnp.asarray(u)
        return u * numbers.of(u.dtype)[0]

    return tree.map(one, updates)


def check_transformation(t: Any, what: str) -> None:
    """Raise ArgumentError unless ``t`` has ``init`` and ``update``."""
    if not callable(getattr(t, "init", None)) or not callable(getattr(t, "update", None)):
        raise errors.ArgumentError(
            f"{what} is a {type(t).__name__}, not a gradient transformation.",
            where=source.here(),
            why="a transformation has two functions, init and update.",
            fix="scale_by_schedule(f) for a schedule; call the factory: clip_by_global_norm(1.0)",
        )
