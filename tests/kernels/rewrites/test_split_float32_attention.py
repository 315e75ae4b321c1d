"""Float32 attention in float16 parts: plans, values and accuracy of kernels."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from benchmarks.harness.kernel_resources import resources
from blufunc import nn
from blufunc.config import config
from blufunc.core.arrays import backend
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import eval_jaxpr
from blufunc.core.programs.simplify import inline_bodies, simplify
from blufunc.kernels.backends.cuda.driver import driver, nvrtc
from blufunc.kernels.backends.cuda.library import mma
from blufunc.kernels.backends.cuda.library.attention import kernels as cuda_attention
from blufunc.kernels.backends.cuda.library.attention import launch as cuda_attention_launch
from blufunc.kernels.backends.cuda.library.attention.kernels import (
    FORWARD_KERNEL,
    KEY_KERNEL,
    QUERY_KERNEL,
    Shape,
    Strides,
    Tiling,
    key_kernels,
)
from blufunc.kernels.precision import ACCURATE, ALGORITHMS
from blufunc.kernels.rewrites import split_float32_attention
from blufunc.nn.attention import call as attention_call
from tests.emulation import fake_cuda
from tests.emulation.cuda_machines import needs_nvrtc
from tests.emulation.emulated_mma import Emulator, maps
from tests.kernels.backends.cuda.test_program import on, packed_attention, program_of, same, uniform

KERNELS = [FORWARD_KERNEL, QUERY_KERNEL, KEY_KERNEL]
NAMES = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
IN_PARTS = ("q", "k", "v", "dout")
DEVIATION = {1: 2e-3, 2: 2e-6}
"""Error of an element relative to the largest, by parts: TF32's and float32's."""
F16 = dtypes.float16


def split(x, key_heads, parts):
    """The parts of an operand [B, T, N, H], and its units [B, K], by their definition."""
    batch, _, heads, _ = x.shape
    top = np.abs(x).max((1, 3)).reshape(batch, key_heads, -1).max(2)
    exponent = np.minimum(14 - np.floor(np.log2(np.maximum(top, 1e-45))), 126)
    scaled = x * np.repeat(2.0**exponent, heads // key_heads, 1)[:, None, :, None].astype(np.float32)
    first = scaled.astype(F16)
    found = [first, (scaled - first.astype(np.float32)).astype(F16)][:parts]
    return [*found, (2.0**-exponent).astype(np.float32)]


class Case:
    """Operands of one attention, in parts too, its results, and the float64 results."""

    def __init__(self, shape, parts, sizes=(1, 1, 1, 1), change=lambda arrays: None):
        """``sizes`` of q, k, v and dout; ``change`` gets these by name before the split."""
        self.shape, self.parts, self.scale = shape, parts, shape.features**-0.5
        b, t, s, h, kh, d = shape
        rng = np.random.default_rng(sum(shape))
        shapes = {"q": (b, t, h, d), "k": (b, s, kh, d), "v": (b, s, kh, d), "dout": (b, t, h, d)}
        self.whole = {
            name: (rng.standard_normal(x) * size).astype(np.float32)
            for (name, x), size in zip(shapes.items(), sizes, strict=True)
        }
        change(self.whole)
        made = {name: split(x, kh, parts) for name, x in self.whole.items()}
        self.units = {name: x[-1] for name, x in made.items()}
        self.rests = {name: x[1] if parts > 1 else x[0] for name, x in made.items()}
        missing = lambda *sizes: np.full(sizes, np.nan, np.float32)
        self.arrays = {name: x[0] for name, x in made.items()} | {
            "out": missing(b, t, h, d), "dq": missing(b, t, h, d), "dk": missing(b, s, kh, d),
            "dv": missing(b, s, kh, d), "lse": missing(b, h, t),
            "scratch": missing(b * h, cuda_attention.padded(shape), 2),
        }  # fmt: skip

    def strides(self):
        found = {n: self.arrays[n] for n in NAMES}
        return {n: Strides(*(s // x.itemsize for s in x.strides[:3])) for n, x in found.items()}

    def results(self, dtype, causal):
        """By the formulas, computed in a dtype."""
        b, t, s, h, kh, d = self.shape
        q, k, v, dout = (self.whole[n].astype(dtype) for n in IN_PARTS)
        k, v = (np.repeat(x, h // kh, axis=2) for x in (k, v))
        scores = np.einsum("bthd,bshd->bhts", q, k) * dtype(self.scale)
        if causal:
            scores = np.where(np.tri(t, s, dtype=bool), scores, dtype(-np.inf))
        top = scores.max(-1, keepdims=True)
        lse = np.log(np.exp(scores - top).sum(-1)) + top[..., 0]
        p = np.exp(scores - lse[..., None])
        out = np.einsum("bhts,bshd->bthd", p, v)
        dp = np.einsum("bthd,bshd->bhts", dout, v) - np.einsum("bthd,bthd->bht", dout, out)[..., None]
        of_keys = lambda x: x.reshape(b, s, kh, h // kh, d).sum(3)
        dk = np.einsum("bhts,bthd->bshd", p * dp, q) * dtype(self.scale)
        return {
            "out": out, "lse": lse, "dq": np.einsum("bhts,bshd->bthd", p * dp, k) * dtype(self.scale),
            "dk": of_keys(dk), "dv": of_keys(np.einsum("bhts,bthd->bshd", p, dout)),
        }  # fmt: skip

    def deviations(self, causal):
        want = self.results(np.float64, causal)
        # with one key, queries and the key have no gradient: the rest is relative to terms of order one
        largest = {name: np.abs(x).max() or 1.0 for name, x in want.items()}
        return {name: np.abs(self.arrays[name] - x).max() / largest[name] for name, x in want.items()}

    def check(self, causal):
        for name, deviation in self.deviations(causal).items():
            assert deviation < DEVIATION[self.parts], name


# -- kernels ---------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("features, parts", [(64, 1), (64, 2), (128, 1), (128, 2), (80, 2)])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.entry)
def test_compiles(kernel, features, parts, arch):
    """No spills in loops, except for the sums of two parts of many features."""
    tiling = kernel.tiling(features, arch, parts=parts)
    text = cuda_attention.source(kernel, F16, features, True, tiling, parts=parts)
    binary = nvrtc.build(text, arch, kernel.entry)
    spilt = 32 if features <= 64 else 64 if parts == 1 else 160
    assert resources(binary)[kernel.entry].spill_stores <= spilt
    assert "serialized" not in binary.log


@pytest.mark.parametrize("features", [16, 64, 80, 128])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
@pytest.mark.parametrize("parts", [1, 2])
def test_tiles_fit(features, arch, parts):
    """Into the shared memory of a block, and into the rows of scratch memory."""
    limit = {"sm_80": 163, "sm_86": 99, "sm_90a": 227}[arch] << 10
    tilings = [k.tiling(features, arch, parts=parts) for k in KERNELS]
    for kernel, tiling in zip(KERNELS, tilings, strict=True):
        assert kernel.shared_bytes(features, tiling, parts) <= limit
        # the numbers of a whole tile of queries are read, and numbers of as many queries written
        if kernel is KEY_KERNEL:
            assert cuda_attention.padded(Shape(1, 1, 1, 1, 1, features)) % tiling.columns == 0


def test_refused():
    shape, dense = Shape(2, 128, 128, 4, 2, 64), [Strides(128 * 256, 256, 64)] * 8
    assert cuda_attention.refused(shape, dtypes.float32, dense, "sm_90a", 2) is None
    assert "sm_75" in cuda_attention.refused(shape, dtypes.float32, dense, "sm_75", 2)
    wide = shape._replace(features=256)
    assert cuda_attention.refused(wide, dtypes.float32, dense, "sm_90a", 1) is None
    assert "in two parts" in cuda_attention.refused(wide, dtypes.float32, dense, "sm_90a", 2)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("attention"))


def run_on_the_host(emulator, case, causal, arch, tilings=None):
    results = ("out", "dq", "dk", "dv", "lse")
    types = {"scratch": "float2 *"} | dict.fromkeys(results, "float *")
    shape, parts = case.shape, case.parts
    for kernel in (FORWARD_KERNEL, QUERY_KERNEL, *key_kernels(shape.features)):
        tiling = (tilings or {}).get(kernel.entry) or kernel.tiling(shape.features, arch, parts=parts)
        parameters = [(types.get(n, "unsigned short *"), case.arrays[n]) for n in kernel.operands]
        parameters += [("unsigned short *", case.rests[n]) for n in IN_PARTS]
        parameters += [("float *", case.units[n]) for n in IN_PARTS]
        parameters += [("Problem", cuda_attention.problem(kernel, shape, case.scale, case.strides()))]
        parameters += maps(kernel, shape, case.strides(), tiling, case.arrays)
        emulator.launch(
            cuda_attention.source(kernel, F16, shape.features, causal, tiling, parts=parts),
            mma.instructions("float16", cuda_attention.group_sizes(shape.features, tiling, parts)),
            "float16",
            kernel.entry,
            parameters,
            kernel.blocks(shape, tiling),
            tiling.launched,
            kernel.shared_bytes(shape.features, tiling, parts),
        )


TWO_SLABS = {k.entry: Tiling(2, 128, 64, 32, 1) for k in KERNELS} | {
    "attention_forward": Tiling(2, 128, 32, 32, 1)
}
SMALL = 1e-3, 1e3, 1e-9, 1e-12


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "shape, parts, causal, arch, tilings, sizes",
    [
        (Shape(1, 130, 130, 2, 1, 64), 1, True, "sm_90a", None, (1, 1, 1, 1)),
        (Shape(1, 90, 210, 2, 1, 128), 1, True, "sm_90a", None, SMALL),
        (Shape(1, 130, 130, 2, 1, 64), 2, True, "sm_90a", None, (1, 1, 1, 1)),
        (Shape(2, 67, 150, 2, 2, 64), 2, False, "sm_90a", None, SMALL),
        (Shape(1, 70, 90, 1, 1, 128), 2, True, "sm_90a", None, (1, 1, 1, 1)),
        (Shape(1, 70, 90, 1, 1, 80), 2, True, "sm_90a", None, (1, 1, 1, 1)),
        (Shape(1, 70, 150, 1, 1, 256), 1, True, "sm_90a", None, (1, 1, 1, 1)),
        (Shape(1, 130, 130, 2, 1, 64), 1, True, "sm_80", None, (1, 1, 1, 1)),
        (Shape(1, 67, 90, 2, 2, 64), 2, False, "sm_80", None, SMALL),
        (Shape(1, 130, 130, 2, 1, 64), 2, True, "sm_80", TWO_SLABS, (1, 1, 1, 1)),
        (Shape(1, 70, 90, 1, 1, 128), 2, True, "sm_80", None, (1, 1, 1, 1)),
        (Shape(1, 70, 70, 1, 1, 16), 2, True, "sm_80", None, (1e-10, 1e10, 1e-10, 1e-8)),
    ],
)
def test_kernels_on_the_host(emulator, shape, parts, causal, arch, tilings, sizes):
    case = Case(shape, parts, sizes)
    run_on_the_host(emulator, case, causal, arch, tilings)
    case.check(causal)
    assert not np.isnan(case.arrays["scratch"]).any()  # the key kernel reads whole tiles of its own


@pytest.mark.slow
def test_two_parts_are_as_exact_as_float32(emulator):
    """The largest error of either, and of most elements; equal sums truncate equally."""
    case = Case(Shape(1, 192, 192, 2, 2, 64), 2)
    run_on_the_host(emulator, case, True, "sm_90a")
    right, plain = (case.results(dtype, True) for dtype in (np.float64, np.float32))
    for name, want in right.items():
        errors = [np.abs(x[name] - want) for x in (case.arrays, plain)]
        assert errors[0].max() < 2 * errors[1].max(), name
        assert np.sqrt((errors[0] ** 2).mean()) < 2 * np.sqrt((errors[1] ** 2).mean()), name


def uneven(arrays):
    """Gradients of tokens of very different size, and one large feature of values."""
    arrays["dout"] *= np.float32(2) ** (np.arange(arrays["dout"].shape[1]) * 7 % 16)[:, None, None]
    arrays["v"][..., 0] *= 8


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_small_rows_are_as_exact_as_float32(emulator, arch):
    """With other tokens' gradients 2^15 times larger, errors are relative to each row."""
    case = Case(Shape(1, 192, 192, 2, 2, 64), 2, change=uneven)
    run_on_the_host(emulator, case, True, arch)
    right, plain = (case.results(dtype, True) for dtype in (np.float64, np.float32))
    for name in ("out", "dq", "dk", "dv"):
        want = right[name][:, 1:]  # the first query has one key, and so no gradient but errors
        largest = np.abs(want).max(-1, keepdims=True)
        errors = [((x[name][:, 1:] - want) / largest) ** 2 for x in (case.arrays, plain)]
        assert np.sqrt(errors[0].mean()) < 2 * np.sqrt(errors[1].mean()), name


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_small_rows_have_the_bits_of_one_part(emulator, arch):
    """Each query's gradient by itself, relative to its largest element."""

    def change(arrays):
        uneven(arrays)
        arrays["v"][..., 0] *= 8  # so that dS is far below what it could be

    case = Case(Shape(1, 192, 192, 2, 2, 64), 1, change=change)
    run_on_the_host(emulator, case, True, arch)
    want = case.results(np.float64, True)["dq"][:, 1:]
    errors = np.abs(case.arrays["dq"][:, 1:] - want).max(-1) / np.abs(want).max(-1)
    assert errors.max() < 3e-3


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1, 1e36, 1e-30), (1e-36, 1e36, 1, 1), (1, 1, 1e-33, 1)])
def test_sizes_at_the_ends_of_float32(emulator, sizes):
    """Nothing overflows, or loses bits, that has its place in the result."""
    case = Case(Shape(1, 70, 70, 1, 1, 128), 2, sizes)
    run_on_the_host(emulator, case, True, "sm_90a")
    case.check(True)


