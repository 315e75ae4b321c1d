"""Scatter kernels: they compile for every dtype, and follow NumPy's update order."""

import numpy as np
import pytest

from benchmarks.harness.kernel_resources import resources
from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda.driver import driver, nvrtc
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.library import scatter as cuda_scatter

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
    text = cuda_scatter.source(how, dtype, "int32", 4, clip=how == "add")
    binary = nvrtc.build(text, "sm_80", "scatter")
    assert all(r.spill_stores == 0 for r in resources(binary).values())


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
    rows = rng.integers(-2, height + 2, n)
    want = x.copy()
    combine = {"set": lambda a, u: u, "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
    for r, u in zip(rows, updates):
        if 0 <= r < height:
            want[r] = combine[how](want[r], u)
    with cuda_memory.library_scope(0):
        xp = cupy_library().xp
        arrays = (xp.asarray(x), xp.asarray(rows), xp.asarray(updates))
        got = xp.asnumpy(cupy_library().scatter(*arrays, how, np.dtype(np.float32)))
    if n <= 2 * height or how not in ("add", "mul"):
        np.testing.assert_array_equal(got, want)  # the same order of additions: the same bits
    else:  # rows of very many updates are split
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(driver.available() is not None, reason=str(driver.available()))
@pytest.mark.parametrize("clip", [True, False])
def test_rows_that_there_are_not(clip):
    import blufunc as bf
    from blufunc import lax

    rng = np.random.default_rng(0)
    x, u = rng.standard_normal((5, 8)).astype(np.float32), rng.standard_normal((300, 8)).astype(np.float32)
    rows = rng.integers(-3, 9, (300, 1)).astype(np.int32)
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    f = lambda x, rows, u: lax.scatter_add(x, rows, u, numbers, mode="clip" if clip else "drop")
    want = np.asarray(f(x, rows, u))
    on_device = [bf.device_put(a, bf.devices("cuda")[0]) for a in (x, rows, u)]
    np.testing.assert_allclose(np.asarray(bf.jit(f)(*on_device)), want, rtol=1e-5, atol=1e-5)
