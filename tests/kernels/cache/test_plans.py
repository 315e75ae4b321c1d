"""Plans on disk: equal to new ones, found for the same program only."""

import contextlib
import dataclasses
import os
import pickle
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, explain, extend, lax, optim, tree
from blufunc.config import config, from_environment
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Eqn, Literal
from blufunc.core.ir.trace import state
from blufunc.core.programs.alternatives import as_written
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cpu import planning
from blufunc.kernels.backends.cpu import program as host_program
from blufunc.kernels.backends.cuda import program as cuda_program
from blufunc.kernels.backends.cuda.device_model import HOPPER, Limits
from blufunc.kernels.backends.cuda.program import Draft
from blufunc.kernels.cache import fingerprint
from blufunc.kernels.cache import plans as plan_store
from blufunc.kernels.cache.disk import DiskCache
from blufunc.kernels.schedule import GroupStep, OpaqueStep
from blufunc.transforms.batching.batch import NamedAxis
from examples.gpt import model
from tests.emulation import fake_cuda

SIZES = model.Config(layers=2, heads=2, width=64, context=64, vocab=256)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where plans are kept, of programs of any size."""
    monkeypatch.setenv("BLUFUNC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(config, "plan_cache", True)
    monkeypatch.setattr(plan_store, "WORTH", 1)
    return tmp_path / "cache"


@pytest.fixture
def messages(monkeypatch, capsys):
    """The messages on plans since the last call."""
    monkeypatch.setattr(config, "debug", "cache")

    def messages():
        return [line for line in capsys.readouterr().err.splitlines() if line.startswith("cache: ")]

    return messages


def struct(*shape, dtype=np.float32):
    return bf.ShapeDtypeStruct(shape, dtype)


def training(low=False, chunk=None):
    """A training step, and the types of its arguments."""
    wiring = model.Wiring(loss_chunk=chunk)
    loss = lambda params, tokens: model.loss(params, tokens, SIZES, wiring)
    loss = bf.autocast(loss) if low else loss
    optimizer = optim.adamw(1e-3)

    def train_step(params, state, tokens):
        value, grads = bf.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, value

    params = bf.eval_shape(lambda key: model.init(key, SIZES), bf.random.key(0))
    state = bf.eval_shape(optimizer.init, params)
    return train_step, (params, state, struct(4, 65, dtype=np.int32))


def loop(x, y):
    def body(c, r):
        return bnp.where(r.sum() > 0, lax.cond(c[0] > 0, bnp.sin, bnp.cos, c), c @ y), r[::-1]

    carry, rows = lax.scan(body, x[0], x)
    return carry, bnp.sort(rows, axis=1), bnp.linalg.cholesky(y @ y.T + 3), lax.while_loop(
        lambda c: c.sum() < 1, lambda c: c + 1, carry
    )  # fmt: skip


def keys_and_indices(key, table, rows):
    noise = bf.random.normal(key, (64, 32)) + bf.random.uniform(key, (64, 1))
    found = table.at[rows].add(noise[:8]), bnp.cumsum(noise, axis=0), bnp.argsort(noise, axis=1)
    return found, bnp.take_along_axis(noise, found[2], 1), bnp.fft.fft(table)


KEY = bf.ShapeDtypeStruct((), bf.random.key(0).dtype)
PROGRAMS = {
    "training, float32": training(),
    "training, bfloat16": training(low=True),
    "training, a loss in chunks": training(chunk=64),
    "loops": (loop, (struct(16, 16), struct(16, 16))),
    "keys": (keys_and_indices, (KEY, struct(16, 32), struct(8, dtype=np.int32))),
}


def traced(name, donate=()):
    f, args = PROGRAMS[name]
    made = bf.jit(f, donate_argnums=donate).trace(*args)
    return simplify(made.jaxpr), made.lower().donated


def cuda(name, budget=None, arch="sm_90a", donate=()):
    jaxpr, donated = traced(name, donate)
    return cuda_program.prepared(jaxpr, donated, arch, HOPPER, budget)


def host(name, budget=None):
    return host_program.prepared(*traced(name), budget)


def text(x):
    """The printed jaxpr without the custom rules of bodies, which are not stored."""
    return re.sub(r"\n *rule=\w+", "", str(x))


def described(schedule):
    """All that a schedule says, with the numbers of values in the place of variables."""
    atom = lambda a: (str(a.aval), str(a.value)) if isinstance(a, Literal) else a
    chain = lambda eqns: [(e.prim, e.params) for e in eqns]

    def step(s):
        if isinstance(s, GroupStep):
            return [step(m) for m in s.members]
        if not isinstance(s, OpaqueStep):
            return str(s.kernel), s.kernel.key, s.values, s.offsets, str(s.region)
        operands = [atom(o) if isinstance(o, Literal) else (o[0], chain(o[1])) for o in s.operands]
        where = source.describe(s.eqn.source), s.eqn.scopes, source.is_backward(s.eqn.source)
        shown = {k: text(v) for k, v in s.eqn.params.items()}
        return s.eqn.prim, shown, where, operands, s.results, s.planned

    values = [str(v.aval) if hasattr(v, "aval") else (v.dtype, v.size) for v in schedule.values]
    found = {f.name: getattr(schedule, f.name) for f in dataclasses.fields(schedule)}
    found = {k: v for k, v in found.items() if k in ("inputs", "unplanned", "aliases", "notes", "plan")}
    return found | {
        "steps": [step(s) for s in schedule.steps],
        "values": values,
        "ids": list(schedule.ids.values()),
        "outputs": [atom(o) for o in schedule.outputs],
        "jaxpr": text(schedule.jaxpr),
        "fusion": str(schedule.fusion),
        "peak": None if schedule.peak is None else step(schedule.peak),
        "bought": schedule.bought and (schedule.bought.report(5), schedule.bought.flops),
    }


def assert_same(a, b):
    assert a is not b
    for (name, x), y in zip(described(a.schedule).items(), described(b.schedule).values(), strict=True):
        assert x == y, name


# -- the same plan ---------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_plans_for_a_gpu_come_back(name, arch, folder, monkeypatch):
    made = cuda(name, arch=arch)
    monkeypatch.setattr(cuda_program, "planned", None)  # nothing is planned from here on
    found = cuda(name, arch=arch)
    assert_same(made, found)
    assert found.rendered == made.rendered and found.others == made.others
    launches = lambda p: [(n, *w[1:], [k.key for k in w.kernels]) for n, ws in p.wanted.items() for w in ws]
    assert launches(found) == launches(made)
    in_steps = {id(m.kernel) for s in found.schedule.steps for m in getattr(s, "members", (s,))
                if not isinstance(m, OpaqueStep)}  # fmt: skip
    assert in_steps == {id(k) for ws in found.wanted.values() for w in ws for k in w.kernels}


@pytest.mark.second
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_plans_for_the_cpu_come_back(name, folder, monkeypatch):
    made = host(name)
    monkeypatch.setattr(host_program, "planned", None)
    found = host(name)
    assert_same(made, found)
    assert found.text == made.text and found.names == made.names


@pytest.mark.slow
@pytest.mark.parametrize("make", [cuda, host])
def test_plans_within_a_budget_come_back(make, folder, monkeypatch):
    name = "training, float32"
    plan = make(name).schedule.plan
    budget = plan.peak_bytes - plan.arena_bytes // 5
    made = make(name, budget=budget)
    monkeypatch.setattr(cuda_program, "planned", None)
    monkeypatch.setattr(host_program, "planned", None)
    found = make(name, budget=budget)
    assert_same(made, found)
    assert found.schedule.bought.made is found.schedule and found.schedule.plan.peak_bytes <= budget


@pytest.mark.slow
def test_programs_run_from_disk(folder, monkeypatch):
    """Bit for bit as before, in a function under jit that knows nothing of the first."""
    monkeypatch.setattr(config, "host_compiler", "always")
    f, (params, state, tokens) = PROGRAMS["training, a loss in chunks"]
    values = tree.map(
        lambda s: np.random.default_rng(0).uniform(0, 0.1, s.shape).astype(s.dtype), (params, state)
    )
    batch = np.random.default_rng(1).integers(0, 256, tokens.shape).astype(np.int32)
    want = bf.jit(f)(*values, batch)
    monkeypatch.setattr(host_program, "planned", None)
    for got, x in zip(tree.leaves(bf.jit(f)(*values, batch)), tree.leaves(want), strict=True):
        np.testing.assert_array_equal(got, x)


@pytest.mark.slow
@pytest.mark.parametrize("low", [False, True])
def test_programs_run_from_disk_on_a_device(low, folder, monkeypatch):
    """With the same launches in the same graphs."""
    fake = fake_cuda.install(monkeypatch)
    (device,) = bf.devices("cuda")
    f, (params, state, tokens) = training(low)
    rng = np.random.default_rng(0)
    values = tree.map(lambda s: rng.uniform(0, 0.1, s.shape).astype(s.dtype), (params, state))
    batch = rng.integers(0, 256, tokens.shape).astype(np.int32)
    results, counts = [], []
    for _ in range(2):
        step, kept = bf.jit(f, donate_argnums=(0, 1)), bf.device_put((*values, batch), device)
        before = fake.launches, fake.products, fake.replays
        losses = []
        for _ in range(5):
            *new, loss = step(*kept)
            kept = (*new, kept[2])
            losses.append(float(loss))
        now = fake.launches, fake.products, fake.replays
        counts.append([b - a for a, b in zip(before, now, strict=True)])
        results.append((losses, tree.map(np.asarray, kept[0])))
        monkeypatch.setattr(cuda_program, "planned", None)
    assert counts[0] == counts[1] and counts[0][2] > 0
    assert results[0][0] == results[1][0]
    for a, b in zip(*map(tree.leaves, (results[0][1], results[1][1])), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_deep_programs(folder, messages):
    """A kernel is a graph that may be deeper than Python's stack."""

    def f(x):
        for i in range(3000):
            x = bnp.sin(x) + i
        return x

    jaxpr = simplify(bf.jit(f).trace(struct(64)).jaxpr)
    made = [host_program.prepared(jaxpr, (False,)) for _ in range(2)]
    assert made[0].text == made[1].text
    assert "is kept, in" in messages()[0]


