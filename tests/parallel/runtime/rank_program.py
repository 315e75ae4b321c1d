"""The program of the ranks of test_launch.py.

Usage: ``python -m blufunc.parallel.launch -n 4 rank_program.py SCENARIO``.
"""

import os
import signal
import sys
import time

import numpy as np

import blufunc as bf
from blufunc.parallel.collectives import primitives
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.runtime import bootstrap, consistency_check
from blufunc.parallel.runtime import engine as engines
from blufunc.parallel.runtime.mpi import MpiEngine
from blufunc.parallel.runtime.simulated import run_ranks

DTYPES = ("float32", "bfloat16", "int16", "complex64", "bool")


def calls(size):
    """Every collective with its options, for arrays of (2 * size, size, 3)."""
    ring = tuple((i, (i + 1) % size) for i in range(size))
    yield "all_reduce", {"op": "sum"}
    yield "all_reduce", {"op": "max"}
    yield "all_reduce", {"op": "min"}
    yield "all_gather", {"dim": 1}
    yield "reduce_scatter", {"dim": 1}
    yield "all_to_all", {"split_dim": 1, "concat_dim": 0}
    yield "all_to_all", {"split_dim": 1, "concat_dim": 2}
    yield "permute", {"perm": ring}
    yield "permute", {"perm": ring[:-1]}


def inputs(rank, shape, dtype):
    values = np.random.default_rng(rank).normal(size=shape) * 10
    return (values > 0) if dtype == "bool" else values.astype(bf.numpy.dtype(dtype))


def trials(engine, rank):
    """The results of every collective over every set of axes.

    The first array is large enough to be summed in parts.
    """
    mesh, results = engine.mesh, []
    for axes in [("x",), ("y",), ("x", "y"), ("y", "x")]:
        size = len(engines.group_of(rank, mesh, axes))
        results.append(engine.collective("all_reduce", inputs(rank, (1237, 3), "float32"), axes))
        for dtype in DTYPES:
            for kind, options in calls(size):
                if kind in ("all_reduce", "reduce_scatter") and dtype in ("bool", "complex64"):
                    continue
                x = inputs(rank, (2 * size, size, 3), dtype)
                results.append(engine.collective(kind, x, axes, **options))
    results.append(engine.collective("all_reduce", np.float32(rank), ("x",)))
    results.append(engine.collective("all_gather", np.zeros((0, 2), np.float32), ("x",), dim=0))
    return results


def collectives(world):
    """All collectives on a mesh of two axes match simulated devices bit for bit."""
    mesh = AbstractMesh((2, world.size // 2), ("x", "y"))
    engine = MpiEngine(world, mesh)
    got = trials(engine, world.rank)
    want = run_ranks(mesh, lambda rank: trials(engines.current(), rank))[world.rank]
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes(), (a, b)
    reordered = MpiEngine(world, AbstractMesh((world.size,), ("z",)), members=range(world.size)[::-1])
    assert reordered.rank == world.size - 1 - world.rank
    assert reordered.collective("all_gather", np.array([world.rank]), ("z",), dim=0).tolist() == [
        *range(world.size)[::-1]
    ]
    print(f"{len(got)} collectives agree")


def program(world, n, twice):
    """A local program; ranks that give other arguments have another one."""

    def step(x):
        x = primitives.psum_invariant_p.bind(x, axes=("x",), sizes=(world.size,), src="V", dst="I")
        if twice:
            x = primitives.psum_invariant_p.bind(x, axes=("x",), sizes=(world.size,), src="V", dst="I")
        return x

    return bf.make_jaxpr(step)(bf.numpy.ones(n))


def programs(world):
    """Ranks with equal programs agree; different programs fail on all ranks."""
    for n, twice in [(3, True), (3, True), (3 + world.rank // 2, False), (3, world.rank != 1)]:
        try:
            consistency_check.check_agreement(program(world, n, twice), world, world.members)
            print("agree")
        except bf.errors.CollectiveError as e:
            print("differ:", *str(e).splitlines())


def shapes(world):
    MpiEngine(world, AbstractMesh((world.size,), ("x",))).collective(
        "all_reduce", np.ones(3 + world.rank), ("x",)
    )


def kill(world):
    fault(world, lambda: os.kill(os.getpid(), signal.SIGKILL))


def fail(world):
    fault(world, lambda: {}["missing"])


def leave(world):
    fault(world, lambda: sys.exit(0))


def stall(world):
    fault(world, lambda: time.sleep(600), deadline=1.0)


def fault(world, what, deadline=60.0):
    """Three steps; then rank 1 runs ``what`` while others wait ``deadline`` seconds."""
    engine = MpiEngine(world, AbstractMesh((world.size,), ("data",)))
    for _ in range(3):
        engine.collective("all_reduce", np.ones(256, np.float32), ("data",))
    world.watchdog.deadline = deadline
    print("process", os.getpid(), flush=True)
    if world.rank == 1:
        print("at", time.time(), flush=True)
        what()
    engine.collective("all_gather", np.ones(256, np.float32), ("data",), dim=0)  # where they wait


if __name__ == "__main__":
    globals()[sys.argv[1]](bootstrap.initialize())
