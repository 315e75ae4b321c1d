"""Shape manipulation against NumPy."""

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.staging.jit import jit
from tests.numpy.common import boolean, check, f32, i32, same

X, Y, Z = f32(2, 3, 4), f32(3, 4, seed=1), f32(5, seed=2)

ONE = [
    lambda n, x: n.reshape(x, (4, 6)),
    lambda n, x: n.reshape(x, (-1, 2)),
    lambda n, x: n.reshape(x, -1),
    lambda n, x: n.reshape(x, (2, -1), order="F"),
    lambda n, x: x.reshape(4, -1),
    lambda n, x: x.reshape((4, 3, 2)),
    lambda n, x: n.ravel(x),
    lambda n, x: x.ravel(),
    lambda n, x: x.flatten(),
    lambda n, x: n.transpose(x),
    lambda n, x: n.transpose(x, (1, 2, 0)),
    lambda n, x: x.transpose(2, 0, 1),
    lambda n, x: x.transpose((2, 0, 1)),
    lambda n, x: x.T,
    lambda n, x: x.mT,
    lambda n, x: n.permute_dims(x, (0, 2, 1)),
    lambda n, x: n.matrix_transpose(x),
    lambda n, x: n.swapaxes(x, 0, -1),
    lambda n, x: x.swapaxes(0, 1),
    lambda n, x: n.moveaxis(x, 0, -1),
    lambda n, x: n.moveaxis(x, (0, 1), (1, 0)),
    lambda n, x: n.expand_dims(x, 1),
    lambda n, x: n.expand_dims(x, (0, -1)),
    lambda n, x: n.squeeze(x[:1]),
    lambda n, x: n.squeeze(x[:1, :, :1], axis=(0, 2)),
    lambda n, x: x[:1].squeeze(0),
    lambda n, x: n.atleast_1d(x),
    lambda n, x: n.atleast_2d(x[0, 0]),
    lambda n, x: n.atleast_3d(x[0, 0]),
    lambda n, x: n.atleast_3d(x[0]),
    lambda n, x: n.flip(x),
    lambda n, x: n.flip(x, (0, 2)),
    lambda n, x: n.flipud(x),
    lambda n, x: n.fliplr(x),
    lambda n, x: n.rot90(x[0]),
    lambda n, x: n.rot90(x, 2, (1, 2)),
    lambda n, x: n.rot90(x, 3),
    lambda n, x: n.broadcast_to(x, (5, 2, 3, 4)),
    lambda n, x: n.broadcast_to(x[:, :1], (2, 3, 4)),
    lambda n, x: n.concatenate([x, x + 1], axis=1),
    lambda n, x: n.concatenate([x, x], axis=None),
    lambda n, x: n.concat([x, x], axis=-1),
    lambda n, x: n.stack([x, x], axis=1),
    lambda n, x: n.stack([x, x], axis=-1),
    lambda n, x: n.vstack([x[0, 0], x[0, 1]]),
    lambda n, x: n.hstack([x[0, 0], x[0, 1]]),
    lambda n, x: n.hstack([x, x]),
    lambda n, x: n.dstack([x[0], x[1]]),
    lambda n, x: n.column_stack([x[0, 0], x[0].T]),
    lambda n, x: n.append(x, x),
    lambda n, x: n.append(x, x, axis=2),
    lambda n, x: n.split(x, 2, axis=2),
    lambda n, x: n.split(x, [1, 3], axis=2),
    lambda n, x: n.array_split(x, 3, axis=2),
    lambda n, x: n.array_split(x, [2, 1, 9], axis=2),
    lambda n, x: n.hsplit(x, 3),
    lambda n, x: n.vsplit(x, 2),
    lambda n, x: n.dsplit(x, 2),
    lambda n, x: n.repeat(x, 3),
    lambda n, x: n.repeat(x, 2, axis=1),
    lambda n, x: n.repeat(x, 0, axis=1),
    lambda n, x: n.repeat(x, np.array([1, 0, 2]), axis=1),
    lambda n, x: x.repeat(2, axis=-1),
    lambda n, x: n.tile(x, 2),
    lambda n, x: n.tile(x, (2, 1, 3)),
    lambda n, x: n.tile(x, (2, 1, 1, 2)),
    lambda n, x: n.roll(x, 5),
    lambda n, x: n.roll(x, -1, axis=1),
    lambda n, x: n.roll(x, (1, 2), axis=(0, 2)),
    lambda n, x: n.roll(x, 1, axis=(0, 2)),
    lambda n, x: n.take(x, np.array([0, 2, 1]), axis=1),
    lambda n, x: n.take(x, np.array([[0, 2], [1, 7]])),
    lambda n, x: n.take(x, -1, axis=2),
    lambda n, x: x.take(1, axis=0),
    lambda n, x: (
        n.take(x, np.array([5, -7]), axis=1, mode="clip")
        if n is np
        else n.take(x, np.array([2, 0]), axis=1, mode="clip")
    ),
    lambda n, x: n.take(x, np.array([5, -7]), axis=1, mode="wrap"),
    lambda n, x: n.take_along_axis(x, np.argsort(X, axis=1), axis=1),
    lambda n, x: n.take_along_axis(x, np.array([[[1], [0], [-1]]]), axis=2),
    lambda n, x: n.take_along_axis(x, np.array([3, 1]), axis=None),
    lambda n, x: n.diff(x),
    lambda n, x: n.diff(x, n=2, axis=1),
    lambda n, x: n.pad(x, 1),
    lambda n, x: n.pad(x, ((0, 1), (2, 0), (1, 1)), constant_values=3),
    lambda n, x: n.pad(x, (1, 2), constant_values=(5, 6)),
    lambda n, x: n.pad(x, ((0, 0), (1, 2), (3, 0)), mode="edge"),
    lambda n, x: n.pad(x, ((1, 1), (2, 2), (5, 4)), mode="reflect"),
    lambda n, x: n.pad(x, ((1, 3), (2, 2), (5, 4)), mode="symmetric"),
    lambda n, x: n.pad(x, ((1, 3), (2, 2), (5, 9)), mode="wrap"),
    lambda n, x: n.array_equal(x, x),
    lambda n, x: n.array_equal(x, x[0]),
    lambda n, x: n.allclose(x, x + 1e-7),
    lambda n, x: n.nan_to_num(x).astype("int32") if n is bnp else x.astype(np.int32),
    lambda n, x: n.select([x > 1, x > 0], [x, -x], 0.0),
    lambda n, x: list(n.unstack(x, axis=1)),
    lambda n, x: list(n.broadcast_arrays(x, x[0, :1])),
]


