"""Insertion, deletion, replacement, choice, masked updates and pads against NumPy."""

# ruff: noqa: B023 - the functions that close over loop variables run at once

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.staging.jit import jit
from tests.numpy.common import check, f32, i32, same

X = f32(4, 5)
V = X[0]


@pytest.mark.parametrize(
    "obj",
    [0, -1, slice(1, 3), [0, 2], np.array([1, 1, 3]), [], np.array([True, False, True, False])],
    ids=str,
)
def test_delete(obj):
    check(lambda x: bnp.delete(x, obj, 0), lambda x: np.delete(x, obj, 0), X)


def test_delete_at_traced_positions():
    same(jit(lambda x, i: bnp.delete(x, i, 1))(X, 2), np.delete(X, 2, 1))
    f = jit(lambda x, i: bnp.delete(x, i, 1, assume_unique_indices=True))
    same(f(X, np.array([0, -1])), np.delete(X, [0, -1], 1))
    same(bnp.delete(X, 3), np.delete(X, 3))
    with pytest.raises(errors.ConcretizationError, match="assume_unique_indices"):
        jit(bnp.delete)(X, np.array([0, 1]))
    with pytest.raises(errors.IndexRangeError):
        bnp.delete(X, 9, 0)


INSERTIONS = [
    (V, 1, 9.0, None), (V, 1, np.array([7.0, 8, 9]), None), (V, [1, 3], 9.0, None),
    (V, [1, 3], np.array([7.0, 8]), None),
    (V, [3, 1, 1], np.array([7.0, 8, 6]), None), (V, [2], np.array([7.0, 8, 6]), None), (X, 1, 9.0, 0),
    (X, 1, np.arange(5.0), 0), (X, 2, np.arange(4.0), 1), (X, [1, 3], 9.0, 1), (X, 2, 9.0, None), (V, 5, 1.0, None),
    (X, [1, 3], np.arange(8.0).reshape(4, 2), 1), (X, [1], np.arange(4.0)[:, None], 1), (X, slice(1, 4), 5.0, 0),
    (X, [1], np.arange(10.0).reshape(2, 5), 0), (V, -1, 1.0, None), (X, 1, np.arange(10.0).reshape(2, 5), 0),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(INSERTIONS)))
def test_insert(i):
    x, obj, values, axis = INSERTIONS[i]
    check(lambda a: bnp.insert(a, obj, values, axis), lambda a: np.insert(a, obj, values, axis), x)
    if not isinstance(obj, slice):
        same(
            jit(lambda a, o, v: bnp.insert(a, o, v, axis))(x, np.asarray(obj), values),
            np.insert(x, obj, values, axis),
        )


def test_resize_and_trim():
    for shape in ((2, 3), (30,), (3, 10), (0,)):
        check(lambda x: bnp.resize(x, shape), lambda x: np.resize(x, shape), X)
    t = np.array([0, 0, 1, 0, 2, 0], np.float32)
    for trim in ("f", "b", "fb"):
        same(bnp.trim_zeros(t, trim), np.trim_zeros(t, trim))
    assert bnp.trim_zeros(np.zeros(3)).shape == (0,)


def test_compress_extract_choose():
    c = np.array([True, False, True, True])
    same(bnp.compress(c, X, 0), np.compress(c, X, 0))
    same(bnp.compress(c, X), np.compress(c, X))
    got = jit(lambda m, x: bnp.compress(m, x, 0, size=4, fill_value=-1))(c, X)
    same(got, np.concatenate([X[c], -np.ones((1, 5), np.float32)]))
    same(bnp.extract(X > 0, X), np.extract(X > 0, X))
    options = [np.arange(4.0), np.arange(4.0) * 10, 5 * np.ones(4)]
    at, far = np.array([2, 0, 1, 1]), np.array([5, -1, 1, 1])
    same(bnp.choose(at, options), np.choose(at, options))
    for mode in ("wrap", "clip"):
        check(lambda a: bnp.choose(a, options, mode=mode), lambda a: np.choose(a, options, mode=mode), far)
    with pytest.raises(errors.IndexRangeError):
        bnp.choose(far, options)


def in_place(f, x, *args, **options):
    y = x.copy()
    f(y, *args, **options)
    return y


def test_what_numpy_does_in_place():
    at, values = np.array([0, 7, 12]), np.array([1, 2], np.float32)
    check(lambda x: bnp.put(x, at, values, inplace=False), lambda x: in_place(np.put, x, at, values), X)
    for mode in ("wrap", "clip"):
        far = np.array([0, 70, 1])
        check(
            lambda x: bnp.put(x, far, values, mode, inplace=False),
            lambda x: in_place(np.put, x, far, values, mode),
            X,
        )
    check(
        lambda x: bnp.place(x, x > 0, values, inplace=False),
        lambda x: in_place(np.place, x, x > 0, values),
        X,
    )
    i = np.argsort(X, 1)[:, :2]
    check(
        lambda x: bnp.put_along_axis(x, i, 9.0, 1, inplace=False),
        lambda x: in_place(np.put_along_axis, x, i, 9.0, 1),
        X,
    )
    j, new = np.array([[0], [1], [2], [-1]]), np.arange(4.0)[:, None]
    check(
        lambda x: bnp.put_along_axis(x, j, new, 1, False),
        lambda x: in_place(np.put_along_axis, x, j, new, 1),
        X,
    )
    for shape in ((4, 4), (5, 3), (3, 5), (7, 3), (3, 3, 3)):
        for wrap in (False, True):
            z = np.zeros(shape, np.float32)
            check(lambda x: bnp.fill_diagonal(x, values, wrap, inplace=False),
                  lambda x: in_place(np.fill_diagonal, x, values, wrap), z)  # fmt: skip
    for f in (bnp.put, bnp.place, bnp.fill_diagonal):
        with pytest.raises(errors.ImmutableArrayError, match="inplace=False"):
            f(X, *[1, 1][: 1 if f is bnp.fill_diagonal else 2])


