"""Timeline of one blufunc training step.

    python -m benchmarks.suites.gpu_timeline --gpus 4 [--layout data]

Every kernel of all streams of the first device, recorded by CUPTI through ``torch.profiler``, including those of CUDA
graphs. The step runs on one GPU, then on several with the same tokens per GPU; matmuls overlapped with collectives are
compared with the same kernels on one GPU. With ``--gpus 1``, only the first part runs. The recorded step of median
length counts.

For each run, ``DIR/gpu_timeline_NAME.trace.json.gz`` is for Perfetto or chrome://tracing; the figures of
``benchmarks/harness/timeline.py`` are printed and stored in ``DIR/gpu_timeline.json``. Recording takes a little time:
the row also has the time of unrecorded steps.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import timeline
from benchmarks.harness.programs import PEERS, Program, Record, add_options, device, names
from benchmarks.suites.gpt2 import GPT2, variants

MODULE = PEERS + "timeline"
FORMS = {
    "one": ("blufunc, one process", (MODULE,)),
    "each": (
        "blufunc, a process each",
        ("blufunc.parallel.launch", "-n", "{n}", "--engine", "nccl", "-m", MODULE),
    ),
}


def main() -> None:
    """Run the programs; print and save the activity of their kernels."""
    parser = _parser()
    o = parser.parse_args()
    if o.device == "cpu":
        parser.error("there are no kernels of a device to record on a CPU")
    deadline = time.monotonic() + o.limit
    with tempfile.TemporaryDirectory(prefix="blufunc-bench-") as scratch:
        planned = list(programs(o, Path(scratch)))
        record = Record("timeline", device(), o, planned)
        alone: list[timeline.Kernel] = []
        for program in planned:
            rows = record.run(program, deadline, Path(scratch))
            trace = trace_file(Path(scratch), program)
            if not trace.is_file():
                continue
            steps = [timeline.kernels_of(events) for events in json.loads(trace.read_text())]
            found = analysed(program, rows, timeline.middle(steps), alone, record)
            alone = alone or found
        record.run_all([], deadline, Path(scratch))


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(p, limit=600)
    p.add_argument("--gpus", type=int, default=1)
    p.add_argument("--layouts", type=names, default=["data"], help="data, fsdp, tensor")
    p.add_argument(
        "--forms", type=names, default=["one"], help="one: one process; each: a process for each GPU"
    )
    p.add_argument("--precision", choices=["bf16", "tf32", "fp32"], default="bf16")
    p.add_argument(
        "--variants", type=names, default=["default"], help="of blufunc, see benchmarks.suites.gpt2"
    )
    return p


def programs(o: argparse.Namespace, scratch: Path) -> Iterator[Program]:
    """One GPU, then the layouts and forms on several, with the first variant."""
    usual = [*(f"--{name}={value}" for name, value in GPT2.items()), "--precision", o.precision]
    usual += ["--warmup", "5", "--steps", "10"]
    for name, settings in variants("blufunc", o.precision, o.variants):
        tags = {"precision": o.precision, "layout": "one", "gpus": 1}
        yield _traced(Program(name, MODULE, (*usual, *settings), tags, cache="blufunc"), scratch)
    if o.gpus == 1:
        return
    _, settings = next(variants("blufunc", o.precision, o.variants))
    for layout in o.layouts:
        for form in o.forms:
            library, (module, *args) = FORMS[form]
            tags = {"precision": o.precision, "layout": layout, "gpus": o.gpus}
            given = [a.format(n=o.gpus) for a in args]
            given += [*usual, *settings, f"--gpus={o.gpus}", "--layout", layout]
            yield _traced(Program(library, module, tuple(given), tags, cache="blufunc"), scratch)


def _traced(program: Program, scratch: Path) -> Program:
    """The program with the name of its trace file."""
    path = trace_file(scratch, program)
    return Program(
        program.library,
        program.module,
        (*program.args, "--trace", str(path)),
        program.tags,
        cache=program.cache,
    )


def trace_file(folder: Path, program: Program) -> Path:
    """File for a program's events."""
    return folder / f"{name_of(program)}.json"


def name_of(program: Program) -> str:
    """Name for a program's files."""
    words = [program.library, *map(str, program.tags.values())]
    return "-".join(words).replace(", ", "-").replace(" ", "-").replace("=", "-")


def analysed(
    program: Program,
    rows: list[dict],
    kernels: list[timeline.Kernel],
    alone: list[timeline.Kernel],
    record: Record,
) -> list[timeline.Kernel]:
    """Add kernel figures to the program's row, print it, and save the trace.

    Returns:
      the kernels.
    """
    if not kernels:
        print(f"{program.library}: no kernels were recorded", flush=True)
        return []
    found = timeline.summary(kernels, alone)
    rows[0]["timeline"] = found
    record.save()
    path = record.path.with_name(f"gpu_timeline_{name_of(program)}.trace.json.gz")
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(gzip.compress(json.dumps({"traceEvents": timeline.events_of(kernels)}).encode()))
    os.replace(part, path)
    print(f"\n{program.library}, {program.tags}: {path}\n{timeline.report(found)}\n", flush=True)
    return kernels


if __name__ == "__main__":
    main()
