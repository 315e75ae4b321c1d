"""Gradient transformations of whole arrays: norms, factored moments, matrices.

A face, above ``optim.base``. Norms of half-precision arrays are taken in float32. State and formulas are those of
optax, under its names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import static_int
from blufunc.core.pytree import tree
from blufunc.optim.base import (
    GradientTransformation,
    PyTree,
    corrected_mean,
    full_like,
    leafwise,
    next_count,
    real_number,
    required,
    stateless,
    steps_of,
    wide_dtype,
    zero_count,
)

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.trace import Array


class FactoredState(NamedTuple):
    """``count``: the steps taken, int32. ``v_row``, ``v_col``, ``v``: mean squares.

    A parameter has ``v_row`` and ``v_col``, means of its rows and columns, or ``v``; the others are one zero each.
    """

    count: Any
    v_row: PyTree
    v_col: PyTree
    v: PyTree


class MuonState(NamedTuple):
    """``count``: int32; ``mu``: the gradients' mean; ``ns_coeffs``: the polynomials."""

    count: Any
    mu: PyTree
    ns_coeffs: Any


# -- norms -----------------------------------------------------------------------------------------


def _pairwise(name: str, one: Any) -> GradientTransformation:
    """A stateless transformation by ``one(update, parameter)``, in float32 or wider."""

    def update(updates, params):
        def wide(u, p):
            dtype = wide_dtype(u.dtype)
            return (one(u.astype(dtype), p.astype(dtype)).astype(u.dtype),)

        return leafwise(wide, 1, {"grads": updates, "params": required(params, name)})[0]

    return stateless(update)


def _norm(x: Any) -> Any:
    return bnp.sqrt(bnp.sum(bnp.square(x)))


def _rms(x: Any) -> Any:
    return bnp.sqrt(bnp.mean(bnp.square(x)))


def scale_by_trust_ratio(
    min_norm: ArrayLike = 0.0, trust_coefficient: ArrayLike = 1.0, eps: ArrayLike = 0.0
) -> GradientTransformation:
    """Scale each array by its parameter's norm over its own (arXiv:1904.00962).

    Args:
      min_norm: a lower bound of both norms. Where one is 0 the array stays as it is.
      trust_coefficient: factor of the ratio.
      eps: added to the norm of the update.
    """

    def one(u, p):
        p_norm, u_norm = (bnp.maximum(_norm(x), min_norm) for x in (p, u))
        none = (p_norm == 0) | (u_norm == 0)
        return u * bnp.where(none, 1, p_norm * trust_coefficient / (bnp.where(none, 1, u_norm) + eps))

    return _pairwise("scale_by_trust_ratio", one)


def scale_by_param_block_norm(min_scale: ArrayLike = 1e-3) -> GradientTransformation:
    """Multiply each array by the norm of its parameter, at least ``min_scale``."""
    return _pairwise("scale_by_param_block_norm", lambda u, p: u * bnp.maximum(_norm(p), min_scale))


def scale_by_param_block_rms(min_scale: ArrayLike = 1e-3) -> GradientTransformation:
    """Multiply each array by the RMS of its parameter, at least ``min_scale``."""
    return _pairwise("scale_by_param_block_rms", lambda u, p: u * bnp.maximum(_rms(p), min_scale))


def clip_by_block_rms(threshold: ArrayLike) -> GradientTransformation:
    """Scale each array so that its root mean square is at most ``threshold``."""

    def one(u):
        u = bnp.asarray(u)
        x = u.astype(wide_dtype(u.dtype))
        return (x / bnp.maximum(_rms(x) / threshold, 1)).astype(u.dtype)

    return stateless(lambda updates, params: tree.map(one, updates))


def adaptive_grad_clip(
    clipping: ArrayLike, eps: ArrayLike = 1e-3, axis: int | Sequence[int] | None = None
) -> GradientTransformation:
    """Clip each unit's gradient norm to a fraction of its weights' (arXiv:2102.06171).

    Args:
      clipping: the fraction.
      eps: a lower bound of the norms of the weights.
      axis: the axes that belong to one unit. By default all but the last, of arrays of 2, 4 or 5 axes, the first of
        arrays of 3, and all of vectors.
    """

    def one(u, p):
        u_norm, most = _unit_norm(u, axis), bnp.maximum(_unit_norm(p, axis), eps) * clipping
        return bnp.where(u_norm < most, u, u * (most / bnp.maximum(u_norm, 1e-6)))

    return _pairwise("adaptive_grad_clip", one)


