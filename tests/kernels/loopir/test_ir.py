"""LoopIR as a data structure: order, substitution, loop variables, text."""

import copy

import numpy as np
import pytest

from blufunc.core.ir import dtypes
from blufunc.core.ops import elementwise as ew
from blufunc.kernels.loopir.index import Computed, Range, constant, of
from blufunc.kernels.loopir.ir import (
    REDUCTIONS,
    Buffer,
    Keep,
    Kernel,
    Lanes,
    Prefix,
    Reduce,
    Rows,
    Scan,
    Store,
    Substitution,
    Total,
    apply,
    computed_in,
    const,
    dependencies,
    fold,
    identity,
    load,
    number,
    outside,
    post_order,
    read,
    statement_text,
    values_of,
    within,
)
from tests.emulation.loop_interpreter import run
from tests.kernels.loop_kernels import CASES, F32, I32, op

I, J, K = Range("i", 4), Range("j", 3), Range("k", 5)
X, IDS = Buffer("x", F32, 60), Buffer("ids", I32, 60)


def test_post_order_is_complete_once_and_in_order():
    ids = load(IDS, of(I))
    gathered = load(X, of(Computed(ids, 0, 59)))
    root = op(ew.add_p, op(ew.mul_p, gathered, gathered), op(ew.convert_p, ids, dtype=F32))
    order = post_order([root, ids])
    assert len(order) == len(set(order)) == 5
    for n, v in enumerate(order):
        assert all(order.index(d) < n for d in dependencies(v))
    assert order[-1] is root


def test_post_order_stops_where_edges_do():
    body = load(X, of(J))
    assert post_order([fold("sum", J, body)], outside)[0].op == "fold"
    assert post_order([fold("sum", J, body)])[0] is body


def test_deep_graphs_need_no_recursion():
    v = load(X, of(I))
    for _ in range(5000):
        v = op(ew.neg_p, v)
    assert v.ranges() == {I}
    assert v.substitute({I: of(J)}).ranges() == {J}
    assert str(v).startswith("neg(")
    assert len(str(v)) < 100


