"""The records of ``benchmarks/gpu.py`` as tables in Markdown.

A ratio compares blufunc with the best of the peers that ran on the same device: above 1, blufunc is ahead. Rows of
which blufunc's or every peer's figure is missing have none. Kernels of blufunc and PyTorch are timed by events on the
device, with the cache overwritten before each; JAX's by the wall clock over calls that follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

OURS = "blufunc"
LOSS_TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 1e-2}
CHECK_TOLERANCE = 1e-3  # of a result's largest told element; float32 sums of many terms, in another order

TITLES = {
    "gpu_copy": "Copying memory on the GPU",
    "gpu_ops": "What a call costs on the GPU",
    "gpu_kernels": "Kernels on the GPU",
    "gpu_gpt2": "GPT-2 124M's training step",
    "gpu_small": "A small model's training step",
    "gpu_repro": "Two runs from one key",
    "gpu_multi": "GPT-2 124M over several GPUs",
}


def table(record: dict) -> str:
    """One record as a section."""
    rows = [r for r in record["rows"] if "error" not in r]
    several = max((r.get("gpus", 1) for r in rows), default=1)
    title = TITLES[record["benchmark"]] + f": {several} of one host" * (several > 1)
    lines = [f"### {title}", "", _circumstances(record), ""]
    lines += _BODIES[record["benchmark"]](record, rows)
    lines += ["", *_missing(record)] if _missing(record) else []
    return "\n".join(lines) + "\n"


def _circumstances(record: dict) -> str:
    gpu, versions = record["gpu"], record["versions"]
    text = f"{record['date']}; {gpu['name']}"
    text += f", driver {gpu['driver_version']}" if "driver_version" in gpu else ""
    return f"{text}; {', '.join(f'{name} {v}' for name, v in versions.items())}."


def _missing(record: dict) -> list[str]:
    """Sentences on what failed or was not run."""
    failed = sorted({_who(r) for r in record["rows"] if "error" in r})
    left = sorted({f"{library} {tags.get('precision', '')}".strip() for library, tags in record["left_out"]})
    sentences = [f"Failed: {'; '.join(failed)}."] if failed else []
    return sentences + ([f"Not run, for want of time: {'; '.join(left)}."] if left else [])


def _who(row: dict) -> str:
    return " ".join(str(row[k]) for k in ("library", "precision", "cache", "what") if k in row)


def _grid(head: list[str], body: Iterable[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


def _libraries(rows: list[dict]) -> list[str]:
    """The libraries of some rows, ours first."""
    found = list(dict.fromkeys(r["library"] for r in rows))
    return sorted(found, key=lambda name: name != OURS)


def _by(rows: list[dict], name: str) -> dict[str, dict[str, dict]]:
    """Rows by a field and then by library."""
    found: dict[str, dict[str, dict]] = {}
    for r in rows:
        found.setdefault(r[name], {})[r["library"]] = r
    return found


def ratio(row: dict[str, dict], name: str, more_is_better: bool = False) -> float | None:
    """How far we are ahead of the best peer in a figure."""
    peers = [r[name] for library, r in row.items() if library != OURS and name in r]
    if not peers or name not in row.get(OURS, {}):
        return None
    ours = row[OURS][name]
    return ours / max(peers) if more_is_better else min(peers) / ours


def geometric_mean(ratios: Iterable[float | None]) -> float | None:
    """Of those that there are."""
    found = [r for r in ratios if r is not None]
    return math.exp(sum(map(math.log, found)) / len(found)) if found else None


def _number(x: float | None, digits: int = 2) -> str:
    return "" if x is None else f"{x:,.{digits}f}"


def _times(x: float | None) -> str:
    """A time with three digits that count."""
    return "" if x is None else f"{x:.3g}" if x < 100 else f"{x:,.0f}"


# ------------------------------------------------------------------------------------------------ the parts


def _copies(record: dict, rows: list[dict]) -> list[str]:
    return _grid(["what", "ms", "GB/s"], [[r["what"], _times(r["ms"]), _number(r["GB_s"], 0)] for r in rows])


def _calls(record: dict, rows: list[dict]) -> list[str]:
    names = _libraries(rows)
    body = [
        [what, *(_times(row.get(n, {}).get("us")) for n in names), _number(ratio(row, "us"))]
        for what, row in _by(rows, "what").items()
    ]
    return _grid(["microseconds a call", *names, "best peer / blufunc"], body)


def _kernels(record: dict, rows: list[dict]) -> list[str]:
    names, copy = _libraries(rows), record.get("copy_GB_s")
    body, ratios = [], []
    for what, row in _by(rows, "what").items():
        ratios.append(ratio(row, "ms"))
        ours = row.get(OURS, {})
        share = _number(100 * ours["GB_s"] / copy, 0) if copy and ours else ""
        disagreement = check(row)
        remark = "" if disagreement is None else f" **differs: {disagreement:.0e}**"
        cells = [_times(row.get(n, {}).get("ms")) for n in names]
        body.append(
            [what + remark, *cells, _times(ours.get("wall_ms")), _number(ours.get("GB_s"), 0), share]
            + [_number(ratios[-1])]
        )
    own = ["blufunc by the wall clock", "blufunc's GB/s", "% of a copy"]
    head = ["milliseconds", *names, *own, "best peer / blufunc"]
    mean = geometric_mean(ratios)
    return _grid(head, body) + ([] if mean is None else ["", f"Geometric mean of the ratios: {mean:.3f}."])


def check(row: dict[str, dict]) -> float | None:
    """By how much our results differ from the first peer's, as a part of the largest; None if by rounding alone."""
    peers = [r["check"] for library, r in row.items() if library != OURS and "check" in r]
    ours = row.get(OURS, {}).get("check")
    if ours is None or not peers:
        return None
    if len(ours) != len(peers[0]):
        return math.inf
    found = float(np.abs(np.subtract(ours, peers[0])).max() / (np.abs(peers[0]).max() or 1.0))
    return None if found <= CHECK_TOLERANCE else found  # NaN is no rounding either


