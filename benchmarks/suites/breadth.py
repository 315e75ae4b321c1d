"""Many model families and operations on a GPU, against JAX and PyTorch.

    python -m benchmarks.suites.breadth --only conv,sort --libraries blufunc,jax

The cases are in ``benchmarks/cases``; with ``--platform cpu`` they run at tiny sizes. Several processes of each library
compile their share of the cases at once. When all are ready, or the time for it is over, each process in turn has the
machine to itself and times its cases. Models have a second round of processes. Cases that end in different results,
beyond a tolerance by dtype, are marked.

The record is ``results/gpu_breadth.json``. With ``--merge``, cases that are not measured this time stay in it, if they
were measured on a device of the same name: all libraries of a case are measured in one run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import blufunc
from benchmarks.cases.case import Case, difference
from benchmarks.cases.table import models, operations
from benchmarks.harness import gpu_tables
from benchmarks.harness.programs import ROOT, add_options, chosen, device, environment, names, parsed, write

WORKERS = {"jax": 6, "blufunc": 5, "torch-eager": 2, "torch-compile": 1}
"""Processes of each library, which compile at once: two less than the cores."""

GRACE = 90.0  # seconds for a case that has begun when the time to compile ends: XLA tunes a model for as long


class Worker:
    """A process that compiles cases, waits, and times them.

    Args:
      library, cases: its share.
      options: of the command line.
      folder: of compiled code.
      until: UNIX time from which it begins no case.
    """

    def __init__(
        self, library: str, cases: Sequence[str], options: argparse.Namespace, folder: Path, until: float
    ):
        self.library, self.cases = library, list(cases)
        python = options.torch_python if library.startswith("torch") else sys.executable
        command = [python, "-m", "benchmarks.peers.breadth", "--library", library]
        command += ["--platform", options.device, f"--until={until}"]
        for name in cases:
            command += ["--case", name]
        self.words = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(folder / library),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.words,
            text=True,
            start_new_session=True,
        )
        self.lines: queue.Queue[dict | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            row = parsed(line)
            if row is not None:
                self.lines.put(row)
        self.lines.put(None)

    def next(self, deadline: float) -> dict | None:
        """The next row before a time of ``time.time``; None if it ended or is late."""
        try:
            return self.lines.get(timeout=max(0.0, deadline - time.time()))
        except queue.Empty:
            return None

    def begin(self) -> None:
        """Let it time its cases."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.close()

    def end(self) -> str:
        """End the process; return its last words if it failed."""
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            self.process.wait(2.0)
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return ""
        self.words.seek(0)
        return f"exit status {self.process.returncode}: {self.words.read()[-600:]}" * bool(
            self.process.returncode
        )


@dataclass
class Run:
    """Rows and versions, as they arrive."""

    options: argparse.Namespace
    folder: Path
    deadline: float
    rows: list[dict] = field(default_factory=list)
    left_out: list[list] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def run(self, cases: dict[str, Case]) -> None:
        """Compile and time these cases in all libraries."""
        begin = time.time()
        until = begin + self.options.compile
        workers = []
        for library, count in WORKERS.items():
            mine = [name for name, case in cases.items() if runs(library, case)]
            if chosen(library, self.options.libraries) and not (
                self.options.device == "cpu" and "torch" in library
            ):
                parts = [mine[i::count] for i in range(count)]
                workers += [Worker(library, p, self.options, self.folder, until) for p in parts if p]
        ready = [w for w in workers if self._until_ready(w, until + GRACE)]
        print(f"# {len(ready)} of {len(workers)} are ready after {time.time() - begin:.1f} s", flush=True)
        for worker in workers:
            start = time.time()
            if worker in ready:
                worker.begin()
                while self._take(worker, worker.next(self.deadline)):
                    pass
            words = worker.end()
            print(f"# {worker.library}, {len(worker.cases)}: {time.time() - start:.1f} s {words}", flush=True)
            done = {r["what"] for r in self.rows if r["library"] == worker.library}
            for name in worker.cases:
                if name in done:
                    continue
                if words:
                    self.rows.append({"library": worker.library, "what": name, "error": words})
                else:
                    self.left_out.append([worker.library, {"what": name}])

    def _until_ready(self, worker: Worker, deadline: float) -> bool:
        while (row := worker.next(min(deadline, self.deadline))) is not None:
            if "ready" in row:
                return True
            self._take(worker, row)
        return False

    def _take(self, worker: Worker, row: dict | None) -> bool:
        """Keep a row; False at the end."""
        if row is None:
            return False
        if "versions" in row:
            self.versions |= row["versions"]
        elif "what" in row:
            self.rows.append({"library": worker.library} | row)
            figures = {k: v for k, v in row.items() if k not in ("check", "what", "tolerance")}
            print(f"{worker.library:<13} {row['what']:<44} {json.dumps(figures)[:400]}", flush=True)
        return True


def runs(library: str, case: Case) -> bool:
    """True if a library has a case."""
    return {"torch-eager": case.torch, "torch-compile": case.compiled}.get(library, case) is not None


