"""Render the records of ``benchmarks/suites/gpu.py`` as Markdown tables.

A ratio compares blufunc with the best peer on the same device: above 1, blufunc is ahead. Rows without a figure of
blufunc or of any peer have no ratio. Kernels of blufunc and PyTorch are timed by events on the device, with L2
overwritten ahead of each launch; JAX's by the wall clock over back-to-back calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from benchmarks.harness import breadth_table, gpt2_tables, timeline
from benchmarks.harness.cells import (
    OURS,
    by,
    geometric_mean,
    grid,
    is_ours,
    libraries,
    losses_apart,
    number,
    ratio,
    three,
)

CHECK_TOLERANCE = 1e-3  # relative to the largest sampled element; long float32 sums in another order

TITLES = {
    "gpu_copy": "Copying memory on the GPU",
    "gpu_ops": "Cost of a call on the GPU",
    "gpu_kernels": "Kernels on the GPU",
    "gpu_attention": "Causal attention on the GPU",
    "gpu_gpt2": "GPT-2 124M's training step",
    "gpu_gpt2_curves": "GPT-2's losses and gradients against PyTorch",
    "gpu_small": "A small model's training step",
    "gpu_repro": "Reproducibility of two runs from one key",
    "gpu_multi": "GPT-2 124M on several GPUs",
    "gpu_timeline": "One step of GPT-2 124M on the first GPU",
    "gpu_family": "Model families against JAX",
    "gpu_breadth": "Many models and operations",
    "gpu_turns": "Against the version before, by turns",
}


def table(record: dict) -> str:
    """Render one record as a section."""
    rows = [r for r in record["rows"] if "error" not in r]
    several = max((r.get("gpus", 1) for r in rows), default=1)
    title = TITLES[record["benchmark"]] + f": {several} on one host" * (several > 1)
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
    """Sentences on failed and skipped programs."""
    failed = sorted({_who(r) for r in record["rows"] if "error" in r})
    left = sorted({_who({"library": library} | tags) for library, tags in record["left_out"]})
    sentences = [f"Failed: {'; '.join(failed)}."] if failed else []
    return sentences + ([f"Not run for lack of time: {'; '.join(left)}."] if left else [])


def _who(row: dict) -> str:
    words = [str(row[k]) for k in ("library", "precision", "layout", "cache", "what") if k in row]
    return " ".join([*words, *(["products"] if "products" in row else [])])


# ------------------------------------------------------------------------------------------------ the parts


def _copies(record: dict, rows: list[dict]) -> list[str]:
    return grid(["what", "ms", "GB/s"], [[r["what"], three(r["ms"]), number(r["GB_s"], 0)] for r in rows])


def _calls(record: dict, rows: list[dict]) -> list[str]:
    names = libraries(rows)
    body = [
        [what, *(three(row.get(n, {}).get("us")) for n in names), number(ratio(row, "us"))]
        for what, row in by(rows, "what").items()
    ]
    return grid(["microseconds a call", *names, "best peer / blufunc"], body)


def _kernels(record: dict, rows: list[dict]) -> list[str]:
    names, copy = libraries(rows), record.get("copy_GB_s")
    body, ratios = [], []
    for what, row in by(rows, "what").items():
        ratios.append(ratio(row, "ms"))
        ours = row.get(OURS, {})
        share = number(100 * ours["GB_s"] / copy, 0) if copy and ours else ""
        disagreement = check(row)
        remark = "" if disagreement is None else f" **differs: {disagreement:.0e}**"
        cells = [three(row.get(n, {}).get("ms")) for n in names]
        body.append(
            [what + remark, *cells, three(ours.get("wall_ms")), number(ours.get("GB_s"), 0), share]
            + [number(ratios[-1])]
        )
    own = ["blufunc by the wall clock", "blufunc's GB/s", "% of a copy"]
    head = ["milliseconds", *names, *own, "best peer / blufunc"]
    mean = geometric_mean(ratios)
    return grid(head, body) + ([] if mean is None else ["", f"Geometric mean of the ratios: {mean:.3f}."])


def _attention(record: dict, rows: list[dict]) -> list[str]:
    """Times with errors against float64; IEEE peers also serve float32_tc."""
    names, body = libraries(rows), []
    peers = {r["what"]: {} for r in rows}
    for r in rows:
        if r["precision"] == "fp32" and not is_ours(r["library"]):
            peers[r["what"]][r["library"]] = r
    for precision in dict.fromkeys(r["precision"] for r in rows):
        for what, row in by([r for r in rows if r["precision"] == precision], "what").items():
            with_ieee = row if precision != "float32_tc" else peers[what] | row
            which = "gradient_error" if "backward" in what else "out_error"
            cells = [f"{three(r['ms'])} ({r[which]:.0e})" if (r := row.get(n)) else "" for n in names]
            rate = number(row.get(OURS, {}).get("TFLOP_s"), 0)
            body.append([precision, what, *cells, rate, number(ratio(with_ieee, "ms"))])
    head = ["precision", "milliseconds (error)", *names, "blufunc's TFLOP/s", "best peer / blufunc"]
    return grid(head, body)


def check(row: dict[str, dict]) -> float | None:
    """Relative difference from the first peer's results; None if only rounding."""
    peers = [r["check"] for library, r in row.items() if library != OURS and "check" in r]
    ours = row.get(OURS, {}).get("check")
    if ours is None or not peers:
        return None
    if len(ours) != len(peers[0]):
        return math.inf
    found = float(np.abs(np.subtract(ours, peers[0])).max() / (np.abs(peers[0]).max() or 1.0))
    return None if found <= CHECK_TOLERANCE else found  # NaN is not rounding either


