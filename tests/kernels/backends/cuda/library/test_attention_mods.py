"""Attention kernels with ``mask_mod`` and ``score_mod``: sources, host results."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from benchmarks.harness.kernel_resources import resources
from blufunc import lax, nn
from blufunc.core.arrays import backend
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.backends.cuda.library import mma
from blufunc.kernels.backends.cuda.library.attention import kernels as cuda_attention
from blufunc.kernels.backends.cuda.library.attention.kernels import FORWARD_KERNEL, Shape
from blufunc.kernels.backends.cuda.library.attention.mods import code_of, lists
from blufunc.kernels.codegen import scalar_ops
from blufunc.kernels.codegen.source_files import DEVICE
from blufunc.nn.attention import call as attention_call
from blufunc.nn.attention.mods import traced
from tests.emulation.cuda_machines import needs_nvrtc
from tests.emulation.emulated_mma import Emulator, maps
from tests.kernels.backends.cuda.library.test_attention import (
    BF16,
    F16,
    GROUPS,
    KERNELS,
    LONG_GROUPS,
    TWO_GROUPS,
    TWO_SLABS,
    WARPS,
    Case,
    on_device,
)

RNG = np.random.default_rng(0)
IDS = np.sort(RNG.integers(0, 4, (2, 256)), 1).astype(np.int32)
SLOPES = np.array([0.5, 0.25, 0.1, 0.05], np.float32)
TABLE = RNG.normal(size=(4, 21)).astype(np.float32)
PREFIX = np.array([40, 7], np.int32)
WINDOW = nn.masks.sliding_window(50)

# mask_mod, score_mod
MODS = {
    "window": (WINDOW, None),
    "prefixes": (nn.masks.prefix_lm(PREFIX), None),
    "documents": (nn.masks.document(IDS), None),
    "heads": (lambda b, h, q, k: (q - k) % 64 < 16 * (h + 1), None),
    "some see nothing": (lambda b, h, q, k: (q > 40) & (k < 20) & (h != 1), None),
    "nothing": (lambda b, h, q, k: q < 0, None),
    "late": (lambda b, h, q, k: (q % 2 == 0) | (k >= 384), None),
    "alibi": (None, nn.score_mods.alibi(SLOPES)),
    "soft cap": (None, nn.score_mods.soft_cap(1.5)),
    "relative": (WINDOW, nn.score_mods.relative_bias(TABLE)),
    "half": (WINDOW, nn.score_mods.relative_bias(bnp.asarray(TABLE, dtype="bfloat16"))),
    "minus infinity": (None, lambda s, b, h, q, k: bnp.where((q - k) % 3 == b, s * s, -bnp.inf)),
    "unseen slopes": (WINDOW, lambda s, b, h, q, k: s * bnp.log((q - k + 1).astype("float32"))),  # NaN beyond
    # NaN of rows that are not there
    "nothing of zero": (None, lambda s, b, h, q, k: s * bnp.log(bnp.abs(s))),
    "both": (nn.masks.document(IDS), nn.score_mods.soft_cap(1.5)),
}


def given(name):
    """The mods of a name, their tables, and the code of a kernel."""
    mods, tables = traced(*MODS[name], np.dtype(np.float32))
    return mods, tables, code_of(mods, tuple(t.aval for t in tables))


# -- the texts -------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize(
    "name, features", [("both", 64), ("relative", 64), ("documents", 128), ("soft cap", 128)]
)
def test_compiles(name, features, arch):
    """Without spills that matter: a change of scores has registers of its own."""
    *_, code = given(name)
    for kernel in KERNELS:
        tiling = kernel.tiling(features, arch, code)
        for k in (kernel, *([kernel.lists] if code.masked else [])):
            text = DEVICE.with_prelude(cuda_attention.source(k, BF16, features, True, tiling, code))
            binary = nvrtc.build(text, arch, k.entry)
            assert resources(binary)[k.entry].spill_stores <= 64, k.entry
            assert "serialized" not in binary.log


@pytest.mark.parametrize(
    "score_mod, why",
    [
        (lambda s, b, h, q, k: s + lax.cumsum(bnp.stack([q, k]))[1], "cumsum has no scalar code"),
        (lambda s, b, h, q, k: s + bnp.sum(bnp.stack([q, k, h])), "reduce_sum would go over an array"),
    ],
)
def test_refused(score_mod, why):
    mods, tables = traced(None, score_mod, np.dtype(np.float32))
    assert why in code_of(mods, tuple(t.aval for t in tables))


def test_scores_that_were_wider_when_they_were_traced():
    """As those of float64 operands that ``autocast`` makes low."""
    mods, tables = traced(None, nn.score_mods.soft_cap(1.5), np.dtype(np.float64))
    assert "score_mod computes in float64" in code_of(mods, tuple(t.aval for t in tables))
    x = bnp.ones((1, 20, 1, 16), dtype="float64")
    f = lambda x: nn.dot_product_attention(x, x, x, score_mod=nn.score_mods.soft_cap(1.5))
    np.testing.assert_allclose(np.asarray(bf.autocast(f)(x)).astype(np.float64), 1)


def test_lists_are_of_what_a_mask_asks_for():
    asked = {
        n: (given(n)[2].by_batch, given(n)[2].by_head) for n in ("window", "documents", "heads", "alibi")
    }
    assert asked == {
        "window": (False, False), "documents": (True, False), "heads": (False, True), "alibi": (False, False),
    }  # fmt: skip
    shape = Shape(2, 256, 256, 4, 2, 64)
    tiling = WARPS["attention_forward"]
    lengths = {n: FORWARD_KERNEL.list_bytes(shape, tiling, given(n)[2]) // 4 for n in asked}
    assert lengths == {"window": 2 * 5, "documents": 2 * 2 * 5, "heads": 4 * 2 * 5, "alibi": 0}


# -- on the host -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("attention_mods"))


class Modified(Case):
    """A case with mods; what is right is the definition, in float64."""

    def __init__(self, name, shape, dtype, growing=False):
        super().__init__(shape, dtype, growing=growing)
        self.alone = 0  # how often warps of the last kernel multiplied by themselves
        self.mods, self.tables, self.code = given(name)
        self.numbers = [np.arange(shape.batch, dtype=np.int32), np.arange(shape.heads, dtype=np.int32)]

    def expected(self, causal):
        extras = [*map(bnp.asarray, self.numbers), *self.tables]
        how = {"scale": self.scale, "is_causal": causal, "mods": self.mods}
        q, k, v, dout = (bnp.asarray(self.arrays[n].astype(np.float64)) for n in ("q", "k", "v", "dout"))
        out, lse = attention_call._forward(q, k, v, *extras, **how)
        grads = attention_call._backward(q, k, v, out, lse, dout, *extras, **how)
        return {
            n: np.asarray(x)
            for n, x in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True)
        }

    def run(self, emulator, causal, tilings, kernels=KERNELS):
        """Run each kernel after the one of its lists; returns the lists."""
        types = {"lse": "float *", "scratch": "float2 *"}
        tables = [np.asarray(t) for t in self.tables]
        found = {}
        for kernel in kernels:
            tiling = tilings[kernel.entry]
            made = np.full(kernel.list_bytes(self.shape, tiling, self.code) // 4 + 1, -1, np.int32)
            extras = [("const int *", n) for n in (*self.numbers, made)]
            extras += [(f"const {scalar_ops.storage_type(t.dtype)} *", t) for t in tables]
            problem = ("Problem", cuda_attention.problem(kernel, self.shape, self.scale, self.strides()))
            rows = kernel.tiles_of(self.shape, tiling)[0]
            if self.code.masked:
                grid = lists(self.code, self.shape.batch, self.shape.heads, rows)
                self.launch(emulator, kernel.lists, tiling, causal, [*extras, problem], grid, 0)
            own = [(types.get(n, "unsigned short *"), self.arrays[n]) for n in kernel.operands]
            grid, shared = kernel.blocks(self.shape, tiling), kernel.shared_bytes(self.shape.features, tiling)
            given = [*own, *extras, problem, *maps(kernel, self.shape, self.strides(), tiling, self.arrays)]
            self.alone = self.launch(emulator, kernel, tiling, causal, given, grid, shared)
            found[kernel.entry] = made
        return found

    def launch(self, emulator, kernel, tiling, causal, parameters, grid, shared):
        features = self.shape.features
        return emulator.launch(
            cuda_attention.source(kernel, self.dtype, features, causal, tiling, self.code),
            mma.instructions(self.dtype.name, cuda_attention.group_sizes(features, tiling)),
            self.dtype.name, kernel.entry, parameters, grid, tiling.launched if shared else tiling.threads, shared,
        )  # fmt: skip


PIPELINES, WIDE_PIPELINES = ({k.entry: (k.masked or k.pipelines)[n] for k in KERNELS} for n in (0, 1))
SMALL = Shape(2, 70, 130, 4, 2, 16)
CASES = [(name, SMALL, BF16, False, WARPS) for name in MODS]
CASES += [
    ("window", Shape(1, 150, 150, 2, 2, 64), F16, True, TWO_SLABS),
    ("both", Shape(2, 67, 150, 4, 1, 32), F16, True, WARPS),
    ("heads", Shape(1, 150, 67, 4, 2, 16), BF16, True, WARPS),
    ("some see nothing", Shape(1, 130, 70, 2, 2, 64), BF16, False, GROUPS),
    ("relative", Shape(1, 130, 200, 2, 1, 64), F16, False, TWO_GROUPS),
    ("soft cap", Shape(1, 70, 70, 2, 2, 80), BF16, True, GROUPS),
    ("both", Shape(2, 140, 150, 4, 2, 64), BF16, True, LONG_GROUPS),
    ("nothing of zero", Shape(1, 200, 70, 2, 1, 64), BF16, False, LONG_GROUPS),
    ("unseen slopes", Shape(1, 200, 70, 2, 1, 64), F16, False, LONG_GROUPS),
    ("window", Shape(1, 220, 220, 2, 2, 64), F16, True, PIPELINES),
    ("heads", Shape(1, 150, 130, 4, 2, 16), BF16, True, PIPELINES),
    ("some see nothing", Shape(1, 230, 140, 2, 1, 128), BF16, False, WIDE_PIPELINES),
    ("nothing", Shape(1, 70, 70, 1, 1, 64), BF16, False, PIPELINES),
    ("documents", Shape(2, 150, 150, 2, 1, 80), F16, True, WIDE_PIPELINES),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, shape, dtype, causal, tilings", CASES)
def test_kernels_on_the_host(emulator, name, shape, dtype, causal, tilings):
    case = Modified(name, shape, dtype)
    case.run(emulator, causal, tilings)
    case.check(causal)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, shape, dtype, causal, tilings",
    [
        ("window", Shape(1, 260, 260, 1, 1, 64), F16, True, PIPELINES),
        ("some see nothing", Shape(1, 230, 140, 2, 1, 64), BF16, False, PIPELINES),
        ("documents", Shape(2, 250, 250, 1, 1, 128), BF16, True, WIDE_PIPELINES),
    ],
)
def test_scores_that_grow_behind_a_mask(emulator, name, shape, dtype, causal, tilings):
    case = Modified(name, shape, dtype, growing=True)
    case.run(emulator, causal, tilings, [FORWARD_KERNEL])
    case.check(causal, ("out", "lse"))


@pytest.mark.slow
@pytest.mark.parametrize("growing, tiles", [(False, 0), (True, 2)])
def test_rows_are_looked_for_until_all_have_seen_something(emulator, growing, tiles):
    """Odd rows see no key before the 7th of 15 tiles; growing scores overflow later."""
    case = Modified("late", Shape(1, 64, 960, 1, 1, 64), BF16, growing)
    case.run(emulator, False, PIPELINES, [FORWARD_KERNEL])
    assert case.alone == tiles * 4 * 8 * 4  # of four warps, products of 16 x 16 and 16 x 8


@pytest.mark.slow
def test_tiles_that_nobody_sees_are_not_read(emulator):
    """Of 4 tiles of keys each block reads those in its window; full ones have no mark."""
    case = Modified("window", Shape(1, 256, 256, 4, 4, 16), BF16)
    tilings = {k.entry: WARPS["attention_key_gradient"]._replace(inner=64) for k in KERNELS}  # 64 x 64
    made = case.run(emulator, False, tilings)
    of = lambda entry: [row[1 : 1 + row[0]].tolist() for row in made[entry][:-1].reshape(4, 5)]
    assert of("attention_forward") == [[1], [1, 3], [3, 5], [5, 7]]
    assert of("attention_key_gradient") == [[1, 3], [3, 5], [5, 7], [7]]
    prefix = Modified("prefixes", Shape(2, 256, 256, 4, 4, 16), BF16)
    rows = prefix.run(emulator, False, tilings)["attention_forward"][:-1].reshape(2, 4, 5)
    assert rows[0, 3].tolist() == [4, 0, 2, 4, 7]  # all that is before is full


# -- on a device -----------------------------------------------------------------------------------


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("features", [64, 128])
@pytest.mark.parametrize("name", MODS)
def test_on_a_device(name, features, causal):
    """Public API: values and gradients against the float32 definition on the host."""
    mask_mod, score_mod = MODS[name]
    how = {"mask_mod": mask_mod, "score_mod": score_mod, "is_causal": causal}
    xs = [RNG.standard_normal((2, 200, n, features)).astype(BF16) for n in (4, 2, 2, 4)]

    def f(q, k, v, c):
        return (nn.dot_product_attention(q, k, v, **how) * c).astype("float32").sum()

    def run(xs):
        return nn.dot_product_attention(*xs[:3], **how), *bf.grad(f, (0, 1, 2))(*xs)

    wide = [bf.device_put(x.astype(np.float32), backend.host_device()) for x in xs]
    got = bf.jit(run)([bf.device_put(x, bf.devices("cuda")[0]) for x in xs])
    for ours, right in zip(got, run(wide), strict=True):
        right = np.asarray(right)
        most = max(np.abs(right).max(), 1e-2)
        np.testing.assert_allclose(np.asarray(ours).astype(np.float32), right, atol=2e-2 * most)
