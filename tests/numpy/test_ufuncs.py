"""Methods of universal functions, against NumPy's."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax

F = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
I = (F * 4).astype("int32")
MASK = F > 0

NAMES = [
    *("add", "multiply", "subtract", "maximum", "minimum", "logaddexp", "logaddexp2"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or", "logical_xor"),
]

CALLS = {  # a method, its other arguments
    "reduce": [(), (1,), (-1, None, None, True), (0, None, None, False, 2)],
    "accumulate": [(), (1,)],
    "outer": [(I[0],)],
    "reduceat": [([0, 2, 1],), ([3, 0], 1)],
}


def operand(name):
    return F if name.startswith("logadd") else I > 0 if name.startswith("logical") else I


def close(got, want):
    np.testing.assert_allclose(got, np.asarray(want).astype(got.dtype), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_methods(name):
    ours, numpys, x = getattr(bnp, name), getattr(np, name), operand(name)
    assert (ours.nin, ours.nout, ours.nargs) == (2, 1, 2) and isinstance(ours, bnp.ufunc)
    for method, calls in CALLS.items():
        for rest in calls:
            mine = [bnp.asarray(r) if isinstance(r, (list, np.ndarray)) else r for r in rest]
            close(getattr(ours, method)(bnp.asarray(x), *mine), getattr(numpys, method)(x, *rest))
    run = bf.jit(lambda x: (ours.reduce(x), ours.accumulate(x)))
    for got, want in zip(run(x), (numpys.reduce(x), numpys.accumulate(x)), strict=True):
        close(got, want)


@pytest.mark.parametrize("name", NAMES)
def test_updates_one_after_another(name):
    ours, numpys, x = getattr(bnp, name), getattr(np, name), operand(name)
    for index, values in [
        (np.array([0, 2, 2, 0, 2]), x[:, :1].repeat(5, 1)[0]),
        (np.array([[1, 1], [3, 1]]), x[0, 0]),
    ]:
        want = x[0].copy()
        numpys.at(want, index, values)
        close(ours.at(bnp.asarray(x[0]), bnp.asarray(index), values, inplace=False), want)
    want = x.copy()
    numpys.at(want, (np.array([0, 1, 1]), slice(1, 3)), x[:, :2])
    close(ours.at(bnp.asarray(x), (bnp.array([0, 1, 1]), slice(1, 3)), x[:, :2], inplace=False), want)
    with pytest.raises(errors.UnsupportedError, match="inplace=False"):
        ours.at(bnp.asarray(x), 0, x[0])


@pytest.mark.parametrize("name", NAMES)
def test_masked_reductions(name):
    ours, numpys, x = getattr(bnp, name), getattr(np, name), operand(name)
    for initial in (None, 1):
        if initial is None and ours.identity is None:
            with pytest.raises(ValueError, match="has no identity"):
                ours.reduce(bnp.asarray(x), where=bnp.asarray(MASK))
            continue
        start = ours.identity if initial is None else initial
        want = [
            numpys.reduce(np.concatenate([[start], c[m]]).astype(x.dtype))
            for c, m in zip(x.T, MASK.T, strict=True)
        ]
        close(ours.reduce(bnp.asarray(x), where=bnp.asarray(MASK), initial=initial), want)
    with pytest.raises(TypeError, match="mask of booleans"):
        ours.reduce(bnp.asarray(x), where=bnp.asarray(I), initial=1)


def test_functions_of_ones_own():
    f = bnp.frompyfunc(lambda a, b: 2 * a - b, 2, 1, identity=0)
    x = bnp.asarray(F)
    close(f(x, x[0]), 2 * F - F[0])
    close(f.reduce(x), -4 * F[0] - 2 * F[1] - F[2])  # from the identity, and from the left
    close(f.accumulate(x)[1], 2 * F[0] - F[1])
    close(f.outer(x, x[0]), 2 * F[..., None] - F[0])
    close(f.at(x[0], bnp.array([1, 1]), bnp.float32(1), inplace=False)[1], 4 * F[0, 1] - 3)
    close(bf.grad(lambda x: f.reduce(x).sum())(x)[1], np.full(4, -2.0))
    close(bf.vmap(f.reduce)(x), f.reduce(x, 1))
    pair = bnp.frompyfunc(lambda a: (a, a + 1), 1, 2)
    assert [v.shape for v in pair(x)] == [F.shape] * 2
    for call in (
        lambda: pair.reduce(x),
        lambda: f(x),
        lambda: bnp.negative.reduce(x),
        lambda: bnp.frompyfunc(1, 1, 1),
    ):
        with pytest.raises(errors.ArgumentError):
            call()
    with pytest.raises(ValueError, match="identity"):
        bnp.frompyfunc(lambda a, b: a - b, 2, 1).reduce(x[:0])
    close(bnp.negative.at(x[0], bnp.array([1, 1, 2]), inplace=False), F[0] * [1, 1, -1, 1])
    assert bnp.frompyfunc(max, 2, 1) == bnp.frompyfunc(max, 2, 1) != bnp.frompyfunc(min, 2, 1)
    assert isinstance(f, bnp.ufunc) and not isinstance(bnp.sin, bnp.ufunc) and {f: 1}[f] == 1


X = np.ones((2, 3), "float32")


@pytest.mark.parametrize(
    "name", "add sub mul div max min pow atan2 eq lt nextafter rem complex igamma".split()
)
def test_functions_of_lax_stretch_axes_of_size_one(name):
    f = getattr(lax, name)
    for a, b in ((X, X[:1]), (X[:, :1], X[:1]), (X, 2.0), (X, np.float32(2))):
        assert f(a, b).shape == (2, 3)
        np.testing.assert_array_equal(
            f(a, b), f(*[np.asarray(v, "float32") for v in np.broadcast_arrays(a, b)])
        )
    for a, b in ((X, X[0]), (X, X[:, :2])):
        with pytest.raises(TypeError, match="of one shape"):
            f(a, b)
    if name in ("mul", "div", "atan2"):
        assert bf.grad(lambda y: lax.real(f(X, y)).sum())(X[:1]).shape == (1, 3)


def test_three_operands_stretch():
    assert lax.betainc(X, X[:1], X[:, :1] / 2).shape == (2, 3)
    for call in (lambda: lax.clamp(X[:1], X, X), lambda: lax.select(X > 0, X, X[:1])):
        with pytest.raises(TypeError):
            call()
