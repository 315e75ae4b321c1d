"""``jax.core.Trace``: the base of traces that libraries define.

Under the face ``as_jax``. A trace of JAX has ``process_primitive``; operations of blufunc arrive there, and
``Primitive.bind_with_trace`` sends them on to the trace outside.
"""

from __future__ import annotations

from typing import Any

from blufunc.core.ir import trace

__all__ = ["Trace"]


class _OfTraces(type):
    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, trace.Trace) if cls is Trace else super().__instancecheck__(x)


class Trace(trace.Trace, metaclass=_OfTraces):
    """One run of a library's transform, which handles each operation."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__()

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of its class, for messages."""
        return type(self).__name__

    def process(self, prim, args, params):
        return self.process_primitive(prim, args, params)

    def process_primitive(self, primitive: Any, tracers: Any, params: dict[str, Any]) -> Any:
        """Apply an operation to values, tracers of this trace among them."""
        raise NotImplementedError(f"{self.name} does not define process_primitive")
