"""Semantics of LoopIR: kernels written by hand against NumPy."""

import numpy as np
import pytest

from blufunc.core.ir import dtypes
from blufunc.core.ops import elementwise as ew
from blufunc.errors import JaxprTypeError
from blufunc.kernels.loopir.index import Computed, Range, constant, of
from blufunc.kernels.loopir.ir import (
    Buffer,
    Kernel,
    Lanes,
    Reduce,
    Rows,
    Store,
    Total,
    apply,
    const,
    fold,
    load,
    read,
)
from blufunc.kernels.loopir.verify import check_kernel
from tests.emulation.loop_interpreter import run
from tests.kernels.loop_kernels import CASES, F32, I32, op


@pytest.mark.parametrize("elements", [1, 37, 1 << 16])
@pytest.mark.parametrize("name", CASES)
def test_against_numpy(name, elements):
    """Also with chunks that hold only some of the points, and of a fold."""
    case = CASES[name]()
    check_kernel(case.kernel)
    run(case.kernel, case.arrays, check=True, elements=elements)
    case.compare()


def test_in_place():
    """An output may be the very array that an input is."""
    case = CASES["gelu"]()
    x, y = case.kernel.buffers[0], case.kernel.buffers[2]
    case.arrays[y] = case.arrays[x]
    run(case.kernel, case.arrays, elements=7)
    case.compare()


def test_half_precision_accumulates_in_single():
    """256 + 1 + 1 + ... rests at 256 in bfloat16; the sum is rounded once."""
    bf16 = dtypes.bfloat16
    k = Range("k", 257)
    x, y, z = Buffer("x", bf16, 257), Buffer("y", bf16, 1, written=True), Buffer("z", F32, 1, written=True)
    t, u = Total("t", bf16, "sum"), Total("u", F32, "sum")
    value = load(x, of(k))
    body = (
        Lanes(k, (Reduce(t, value), Reduce(u, value))),
        Store(y, constant(0), read(t)),
        Store(z, constant(0), read(u)),
    )
    arrays = {x: np.array([257.0] + [1.0] * 256, bf16), y: np.zeros(1, bf16), z: np.zeros(1, F32)}
    run(Kernel("k", (x, y, z), (), body), arrays)
    assert (float(arrays[y][0]), float(arrays[z][0])) == (512.0, 512.0)


def test_a_total_is_fresh_in_every_row():
    s, k = Range("s", 3), Range("k", 2)
    x, y = Buffer("x", I32, 6), Buffer("y", I32, 3, written=True)
    t = Total("t", I32, "sum")
    row = (Lanes(k, (Reduce(t, load(x, of(s) * 2 + of(k))),)), Store(y, of(s), read(t)))
    arrays = {x: np.arange(6, dtype=I32), y: np.zeros(3, I32)}
    run(Kernel("k", (x, y), (), (Rows(s, row, of(s), 3),)), arrays)
    assert arrays[y].tolist() == [1, 5, 9]


def test_shared_values_are_computed_once():
    """A chain that doubles at each step is a graph of 60 values, and a tree of 2**60."""
    i = Range("i", 3)
    x, y = Buffer("x", I32, 3), Buffer("y", I32, 3, written=True)
    v = load(x, of(i))
    for _ in range(60):
        v = op(ew.add_p, v, v)
    kernel = Kernel("k", (x, y), (i,), (Store(y, of(i), v),))
    arrays = {x: np.array([1, 2, 0], I32), y: np.ones(3, I32)}
    check_kernel(kernel)
    run(kernel, arrays)
    assert arrays[y].tolist() == [0, 0, 0]
    assert len(str(kernel)) < 4000
    assert len(str(v)) < 400


