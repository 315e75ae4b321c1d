"""Float32 matmuls as one float16 matmul in place of TF32: sharing and accuracy."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from benchmarks.suites import float32_errors
from blufunc.config import config
from blufunc.core.arrays.array import from_numpy
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cuda.library import matmul
from blufunc.kernels.backends.cuda.program import Draft
from blufunc.kernels.precision import ALGORITHMS, QUICKER_BY, ProductShape, is_tf32
from blufunc.kernels.rewrites import split_float32
from blufunc.kernels.schedule import OpaqueStep
from tests.kernels.backends.cuda.test_program import on, uniform
from tests.kernels.rewrites.test_gemm_epilogue import draft
from tests.kernels.rewrites.test_split_float32 import SCALED, SPECIAL, X3, columns, product

UNIT = 2.0**-10
"""Maximum error of a product of two values rounded to 11 bits, with float32 sums."""


# -- where they are ------------------------------------------------------------------------------------

PAYS = {  # batch, m, n, k: whether it pays with contracted axes last, and first
    (1, 32768, 768, 768): (True, True), (1, 32768, 3072, 768): (True, True), (1, 8192, 50304, 768): (True, True),
    (1, 768, 3072, 32768): (True, True), (1, 768, 2304, 32768): (True, True), (1, 768, 768, 32768): (True, False),
    (1, 4096, 16384, 32768): (True, True), (1, 8192, 8192, 8192): (True, True),
    (1, 32768, 1, 768): (False, False), (1, 1, 50304, 768): (False, False), (384, 1024, 1024, 64): (False, False),
    (384, 1024, 64, 1024): (False, False), (1, 512, 512, 512): (False, False),
}  # fmt: skip


@pytest.mark.parametrize("sizes", PAYS)
def test_where_it_pays(sizes):
    pays = [matmul.split_pays(SCALED, ProductShape(*sizes, (rows, rows))) for rows in (True, False)]
    assert tuple(pays) == PAYS[sizes]


def both(precision):
    """A product and both gradients, as float32 or in what takes its place."""

    def f(x, w, g):
        y, pull = bf.vjp(product(precision), x, w)
        return y, *pull(g)

    return f


EACH_ROUNDED = "float16", "float16", "float16"  # the gradient of a weight too, which sums over tokens
CHOSEN = {  # the dtypes of the operands of a product, of that for the gradient of its input, and of its weight
    "high": EACH_ROUNDED,
    "fastest": EACH_ROUNDED,
    "tf32": EACH_ROUNDED,
    ("high", "fastest"): EACH_ROUNDED,
    ("high", "TF32_TF32_F32"): ("float32", "float32", "float32"),
    "TF32_TF32_F32": ("float32", "float32", "float32"),
    SCALED: EACH_ROUNDED,
}


def chosen(precision, width):
    shapes = (4, 8192, 768), (768, width), (4, 8192, width)
    made, _ = draft(both(precision), *[bf.ShapeDtypeStruct(s, np.float32) for s in shapes])
    eqns = [s.eqn for s in made.steps if isinstance(s, OpaqueStep)]
    assert [len(e.outvars[0].aval.shape) for e in eqns].count(2) == 1 and len(eqns) == 3
    forward, *gradients = sorted(
        eqns, key=lambda e: (e.outvars[0].aval.shape != shapes[2], -e.outvars[0].aval.ndim)
    )
    return tuple(str(e.invars[0].aval.dtype) for e in (forward, *gradients))


@pytest.mark.parametrize("precision", CHOSEN)
def test_what_is_chosen_for_tf32(precision, cuda):
    """The faster algorithm, if only the accuracy is fixed."""
    assert chosen(precision, 3072) == CHOSEN[precision]


def test_gradients_of_small_weights_stay_tf32(cuda):
    """Copies in float16 with scales of columns would take longer than what they save."""
    assert chosen("tf32", 512) == ("float16", "float16", "float32")
    assert chosen(SCALED, 512) == EACH_ROUNDED


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
    return simplify(split_float32.with_split_products(jaxpr, {}, lambda *_: True))


def test_golden_gradients(golden):
    golden(f"gradients_{SCALED}", str(rewritten(SCALED)))


def test_forward_and_backward_passes_have_copies_of_their_own():
    """Each is scaled along other axes."""
    shapes = [v.aval.shape for e in rewritten(SCALED).eqns for v in e.outvars if v.aval.dtype == np.float16]
    assert sorted(shapes) == sorted([(24, 40), (40, 16), (24, 16)] * 2)


def test_gradients_and_memory_at_size(cuda):
    """A layer saves its input in float32 for TF32, or in float16 if the gradient is."""

    def peak(precision, width):
        shapes = [bf.ShapeDtypeStruct(s, np.float32) for s in ((1 << 15, 768), (768, width))]
        f = lambda x, w: product(precision)(bnp.tanh(x), w).sum()
        jaxpr = bf.jit(bf.grad(f, argnums=(0, 1))).trace(*shapes).jaxpr
        return Draft(jaxpr, (False,) * 2, "sm_90").schedule.plan.peak_bytes

    assert peak("TF32_TF32_F32", 1024) <= peak("high", 1024) < 1.35 * peak("TF32_TF32_F32", 1024)
    assert peak(SCALED, 3072) == peak("high", 3072) < peak("TF32_TF32_F32", 3072)


# -- numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECIAL)
def test_special_numbers_of_columns(name, cuda):
    x, y = (np.asarray(v, np.float32) for v in SPECIAL[name])
    with np.errstate(all="ignore"):
        want = (x.astype(np.float64) @ y.T.astype(np.float64)).astype(np.float32)
        bound = np.abs(x).astype(np.float64) @ np.abs(y.T).astype(np.float64)
    got = np.asarray(bf.jit(columns(SCALED))(*on(cuda, x.T.copy(), y.T.copy())))
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    assert (np.abs(got[finite] - want[finite]) <= UNIT * bound[finite]).all()


@pytest.mark.parametrize("precision", [SCALED, X3])
@pytest.mark.parametrize("top", [1.0, 1.99, 2.0, 3.99])
def test_down_to_where_elements_have_all_bits(top, precision):
    """A scale is a power of 4: the largest of a row is anywhere between 2^13 and 2^15."""
    algorithm = ALGORITHMS[precision]
    least = top * 2.0**-27
    row = from_numpy(np.concatenate([[top], least * uniform(200) ** 2 + least]).astype(np.float32)[None])
    *parts, root = (np.asarray(v, np.float64) for v in split_float32.parts_of(row, (1,), algorithm))
    held = sum(p * 2.0 ** (-algorithm.raised * n) for n, p in enumerate(parts)) * root[:, None] ** 2
    assert (np.abs(held - row) <= 2.0 ** -(11 * algorithm.parts) * np.abs(row)).all()


SCALES = {  # powers of two of the lhs' rows, the rhs' columns, the contracted axis and back; whether the bound holds
    "as they are": (0, 0, 0, True),
    "rows and columns, a little": (6, 6, 0, True),
    "rows and columns": (60, 40, 0, True),
    "small rows": ([-120], [100], 0, True),
    "subnormal rows": ([-136], [120], 0, True),
    "huge rows": ([124], [-100], 0, True),
    "contracted, a little": (0, 0, 12, True),
    "contracted, a lot": (0, 0, 30, False),
}


@pytest.mark.parametrize("name", SCALES)
def test_scales_where_rows_are_contracted(name, cuda):
    """As exact as TF32, which rounds to 11 bits, for rows of different scales."""
    rows, column, contracted, holds = SCALES[name]
    rng = np.random.default_rng(1)
    draw = lambda bits, *shape: np.exp2(
        np.full(shape, bits[0]) if isinstance(bits, list) else rng.integers(-bits, bits + 1, shape)
    )
    inner = draw(contracted, 256)
    x = (rng.uniform(-4, 4, (256, 8)) * draw(rows, 1, 8) * inner[:, None]).astype(np.float32)
    y = (rng.uniform(-4, 4, (256, 12)) / inner[:, None] * draw(column, 1, 12)).astype(np.float32)
    exact, bound = x.T.astype(np.float64) @ y, np.abs(x).T.astype(np.float64) @ np.abs(y)
    got = np.asarray(bf.jit(columns(SCALED))(*on(cuda, x, y)), np.float64)
    assert (np.abs(got - exact) <= UNIT * bound).all() == holds


def test_rows_of_very_different_size(cuda):
    """Gradients of inputs are exact per row, those of weights relative to the largest."""
    rng = np.random.default_rng(0)
    sizes = np.exp2(rng.integers(-50, 50, (64, 1)))
    x, w, g = (
        rng.standard_normal((64, 24)),
        rng.standard_normal((24, 16)),
        rng.standard_normal((64, 16)) * sizes,
    )
    args = [v.astype(np.float32) for v in (x, w, g)]
    x, w, g = (v.astype(np.float64) for v in args)
    _, dx, dw = (np.asarray(v, np.float64) for v in bf.jit(both(SCALED))(*on(cuda, *args)))
    assert (np.abs(dx - g @ w.T) <= UNIT * (np.abs(g) @ np.abs(w.T))).all()
    assert (np.abs(dw - x.T @ g) <= UNIT * (np.abs(x.T) @ np.abs(g))).all()


EXACT = dict.fromkeys(float32_errors.OPERANDS, 1.1) | {
    "contracted axis scaled by 2^±30 and its inverse": np.inf
}
"""Limit of the error relative to TF32's, by operands: the maximum is noisy."""


@pytest.mark.parametrize("operands", EXACT)
def test_errors_beside_tf32(operands):
    """By the model of tensor cores: the same rounding of elements, sums no less exact."""
    found = float32_errors.errors_of(operands, 768, ("TF32", SCALED))
    assert found[SCALED]["worst"] <= EXACT[operands] * found["TF32"]["worst"]
    assert found[SCALED]["rms"] <= EXACT[operands] * found["TF32"]["rms"]


def test_every_choice_is_as_exact_as_what_it_stands_for():
    """By the number of bits that parts hold together."""
    for precision, name in QUICKER_BY.items():
        assert 11 * ALGORITHMS[name].parts >= (11 if is_tf32(precision) else 22)