def opposed(arrays):
    """Two keys of the same weight, with values as far apart as they can be."""
    arrays["k"] *= 1e-6
    arrays["dout"][...], arrays["v"][...] = np.nextafter(np.float32(2), 0), np.nextafter(np.float32(2), 0)
    arrays["v"][:, 1] *= -1


@pytest.mark.slow
@pytest.mark.parametrize("features", [16, 80, 256])
def test_the_largest_gradient_of_scores_fits_into_one_part(emulator, features):
    case = Case(Shape(1, 16, 2, 1, 1, features), 1, change=opposed)
    run_on_the_host(emulator, case, False, "sm_80")
    case.arrays["out"] = case.results(np.float64, False)["out"]  # it is nearly zero
    case.check(False)


@pytest.mark.slow
def test_zeros_are_zeros(emulator):
    """Their scale is the largest; masked scores of zero stay no NaN with its inverse."""
    case = Case(Shape(1, 70, 70, 1, 1, 64), 2, (0, 0, 1, 1))
    run_on_the_host(emulator, case, True, "sm_90a")
    want = case.results(np.float64, True)
    for name in ("out", "lse", "dv"):
        np.testing.assert_allclose(case.arrays[name], want[name], atol=1e-5)
    assert not case.arrays["dq"].any() and not case.arrays["dk"].any()


