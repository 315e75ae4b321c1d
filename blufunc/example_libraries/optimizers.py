"""``optimizers``: triples of functions ``(init, update, get_params)`` on pytrees.

A face above ``blufunc.numpy``. ``init(params)`` gives a state, ``update(step, grads, state)`` the next one, and
``get_params(state)`` the parameters in it. Rules are written for one array; ``optimizer`` lifts them to pytrees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.pytree import tree
from blufunc.tree_util import register_pytree_node

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

T = TypeVar("T")

P = ParamSpec("P")

__all__ = [
    "JoinPoint", "Optimizer", "OptimizerState", "adagrad", "adam", "adamax", "clip_grads", "constant",
    "exponential_decay", "inverse_time_decay", "l2_norm", "make_schedule", "momentum", "nesterov", "optimizer",
    "pack_optimizer_state", "piecewise_constant", "polynomial_decay", "rmsprop", "rmsprop_momentum", "sgd", "sm3",
    "unpack_optimizer_state",
]  # fmt: skip

Schedule = Callable[[Any], Any]


class OptimizerState(NamedTuple):
    """The states of all arrays.

    Attributes:
      packed_state: for each parameter, the leaves of its state.
      tree_def: the structure of the parameters.
      subtree_defs: the structures of the states.
    """

    packed_state: Any
    tree_def: Any
    subtree_defs: Any


register_pytree_node(
    OptimizerState,
    lambda s: ((s.packed_state,), (s.tree_def, s.subtree_defs)),
    lambda aux, children: OptimizerState(children[0], *aux),
)


class Optimizer(NamedTuple):
    """The functions of an optimizer."""

    init_fn: Callable
    update_fn: Callable
    params_fn: Callable


def optimizer(opt_maker: Callable[P, Any]) -> Callable[P, Optimizer]:
    """Decorator: a maker of rules for one array becomes one of rules for pytrees.

    Args:
      opt_maker: returns ``(init, update, get_params)``: ``init(x)`` gives a pytree, ``update(step, grad, state)`` one
        of the same structure.
    """

    @functools.wraps(opt_maker)
    def make(*args, **kwargs):
        init, update, get_params = opt_maker(*args, **kwargs)

        def tree_init(params):
            leaves, structure = tree.flatten(params)
            return _packed([init(x) for x in leaves], structure)

        def tree_update(i, grads, state):
            leaves, structure = tree.flatten(grads)
            if structure != state.tree_def:
                raise errors.TreeError(
                    f"an optimizer of {state.tree_def} is given gradients {structure}.",
                    where=source.here(),
                    fix="pass the gradient with respect to get_params(state)",
                )
            new = [update(i, g, s) for g, s in zip(leaves, _unpacked(state), strict=True)]
            packed = _packed(new, state.tree_def)
            if packed.subtree_defs != state.subtree_defs:
                raise errors.TreeError(
                    "the update of an optimizer changes the structure of its state.",
                    where=source.here(),
                    fix="return what init returns, with new values",
                )
            return packed

        def tree_params(state):
            return tree.unflatten(state.tree_def, [get_params(s) for s in _unpacked(state)])

        return Optimizer(tree_init, tree_update, tree_params)

    return make


def _packed(states: Sequence[Any], structure: Any) -> OptimizerState:
    flat = [tree.flatten(s) for s in states]
    return OptimizerState(tuple([tuple(x) for x, _ in flat]), structure, tuple([d for _, d in flat]))


def _unpacked(state: OptimizerState) -> list[Any]:
    return [tree.unflatten(d, x) for d, x in zip(state.subtree_defs, state.packed_state, strict=True)]


class JoinPoint:
    """The state of one parameter, as a leaf of the pytree of parameters."""

    def __init__(self, subtree: Any):
        self.subtree = subtree

    def __iter__(self):
        yield self.subtree


def unpack_optimizer_state(opt_state: OptimizerState) -> Any:
    """The pytree of parameters with a ``JoinPoint`` of the state of each: to save it."""
    return tree.unflatten(opt_state.tree_def, [JoinPoint(s) for s in _unpacked(opt_state)])


def pack_optimizer_state(marked_pytree: Any) -> OptimizerState:
    """The inverse of ``unpack_optimizer_state``."""
    leaves, structure = tree.flatten(marked_pytree)
    if not all(isinstance(x, JoinPoint) for x in leaves):
        raise errors.ArgumentError(
            "pack_optimizer_state: a leaf is no JoinPoint.",
            where=source.here(),
            fix="unpack_optimizer_state(state)",
        )
    return _packed([x.subtree for x in leaves], structure)


# -- rules -------------------------------------------------------------------------------------------


@optimizer
def sgd(step_size: Any) -> Any:
    """Gradient descent."""
    rate = make_schedule(step_size)
    return lambda x: x, lambda i, g, x: x - rate(i) * g, lambda x: x


@optimizer
def momentum(step_size: Any, mass: float) -> Any:
    """Gradient descent with a velocity: B. T. Polyak (1964)."""
    rate = make_schedule(step_size)

    def update(i, g, state):
        x, velocity = state
        velocity = mass * velocity + g
        return x - rate(i) * velocity, velocity

    return _with_zeros(1), update, _parameter


@optimizer
def nesterov(step_size: Any, mass: float) -> Any:
    """Gradient descent with a velocity that looks ahead: Y. Nesterov (1983)."""
    rate = make_schedule(step_size)

    def update(i, g, state):
        x, velocity = state
        velocity = mass * velocity + g
        return x - rate(i) * (mass * velocity + g), velocity

    return _with_zeros(1), update, _parameter


@optimizer
def adagrad(step_size: Any, momentum: float = 0.9) -> Any:
    """J. Duchi, E. Hazan and Y. Singer, "Adaptive Subgradient Methods" (2011)."""
    rate = make_schedule(step_size)

    def update(i, g, state):
        x, squares, m = state
        squares = squares + bnp.square(g)
        m = (1 - momentum) * (g * _inverse_root(squares)) + momentum * m
        return x - rate(i) * m, squares, m

    return _with_zeros(2), update, _parameter


@optimizer
def rmsprop(step_size: Any, gamma: float = 0.9, eps: float = 1e-8) -> Any:
    """T. Tieleman and G. Hinton, "Lecture 6.5: rmsprop" (2012)."""
    rate = make_schedule(step_size)

    def update(i, g, state):
        x, mean = state
        mean = mean * gamma + bnp.square(g) * (1 - gamma)
        return x - rate(i) * g / bnp.sqrt(mean + eps), mean

    return _with_zeros(1), update, _parameter


@optimizer
def rmsprop_momentum(step_size: Any, gamma: float = 0.9, eps: float = 1e-8, momentum: float = 0.9) -> Any:
    """``rmsprop`` with a velocity."""
    rate = make_schedule(step_size)

    def update(i, g, state):
        x, mean, velocity = state
        mean = mean * gamma + bnp.square(g) * (1 - gamma)
        velocity = momentum * velocity + rate(i) * g / bnp.sqrt(mean + eps)
        return x - velocity, mean, velocity

    return _with_zeros(2), update, _parameter


@optimizer
def adam(step_size: Any, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Any:
    """D. P. Kingma and J. Ba, "Adam" (2015)."""
    rate = make_schedule(step_size)

    def update(i, g, state):
        x, m, v = state
        m, v = (1 - b1) * g + b1 * m, (1 - b2) * bnp.square(g) + b2 * v
        m_hat, v_hat = m / (1 - _power(b1, i, m)), v / (1 - _power(b2, i, v))
        return x - rate(i) * m_hat / (bnp.sqrt(v_hat) + eps), m, v

    return _with_zeros(2), update, _parameter


@optimizer
def adamax(step_size: Any, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Any:
    """``adam`` by the infinity norm, of the same paper."""
    rate = make_schedule(step_size)

    def update(i, g, state):
        x, m, u = state
        m, u = (1 - b1) * g + b1 * m, bnp.maximum(b2 * u, bnp.abs(g))
        return x - rate(i) / (1 - _power(b1, i, m)) * m / (u + eps), m, u

    return _with_zeros(2), update, _parameter


@optimizer
def sm3(step_size: Any, momentum: float = 0.9) -> Any:
    """A vector for each axis: R. Anil et al., "Memory-Efficient Optimization" (2019)."""
    rate = make_schedule(step_size)

    def init(x):
        x = bnp.asarray(x)
        rows = [bnp.zeros(n, x.dtype) for n in x.shape]
        return x, bnp.zeros_like(x), rows or [bnp.zeros_like(x)]

    def update(i, g, state):
        x, m, rows = state
        axes = range(x.ndim)
        wide = [bnp.expand_dims(r, tuple(a for a in axes if a != d)) for d, r in enumerate(rows)]
        squares = functools.reduce(bnp.minimum, wide) + bnp.square(g)
        m = (1 - momentum) * (g * _inverse_root(squares)) + momentum * m
        rows = [bnp.max(squares, tuple(a for a in axes if a != d)) for d in axes] or [squares]
        return x - rate(i) * m, m, rows

    return init, update, _parameter


def _with_zeros(n: int) -> Callable:
    """The initial state: a parameter, and zeros like it n times."""
    return lambda x: (x, *[bnp.zeros_like(x) for _ in range(n)])


def _parameter(state: Any) -> Any:
    return state[0]


def _power(b: float, i: Any, like: Any) -> Any:
    return bnp.asarray(b, like.dtype) ** (bnp.asarray(i, like.dtype) + 1)


def _inverse_root(x: Any) -> Any:
    return bnp.where(x > 0, 1 / bnp.sqrt(bnp.where(x > 0, x, 1)), 0)


# -- schedules ---------------------------------------------------------------------------------------


def constant(step_size: Any) -> Schedule:
    """The same step size for all steps."""
    return lambda i: step_size


def exponential_decay(step_size: Any, decay_steps: Any, decay_rate: Any) -> Schedule:
    """``step_size * decay_rate ** (i / decay_steps)``."""
    return lambda i: step_size * decay_rate ** (i / decay_steps)


def inverse_time_decay(
    step_size: Any, decay_steps: Any, decay_rate: Any, staircase: bool = False
) -> Schedule:
    """``step_size / (1 + decay_rate * i / decay_steps)``.

    ``staircase``: round the quotient down.
    """
    of = (lambda i: bnp.floor(i / decay_steps)) if staircase else (lambda i: i / decay_steps)
    return lambda i: step_size / (1 + decay_rate * of(i))


def polynomial_decay(step_size: Any, decay_steps: Any, final_step_size: Any, power: float = 1.0) -> Schedule:
    """From ``step_size`` to ``final_step_size``: ``(1 - i / decay_steps) ** power``."""
    rest = lambda i: 1 - bnp.minimum(i, decay_steps) / decay_steps
    return lambda i: rest(i) ** power * (step_size - final_step_size) + final_step_size


def piecewise_constant(boundaries: Any, values: Any) -> Schedule:
    """``values[k]`` after k of the boundaries."""
    boundaries, values = bnp.asarray(boundaries), bnp.asarray(values)
    if boundaries.ndim != 1 or values.shape != (boundaries.shape[0] + 1,):
        raise errors.ShapeError(
            f"piecewise_constant: boundaries {boundaries.aval} and values {values.aval}.",
            where=source.here(),
            fix="give one value more than boundaries",
        )
    return lambda i: values[bnp.sum(i > boundaries)]


def make_schedule(scalar_or_schedule: Any) -> Schedule:
    """A schedule as it is, and a number as a constant one."""
    if callable(scalar_or_schedule):
        return scalar_or_schedule
    if bnp.ndim(scalar_or_schedule) == 0:
        return constant(scalar_or_schedule)
    raise errors.ArgumentError(
        f"a step size is a number or a function of the step, not {scalar_or_schedule!r:.60}.",
        where=source.here(),
    )


# -- norms -------------------------------------------------------------------------------------------


def l2_norm(tree: Any) -> Array:
    """The Euclidean norm of a pytree."""
    return bnp.sqrt(sum(bnp.real(bnp.vdot(x, x)) for x in _leaves(tree)))


_leaves = tree.leaves


def clip_grads(grad_tree: T, max_norm: ArrayLike) -> T:
    """The gradients, scaled down to a norm of ``max_norm`` if theirs is larger."""
    norm = l2_norm(grad_tree)
    return tree.map(lambda g: bnp.where(norm < max_norm, g, g * (max_norm / norm)), grad_tree)
