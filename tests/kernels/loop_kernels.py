"""Kernels written by hand, with inputs and what NumPy says that they compute.

``CASES`` maps names to functions without arguments that make a ``Case``. The interpreter is held against these, and
the renderers may be held against the interpreter on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.special

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.random_bits import random_bits_p
from blufunc.kernels.loopir.index import Computed, Range, constant, flat, of, unflat
from blufunc.kernels.loopir.ir import (
    Accumulate,
    Branch,
    Buffer,
    Keep,
    Kernel,
    Lanes,
    Loop,
    Prefix,
    Reduce,
    Rows,
    Scan,
    Set,
    Store,
    Total,
    Value,
    apply,
    branch,
    carried,
    const,
    fold,
    load,
    loop,
    number,
    read,
    within,
)

F32, I32, U32, BOOL = dtypes.float32, dtypes.int32, dtypes.uint32, dtypes.bool_


@dataclass
class Case:
    """A kernel, its inputs, the expected outputs, and the tolerance."""

    kernel: Kernel
    inputs: dict[Buffer, np.ndarray]
    expected: dict[Buffer, np.ndarray]
    rtol: float = 1e-5
    atol: float = 1e-6
    arrays: dict[Buffer, np.ndarray] = field(init=False)

    def __post_init__(self):
        self.arrays = {b: np.ascontiguousarray(a).reshape(-1) for b, a in self.inputs.items()}
        self.arrays |= {b: np.zeros(b.size, b.dtype) for b in self.kernel.buffers if b.written}

    def compare(self) -> None:
        """Assert that the outputs are what was expected."""
        for b, want in self.expected.items():
            got, want = self.arrays[b], np.asarray(want).reshape(-1)
            assert got.dtype == want.dtype
            if dtypes.is_floating(b.dtype):
                got, want = got.astype(np.float64), want.astype(np.float64)
                np.testing.assert_allclose(got, want, self.rtol, self.atol, err_msg=b.name)
            else:
                np.testing.assert_array_equal(got, want, err_msg=b.name)


def op(prim: Any, *args: Any, **params: Any) -> Value:
    """``apply`` with its dtype inferred; Python scalars take the first value's dtype."""
    dtype = next(a.dtype for a in args if isinstance(a, Value) and a.dtype != BOOL)
    values = [a if isinstance(a, Value) else const(a, dtype) for a in args]
    out = prim.typed(tuple(ShapedArray((), v.dtype) for v in values), params)
    return apply(prim, values, params, out.dtype)


def into(dtype: np.dtype, value: Value) -> Value:
    """A conversion, where one is needed."""
    return value if value.dtype == dtype else op(ew.convert_p, value, dtype=dtype)


