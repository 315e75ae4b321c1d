"""Float32 products as one product of float16: where they stand for TF32, what they share, and how exact they are."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from benchmarks import float32_errors
from blufunc.config import config
from blufunc.core.passes import simplify
from blufunc.kernels import cuda_product, split_products
from blufunc.kernels.cuda_draft import Draft
from blufunc.kernels.precisions import QUICKER_BY, ProductShape
from blufunc.kernels.steps import OpaqueStep
from tests.kernels import fake_cuda
from tests.kernels.test_cuda_program import on, uniform
from tests.kernels.test_epilogue import draft
from tests.kernels.test_split_products import SCALED, SHARED, SPECIAL, columns, product

UNIT = 2.0**-10
"""What two roundings to 11 bits lose of a product, and what float32 sums add to that, at most."""


@pytest.fixture
def fake(monkeypatch):
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def cuda(fake):
    return bf.devices("cuda")[0]


# -- where they are ------------------------------------------------------------------------------------

PAYS = {  # batch, m, n, k: whether it pays with contracted axes last, and first
    (1, 32768, 768, 768): (True, False), (1, 32768, 3072, 768): (True, True), (1, 8192, 50304, 768): (True, True),
    (1, 768, 3072, 32768): (True, False), (1, 4096, 16384, 32768): (True, True), (1, 8192, 8192, 8192): (True, True),
    (1, 32768, 1, 768): (False, False), (1, 1, 50304, 768): (False, False), (384, 1024, 1024, 64): (False, False),
    (384, 1024, 64, 1024): (False, False), (1, 512, 512, 512): (False, False),
}  # fmt: skip


@pytest.mark.parametrize("sizes", PAYS)
def test_where_it_pays(sizes):
    pays = [cuda_product.split_pays(SCALED, ProductShape(*sizes, (rows, rows))) for rows in (True, False)]
    assert tuple(pays) == PAYS[sizes]


def both(precision):
    """A product and both gradients, as float32 or in what takes its place."""

    def f(x, w, g):
        y, pull = bf.vjp(product(precision), x, w)
        return y, *pull(g)

    return f


CHOSEN = {  # the dtypes of the operands of a product, of that for the gradient of its input, and of its weight
    "high": ("float16", "float16", "float32"),  # which sums over tokens
    "fastest": ("float16", "float16", "float32"),
    "tf32": ("float16", "float16", "float32"),
    ("high", "fastest"): ("float16", "float16", "float32"),
    ("high", "TF32_TF32_F32"): ("float32", "float32", "float32"),
    "TF32_TF32_F32": ("float32", "float32", "float32"),
    SCALED: ("float16", "float16", "float16"),
    SHARED: ("float16", "float16", "float16"),
}


@pytest.mark.parametrize("precision", CHOSEN)
def test_what_is_chosen_for_tf32(precision, cuda):
    """What is quicker, where only exactness was asked for."""
    shapes = (4, 8192, 768), (768, 3072), (4, 8192, 3072)
    made, _ = draft(both(precision), *[bf.ShapeDtypeStruct(s, np.float32) for s in shapes])
    eqns = {s.eqn.outvars[0].aval.shape: s.eqn for s in made.steps if isinstance(s, OpaqueStep)}
    found = [str(eqns[shape].invars[0].aval.dtype) for shape in (shapes[2], shapes[0], shapes[1])]
    assert len(eqns) == 3 and tuple(found) == CHOSEN[precision]


def test_the_flag_for_tf32_chooses_too(cuda, monkeypatch):
    shapes = bf.ShapeDtypeStruct((32768, 768), np.float32), bf.ShapeDtypeStruct((768, 3072), np.float32)
    monkeypatch.setattr(config, "matmul_precision", "tf32")
    assert draft(product(None), *shapes)[1] == draft(product(SCALED), *shapes)[1]
    assert draft(product("TF32_TF32_F32"), *shapes)[1] == ["dot_general"]
    assert draft(product(None), uniform(8, 16), uniform(16, 8))[1] == ["dot_general"]


def rewritten(precision):
    """A product with its gradients."""
    args = uniform(24, 40), uniform(40, 16), uniform(24, 16)
    jaxpr = simplify(bf.jit(both(precision)).trace(*args).jaxpr)
    return simplify(split_products.with_split_products(jaxpr, {}, lambda *_: True))


@pytest.mark.parametrize("precision", [SCALED, SHARED])
def test_golden_gradients(golden, precision):
    golden(f"gradients_{precision}", str(rewritten(precision)))


def copies(precision):
    """The shapes of arrays of float16 in it."""
    made = rewritten(precision)
    return sorted(v.aval.shape for e in made.eqns for v in e.outvars if v.aval.dtype == np.float16)


def test_one_copy_serves_forward_and_backward_passes():
    """Of the input; the cotangent has one too, and one that both scales are taken out of."""
    assert copies(SCALED) == sorted([(24, 40), (40, 16), (24, 16)] * 2)
    assert copies(SHARED) == sorted([(24, 40), (40, 16), (24, 16), (40, 16), (24, 16)])


def test_a_copy_that_serves_all_is_kept(cuda):
    """Behind more products than parts are kept for otherwise."""

    def f(x, w, v):
        p = product(SHARED)
        y = p(x, w.T)
        for _ in range(split_products.NEAR + 1):
            y = p(y, v.T)
        return bnp.einsum("km,kn->mn", y, x, precision=SHARED)

    args = uniform(24, 40), uniform(16, 40), uniform(16, 16)
    made = split_products.with_split_products(simplify(bf.jit(f).trace(*args).jaxpr), {}, lambda *_: True)
    shapes = [v.aval.shape for e in made.eqns for v in e.outvars if v.aval.dtype == np.float16]
    assert shapes.count((24, 40)) == 1 and shapes.count((16, 16)) == 1


def test_gradients_and_memory_at_size(cuda):
    """A layer whose input is kept: in half its bytes where one copy serves all, in float32 for TF32's gradient."""
    shapes = [bf.ShapeDtypeStruct(s, np.float32) for s in ((1 << 15, 768), (768, 3072))]

    def peak(precision):
        f = lambda x, w: product(precision)(bnp.tanh(x), w).sum()
        jaxpr = bf.jit(bf.grad(f, argnums=(0, 1))).trace(*shapes).jaxpr
        return Draft(jaxpr, (False,) * 2, "sm_90").schedule.plan.peak_bytes

    assert peak(SHARED) < peak("TF32_TF32_F32") <= peak("high") < 1.35 * peak("TF32_TF32_F32")