def test_lines_are_those_of_the_process(folder):
    """A plan has the code objects of the program that it was loaded for, not copies."""
    jaxpr, donated = traced("loops")
    cuda_program.prepared(jaxpr, donated, "sm_90a", HOPPER)
    found = cuda_program.prepared(jaxpr, donated, "sm_90a", HOPPER)
    own = {id(e.source[0]) for e in jaxpr.eqns}
    lines = [s.eqn.source for s in found.schedule.steps if isinstance(s, OpaqueStep)]
    assert lines and all(id(line[0]) in own for line in lines)


# -- what plans are kept under ---------------------------------------------------------------------


class Spy(DiskCache):
    """Keeps nothing, and knows what it was asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def get(self, key):
        self.asked.append(key)

    def put(self, key, *rest):
        pass


JAXPR, DONATED = traced("training, float32")
BASE = {"jaxpr": JAXPR, "donated": DONATED, "arch": "sm_90a", "limits": HOPPER, "budget": None}


def with_config(name, value):
    return lambda monkeypatch: monkeypatch.setattr(config, name, value)


def another(flag):
    """A value that a flag has not."""
    choices = {
        "host_compiler": "always",
        "matmul_precision": "tf32",
        "default_device": "cpu:1",
        "numpy_rank_promotion": "warn",
        "numpy_dtype_promotion": "strict",
    }
    value = getattr(config, flag)
    return choices.get(flag) or (not value if isinstance(value, bool) else value + 1)


CHANGES = {
    "nothing": {},
    "the program": {"jaxpr": traced("training, bfloat16")[0]},
    "what is donated": {"donated": (True, *DONATED[1:])},
    "the architecture": {"arch": "sm_80"},
    "its limits": {"limits": Limits(100 << 10, 1)},
    "the budget": {"budget": 1 << 40},
    **{
        f.name: with_config(f.name, another(f.name))
        for f in dataclasses.fields(config)
        if f.name not in plan_store._CHANGES_NO_PLAN
    },
    "the version of Python": lambda monkeypatch: monkeypatch.setattr(sys, "version", "3.99"),
    "the version of NumPy": lambda monkeypatch: monkeypatch.setattr(np, "__version__", "9.9"),
    "blufunc's sources": lambda monkeypatch: monkeypatch.setattr(plan_store, "_sources", lambda: "others"),
}


def key_under(change, monkeypatch):
    spy = Spy()
    with monkeypatch.context() as m:
        m.setattr(plan_store, "_disk", lambda folder: spy)
        m.setattr(cuda_program, "planned", stop)
        if callable(CHANGES[change]):
            CHANGES[change](m)
        with pytest.raises(Stop):
            cuda_program.prepared(**BASE | (CHANGES[change] if isinstance(CHANGES[change], dict) else {}))
    (key,) = spy.asked
    return key


class Stop(Exception):
    pass


def stop(*args):
    raise Stop


def test_all_that_planning_reads_is_in_the_key(folder, monkeypatch):
    keys = {change: key_under(change, monkeypatch) for change in CHANGES}
    assert len(set(keys.values())) == len(CHANGES), keys
    assert keys["nothing"] == key_under("nothing", monkeypatch)


@pytest.mark.parametrize("flag", sorted(plan_store._CHANGES_NO_PLAN - {"plan_cache"}))
def test_flags_that_change_no_plan_are_not(flag, folder, monkeypatch):
    before = key_under("nothing", monkeypatch)
    other = {"debug": "memory", "check": not config.check, "simulated_network": "2hosts,100us,10GB/s"}
    monkeypatch.setattr(config, flag, other[flag])
    assert key_under("nothing", monkeypatch) == before


def test_the_cpu_and_a_gpu_have_plans_of_their_own(folder, messages):
    cuda("loops")
    host("loops")
    assert [line.split(", in ")[0].rpartition(" ")[2] for line in messages()] == ["kept", "kept"]


@pytest.fixture
def source_file(tmp_path, monkeypatch):
    """One more source of blufunc, and a process that began after it was written."""
    path = tmp_path / "more.py"
    monkeypatch.setattr(plan_store, "_files", lambda root: [*files(root), str(path)])
    path.write_text("x = 1\n")
    monkeypatch.setattr(plan_store, "BEGAN", max(plan_store.BEGAN, path.stat().st_ctime))
    plan_store._sources.cache_clear()
    yield path
    plan_store._sources.cache_clear()


def sources():
    plan_store._sources.cache_clear()
    return plan_store._sources()


def test_sources_are_all_of_blufunc(source_file, monkeypatch):
    with_more = sources()
    with monkeypatch.context() as m:
        m.setattr(plan_store, "_files", files)
        without = sources()
    assert len(with_more) == len(without) == 64 and with_more != without


def touched(path):
    os.utime(path, (time.time() + 10,) * 2)


def replaced(path):
    """As ``cp -p`` and ``rsync -a`` do: with the time of what was copied."""
    time.sleep(0.05)  # more than a tick of the file system's clock
    path.with_suffix(".new").write_text("x = 2\n")
    os.utime(path.with_suffix(".new"), (1, 1))
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize("change", [touched, replaced, lambda path: path.unlink()])
def test_sources_that_are_not_what_runs(change, source_file, folder):
    change(source_file)
    assert sources() == ""
    assert "sources cannot be read, or have changed" in plan_store.why_not(JAXPR)


def test_a_process_begins_before_it_imports():
    """Changes during the import may be older than the plan cache."""
    script = """
        import sys, time
        before = time.time()
        import blufunc._began
        first = [m for m in sys.modules if m.startswith("blufunc.")][0]
        assert first == "blufunc._began", first
        assert before <= blufunc._began.BEGAN <= time.time()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_sources_in_c_and_cuda_are_in_the_key():
    """A kernel is compiled from its files; a plan keeps what was rendered with them."""
    root = str(Path(plan_store.__file__).parents[2])
    found = {path.removeprefix(root).rpartition(".")[2] for path in files(root)}
    assert {"py", "cuh"} <= found