# -- programs --------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch):
    fake_cuda.install(monkeypatch)
    return bf.devices("cuda")[0]


def steps_of(f, device, *args):
    return [s.eqn for s in program_of(f, *on(device, *args)).schedule.steps if hasattr(s, "eqn")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "precision, parts",
    [("tf32", 1), (ACCURATE, 2), *((n, ALGORITHMS[n].parts) for n in ALGORITHMS if n.startswith("F16"))],
)
@pytest.mark.parametrize("key_heads, causal", [(4, True), (2, False)])
def test_is_one_kernel_in_each_direction(precision, parts, key_heads, causal, cuda, monkeypatch):
    """Which read the same parts of queries, keys and values."""
    monkeypatch.setattr(config, "matmul_precision", precision)
    q, w = (uniform(2, 40, 4, 16, seed=s) for s in (1, 4))
    k, v = (uniform(2, 40, key_heads, 16, seed=s) for s in (2, 3))
    f = lambda q, k, v, w: (nn.dot_product_attention(q, k, v, is_causal=causal) * w).sum()
    run = bf.value_and_grad(f, (0, 1, 2))
    forward, backward = steps_of(run, cuda, q, k, v, w)
    assert [e.prim.name for e in (forward, backward)] == ["attention+split", "attention_grad+split"]
    assert forward.invars[:3] == backward.invars[:3]
    assert forward.params["parts"] == parts and forward.invars[0].aval.dtype == F16
    got, want = bf.jit(run)(*on(cuda, q, k, v, w)), run(*on(backend.host_device(), q, k, v, w))
    same(got, want, DEVIATION[parts])
    same(run(*on(cuda, q, k, v, w)), want, DEVIATION[parts])  # and operation by operation


