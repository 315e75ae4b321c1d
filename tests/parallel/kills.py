"""Faults in ranks at random moments: no job hangs, and restarts change no result.

    python -m tests.parallel.kills --faults 200 --restarts 50

A trial prints a line when it ends, and the counts are printed also if the run is interrupted: it takes 25 minutes on
two busy cores. Each trial has a seed of its own, so ``--first 57 --faults 1`` repeats one, and ``--first 120`` goes on.

A fault is a SIGKILL, a SIGSTOP, an exception or an exit of one rank, at a random moment from its start on. The job must
end by itself within ``LIMIT`` seconds, with a failure, and leave no process. A run of ``examples/gpt`` under
``--restarts``, of which a rank has such a fault in each attempt, must have the losses and the state of an undisturbed
one, bit for bit.
"""

import argparse
import collections
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from blufunc import io
from blufunc.parallel.runtime import guard
from tests.parallel.launching import start

PROGRAM = Path(__file__).with_name("faulty.py")
KINDS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "raise": signal.SIGUSR1,  # the program raises an exception,
    "exit": signal.SIGUSR2,  # or exits with 3
}
ENGINES = ("nccl", "mpi")
DEADLINE = 5.0  # BLUFUNC_DEADLINE: after which a stopped rank is noticed
LIMIT = 60.0  # seconds in which the job must have ended
LONGEST = 4.0  # seconds from the first sight of a rank to its fault: half of them are in its start


def tree(root):
    """Descendants of a process."""
    children = collections.defaultdict(list)
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{name}/stat").read_text()
            children[int(stat.rpartition(")")[2].split()[1])].append(int(name))
    found = [root]
    for process in found:
        found += children[process]
    return found[1:]


def ranks_of(launcher):
    """The processes of the ranks, by rank."""
    found = {}
    for process in tree(launcher.pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            environ = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            rank = [int(v[5:]) for v in environ if v.startswith(b"RANK=")]
            if rank and str(PROGRAM).encode() in words and guard.__file__.encode() not in words:
                if b"-c" not in words:  # the shell of a rank
                    found[rank[0]] = process
    return found


def end_of(process, ranks):
    """Wait for the end of a job; what it has written to stderr."""
    try:
        return process.communicate(timeout=LIMIT)[1]
    except subprocess.TimeoutExpired:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGXCPU)
        time.sleep(1)
        for one in (*tree(process.pid), process.pid):  # any of them may hold the pipe
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        raise AssertionError(f"it hangs:\n{process.communicate()[1]}") from None


def trial(draw, engine, kind=None):
    """Returns the kind of one fault, its moment, and the seconds to the end."""
    kind = kind or draw.choice(list(KINDS))
    process = start("-n", 2, "--engine", engine, PROGRAM, "spin", engine, BLUFUNC_DEADLINE=str(DEADLINE))
    try:
        while len(found := ranks_of(process)) < 2:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
        time.sleep(after := draw.uniform(0.0, LONGEST))
        everything = tree(process.pid)
        began = time.monotonic()
        os.kill(found[draw.randrange(2)], KINDS[kind])
        err = end_of(process, found.values())
        seconds = time.monotonic() - began
    finally:
        process.kill()
    assert process.returncode not in (0, io.STOPPED), err
    assert "launch: " in err and "all 2 ranks have ended" in err, err
    end = time.monotonic() + 5
    while left := [p for p in everything if Path(f"/proc/{p}").exists()]:
        assert time.monotonic() < end, f"{kind}: {left} outlive their job"
        time.sleep(0.02)
    return kind, after, seconds


def trained(folder, name, restarts, seed, steps, engine, *options):
    """Losses and state of a run, disturbed once in each attempt but the last."""
    words = ["--steps", steps, "--data", folder / "text.txt", "--out", folder / name, "--no-progress"]
    process = start(
        *("-n", 2, "--engine", engine, "--restarts", restarts, *options, PROGRAM, "train", seed, restarts),
        *words,
        *("--sample-tokens", 0),
        BLUFUNC_DEADLINE="20",
    )
    try:
        _, err = process.communicate(timeout=120 * (restarts + 5))
    finally:
        process.kill()
    assert process.returncode == 0, err
    saves = io.Checkpointer(folder / name / "checkpoints")
    return saves.facts()["history"], saves.restore(), err


def restarted(folder, restarts, seed=0, engine="mpi", steps=None):
    """A run with faults ends as one without; returns what ended the attempts."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    steps = steps or 10 + 4 * restarts
    history, state, _ = trained(folder, "undisturbed", 0, seed, steps, engine)
    other, values, err = trained(folder, "disturbed", restarts, seed, steps, engine)
    assert len(history["train"]) == steps and other == history
    assert values.keys() == state.keys()
    for name, array in state.items():
        assert name == "position" or array.tobytes() == values[name].tobytes(), name
    lines = [line for line in err.splitlines() if line.startswith("launch:   ")]
    assert len(lines) == (restarts + 1 if restarts else 0), err
    return lines


class Counts:
    """Trials that ended as they must, by kind, and those that did not."""

    def __init__(self, seed):
        self.seed, self.seconds, self.failed = seed, collections.defaultdict(list), 0

    def add(self, k):
        """Run a trial, and say how it ended."""
        engine = ENGINES[k % len(ENGINES)]
        try:
            kind, after, seconds = trial(random.Random(f"{self.seed} {k}"), engine)
        except Exception:  # a trial that cannot be run is none that passed
            self.failed += 1
            print(f"trial {k} of seed {self.seed}, {engine}: {traceback.format_exc()}", flush=True)
            return
        self.seconds[kind].append(seconds)
        print(f"trial {k}, {engine}: {kind} after {after:.2f} s, ended within {seconds:.2f} s", flush=True)

    def __str__(self):
        lines = [
            f"{len(found)} times {kind}: ended within {max(found):.1f} s, half of them within "
            f"{statistics.median(found):.1f} s"
            for kind, found in sorted(self.seconds.items())
        ]
        counted = sum(map(len, self.seconds.values()))
        return "\n".join([*lines, f"{counted} faults were counted, {self.failed} trials failed"])


def interrupted(number, frame):
    raise KeyboardInterrupt


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial")
    parser.add_argument("--restarts", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupted)
    counts = Counts(options.seed)
    try:
        for k in range(options.first, options.first + options.faults):
            counts.add(k)
    finally:
        print(counts, flush=True)
    if options.restarts:
        with tempfile.TemporaryDirectory() as name:
            for line in restarted(Path(name), options.restarts, options.seed):
                print(line)
        print(f"{options.restarts} restarts: the losses and the state of an undisturbed run")
    sys.exit(1 if counts.failed else 0)


if __name__ == "__main__":
    main()
