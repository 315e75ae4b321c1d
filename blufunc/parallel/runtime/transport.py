"""Collectives in terms of contiguous parts, which communication libraries move.

Parallel, used at stage 8. In: a collective of ``MpiEngine`` or ``NcclEngine``, and their ``Transport``. Out: its
result, with dimensions moved to the front and back. ``engine.reference`` defines the collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from blufunc import errors
from blufunc.parallel.runtime import engine as engines


class Transport(Protocol):
    """Moves contiguous arrays (NumPy or CuPy) between the ``size`` ranks of a group."""

    size: int

    def all_reduce(self, x: Any, op: str) -> Any:
        """Reduce the arrays of all ranks; the shape of ``x``."""

    def gather(self, x: Any) -> Any:
        """Stack the arrays of all ranks: (size, *x.shape)."""

    def reduce_scatter(self, parts: Any) -> Any:
        """Sum every rank's ``parts[i]`` on rank i; ``parts`` is (size, ...)."""

    def swap(self, parts: Any) -> Any:
        """Stack every rank's ``parts[i]`` on rank i; the shape of ``parts``, (size, ...)."""

    def permute(self, x: Any, perm: Sequence[tuple[int, int]]) -> Any:
        """Send arrays by (src, dst) pairs of ranks; zeros without a source."""


def run(transport: Transport, kind: str, x: Any, **options: Any) -> Any:
    """Run a collective of ``engine.KINDS`` with its options; ``x`` is contiguous.

    Raises:
      ShapeError: a dimension cannot be split among the ranks.
      ValueRangeError: an unknown collective.
    """
    n, tiled = transport.size, options.get("tiled", True)
    join = np.concatenate if tiled else np.stack
    if kind == "all_reduce":
        return transport.all_reduce(x, options.get("op", "sum"))
    if kind == "all_gather":
        return join(list(transport.gather(x)), axis=options["dim"])
    if kind == "reduce_scatter":
        return transport.reduce_scatter(np.stack(engines.split(x, n, options["dim"], tiled)))
    if kind == "all_to_all":
        parts = np.stack(engines.split(x, n, options["split_dim"], tiled))
        return join(list(transport.swap(parts)), axis=options["concat_dim"])
    if kind == "permute":
        return transport.permute(x, options["perm"])
    raise errors.ValueRangeError(
        f"no collective is called {kind!r:.60}.", fix=f"one of {', '.join(engines.KINDS)}"
    )
