"""Arrays in notebooks: facts, the values abridged, and a drawing of the shards.

Parallel, after stage 8. In: an array. Out: HTML. ``Array`` calls this module, since the core does not know shardings.
"""

from __future__ import annotations

import html
from collections.abc import Iterator

from blufunc.core.arrays.array import ConcreteArray, Donated
from blufunc.core.ir.avals import DEVICE
from blufunc.kernels.tables import size
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.programs.array_shards import sharding_of
from blufunc.parallel.reports.visualize import sharding_svg

_MOST_DEVICES = 64
"""Maximum devices of a drawing: the names of more do not fit its 480 pixels."""


def html_of(x: ConcreteArray) -> str:
    """The array as HTML; without values that this process does not have."""
    rows = "".join(
        f'<tr><th style="text-align:left">{html.escape(name)}</th>'
        f'<td style="text-align:left">{html.escape(value)}</td></tr>'
        for name, value in _facts(x)
    )
    parts = [f"<table>{rows}</table>", f"<pre>{html.escape(str(x))}</pre>"]
    if _is_drawn(x):
        parts.append(sharding_svg(x))
    return f"<div>{''.join(parts)}</div>"


def _facts(x: ConcreteArray) -> Iterator[tuple[str, str]]:
    aval = x.aval
    yield "shape", str(aval.shape)
    yield "dtype", aval.dtype.name + (" (weak)" if aval.weak_type else "")
    yield "size", size(aval.nbytes)
    if x._buffer.__class__ is Donated:
        yield "donated to", str(x._buffer)
        return
    sharding = sharding_of(x)
    if isinstance(sharding, NamedSharding):
        yield "sharding", f"{sharding.spec} on {sharding.mesh}"
        yield "of a device", str(sharding.shard_shape(aval.shape))
    else:
        yield "device", str(x.device)
    if aval.memory != DEVICE:
        yield "memory", aval.memory


def _is_drawn(x: ConcreteArray) -> bool:
    """True if devices hold different parts."""
    if x._buffer.__class__ is Donated:
        return False
    sharding = sharding_of(x)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return False
    return sharding.mesh.size <= _MOST_DEVICES and bool(x.aval.size)
