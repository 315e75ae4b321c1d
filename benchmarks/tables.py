"""Writes ``docs/benchmarks.md`` from the records in ``benchmarks/results``: ``python -m benchmarks.tables``."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.peers import RESULTS

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Every figure is a median after warm-up, on random data, taken in turns with the peer in one run. A ratio of times below
1, or of rates above 1, means that blufunc is ahead. This page is written by `python -m benchmarks.tables` from the
records in `benchmarks/results`; `BLUFUNC_SAVE_RESULTS=1 make bench` takes them again.
"""


def table(record: dict) -> str:
    """One record as a section with a table."""
    versions = ", ".join(f"{name} {v}" for name, v in record["versions"].items())
    lines = [
        f"## {record['benchmark']}",
        "",
        f"{record['date']}; {record['device']}; BLAS threads: {record['blas_threads']}; {versions}.",
        "",
        "| what | blufunc | jax | ratio |",
        "|---|---|---|---|",
    ]
    for r in record["rows"]:
        digits = 0 if r["blufunc"] > 1000 else 3 if r["unit"] == "s" else 1
        ours, theirs = (f"{r[k]:,.{digits}f} {r['unit']}" for k in ("blufunc", "jax"))
        lines.append(f"| {r['what']} | {ours} | {theirs} | {r['ratio']:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    records = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    PAGE.write_text("\n".join([HEAD, *map(table, records)]))


if __name__ == "__main__":
    main()
