"""Sorts and selections of rows: the kernels, and their results."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.backends.cuda.library.sorting import rows
from tests.emulation.cuda_machines import needs_nvrtc
from tests.kernels.backends.cuda.test_program import on, same, uniform

RNG = np.random.default_rng(0)


def special(dtype, shape):
    """Numbers with ties; floats with zeros, infinities and NaN of both signs."""
    dtype = np.dtype(dtype)
    if dtypes.is_bool(dtype):
        return RNG.integers(0, 2, shape).astype(bool)
    if dtypes.is_integer(dtype):
        info = np.iinfo(dtype)
        return RNG.integers(max(info.min, -(1 << 30)), min(info.max, 1 << 30), shape).astype(dtype)
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1.5, 1.5, -2.0, 1e-30], np.float32)
    x = RNG.standard_normal(shape).astype(np.float32)
    return np.where(RNG.random(shape) < 0.3, values[RNG.integers(0, len(values), shape)], x).astype(dtype)


ORDERED = [
    np.dtype(d)
    for d in ("float32", "float64", "float16", "bool", "int8", "uint8", "int16", "int32", "uint32", "int64", "uint64")
] + [dtypes.bfloat16]  # fmt: skip

SORTS = {
    "a vector": (bnp.sort, uniform(1000)),
    "one element": (bnp.sort, uniform(5, 1)),
    "two": (lambda x: bnp.argsort(x, stable=True), uniform(5, 2)),
    "rows": (lambda x: bnp.argsort(x, axis=1, stable=True), special(np.float32, (70, 300))),
    "columns": (lambda x: bnp.argsort(x, axis=0, stable=True), special(np.float32, (300, 70))),
    "an axis between": (lambda x: bnp.sort(x, axis=1), special(np.float32, (3, 33, 5))),
    "operands": (
        lambda k, a, b: lax.sort((k, a, b), dimension=0, num_keys=1),
        special(np.int8, (500,)), uniform(500), np.arange(500) % 2 == 0,
    ),
    "the longest row": (lambda x: bnp.argsort(x, stable=True), special(np.float32, (2, rows.LONGEST))),
    "top of a row": (lambda x: lax.top_k(x, 5), special(np.float32, (700,))),
    "top of rows": (lambda x: lax.top_k(x, 8), special(np.float32, (9, 4000))),
    "all of rows": (lambda x: lax.top_k(x, 100), special(np.float32, (9, 100))),
    "top of long rows": (lambda x: lax.top_k(x, 50), special(np.float32, (3, 40_000))),
    "top of very long rows": (lambda x: lax.top_k(x, 900), uniform(2, 60_000)),
    "gradient": (bf.grad(lambda x: (lax.top_k(x, 3)[0] * bnp.sort(x)[:3]).sum()), uniform(50)),
}  # fmt: skip


def check(fun, args, device):
    want, jitted, there = bf.jit(fun)(*args), bf.jit(fun), on(device, *args)
    for _ in range(3):
        same(jitted(*there), want)


@pytest.mark.parametrize("name", SORTS)
def test_sorts(name, cuda):
    fun, *args = SORTS[name]
    check(fun, args, cuda)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SORTS)
def test_sorts_on_a_device(name):
    fun, *args = SORTS[name]
    check(fun, args, bf.devices("cuda")[0])


LONG = rows.LONGEST + 904


def complexes(shape):
    """Complex numbers whose parts are special."""
    x = np.empty(shape, np.complex64)
    x.real, x.imag = special(np.float32, shape), special(np.float32, shape)
    return x


ORDERED_BY = {
    "sort": (lambda x: bnp.sort(x, axis=-1, stable=True), (LONG,), (2, LONG), (300, 7)),
    "sort, first axis": (lambda x: bnp.sort(x, axis=0, stable=True), (LONG, 2), (40, 3)),
    "argsort": (lambda x: bnp.argsort(x, axis=-1, stable=True), (LONG,), (3, LONG), (9, 50)),
    "descending": (lambda x: bnp.argsort(x, descending=True, stable=True), (LONG,), (70,)),
    "two keys": (lambda x: lax.sort((x > 0, x, bnp.arange(x.shape[0])), dimension=0, num_keys=2), (LONG,), (90,)),
    "complex and real keys": (
        lambda x: lax.sort((x, x.real, bnp.arange(x.shape[0])), dimension=0, num_keys=2)[2],
        (LONG,), (90,),
    ),
    "lexsort": (lambda x: bnp.lexsort((x, bnp.floor(x))), (LONG,), (90,)),
    "top_k": (lambda x: lax.top_k(x, 12), (LONG,), (2, 50_000), (5, 40)),
    "most of a long row": (lambda x: lax.top_k(x, rows.MOST_KEPT + 9), (2, LONG)),
    "unique": (lambda x: bnp.unique(x, size=200, return_counts=True), (LONG,), (300,)),
    "searchsorted": (lambda x: bnp.searchsorted(bnp.sort(x), x), (LONG,), (300,)),
    "median": (lambda x: (bnp.median(x, axis=-1), bnp.nanmedian(x, axis=-1)), (3, LONG), (4, 31)),
    "quantile": (lambda x: bnp.nanquantile(x, 0.3, axis=-1), (LONG,), (4, 31)),
    "extrema": (lambda x: (x.max(-1), x.min(-1), bnp.nanmax(x, -1), bnp.nanmin(x, -1)), (3, LONG), (4, 31)),
    "positions": (lambda x: (x.argmax(-1), x.argmin(-1), bnp.nanargmax(x, -1)), (3, LONG), (40, 31)),
}  # fmt: skip


def check_order(name, dtype, device):
    """Results are those of the CPU."""
    fun, *shapes = ORDERED_BY[name]
    for shape in shapes:
        x = complexes(shape) if dtype == "complex64" else special(dtypes.as_dtype(dtype), shape)
        x = bnp.asarray(x, dtype)
        want, got = bf.jit(fun)(x), bf.jit(fun)(*on(device, x))
        same(got, want)
        if name == "two keys":  # stable: zeros of both signs keep their order
            zeros = [np.signbit(np.asarray(v[1], np.float64))[np.asarray(v[1]) == 0] for v in (got, want)]
            np.testing.assert_array_equal(*zeros)


COMPLEX_ORDER = ("sort", "argsort", "sort, first axis", "complex and real keys")


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "name, dtype",
    [*((n, "float32") for n in ORDERED_BY), *((n, "complex64") for n in COMPLEX_ORDER)],
)
def test_nan_and_zeros_are_ordered_as_on_the_cpu(name, dtype, cuda):
    check_order(name, dtype, cuda)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "complex64"])
@pytest.mark.parametrize("name", ORDERED_BY)
def test_nan_and_zeros_are_ordered_as_on_the_cpu_on_a_device(name, dtype):
    if dtype == "complex64" and name not in COMPLEX_ORDER:
        pytest.skip("complex numbers have no such order")
    check_order(name, dtype, bf.devices("cuda")[0])


def of_dtype(dtype):
    x = special(dtype, (7, 130))
    return lambda x: (bnp.argsort(x, axis=1, stable=True), lax.top_k(x, 9), bnp.sort(x, axis=0)), x


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ORDERED, ids=str)
def test_dtypes_on_a_device(dtype):
    fun, x = of_dtype(dtype)
    check(fun, [bnp.asarray(x, dtype)], bf.devices("cuda")[0])


def on_host(text):
    """A kernel without its prelude: the host has its own."""
    cast = "long long __double_as_longlong(double x) { long long y; memcpy(&y, &x, 8); return y; }\n"
    return "#define __device__\n" + cast + text[text.index("constexpr int LENGTH") :]


def equation(fun, *args):
    jaxpr = bf.make_jaxpr(fun)(*[bf.ShapeDtypeStruct(a.shape, a.dtype) for a in args])
    return next(e for e in getattr(jaxpr, "jaxpr", jaxpr).eqns if e.prim.name in ("sort", "top_k"))


@pytest.mark.parametrize("dtype", ORDERED, ids=str)
@pytest.mark.parametrize("fun", [lambda x: lax.sort(x, dimension=1), lambda x: lax.sort(x, dimension=0)])
def test_the_kernel_on_the_host(fun, dtype, host):
    x = special(dtype, (3, 37))
    eqn = equation(fun, x)
    (only,) = rows.passes(eqn)
    text = rows.source(eqn, only)
    text = on_host(text)
    got = host.launch(
        text, "sort_rows", [x, x], x, grid=3 if eqn.params["dimension"] else 37, block=only.threads
    )
    same(got, np.asarray(fun(bnp.asarray(x, dtype))))


@pytest.mark.parametrize("length, k", [(100, 7), (9000, 30)])
def test_selections_on_the_host(length, k, host):
    x = special(np.float32, (2, length))
    eqn = equation(lambda x: lax.top_k(x, k), x)
    given, found = x, rows.passes(eqn)
    for p in found[:-1]:
        text = rows.source(eqn, p)
        out = np.zeros((2, p.parts * p.kept, 2), np.uint32)
        text = on_host(text)
        given = host.launch(text, "sort_rows", [given], out, grid=2 * p.parts, block=p.threads)
    text = rows.source(eqn, found[-1])
    text = on_host(text).replace("*out0, int *index)", "*out0)").replace("index[to]", "((int *)out0)[to]")
    got = host.launch(
        text, "sort_rows", [given, x], np.zeros((2, k), np.int32), grid=2, block=found[-1].threads
    )
    np.testing.assert_array_equal(got, lax.top_k(bnp.asarray(x), k)[1])


@pytest.mark.second
@needs_nvrtc
@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ORDERED, ids=str)
def test_the_kernel_compiles(dtype):
    for fun in (lambda x: lax.sort(x, dimension=0), lambda x: lax.top_k(x, 20)):
        eqn = equation(fun, special(dtype, (2, 2000)))
        for p in rows.passes(eqn):
            nvrtc.build(rows.source(eqn, p), "sm_80", "sort_rows")


def test_what_cupy_sorts():
    long = np.zeros(rows.LONGEST + 1, np.float32)
    assert rows.passes(equation(lambda x: lax.sort(x), long)) is None
    assert rows.passes(equation(lambda x: lax.sort((x, x), num_keys=2), long[:9])) is None
    assert rows.passes(equation(lambda x: lax.top_k(x, rows.MOST_KEPT + 1), long)) is None