def test_packed_operands_are_split_where_they_are(cuda, monkeypatch):
    """One kernel for row maxima, two for scales, and one for the parts."""
    monkeypatch.setattr(config, "matmul_precision", ACCURATE)
    qkv = uniform(2, 40, 3, 2, 16)
    f = lambda x: (packed_attention(x) ** 2).sum()
    schedule = program_of(packed_attention, *on(cuda, qkv)).schedule
    assert len(schedule.steps) == 5
    same(bf.jit(bf.grad(f))(*on(cuda, qkv)), bf.grad(f)(*on(backend.host_device(), qkv)), DEVIATION[2])


def test_operands_that_lie_otherwise_are_copied(cuda, monkeypatch):
    """Rows of 20 elements are no multiple of 8, which kernels need for float32 too."""
    monkeypatch.setattr(config, "matmul_precision", ACCURATE)
    q, k, v, ct = (uniform(2, 40, 2, 16, seed=s) for s in range(4))
    out, lse = uniform(2, 40, 2, 20, seed=4), uniform(2, 2, 40) + 3
    how = {"scale": 0.25, "is_causal": True}
    f = lambda q, k, v, out, lse, ct: attention_call.attention_grad_p.at(
        q, k, v, out[..., :16], lse, ct, **how
    )
    args = q, k, v, out, lse, ct
    assert [e.prim.name for e in steps_of(f, cuda, *args)] == ["attention_grad+split"]
    same(bf.jit(f)(*on(cuda, *args)), f(*on(backend.host_device(), *args)), DEVIATION[2])


