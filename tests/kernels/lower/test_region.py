"""Regions as LoopIR kernels: their text, kept values, and aliasing."""

from dataclasses import replace

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax, nn, random
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from blufunc.kernels.loopir.index import Range, of
from blufunc.kernels.loopir.ir import (
    Buffer,
    Kernel,
    Lanes,
    Reduce,
    Rows,
    Set,
    Store,
    Total,
    apply,
    const,
    load,
    read,
)
from blufunc.kernels.loopir.verify import check_kernel
from blufunc.kernels.pipeline import same_place
from blufunc.kernels.target import Target
from tests.kernels.differential import LIKE_A_GPU, SMALL, case
from tests.kernels.test_kernel_counts import cross_entropy, dropout, layer_norm

ROOMY = Target(
    chunks=lambda rows, lanes: 1,
    total_chunks=lambda size: 1,
    keep_bytes=1 << 20,
    keep_loads=True,
    tile=64,
)
"""Cuts nothing, and keeps everything."""


def ones(*shape, dtype=np.float32):
    return from_numpy(np.ones(shape, dtype))


X, G, SCALE, BIAS = ones(6, 8), ones(6, 8), ones(8), ones(8)
LABELS, KEY = ones(6, dtype=np.int32), random.key(1)


def kernels(fun, *args, target=ROOMY, donate=()):
    """The kernels of a function, each of which obeys the rules."""
    made = case(fun, *args, target=target, donate=donate, name="lowered").schedule.kernels
    for kernel in made:
        check_kernel(kernel)
    return made


# -- texts -------------------------------------------------------------------------------------------

