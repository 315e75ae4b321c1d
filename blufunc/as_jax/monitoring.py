"""``jax.monitoring``: events that libraries record, and their listeners.

Under the face ``as_jax``. blufunc itself records none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = [
    "clear_event_listeners",
    "record_event",
    "record_event_duration_secs",
    "record_event_time_span",
    "record_scalar",
    "register_event_duration_secs_listener",
    "register_event_listener",
    "register_event_time_span_listener",
    "register_scalar_listener",
    "unregister_event_duration_listener",
    "unregister_event_listener",
    "unregister_event_time_span_listener",
    "unregister_scalar_listener",
]

_listeners: dict[str, list[Callable]] = {
    kind: [] for kind in ("event", "event_duration_secs", "event_time_span", "scalar")
}


def _record(kind: str) -> Callable[..., None]:
    def record(event: str, *values: Any, **options: Any) -> None:
        for listener in _listeners[kind]:
            listener(event, *values, **options)

    return record


def _unregister(kind: str) -> Callable[[Callable], None]:
    return lambda listener: _listeners[kind].remove(listener)


record_event = _record("event")
record_event_duration_secs = _record("event_duration_secs")
record_event_time_span = _record("event_time_span")
record_scalar = _record("scalar")
register_event_listener = _listeners["event"].append
register_event_duration_secs_listener = _listeners["event_duration_secs"].append
register_event_time_span_listener = _listeners["event_time_span"].append
register_scalar_listener = _listeners["scalar"].append
unregister_event_listener = _unregister("event")
unregister_event_duration_listener = _unregister("event_duration_secs")
unregister_event_time_span_listener = _unregister("event_time_span")
unregister_scalar_listener = _unregister("scalar")


def clear_event_listeners() -> None:
    """Remove all listeners."""
    for listeners in _listeners.values():
        listeners.clear()
