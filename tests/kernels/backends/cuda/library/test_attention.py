"""Attention kernels: no spills, and float64 accuracy on a device or its emulation."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.harness.kernel_resources import resources
from blufunc import errors
from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda.driver import driver, nvrtc
from blufunc.kernels.backends.cuda.library import mma
from blufunc.kernels.backends.cuda.library.attention import kernels as cuda_attention
from blufunc.kernels.backends.cuda.library.attention import launch as cuda_attention_launch
from blufunc.kernels.backends.cuda.library.attention.kernels import (
    FORWARD_KERNEL,
    KEPT,
    KEY_KERNEL,
    PLANE_KERNEL,
    QUERY_KERNEL,
    ROWS_OF_SUM,
    Shape,
    Strides,
    Tiling,
    key_kernels,
)
from tests.emulation.cuda_machines import needs_nvrtc
from tests.emulation.emulated_mma import Emulator, maps
from tests.pairwise import pairwise

KERNELS = [FORWARD_KERNEL, QUERY_KERNEL, KEY_KERNEL]
PLANES = PLANE_KERNEL.pipelines[0]
TOGETHER = [(kernel, features) for features in (64, 128) for kernel in KERNELS]
APART = [(kernel, 256) for kernel in (FORWARD_KERNEL, QUERY_KERNEL, *key_kernels(256))]
NAMES = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
BF16, F16 = dtypes.bfloat16, dtypes.float16


class Case:
    """The strided operands of one attention, and its expected results.

    ``growing`` scores grow from tile to tile of keys, by far more than a weight may.
    """

    def __init__(self, shape, dtype, packed=False, growing=False):
        self.shape, self.dtype, self.scale, self.growing = shape, dtype, shape.features**-0.5, growing
        rng = np.random.default_rng(sum(shape))
        b, t, s, h, kh, d = shape
        normal = lambda *sizes: rng.standard_normal(sizes).astype(dtype)
        if packed:
            both = normal(b, t, 3, h, d), np.full((b, t, 3, h, d), np.nan, dtype)
            qkv, gradients = ([x[:, :, i] for i in range(3)] for x in both)
        else:
            qkv = [normal(b, t, h, d), normal(b, s, kh, d), normal(b, s, kh, d)]
            gradients = [np.full(x.shape, np.nan, dtype) for x in qkv]
        if growing:
            qkv[1] *= np.linspace(0.1, 50, s).astype(dtype)[:, None, None]
        self.arrays = dict(zip(("q", "k", "v", "dq", "dk", "dv"), qkv + gradients, strict=True))
        self.arrays |= {
            "dout": normal(b, t, h, d),
            "out": np.full((b, t, h, d), np.nan, dtype),
            "lse": np.full((b, h, t), np.nan, np.float32),
            "scratch": np.full((b * h, cuda_attention.padded(shape), 2), np.nan, np.float32),
        }

    def strides(self):
        return {name: Strides(*(n // 2 for n in self.arrays[name].strides[:3])) for name in NAMES}

    def check(self, causal, names=("out", "lse", "dq", "dk", "dv")):
        tolerance = {BF16: 8e-3, F16: 1e-3}[self.dtype]
        expected = self.expected(causal)
        for name in names:
            want = expected[name]
            got, most = (
                self.arrays[name].astype(np.float64),
                max(np.abs(want, where=np.isfinite(want), out=np.zeros_like(want)).max(), 1e-2),
            )
            # where one key has all the weight, gradients of scores are differences of nearly equal numbers
            more = 2 if self.growing and name.startswith("d") else 1
            np.testing.assert_allclose(
                got, want, atol=(1e-5 if name == "lse" else more * tolerance) * most, err_msg=name
            )

    def expected(self, causal):
        b, t, s, h, kh, d = self.shape
        q, k, v, dout = (self.arrays[n].astype(np.float64) for n in ("q", "k", "v", "dout"))
        k, v = (np.repeat(x, h // kh, axis=2) for x in (k, v))
        scores = np.einsum("bthd,bshd->bhts", q, k) * self.scale
        if causal:
            scores = np.where(np.tri(t, s, dtype=bool), scores, -np.inf)
        lse = np.log(np.exp(scores).sum(-1))
        p = np.exp(scores - lse[..., None])
        out = np.einsum("bhts,bshd->bthd", p, v)
        dp = np.einsum("bthd,bshd->bhts", dout, v) - np.einsum("bthd,bthd->bht", dout, out)[..., None]
        dk = np.einsum("bhts,bthd->bshd", p * dp, q) * self.scale
        dv = np.einsum("bhts,bthd->bshd", p, dout)
        summed = lambda x: x.reshape(b, s, kh, h // kh, d).sum(3)
        dq = np.einsum("bhts,bshd->bthd", p * dp, k) * self.scale
        return {"out": out, "lse": lse, "dq": dq, "dk": summed(dk), "dv": summed(dv)}


# -- the texts -------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("kernel, features", TOGETHER + APART, ids=lambda k: getattr(k, "entry", k))
def test_compiles_without_spills(kernel, features, arch):
    tiling = kernel.tiling(features, arch)
    binary = nvrtc.build(cuda_attention.source(kernel, BF16, features, True, tiling), arch, kernel.entry)
    used = resources(binary)[kernel.entry]
    assert used.spill_stores <= 16  # bytes of a thread: what only begins and ends need
    assert "serialized" not in binary.log  # a warning of ptxas that warpgroup matmuls wait for each other
    assert tiling.groups == (arch == "sm_90a")
    if (
        tiling.stages
    ):  # groups take what registers others leave of this share each; of fewer they wait for ever
        assert used.registers >= 65536 // tiling.blocks // tiling.launched // 8 * 8


@pytest.mark.sampled(1)
@needs_nvrtc
@pytest.mark.parametrize("features", [64, 128])
@pytest.mark.parametrize("kernel", [QUERY_KERNEL, KEY_KERNEL], ids=lambda k: k.entry)
def test_sums_over_tokens_hardly_spill(kernel, features):
    """The summed values are in registers anyway, and are reduced once, after loops."""
    summed, tiling = kernel.summed, kernel.tiling(features, "sm_90a")
    binary = nvrtc.build(cuda_attention.source(summed, BF16, features, True, tiling), "sm_90a", summed.entry)
    assert resources(binary)[summed.entry].spill_stores <= 32
    assert "serialized" not in binary.log


@pytest.mark.sampled(1)
@needs_nvrtc
@pytest.mark.parametrize("kernel, spilt", [(PLANE_KERNEL, 0), (PLANE_KERNEL.summed, 32)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_of_planes_hardly_spills(kernel, spilt, causal):
    binary = nvrtc.build(cuda_attention.source(kernel, BF16, 64, causal, PLANES), "sm_90a", kernel.entry)
    used = resources(binary)[kernel.entry]
    assert used.spill_stores <= spilt
    assert "serialized" not in binary.log
    assert used.registers * PLANES.launched == 65536  # warpgroups take the registers that others release
    assert kernel.shared_bytes(64, PLANES) <= 227 << 10


@pytest.mark.parametrize(
    "shape, arch, fits",
    [
        (Shape(32, 1024, 1024, 12, 12, 64), "sm_90a", True),
        (Shape(11, 512, 2000, 12, 12, 64), "sm_90a", True),
        (Shape(11, 511, 512, 12, 12, 64), "sm_90a", False),
        (Shape(11, 512, 511, 12, 12, 64), "sm_90a", False),
        (Shape(32, 1024, 1024, 12, 12, 64), "sm_100", False),
        (Shape(32, 1025, 1024, 12, 12, 64), "sm_90a", False),
        (Shape(32, 1024, 1024, 12, 4, 64), "sm_90a", False),
        (Shape(32, 1024, 1024, 12, 12, 32), "sm_90a", False),
        (Shape(16, 1024, 1024, 12, 12, 64), "sm_90a", False),  # 192 planes: turns of 132 and of 60
    ],
)
def test_which_gradients_are_made_by_planes(shape, arch, fits):
    kernels = cuda_attention.gradient_kernels(shape, arch)
    assert kernels == ((PLANE_KERNEL,) if fits else (QUERY_KERNEL, KEY_KERNEL))
    assert not cuda_attention.fits_planes(shape, arch, parts=1)
    texts = cuda_attention.texts(False, BF16, shape, True, arch)
    assert [entry for _, entry in texts] == [kernel.entry for kernel in kernels]
    if fits:
        blocks = min(132, shape.batch * shape.heads)
        assert cuda_attention.scratch_bytes(False, shape, arch) == (
            blocks * (-(-shape.queries // 64) - KEPT) * 64 * 64 * 4,
            0,
        )


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize(
    "features, which, arch", pairwise([16, 48, 96, 112, 144, 192], range(3), ["sm_80", "sm_90a"])
)
def test_compiles_for_other_features(features, which, arch):
    for kernel in ((FORWARD_KERNEL,), (QUERY_KERNEL,), key_kernels(features))[which]:
        text = cuda_attention.source(kernel, F16, features, False, kernel.tiling(features, arch))
        assert nvrtc.build(text, arch, kernel.entry).cubin


@pytest.mark.parametrize("features", [16, 64, 80, 128, 144, 256])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
def test_shared_memory_is_what_a_block_can_have(features, arch):
    limit = {"sm_80": 163, "sm_86": 99, "sm_90a": 227}[arch] << 10
    for kernel in KERNELS:
        tiling = kernel.tiling(features, arch)
        assert kernel.shared_bytes(features, tiling) <= limit
        # the numbers of a whole tile of queries are read, and numbers of as many queries written
        if kernel is KEY_KERNEL:
            assert cuda_attention.padded(Shape(1, 1, 1, 1, 1, features)) % tiling.columns == 0


# -- what is refused -------------------------------------------------------------------------------

GOOD = Shape(2, 128, 128, 4, 2, 64)
DENSE = [Strides(128 * 256, 256, 64)] * 8


@pytest.mark.parametrize(
    "shape, dtype, strides, arch, why",
    [
        (GOOD, dtypes.float32, DENSE, "sm_90a", "elements are float32"),
        (GOOD, BF16, DENSE, "sm_75", "sm_80 and later"),
        (GOOD._replace(features=72), BF16, DENSE, "sm_90a", "features=72"),
        (GOOD._replace(features=272), BF16, DENSE, "sm_90a", "features=272"),
        (GOOD._replace(keys=0), BF16, DENSE, "sm_90a", "is empty"),
        (GOOD._replace(key_heads=3), BF16, DENSE, "sm_90a", "key_heads=3"),
        (GOOD._replace(keys=1 << 25), BF16, DENSE, "sm_90a", "tokens"),
        (GOOD, BF16, [*DENSE, Strides(4096, 100, 64)], "sm_90a", "stride"),
    ],
)
def test_refused(shape, dtype, strides, arch, why):
    assert why in cuda_attention.refused(shape, dtype, strides, arch)


def test_not_refused():
    for arch in ("sm_80", "sm_90a", "sm_120"):
        for dtype in (BF16, F16):
            assert cuda_attention.refused(GOOD, dtype, DENSE, arch) is None


# -- on the host -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("attention"))


WARPS, WIDE_WARPS = ({k.entry: k.warps[n] for k in KERNELS} for n in (0, 2))
WIDE_GROUPS = {k.entry: k.groups[2] for k in KERNELS}
TWO_SLABS = {k.entry: Tiling(2, 128, 64, 32, 1) for k in KERNELS} | {
    "attention_forward": Tiling(2, 128, 32, 32, 1)
}
GROUPS = {k.entry: Tiling(1, 128, 64, 64, 1, groups=True) for k in KERNELS}
LONG_GROUPS = GROUPS | {"attention_key_gradient": Tiling(1, 128, 128, 64, 1, groups=True)}
TWO_GROUPS = {k.entry: Tiling(1, 256, 64, 32, 1, groups=True) for k in KERNELS} | {
    "attention_forward": Tiling(1, 256, 128, 128, 1, groups=True)
}
PIPELINES, WIDE_PIPELINES = ({k.entry: k.pipelines[n] for k in KERNELS} for n in (0, 1))


N_SMS = 2  # of a device on the host


def launch(emulator, case, kernel, tiling, causal, types, arrays, eager=False):
    """Run one kernel on the host; what ``Emulator.launch`` returns."""
    names = cuda_attention.operands_of(kernel, cuda_attention.NO_CODE)
    parameters = [(types.get(n, "unsigned short *"), arrays[n]) for n in names]
    parameters += [("Problem", cuda_attention.problem(kernel, case.shape, case.scale, case.strides()))]
    parameters += maps(kernel, case.shape, case.strides(), tiling, arrays)
    features = case.shape.features
    return emulator.launch(
        cuda_attention.source(kernel, case.dtype, features, causal, tiling),
        mma.instructions(case.dtype.name, cuda_attention.group_sizes(features, tiling)),
        case.dtype.name,
        kernel.entry,
        parameters,
        kernel.blocks(case.shape, tiling, N_SMS),
        tiling.launched,
        kernel.shared_bytes(features, tiling),
        eager=eager,
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "shape, dtype, causal, tilings, packed",
    [
        (Shape(1, 130, 130, 2, 2, 64), BF16, True, WARPS, True),
        (Shape(1, 67, 150, 4, 2, 64), F16, False, WARPS, False),
        (Shape(2, 150, 67, 2, 1, 64), BF16, True, WARPS, False),
        (Shape(1, 67, 201, 1, 1, 64), BF16, True, WARPS, False),  # keys without a query
        (Shape(1, 70, 70, 1, 1, 96), F16, True, WARPS, False),
        (Shape(1, 70, 70, 1, 1, 16), BF16, True, WARPS, False),
        (Shape(1, 130, 130, 2, 1, 64), BF16, True, TWO_SLABS, False),
        (Shape(1, 130, 130, 2, 1, 64), BF16, True, GROUPS, False),
        (Shape(1, 67, 150, 1, 1, 128), F16, False, GROUPS, False),
        (Shape(1, 70, 90, 1, 1, 80), BF16, True, GROUPS, False),
        (Shape(1, 70, 70, 1, 1, 32), F16, True, GROUPS, False),
        (Shape(1, 200, 200, 1, 1, 64), BF16, True, TWO_GROUPS, False),
        (
            Shape(1, 140, 140, 2, 1, 64),
            BF16,
            True,
            LONG_GROUPS,
            False,
        ),  # the last tile of queries is less than half full
        (Shape(1, 70, 70, 2, 1, 256), BF16, True, WIDE_WARPS, False),
        (Shape(1, 67, 90, 1, 1, 144), F16, False, WIDE_WARPS, False),
        (Shape(1, 150, 150, 1, 1, 256), BF16, True, WIDE_GROUPS, False),
        (Shape(1, 70, 140, 2, 1, 192), F16, False, WIDE_GROUPS, False),
        (Shape(2, 200, 200, 2, 2, 64), BF16, True, PIPELINES, True),
        (Shape(1, 130, 190, 4, 2, 64), F16, False, PIPELINES, False),
        (Shape(1, 70, 150, 2, 1, 48), BF16, True, PIPELINES, False),  # keys without a query
        (Shape(1, 1, 1, 1, 1, 16), BF16, True, PIPELINES, False),
        (Shape(1, 330, 330, 1, 1, 128), BF16, True, WIDE_PIPELINES, False),
        (Shape(2, 150, 67, 4, 2, 128), F16, True, WIDE_PIPELINES, False),
        (Shape(1, 67, 290, 2, 1, 80), BF16, False, WIDE_PIPELINES, False),
    ],
)
def test_kernels_on_the_host(emulator, shape, dtype, causal, tilings, packed):
    types = {"lse": "float *", "scratch": "float2 *"}
    kernels = (FORWARD_KERNEL, QUERY_KERNEL, *key_kernels(shape.features))
    copied_for = tilings[kernels[0].entry].stages > 0
    for eager in (False, True)[: 1 + copied_for]:
        case = Case(shape, dtype, packed)
        for kernel in kernels:
            launch(emulator, case, kernel, tilings[kernel.entry], causal, types, case.arrays, eager)
        case.check(causal)
        assert not np.isnan(case.arrays["scratch"]).any()  # the key kernel reads whole tiles of its own


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, dtype, causal, tilings",
    [
        (Shape(1, 130, 330, 2, 1, 64), F16, False, PIPELINES),
        (Shape(1, 330, 330, 1, 1, 64), BF16, True, PIPELINES),
        (Shape(1, 200, 400, 1, 1, 128), F16, False, WIDE_PIPELINES),
        (Shape(1, 330, 330, 1, 1, 96), BF16, True, WIDE_PIPELINES),
    ],
)
def test_scores_that_grow_on_the_host(emulator, shape, dtype, causal, tilings):
    case, tiling = Case(shape, dtype, growing=True), tilings["attention_forward"]
    launch(emulator, case, FORWARD_KERNEL, tiling, causal, {"lse": "float *"}, case.arrays, eager=True)
    assert case.expected(causal)["lse"].max() > 130 / np.log2(np.e)  # weights would be beyond float32
    case.check(causal, ("out", "lse"))


def with_scores(dtype, scores, size=1.0):
    """64 queries and 16 tiles of 64 keys with these scores, and values of a size."""
    case = Case(Shape(1, 64, 1024, 1, 1, 64), dtype)
    case.arrays["q"][...] = 0
    case.arrays["q"][..., 0] = 8  # and the scale is an eighth
    case.arrays["k"][..., 0] = np.reshape(scores, (1024, 1))
    case.arrays["v"] = (case.arrays["v"].astype(np.float64) * size).astype(dtype)
    return case


def attend_once(emulator, case):
    """Run the forward kernel; returns the number of tiles that its warps multiplied."""
    tiling = PIPELINES["attention_forward"]
    count = launch(emulator, case, FORWARD_KERNEL, tiling, False, {"lse": "float *"}, case.arrays)
    return count / (8 * 4)  # products of 16 x 16 and 16 x 8


@pytest.mark.sampled(1)
@pytest.mark.parametrize("many", [False, True], ids=["one key", "a tile"])
@pytest.mark.parametrize("dtype, size", [(BF16, 1.0), (BF16, 2.0**100), (F16, 1.0)])
@pytest.mark.parametrize("score", [6.875, 9.625, 9.75, 90.0])
def test_scores_that_grow_once(emulator, dtype, size, score, many):
    """Just below what weights may grow by without being looked for, and beyond."""
    scores = np.where(np.arange(1024) < 64, 0.0, -60.0)
    scores[300 : 364 if many else 301] = score
    case = with_scores(dtype, scores, size)
    attend_once(emulator, case)
    weights = np.exp(scores - scores.max())
    total = weights.sum()
    v = case.arrays["v"][0, :, 0].astype(np.float64)
    most = np.abs(v).max()
    np.testing.assert_allclose(case.arrays["lse"], scores.max() + np.log(total), rtol=2e-6)
    # a last bit of the weight, and one of the result
    last_bit = {BF16: 2**-8, F16: 2**-11}[dtype]
    got = case.arrays["out"][0, :, 0].astype(np.float64)
    np.testing.assert_allclose(got / most, np.tile(weights @ v / total / most, (64, 1)), atol=2 * last_bit)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "grown, tiles",
    [
        ([], 0),
        ([(0, 50)], 0),  # it is looked for
        ([(2, 9.625)], 0),  # not by more than a weight may
        ([(2, 9.75)], 1),
        ([(2, 20), (5, 40)], 1),  # it still is looked for
        ([(2, 20), (6, 40)], 2),
        ([(1, 20), (6, 29), (15, 40)], 2),
    ],
)
def test_tiles_are_multiplied_once_more_where_scores_grow(emulator, grown, tiles):
    scores = np.zeros(1024)
    for tile, score in grown:
        scores[tile * 64 + 5] = score
    case = with_scores(BF16, scores)
    assert attend_once(emulator, case) == tiles * 4  # of four warps each
    np.testing.assert_allclose(
        case.arrays["lse"], scores.max() + np.log(np.exp(scores - scores.max()).sum()), rtol=1e-6
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rest, lse, tiles", [(0.0, np.log(960), 1), (-np.inf, -np.inf, 15)])
def test_scores_that_begin_with_minus_infinity(emulator, rest, lse, tiles):
    """A row whose first scores are -inf has NaN weights, and its tiles are checked."""
    case = with_scores(BF16, np.where(np.arange(1024) < 64, -np.inf, rest))
    assert attend_once(emulator, case) == 4 * -(-tiles // 4)
    np.testing.assert_allclose(case.arrays["lse"], lse, rtol=1e-6)
    assert np.isfinite(case.arrays["out"].astype(np.float32)).all()


def sums_of_queries(shape):
    """Scratch memory for sums of queries, with a guard row at its end."""
    blocks = min(shape.batch * shape.heads, N_SMS)
    tiles = max(-(-shape.queries // PLANES.columns) - KEPT, 0)
    return np.full((blocks * tiles + 1, PLANES.columns * 64), np.nan, np.float32)


def by_planes(emulator, case, causal, eager=False, sums=None):
    """Run the forward kernel and the plane kernel; ``sums`` over tokens are by name."""
    partial = sums_of_queries(case.shape)
    types = dict.fromkeys(("lse", "partial", *(sums or {})), "float *")
    arrays = case.arrays | {"partial": partial} | (sums or {})
    kernel = PLANE_KERNEL.summed if sums else PLANE_KERNEL
    launch(emulator, case, FORWARD_KERNEL, PIPELINES["attention_forward"], causal, types, arrays)
    launch(emulator, case, kernel, PLANES, causal, types, arrays, eager)
    used = ~np.isnan(partial)
    assert not used[-1].any()
    if (
        case.shape.keys > PLANES.rows and len(partial) > 1
    ):  # tiles of keys follow each other: all blocks have sums
        tiles = max(-(-case.shape.queries // PLANES.columns) - KEPT, 0)
        of_blocks = used[:-1].reshape(-1, tiles, used.shape[1])
        assert of_blocks[:, 2 * causal :].all()  # the first two tiles see one tile of keys, if it is causal


@pytest.mark.sampled(1)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    "shape, dtype, causal, packed",
    [
        (Shape(2, 200, 200, 2, 2, 64), BF16, True, True),
        (Shape(13, 66, 70, 1, 1, 64), F16, False, False),  # seven planes one after the other
        (Shape(1, 450, 400, 1, 1, 64), BF16, False, False),  # sums in memory that are added to
        (Shape(1, 1024, 300, 1, 1, 64), BF16, True, False),
        (Shape(2, 400, 200, 2, 2, 64), BF16, False, False),  # of each block its own
        (Shape(2, 128, 1000, 2, 2, 64), BF16, True, False),  # keys without a query
        (Shape(1, 330, 150, 1, 1, 64), BF16, True, False),
        (Shape(3, 1, 1, 1, 1, 64), BF16, True, False),
    ],
)
def test_all_gradients_at_once_on_the_host(emulator, shape, dtype, causal, packed, eager):
    case = Case(shape, dtype, packed)
    by_planes(emulator, case, causal, eager)
    case.check(causal)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, causal", [(Shape(1, 64, 100, 1, 1, 64), False), (Shape(1, 192, 100, 1, 1, 64), True)]
)
@pytest.mark.parametrize("dtype, size", [(F16, 1.9), (BF16, 4.0)])
def test_keys_behind_the_last_are_nothing(emulator, shape, causal, dtype, size):
    """Padding keys score 0: if all others are far below, their weights are infinite."""
    case = Case(shape, dtype)
    case.arrays["q"][...], case.arrays["k"][...] = size, -size
    by_planes(emulator, case, causal)
    assert case.arrays["lse"].max() < {F16: -11, BF16: -88}[dtype]
    for name in ("dq", "dk", "dv"):  # that of queries is the rest of a sum, as all keys are the same
        assert np.isfinite(case.arrays[name].astype(np.float32)).all()
    want, got = case.expected(causal), case.arrays
    np.testing.assert_allclose(got["dv"].astype(np.float64), want["dv"], atol=0.02 * np.abs(want["dv"]).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, dtype, causal, tilings",
    [
        (Shape(2, 70, 70, 2, 2, 64), BF16, True, GROUPS),
        (Shape(1, 130, 130, 1, 1, 64), F16, False, TWO_SLABS),
        (Shape(1, 40, 40, 1, 1, 192), BF16, True, WIDE_WARPS),
        (Shape(1, 210, 210, 1, 1, 80), BF16, True, WIDE_PIPELINES),
        (Shape(1, 210, 210, 3, 3, 64), BF16, True, None),  # by planes
    ],
)
def test_sums_of_gradients_over_tokens_on_the_host(emulator, shape, dtype, causal, tilings):
    """Exact sums of sixteen stored tokens; the last of a batch entry may have fewer."""
    case = Case(shape, dtype, packed=True)
    groups = -(-shape.queries // ROWS_OF_SUM)
    sums = np.full((shape.batch, groups, 3, shape.heads, shape.features), np.nan, np.float32)
    of_tokens = {f"d{name}_sums": sums[:, :, i] for i, name in enumerate("qkv")}
    if tilings is None:
        by_planes(emulator, case, causal, sums=of_tokens)
    else:
        types = dict.fromkeys(("lse", *of_tokens), "float *") | {"scratch": "float2 *"}
        kernels = (QUERY_KERNEL.summed, *(k.summed for k in key_kernels(shape.features)))
        for kernel in (FORWARD_KERNEL, *kernels):
            launch(emulator, case, kernel, tilings[kernel.entry], causal, types, case.arrays | of_tokens)
    case.check(causal)
    stored = np.stack([case.arrays[f"d{n}"].astype(np.float32) for n in "qkv"], 2)
    filled = np.zeros((shape.batch, groups * ROWS_OF_SUM, *stored.shape[2:]), np.float32)
    filled[:, : shape.queries] = stored
    want = filled.reshape(shape.batch, groups, -1, *stored.shape[2:]).sum(2)
    np.testing.assert_allclose(sums, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("batch", [1, 66])
def test_each_kernel_of_the_derivative_gets_its_operands(monkeypatch, batch, summed):
    got = []

    class Recorded:
        def __init__(self, kernel, *_):
            self.names = cuda_attention.operands_of(kernel, cuda_attention.NO_CODE)

        def __call__(self, pointers, extras, lists, stream):
            got.append(dict(zip(self.names, pointers, strict=True)))

    monkeypatch.setattr(cuda_attention_launch, "_Kernel", Recorded)
    monkeypatch.setattr(driver, "properties", lambda device: SimpleNamespace(arch="sm_90a"))
    shape = Shape(batch, 512, 512, 2, 2, 64)
    backward = cuda_attention_launch.Backward(shape, BF16, DENSE, 0.125, True, 0, summed=summed)
    names = ["q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv"]
    names += ["dq_sums", "dk_sums", "dv_sums"] if summed else []
    backward([*names], 0, None)
    own = "partial" if batch > 1 else "scratch"
    assert len(got) == (1 if batch > 1 else 2)
    for operands in got:
        assert operands == {name: 0 if name == own else name for name in operands}


# -- on a device -----------------------------------------------------------------------------------

on_device = pytest.mark.skipif(driver.available() is not None, reason=str(driver.available()))


def run_on_device(case, causal, repeats=1):
    """Both directions; the gradients of each repeat of the backward one."""
    import cupy

    stream = driver.work_stream(0)
    roots = {}  # slices of one array stay slices of one

    def address(x):
        root = x if x.base is None else x.base
        held = roots.setdefault(id(root), (root, cupy.asarray(root.view(np.uint8))))
        return int(held[1].data.ptr) + x.ctypes.data - root.ctypes.data

    at = {name: address(x) for name, x in case.arrays.items()}
    cupy.cuda.Device().synchronize()
    strides = [case.strides()[n] for n in NAMES]
    forward = cuda_attention_launch.Forward(case.shape, case.dtype, strides[:4], case.scale, causal, 0)
    backward = cuda_attention_launch.Backward(case.shape, case.dtype, strides, case.scale, causal, 0)
    needed = cuda_attention.scratch_bytes(False, case.shape, driver.properties(0).arch)
    scratch = cupy.empty(sum(needed), np.uint8)
    cupy.cuda.Device().synchronize()
    forward([at[n] for n in ("q", "k", "v", "out", "lse")], 0, stream)
    results = []
    for _ in range(repeats):
        backward(
            [at[n] for n in ("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv")], scratch.data.ptr, stream
        )
        stream.synchronize()
        for root, on_device in roots.values():
            root.view(np.uint8)[...] = on_device.get()
        results.append([case.arrays[n].copy().view(np.uint16) for n in ("dq", "dk", "dv")])
    return results


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape, dtype, packed",
    [
        (Shape(2, 190, 190, 3, 3, 64), BF16, True),
        (Shape(2, 67, 301, 4, 2, 64), F16, False),
        (Shape(1, 301, 67, 6, 2, 64), BF16, False),
        (Shape(1, 257, 257, 3, 1, 128), BF16, False),
        (Shape(1, 150, 260, 2, 2, 80), F16, False),
        (Shape(1, 200, 200, 2, 2, 32), BF16, False),
        (Shape(2, 190, 190, 2, 2, 256), BF16, True),
        (Shape(1, 150, 260, 2, 2, 160), F16, False),
        (Shape(1, 1, 1, 1, 1, 16), BF16, False),
    ],
)
def test_on_a_device(shape, dtype, packed, causal, growing):
    case = Case(shape, dtype, packed, growing)
    run_on_device(case, causal)
    case.check(causal)


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("shape", [Shape(2, 500, 500, 4, 2, 64), Shape(22, 700, 600, 12, 12, 64)])
def test_gradients_are_the_same_each_time(shape):
    first, *others = run_on_device(Case(shape, BF16), True, repeats=4)
    for other in others:
        for x, y in zip(first, other, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape, dtype, packed",
    [
        (Shape(22, 1024, 1024, 12, 12, 64), BF16, True),  # two planes for each SM of an H200
        (Shape(33, 512, 1400, 12, 12, 64), BF16, False),  # three
        (Shape(13, 515, 700, 20, 20, 64), F16, False),
        (Shape(11, 1000, 530, 12, 12, 64), BF16, False),
    ],
)
def test_gradients_by_planes_are_those_of_two_kernels(shape, dtype, packed, causal, monkeypatch):
    if driver.properties(0).arch != "sm_90a":
        pytest.skip("the kernel is for Hopper")
    case = Case(shape, dtype, packed)
    assert cuda_attention.fits_planes(shape, "sm_90a")
    run_on_device(case, causal)
    found = {name: case.arrays[name].astype(np.float32) for name in ("dq", "dk", "dv")}
    monkeypatch.setattr(cuda_attention, "fits_planes", lambda *_: False)
    run_on_device(case, causal)
    for name, got in found.items():
        want = case.arrays[name].astype(np.float32)
        # tolerances: the order of sums, in last bits of the rounded operand; and delta, which may round a term
        # the other way, so that a few of many million elements differ more
        last_bit, step = {BF16: 2**-7, F16: 2**-10}[dtype], 2**-13 * np.abs(want).max()
        far = np.abs(got - want) > step + last_bit * np.abs(want)
        assert far.mean() <= 1e-6, name
        np.testing.assert_allclose(got, want, rtol=last_bit, atol=2 * step, err_msg=name)


@pytest.mark.gpu
@on_device
def test_scale_that_is_not_positive():
    with pytest.raises(errors.UnsupportedError, match="not positive"):
        cuda_attention_launch.Forward(GOOD, BF16, DENSE[:4], -1.0, True, 0)