@pytest.mark.parametrize("i", range(len(ONE)))
def test_one(i):
    check(lambda x: ONE[i](bnp, x), lambda x: ONE[i](np, x), X)


def test_values_given_to_nonzero():
    m = boolean(3, 4)
    same(bnp.nonzero(bnp.asarray(m)), np.nonzero(m))
    same(bnp.argwhere(bnp.asarray(m)), np.argwhere(m))
    same(bnp.flatnonzero(m), np.flatnonzero(m))
    k = int(m.sum())
    got = jit(lambda v: bnp.nonzero(v, size=k + 2, fill_value=-1))(m)
    for g, w in zip(got, np.nonzero(m)):
        same(g, np.concatenate([w, [-1, -1]]))
    same(jit(lambda v: bnp.flatnonzero(v, size=2))(m), np.flatnonzero(m)[:2])
    same(bnp.unravel_index(np.array([5, 11]), (3, 4)), np.unravel_index(np.array([5, 11]), (3, 4)))
    with pytest.raises(errors.ConcretizationError, match="size="):
        jit(bnp.nonzero)(m)


def test_traced_amounts():
    for k in (-7, 0, 2, 9):
        same(jit(lambda x, s: bnp.roll(x, s, 1))(Y, k), np.roll(Y, k, 1))
    counts = np.array([1, 0, 2])
    same(jit(lambda x, c: bnp.repeat(x, c, 0, total_repeat_length=3))(Y, counts), np.repeat(Y, counts, 0))
    same(bnp.repeat(Y, counts, 0, total_repeat_length=2), np.repeat(Y, counts, 0)[:2])
    with pytest.raises(errors.ConcretizationError, match="total_repeat_length"):
        jit(lambda x, c: bnp.repeat(x, c, 0))(Y, counts)


def test_promotion_in_joins():
    assert bnp.concatenate([bnp.ones(2, "int32"), bnp.ones(2, "bfloat16")]).dtype == bnp.bfloat16
    assert bnp.stack([1, 2.0]).dtype == bnp.float32
    assert bnp.concatenate([bnp.ones(2)], dtype="float64").dtype == bnp.float64
    same(bnp.concatenate(bnp.asarray(Y)), np.concatenate(Y))
    same(bnp.asarray(i32(3)).astype("float32"), i32(3).astype(np.float32))
    rows, columns = bnp.ix_(np.array([0, 2]), np.array([1, 3]))
    same(bnp.asarray(Y)[rows, columns], Y[np.ix_([0, 2], [1, 3])])


def test_gradients():
    w = f32(2, 5, 4)
    want = w[:, 1:4].copy()
    want[:, 0] += w[:, 0]
    want[:, 2] += w[:, 4]
    same(grad(lambda x: (bnp.pad(x, ((0, 0), (1, 1), (0, 0)), mode="edge") * w).sum())(bnp.asarray(X)), want)
    same(
        grad(lambda x: (bnp.tile(x, 2) * bnp.arange(10.0)).sum())(bnp.asarray(Z)),
        np.arange(5) + np.arange(5.0) + 5,
    )


