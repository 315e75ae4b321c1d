"""Links between devices, and the time of collectives on them.

Parallel, used by ``reports/plan.py`` for programs that are not run, and by ``simulated_network.py``. In: figures from
the user. Out: seconds. Bandwidths of links are *bus bandwidths* as NCCL defines them (nccl-tests, doc/PERFORMANCE.md):
bytes per second through each device's link, for any operation and number of ranks. An operation on S bytes by n ranks
takes at least

| operation | S is | bytes over each link | steps of a ring |
|---|---|---|---|
| all_reduce | the array | 2 (n - 1)/n S | 2 (n - 1) |
| all_gather | the result | (n - 1)/n S | n - 1 |
| reduce_scatter | the operand | (n - 1)/n S | n - 1 |
| all_to_all | the operand | (n - 1)/n S | n - 1 |
| permute | the operand | S | 1 |

bytes / bandwidth + steps x latency: the alpha-beta model of Thakur, Rabenseifner and Gropp ("Optimization of Collective
Communication Operations in MPICH", 2005), with rings throughout. Engines use trees for small arrays and many ranks,
which take fewer steps, so the time is an upper bound there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blufunc import errors
from blufunc.core.ir import source

_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""Steps per execution, in rounds of a ring."""


@dataclass(frozen=True, init=False)  # messages would report a generated __init__ as the user's code
class LinkSpec:
    """The links of devices along a mesh axis.

    Attributes:
      bandwidth: bytes per second and direction for each device: the bus bandwidth that nccl-tests reports.
      latency: seconds per hop between neighbouring devices; default 0.
    Raises:
      ValueRangeError: the bandwidth is not positive, or the latency negative.
    """

    bandwidth: float
    latency: float

    def __init__(self, bandwidth: float, latency: float = 0.0):
        check_positive("LinkSpec", bandwidth=bandwidth)
        if not latency >= 0:
            raise errors.ValueRangeError(
                f"LinkSpec: latency is {latency!r:.60}.", where=source.here(), fix="seconds, as 5e-6"
            )
        set_fields(self, bandwidth=bandwidth, latency=latency)


def wire_bytes(operation: str, nbytes: int, ranks: int) -> float:
    """Bytes that each rank sends in a collective of ``nbytes``, by the table above."""
    return nbytes * (_ROUNDS[operation] * (ranks - 1) / ranks if operation in _ROUNDS else 1)


def exchange_seconds(operation: str, nbytes: int, sizes: Sequence[int], links: Sequence[LinkSpec]) -> float:
    """Lower bound in seconds of a collective along axes with these links.

    Over several axes it is one ring of all ranks, as fast as the slowest link.
    """
    ranks = math.prod(sizes)
    if ranks == 1:
        return 0.0
    used = [link for link, size in zip(links, sizes, strict=True) if size > 1]
    steps = _ROUNDS[operation] * (ranks - 1) if operation in _ROUNDS else 1
    bandwidth, latency = min(k.bandwidth for k in used), max(k.latency for k in used)
    return wire_bytes(operation, nbytes, ranks) / bandwidth + steps * latency


def links_by_axis(links: Any, axis_names: Sequence[str]) -> dict[str, LinkSpec]:
    """The link of each axis, from one for all or a mapping.

    Raises:
      ArgumentError: it is something else.
      ShardingError: an axis has no link, or a link no axis.
    """
    if isinstance(links, LinkSpec):
        return dict.fromkeys(axis_names, links)
    if not isinstance(links, Mapping) or not all(isinstance(k, LinkSpec) for k in links.values()):
        raise errors.ArgumentError(
            f"plan: links holds LinkSpecs by the names of axes, not {links!r:.60}.",
            where=source.here(),
            fix="links={'data': bf.LinkSpec(50e9, 5e-6), 'model': bf.LinkSpec(450e9, 1e-6)}",
        )
    if set(links) != set(axis_names):
        raise errors.ShardingError(
            f"plan: links are of the axes {sorted(links)}, and the mesh has {sorted(axis_names)}.",
            where=source.here(),
            fix="one LinkSpec for each axis of the mesh, or one for all",
        )
    return dict(links)


def set_fields(spec: Any, **values: Any) -> None:
    """Set attributes of a frozen object in its ``__init__``."""
    for name, value in values.items():
        object.__setattr__(spec, name, value)


def check_positive(what: str, **values: float) -> None:
    """Raise ValueRangeError for a figure that is not positive."""
    for name, value in values.items():
        if not value > 0:
            raise errors.ValueRangeError(
                f"{what}: {name} is {value!r:.60}.", where=source.here(), fix="a positive number"
            )
