"""Special functions. Face: part of ``blufunc.lax``, under JAX's names; ``core/ops/special`` defines them.

Strict like the rest: operands of one dtype, of one shape or of rank 0; ``blufunc.scipy.special`` promotes.
"""

from __future__ import annotations

from blufunc.core.ops.special import (
    bessel_i0e,
    bessel_i0e_p,
    bessel_i1e,
    bessel_i1e_p,
    betainc,
    digamma,
    digamma_p,
    hypot_p,
    igamma,
    igamma_grad_a,
    igamma_grad_a_p,
    igamma_p,
    igammac,
    igammac_p,
    lgamma,
    lgamma_p,
    logaddexp_p,
    polygamma,
    polygamma_p,
    random_gamma_grad,
    random_gamma_grad_p,
    regularized_incomplete_beta_p,
    zeta,
    zeta_p,
)

__all__ = [
    "hypot_p", "logaddexp_p",
    "bessel_i0e", "bessel_i0e_p", "bessel_i1e", "bessel_i1e_p", "betainc", "digamma", "digamma_p", "igamma",
    "igamma_grad_a", "igamma_grad_a_p", "igamma_p", "igammac", "igammac_p", "lgamma", "lgamma_p", "polygamma",
    "polygamma_p", "random_gamma_grad", "random_gamma_grad_p", "regularized_incomplete_beta_p", "zeta", "zeta_p",
]  # fmt: skip