def compared(rows: list[dict], cases: dict[str, Case]) -> list[dict]:
    """Rows in the order of cases, with differences instead of samples."""
    reference: dict[str, dict] = {}
    for library in ("torch-compile", "torch-eager", "jax"):  # JAX's, if it ran
        reference |= {r["what"]: r for r in rows if r["library"] == library and "check" in r}
    found = []
    order = list(cases)
    for r in sorted(rows, key=lambda r: (order.index(r["what"]), list(WORKERS).index(r["library"]))):
        kept = {k: v for k, v in r.items() if k != "check"}
        base = reference.get(r["what"])
        torch = r["library"].startswith("torch") or (base or r)["library"].startswith("torch")
        if base is not None and base is not r and "check" in r and (cases[r["what"]].comparable or not torch):
            kept["apart"] = difference(r["check"], base["check"])
            kept["agrees"] = kept["apart"] <= max(r["tolerance"], base["tolerance"])
        found.append(kept)
    return found


def main() -> None:
    """Run, print the table, and write the record."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(p, limit=600.0)
    p.add_argument("--platform", dest="device", choices=["cuda", "cpu"], help="as --device")
    p.add_argument("--compile", type=float, default=90.0, help="seconds to compile, in each round")
    p.add_argument("--only", type=names, default=[], help="parts of cases' names; models, operations")
    p.add_argument(
        "--combine", nargs="+", default=[], help="records of several runs, of which to take medians"
    )
    o = p.parse_args()
    if o.combine:
        record = medians([json.loads(Path(path).read_text()) for path in o.combine])
        write(Path(o.out) / "gpu_breadth.json", json.dumps(record, indent=1) + "\n")
        return
    begin = time.monotonic()
    tiny = o.device == "cpu"
    whole, single = models(tiny), operations(tiny)
    cases = whole | single
    kinds = {"models": whole, "operations": single}
    wanted = {
        name
        for name in cases
        if not o.only or any(name in kinds[w] if w in kinds else w in name for w in o.only)
    }
    path = Path(o.out) / "gpu_breadth.json"
    gpu = device()
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(o, Path(scratch), time.time() + o.limit)
        for kind in (single, whole):
            if part := {name: case for name, case in kind.items() if name in wanted}:
                run.run(part)
    rows = compared(run.rows, cases)
    record = {
        "benchmark": "gpu_breadth",
        "date": datetime.date.today().isoformat(),
        "gpu": gpu,
        "versions": {"python": platform.python_version(), "blufunc": blufunc.__version__} | run.versions,
        "models": list(whole),
        "rows": rows,
        "left_out": sorted(run.left_out, key=str),
    }
    if o.merge and path.is_file():
        merge(record, json.loads(path.read_text()), {r["what"] for r in rows}, list(cases))
    Path(o.out).mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(record, indent=1) + "\n")
    print(f"\n{gpu_tables.table(record)}\n{time.monotonic() - begin:.0f} s", flush=True)


def medians(records: list[dict]) -> dict:
    """One record of several runs on one device: median times of every row.

    All runs count, and each row keeps its times. Memory and differences are the largest.
    """
    uuids = {r["gpu"].get("uuid") for r in records}
    if len(uuids) > 1:
        raise SystemExit(
            f"breadth: runs on different devices cannot be combined: {', '.join(map(str, uuids))}"
        )
    found: dict[tuple[str, str], list[dict]] = {}
    for record in records:
        for r in record["rows"]:
            if "error" not in r:
                found.setdefault((r["what"], r["library"]), []).append(r)
    order = list(dict.fromkeys(name for kind in (models(True), operations(True)) for name in kind))
    rows = []
    for (what, library), same in found.items():
        times = [r["ms"] for r in same]
        row = same[0] | {"what": what, "library": library, "ms": statistics.median(times), "all_ms": times}
        row |= {k: max(r[k] for r in same) for k in ("peak_GB", "apart") if k in same[0]}
        row |= {"agrees": all(r["agrees"] for r in same)} if "agrees" in same[0] else {}
        rows.append(row)
    rows.sort(key=lambda r: (order.index(r["what"]), list(WORKERS).index(r["library"])))
    failed = {(r["what"], r["library"]): r for record in records for r in record["rows"] if "error" in r}
    rows += [r for key, r in failed.items() if key not in found]
    left = {(lib, tags["what"]) for record in records for lib, tags in record["left_out"]}
    left_out = [[lib, {"what": what}] for lib, what in sorted(left) if (what, lib) not in found]
    return records[0] | {"rows": rows, "left_out": left_out, "runs": len(records)}


def merge(record: dict, before: dict, measured: set[str], order: list[str]) -> None:
    """Add the rows of an earlier record whose cases were not measured now."""
    if before["gpu"]["name"] != record["gpu"]["name"]:
        return
    kept = [r for r in before["rows"] if r["what"] not in measured and r["what"] in order]
    record["rows"] = sorted([*kept, *record["rows"]], key=lambda r: order.index(r["what"]))
    present = {r["what"] for r in record["rows"]}
    older = [left for left in before["left_out"] if left[1]["what"] not in present]
    record["left_out"] = [*older, *record["left_out"]]
    record["versions"] = before["versions"] | record["versions"]


if __name__ == "__main__":
    main()
