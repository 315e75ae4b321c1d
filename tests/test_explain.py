"""``explain``, the reports of ``lower()`` and ``compile()``, and ``config.debug``."""

import html
import importlib
import io
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, nn
from blufunc.config import config
from blufunc.explain import Explanation
from blufunc.kernels.backends.cpu import toolchain
from blufunc.kernels.inspect.program import Sight
from blufunc.kernels.machine import Machine
from tests.emulation import fake_cuda


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with fixed measurements."""
    m = Machine("a machine", bandwidth=1e10, flops=1e11, products=1e11)
    for module in ("blufunc.explain", "blufunc.kernels.inspect.roofline"):
        monkeypatch.setattr(importlib.import_module(module), "machine_of", lambda device: m)
    return m


@pytest.fixture
def compiled(monkeypatch):
    """Compile small programs too."""
    if toolchain.find() is None:
        pytest.skip("this machine has no C++ compiler")
    monkeypatch.setattr(config, "host_compiler", "always")


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(config, "host_compiler", "never")


def layer(x, w, b):
    h = bnp.tanh(x @ w + b)
    return bf.nn.softmax(h), (h * h).sum()


ARGS = (bnp.ones((64, 32)), bnp.ones((32, 48)), bnp.ones(48))


def lowered(f, *args, **options):
    return bf.jit(f, **options).lower(*args)


# -- what a lowered program shows ------------------------------------------------------------------


def test_fusion_says_what_is_together_and_why_not_more():
    fusion = lowered(layer, *ARGS).fusion
    assert len(fusion.steps) == 3 and len(fusion.regions) == 2
    assert {e.prim.name for e in fusion.free} == {"broadcast_in_dim"}
    ((first, second, why),) = fusion.apart
    assert {first.prim.name, second.prim.name} <= {"tanh", "reduce_max", "reduce_sum", "mul"}
    text = str(fusion)
    assert "dot_general" in text and f"steps 1 and 2 are apart: {first.prim.name}" in text and why in text
    assert "free: 3 broadcast_in_dim" in text and "test_explain.py:" in text


def test_what_was_joined_later_is_not_apart():
    fusion = lowered(lambda x: bf.nn.softmax(x), ARGS[0]).fusion
    assert len(fusion.steps) == 1 and not fusion.apart and "apart" not in str(fusion)


def test_an_empty_program():
    l = lowered(lambda x: x, ARGS[0])
    assert str(l.fusion) == "no steps" and not l.cost.steps
    assert "nothing is computed" in str(bf.explain(lambda x: x, ARGS[0]))


def test_memory_is_that_of_the_plan(compiled):
    l = lowered(layer, *ARGS)
    m = l.memory
    assert m.argument_bytes == sum(a.nbytes for a in ARGS)
    assert m.output_bytes == 64 * 48 * 4 + 4
    assert m.arena_bytes >= 64 * 48 * 4  # the matmul's result, before the activation
    assert m.peak_bytes == m.argument_bytes + m.output_bytes + m.arena_bytes == m.plan.peak_bytes
    assert str(m).startswith("planned peak") and "dot_general at test_explain.py" in m.report(1)


def test_donation_shows_in_memory(compiled):
    x = bnp.ones((256, 64))
    update = lambda p, g: p - 0.1 * g
    plain, donating = lowered(update, x, x).memory, lowered(update, x, x, donate_argnums=0).memory
    assert plain.output_bytes == x.nbytes and donating.output_bytes == 0


def test_a_program_that_is_not_compiled_says_why(uncompiled):
    m = lowered(layer, *ARGS).memory
    assert str(m).startswith(
        "runs as NumPy calls, which allocate as they go: config.host_compiler is 'never'"
    )
    text = str(bf.explain(layer, *ARGS))
    assert "It runs as NumPy calls: config.host_compiler is 'never'." in text


def test_small_programs_say_so(monkeypatch):
    monkeypatch.setattr(config, "host_compiler", "auto")
    assert "too small" in str(lowered(layer, *ARGS).memory)


def test_source_needs_no_compiler_to_run(compiled, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("compiled")

    l = lowered(lambda x: bnp.exp(x) + 2, ARGS[0])
    monkeypatch.setattr(toolchain.Compiler, "compile", refuse)
    assert 'extern "C"' in l.source() and "bf_exp" in l.source()


def test_source_is_that_of_the_program(compiled):
    l = lowered(layer, *ARGS)
    assert l.source() == l.compile().source()


def test_source_of_numpy_calls(uncompiled):
    assert lowered(layer, *ARGS).source().startswith("def program(buffers):")


# -- times -----------------------------------------------------------------------------------------


def test_timings_of_a_compiled_program(compiled, machine):
    c = lowered(layer, *ARGS).compile()
    t = c.timings(*ARGS, repeats=2)
    cost = c.lowered.cost
    assert len(t) == len(cost.steps) == 3 and t.machine is machine
    assert [s.bytes for s in t] == [s.bytes for s in cost.steps]
    assert all(s.ms > 0 and s.share > 0 for s in t) and t.ms == pytest.approx(sum(s.ms for s in t))
    assert t[0].name == "dot_general" and t[0].gbps == pytest.approx(t[0].bytes / t[0].ms / 1e6)
    assert all("test_explain.py" in line for s in t for line in s.lines)
    lines = str(t).splitlines()
    assert len(lines) == 5 and lines[0].split()[:3] == ["step", "name", "ms"]


def test_timings_leave_arguments_alone(compiled):
    x = bnp.arange(4096.0).reshape(64, 64)
    c = lowered(lambda p, g: p - g, x, x, donate_argnums=0).compile()
    c.timings(x, x)
    np.testing.assert_array_equal(x, np.arange(4096.0).reshape(64, 64))
    assert not x.is_deleted()


def test_timings_of_numpy_calls(uncompiled):
    def f(x):
        return lax.scan(lambda c, _: (c * 2, c.sum()), bnp.sin(x), None, length=3)

    t = lowered(f, ARGS[0]).compile().timings(ARGS[0])
    assert [s.name for s in t] == ["sin", "scan"]
    assert "run as NumPy calls: config.host_compiler is 'never'" in str(t)


def test_timings_with_constants_and_keywords(compiled):
    w = ARGS[1]
    c = bf.jit(lambda x, *, scale: x @ w * scale).lower(ARGS[0], scale=2.0).compile()
    assert len(c.timings(ARGS[0], scale=3.0)) == 2
    with pytest.raises(errors.ArgumentError, match="arguments of other types"):
        c.timings(ARGS[1], scale=3.0)


# -- explain ---------------------------------------------------------------------------------------


def test_explain_is_a_table(compiled):
    e = bf.explain(layer, *ARGS)
    assert isinstance(e, Explanation) and e.name == "layer" and e.timings is None
    assert e.cost.kernels == 2 and e.cost.launches == 3
    lines = str(e).splitlines()
    assert lines[0].startswith("layer: 2 kernels, 1 other call, ") and "at least" in lines[0]
    assert lines[1].split()[:4] == ["step", "kernel", "computes", "points"]
    assert "(library)" in lines[2] and "tanh" in lines[3]
    assert any(line.startswith("steps 1 and 2 are apart") for line in lines)
    assert any(line.startswith("planned peak") for line in lines)


def deep(x, ws):
    for w in ws:
        x = x + bnp.tanh(bf.nn.softmax(x) @ w)
    return (x * x).sum()


def test_alike_rows_of_a_long_program_are_one(compiled):
    ws = [bnp.ones((16, 16))] * 20
    args = (bnp.ones((8, 16)), ws)
    e = bf.explain(bf.grad(deep, argnums=1), *args)
    lines = str(e).splitlines()
    assert lines[1].split()[:4] == ["step", "times", "kernel", "computes"]
    rows = [line.split() for line in lines[2 : lines.index("")]]
    assert len(e.cost.steps) > 64 > len(rows) and sum(int(row[1]) for row in rows) == len(e.cost.steps)
    reasons = [line for line in lines if "more such pairs, are apart" in line]
    assert reasons and len(reasons) < len(e.fusion.apart)
    timed = lowered(bf.grad(deep, argnums=1), *args).compile().timings(*args, repeats=1)
    rows = str(timed).splitlines()[1:-1]
    assert sum(int(row.split()[1]) for row in rows) == len(timed) == len(e.cost.steps)


def test_steps_have_the_numbers_of_their_launches(compiled):
    args = (bnp.ones((8, 16)), [bnp.ones((16, 16))] * 5)
    l = lowered(bf.grad(deep, argnums=1), *args)
    text = str(l.fusion).splitlines()
    rows = {int(line.split()[0]): line for line in text if line.split()[0].isdecimal()}
    assert len(rows) == len(l.fusion.steps) > 20
    for number, row in rows.items():
        assert l.cost.steps[number].ops[0] in row


def test_explain_takes_types_and_jitted_functions():
    types = [bf.ShapeDtypeStruct(a.shape, a.dtype) for a in ARGS]
    assert str(bf.explain(bf.jit(layer), *types)) == str(bf.explain(layer, *ARGS))


def test_explain_measures(compiled):
    e = bf.explain(bf.grad(lambda *a: layer(*a)[1]), *ARGS, run=True)
    assert len(e.timings) == len(e.cost.steps)
    head, columns, *rows = str(e).splitlines()
    assert "; measured " in head and columns.split()[-3:] == ["measured", "roofline", "lines"]
    assert any("(layer) backward" in row for row in rows)


def test_explain_measures_numpy_calls(uncompiled):
    text = str(bf.explain(layer, *ARGS, run=True))
    assert "measured, as NumPy calls:" in text and "reduce_max" in text


def test_loops_are_counted_by_the_round():
    def f(x):
        return lax.while_loop(lambda x: x.sum() < 1e6, lambda x: x * 2, x)

    assert "a round" in str(bf.explain(f, ARGS[0]))


def iterated(x, w):
    def cell(h, _):
        h = lax.cond(h.sum() > 0, lambda h: bnp.tanh(h @ w), lambda h: bnp.exp(-h), h)
        return h, h.sum()

    h, sums = lax.scan(cell, x, None, length=7)
    return lax.while_loop(lambda h: h.sum() < 0, lambda h: h * 2 + 1, h), sums


def test_explain_shows_the_bodies_of_loops_and_branches(compiled):
    e = bf.explain(iterated, bnp.ones((8, 16)), bnp.ones((16, 16)))
    assert [("scan" in b.role, "7 times" in b.role, b.step) for b in e.bodies[:1]] == [(True, True, 0)]
    assert [b.role.split(" at ")[0] for b in e.bodies] == [
        "the body of scan",
        "the cond of while",
        "the body of while",
    ]
    titles = [line for line in str(e).splitlines() if " runs the " in line]
    assert len(titles) == 5 and "branches[1] of cond" in titles[2] and titles[2].split()[1].startswith("0.")
    text = str(e)
    assert "tanh" in text and "neg exp" in text and "mul add" in text


def test_the_source_has_that_of_bodies(compiled, monkeypatch, capsys):
    args = bnp.ones((8, 16)), bnp.ones((16, 16))
    l = lowered(iterated, *args)
    text = l.source()
    assert text.count(" runs the ") == 5 and "bf_tanh(" in text and "bf_exp(" in text
    assert l.compile().source() == text
    monkeypatch.setattr(config, "debug", "source")
    bf.jit(lambda *a: iterated(*a))(*args)
    shown = capsys.readouterr().err
    assert "bf_tanh(" in shown and "bf_exp(" in shown


def test_memory_says_what_is_not_planned(compiled):
    x, w = bnp.ones((8, 16)), bnp.ones((16, 16))
    memory = lowered(lambda x, w: lax.sort((x @ w) * 1j, 0).real * 2, x, w).memory
    assert memory.unplanned_bytes == 2 * x.nbytes
    assert "1.0 KiB in results of calls besides" in str(memory).splitlines()[0]
    for fun, args in ((layer, ARGS), (iterated, (x, w))):
        assert "besides" not in str(lowered(fun, *args).memory)


def test_explain_wants_a_device_and_values():
    for call in (
        lambda: bf.explain(layer, *ARGS, device="cuda"),
        lambda: lowered(layer, *ARGS).compile("cuda"),
    ):
        with pytest.raises(errors.ArgumentError, match="takes a device, not 'cuda'"):
            call()
    with pytest.raises(errors.ArgumentError, match=r"no values: .*\n(.*\n)*.*take types"):
        bf.explain(bnp.sin, bf.ShapeDtypeStruct((3,), "float32"), run=True)


@pytest.mark.parametrize("repeats", [0, -1, 2.5])
def test_times_are_of_some_runs(repeats):
    with pytest.raises(errors.ArgumentError, match="repeats"):
        lowered(layer, *ARGS).compile().timings(*ARGS, repeats=repeats)


def test_explain_wants_a_function():
    with pytest.raises(errors.ArgumentError, match="explain"):
        bf.explain(ARGS[0])


def test_a_device_shows_what_its_host_must_do(monkeypatch):
    fake_cuda.install(monkeypatch)
    device = bf.devices("cuda")[0]

    def f(a, b):
        return bnp.linalg.eigvals(a).real + bnp.exp(a @ b)

    e = bf.explain(f, bnp.eye(4), bnp.ones(4), device=device)
    kinds = {s.name: s.kind for s in e.cost.steps if s.kind != "kernel"}
    assert kinds == {"eig": "host", "dot_general": "library"}
    assert "computed on the host, with copies there and back: steps" in str(e)


def test_a_device_shows_its_stages_and_times(monkeypatch, capsys):
    fake_cuda.install(monkeypatch)
    monkeypatch.setattr(config, "debug", "fusion,launch")
    device = bf.devices("cuda")[0]
    x = bf.device_put(ARGS[0], device)

    def shown(x):
        return bnp.exp(x) + 1

    e = bf.explain(shown, x, device=device, run=True)
    assert [s.kind for s in e.cost.steps] == ["kernel"] and len(e.timings) == 1
    err = capsys.readouterr().err
    assert err.count("fusion of shown:") == 1 and "launch 0: shown" in err


def test_a_backend_without_a_draft_is_asked_for_the_program():
    class Plain:
        def __init__(self, backend):
            self.made = 0
            self.backend = backend

        def compile(self, jaxpr, donated, budget=None):
            self.made += 1
            return self.backend.draft(jaxpr, donated)

    device = bf.devices("cpu")[0]
    plain = Plain(device.backend)
    jaxpr = lowered(layer, *ARGS).jaxpr
    seen = Sight(jaxpr, (False,) * 3, type(device)("cpu", 0, plain))
    assert len(seen.cost.steps) == 3 and seen.memory.peak_bytes and plain.made == 1


# -- stages that can be printed --------------------------------------------------------------------

STAGES = {
    "jaxpr": ["exp", "f32[64,32]"],
    "fusion": ["fusion of shown:", "exp", "test_explain.py:"],
    "loopir": ["loopir of shown:", "kernel shown", "grid", "exp("],
    "source": ['extern "C"', "bf_exp"],
    "memory": ["memory of shown:", "planned peak"],
    "launch": ["launch 0: shown", "f32[2048]"],
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_printed(stage, compiled, monkeypatch, capsys):
    def shown(x):
        return bnp.exp(x) + 1

    monkeypatch.setattr(config, "debug", stage)
    bf.jit(shown)(ARGS[0])
    err = capsys.readouterr().err
    assert all(text in err for text in STAGES[stage])
    marks = {"fusion of", "loopir of", "memory of", 'extern "C"', "launch 0"}
    assert {m for m in marks if m in err} == {m for m in marks if STAGES[stage][0].startswith(m)}


def test_launches_are_printed_when_asked(compiled, monkeypatch, capsys):
    f = bf.jit(lambda x: bnp.exp(x) + 1)
    f(ARGS[0])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(config, "debug", "launch")
    f(ARGS[0])
    assert "launch 0: " in capsys.readouterr().err


def test_stages_of_numpy_calls(uncompiled, monkeypatch, capsys):
    monkeypatch.setattr(config, "debug", "source,memory")
    bf.jit(lambda x: bnp.exp(x))(ARGS[0])
    err = capsys.readouterr().err
    assert "def program(buffers):" in err and "planned" not in err


def test_a_retrace_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(config, "debug", "retrace")
    f = bf.jit(lambda x: x + 1)
    f(ARGS[0])
    f(ARGS[1])
    assert "retrace of <lambda>: x" in capsys.readouterr().err


def test_nothing_is_printed_unasked(compiled, capsys):
    bf.jit(lambda x: bnp.exp(x))(ARGS[0])
    assert capsys.readouterr().err == ""


def test_attention_that_has_no_kernel(monkeypatch):
    """Reports the reason and the line; nothing where there is a kernel."""
    fake_cuda.install(monkeypatch)
    device = bf.devices("cuda")[0]
    q = bnp.ones((1, 40, 2, 16), dtype="bfloat16")
    table = bnp.ones((2, 5))

    def shown(f, *args):
        text = str(bf.explain(f, *args, device=device))
        return [line for line in text.splitlines() if "no kernel for" in line]

    attend = lambda q, **mods: nn.dot_product_attention(q, q, q, **mods).astype("float32").sum()
    relative = lambda q, table: attend(q, score_mod=nn.score_mods.relative_bias(table))
    assert shown(relative, q, table) == shown(bf.grad(relative), q, table) == []
    (line,) = shown(lambda q: attend(q, is_causal=True), q.astype("float32"))
    assert "attention at test_explain.py:" in line and "40 queries of float32: below 48" in line
    (line,) = shown(
        lambda q: attend(q, score_mod=lambda s, b, h, q, k: s + bnp.sort(bnp.stack([q, k]))[0]), q
    )
    assert "score_mod has no code in a kernel: sort has no scalar code" in line
    (line,) = shown(bf.grad(relative, (0, 1)), q, table)
    assert "attention_table_grad" in line and "the gradients of arrays that score_mod reads" in line


def test_attention_that_is_written_by_hand(monkeypatch):
    """Reports recognized attention, and reasons for near misses."""
    fake_cuda.install(monkeypatch)
    q = bnp.ones((40, 16), dtype="bfloat16")
    weights = lambda q: nn.softmax(q @ q.T)

    def shown(f):
        text = str(bf.explain(f, q, device=bf.devices("cuda")[0]))
        return [line for line in text.splitlines() if "as attention at" in line]

    (line,) = shown(lambda q: weights(q) @ q)
    assert line.startswith("recognised as attention at test_explain.py:")
    (line,) = shown(lambda q: (weights(q) @ q, weights(q)))
    assert line.endswith("its scores or weights are returned, too")
    lines = shown(bf.grad(lambda q: (weights(q) @ q).astype("float32").sum()))
    assert [line.endswith(" backward") for line in lines] == [False, True]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_show_fits_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.delenv("NO_COLOR", raising=False)
    found, out = bf.explain(layer, *ARGS), Terminal()
    found.show(out)
    shown = re.sub(r"\x1b\[\d*m", "", out.getvalue()).splitlines()
    n = len(found.cost.steps)
    first = next(i for i, line in enumerate(shown) if line.startswith("step"))
    table = shown[first : first + n + 1]
    assert max(map(len, table)) <= 90 < max(map(len, str(found).splitlines()[first : first + n + 1]))
    assert "\x1b[31m" in out.getvalue()  # a step takes a fifth of the time
    assert [row.split()[0] for row in table[1:]] == [str(i) for i in range(n)]


@pytest.mark.parametrize("terminal", [True, False])
def test_show_without_colours_is_the_text(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1") if terminal else monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal() if terminal else io.StringIO()
    found = bf.explain(layer, *ARGS)
    found.show(out)
    assert out.getvalue() == f"{found}\n"


def test_html():
    found = bf.explain(layer, *ARGS)
    page = ET.fromstring(found.to_html())
    (table,) = page.iter("table")
    rows = [[c.text for c in row] for row in table]
    assert rows[0][:2] == ["step", "kernel"] and len(rows) == 1 + len(found.cost.steps)
    assert found.to_html() == found._repr_html_() and "planned peak" in found.to_html()


def test_stages_and_jaxprs_in_notebooks():
    lowered = bf.jit(layer).lower(*ARGS)
    assert (
        lowered._repr_html_()
        == lowered.jaxpr._repr_html_()
        == f"<pre>{html.escape(str(lowered.jaxpr))}</pre>"
    )
