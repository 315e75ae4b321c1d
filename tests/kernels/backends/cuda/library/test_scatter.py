"""Scatter kernels: they compile for every dtype, and follow NumPy's update order."""

import numpy as np
import pytest

from benchmarks.harness.kernel_resources import resources
from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda.driver import driver, nvrtc
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.library.scatter import bins, op, partitions, rows

DTYPES = [dtypes.float32, dtypes.bfloat16, dtypes.float64, dtypes.int32, dtypes.uint8, dtypes.complex64]
WAYS = ["set", "add", "mul", "max", "min"]
no_compiler = pytest.mark.skipif(nvrtc.available() is not None, reason=str(nvrtc.available()))


@pytest.mark.sampled(3)
@no_compiler
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_compiles_without_spills(how, dtype):
    if dtypes.is_complex(dtype) and how in ("max", "min"):
        pytest.skip("complex numbers have no order")
    clip = how == "add"
    texts = [rows.source(how, dtype, "int32", 4, clip)]
    if bins.suits(how, dtype, 1 << 20, 100, 1):
        texts.append(bins.source(how, dtype, "int64", clip))
    if partitions.suits(how, dtype, 1 << 22, 50_000, 1):
        texts.append(partitions.source(how, dtype, "int32", 8))
    for text in texts:
        binary = nvrtc.build(text, "sm_80", "scatter")
        assert all(r.spill_stores == 0 for r in resources(binary).values())


@no_compiler
@pytest.mark.parametrize("height", [1, 31, 1000, 1023, 50_000, 1 << 20, (1 << 31) - 1])
def test_digits_hold_every_row(height):
    passes, bits = rows.digits(height)
    assert height < 1 << passes * bits and 5 <= bits <= 8  # height itself is the key of rows out of range
    assert passes == 1 or height >> 8


@pytest.mark.parametrize(
    ("how", "dtype", "n", "height", "width", "suits"),
    [
        ("add", "float32", 1 << 24, 1024, 1, True),
        ("add", "int64", 1 << 20, 1000, 1, True),
        ("max", "float64", 1 << 20, 1000, 1, True),
        ("set", "float32", 1 << 24, 1024, 1, False),  # the last update counts
        ("add", "complex64", 1 << 24, 1024, 1, False),
        ("add", "uint8", 1 << 24, 1024, 1, False),
        ("add", "float32", 1 << 24, 50_000, 1, False),  # the bins do not fit
        ("add", "float32", 2000, 1024, 1, False),
        ("add", "float32", 1 << 24, 1024, 2, False),
    ],
)
def test_which_scatters_have_bins(how, dtype, n, height, width, suits):
    assert bins.suits(how, np.dtype(dtype), n, height, width) == suits
    texts = op.texts(how, np.dtype(dtype), np.dtype(np.int32), n, height, width, False)
    assert ("scatter_bins" in texts[0][1]) == suits
    assert (len(texts) == 1) == (suits or not rows.is_sorted(n))


@pytest.mark.parametrize(
    ("how", "dtype", "n", "height", "suits"),
    [
        ("add", "float32", 1 << 24, 50_000, True),
        ("add", "float16", 1 << 20, 4000, True),
        ("mul", "int32", 1 << 20, 4000, True),
        ("add", "float32", 1 << 24, 1 << 20, False),  # the bins of a partition do not fit
        ("add", "float64", 1 << 24, 50_000, False),  # positions are sorted
        ("add", "float32", 100_000, 50_000, False),  # more bins than updates
        ("set", "float32", 1 << 24, 50_000, False),
    ],
)
def test_which_scatters_have_partitions(how, dtype, n, height, suits):
    assert partitions.suits(how, np.dtype(dtype), n, height, 1) == suits
    texts = op.texts(how, np.dtype(dtype), np.dtype(np.int64), n, height, 1, True)
    assert any("partitions" in name for _, name in texts) == suits


