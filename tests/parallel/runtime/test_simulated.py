"""Ranks as threads: collectives, and errors where ranks do not synchronize."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest

from blufunc import errors
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.runtime import engine, simulated
from blufunc.parallel.runtime.simulated import run_ranks


def mesh_of(*sizes: int) -> AbstractMesh:
    return AbstractMesh(sizes, ("x", "y", "z")[: len(sizes)])


def on_ranks(mesh, kind, parts, axes, **options):
    return run_ranks(mesh, lambda r: engine.current().collective(kind, parts[r], axes, **options))


PARTS = [np.arange(8.0, dtype=np.float32).reshape(4, 2) * (r + 1) for r in range(4)]


@pytest.mark.parametrize("op, expected", [("sum", sum(PARTS)), ("max", PARTS[3]), ("min", PARTS[0])])
def test_all_reduce(op, expected):
    for out in on_ranks(mesh_of(4), "all_reduce", PARTS, ("x",), op=op):
        np.testing.assert_array_equal(out, expected)


def test_all_gather_concatenates():
    for out in on_ranks(mesh_of(4), "all_gather", PARTS, ("x",), dim=1):
        np.testing.assert_array_equal(out, np.concatenate(PARTS, 1))


def test_reduce_scatter_gives_each_rank_its_slice():
    for r, out in enumerate(on_ranks(mesh_of(4), "reduce_scatter", PARTS, ("x",), dim=0)):
        np.testing.assert_array_equal(out, sum(PARTS)[r : r + 1])


def test_all_to_all_swaps_slices():
    for r, out in enumerate(on_ranks(mesh_of(4), "all_to_all", PARTS, ("x",), split_dim=0, concat_dim=1)):
        np.testing.assert_array_equal(out, np.concatenate([p[r : r + 1] for p in PARTS], 1))


def test_permute_gives_zeros_to_those_without_a_source():
    outs = on_ranks(mesh_of(4), "permute", PARTS, ("x",), perm=((0, 1), (3, 0)))
    for out, expected in zip(outs, [PARTS[3], PARTS[0], 0 * PARTS[0], 0 * PARTS[0]], strict=True):
        np.testing.assert_array_equal(out, expected)


def test_groups_follow_the_axes_in_the_order_given():
    parts = [np.full(1, r) for r in range(6)]
    mesh = mesh_of(2, 3)
    assert [o.tolist() for o in on_ranks(mesh, "all_gather", parts, ("y",), dim=0)][::3] == [
        [0, 1, 2],
        [3, 4, 5],
    ]
    both = on_ranks(mesh, "all_gather", parts, ("y", "x"), dim=0)
    assert all(o.tolist() == [0, 3, 1, 4, 2, 5] for o in both)


def test_ranks_know_where_they_are():
    places = run_ranks(mesh_of(2, 2), lambda r: (engine.current().rank, engine.current().coordinates))
    assert places[2] == (2, {"x": 1, "y": 0})


def test_half_precision_is_summed_in_float32():
    parts = [np.full(1, v, np.float16) for v in (2048, 1, 1, 0)]
    assert on_ranks(mesh_of(4), "all_reduce", parts, ("x",), op="sum")[0] == 2050


def test_results_are_of_each_rank_alone():
    outs = on_ranks(mesh_of(2), "all_reduce", PARTS[:2], ("x",), op="sum")
    outs[0][:] = -1
    np.testing.assert_array_equal(outs[1], PARTS[0] + PARTS[1])


def test_the_error_of_a_rank_ends_all():
    def function(rank):
        if rank == 2:
            raise KeyError("rank two")
        return engine.current().collective("all_reduce", PARTS[0], ("x",), op="sum")

    with pytest.raises(KeyError, match="rank two"):
        run_ranks(mesh_of(4), function)


def test_a_rank_that_ended_is_not_waited_for():
    def function(rank):
        return rank == 3 or engine.current().collective("all_reduce", PARTS[0], ("x",), op="sum")

    with pytest.raises(errors.CollectiveError, match="deadlock: ranks wait for one another") as e:
        run_ranks(mesh_of(4), function)
    assert "rank 3 has ended" in str(e.value) and "test_simulated.py" in str(e.value)


def test_ranks_that_wait_for_one_another_end():
    def function(rank):
        axes = ("x",) if rank == 0 else ("y",)
        return engine.current().collective("all_reduce", PARTS[0], axes, op="sum")

    with pytest.raises(errors.CollectiveError, match="deadlock: ranks wait for one another"):
        run_ranks(mesh_of(2, 2), function)


def test_a_late_rank_is_named():
    def function(rank):
        if rank == 1:
            time.sleep(0.3)
        return engine.current().collective("all_reduce", PARTS[0], ("x",), op="sum")

    with pytest.raises(errors.CollectiveError, match=r"waited 0.05 s in all_reduce.* for ranks \[1\]"):
        run_ranks(mesh_of(2), function, deadline=0.05)


@pytest.mark.parametrize("other", [np.zeros(3, np.float32), np.zeros((4, 2))])
def test_ranks_that_exchange_different_types_end(other):
    parts = [PARTS[0], PARTS[1], PARTS[2], other]
    with pytest.raises(errors.CollectiveError, match="ranks 0 and 3 call different collectives"):
        on_ranks(mesh_of(4), "all_reduce", parts, ("x",), op="sum")


def test_outside_of_a_program_there_is_no_engine():
    with pytest.raises(errors.CollectiveError, match="outside of a program"):
        engine.current()


def test_an_axis_that_the_mesh_has_not():
    with pytest.raises(errors.CollectiveError, match="'q'"):
        on_ranks(mesh_of(4), "all_reduce", PARTS, ("q",), op="sum")


def test_what_cannot_be_divided():
    with pytest.raises(errors.ShapeError, match="among 4 ranks"):
        on_ranks(mesh_of(4), "reduce_scatter", PARTS, ("x",), dim=1)


def test_threads_are_kept_for_the_next_run_and_runs_may_nest():
    def whoami(rank):
        return threading.get_ident()

    first = run_ranks(mesh_of(3), whoami)
    assert run_ranks(mesh_of(3), whoami) == first and len({*first, threading.get_ident()}) == 4
    meet = threading.Barrier(9, timeout=10)
    nested = run_ranks(mesh_of(3), lambda rank: run_ranks(mesh_of(3), lambda _: (meet.wait(), whoami(0))[1]))
    assert len({ident for idents in nested for ident in idents}) == 9


def test_an_interrupt_ends_the_run(monkeypatch):
    def interrupt(crew, function):
        main = threading.main_thread().ident
        threading.Timer(0.05, signal.pthread_kill, [main, signal.SIGINT]).start()
        run(crew, function)

    released = threading.Event()

    def function(rank):
        if rank == 0:
            released.wait(20)
        return engine.current().collective("all_reduce", PARTS[0], ("x",), op="sum")

    run = simulated._ThreadPool.run
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    try:
        with monkeypatch.context() as patch:
            patch.setattr(simulated._ThreadPool, "run", interrupt)
            with pytest.raises(KeyboardInterrupt):
                run_ranks(mesh_of(2), function)
    finally:
        signal.signal(signal.SIGINT, before)
        released.set()
    assert run_ranks(mesh_of(2), lambda rank: rank) == [0, 1]
