"""L-BFGS with a line search, for losses that are not sampled.

A face, above ``optim.line_search``. J. Nocedal and S. J. Wright, "Numerical Optimization" (2006), 7.4 and 7.5. State
and formulas of the direction are those of optax, but steps along which the gradient falls have the weight 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import static_int
from blufunc.core.pytree import tree
from blufunc.flatten_util import ravel_pytree
from blufunc.optim.base import (
    GradientTransformation,
    PyTree,
    aligned,
    chain,
    next_count,
    required,
    zero_count,
)
from blufunc.optim.line_search import line_search
from blufunc.optim.transforms import scale, scale_by_learning_rate
from blufunc.transforms.autodiff.grad import value_and_grad

if TYPE_CHECKING:
    from blufunc.optim.base import ScalarOrSchedule


class ScaleByLBFGSState(NamedTuple):
    """``count``: the steps taken, int32. ``params``, ``updates``: of the last step.

    ``diff_params_memory``, ``diff_updates_memory``: the last changes of both, stacked, in a ring of ``memory_size``;
    ``weights_memory``: 1 over their inner products, 0 for none.
    """

    count: Any
    params: PyTree
    updates: PyTree
    diff_params_memory: PyTree
    diff_updates_memory: PyTree
    weights_memory: Any


class ScaleByZoomLinesearchState(NamedTuple):
    """``learning_rate``: the last step; ``value``, ``grad``: the loss after it.

    ``evaluations``: of the loss, by the last search, int32.
    """

    learning_rate: Any
    value: Any
    grad: PyTree
    evaluations: Any


def scale_by_lbfgs(memory_size: int = 10, scale_init_precond: bool = True) -> GradientTransformation:
    """Multiply by an approximation of the inverse Hessian from the last steps.

    Args:
      memory_size: the number of steps that are kept.
      scale_init_precond: begin with the identity scaled by the last step; before the first one by the reciprocal of the
        norm of the gradient, at most 1.
    Returns:
      a transformation whose ``update`` needs ``params``.
    Raises:
      ValueRangeError: ``memory_size`` is less than 1.
    """
    memory_size = static_int(memory_size, "scale_by_lbfgs", "memory_size")
    if memory_size < 1:
        raise errors.ValueRangeError(
            f"scale_by_lbfgs: a memory of {memory_size} steps.", where=source.here(), fix="memory_size=10"
        )

    def init(params):
        params = tree.map(bnp.asarray, params)
        zeros = lambda: tree.map(bnp.zeros_like, params)
        stacks = lambda: tree.map(lambda p: bnp.zeros((memory_size, *p.shape), p.dtype), params)
        weights = bnp.zeros(memory_size, _scalar_dtype(params))
        return ScaleByLBFGSState(zero_count(), zeros(), zeros(), stacks(), stacks(), weights)

    def update(updates, state, params=None):
        trees = {"grads": updates, "params": required(params, "scale_by_lbfgs")}
        treedef, gs, ps, old_gs, old_ps = aligned(
            trees | {"state.updates": state.updates, "state.params": state.params}
        )
        wide = state.weights_memory.dtype
        product = lambda xs, ys: sum(
            [bnp.sum(x.astype(wide) * y.astype(wide)) for x, y in zip(xs, ys, strict=True)],
            bnp.zeros((), wide),
        )
        begun = state.count > 0
        change = lambda new, old: [bnp.where(begun, x - y, 0) for x, y in zip(new, old, strict=True)]
        steps, changes = change(ps, old_ps), change(gs, old_gs)
        curvature, square = product(steps, changes), product(changes, changes)
        least = bnp.finfo(wide).tiny  # below, reciprocals overflow
        curved = (curvature > least) & (square > least)
        weight = bnp.where(curved, 1 / bnp.where(curved, curvature, 1), 0)

        last = (state.count - 1) % memory_size
        pushed = lambda stack, xs: [s.at[last].set(x) for s, x in zip(tree.leaves(stack), xs, strict=True)]
        all_steps, all_changes = (
            pushed(state.diff_params_memory, steps),
            pushed(state.diff_updates_memory, changes),
        )
        weights = state.weights_memory.at[last].set(weight)

        size: Any = 1.0
        if scale_init_precond:
            first = bnp.minimum(1, 1 / bnp.maximum(bnp.sqrt(product(gs, gs)), least))
            size = bnp.where(curved, curvature / bnp.where(curved, square, 1), bnp.where(begun, 1, first))
        moved = lambda xs, factor, ys: [
            (x + factor.astype(x.dtype) * y).astype(x.dtype) for x, y in zip(xs, ys, strict=True)
        ]
        row = lambda stack, i: [x[i] for x in stack]

        def last_to_first(q, i):
            alpha = weights[i] * product(row(all_steps, i), q)
            return moved(q, -alpha, row(all_changes, i)), alpha

        def first_to_last(r, given):
            i, alpha = given
            beta = weights[i] * product(row(all_changes, i), r)
            return moved(r, alpha - beta, row(all_steps, i)), None

        order = (state.count + bnp.arange(memory_size)) % memory_size  # the oldest first
        q, alphas = lax.scan(last_to_first, gs, order, reverse=True)
        r, _ = lax.scan(first_to_last, [(x * bnp.asarray(size, x.dtype)) for x in q], (order, alphas))
        unflat = lambda leaves: tree.unflatten(treedef, leaves)
        memory = (unflat(all_steps), unflat(all_changes), weights)
        return unflat(r), ScaleByLBFGSState(next_count(state.count), unflat(ps), unflat(gs), *memory)

    return GradientTransformation(init, update)


def scale_by_zoom_linesearch(max_linesearch_steps: int = 20) -> GradientTransformation:
    """Scale updates by a step of the strong Wolfe conditions, from 1 on.

    ``update`` takes three arguments more, which ``chain`` passes on: ``value`` and ``grad``, of the loss at ``params``,
    and ``value_fn``, the loss, a function of parameters alone. ``value_and_grad_from_state`` saves a call of it.

    Args:
      max_linesearch_steps: the largest number of evaluations of the loss; then the best step so far is taken, or none.
    Raises:
      ValueRangeError: the number is less than 1.
    """
    most = static_int(max_linesearch_steps, "scale_by_zoom_linesearch", "max_linesearch_steps")
    if most < 1:
        raise errors.ValueRangeError(
            f"scale_by_zoom_linesearch: {most} steps.", where=source.here(), fix="max_linesearch_steps=20"
        )

    def init(params):
        params = tree.map(bnp.asarray, params)
        dtype = _scalar_dtype(params)
        zeros = tree.map(bnp.zeros_like, params)
        return ScaleByZoomLinesearchState(
            bnp.ones((), dtype), bnp.asarray(bnp.inf, dtype), zeros, zero_count()
        )

    def update(updates, state, params=None, *, value=None, grad=None, value_fn=None, **extra):
        params = required(params, "scale_by_zoom_linesearch")
        if value is None or grad is None or not callable(value_fn):
            raise errors.ArgumentError(
                "scale_by_zoom_linesearch: update was called without the loss.",
                where=source.here(),
                fix="optimizer.update(grad, state, params, value=value, grad=grad, value_fn=loss)",
            )
        flat, unravel = ravel_pytree(params)
        direction, slope = (ravel_pytree(t)[0].astype(flat.dtype) for t in (updates, grad))
        flat_loss = value_and_grad(lambda x: value_fn(unravel(x)).astype(flat.dtype))
        start = bnp.asarray(value).astype(flat.dtype)
        found = line_search(flat_loss, flat, direction, start, slope, most)
        new = tree.map(lambda u: u * found.a.astype(u.dtype), tree.map(bnp.asarray, updates))
        own = state.value.dtype
        found_grad = tree.map(lambda g, old: g.astype(old.dtype), unravel(found.g), state.grad)
        return new, ScaleByZoomLinesearchState(
            found.a.astype(own), found.f.astype(own), found_grad, bnp.asarray(found.evaluations, dtypes.int32)
        )

    return GradientTransformation(init, update)


_DEFAULT_SEARCH = scale_by_zoom_linesearch()


def lbfgs(
    learning_rate: ScalarOrSchedule | None = None,
    memory_size: int = 10,
    scale_init_precond: bool = True,
    linesearch: Any = _DEFAULT_SEARCH,
) -> GradientTransformation:
    """L-BFGS: see ``scale_by_lbfgs`` and ``scale_by_zoom_linesearch``.

    A step calls the loss a few times::

        optimizer = optim.lbfgs()
        value_and_grad = optim.value_and_grad_from_state(loss)


        @bf.jit
        def step(params, state):
            value, grad = value_and_grad(params, state=state)
            updates, state = optimizer.update(
                grad, state, params, value=value, grad=grad, value_fn=loss
            )
            return optim.apply_updates(params, updates), state

    ``scipy.optimize.minimize`` is the same method with a stopping rule, for one vector.

    Args:
      learning_rate: a number or a schedule, which scales the direction; None for 1.
      memory_size, scale_init_precond: see ``scale_by_lbfgs``.
      linesearch: a transformation, such as ``scale_by_zoom_linesearch(30)``; None for none, with a learning rate.
    """
    base = scale(-1) if learning_rate is None else scale_by_learning_rate(learning_rate)
    parts = [scale_by_lbfgs(memory_size, scale_init_precond), base]
    return chain(*parts) if linesearch is None else chain(*parts, linesearch)


def value_and_grad_from_state(value_fn: Callable[..., Any]) -> Callable[..., tuple[Any, PyTree]]:
    """``value_and_grad`` of a loss that reuses what the last line search computed.

    Args:
      value_fn: the loss, a function of parameters and further arguments, which do not change between steps.
    Returns:
      a function ``(params, *args, state=state, **kwargs) -> value, grad`` of the state of an optimizer with a
      ``scale_by_zoom_linesearch``. It calls the loss in the first step only.
    Raises:
      ArgumentError: when called, the state has none.
    """
    both = value_and_grad(value_fn)

    def reused(params: PyTree, *args: Any, state: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        is_search = lambda x: isinstance(x, ScaleByZoomLinesearchState)
        found = [x for x in tree.leaves(state, is_leaf=is_search) if is_search(x)]
        if not found:
            raise errors.ArgumentError(
                "value_and_grad_from_state: the state has no line search.",
                where=source.here(),
                fix="the state of optim.lbfgs(), or value_and_grad(loss)",
            )
        value, grad = found[0].value, found[0].grad

        def computed():
            new, of_params = both(params, *args, **kwargs)
            return bnp.asarray(new).astype(value.dtype), tree.map(
                lambda g, old: g.astype(old.dtype), of_params, grad
            )

        return lax.cond(bnp.isfinite(value), lambda: (value, grad), computed)

    return reused


def _scalar_dtype(params: PyTree) -> Any:
    """float64 if a parameter is, else float32."""
    wide = any(p.dtype == dtypes.float64 for p in tree.leaves(params))
    return dtypes.float64 if wide else dtypes.float32
