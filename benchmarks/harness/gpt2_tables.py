"""Tables of training steps: rates, memory, start-up and losses of all libraries.

Losses and gradients are compared with PyTorch's and with float64.
"""

from __future__ import annotations

from benchmarks.harness.cells import (
    best_peer,
    by,
    grid,
    is_ours,
    libraries,
    losses_apart,
    number,
    ratio,
    three,
)
from benchmarks.suites import seed_noise

ASKED = {"bf16": (1.15, 0.60), "tf32": (1.7, 0.60), "fp32": (2.5, 0.60)}
"""GPT-2 124M on an H200: target ratios to the best peer's rate and memory."""

HEAD = {  # by the key of the figure in a row, or the figure derived from several rows
    "precision": "precision", "library": "library",
    "tokens_s": "tokens/s", "rate": "rate / best peer", "asked": "target rate", "step_ms": "step ms",
    "TFLOP_s": "model TFLOP/s", "of_square": "% of 8192^3", "of_products": "% of its matmuls",
    "most_GB": "device GB", "memory": "memory / best peer", "asked_memory": "target memory",
    "peak_GB": "arrays GB",
    "first_step_s": "first step s", "warm_s": "from warm cache s", "last": "last loss", "apart": "losses apart",
}  # fmt: skip


def training(record: dict, rows: list[dict]) -> list[str]:
    """One row per precision and library, blufunc first; empty columns are omitted."""
    asked = ASKED if record["benchmark"] == "gpu_gpt2" and record["gpu"]["name"].endswith("H200") else {}
    steps = [r for r in rows if "first_step_s" in r]
    warm = {(r["precision"], r["library"]): r["first_step_s"] for r in steps if r.get("cache") == "warm"}
    ceilings = rates([r for r in rows if "product" in r])
    body = []
    for precision, row in by([r for r in steps if r.get("cache") != "warm"], "precision").items():
        peers = [r for r in row.values() if not is_ours(r["library"]) and "losses" in r]
        reference = peers[0]["losses"] if peers else None
        for name in libraries(list(row.values())):
            cells = _figures(row[name], *ceilings.get(precision, (None, None)))
            cells["warm_s"] = three(warm.get((precision, name)))
            cells["apart"] = losses_apart(row[name].get("losses"), reference, precision)
            body.append(cells | (_beside_peers(row, name, asked.get(precision)) if is_ours(name) else {}))
    shown = [key for key in HEAD if any(cells.get(key) for cells in body)]
    cells_shown = [[cells.get(key, "") for key in shown] for cells in body]
    return [
        *(grid([HEAD[key] for key in shown], cells_shown) if body else []),
        *_notes(record, rows, steps, ceilings),
    ]


def _figures(r: dict, square: float | None, products: float | None) -> dict[str, str]:
    """Cells of one row; ``square`` and ``products`` are device rates in TFLOP/s."""
    of = lambda rate: number(100 * r["TFLOP_s"] / rate, 0) if rate and "TFLOP_s" in r else ""
    return {
        "precision": r["precision"],
        "library": r["library"],
        **{
            key: number(r.get(key), digits)
            for key, digits in (("tokens_s", 0), ("step_ms", 2), ("TFLOP_s", 0))
        },
        **{key: number(r.get(key), 2) for key in ("most_GB", "peak_GB")},
        "of_square": of(square),
        "of_products": of(products),
        "first_step_s": three(r["first_step_s"]),
        "last": number(r["losses"][-1], 4) if "losses" in r else "",
    }


def _beside_peers(row: dict[str, dict], name: str, asked: tuple[float, float] | None) -> dict[str, str]:
    """Cells that compare a row of blufunc with the best peers, and its targets."""
    rate, least = ratio(row, "tokens_s", True, ours=name), best_peer(row, "most_GB")
    memory = row[name]["most_GB"] / least if least and "most_GB" in row[name] else None
    cells = {"rate": number(rate, 3), "memory": number(memory, 3)}
    if asked:
        cells |= {
            "asked": number(asked[0]) if rate else "",
            "asked_memory": number(asked[1]) if memory else "",
        }
    return cells


