"""Attention of IEEE float32: choice, sources, and errors against float64."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from benchmarks.harness.kernel_resources import resources
from blufunc import nn
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.backends.cuda.library.attention import ieee
from blufunc.kernels.backends.cuda.library.attention import mods as attention_mods
from blufunc.kernels.backends.cuda.library.attention.kernels import NO_CODE, Shape, Strides, padded
from blufunc.kernels.backends.cuda.program import planned
from blufunc.kernels.codegen import scalar_ops
from blufunc.nn.attention import call as attention_call
from tests.emulation.cuda_machines import needs_nvrtc
from tests.emulation.emulated_mma import Emulator
from tests.kernels.backends.cuda.library.test_attention_mods import given

F32 = np.dtype(np.float32)
KERNELS = (ieee.FORWARD, ieee.DELTA_KERNEL, ieee.BACKWARD)
NAMES = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
GPT2 = Shape(32, 1024, 1024, 12, 12, 64)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("attention_ieee"))


def mods_of(name):
    """The mods of a name, their tables, and the code of a kernel."""
    return (None, (), NO_CODE) if name is None else given(name)


class Case:
    """The operands of one attention, packed or not, and its results in float64."""

    def __init__(self, shape, name=None, packed=False):
        self.shape, self.scale = shape, shape.features**-0.5
        self.mods, self.tables, self.code = mods_of(name)
        rng = np.random.default_rng(sum(shape))
        b, t, s, h, kh, d = shape
        normal = lambda *sizes: rng.standard_normal(sizes, dtype=F32)
        if packed:
            both = normal(b, t, 3, h, d), np.full((b, t, 3, h, d), np.nan, F32)
            qkv, gradients = ([x[:, :, i] for i in range(3)] for x in both)
        else:
            qkv = [normal(b, t, h, d), normal(b, s, kh, d), normal(b, s, kh, d)]
            gradients = [np.full(x.shape, np.nan, F32) for x in qkv]
        self.arrays = dict(zip(("q", "k", "v", "dq", "dk", "dv"), qkv + gradients, strict=True))
        self.arrays |= {
            "dout": normal(b, t, h, d), "out": np.full((b, t, h, d), np.nan, F32),
            "lse": np.full((b, h, t), np.nan, F32), "numbers": np.full((b * h, padded(shape), 2), np.nan, F32),
            "turns": np.full((b * h, padded(shape) // ieee.COLUMNS), -1, np.int32),
        }  # fmt: skip
        self.extras = [np.arange(n, dtype=np.int32) for n in (b, h)] if self.mods is not None else []

    def strides(self):
        return {name: Strides(*(n // 4 for n in self.arrays[name].strides[:3])) for name in NAMES}

    def run(self, emulator, causal):
        """Run all kernels on the host, each after the one of its lists."""
        for kernel in KERNELS:
            tiling, problem = (
                kernel.tiling(self.shape),
                ("Problem", ieee.problem(kernel, self.shape, self.scale, self.strides())),
            )
            extras = []
            if self.code is not NO_CODE and kernel.has_pairs:
                lists = np.full(kernel.list_bytes(self.shape, self.code) // 4 + 1, -1, np.int32)
                extras = [("const int *", n) for n in (*self.extras, lists)]
                extras += [
                    (f"const {scalar_ops.storage_type(t.dtype)} *", np.asarray(t)) for t in self.tables
                ]
            how = tiling, self.shape.features, causal, self.code
            launch = lambda text, entry, given, grid, shared, t=tiling: emulator.launch(
                text, ieee.instructions(), "float16", entry, given, grid, t.threads, shared, parts=("pairs",)
            )
            if kernel.has_pairs and self.code.masked:
                rows = kernel.tiles(self.shape)[0]
                grid = attention_mods.lists(self.code, self.shape.batch, self.shape.heads, rows)
                launch(ieee.lists_source(kernel, *how), "attention_tiles", [*extras, problem], grid, 0)
            types = {"numbers": "float2 *", "turns": "int *"}
            own = [(types.get(n, "float *"), self.arrays[n]) for n in kernel.operands]
            shared = kernel.shared_bytes(self.shape, self.code)
            text = ieee.source(kernel, *how)
            launch(text, kernel.entry, [*own, *extras, problem], kernel.grid(self.shape), shared)

    def expected(self, causal):
        how = {"scale": self.scale, "is_causal": causal} | ({} if self.mods is None else {"mods": self.mods})
        q, k, v, dout = (bnp.asarray(self.arrays[n].astype(np.float64)) for n in ("q", "k", "v", "dout"))
        extras = [*map(bnp.asarray, self.extras), *self.tables]
        out, lse = attention_call._forward(q, k, v, *extras, **how)
        grads = attention_call._backward(q, k, v, out, lse, dout, *extras, **how)
        return dict(zip(("out", "lse", "dq", "dk", "dv"), map(np.asarray, (out, lse, *grads)), strict=True))

    def check(self, causal):
        for name, want in self.expected(causal).items():
            finite = np.where(np.isfinite(want), want, 0)
            tolerance = 3e-6 * max(np.abs(finite).max(), 1)
            np.testing.assert_allclose(self.arrays[name], want, atol=tolerance, err_msg=name)


# -- choice ----------------------------------------------------------------------------------------

DENSE = [Strides(128 * 256, 256, 64)] * 8


@pytest.mark.parametrize(
    "shape, arch, why",
    [
        (GPT2, "sm_90a", None),
        (GPT2, "sm_80", None),
        (GPT2._replace(features=80), "sm_90a", None),
        (GPT2._replace(features=128), "sm_80", "blocks of sm_80 have 163 KB"),
        (GPT2._replace(features=136), "sm_90a", "multiple of 8 up to 128"),
        (GPT2._replace(features=36), "sm_90a", "multiple of 8 up to 128"),
        (GPT2._replace(queries=1), "sm_90a", "1 queries"),
        (GPT2._replace(key_heads=5), "sm_90a", "key_heads=5"),
        (GPT2, "sm_86", "blocks of sm_86 have 99 KB"),
        (GPT2._replace(features=32), "sm_86", None),
        (GPT2, "sm_75", "sm_80 and later"),
    ],
)
def test_what_has_kernels(shape, arch, why):
    reason = ieee.refused(shape, DENSE, arch)
    assert reason is None if why is None else why in reason


def test_small_grids_have_small_tiles():
    assert ieee.FORWARD.tiling(GPT2).rows == 128
    assert ieee.FORWARD.tiling(GPT2._replace(batch=2)).rows == 64
    assert ieee.FORWARD.grid(GPT2) == 32 * 12 * 8


def operands(shape):
    b, t, s, h, kh, d = shape
    rng = np.random.default_rng(0)
    sizes = (b, t, h, d), (b, s, kh, d), (b, s, kh, d), (b, t, h, d)
    return [bnp.asarray(rng.standard_normal(n, dtype=F32)) for n in sizes]


def both(q, k, v, ct, **how):
    out, pullback = bf.vjp(lambda *x: nn.dot_product_attention(*x, **how), q, k, v)
    return out, *pullback(ct)


@pytest.mark.parametrize(
    "precision, name", [("default", "attention"), ("highest", "attention"), ("tf32", "attention+split")]
)
def test_which_kernels_a_precision_has(precision, name, monkeypatch):
    monkeypatch.setattr(bf.config, "matmul_precision", precision)
    args = operands(Shape(1, 128, 128, 2, 2, 64))
    jaxpr = bf.jit(lambda *a: both(*a, is_causal=True)).trace(*args).jaxpr
    found = [e.prim.name for e in planned(jaxpr, (False,) * 4, "sm_90a").opaque]
    assert name in found
    assert "dot_general" not in found


# -- sources ---------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@needs_nvrtc
@pytest.mark.parametrize(
    "kernel, which, name",
    [
        *((kernel, which, None) for kernel in KERNELS for which in range(3)),
        *((k, 1, "both") for k in KERNELS[::2]),
    ],
    ids=lambda x: getattr(x, "entry", x),
)
def test_compiles_without_spills(kernel, which, name):
    *_, code = mods_of(name)
    for tiling in {kernel.tilings[which], *kernel.small[which : which + 1]}:
        text = ieee.text_of(kernel, tiling, tiling.width, True, code if kernel.has_pairs else NO_CODE)
        used = resources(nvrtc.build(text, "sm_90a", kernel.entry))[kernel.entry]
        assert used.spill_stores <= (0 if name is None else 128)


# -- on the host -----------------------------------------------------------------------------------

CASES = [
    (Shape(1, 130, 130, 2, 2, 64), None, True, True),
    (Shape(1, 70, 150, 4, 2, 64), None, False, False),
    (Shape(2, 150, 67, 2, 1, 32), None, True, False),
    (Shape(1, 67, 201, 1, 1, 64), None, True, False),  # keys without a query
    (Shape(1, 70, 140, 2, 1, 128), None, True, False),
    (Shape(1, 130, 70, 1, 1, 80), None, False, False),
    (Shape(1, 65, 65, 1, 1, 8), None, True, False),
    (Shape(140, 65, 2, 2, 2, 8), None, False, False),  # tiles of 128 queries
    *[
        (Shape(2, 70, 130, 4, 2, 16), name, False, False)
        for name in ("window", "heads", "some see nothing", "relative", "unseen slopes", "both")
    ],
    (Shape(1, 260, 260, 2, 1, 64), "window", True, False),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape, name, causal, packed", CASES)
def test_kernels_on_the_host(emulator, shape, name, causal, packed):
    case = Case(shape, name, packed)
    case.run(emulator, causal)
    case.check(causal)


# -- on a device -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape, how",
    [
        (Shape(2, 200, 200, 4, 4, 64), {}),
        (Shape(40, 130, 260, 8, 8, 64), {}),
        (Shape(1, 1000, 1000, 8, 2, 64), {}),
        (Shape(2, 300, 170, 4, 1, 128), {}),
        (Shape(1, 260, 260, 3, 3, 32), {}),
        (Shape(2, 500, 500, 4, 2, 80), {"local_window_size": (70, 0)}),
        (
            Shape(2, 256, 256, 4, 4, 64),
            {"mask_mod": nn.masks.document(np.repeat([[0, 1], [0, 0]], 128, axis=1))},
        ),
        (Shape(2, 256, 256, 4, 4, 64), {"score_mod": nn.score_mods.soft_cap(1.5)}),
    ],
)
def test_on_a_device(shape, how, causal):
    """IEEE accuracy against float64 on the host, and the same bits every time."""
    args = operands(shape)
    call = lambda *xs: both(*xs, is_causal=causal, **how)
    compiled, device = bf.jit(call), bf.devices("cuda")[0]
    on_device = [bf.device_put(x, device) for x in args]
    assert "dot_general" not in str(bf.explain(compiled, *on_device))
    got = [np.asarray(x) for x in compiled(*on_device)]
    want = [np.asarray(x) for x in call(*[x.astype("float64") for x in args])]
    for x, y in zip(got, want, strict=True):
        assert np.linalg.norm(x - y) <= 2e-6 * np.linalg.norm(y)
    for _ in range(3):
        repeated = compiled(*on_device)
        assert all(np.array_equal(np.asarray(x), y) for x, y in zip(repeated, got, strict=True))