def _unit_norm(x: Any, axis: Any) -> Any:
    if axis is None and sum(n > 1 for n in x.shape) > 1:
        if x.ndim > 5:
            raise errors.ShapeError(
                f"adaptive_grad_clip does not know which axes of an array of shape {tuple(x.shape)} make a unit.",
                where=source.here(),
                fix="say so: axis=(0, 1)",
            )
        axis = (0,) if x.ndim < 4 else tuple(range(x.ndim - 1))
    return bnp.sqrt(bnp.sum(bnp.square(x), axis=axis, keepdims=True))


def centralize() -> GradientTransformation:
    """Subtract each array's mean over all axes but the first (arXiv:2004.01461).

    Vectors are unchanged.
    """

    def one(u):
        u = bnp.asarray(u)
        return u if u.ndim < 2 else u - bnp.mean(u, axis=tuple(range(1, u.ndim)), keepdims=True)

    return stateless(lambda updates, params: tree.map(one, updates))


# -- factored mean squares -------------------------------------------------------------------------


def scale_by_factored_rms(
    factored: bool = True,
    decay_rate: ArrayLike = 0.8,
    step_offset: Any = 0,
    min_dim_size_to_factor: int = 128,
    epsilon: ArrayLike = 1e-30,
) -> GradientTransformation:
    """Divide by RMS values factored into row and column means (arXiv:1804.04235).

    Args:
      factored: whether to factor at all.
      decay_rate: the means decay by ``1 - (count + 1 - step_offset)**-decay_rate``.
      step_offset: steps taken before this optimiser started.
      min_dim_size_to_factor: arrays are factored along their two largest axes if both are at least so large.
      epsilon: added to the squares.
    """

    def init(params):
        def one(p):
            dtype = wide_dtype(p.dtype)
            none, zeros = bnp.zeros((1,), dtype), lambda shape: bnp.zeros(shape, dtype)
            axes = _largest_axes(p.shape, factored, min_dim_size_to_factor)
            if axes is None:
                return none, none, zeros(p.shape)
            row, col = ([n for d, n in enumerate(p.shape) if d != axis] for axis in axes[::-1])
            return zeros(row), zeros(col), none

        return FactoredState(zero_count(), *leafwise(one, 3, {"params": params}))

    def update(updates, state, params=None):
        required(params, "scale_by_factored_rms")
        steps = (state.count - step_offset + 1).astype(dtypes.float32)
        rest = bnp.power(steps, -decay_rate)  # type: ignore[operator]

        def one(g, v_row, v_col, v):
            x = g.astype(v.dtype)
            kept, new = (1 - rest).astype(v.dtype), rest.astype(v.dtype)
            square = bnp.square(x) + epsilon
            axes = _largest_axes(g.shape, factored, min_dim_size_to_factor)
            if axes is None:
                v = v * kept + square * new
                return (x / bnp.sqrt(v)).astype(g.dtype), v_row, v_col, v
            d1, d0 = axes
            v_row = v_row * kept + bnp.mean(square, axis=d0) * new
            v_col = v_col * kept + bnp.mean(square, axis=d1) * new
            mean = bnp.mean(v_row, axis=d1 - 1 if d1 > d0 else d1, keepdims=True)
            x = x * bnp.expand_dims(bnp.sqrt(mean / v_row), d0) / bnp.expand_dims(bnp.sqrt(v_col), d1)
            return x.astype(g.dtype), v_row, v_col, v

        # the means have shapes of their own: they are matched by structure only
        treedef = tree.structure(updates)
        columns = [tree.flatten_up_to(treedef, t) for t in (updates, state.v_row, state.v_col, state.v)]
        rows = [one(*map(bnp.asarray, leaves)) for leaves in zip(*columns, strict=True)]
        new, *means = (tree.unflatten(treedef, [row[i] for row in rows]) for i in range(4))
        return new, FactoredState(next_count(state.count), *means)

    return GradientTransformation(init, update)


def _largest_axes(shape: Sequence[int], factored: bool, least: int) -> tuple[int, int] | None:
    """The second largest and largest axis of ``shape``; None if not to be factored."""
    if not factored or len(shape) < 2:
        return None
    *_, second, largest = sorted(range(len(shape)), key=lambda d: shape[d])
    return (second, largest) if shape[second] >= least else None


# -- orthogonal updates ----------------------------------------------------------------------------

NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
"""Jordan's coefficients: five steps map singular values (0, 1] to [0.7, 1.2]."""

NEWTON_SCHULZ_PRESETS: dict[str, Any] = {
    "standard": NEWTON_SCHULZ,
    "dion": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
}
"""Coefficients by name.

Those of Dion (Ahn et al., arXiv:2504.05295) differ from step to step.
"""