@pytest.mark.parametrize(
    ("value", "ranges"),
    [
        (const(1, F32), set()),
        (load(X, of(I) // 2), {I}),
        (load(X, of(I), within(of(J), 0, 2)), {I, J}),
        (number(of(J) % 2, I32), {J}),
        (load(X, of(Computed(load(IDS, of(K))))), {K}),
        (load(X, of(Computed(load(IDS, of(K)))) // 2 + of(I)), {I, K}),
        (fold("sum", J, load(X, of(I) * 3 + of(J))), {I}),
        (read(Keep("kept", F32, K)), {K}),
        (read(Total("t", F32, "sum")), set()),
    ],
    ids=["const", "load", "guard", "number", "gather", "quotient of a gather", "fold", "keep", "total"],
)
def test_ranges(value, ranges):
    assert value.ranges() == ranges


def test_substitution_keeps_sharing():
    """Shared values stay shared, through indices too; unchanged ones are the same."""
    ids = op(ew.clamp_p, const(0, I32), load(IDS, of(I)), const(59, I32))
    atom, still = Computed(ids, 0, 59), Computed(load(IDS, of(K)), 0, 59)
    a, b = load(X, of(atom)), load(X, of(atom) + of(J) + of(still))
    substitute = Substitution({I: of(K) + 1})
    new_a, new_b = substitute(a), substitute(b)
    (new_ids,) = computed_in(new_a.attr[1])
    assert new_ids in computed_in(new_b.attr[1])
    assert new_ids is substitute(ids)
    assert still in new_b.attr[1].terms
    assert new_b.attr[1] - new_a.attr[1] == of(J) + of(still)
    assert substitute(load(X, of(J))).ranges() == {J}
    assert substitute.index(of(I) * 2) == of(K) * 2 + 2


def test_substitution_leaves_others_alone():
    v = op(ew.neg_p, load(X, of(J)))
    assert v.substitute({I: constant(3)}) is v


def test_substitution_means_evaluation_elsewhere():
    """A value with ``i`` replaced, at each ``k``, is the value at that ``i``."""
    i, k = Range("i", 12), Range("k", 12)
    ids, x, y = Buffer("ids", I32, 12), Buffer("x", F32, 12), Buffer("y", F32, 12, written=True)
    j = Range("j", 2)
    at = Computed(load(ids, of(i)), 0, 11)
    value = op(
        ew.add_p,
        op(ew.add_p, load(x, of(at)), load(x, of(i) - 1, within(of(i), 1, 12))),
        fold("sum", j, op(ew.mul_p, number(of(i) % 5, F32), load(x, of(i) // 2 + of(j)))),
    )
    rng = np.random.default_rng(0)
    arrays = {ids: rng.permutation(12).astype(I32), x: rng.standard_normal(12).astype(F32)}
    results = []
    for r, v in ((i, value), (k, value.substitute({i: of(k) * -1 + 11}))):
        arrays[y] = np.zeros(12, F32)
        run(Kernel("k", (ids, x, y), (r,), (Store(y, of(r), v),)), arrays)
        results.append(arrays[y])
    np.testing.assert_array_equal(results[0], results[1][::-1])


FLOATS, INTEGERS = (F32, dtypes.bfloat16, dtypes.float8_e4m3fn), (I32, dtypes.uint8)
TAKES = {
    "sum": (*FLOATS, *INTEGERS),
    "prod": (*FLOATS, *INTEGERS),
    "max": (*FLOATS, *INTEGERS, dtypes.bool_),
    "min": (*FLOATS, *INTEGERS, dtypes.bool_),
    "and": (*INTEGERS, dtypes.bool_),
    "or": (*INTEGERS, dtypes.bool_),
    "xor": (*INTEGERS, dtypes.bool_),
    "logaddexp": (F32, dtypes.float64),
}


@pytest.mark.parametrize("reverse", [False, True])
def test_text_of_scans(reverse):
    """It says all that tells two scans apart."""
    way = " from the end" if reverse else ""
    halves = Buffer("h", dtypes.float16, 5)
    scan = Scan(Prefix("so_far", F32, K, "max", reverse), load(halves, of(K)))
    assert statement_text(scan) == f"so_far[k]: f32 scans max of h[k]{way}"


def test_identities_of_all_reductions_are_tested():
    assert TAKES.keys() == REDUCTIONS.keys()


@pytest.mark.parametrize(("name", "dtype"), [(n, d) for n in TAKES for d in TAKES[n]], ids=str)
def test_identity(name, dtype):
    """It changes no element, and has the dtype."""
    start = identity(name, dtype)
    elements = np.array([0, 1] if dtype == dtypes.bool_ else [0, 1, 3, 100], dtype)
    assert start.dtype == dtype
    np.testing.assert_array_equal(REDUCTIONS[name](np.full(elements.shape, start, dtype), elements), elements)


def test_values_of_include_those_of_indices():
    ids, row = load(IDS, of(I)), load(IDS, of(J))
    guard, value = within(of(I), 0, 2), const(1, F32)
    y = Buffer("y", F32, 60, written=True)
    assert values_of(Store(y, of(Computed(ids)), value, guard)) == [ids, guard, value]
    assert values_of(Reduce(Total("p", F32, "argmax", I32), value, of(Computed(ids)))) == [ids, value]
    assert values_of(Rows(K, (), of(Computed(row)) + of(K), 3)) == [row]
    assert values_of(Lanes(K, ())) == []


def test_points():
    assert Kernel("k", (), (), ()).points == 1
    assert Kernel("k", (), (I, J), ()).points == 12
    assert Kernel("k", (), (I, Range("n", 0)), ()).points == 0


TEXTS = {
    "gelu": """\
kernel gelu(x: f32[240], bias: f32[40]) -> (y: f32[240])
  # test.py:3 (gelu)
  grid i < 6, j < 40
    v0 = add(x[40*i + j], bias[j])
    v1 = add(tanh(mul(add(v0, mul(mul(mul(v0, v0), v0), 0.044715)), 0.7978846)), 1.0)
    y[40*i + j] = mul(mul(v0, 0.5), v1)
""",
    "softmax": """\
kernel softmax(x: f32[297]) -> (y: f32[297])
  grid r < 9
    lanes k < 33:
      v0 = x[33*r + k]
      top max= v0
    lanes k < 33:
      v1 = x[33*r + k]
      e[k] = exp(sub(v1, top))
      mass sum= e
    lanes k < 33:
      y[33*r + k] = div(e, mass)
""",
    "argmax": """\
kernel argmax(x: f32[36]) -> (y: i32[6])
  grid r < 6
    lanes k < 6:
      place argmax= x[6*r + k] at i32(k)
    y[r] = place
""",
    "column sum, ragged": """\
kernel column_sum(x: f32[185]) -> (y: f32[25])
  grid b < 5
    rows s < 8 while 8*b + s < 37:
      lanes k < 5:
        column[k] sum= x[40*b + 5*s + k]
    lanes k < 5:
      y[5*b + k] = column
""",
    "gather": """\
kernel gather(ids: i32[7], table: f32[20]) -> (y: f32[28])
  grid i < 7, k < 4
    y[4*i + k] = table[4*[clamp(0, ids[i], 4)] + k]
""",
    "finish": """\
kernel mean_of_squares(x: f32[10]) -> (y: f32[10], parts: f32[4], out: f32[1])
  grid g < 4
    lanes k < 3:
      v0 = (0 <= 3*g + k < 10)
      v1 = square(x[3*g + k] if v0)
      y[3*g + k] = v1 if v0
      part sum= v1
    parts[g] = part
  finish
    lanes q < 4:
      total sum= parts[q]
    out[0] = div(total, 10.0)
""",
    "loop": """\
kernel collatz(x: i32[70]) -> (y: i32[70], z: i32[70])
  grid i < 70
    v0 = branch(side.x = t.at: add(mul(side.x, 3), 1) if ne(and(t.at, 1), 0) else shift_right_logical(side.x, 1))
    v1 = loop(t.at, t.steps = x[i], 0 while gt(t.at, 1): v0.0, add(t.steps, 1))
    y[i] = v1.0
    z[i] = v1.1
""",
    "loop of at most 7 turns": """\
kernel collatz(x: i32[70]) -> (y: i32[70], z: i32[70])
  grid i < 70
    v0 = branch(side.x = t.at: add(mul(side.x, 3), 1) if ne(and(t.at, 1), 0) else shift_right_logical(side.x, 1))
    v1 = loop(t.at, t.steps = x[i], 0 while gt(t.at, 1), at most 7 times: v0.0, add(t.steps, 1))
    y[i] = v1.0
    z[i] = v1.1
""",
    "scalar": """\
kernel scalar(x: i32[1]) -> (y: i32[1])
  grid once
    y[0] = mul(x[0], 3)
""",
}


@pytest.mark.parametrize("name", TEXTS)
def test_text(name):
    assert str(CASES[name]().kernel) == TEXTS[name]


def test_text_tells_kernels_apart():
    """However deep a difference lies: programs launch kernels of one text as one."""

    def gathers(depth, total=F32):
        index = load(IDS, of(I))
        for _ in range(30):
            index = op(ew.mul_p, index, 3)
        for _ in range(depth):
            index = op(ew.mul_p, index, 5)
        t = Total("t", total, "sum")
        return str(Kernel("k", (X, IDS), (), (Lanes(I, (Reduce(t, load(X, of(Computed(index)) % 8)),)),)))

    assert gathers(1) == gathers(1)
    assert len({gathers(0), gathers(1), gathers(2), gathers(0, dtypes.float64)}) == 4
    assert "..." not in gathers(2)


def test_keys_tell_kernels_apart_that_read_alike():
    """Constants of other dtypes, and operations of users that have one name."""

    def kernel(dtype, prim=ew.mul_p):
        y = Buffer("y", F32, 4, written=True)
        value = apply(prim, (const(0.1, dtype), const(0.1, dtype)), {}, dtype)
        value = apply(ew.convert_p, (value,), {"dtype": F32}, F32)
        return Kernel("k", (y,), (I,), (Store(y, of(I), value),))

    other = copy.copy(ew.mul_p)
    assert kernel(dtypes.float16).key == kernel(dtypes.float16).key
    assert str(kernel(dtypes.float16)) == str(kernel(dtypes.float64)) == str(kernel(dtypes.float16, other))
    assert len({kernel(*k).key for k in [(dtypes.float16,), (dtypes.float64,), (dtypes.float16, other)]}) == 3


def test_text_of_a_guard_and_a_fold():
    guard = within(of(I), 1, 3)
    value = fold("sum", J, load(X, of(I) * 3 + of(J), guard))
    y = Buffer("y", F32, 4, written=True)
    text = statement_text(Store(y, of(I), value, guard))
    assert text == "y[i] = sum(j < 3: x[3*i + j] if (1 <= i < 3)) if (1 <= i < 3)"
