"""Attention of few queries to a cache: choice, host results, and its reads."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from benchmarks.harness.kernel_resources import resources
from blufunc import lax, nn
from blufunc.core.arrays import backend
from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.backends.cuda.library.attention import decode
from blufunc.kernels.backends.cuda.library.attention.kernels import NO_CODE, Shape, Strides
from blufunc.kernels.backends.cuda.library.attention.mods import code_of
from blufunc.kernels.backends.cuda.program import planned
from blufunc.kernels.codegen import scalar_ops
from blufunc.nn.attention import call as attention_call
from blufunc.nn.attention.mods import traced
from tests.emulation.cuda_machines import needs_nvrtc
from tests.emulation.emulated_mma import Emulator

BF16, F16, F32 = dtypes.bfloat16, dtypes.float16, np.dtype(np.float32)
POSITION, LENGTHS = np.array(21, np.int32), np.array([0, 1, 40], np.int32)
IDS = np.random.default_rng(0).random((3, 200)) < 0.1
MODS = {  # mask_mod, score_mod
    "nothing": (None, None),
    "position": (lambda b, h, q, k: k <= bnp.asarray(POSITION), None),
    "lengths": (lambda b, h, q, k: k < bnp.asarray(LENGTHS)[b], None),
    "window": (lambda b, h, q, k: (k <= 60 + q) & (k > 30 + q), None),
    "heads": (lambda b, h, q, k: k % 4 <= h, None),
    "table": (lambda b, h, q, k: bnp.asarray(IDS)[b, k], None),
    "soft cap": (lambda b, h, q, k: k <= bnp.asarray(POSITION), nn.score_mods.soft_cap(1.5)),
}
SHAPES = [
    Shape(1, 1, 70, 4, 1, 128), Shape(3, 1, 100, 8, 4, 64), Shape(2, 2, 33, 4, 2, 64), Shape(1, 1, 200, 9, 1, 128),
    Shape(2, 1, 16, 2, 2, 64), Shape(1, 4, 40, 8, 2, 64),
]  # fmt: skip


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("decode"))


def given(name):
    """The mods of a name, their tables, and the code of a kernel."""
    if MODS[name] == (None, None):
        return None, (), NO_CODE
    mods, tables = traced(*MODS[name], F32)
    return mods, tables, code_of(mods, tuple(t.aval for t in tables))


def test_what_it_computes():
    assert decode.decodes(SHAPES[0], False)
    assert not decode.decodes(SHAPES[0], True)
    assert not decode.decodes(SHAPES[0]._replace(features=96), False)
    assert not decode.decodes(SHAPES[0]._replace(queries=5), False)
    shape = Shape(8, 1, 512, 16, 4, 128)
    assert [decode.splits_of(shape, arch) for arch in ("sm_80", "sm_90a")] == [1, 1]
    assert decode.splits_of(shape._replace(keys=4096), "sm_90a") == 4
    assert decode.splits_of(shape._replace(batch=64), "sm_90a") == 1
    assert decode.splits_of(shape._replace(batch=1, keys=1 << 14), "sm_90a") == 8


@pytest.mark.sampled(3)
@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("rows, features", [(4, 128), (8, 128), (16, 64), (1, 64), (16, 128)])
def test_it_compiles_without_spills(rows, features, name, arch):
    shape, (*_, code) = Shape(8, 1, 512, 4 * rows, 4, features), given(name)
    ((text, entry),) = decode.texts(shape, BF16, arch, code)
    found = resources(nvrtc.build(text, arch, entry))[entry]
    assert found.spill_stores <= (8 if arch == "sm_80" else 0)


def expected(shape, arrays, mods, tables, scale):
    """The definition, in float32 on the host."""
    on_host = lambda x: bf.device_put(x, backend.host_device())
    numbers = [np.arange(n, dtype=np.int32) for n in (shape.batch, shape.heads)] if mods is not None else []
    how = {"scale": scale, "is_causal": False} | ({} if mods is None else {"mods": mods})
    args = [on_host(np.asarray(x).astype(F32)) for x in arrays] + [
        on_host(np.asarray(x)) for x in (*numbers, *tables)
    ]
    return [np.asarray(x) for x in attention_call._forward(*args, **how)]


@pytest.mark.second
@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_on_the_host(emulator, shape, name, dtype):
    mods, tables, code = given(name)
    rng = np.random.default_rng(sum(shape))
    b, t, s, h, kh, d = shape
    q, k, v = (rng.standard_normal(n).astype(dtype) for n in ((b, t, h, d), (b, s, kh, d), (b, s, kh, d)))
    if name == "table" and s > 200:
        pytest.skip("the table is shorter")
    out, lse = np.full((b, t, h, d), np.nan, dtype), np.full((b, h, t), np.nan, F32)
    strides = [Strides(*(n // 2 for n in x.strides[:3])) for x in (q, k, v, out)]
    parameters = [("unsigned short *", x.view(np.uint16)) for x in (q, k, v, out)] + [("float *", lse)]
    if code is not NO_CODE:
        numbers = [np.arange(n, dtype=np.int32) for n in (b, h)]
        parameters += [("int *", x) for x in (*numbers, np.zeros(1, np.int32))]
        parameters += [
            (f"{scalar_ops.storage_type(x.dtype)} *", np.array(x)) for x in map(np.asarray, tables)
        ]
    scale = d**-0.5
    parameters.append(("Problem", decode.problem(shape, scale, strides)))
    emulator.launch(
        decode.source(shape, dtype, code), decode.instructions(dtype), dtype.name, decode.ENTRY, parameters,
        b * kh, 32 * decode.WARPS, decode.shared_bytes(shape), parts=("overlap", "cluster", "skinny"),
    )  # fmt: skip
    want, sums = expected(shape, (q, k, v), mods, tables, scale)
    np.testing.assert_allclose(lse, sums, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(out.astype(F32), want, atol=0.02)


# -- on a device -----------------------------------------------------------------------------------

FORMS = {
    "function": lambda q, k, v, length: nn.dot_product_attention(
        q[:, None], k, v, key_value_seq_lengths=length
    )[:, 0],
    "by hand": lambda q, k, v, length: by_hand(q, k, v, length, "btkd"),
    "heads first": lambda q, k, v, length: by_hand(q, k.swapaxes(1, 2), v.swapaxes(1, 2), length, "bktd"),
}


def by_hand(q, k, v, length, layout):
    B, N, H = q.shape
    K, S = k.shape[layout.index("k")], k.shape[layout.index("t")]
    q = q.reshape(B, K, N // K, H)
    scores = bnp.einsum(f"bkgd,{layout}->bkgt", q, k, preferred_element_type="float32") * H**-0.5
    seen = bnp.arange(S)[None, :] < length[:, None]
    weights = nn.softmax(bnp.where(seen[:, None, None], scores, -bnp.inf), axis=-1).astype(v.dtype)
    return bnp.einsum(f"bkgt,{layout}->bkgd", weights, v).reshape(B, N, H)


def arguments(batch, keys, heads, key_heads, features, dtype, lengths):
    rng = np.random.default_rng([batch, keys, heads])
    sizes = (batch, heads, features), *[(batch, keys, key_heads, features)] * 2
    q, k, v = (bnp.asarray(rng.standard_normal(n), dtype=dtype) for n in sizes)
    return q, k, v, np.resize(np.array(lengths, np.int32), batch)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "sizes",
    [
        (8, 512, 16, 4, 128),
        (3, 333, 8, 8, 64),
        (1, 5000, 16, 1, 128),
        (64, 257, 8, 8, 128),
        (1, 4096, 32, 8, 64),
    ],
)
def test_on_a_device(sizes, dtype, form):
    keys = sizes[1]
    device = bf.devices("cuda")[0]
    args = arguments(*sizes, dtype, [keys, 1, keys // 2, 17, keys - 1, 100, 16, 129])
    found = bf.jit(FORMS[form])
    on_device = [bf.device_put(x, device) for x in args]
    assert "attention_decode" in str(bf.explain(found, *on_device, run=True))
    want = np.asarray(
        FORMS[form](*[bnp.asarray(x).astype("float32") if n < 3 else x for n, x in enumerate(args)])
    )
    got = np.asarray(found(*on_device)).astype(F32)
    np.testing.assert_allclose(got, want, atol=0.02)
    np.testing.assert_array_equal(np.asarray(found(*on_device)).astype(F32), got)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_it_reads_the_valid_part_only(form):
    """Whole tiles beyond the length are NaN."""
    q, k, v, length = arguments(4, 512, 8, 2, 128, "bfloat16", [16, 160, 512, 304])
    poisoned = [
        bnp.where(bnp.arange(512)[None, :, None, None] < length[:, None, None, None], x, bnp.nan)
        for x in (k, v)
    ]
    device = bf.devices("cuda")[0]
    found = bf.jit(FORMS[form])
    put = lambda *xs: [bf.device_put(x, device) for x in xs]
    got = np.asarray(found(*put(q, *[x.astype("bfloat16") for x in poisoned], length)))
    np.testing.assert_array_equal(got, np.asarray(found(*put(q, k, v, length))))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["by hand", "function"])
def test_queries_that_see_nothing(form):
    q, k, v, length = arguments(2, 256, 4, 2, 64, "bfloat16", [0, 5])
    device = bf.devices("cuda")[0]
    got = np.asarray(bf.jit(FORMS[form])(*[bf.device_put(x, device) for x in (q, k, v, length)])).astype(F32)
    assert np.isnan(got[0]).all() if form == "by hand" else not got[0].any()
    assert np.isfinite(got[1]).all()


def decoding(B, S, K, N, H, steps):
    """A loop that updates a cache at its index, and its arguments."""
    q, k, v, _ = arguments(B, steps, N, K, H, "bfloat16", [0])
    qs = bnp.stack([q * (i % 5 + 1) / 4 for i in range(steps)]).astype("bfloat16")

    def run(qs, k, v):
        def step(cache, i):
            keys, values = (
                lax.dynamic_update_slice(c, lax.dynamic_slice_in_dim(x, i, 1, 1), (0, i, 0, 0))
                for c, x in zip(cache, (k, v), strict=True)
            )
            return (keys, values), by_hand(qs[i], keys, values, bnp.full((B,), i + 1), "btkd")

        empty = bnp.zeros((B, S, K, H), k.dtype)
        return lax.scan(step, (empty, empty), bnp.arange(steps))[1]

    return run, (qs, k, v)


def test_a_loop_keeps_its_attention():
    """Values that leave the loop must not take the kernel's call apart."""
    run, args = decoding(4, 256, 2, 8, 64, 40)
    jaxpr = bf.jit(run).trace(*args).jaxpr
    inner = planned(jaxpr, (False,) * 3, "sm_90a").opaque
    (scan,) = (e for e in inner if e.prim.name == "scan")
    assert [e.prim.name for e in scan.params["jaxpr"].eqns].count("attention") == 1


@pytest.mark.gpu
def test_decoding_in_a_loop():
    run, (qs, k, v) = decoding(4, 256, 2, 8, 64, 40)
    device = bf.devices("cuda")[0]
    got = np.asarray(bf.jit(run)(*[bf.device_put(x, device) for x in (qs, k, v)])).astype(F32)
    np.testing.assert_allclose(got, np.asarray(run(*[x.astype("float32") for x in (qs, k, v)])), atol=0.02)
