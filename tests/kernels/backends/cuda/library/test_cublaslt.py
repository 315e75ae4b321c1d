"""GEMM layouts against a model of the library, and descriptors without a device."""

import ctypes
import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from blufunc import errors
from blufunc.core.ir import dtypes
from blufunc.core.ops.dot import dot_general_p
from blufunc.kernels.backends.cuda.driver import driver, sm_reservation
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.library import cublaslt
from blufunc.kernels.backends.cuda.library import matmul as cuda_product
from blufunc.kernels.gemm_layout import Copies, Gemm, Layout, column_major, plan_dot_general
from blufunc.kernels.loopir.index import strides_of

F32, F64, BF16, F16 = dtypes.float32, dtypes.float64, dtypes.bfloat16, dtypes.float16


def model(call, a, b, d):
    """Model of cuBLASLt: column-major matrices with stride ``ld``; writes d."""

    def matrix(flat, side, i):
        strides = (flat.itemsize, side.ld * flat.itemsize)
        start = flat[i * side.stride :]
        assert (side.columns - 1) * side.ld + side.rows <= len(start) and side.ld >= side.rows
        return np.lib.stride_tricks.as_strided(start, (side.rows, side.columns), strides)

    for i in range(call.batch):
        x, y = matrix(a, call.a, i), matrix(b, call.b, i)
        x, y = (x.T if call.trans_a else x), (y.T if call.trans_b else y)
        assert x.shape[1] == y.shape[0] and (x.shape[0], y.shape[1]) == (call.d.rows, call.d.columns)
        matrix(d, call.d, i)[:] = x @ y


