"""Products, einsum and diagonals against NumPy; sorting and searching."""

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.numpy.common import check, f32, i32, same

SHAPES = [
    ((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 4)), ((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((2, 3), (5, 3, 4)),
    ((5, 2, 3), (5, 3, 4)), ((5, 1, 2, 3), (6, 3, 4)), ((1, 2, 3), (5, 3, 4)), ((3,), (5, 3, 4)), ((5, 2, 3), (3,)),
    ((0, 3), (3, 2)), ((2, 0), (0, 3)),
]  # fmt: skip


@pytest.mark.parametrize("a, b", SHAPES)
def test_matmul(a, b):
    x, y = f32(*a), f32(*b, seed=1)
    check(lambda p, q: p @ q, lambda p, q: p @ q, x, y)
    check(bnp.matmul, np.matmul, i32(*a), i32(*b, seed=1))
    w = f32(*(x @ y).shape, seed=2)
    gx, gy = grad(lambda p, q: (bnp.matmul(p, q) * w).sum(), (0, 1))(bnp.asarray(x), bnp.asarray(y))
    eps = 1e-2
    if x.size and y.size:
        d = f32(*a, seed=3)
        want = (((x + eps * d) @ y - (x - eps * d) @ y) * w).sum() / (2 * eps)
        assert float((gx * d).sum()) == pytest.approx(want, rel=2e-2, abs=1e-2)
    assert gy.shape == y.shape


def test_products():
    x, y = f32(2, 3, 4), f32(5, 4, 3, seed=1)
    v, w = f32(4), f32(4, seed=1)
    check(bnp.dot, np.dot, x, y)
    check(bnp.dot, np.dot, v, w)
    check(bnp.dot, np.dot, x, v)
    check(lambda a: bnp.dot(a, 2.0), lambda a: np.dot(a, np.float32(2)), x)
    check(bnp.inner, np.inner, x, v)
    check(bnp.inner, np.inner, x, f32(3, 4))
    check(bnp.outer, np.outer, v, x)
    check(bnp.vdot, np.vdot, x, x)
    check(lambda a, b: bnp.vecdot(a, b), np.vecdot, x, v)
    check(lambda a, b: bnp.vecdot(a, b, axis=1), lambda a, b: np.vecdot(a, b, axis=1), x, x)
    check(bnp.kron, np.kron, f32(2, 3), f32(3, 2))
    check(bnp.kron, np.kron, v, f32(2, 2))
    check(bnp.cross, np.cross, f32(4, 3), f32(3))
    z = (f32(3) + 1j * f32(3, seed=1)).astype(np.complex64)
    check(bnp.vdot, np.vdot, z, z)
    check(lambda a, b: a @ b, lambda a, b: a @ b, x > 0, np.ones((4, 2), bool))
    for axes in (1, 2, ((1, 2), (2, 1)), (2, 1), ((-1,), (1,)), 0):
        b = y if axes not in (1, 2) else (f32(4, 2) if axes == 1 else f32(3, 4, 2))
        check(lambda p, q, a=axes: bnp.tensordot(p, q, a), lambda p, q, a=axes: np.tensordot(p, q, a), x, b)
    half = bnp.ones((2, 3), "bfloat16")
    assert (half @ half.T).dtype == bnp.bfloat16
    assert bnp.matmul(half, half.T, preferred_element_type="float32").dtype == bnp.float32
    assert bnp.einsum("ij,kj->ik", half, half, preferred_element_type="float32").dtype == bnp.float32


EINSUM = [
    ("ij,jk->ik", (2, 3), (3, 4)), ("ij,jk", (2, 3), (3, 4)), ("ij,jk->ki", (2, 3), (3, 4)),
    ("bij,bjk->bik", (5, 2, 3), (5, 3, 4)),
    ("bqhd,bkhd->bhqk", (2, 3, 4, 5), (2, 6, 4, 5)), ("bhqk,bkhd->bqhd", (2, 4, 3, 6), (2, 6, 4, 5)),
    ("i,i->", (3,), (3,)), ("i,j->ij", (3,), (4,)), ("ij,ij->", (2, 3), (2, 3)),
    ("ij,ij->ij", (2, 3), (2, 3)),
    ("ii->i", (3, 3)), ("ii", (3, 3)), ("ij->", (2, 3)), ("ij->ji", (2, 3)), ("ijk->ki", (2, 3, 4)),
    ("iij->j", (3, 3, 2)),
    ("...ij,...jk->...ik", (5, 2, 3), (5, 3, 4)), ("...ij,...jk->...ik", (5, 2, 3), (3, 4)),
    ("...i->...", (2, 3, 4)),
    ("b...i,...i->b...", (2, 3, 4), (3, 4)), ("...,...->...", (2, 3), (3,)),
    ("ij...,j->i...", (2, 3, 4), (3,)),
    ("ij,jk,kl->il", (2, 3), (3, 4), (4, 5)), ("ij,jk,kl,lm->im", (2, 3), (3, 4), (4, 5), (5, 2)),
    ("i,i,i->", (3,), (3,), (3,)),
    ("ij,kj->ik", (2, 3), (1, 3)), ("ij,ij->i", (2, 1), (2, 3)), ("ijk,k->ij", (2, 3, 1), (4,)),
    ("ab,ab,c->", (2, 3), (2, 3), (4,)),
    ("i->", (0,)), (",i->i", (), (3,)), ("abc,cd->abd", (2, 3, 4), (4, 5)), ("iji->j", (3, 2, 3)),
    ("ab,cd->abcd", (2, 3), (4, 2)),
    ("ba", (2, 3)),
]  # fmt: skip


@pytest.mark.parametrize("subscripts, shapes", [(row[0], row[1:]) for row in EINSUM])
def test_einsum(subscripts, shapes):
    xs = [f32(*s, seed=k) for k, s in enumerate(shapes)]
    check(
        lambda *v: bnp.einsum(subscripts, *v), lambda *v: np.einsum(subscripts, *v), *xs, rtol=1e-4, atol=1e-5
    )


def test_einsum_forms():
    x, y = f32(2, 3), f32(3, 4)
    same(bnp.einsum(x, [0, 1], y, [1, 2], [0, 2]), x @ y)
    same(bnp.einsum("ij, jk -> ik", x, y), x @ y)
    path = bnp.einsum_path("ij,jk,kl->il", x, y, f32(4, 2))[0]
    for optimize in (None, False, True, "optimal", [(0, 1), (0, 1)], [[1, 2], [0, 1]], path):
        same(bnp.einsum("ij,jk,kl->il", x, y, f32(4, 2), optimize=optimize), x @ y @ f32(4, 2), rtol=1e-4)
    names = lambda f, *a: [e.prim.name for e in make_jaxpr(f)(*a).eqns]
    q = f32(2, 3, 4, 5)
    assert names(lambda a, b: bnp.einsum("bqhd,bkhd->bhqk", a, b), q, q) == ["dot_general"]
    assert names(lambda a, b: bnp.einsum("bhqk,bkhd->bqhd", a, b), f32(2, 4, 3, 3), q) == [
        "dot_general",
        "transpose",
    ]
    assert names(lambda a, b: a @ b, q, f32(5, 6)) == ["dot_general"]
    assert names(lambda a, b: a @ b, q, f32(2, 3, 5, 6)) == ["dot_general"]
    same(
        vmap(lambda a: bnp.einsum("ij,kj->ik", a, a))(q[0]), np.einsum("bij,bkj->bik", q[0], q[0]), rtol=1e-4
    )


@pytest.mark.parametrize(
    "f, words",
    [
        (lambda: bnp.ones((2, 3)) @ bnp.ones((2, 3)), ["(2, 3)", "mT"]),
        (lambda: bnp.ones((2, 3)) @ 2.0, ["rank 1"]),
        (lambda: bnp.ones((4, 2, 3)) @ bnp.ones((5, 3, 2)), ["(4,)", "(5,)"]),
        (lambda: bnp.dot(bnp.ones((2, 3)), bnp.ones((2, 3))), ["dot"]),
        (lambda: bnp.tensordot(bnp.ones((2, 3)), bnp.ones((2, 3)), 1), ["tensordot"]),
        (lambda: bnp.einsum("ij,jk->ik", bnp.ones((2, 3)), bnp.ones((4, 5))), ["'j'", "3", "4"]),
        (lambda: bnp.einsum("ij,jk->ik", bnp.ones((2, 3))), ["2 terms for 1 operands"]),
        (lambda: bnp.einsum("ij->ik", bnp.ones((2, 3))), ["'k'", "no operand"]),
        (lambda: bnp.einsum("ij->ii", bnp.ones((2, 3))), ["twice"]),
        (lambda: bnp.einsum("ijk->i", bnp.ones((2, 3))), ["3 axes", "rank 2"]),
    ],
)
def test_errors(f, words):
    with pytest.raises(errors.ShapeError) as e:
        f()
    for word in [*words, "test_linear.py"]:
        assert word in str(e.value), str(e.value)


def test_diagonals():
    x = f32(2, 4, 5)
    for k in (-5, -2, 0, 1, 4, 7):
        check(lambda v, k=k: bnp.diagonal(v, k, 1, 2), lambda v, k=k: np.diagonal(v, k, 1, 2), x)
        check(lambda v, k=k: bnp.trace(v, k, 1, 2), lambda v, k=k: np.trace(v, k, 1, 2), x)
        check(lambda v, k=k: bnp.diag(v, k), lambda v, k=k: np.diag(v, k), x[0])
        check(lambda v, k=k: bnp.diag(v, k), lambda v, k=k: np.diag(v, k), x[0, 0])
    check(lambda v: v.diagonal(axis1=2, axis2=0), lambda v: v.diagonal(axis1=2, axis2=0), x)
    check(bnp.diagflat, np.diagflat, x[0, :2, :2])
    check(bnp.trace, np.trace, i32(3, 3))
    for mask in (np.eye(3, dtype=bool), np.eye(3, k=1, dtype=bool)):
        check(bnp.trace, lambda v: np.trace(v).astype(np.int32), mask)
        check(lambda v: bnp.trace(v, dtype=bool), lambda v: np.trace(v) > 0, mask)


def test_sorting():
    x = np.round(f32(3, 5), 1)
    x[0, 1] = np.nan
    for axis in (None, 0, -1):
        check(lambda v, a=axis: bnp.sort(v, a), lambda v, a=axis: np.sort(v, a), x)
        check(lambda v, a=axis: bnp.argsort(v, a), lambda v, a=axis: np.argsort(v, a, stable=True), x)
    n = i32(3, 5)
    check(lambda v: bnp.sort(v, descending=True), lambda v: -np.sort(-v), n)
    check(lambda v: bnp.argsort(v, descending=True), lambda v: np.argsort(-v, stable=True), n)
    check(lambda v: v.sort(), lambda v: np.sort(v), n)
    check(lambda v: v.argsort(0), lambda v: np.argsort(v, 0, stable=True), n)
    check(lambda a, b: bnp.lexsort((a, b)), lambda a, b: np.lexsort((a, b)), n[0], n[1])
    line = np.sort(np.round(f32(9), 1))
    probe = np.array([[-3.0, line[2], 0.05], [line[5], 3.0, np.nan]], np.float32)
    for side in ("left", "right"):
        check(
            lambda a, v, s=side: bnp.searchsorted(a, v, s),
            lambda a, v, s=side: np.searchsorted(a, v, s),
            line,
            probe,
        )
        check(lambda a, v, s=side: bnp.digitize(v, a, s == "left"),
              lambda a, v, s=side: np.digitize(v, a, s == "left"), line, probe[:, :2])  # fmt: skip
    with_nan = np.array([1.0, 2.0, np.nan], np.float32)
    for side in ("left", "right"):
        check(lambda a, v, s=side: bnp.searchsorted(a, v, s), lambda a, v, s=side: np.searchsorted(a, v, s), with_nan,
              np.array([np.nan, 1.5], np.float32))  # fmt: skip
    check(lambda a, b: bnp.isin(a, b), np.isin, n, np.array([1, 3], np.int32))
    check(lambda a: bnp.isin(a, np.array([1]), invert=True), lambda a: np.isin(a, [1], invert=True), n)
    xp, fp = np.array([0.0, 1.0, 3.0], np.float32), np.array([1.0, 5.0, -1.0], np.float32)
    at = np.array([-1.0, 0.0, 0.5, 1.0, 2.0, 3.0, 4.0], np.float32)
    check(bnp.interp, np.interp, at, xp, fp)
    check(lambda v: bnp.interp(v, xp, fp, 7.0, 8.0), lambda v: np.interp(v, xp, fp, 7.0, 8.0), at)
    with pytest.raises(errors.ValueRangeError, match="side"):
        bnp.searchsorted(line, 0.0, "middle")


@pytest.mark.parametrize("bins", [[4, 2, 1], [1, 2, 4], [3, 3, 1], [2, 2], [5], []])
@pytest.mark.parametrize("right", [False, True])
def test_digitize(bins, right):
    x, bins = np.array([0, 1, 1.5, 2, 3, 4, 9], np.float32), np.array(bins, np.float32)
    check(lambda x, b: bnp.digitize(x, b, right), lambda x, b: np.digitize(x, b, right), x, bins)


def test_interp_at_a_jump():
    xp, fp = np.array([0, 1, 1, 2], np.float32), np.array([0, 1, 5, 6], np.float32)
    check(bnp.interp, np.interp, np.array([0.5, 1, 1.5, 2, 3], np.float32), xp, fp)


@pytest.mark.parametrize("subscripts, shapes", [("ij,jk->ik", [(2, 3), (3, 4)]), ("ij,jk", [(2, 3), (3, 4)]),
                                                ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)])])  # fmt: skip
def test_einsum_in_natural_order_is_one_product(subscripts, shapes):
    jaxpr = make_jaxpr(lambda *v: bnp.einsum(subscripts, *v))(*[f32(*s) for s in shapes])
    assert str(jaxpr).count(" = ") == str(jaxpr).count("dot_general") == 1
