"""Verdicts of checkpoint policies under JAX's names. Under the face ``as_jax``."""

from __future__ import annotations

from blufunc.as_jax.toplevel import checkpoint_policies
from blufunc.transforms.checkpointing.policies import Offload as Offloadable

__all__ = ["Offloadable", "Recompute", "Saveable", "checkpoint_policies"]

Saveable, Recompute = True, False
