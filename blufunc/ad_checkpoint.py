"""``checkpoint``, its policies and reports of saved residuals, under JAX's names.

Face over ``transforms.checkpointing``.
"""

from blufunc.transforms.checkpointing import policies as checkpoint_policies
from blufunc.transforms.checkpointing.checkpoint import checkpoint as checkpoint
from blufunc.transforms.checkpointing.checkpoint import remat as remat
from blufunc.transforms.checkpointing.policies import checkpoint_name as checkpoint_name
from blufunc.transforms.checkpointing.saved_residuals import print_saved_residuals as print_saved_residuals
from blufunc.transforms.checkpointing.saved_residuals import saved_residuals as saved_residuals

__all__ = [
    "checkpoint",
    "checkpoint_name",
    "checkpoint_policies",
    "print_saved_residuals",
    "remat",
    "saved_residuals",
]
