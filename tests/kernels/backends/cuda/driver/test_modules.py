"""Kernel modules: compilation, sharing, and launch arguments."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, nn
from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda import dispatch
from blufunc.kernels.backends.cuda.backend import CudaBackend
from blufunc.kernels.backends.cuda.driver import driver, modules, nvrtc
from blufunc.kernels.backends.cuda.driver.modules import Loaded, wanted_by
from blufunc.kernels.backends.cuda.library.attention import kernels as cuda_attention
from blufunc.kernels.backends.cuda.library.attention import launch as cuda_attention_launch
from blufunc.kernels.backends.cuda.library.attention.mods import code_of
from blufunc.kernels.backends.cuda.library.scatter import rows as scatter
from blufunc.kernels.backends.cuda.program import TARGET
from blufunc.kernels.pipeline import schedule
from blufunc.kernels.schedule import GroupStep, OpaqueStep
from blufunc.nn.attention.mods import traced


class Function:
    """A function of a module that records how it is prepared."""

    def __init__(self, name):
        self.name = name

    def prepare(self, grid, block, shared, values):
        return Prepared(driver.Arguments(values))


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
    """Sources passed to NVRTC, for a device that is not present."""
    texts = []
    properties = driver.DeviceProperties(0, "fake", (9, 0), 132, 1 << 30, 50 << 20, 227 << 10)
    compile_many = nvrtc.compile_many

    def spied(sources, arch):
        texts.extend(text for text, _ in sources)
        return compile_many(sources, arch, 2)

    monkeypatch.setattr(driver, "properties", lambda index=0: properties)
    monkeypatch.setattr(driver, "use_device", lambda index: None)
    monkeypatch.setattr(driver, "Module", Module)
    monkeypatch.setattr(nvrtc, "compile_many", spied)
    monkeypatch.setattr(modules, "_modules", {})
    for module, name in (
        (cuda_attention_launch, "_function"),
        (scatter, "functions_of"),
        (scatter, "order_functions"),
    ):  # which keep functions
        monkeypatch.setattr(module, name, functools.lru_cache(getattr(module, name).__wrapped__))
    return texts


def wanted_of(f, *args):
    jaxpr = bf.jit(f).lower(*args).jaxpr
    made = schedule(jaxpr, (True,) * len(jaxpr.invars), TARGET, dispatch.Library("sm_90a").planned)
    steps = [s for s in made.steps if not isinstance(s, OpaqueStep)]
    return made, steps, [w for s in steps for w in wanted_by(made, s)]


def struct(*shape, dtype=np.float32):
    return bf.ShapeDtypeStruct(shape, dtype)


def test_kernels_of_one_text_are_one_function(compiled):
    _, _, wanted = wanted_of(lambda x: bnp.tanh(bnp.tanh(bnp.tanh(x @ x) @ x) @ x).sum(0), struct(64, 64))
    texts, loaded = modules.load(wanted, 0, "program")
    functions = {id(one) for one in loaded}
    assert len(functions) == len({w.key for w in wanted}) == len(texts) < len(wanted)
    modules.load(wanted, 0, "program")
    assert compiled == texts


def update(params, moments, grads):
    moments = [0.9 * m + 0.1 * g for m, g in zip(moments, grads)]
    return [p - 0.1 * m / (bnp.sqrt(m * m) + 1e-8) for p, m in zip(params, moments)], moments


def test_kernels_one_after_another_are_in_different_modules(compiled, monkeypatch):
    monkeypatch.setattr(modules, "_PER_MODULE", 2)
    monkeypatch.setattr(modules, "_ALONE", 0)
    f = lambda *xs: [g(x) for g in (lambda x: nn.softmax(x, axis=1), lambda x: bnp.tanh(x.T)) for x in xs]
    _, _, wanted = wanted_of(f, struct(48, 64), struct(48, 96))
    texts, loaded = modules.load(wanted, 0, "program")
    assert texts == compiled
    within = [[n for n, one in enumerate(loaded) if f" {one.function.name}(" in text] for text in texts]
    assert within == [[0, 2], [1]]


def test_few_kernels_are_modules_of_their_own_and_shared(compiled):
    f = lambda *xs: [g(x) for g in (lambda x: nn.softmax(x, axis=1), lambda x: bnp.tanh(x.T)) for x in xs]
    _, _, wanted = wanted_of(f, struct(48, 64), struct(48, 96))
    texts, loaded = modules.load(wanted, 0, "program")
    assert len(texts) == len({x.function.name for x in loaded}) > 1
    modules.load(wanted[:2], 0, "another")
    assert compiled == texts, "the other program has kernels of the first"


def test_threads_compile_at_the_same_time(compiled, monkeypatch):
    """Two threads with sources of their own, and a third that waits for one of these."""
    both, lock = threading.Barrier(2, timeout=30), threading.Lock()
    compile_many, count = nvrtc.compile_many, [0]

    def together(sources, arch):
        with lock:
            count[0] += 1
        both.wait()
        return compile_many(sources, arch)

    monkeypatch.setattr(nvrtc, "compile_many", together)
    texts = [(f'extern "C" __global__ void k{i}(int* x) {{ *x = {i}; }}', f"k{i}") for i in range(2)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda t: modules.module(t[0], 0, t[1]), [*texts, texts[0]]))
    assert count == [2] and found[2] is found[0] is not found[1]


def test_a_source_that_does_not_compile_may_be_tried_again(compiled):
    for _ in range(2):
        with pytest.raises(errors.CompileError, match="undefined"):
            modules.module("void f() { undefined; }", 0, "f")


def test_sources_of_other_steps_are_compiled_with_kernels(compiled):
    double = bf.cuda_kernel("out[i] = 2 * x[i];", reference=lambda x: 2 * x, name="double_")

    def f(table, rows, q, k, v):
        attend = lambda q: nn.dot_product_attention(q, k, v, is_causal=True).sum()
        return table.at[rows].add(1.0), bf.value_and_grad(attend)(q), double(table)

    of_heads = [struct(1, 1024, 2, 64, dtype=dtypes.bfloat16)] * 3
    traced = bf.jit(f).trace(struct(16, 8), struct(100, dtype=np.int32), *of_heads)
    made = CudaBackend().draft(traced.jaxpr, (False,) * 5).schedule
    others = dict.fromkeys(
        t for s in made.steps if isinstance(s, OpaqueStep) for t in dispatch.Library("sm_90a").sources(s)
    )
    names = [
        "attention_forward",
        "attention_key_gradient",
        "attention_query_gradient",
        "double_",
        "scatter_add",
    ]
    assert sorted(name for _, name in others) == names
    modules.load([], 0, "program", others)
    assert compiled == [text for text, _ in others]
    for text, name in others:
        modules.module(text, 0, name)
    assert len(compiled) == len(others)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "kind, parts, masked, summed, batch",
    [
        (cuda_attention_launch.Forward, 0, False, False, 1),
        (cuda_attention_launch.Forward, 2, False, False, 1),
        (cuda_attention_launch.Forward, 0, True, False, 1),
        (cuda_attention_launch.Backward, 0, False, False, 1),
        (cuda_attention_launch.Backward, 2, False, False, 1),
        (cuda_attention_launch.Backward, 0, True, False, 1),
        (cuda_attention_launch.Backward, 0, False, True, 1),
        (cuda_attention_launch.Backward, 0, True, True, 1),
        (cuda_attention_launch.Backward, 0, False, False, 66),  # by planes
        (cuda_attention_launch.Backward, 0, False, True, 66),
    ],
)
def test_attention_asks_for_what_was_compiled(compiled, kind, parts, masked, summed, batch):
    mods, _ = traced(nn.masks.sliding_window(20), None, np.dtype(np.float32))
    code = code_of(mods, ()) if masked else cuda_attention.NO_CODE
    dtype = dtypes.float16 if parts else dtypes.bfloat16
    forward = kind is cuda_attention_launch.Forward
    shape = cuda_attention.Shape(batch, 512, 512, 2, 2, 64)
    strides = cuda_attention.Strides(512 * 128, 128, 64)
    assert cuda_attention.fits_planes(shape, "sm_90a") == (batch > 1)
    others = cuda_attention.texts(forward, dtype, shape, True, "sm_90a", code, parts, summed)
    modules.load([], 0, "program", others)
    how = (0.125, True, 0, code, parts, *([] if forward else [summed]))
    kind(shape, dtype, [strides] * (4 if forward else 8), *how)
    assert compiled == [text for text, _ in others]


def test_kernels_of_partial_sums_are_compiled_with_others(compiled):
    """The step also requests ``partial_reductions``, for the gradient of a bias."""

    def loss(x, w, b):
        y = (x @ w + b).reshape(1, 1024, 3, 2, 64)
        attended = nn.dot_product_attention(*[y[:, :, i] for i in range(3)], is_causal=True)
        return attended.astype("float32").sum()

    f = bf.grad(bf.autocast(loss), (0, 1, 2))
    traced = bf.jit(f).trace(struct(1, 1024, 32), struct(32, 384), struct(384))
    made = CudaBackend().draft(traced.jaxpr, (False,) * 3).schedule
    (step,) = [s for s in made.steps if isinstance(s, OpaqueStep) and "packed" in s.eqn.prim.name]
    found = dispatch.Library("sm_90a").sources(step)
    assert len(step.eqn.outvars) == 2 and len(found) == 2
    shape = cuda_attention.Shape(1, 1024, 1024, 2, 2, 64)
    assert found == cuda_attention.texts(False, dtypes.bfloat16, shape, True, "sm_90a", summed=True)


def test_an_update_of_all_parameters_is_one_launch(compiled):
    shapes = [(64, 32), (32,), (128, 8), (8,), (256,), (40, 4)]
    arrays = [struct(*s) for s in shapes]
    made, steps, wanted = wanted_of(update, arrays, arrays, arrays)
    assert [type(s) for s in steps] == [GroupStep]
    assert len(wanted) == 1 and len(wanted[0].kernels) == len(shapes)
    assert len(wanted[0].values) == sum(len(k.buffers) for k in wanted[0].kernels)
    assert wanted[0].aliased  # results reuse donated arrays
    (text,), (loaded,) = modules.load(wanted, 0, "update")
    assert loaded.table and "_table table" in text


def test_a_group_that_is_too_large_is_several_launches(compiled, monkeypatch):
    monkeypatch.setattr(modules, "group_limit", lambda kernel: 4)
    arrays = [struct(8 * n) for n in range(1, 11)]
    _, steps, wanted = wanted_of(update, arrays, arrays, arrays)
    assert len(steps) == 1 and [len(w.kernels) for w in wanted] == [4, 4, 2]
    values = [v for w in wanted for v in w.values]
    assert sorted(values) == sorted(steps[0].values)


def test_kernels_of_one_name_get_distinct_names(compiled, monkeypatch):
    monkeypatch.setattr(modules, "_ALONE", 0)

    def f(x):
        return nn.softmax(x), nn.softmax(x[:, :40]), nn.softmax(x.T)

    _, _, wanted = wanted_of(f, struct(48, 64))
    texts, loaded = modules.load(wanted, 0, "program")
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
    texts, _ = modules.load(wanted, 0, "program")
    assert draft.source() == "\n".join(texts) and compiled == texts