# -- numbers -----------------------------------------------------------------------------------------

BESIDE = ("infinities", "infinities and ones", "large rows by small columns")
"""Special numbers that ``SHARED`` loses where rows are contracted: the scale of one column is not that of another."""


@pytest.mark.parametrize("precision", [SCALED, SHARED])
@pytest.mark.parametrize("name", SPECIAL)
def test_special_numbers_of_columns(name, precision, cuda):
    x, y = (np.asarray(v, np.float32) for v in SPECIAL[name])
    with np.errstate(all="ignore"):
        want = (x.astype(np.float64) @ y.T.astype(np.float64)).astype(np.float32)
        bound = np.abs(x).astype(np.float64) @ np.abs(y.T).astype(np.float64)
    got = np.asarray(bf.jit(columns(precision))(*on(cuda, x.T.copy(), y.T.copy())))
    finite = np.isfinite(want)
    if precision == SHARED and name in BESIDE:
        assert not np.isfinite(got[~finite]).any()
        return
    np.testing.assert_array_equal(got[~finite], want[~finite])
    assert (np.abs(got[finite] - want[finite]) <= UNIT * bound[finite]).all()


SCALES = {  # powers of two of the lhs' rows, of the rhs' columns, of the contracted axis there and back, and what holds
    "as they are": (0, 0, 0, {SCALED, SHARED}),
    "rows and columns, a little": (6, 6, 0, {SCALED, SHARED}),
    "rows and columns": (60, 40, 0, {SCALED}),
    "small rows": ([-120], [100], 0, {SCALED, SHARED}),
    "subnormal rows": ([-136], [120], 0, {SCALED, SHARED}),
    "huge rows": ([124], [-100], 0, {SCALED, SHARED}),
    "contracted, a little": (0, 0, 12, {SCALED, SHARED}),
    "contracted, a lot": (0, 0, 30, {SHARED}),
}