@pytest.mark.gpu
@pytest.mark.skipif(driver.available() is not None, reason=str(driver.available()))
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(
    "height, n, width", [(7, 0, 3), (1, 1000, 8), (50, 3000, 12), (5000, 300, 1), (40, 64, 768)]
)
def test_order_of_updates(how, height, n, width):
    from blufunc.kernels.backends.cuda.library.cupy_ops import cupy_library

    rng = np.random.default_rng(height + n)
    x = rng.standard_normal((height, width)).astype(np.float32)
    updates = rng.standard_normal((n, width)).astype(np.float32)
    at = rng.integers(-2, height + 2, n)
    want = x.copy()
    combine = {"set": lambda a, u: u, "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
    for r, u in zip(at, updates):
        if 0 <= r < height:
            want[r] = combine[how](want[r], u)
    with cuda_memory.library_scope(0):
        xp = cupy_library().xp
        arrays = (xp.asarray(x), xp.asarray(at), xp.asarray(updates))
        got = xp.asnumpy(cupy_library().scatter(*arrays, how, np.dtype(np.float32)))
    if n <= 2 * height or how not in ("add", "mul"):
        np.testing.assert_array_equal(got, want)  # the same order of additions: the same bits
    else:  # rows of very many updates are split
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def expected(x, at, updates, how):
    """The result in float64 or in integers."""
    want = x.astype(np.float64 if x.dtype.kind == "f" else x.dtype)
    inside = (at >= 0) & (at < len(x))
    ufunc = {"add": np.add, "max": np.maximum, "min": np.minimum}[how]
    ufunc.at(want, at[inside], updates[inside].astype(want.dtype))
    return want


def draw_rows(rng, kind, n, height):
    """Rows of updates: evenly drawn, most of one row, or sorted."""
    at = rng.integers(-2, height + 2, n)
    if kind == "skewed":
        at[rng.random(n) < 0.9] = height // 2
    return np.sort(at) if kind == "sorted" else at


@pytest.mark.gpu
@pytest.mark.skipif(driver.available() is not None, reason=str(driver.available()))
@pytest.mark.parametrize("kind", ["even", "skewed", "sorted"])
@pytest.mark.parametrize(
    ("how", "dtype", "height", "n", "width"),
    [
        ("add", "float32", 1000, 300_001, 1),  # bins
        ("add", "float64", 33, 200_000, 1),
        ("add", "int32", 5, 100_003, 1),
        ("add", "int64", 1024, 1 << 20, 1),
        ("max", "float32", 700, 100_000, 1),
        ("min", "int32", 700, 100_000, 1),
        ("add", "float32", 40, 70_000, 12),  # positions sorted in one pass
        ("add", "float32", 255, 70_000, 4),
        ("add", "float32", 50_257, 200_003, 3),  # in two
        ("add", "float64", 1 << 20, 100_000, 1),  # in three
        ("add", "float32", 60_000, 100_000, 1),  # and the updates
        ("add", "float32", 60_000, 1 << 20, 1),  # partitions
        ("max", "float16", 3333, 300_007, 1),
        ("min", "float32", 90_001, 1 << 20, 1),
        ("max", "float32", 1 << 21, 100_000, 1),
        ("add", "int32", 60_000, 1 << 20, 1),  # atomics
        ("max", "int64", 60_000, 100_000, 3),
        ("min", "uint32", 50, 100_000, 2),
    ],
)
def test_many_updates(how, dtype, height, n, width, kind):
    from blufunc.kernels.backends.cuda.library.cupy_ops import cupy_library

    rng = np.random.default_rng(height + n)
    at = draw_rows(rng, kind, n, height)
    draw = lambda *shape: (
        rng.standard_normal(shape)
        if dtype.startswith("f")
        else rng.integers(-999 * (dtype[0] == "i"), 999, shape)
    ).astype(dtype)
    x, updates = draw(height, width), draw(n, width)
    want = expected(x, at, updates, how)
    with cuda_memory.library_scope(0):
        xp = cupy_library().xp
        arrays = (xp.asarray(x), xp.asarray(at), xp.asarray(updates))
        got, repeated = (xp.asnumpy(cupy_library().scatter(*arrays, how, np.dtype(dtype))) for _ in range(2))
    np.testing.assert_array_equal(got, repeated)  # bit by bit
    if how == "add" and dtype.startswith("f"):
        scale = expected(np.abs(x), at, np.abs(updates), "add")
        assert np.all(np.abs(got - want) <= scale * (1e-6 if dtype == "float32" else 1e-14))
    else:
        np.testing.assert_array_equal(got, want.astype(dtype))


@pytest.mark.gpu
@pytest.mark.skipif(driver.available() is not None, reason=str(driver.available()))
@pytest.mark.parametrize("how", ["set", "mul"])
def test_sorted_updates_keep_their_order(how):
    from blufunc.kernels.backends.cuda.library.cupy_ops import cupy_library

    rng = np.random.default_rng(3)
    n, height = rows.SORTED + 17, 1 << 16
    at = rng.integers(-2, height + 2, n)
    x, updates = (rng.standard_normal((m, 2)).astype(np.float32) for m in (height, n))
    want = x.copy()
    for r, u in zip(at, updates):
        if 0 <= r < height:
            want[r] = u if how == "set" else want[r] * u
    with cuda_memory.library_scope(0):
        xp = cupy_library().xp
        arrays = (xp.asarray(x), xp.asarray(at), xp.asarray(updates))
        got = xp.asnumpy(cupy_library().scatter(*arrays, how, np.dtype(np.float32)))
    np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
@pytest.mark.skipif(driver.available() is not None, reason=str(driver.available()))
@pytest.mark.parametrize("clip", [True, False])
def test_rows_that_there_are_not(clip):
    import blufunc as bf
    from blufunc import lax

    rng = np.random.default_rng(0)
    x, u = rng.standard_normal((5, 8)).astype(np.float32), rng.standard_normal((300, 8)).astype(np.float32)
    at = rng.integers(-3, 9, (300, 1)).astype(np.int32)
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    f = lambda x, rows, u: lax.scatter_add(x, rows, u, numbers, mode="clip" if clip else "drop")
    want = np.asarray(f(x, at, u))
    on_device = [bf.device_put(a, bf.devices("cuda")[0]) for a in (x, at, u)]
    np.testing.assert_allclose(np.asarray(bf.jit(f)(*on_device)), want, rtol=1e-5, atol=1e-5)
