"""Hopper's two-part float32 GEMM: equations that use it, values, the kernel."""

import dataclasses
import re

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from benchmarks.harness.kernel_resources import resources
from blufunc.core.ir.jaxpr import Eqn, Var
from blufunc.kernels.backends.cuda.driver import modules, nvrtc
from blufunc.kernels.backends.cuda.library import split_gemm
from blufunc.kernels.backends.cuda.library.split_gemm import SplitGemm, instructions, source
from blufunc.kernels.backends.cuda.program import Draft
from blufunc.kernels.cost import of_eqn
from blufunc.kernels.ops import split_dot
from blufunc.kernels.ops.split_dot import split_dot_p
from blufunc.kernels.precision import ProductShape
from blufunc.kernels.rewrites.split_float32 import parts_of
from tests.emulation.cuda_machines import needs_nvrtc
from tests.emulation.emulated_mma import Emulator
from tests.kernels.backends.cuda.test_program import on, uniform
from tests.kernels.rewrites.test_split_float32 import CASES, SPECIAL, W, X

X3, PARTS = "F16_F16_F32_X3", split_dot_p.name
DEVIATION = 2e-6
"""Of an element, relative to the sum of the absolute values of its terms."""


@pytest.fixture
def any_size(monkeypatch):
    """Let the kernel take all matmuls, as a definition has no tiles."""
    monkeypatch.setattr(split_gemm, "_LEAST", 1)
    monkeypatch.setattr(split_gemm, "_VECTOR", 1)


def einsum(equation, precision=X3):
    return lambda x, y: bnp.einsum(equation, x, y, precision=precision)


def products(fun, *args, arch="sm_90a"):
    """The matmul equations of a program on a device of an architecture."""
    traced = bf.jit(fun).trace(*args)
    steps = Draft(traced.jaxpr, (False,) * len(traced.jaxpr.invars), arch).schedule.steps
    return [s.eqn for s in steps if hasattr(s, "eqn")]


# -- which products ----------------------------------------------------------------------------------

EQUATIONS = {  # the equation, unusual sizes, and whether the kernel has it
    "rows by columns": ("mk,kn->mn", {}, True),
    "rows by rows": ("mk,nk->mn", {}, True),
    "columns by columns": ("km,kn->mn", {}, True),
    "columns by rows": ("km,nk->mn", {}, True),
    "several axes": ("abm,abn->mn", {}, True),
    "several free axes": ("abk,kn->abn", {}, True),
    "several axes behind": ("mab,nab->mn", {}, True),
    "a transpose": ("mk,kn->nm", {}, True),
    "axes in another order": ("abm,ban->mn", {}, False),
    "axes around a free one": ("amb,abn->mn", {}, False),
    "batches": ("bmk,bkn->bmn", {}, False),
    "few rows": ("mk,kn->mn", {"m": 56}, False),
    "few columns": ("mk,kn->mn", {"n": 56}, False),
    "few terms": ("mk,kn->mn", {"k": 56}, False),
    "rows of an odd size": ("mk,kn->mn", {"m": 129}, True),  # no axis of this size is contiguous
    "columns of an odd size": ("mk,kn->mn", {"n": 129}, False),
    "odd rows that lie side by side": ("km,kn->mn", {"m": 129}, False),
    "terms of an odd size": ("mk,kn->mn", {"k": 129}, False),
    "odd terms, not side by side": ("km,kn->mn", {"k": 129}, True),
}
SIZES = {"m": 128, "n": 136, "k": 192, "a": 8, "b": 16}


def operands(equation, sizes=()):
    sizes = {**SIZES, **dict(sizes)}
    return [
        uniform(*[sizes[c] for c in part], seed=i)
        for i, part in enumerate(equation.partition("->")[0].split(","))
    ]


