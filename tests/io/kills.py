"""Kill runs at random moments of asynchronous saves, and check what they leave.

    python -m tests.io.kills --kills 1000 --processes 4

Each trial forks processes that save without pause, as one run or as the ranks of one, and kills them after a random
time. Then every checkpoint must be whole and hold what was saved at its step, the last one that a run has seen
committed must be there, or a later one, and after the next save nothing else may be in the folder. Processes are forked
ahead of any thread, so that a trial takes a few milliseconds instead of an import.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import blufunc as bf
from blufunc import NamedSharding, P, io
from blufunc.core.arrays import backend
from blufunc.core.arrays.process_info import Job
from blufunc.io import manifest, storage
from blufunc.parallel.runtime import bootstrap

KEEP = 2
LONGEST = 0.3  # seconds until a kill: a save takes 20 to 60 ms, and a part of them waits for a commit
ROWS, COLUMNS = 64, 4096  # 1 MiB: several chunks are not needed for a kill to fall between two system calls


def world(rank, size, scratch):
    """Stand-in of a job's store: process 0 leaves its values in files."""

    def gather(name, value):
        path = scratch / name.replace(" ", "-")
        if rank == 0:
            path.with_suffix(".new").write_bytes(value)
            os.replace(path.with_suffix(".new"), path)
        while not path.exists():
            time.sleep(0.001)
        return [path.read_bytes()]

    return SimpleNamespace(rank=rank, size=size, deadline=30.0, gather=gather)


def state(step, rank, size):
    """The state after a step; the array is sharded over the processes."""
    values = np.full((ROWS, COLUMNS), step, np.float32) + np.arange(ROWS, dtype=np.float32)[:, None] / ROWS
    tree = {"position": step, "host": np.full(1000, step)}
    if size == 1:
        return tree | {"x": values}
    mesh = bf.make_mesh((size,), ("data",))
    rows = NamedSharding(mesh, P("data"))
    return tree | {"x": bf.make_array_from_callback(values.shape, rows, lambda index: values[index])}


def save_forever(folder, rank, size, scratch, first):
    """The run: one save after the other, of which those that are committed are noted."""
    if size > 1:
        backend.join(Job(rank, size, rank))
        bootstrap._world = world(rank, size, scratch)
    saves = io.Checkpointer(folder, keep=KEEP)
    step = first
    while True:
        saves.save(step, state(step, rank, size))
        if step % 3 == 0:
            saves.wait()
            if rank == 0:
                (scratch / "new").write_text(str(step))
                os.replace(scratch / "new", scratch / "committed")
        step += 1


def check(folder, committed):
    """Every checkpoint is whole; the latest is no older than the last that was seen."""
    saves = io.Checkpointer(folder, keep=KEEP)
    found = saves.steps()
    assert max(found, default=-1) >= committed, f"step {committed} was committed, and {found} are there"
    like = {"position": 0, "host": np.zeros(1000, int), "x": np.zeros((ROWS, COLUMNS), np.float32)}
    for step in found:
        values = saves.restore(like, step=step)
        expected = state(step, 0, 1)
        assert values["position"] == step and np.array_equal(values["host"], expected["host"])
        assert np.array_equal(values["x"], expected["x"]), f"the checkpoint of step {step} is torn"


def check_tidy(folder, step):
    """After the next save only checkpoints are in the folder."""
    with io.Checkpointer(folder, keep=KEEP) as saves:
        saves.save(step, state(step, 0, 1))
    kept = manifest.listing(storage.Local(str(folder))).committed
    names = {".lock", *(e.folder for e in kept), *(e.manifest for e in kept)}
    assert set(os.listdir(folder)) == names and len(kept) <= KEEP, sorted(os.listdir(folder))
    for e in kept:
        inside = os.listdir(folder / e.folder)
        assert not [name for name in inside if not name.endswith(".safetensors")], inside


def forked(f, *args):
    """A child that runs ``f``; its exit status is 0 if that returns."""
    child = os.fork()
    if child:
        return child
    try:
        f(*args)
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def trial(folder, scratch, processes, draw, first):
    for path in scratch.iterdir():
        path.unlink()
    children = [forked(save_forever, folder, r, processes, scratch, first) for r in range(processes)]
    time.sleep(draw.uniform(0.0, LONGEST * (1 + processes) / 2))
    draw.shuffle(children)
    for child in children:
        os.kill(child, signal.SIGKILL)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert all(end == -signal.SIGKILL for end in ends), f"a run failed by itself: {ends}"
    noted = scratch / "committed"
    committed = int(noted.read_text()) if noted.exists() else -1
    return committed


def warm():
    """Import all that trials need: a fork has it."""
    mesh = bf.make_mesh((1,), ("data",))
    bf.make_array_from_callback((1,), NamedSharding(mesh, P("data")), lambda index: np.zeros(1))
    return io.Checkpointer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warm()
    draw = random.Random(options.seed)
    committed, saved, remains = -1, 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder, scratch = Path(name, "run"), Path(name, "scratch")
        scratch.mkdir()
        for k in range(options.kills):
            first = 1000 * k
            committed = max(committed, trial(folder, scratch, options.processes, draw, first))
            found = manifest.listing(storage.Local(str(folder)))
            saved += bool(found.committed and found.committed[-1].step >= first)
            remains += bool(found.started)
            checks = [(check, folder, committed)]
            if k % 5 == 0 or k == options.kills - 1:
                checks.append((check_tidy, folder, first + 999))
            for f, *args in checks:
                _, status = os.waitpid(forked(f, *args), 0)
                if status:
                    sys.exit(f"trial {k} of seed {options.seed}: {f.__name__} failed")
            if len(checks) > 1:
                committed = first + 999
    print(
        f"{options.kills} kills of {options.processes} process(es): {saved} after a commit, {remains} within a save"
    )


if __name__ == "__main__":
    main()
