"""Flags of JAX as blocks, of which blufunc has one value each.

Under the face ``as_jax``. A block with the value that blufunc has changes nothing; any other is an error. Flags that
change no result, here or there, accept all values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.trace import state

__all__ = [
    "allow_f16_reductions",
    "array_garbage_collection_guard",
    "auto_pcast",
    "jax2tf_associative_scan_reductions",
    "legacy_prng_key",
    "make_user_context",
    "no_execution",
    "no_tracing",
    "remove_size_one_mesh_axis_from_type",
    "softmax_custom_jvp",
    "thread_guard",
    "transfer_guard",
    "transfer_guard_device_to_device",
    "transfer_guard_device_to_host",
    "transfer_guard_host_to_device",
]


def _flag(name: str, *accepted: Any, why: str) -> Callable[[Any], Any]:
    @contextlib.contextmanager
    def block(new_val: Any = accepted[0]) -> Iterator[None]:
        if new_val not in accepted:
            shown = " or ".join(map(repr, accepted))
            raise errors.UnsupportedError(
                f"jax.{name}({new_val!r:.60}) is not in blufunc.",
                where=source.here(),
                why=why,
                fix=f"use {shown}",
            )
        yield

    block.__name__ = block.__qualname__ = name
    block.__doc__ = f"No effect: {why}.\n\nRaises:\n  UnsupportedError: another value, in the block."
    return block


_GUARD = (
    "arrays move to the host when NumPy or Python asks for them, and to a device when a program uses them"
)

allow_f16_reductions = _flag("allow_f16_reductions", True, why="half precisions are summed in float32")
array_garbage_collection_guard = _flag(
    "array_garbage_collection_guard", "allow", None, why="arrays in cycles are freed by Python's collector"
)
auto_pcast = _flag("auto_pcast", True, why="the types of values in a shard_map are inferred")
jax2tf_associative_scan_reductions = _flag(
    "jax2tf_associative_scan_reductions", True, False, why="it concerns the conversion to TensorFlow alone"
)
legacy_prng_key = _flag(
    "legacy_prng_key", "allow", why="functions take the words of a key as well as the key"
)
no_execution = _flag("no_execution", False, why="make_jaxpr and lower stage a program without running it")
no_tracing = _flag("no_tracing", False, why="jit(max_traces=n) bounds the traces of a function")
remove_size_one_mesh_axis_from_type = _flag(
    "remove_size_one_mesh_axis_from_type", False, why="types have no shardings"
)
softmax_custom_jvp = _flag("softmax_custom_jvp", True, False, why="softmax has the derivative of its result")
thread_guard = _flag("thread_guard", False, why="each thread issues its own programs in order")
transfer_guard = _flag("transfer_guard", "allow", why=_GUARD)
transfer_guard_device_to_device = _flag("transfer_guard_device_to_device", "allow", why=_GUARD)
transfer_guard_device_to_host = _flag("transfer_guard_device_to_host", "allow", why=_GUARD)
transfer_guard_host_to_device = _flag("transfer_guard_host_to_device", "allow", why=_GUARD)


class UserContext:
    """A value of a thread on which traces depend.

    Calling it gives a block with another value, in which functions under ``jit`` are traced again.

    Attributes:
      value: the value of the innermost open block, or the default.
    """

    def __init__(self, default: Any):
        self.default = default

    @property
    def value(self) -> Any:
        """The value of the innermost open block of this thread, or the default."""
        own = (
            entry for entry in reversed(state.context) if isinstance(entry, tuple) and entry[:1] == (self,)
        )
        return next((entry[1] for entry in own), self.default)

    @contextlib.contextmanager
    def __call__(self, new_value: Any) -> Iterator[None]:
        before = state.context
        state.context = (*before, (self, new_value))
        try:
            yield
        finally:
            state.context = before


def make_user_context(default_value: Any = None) -> UserContext:
    """A value of a thread that traces of functions under ``jit`` depend on."""
    return UserContext(default_value)