@pytest.mark.parametrize("parts, planes", [(0, 4), (1, 4), (2, 2)])
def test_sections_fit_into_the_cache(parts, planes):
    """Their keys and values, 16 MiB in all."""
    shape = Shape(2, 16384, 16384, 8, 8, 64)
    numbers = cuda_attention.problem(FORWARD_KERNEL, shape, 1.0, {}, parts)
    assert np.frombuffer(numbers, np.int32, 7)[5] == planes


@pytest.mark.parametrize("precision", ["default", "highest"])
def test_ieee_precisions_have_no_kernel_for_few_queries(precision, cuda, monkeypatch):
    monkeypatch.setattr(config, "matmul_precision", precision)
    q = uniform(2, 40, 2, 16)
    f = lambda q: packed_attention(bnp.stack([q] * 3, 2))
    assert not [e for e in steps_of(f, cuda, q) if e.prim.name.startswith("attention")]
    (note,) = program_of(f, *on(cuda, q)).schedule.notes
    assert "no kernel for attention at" in note and "40 queries of float32: below 48" in note


@pytest.mark.slow
def test_functions_of_pairs(cuda, monkeypatch):
    """Masks and score biases; an arbitrary slope would not fit into one float16 part."""
    monkeypatch.setattr(config, "matmul_precision", ACCURATE)
    qkv, table = [uniform(2, 40, 4, 16, seed=s) for s in range(3)], uniform(4, 5)
    ids = np.repeat(np.arange(10), 8).reshape(2, 40).astype(np.int32)
    added = {"mask_mod": nn.masks.document(ids), "score_mod": nn.score_mods.relative_bias(table)}
    attend = lambda q, k, v, **mods: (nn.dot_product_attention(q, k, v, **mods) ** 2).sum()
    run = bf.grad(lambda *x: attend(*x, **added), (0, 1, 2))
    names = [e.prim.name for e in steps_of(run, cuda, *qkv)]
    assert names == ["attention+split", "attention_grad+split"]
    same(bf.jit(run)(*on(cuda, *qkv)), run(*on(backend.host_device(), *qkv)), DEVIATION[2])
    capped = bf.grad(lambda *x: attend(*x, score_mod=nn.score_mods.soft_cap(5.0)), (0, 1, 2))
    assert [e.prim.name for e in steps_of(capped, cuda, *qkv)] == names
    monkeypatch.setattr(config, "matmul_precision", "tf32")
    assert steps_of(capped, cuda, *qkv)[0].prim.name == "attention+split"
    (note,) = program_of(capped, *on(cuda, *qkv)).schedule.notes
    assert "no kernel for attention_grad" in note and "a slope that may be of any size" in note
    same(bf.jit(capped)(*on(cuda, *qkv)), capped(*on(backend.host_device(), *qkv)), DEVIATION[1])


SPECIAL = {
    "zeros": lambda x: x * 0,
    "subnormal": lambda x: x * np.float32(1e-39),
    "huge": lambda x: x * np.float32(1e37),
    "heads of very different size": lambda x: x * np.float32([1e-12, 1e12])[:, None],
}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("parts", [1, 2])
def test_parts_are_what_is_split(name, parts):
    """Of float32 of any size; by the equations, and by their definition."""
    x = SPECIAL[name](uniform(3, 20, 2, 16, seed=7) - np.float32(0.5)).astype(np.float32)
    found = split_float32_attention._split([from_numpy(x)], 2, parts)
    for got, want in zip(found, split(x, 2, parts), strict=True):
        np.testing.assert_array_equal(np.asarray(got), want)
    if name not in ("zeros", "subnormal"):
        top = np.abs(np.asarray(found[0]).astype(np.float32)).max((1, 3))
        assert (top >= 2**14).all() and (top <= 2**15).all()
    joined = np.asarray(split_float32_attention._joined(found[:-1], found[-1]))
    assert np.abs(joined - x).max() <= np.abs(x).max() * 2.0 ** (-11 * parts)


