"""CPU GEMM against NumPy's matmul, and the matmuls that it leaves to BLAS."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc.config import config
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ops.dot import dot_general_p
from blufunc.kernels.backends.cpu import gemm, toolchain
from blufunc.kernels.backends.cpu import program as host_program

COMPILER = toolchain.find()
pytestmark = pytest.mark.skipif(
    COMPILER is None or not COMPILER.openmp, reason="this machine has no C++ compiler with OpenMP"
)

MATRICES = (((1,), (0,)), ((), ()))
STACKS = (((2,), (1,)), ((0,), (0,)))


def cut(shape, axes, spans):
    """Array with transposed axes, then sliced."""
    return lambda draw: draw(shape).transpose(axes)[spans]


def plain(*shape):
    """Array of a shape."""
    return lambda draw: draw(shape)


CASES = {  # lhs, rhs, dimension numbers
    "one tile": (plain(16, 7), plain(7, 32), MATRICES),
    "ends of tiles": (plain(37, 50), plain(50, 41), MATRICES),
    "beyond all blocks": (plain(271, 600), plain(600, 530), MATRICES),
    "lhs transposed": (cut((300, 75), (1, 0), ...), plain(300, 90), MATRICES),
    "rhs transposed": (plain(75, 301), cut((90, 301), (1, 0), ...), MATRICES),
    "both transposed": (cut((70, 141), (1, 0), ...), cut((90, 70), (1, 0), ...), MATRICES),
    "summed over the first axes": (plain(40, 50), plain(40, 60), (((0,), (0,)), ((), ()))),
    "gradient of weights": (plain(4, 50, 31), plain(4, 50, 70), (((0, 1), (0, 1)), ((), ()))),
    "sums in another order": (plain(6, 5, 31), plain(6, 5, 70), (((1, 0), (1, 0)), ((), ()))),
    "every other": (
        cut((90, 80), (0, 1), np.s_[3::2, ::2]), cut((80, 99), (0, 1), np.s_[::2, 1::3]), MATRICES,
    ),
    "backwards": (
        cut((40, 30), (0, 1), np.s_[::-1, ::-1]), cut((30, 50), (0, 1), np.s_[::-1, 4:]), MATRICES,
    ),
    "few rows": (plain(15, 64), plain(64, 101), MATRICES),
    "few columns": (plain(64, 40), plain(40, 31), MATRICES),
    "few columns, transposed": (plain(64, 40), cut((31, 40), (1, 0), ...), MATRICES),
    "few of all": (plain(3, 2), plain(2, 5), MATRICES),
    "a vector": (plain(64), plain(64, 99), (((0,), (0,)), ((), ()))),
    "times a vector": (plain(33, 70), plain(70), (((1,), (0,)), ((), ()))),
    "transposed, times a vector": (cut((70, 33), (1, 0), ...), plain(70), (((1,), (0,)), ((), ()))),
    "every other, times every third": (
        cut((66, 140), (0, 1), np.s_[::2, ::2]), lambda draw: draw((210,))[::3], (((1,), (0,)), ((), ())),
    ),
    "a dot product": (plain(77), plain(77), (((0,), (0,)), ((), ()))),
    "an outer product": (plain(20), plain(35), (((), ()), ((), ()))),
    "both transposed, few rows": (cut((70, 5), (1, 0), ...), cut((90, 70), (1, 0), ...), MATRICES),
    "both transposed, many columns": (cut((7, 5), (1, 0), ...), cut((300, 7), (1, 0), ...), MATRICES),
    "small batches": (plain(6, 3, 7), plain(6, 7, 4), STACKS),
    "batches of vectors": (plain(6, 7), plain(6, 7, 40), (((1,), (1,)), ((0,), (0,)))),
    "batches": (plain(5, 20, 30), plain(5, 30, 40), STACKS),
    "batches inside": (plain(4, 20, 3, 6), plain(4, 42, 3, 6), (((3,), (3,)), ((0, 2), (0, 2)))),
    "rows apart": (cut((4, 40, 30), (0, 1, 2), np.s_[:, 5:25]), plain(30, 50), (((2,), (0,)), ((), ()))),
    "rows apart in batches": (
        cut((2, 3, 4, 20, 30), (0, 1, 2, 3, 4), np.s_[:, :, 1:3]), plain(2, 30, 50), (((4,), (1,)), ((0,), (0,))),
    ),
    "one row for all": (
        lambda draw: np.broadcast_to(draw((30,)), (40, 30)), plain(30, 50), MATRICES,
    ),
}  # fmt: skip


def params_of(numbers):
    return {"dimension_numbers": numbers, "precision": None, "preferred_element_type": None}


def product(x, y, numbers, threads):
    """Matmul by the compiled GEMM."""
    want = dot_general_p.impl(x, y, **params_of(numbers))
    layout = gemm.layout_of(x, y, params_of(numbers))
    assert layout is not None
    out = np.full(want.shape, 77, want.dtype)
    function = gemm.function_for(COMPILER, want.dtype)
    addresses = [a.__array_interface__["data"][0] for a in (x, y, out)]
    function(layout, *addresses, threads)
    return out, want


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_products(name, dtype):
    rng = np.random.default_rng(0)
    left, right, numbers = CASES[name]
    x, y = (make(lambda shape: rng.integers(-3, 4, shape).astype(dtype)) for make in (left, right))
    got, want = product(x, y, numbers, threads=2)
    np.testing.assert_array_equal(got, want)  # sums of small integers are exact


SIZES = [(271, 600, 530), (1000, 40, 33), (20, 300, 700), (3, 300, 700), (1, 64, 1000)]


@pytest.mark.parametrize(("m", "k", "n"), SIZES)
def test_results_do_not_depend_on_the_number_of_threads(m, k, n):
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (k, n)))
    one, want = product(x, y, MATRICES, threads=1)
    np.testing.assert_allclose(one, want, atol=1e-4)
    for threads in (2, 3, 7):
        np.testing.assert_array_equal(product(x, y, MATRICES, threads)[0], one)


@pytest.mark.parametrize(("m", "k", "n"), [(3, 7, 129), (7, 15, 385), (2, 40, 257)])
def test_nor_do_those_of_a_column_alone(m, k, n):
    """A thread may get one column of a rhs whose columns are apart."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((m, k), dtype=np.float32), rng.standard_normal((n, k), dtype=np.float32).T
    one, _ = product(x, y, MATRICES, threads=1)
    for threads in (2, 3, 7):
        np.testing.assert_array_equal(product(x, y, MATRICES, threads)[0], one)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 100])