@pytest.mark.parametrize("name", SCALES)
def test_scales_where_rows_are_contracted(name, cuda):
    """As exact as TF32, which rounds to 11 bits, where scales are those that an algorithm takes out."""
    rows, column, contracted, holds = SCALES[name]
    rng = np.random.default_rng(1)
    draw = lambda bits, *shape: np.exp2(
        np.full(shape, bits[0]) if isinstance(bits, list) else rng.integers(-bits, bits + 1, shape)
    )
    inner = draw(contracted, 256)
    x = (rng.uniform(-4, 4, (256, 8)) * draw(rows, 1, 8) * inner[:, None]).astype(np.float32)
    y = (rng.uniform(-4, 4, (256, 12)) / inner[:, None] * draw(column, 1, 12)).astype(np.float32)
    exact, bound = x.T.astype(np.float64) @ y, np.abs(x).T.astype(np.float64) @ np.abs(y)
    found = {
        p
        for p in (SCALED, SHARED)
        if (np.abs(np.asarray(bf.jit(columns(p))(*on(cuda, x, y)), np.float64) - exact) <= UNIT * bound).all()
    }
    assert found == holds


def test_rows_of_very_different_size(cuda):
    """Tokens whose gradients differ: those of inputs are exact in each row, those of weights beside the largest."""
    rng = np.random.default_rng(0)
    sizes = np.exp2(rng.integers(-50, 50, (64, 1)))
    x, w, g = (
        rng.standard_normal((64, 24)),
        rng.standard_normal((24, 16)),
        rng.standard_normal((64, 16)) * sizes,
    )
    args = [v.astype(np.float32) for v in (x, w, g)]
    x, w, g = (v.astype(np.float64) for v in args)
    for precision in (SCALED, SHARED):
        _, dx, dw = (np.asarray(v, np.float64) for v in bf.jit(both(precision))(*on(cuda, *args)))
        assert (np.abs(dx - g @ w.T) <= UNIT * (np.abs(g) @ np.abs(w.T))).all()
        assert (np.abs(dw - x.T @ g) <= UNIT * (np.abs(x.T) @ np.abs(g))).all()


EXACT = dict.fromkeys(float32_errors.OPERANDS, 1.1) | {
    "contracted axis scaled by 2^±30 and its inverse": np.inf
}
"""By operands, how many times the error of TF32 an error may be: the largest of a few thousand is noisy."""


@pytest.mark.parametrize("operands", EXACT)
def test_errors_beside_tf32(operands):
    """By the model of tensor cores; elements are rounded to the same numbers, and sums are as exact or more."""
    found = float32_errors.errors_of(operands, 768, ("TF32", SCALED, SHARED))
    assert found[SCALED]["worst"] <= EXACT[operands] * found["TF32"]["worst"]
    assert found[SCALED]["rms"] <= EXACT[operands] * found["TF32"]["rms"]
    # beside the largest, not beside their own terms, where the columns of a result differ
    differ = operands.startswith("rows scaled")
    assert found[SHARED]["rms"] <= 1.1 * found["TF32"]["rms"]
    assert (found[SHARED]["worst"] <= 1.1 * found["TF32"]["worst"]) is not differ


def test_every_choice_is_as_exact_as_what_it_stands_for():
    """By the number of bits that parts hold together."""
    from blufunc.kernels.precisions import ALGORITHMS, is_tf32

    for precision, name in QUICKER_BY.items():
        bits = ALGORITHMS[name].parts * (ALGORITHMS[name].mantissa + 1)
        assert bits >= (11 if is_tf32(precision) else 22)
        assert not ALGORITHMS[name].by_rows
