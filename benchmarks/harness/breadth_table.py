"""Tables of the breadth suite: time, ratio to the best peer, memory of models.

Here a ratio is blufunc's figure over the best peer's: below 1, blufunc is ahead.
"""

from __future__ import annotations

from benchmarks.harness.cells import OURS, best_peer, by, geometric_mean, grid, libraries, number, three


def against(row: dict[str, dict], name: str) -> float | None:
    """Ratio of a figure of blufunc to the lowest of the peers'."""
    best, own = best_peer(row, name), row.get(OURS, {}).get(name)
    return None if best is None or own is None else own / best


def _mark(row: dict[str, dict]) -> str:
    """Remark on libraries whose results are apart."""
    found = [(name, r["apart"]) for name, r in row.items() if r.get("agrees") is False]
    return "".join(f" **{name} differs: {apart:.0e}**" for name, apart in found)


def _times(cases: dict[str, dict[str, dict]], names: list[str], title: str) -> list[str]:
    body, ratios = [], []
    for what, row in cases.items():
        ratios.append(against(row, "ms"))
        cells = [three(row.get(n, {}).get("ms")) for n in names]
        body.append([what + _mark(row), *cells, number(ratios[-1])])
    lines = grid([title, *names, "time / best peer"], body)
    mean = geometric_mean(ratios)
    if mean is None:
        return lines
    known = [r for r in ratios if r is not None]
    return [
        *lines,
        "",
        f"Geometric mean of {len(known)} ratios: {mean:.3f}; above 1: {sum(r > 1.0 for r in known)}.",
    ]


def breadth(record: dict, rows: list[dict]) -> list[str]:
    """Times of models and of operations, in milliseconds, and the models' memory."""
    names, models = libraries(rows), set(record["models"])
    found = by(rows, "what")
    whole = {what: row for what, row in found.items() if what in models}
    single = {what: row for what, row in found.items() if what not in models}
    parts = ["Ratios are blufunc's time or memory over the best peer's: below 1, blufunc is ahead."]
    if record.get("runs", 1) > 1:
        parts += [f"Times are medians of {record['runs']} runs on this device."]
    if whole:
        parts += ["", *_times(whole, names, "models, ms")]
        body = [
            [what, *(number(row.get(n, {}).get("peak_GB")) for n in names), number(against(row, "peak_GB"))]
            for what, row in whole.items()
            if any("peak_GB" in r for r in row.values())
        ]
        head = ["peak of arrays, GB", *names, "memory / best peer"]
        parts += ["", *grid(head, body)] if body else []
        mean = geometric_mean(against(row, "peak_GB") for row in whole.values())
        parts += ["", f"Geometric mean of the memory ratios: {mean:.3f}."] if mean is not None else []
    if single:
        parts += ["", *_times(single, names, "operations, ms")]
    every = geometric_mean(against(row, "ms") for row in found.values())
    return parts + (["", f"Geometric mean of all time ratios: {every:.3f}."] if every is not None else [])
