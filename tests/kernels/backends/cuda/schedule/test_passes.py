"""Scheduled kernels: readable text, and the passes that build them."""

from dataclasses import replace

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import nn
from blufunc.config import config
from blufunc.kernels.backends.cuda.device_model import HOPPER, Limits
from blufunc.kernels.backends.cuda.program import Draft
from blufunc.kernels.backends.cuda.render.source import RENDERERS, render, render_many
from blufunc.kernels.backends.cuda.schedule.passes import PASSES, schedule, schedule_group
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import ScheduledKernel
from tests.emulation import fake_cuda
from tests.emulation.cuda_functions import BF16, SMALL_CASES, adamw, backward, kernels, ranged

FIRST = {  # a kernel of each kind, and of each way to keep rows
    "softmax": (nn.softmax, ranged((4096, 1024), dtype=BF16)),
    "column sums": (lambda x: x.sum(0), ranged((16384, 768))),
    "cluster": SMALL_CASES["cross-entropy of long rows with gradient"],
    "prefetch": (backward(nn.layer_norm), ranged((16384, 768), (768,), (768,), (16384, 768))),
    "column scan": (lambda x: bnp.cumsum(x * 2, 0) - x, ranged((4096, 4096))),
    "transpose": (lambda x: x.T + 1, ranged((300, 200))),
}


def first(name):
    """First kernel of a function, without line numbers."""
    kernel, *_ = kernels(*FIRST[name])
    return replace(kernel, notes=())


@pytest.mark.parametrize("name", FIRST)
def test_golden_schedules(golden, name):
    golden(f"schedule_{name.replace(' ', '_')}", schedule(first(name)))


def test_the_limits_of_a_device_show():
    """Without clusters one block stages a row; with little shared memory it is reread."""
    kernel = first("cluster")
    texts = [str(schedule(kernel, (), limits)) for limits in (HOPPER, Limits(cluster=1), Limits(99 << 10, 1))]
    assert ["cluster   2 blocks" in t for t in texts] == [True, False, False]
    assert ["in bulk" in t for t in texts] == [True, False, False]
    assert ["vector by vector" in t for t in texts] == [False, True, False]
    assert ["read last: logits" in t for t in texts] == [False, False, True]


def test_each_pass_leaves_a_kernel_that_can_be_shown():
    for name in FIRST:
        scheduled = ScheduledKernel(first(name))
        for _, run in PASSES:
            scheduled = run(scheduled)
            assert str(scheduled).startswith(f"schedule {scheduled.entry}\n")


def test_rendering_is_a_function_of_the_schedule():
    """Equal schedules give equal sources in any order; each kind has a renderer."""
    every = [schedule(first(name)) for name in FIRST]
    every.append(schedule_group([kernels(adamw, ranged(*[(n,)] * 4))[0] for n in (8, 4096)], "update"))
    every.append(schedule(kernels(bnp.exp, ranged((100,)))[0]))
    assert {s.kind for s in every} == set(RENDERERS)
    texts = [render(s).source for s in every]
    assert texts == [render(s).source for s in reversed(every)][::-1]
    together = render_many([s for s in every if s.kind in ("group", "transpose")])
    assert len({k.source for k in together}) == 1 and [k.segments for k in together] == [0, 2]


def test_passes_have_names():
    assert len({name for name, _ in PASSES}) == len({run for _, run in PASSES}) == len(PASSES)


# -- BLUFUNC_DEBUG=schedule ------------------------------------------------------------------------


def shown(x):
    return nn.softmax(x) + nn.softmax(2 * x)


def test_a_program_shows_the_schedule_of_each_kernel(monkeypatch, capsys):
    fake_cuda.install(monkeypatch)
    monkeypatch.setattr(config, "debug", "schedule")
    x = bf.device_put(np.ones((300, 1024), np.float32), bf.devices("cuda")[0])
    bf.jit(shown)(x)
    err = capsys.readouterr().err
    assert err.count("schedule of shown:") == 1 and "loopir of" not in err
    assert "  kind      lanes\n" in err and "threads per point" in err and "lanes k < 1024:" in err


def test_a_draft_shows_schedules_without_a_device(monkeypatch, capsys):
    jaxpr = bf.jit(shown).lower(bf.ShapeDtypeStruct((300, 60000), "float32")).jaxpr
    monkeypatch.setattr(config, "debug", "schedule")
    draft = Draft(jaxpr, (False,), "sm_90a")
    text = draft.schedules()
    err = capsys.readouterr().err
    assert err == f"schedule of shown:\n{text}\n"
    assert text.count("schedule shown") == draft.source().count('extern "C"') and "cluster   " in text
    monkeypatch.setattr(config, "debug", "")
    old = Draft(jaxpr, (False,), "sm_80", Limits(163 << 10, cluster=1))
    assert "cluster   " not in old.schedules() and capsys.readouterr().err == ""