MASKS = {
    "rows": (X[:, 0] > 0, lambda m: m),
    "elements": (X > 0, lambda m: m),
    "columns": (V > 0, lambda m: (Ellipsis, m)),
    "columns behind a slice": (V > 0, lambda m: (slice(None), m)),
    "rows before a slice": (X[:, 0] > 0, lambda m: (m, slice(None))),
}


@pytest.mark.parametrize("name", MASKS)
def test_updates_by_masks(name):
    mask, index = MASKS[name]
    for value in (2.0, f32(5, seed=3) if name.startswith("rows") else np.float32(3)):
        want = X.copy()
        want[index(mask)] = value
        check(lambda x, m: x.at[index(m)].set(value), lambda x, m: want, X, mask)
        added = X.copy()
        added[index(mask)] += value
        check(lambda x, m: x.at[index(m)].add(value), lambda x, m: added, X, mask)
    powered = X.copy()
    powered[index(mask)] = np.exp(powered[index(mask)])
    check(lambda x, m: x.at[index(m)].apply(bnp.exp), lambda x, m: powered, X, mask)
    check(lambda x, m: x.at[index(m)].min(0.5), lambda x, m: np.where(np.broadcast_to(_whole(m, index), x.shape),
          np.minimum(x, 0.5), x), X, mask)  # fmt: skip
    same(grad(lambda x: jit(lambda y, m: y.at[index(m)].multiply(3.0).sum())(x, mask))(X),
         np.where(_whole(mask, index), np.float32(3), np.float32(1)))  # fmt: skip


def _whole(mask, index):
    flags = np.zeros((4, 5), bool)
    flags[index(mask)] = True
    return flags


LISTS = [[0, 1], ([0, 2], slice(None)), (slice(None), [1, 2]), [[0, 1], [2, 0]], [], ([0], [1]),
         [True, False, True, True],
         ((0, 1),), ([True, False, True, False], [1, 2]), (0, [1, 2]), ([0, 1], None, 2),
         (Ellipsis, [0, -1])]  # fmt: skip


@pytest.mark.parametrize("index", LISTS, ids=str)
def test_lists_as_indices(index):
    check(lambda x: x[index], lambda x: x[index], X)
    same(jit(lambda x, i: x[[i, 0]])(X, 2), X[[2, 0]])


MODES = [
    "edge",
    "wrap",
    "reflect",
    "symmetric",
    "maximum",
    "minimum",
    "mean",
    "median",
    "linear_ramp",
    "constant",
]


@pytest.mark.parametrize("widths", [2, (1, 3), ((1, 2), (0, 3)), ((7, 9), (2, 0))], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_pad(mode, widths):
    for x in (X, i32(3, 4), X[:1, :1]):
        check(lambda v: bnp.pad(v, widths, mode), lambda v: np.pad(v, widths, mode), x)
        if mode in ("maximum", "minimum", "mean", "median"):
            for n in (2, ((1, 2),)):
                check(
                    lambda v: bnp.pad(v, widths, mode, stat_length=n),
                    lambda v: np.pad(v, widths, mode, stat_length=n),
                    x,
                )
        option = {
            "reflect": {"reflect_type": "odd"},
            "symmetric": {"reflect_type": "odd"},
            "linear_ramp": {"end_values": (5, -4)},
            "constant": {"constant_values": (5, -4)},
        }.get(mode)
        if option and x.size > 1:
            check(
                lambda v: bnp.pad(v, widths, mode, **option), lambda v: np.pad(v, widths, mode, **option), x
            )


def test_pad_by_a_function_and_by_axes():
    def frame(line, widths, axis, options):
        return (
            line.at[: widths[0]].set(options["with_"]).at[line.shape[0] - widths[1] :].set(options["with_"])
        )

    same(bnp.pad(X, 2, frame, with_=7), np.pad(X, 2, constant_values=7))
    same(bnp.pad(X, {0: (1, 2)}, "edge"), np.pad(X, ((1, 2), (0, 0)), "edge"))
    with pytest.raises(errors.ArgumentError, match="stat_length"):
        bnp.pad(X, 1, "edge", stat_length=2)
    w = f32(7)
    same(grad(lambda v: (bnp.pad(v, 1, "mean") * w).sum())(V), w[1:-1] + (w[0] + w[-1]) / 5)
