"""CPU renderer: C++ against the LoopIR interpreter, for several thread counts."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from blufunc.core.ir import dtypes
from blufunc.core.ops import elementwise as ew
from blufunc.kernels.backends.cpu import renderer, toolchain
from blufunc.kernels.codegen import scalar_ops
from blufunc.kernels.loopir.index import Range, constant, of
from blufunc.kernels.loopir.ir import (
    Accumulate,
    Buffer,
    Keep,
    Kernel,
    Lanes,
    Reduce,
    Rows,
    Set,
    Store,
    Total,
    fold,
    load,
    number,
    read,
    within,
)
from blufunc.kernels.loopir.verify import check_kernel
from tests.emulation.loop_interpreter import run as interpret
from tests.kernels.loop_kernels import CASES, F32, I32, draw, op


@pytest.fixture(scope="module")
def compiler():
    found = toolchain.find()
    if found is None:
        pytest.skip("this machine has no C++ compiler")
    return found


def call(library, kernel, arrays, threads=1):
    """Run a compiled kernel on the arrays of its buffers."""
    pointers = (ctypes.c_void_p * len(kernel.buffers))(*[arrays[b].ctypes.data for b in kernel.buffers])
    getattr(library, kernel.name)(pointers, threads)


def run(compiler, kernel, arrays, threads=1):
    """Compile and run a kernel."""
    call(compiler.compile(renderer.render(kernel), kernel.name), kernel, arrays, threads)


def arrays_for(kernel, seed=0):
    """Normal random inputs and zero outputs."""
    return {
        b: np.zeros(b.size, b.dtype) if b.written else draw(b.size, dtype=b.dtype, seed=seed + i)
        for i, b in enumerate(kernel.buffers)
    }


def agrees(compiler, kernel, threads=2, rtol=1e-5):
    """Compare a compiled kernel with the interpreter; returns its arrays."""
    check_kernel(kernel)
    want, got = arrays_for(kernel), arrays_for(kernel)
    interpret(kernel, want)
    run(compiler, kernel, got, threads)
    for b in kernel.buffers:
        np.testing.assert_allclose(got[b].astype("f8"), want[b].astype("f8"), rtol, 1e-5, err_msg=b.name)
    return got


@pytest.fixture(scope="module")
def cases(compiler):
    """All handwritten kernels, as one source."""
    found = {name: make() for name, make in CASES.items()}
    kernels = []
    for i, case in enumerate(found.values()):
        case.kernel = replace(case.kernel, name=f"{case.kernel.name}_{i}")
        kernels.append(case.kernel)
    return found, compiler.compile(renderer.render_many(kernels), "cases")


@pytest.mark.parametrize("name", CASES)
def test_against_numpy(cases, name):
    found, library = cases
    case = found[name]
    call(library, case.kernel, case.arrays)
    case.compare()


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("arg")])
def test_extrema_accumulated_lane_by_lane(compiler, name, monkeypatch):
    """As for expensive values, or several reductions in one loop."""
    monkeypatch.setattr(renderer, "_CHEAP", 0)
    case = CASES[name]()
    run(compiler, case.kernel, case.arrays)
    case.compare()


def test_in_place(compiler):
    """An output may alias an input."""
    case = CASES["gelu"]()
    x, y = case.kernel.buffers[0], case.kernel.buffers[2]
    case.arrays[y] = case.arrays[x]
    run(compiler, case.kernel, case.arrays)
    case.compare()


def test_outputs_in_place_of_each_others_inputs(compiler):
    """All reads precede all writes, so two arrays may be swapped."""
    i = Range("i", 100)
    x, y = Buffer("x", F32, 100), Buffer("y", F32, 100)
    u, v = Buffer("u", F32, 100, written=True), Buffer("v", F32, 100, written=True)
    at = of(i)
    body = (Store(u, at, op(ew.neg_p, load(y, at))), Store(v, at, load(x, at)))
    a, b = draw(100), draw(100, seed=1)
    arrays = {x: a.copy(), y: b.copy()}
    arrays |= {u: arrays[x], v: arrays[y]}
    run(compiler, Kernel("trade", (x, y, u, v), (i,), body), arrays)
    np.testing.assert_array_equal(arrays[u], -b)
    np.testing.assert_array_equal(arrays[v], a)


# -- loops that threads share ------------------------------------------------------------------------


@pytest.fixture
def eager(monkeypatch):
    """Use threads for kernels small enough for tests."""
    monkeypatch.setattr(renderer, "PARALLEL_WORK", 1 << 16)


def _pointwise(name, *shape):
    ranges = [Range(n, e) for n, e in zip("abc", shape, strict=False)]
    size = int(np.prod(shape))
    x, y = Buffer("x", F32, size), Buffer("y", F32, size, written=True)
    scale = Buffer("scale", F32, shape[-1])
    at = constant(0)
    for r in ranges:
        at = at * r.extent + of(r)
    body = Store(y, at, op(ew.mul_p, op(ew.tanh_p, load(x, at)), load(scale, of(ranges[-1]))))
    return Kernel(name, (x, scale, y), tuple(ranges), (body,))


def _transposed(name, rows, width):
    a, b = Range("a", width), Range("b", rows)
    x, y = Buffer("x", F32, rows * width), Buffer("y", F32, rows * width, written=True)
    value = op(ew.exp_p, load(x, of(b) * width + of(a)))
    return Kernel(name, (x, y), (a, b), (Store(y, of(a) * rows + of(b), value),))


def _rows(name, rows, width):
    r, k = Range("r", rows), Range("k", width)
    x, y = Buffer("x", F32, rows * width), Buffer("y", F32, rows * width, written=True)
    total, top, kept = Total("total", F32, "sum"), Total("top", F32, "max"), Keep("kept", F32, k)
    at = of(r) * width + of(k)
    body = (
        Lanes(k, (Reduce(top, load(x, at)),)),
        Lanes(k, (Set(kept, op(ew.sub_p, load(x, at), read(top))), Reduce(total, read(kept)))),
        Lanes(k, (Store(y, at, op(ew.div_p, read(kept), read(total))),)),
    )
    return Kernel(name, (x, y), (r,), body)


def _columns(name, rows, width, span):
    b, s, k = Range("b", -(-rows // span)), Range("s", span), Range("k", width)
    x, y = Buffer("x", F32, rows * width), Buffer("y", F32, b.extent * width, written=True)
    row, column = of(b) * span + of(s), Keep("column", F32, k, "sum")
    body = (
        Rows(s, (Lanes(k, (Accumulate(column, load(x, row * width + of(k))),)),), row, rows),
        Lanes(k, (Store(y, of(b) * width + of(k), read(column)),)),
    )
    return Kernel(name, (x, y), (b,), body)


def _folded(name, rows, width):
    r, k = Range("r", rows), Range("k", width)
    x, y = Buffer("x", F32, rows * width), Buffer("y", F32, rows, written=True)
    value = op(ew.mul_p, fold("sum", k, load(x, of(r) * width + of(k))), number(of(r), F32))
    return Kernel(name, (x, y), (r,), (Store(y, of(r), value),))


SHARED = {
    "one range": (lambda n: _pointwise(n, 70_001), ["parallel for simd schedule"]),
    "rows of elements": (lambda n: _pointwise(n, 300, 257), ["parallel for schedule", "omp simd"]),
    "three ranges": (lambda n: _pointwise(n, 10, 30, 257), ["parallel for collapse(2)", "omp simd"]),
    "two long rows": (lambda n: _pointwise(n, 2, 40_001), ["parallel for collapse(2)", "start += 8192", "omp simd"]),
    "a transposition": (lambda n: _transposed(n, 97, 83), ["+= 16", "+= 64", "parallel for collapse(2)", "omp simd"]),
    "rows": (lambda n: _rows(n, 90, 801), ["parallel for schedule", "reduction(nan_max", "reduction(+"]),
    "keeps too large for the stack": (lambda n: _rows(n, 4, 20_001), ["scratch.of(", "parallel for"]),
    "columns": (lambda n: _columns(n, 500, 333, 64), ["parallel for", "500 - 64 * b < 64", "first += 4"]),
    "columns too large for the stack": (lambda n: _columns(n, 9, 17_000, 4), ["scratch.of("]),
    "folds along memory": (lambda n: _folded(n, 300, 301), ["parallel for", "simd reduction(+"]),
    "short folds": (lambda n: _folded(n, 5000, 9), ["GCC unroll 9", "omp simd"]),
    "little work": (lambda n: _pointwise(n, 10, 10), ["omp simd"]),
}  # fmt: skip


@pytest.mark.parametrize("what", SHARED)
def test_loops(compiler, eager, what):
    """The generated loops are the expected ones, and match the interpreter."""
    make, parts = SHARED[what]
    kernel = make(what.replace(" ", "_"))
    source = renderer.render(kernel)
    for part in parts:
        assert part in source, source[-2000:]
    assert ("parallel" in source) == ("parallel" in " ".join(parts) or what.startswith("columns too"))
    agrees(compiler, kernel, rtol=2e-4)


@pytest.mark.parametrize("what", ["rows", "folds along memory", "columns"])
def test_threads_change_nothing(compiler, eager, what):
    kernel = SHARED[what][0]("k")
    results = []
    for threads in (1, 2, 3):
        arrays = arrays_for(kernel)
        run(compiler, kernel, arrays, threads)
        results.append(arrays[kernel.buffers[-1]].tobytes())
    assert len(set(results)) == 1


@pytest.mark.parametrize(("rows", "span"), [(64, 16), (61, 16), (35, 16), (5, 5)])
def test_rows_at_once_are_added_in_order(compiler, rows, span):
    kernel = _columns("columns", rows, 19, span)
    assert "first += 4" in renderer.render(kernel)
    x, y = kernel.buffers
    arrays = arrays_for(kernel)
    run(compiler, kernel, arrays)
    want = np.zeros((y.size // 19, 19), np.float32)
    for i, row in enumerate(arrays[x].reshape(rows, 19)):
        want[i // span] += row
    np.testing.assert_array_equal(arrays[y].reshape(want.shape), want)


OPS = {
    "b": ["max", "min", "and", "or", "xor"],
    "i": ["sum", "prod", "max", "min", "and", "or", "xor"],
    "f": ["sum", "prod", "max", "min"],
    "c": ["sum", "prod"],
}
REDUCED = [d for d in scalar_ops.STORAGE if d != dtypes.key and not dtypes.is_narrow(d)]  # computed in 8 bits


@pytest.mark.parametrize("dtype", REDUCED, ids=dtypes.short_name)
def test_reductions_of_every_dtype(compiler, dtype):
    """Over lanes, in rows and folded; NaN is both maximum and minimum."""
    n = 37
    r, s, k = Range("r", 2), Range("s", 6), Range("k", n)
    x = Buffer("x", dtype, 2 * n)
    kind = (
        "b" if dtype == dtypes.bool_ else "c" if dtypes.is_complex(dtype) else "if"[dtypes.is_floating(dtype)]
    )
    lanes, grown, body = [], [], []
    outs = []
    for name in OPS[kind]:
        total, keep, j = Total(name, dtype, name), Keep(f"keep_{name}", dtype, k, name), Range("j", n)
        value = load(x, of(r) * n + of(k))
        lanes.append(Reduce(total, value))
        grown.append(Accumulate(keep, value))
        for part, found in (("total", read(total)), ("fold", fold(name, j, load(x, of(r) * n + of(j))))):
            outs.append(Buffer(f"{part}_{name}", dtype, 2, written=True))
            body.append(Store(outs[-1], of(r), found))
        outs.append(Buffer(f"kept_{name}", dtype, 2 * n, written=True))
        body.append(Lanes(k, (Store(outs[-1], of(r) * n + of(k), read(keep)),)))
    body = (Lanes(k, tuple(lanes)), Rows(s, (Lanes(k, tuple(grown)),), of(s), 6), *body)
    kernel = Kernel("reductions", (x, *outs), (r,), body)
    check_kernel(kernel)
    data = np.random.default_rng(0).integers(0, 3, 2 * n)
    data = (data * 0.25 + 0.75).astype(dtype) if dtypes.is_inexact(dtype) else data.astype(dtype)
    if dtypes.is_floating(dtype):
        data[40] = np.nan
    want, got = ({x: data} | {b: np.zeros(b.size, b.dtype) for b in outs} for _ in range(2))
    interpret(kernel, want)
    run(compiler, kernel, got)
    wide = np.complex128 if dtypes.is_complex(dtype) else np.float64
    rtol = 20 * float(dtypes.finfo(dtype).eps) if dtypes.is_inexact(dtype) else 0
    for b in outs:
        if dtype == dtypes.float8_e8m0fnu and b.name.startswith("kept_"):
            continue  # the reference keeps totals in the dtype itself, which has no zero to start from
        np.testing.assert_allclose(got[b].astype(wide), want[b].astype(wide), rtol, err_msg=b.name)


# -- values ------------------------------------------------------------------------------------------


def test_what_does_not_vary_is_computed_once():
    """Hoisting: scalars before loops, row values before lanes, shared values once."""
    r, k = Range("r", 8), Range("k", 32)
    rate, x, b = Buffer("rate", F32, 1), Buffer("x", F32, 256), Buffer("b", F32, 8)
    y, z = Buffer("y", F32, 256, written=True), Buffer("z", F32, 256, written=True)
    at = of(r) * 32 + of(k)
    per_row = op(ew.exp_p, load(b, of(r)))
    shared = op(ew.mul_p, op(ew.log_p, load(rate, constant(0))), op(ew.tanh_p, load(x, at)))
    body = (
        Lanes(k, (Store(y, at, op(ew.add_p, shared, per_row)), Store(z, at, op(ew.sub_p, shared, per_row)))),
        Lanes(k, (Store(y, at, per_row),)),
    )
    text = renderer.HostStyle(Kernel("k", (rate, x, b, y, z), (r,), body)).render()
    lines = text.splitlines()

    def depth(piece):
        (line,) = [line for line in lines if piece in line]
        return (len(line) - len(line.lstrip())) // 2

    assert (depth("bf_log("), depth("bf_exp("), depth("bf_tanh(")) == (1, 2, 3)


def test_deep_graphs():
    """A chain that doubles at every step is written once per value, without recursion."""
    i = Range("i", 8)
    x, y = Buffer("x", F32, 8), Buffer("y", F32, 8, written=True)
    v = load(x, of(i))
    for _ in range(3000):
        v = op(ew.add_p, v, v)
    text = renderer.HostStyle(Kernel("k", (x, y), (i,), (Store(y, of(i), v),))).render()
    assert text.count(" + ") == 3000


def test_a_total_stays_in_its_row(compiler):
    """Values computed from a row's total are not hoisted out of the rows."""
    s, k = Range("s", 3), Range("k", 20)
    x, y = Buffer("x", F32, 60), Buffer("y", F32, 60, written=True)
    total, at = Total("total", F32, "sum"), of(s) * 20 + of(k)
    body = (
        Lanes(k, (Reduce(total, load(x, at)),)),
        Lanes(k, (Store(y, at, op(ew.exp_p, op(ew.mul_p, read(total), 0.1))),)),
    )
    agrees(compiler, Kernel("rows", (x, y), (), (Rows(s, body, of(s), 3),)))


