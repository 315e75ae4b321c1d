"""Resampling, interpolation, integrals and codes: SciPy, and definitions."""

import itertools

import numpy as np
import pytest
import scipy.cluster.vq
import scipy.integrate
import scipy.interpolate
import scipy.ndimage

from blufunc import errors, image, tree
from blufunc.core.arrays.array import from_numpy
from blufunc.scipy import cluster, integrate, interpolate, ndimage
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.staging.jit import jit

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 4))
AT = RNG.uniform(-9, 12, (2, 3, 20))


def same(got, want, **options):
    np.testing.assert_allclose(np.asarray(got), want, **{"atol": 1e-12, "rtol": 1e-9, **options})


# -- images ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["linear", "cubic", "lanczos3", "lanczos5", "area", "cubic-pytorch"])
def test_constants_stay_constant(method):
    ones = from_numpy(np.ones((7, 5)))
    for shape, antialias in itertools.product([(3, 9), (14, 2)], [True, False]):
        same(image.resize(ones, shape, method, antialias), np.ones(shape))


def test_area_and_nearest_by_integers_are_means_and_repeats():
    x = RNG.normal(size=(6, 8))
    same(image.resize(from_numpy(x), (3, 4), "area"), x.reshape(3, 2, 4, 2).mean((1, 3)))
    same(image.resize(from_numpy(x), (12, 8), "nearest"), np.repeat(x, 2, 0))
    assert image.resize(from_numpy(x > 0), (3, 3), "nearest").dtype == "bool"
    assert image.resize(np.arange(6), (3,), "linear").dtype == "float32"
    assert image.resize(from_numpy(x).astype("bfloat16"), (3, 3), "cubic").dtype == "bfloat16"


@pytest.mark.parametrize("method", ["linear", "cubic", "cubic-pytorch"])
def test_lines_are_reproduced(method):
    n, out = 12, 30
    got = image.resize(from_numpy(np.arange(n) + 0.5), (out,), method)
    centres = (np.arange(out) + 0.5) * n / out
    inside = slice(6, -6)
    same(got[inside], centres[inside])


def test_a_translation_moves_pixels():
    got = image.scale_and_translate(from_numpy(X), (5, 4), (0,), np.ones(1), np.full(1, 2.0), "linear")
    same(got, np.concatenate([np.zeros((2, 4)), X[:3]]), atol=1e-6)


# -- interpolation ---------------------------------------------------------------------------------


MODES = {
    "constant": "grid-constant",
    "nearest": "nearest",
    "wrap": "grid-wrap",
    "mirror": "mirror",
    "reflect": "reflect",
}


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_map_coordinates(mode, order):
    want = scipy.ndimage.map_coordinates(X, AT, order=order, mode=MODES[mode], cval=1.5)
    same(
        jit(lambda x, at: ndimage.map_coordinates(x, at, order, mode, 1.5))(from_numpy(X), from_numpy(AT)),
        want,
    )


def test_map_coordinates_of_integers():
    x = np.arange(12, dtype=np.int32).reshape(3, 4) * 10
    got = ndimage.map_coordinates(x, [np.array([0.26, 1.0]), np.array([1.5, 2.0])], 1)
    assert got.dtype == "int32" and got.tolist() == [25, 60]
    at = [np.array([0, 2]), np.array([1, 9])]
    assert ndimage.map_coordinates(x, at, 1, cval=7).tolist() == [10, 7]


@pytest.mark.parametrize("fill", [np.nan, 3.0, None])
@pytest.mark.parametrize("method", ["linear", "nearest"])
def test_regular_grids(method, fill):
    grid = (np.array([0.0, 1, 2.5, 3, 5]), np.array([-1.0, 0, 0.5, 2]))
    values = RNG.normal(size=(5, 4, 2))
    points = RNG.uniform(-1.5, 5.5, (7, 3, 2))
    want = scipy.interpolate.RegularGridInterpolator(grid, values, method, False, fill)(points)
    f = interpolate.RegularGridInterpolator(
        [from_numpy(g) for g in grid], from_numpy(values), method, False, fill
    )
    same(f(from_numpy(points)), want)
    same(jit(lambda f, p: f(p))(f, from_numpy(points)), want)
    same(f((from_numpy(points[..., 0]), from_numpy(points[..., 1]))), want)
    assert len(tree.leaves(f)) == 3 + (fill is not None)


def test_the_slope_of_an_interpolant():
    f = interpolate.RegularGridInterpolator((np.array([0.0, 1, 3]),), np.array([0.0, 2, 1]))
    assert grad(lambda x: f(x[None])[0])(2.0) == -0.5


def test_trapezoid():
    t = np.sort(RNG.uniform(size=5))
    same(integrate.trapezoid(from_numpy(X), from_numpy(t), axis=0), scipy.integrate.trapezoid(X, t, axis=0))
    same(integrate.trapezoid(from_numpy(X), dx=0.5), scipy.integrate.trapezoid(X, dx=0.5))


def test_vq():
    for obs, codes in ((X, X[1:4] + 0.1), (X[:, 0], X[:3, 1])):
        code, distance = cluster.vq.vq(from_numpy(obs), from_numpy(codes))
        want = scipy.cluster.vq.vq(obs, codes)
        assert code.tolist() == want[0].tolist() and code.dtype == "int32"
        same(distance, want[1])


GRID = (np.arange(5.0), np.arange(4.0))


@pytest.mark.parametrize(
    "call",
    [
        lambda: image.resize(X, (3, 3), "sharp"),
        lambda: image.resize(X, (3,), "linear"),
        lambda: image.scale_and_translate(X, (5, 4), (0,), np.ones(2), np.ones(1), "linear"),
        lambda: image.scale_and_translate(X, (5, 3), (0,), np.ones(1), np.ones(1), "linear"),
        lambda: image.scale_and_translate(X, (5, 4), (0,), np.ones(1), np.ones(1), "nearest"),
        lambda: ndimage.map_coordinates(X, AT[:1], 1),
        lambda: ndimage.map_coordinates(X, AT, 3),
        lambda: ndimage.map_coordinates(X, AT, 1, mode="torn"),
        lambda: interpolate.RegularGridInterpolator(GRID, X, "cubic"),
        lambda: interpolate.RegularGridInterpolator(GRID, X, bounds_error=True),
        lambda: interpolate.RegularGridInterpolator(GRID[::-1], X),
        lambda: interpolate.RegularGridInterpolator((GRID[0][::-1], GRID[1]), X),
        lambda: interpolate.RegularGridInterpolator(GRID, X)(np.ones(3)),
        lambda: cluster.vq.vq(X, X[0]),
        lambda: cluster.vq.vq(X, X[:, :2]),
    ],
)
def test_errors(call):
    with pytest.raises(errors.BlufuncError, match="at:"):
        call()
