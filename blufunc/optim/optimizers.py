"""Optimisers: the usual compositions, ready to use.

A face, last in ``optim``. A learning rate is a scalar or a schedule: a function of the steps
taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.pytree import tree
from blufunc.optim.adam_variants import fourth_root, scale_by_ademamix, scale_by_adopt
from blufunc.optim.base import GradientTransformation, PyTree, chain, identity
from blufunc.optim.blocks import (
    NEWTON_SCHULZ,
    NEWTON_SCHULZ_PRESETS,
    clip_by_block_rms,
    scale_by_factored_rms,
    scale_by_muon,
    scale_by_param_block_rms,
    scale_by_shape,
    scale_by_trust_ratio,
)
from blufunc.optim.moments import (
    ema,
    scale_by_adadelta,
    scale_by_adamax,
    scale_by_amsgrad,
    scale_by_belief,
    scale_by_lion,
    scale_by_radam,
    scale_by_rms,
    scale_by_rss,
    scale_by_sign,
    scale_by_stddev,
    scale_by_yogi,
)
from blufunc.optim.transforms import (
    adam_update,
    add_decayed_weights,
    scale,
    scale_by_adam,
    scale_by_learning_rate,
    trace,
)
from blufunc.optim.wrappers import masked, partition

if TYPE_CHECKING:
    from collections.abc import Callable

    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.optim.base import ScalarOrSchedule


def sgd(
    learning_rate: ScalarOrSchedule,
    momentum: ArrayLike | None = None,
    nesterov: bool = False,
    accumulator_dtype: DTypeLike | None = None,
) -> GradientTransformation:
    """Gradient descent, with momentum if asked for.

    Args:
      learning_rate: a scalar or a schedule.
      momentum: the decay of the sum of past gradients; None for none.
      nesterov: use Nesterov momentum (see ``trace``).
      accumulator_dtype: the dtype of that sum; the parameters' by default.
    """
    if momentum is None:
        return scale_by_learning_rate(learning_rate)
    return chain(trace(momentum, nesterov, accumulator_dtype), scale_by_learning_rate(learning_rate))


def adam(
    learning_rate: ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Adam (Kingma & Ba, arXiv:1412.6980); for the arguments see ``scale_by_adam``."""
    return adam_update(learning_rate, b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)


