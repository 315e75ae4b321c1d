"""Writes ``docs/benchmarks.md`` from the records in ``benchmarks/results``: ``python -m benchmarks.report``."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.harness import gpu_tables
from benchmarks.harness.cells import geometric_mean
from benchmarks.harness.timing import RESULTS

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Every figure is a median after warm-up, on random data, taken in turns with the peer in one run. A ratio of times below
1, or of rates above 1, means that blufunc is ahead. This page is written by `python -m benchmarks.report` from the
records in `benchmarks/results`; `BLUFUNC_SAVE_RESULTS=1 make bench` takes them again.
"""
GPU_HEAD = """## On a GPU

Each library runs in a process of its own, one after the other on the same device, from the same weights and data.
Ratios compare with the best of the peers: above 1, blufunc is ahead. Kernels of blufunc and PyTorch are timed by events
on the device, with the cache overwritten before each; JAX's by the wall clock over calls that follow each other, and so
is blufunc's second figure. "Losses apart" is the largest difference from the first peer's losses, step by step. "Device
GB" is the most that the driver saw taken of the device, with contexts, workspaces and what allocators hold; "arrays GB"
is what each library's allocator says of its arrays.

`make bench-gpu` takes the records again that one GPU has; these are the commands one by one. All but the last have a
total `--limit` in seconds, `--libraries`, and `--merge`, with which rows of before are kept that were measured on this
device; with `--device cpu` all but the timeline try themselves out at tiny sizes.

| command | what it shows |
| --- | --- |
| `python -m benchmarks.suites.gpt2` | GPT-2 124M's training step in every library and precision: the table below, at
once |
| `python -m benchmarks.suites.gpt2_curves` | 200 steps on real text beside PyTorch's, and gradients beside float64's |
| `python -m benchmarks.suites.gpu_attention` | causal attention beside PyTorch's backends and JAX's |
| `python -m benchmarks.suites.gpu --only copy,ops,kernels,small,repro` | the other tables of one GPU |
| `python -m benchmarks.suites.multi_gpu --gpus 4` | data, FSDP and tensor parallel, in one process and in one for each
GPU |
| `python -m benchmarks.suites.gpu_timeline --gpus 4` | what the first GPU does in one step, as a trace and as figures |
| `python -m benchmarks.suites.gpu_products` | products in float32 by every algorithm, with errors |
"""


def section(record: dict) -> str:
    """One record of the CPU's benchmarks as a section with a table."""
    if record["benchmark"] == "float32_errors":
        return errors(record)
    versions = ", ".join(f"{name} {v}" for name, v in record["versions"].items())
    lines = [
        f"## {record['benchmark']}",
        "",
        f"{record['date']}; {record['device']}; BLAS threads: {record['blas_threads']}; {versions}.",
        "",
        *(_kernels(record["rows"]) if record["benchmark"] == "cpu_kernels" else _times(record["rows"])),
    ]
    return "\n".join(lines) + "\n"


def _times(rows: list[dict]) -> list[str]:
    peer = next(k for k in rows[0] if k not in ("what", "unit", "blufunc", "ratio"))
    lines = [f"| what | blufunc | {peer} | ratio |", "|---|---|---|---|"]
    for r in rows:
        digits = 0 if r["blufunc"] > 1000 else 3 if r["unit"] == "s" else 1
        ours, theirs = (f"{r[k]:,.{digits}f} {r['unit']}" for k in ("blufunc", peer))
        lines.append(f"| {r['what']} | {ours} | {theirs} | {r['ratio']:.2f} |")
    return lines


def _kernels(rows: list[dict]) -> list[str]:
    """Times with what they come to in bytes moved, beside a plain copy on the same cores."""
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
    """The errors of float32 products in parts, by operands and numbers of terms."""
    methods = list(record["rows"][0]["errors"])
    lines = [
        "## float32_errors",
        "",
        f"{record['date']}; a model of tensor cores in NumPy (`benchmarks/suites/float32_errors.py`). Largest error",
        "of an element over the sum of absolute values of its terms; after it the root of the mean of squared errors",
        "over that of squared results.",
        "",
        f"| operands | terms | {' | '.join(methods)} |",
        "|---" * (len(methods) + 2) + "|",
    ]
    for r in record["rows"]:
        figures = [f"{e['worst']:.1e}, {e['rms']:.1e}" for e in r["errors"].values()]
        lines.append(f"| {r['operands']} | {r['terms']:,} | {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def page(records: list[dict]) -> str:
    """The whole page, the CPU's records first."""
    host = [r for r in records if "gpu" not in r]
    order = list(gpu_tables.TITLES)
    gpu = sorted((r for r in records if "gpu" in r), key=lambda r: order.index(r["benchmark"]))
    parts = [HEAD, *map(section, host)] + ([GPU_HEAD] if gpu else []) + [gpu_tables.table(r) for r in gpu]
    return "\n".join(parts)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page([json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]))


if __name__ == "__main__":
    main()