def _several(record: dict, rows: list[dict]) -> list[str]:
    """Tokens/s on several GPUs, and efficiency against one GPU of the same library.

    Layouts with a step of their own are compared with one GPU that takes the same step.
    """
    work = lambda r: r.get("work", "gpt2")
    alone = {(work(r), r["library"]): r for r in rows if r["layout"] == "one"}
    wholes = {work(r): r for r in rows if "whole batch" in r["library"]}
    idles = any("bubble" in r for r in rows)
    body = []
    for r in rows:
        one = alone.get((work(r), r["library"].partition(",")[0].partition(" ")[0]))
        whole = wholes.get(work(r), one if work(r) == "context" else None)  # whose batch is the same
        share = r["tokens_s"] / r["gpus"] / one["tokens_s"] if one and r["gpus"] > 1 else None
        same = r["gpus"] > 1 and whole is not None and is_ours(r["library"])
        apart = losses_apart(r.get("losses"), whole["losses"], r["precision"]) if same and whole else "-"
        peak = f"{r['peak_GB']:.2f}" if "peak_GB" in r else "-"
        body.append(
            [
                r["library"],
                r["layout"] if r["layout"] != "one" or work(r) == "gpt2" else f"one, for {work(r)}",
                str(r["gpus"]),
                f"{r['tokens_s']:,.0f}",
                number(share, 3),
                peak,
                apart,
                *([number(r.get("bubble"), 3)] if idles else []),
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
        *(["bubble of the schedule"] if idles else []),
    ]
    return grid(head, body)


def _timelines(record: dict, rows: list[dict]) -> list[str]:
    """Activity of the first device in one step, in milliseconds."""
    body = []
    for r in (r for r in rows if "timeline" in r):
        found = r["timeline"]
        classes = [
            found["classes"].get(kind, {}).get("us", 0.0) for kind in (*timeline.CLASSES, timeline.OTHERS)
        ]
        times = [
            found["step_us"],
            *classes,
            *(found[k] for k in ("only_nccl_us", "nccl_beside_us", "idle_us")),
        ]
        overlapped = found["products"]
        slower = overlapped["us"] / overlapped["alone_us"] if overlapped["times"] else None
        cells = [number(us / 1e3) for us in times]
        body.append([r["library"], r["layout"], str(r["gpus"]), number(r["step_ms"]), *cells, number(slower)])
    head = ["library", "layout", "GPUs", "step", "step recorded", *timeline.CLASSES, timeline.OTHERS]
    return grid([*head, "only NCCL", "NCCL overlapped", "idle", "matmuls with NCCL / alone"], body)


def _repeated(record: dict, rows: list[dict]) -> list[str]:
    runs: dict[tuple[str, str], list[dict]] = {}
    for r in rows:
        runs.setdefault((r["what"], r["precision"]), []).append(r)
    body = []
    for (what, precision), same in runs.items():
        equal = len(same) > 1 and all(r["parameters"] == same[0]["parameters"] for r in same)
        equal_losses = equal and all(r["losses"] == same[0]["losses"] for r in same)
        steps = len(same[0]["losses"])
        body.append([what, precision, str(steps), str(len(same)), "yes" if equal_losses else "**no**"])
    return grid(["model", "precision", "steps", "runs", "parameters and losses equal to the last bit"], body)


def _turns(record: dict, rows: list[dict]) -> list[str]:
    """Times of all runs, and the medians' ratio: below 1, this version is faster."""
    body = []
    for r in rows:
        before, after = r["before"], r["after"]
        times = [", ".join(f"{ms:.4g}" for ms in found) for found in (before, after)]
        change = number(np.median(after) / np.median(before), 3)
        memory = [number(r.get(f"{version}_GB"), 1) for version in ("before", "after")]
        body.append([r["what"], *times, change, *memory])
    return grid(["milliseconds", "before", "after", "after / before", "GB before", "GB after"], body)


def _families(record: dict, rows: list[dict]) -> list[str]:
    """Times of a step, and the best peer's over blufunc's."""
    names = libraries(rows)
    body = [
        [what, *(three(row.get(n, {}).get("ms")) for n in names), number(ratio(row, "ms"))]
        for what, row in by(rows, "what").items()
    ]
    return grid(["milliseconds", *names, "speedup"], body)


_BODIES: dict[str, Callable[[dict, list[dict]], list[str]]] = {
    "gpu_copy": _copies,
    "gpu_ops": _calls,
    "gpu_kernels": _kernels,
    "gpu_attention": _attention,
    "gpu_gpt2": gpt2_tables.training,
    "gpu_small": gpt2_tables.training,
    "gpu_gpt2_curves": gpt2_tables.curves,
    "gpu_repro": _repeated,
    "gpu_multi": _several,
    "gpu_timeline": _timelines,
    "gpu_turns": _turns,
    "gpu_family": _families,
    "gpu_breadth": breadth_table.breadth,
}