def _notes(record: dict, rows: list[dict], steps: list[dict], ceilings: dict[str, tuple]) -> list[str]:
    """Lines below the table, after an empty line."""
    counts = sorted({len(r["losses"]) for r in steps if "losses" in r})
    data = " on real text" if record.get("facts", {}).get("data") == "text" else ""
    notes = [f"Losses are of {' or '.join(map(str, counts))} steps{data}."] if counts else []
    for precision, (square, products) in ceilings.items():
        if square and products:
            best = ", ".join(libraries(rows_of(rows, precision)))
            notes.append(
                f"Matmuls in {precision}, the best of {best}: {square:,.0f} TFLOP/s for 8192^3, "
                f"{products:,.0f} for those of a step."
            )
    return ["", *notes] if notes else []


def rows_of(rows: list[dict], precision: str) -> list[dict]:
    """Rows of matmuls in a precision."""
    return [r for r in rows if "product" in r and r["precision"] == precision]


def rates(rows: list[dict]) -> dict[str, tuple[float | None, float | None]]:
    """TFLOP/s by precision: square matmul, step's matmuls, best of the libraries."""
    found = {}
    for precision in dict.fromkeys(r["precision"] for r in rows):
        best: dict[str, dict] = {}
        for r in rows_of(rows, precision):
            if r["product"] not in best or r["ms"] < best[r["product"]]["ms"]:
                best[r["product"]] = r
        square = next((r["TFLOP_s"] for r in best.values() if not r["count"]), None)
        ms = sum(r["count"] * r["ms"] for r in best.values())
        work = sum(r["count"] * r["ms"] * r["TFLOP_s"] for r in best.values())
        found[precision] = (square, work / ms if ms else None)
    return found


def curves(record: dict, rows: list[dict]) -> list[str]:
    """Losses by step against PyTorch's, and losses and gradients against float64."""
    return [*_curves([r for r in rows if "order" in r]), *_gradients([r for r in rows if "gradients" in r])]


def _curves(rows: list[dict]) -> list[str]:
    body = []
    runs: dict[str, dict[str, dict[int, list[float]]]] = {}
    for r in rows:
        runs.setdefault(r["precision"], {}).setdefault(r["library"], {})[r["order"]] = r["losses"]
    for precision, of in runs.items():
        peers = [name for name in of if not is_ours(name)]
        for name in filter(is_ours, of):
            found = seed_noise.compare(of[name], of[peers[0]]) if peers else None
            if found is None:
                continue
            steps, seeds = len(next(iter(of[name].values()))), len(of[name].keys() & of[peers[0]].keys())
            figures = [found.largest, found.spread_largest, found.mean, found.spread_mean]
            body.append(
                [precision, name, peers[0], str(steps), str(seeds), *(f"{x:.1e}" for x in figures)]
                + ["yes" if found.within_noise else "**no**"]
            )
    head = [
        "precision",
        "library",
        "peer",
        "steps",
        "orders of data",
        "largest difference",
        "between orders",
    ]
    head += ["mean difference", "between orders", "within seed noise"]
    return [*grid(head, body), ""] if body else []


def _gradients(rows: list[dict]) -> list[str]:
    exact = {
        r["library"]: r["gradients"] for r in rows if r["precision"] == "fp32" and not is_ours(r["library"])
    }
    ieee = min(exact.values(), default=None)
    body = [
        [
            r["precision"],
            r["library"],
            f"{r['loss_error']:.1e}",
            f"{r['gradients']:.1e}",
            f"{r['worst']:.1e}",
            r["worst_of"],
        ]
        + [number(r["gradients"] / ieee, 2) if ieee else ""]
        for r in sorted(rows, key=lambda r: (r["precision"], not is_ours(r["library"])))
    ]
    head = [
        "precision",
        "library",
        "error of the loss",
        "of the gradients",
        "of the worst parameter",
        "parameter",
    ]
    return grid([*head, "relative to the peers' fp32"], body) if body else []
