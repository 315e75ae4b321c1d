"""blufunc on a CUDA device beside PyTorch and JAX: ``python -m benchmarks.gpu [--only kernels,gpt2] [--out DIR]``.

Each library runs in processes of its own, one after the other, so that none holds memory or threads while another is
timed, and a crash or a time limit costs no more than one program's remaining rows: they come as JSON lines
(``gpu_peers/clock.py``) and are written to ``DIR/gpu_PART.json`` as they come. The parts:

    copy     the device, and how fast it copies its memory
    ops      what calls cost when there is nothing to compute
    kernels  the usual kernels of a transformer, by device time
    gpt2     GPT-2 124M's training step: losses, tokens a second, memory, time to the first step
    small    the same for 6 layers of width 384, where launches are what costs
    repro    whether two runs from one key end in the same bits

``--libraries`` and ``--precisions`` choose among the programs of a part, so that it can be split over several calls;
``--merge`` then keeps the rows of programs that are not run now, if they were measured on this very device.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import blufunc
from benchmarks import gpu_tables
from benchmarks.peers import RESULTS

ROOT = Path(__file__).parent.parent
PROGRAMS = "benchmarks.gpu_peers."
PARTS = ("copy", "ops", "kernels", "gpt2", "small", "repro")

GPT2 = {"layers": 12, "heads": 12, "width": 768, "context": 1024, "vocab": 50304, "batch": 32}
SMALL = {"layers": 6, "heads": 6, "width": 384, "context": 256, "vocab": 256, "batch": 16}
TINY = {"layers": 2, "heads": 2, "width": 64, "context": 32, "vocab": 96, "batch": 2}
STEPS = {
    "gpt2": ["--warmup", "5", "--steps", "20"],
    "small": ["--warmup", "100", "--steps", "400"],  # a second: until clocks are up
    "tiny": ["--warmup", "2", "--steps", "5"],
}
TRAINERS = {  # the module and its options
    "blufunc": ("gpt2_blufunc",),
    "torch-eager": ("gpt2_torch",),
    "torch-compile": ("gpt2_torch", "--compile"),
    "torch-reduce-overhead": ("gpt2_torch", "--compile", "--mode", "reduce-overhead"),
    "torch-max-autotune": ("gpt2_torch", "--compile", "--mode", "max-autotune"),
    "jax-cudnn": ("gpt2_jax", "--attention", "cudnn"),
    "jax-xla": ("gpt2_jax", "--attention", "xla"),
}
KERNELS = {
    "blufunc": ("kernels", "--library", "blufunc"),
    "torch-eager": ("kernels_torch",),
    "torch-compile": ("kernels_torch", "--compile"),
    "jax": ("kernels", "--library", "jax"),
}
DISPATCH = {name: ("dispatch", "--library", name) for name in ("blufunc", "torch", "jax")}
SHORTEST = 10.0  # seconds: with less, a program is not begun
SLOW = {"torch-max-autotune"}  # minutes of tuning: only when it is asked for by its whole name


@dataclass(frozen=True)
class Program:
    """One process to run.

    Attributes:
      library: what its rows are told of.
      module, args: what to run.
      tags: what is added to its rows.
      limit: seconds.
      cache: programs with the same name share a folder of compiled code, which is empty for the first.
    """

    library: str
    module: str
    args: tuple[str, ...] = ()
    tags: dict = field(default_factory=dict)
    limit: float = 240.0
    cache: str = ""

    @property
    def key(self) -> tuple:
        """What it measures: two programs with the same key replace each other."""
        return (self.library, *sorted(self.tags.items()))


def main() -> None:
    """Run the parts and print their tables."""
    options = _parser().parse_args()
    deadline = time.monotonic() + options.limit
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    gpu = device()
    with tempfile.TemporaryDirectory(prefix="blufunc-bench-") as scratch:
        for part in options.only:
            chosen_now = list(programs(part, options))
            record = Record(part, out / f"gpu_{part}.json", gpu, options, chosen_now)
            for program in chosen_now:
                record.run(program, deadline, Path(scratch))
            if record.contents["rows"]:
                print("\n" + gpu_tables.table(record.contents), flush=True)


def _parser() -> argparse.ArgumentParser:
    names = lambda text: [name for name in text.split(",") if name]
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=f"The parts are {', '.join(PARTS)}."
    )
    p.add_argument("--only", type=names, default=list(PARTS), help="parts, with commas")
    p.add_argument(
        "--libraries", type=names, default=[], help="such as blufunc,torch-compile,jax: families too"
    )
    p.add_argument("--precisions", type=names, default=["bf16", "tf32", "fp32"], help="of gpt2 and small")
    p.add_argument("--kernel", default="", help="the kernels with this in their names")
    p.add_argument("--steps", type=int, help="timed training steps, if not the usual number")
    p.add_argument("--out", default=str(RESULTS), help="the folder of the records")
    p.add_argument("--merge", action="store_true", help="keep rows that were measured on this device before")
    p.add_argument(
        "--limit", type=float, default=3600, help="seconds for everything; what is left is left out"
    )
    p.add_argument("--warm", choices=["blufunc", "all", "none"], default="blufunc", help="who starts twice")
    p.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tiny sizes, to try this out"
    )
    p.add_argument("--torch-python", default=sys.executable, help="an interpreter that has torch and NumPy")
    return p


# ---------------------------------------------------------------------------------------------- what to run


def programs(part: str, options: argparse.Namespace) -> Iterator[Program]:
    """The programs of a part that the options leave."""
    for program in _PROGRAMS[part](options):
        if part == "copy" or chosen(program.library, options.libraries):
            yield program


def chosen(library: str, wanted: list[str]) -> bool:
    """Whether a library, or the family before its first dash, is wanted; all but the slow ones by default."""
    if library in SLOW:
        return library in wanted
    return not wanted or library in wanted or library.partition("-")[0] in wanted


def _copy(o: argparse.Namespace) -> Iterator[Program]:
    if o.device == "cuda":
        yield Program("copy", PROGRAMS + "copy_bandwidth", limit=120)


def _ops(o: argparse.Namespace) -> Iterator[Program]:
    for library, (module, *args) in DISPATCH.items():
        yield Program(library, PROGRAMS + module, ("--platform", o.device, *args), limit=150)


def _kernels(o: argparse.Namespace) -> Iterator[Program]:
    extra = ["--platform", o.device, "--only", o.kernel, *(["--tiny"] if o.device == "cpu" else [])]
    for library, (module, *args) in KERNELS.items():
        yield Program(library, PROGRAMS + module, (*args, *extra), limit=300)


def _trainers(part: str, sizes: dict, skip: set[str]):
    def make(o: argparse.Namespace) -> Iterator[Program]:
        tiny = o.device == "cpu"
        size = [f"--{name}={value}" for name, value in (TINY if tiny else sizes).items()]
        steps = STEPS["tiny" if tiny else part] + ([f"--steps={o.steps}"] if o.steps is not None else [])
        for precision in o.precisions:
            for library, (module, *args) in TRAINERS.items():
                if library in skip or (library == "jax-cudnn" and (precision != "bf16" or tiny)):
                    continue
                if library == "jax-xla" and precision == "bf16" and not tiny and not o.libraries:
                    continue  # cuDNN's attention is faster there
                args = [*args, "--platform", o.device, "--precision", precision, *size]
                cache = f"{part}-{library}-{precision}"
                tags = {"precision": precision}
                yield Program(library, PROGRAMS + module, (*args, *steps), tags, cache=cache)
                if o.warm == "all" or o.warm == library:
                    again = (*args, "--warmup=0", "--steps=0")
                    yield Program(library, PROGRAMS + module, again, tags | {"cache": "warm"}, cache=cache)

    return make


def _repro(o: argparse.Namespace) -> Iterator[Program]:
    tiny = o.device == "cpu"
    runs = [("6 layers of width 384", SMALL, "20"), ("GPT-2 124M", GPT2, "5")]
    for what, sizes, steps in [("tiny", TINY, "5")] if tiny else runs:
        size = [f"--{name}={value}" for name, value in sizes.items()]
        for precision in o.precisions:
            args = ("--precision", precision, *size, "--platform", o.device, "--steps", steps)
            for run in (1, 2):
                tags = {"what": what, "precision": precision, "run": run}
                yield Program(
                    "blufunc", PROGRAMS + "gpt2_blufunc", (*args, "--hash", "--key", "0"), tags, cache="repro"
                )


_PROGRAMS = {
    "copy": _copy,
    "ops": _ops,
    "kernels": _kernels,
    "gpt2": _trainers("gpt2", GPT2, {"torch-reduce-overhead"}),
    "small": _trainers("small", SMALL, {"torch-max-autotune"}),
    "repro": _repro,
}

# --------------------------------------------------------------------------------- running and remembering


class Record:
    """The results of one part, on disk at every moment."""

    def __init__(
        self, part: str, path: Path, gpu: dict, options: argparse.Namespace, programs: Sequence[Program]
    ):
        self.path, self.options = path, options
        self.contents = {
            "benchmark": f"gpu_{part}",
            "date": datetime.date.today().isoformat(),
            "gpu": gpu,
            "versions": {"python": platform.python_version(), "blufunc": blufunc.__version__},
            "rows": [],
            "left_out": [],
        }
        if options.merge and path.is_file():
            before = json.loads(path.read_text())
            if same_device(before["gpu"], gpu):
                again = {p.key for p in programs}
                self.contents["versions"] = before["versions"] | self.contents["versions"]
                self.contents["rows"] = [r for r in before["rows"] if _key(r) not in again]
        copied = path.parent / "gpu_copy.json"
        if part != "copy" and copied.is_file():
            copy = json.loads(copied.read_text())
            if same_device(copy["gpu"], gpu):
                self.contents["copy_GB_s"] = max(r["GB_s"] for r in copy["rows"] if "GB_s" in r)

    def save(self) -> None:
        """Write the record; a reader sees the old one or the new one."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.contents, indent=1) + "\n")
        os.replace(part, self.path)

    def run(self, program: Program, deadline: float, scratch: Path) -> None:
        """Run a program, take in its rows as they come, and note how it ended if not well."""
        limit = min(program.limit, deadline - time.monotonic())
        if limit < SHORTEST:
            self.contents["left_out"].append([program.library, program.tags])
            return self.save()
        start = time.monotonic()
        with tempfile.TemporaryFile("w+") as words:
            ending = self._rows_of(program, scratch / (program.cache or program.library), limit, words)
            print(f"{program.library}: {time.monotonic() - start:.0f} s, {program.tags}", flush=True)
            if ending:
                words.seek(0)
                said = words.read().replace(f"{ROOT}{os.sep}", "").strip()
                print(f"{ending}: {said[-3000:]}", file=sys.stderr, flush=True)
                self._add(program, {"error": "\n".join([f"{ending}:", *said.splitlines()[-4:]])})

    def _rows_of(self, program: Program, cache: Path, limit: float, words: IO) -> str:
        """Run a program, which says what goes wrong to ``words``, and add its rows; returns its bad end, or ""."""
        python = self.options.torch_python if program.library.startswith("torch") else sys.executable
        cut = threading.Event()

        def stop():
            cut.set()
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.killpg(process.pid, signal.SIGKILL)

        with subprocess.Popen(
            [python, "-m", program.module, *program.args],
            cwd=ROOT,
            env=_environment(cache),
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
        """A line of a program's output: a row, versions, or what a library chose to print; behind the rank, if any."""
        try:
            row = json.loads(re.sub(r"^\[\d+\] ", "", line))
        except ValueError:
            row = None
        if not isinstance(row, dict):
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


def _key(row: dict) -> tuple:
    return (row["library"], *((name, row[name]) for name in row["of"]))


def _short(row: dict) -> dict:
    """A row to look at: numbers to four digits, and no long lists."""
    kept = {k: v for k, v in row.items() if k not in ("check", "losses")}
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in kept.items()}


def _environment(cache: Path) -> dict[str, str]:
    """For a program: the folders of compiled code are its own, and empty when it is the first to use them."""
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
    """Whether both are one device, as its own number says."""
    return one.get("uuid") is not None and one.get("uuid") == other.get("uuid")


def device() -> dict:
    """What ``nvidia-smi`` says of the first device; only the processor's name where it is not there."""
    fields = ("name", "uuid", "driver_version", "memory.total", "clocks.max.sm", "power.limit")
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {"name": platform.processor() or platform.machine()}
    return dict(zip(fields, (text.strip() for text in found.split(",")), strict=True))


if __name__ == "__main__":
    main()
