"""``profiler``: traces, and times by line."""

import gzip
import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import errors, profiler
from blufunc.core.arrays import recording
from blufunc.kernels.backends.cpu import program, toolchain
from blufunc.kernels.backends.cuda.driver import device_times
from blufunc.kernels.inspect import roofline
from tests.emulation import fake_cuda


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setattr(toolchain, "WORTH_CALLING", 1)


@pytest.fixture
def cuda(monkeypatch):
    fake_cuda.install(monkeypatch)
    return bf.devices("cuda")[0]


def layer(w, x):
    h = x @ w
    return jnp.tanh(h) * 2


def read(path):
    """The slices and all events of a file; strict JSON, and slices of a row nest."""
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data, parse_constant=pytest.fail)
    events = trace["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [{**e, "row": rows[e["tid"]]} for e in events if e["ph"] == "X"]
    for e in slices:
        for at in (1e3 * e["ts"], 1e3 * e["dur"]):
            assert at >= 0 and at == pytest.approx(round(at), abs=1e-3)  # whole nanoseconds
    for tid in rows:
        outer = []
        for e in sorted((e for e in slices if e["tid"] == tid), key=lambda e: (e["ts"], -e["dur"])):
            while outer and outer[-1] <= e["ts"] + 1e-3:
                outer.pop()
            end = e["ts"] + e["dur"]
            assert not outer or end <= outer[-1] + 1e-3
            outer.append(end)
    return slices, events


def arguments(device=None):
    w, x = jnp.ones((64, 64)), jnp.ones((256, 64))
    return [bf.device_put(a, device) for a in (w, x)] if device else [w, x]


def test_steps_of_a_program_with_the_users_lines(tmp_path, compiled):
    f, args = bf.jit(layer), arguments()
    plain = f(*args)
    with profiler.trace(tmp_path / "trace.json"):
        traced = f(*args)
    assert recording.active is None
    np.testing.assert_array_equal(traced, plain)
    slices, events = read(tmp_path / "trace.json")
    steps = [e for e in slices if e["row"] == "CPU"]
    assert len(steps) == len(f.lower(*args).cost.steps)
    assert any("test_profiler.py" in e["args"]["lines"] and "(layer)" in e["args"]["lines"] for e in steps)
    assert sum(e["args"]["bytes"] for e in steps) == f.lower(*args).cost.bytes
    (call,) = [e for e in slices if e["name"] == "layer"]
    assert call["row"] == "Python"
    for e in steps:
        assert call["ts"] <= e["ts"] and e["ts"] + e["dur"] <= call["ts"] + call["dur"] + 1e-3
    held = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert len(held) == len(steps) + 1 and 0 < max(held) <= f.lower(*args).memory.peak_bytes
    assert held[-1] == 0 and 0 not in held[:-1]


def python_calls(f):
    """The number of Python functions that are entered."""
    entered = []
    sys.setprofile(
        lambda frame, event, arg: entered.append(frame.f_code.co_name) if event == "call" else None
    )
    try:
        f()
    finally:
        sys.setprofile(None)
    return len(entered)


def test_a_trace_costs_a_compiled_program_a_few_calls_of_python(tmp_path, compiled):
    """So the overhead is below 3% of programs of 40 us."""

    def deep(w, x):
        for _ in range(12):
            x = layer(w, x)
        return x

    f, args = bf.jit(deep), arguments()
    for _ in range(2):
        f(*args)
    plain = python_calls(lambda: f(*args))
    with profiler.trace(tmp_path / "t.json"):
        f(*args)
        traced = python_calls(lambda: f(*args))
    assert len(f.lower(*args).cost.steps) >= 12
    assert traced - plain <= 2


def test_steps_are_timed_in_the_one_call_that_runs_them(compiled, monkeypatch):
    def fails(*args):
        raise AssertionError("the steps ran from Python")

    monkeypatch.setattr(program.Runner, "__call__", fails)
    found = profiler.profile(layer, *arguments(), repeats=2)
    assert found.ms > 0 and all(t.ms > 0 for t in found.timings)


def test_steps_that_python_runs_are_timed(tmp_path, compiled):
    """Not all of this program is native: it has a callback on the host."""

    def f(w, x):
        y = layer(w, x)
        return layer(
            w, bf.pure_callback(lambda y: time.sleep(0.01) or y, bf.ShapeDtypeStruct(y.shape, y.dtype), y)
        )

    with profiler.trace(tmp_path / "t.json"):
        bf.jit(f)(*arguments())
    slices, _ = read(tmp_path / "t.json")
    longest = max((e for e in slices if e["row"] == "CPU"), key=lambda e: e["dur"])
    assert "callback" in longest["args"]["computes"] and longest["dur"] >= 1e4


def test_compilation_operations_and_annotations(tmp_path):
    with profiler.trace(tmp_path / "trace.json.gz"):
        with profiler.StepTraceAnnotation("train", step_num=3):
            bf.jit(layer)(*arguments())
        jnp.ones(3) + 1
        profiler.annotate_function(lambda: None, "named", tree={}, loss=float("nan"), kind="mine")()
        with profiler.TraceAnnotation(3, n=np.int64(7), x=2.5):
            pass
    slices, _ = read(tmp_path / "trace.json.gz")
    kinds = {e["name"]: e["cat"] for e in slices}
    assert kinds["trace layer"] == kinds["compile layer"] == "compilation"
    assert kinds["add"] == "operation" and kinds["train"] == kinds["named"] == "annotation"
    facts = {e["name"]: e["args"] for e in slices if e["cat"] == "annotation"}
    assert facts["train"] == {"step_num": 3} and facts["3"] == {"n": 7, "x": 2.5}
    assert facts["named"] == {"tree": "{}", "loss": "nan", "kind": "mine"}
    assert next(e for e in slices if e["name"] == "layer as NumPy calls")["args"]["flops"] > 0


def test_perfettos_trace_processor_finds_kernels_by_query(tmp_path, compiled):
    """The parser of Perfetto's own page; its package downloads it when it first runs."""
    package = pytest.importorskip("perfetto.trace_processor", reason="pip install perfetto")
    f, args = bf.jit(layer), arguments()
    with profiler.trace(tmp_path / "t.json.gz"):
        for n in range(3):
            with profiler.StepTraceAnnotation("train", step_num=n):
                f(*args)
    try:
        processor = package.TraceProcessor(trace=str(tmp_path / "t.json.gz"))
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"the trace processor could not be downloaded: {e}")
    slices, _ = read(tmp_path / "t.json.gz")
    try:
        found = processor.query(
            "select slice.name as name, slice.dur as dur, thread.name as row from slice "
            "join thread_track on slice.track_id = thread_track.id join thread using (utid)"
        )
        got = sorted((r.row, r.name, r.dur) for r in found)
        assert got == sorted((e["row"], e["name"], round(e["dur"] * 1e3)) for e in slices)
        lines = processor.query("select distinct string_value as line from args where key like '%lines'")
        assert any("test_profiler.py" in r.line for r in lines)
        lost = processor.query(
            "select sum(value) as n from stats where severity != 'info' and name like '%slice%'"
        )
        assert not next(iter(lost)).n
    finally:
        processor.close()