def test_means_the_same_by_its_definition(monkeypatch):
    """The program that has parts, run where there are no kernels."""
    monkeypatch.setattr(config, "matmul_precision", ACCURATE)
    f = bf.grad(lambda q, k, v: (nn.dot_product_attention(q, k, v, is_causal=True) ** 2).sum(), (0, 1, 2))
    args = [uniform(2, 9, 2, 8, seed=s) for s in range(3)]
    keep = lambda e: e.prim.name in split_float32_attention.OPERANDS
    jaxpr, origins = inline_bodies(simplify(bf.make_jaxpr(f)(*args)), keep)
    made = split_float32_attention.with_split_attention(jaxpr, origins)
    assert [e.prim.name for e in made.eqns if e.prim.kind == "call"] == [
        "attention+split",
        "attention_grad+split",
    ]
    for got, want in zip(eval_jaxpr(made, list(map(from_numpy, args))), f(*args), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=3e-6)


# -- on a device -----------------------------------------------------------------------------------

on_device = pytest.mark.skipif(driver.available() is not None, reason=str(driver.available()))


def run_on_device(case, causal, repeats=1):
    import cupy

    more = {f"{n} rest": x for n, x in case.rests.items()} | {f"{n} unit": x for n, x in case.units.items()}
    at = {name: cupy.asarray(x) for name, x in (case.arrays | more).items()}
    cupy.cuda.Device().synchronize()
    stream, address = driver.work_stream(0), lambda *names: [int(at[n].data.ptr) for n in names]
    strides = [case.strides()[n] for n in NAMES]
    options = {"parts": case.parts}
    forward = cuda_attention_launch.Forward(case.shape, F16, strides[:4], case.scale, causal, 0, **options)
    backward = cuda_attention_launch.Backward(case.shape, F16, strides, case.scale, causal, 0, **options)
    split = lambda n: [
        f"{name} {what}" for what in ("rest", "unit")[2 - case.parts :] for name in IN_PARTS[:n]
    ]
    forward(address("q", "k", "v", *split(3), "out", "lse"), 0, stream)
    results = []
    for _ in range(repeats):
        names = ("q", "k", "v", "out", "lse", "dout", *split(4), "dq", "dk", "dv")
        backward(address(*names), *address("scratch"), stream)
        stream.synchronize()
        for name, x in case.arrays.items():
            x[...] = at[name].get()
        results.append([case.arrays[n].copy() for n in ("dq", "dk", "dv")])
    return results


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    "shape, sizes",
    [
        (Shape(2, 190, 190, 3, 3, 64), (1, 1, 1, 1)),
        (Shape(2, 67, 301, 4, 2, 64), SMALL),
        (Shape(1, 1000, 1000, 2, 1, 64), (1, 1, 1, 1)),
        (Shape(1, 257, 257, 3, 1, 128), (1, 1, 1, 1)),
        (Shape(1, 150, 260, 2, 2, 80), (1, 1, 1, 1)),
        (Shape(1, 1, 1, 1, 1, 16), (1, 1, 1, 1)),
    ],
)
def test_on_a_device(shape, sizes, parts, causal):
    case = Case(shape, parts, sizes)
    run_on_device(case, causal)
    case.check(causal)


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("parts", [1, 2])
def test_gradients_are_the_same_each_time(parts):
    first, *others = run_on_device(Case(Shape(2, 500, 500, 4, 2, 64), parts), True, repeats=4)
    for other in others:
        for x, y in zip(first, other, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("precision, parts", [("tf32", 1), (ACCURATE, 2)])
def test_programs_on_a_device(precision, parts, monkeypatch):
    device = bf.devices("cuda")[0]
    qkv = uniform(2, 300, 3, 4, 64) * 2 - 1
    f = bf.grad(lambda x: (packed_attention(x) ** 2).sum())
    want = np.asarray(f(*on(backend.host_device(), qkv.astype(np.float64))))
    monkeypatch.setattr(config, "matmul_precision", precision)
    got = np.asarray(bf.jit(f)(*on(device, qkv)))
    assert got.dtype == np.float32
    assert np.abs(got - want).max() < 5 * DEVIATION[parts] * np.abs(want).max()
