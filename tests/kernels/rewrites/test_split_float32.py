"""Float32 matmuls in parts: plans, values, costs and accuracy."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from benchmarks.suites import float32_errors
from blufunc import errors, lax, nn
from blufunc.config import config
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cuda import program as cuda_program
from blufunc.kernels.backends.cuda.library import matmul as cuda_product
from blufunc.kernels.backends.cuda.program import Draft
from blufunc.kernels.cost import cost_of
from blufunc.kernels.gemm_layout import chunks_of
from blufunc.kernels.ops.gemm import dot_promoted_p
from blufunc.kernels.precision import ALGORITHMS, ProductShape, resolved
from blufunc.kernels.rewrites import split_float32
from tests.emulation import fake_cuda
from tests.kernels.backends.cuda.test_program import on, same, uniform
from tests.kernels.rewrites.test_gemm_epilogue import draft

X3, SCALED = "F16_F16_F32_X3", "F16_F16_F32_SCALED"
DOT, SUM, PROMOTED, KERNEL = "dot_general", "dot_general+accumulate", "dot_general+promoted", "kernel"
DEVIATION = {X3: 2e-6, SCALED: 2.0**-10}
"""Of an element, relative to the sum of the absolute values of its terms."""


def product(precision):
    return lambda x, w: bnp.matmul(x, w, precision=precision)


def by_rows(precision):
    """Of operands whose contracted axis is the last."""
    return lambda x, w: bnp.matmul(x, w.T, precision=precision)


def columns(precision):
    """Of operands whose contracted axis is the first, as in the gradient of a weight."""
    return lambda x, w: bnp.einsum("km,kn->mn", x, w, precision=precision)


X, W = uniform(24, 40), uniform(40, 16)

PLANS = {  # the steps, and the function
    "in IEEE arithmetic": ([DOT], product("highest"), X, W),
    "in TF32": ([DOT], product("TF32_TF32_F32"), X, W),
    # rows find their scale in the kernel that splits them; for columns, two kernels do before
    "scaled": ([KERNEL] * 4 + [DOT, SUM, DOT, KERNEL], product(X3), X, W),
    "scaled along rows": ([KERNEL] * 2 + [DOT, SUM, DOT, KERNEL], lambda x, w: product(X3)(x, w.T), X, W.T.copy()),
    "one part": ([KERNEL] * 4 + [DOT, KERNEL], product(SCALED), X, W),
    "one part, scaled along rows": (
        [KERNEL] * 2 + [DOT, KERNEL], lambda x, w: product(SCALED)(x, w.T), X, W.T.copy()
    ),
    "one part of columns": ([KERNEL] * 6 + [DOT, KERNEL], columns(SCALED), X.T.copy(), W),
    "one part, long sums": (
        [KERNEL] * 2 + [DOT, KERNEL], lambda x, w: product(SCALED)(x, w.T), uniform(2, 9000), uniform(3, 9000)
    ),
    "between kernels, one part": (
        [KERNEL, KERNEL, DOT, KERNEL],
        lambda x, w: nn.softmax(product(SCALED)(nn.layer_norm(x, X[0], X[0]), w.T)), X, W.T.copy(),
    ),
    "a member of the enumeration": (
        [KERNEL] * 4 + [DOT, SUM, DOT, KERNEL], product(lax.DotAlgorithmPreset.F16_F16_F32_X3), X, W
    ),
    "of two precisions the more exact": ([DOT], product((X3, "highest")), X, W),
    "long sums": ([KERNEL, KERNEL, DOT, SUM, PROMOTED, KERNEL], by_rows(X3), uniform(8, 1025), uniform(8, 1025)),
    "very long sums, of batches": (
        [KERNEL, KERNEL, PROMOTED, PROMOTED, PROMOTED, KERNEL],
        lambda x, w: bnp.einsum("bmk,bnk->bmn", x, w, precision=X3), uniform(1, 2, 8193), uniform(1, 2, 8193),
    ),
    # what reads the result adds up the partial sums, too; where some terms are left, these are products of their own
    "partial sums": (
        [KERNEL, KERNEL, DOT, SUM, PROMOTED, KERNEL], by_rows(X3), uniform(8, 8192), uniform(8, 8192)
    ),
    "partial sums, and the rest": (
        [KERNEL, KERNEL, DOT, DOT, SUM, DOT, SUM, PROMOTED, KERNEL],
        by_rows(X3), uniform(8, 8200), uniform(8, 8200),
    ),
    "one operand": ([KERNEL, DOT, SUM, DOT, KERNEL], lambda x: product(X3)(x, x.T), X),
    # what computes an operand, its scale and its parts, and what reads the result, are one kernel each
    "between kernels": (
        [KERNEL, KERNEL, DOT, SUM, DOT, KERNEL],
        lambda x, w: nn.softmax(product(X3)(nn.layer_norm(x, X[0], X[0]), w.T)), X, W.T.copy(),
    ),
    "bfloat16": ([DOT], product(X3), X.astype(dtypes.bfloat16), W.astype(dtypes.bfloat16)),
    "float64": ([DOT], product(X3), from_numpy(X.astype(np.float64)), from_numpy(W.astype(np.float64))),
    "complex64": ([DOT], product(X3), X.astype(np.complex64), W.astype(np.complex64)),
    "float32 of bfloat16": (
        [DOT], lambda x, w: bnp.matmul(x, w, precision=X3, preferred_element_type="float32"),
        X.astype(dtypes.bfloat16), W.astype(dtypes.bfloat16),
    ),
    "nothing": ([DOT], product(X3), uniform(3, 0), uniform(0, 4)),
    "small, by whatever is quickest": ([DOT], product("float32_tc"), X, W),
    "small, as exact as TF32": ([DOT], product("high"), X, W),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_steps(name, cuda):
    steps, fun, *args = PLANS[name]
    made = draft(fun, *args)[1]
    assert sorted(made) == sorted(steps)


def test_bytes(cuda):
    """Operands are read once to be scaled and split; later sums read the previous one."""
    m, k, n = 64, 96, 32
    operands, results, roots = 4 * (m * k + k * n), 4 * m * n, 4 * (m + n)
    parts = operands  # two of 16 bits
    made, _ = draft(by_rows(X3), uniform(m, k), uniform(n, k))
    splits = operands + parts + roots
    products = 3 * (parts // 2) + 4 * results
    assert cost_of(made).bytes == splits + products + 3 * results + roots


CASES = {
    "matrices": product,
    "transposed": lambda p: lambda x, w: bnp.einsum("km,nk->mn", x.T, w.T, precision=p),
    "a vector": lambda p: lambda x, w: bnp.matmul(x[0], w, precision=p),
    "batches": lambda p: lambda x, w: bnp.einsum(
        "ibk,jbk->bij", x.reshape(6, 4, 40), w.T.reshape(8, 2, 40).repeat(2, 1), precision=p
    ),
    "several axes": lambda p: lambda x, w: bnp.einsum(
        "mab,abn->mn", x.reshape(24, 5, 8), w.reshape(5, 8, 16), precision=p
    ),
    "transposed batches": lambda p: lambda x, w: bnp.einsum(
        "bhik,bhjk->bhij",
        x.reshape(2, 3, 4, 40).transpose(0, 2, 1, 3), w.T.reshape(2, 2, 4, 40).transpose(0, 2, 1, 3), precision=p
    ),
    "free axes exchanged": lambda p: lambda x, w: bnp.einsum(
        "mnk,kj->mnj", x.reshape(6, 4, 40).transpose(1, 0, 2), w, precision=p
    ),
    "outer": lambda p: lambda x, w: bnp.einsum("i,j->ij", x[0], w[:, 0], precision=p),
    "inner": lambda p: lambda x, w: bnp.einsum("i,i->", x[0], w[:, 0], precision=p),
    "vmap": lambda p: lambda x, w: bf.vmap(lambda row: bnp.matmul(row, w, precision=p))(x),
    "vmap of both": lambda p: lambda x, w: bf.vmap(product(p))(
        x.reshape(4, 6, 40), w.reshape(40, 4, 4).transpose(1, 0, 2)
    ),
    "a loop": lambda p: lambda x, w: lax.scan(
        lambda c, _: (bnp.matmul(bnp.matmul(c, w, precision=p), w.T, precision=p), None), x, None, length=2
    )[0],
    "contracted axes first": lambda p: lambda x, w: columns(p)(x.T.copy(), w),
    "contracted axes first, several": lambda p: lambda x, w: bnp.einsum(
        "abm,ban->mn", x.T.reshape(5, 8, 24), w.reshape(8, 5, 16), precision=p
    ),
    "contracted axes first, batches": lambda p: lambda x, w: bnp.einsum(
        "bkm,kbn->bmn", x.reshape(3, 20, 16), w.reshape(20, 2, 16)[:, [0, 1, 0]], precision=p
    ),
    "contracted axes around the free one": lambda p: lambda x, w: bnp.einsum(
        "amb,abn->mn", x.reshape(5, 24, 8), w.reshape(5, 8, 16), precision=p
    ),
    "gradients": lambda p: lambda x, w: bf.vjp(lambda x, w: bnp.tanh(product(p)(x, w)), x, w)[1](x @ w),
    "checkpointed gradients": lambda p: lambda x, w: bf.grad(
        lambda w: bf.checkpoint(lambda x, w: bnp.tanh(product(p)(x, w)))(x, w).sum()
    )(w),
    "tangents": lambda p: lambda x, w: bf.jvp(product(p), (x, w), (x + 1, w * 2)),
}  # fmt: skip


@pytest.mark.parametrize("precision", ALGORITHMS)
@pytest.mark.parametrize("name", CASES)
def test_values(name, precision, cuda, fake):
    fun = CASES[name](precision)
    want = bf.jit(CASES[name]("highest"))(from_numpy(X.astype(np.float64)), from_numpy(W.astype(np.float64)))
    got = bf.jit(fun)(*on(cuda, X, W))
    for w, g in zip(bf.tree.leaves(want), bf.tree.leaves(got), strict=True):
        assert g.dtype == np.float32
        np.testing.assert_allclose(g, w, rtol=0, atol=DEVIATION[precision] * 40 * max(1, np.abs(w).max()))
    if name != "outer":  # elementwise: it sums nothing
        assert fake.products >= ALGORITHMS[precision].parts * (ALGORITHMS[precision].parts + 1) // 2


def splits(fun, *args):
    """The number of splits of operands in a function, with ``F16_F16_F32_X3``."""
    jaxpr = simplify(bf.jit(fun).trace(*args).jaxpr)
    made = split_float32.with_split_products(jaxpr, {}, lambda *sizes: True)
    return sum(v.aval.dtype == dtypes.float16 for e in made.eqns for v in e.outvars) // 2


def test_parts_serve_all_near_products(cuda):
    """Matmuls that contract the same axes share parts, up to ``NEAR`` others between."""
    p, n = product(X3), split_float32.NEAR
    assert splits(lambda x, w: p(x, w) + p(x, w * 2), X, W) == 3
    assert splits(lambda x: (p(x, x.T), p(x.T, x)), X) == 2
    assert splits(lambda x, w, g: bf.vjp(p, x, w)[1](g), X, W, uniform(24, 16)) == 4

    def apart(count):
        def f(x, w):
            first = p(x, w)
            for _ in range(count):
                first = p(first, first.T)
            return first, p(w.T, w)

        return f

    assert splits(apart(n - 1), W.T.copy(), W) == 2 + (n - 1)
    assert splits(apart(n), W.T.copy(), W) == 2 + n + 1


def test_matmuls_along_rows_and_columns_share_magnitudes(cuda):
    """Of a gradient, say: its absolute values are one equation."""
    f = lambda x, w, y: (by_rows(SCALED)(x, w), columns(SCALED)(x, y))
    schedule, _ = draft(f, uniform(24, 40), uniform(16, 40), uniform(24, 8))
    magnitudes = [
        e for e in schedule.jaxpr.eqns if e.prim.name == "abs" and e.outvars[0].aval.shape == (24, 40)
    ]
    assert len(magnitudes) == 1


@pytest.mark.parametrize("precision", [SCALED, X3])
def test_batch_axes_behind_others_need_no_further_kernels(precision, cuda):
    """One pass finds magnitudes and parts, both with the batch first."""
    x, y = uniform(2, 24, 3, 16), uniform(2, 40, 3, 16)
    of = lambda equation, *args: draft(lambda x, y: bnp.einsum(equation, x, y, precision=precision), *args)[1]
    first = of("bhqd,bhkd->bhqk", x.swapaxes(1, 2).copy(), y.swapaxes(1, 2).copy())
    assert of("bqhd,bkhd->bhqk", x, y) == first


def test_autocast_is_as_it_was(cuda):
    wide, split = (bf.autocast(product(p)) for p in (None, X3))
    assert draft(split, X, W)[1] == draft(wide, X, W)[1]


def test_on_a_cpu_it_is_float32():
    for precision in (*lax.DotAlgorithmPreset, "float32_tc"):
        np.testing.assert_array_equal(bf.jit(product(precision))(X, W), bf.jit(product(None))(X, W))


def test_the_flag_serves_products_that_ask_for_none(cuda, monkeypatch):
    monkeypatch.setattr(config, "matmul_precision", X3)
    assert draft(product(None), X, W)[1].count(DOT) == 2
    assert draft(product("highest"), X, W)[1] == [DOT]


def test_a_large_product_is_split_for_float32_tc(cuda):
    shapes = bf.ShapeDtypeStruct((32768, 768), np.float32), bf.ShapeDtypeStruct((768, 3072), np.float32)
    assert draft(product("float32_tc"), *shapes)[1] == draft(product(X3), *shapes)[1]


PAYS = {  # batch, m, n, k
    (1, 32768, 768, 768): True, (1, 768, 3072, 32768): True, (1, 8192, 50304, 768): True, (1, 2048, 2048, 2048): True,
    (1, 32768, 1, 768): False, (1, 1, 50304, 768): False, (384, 1024, 1024, 64): False, (1, 64, 64, 64): False,
}  # fmt: skip


@pytest.mark.parametrize("sizes", PAYS)
def test_where_it_pays(sizes):
    assert cuda_product.split_pays(X3, ProductShape(*sizes)) == PAYS[sizes]


def test_replaced_products_are_left_alone(cuda, monkeypatch):
    monkeypatch.setattr(split_float32, "is_replaced", lambda prim, what: prim is dot_general_p)
    assert draft(product(X3), X, W)[1] == [DOT]


def test_replaced_transposes_are_not_read_through(cuda):
    with bf.override(lax.transpose_p, impl=lambda x, permutation: 2 * x.transpose(permutation)):
        got = bf.jit(lambda x, w: product(X3)(x, w.T))(*on(cuda, X, W.T.copy()))
    same(got, 2 * X @ W, 1e-4)


# -- numbers -----------------------------------------------------------------------------------------

HUGE, TINY = np.float32(3.4e38), np.float32(1e-42)
SPECIAL = {  # rows of the lhs, columns of the rhs; results that are finite agree to the algorithm's deviation
    "infinities": ([[np.inf, 1, 2], [1, -np.inf, 0], [1, 2, 3]], [[1, 2, 0], [1, 1, 1], [-1, 2, 3]]),
    "infinities and ones": ([[np.inf, 1, 1], [-np.inf, 1, 1]], [[1, 1, 1], [-1, 1, 1]]),
    "NaN": ([[np.nan, 1, 2], [1, 2, 3]], [[1, 2, 3], [4, 5, np.nan]]),
    "zeros": ([[0, 0, 0], [0, -0.0, 1]], [[0, 0, 0], [1, 2, 0]]),
    "the largest": ([[HUGE, -HUGE, HUGE], [HUGE, 0, 1]], [[0.5, 0.25, 0.125], [1, 1, 1]]),
    "overflow": ([[HUGE, HUGE, 0]], [[2, 2, 2], [-2, -2, 0]]),
    "large rows by small columns": ([[1e38, 2e38, 3e38], [1, 2, 3]], [[1e-30, 1e-30, 2e-30], [1, 2, 3]]),
}


@pytest.mark.parametrize("precision", ALGORITHMS)
@pytest.mark.parametrize("name", SPECIAL)
def test_special_numbers(name, precision, cuda):
    x, y = (np.asarray(v, np.float32) for v in SPECIAL[name])
    with np.errstate(all="ignore"):
        want = (x.astype(np.float64) @ y.T.astype(np.float64)).astype(np.float32)
        bound = np.abs(x).astype(np.float64) @ np.abs(y.T).astype(np.float64)
    got = np.asarray(bf.jit(lambda x, y: product(precision)(x, y.T))(*on(cuda, x, y)))
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    assert (np.abs(got[finite] - want[finite]) <= DEVIATION[precision] * bound[finite]).all()


SCALES = {  # powers of two of rows, of columns, of the contracted axis there and back, and whether the bound holds
    "as they are": (0, 0, 0, True),
    "rows and columns": (60, 40, 0, True),
    "small rows": (-120, 100, 0, True),
    "subnormal rows": (-136, 120, 0, True),
    "contracted, a little": (0, 0, 12, True),
    "contracted, a lot": (0, 0, 30, False),  # small elements of a row next to large ones
}


@pytest.mark.parametrize("name", SCALES)
def test_scales(name, cuda):
    rows, columns, contracted, holds = SCALES[name]
    rng = np.random.default_rng(1)
    draw = lambda bits, *shape: np.exp2(
        rng.integers(-bits, bits + 1, shape) if rows >= 0 else np.full(shape, bits)
    )
    inner = draw(contracted, 256)
    x = (rng.standard_normal((8, 256)) * draw(rows, 8, 1) * inner).astype(np.float32)
    y = (rng.standard_normal((256, 8)) / inner[:, None] * draw(columns, 1, 8)).astype(np.float32)
    exact, bound = x.astype(np.float64) @ y, np.abs(x).astype(np.float64) @ np.abs(y)
    got = np.asarray(bf.jit(product(X3))(*on(cuda, x, y)))
    assert (np.abs(got - exact) <= 5e-7 * bound).all() == holds


OPERANDS = ["normal", "rows scaled by 2^±60, columns by 2^±40", "a loss's gradient"]


@pytest.mark.parametrize("operands", OPERANDS)
def test_errors_beside_sgemm(operands):
    """By a model of tensor cores."""
    found = float32_errors.errors_of(operands, 3072, (X3, "SGEMM", "TF32", "F16 X3, one chunk"))
    assert found[X3]["worst"] <= found["SGEMM"]["worst"]
    assert found["F16 X3, one chunk"]["worst"] > 2 * found["SGEMM"]["worst"]  # what chunks are for
    assert found["TF32"]["rms"] > 100 * found["SGEMM"]["rms"]


@pytest.mark.gpu
@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize("terms", [32768, 33000])  # partial sums of all terms, and some terms more
def test_errors_on_a_device(operands, terms):
    """Where tensor cores cut off, at many terms: as the model has it, or less."""
    rng = np.random.default_rng([terms, len(operands)])
    x, y = (np.ascontiguousarray(v, np.float32) for v in float32_errors.OPERANDS[operands](rng, terms))
    device = bf.devices("cuda")[0]
    got = np.asarray(bf.jit(product(X3))(*on(device, x, y)), np.float64)
    exact, bound = x.astype(np.float64) @ y, np.abs(x).astype(np.float64) @ np.abs(y)
    model = float32_errors.errors_of(operands, terms, [X3])[X3]
    assert (np.abs(got - exact) / bound).max() <= 2 * model["worst"]


def test_an_exponential_is_exact_where_its_remainder_is_kept(cuda):
    """16 bits are stored, but of what 16 bits leave too."""
    source = lambda f: Draft(bf.jit(f).trace(X, W).jaxpr, (False, False), "sm_90").source()
    rounded = source(lambda x, w: bnp.exp(x).astype("bfloat16"))
    split = source(lambda x, w: product(X3)(bnp.exp(x), w))
    assert " ptx_exp(" in rounded and " bf_exp(" not in rounded
    assert " ptx_exp(" not in split and " bf_exp(" in split


# -- chunks ------------------------------------------------------------------------------------------

CHUNKS = {  # terms and the most in a chunk: the sizes
    (512, 512): [512], (513, 512): [320, 193], (768, 512): [384, 384], (3072, 512): [512] * 6, (1000, 100): [100] * 10,
    (5, 2): [2, 2, 1], (50304, 8192): [7232] * 6 + [6912],
}  # fmt: skip


@pytest.mark.parametrize("terms, most", CHUNKS)
def test_chunks(terms, most):
    made = chunks_of(terms, most)
    assert [size for _, size in made] == CHUNKS[terms, most]
    assert [start for start, _ in made] == list(np.cumsum([0, *CHUNKS[terms, most][:-1]]))


@pytest.mark.parametrize(
    "equation", ["mk,kn->mn", "km,kn->mn", "mk,nk->mn", "km,nk->mn", "bmk,bkn->bmn", "mbk,nbk->bmn"]
)
def test_chunks_are_calls_of_the_library(equation, cuda, fake):
    """Of operands either way round; each adds to what those before it wrote."""
    sizes = {"m": 8, "n": 16, "k": 1100, "b": 2}
    left, right = equation.split("->")[0].split(",")
    x, y = (uniform(*[sizes[c] for c in part], seed=i) for i, part in enumerate((left, right)))
    f = lambda x, y: bnp.einsum(equation, x, y, precision=X3)
    same(bf.jit(f)(*on(cuda, x, y)), np.einsum(equation, x, y), 1e-4)
    assert fake.products == 2 + len(chunks_of(1100, 512)) and len(fake.epilogues) == 3


def side_by_side(monkeypatch, count, unit):
    """Let all matmuls have ``count`` partial sums of a multiple of ``unit`` terms."""
    monkeypatch.setattr(split_float32, "UNIT", unit)
    target = replace(cuda_program.TARGET, partial_sums=lambda shape, chunk: count)
    monkeypatch.setattr(cuda_program, "TARGET", target)


PARTIAL_SUMS = {  # m, n, k: partial sums
    (768, 3072, 32768): 4, (768, 2304, 32768): 4, (768, 768, 32768): 8, (2048, 768, 50304): 6, (64, 64, 1 << 20): 8,
    (768, 3072, 32771): 4, (768, 3072, 20 * 64 * 3): 3,  # four would leave terms over
    (32768, 768, 3072): 1, (32768, 3072, 768): 1, (50304, 768, 2048): 1,  # a chunk fills the device
    (768, 768, 2047): 1, (8, 8, 5): 1,  # there are not enough chunks
}  # fmt: skip


@pytest.mark.parametrize("sizes", PARTIAL_SUMS)
def test_how_many_partial_sums_there_are(sizes):
    m, n, k = sizes
    assert cuda_product.partial_sums(ProductShape(1, m, n, k), 512) == PARTIAL_SUMS[sizes]


DIVIDED = {  # the equation, and the axes of the operands and of the result of the first product: p partial sums
    "by rows": ("mk,kn->mn", ("mpk", "pkn", "pmn")),
    "both by rows": ("mk,nk->mn", ("mpk", "npk", "pmn")),
    "by columns": ("km,kn->mn", ("pkm", "pkn", "pmn")),
    "two axes": ("abm,abn->mn", ("pkm", "pkn", "pmn")),
    "two axes, the other way round": ("bam,ban->mn", ("pkm", "pkn", "pmn")),
    "two free axes": ("imk,kn->imn", ("impk", "pkn", "pimn")),
    "a vector": ("k,kn->n", ("pk", "pkn", "pn")),
    "two vectors": ("k,k->", ("pk", "pk", "p")),
    "axes in another order": ("abm,ban->mn", ("abm", "ban", "mn")),
    "axes apart": ("amb,abn->mn", ("amb", "abn", "mn")),
    "batches": ("imk,ikn->imn", ("imk", "ikn", "imn")),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("count, terms", [(2, 1280), (3, 1300), (5, 640), (4, 200)])
@pytest.mark.parametrize("name", DIVIDED)
def test_partial_sums(name, count, terms, cuda, fake, monkeypatch):
    """They are a batch of matmuls, if there are enough terms, on strided operands."""
    equation, axes = DIVIDED[name]
    size = terms // count // 64 * 64
    sizes = {"m": 8, "n": 16, "i": 3, "a": 4, "b": terms // 4, "k": terms}
    left, right = equation.split("->")[0].split(",")
    x, y = (uniform(*[sizes[c] for c in part], seed=i) for i, part in enumerate((left, right)))
    f = lambda x, y: bnp.einsum(equation, x, y, precision=X3)
    side_by_side(monkeypatch, count, 64)
    made, names = draft(f, x, y)
    first = next(s.eqn for s in made.steps if hasattr(s, "eqn"))
    divided = size > 0 and "p" in axes[0]
    found = {**sizes, "p": count, "k": size} if divided else sizes
    axes = axes if divided else (left, right, equation.split("->")[1])
    shapes = [v.aval.shape for v in (*first.invars, *first.outvars)]
    assert shapes == [tuple(found[c] for c in part) for part in axes]
    products = sum("dot_general" in n for n in names)
    assert products == 3 * (2 if divided and terms % (count * 64) else 1)
    exact = np.einsum(equation, x.astype(np.float64), y)
    bound = np.einsum(equation, np.abs(x), np.abs(y))
    got = np.asarray(bf.jit(f)(*on(cuda, x, y)))
    assert (np.abs(got - exact) <= DEVIATION[X3] / 4 * bound).all()
    assert fake.products >= products
    assert not divided or fake.launches == names.count(KERNEL)  # the library reads operands in place


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_values_of_partial_sums(name, count, cuda, fake, monkeypatch):
    """Under all transformations; and a program that runs again gives the same bits."""
    side_by_side(monkeypatch, count, 8)
    want = bf.jit(CASES[name]("highest"))(from_numpy(X.astype(np.float64)), from_numpy(W.astype(np.float64)))
    f = bf.jit(CASES[name](X3))
    first, second = f(*on(cuda, X, W)), f(*on(cuda, X, W))
    for w, g, a in zip(*map(bf.tree.leaves, (want, first, second)), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=DEVIATION[X3] * 40 * max(1, np.abs(w).max()))
        np.testing.assert_array_equal(g, a)


@pytest.mark.parametrize("name", SPECIAL)
def test_special_numbers_in_partial_sums(name, cuda, monkeypatch):
    """Each of two or three terms in a sum of its own."""
    side_by_side(monkeypatch, 2, 1)
    x, y = (np.asarray(v, np.float32) for v in SPECIAL[name])
    with np.errstate(all="ignore"):
        want = (x.astype(np.float64) @ y.T.astype(np.float64)).astype(np.float32)
    got = np.asarray(bf.jit(lambda x, y: product(X3)(x, y.T))(*on(cuda, x, y)))
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    np.testing.assert_allclose(got[finite], want[finite], rtol=1e-5)


def test_what_is_promoted_means_the_same_everywhere():
    numbers = {
        "dimension_numbers": (((1,), (0,)), ((), ())),
        "precision": None,
        "preferred_element_type": dtypes.float32,
    }
    x, w, y = X, W, uniform(24, 16)
    same(dot_promoted_p.impl(x, w, chunk=7, **numbers), x @ w)
    same(dot_promoted_p.impl(x, w, y, chunk=7, **numbers), x @ w + y)


def test_what_the_library_refuses_is_done_otherwise(fake, cuda, monkeypatch):
    def refuse(gemm, device, addresses):
        raise errors.UnsupportedError("no algorithm.")

    monkeypatch.setattr(fake_cuda.cublaslt, "Plan", refuse)
    x, y = uniform(4, 9000), uniform(9000, 4)
    same(bf.jit(product(X3))(*on(cuda, x, y)), x @ y, 1e-3)
    assert not fake.products


# -- what is said ------------------------------------------------------------------------------------


def test_wrong_names_are_errors():
    with pytest.raises(errors.ArgumentError, match=r"BF16_BF16_F32_X6.*\n.*float32_tc.*F16_F16_F32_X3"):
        bnp.matmul(X, W, precision="BF16_BF16_F32_X6")
    with pytest.raises(errors.ValueRangeError, match=r"float32_t.*\n.*'F16_F16_F32_X3'"):
        resolved("float32_t")


FROM_COARSE_TO_EXACT = (SCALED, "high", "TF32_TF32_F32", X3, "float32_tc", "highest")


@pytest.mark.parametrize("coarse, exact", list(itertools.pairwise(FROM_COARSE_TO_EXACT)))
def test_the_more_exact_of_two_precisions_counts(coarse, exact):
    """Of one part of float16, elements have the bits of TF32, but not its range."""
    assert resolved((coarse, exact)) == resolved((exact, coarse)) == exact


def test_every_algorithm_has_a_name_in_the_enumeration():
    plain = {"F32_F32_F32", "TF32_TF32_F32"}
    assert {p.value for p in lax.DotAlgorithmPreset} == {*ALGORITHMS, *plain}