def _bad(what: str):
    i, k, n = Range("i", 4), Range("k", 3), Range("n", 1)
    x, ids = Buffer("x", F32, 4), Buffer("ids", I32, 4)
    y, z = Buffer("y", F32, 4, written=True), Buffer("z", F32, 12, written=True)
    buffers = (x, ids, y, z)
    one = const(1, F32)
    bodies = {
        "a load beyond the end": ((i,), Store(y, of(i), load(x, of(i) + 1))),
        "a load before the start": ((i,), Store(y, of(i), load(x, of(i) - 1))),
        "a store beyond the end": ((i,), Store(y, of(i) * 2, one)),
        "a gather outside": ((i,), Store(y, of(i), load(x, of(Computed(load(ids, of(i))))))),
        "a wrong bound": ((i,), Store(y, of(i), load(x, of(Computed(load(ids, of(i)), 0, 3))))),
        "points that meet": ((i,), Store(y, of(i) // 2, one)),
        "lanes that meet": ((i,), Lanes(k, (Store(y, of(i), one),))),
        "a lane and the point": (
            (i,),
            Lanes(k, (Store(z, of(i) * 3 + of(k), one),)),
            Store(z, of(i) * 3, one),
        ),
        "an extremum of no lanes": (
            (n,),
            Lanes(Range("none", 0), (Reduce(Total("t", F32, "argmax", I32), one, constant(0)),)),
        ),
        "a wrong dtype": ((i,), Store(y, of(i), apply(ew.neg_p, [load(ids, of(i))], {}, F32))),
    }
    grid, *body = bodies[what]
    return Kernel("bad", buffers, grid, tuple(body))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a load beyond the end", r"x\[i \+ 1\] touches element 4 of 4"),
        ("a load before the start", r"x\[i \+ -1\] touches element -1 of 4"),
        ("a store beyond the end", r"y\[2\*i\] = 1.0 touches element 4 of 4"),
        ("a gather outside", r"touches element 9 of 4"),
        ("a wrong bound", r"\[ids\[i\]\] lies in 0 .. 9, not in 0 .. 3"),
        ("points that meet", "element 0 is also written elsewhere"),
        ("lanes that meet", "element 0 is also written elsewhere"),
        ("a lane and the point", "element 0 is also written elsewhere"),
        ("an extremum of no lanes", "t is the place of an extremum of no lanes"),
        ("a wrong dtype", "is i32, not of its dtype"),
    ],
)
def test_errors(what, message):
    kernel = _bad(what)
    arrays = {b: np.zeros(b.size, b.dtype) for b in kernel.buffers}
    arrays[kernel.buffers[1]][2] = 9
    with pytest.raises(JaxprTypeError, match=message) as caught:
        run(kernel, arrays, check=True)
    assert "kernel bad(" in str(caught.value)


@pytest.mark.parametrize("shift, rows", [(0, 3), (1, 3), (0, 4)])
def test_a_finish_reads_what_it_waits_for(shift, rows):
    """Not elements that points of other columns write, nor those that no point writes."""
    r, t = Range("r", 3), Range("t", 2)
    y, z = Buffer("y", F32, 8, written=True), Buffer("z", F32, 2, written=True)
    q = Range("q", rows)
    body = (Store(y, of(r) * 2 + of(t), const(1, F32)),)
    column = load(y, of(q) * 2 + (of(t) + shift) % 2)
    kernel = Kernel(
        "ends", (y, z), (r, t), body, finish=(Store(z, of(t), fold("sum", q, column)),), over=(t,)
    )
    arrays = {b: np.zeros(b.size, b.dtype) for b in kernel.buffers}
    if shift or rows > 3:
        with pytest.raises(JaxprTypeError, match="may not have been written"):
            run(kernel, arrays, check=True)
    else:
        run(kernel, arrays, check=True)
        np.testing.assert_array_equal(arrays[z], [3, 3])


def test_guards_keep_off_memory():
    """Guarded loads and stores with a false guard do not touch memory."""
    i = Range("i", 4)
    x, y = Buffer("x", F32, 2), Buffer("y", F32, 2, written=True)
    guard = op(ew.lt_p, load(x, constant(0)), 0)
    kernel = Kernel("k", (x, y), (i,), (Store(y, of(i) + 100, load(x, of(i) * 7, guard), guard),))
    arrays = {x: np.ones(2, F32), y: np.full(2, 3, F32)}
    run(kernel, arrays, check=True)
    assert arrays[y].tolist() == [3, 3]


@pytest.mark.parametrize(
    "given", [np.zeros(3, F32), np.zeros((2, 2), F32), np.zeros(4, I32)], ids=["size", "rank", "dtype"]
)
def test_arrays_must_fit(given):
    i = Range("i", 4)
    y = Buffer("y", F32, 4, written=True)
    with pytest.raises(JaxprTypeError, match=r"y: f32\[4\] was given an array"):
        run(Kernel("k", (y,), (i,), (Store(y, of(i), const(0, F32)),)), {y: given})