def orthogonalize_via_newton_schulz(
    x: ArrayLike, ns_coeffs: Any = NEWTON_SCHULZ, ns_steps: int = 5, eps: ArrayLike = 1e-8
) -> Array:
    """A matrix with the singular vectors of ``x`` and singular values near 1.

    Each step takes x to ``a x + b (x xᵀ) x + c (x xᵀ)² x`` (K. Jordan et al., "Muon", 2024,
    https://kellerjordan.github.io/posts/muon).

    Args:
      x: of shape [..., m, n].
      ns_coeffs: ``(a, b, c)``, or one such triple for each step.
      ns_steps: the number of steps, where there is one triple.
      eps: added to the norm that x is first divided by.
    """
    coeffs, ns_steps = bnp.asarray(ns_coeffs), static_int(ns_steps, "Newton-Schulz", "ns_steps")
    eps = real_number(eps, "Newton-Schulz: eps")
    if coeffs.ndim not in (1, 2) or coeffs.shape[-1] != 3:
        raise errors.ShapeError(
            f"ns_coeffs is a triple or a sequence of triples, not an array of shape {tuple(coeffs.shape)}.",
            where=source.here(),
            fix="ns_coeffs=(3.4445, -4.775, 2.0315)",
        )
    x = bnp.asarray(x)
    if x.ndim < 2:
        raise errors.ShapeError(
            f"only matrices can be made orthogonal, not an array of shape {tuple(x.shape)}.",
            where=source.here(),
            fix="give vectors to another optimiser: partition",
        )
    if not dtypes.is_floating(x.dtype):
        raise errors.DtypeError(
            f"only floating matrices can be made orthogonal, not {x.aval}.",
            where=source.here(),
            fix="x.astype('float32')",
        )
    coeffs = coeffs.astype(x.dtype)
    is_tall = x.shape[-2] > x.shape[-1]
    y = bnp.matrix_transpose(x) if is_tall else x  # the products are of the smaller size
    y = y / (bnp.sqrt(bnp.sum(bnp.square(y), axis=(-2, -1), keepdims=True)) + eps)
    for i in range(ns_steps if coeffs.ndim == 1 else coeffs.shape[0]):
        a, b, c = (coeffs[k] if coeffs.ndim == 1 else coeffs[i, k] for k in range(3))
        gram = y @ bnp.matrix_transpose(y)
        y = y * a + (gram * b + gram @ gram * c) @ y
    return bnp.matrix_transpose(y) if is_tall else y


def scale_by_muon(
    ns_coeffs: Any = NEWTON_SCHULZ,
    ns_steps: int = 5,
    beta: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
) -> GradientTransformation:
    """Replace matrices by the nearest orthogonal ones of their momentum.

    Args:
      ns_coeffs, ns_steps, eps: see ``orthogonalize_via_newton_schulz``; of more triples than steps, the last serve.
      beta: decay of the momentum per step.
      mu_dtype: the dtype of its state; see ``scale_by_adam``.
      nesterov: use Nesterov momentum.
      adaptive: multiply by the sum of the products of momentum and result (Bernstein & Newhouse, arXiv:2409.20325).
    Raises:
      ShapeError: a parameter has fewer than two axes. More than two are a stack of matrices.
    """

    def init(params):
        coeffs = bnp.asarray(ns_coeffs, dtype=dtypes.float32)
        return MuonState(
            zero_count(), full_like(params, 0, mu_dtype), coeffs[-ns_steps:] if coeffs.ndim == 2 else coeffs
        )

    def update(updates, state, params=None):
        count = next_count(state.count)
        steps = steps_of(count, state.mu)

        def one(g, m):
            x = g.astype(wide_dtype(g.dtype))
            mu = m.astype(x.dtype) * beta + x * (1 - beta)
            mean = corrected_mean(mu, x, beta, steps, nesterov)
            new = orthogonalize_via_newton_schulz(mean, state.ns_coeffs, ns_steps, eps)
            if adaptive:
                new = new * bnp.sum(mean * new, axis=(-2, -1), keepdims=True)
            return new.astype(g.dtype), mu.astype(m.dtype)

        new, mus = leafwise(one, 2, {"grads": updates, "state.mu": state.mu})
        return new, MuonState(count, mus, state.ns_coeffs)

    return GradientTransformation(init, update)


def scale_by_shape(consistent_rms: ArrayLike | None = None) -> GradientTransformation:
    """Multiply matrices [inputs, outputs] by the root of ``max(1, outputs / inputs)``.

    Args:
      consistent_rms: multiply by this number times the root of ``max(inputs, outputs)`` instead, which gives updates
        the root mean square of Adam's (Liu et al., arXiv:2502.16982, who use 0.2).
    """

    def one(u):
        rows, columns = u.shape[-2:]
        if consistent_rms is None:
            return u * math.sqrt(max(1, columns / rows))
        return u * (consistent_rms * math.sqrt(max(rows, columns)))

    return stateless(lambda updates, params: tree.map(one, updates))
