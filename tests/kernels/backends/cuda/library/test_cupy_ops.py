"""Library entries against ``impl``: with NumPy in CuPy's place, and on a device."""

import numpy as np
import pytest
import scipy.linalg
import scipy.special

from blufunc.config import config
from blufunc.core.arrays.errstate import ignoring_fp_errors
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ops import gather_scatter, sort
from blufunc.core.ops.linalg import factor as linalg_factor
from blufunc.core.ops.linalg import spectral
from blufunc.core.ops.windows import GatherScatterMode, ScatterDimensionNumbers
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.library import cupy_entries, cupy_ops
from blufunc.kernels.ops.gemm import PRODUCTS
from tests.op_table.rows import OPS


class NumpyLibrary:
    """``CupyLibrary`` by NumPy and SciPy."""

    xp, special = np, scipy.special

    def constant(self, x):
        return x

    def order(self, x, axis):
        return np.argsort(x, axis, stable=True)

    def solve_triangles(self, a, b, lower, transposed, conjugated, unit):
        a = np.where(np.eye(a.shape[-1], dtype=bool), 1, a) if unit else a
        a = np.tril(a) if lower else np.triu(a)
        a = a.conj() if conjugated else a
        return np.linalg.solve(a.swapaxes(-1, -2) if transposed else a, b).astype(b.dtype)

    def cholesky(self, x):
        return linalg_factor.cholesky_p.impl(x)

    def lu(self, x):
        return linalg_factor.lu_p.impl(x)[:2]

    def permutation(self, pivots, rows):
        return linalg_factor.lu_pivots_to_permutation_p.impl(pivots.astype(np.int32), permutation_size=rows)

    def scatter(self, x, rows, updates, how, dtype):
        raw = x.dtype
        x, updates = (cupy_entries.widened(np, a, dtype) for a in (x, updates))
        combine = {
            "add": np.add,
            "mul": np.multiply,
            "max": np.maximum,
            "min": np.minimum,
            "set": lambda a, u: u,
        }
        out = x.copy()
        for row, update in zip(rows, updates):
            if row < len(x):
                out[row] = combine[how](out[row], update)
        return cupy_entries.narrowed(np, out, dtype, raw)


ROWS = [op for op in OPS if op.prim.name in cupy_ops.TABLE]
CASES = [pytest.param(op, d, id=f"{op.id}-{d}") for op in ROWS for d in op.dtypes]
# Each dtype is a kernel to compile, so that a device gets fewer of them.
ON_DEVICE = [
    pytest.param(op, d, id=f"{op.id}-{d}")
    for op in ROWS
    for d in op.dtypes
    if d in ("float32", "bfloat16", "complex64") or d == op.dtypes[0]
]


def raw(x):
    x = np.asarray(x)
    return np.ascontiguousarray(x).reshape(x.shape).view(cuda_memory.raw_dtype(x.dtype))


def expected(prim, xs, params):
    out = ignoring_fp_errors(lambda: prim.impl(*xs, **params))
    return [np.asarray(x) for x in (out if prim.multiple_results else [out])]


def result_types(prim, xs, params):
    out = prim.typed(tuple(ShapedArray(x.shape, x.dtype) for x in xs), params)
    return list(out) if prim.multiple_results else [out]


def on_numpy(prim, xs, params, library=None):
    outs = result_types(prim, xs, params)
    operands = [x.dtype for x in xs]
    results = cupy_ops.evaluate(library or NumpyLibrary(), prim, [raw(x) for x in xs], operands, params, outs)
    return [raw(r).view(a.dtype) for r, a in zip(results, outs)]


