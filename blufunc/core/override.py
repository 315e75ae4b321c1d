"""Rules of primitives replaced, or added, within a scope.

Core, beside ``primitive``. Inside of a ``with`` block a primitive has other rules, in this thread; at its end the old
ones are back. What is memoised or compiled meanwhile is kept apart: the override is part of ``state.context``, on
which every memo of traces and programs depends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from blufunc import errors
from blufunc.core import source
from blufunc.core.primitive import Primitive
from blufunc.core.trace import state

OVERRIDABLE = ("impl", "jvp", "transpose", "batch", "linearize")

_lock = threading.Lock()
_uses: dict[tuple[Primitive, str], int] = {}  # blocks that are open, in any thread


class override:
    """Context manager: ``prim`` with other rules.

        with bf.override(lax.sin_p, jvp=my_jvp):
            bf.grad(f)(x)

    Each rule has the signature of the method of ``Primitive`` that it stands for, without self. The rule that it
    replaces is the method as it was before the block: ``before = lax.sin_p.jvp``.

    Args:
      prim: a primitive.
      rules: impl, jvp, transpose, batch or linearize. Where ``impl`` is replaced, no ufunc runs in its place.
    Raises:
      ArgumentError: it is no rule, or cannot be called.
    """

    def __init__(self, prim: Primitive, **rules: Callable):
        if not isinstance(prim, Primitive):
            raise errors.ArgumentError(
                f"override takes a primitive, not {prim!r:.60}.",
                where=source.here(),
                fix="their names end in _p: bf.override(lax.sin_p, jvp=...)",
            )
        for name, rule in rules.items():
            if name not in OVERRIDABLE or not callable(rule):
                raise errors.ArgumentError(
                    f"override of {prim.name}: {name}={rule!r:.60} is no rule.",
                    where=source.here(),
                    why=f"rules that can be replaced are {', '.join(OVERRIDABLE)}; types are not a matter of scope.",
                )
        if "jvp" in rules and "linearize" not in rules and prim.linearize is not None:
            raise errors.ArgumentError(
                f"override of {prim.name}: reverse mode does not use its jvp rule but linearize.",
                where=source.here(),
                fix="give linearize too",
            )
        self.prim = prim
        self.rules: dict[str, Callable] = dict(rules)
        if "impl" in rules:
            self.rules["ufunc_for"] = lambda dtype: None

    def __repr__(self) -> str:
        return f"override({self.prim}, {', '.join(self.rules)})"

    def __enter__(self) -> override:
        for name in self.rules:
            with _lock:
                key = self.prim, name
                if key not in _uses:
                    _dispatch(self.prim, name)
                _uses[key] = _uses.get(key, 0) + 1
        self._before = state.context
        state.context = (*self._before, self)
        return self

    def __exit__(self, *exc: Any) -> None:
        state.context = self._before
        for name in self.rules:
            with _lock:
                key = self.prim, name
                _uses[key] -= 1
                if not _uses[key]:
                    del _uses[key], self.prim.__dict__[name]


def _dispatch(prim: Primitive, name: str) -> None:
    """Have a rule look for overrides of this thread, innermost first."""
    original = getattr(prim, name)

    def rule(*args: Any, **params: Any) -> Any:
        for entry in reversed(state.context):
            if isinstance(entry, override) and entry.prim is prim and name in entry.rules:
                return entry.rules[name](*args, **params)
        return original(*args, **params)

    prim.__dict__[name] = rule