def _training(record: dict, rows: list[dict]) -> list[str]:
    cold = [r for r in rows if r.get("cache") != "warm"]
    warm = {(r["precision"], r["library"]): r for r in rows if r.get("cache") == "warm"}
    body = []
    for precision, row in _by(cold, "precision").items():
        reference = next((r["losses"] for name, r in row.items() if name != OURS and "losses" in r), None)
        for name in _libraries(list(row.values())):
            r = row[name]
            ahead = ratio(row, "tokens_s", more_is_better=True) if name == OURS else None
            body.append(
                [
                    precision,
                    name,
                    *(_number(r.get(k), d) for k, d in (("tokens_s", 0), ("step_ms", 2), ("TFLOP_s", 0))),
                    *(_number(r.get(k), 2) for k in ("peak_GB", "held_GB")),
                    _times(r["first_step_s"]),
                    _times(warm.get((precision, name), {}).get("first_step_s")),
                    losses_apart(r.get("losses"), reference, precision),
                    _number(ahead, 3),
                ]
            )
    head = "precision, library, tokens/s, step ms, model TFLOP/s, peak GB, held GB, first step s, from warm cache s"
    return _grid([*head.split(", "), "losses apart", "of the best peer's rate"], body)


def losses_apart(losses: list | None, reference: list | None, precision: str) -> str:
    """The largest difference of two runs' losses, step by step, and a mark where it is beyond the tolerance."""
    if not losses or not reference:
        return ""
    steps = min(len(losses), len(reference))
    apart = float(np.abs(np.subtract(losses[:steps], reference[:steps])).max())
    return f"{apart:.1e}" if apart <= LOSS_TOLERANCE[precision] else f"**{apart:.1e}**"


def _several(record: dict, rows: list[dict]) -> list[str]:
    """Tokens a second over several GPUs, and what part that is of as many times one GPU of the same library."""
    alone = {r["library"]: r for r in rows if r["layout"] == "one"}
    whole = next((r for r in rows if "whole batch" in r["library"]), None)
    body = []
    for r in rows:
        one = alone.get(r["library"].partition(",")[0].partition(" ")[0])
        share = r["tokens_s"] / r["gpus"] / one["tokens_s"] if one and r["gpus"] > 1 else None
        same = r["gpus"] > 1 and whole is not None and r["library"].startswith(OURS)
        apart = losses_apart(r.get("losses"), whole["losses"], r["precision"]) if same and whole else "-"
        peak = f"{r['peak_GB']:.2f}" if "peak_GB" in r else "-"
        body.append(
            [
                r["library"],
                r["layout"],
                str(r["gpus"]),
                f"{r['tokens_s']:,.0f}",
                _number(share, 3),
                peak,
                apart,
            ]
        )
    head = [
        "library",
        "layout",
        "GPUs",
        "tokens/s",
        "efficiency",
        "peak GB a GPU",
        "losses apart from one GPU",
    ]
    return _grid(head, body)


def _repeated(record: dict, rows: list[dict]) -> list[str]:
    runs: dict[tuple[str, str], list[dict]] = {}
    for r in rows:
        runs.setdefault((r["what"], r["precision"]), []).append(r)
    body = []
    for (what, precision), same in runs.items():
        equal = len(same) > 1 and all(r["parameters"] == same[0]["parameters"] for r in same)
        alike = equal and all(r["losses"] == same[0]["losses"] for r in same)
        steps = len(same[0]["losses"])
        body.append([what, precision, str(steps), str(len(same)), "yes" if alike else "**no**"])
    return _grid(["model", "precision", "steps", "runs", "parameters and losses equal to the last bit"], body)


_BODIES: dict[str, Callable[[dict, list[dict]], list[str]]] = {
    "gpu_copy": _copies,
    "gpu_ops": _calls,
    "gpu_kernels": _kernels,
    "gpu_gpt2": _training,
    "gpu_small": _training,
    "gpu_repro": _repeated,
    "gpu_multi": _several,
}
