"""An earlier version of blufunc against this one, by turns on one device.

    python -m benchmarks.suites.turns --before ../earlier --only gpt2,small

Each program runs in the earlier checkout, twice in this one, and in the earlier one again, in processes of its own, so
that a device that warms up slows both versions. Both share a folder of compiled code and of cuBLASLt's choices: they
multiply by the same algorithms, unless the key of a choice changed. The record is ``gpu_turns.json``; a row has the
times of all runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import blufunc
from benchmarks.harness import gpu_tables
from benchmarks.harness.programs import PEERS, ROOT, device, names, write
from benchmarks.harness.timing import RESULTS
from benchmarks.suites.gpt2 import GPT2, SMALL, STEPS

ORDER = ("before", "after", "after", "before")
PRECISIONS = {
    "bfloat16": ("--precision", "bf16"),
    "TF32": ("--precision", "tf32"),
    "float32_tc": ("--precision", "fp32", "--products", "float32_tc"),
}
PARTS = ("gpt2", "small", "kernels", "attention", "multi")


def main() -> None:
    """Run the programs and print their table."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--before", required=True, type=Path, help="a checkout of the earlier version")
    p.add_argument("--only", type=names, default=["gpt2", "small"], help=f"parts, of {', '.join(PARTS)}")
    p.add_argument("--precisions", type=names, default=list(PRECISIONS), help="of GPT-2")
    p.add_argument("--gpus", type=int, default=2, help="devices of the part multi")
    p.add_argument("--limit", type=float, default=1800, help="seconds; no program is started later")
    p.add_argument("--out", default=str(RESULTS), help="the folder of the record")
    o = p.parse_args()
    record = {
        "benchmark": "gpu_turns",
        "date": datetime.date.today().isoformat(),
        "gpu": device(),
        "versions": {"blufunc": blufunc.__version__},
        "rows": [],
        "left_out": [],
    }
    end = time.monotonic() + o.limit
    with tempfile.TemporaryDirectory(prefix="blufunc-turns-") as cache:
        for what, module, args in programs(o):
            rows: dict[str, dict] = {}
            for version in ORDER:
                if time.monotonic() > end:
                    record["left_out"].append(["blufunc", {"what": what}])
                    break
                for row in run(o.before if version == "before" else ROOT, module, args, cache):
                    add(rows, what, version, row)
            record["rows"] += rows.values()
            write(Path(o.out) / "gpu_turns.json", json.dumps(record, indent=1) + "\n")
    print(gpu_tables.table(record))


def programs(o: argparse.Namespace) -> Iterator[tuple[str, str, list[str]]]:
    """Label, module and arguments of each selected program."""
    step = lambda sizes, part: [*(f"--{name}={n}" for name, n in sizes.items()), *STEPS[part]]
    if "gpt2" in o.only:
        for name in o.precisions:
            yield f"GPT-2 124M, {name}", "gpt2_blufunc", [*PRECISIONS[name], *step(GPT2, "gpt2")]
    if "small" in o.only:
        yield "6 layers of width 384, bfloat16", "gpt2_blufunc", step(SMALL, "small")
    if "multi" in o.only:
        label = f"GPT-2 124M, bfloat16, data parallel, {o.gpus} GPUs"
        yield label, "gpt2_blufunc", [*step(GPT2, "gpt2"), f"--gpus={o.gpus}"]
    for part in ("kernels", "attention"):
        if part in o.only:
            yield part, part, ["--library", "blufunc"]


def run(checkout: Path, module: str, args: list[str], cache: str) -> list[dict]:
    """The rows that a program of a checkout emits."""
    env = os.environ | {"PYTHONPATH": str(checkout.resolve()), "BLUFUNC_CACHE_DIR": cache}
    command = [sys.executable, "-m", PEERS + module, *args]
    done = subprocess.run(command, cwd=checkout, env=env, stdout=subprocess.PIPE, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [row for row in rows if "versions" not in row]


def add(rows: dict[str, dict], what: str, version: str, row: dict) -> None:
    """Add the time and the memory of a run to the rows, by label."""
    label = row.get("what", what)
    found = rows.setdefault(label, {"library": "blufunc", "what": label, "before": [], "after": []})
    found[version].append(row["step_ms"] if "step_ms" in row else row["ms"])
    if "peak_GB" in row:
        found[f"{version}_GB"] = row["peak_GB"]


if __name__ == "__main__":
    main()