@pytest.mark.second
@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", EQUATIONS)
def test_what_the_kernel_multiplies(name, fake, cuda):
    equation, sizes, whole = EQUATIONS[name]
    x, y = operands(equation, sizes)
    f = einsum(equation)
    found = [e.prim.name for e in products(f, x, y)]
    assert (found == [PARTS]) == whole, found
    assert PARTS not in [e.prim.name for e in products(f, x, y, arch="sm_80")]
    exact = np.einsum(equation, x.astype(np.float64), y)
    bound = np.einsum(equation, np.abs(x), np.abs(y))
    got = np.asarray(bf.jit(f)(*on(cuda, x, y)))
    assert (np.abs(got - exact) <= DEVIATION / 4 * bound).all()
    assert not whole or fake.products == 1


def test_other_algorithms_are_as_they_were(cuda):
    x, y = operands("mk,kn->mn")
    for precision in ("F16_F16_F32_SCALED", "TF32_TF32_F32", "highest"):
        assert PARTS not in [e.prim.name for e in products(einsum("mk,kn->mn", precision), x, y)]


SUMS = {  # m, n, k, which operands are by rows: number of sums
    (32768, 768, 768, (True, True)): 1, (32768, 768, 3072, (True, False)): 1, (50304, 768, 2048, (False, False)): 1,
    (768, 768, 32768, (False, False)): 11, (768, 2304, 32768, (False, False)): 9, (2048, 768, 50304, (True, False)): 2,
    (128, 128, 1 << 20, (True, True)): 16, (128, 128, 64, (True, True)): 1,
    (128, 128, 60, (True, True)): 0, (128, 60, 128, (True, True)): 0, (129, 128, 128, (False, True)): 0,
}  # fmt: skip


@pytest.mark.parametrize("case", SUMS)
def test_how_many_sums_there_are(case):
    m, n, k, by_rows = case
    assert split_gemm.sums_of(ProductShape(1, m, n, k, by_rows)) == SUMS[case]
    assert split_gemm.sums_of(ProductShape(2, m, n, k, by_rows)) == 0


@pytest.mark.parametrize("sums", [2, 3])
def test_several_sums(sums, fake, cuda, monkeypatch):
    """Readers of the result add the sums."""
    monkeypatch.setattr(split_gemm, "sums_of", lambda shape: sums)
    x, y = operands("km,kn->mn")
    f = lambda x, y: bnp.tanh(einsum("km,kn->mn")(x, y))
    (eqn,) = products(f, x, y)
    assert eqn.params["sums"] == sums
    assert eqn.outvars[0].aval.shape == (sums, 128, 136)
    got = np.asarray(bf.jit(f)(*on(cuda, x, y)))
    np.testing.assert_allclose(got, np.tanh(x.T.astype(np.float64) @ y), rtol=0, atol=1e-5)


def test_blocks_stay_for_several_tiles(cuda):
    (eqn,) = products(einsum("mk,kn->mn"), uniform(4096, 64), uniform(64, 1536))
    text = split_gemm.SplitDot().source_of(eqn)
    assert (text.grid, modules.grid_of(text, 114), modules.grid_of(text, 999)) == (
        (256, 1, 1), (114, 1, 1), (256, 1, 1),
    )  # fmt: skip
    assert modules.grid_of(dataclasses.replace(text, resident=False), 114) == (256, 1, 1)


def test_flops_are_those_of_three_products(cuda):
    (eqn,) = products(einsum("mk,kn->mn"), *operands("mk,kn->mn"))
    assert of_eqn(eqn, "library").products == 3 * 2 * 128 * 136 * 192


# -- what they mean ----------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", CASES)
def test_values(name, cuda, any_size):
    """Under all transformations; and a second run gives the same bits."""
    want = bf.jit(CASES[name]("highest"))(*(bf.device_put(v.astype(np.float64)) for v in (X, W)))
    f = bf.jit(CASES[name](X3))
    first, second = f(*on(cuda, X, W)), f(*on(cuda, X, W))
    for w, g, a in zip(*map(bf.tree.leaves, (want, first, second)), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=DEVIATION * 40 * max(1, np.abs(w).max()))
        np.testing.assert_array_equal(g, a)