@pytest.mark.parametrize(
    "f, error, words",
    [
        (lambda x: x.reshape(5, 5), errors.ShapeError, ["(2, 3, 4)", "(5, 5)", "24", "25"]),
        (lambda x: x.reshape(-1, 5), errors.ShapeError, ["-1", "multiple of 5"]),
        (lambda x: x.reshape(-1, -1), errors.ShapeError, ["only one size"]),
        (lambda x: x.reshape(2.0, 12), errors.ArgumentError, ["2.0"]),
        (lambda x: x.sum(3), errors.ValueRangeError, ["axis 3", "rank 3", "-3 to 2"]),
        (lambda x: bnp.transpose(x, (0, 0, 1)), errors.ShapeError, ["(0, 0, 1)"]),
        (lambda x: bnp.squeeze(x, 0), errors.ShapeError, ["size 2"]),
        (lambda x: bnp.concatenate([x, x[0]]), errors.ShapeError, ["(2, 3, 4)", "(3, 4)", "stack"]),
        (lambda x: bnp.concatenate([x, x[:, :2]]), errors.ShapeError, ["axis 0"]),
        (lambda x: bnp.concatenate(1.0), errors.ArgumentError, ["sequence"]),
        (lambda x: bnp.stack([x, x[0]]), errors.ShapeError, ["stack"]),
        (lambda x: bnp.split(x, 5, 2), errors.ValueRangeError, ["array_split"]),
        (lambda x: bnp.broadcast_to(x, (2, 3, 5)), errors.ShapeError, ["(2, 3, 4)", "(2, 3, 5)"]),
        (lambda x: bnp.pad(x, 1, mode="magic"), errors.ValueRangeError, ["magic"]),
        (lambda x: bnp.pad(x, ((1, 1), (2, 2))), errors.ShapeError, ["pad_width"]),
        (lambda x: bnp.reshape([1, 2], (2,)), errors.ArgumentError, ["list", "bnp.asarray"]),
        (lambda x: bnp.sum([1, 2]), errors.ArgumentError, ["list", "bnp.asarray"]),
        (lambda x: bnp.take(x, 1.5), errors.DtypeError, ["float"]),
        (lambda x: bnp.where(x > 0, None, 1), errors.ArgumentError, ["nonzero"]),
        (lambda x: bnp.moveaxis(x, (0, 1), 0), errors.ValueRangeError, ["moveaxis"]),
        (lambda x: x.sum((0, 0)), errors.ValueRangeError, ["twice"]),
    ],
)
def test_errors(f, error, words):
    with pytest.raises(error) as e:
        f(bnp.asarray(X))
    for word in [*words, "test_manipulation.py"]:
        assert word in str(e.value), str(e.value)


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8"])
def test_unravel_index_out_of_range(dtype):
    i = np.array([-1, -13, 12, 5, 100, -100] if dtype != "uint8" else [12, 5, 200]).astype(dtype)
    flat = i.astype(np.int64)
    want = np.clip(np.where(flat < 0, flat + 12, flat), 0, 11)
    check(lambda i: bnp.unravel_index(i, (3, 4)), lambda i: np.unravel_index(want, (3, 4)), i)
    same(bnp.unravel_index(np.int8(-1), (3, 100)), (np.int32(2), np.int32(99)))


def test_repeat_to_a_given_length():
    for x, repeats, length in (
        ([1.0], 3, 5),
        ([1.0], 3, 2),
        ([0.0, 1.0, 2.0], 2, 7),
        ([0.0, 1.0], [1, 2], 5),
    ):
        whole = np.repeat(np.float32(x), repeats)
        want = np.pad(whole, (0, max(0, length - whole.size)), mode="edge")[:length]
        counts = bnp.asarray(repeats) if isinstance(repeats, list) else repeats
        got = bnp.repeat(bnp.asarray(x), counts, total_repeat_length=length)
        np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize(
    "shape, index, axis", [((0, 5), (0, 1), 1), ((3, 0), (3, 0), 1), ((2, 0), (0, 0), 0)]
)
def test_elements_of_nothing(shape, index, axis):
    """No positions: as in NumPy that is no error, and nothing is differentiated."""
    i = np.zeros(index, np.int32)
    pick = lambda x: bnp.take_along_axis(x, bnp.asarray(i), axis)
    x = np.zeros(shape, np.float32)
    assert pick(bnp.asarray(x)).shape == np.take_along_axis(x, i, axis).shape
    assert grad(lambda x: pick(x).sum())(bnp.asarray(x)).shape == shape
