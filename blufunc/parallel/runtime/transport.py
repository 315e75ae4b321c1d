"""Exchanges between processes, in terms of what libraries of communication move: contiguous parts, one for each rank.

Parallel, used at stage 8. ``MpiEngine`` and ``NcclEngine`` have the ``Transport``; here the dimensions are brought to
the front before it and back after it. The definitions are those of ``engine.exchanged``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from blufunc import errors
from blufunc.parallel.runtime import engine as engines


class Transport(Protocol):
    """What moves contiguous arrays (of NumPy or CuPy) between the ``size`` ranks of a group."""

    size: int

    def all_reduce(self, x: Any, op: str) -> Any:
        """The arrays of all ranks combined; shaped as ``x``."""

    def gather(self, x: Any) -> Any:
        """The arrays of all ranks, stacked: (size, *x.shape)."""

    def reduce_scatter(self, parts: Any) -> Any:
        """The sum of every rank's ``parts[i]``, on rank i; ``parts`` is (size, ...)."""

    def swap(self, parts: Any) -> Any:
        """Every rank's ``parts[i]``, stacked, on rank i; shaped as ``parts``, (size, ...)."""

    def permute(self, x: Any, perm: Sequence[tuple[int, int]]) -> Any:
        """The array of rank src on rank dst for each (src, dst); zeros where there is none."""


def exchange(transport: Transport, kind: str, x: Any, **options: Any) -> Any:
    """One exchange of ``engine.KINDS`` with its options; ``x`` is contiguous.

    Raises:
      ShapeError: a dimension cannot be divided among the ranks.
      ValueRangeError: no exchange has this name.
    """
    n, tiled = transport.size, options.get("tiled", True)
    join = np.concatenate if tiled else np.stack
    if kind == "all_reduce":
        return transport.all_reduce(x, options.get("op", "sum"))
    if kind == "all_gather":
        return join(list(transport.gather(x)), axis=options["dim"])
    if kind == "reduce_scatter":
        return transport.reduce_scatter(np.stack(engines.divided(x, n, options["dim"], tiled)))
    if kind == "all_to_all":
        parts = np.stack(engines.divided(x, n, options["split_dim"], tiled))
        return join(list(transport.swap(parts)), axis=options["concat_dim"])
    if kind == "permute":
        return transport.permute(x, options["perm"])
    raise errors.ValueRangeError(
        f"no exchange is called {kind!r:.60}.", fix=f"one of {', '.join(engines.KINDS)}"
    )