def test_products_of_few_columns(rows, dtype):
    """Short and overlapping vectors, and terms that are left after the last vector."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.integers(-3, 4, shape).astype(dtype)
    for n in range(1, 36):
        for k in (1, 3, 8, 21):
            x, y = draw(rows, k), draw(k, n)
            for lhs, rhs in ((x, y), (np.asfortranarray(x), y), (x, np.asfortranarray(y))):
                got, want = product(lhs, rhs, MATRICES, threads=2)
                np.testing.assert_array_equal(got, want)


def test_what_is_not_finite_stays_in_its_row_and_column():
    x, y = np.ones((20, 9), np.float32), np.ones((9, 35), np.float32)
    x[19, 3], y[8, 34] = np.nan, np.inf
    got, want = product(x, y, MATRICES, threads=1)
    np.testing.assert_array_equal(got, want)
    assert np.isfinite(got[:19, :34]).all()


LEFT = {  # lhs, rhs, dimension numbers of matmuls left to BLAS
    "nothing to sum": ((64, 0), (0, 64), MATRICES),
    "summed axes apart": ((32, 5, 6), (6, 5, 64), (((1, 2), (1, 0)), ((), ()))),
    "columns apart": ((32, 6), (8, 6, 9), (((1,), (1,)), ((), ()))),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_blas(name):
    left, right, numbers = LEFT[name]
    assert gemm.layout_of(np.ones(left), np.ones(right), params_of(numbers)) is None


# -- in programs ---------------------------------------------------------------------------------------


def attention(x, w):
    """Matmuls of slices, batched: (4, 32, 64), (64, 192) -> (4, 32, 2, 32)."""
    q, k, v = bnp.split((x @ w).reshape(4, 32, 3, 2, 32), 3, axis=2)
    q, k, v = (bnp.squeeze(a, 2) for a in (q, k, v))
    weights = bnp.einsum("bqhd,bkhd->bhqk", q, k)
    return bnp.einsum("bhqk,bkhd->bqhd", weights, v)


def drawn(dtype="float32"):
    rng = np.random.default_rng(1)
    return [from_numpy(rng.integers(-2, 3, s).astype(dtype)) for s in ((4, 32, 64), (64, 192))]


def program_of(fun, *args):
    return bf.jit(fun).lower(*args).compile().program


def test_a_program_multiplies_views_as_they_lie(monkeypatch):
    monkeypatch.setattr(config, "host_compiler", "always")
    x, w = drawn()
    assert not program_of(attention, x, w).run.calls_blas
    gradient = lambda x, w: bf.grad(lambda x, w: attention(x, w).sum(), argnums=(0, 1))(x, w)
    assert not program_of(gradient, x, w).run.calls_blas
    np.testing.assert_array_equal(bf.jit(attention)(x, w), attention(x, w))
    for got, want in zip(bf.jit(gradient)(x, w), gradient(x, w), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("why", ["no OpenMP", "int32"])
def test_what_a_program_leaves_to_blas_is_said(why, monkeypatch, capsys):
    monkeypatch.setattr(config, "host_compiler", "always")
    monkeypatch.setattr(config, "debug", "compile")
    if why == "no OpenMP":
        monkeypatch.setattr(COMPILER, "openmp", False)
    x, w = drawn("float32" if why == "no OpenMP" else "int32")
    program = program_of(lambda x, w: x @ w, x, w)
    assert isinstance(program, host_program.HostProgram)
    assert program.run.calls_blas
    assert "[4,32,64]" in capsys.readouterr().err
    np.testing.assert_array_equal(bf.jit(lambda x, w: x @ w)(x, w), np.asarray(x) @ np.asarray(w))
