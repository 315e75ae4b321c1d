"""``jax.extend.core.primitives``: primitives under the names of JAX.

Under the face ``as_jax``.
"""

from __future__ import annotations

from blufunc.core.primitives.linear_ops import add_any_p
from blufunc.transforms.control_flow.calls import jit_p

__all__ = ["add_jaxvals_p", "call_p", "closed_call_p", "jit_p", "pjit_p", "xla_pmap_p"]

add_jaxvals_p = add_any_p
# One primitive calls a function here; JAX has several.
call_p = closed_call_p = pjit_p = xla_pmap_p = jit_p