@pytest.mark.parametrize("name", SPECIAL)
def test_special_numbers(name, cuda, any_size):
    x, y = (np.asarray(v, np.float32) for v in SPECIAL[name])
    check_special(x, y, np.asarray(bf.jit(einsum("mk,nk->mn"))(*on(cuda, x, y))))


def check_special(x, y, got):
    with np.errstate(all="ignore"):
        want = (x.astype(np.float64) @ y.T.astype(np.float64)).astype(np.float32)
        bound = np.abs(x).astype(np.float64) @ np.abs(y.T).astype(np.float64)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    assert (np.abs(got[finite] - want[finite]) <= DEVIATION * bound[finite]).all()


# -- the kernel --------------------------------------------------------------------------------------

KERNELS = [
    SplitGemm(256, 768, 768, (True, False)), SplitGemm(768, 384, 4096, (False, False), sums=3),
    SplitGemm(200, 136, 104, (True, True), columns=128), SplitGemm(136, 64, 72, (False, True), columns=64),
]  # fmt: skip


@pytest.mark.sampled(2)
@needs_nvrtc
@pytest.mark.parametrize("product", KERNELS)
def test_it_compiles_without_spills(product):
    text = source(product)
    made = nvrtc.build(text, "sm_90a", "split_product")
    found = resources(made)["split_product"]
    assert found.spill_stores == 0
    assert "wgmma" not in made.log, made.log  # as where products are done one by one
    assert moved_registers(text, product.threads) <= found.registers * product.threads


def moved_registers(text, threads):
    """Registers of a block after ``setmaxnreg``; if these are too few, it hangs."""
    few, many = (int(re.search(rf"{what}_registers<(\d+)>\(\);", text)[1]) for what in ("leave", "take"))
    return 2 * 128 * many + (threads - 2 * 128) * few


def parted(x, by_rows):
    """Float16 parts and roots of an operand in its layout, from equations."""
    laid = x if by_rows else np.ascontiguousarray(x.T)
    with np.errstate(all="ignore"):
        first, rest, roots = (
            np.asarray(v) for v in parts_of(bnp.asarray(laid), (int(by_rows),), split_dot.ALGORITHM)
        )
    return first, rest, roots


def eqn_of(x, y, by_rows, sums):
    """The equation of a matmul, and its operands."""
    given = [parted(x, by_rows[0]), parted(y, by_rows[1])]
    arrays = [*given[0][:2], *given[1][:2], given[0][2], given[1][2]]
    numbers = (((int(by_rows[0]),), (int(by_rows[1]),)), ((), ()))
    how = {"dimension_numbers": numbers, "sums": sums}
    avals = [bf.core.ir.avals.ShapedArray(a.shape, a.dtype) for a in arrays]
    out = Var(split_dot_p.abstract(*avals, **how))
    return Eqn(split_dot_p, [Var(a) for a in avals], [out], how, None), arrays


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("emulated"))


def run_emulated(emulator, product, arrays, blocks, eager=False):
    """Results of a kernel on the host, with a number of blocks that run in sequence."""
    out = np.full((product.sums, product.m, product.n), np.nan, np.float32)
    types = ["const element *"] * 4 + ["const float *"] * 2
    parameters = [*zip(types, arrays, strict=True), ("float *", out)]
    turned = (not product.by_rows[0], not product.by_rows[1])
    how = (product.threads, product.shared_bytes, turned, eager)
    emulator.launch(
        source(product), instructions(product), "float16", "split_product", parameters, blocks, *how
    )
    return out


