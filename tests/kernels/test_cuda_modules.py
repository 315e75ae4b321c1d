"""Kernels of programs become modules: what is compiled, what is shared, and what a launch is given."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import nn
from blufunc.kernels import cuda_modules, cuda_opaque, cuda_runtime, nvrtc
from blufunc.kernels.cuda_backend import CudaBackend
from blufunc.kernels.cuda_modules import Loaded, wanted_by
from blufunc.kernels.cuda_program import TARGET
from blufunc.kernels.steps import GroupStep, OpaqueStep, schedule


class Function:
    """A function of a module; it says what it is prepared with."""

    def __init__(self, name):
        self.name = name

    def prepare(self, grid, block, shared, values):
        return Prepared(cuda_runtime.Arguments(values))


class Prepared:
    def __init__(self, arguments):
        self.arguments = arguments


class Module:
    def __init__(self, cubin):
        self.cubin = cubin

    def kernel(self, name):
        assert name.encode() in self.cubin
        return Function(name)


@pytest.fixture
def compiled(monkeypatch):
    """What is compiled, as texts: by NVRTC, for a device that is not there."""
    texts = []
    properties = cuda_runtime.DeviceProperties(0, "fake", (9, 0), 132, 1 << 30, 50 << 20, 227 << 10)
    compile_many = nvrtc.compile_many

    def spied(sources, arch):
        texts.extend(text for text, _ in sources)
        return compile_many(sources, arch, 2)

    monkeypatch.setattr(cuda_runtime, "properties", lambda index=0: properties)
    monkeypatch.setattr(cuda_runtime, "use_device", lambda index: None)
    monkeypatch.setattr(cuda_runtime, "Module", Module)
    monkeypatch.setattr(nvrtc, "compile_many", spied)
    monkeypatch.setattr(cuda_modules, "_modules", {})
    return texts


def wanted_of(f, *args):
    jaxpr = bf.jit(f).lower(*args).jaxpr
    made = schedule(jaxpr, (True,) * len(jaxpr.invars), TARGET, cuda_opaque.planned)
    steps = [s for s in made.steps if not isinstance(s, OpaqueStep)]
    return made, steps, [w for s in steps for w in wanted_by(made, s)]


def struct(*shape, dtype=np.float32):
    return bf.ShapeDtypeStruct(shape, dtype)


def test_kernels_of_one_text_are_one_function_in_one_module(compiled):
    _, _, wanted = wanted_of(lambda x: bnp.tanh(bnp.tanh(bnp.tanh(x @ x) @ x) @ x).sum(0), struct(64, 64))
    texts, loaded = cuda_modules.load(wanted, 0, "program")
    assert len(texts) == 1 and texts == compiled
    functions = {id(one) for one in loaded}
    assert len(functions) == len({w.key for w in wanted}) < len(wanted)
    cuda_modules.load(wanted, 0, "program")
    assert len(compiled) == 1


def update(params, moments, grads):
    moments = [0.9 * m + 0.1 * g for m, g in zip(moments, grads)]
    return [p - 0.1 * m / (bnp.sqrt(m * m) + 1e-8) for p, m in zip(params, moments)], moments


def test_an_update_of_all_parameters_is_one_launch(compiled):
    shapes = [(64, 32), (32,), (128, 8), (8,), (256,), (40, 4)]
    arrays = [struct(*s) for s in shapes]
    made, steps, wanted = wanted_of(update, arrays, arrays, arrays)
    assert [type(s) for s in steps] == [GroupStep]
    assert len(wanted) == 1 and len(wanted[0].kernels) == len(shapes)
    assert len(wanted[0].values) == sum(len(k.buffers) for k in wanted[0].kernels)
    assert wanted[0].aliased  # the results take over donated arrays
    (text,), (loaded,) = cuda_modules.load(wanted, 0, "update")
    assert loaded.table and "_table table" in text


def test_a_group_that_is_too_large_is_several_launches(compiled, monkeypatch):
    monkeypatch.setattr(cuda_modules, "group_limit", lambda kernel: 4)
    arrays = [struct(8 * n) for n in range(1, 11)]
    _, steps, wanted = wanted_of(update, arrays, arrays, arrays)
    assert len(steps) == 1 and [len(w.kernels) for w in wanted] == [4, 4, 2]
    values = [v for w in wanted for v in w.values]
    assert sorted(values) == sorted(steps[0].values)


def test_kernels_called_alike_have_names_of_their_own(compiled):
    def f(x):
        return nn.softmax(x), nn.softmax(x[:, :40]), nn.softmax(x.T)

    _, _, wanted = wanted_of(f, struct(48, 64))
    texts, loaded = cuda_modules.load(wanted, 0, "program")
    names = [one.function.name for one in loaded]
    assert len(set(names)) == len({w.key for w in wanted}) and len(texts) == 1


@pytest.mark.parametrize("table", [False, True])
def test_addresses_can_be_changed(table):
    launch, addresses = Loaded(Function("f"), (1, 1, 1), (32, 1, 1), 0, table=table).prepare([11, 12, 13])
    arguments = launch.arguments
    addresses[2] = 99
    assert list(arguments.words)[:3] == [11, 12, 99]


def test_a_draft_has_the_source_that_is_compiled(compiled):
    jaxpr = bf.jit(lambda x: nn.softmax(x @ x)).lower(struct(48, 48)).jaxpr
    draft = CudaBackend().draft(jaxpr, (False,))
    assert not compiled
    wanted = [
        w for s in draft.schedule.steps if not isinstance(s, OpaqueStep) for w in wanted_by(draft.schedule, s)
    ]
    texts, _ = cuda_modules.load(wanted, 0, "program")
    assert draft.source() == "\n".join(texts) and compiled == texts