def flat_from(x):
    """All memory from the first element of a view on."""
    base = x if x.base is None else x.base
    offset = (x.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // x.itemsize
    assert base.flags.c_contiguous
    return base.reshape(-1)[offset:]


def by_product(x, y, numbers):
    """``dot_general`` by ``plan_dot_general`` and the model, with copies as planned."""
    strides = [tuple(s // v.itemsize for s in v.strides) for v in (x, y)]
    plan = plan_dot_general(x.shape, strides[0], y.shape, strides[1], numbers)
    copied = []
    if isinstance(plan, Copies):
        operands = []
        inverse = []
        for v, order in ((x, plan.lhs), (y, plan.rhs)):
            copied.append(order is not None)
            order = tuple(range(v.ndim)) if order is None else order
            operands.append(np.ascontiguousarray(v.transpose(order)) if copied[-1] else v)
            inverse.append([order.index(d) for d in range(v.ndim)])
        (lc, rc), (lb, rb) = numbers
        to = lambda axes, places: tuple(places[d] for d in axes)
        numbers = ((to(lc, inverse[0]), to(rc, inverse[1])), (to(lb, inverse[0]), to(rb, inverse[1])))
        x, y = operands
        strides = [tuple(s // v.itemsize for s in v.strides) for v in (x, y)]
        plan = plan_dot_general(x.shape, strides[0], y.shape, strides[1], numbers)
    assert isinstance(plan, Layout), "after the copies it must be one product"
    gemm = Gemm(plan, F64, F64, F64, "f64")
    d = np.zeros(plan.batch * plan.m * plan.n)
    model(column_major(gemm), flat_from(y), flat_from(x), d)
    return d, copied, plan


def made(shape, order=None, cut=None):
    """Random array; ``order`` of axes in memory; ``cut`` from a larger array."""
    order = order or tuple(range(len(shape)))
    whole = [shape[d] + (cut[d] if cut else 0) for d in range(len(shape))]
    base = np.random.default_rng(0).standard_normal([whole[d] for d in order])
    x = base.transpose(np.argsort(order))
    return x[tuple(slice(n) for n in shape)]


MM = (((1,), (0,)), ((), ()))
BMM = (((2,), (1,)), ((0,), (0,)))

# name: lhs, rhs, numbers, whether lhs and rhs must be copied
LAYOUTS = {
    "plain": (made((3, 4)), made((4, 5)), MM, None),
    "lhs transposed": (made((3, 4), (1, 0)), made((4, 5)), MM, None),
    "rhs transposed": (made((3, 4)), made((4, 5), (1, 0)), MM, None),
    "both transposed": (made((3, 4), (1, 0)), made((4, 5), (1, 0)), MM, None),
    "contracted first axes": (made((4, 3)), made((4, 5)), (((0,), (0,)), ((), ())), None),
    "contracted last axes": (made((3, 4)), made((5, 4)), (((1,), (1,)), ((), ())), None),
    "columns of a larger array": (made((3, 4), cut=(0, 2)), made((4, 5), cut=(1, 3)), MM, None),
    "columns of a transposed one": (made((3, 4), (1, 0), cut=(3, 0)), made((4, 5)), MM, None),
    "every other column": (made((3, 8))[:, ::2], made((4, 5)), MM, (True, False)),
    "every other row": (made((6, 4))[::2], made((4, 5)), MM, None),
    "a broadcast row": (np.broadcast_to(made((4,)), (3, 4)), made((4, 5)), MM, (True, False)),
    "vector and matrix": (made((4,)), made((4, 5)), (((0,), (0,)), ((), ())), None),
    "matrix and strided vector": (made((3, 4)), made((4, 5))[:, 2], MM, None),
    "outer product": (made((3,)), made((5,)), (((), ()), ((), ())), None),
    "inner product": (made((4,)), made((4,)), (((0,), (0,)), ((), ())), None),
    "batch": (made((2, 3, 4)), made((2, 4, 5)), BMM, None),
    "batch of transposed": (made((2, 3, 4), (0, 2, 1)), made((2, 4, 5), (0, 2, 1)), BMM, None),
    "batch inside": (made((2, 3, 4), (1, 0, 2)), made((2, 4, 5), (1, 0, 2)), BMM, None),
    "batch innermost": (made((2, 3, 4), (1, 2, 0)), made((2, 4, 5)), BMM, (True, False)),
    "batch of one matrix": (made((2, 3, 4)), np.broadcast_to(made((4, 5)), (2, 4, 5)), BMM, None),
    "batch of size 1": (made((1, 3, 4)), made((1, 4, 5)), BMM, None),
    "two batch axes": (
        made((2, 3, 4, 5)), made((2, 3, 5, 6)), (((3,), (2,)), ((0, 1), (0, 1))), None
    ),
    "heads inside positions": (
        made((2, 3, 4, 5), (0, 2, 1, 3)), made((2, 3, 5, 6)), (((3,), (2,)), ((0, 1), (0, 1))), (True, False),
    ),
    "one example, heads inside positions": (
        made((1, 3, 4, 5), (0, 2, 1, 3)), made((1, 3, 4, 5), (0, 2, 1, 3)), (((3,), (3,)), ((0, 1), (0, 1))), None,
    ),
    "dense layer": (made((2, 3, 4)), made((4, 5)), (((2,), (0,)), ((), ())), None),
    "gradient of its weights": (made((2, 3, 4)), made((2, 3, 5)), (((0, 1), (0, 1)), ((), ())), None),
    "contracted axes in another order": (
        made((3, 4, 5)), made((5, 4, 2)), (((2, 1), (0, 1)), ((), ())), (False, True)
    ),
    "both orders alike": (made((3, 4, 5)), made((4, 5, 2)), (((2, 1), (1, 0)), ((), ())), None),
    "free axes apart": (made((3, 4, 2), (0, 2, 1)), made((4, 5)), (((1,), (0,)), ((), ())), None),
    "free axes around the contracted": (made((3, 4, 2)), made((4, 5)), (((1,), (0,)), ((), ())), (True, False)),
    "the larger is not copied": (
        made((3, 2, 4, 5)), made((5, 4, 2)), (((3, 2), (0, 1)), ((), ())), (False, True)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_contraction_is_one_product(name):
    x, y, numbers, copies = LAYOUTS[name]
    d, copied, _ = by_product(x, y, numbers)
    want = dot_general_p.impl(x, y, dimension_numbers=numbers, precision=None, preferred_element_type=None)
    np.testing.assert_allclose(d.reshape(want.shape), want, rtol=1e-12, atol=1e-12)
    assert tuple(copied) == (copies or ()), "no more copies than needed"


def test_contractions_of_all_kinds_of_axes():
    """One contracted and at most one batch axis of rank-3 operands, in every order."""
    sizes = {"b": 2, "k": 3, "m": 4, "n": 5, "p": 2}
    for left, right in itertools.product(("mpk", "bmk"), ("npk", "bnk")):
        if ("b" in left) != ("b" in right):
            continue
        right = right.replace("p", "q")
        sizes["q"] = 3
        for order_x, order_y in itertools.product(itertools.permutations(range(3)), repeat=2):
            x = made([sizes[c] for c in left], order_x)
            y = made([sizes[c] for c in right], order_y)
            batch = ((left.index("b"),), (right.index("b"),)) if "b" in left else ((), ())
            numbers = (((left.index("k"),), (right.index("k"),)), batch)
            want = dot_general_p.impl(
                x, y, dimension_numbers=numbers, precision=None, preferred_element_type=None
            )
            d, _, _ = by_product(x, y, numbers)
            np.testing.assert_allclose(d.reshape(want.shape), want, rtol=1e-12, atol=1e-12)


def test_copies_whose_contracted_axes_are_in_another_order():
    """The copy of one operand follows the order that the other needs."""
    lhs, rhs = (2, 40, 16), (2, 24, 40)
    numbers = (((0, 1), (0, 2)), ((), ()))
    copies = plan_dot_general(lhs, (32, 64, 1), rhs, strides_of(rhs), numbers)
    assert copies == Copies(None, (2, 0, 1))

    class Side:
        shape, strides, itemsize = rhs, strides_of(rhs), 4

    assert cuda_product._along(Side(), copies.rhs, (0, 2), ()) == copies.rhs


def test_gradients_of_a_dense_layer_are_flags_and_no_copies():
    tokens, wide = (8, 6), (6, 10)
    forward = plan_dot_general(tokens, (6, 1), wide, (10, 1), MM)
    to_input = plan_dot_general((8, 10), (10, 1), wide, (10, 1), (((1,), (1,)), ((), ())))
    to_weight = plan_dot_general(tokens, (6, 1), (8, 10), (10, 1), (((0,), (0,)), ((), ())))
    assert [(p.trans_a, p.trans_b) for p in (forward, to_input, to_weight)] == [
        (False, False), (False, True), (True, False),
    ]  # fmt: skip
    assert [(p.m, p.n, p.k) for p in (forward, to_input, to_weight)] == [(8, 10, 6), (8, 6, 10), (6, 10, 8)]


# -- descriptors: the library itself, which needs no device for them ---------------------------------

PLAIN = Layout(32, 64, 16, False, True, 16, 16, 64)

GEMMS = {
    "float32": Gemm(PLAIN, F32, F32, F32),
    "float32 as tf32": Gemm(PLAIN, F32, F32, F32, "tf32"),
    "float64": Gemm(PLAIN, F64, F64, F64, "f64"),
    "complex64": Gemm(PLAIN, dtypes.complex64, dtypes.complex64, dtypes.complex64),
    "complex128": Gemm(PLAIN, dtypes.complex128, dtypes.complex128, dtypes.complex128, "f64"),
    "float16": Gemm(PLAIN, F16, F16, F16),
    "bfloat16": Gemm(PLAIN, BF16, BF16, BF16),
    "bfloat16 to float32": Gemm(PLAIN, BF16, BF16, F32),
    "int8": Gemm(PLAIN, dtypes.int8, dtypes.int8, dtypes.int32, "i32"),
    "fewer multiprocessors": Gemm(PLAIN, BF16, BF16, BF16, sms=108),
    "float8": Gemm(PLAIN, dtypes.float8_e4m3fn, dtypes.float8_e5m2, BF16),
    "batch": Gemm(Layout(3, 5, 4, True, False, 3, 5, 5, 7, 12, 20, 15), F32, F32, F32),
    "a bias": Gemm(PLAIN, BF16, BF16, BF16, bias=True),
}  # fmt: skip


@pytest.fixture(scope="module")
def lib():
    try:
        return cublaslt.library()
    except errors.UnsupportedError as e:
        pytest.skip(str(e))


@pytest.mark.parametrize("name", GEMMS)
def test_descriptors_say_what_the_product_is(lib, name):
    gemm = GEMMS[name]
    made, call = cublaslt.Descriptors(gemm), column_major(gemm)
    assert made.get(0, ctypes.c_int32()) == {"f32": 68, "tf32": 77, "f64": 70, "i32": 72}[gemm.compute]
    assert made.get(3, ctypes.c_int32()) == gemm.layout.trans_b
    assert made.get(4, ctypes.c_int32()) == gemm.layout.trans_a
    assert made.get(7, ctypes.c_uint32()) == (4 if gemm.bias else 1)
    assert made.get(15, ctypes.c_int32()) == gemm.sms
    for handle, side in ((made.a, call.a), (made.b, call.b), (made.d, call.d)):
        got = []
        for attribute, kind in (
            (2, ctypes.c_uint64),
            (3, ctypes.c_uint64),
            (4, ctypes.c_int64),
            (6, ctypes.c_int64),
        ):
            value = kind()
            status = lib.cublasLtMatrixLayoutGetAttribute(
                handle, attribute, ctypes.byref(value), ctypes.sizeof(value), None
            )
            assert status == 0
            got.append(value.value)
        assert got == [side.rows, side.columns, side.ld, side.stride]
    made.preference()


REFUSED = {
    "mixed operands": Gemm(PLAIN, F32, BF16, F32),
    "narrow result": Gemm(PLAIN, F32, F32, BF16),
    "tf32 of float64": Gemm(PLAIN, F64, F64, F64, "tf32"),
    "nothing": Gemm(Layout(0, 4, 4, False, False, 4, 4, 4), F32, F32, F32),
    "float8 not k innermost": Gemm(
        Layout(32, 64, 16, False, False, 16, 64, 64), dtypes.float8_e4m3fn, dtypes.float8_e4m3fn, BF16
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_library_cannot_do_is_refused_with_a_reason(name):
    assert REFUSED[name].refused()
    with pytest.raises(errors.UnsupportedError, match="cuBLASLt has no GEMM"):
        cublaslt.Descriptors(REFUSED[name])


def test_alpha_and_beta_in_the_type_of_the_sums():
    number = cublaslt._number
    assert np.frombuffer(number(0.5, "f"), np.float32)[0] == 0.5
    assert np.frombuffer(number(2, "d"), np.float64)[0] == 2
    assert np.frombuffer(number(1 - 2j, "ff"), np.complex64)[0] == 1 - 2j
    assert np.frombuffer(number(1 - 2j, "dd"), np.complex128)[0] == 1 - 2j
    assert np.frombuffer(number(3, "i"), np.int32)[0] == 3


def test_a_run_hands_over_the_operands_exchanged(lib, monkeypatch):
    calls = []
    monkeypatch.setattr(cublaslt, "_handle", lambda device: "handle")
    monkeypatch.setattr(cublaslt.Plan, "_choose", lambda self, addresses: None)
    monkeypatch.setattr(cublaslt, "workspace", lambda device, stream: (device, stream))
    plan = cublaslt.Plan(GEMMS["a bias"], 3)
    plan._call, plan._needs = lambda *args: calls.append(args) or 0, 512
    plan.run(0xA0, 0xB0, 0, 0xD0, 0xE0, alpha=2, beta=0.5, stream=7)
    handle, matmul, alpha, x, x_is, y, y_is, beta, c, _, d, d_is, _, scratch, size, stream = calls[0]
    made = plan._descriptors
    assert (x, x_is, y, y_is) == (0xB0, made.a, 0xA0, made.b)
    assert (c, d, d_is, scratch, size, stream) == (0xD0, 0xD0, made.d, (3, 7), 512, 7)
    assert np.frombuffer(alpha.raw, F32)[0] == 2 and np.frombuffer(beta.raw, F32)[0] == 0.5
    assert made.get(8, ctypes.c_uint64()) == 0xE0


# -- on a device -----------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BLUFUNC_CACHE_DIR", str(tmp_path))
    cublaslt._chosen.clear()
    return tmp_path


def on_device(gemm, a, b, c=None, bias=None, alpha=1, beta=0):
    """D of a GEMM."""
    layout = gemm.layout
    shape = (layout.batch, layout.m, layout.ldd)
    held = [None if x is None else cuda_memory.to_device(x) for x in (a, b, bias)]
    d = cuda_memory.to_device(np.zeros(shape, gemm.d) if c is None else c)
    at = [0 if h is None else h.ptr for h in held]
    plan = cublaslt.Plan(gemm)
    plan.run(at[0], at[1], d.ptr, d.ptr, at[2], alpha, beta, driver.compute_stream().ptr)
    return cuda_memory.to_host(d)


def wide(x):
    return x.astype(np.complex128 if dtypes.is_complex(x.dtype) else np.float64)


PLAIN_TYPES = [n for n in GEMMS if n not in ("a bias", "batch", "fewer multiprocessors")]


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLAIN_TYPES)
def test_products_on_a_device(name, own_cache, rng):
    gemm = GEMMS[name]
    if "float8" in name and driver.properties().capability < (8, 9):
        pytest.skip("float8 needs a newer device")
    if dtypes.is_integer(gemm.a):
        a, b = rng.integers(-9, 9, (32, 16)).astype(gemm.a), rng.integers(-9, 9, (64, 16)).astype(gemm.b)
    else:
        a, b = rng.standard_normal((32, 16)), rng.standard_normal((64, 16))
        if dtypes.is_complex(gemm.a):
            a, b = a + 1j * rng.standard_normal((32, 16)), b - 2j * rng.standard_normal((64, 16))
        a, b = a.astype(gemm.a), b.astype(gemm.b)
    d = on_device(gemm, a, b)
    tolerance = {"f64": 1e-12, "i32": 0, "tf32": 2e-2}.get(gemm.compute, 1e-5 if gemm.d == F32 else 1e-6)
    if gemm.d in (BF16, F16):
        tolerance = 2e-2
    want = wide(a) @ wide(b).T
    np.testing.assert_allclose(wide(d)[0], want, rtol=tolerance, atol=tolerance * 8)
    assert list(own_cache.rglob("*.gemm")) or cublaslt._chosen, "the choice is kept"


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in LAYOUTS if LAYOUTS[n][3] is None])
def test_layouts_on_a_device(name, own_cache):
    x, y, numbers, _ = LAYOUTS[name]
    want, _, plan = by_product(x, y, numbers)
    # copy all memory after the operands' first elements
    d = on_device(Gemm(plan, F64, F64, F64, "f64", alignment=16), flat_from(x), flat_from(y))
    np.testing.assert_allclose(d.reshape(-1), want, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
def test_beta_adds_to_what_is_there(own_cache, rng):
    a, b, c = (rng.standard_normal(s).astype(F32) for s in ((32, 16), (64, 16), (1, 32, 64)))
    d = on_device(replace(GEMMS["float32"], reads_c=True), a, b, c, alpha=0.5, beta=2)
    np.testing.assert_allclose(d[0], 0.5 * a @ b.T + 2 * c[0], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_a_bias_is_added_along_columns(own_cache, rng):
    """The swap of operands for the column-major library is invisible."""
    a, b = rng.standard_normal((32, 16)).astype(BF16), rng.standard_normal((64, 16)).astype(BF16)
    bias = rng.standard_normal(64).astype(BF16)
    d = on_device(GEMMS["a bias"], a, b, bias=bias)
    np.testing.assert_allclose(wide(d[0]), wide(a) @ wide(b).T + wide(bias), rtol=2e-2, atol=6e-2)


@pytest.mark.gpu
def test_products_timed_beside_what_keeps_multiprocessors_are_the_same(own_cache, monkeypatch, rng):
    layout = Layout(512, 256, 384, False, False, 384, 256, 256)
    gemm = Gemm(layout, BF16, BF16, F32)
    a, b = (rng.standard_normal(s).astype(BF16) for s in ((512, 384), (384, 256)))
    want = on_device(gemm, a, b)
    kept, taken = [], sm_reservation.taken
    monkeypatch.setattr(sm_reservation, "taken", lambda *args: kept.append(args[1]) or taken(*args))
    there = driver.properties().sm_count
    got = on_device(replace(gemm, sms=there - 24), a, b)
    assert kept and set(kept) == {24}
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("seconds", [2e-4, 2e-3])
def test_a_pause_is_about_as_long_as_asked_for(seconds):
    stream, pause = driver.compute_stream(), sm_reservation.pause(0, seconds)
    pause(stream.ptr)  # what is loaded at the first launch takes longer
    ms = driver.elapsed_ms(lambda: pause(stream.ptr), stream)
    assert seconds <= ms / 1e3 < 10 * seconds


@pytest.mark.parametrize("there, left", [(132, 108), (48, 24), (40, 20)])
def test_a_product_keeps_half_of_a_small_device(monkeypatch, there, left):
    monkeypatch.setattr(driver, "properties", lambda index: SimpleNamespace(sm_count=there))
    product = cuda_product.Product.__new__(cuda_product.Product)
    product.device, product.calls = 0, [cuda_product._Call(GEMMS["float32"])]
    product.leave(24)
    assert [c.gemm.sms for c in (*product.calls, *product.overlapped_calls)] == [0, left]


def test_choices_for_fewer_multiprocessors_are_kept_apart(lib, monkeypatch):
    """And those for all of them where they were before there were others."""
    names = []
    monkeypatch.setattr(cublaslt, "_handle", lambda device: "handle")
    monkeypatch.setattr(cublaslt, "_chosen", {})
    monkeypatch.setattr(cublaslt, "key_of", lambda *parts: names.append(parts) or "key")
    monkeypatch.setattr(cublaslt, "DiskCache", lambda: SimpleNamespace(get=lambda key: b"kept"))
    monkeypatch.setattr(cublaslt.Plan, "_accept", lambda self, kept: True)
    monkeypatch.setattr(driver, "properties", lambda index: SimpleNamespace(name="a device"))
    gemm = GEMMS["float32"]
    for count in (0, 100, 108):
        cublaslt.Plan(replace(gemm, sms=count))
    assert len(set(names)) == 3 and names[0][0] == "cublaslt, by warm devices"
    assert "multiprocessors" not in str(gemm) and len(cublaslt._chosen) == 3


@pytest.mark.gpu
def test_a_second_process_takes_the_choice_from_disk(own_cache, monkeypatch, rng):
    gemm = Gemm(Layout(256, 256, 256, False, False, 256, 256, 256), BF16, BF16, BF16)
    cublaslt.Plan(gemm)
    cublaslt._chosen.clear()
    monkeypatch.setattr(cublaslt.Plan, "_tune", lambda *_: pytest.fail("timed again"))
    cublaslt.Plan(gemm)
