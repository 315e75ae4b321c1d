"""Loops and branches as nodes of CUDA graphs."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.config import config
from blufunc.kernels.backends.cuda import replay
from blufunc.kernels.backends.cuda.driver import conditional, nvrtc
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
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


def constant_carried(k, x):
    """A carry that is a constant for a step, and is updated in place in others."""

    def step(c, _):
        a, b, n = c
        return (k, a.at[n % 70].set(x), n + 1), (b[0, :3], n)

    return lax.scan(step, (k * 2, k + 1, 0), None, length=67)


def carried_twice(k, x):
    def step(c, _):
        a, b, n = c
        t = a.at[n % 70].set(x) + b * 0.5
        return (t, t, n + 1), None

    return lax.scan(step, (k * 0.1, k * 0.2, 0), None, length=9)


def short(w, x):
    """Fewer steps than the host drives before it makes a graph."""
    step = lambda c, _: ((c[0] + 1, bnp.cumsum(bnp.tanh(c[1] @ w) @ w)), c[0])
    return lax.scan(step, (0, x), None, length=7)


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
    "a constant that is carried": (constant_carried, uniform(70, 512), X[0] * uniform(512)),
    "a value that is carried twice": (carried_twice, uniform(70, 512), uniform(512)),
    "a short scan": (short, W, X),
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
    monkeypatch.setattr(loops, "MOST_STEPS", 5)


@pytest.mark.second
@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", PROGRAMS)
def test_loops_are_nodes(name, fake, cuda, repeating):
    check(name, cuda)
    in_one_kernel = name == "gradient of a scan"
    assert in_one_kernel or name in ("no round", "few rounds") or fake.nodes


@pytest.mark.second
@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", PROGRAMS)
def test_loops_of_the_host(name, fake, cuda, monkeypatch):
    monkeypatch.setattr(config, "cuda_graphs", False)
    check(name, cuda, 2)
    assert not fake.nodes


@pytest.mark.second
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


def test_a_failed_capture_is_not_retried(fake, cuda, repeating, monkeypatch):
    captures = []

    def capture(run, device=0, keep=(), urgent=()):
        captures.append(run)
        raise errors.OutOfMemoryError("out of memory")

    monkeypatch.setattr(fake_cuda.cuda_graph, "capture", capture)
    monkeypatch.setattr(replay, "FEWEST", 1 << 30)
    for name in ("scan", "while"):
        fun, *args = PROGRAMS[name]
        jitted, there = bf.jit(fun), on(cuda, *args)
        for _ in range(3):
            same(jitted(*there), bf.jit(fun)(*args), 1e-4)
    assert len(captures) == 2


@pytest.mark.parametrize("name", ["scan", "while", "a constant that is carried"])
def test_a_loop_in_a_program_without_a_graph_has_one(name, fake, cuda, repeating, monkeypatch):
    """It serves later calls, and keeps no argument alive."""
    monkeypatch.setattr(replay, "FEWEST", 1 << 30)
    monkeypatch.setattr(loops, "HOST_ROUNDS", 2)
    captures = []
    capture = fake_cuda.cuda_graph.capture
    monkeypatch.setattr(
        fake_cuda.cuda_graph, "capture", lambda *a, **k: captures.append(1) or capture(*a, **k)
    )
    fun, *args = PROGRAMS[name]
    jitted, there = bf.jit(fun), on(cuda, *args)
    results = [jitted(*there) for _ in range(2)]
    for found in results:
        same(found, bf.jit(fun)(*args), 1e-4)
    if name == "while":
        same(jitted(*on(cuda, *args)), bf.jit(fun)(*args), 1e-4)
        assert len(captures) == 1
    before = cuda_memory.pool().live_bytes()
    del there
    assert before - cuda_memory.pool().live_bytes() == sum(np.asarray(a).nbytes for a in args)


def test_kernels_that_move_on_the_host(host):
    """Sources are read before targets are written, and rows go where they belong."""
    before = """
#define __device__
#define __align__(n)
struct int4 { int x, y, z, w; };
void cudaGraphSetConditional(unsigned long long, unsigned) {}
namespace moving {
"""
    after = """
extern "C" __global__ void swap(const int *from, int *out) {
  for (int i = threadIdx.x; i < 70; i += THREADS) out[i] = from[i];
  __syncthreads();
  Copies copies = {2, {{(char *)out, (const char *)(out + 35), 140}, {(char *)(out + 35), (const char *)out, 140}}};
  move_all(copies);
}
extern "C" __global__ void rows(const int *from, int *out) {
  long long rounds = 2;
  move_rows(&rounds, 1, 3, 4, 0, {1, {{(char *)out, (char *)from, 20, 32}}});
}
}
"""
    text = moves.source().replace("blockIdx.y", "0")
    text = "\n".join(line for line in text.splitlines() if "__device__ void cudaGraph" not in line)
    x = np.arange(70, dtype=np.int32)
    source = before + text + after
    np.testing.assert_array_equal(host.launch(source, "swap", [x], x), np.roll(x, 35))
    got = host.launch(source, "rows", [x], np.zeros((14, 5), np.int32))
    want = np.zeros((14, 5), np.int32)
    want[7:11] = np.stack([x[8 * i : 8 * i + 5] for i in range(4)])
    np.testing.assert_array_equal(got, want)


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_kernels_compile(arch):
    nvrtc.build(moves.source(), arch, "control_flow")
