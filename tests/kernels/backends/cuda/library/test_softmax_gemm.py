"""Hopper's GEMM with a row softmax: losses that use it, values, the kernel."""

import functools

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from benchmarks.harness.kernel_resources import resources
from blufunc import nn
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import DropVar
from blufunc.core.ops.linear_softmax import BELOW, FAR, NAME
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cuda import dispatch
from blufunc.kernels.backends.cuda.dispatch import Library
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.backends.cuda.library import softmax_gemm
from blufunc.kernels.backends.cuda.library.softmax_gemm import (
    ENTRY,
    SETTLE,
    LinearSoftmax,
    SoftmaxGemm,
    source,
)
from blufunc.kernels.backends.cuda.library.tile_gemm import COLUMNS, ROWS, instructions
from blufunc.kernels.backends.cuda.program import TARGET, Draft
from blufunc.kernels.pipeline import Planning
from blufunc.kernels.rewrites.select_variant import select_variants
from blufunc.kernels.schedule import OpaqueStep
from blufunc.nn import vocabulary_loss_call
from tests.emulation.cuda_machines import needs_nvrtc
from tests.emulation.emulated_mma import Emulator, tensor_map
from tests.kernels.backends.cuda.library.test_split_gemm import moved_registers

BF16, F32 = dtypes.bfloat16, np.float32


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("emulated"))


# -- which losses ------------------------------------------------------------------------------------

N, V, C = 512, 200, 64
RNG = np.random.default_rng(0)
X, W = RNG.standard_normal((N, C)).astype(F32), RNG.standard_normal((V, C)).astype(F32) / 8
LABELS = RNG.integers(0, V, N).astype(np.int32)


def loss(x, weight, labels, cast=True, **options):
    f = lambda x, weight: nn.linear_cross_entropy(x, weight, labels, **options)
    return (bf.autocast(f) if cast else f)(x, weight)


def with_gradients(**options):
    return bf.value_and_grad(functools.partial(loss, **options), argnums=(0, 1))


def planned(f, *args, arch="sm_90a"):
    return Draft(bf.jit(f).trace(*args).jaxpr, (False,) * len(args), arch).schedule