def in_threads(count, run):
    ready = threading.Barrier(count)  # all alive at once: identities of threads are reused
    threads = [
        threading.Thread(target=lambda: (ready.wait(), run(), ready.wait()), name="worker")
        for _ in range(count)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def test_threads_have_rows(tmp_path, compiled):
    f, args = bf.jit(layer), arguments()
    f(*args)
    with profiler.trace(tmp_path / "t.json"):
        in_threads(3, lambda: [f(*args) for _ in range(10)])
    slices, _ = read(tmp_path / "t.json")
    rows = {(e["tid"], e["row"]) for e in slices}
    assert sorted(name for _, name in rows) == 3 * ["CPU, worker"] + 3 * ["Python, worker"]
    assert len([e for e in slices if e["name"] == "layer"]) == 30


def test_a_decorated_function_in_threads(tmp_path):
    calls = {}

    @profiler.TraceAnnotation("waits")
    def waits():
        gate.wait()
        calls[threading.get_ident()] = time.sleep(0.05 * len(calls))

    gate = threading.Barrier(2)
    with profiler.trace(tmp_path / "t.json"):
        in_threads(2, waits)
    slices, _ = read(tmp_path / "t.json")
    assert len(slices) == len({e["tid"] for e in slices}) == 2


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_program_that_fails(where, tmp_path, compiled, request):
    device = request.getfixturevalue("cuda") if where == "cuda" else None

    def fails(x):
        raise ZeroDivisionError

    def f(w, x):
        y = layer(w, x)
        return layer(w, bf.pure_callback(fails, bf.ShapeDtypeStruct(y.shape, y.dtype), y))

    def run():
        with profiler.trace(tmp_path / "t.json"):
            bf.block_until_ready(bf.jit(f)(*arguments(device)))

    with pytest.raises(ZeroDivisionError):
        run()
    slices, _ = read(tmp_path / "t.json")
    assert [e for e in slices if e["name"] == "f" and e["cat"] == "program"]
    steps = [e for e in slices if e["row"] in ("CPU", "cuda:0")]
    total = len(bf.jit(f).lower(*arguments(device)).cost.steps)
    assert 0 < len(steps) < total


def test_a_device(tmp_path, cuda):
    f, args = bf.jit(layer), arguments(cuda)
    plain = np.asarray(f(*args))
    with profiler.trace(tmp_path / "t.json"):
        for _ in range(4):  # a graph would replay the last ones
            traced = np.asarray(f(*args))
    np.testing.assert_array_equal(traced, plain)
    slices, events = read(tmp_path / "t.json")
    steps = [e for e in slices if e["row"] == "cuda:0"]
    assert len(steps) == 4 * len(f.lower(*args).cost.steps)
    assert {e["cat"] for e in steps} == {"kernel", "library"}
    assert [e for e in slices if e["cat"] == "transfer" and e["args"]["bytes"] == traced.nbytes]


def test_many_steps_of_a_device_are_read_in_between(tmp_path, cuda, monkeypatch):
    monkeypatch.setattr(device_times, "_MOST", 4)
    f, args = bf.jit(layer), arguments(cuda)
    with profiler.trace(tmp_path / "t.json"):
        for _ in range(5):
            f(*args)
    steps = [e for e in read(tmp_path / "t.json")[0] if e["row"] == "cuda:0"]
    assert len(steps) == 5 * len(f.lower(*args).cost.steps)


def test_threads_of_a_device(tmp_path, cuda, monkeypatch):
    monkeypatch.setattr(device_times, "_MOST", 4)
    f, args = bf.jit(layer), arguments(cuda)
    f(*args)
    with profiler.trace(tmp_path / "t.json"):
        in_threads(3, lambda: [f(*args) for _ in range(8)])
    steps = [e for e in read(tmp_path / "t.json")[0] if e["row"] == "cuda:0"]
    assert len(steps) == 24 * len(f.lower(*args).cost.steps)


def test_a_mesh(tmp_path, monkeypatch):
    monkeypatch.setattr(bf.config, "cpu_devices", 2)
    mesh = bf.make_mesh((2,), ("x",), devices=bf.devices("cpu"))
    x = bf.device_put(jnp.ones((8, 4)), bf.NamedSharding(mesh, bf.P("x")))
    f = bf.jit(lambda x: jnp.sum(x, 0))
    f(x)
    with profiler.trace(tmp_path / "t.json"):
        f(x)
    slices, _ = read(tmp_path / "t.json")
    assert len({e["tid"] for e in slices if e["row"].startswith("CPU")}) == 2
    assert any(e["name"].endswith("on x=2") and e["row"] == "Python" for e in slices)


def test_a_folder_is_laid_out_for_tensorboard(tmp_path):
    with profiler.trace(tmp_path / "logs"):
        pass
    (path,) = (tmp_path / "logs").rglob("*.trace.json.gz")
    assert path.relative_to(tmp_path).parts[:3] == ("logs", "plugins", "profile")


def test_the_file_is_written_if_the_block_raises(tmp_path):
    def fails():
        with profiler.trace(tmp_path / "t.json"):
            jnp.ones(3) + 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert [e["name"] for e in read(tmp_path / "t.json")[0]].count("add") == 1


def test_an_annotation_that_began_before_the_trace_is_left_out(tmp_path):
    with profiler.TraceAnnotation("early"):
        profiler.start_trace(tmp_path / "t.json")
    profiler.stop_trace()
    assert not read(tmp_path / "t.json")[0]


def test_a_trace_that_the_block_ends(tmp_path):
    with profiler.trace(tmp_path / "t.json"):
        profiler.stop_trace()
    assert (tmp_path / "t.json").exists()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda path: profiler.stop_trace(), "no trace is on"),
        (lambda path: profiler.start_trace(path, create_perfetto_link=True), "create_perfetto_link"),
        (lambda path: profiler.start_trace(path, profiler_options={}), "profiler_options"),
        (lambda path: profiler.start_trace(3), "writes to a path, not to 3"),
        (lambda path: profiler.start_trace("/proc/none/t.json"), "cannot write /proc/none/t.json"),
        (lambda path: profiler.profile(3), "profile"),
        (lambda path: profiler.annotate_function(3), "annotate_function"),
    ],
)
def test_bad_input(call, message, tmp_path):
    with pytest.raises(errors.ArgumentError, match=message):
        call(tmp_path)
    assert recording.active is None


