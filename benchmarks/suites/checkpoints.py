"""Asynchronous checkpoints: stall of a step, host memory, write rate.

    BLUFUNC_SAVE_RESULTS=1 python -m benchmarks.suites.checkpoints --platform cuda

The state is that of GPT-2 124M with AdamW: parameters and moments in float32, 1.5 GB, donated to each step. A loop
waits for the loss of each step, or, ``one ahead``, of the step before, as training loops do. ``longest stall``: the
longest step from the call of ``save`` to the commit, less a usual one. ``stall of all``: what these steps took longer
than as many usual ones. ``host memory``: the rise of the process's resident memory until the commit, over the bytes of
the state. ``write``: bytes over the seconds from ``save`` to the commit, which syncs, reads the file back and compares
digests, next to ``dd`` with ``fsync`` of as many bytes in the same folder.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import blufunc as bf
from benchmarks.harness.programs import device
from benchmarks.harness.timing import report
from benchmarks.suites.offload import SMALL, TINY, begun, emit, tokens_of, training
from blufunc import io, tree
from examples.gpt import model

STALL = 5e-3
HOST = 1.2
WRITE = 0.8


def main() -> None:
    """Print the rows, and record them."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--platform", choices=["cpu", "cuda"], default="cpu", help="cpu: a tiny model")
    parser.add_argument("--saves", type=int, default=5, help="checkpoints; medians over these")
    parser.add_argument("--folder", help="where to write; default: the system's temporary folder")
    o = parser.parse_args()
    if o.platform == "cuda":
        bf.config.update("default_device", "cuda")
    folder = Path(tempfile.mkdtemp(prefix="blufunc-checkpoints-", dir=o.folder))
    try:
        rows = measured(o, folder)
    finally:
        shutil.rmtree(folder)
    report("checkpoints", rows, o.platform, device()["name"] if o.platform == "cuda" else "")


def measured(o: argparse.Namespace, folder: Path) -> list[dict]:
    """The rows of steps with saves among them, and of ``dd``."""
    sizes = SMALL if o.platform == "cuda" else TINY
    wiring = model.Wiring(loss_chunk=sizes.chunk)
    optimizer, step = training(lambda p, tokens: model.loss(p, tokens, sizes.config, wiring), False)
    state, tokens = begun(sizes, optimizer, False), tokens_of(sizes)
    nbytes = sum(leaf.nbytes for leaf in tree.leaves(state))

    before: list = []

    def call(ahead: bool, save: Callable[[], object] = lambda: None) -> float:
        start = time.perf_counter()
        save()
        *state[:], loss = step(*state, tokens)
        float(before.pop() if ahead and before else loss)
        before[:] = [loss]
        return time.perf_counter() - start

    for _ in range(12):  # matmuls are tuned, and graphs captured
        call(False)
    rows: list[dict] = []
    seconds, rises = [], []
    for ahead in (False, True):
        saving, stalls, longest = [], [], []
        with io.Checkpointer(folder, keep=1) as checkpoints:
            for i in range(o.saves + 1):  # the first one is a warm-up
                usual = statistics.median(call(ahead) for _ in range(20))
                resident, calls = _Resident(), []

                def save(i: int = i, calls: list = calls) -> None:
                    begin = time.perf_counter()
                    checkpoints.save(i, state)
                    calls.append(time.perf_counter() - begin)

                begin, done = time.perf_counter(), threading.Event()
                steps = [call(ahead, save)]
                waiting = threading.Thread(target=_then(checkpoints.wait, done))
                waiting.start()
                while not done.is_set():
                    steps.append(call(ahead))
                waiting.join()
                seconds.append(time.perf_counter() - begin)
                rises.append(resident.rise() / nbytes)
                saving += calls
                stalls.append(sum(steps) - usual * len(steps))
                longest.append(max(steps) - usual)
        way = "one ahead" if ahead else "waiting"
        rows += [
            emit(way, "call of save", ms=1e3 * middle(saving)),
            emit(
                way,
                "longest stall of a step",
                ms=1e3 * middle(longest),
                goal=1e3 * STALL,
                step_ms=1e3 * usual,
            ),
            emit(way, "stall of all steps to the commit", ms=1e3 * middle(stalls), steps=len(steps)),
        ]
    rate, plain = nbytes / middle(seconds), _dd(folder, nbytes)
    return [
        *rows,
        emit("host memory", "rise, of the state", ratio=middle(rises), goal=HOST),
        emit("write", "to the commit", GB_s=rate / 1e9, GB=nbytes / 1e9, s=middle(seconds)),
        emit("write", "dd with fsync", GB_s=plain / 1e9),
        emit("write", "of dd's rate", ratio=rate / plain, goal=WRITE),
    ]


def middle(values: list[float]) -> float:
    """The median without the first, which warms up."""
    return statistics.median(values[1:])


def _then(wait: Callable[[], None], done: threading.Event) -> Callable[[], None]:
    def run() -> None:
        try:
            wait()
        finally:
            done.set()

    return run


class _Resident:
    """Watches this process's resident memory, page-locked pages among it."""

    def __init__(self) -> None:
        self._first = self._highest = _resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(5e-3):
            self._highest = max(self._highest, _resident_bytes())

    def rise(self) -> int:
        """Bytes above those at the beginning, at most so far; ends the watch."""
        self._stop.set()
        self._thread.join()
        return self._highest - self._first


def _resident_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["VmRSS"].split()[0])


def _dd(folder: Path, nbytes: int) -> float:
    """Bytes a second that ``dd`` reaches, the best of three."""
    blocks = max(1, nbytes >> 22)
    rates = []
    for _ in range(3):
        start = time.perf_counter()
        command = ["dd", "if=/dev/zero", f"of={folder / 'dd'}", "bs=4M", f"count={blocks}", "conv=fsync"]
        subprocess.run(command, check=True, capture_output=True)
        rates.append((blocks << 22) / (time.perf_counter() - start))
    return max(rates)


if __name__ == "__main__":
    main()