def test_hidden_files_are_no_sources(tmp_path):
    """As an editor's lock, which points to no file."""
    (tmp_path / "a.py").write_text("")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "b.py").write_text("")
    (tmp_path / ".#a.py").symlink_to("somebody@somewhere.1234")
    assert list(files(str(tmp_path))) == [str(tmp_path / "a.py")]


files = plan_store._files


# -- what is not kept ------------------------------------------------------------------------------


class Thrice(extend.Primitive):
    name = "thrice_of_a_user"

    def impl(self, x):
        return 3 * x

    def abstract(self, x):
        return x


thrice_p = Thrice()

NOT_KEPT = {
    "a user's primitive": (lambda x: thrice_p.bind(x), "thrice_of_a_user at test_plans.py:"),
    "a callback": (lambda x: bf.pure_callback(np.sin, struct(64), x), "pure_callback at test_plans.py:"),
    "a value that is printed": (lambda x: (bf.debug.print("{}", x), x)[1], "debug_callback at test_plans.py:"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::blufunc.errors.HostPrimitiveWarning")
@pytest.mark.parametrize("what", NOT_KEPT)
def test_what_has_no_text_is_planned_as_ever(what, folder, messages, monkeypatch):
    monkeypatch.setattr(config, "host_compiler", "always")
    f, why = NOT_KEPT[what]
    x = np.linspace(0, 1, 64, dtype=np.float32)
    g = bf.jit(lambda x: f(x) + 1)
    g(x)
    (line,) = [line for line in messages() if "is not kept" in line]
    assert why in line
    assert f"planned anew in each process: {why}" in str(explain(g, x))
    assert not any("a plan of <lambda>" in p.read_text() for p in folder.glob("*.txt"))


def test_a_primitive_without_a_name_is_never_copied(folder):
    """Of a user's class or blufunc's: loading must return the same object."""
    for prim in (thrice_p, type(lax.sin_p)("sine_of_a_user", np.sin, "inexact")):
        with pytest.raises(fingerprint.NoFingerprint):
            plan_store.dump([prim], [])
    assert plan_store.load(plan_store.dump([lax.sin_p], []), [], list) == [lax.sin_p]


def twice_sine(x):
    return bnp.sin(x) * 2


CONTEXTS = {
    "none": (contextlib.nullcontext, True),
    "a mesh": (lambda: bf.make_mesh((1,), ("rows",), devices=bf.devices("cpu")[:1]), True),
    "jit is disabled": (bf.disable_jit, True),
    "a named axis": (lambda: in_context(NamedAxis("rows", 4)), True),
    "replaced rules": (lambda: extend.override(lax.cos_p, impl=lambda x: x), False),
    "as it was written": (as_written, False),
}


@contextlib.contextmanager
def in_context(entry):
    before, state.context = state.context, (*state.context, entry)
    try:
        yield
    finally:
        state.context = before


@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_that_plans_are_kept_in(context, folder):
    make, keeps = CONTEXTS[context]
    made = bf.jit(twice_sine).trace(struct(64))
    jaxpr = simplify(made.jaxpr)
    with make():
        assert context in ("none", "as it was written") or state.context
        assert (plan_store.why_not(jaxpr) is None) == keeps
        host_program.prepared(jaxpr, (False,))
    assert bool(list(folder.glob("*.plan"))) == keeps


def test_functions_with_named_axes_are_kept(folder, monkeypatch):
    monkeypatch.setattr(config, "host_compiler", "always")
    f = bf.jit(lambda x: bnp.sin(x) + lax.axis_index("rows"))
    bf.vmap(f, axis_name="rows")(np.ones((4, 64), np.float32))
    with bf.make_mesh((1,), ("rows",), devices=bf.devices("cpu")[:1]):
        bf.jit(twice_sine)(np.ones((64, 64), np.float32))
    assert len(list(folder.glob("*.plan"))) >= 2


def test_replaced_rules_are_not_kept(folder, monkeypatch):
    monkeypatch.setattr(config, "host_compiler", "always")
    x = np.linspace(0, 1, 64, dtype=np.float32)
    with extend.override(lax.sin_p, impl=lambda x: 0 * x):
        np.testing.assert_array_equal(bf.jit(lambda x: bnp.sin(x) + 1)(x), np.ones(64))
    assert not list(folder.glob("*.plan"))
    np.testing.assert_allclose(bf.jit(lambda x: bnp.sin(x) + 1)(x), np.sin(x) + 1, rtol=1e-6)


def test_code_of_callers_is_never_copied(folder, messages, monkeypatch):
    """A line of another program; the reason is found once, and reported."""

    def secret():
        return "a string of the user's"

    jaxpr, donated = traced("loops")
    planned, dump, dumps = planning.planned, plan_store.dump, []

    def with_another_line(*args):
        made = planned(*args)
        made.notes = (secret.__code__,)
        return made

    monkeypatch.setattr(host_program, "planned", with_another_line)
    monkeypatch.setattr(plan_store, "_undumped", {})
    monkeypatch.setattr(plan_store, "dump", lambda *args: dumps.append(args) or dump(*args))
    assert plan_store.why_not(jaxpr) is None
    for _ in range(2):
        host_program.prepared(jaxpr, donated)
        (line,) = messages()
        assert "is not kept: its plan has a line of secret" in line
    assert "a line of secret" in plan_store.why_not(jaxpr)
    assert len(dumps) == 1 and not folder.exists()


def test_lines_of_callers_are_left_out():
    """Equations of definitions traced while planning, by any caller."""
    own = next(e for e in JAXPR.eqns if e.source is not None)
    codes = [own.source[0]]
    foreign = Eqn(own.prim, own.invars, own.outvars, own.params, ((lambda: "a secret").__code__, 0))
    binary = plan_store.dump([own, foreign], codes)
    found = plan_store.load(binary, codes, list)
    assert [e.source for e in found] == [own.source, None]
    assert b"a secret" not in binary


def fail(*args):
    raise ZeroDivisionError("in the way")


FAILURES = {
    "finding": (DiskCache, "get"),
    "keeping": (DiskCache, "put"),
    "spelling": (plan_store, "Fingerprint"),
    "writing": (plan_store, "dump"),
    "loading": (plan_store, "load"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_the_store_never_stands_in_the_way(failure, folder, messages, monkeypatch):
    made = host("loops")
    if failure in ("keeping", "writing"):
        plan_store._disk.cache_clear()
        for path in folder.iterdir():
            path.unlink()
    jaxpr, donated = traced("loops")
    monkeypatch.setattr(plan_store, "_undumped", {})
    monkeypatch.setattr(*FAILURES[failure], fail)
    messages()
    assert_same(made, host_program.prepared(jaxpr, donated))
    assert "ZeroDivisionError: in the way" in messages()[0]
    if failure not in ("finding", "loading"):
        assert plan_store.why_not(jaxpr) == "ZeroDivisionError: in the way"


def test_who_only_looks_writes_nothing(folder, monkeypatch):
    """Reports and budgets of the CPU take the schedule; they render and store nothing."""
    monkeypatch.setattr(config, "host_compiler", "always")
    monkeypatch.setattr(host_program, "source_of", None)
    x = struct(64, 64)
    f = bf.jit(twice_sine, memory_budget="1MB")
    assert f.lower(x).memory.peak_bytes > 0
    assert bf.jit(twice_sine).lower(x).fusion is not None
    jaxpr = bf.jit(twice_sine).trace(x).jaxpr
    with monkeypatch.context() as m:
        m.setattr(config, "host_compiler", "never")
        assert host_program.compile_program(jaxpr, (False,), 1 << 20) is None
    assert not list(folder.glob("*.plan"))


def test_a_users_kernel_that_cannot_be_launched_has_a_schedule(folder):
    """Only compilation reports its error."""
    kernel = bf.cuda_kernel("out[i] = x[i];", reference=lambda x: x, name="copied", block=5000)
    traced = bf.jit(lambda x: kernel(x) + 1).trace(struct(64))
    with pytest.raises(errors.BlufuncError, match="5000"):
        kernel.source(struct(64))
    assert Draft(traced.jaxpr, (False,), "sm_90a").schedule.plan.peak_bytes > 0


def test_small_programs_are_not_kept(folder, monkeypatch):
    monkeypatch.setattr(plan_store, "WORTH", 1000)
    cuda("loops")
    assert not folder.exists()


def test_the_switch(folder, monkeypatch):
    assert from_environment({"BLUFUNC_PLAN_CACHE": "0"}).plan_cache is False
    assert from_environment({}).plan_cache is True
    monkeypatch.setattr(config, "plan_cache", False)
    cuda("loops")
    assert not folder.exists()


# -- what is wrong with a folder -------------------------------------------------------------------


def put(folder, data):
    """Another binary for the one plan that is there."""
    (path,) = folder.glob("*.plan")
    key = path.name.partition("-")[0]
    DiskCache(folder).put(key, data, "", ".plan")


HARMS = {
    "cut short": lambda folder: [p.write_bytes(p.read_bytes()[:-9]) for p in folder.glob("*.plan")],
    "not a pickle": lambda folder: put(folder, b"garbage"),
    "half a pickle": lambda folder: put(folder, next(folder.glob("*.plan")).read_bytes()[:5000]),
    "empty": lambda folder: put(folder, b""),
    "of another class": lambda folder: put(folder, pickle.dumps([1])),
    "of what is no more": lambda folder: put(folder, b"cblufunc.kernels.steps\nGone\n."),
    "without its record": lambda folder: [p.unlink() for p in folder.glob("*.txt")],
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_plan_is_made_again(harm, folder):
    made = cuda("loops")
    HARMS[harm](folder)
    assert_same(made, cuda("loops"))
    (record,) = folder.glob("*.txt")  # a whole one is in its place
    jaxpr, _ = traced("loops")
    binary = DiskCache(folder).get(record.stem)
    assert_same(made, plan_store.load(binary, plan_store._fingerprint(jaxpr).codes, cuda_program.Prepared))


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, folder, messages):
    """It is tried once, and what it said is messages of all later programs."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("BLUFUNC_CACHE_DIR", str(tmp_path / "file" / "below"))
    dump, dumps = plan_store.dump, []
    monkeypatch.setattr(plan_store, "dump", lambda *args: dumps.append(args) or dump(*args))
    assert_same(cuda("loops"), cuda("loops"))
    lines = [line for line in messages() if line.startswith("cache: the plan")]
    assert len(lines) == 2 and all("is not kept: " in x and "below cannot be written" in x for x in lines)
    assert len(dumps) == 1
    assert "cannot be written" in plan_store.why_not(JAXPR)


def test_a_folder_that_has_no_place(monkeypatch, folder, messages):
    monkeypatch.setenv("BLUFUNC_CACHE_DIR", "~a_user_that_there_is_not/cache")
    cuda("loops")
    assert "is not kept: RuntimeError" in messages()[0]


def of_another_user(folder, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)


NOT_OWN = {
    "of another user": (of_another_user, "belongs to another user"),
    "that a group may write": (lambda folder, _: folder.chmod(0o770), "others may write to"),
    "that all may write": (lambda folder, _: folder.chmod(0o1777), "others may write to"),
}


@pytest.mark.filterwarnings("ignore:what blufunc compiles is not kept")
@pytest.mark.parametrize("which", NOT_OWN)
def test_a_folder_that_is_not_ones_own(which, folder, messages, monkeypatch):
    """Nothing is loaded from it, and nothing put there."""
    change, why = NOT_OWN[which]
    made = cuda("loops")
    before = sorted(folder.iterdir())
    change(folder, monkeypatch)
    messages()
    monkeypatch.setattr(plan_store, "load", None)
    assert_same(made, cuda("loops"))
    cuda("keys")
    lines = messages()
    assert len(lines) == 2 and all("is not kept: " in line and why in line for line in lines)
    assert why in plan_store.why_not(JAXPR)
    assert sorted(folder.iterdir()) == before


def pickled(module, name):
    """The pickle of a call with one argument."""
    return pickle.PROTO + b"\x04" + b"".join(
        pickle.SHORT_BINUNICODE + bytes([len(x)]) + x.encode() for x in (module, name)
    ) + pickle.STACK_GLOBAL + b"(S'1'\ntR."  # fmt: skip


@pytest.mark.parametrize(
    "module, name",
    [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("marshal", "loads"),
        ("subprocess", "run"),
        ("numpyro_of_a_user", "load"),
        ("blufunc.kernels.cache.disk", "os.system"),
        ("blufunc.kernels.cache.disk", "os"),
    ],
)
def test_plans_are_made_of_what_plans_have(module, name):
    with pytest.raises(pickle.UnpicklingError, match=re.escape(f"{module}.{name} is in no plan")):
        plan_store.load(pickled(module, name), [], object)


def test_primitives_of_plans_are_ours():
    for name in ("os:system", "blufunc.lax:sin", "blufunc.lax:gone_p"):
        with pytest.raises(fingerprint.NoFingerprint, match="no primitive"):
            fingerprint.primitive(name)


@pytest.mark.slow
def test_plans_count_towards_the_size_of_the_folder(folder, monkeypatch):
    small = DiskCache(folder, limit_bytes=200_000)
    monkeypatch.setattr(plan_store, "_disk", lambda folder: small)
    for name in PROGRAMS:
        cuda(name)
    assert 0 < sum(p.stat().st_size for p in folder.iterdir()) <= 200_000


def test_many_at_once(folder):
    """All plan, or some find what others have kept: each gets a whole plan."""
    made = [None] * 6
    ready = threading.Barrier(len(made))

    def run(n):
        ready.wait()
        made[n] = cuda("loops")

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(made))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for other in made[1:]:
        assert_same(made[0], other)
    assert len(list(folder.glob("*.txt"))) == 1


SCRIPT = """
    import numpy as np, blufunc as bf

    def f(x, n):
        for i in range(n):
            x = bf.numpy.tanh(x @ x) + x
        return x.sum(0), bf.numpy.sort(x, axis=0)

    x = np.full((64, 64), 0.01, np.float32)
    print(float(bf.jit(f, static_argnums=1)(x, 12)[0][0]))
"""


@pytest.mark.slow
def test_processes_share_plans(folder, tmp_path):
    """Two at once, with other hashes; a third finds what they have kept."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    options = {"BLUFUNC_HOST_COMPILER": "always", "BLUFUNC_DEBUG": "cache"}

    def start(seed):
        env = {**os.environ, **options, "PYTHONHASHSEED": str(seed)}
        return subprocess.Popen([sys.executable, script], env=env, stdout=-1, stderr=-1, text=True)

    both = [p.communicate() for p in (start(1), start(2))]
    third = start(3).communicate()
    assert both[0][0] == both[1][0] == third[0] != ""
    assert "the plan of f was found on disk" in third[1], third[1]