def draw(*shape: int, dtype: np.dtype = F32, seed: int = 0) -> np.ndarray:
    """Normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def wide(a: np.ndarray) -> np.ndarray:
    """Floats with enough bits to compute a reference in."""
    return a.astype(np.float64)


CASES: dict[str, Callable[[], Case]] = {}


def case(name: str, *args: Any) -> Callable:
    """Put a function into ``CASES``, called with ``args``."""

    def add(function):
        CASES[name] = lambda: function(*args)
        return function

    return add


# -- elementwise ------------------------------------------------------------------------------------


@case("gelu", F32)
@case("gelu bf16", dtypes.bfloat16)
@case("gelu f64", dtypes.float64)
def gelu(dtype: np.dtype) -> Case:
    """Bias and GELU, its inner part used twice; no lanes: a grid of two ranges."""
    n, m = 6, 40
    i, j = Range("i", n), Range("j", m)
    x, bias = Buffer("x", dtype, n * m), Buffer("bias", dtype, m)
    y = Buffer("y", dtype, n * m, written=True)
    at = flat((of(i), of(j)), (n, m))
    u = op(ew.add_p, into(F32, load(x, at)), into(F32, load(bias, of(j))))
    cubic = op(ew.mul_p, op(ew.mul_p, op(ew.mul_p, u, u), u), 0.044715)
    inner = op(ew.mul_p, op(ew.add_p, u, cubic), 0.7978845608)
    out = op(ew.mul_p, op(ew.mul_p, u, 0.5), op(ew.add_p, op(ew.tanh_p, inner), 1))
    kernel = Kernel("gelu", (x, bias, y), (i, j), (Store(y, at, into(dtype, out)),), ("test.py:3 (gelu)",))
    a, b = draw(n, m, dtype=dtype), draw(m, dtype=dtype, seed=1)
    z = wide(a) + wide(b)
    want = 0.5 * z * (1 + np.tanh(0.7978845608 * (z + 0.044715 * z**3)))
    eps = float(dtypes.finfo(dtype).eps) if dtype != dtypes.float64 else 1e-7
    return Case(kernel, {x: a, bias: b}, {y: want.astype(dtype)}, rtol=4 * eps, atol=4e-7)


@case("scalar")
def scalar() -> Case:
    """A grid of rank 0."""
    x, y = Buffer("x", I32, 1), Buffer("y", I32, 1, written=True)
    store = Store(y, constant(0), op(ew.mul_p, load(x, constant(0)), 3))
    return Case(Kernel("scalar", (x, y), (), (store,)), {x: np.array([14], I32)}, {y: np.array([42], I32)})


@case("empty")
def empty() -> Case:
    """A grid with no points."""
    i = Range("i", 0)
    x, y = Buffer("x", F32, 0), Buffer("y", F32, 0, written=True)
    kernel = Kernel("empty", (x, y), (i,), (Store(y, of(i), load(x, of(i))),))
    return Case(kernel, {x: np.zeros(0, F32)}, {y: np.zeros(0, F32)})


@case("transpose")
def transpose() -> Case:
    """A transposition of a reshaped array: only indices."""
    i = Range("i", 4 * 6 * 5)
    x, y = Buffer("x", I32, 120), Buffer("y", I32, 120, written=True)
    a, b, c = unflat(of(i), (5, 4, 6))
    kernel = Kernel("transpose", (x, y), (i,), (Store(y, of(i), load(x, flat((b, c, a), (4, 6, 5)))),))
    data = np.arange(120, dtype=I32)
    return Case(kernel, {x: data}, {y: data.reshape(4, 6, 5).transpose(2, 0, 1)})


@case("pad")
def pad() -> Case:
    """One before and two after a row, and holes between elements: a guarded load."""
    i = Range("i", 12)
    x, y = Buffer("x", F32, 5), Buffer("y", F32, 12, written=True)
    source = of(i) - 1
    hole = op(ew.eq_p, number(source % 2, I32), 0)
    guard = op_bool(ew.and_p, within(source, 0, 9), hole)
    value = op(ew.select_p, guard, load(x, source // 2, guard), const(7, F32))
    data, want = draw(5), np.full(12, 7, F32)
    want[1:10:2] = data
    return Case(Kernel("pad", (x, y), (i,), (Store(y, of(i), value),)), {x: data}, {y: want})


def op_bool(prim: Any, *args: Value) -> Value:
    """A primitive of booleans."""
    return apply(prim, args, {}, BOOL)


@case("gather")
def gather() -> Case:
    """Rows of a table at indices that were read, clamped into it."""
    n, rows, width = 7, 5, 4
    i, k = Range("i", n), Range("k", width)
    ids, table = Buffer("ids", I32, n), Buffer("table", F32, rows * width)
    y = Buffer("y", F32, n * width, written=True)
    row = Computed(op(ew.clamp_p, const(0, I32), load(ids, of(i)), const(rows - 1, I32)), 0, rows - 1)
    value = load(table, of(row) * width + of(k))
    kernel = Kernel("gather", (ids, table, y), (i, k), (Store(y, of(i) * width + of(k), value),))
    where, data = np.array([0, 4, 2, 2, -3, 9, 1], I32), draw(rows, width)
    return Case(kernel, {ids: where, table: data}, {y: data[np.clip(where, 0, rows - 1)]})


@case("scatter")
def scatter() -> Case:
    """A guarded store to a permutation, at an index that was loaded."""
    i = Range("i", 6)
    ids, x, y = Buffer("ids", I32, 6), Buffer("x", F32, 6), Buffer("y", F32, 6, written=True)
    at = load(ids, of(i))
    guard = op_bool(ew.and_p, op(ew.ge_p, at, 0), op(ew.lt_p, at, 6))
    kernel = Kernel("scatter", (ids, x, y), (i,), (Store(y, of(Computed(at)), load(x, of(i)), guard),))
    where, data, want = np.array([3, 0, 6, 5, -1, 1], I32), draw(6), np.zeros(6, F32)
    keep = (where >= 0) & (where < 6)
    want[where[keep]] = data[keep]
    return Case(kernel, {ids: where, x: data}, {y: want})


@case("fold")
def convolution() -> Case:
    """A fold in a fold, over guarded loads: a padded two-dimensional convolution."""
    i, j, a, b = Range("i", 6), Range("j", 7), Range("a", 3), Range("b", 2)
    x, w = Buffer("x", F32, 42), Buffer("w", F32, 6)
    y = Buffer("y", F32, 42, written=True)
    row = of(i) + of(a) - 1
    product = op(
        ew.mul_p,
        load(x, flat((row, of(j) + of(b)), (6, 7)), both(row, of(j) + of(b))),
        load(w, of(a) * 2 + of(b)),
    )
    value = fold("sum", a, fold("sum", b, product))
    kernel = Kernel("conv", (x, w, y), (i, j), (Store(y, flat((of(i), of(j)), (6, 7)), value),))
    data, weight = draw(6, 7), draw(3, 2, seed=1)
    padded = np.pad(data, ((1, 1), (0, 1)))
    want = sum(weight[p, q] * padded[p : p + 6, q : q + 7] for p in range(3) for q in range(2))
    return Case(kernel, {x: data, w: weight}, {y: want.astype(F32)})


def both(row: Any, column: Any) -> Value:
    """Whether a place is inside of the array of ``convolution``."""
    guards = [g for g in (within(row, 0, 6), within(column, 0, 7)) if g is not None]
    return guards[0] if len(guards) == 1 else op_bool(ew.and_p, *guards)


@case("fold of none")
def fold_of_none() -> Case:
    """The fold of an empty range is its identity."""
    i, j = Range("i", 3), Range("j", 0)
    x, y, z = Buffer("x", F32, 0), Buffer("y", F32, 3, written=True), Buffer("z", F32, 3, written=True)
    body = load(x, of(i) * 0 + of(j))
    stores = (Store(y, of(i), fold("max", j, body)), Store(z, of(i), fold("prod", j, body)))
    want = {y: np.full(3, -np.inf, F32), z: np.ones(3, F32)}
    return Case(Kernel("none", (x, y, z), (i,), stores), {x: np.zeros(0, F32)}, want)


@case("bits 8", 8)
@case("bits 16", 16)
@case("bits 32", 32)
@case("bits 64", 64)
def random_bits(width: int) -> Case:
    """Random bits under two keys."""
    n, m = 2, 300
    i, j = Range("i", n), Range("j", m)
    dtype = np.dtype(f"u{width // 8}")
    words, y = Buffer("words", U32, 2 * n), Buffer("y", dtype, n * m, written=True)
    hi, lo = load(words, of(i) * 2), load(words, of(i) * 2 + 1)
    value = Value("bits", (hi, lo), (of(j), width), dtype)
    kernel = Kernel("bits", (words, y), (i, j), (Store(y, of(i) * m + of(j), value),))
    data = np.array([[1, 2], [3 << 30, 4]], U32)
    keys = np.empty(n, dtypes.key)
    keys["hi"], keys["lo"] = data.T
    return Case(kernel, {words: data}, {y: random_bits_p.impl(keys, shape=(m,), bit_width=width)})


# -- rows that stay on the chip ---------------------------------------------------------------------


@case("softmax", F32, 33)
@case("softmax f16", dtypes.float16, 33)
@case("softmax of one", F32, 1)
def softmax(dtype: np.dtype, width: int) -> Case:
    """Two reductions over lanes, and values kept between them."""
    rows = 9
    r, k = Range("r", rows), Range("k", width)
    x, y = Buffer("x", dtype, rows * width), Buffer("y", dtype, rows * width, written=True)
    top, mass, kept = Total("top", F32, "max"), Total("mass", F32, "sum"), Keep("e", F32, k)
    at = of(r) * width + of(k)
    value = load(x, at)
    e = op(ew.exp_p, op(ew.sub_p, into(F32, value), read(top)))
    body = (
        Lanes(k, (Reduce(top, value),)),
        Lanes(k, (Set(kept, e), Reduce(mass, read(kept)))),
        Lanes(k, (Store(y, at, into(dtype, op(ew.div_p, read(kept), read(mass)))),)),
    )
    data = draw(rows, width, dtype=dtype)
    want = scipy.special.softmax(wide(data), 1).astype(dtype)
    eps = float(dtypes.finfo(dtype).eps)
    return Case(Kernel("softmax", (x, y), (r,), body), {x: data}, {y: want}, rtol=8 * eps)


@case("layer norm")
def layer_norm() -> Case:
    """Statistics of a row, which it also writes, one for each point."""
    rows, width = 6, 48
    r, k = Range("r", rows), Range("k", width)
    x, scale = Buffer("x", F32, rows * width), Buffer("scale", F32, width)
    y, inv = Buffer("y", F32, rows * width, written=True), Buffer("inv", F32, rows, written=True)
    total, squares = Total("total", F32, "sum"), Total("squares", F32, "sum")
    at = of(r) * width + of(k)
    mean = op(ew.div_p, read(total), width)
    centred = op(ew.sub_p, load(x, at), mean)
    rstd = op(ew.rsqrt_p, op(ew.add_p, op(ew.div_p, read(squares), width), 1e-5))
    body = (
        Lanes(k, (Reduce(total, load(x, at)),), "mean"),
        Lanes(k, (Reduce(squares, op(ew.mul_p, centred, centred)),), "variance"),
        Lanes(k, (Store(y, at, op(ew.mul_p, op(ew.mul_p, centred, rstd), load(scale, of(k)))),)),
        Store(inv, of(r), rstd),
    )
    data, s = draw(rows, width), draw(width, seed=1)
    d = wide(data) - wide(data).mean(1, keepdims=True)
    root = 1 / np.sqrt((d * d).mean(1) + 1e-5)
    want = {y: (d * root[:, None] * s).astype(F32), inv: root.astype(F32)}
    return Case(Kernel("layer_norm", (x, scale, y, inv), (r,), body), {x: data, scale: s}, want)


_EXTREMES = np.array(
    [
        [3, 1, 3, 2, 0, 3], [1, np.nan, 9, np.nan, 2, 3], [-np.inf] * 6, [-1, -3, -2, -3, -1, -2],
        [0, -0.0, 0, 0, 0, 0], [np.inf, 1, np.inf, 2, -np.inf, -np.inf],
    ]
)  # fmt: skip


@case("argmax", "argmax", F32)
@case("argmin", "argmin", F32)
@case("argmax bf16", "argmax", dtypes.bfloat16)
@case("argmax i32", "argmax", I32)
@case("argmin bool", "argmin", BOOL)
def arg_extremum(which: str, dtype: np.dtype) -> Case:
    """The first of several, and the first NaN before all."""
    data = np.nan_to_num(_EXTREMES, nan=5, posinf=8, neginf=-8) if dtype in (I32, BOOL) else _EXTREMES
    data = data.astype(dtype)
    rows, width = data.shape
    r, k = Range("r", rows), Range("k", width)
    x, y = Buffer("x", dtype, data.size), Buffer("y", I32, rows, written=True)
    place = Total("place", dtype, which, I32)
    body = (Lanes(k, (Reduce(place, load(x, of(r) * width + of(k)), of(k)),)), Store(y, of(r), read(place)))
    exact = data.astype(np.float64) if dtypes.is_floating(dtype) else data
    want = getattr(np, which)(exact, axis=1).astype(I32)
    return Case(Kernel(which, (x, y), (r,), body), {x: data}, {y: want})


_OPS = {
    "sum": (np.add, I32), "prod": (np.multiply, I32), "max": (np.maximum, F32), "min": (np.minimum, F32),
    "and": (np.bitwise_and, U32), "or": (np.bitwise_or, U32), "xor": (np.bitwise_xor, U32),
}  # fmt: skip


_SCANS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "logaddexp": np.logaddexp}


@case("scan", "sum", F32, 33)
@case("scan from the end", "sum", F32, 520, True)
@case("scan f16", "sum", dtypes.float16, 33)
@case("scan of one", "max", F32, 1)
@case("scan of a product", "prod", F32, 7)
@case("scan of integers", "min", I32, 1100)
@case("scan of wrapping integers", "sum", dtypes.as_dtype("int8"), 300, True)
@case("scan of booleans", "max", BOOL, 40)
@case("scan of logarithms", "logaddexp", F32, 100)
@case("scan of logarithms in parts", "logaddexp", F32, 1500)
@case("scan of logarithms in parts, of one strip", "logaddexp", F32, 700, True)
@case("scan f64", "logaddexp", dtypes.float64, 9, True)
def scan(name: str, dtype: np.dtype, width: int, reverse: bool = False) -> Case:
    """A scan read in its loop, kept, and scanned in reverse with a reduction."""
    rows, acc = 5, F32 if dtype == dtypes.float16 else dtype
    r, k = Range("r", rows), Range("k", width)
    x, y = Buffer("x", dtype, rows * width), Buffer("y", dtype, rows * width, written=True)
    z, top = Buffer("z", dtype, rows * width, written=True), Buffer("top", acc, rows, written=True)
    so_far, back = (Prefix(n, acc, k, name, way) for n, way in (("so_far", reverse), ("back", not reverse)))
    total, kept = Total("total", acc, "max"), Keep("kept", acc, k)
    at = of(r) * width + of(k)
    store = lambda b, cell: Store(b, at, read(cell) if acc == dtype else into(dtype, read(cell)))
    body = (
        Lanes(k, (Scan(so_far, load(x, at)), Set(kept, read(so_far)), store(y, so_far))),
        Lanes(k, (Scan(back, read(kept)), Reduce(total, read(back)), store(z, back))),
        Store(top, of(r), read(total)),
    )
    data = draw(rows, width, dtype=dtype)
    along = lambda a, back: _SCANS[name].accumulate(a[:, :: -1 if back else 1], axis=1, dtype=acc)
    first = along(data.astype(acc), reverse)[:, :: -1 if reverse else 1]
    second = along(first, not reverse)[:, :: 1 if reverse else -1]
    want = {y: first.astype(dtype), z: second.astype(dtype), top: second.max(1)}
    size = float(np.abs(second.astype(np.float64)).max())
    tolerance = 2e-3 if dtype == dtypes.float16 else 2e-6
    kernel = Kernel("scan", (x, y, z, top), (r,), body)
    return Case(kernel, {x: data}, want, rtol=1e-5, atol=tolerance * size)


@case("reductions")
def reductions() -> Case:
    """All reductions of rows, in one loop, over lanes and folded; NaN propagates."""
    rows, width = 4, 11
    r, k = Range("r", rows), Range("k", width)
    data = np.random.default_rng(0).integers(-9, 9, (rows, width)).astype(I32)
    with_nan = data.astype(F32)
    with_nan[2, 5] = np.nan
    sources = {I32: data, U32: data.view(U32), F32: with_nan}
    x = {d: Buffer(f"x_{dtypes.short_name(d)}", d, data.size) for d in sources}
    lanes, after, want = [], [], {}
    for name, (ufunc, dtype) in _OPS.items():
        total, j = Total(name, dtype, name), Range("j", width)
        lanes.append(Reduce(total, load(x[dtype], of(r) * width + of(k))))
        folded = fold(name, j, load(x[dtype], of(r) * width + of(j)))
        for suffix, value in (("", read(total)), ("_fold", folded)):
            out = Buffer(f"y_{name}{suffix}", dtype, rows, written=True)
            after.append(Store(out, of(r), value))
            want[out] = ufunc.reduce(sources[dtype], axis=1, dtype=dtype)
    kernel = Kernel("reductions", (*x.values(), *want), (r,), (Lanes(k, tuple(lanes)), *after))
    return Case(kernel, {x[d]: a for d, a in sources.items()}, want)


@case("reductions of none")
def reductions_of_none() -> Case:
    """No lanes: the identities, also of a dtype without infinities."""
    r, k, f8 = Range("r", 2), Range("k", 0), dtypes.float8_e4m3fn
    lanes, after, want = [], [], {}
    x = {d: Buffer(f"x_{dtypes.short_name(d)}", d, 0) for d in (F32, I32, U32, f8)}
    for name, dtype, value in [
        ("sum", F32, 0), ("prod", F32, 1), ("max", F32, -np.inf), ("min", I32, 2**31 - 1), ("and", U32, 2**32 - 1),
        ("or", U32, 0), ("max", f8, -448),
    ]:  # fmt: skip
        total = Total(f"{name}_{dtypes.short_name(dtype)}", dtype, name)
        out = Buffer(f"y_{total}", dtype, 2, written=True)
        lanes.append(Reduce(total, load(x[dtype], of(k))))
        after.append(Store(out, of(r), read(total)))
        want[out] = np.full(2, value, dtype)
    kernel = Kernel("none", (*x.values(), *want), (r,), (Lanes(k, tuple(lanes)), *after))
    return Case(kernel, {b: np.zeros(0, b.dtype) for b in x.values()}, want)


@case("finish", 10, 3)
@case("finish, of one chunk", 4, 4)
def mean_of_squares(size: int, per: int) -> Case:
    """A full reduction in chunks, the last one shorter, and its finish."""
    chunks = -(-size // per)
    g, k, q = Range("g", chunks), Range("k", per), Range("q", chunks)
    x, y = Buffer("x", F32, size), Buffer("y", F32, size, written=True)
    parts, out = Buffer("parts", F32, chunks, written=True), Buffer("out", F32, 1, written=True)
    part, total = Total("part", F32, "sum"), Total("total", F32, "sum")
    at = of(g) * per + of(k)
    inside = within(at, 0, size)
    square = op(ew.square_p, load(x, at, inside))
    body = (Lanes(k, (Store(y, at, square, inside), Reduce(part, square))), Store(parts, of(g), read(part)))
    finish = (
        Lanes(q, (Reduce(total, load(parts, of(q))),)),
        Store(out, constant(0), op(ew.div_p, read(total), size)),
    )
    data = draw(size)
    kernel = Kernel("mean_of_squares", (x, y, parts, out), (g,), body, finish=finish)
    return Case(kernel, {x: data}, {y: data * data, out: np.array([(wide(data) ** 2).mean()], F32)})


# -- columns ----------------------------------------------------------------------------------------


@case("column sum", 40, 10)
@case("column sum, ragged", 37, 8)
@case("column sum, ragged at first", 37, 8, True)
def column_sum(rows: int, span: int, backwards: bool = False) -> Case:
    """Column sums of blocks of rows; a block ends early if ``span`` is no divisor."""
    width = 5
    blocks = -(-rows // span)
    b, s, k = Range("b", blocks), Range("s", span), Range("k", width)
    x, y = Buffer("x", F32, rows * width), Buffer("y", F32, blocks * width, written=True)
    column = Keep("column", F32, k, "sum")
    block = of(b) * -1 + (blocks - 1) if backwards else of(b)
    row = block * span + of(s)
    body = (
        Rows(s, (Lanes(k, (Accumulate(column, load(x, row * width + of(k))),)),), row, rows),
        Lanes(k, (Store(y, block * width + of(k), read(column)),)),
    )
    data = draw(rows, width)
    want = np.add.reduceat(wide(data), np.arange(0, rows, span), axis=0)
    return Case(Kernel("column_sum", (x, y), (b,), body), {x: data}, {y: want.astype(F32)})


@case("column sum, finished", 37, 8, 2)
@case("column sum, finished, of one tile", 37, 8, 1)
def finished_column_sum(rows: int, span: int, tiles: int) -> Case:
    """Sums of blocks of rows, reduced per tile of columns when its blocks are done."""
    wide_tile, blocks = 12, -(-rows // span)
    width = wide_tile * tiles
    b, t, s = Range("b", blocks), Range("t", tiles), Range("s", span)
    k, q = Range("k", wide_tile), Range("q", blocks)
    x, y = Buffer("x", F32, rows * width), Buffer("y", F32, width, written=True)
    parts, column = Buffer("parts", F32, blocks * width, written=True), Keep("column", F32, k, "sum")
    row, at = of(b) * span + of(s), of(t) * wide_tile + of(k)
    body = (
        Rows(s, (Lanes(k, (Accumulate(column, load(x, row * width + at)),)),), row, rows),
        Lanes(k, (Store(parts, of(b) * width + at, read(column)),)),
    )
    finish = (
        Rows(q, (Lanes(k, (Accumulate(column, load(parts, of(q) * width + at)),)),), of(q), blocks),
        Lanes(k, (Store(y, at, op(ew.mul_p, read(column), 2)),)),
    )
    data = draw(rows, width)
    kernel = Kernel("column_sum", (x, y, parts), (b, t), body, finish=finish, over=(t,))
    return Case(kernel, {x: data}, {y: (2 * wide(data).sum(0)).astype(F32)})


@case("rows and columns")
def rows_and_columns() -> Case:
    """Rows normalized by their sums, then column sums: a total in rows, and a store."""
    rows, width = 12, 6
    b, s, k = Range("b", 3), Range("s", 5), Range("k", width)
    x, y = Buffer("x", F32, rows * width), Buffer("y", F32, rows * width, written=True)
    sums, part = Buffer("sums", F32, rows, written=True), Buffer("part", F32, 3 * width, written=True)
    total, column, kept = Total("total", F32, "sum"), Keep("column", F32, k, "sum"), Keep("row", F32, k)
    row = of(b) * 5 + of(s)
    at = row * width + of(k)
    share = op(ew.div_p, read(kept), read(total))
    body = (
        Rows(
            s,
            (
                Lanes(k, (Set(kept, op(ew.exp_p, load(x, at))), Reduce(total, read(kept)))),
                Lanes(k, (Store(y, at, share), Accumulate(column, share))),
                Store(sums, row, read(total)),
            ),
            row,
            rows,
        ),
        Lanes(k, (Store(part, of(b) * width + of(k), read(column)),)),
    )
    data = draw(rows, width)
    e = np.exp(wide(data))
    shares = e / e.sum(1, keepdims=True)
    want = {y: shares, sums: e.sum(1), part: np.add.reduceat(shares, [0, 5, 10], axis=0)}
    kernel = Kernel("rows_and_columns", (x, y, sums, part), (b,), body)
    return Case(kernel, {x: data}, {o: a.astype(F32) for o, a in want.items()})


@case("recurrence")
def recurrence() -> Case:
    """A keep set before the rows and in each row: an online recurrence."""
    n, width = 6, 4
    s, k = Range("s", n), Range("k", width)
    x, y = Buffer("x", F32, n * width), Buffer("y", F32, width, written=True)
    kept = Keep("state", F32, k)
    old, new = read(kept), load(x, of(s) * width + of(k))
    body = (
        Lanes(k, (Set(kept, const(1, F32)),)),
        Rows(s, (Lanes(k, (Set(kept, op(ew.add_p, op(ew.mul_p, old, 0.5), new)),)),), of(s), n),
        Lanes(k, (Store(y, of(k), read(kept)),)),
    )
    data, state = draw(n, width), np.ones(width)
    for line in data:
        state = state * 0.5 + line
    return Case(Kernel("recurrence", (x, y), (), body), {x: data}, {y: state.astype(F32)})


# -- loops and branches of a point -------------------------------------------------------------------


def collatz_of(n: Value, turn: Range, most: int | None = None) -> list[Value]:
    """The end and the length of the sequence from ``n``; a branch in a loop."""
    carries = at, steps = carried("at", turn, I32), carried("steps", turn, I32)
    x = carried("x", side := Range("side", 1), I32)
    odd = op(ew.ne_p, op(ew.and_p, at, 1), 0)
    up, down = op(ew.add_p, op(ew.mul_p, x, 3), 1), op(ew.shift_right_logical_p, x, 1)
    (after,) = branch(Branch((x,), side), odd, [at], [up], [down])
    return loop(
        Loop(carries, turn, most),
        [n, const(0, I32)],
        op(ew.gt_p, at, 1),
        [after, op(ew.add_p, steps, 1)],
    )


def collatz_steps(n: int, most: int) -> tuple[int, int]:
    """The same in Python."""
    steps = 0
    while n > 1 and steps != most:
        n, steps = (3 * n + 1 if n % 2 else n // 2), steps + 1
    return n, steps


@case("loop", None)
@case("loop of at most 7 turns", 7)
def loops(most: int | None) -> Case:
    """Points whose loops end at different turns."""
    i = Range("i", 70)
    x, y, z = (Buffer(b, I32, 70, written=b != "x") for b in "xyz")
    end, steps = collatz_of(load(x, of(i)), Range("t", most or 1), most)
    kernel = Kernel("collatz", (x, y, z), (i,), (Store(y, of(i), end), Store(z, of(i), steps)))
    want = np.array([collatz_steps(n, -1 if most is None else most) for n in range(70)], I32)
    return Case(kernel, {x: np.arange(70, dtype=I32)}, {y: want[:, 0], z: want[:, 1]})


@case("loop in lanes")
def loops_in_lanes() -> Case:
    """A sum over lanes of loops' results; one loop starts with another's result."""
    r, k = Range("r", 3), Range("k", 21)
    x, y, z = Buffer("x", I32, 63), Buffer("y", I32, 3, written=True), Buffer("z", I32, 63, written=True)
    total = Total("total", I32, "sum")
    at = of(r) * 21 + of(k)
    _, steps = collatz_of(load(x, at), Range("t", 1))
    _, nested = collatz_of(steps, Range("u", 1))
    body = (Lanes(k, (Reduce(total, steps), Store(z, at, nested))), Store(y, of(r), read(total)))
    want = np.array([collatz_steps(n, -1)[1] for n in range(63)], I32)
    twice = np.array([collatz_steps(n, -1)[1] for n in want], I32)
    kernel = Kernel("collatz_rows", (x, y, z), (r,), body)
    return Case(kernel, {x: np.arange(63, dtype=I32)}, {y: want.reshape(3, 21).sum(1, dtype=I32), z: twice})


@case("loop of carries that trade places")
def fibonacci() -> Case:
    """All carries change at once; the condition is on a scalar that differs per point."""
    i, turn = Range("i", 20), Range("t", 1)
    y = Buffer("y", I32, 20, written=True)
    a, b, n = (carried(c, turn, I32) for c in "abn")
    found, *_ = loop(
        Loop((a, b, n), turn, None),
        [const(0, I32), const(1, I32), number(of(i), I32)],
        op(ew.gt_p, n, 0),
        [b, op(ew.add_p, a, b), op(ew.sub_p, n, 1)],
    )
    want = [0, 1]
    while len(want) < 20:
        want.append(want[-1] + want[-2])
    return Case(Kernel("fibonacci", (y,), (i,), (Store(y, of(i), found),)), {}, {y: np.array(want, I32)})


@case("branch of all points")
def uniform_branches() -> Case:
    """Nested uniform predicates: three versions of the loop over points."""
    i, one, two = Range("i", 50), Range("s", 1), Range("u", 1)
    which, x, y = Buffer("which", I32, 1), Buffer("x", F32, 50), Buffer("y", F32, 50, written=True)
    w, a = load(which, constant(0)), load(x, of(i))
    p, q = [carried(c, one, d) for c, d in zip("wa", (I32, F32), strict=True)]
    inner = carried("a", two, F32)
    (no,) = branch(
        Branch((inner,), two), op(ew.lt_p, p, 2), [q], [op(ew.exp_p, inner)], [op(ew.mul_p, inner, 2)]
    )
    (value,) = branch(Branch((p, q), one), op(ew.lt_p, w, 1), [w, a], [op(ew.neg_p, q)], [no])
    kernel = Kernel("choice", (which, x, y), (i,), (Store(y, of(i), op(ew.add_p, value, 1)),))
    data = draw(50)
    return Case(kernel, {which: np.array([1], I32), x: data}, {y: np.exp(data) + 1})
