"""Cells of the Markdown tables: grids, numbers, ratios to the best peer.

A row belongs to blufunc if its library is "blufunc", optionally followed by a variant; all others are peers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

OURS = "blufunc"
LOSS_TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 1e-2}


def is_ours(library: str) -> bool:
    """True for blufunc, in any variant or form."""
    return library.replace(",", " ").split()[0] == OURS


def grid(head: list[str], body: Iterable[list[str]]) -> list[str]:
    """Lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


def number(x: float | None, digits: int = 2) -> str:
    """A number with this many decimals; empty for None."""
    return "" if x is None else f"{x:,.{digits}f}"


def three(x: float | None) -> str:
    """A time with three significant digits; empty for None."""
    return "" if x is None else f"{x:.3g}" if x < 100 else f"{x:,.0f}"


def libraries(rows: list[dict]) -> list[str]:
    """Libraries of some rows, blufunc first."""
    found = list(dict.fromkeys(r["library"] for r in rows))
    return sorted(found, key=lambda name: not is_ours(name))


def by(rows: list[dict], name: str) -> dict[str, dict[str, dict]]:
    """Rows by a field and then by library."""
    found: dict[str, dict[str, dict]] = {}
    for r in rows:
        found.setdefault(r[name], {})[r["library"]] = r
    return found


def best_peer(row: dict[str, dict], name: str, most: bool = False) -> float | None:
    """Lowest (or highest) figure of the peers, by library."""
    peers = [r[name] for library, r in row.items() if not is_ours(library) and r.get(name) is not None]
    return (max if most else min)(peers) if peers else None


def ratio(row: dict[str, dict], name: str, more_is_better: bool = False, ours: str = OURS) -> float | None:
    """Ratio of a figure of blufunc, or of a variant, to the best peer."""
    best, own = best_peer(row, name, more_is_better), row.get(ours, {}).get(name)
    if best is None or own is None:
        return None
    return own / best if more_is_better else best / own


def geometric_mean(ratios: Iterable[float | None]) -> float | None:
    """Geometric mean of the given values; None if there are none."""
    found = [r for r in ratios if r is not None]
    return math.exp(sum(map(math.log, found)) / len(found)) if found else None


def losses_apart(losses: list | None, reference: list | None, precision: str) -> str:
    """Largest difference of two runs' losses, marked if beyond the tolerance."""
    if not losses or not reference:
        return ""
    steps = min(len(losses), len(reference))
    apart = float(np.abs(np.subtract(losses[:steps], reference[:steps])).max())
    return f"{apart:.1e}" if apart <= LOSS_TOLERANCE[precision] else f"**{apart:.1e}**"