LOSSES = {  # options, operands, and the reason without a kernel: a part of the line, or None
    "a mean": ({}, (X, W), None),
    "a sum": ({"reduction": "sum"}, (X, W), None),
    "in chunks": ({"chunk": 256}, (X, W), None),
    "features first": ({"layout": "CV"}, (X, W.T.copy()), None),
    "of bfloat16": ({"cast": False}, (X.astype(BF16), W.astype(BF16)), None),
    "some do not count": ({"ignore_index": 3}, (X, W), None),
    "leading axes": ({}, (X.reshape(2, N // 2, C), W), None),
    "a remainder": ({"chunk": 256}, (X[:400], W), None),
    "chunks of another size": ({"chunk": 384}, (X, W), "384 tokens are no multiple of 256"),
    "classes of another number": ({}, (X, W[:100]), "100 classes are no multiple of 8"),
    "features of another number": (
        {},
        (X[:, :40].copy(), W[:, :40].copy()),
        "40 features are no multiple of 64",
    ),
    "no features": ({}, (X[:, :0], W[:, :0]), "0 features"),
    "float32": ({"cast": False}, (X, W), ""),
    "smoothed": ({"label_smoothing": 0.1}, (X, W), ""),
    "a z-loss": ({"z_loss": 1e-3}, (X, W), ""),
    "capped": ({"soft_cap": 30.0}, (X, W), ""),
}


@pytest.mark.second
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", LOSSES)
def test_which_losses_have_kernels_and_that_they_mean_the_same(name, fake, cuda):
    options, (x, weight), why = LOSSES[name]
    labels = np.minimum(LABELS, (weight.shape[1] if options.get("layout") == "CV" else len(weight)) - 1)
    labels = labels[: x.size // x.shape[-1] if x.size else N].reshape(x.shape[:-1])
    f = with_gradients(**options)
    value, grads = bf.jit(f)(*[bf.device_put(a, cuda) for a in (x, weight, labels)])
    schedule = planned(f, x, weight, labels)
    found = [s.eqn.prim.name for s in schedule.steps if isinstance(s, OpaqueStep)]
    chunks = labels.size // options.get("chunk", labels.size) if why is None else 0
    assert found.count(NAME) == fake.epilogues.count("softmax") == chunks
    notes = [note for note in schedule.notes if "softmax" in note]
    assert bool(notes) == bool(why or name == "a remainder") and all(
        (why or "144 tokens") in note for note in notes
    )
    expected, of = bf.jit(f)(x, weight, labels)
    np.testing.assert_allclose(float(value), float(expected), rtol=1e-5)
    for g, e in zip(grads, of, strict=True):
        assert g.dtype == e.dtype and g.shape == e.shape
        e = np.asarray(e, F32)
        np.testing.assert_allclose(np.asarray(g, F32), e, rtol=0.03, atol=0.01 * np.abs(e).max(initial=0))


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int64", "uint64"])
def test_labels_of_any_integers(dtype, cuda):
    """Of which some are no class, also where that shows in upper bits only."""
    given = (LABELS % 100).astype(dtype)
    wide = given.dtype.itemsize == 8
    given[3] += wide << 32
    labels = bnp.asarray(given, dtype=dtype)
    f = bf.jit(with_gradients(reduction="sum"))
    value, grads = f(*[bf.device_put(a, cuda) for a in (X, W, labels)])
    expected, of = f(X, W, labels)
    assert np.isnan(float(value)) == np.isnan(float(expected)) == wide
    found, wanted = (np.asarray(g[0]) for g in (grads, of))
    np.testing.assert_allclose(
        found, wanted, rtol=0.03, atol=0.01 * np.nanmax(np.abs(wanted))
    )  # NaN where NaN is
    assert np.isnan(found).any(1).sum() == wide
    np.testing.assert_allclose(float(value), float(expected), rtol=1e-5)


def test_what_nobody_reads_is_not_computed():
    """The forward pass of a checkpointed loss computes no gradients."""
    f = bf.value_and_grad(
        lambda x, w, labels: bf.checkpoint(lambda x, w: loss(x, w, labels))(x, w), argnums=(0, 1)
    )
    steps = [s for s in planned(f, X, W, LABELS).steps if isinstance(s, OpaqueStep)]
    found = [s for s in steps if s.eqn.prim.name == NAME]
    assert len(found) == 1 and found[0].results[0] is not None
    assert sum(s.eqn.prim.name.startswith("dot_general") for s in steps) == 3


def test_what_is_computed_again_is_known_as_such():
    """A recomputation with unused results must not be merged with the original."""
    nested = bf.checkpoint(lambda x, w, labels: bnp.sin(bf.checkpoint(lambda x, w: loss(x, w, labels))(x, w)))
    f = bf.jit(bf.value_and_grad(nested, argnums=(0, 1))).trace(X, W, LABELS)
    keep = lambda e: LinearSoftmax().matches(e) and e.outvars[0].__class__ is not DropVar
    jaxpr = simplify(select_variants(f.jaxpr, Library("sm_90a"))[0])
    planning = Planning(jaxpr, (False,) * 3, TARGET, dispatch.Library("sm_90a").planned, keep)
    found = [e for e in planning.jaxpr.eqns if LinearSoftmax().matches(e)]
    assert found and all(planning.origins.get(e) for e in found)


def test_scratch_is_planned():
    schedule = planned(with_gradients(chunk=256), X, W, LABELS)
    found = [s.scratch for s in schedule.steps if isinstance(s, OpaqueStep) and s.eqn.prim.name == NAME]
    assert all(schedule.place(v) is not None for v in found)
    of_tiles, of_rows, of_bands = 2 * 256, 256, 1  # numbers
    assert {schedule.values[v].nbytes for v in found} == {4 * (2 * of_tiles + 2 * of_rows + of_bands)}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100a"])
def test_other_devices_read_their_logits(arch):
    steps = planned(with_gradients(), X, W, LABELS, arch=arch).steps
    assert not any(isinstance(s, OpaqueStep) and s.eqn.prim.name == NAME for s in steps)


def test_a_value_alone_multiplies_once():
    steps = planned(loss, X, W, LABELS).steps
    assert [s.eqn.prim.name for s in steps if isinstance(s, OpaqueStep)] == ["dot_general"]


def test_nobody_reads_or_keeps_logits():
    """One array is as large as the logits: the kernel writes it, two matmuls read it."""
    schedule = planned(with_gradients(), X, W, LABELS)
    sizes = [getattr(v, "aval", None) for v in schedule.values]
    assert sum(a is not None and a.size >= N * V for a in sizes) == 1
    kernels = [s for s in schedule.steps if not isinstance(s, OpaqueStep)]
    assert all(b.size < N * V for s in kernels for b in s.kernel.buffers)


# -- the definition ----------------------------------------------------------------------------------


def in_products(x, weight, labels, shares, **how):
    """The loss in its form for devices: losses, and gradients of x and weight."""
    how = vocabulary_loss_call.How(chunk=len(labels) // 2, **how)
    args = [bnp.asarray(a) for a in (x, weight, labels, shares)]
    of = {"how": how, "wanted": (True, True, False), "size": how.chunk, "dtype": args[0].dtype}
    return [np.asarray(a, np.float64) for a in vocabulary_loss_call._in_products(*args, **of)]


def exactly(x, weight, labels, shares):
    t = x.astype(np.float64) @ weight.astype(np.float64).T
    t = t - t.max(1, keepdims=True)
    p = np.exp(t) / np.exp(t).sum(1, keepdims=True)
    rows = np.arange(len(labels))
    slope = (p - (labels[:, None] == np.arange(len(weight)))) * shares[:, None].astype(np.float64)
    losses = np.log(np.exp(t).sum(1)) - t[rows, labels]
    return losses, slope @ weight.astype(np.float64), slope.T @ x.astype(np.float64)


@pytest.mark.parametrize("far", [0, 30, 60, 1000])
@pytest.mark.parametrize("features", [0, 1])
def test_the_definition_is_exact_at_any_loss(far, features):
    """In float32, where rounding hides nothing: losses from near 0 to thousands."""
    rng = np.random.default_rng(far)
    n, classes, width = 32, 50, 8
    x = rng.standard_normal((n, width)).astype(F32)
    weight = rng.standard_normal((classes, width)).astype(F32)
    labels = rng.integers(0, classes, n).astype(np.int32)
    way = weight[labels] / (weight[labels] ** 2).sum(1, keepdims=True)
    x[::2] -= far * way[::2]  # so far below other logits
    x[1::2] += 30 * way[1::2]  # above them
    shares = rng.random(n).astype(F32)
    of = {"features": features, "low": np.dtype(F32)}
    got = in_products(x, weight if features else weight.T, labels, shares, **of)
    want = exactly(x, weight, labels, shares)
    assert (want[0].max() > far * 0.9) and want[0].min() < 0.01
    for g, e in zip(got, (want[0], want[1], want[2] if features else want[2].T), strict=True):
        np.testing.assert_allclose(g, e, rtol=2e-5, atol=2e-6 * np.abs(e).max())


@pytest.mark.parametrize("size", [1e2, 2e3, 9e3, 5e4, 1e6])
def test_large_logits_in_bfloat16(size):
    """Their rounding exceeds the range of exponentials, with the class on top or not."""
    rng = np.random.default_rng(0)
    n, classes, width = 64, 40, 64
    weight = rng.standard_normal((classes, width)).astype(BF16)
    labels = rng.integers(0, classes, n).astype(np.int32)
    way = weight.astype(F32)[np.where(np.arange(n) % 4, labels, (labels + 1) % classes)]
    scale = size * (1 + rng.random((n, 1)).astype(F32)) / (way**2).sum(1, keepdims=True)
    x = (way * scale).astype(BF16)
    shares = np.ones(n, F32)
    how = vocabulary_loss_call.How(chunk=n)
    of = {"how": how, "wanted": (True, True, False), "size": n, "dtype": np.dtype(BF16)}
    args = [bnp.asarray(a) for a in (x, weight, labels, shares)]
    got, want = (
        [np.asarray(a, np.float64) for a in form(*args, **of)]
        for form in (vocabulary_loss_call._in_products, vocabulary_loss_call._whole)
    )
    for g, e in zip(got, want, strict=True):
        np.testing.assert_allclose(g, e, rtol=0.02, atol=0.01 * np.abs(e).max() + 1e-5)
    assert (got[0] >= 0).all()
    top = np.arange(n) % 4 != 0  # rows whose class is above all others, or nearly
    np.testing.assert_allclose(got[0][top], want[0][top], rtol=0.02, atol=1e-4)


def test_what_does_not_count_and_what_is_no_class():
    x, weight, labels = X[:8].copy(), W.copy(), LABELS[:8].copy()
    shares = np.array([1, 0, 1, 0, 1, 1, 1, 1], F32)
    x[1], x[3] = np.nan, np.inf
    losses, of_x, of_weight = in_products(x, weight, labels, shares, low=np.dtype(F32))
    keep = shares != 0
    want = exactly(x[keep], weight, labels[keep], shares[keep])
    np.testing.assert_allclose(losses[keep], want[0], rtol=1e-5)
    np.testing.assert_allclose(of_x[keep], want[1], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(of_weight, want[2], rtol=1e-3, atol=1e-5)
    assert not of_x[~keep].any()
    labels[2], labels[5] = V, -1
    losses, of_x, of_weight = in_products(X[:8], weight, labels, shares, low=np.dtype(F32))
    wrong = np.isin(np.arange(8), (2, 5))
    assert (np.isnan(losses) == wrong).all() and (np.isnan(of_x).all(1) == wrong).all()
    assert np.isnan(of_weight).all()  # as in the other form


# -- the kernels -------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize(
    "product",
    [SoftmaxGemm(32768, 50304, 768, True), SoftmaxGemm(512, 1000, 64, False)],
)
def test_it_compiles_without_spills(product):
    text = source(product)
    made = nvrtc.build(text, "sm_90a", ENTRY)
    found = resources(made)
    assert {name: r.spill_stores for name, r in found.items()} == {ENTRY: 0, SETTLE: 0}
    assert "erialized" not in made.log, made.log  # as products are that wait for each other
    assert moved_registers(text, product.threads) <= found[ENTRY].registers * product.threads


class Case:
    """Operands with rows that are far off, that do not count, or without a class."""

    def __init__(self, product, seed=0):
        p = self.product = product
        rng = np.random.default_rng([p.m, p.n, p.k, seed])
        normal = lambda *shape: rng.standard_normal(shape).astype(F32)
        x, weight = normal(p.m, p.k) * 4 / np.sqrt(p.k, dtype=F32), normal(p.n, p.k)
        self.classes = rng.integers(0, p.n, p.m).astype(np.int32)
        self.far = np.arange(p.m) % 61 == 5
        self.far[: p.m // 2] = False  # of half of the bands none, where there are several
        self.classes[self.far] = 3
        weight[3], weight[7] = -8 * weight[7] / np.linalg.norm(weight[7]), weight[7] / 8
        x[self.far] += 200 * weight[7] / np.linalg.norm(weight[7])
        self.classes[::37] = -1
        self.classes[1::53] = p.n - 1
        self.far &= self.classes == 3
        steep = (
            np.arange(p.m) % 29 == 3
        )  # rows whose class is far above the others: its logit is rounded by tens
        steep[: p.m // 2] = False
        steep &= (self.classes > 7) & ~self.far
        x[steep] = (
            2e4 * weight[self.classes[steep]] / (weight[self.classes[steep]] ** 2).sum(1, keepdims=True)
        )
        self.live = rng.random(p.m) < 0.9
        self.live[self.far.argmax()] = True
        self.a, b = x.astype(BF16), weight.astype(BF16)
        self.b = b if p.by_rows else np.ascontiguousarray(b.T)
        t = self.a.astype(np.float64) @ b.astype(np.float64).T
        self.near = np.where(self.classes < 0, t.max(1), t[np.arange(p.m), self.classes]).astype(F32)
        self.t = t.astype(BF16).astype(np.float64)
        self.slopes = np.full((p.m, p.n), np.nan, BF16)
        self.losses, self.factors, self.shift, self.own = (np.full(p.m, np.nan, F32) for _ in range(4))
        self.sums, self.tops = (np.full((p.columns, p.m), np.nan, F32) for _ in range(2))
        self.flags = np.full(p.bands, -1, np.int32)

    def check(self):
        p, rows = self.product, np.arange(self.product.m)
        hit = self.classes[:, None] == np.arange(p.n)
        others = np.where(hit, -np.inf, self.t)
        known = self.classes >= 0
        own = np.where(known, self.t[rows, self.classes], self.near)
        near = self.near.astype(np.float64)
        top = np.maximum(others.max(1), own)
        far = known & self.live & ((top > near + FAR) | (own < near - BELOW))
        assert far.any() and not far.all() and self.far.any()
        np.testing.assert_array_equal(self.flags != 0, far.reshape(p.bands, -1).any(1))
        if p.bands > 1:
            assert not self.flags.all()
        # what is rounded in another order may be the next number of bfloat16
        np.testing.assert_allclose(self.shift, np.where(far, top, self.near), rtol=2**-8)
        np.testing.assert_allclose(self.own[known], self.t[rows, self.classes][known], rtol=2**-7)
        shift = self.shift.astype(np.float64)
        exact = np.exp((others - shift[:, None]).clip(max=700))  # beyond are rows that do not count
        above = np.where(known, self.own, self.near).astype(np.float64) - shift
        total = exact.sum(1) + np.exp(above)
        count = self.live
        np.testing.assert_allclose(self.factors[count], 1 / total[count], rtol=0.02)
        np.testing.assert_allclose(self.losses[count], (np.log(total) - above)[count], rtol=1e-3, atol=0.02)
        # both are of the same sums, to rounding: of losses, which are in the hundreds, that is 1e-5
        np.testing.assert_allclose(
            np.exp(self.losses.astype(np.float64) + above)[count] * self.factors[count], 1, rtol=5e-4
        )
        got = self.slopes.astype(np.float64)
        want = np.where(hit, -exact.sum(1, keepdims=True), exact)
        want[~self.live] = 0
        slack = np.expm1((np.abs(others) * 2.0**-7).clip(0, 80)) + 2**-8  # of logits that are the next number
        wrong = np.abs(got - want) > np.where(hit, 0.03, slack) * np.abs(want) + 1e-30
        assert not wrong.any(), np.argwhere(wrong)[:5]
        close = np.abs(got - want) <= 2**-8 * np.abs(want) + 1e-30
        assert close.mean() > 0.98  # the others are as logits should be


@pytest.mark.sampled(1)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("columns", [2 * COLUMNS, COLUMNS + 40])
def test_the_kernels_emulated(columns, by_rows, eager, emulator):
    """With a block in place of a cluster, which has tiles of two bands."""
    case = Case(SoftmaxGemm(2 * ROWS, columns, 192, by_rows, cluster=1))
    run_emulated(case, emulator, eager)
    case.check()


def run_emulated(case, emulator, eager=False):
    p = case.product
    boxes = p.boxes(2 * case.a.shape[1], 2 * case.b.shape[1])
    maps = [("TensorMap", tensor_map(box, of)) for box, of in zip(boxes, (case.a, case.b), strict=True)]
    ints, floats, bits = "const int *", "float *", lambda x: x.view(np.uint16)
    known = [(ints, case.classes), ("const unsigned char *", case.live.view(np.uint8))]
    nothing = np.zeros(1, np.int64)  # a null pointer by value
    text, how = source(p), (p.threads, p.shared_bytes, (False, not p.by_rows), eager)
    for second in (0, 1):
        shift, flags = (
            (case.shift, (ints, case.flags)) if second else (case.near, ("const int *const", nothing))
        )
        product = [*maps, *known, ("const float *", shift), flags, ("element *", bits(case.slopes))]
        product += [(floats, a) for a in (case.own, case.sums, case.tops)]
        emulator.launch(text, instructions(p), "bfloat16", ENTRY, product, 1, *how)
        settle = [(floats, a) for a in (case.sums, case.tops, case.near)] + known
        settle += [(floats, case.own), ("element *", bits(case.slopes))]
        settle += [(floats, a) for a in (case.losses, case.factors, case.shift)]
        settle += [("int *", case.flags), ("const int", np.array(second, np.int32).tobytes())]
        emulator.launch(text, instructions(p), "bfloat16", SETTLE, settle, p.bands, p.settlers, *how[1:])


ON_A_DEVICE = [  # m, n, k; the last ones have several tiles for each cluster, and more bands than take turns
    (256, 192, 64), (512, 1000, 128), (1024, 50304, 768), (8192, 4096, 192), (4608, 3080, 320),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("sizes", ON_A_DEVICE)
def test_on_a_device(sizes, by_rows):
    import cupy

    case = Case(SoftmaxGemm(*sizes, by_rows))
    words = {np.dtype(BF16): np.uint16, np.dtype(bool): np.uint8}
    view = lambda a: a.view(words.get(a.dtype, a.dtype))
    names = "a", "b", "classes", "live", "near", "slopes", "losses", "factors"
    names += "sums", "tops", "own", "shift", "flags"
    there = {n: cupy.asarray(view(getattr(case, n))) for n in names}
    at = [there[n].data.ptr for n in names]
    rows = case.a.shape[1], case.b.shape[1]
    kernel, stream = softmax_gemm.Kernel(case.product, rows, 0), cupy.cuda.get_current_stream()
    kernel(at[:2], at[2:5], at[5:8], at[8:], stream)
    first = there["slopes"].get()
    kernel(at[:2], at[2:5], at[5:8], at[8:], stream)
    np.testing.assert_array_equal(there["slopes"].get(), first)
    for n in names[5:]:
        getattr(case, n)[...] = there[n].get().view(getattr(case, n).dtype)
    case.check()
