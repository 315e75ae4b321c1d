"""Export: programs as bytes that run in a process without the source.

A face over ``jit``, with JAX's names. docs/design/025-export.md has the format and its reasons.
"""

from __future__ import annotations

from blufunc.export.exported import (
    DisabledSafetyCheck,
    Exported,
    default_export_platform,
    deserialize,
    export,
    is_symbolic_dim,
    symbolic_args_specs,
    symbolic_shape,
)
from blufunc.export.structures import register_namedtuple_serialization, register_pytree_node_serialization

__all__ = [
    "DisabledSafetyCheck",
    "Exported",
    "default_export_platform",
    "deserialize",
    "export",
    "is_symbolic_dim",
    "register_namedtuple_serialization",
    "register_pytree_node_serialization",
    "symbolic_args_specs",
    "symbolic_shape",
]
