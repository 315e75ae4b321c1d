"""The analysis of kernel times, on synthetic traces; no device is needed."""

import gzip
import json

import numpy as np
import pytest

from benchmarks.harness import gpu_tables, programs, timeline
from benchmarks.harness.timeline import Kernel
from benchmarks.suites import gpu_timeline

GEMM, NCCL = "nvjet_tst_128x256", "ncclDevKernel_AllReduce"


def event(name, ts, dur, stream=7, device=0, cat="kernel", grid=(8, 1, 1)):
    return {
        "cat": cat,
        "name": name,
        "ts": ts,
        "dur": dur,
        "args": {"device": device, "stream": stream, "grid": list(grid)},
    }


EVENTS = [
    {"cat": "cpu_op", "name": "aten::add", "ts": 0, "dur": 50, "args": {}},
    event("layer_norm_add", 100, 10),
    event(GEMM, 112, 20),
    event(NCCL, 120, 40, stream=9),
    event(GEMM, 140, 30),
    event(GEMM, 140, 30, device=1),
    event("attention_forward", 175, 5),
    {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 180, "dur": 2, "args": {"device": 0, "stream": 7}},
]


def test_kernels_of_one_device_are_found_and_written_as_events():
    found = timeline.kernels_of(reversed(EVENTS))
    assert [k.name for k in found] == ["layer_norm_add", GEMM, NCCL, GEMM, "attention_forward", "Memcpy DtoD"]
    parsed = timeline.kernels_of(timeline.events_of(found))
    assert [(k.name, k.start + 100, k.us, k.stream, k.grid) for k in parsed] == [
        (k.name, k.start, k.us, k.stream, k.grid) for k in found
    ]


@pytest.mark.parametrize(
    "name, kind",
    [
        (GEMM, "GEMM"), ("void cutlass::Kernel2<x>", "GEMM"), ("sm90_xmma_gemm_bf16", "GEMM"), ("splitKreduce", "GEMM"),
        (NCCL, "NCCL"), ("attention_query_gradient", "attention"), ("Memset (Device)", "copies"),
        ("mul_add_tanh", "fused"),
    ],
)  # fmt: skip
def test_classes(name, kind):
    assert Kernel(name, 0, 1).kind == kind


def test_the_summary_of_a_step():
    found = timeline.summary(timeline.kernels_of(EVENTS))
    assert found["step_us"] == 82
    assert {kind: of["us"] for kind, of in found["classes"].items()} == {
        "NCCL": 40, "copies": 2, "attention": 5, "GEMM": 50, "fused": 10,
    }  # fmt: skip
    # the collective is alone from 132 to 140; nothing runs from 110 to 112 and from 170 to 175
    assert (found["only_nccl_us"], found["nccl_beside_us"], found["idle_us"]) == (8, 32, 7)
    assert [(g["before"], g["after"], g["us"]) for g in found["gaps"]] == [
        (GEMM, "attention_forward", 5), ("layer_norm_add", GEMM, 2),
    ]  # fmt: skip


def test_no_kernels_are_an_error():
    with pytest.raises(ValueError, match="did not see the device"):
        timeline.summary([])


def test_a_gap_begins_where_the_last_of_all_streams_ends():
    found = timeline.gaps([Kernel("long", 0, 100, 1), Kernel("short", 10, 5, 2), Kernel("next", 103, 1, 2)])
    assert found == [{"before": "long", "after": "next", "times": 1, "us": 3}]


@pytest.mark.parametrize(
    "alone, expected",
    [
        # overlapped with NCCL: the GEMM at 140 for 20 of its 30 us; that at 112 for 12 of 20
        ([Kernel(GEMM, 0, 10, grid=(8, 1, 1)), Kernel(GEMM, 20, 20, grid=(8, 1, 1))], (2, 50, 30, 0)),
        # in another order: kernels cannot be matched, unless all take as long
        ([Kernel(GEMM, n, us, grid=(8, 1, 1)) for n, us in enumerate((10, 20, 20))], (0, 0, 0, 2)),
        ([Kernel(GEMM, n, us, grid=(8, 1, 1)) for n, us in enumerate((10, 11, 12))], (2, 50, 22, 0)),
        ([Kernel(GEMM, 0, 10, grid=(4, 1, 1))], (0, 0, 0, 2)),  # another grid is another product
        ([], (0, 0, 0, 2)),  # and none of this run is without a collective
    ],
)
def test_products_beside_collectives(alone, expected):
    found = timeline.summary(timeline.kernels_of(EVENTS), alone)["products"]
    assert tuple(found[k] for k in ("times", "us", "alone_us", "unknown")) == expected


