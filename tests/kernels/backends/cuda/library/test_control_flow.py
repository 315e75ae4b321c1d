"""Loops and branches as nodes of CUDA graphs."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.config import config
from blufunc.kernels.backends.cuda.driver import conditional, nvrtc
from blufunc.kernels.backends.cuda.library.control_flow import loops, moves
from blufunc.kernels.inspect.program import Sight
from tests.emulation import fake_cuda
from tests.emulation.cuda_machines import needs_nvrtc
from tests.kernels.backends.cuda.test_program import on, same, uniform

W, X = uniform(8, 8) * 0.3, uniform(8, seed=1)
XS = uniform(70, 8, seed=2)


def until(w, x, rounds):
    """A loop whose body is a product."""
    return lax.while_loop(lambda s: s[0] < rounds, lambda s: (s[0] + 1, bnp.tanh(s[1] @ w) + 0.1), (0, x))


def swapped(x, rounds):
    """Carries that change places, of several sizes and dtypes."""

    def body(s):
        i, a, b, big, other, flag = s
        return i + 1, b, a + b, other, big + bnp.sum(a), ~flag

    big = bnp.broadcast_to(x, (1500, 8)) * 1.0
    return lax.while_loop(lambda s: s[0] < rounds, body, (0, x, x * 0.5, big, big + 1, True))


def verdict_carried(x):
    """The condition is a carry that the next round overwrites."""

    def body(s):
        flag, after, i, y = s
        return after, i < 30, i + 1, bnp.cumsum(y) / 8

    return lax.while_loop(lambda s: s[0], body, (True, True, 0, x))


def nested(w, x, rounds):
    def body(s):
        i, y = s
        inner = lax.while_loop(lambda t: t[0] < i % 3, lambda t: (t[0] + 1, bnp.cumsum(t[1] @ w)), (0, y))
        return i + 1, inner[1]

    return lax.while_loop(lambda s: s[0] < rounds, body, (0, x))


def branches(w, x, kinds):
    cases = (lambda x: bnp.cumsum(x @ w) / 8, lambda x: x, lambda x: bnp.tanh(x @ w))
    return lax.scan(lambda x, k: (lax.switch(k, cases, x), x.sum()), x, kinds)


def in_scan(w, x, xs, reverse=False):
    def step(c, a):
        n, y = c
        y = bnp.tanh(y @ w + a["row"])
        return (n + 1, y), {"y": y, "n": n, "pair": (a["row"][:3], bnp.cumsum(y))}

    scalars = np.arange(len(xs), dtype=np.int16)
    return lax.scan(step, (0, x), {"row": xs, "scalar": scalars}, reverse=reverse)


def while_in_scan(w, x, xs):
    def step(c, a):
        y = lax.while_loop(lambda t: (t**2).sum() > 0.5, lambda t: bnp.cumsum(t @ w) / 8, c + a)
        return y, y

    return lax.scan(step, x, xs)


def bounded(w, x):
    return lax.while_loop(lambda s: True, lambda s: bnp.cumsum(s @ w), x, max_steps=21)


KINDS = np.random.default_rng(0).integers(-1, 4, 70).astype(np.int32)
PROGRAMS = {
    "while": (until, W, X, np.int32(40)),
    "no round": (until, W, X, np.int32(0)),
    "few rounds": (until, W, X, np.int32(3)),
    "carries that change places": (swapped, X, np.int32(37)),
    "a condition that is carried": (verdict_carried, X),
    "nested": (nested, W, X, np.int32(40)),
    "branches": (branches, W, X, KINDS),
    "scan": (in_scan, W, X, XS),
    "reversed scan": (lambda *a: in_scan(*a, reverse=True), W, X, XS),
    "while in a scan": (while_in_scan, W, X, XS),
    "a bound": (bounded, W, X),
    "gradient of a scan": (bf.grad(lambda w, x, xs: in_scan(w, x, xs)[1]["y"].sum()), W, X, XS),
}


def check(name, device, repeat=4):
    fun, *args = PROGRAMS[name]
    want, jitted, there = bf.jit(fun)(*args), bf.jit(fun), on(device, *args)
    for _ in range(repeat):
        same(jitted(*there), want, 1e-4)
    longer = bf.jit(lambda *args: (fun(*args), bnp.cumsum(args[0]), bnp.cumsum(args[0] * 2)))
    for _ in range(repeat):
        same(longer(*there)[0], want, 1e-4)
    same(there, args)


@pytest.fixture
def repeating(monkeypatch):
    """Scans become nodes that repeat."""
    monkeypatch.setattr(loops, "MOST_NODES", 8)


@pytest.mark.parametrize("name", PROGRAMS)
def test_loops_are_nodes(name, fake, cuda, repeating):
    check(name, cuda)
    in_one_kernel = name == "gradient of a scan"
    assert in_one_kernel or name in ("no round", "few rounds") or fake.nodes


@pytest.mark.parametrize("name", PROGRAMS)
def test_loops_of_the_host(name, fake, cuda, monkeypatch):
    monkeypatch.setattr(config, "cuda_graphs", False)
    check(name, cuda, 2)
    assert not fake.nodes


@pytest.mark.parametrize("name", PROGRAMS)
def test_loops_without_conditional_nodes(name, fake, cuda, monkeypatch):
    monkeypatch.setattr(conditional, "why_not", lambda: "the driver is old")
    check(name, cuda, 3)
    assert not fake.nodes


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_loops_are_nodes_on_a_device(name, repeating):
    check(name, bf.devices("cuda")[0])


def test_the_host_drives_a_loop_that_cannot_be_captured(fake, cuda, monkeypatch):
    def capture(run, device=0, keep=(), urgent=()):
        raise RuntimeError("cudaErrorStreamCaptureUnsupported")

    monkeypatch.setattr(fake_cuda.cuda_graph, "capture", capture)
    check("while", cuda)
    assert not fake.nodes


def test_a_loop_with_a_callback_runs_on_the_host(fake, cuda):
    def body(s):
        return s[0] + 1, bf.pure_callback(np.sin, bf.ShapeDtypeStruct((8,), np.float32), s[1])

    f = lambda x: lax.while_loop(lambda s: s[0] < 20, body, (0, x))
    (x,) = on(cuda, X)
    traced = bf.jit(f).trace(x)
    (note,) = Sight(traced.jaxpr, traced.donated, cuda).notes
    assert "the host drives the while at" in note and "pure_callback" in note
    for _ in range(3):
        same(bf.jit(f)(x), bf.jit(f)(X))
    assert not fake.nodes


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_kernels_compile(arch):
    nvrtc.build(moves.source(), arch, "control_flow")
