"""BLAS matmuls split across threads, against unsplit ones."""

import threading

import numpy as np
import pytest

from blufunc.core.ops.dot import dot_general_p
from blufunc.kernels.backends.cpu import blas, toolchain

CASES = {  # lhs, rhs, dimension numbers
    "matrices": ((300, 40), (40, 30), (((1,), (0,)), ((), ()))),
    "of rows": ((4, 75, 40), (40, 30), (((2,), (0,)), ((), ()))),
    "gradient of weights": ((4, 50, 31), (4, 50, 20), (((0, 1), (0, 1)), ((), ()))),
    "batches": ((5, 20, 30), (5, 30, 10), (((2,), (1,)), ((0,), (0,)))),
    "batches inside": ((4, 10, 3, 6), (4, 12, 3, 6), (((3,), (3,)), ((0, 2), (0, 2)))),
    "a vector": ((40,), (40, 30), (((0,), (0,)), ((), ()))),
    "two vectors": ((40,), (40,), (((0,), (0,)), ((), ()))),
    "one row": ((1, 40), (40, 30), (((1,), (0,)), ((), ()))),
}


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "bfloat16"])
def test_parts_make_the_whole(name, threads, dtype, monkeypatch):
    from blufunc.core.ir.dtypes import as_dtype

    monkeypatch.setattr(blas, "WORTH_SHARING", 0)
    monkeypatch.setattr(toolchain, "threads", lambda: threads)
    left, right, numbers = CASES[name]
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-3, 4, shape).astype(as_dtype(dtype)) for shape in (left, right))
    params = {"dimension_numbers": numbers, "precision": None, "preferred_element_type": None}
    want = dot_general_p.impl(x, y, **params)
    got = np.full(want.shape, 77, want.dtype)
    blas.product_into(got, x, y, params)
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


def test_a_thread_that_fails_says_so(monkeypatch):
    monkeypatch.setattr(blas, "WORTH_SHARING", 0)
    monkeypatch.setattr(toolchain, "threads", lambda: 2)
    params = {
        "dimension_numbers": (((1,), (0,)), ((), ())),
        "precision": None,
        "preferred_element_type": None,
    }
    x, out = np.zeros((4, 3), np.float32), np.zeros((4, 9), np.float32)
    with pytest.raises(ValueError, match="mismatch"):
        blas.product_into(out, x, np.zeros((3, 5), np.float32), params)


def blas_threads():
    return [i["num_threads"] for i in blas._controller().info() if i["user_api"] == "blas"]


def test_blas_gets_its_threads_back():
    with blas._controller().limit(limits=2, user_api="blas"):
        before = blas_threads()
        entered, leave = threading.Event(), threading.Event()

        def other():
            with blas.one_thread_each:
                entered.set()
                leave.wait(10)

        thread = threading.Thread(target=other)
        with blas.one_thread_each:
            thread.start()
            assert entered.wait(10)
            with blas.one_thread_each:  # a nested program
                assert set(blas_threads()) <= {1}
            assert set(blas_threads()) <= {1}
        assert blas_threads() == before  # although the other thread is still inside
        leave.set()
        thread.join()
        assert blas_threads() == before
        with blas.one_thread_each:
            assert set(blas_threads()) <= {1}
        assert blas_threads() == before
