"""Functions under ``jit`` that take Refs, or close over them.

Transforms, stage 2, above ``core/programs/refs.py``. In: a call with cells. Out: a call of a jitted function that takes
and returns their values, which are written back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.programs.refs import Ref, RefError, bound, written_back
from blufunc.core.pytree import tree


class RefCarrier:
    """Calls of one jitted function with the values of cells.

    Args:
      jitted: the function.
      jit: the transform.
    Raises:
      UnsupportedError: the function has static or donated arguments.
    """

    def __init__(self, jitted: Any, jit: Callable):
        others = ("static_nums", "static_names", "donate_nums", "donate_names")
        if any(getattr(jitted, name) for name in others):
            raise errors.UnsupportedError(
                f"{jitted.name} uses Refs, and has static or donated arguments.",
                where=source.here(),
                fix="close over static values; the memory of a Ref is not donated",
            )
        self.fun, self.jit = jitted.fun, jit
        self.closed: list[Ref] = []
        self.made: dict[tuple, Any] = {}

    def __call__(self, args: tuple, kwargs: dict) -> Any:
        while True:
            try:
                return self._run(args, kwargs)
            except RefError as e:
                if any(e.ref is r for r in (*self.closed, *_refs((args, kwargs)))):
                    raise  # of a trace further out, which carries it
                self.closed.append(e.ref)
                self.made.clear()

    def _run(self, args: tuple, kwargs: dict) -> Any:
        leaves, structure = tree.flatten((args, kwargs))
        refs = _refs((args, kwargs))
        places = tuple(
            next((n for n, r in enumerate(refs) if r is x), None) if isinstance(x, Ref) else None
            for x in leaves
        )
        plain = [x for x in leaves if not isinstance(x, Ref)]
        key = (structure, places)
        if key not in self.made:
            self.made[key] = made = self.jit(self._explicit(structure, places))
            made.carries_refs = False  # what it does not carry is carried further out
        before = [r.value for r in refs], [r.value for r in self.closed]
        out, own, closed = self.made[key](*before, plain)
        written_back(refs, own)
        written_back(self.closed, closed)
        return out

    def _explicit(self, structure: Any, places: tuple[int | None, ...]) -> Callable:
        closed = list(self.closed)

        def explicit(own: Any, closed_values: Any, plain: Any) -> Any:
            refs, rest = [Ref(v) for v in own], iter(plain)
            args, kwargs = tree.unflatten(structure, [next(rest) if p is None else refs[p] for p in places])
            with bound(closed, closed_values):
                out = self.fun(*args, **kwargs)
                return out, [r.value for r in refs], [r.value for r in closed]

        explicit.__name__ = explicit.__qualname__ = getattr(self.fun, "__name__", "function")
        return explicit


def _refs(given: Any) -> list[Ref]:
    """The cells among arguments, each once."""
    found: list[Ref] = []
    for x in tree.leaves(given):
        if isinstance(x, Ref) and not any(x is r for r in found):
            found.append(x)
    return found