def adamw(
    learning_rate: ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    mu_dtype: DTypeLike | None = None,
    weight_decay: ScalarOrSchedule = 1e-4,
    mask: PyTree = None,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Adam with decoupled weight decay (Loshchilov & Hutter, arXiv:1711.05101).

    Args:
      learning_rate: a scalar or a schedule.
      b1, b2, eps, eps_root, mu_dtype, nesterov: see ``scale_by_adam``.
      weight_decay: each step takes ``learning_rate * weight_decay`` of a parameter away; a scalar or a schedule.
      mask: which parameters decay: a pytree of bools that is a prefix of the parameters, or a function that makes one
        of them. All by default.
    Returns:
      a transformation whose ``update`` needs ``params``. Its state is a ``ScaleByAdamState``, the count of which also
      serves the schedule.
    """
    return adam_update(learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov)


def nadam(
    learning_rate: ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = True,
) -> GradientTransformation:
    """Adam that looks one step ahead (Dozat, ICLR workshop 2016)."""
    return adam_update(learning_rate, b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)


def nadamw(
    learning_rate: ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    mu_dtype: DTypeLike | None = None,
    weight_decay: ScalarOrSchedule = 1e-4,
    mask: PyTree = None,
    *,
    nesterov: bool = True,
) -> GradientTransformation:
    """``adamw`` that looks one step ahead."""
    return adam_update(learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov)


def lion(
    learning_rate: ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    mu_dtype: DTypeLike | None = None,
    weight_decay: ScalarOrSchedule = 1e-3,
    mask: PyTree = None,
) -> GradientTransformation:
    """The sign of momentum, and weight decay (arXiv:2302.06675): ``scale_by_lion``."""
    return chain(
        scale_by_lion(b1, b2, mu_dtype),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def adafactor(
    learning_rate: ScalarOrSchedule | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: ArrayLike = 0.8,
    decay_offset: Any = 0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: ArrayLike = 1.0,
    momentum: ArrayLike | None = None,
    dtype_momentum: DTypeLike = "float32",
    weight_decay_rate: ArrayLike | None = None,
    eps: ArrayLike = 1e-30,
    factored: bool = True,
    weight_decay_mask: PyTree = None,
) -> GradientTransformation:
    """Adafactor: mean squares by rows and columns (Shazeer & Stern, arXiv:1804.04235).

    Args:
      learning_rate: a scalar or a schedule; None for 1.
      min_dim_size_to_factor, decay_rate, decay_offset, eps, factored: see ``scale_by_factored_rms``.
      multiply_by_parameter_scale: updates are relative to the root mean square of their parameter.
      clipping_threshold: the largest root mean square of an update, before it is scaled; None for no limit.
      momentum: the decay of a moving average of the updates; None for none. dtype_momentum: its dtype.
      weight_decay_rate: taken away from the parameters in each step, whatever the learning rate; None for none.
      weight_decay_mask: see ``add_decayed_weights``.
    """
    parts = [scale_by_factored_rms(factored, decay_rate, decay_offset, min_dim_size_to_factor, eps)]
    if clipping_threshold is not None:
        parts.append(clip_by_block_rms(clipping_threshold))
    if learning_rate is not None:
        parts.append(scale_by_learning_rate(learning_rate, flip_sign=False))
    if multiply_by_parameter_scale:
        parts.append(scale_by_param_block_rms())
    if momentum is not None:
        parts.append(ema(momentum, False, dtype_momentum))
    if weight_decay_rate is not None:
        parts.append(add_decayed_weights(weight_decay_rate, weight_decay_mask))
    return chain(*parts, scale(-1))


def rmsprop(
    learning_rate: ScalarOrSchedule,
    decay: ArrayLike = 0.9,
    eps: ArrayLike = 1e-8,
    initial_scale: ArrayLike = 0.0,
    eps_in_sqrt: bool = True,
    centered: bool = False,
    momentum: ArrayLike | None = None,
    nesterov: bool = False,
    bias_correction: bool = False,
) -> GradientTransformation:
    """RMSProp, by ``scale_by_rms``; by ``scale_by_stddev`` if ``centered``."""
    rescale = scale_by_stddev if centered else scale_by_rms
    return chain(
        rescale(decay, eps, initial_scale, eps_in_sqrt, bias_correction),
        scale_by_learning_rate(learning_rate),
        identity() if momentum is None else trace(momentum, nesterov),
    )


def lamb(
    learning_rate: ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-6,
    eps_root: ArrayLike = 0.0,
    weight_decay: ScalarOrSchedule = 0.0,
    mask: PyTree = None,
) -> GradientTransformation:
    """Adam whose updates have their parameters' norms (You et al., arXiv:1904.00962)."""
    return chain(
        scale_by_adam(b1, b2, eps, eps_root),
        add_decayed_weights(weight_decay, mask),
        scale_by_trust_ratio(),
        scale_by_learning_rate(learning_rate),
    )


def lars(
    learning_rate: ScalarOrSchedule,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: PyTree = True,
    trust_coefficient: ArrayLike = 0.001,
    eps: ArrayLike = 0.0,
    trust_ratio_mask: PyTree = True,
    momentum: ArrayLike = 0.9,
    nesterov: bool = False,
) -> GradientTransformation:
    """Momentum on updates of their parameters' norms (You et al., arXiv:1708.03888)."""
    return chain(
        add_decayed_weights(weight_decay, weight_decay_mask),
        masked(scale_by_trust_ratio(trust_coefficient=trust_coefficient, eps=eps), trust_ratio_mask),
        scale_by_learning_rate(learning_rate),
        trace(momentum, nesterov),
    )


def adagrad(
    learning_rate: ScalarOrSchedule, initial_accumulator_value: ArrayLike = 0.1, eps: ArrayLike = 1e-7
) -> GradientTransformation:
    """Adagrad: see ``scale_by_rss``."""
    return chain(scale_by_rss(initial_accumulator_value, eps), scale_by_learning_rate(learning_rate))


def adadelta(
    learning_rate: ScalarOrSchedule | None = None,
    rho: ArrayLike = 0.9,
    eps: ArrayLike = 1e-6,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: PyTree = None,
) -> GradientTransformation:
    """Adadelta: see ``scale_by_adadelta``.

    Without a learning rate updates keep their sign, as in optax.
    """
    return chain(
        add_decayed_weights(weight_decay, weight_decay_mask),
        scale_by_adadelta(rho, eps),
        identity() if learning_rate is None else scale_by_learning_rate(learning_rate),
    )


def adamax(
    learning_rate: ScalarOrSchedule, b1: ArrayLike = 0.9, b2: ArrayLike = 0.999, eps: ArrayLike = 1e-8
) -> GradientTransformation:
    """Adam with a decaying maximum: see ``scale_by_adamax``."""
    return chain(scale_by_adamax(b1, b2, eps), scale_by_learning_rate(learning_rate))


def adamaxw(
    learning_rate: ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_decay: ScalarOrSchedule = 1e-4,
    mask: PyTree = None,
) -> GradientTransformation:
    """``adamax`` with decoupled weight decay."""
    return chain(
        scale_by_adamax(b1, b2, eps),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def amsgrad(
    learning_rate: ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    mu_dtype: DTypeLike | None = None,
    bias_correction_mu: bool = True,
    bias_correction_nu: bool = True,
) -> GradientTransformation:
    """Adam with the largest mean square so far: see ``scale_by_amsgrad``."""
    rescale = scale_by_amsgrad(b1, b2, eps, eps_root, mu_dtype, bias_correction_mu, bias_correction_nu)
    return chain(rescale, scale_by_learning_rate(learning_rate))


def radam(
    learning_rate: ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    threshold: ArrayLike = 5.0,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Rectified Adam: see ``scale_by_radam``."""
    return chain(
        scale_by_radam(b1, b2, eps, eps_root, threshold, nesterov=nesterov),
        scale_by_learning_rate(learning_rate),
    )


def adabelief(
    learning_rate: ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-16,
    eps_root: ArrayLike = 1e-16,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """AdaBelief: see ``scale_by_belief``."""
    return chain(
        scale_by_belief(b1, b2, eps, eps_root, nesterov=nesterov), scale_by_learning_rate(learning_rate)
    )


def yogi(
    learning_rate: ScalarOrSchedule, b1: ArrayLike = 0.9, b2: ArrayLike = 0.999, eps: ArrayLike = 1e-3
) -> GradientTransformation:
    """Yogi: see ``scale_by_yogi``."""
    return chain(scale_by_yogi(b1, b2, eps), scale_by_learning_rate(learning_rate))


def adopt(
    learning_rate: ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.9999,
    eps: ArrayLike = 1e-6,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = False,
    use_clipping: bool = True,
    clip_value_fn: Callable[[Any], Any] = fourth_root,
) -> GradientTransformation:
    """ADOPT: see ``scale_by_adopt``."""
    rescale = scale_by_adopt(
        b1, b2, eps, mu_dtype, nesterov=nesterov, use_clipping=use_clipping, clip_value_fn=clip_value_fn
    )
    return chain(rescale, scale_by_learning_rate(learning_rate))


def ademamix(
    learning_rate: ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    b3: ScalarOrSchedule = 0.9999,
    alpha: ScalarOrSchedule = 5.0,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    mu_dtype: DTypeLike | None = None,
    weight_decay: ScalarOrSchedule = 0.0,
    mask: PyTree = None,
) -> GradientTransformation:
    """AdEMAMix with decoupled weight decay: see ``scale_by_ademamix``."""
    return chain(
        scale_by_ademamix(b1, b2, b3, alpha, eps, eps_root, mu_dtype),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def sign_sgd(learning_rate: ScalarOrSchedule) -> GradientTransformation:
    """The sign of the gradient (Bernstein et al., arXiv:1802.04434)."""
    return chain(scale_by_sign(), scale_by_learning_rate(learning_rate))


def signum(
    learning_rate: ScalarOrSchedule, beta: ArrayLike = 0.9, accumulator_dtype: DTypeLike | None = None
) -> GradientTransformation:
    """The sign of the gradients' moving average (Bernstein et al., arXiv:1802.04434)."""
    return chain(ema(beta, False, accumulator_dtype), scale_by_sign(), scale_by_learning_rate(learning_rate))


def muon(
    learning_rate: ScalarOrSchedule,
    ns_coeffs: Any = NEWTON_SCHULZ,
    ns_steps: int = 5,
    beta: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: PyTree = None,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.999,
    adam_eps_root: ArrayLike = 0.0,
    adam_weight_decay: ArrayLike = 0.0,
    adam_learning_rate: Any = None,
    muon_mask: PyTree = None,
    consistent_rms: ArrayLike | None = None,
) -> GradientTransformation:
    """Muon for matrices, ``adamw`` for all else (K. Jordan et al., "Muon", 2024).

    Args:
      learning_rate: a scalar or a schedule.
      ns_coeffs, ns_steps, beta, eps, mu_dtype, nesterov, adaptive: see ``scale_by_muon``; ``ns_coeffs`` may be the name
        ``"standard"`` or ``"dion"``.
      weight_decay, weight_decay_mask: see ``add_decayed_weights``.
      adam_b1, adam_b2, adam_eps_root, adam_weight_decay, adam_learning_rate: for ``adamw``; the rate is the same by
        default.
      muon_mask: which parameters are for Muon: a pytree of bools that is a prefix of the parameters, or a function
        that makes one of them. By default those of two axes; three are a stack of matrices.
      consistent_rms: see ``scale_by_shape``.
    Raises:
      ValueRangeError: there are no coefficients of that name.
    """
    if isinstance(ns_coeffs, str):
        if ns_coeffs not in NEWTON_SCHULZ_PRESETS:
            raise errors.ValueRangeError(
                f"muon: there are no coefficients {ns_coeffs!r:.60}.",
                where=source.here(),
                fix=f"ns_coeffs is a triple, triples, or one of {', '.join(NEWTON_SCHULZ_PRESETS)}",
            )
        ns_coeffs = NEWTON_SCHULZ_PRESETS[ns_coeffs]

    def labels(params):
        flags = muon_mask(params) if callable(muon_mask) else muon_mask
        if flags is None:
            flags = tree.map(lambda p: bnp.asarray(p).ndim == 2, params)
        return tree.map(lambda m: "muon" if m else "adam", flags)

    for_matrices = chain(
        scale_by_muon(ns_coeffs, ns_steps, beta, eps, mu_dtype, nesterov=nesterov, adaptive=adaptive),
        scale_by_shape(consistent_rms),
        add_decayed_weights(weight_decay, weight_decay_mask),
        scale_by_learning_rate(learning_rate),
    )
    rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    for_others = adamw(
        rate, adam_b1, adam_b2, eps, adam_eps_root, mu_dtype, adam_weight_decay, nesterov=nesterov
    )
    return partition({"muon": for_matrices, "adam": for_others}, labels)