def test_one_trace_at_a_time(tmp_path):
    with profiler.trace(tmp_path / "t.json"):
        with pytest.raises(errors.ArgumentError, match="a trace is on already"):
            profiler.start_trace(tmp_path / "u.json")
    assert (tmp_path / "t.json").exists() and not (tmp_path / "u.json").exists()


@pytest.mark.parametrize("how", ["compiled", "as NumPy calls"])
def test_profile_by_line(how, monkeypatch):
    if how == "compiled":
        monkeypatch.setattr(toolchain, "WORTH_CALLING", 1)
    found = profiler.profile(layer, *arguments(), repeats=2)
    assert found.name == "layer" and len(found.lines) == 2
    assert all("(layer)" in t.line for t in found.lines)
    assert sum(t.ms for t in found.lines) == pytest.approx(found.ms)
    cost = sum(s.bytes for s in found.timings)
    assert sum(t.bytes for t in found.lines) == pytest.approx(cost)
    assert [t.ms for t in found.lines] == sorted((t.ms for t in found.lines), reverse=True)
    assert str(found).endswith(f"layer: {found.ms:.4g} ms in {len(found.timings)} steps")


def test_profile_of_loops_and_branches(compiled):
    def scanned(w, x):
        def body(c, _):
            c = jnp.tanh(c @ w)
            return c, None

        return bf.lax.scan(body, x, None, length=5)[0]

    found = profiler.profile(scanned, *arguments(), repeats=1)
    assert {t.line.split()[-1] for t in found.lines} == {"(body)"}


def test_profile_of_a_device(cuda, monkeypatch):
    monkeypatch.setitem(roofline._MULTIPLIED, "cuda", 64)
    monkeypatch.setitem(roofline._COPIED, "cuda", 1 << 10)
    found = profiler.profile(bf.jit(layer), *arguments(cuda), repeats=1)
    assert {t.line.split()[-1] for t in found.lines} == {"(layer)"}


def test_profile_of_nothing():
    assert "nothing is computed" in str(profiler.profile(lambda x: x, jnp.ones(3)))