def test_indices_of_any_size(compiler):
    """Quotients of negative integers round down, and large arrays have wide indices."""
    i = Range("i", 40)
    y = Buffer("y", I32, 40, written=True)
    back = of(i) * -3 + 50
    parts = [back // 7, back % 7, back // 8, back % 8, (back + 100) // 7, (back + 100) % 7, of(i) * -1]
    value = number(parts[0], I32)
    for n, p in enumerate(parts[1:]):
        value = op(ew.add_p, op(ew.mul_p, value, 3 + n), number(p, I32))
    agrees(compiler, Kernel("negative", (y,), (i,), (Store(y, of(i), value),)))
    big = Buffer("big", dtypes.int8, 1 << 32)
    far = Kernel("far", (big, y), (i,), (Store(y, of(i), number(of(i) * (1 << 27), I32)),))
    assert "for (int64_t i = 0;" in renderer.render(far)


def test_guards_touch_no_memory(compiler):
    """Out-of-bounds load and store with false guards."""
    i = Range("i", 64)
    x, y = Buffer("x", F32, 64), Buffer("y", F32, 64, written=True)
    source = of(i) - 40
    value = load(x, source * (1 << 20), within(source, 0, 1))
    store = Store(y, of(i) * 3 + 1, value, within(of(i) * 3 + 1, 0, 64))
    agrees(compiler, Kernel("guards", (x, y), (i,), (store,)))


def test_keys(compiler):
    """Keys are selected and copied like scalars."""
    i = Range("i", 8)
    flags, a = Buffer("flags", dtypes.bool_, 8), Buffer("a", dtypes.key, 8)
    y = Buffer("y", dtypes.key, 8, written=True)
    value = op(ew.select_p, load(flags, of(i)), load(a, of(i)), load(a, of(i) * -1 + 7))
    keys = np.array([(j, 2 * j + (1 << 31)) for j in range(8)], dtypes.key)
    chosen = np.arange(8) % 3 == 0
    arrays = {flags: chosen, a: keys, y: np.zeros(8, dtypes.key)}
    run(compiler, Kernel("keys", (flags, a, y), (i,), (Store(y, of(i), value),)), arrays)
    np.testing.assert_array_equal(arrays[y], np.where(chosen, keys, keys[::-1]))


@pytest.mark.parametrize("cheap", [True, False], ids=["searched twice", "taken up"])
def test_the_first_of_lanes_that_run_backwards(compiler, cheap, monkeypatch):
    """Position, not lane order, breaks ties."""
    monkeypatch.setattr(renderer, "_CHEAP", 4 if cheap else 0)
    r, k = Range("r", 3), Range("k", 6)
    x, y = Buffer("x", F32, 18), Buffer("y", I32, 3, written=True)
    place = Total("place", F32, "argmax", I32)
    back = of(k) * -1 + 5
    body = (Lanes(k, (Reduce(place, load(x, of(r) * 6 + back), back),)), Store(y, of(r), read(place)))
    data = np.array([[1, 4, 4, 0, 4, 2], [0, np.nan, 7, np.nan, 1, 2], [-np.inf] * 6], F32)
    arrays = {x: data.reshape(-1), y: np.zeros(3, I32)}
    kernel = Kernel("backwards", (x, y), (r,), body)
    assert ("reduction(min :" in renderer.render(kernel)) == cheap
    run(compiler, kernel, arrays)
    assert arrays[y].tolist() == [1, 1, 0]


def test_names_that_c_has_already(compiler):
    """Buffers and totals may have the names of keywords, values or prelude functions."""
    r, k = Range("int", 4), Range("for", 40)
    x, y, at = (
        Buffer("float", F32, 160),
        Buffer("v0", F32, 4, written=True),
        Buffer("buffers", F32, 4, written=True),
    )
    total = Total("threads", F32, "sum")
    value = op(ew.exp_p, load(x, of(r) * 40 + of(k)))
    body = (
        Lanes(k, (Reduce(total, op(ew.mul_p, value, value)),)),
        Store(y, of(r), read(total)),
        Store(at, of(r), op(ew.neg_p, read(total))),
    )
    agrees(compiler, Kernel("names", (x, y, at), (r,), body))


# -- how it reads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["gelu", "layer norm", "rows and columns", "gather", "loop in lanes", "branch of all points"]
)
def test_golden(golden, name):
    golden(f"host_{name.replace(' ', '_')}", renderer.HostStyle(CASES[name]().kernel).render())
