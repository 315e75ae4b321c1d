"""Scoped replacement of primitives' rules.

Core, on top of ``primitive``. Inside a ``with`` block a primitive has other rules in this thread; afterwards
the old ones are restored. Memoized and compiled results are kept separate: the override is part of
``state.context``, a component of every trace and program key.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.trace import set_trace, state
from blufunc.core.primitives.primitive import Primitive

OVERRIDABLE = ("impl", "jvp", "transpose", "batch", "linearize")

_lock = threading.Lock()
_uses: dict[tuple[Primitive, str], int] = {}  # number of open blocks, over all threads
_kept: dict[tuple[Primitive, str], Any] = {}  # the instance's own attribute that a rule replaces


class _Running(threading.local):
    """The replaced rules running in this thread, each with its trace."""

    def __init__(self) -> None:
        self.rules: list[tuple] = []


_running = _Running()


class override:
    """Context manager: ``prim`` with other rules.

        with bf.override(lax.sin_p, jvp=my_jvp):
            bf.grad(f)(x)

    Each rule has the signature of the method of ``Primitive`` that it replaces, without self. To call the
    replaced rule, save it before the block: ``before = lax.sin_p.jvp``. Blocks nest; the innermost applies.
    Programs compiled in a block are reused only by blocks with identical rule functions.

    Args:
      prim: a primitive.
      rules: impl, jvp, transpose, batch or linearize. Where ``impl`` is replaced, no ufunc runs in its place; that of a
        loop or branch returns a list, and its bodies are parameters (jaxprs).
    Raises:
      ArgumentError: unknown rule, or not callable.
    """

    def __init__(self, prim: Primitive, **rules: Callable):
        if not isinstance(prim, Primitive):
            raise errors.ArgumentError(
                f"override takes a primitive, not {prim!r:.60}.",
                where=source.here(),
                fix="their names end in _p: bf.override(lax.sin_p, jvp=...)",
            )
        if not rules:
            raise errors.ArgumentError(
                f"override of {prim.name} without rules.",
                where=source.here(),
                fix=f"give one or more of {', '.join(OVERRIDABLE)}",
            )
        for name, rule in rules.items():
            if name not in OVERRIDABLE or not callable(rule):
                raise errors.ArgumentError(
                    f"override of {prim.name}: {name}={rule!r:.60} is not a rule.",
                    where=source.here(),
                    why=f"rules that can be replaced are {', '.join(OVERRIDABLE)}; types are not a matter of scope.",
                )
        if "jvp" in rules and "linearize" not in rules and _has_linearize(prim):
            raise errors.ArgumentError(
                f"override of {prim.name}: reverse mode does not use its jvp rule but linearize.",
                where=source.here(),
                fix="give linearize too",
            )
        self.prim = prim
        self.given = rules
        self.rules: dict[str, Callable] = dict(rules)
        if "impl" in rules:
            self.rules["ufunc_for"] = _no_ufunc
            if (
                prim.reference is not None
            ):  # a primitive that runs jaxprs: executors ask for it instead of impl
                self.rules["reference"] = functools.partial(_called, rules["impl"])

    def __repr__(self) -> str:
        return f"override({self.prim}, {', '.join(self.rules)})"

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, override)
            and self.prim is other.prim
            and self.given.keys() == other.given.keys()
            and all(rule is other.given[name] for name, rule in self.given.items())
        )

    def __hash__(self) -> int:
        return hash((self.prim, *sorted((name, id(rule)) for name, rule in self.given.items())))

    def __enter__(self) -> override:
        with _lock:
            for name in self.rules:
                key = self.prim, name
                if key not in _uses:
                    _dispatch(self.prim, name)
                _uses[key] = _uses.get(key, 0) + 1
        state.context = (*state.context, self)
        return self

    def __exit__(self, *exc: Any) -> None:
        entries = list(state.context)
        entries.reverse()
        entries.remove(self)  # the innermost: a block may be open more than once
        state.context = tuple(reversed(entries))
        with _lock:
            for name in self.rules:
                key = self.prim, name
                _uses[key] -= 1
                if not _uses[key]:
                    del _uses[key], self.prim.__dict__[name]
                    if key in _kept:
                        self.prim.__dict__[name] = _kept.pop(key)


def is_replaced(prim: Primitive, rule: str) -> bool:
    """True if this scope overrides a rule: compilers must not bypass it."""
    return any(isinstance(c, override) and c.prim is prim and rule in c.rules for c in state.context)


def _has_linearize(prim: Primitive) -> bool:
    """True if reverse mode uses the primitive's ``linearize`` in this thread."""
    if is_replaced(prim, "linearize"):
        return True
    key = prim, "linearize"
    of_instance = _kept.get(key) if key in _uses else vars(prim).get("linearize")
    return of_instance is not None or type(prim).linearize is not None


def _dispatch(prim: Primitive, name: str) -> None:
    """Make a rule look for overrides of this thread, innermost first."""
    original = getattr(prim, name)
    if original is None:  # in other threads and outer blocks, the jvp rule is still split
        original = functools.partial(_split_jvp, prim)
    if name in prim.__dict__:
        _kept[prim, name] = prim.__dict__[name]

    def rule(*args: Any, **params: Any) -> Any:
        for entry in reversed(state.context):
            if not (isinstance(entry, override) and entry.prim is prim and name in entry.rules):
                continue
            # A rule that calls the one it replaces re-enters here under the same trace; a nested use of the
            # operation re-enters under another.
            this = entry, name, state.trace
            if any(all(a is b for a, b in zip(this, one, strict=True)) for one in _running.rules):
                continue
            _running.rules.append(this)
            try:
                return entry.rules[name](*args, **params)
            finally:
                _running.rules.pop()
        return original(*args, **params)

    prim.__dict__[name] = rule


def _split_jvp(prim: Primitive, trace: Any, primals: Any, tangents: Any, **params: Any) -> Any:
    """Linearization of a primitive without ``linearize``: split its jvp rule."""
    with set_trace(trace.split):
        return prim.jvp(primals, tangents, **params)


def _no_ufunc(dtype: Any) -> None:
    """Replacement of ``ufunc_for`` that makes executors call the replaced ``impl``."""


def _called(impl: Callable, compile: Callable, **params: Any) -> Callable[[list], Any]:
    """``reference`` of a primitive whose ``impl`` is replaced."""
    return lambda operands: impl(*operands, **params)
