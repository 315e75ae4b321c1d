"""Run programs one after the other and record their rows.

Shared by the GPU suites. Each library runs in its own processes, so none holds memory or threads while another one is
timed, and a crash or a time limit costs at most one program's remaining rows. Rows arrive as JSON lines
(``peers/clock.py``) and are written to the record on arrival, with the peak device memory while the program ran
(``device_memory.py``), which is measured from outside and therefore identically for all libraries.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import blufunc
from benchmarks.harness import device_memory, gpu_tables
from benchmarks.harness.timing import RESULTS

ROOT = Path(__file__).parents[2]
PEERS = "benchmarks.peers."
SHORTEST = 10.0  # seconds: with less time left, a program is not started
SLOW = {"torch-max-autotune"}  # minutes of tuning: runs only if requested by its full name


@dataclass(frozen=True)
class Program:
    """One process to run.

    Attributes:
      library: label of its rows.
      module, args: what to run.
      tags: fields added to its rows.
      limit: seconds.
      cache: programs with the same name share a folder of compiled code, which is empty for the first one.
      needs: seconds: with less time left, it is not started.
    """

    library: str
    module: str
    args: tuple[str, ...] = ()
    tags: dict = field(default_factory=dict)
    limit: float = 240.0
    cache: str = ""
    needs: float = 0.0

    @property
    def key(self) -> tuple:
        """Key of the measurement: two programs with the same key replace each other."""
        return (self.library, *sorted(self.tags.items()))


def chosen(library: str, wanted: Sequence[str]) -> bool:
    """True if a library, or its family up to the first dash or space, is selected.

    All but the slow libraries are selected by default.
    """
    if library in SLOW:
        return library in wanted
    family = re.split("[- ,]", library)[0]
    return not wanted or library in wanted or family in wanted


def add_options(parser: argparse.ArgumentParser, limit: float) -> None:
    """Add the options shared by all drivers."""
    parser.add_argument(
        "--libraries", type=names, default=[], help="such as blufunc,torch-compile,jax: families too"
    )
    parser.add_argument("--out", default=str(RESULTS), help="the folder of the records")
    parser.add_argument(
        "--merge", action="store_true", help="keep rows that were measured on this device before"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=limit,
        help="seconds for everything; what does not fit is left out, and named",
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tiny sizes, to try this out"
    )
    parser.add_argument(
        "--torch-python", default=sys.executable, help="an interpreter that has torch and NumPy"
    )


def names(text: str) -> list[str]:
    """Names in a comma-separated list."""
    return [name for name in text.split(",") if name]


class Record:
    """Results of one part, always up to date on disk.

    Args:
      gpu: result of ``device()``.
      options: those of ``add_options``.
      programs: all programs that will run; ``--merge`` drops their earlier rows.
      name: of the file, if not that of the part.
      facts: properties of all rows, such as the number of steps; earlier rows with other facts are dropped too.
    """

    def __init__(
        self,
        part: str,
        gpu: dict,
        options: argparse.Namespace,
        programs: Sequence[Program],
        name: str = "",
        **facts: object,
    ):
        out = Path(options.out)
        out.mkdir(parents=True, exist_ok=True)
        self.path, self.options = out / f"{name or f'gpu_{part}'}.json", options
        self.contents = {
            "benchmark": f"gpu_{part}",
            "date": datetime.date.today().isoformat(),
            "gpu": gpu,
            "versions": {"python": platform.python_version(), "blufunc": blufunc.__version__},
            "facts": facts,
            "rows": [],
            "left_out": [],
        }
        if options.merge and self.path.is_file():
            before = json.loads(self.path.read_text())
            if same_device(before["gpu"], gpu) and before.get("facts", facts) == facts:
                replaced = {p.key for p in programs}
                self.contents["versions"] = before["versions"] | self.contents["versions"]
                self.contents["rows"] = [r for r in before["rows"] if _key(r) not in replaced]
        copied = self.path.parent / "gpu_copy.json"
        if part != "copy" and copied.is_file():
            copy = json.loads(copied.read_text())
            if same_device(copy["gpu"], gpu):
                self.contents["copy_GB_s"] = max(r["GB_s"] for r in copy["rows"] if "GB_s" in r)

    def save(self) -> None:
        """Write the record atomically: a reader sees the old or the new one."""
        write(self.path, json.dumps(self.contents, indent=1) + "\n")

    def run_all(self, programs: Iterable[Program], deadline: float, scratch: Path) -> None:
        """Run programs until the deadline (of ``time.monotonic``), and print their table."""
        for program in programs:
            self.run(program, deadline, scratch)
        if self.contents["rows"] or self.contents["left_out"]:
            self.save()
            print("\n" + gpu_tables.table(self.contents), flush=True)

    def run(self, program: Program, deadline: float, scratch: Path) -> list[dict]:
        """Run a program and record its rows and any failure; return its rows."""
        left = deadline - time.monotonic()
        limit = min(program.limit, left)
        if left < max(SHORTEST, program.needs):
            self.contents["left_out"].append([program.library, program.tags])
            print(f"{program.library}: left out, {left:.0f} s are left, {program.tags}", flush=True)
            self.save()
            return []
        print(f"{program.library}: begins, at most {limit:.0f} s, {program.tags}", flush=True)
        start, before = time.monotonic(), len(self.contents["rows"])
        with tempfile.TemporaryFile("w+") as words:
            with device_memory.Watch(self.options.device) as memory:
                ending = self._rows_of(program, scratch / (program.cache or program.library), limit, words)
            if memory.peak is not None:
                for row in self.contents["rows"][before:]:
                    row["most_GB"] = memory.peak / 1e9
                self.save()
            print(f"{program.library}: {time.monotonic() - start:.0f} s, {program.tags}", flush=True)
            if ending:
                words.seek(0)
                said = words.read().replace(f"{ROOT}{os.sep}", "").strip()
                print(f"{ending}: {said[-3000:]}", file=sys.stderr, flush=True)
                self._add(program, {"error": "\n".join([f"{ending}:", *said.splitlines()[-4:]])})
        return self.contents["rows"][before:]

    def _rows_of(self, program: Program, cache: Path, limit: float, words: IO) -> str:
        """Run a program and add its rows; return its error or "".

        Its diagnostics go to ``words``.
        """
        python = self.options.torch_python if program.library.startswith("torch") else sys.executable
        cut = threading.Event()

        def stop():
            cut.set()
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.killpg(process.pid, signal.SIGKILL)

        with subprocess.Popen(
            [python, "-m", program.module, *program.args],
            cwd=ROOT,
            env=environment(cache),
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
            start_new_session=True,
        ) as process:
            timer = threading.Timer(limit, stop)
            timer.start()
            try:
                for line in process.stdout or ():
                    self._take(program, line)
                status = process.wait()
            finally:
                timer.cancel()
                if process.poll() is None:
                    stop()
        return f"cut off after {limit:.0f} s" if cut.is_set() else f"exit status {status}" if status else ""

    def _take(self, program: Program, line: str) -> None:
        """Parse one line of output: a row, versions, or other."""
        row = parsed(line)
        if row is None:
            return
        if "versions" in row:
            self.contents["versions"] |= row["versions"]
        else:
            print(f"  {program.library}: {json.dumps(_short(row))}", flush=True)
            self._add(program, row)

    def _add(self, program: Program, row: dict) -> None:
        self.contents["rows"].append(
            {"library": program.library, **program.tags, "of": sorted(program.tags)} | row
        )
        self.save()


def parsed(line: str) -> dict | None:
    """A row of a line of output, if it is one; ranks prefix their lines."""
    try:
        row = json.loads(re.sub(r"^\[\d+\] ", "", line))
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def write(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old or the new contents."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    os.replace(part, path)


def _key(row: dict) -> tuple:
    return (row["library"], *((name, row[name]) for name in row["of"]))


def _short(row: dict) -> dict:
    """A row for display: numbers with four digits, without long lists."""
    kept = {k: v for k, v in row.items() if k not in ("check", "losses")}
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in kept.items()}


def environment(cache: Path) -> dict[str, str]:
    """Environment of a program: private folders of compiled code, empty at first use."""
    folders = {
        "BLUFUNC_CACHE_DIR": "blufunc",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TRITON_CACHE_DIR": "triton",
    }
    folders |= {"CUDA_CACHE_PATH": "driver", "JAX_COMPILATION_CACHE_DIR": "jax"}
    own = {name: str(cache / folder) for name, folder in folders.items()}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | own | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def same_device(one: dict, other: dict) -> bool:
    """True if both are the same device, by its UUID."""
    return one.get("uuid") is not None and one.get("uuid") == other.get("uuid")


def device() -> dict:
    """Facts about the first device from ``nvidia-smi``; without it, the CPU's name."""
    fields = ("name", "uuid", "driver_version", "memory.total", "clocks.max.sm", "power.limit")
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    query.append(f"--id={device_memory.first_device()}")
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {"name": platform.processor() or platform.machine()}
    return dict(zip(fields, (text.strip() for text in found.split(",")), strict=True))