def assert_close(got, want, prim):
    for g, w in zip(got, want, strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        if not dtypes.is_inexact(w.dtype):
            np.testing.assert_array_equal(g, w)
            continue
        wide = np.complex128 if dtypes.is_complex(w.dtype) else np.float64
        eps = float(dtypes.finfo(w.dtype).eps)
        scale = float(np.nanmax(np.abs(w.astype(wide)), initial=1, where=np.isfinite(w.astype(wide))))
        factor = 2 if w.dtype.itemsize == 2 else 256
        np.testing.assert_allclose(
            g.astype(wide), w.astype(wide), rtol=factor * eps, atol=factor * eps * scale
        )


def agree(prim, got, xs, params):
    """Compare ``got`` with ``impl``; ambiguous factors are compared by their product."""
    name, want = prim.name, expected(prim, xs, params)
    if name == "svd" and len(got) == 3:
        k = got[1].shape[-1]
        x = (got[0][..., :k] * got[1][..., None, :]) @ got[2][..., :k, :]
        assert_close([got[1], x.astype(xs[0].dtype)], [want[1], xs[0]], prim)
    elif name == "eigh" and len(got) == 2:
        low = np.tril(xs[0], -1)
        full = low + low.conj().swapaxes(-1, -2) + np.eye(low.shape[-1]) * xs[0].real
        x = (got[0] * got[1][..., None, :]) @ got[0].conj().swapaxes(-1, -2)
        assert_close([x.astype(xs[0].dtype), got[1]], [full.astype(xs[0].dtype), want[1]], prim)
    elif name == "qr":
        assert_close([(got[0] @ got[1]).astype(xs[0].dtype)], [xs[0]], prim)
        assert not np.tril(got[1], -1).any()
    else:
        assert_close(got, want, prim)


@pytest.mark.parametrize("op, dtype", CASES)
def test_entries_give_what_the_definition_gives(op, dtype):
    xs = op.sample(dtype)
    if cupy_ops.is_host_fallback(op.prim, [x.dtype for x in xs], op.params):
        pytest.skip("computed on the host")
    if any(not x.size for x in xs):
        pytest.skip("nothing to compute")
    agree(op.prim, on_numpy(op.prim, xs, op.params), xs, op.params)


def test_the_table_of_operations_covers_the_table_of_entries():
    """Except fused matmul-adds, which rewrites/test_gemm_epilogue.py tests."""
    made = {prim.name for prim in PRODUCTS} - {"dot_general"}
    assert {op.prim.name for op in ROWS} == set(cupy_ops.TABLE) - made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nan_sorts_last_and_counts_as_largest(dtype):
    x = np.array([[2, np.nan, -1, 0], [np.inf, 3, -np.inf, np.nan]]).astype(dtypes.as_dtype(dtype))
    by = {"dimension": 1, "is_stable": True, "num_keys": 1}
    agree(sort.sort_p, on_numpy(sort.sort_p, [x], by), [x], by)
    agree(sort.top_k_p, on_numpy(sort.top_k_p, [x], {"k": 2}), [x], {"k": 2})


def digits(x):
    """The digits of floats in a radix sort: zeros are equal, NaN has a sign."""
    bits = np.where(x == 0, 0, x).astype(x.dtype).view(f"i{x.dtype.itemsize}")
    return np.where(bits < 0, ~bits ^ np.iinfo(bits.dtype).min, bits)


class RadixModule:
    """NumPy with a ``sort`` of floats by their digits."""

    def __getattr__(self, name):
        return getattr(np, name)

    def sort(self, x, axis):
        return np.take_along_axis(x, np.argsort(digits(x), axis, stable=True), axis)


class RadixLibrary(NumpyLibrary):
    """Sorts floats by their digits, as CuPy does in arrays of rank 1."""

    xp = RadixModule()

    def order(self, x, axis):
        return np.argsort(digits(x), axis, stable=True)


SIGNED = np.array([2, -np.nan, -1, 0.0, np.nan, -np.inf, -0.0, -np.nan, np.inf])
BY_ONE = {"dimension": 0, "is_stable": True, "num_keys": 1}
SORTS = {
    "sort": (sort.sort_p, 1, BY_ONE),
    "with a value": (sort.sort_p, 2, BY_ONE),
    "by two keys": (sort.sort_p, 3, {**BY_ONE, "num_keys": 2}),
    "top_k": (sort.top_k_p, 1, {"k": 5}),
}


def signed(name, dtype):
    """A primitive, its operands with NaN of both signs, and its parameters."""
    prim, count, params = SORTS[name]
    x = SIGNED.astype(dtypes.as_dtype(dtype))
    xs = [x, x[::-1].copy(), np.arange(len(x), dtype=np.int32)]
    return prim, [*xs[: max(count - 1, 1)], *([xs[2]] if count > 1 else [])], params


@pytest.mark.parametrize("name", SORTS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_nan_with_a_sign_sorts_last_too(name, dtype):
    prim, xs, params = signed(name, dtype)
    agree(prim, on_numpy(prim, xs, params, RadixLibrary()), xs, params)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SORTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_with_a_sign_sorts_last_on_a_device(name, dtype):
    prim, xs, params = signed(name, dtype)
    outs = result_types(prim, xs, params)
    got = cupy_ops.run(prim, [cuda_memory.to_device(x) for x in xs], params, outs)
    agree(prim, [cuda_memory.to_host(b) for b in got], xs, params)


@pytest.mark.parametrize("prim", [gather_scatter.scatter_p, gather_scatter.scatter_add_p], ids=str)
@pytest.mark.parametrize("mode", list(GatherScatterMode), ids=str)
def test_repeated_and_outlying_indices(prim, mode):
    numbers = ScatterDimensionNumbers((1,), (0,), (0,))
    indices = np.array([[2], [2], [-1], [5], [0], [2]], np.int32)
    if mode is GatherScatterMode.PROMISE_IN_BOUNDS:
        indices = np.clip(indices, 0, 3)
    xs = [np.ones((4, 3), np.float32), indices, np.arange(18, dtype=np.float32).reshape(6, 3)]
    params = {
        "dimension_numbers": numbers,
        "indices_are_sorted": False,
        "unique_indices": False,
        "mode": mode,
    }
    agree(prim, on_numpy(prim, xs, params), xs, params)


def test_matrices_without_a_factor_are_nan_and_their_neighbours_are_not():
    good, bad = np.array([[4.0, 1], [1, 3]], np.float32), np.array([[1.0, 2], [2, 1]], np.float32)
    broken = np.array([[np.nan, 1], [1, 1]], np.float32)
    x = np.stack([good, bad, broken, good])
    (out,) = on_numpy(linalg_factor.cholesky_p, [x], {})
    assert np.isnan(out[[1, 2]][:, [0, 1, 1], [0, 0, 1]]).all()
    assert not out[:, 0, 1].any()
    np.testing.assert_allclose(out[[0, 3]], np.linalg.cholesky(x[[0, 3]]), rtol=1e-6)
    vectors, values = on_numpy(spectral.eigh_p, [x], {"compute_vectors": True})
    assert np.isnan(vectors[2]).all() and np.isnan(values[2]).all()
    assert np.isfinite(values[[0, 1, 3]]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.complex64], ids=lambda d: d.__name__)
def test_what_lies_above_the_diagonal_is_not_read(dtype):
    x = np.array([[4, 7], [1, 3]], dtype)
    if dtype is np.complex64:  # the imaginary part of the diagonal does not count
        x += np.array([[0, 0], [1j, 5j]], dtype)
    marred = x.copy()
    marred[0, 1] = np.nan
    for prim, params in (
        (linalg_factor.cholesky_p, {}),
        (spectral.eigh_p, {"compute_vectors": False}),
    ):
        assert_close(on_numpy(prim, [marred], params), on_numpy(prim, [x], params), prim)
        agree(prim, on_numpy(prim, [marred], params), [x], params)


def test_bfloat16_goes_there_and_back():
    bits, raw16 = np.arange(1 << 16, dtype=np.uint16), np.dtype(np.uint16)
    values = bits.view(dtypes.bfloat16)
    wide = cupy_entries.widened(np, bits, dtypes.bfloat16)
    np.testing.assert_array_equal(wide, values.astype(np.float32))
    number = ~np.isnan(wide)
    np.testing.assert_array_equal(
        cupy_entries.narrowed(np, wide, dtypes.bfloat16, raw16)[number], bits[number]
    )
    rng = np.random.default_rng(0)
    x = rng.integers(0, 1 << 32, 100_000, np.uint32).view(np.float32)
    x = np.concatenate([x, (bits.astype(np.uint32) << 16 | 0x8000).view(np.float32)])  # ties
    got = cupy_entries.narrowed(np, x, dtypes.bfloat16, raw16).view(dtypes.bfloat16).astype(np.float32)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(got, x.astype(dtypes.bfloat16).astype(np.float32))


def test_what_is_left_to_the_host():
    f32, f8 = dtypes.float32, dtypes.float8_e4m3fn
    assert cupy_ops.is_host_fallback(spectral.eig_p)
    assert not cupy_ops.is_host_fallback(linalg_factor.qr_p)
    assert cupy_ops.is_host_fallback(linalg_factor.qr_p, [f32], {"full_matrices": True, "pivoting": True})
    assert cupy_ops.is_host_fallback(sort.sort_p, [f8], {})
    assert not cupy_ops.is_host_fallback(sort.sort_p, [f32], {})
    assert not cupy_ops.is_host_fallback(gather_scatter.gather_p, [f8, dtypes.int32], {}), "it moves bits"


# -- on a device -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("op, dtype", ON_DEVICE)
def test_entries_on_a_device(op, dtype):
    xs = op.sample(dtype)
    if cupy_ops.is_host_fallback(op.prim, [x.dtype for x in xs], op.params):
        pytest.skip("computed on the host")
    outs = result_types(op.prim, xs, op.params)
    got = cupy_ops.run(op.prim, [cuda_memory.to_device(x) for x in xs], op.params, outs)
    assert [b.dtype for b in got] == [a.dtype for a in outs]
    agree(op.prim, [cuda_memory.to_host(b) for b in got], xs, op.params)


@pytest.mark.gpu
def test_the_host_does_the_rest_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(config, "debug", "fusion")
    x = np.array([[2.0, 1], [0, 3]], np.float32)
    params = {"left": False, "right": False}
    outs = result_types(spectral.eig_p, [x], params)
    (got,) = cupy_ops.run(spectral.eig_p, [cuda_memory.to_device(x)], params, outs)
    np.testing.assert_allclose(np.sort(cuda_memory.to_host(got).real), [2, 3], rtol=1e-6)
    assert "eig is computed on the host" in capsys.readouterr().err


@pytest.mark.gpu
def test_scatter_add_is_the_same_every_time():
    rng = np.random.default_rng(0)
    numbers = ScatterDimensionNumbers((1,), (0,), (0,))
    x, indices = np.zeros((50, 64), np.float32), rng.integers(0, 50, (20_000, 1), np.int32)
    updates = rng.standard_normal((20_000, 64)).astype(np.float32)
    params = {
        "dimension_numbers": numbers, "indices_are_sorted": False, "unique_indices": False,
        "mode": GatherScatterMode.FILL_OR_DROP,
    }  # fmt: skip
    prim = gather_scatter.scatter_add_p
    buffers = [cuda_memory.to_device(v) for v in (x, indices, updates)]
    outs = result_types(prim, [x, indices, updates], params)
    first, second = (cuda_memory.to_host(cupy_ops.run(prim, buffers, params, outs)[0]) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, expected(prim, [x, indices, updates], params)[0], rtol=1e-4, atol=1e-3)