EMULATED = [  # a GEMM, and the blocks that share its tiles
    (SplitGemm(128, 64, 72, (True, True), 64), 1), (SplitGemm(136, 72, 136, (False, True), 64), 2),
    (SplitGemm(136, 64, 200, (True, False), 64, sums=2), 3), (SplitGemm(200, 136, 72, (False, False), 128), 1),
]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("product, blocks", EMULATED)
def test_the_kernel_emulated(product, blocks, eager, emulator):
    """By the definition, to the last bits, which depend on the order of sums."""
    p, rng = product, np.random.default_rng(product.m)
    x, y = random(rng, p.m, p.k), random(rng, p.n, p.k)
    eqn, arrays = eqn_of(x, y, p.by_rows, p.sums)
    got = run_emulated(emulator, p, arrays, blocks, eager)
    want = split_dot_p.impl(*arrays, **eqn.params).reshape(got.shape)
    bound = np.abs(x) @ np.abs(y.T)
    assert (np.abs(got - want) <= 1e-6 * bound).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SPECIAL)
def test_special_numbers_emulated(name, emulator):
    p = SplitGemm(64, 64, 64, (True, True), 64)
    x, y = (np.zeros((64, 64), np.float32) for _ in range(2))
    for full, part in zip((x, y), SPECIAL[name], strict=True):
        part = np.asarray(part, np.float32)
        full[-part.shape[0] :, -part.shape[1] :] = part
    _, arrays = eqn_of(x, y, p.by_rows, 1)
    check_special(x, y, run_emulated(emulator, p, arrays, 1)[0])


def random(rng, rows, k):
    """Rows of very different sizes."""
    return (rng.standard_normal((rows, k)) * np.exp2(rng.integers(-40, 40, (rows, 1)))).astype(np.float32)


ON_A_DEVICE = [  # m, n, k, sums
    (128, 192, 64, 1), (129, 200, 72, 1), (1000, 776, 1000, 3), (64, 64, 64, 1), (264, 72, 4096, 16),
    (768, 2304, 8192, 5), (3000, 1544, 256, 1),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("by_rows", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("sizes", ON_A_DEVICE)
def test_on_a_device(sizes, by_rows):
    m, n, k, sums = sizes
    m += -m % 8 * (not by_rows[0])
    rng = np.random.default_rng(sizes)
    x, y = random(rng, m, k), random(rng, n, k)
    eqn, arrays = eqn_of(x, y, by_rows, sums)
    run = bf.jit(lambda *given: split_dot_p.bind(*given, **eqn.params))
    there = on(bf.devices("cuda")[0], *arrays)
    got, second = np.asarray(run(*there)), np.asarray(run(*there))
    np.testing.assert_array_equal(got, second)
    total = got.astype(np.float64).sum(0) if sums > 1 else got
    bound = np.abs(x).astype(np.float64) @ np.abs(y.T)
    assert (np.abs(total - x.astype(np.float64) @ y.T) <= 3e-7 * bound).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECIAL)
def test_special_numbers_on_a_device(name):
    """In the first rows and terms of a tile, and in the last ones."""
    x, y = (np.zeros((rows, 128), np.float32) for rows in (136, 200))
    given = [np.asarray(v, np.float32) for v in SPECIAL[name]]
    for full, part in zip((x, y), given, strict=True):
        full[: part.shape[0], : part.shape[1]] = part
        full[-part.shape[0] :, -part.shape[1] :] = part
    eqn, arrays = eqn_of(x, y, (True, True), 1)
    run = bf.jit(lambda *parts: split_dot_p.bind(*parts, **eqn.params))
    check_special(x, y, np.asarray(run(*on(bf.devices("cuda")[0], *arrays))))


@pytest.mark.gpu
@pytest.mark.parametrize("terms", [768, 3072, 32768])
def test_no_less_exact_than_the_library_on_a_device(terms):
    """By the root of the mean square, of terms of both signs."""
    rng = np.random.default_rng(terms)
    x, y = rng.standard_normal((256, terms), np.float32), rng.standard_normal((192, terms), np.float32)
    device = bf.devices("cuda")[0]
    exact = x.astype(np.float64) @ y.T
    errors = {
        p: np.sqrt(np.mean((np.asarray(bf.jit(einsum("mk,nk->mn", p))(*on(device, x, y))) - exact) ** 2))
        for p in (X3, "highest")
    }
    assert errors[X3] <= 1.25 * errors["highest"], errors
