"""Write ``docs/benchmarks.md``: ``python -m benchmarks.report``.

In: the JSON records in ``benchmarks/results``, and the page as it was. Out: the page, with a section per record. The
part of the page that follows ``BY_HAND`` is written by hand and is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import gpu_tables
from benchmarks.harness.cells import geometric_mean
from benchmarks.harness.timing import RESULTS

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
BY_HAND = "<!-- By hand from here on: `python -m benchmarks.report` leaves it alone. -->"
HEAD = """# Benchmarks

Every figure is a median after warm-up, on random data, measured alternately with the peer in one run. A ratio of times
below 1, or of rates above 1, means that blufunc is ahead. `python -m benchmarks.report` generates this page from the
records in `benchmarks/results`, except for [design measurements](#design-measurements), which are written by hand.
`BLUFUNC_SAVE_RESULTS=1 make bench` repeats the CPU measurements.

The [summary](#summary) has the figures that matter most.
"""
GPU_HEAD = """## On a GPU

Each library runs in its own process, one after the other on the same device, from the same weights and data. Ratios
compare with the best peer: above 1, blufunc is ahead. Kernels of blufunc and PyTorch are timed by events on the device,
with L2 overwritten ahead of each launch; JAX's by the wall clock over back-to-back calls, and so is blufunc's second
figure. "Losses apart" is the largest difference from the first peer's losses, step by step. "Device GB" is the peak
device memory that the driver reports, including contexts, workspaces and allocator caches; "arrays GB" is what each
library's allocator reports for its arrays.

`make bench-gpu` repeats the measurements of one GPU; these are the individual commands. All but the last accept a total
`--limit` in seconds, `--libraries`, and `--merge`, which keeps earlier rows measured on this device. With
`--device cpu`, all but the timeline run at tiny sizes.

| command | measures |
| --- | --- |
| `python -m benchmarks.suites.gpt2` | GPT-2 124M's training step in every library and precision: the table below |
| `python -m benchmarks.suites.gpt2_curves` | 200 steps on real text against PyTorch, and gradients against float64 |
| `python -m benchmarks.suites.gpu_attention` | causal attention against PyTorch's backends and JAX's |
| `python -m benchmarks.suites.gpu --only copy,ops,kernels,small,repro` | the other tables of one GPU |
| `python -m benchmarks.suites.multi_gpu --gpus 4` | every layout, on one GPU and several; `--layouts` for some |
| `python -m benchmarks.suites.gpu_timeline --gpus 4` | one step of the first GPU, as a trace and as figures |
| `python -m benchmarks.suites.linalg` | small linear algebra and pooling against JAX and PyTorch |
| `python -m benchmarks.suites.breadth` | 192 models and operations against JAX and PyTorch |
| `python -m benchmarks.suites.gpu_products` | float32 matmuls by every algorithm, with errors |
| `python -m benchmarks.suites.offload --platform cuda` | optimizer state and residuals on the host, and the link |
| `python -m benchmarks.suites.checkpoints --platform cuda` | stalls of saves, memory of the host, rate of writing |
| `python -m benchmarks.suites.turns --before ../earlier` | an earlier checkout against this one, by turns |
"""


def section(record: dict) -> str:
    """Render a record of the CPU benchmarks as a section with a table."""
    if record["benchmark"] == "float32_errors":
        return errors(record)
    versions = ", ".join(f"{name} {v}" for name, v in record["versions"].items())
    lines = [
        f"## {record['benchmark']}{' on a GPU' if record.get('platform') == 'cuda' else ''}",
        "",
        f"{record['date']}; {record['device']}; BLAS threads: {record['blas_threads']}; {versions}.",
        "",
        *_table(record)(record["rows"]),
    ]
    return "\n".join(lines) + "\n"


def _table(record: dict) -> Callable[[list[dict]], list[str]]:
    if "part" in record["rows"][0]:
        return _figures
    return _kernels if record["benchmark"] == "cpu_kernels" else _times


def _figures(rows: list[dict]) -> list[str]:
    """Render rows that have figures of their own."""
    lines = ["| part | what | figures |", "|---|---|---|"]
    for r in rows:
        found = ", ".join(
            f"{name} {value:.4g}"
            for name, value in r.items()
            if name not in ("part", "what") and value is not None
        )
        lines.append(f"| {r['part']} | {r['what']} | {found} |")
    return lines


def _times(rows: list[dict]) -> list[str]:
    peer = next(k for k in rows[0] if k not in ("what", "unit", "blufunc", "ratio"))
    lines = [f"| what | blufunc | {peer} | ratio |", "|---|---|---|---|"]
    for r in rows:
        digits = 0 if r["blufunc"] > 1000 else 3 if r["unit"] in ("s", "ms") else 1
        ours, theirs = (f"{r[k]:,.{digits}f} {r['unit']}" for k in ("blufunc", peer))
        lines.append(f"| {r['what']} | {ours} | {theirs} | {r['ratio']:.2f} |")
    return lines


def _kernels(rows: list[dict]) -> list[str]:
    """Render times with the bandwidth they reach, and its share of a plain copy's."""
    copy = rows[0]["copy_GB_s"]
    lines = [
        f"A copy on the same cores moves {copy:.0f} GB/s, bytes read and bytes written.",
        "",
        "| what | blufunc | jax | ratio | blufunc's GB/s | % of a copy |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        rate = r["bytes"] / r["blufunc"] / 1e6
        lines.append(
            f"| {r['what']} | {r['blufunc']:.2f} ms | {r['jax']:.2f} ms | {r['ratio']:.2f} "
            f"| {rate:.1f} | {100 * rate / copy:.0f} |"
        )
    mean = geometric_mean(r["ratio"] for r in rows)
    return [*lines, "", f"Geometric mean of the ratios: {mean:.2f}."]


def errors(record: dict) -> str:
    """Render the errors of split float32 matmuls, by operands and contraction length."""
    methods = list(record["rows"][0]["errors"])
    lines = [
        "## float32_errors",
        "",
        f"{record['date']}; a NumPy model of tensor cores (`benchmarks/suites/float32_errors.py`). Each cell has the",
        "largest error of an element over the sum of the absolute values of its terms, then the root mean square error",
        "over the root mean square of the results.",
        "",
        f"| operands | terms | {' | '.join(methods)} |",
        "|---" * (len(methods) + 2) + "|",
    ]
    for r in record["rows"]:
        figures = [f"{e['worst']:.1e}, {e['rms']:.1e}" for e in r["errors"].values()]
        lines.append(f"| {r['operands']} | {r['terms']:,} | {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def page(records: list[dict]) -> str:
    """Render the generated part of the page, CPU records first."""
    host = [r for r in records if "gpu" not in r]
    order = list(gpu_tables.TITLES)
    gpu = sorted((r for r in records if "gpu" in r), key=lambda r: order.index(r["benchmark"]))
    parts = [HEAD, *map(section, host)] + ([GPU_HEAD] if gpu else []) + [gpu_tables.table(r) for r in gpu]
    return "\n".join(parts)


def main() -> None:
    """Write the page, and keep its part written by hand."""
    _, marker, by_hand = PAGE.read_text().partition(BY_HAND)
    generated = page([json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))])
    PAGE.write_text(f"{generated}\n{marker}{by_hand}" if marker else generated)


if __name__ == "__main__":
    main()
