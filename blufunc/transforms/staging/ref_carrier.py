"""Functions under ``jit`` that take Refs, or close over them.

Transforms, stage 2, above ``core/programs/refs.py``. In: a call with cells. Out: a call of a jitted function that takes
their values, and returns those that were written, which are written back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.programs.refs import Missing, Ref, bound, written_back
from blufunc.core.pytree import nodes, tree


class RefCarrier:
    """Calls of one jitted function with the values of cells.

    Args:
      jitted: the function.
      jit: the transform.
    Raises:
      UnsupportedError: the function has static or donated arguments, or shardings.
    """

    def __init__(self, jitted: Any, jit: Callable):
        others = ("static_nums", "static_names", "donate_nums", "donate_names")
        if any(getattr(jitted, name) for name in others):
            raise errors.UnsupportedError(
                f"{jitted.name} uses Refs, and has static or donated arguments.",
                where=source.here(),
                fix="close over static values; the memory of a Ref is not donated",
            )
        if any(getattr(jitted, name, None) is not None for name in ("in_shardings", "out_shardings")):
            raise errors.UnsupportedError(
                f"{jitted.name} uses Refs, and has in_shardings or out_shardings.",
                where=source.here(),
                why="these match arguments and results, and a program with Refs has their values among both.",
                fix="put arguments there by device_put, and constrain results by with_sharding_constraint",
            )
        self.fun = jitted.fun
        self.closed: list[Ref] = []  # that the function closes over, as far as it is known
        self.explicit = jit(self._explicit(), max_traces=jitted.max_traces, memory_budget=jitted.budget)
        self.explicit.counter = jitted.counter
        self.explicit.carries_refs = False  # what it does not carry is carried further out

    def __call__(self, args: tuple, kwargs: dict) -> Any:
        out, own, *written = self._explicitly(self.explicit, args, kwargs)
        for refs, values in zip((own, self.closed), written, strict=True):
            written_back(refs, values)
        return out

    def eval_shape(self, args: tuple, kwargs: dict) -> Any:
        """The results as ``ShapeDtypeStruct``; no cell is written."""
        return self._explicitly(self.explicit.eval_shape, args, kwargs)[0]

    def _explicitly(self, call: Callable, args: tuple, kwargs: dict) -> tuple[Any, list[Ref], Any, Any]:
        """Call the function of values.

        Returns:
          its result, the cells among the arguments, and what was written to these and to those of the closure.
        """
        leaves, structure = tree.flatten((args, kwargs))
        own = list(dict.fromkeys(x for x in leaves if isinstance(x, Ref)))
        places = tuple(own.index(x) if isinstance(x, Ref) else None for x in leaves)
        plain = [x for x in leaves if not isinstance(x, Ref)]
        while True:
            closed = tuple(self.closed)
            cells = _Cells(structure, places, closed)
            try:
                out, *written = call(cells, [r.value for r in own], [r.value for r in closed], plain)
            except Missing as e:
                self.closed += [r for r in e.refs if r not in self.closed]
                continue
            return out, own, *written

    def _explicit(self) -> Callable:
        """The function of values that is jitted."""

        def explicit(cells: _Cells, refs: Any, closed_over: Any, args: Any) -> Any:
            own, rest = [Ref(v) for v in refs], iter(args)
            leaves = [next(rest) if p is None else own[p] for p in cells.places]
            args, kwargs = tree.unflatten(cells.structure, leaves)
            with bound(cells.closed, closed_over, None) as frame:
                out = self.fun(*args, **kwargs)
                new = [None if r.value is v else r.value for r, v in zip(own, refs, strict=True)]
                return out, new, [frame.values[r] if frame.is_written(r) else None for r in cells.closed]

        explicit.__name__ = explicit.__qualname__ = getattr(self.fun, "__name__", "function")
        return explicit


class _Cells(NamedTuple):
    """Where the cells of a call are; a pytree without leaves, on which traces depend."""

    structure: tree.TreeDef
    places: tuple[int | None, ...]
    closed: tuple[Ref, ...]


nodes.register_node(_Cells, lambda x: ((), tuple(x)), lambda aux, children: _Cells(*aux))