TEXTS = {
    "softmax": (lambda x: nn.softmax(x), (X,), ROOMY),
    "layer_norm_backward": (lambda g, *a: bf.vjp(layer_norm, *a)[1](g), (G, X, SCALE, BIAS), ROOMY),
    "columns_in_chunks": (lambda x: (x * 2).sum(0), (X,), SMALL),
    "columns_in_chunks_at_once": (lambda x: (x * 2).sum(0), (X,), LIKE_A_GPU),
    "total_in_chunks": (lambda x: bnp.sqrt((x * x).sum()) + 1, (ones(300, 300),), SMALL),
    "cross_entropy": (bf.value_and_grad(cross_entropy), (X, LABELS), ROOMY),
    "dropout": (dropout, (KEY, X), ROOMY),
    "padded_parts": (
        lambda x: lax.pad(bnp.concatenate([x, x[::-1]], 1), 0.0, [(1, 0, 1), (0, -2, 0)]),
        (X,),
        ROOMY,
    ),
    "window": (
        lambda x, i: lax.dynamic_update_slice(x, x[1:3, 2:6] * 2, (i, i)),
        (X, ones(dtype=np.int32)),
        ROOMY,
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_golden_kernels(name, golden):
    fun, args, target = TEXTS[name]
    golden(f"loopir_{name}", "\n".join(map(str, kernels(fun, *args, target=target))))


# -- loops -------------------------------------------------------------------------------------------


def loops_of(kernel):
    """The loops over lanes."""
    return [s for s in kernel.statements() if isinstance(s, Lanes)]


def statements(kernel, kind):
    return [s for s in kernel.statements() if isinstance(s, kind)]


def loads_of(kernel, loop):
    """The names of the buffers that a loop reads."""
    part = Kernel("part", kernel.buffers, kernel.grid, (loop,))
    from_ = [v for root in part.roots() for v in [root, *root.args] if v.op == "load"]
    return {v.attr[0].name for v in from_}


def test_a_row_is_read_once_where_there_is_room():
    """Three loops of a softmax: the later ones read what the earlier kept."""
    (kernel,) = kernels(lambda x: nn.softmax(x), X)
    assert len(loops_of(kernel)) == 3
    assert len(statements(kernel, Set)) == 2  # the row, and its exponentials
    assert [bool(loads_of(kernel, loop)) for loop in loops_of(kernel)] == [True, False, False]


def test_without_room_values_are_computed_again():
    narrow = Target(ROOMY.chunks, ROOMY.total_chunks, 8, True, 64)
    (kernel,) = kernels(lambda x: nn.softmax(x), X, target=narrow)
    assert not statements(kernel, Set)


@pytest.mark.parametrize("room", [8, 1 << 20])
def test_a_row_that_is_read_again_is_stored_over_at_the_end(room):
    """Two results, one of which is stored a loop earlier if the row is kept."""

    def f(x):
        y = bnp.exp(x - x.max(1, keepdims=True))
        return y, (y / y.max(1, keepdims=True)).astype("int8")

    (kernel,) = kernels(f, X, target=replace(ROOMY, keep_bytes=room))
    stored = [[s.buffer.dtype.name for s in loop.body if isinstance(s, Store)] for loop in loops_of(kernel)]
    assert stored == ([[], [], ["int8", "float32"]] if room == 8 else [[], ["float32"], ["int8"]])
    assert len(same_place(kernel)) == 1


def test_an_axis_of_one_place_is_always_hit():
    """As in the gradient of what was taken along it, wherever that was."""
    w = from_numpy(np.arange(6, dtype=np.float32)[:, None])
    f = bf.grad(lambda x: (bnp.take_along_axis(x, LABELS[:, None], axis=1, mode="clip") * w).sum())
    made = case(f, ones(6, 1), target=ROOMY)
    assert made.schedule.kernels
    np.testing.assert_array_equal(made.interpreted()[0], w)


def test_reductions_that_do_not_wait_for_each_other_share_a_loop():
    (kernel,) = kernels(lambda x: x.max(1) + x.sum(1) + x.min(1), X)
    assert len(loops_of(kernel)) == 1 and len(statements(kernel, Reduce)) == 3


def _normalised(x, y):
    """The sum of the products of a row less its mean, over its length, with another."""
    x = x + x.sum(1, keepdims=True) * (-1 / x.shape[1])
    return x * lax.rsqrt((x * x).sum(1, keepdims=True)) * y


GENERATIONS = {  # a function of two arrays, and the number of loops that reduce its rows
    "a root that the rest need not wait for": (lambda x, y: _normalised(x, y).sum(1), 2),
    "the other way round": (lambda x, y: (y * (3 * _normalised(x, x))).sum(1), 2),
    "a factor that is no root": (lambda x, y: (x * (1 / x.sum(1, keepdims=True)) * y).sum(1), 2),
    "a root of each element": (lambda x, y: (x * lax.rsqrt(y * y + x.sum(1, keepdims=True) ** 2)).sum(1), 2),
    "a root, and a rest that waits as long": (
        lambda x, y: (
            lax.rsqrt((x * x).sum(1, keepdims=True)) * bnp.exp(y - (x * x).sum(1, keepdims=True))
        ).sum(1),
        2,
    ),
    "factors that are not under the root": (
        lambda x, y: (y * lax.rsqrt((x * x).sum(1, keepdims=True)) * y).sum(1),
        2,
    ),
    "the largest, not the sum": (lambda x, y: _normalised(x, y).max(1), 3),
}


@pytest.mark.parametrize("name", GENERATIONS)
def test_a_root_is_taken_out_of_sums(name):
    """Where the sum of the rests need not wait for what is under the root."""
    function, generations = GENERATIONS[name]
    (kernel,) = kernels(function, X, X)
    assert sum(any(isinstance(s, Reduce) for s in loop.body) for loop in loops_of(kernel)) == generations


@pytest.mark.parametrize("rows, chunks", [(6, 3), (7, 3), (2, 2)])
def test_chunks_may_take_rows_in_turns(rows, chunks):
    """Where a kernel reduces rows and columns both: each row is one chunk's."""
    function = lambda x: (x - x.sum(1, keepdims=True)).sum(0)
    kernel, *_ = kernels(function, ones(rows, 8), target=replace(SMALL, interleaved=True))
    (loop,) = [s for s in kernel.body if isinstance(s, Rows)]
    taken = [
        loop.index.at({loop.range: j, **dict.fromkeys(kernel.grid, g)})
        for g in range(kernel.points)
        for j in range(loop.range.extent)
    ]
    assert kernel.points == chunks
    assert sorted(r for r in taken if r < loop.limit) == list(range(rows))
    assert loop.index.coefficient(loop.range) == chunks or rows == chunks
    by_chunks, *_ = kernels(function, ones(rows, 8), target=SMALL)
    (in_order,) = [s for s in by_chunks.body if isinstance(s, Rows)]
    assert in_order.index.coefficient(in_order.range) in (1, 0)


@pytest.mark.parametrize("rows, chunks, per", [(6, 3, 2), (7, 3, 3), (2, 2, 1)])
def test_chunks_of_rows(rows, chunks, per):
    """The chunks that are not empty; a finish reduces their results."""
    made = kernels(lambda x: x.sum(0), ones(rows, 8), target=SMALL)
    (loop,) = statements(made[0], Rows)
    assert (loop.range.extent, loop.limit) == (per, rows)
    assert made[0].points == chunks * 2  # and two tiles of four columns
    assert len(made) == 2


@pytest.mark.parametrize("found, launches", [(3 * 4 * 4, 1), (3 * 4 * 4 - 1, 2)])
def test_what_chunks_found_is_added_up_at_the_end_if_it_is_not_much(found, launches):
    """Three chunks find a tile of four numbers each."""
    made = kernels(lambda x: x.sum(0), X, target=replace(SMALL, finish_bytes=found))
    assert [bool(k.finish) for k in made] == ([True] if launches == 1 else [False, False])
    assert [r.extent for r in made[0].over] == [2] * (launches == 1)


def test_neighbouring_axes_that_are_stepped_through_as_one_are_one():
    (kernel,) = kernels(lambda x, r: x * r, ones(3, 4, 5), ones(4, 5))
    assert [r.extent for r in kernel.grid] == [3, 20]
    (kernel,) = kernels(lambda x, r: x * r, ones(3, 4, 5), ones(3, 1, 1))
    assert [r.extent for r in kernel.grid] == [3, 20]
    (kernel,) = kernels(lambda x: x[..., ::-1] * 2, ones(3, 4, 5))
    assert [r.extent for r in kernel.grid] == [12, 5]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_floats_are_added_up_in_float32(dtype):
    x = from_numpy(np.ones((6, 8), dtypes.as_dtype(dtype)))
    for fun in (lambda x: x.sum(0), lambda x: x.sum(1), lambda x: x.sum()):
        for kernel in kernels(fun, x, target=SMALL):
            cells = [s.total for s in statements(kernel, Reduce)] + [
                s.keep for s in kernel.statements() if hasattr(s, "keep")
            ]
            assert all(c.dtype == np.float32 for c in cells)


# -- in place ----------------------------------------------------------------------------------------


def built(*statements, grid=(), out=(), into=()):
    """A kernel over its buffers."""
    return Kernel("built", (*into, *out), grid, statements)


R, K = Range("r", 4), Range("k", 8)
ROW = of(R) * 8 + of(K)
A, B = Buffer("a", np.dtype(np.float32), 32), Buffer("b", np.dtype(np.int32), 32)
ONE_A_ROW = Buffer("s", np.dtype(np.float32), 4)
OUT, OUT_ROW = Buffer("out", np.dtype(np.float32), 32, True), Buffer("out_row", np.dtype(np.float32), 4, True)
T = Total("t", np.dtype(np.float32), "sum")


def plus(x, y):
    return apply(lax.add_p, (x, y), {}, x.dtype)


IN_PLACE = {
    "its own element": ((Lanes(K, (Store(OUT, ROW, load(A, ROW)),)),), {"a"}),
    "of another dtype of the same size": ((Lanes(K, (Store(OUT, ROW, apply(
        lax.convert_p, (load(B, ROW),), {"dtype": np.dtype(np.float32)}, np.dtype(np.float32))),)),), {"b"}),
    "another element": ((Lanes(K, (Store(OUT, ROW, load(A, ROW * -1 + 31)),)),), set()),
    "read before by a reduction": (
        (Lanes(K, (Reduce(T, load(A, ROW)),)), Lanes(K, (Store(OUT, ROW, plus(load(A, ROW), read(T))),))), {"a"}),
    "read after it is written": (
        (Lanes(K, (Store(OUT, ROW, load(A, ROW)),)), Lanes(K, (Reduce(T, load(A, ROW)),)),
         Store(OUT_ROW, of(R), read(T))), set()),
    "a number of the row": ((Lanes(K, (Reduce(T, load(ONE_A_ROW, of(R))),)), Store(OUT_ROW, of(R), read(T))), {"s"}),
    "a number of the row that lanes may still read": (
        (Lanes(K, (Store(OUT, ROW, plus(load(A, ROW), load(ONE_A_ROW, of(R)))),)),
         Store(OUT_ROW, of(R), load(ONE_A_ROW, of(R)))), {"a"}),
    "stored twice": ((Lanes(K, (Store(OUT, ROW, load(A, ROW)), Store(OUT, ROW, const(0, A.dtype)))),), set()),
    "stored where a guard holds": ((Lanes(K, (Store(OUT, ROW, load(A, ROW), const(True, dtypes.bool_)),)),), set()),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_may_be_written_in_place(name):
    body, inputs = IN_PLACE[name]
    stores = [s.buffer for s in Kernel("k", (), (R,), body).statements() if isinstance(s, Store)]
    reads = [b for b in (A, B, ONE_A_ROW) if any(b is v.attr[0] for r in Kernel("k", (), (R,), body).roots()
                                                 for v in [r, *r.args] if v.op == "load")]  # fmt: skip
    kernel = built(*body, grid=(R,), out=dict.fromkeys(stores), into=reads)
    assert {into.name for _, into in same_place(kernel)} == inputs


def test_results_go_over_donated_arguments():
    """The whole of an optimiser's step; nothing else is allocated."""
    step = lambda p, g, m: (p - (m := 0.9 * m + g) * 0.1, m)
    made = case(step, X, G, X * 2, donate=(0, 2), name="step").schedule
    assert made.plan.output_bytes == made.plan.arena_bytes == 0
    assert {made.place(o).owner for o in made.outputs} == {made.inputs[0], made.inputs[2]}
