"""Parts of arrays as buffers: kernels of different parts are equal, and correct."""

import re

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import nn
from blufunc.core.arrays.array import from_numpy
from blufunc.core.programs.simplify import inline_bodies, simplify
from blufunc.kernels.backends.cpu import toolchain
from blufunc.kernels.backends.cuda.render.source import render
from blufunc.kernels.backends.cuda.schedule.passes import schedule
from blufunc.kernels.backends.cuda.target import CUDA
from blufunc.kernels.fusion.fuse import Region, fuse
from blufunc.kernels.lower.region import ALIGNMENT, Lowered
from tests.emulation import fake_cuda
from tests.kernels.differential import LIKE_A_GPU, SMALL, case, compile_all, differences


def draw(*shape, dtype=np.float32):
    return from_numpy((4 * np.random.default_rng(shape).random(shape)).astype(dtype))


def launches(fun, *args):
    """The launches of a function on a GPU, in the order of its regions."""
    fusion = fuse(inline_bodies(simplify(bf.jit(fun).trace(*args).jaxpr))[0])
    made = Lowered(fusion, CUDA)
    return [x for r in fusion.steps if isinstance(r, Region) for x in made.launches(r)]


X, NARROW, ROWS, LABELS = draw(64, 32), draw(64, 3), draw(64), draw(8, 9, dtype=np.int32)


def losses(x, labels):
    """The negative logarithms of what rows have at their labels."""
    return -(nn.log_softmax(x) * (bnp.arange(x.shape[1]) == labels[:, None])).sum(1)


CASES = {  # with the elements at which buffers begin that are not whole arrays
    "rows": (lambda x: bnp.tanh(x[16:32]), (X,), [512]),
    "first rows": (lambda x: bnp.tanh(x[:16]), (X,), [0]),
    "last rows": (lambda x: bnp.tanh(x[-16:]), (X,), [1536]),
    "reversed": (lambda x: bnp.tanh(x[32:48][::-1]), (X,), [1024]),
    "aligned": (lambda x: bnp.tanh(x[16:32]), (NARROW,), [48]),
    "not aligned": (lambda x: bnp.tanh(x[5:9]), (NARROW,), [8]),  # the last place before 15 that is
    "half": (lambda x: bnp.tanh(x[5:9]), (draw(64, 3, dtype=np.float16),), [0]),
    "reduced": (lambda x: nn.softmax(x[16:32]), (X,), [512]),
    "read by rows": (lambda x, s: nn.softmax(x[16:32] * s[7:23, None]), (X, ROWS), [512, 7]),
    "read in loops over rows": (lambda x, s: (x[32:48] * s[19:35, None]).sum(0), (X, ROWS), [1024, 19]),
    "labels": (lambda x, y: losses(x[16:32], y[:, 1:].reshape(-1)[16:32]), (X, LABELS), [512, 19]),
    "indices": (lambda t, i: t[i[16:32]] * 2, (ROWS, draw(64, dtype=np.int32)), [16]),
    "what indices look up": (lambda t, i: t[32:][i] * 2, (X, draw(9, dtype=np.int32)), [1024]),
    "two parts": (lambda x: x[8:24] + x[16:32], (X,), [256]),
    "padded": (lambda x: bnp.pad(x[2:9], ((1, 1), (0, 0))) * 2, (X,), [32]),
    "padded from the first on": (lambda x: bnp.pad(x[:9], ((1, 1), (0, 0))) * 2, (X,), []),
    "all": (lambda x: x[:-1] + x[1:], (X,), []),
}
compiled = pytest.mark.skipif(toolchain.find() is None, reason="this machine has no C++ compiler")


@pytest.mark.parametrize("name", CASES)
def test_a_buffer_begins_where_it_is_read_first(name):
    fun, args, begins = CASES[name]
    made = launches(fun, *args)
    assert [n for launch in made for n in launch.starts.values()] == begins
    for launch in made:
        text = render(schedule(launch.kernel)).source
        assert set(launch.operands) == set(launch.kernel.buffers) >= set(launch.starts)
        for buffer, start in launch.starts.items():
            assert start + buffer.size <= launch.operands[buffer].aval.size
            in_vectors = re.search(rf"vec_\w+<[^>]*>\({buffer.name}\b", text)
            assert not in_vectors or start * buffer.dtype.itemsize % ALIGNMENT == 0


@pytest.mark.parametrize("target", [SMALL, LIKE_A_GPU], ids=["small", "gpu"])
def test_the_values_are_the_same(target):
    for name, (fun, args, _) in CASES.items():
        c = case(fun, *args, target=target, name=name)
        assert not differences(c.interpreted(), c.expected(), False), name


@compiled
def test_the_values_are_the_same_compiled():
    cases = [case(fun, *args, target=SMALL, name=name) for name, (fun, args, _) in CASES.items()]
    for c, functions in zip(cases, compile_all(cases), strict=True):
        assert not differences(c.run(functions), c.expected(), False), c.name


def chunked(x, weight, labels):
    return nn.linear_cross_entropy(x, weight, labels, chunk=16)


def test_a_loss_in_chunks_has_one_kernel_for_all():
    args = draw(96, 16), draw(48, 16), draw(96, dtype=np.int32)
    gradients = bf.value_and_grad(chunked, (0, 1))
    of_losses = [x for x in launches(gradients, *args) if "exp" in x.kernel.name]
    assert len(of_losses) == 6 and len({x.kernel.key for x in of_losses}) == 1
    found = [sorted(x.starts.values()) for x in of_losses]
    assert found == [[16 * n] for n in range(6)]


def test_a_device_gets_the_addresses_of_the_parts(monkeypatch):
    fake_cuda.install(monkeypatch)
    args = draw(96, 16), draw(48, 16), draw(96, dtype=np.int32)
    gradients = bf.value_and_grad(chunked, (0, 1))
    (device,) = bf.devices("cuda")
    step = bf.jit(gradients)
    on_device = [from_numpy(np.asarray(a), device) for a in args]
    want = gradients(*args)
    for _ in range(3):  # kernel by kernel, and as a graph
        value, (dx, dw) = step(*on_device)
        np.testing.assert_allclose(np.asarray(value), np.asarray(want[0]), rtol=1e-5)
        np.testing.assert_allclose(np.asarray(dx), np.asarray(want[1][0]), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.asarray(dw), np.asarray(want[1][1]), rtol=1e-4, atol=1e-5)