def test_without_a_run_on_one_gpu_the_products_without_a_collective_count():
    kernels = timeline.kernels_of([*EVENTS, event(GEMM, 200, 10)])
    found = timeline.summary(kernels)["products"]
    assert (found["times"], found["us"], found["alone_us"]) == (2, 50, 20)


def test_coverage_agrees_with_counting():
    rng = np.random.default_rng(0)
    for _ in range(20):
        starts, sizes = rng.integers(0, 50, 8), rng.integers(1, 9, 8)
        merged = timeline.union(zip(starts.tolist(), (starts + sizes).tolist()))
        points = {x for a, n in zip(starts, sizes) for x in range(a, a + n)}
        assert timeline.length(merged) == len(points)
        a, b = sorted(rng.integers(0, 60, 2).tolist())
        assert timeline.covered(a, b, merged) == len(points & set(range(a, b)))


def test_the_step_of_median_length():
    steps = [[Kernel("x", 0, us)] for us in (5.0, 1.0, 9.0)] + [[]]
    assert timeline.middle(steps)[0].us == 5.0
    assert timeline.middle([[]]) == []


def test_the_report_names_what_costs():
    kernels = timeline.kernels_of([*EVENTS, event(GEMM, 200, 10)])
    text = timeline.report(timeline.summary(kernels))
    for words in ("only NCCL", "GEMM", "5.0 us in   1 gaps between " + GEMM, "2.50x"):
        assert words in text


# -- the command -----------------------------------------------------------------------------------


def options(tmp_path, *words):
    return gpu_timeline._parser().parse_args(["--out", str(tmp_path), *words])


def test_one_gpu_comes_before_several(tmp_path):
    o = options(
        tmp_path, "--gpus", "4", "--layouts", "data,tensor", "--forms", "one,each", "--variants", "chunk=4096"
    )
    found = list(gpu_timeline.programs(o, tmp_path))
    assert [(p.library, p.tags["layout"], p.tags["gpus"]) for p in found] == [
        ("blufunc chunk=4096", "one", 1),
        ("blufunc, one process", "data", 4), ("blufunc, a process each", "data", 4),
        ("blufunc, one process", "tensor", 4), ("blufunc, a process each", "tensor", 4),
    ]  # fmt: skip
    assert all("--chunk=4096" in p.args for p in found)
    assert found[2].module == "blufunc.parallel.launch" and found[2].args[:2] == ("-n", "4")
    assert len({gpu_timeline.trace_file(tmp_path, p) for p in found}) == 5
    assert [len(list(gpu_timeline.programs(options(tmp_path, "--gpus", n), tmp_path))) for n in "12"] == [
        1,
        2,
    ]


PROGRAM = """
import json, sys
from benchmarks.peers import clock
name, path = sys.argv[1:]
steps = json.loads(open(path + ".made").read())
open(path, "w").write(json.dumps(steps))
clock.emit(step_ms=0.08)
"""


def test_what_a_run_leaves(tmp_path, monkeypatch, capsys):
    """The record holds the analysis of both runs, and the table a row of each.

    The traces are stored next to it.
    """
    folder = tmp_path / "out"
    (tmp_path / "fake_timeline.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def planned(o, scratch):
        for gpus, events in ((1, [event(GEMM, 0, 10), event(GEMM, 10, 5)]), (2, EVENTS)):
            path = scratch / f"{gpus}"
            path.with_name(f"{gpus}.made").write_text(json.dumps([events]))
            tags = {"layout": "data" if gpus > 1 else "one", "gpus": gpus}
            yield programs.Program("blufunc", "fake_timeline", ("x", str(path)), tags)

    monkeypatch.setattr(gpu_timeline, "programs", planned)
    monkeypatch.setattr(
        gpu_timeline, "trace_file", lambda scratch, program: scratch / str(program.tags["gpus"])
    )
    monkeypatch.setattr("sys.argv", ["gpu_timeline", "--gpus", "2", "--out", str(folder)])
    gpu_timeline.main()
    printed = capsys.readouterr().out
    record = json.loads((folder / "gpu_timeline.json").read_text())
    assert [r["timeline"]["step_us"] for r in record["rows"]] == [15, 82]
    assert record["rows"][1]["timeline"]["products"]["alone_us"] == 15
    assert "### One step of GPT-2 124M on the first GPU" in printed and "| data | 2 |" in printed
    assert gpu_tables.table(record) in printed
    traces = sorted(path.name for path in folder.glob("*.trace.json.gz"))
    assert traces == ["gpu_timeline_blufunc-data-2.trace.json.gz", "gpu_timeline_blufunc-one-1.trace.json.gz"]
    assert len(json.loads(gzip.decompress((folder / traces[0]).read_bytes()))["traceEvents"]) == 6
    assert not list(folder.glob("*.part"))
