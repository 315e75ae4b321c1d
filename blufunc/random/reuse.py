"""Detection of key reuse, enabled by ``config.debug_key_reuse``.

Below the samplers of ``random``. In come the keys that samplers and ``split`` use up; out comes a ``KeyReuseError``
for a key that was used up before. A key is told by its identity: an array while it lives, a traced key while its
trace does. Like in JAX's checker ``fold_in`` and ``key_data`` use nothing up, and ``clone`` makes a new key of the
same value. What is traced is checked as it is traced, once, and not again when the program runs.
"""

from __future__ import annotations

import weakref
from typing import Any

from blufunc import errors
from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.ir import source
from blufunc.core.ir.trace import Trace, state

_uses: dict[int, tuple[Any, Trace, str]] = {}
"""By id of a key: the key or a weak reference, the trace and the call of its use."""


def consume(name: str, key: Any) -> None:
    """Note that ``random.<name>`` uses up ``key``.

    Raises:
      KeyReuseError: it was used up before.
    """
    _forget_ended_traces()
    key, trace = _underneath(key), _staging(state.trace)
    known = _uses.get(id(key))
    call = f"random.{name}, {source.here() or 'at an unknown line'}"
    # what branches of a cond or retraces of a function closed over belongs to traces that have ended
    if known is not None and known[1].alive:
        raise errors.KeyReuseError(
            f"random.{name} got a key that was used before.",
            where=source.here(),
            why=f"the first use was {known[2]}. The same key gives the same numbers, which are not independent.",
            fix="split the key first: key, subkey = random.split(key); where equal numbers are meant, clone(key)",
        )
    held: Any = key
    if isinstance(key, ConcreteArray):
        number = id(key)
        forget = _uses.pop  # at the end of the process modules lose their names before keys go
        held = weakref.ref(key, lambda _: forget(number, None))
    _uses[id(key)] = (held, trace, call)


def _underneath(key: Any) -> Any:
    """The underlying key of autodiff and batching tracers; it outlives their traces."""
    while not isinstance(key, ConcreteArray):
        inner = getattr(key, "primal", None)
        inner = getattr(key, "value", None) if inner is None else inner
        if inner is None:
            break
        key = inner
    return key


def _staging(trace: Trace) -> Trace:
    """The trace that records what ``trace`` does: autodiff and batching pass it on."""
    while (parent := getattr(trace, "parent", None)) is not None:
        trace = parent
    return trace


def _forget_ended_traces() -> None:
    for number, (held, trace, _) in list(_uses.items()):
        if not trace.alive or not getattr(getattr(held, "trace", None), "alive", True):
            del _uses[number]
