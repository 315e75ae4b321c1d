"""Native reductions of windows against the same programs as NumPy calls."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.config import config
from blufunc.kernels.backends.cpu import toolchain
from blufunc.kernels.backends.cpu.steps.forms import has_form
from tests.kernels.backends.cpu.steps.test_convolution import close, draw

pytestmark = pytest.mark.skipif(toolchain.find() is None, reason="this machine has no C++ compiler")

REDUCTIONS = {"sum": (0.0, lax.add), "max": (-np.inf, lax.max), "min": (np.inf, lax.min)}
CASES = {  # shape, window, strides, padding and dilations
    "2/2": ((2, 8, 8, 5), (1, 2, 2, 1), (1, 2, 2, 1), "VALID", {}),
    "3/2": ((2, 3, 9, 8), (1, 1, 3, 3), (1, 1, 2, 2), "SAME", {}),
    "overlap": ((2, 9, 10, 16), (1, 3, 3, 1), (1, 1, 1, 1), "SAME", {}),
    "whole axis": ((4, 50), (1, 50), (1, 1), "VALID", {}),
    "no windows": ((2, 3), (1, 5), (1, 1), "VALID", {}),
    "padding alone": ((2, 3), (1, 2), (1, 2), ((0, 0), (5, 5)), {}),
    "cropped": ((6, 9), (2, 3), (1, 2), ((-1, 2), (1, -2)), {}),
    "dilations": (
        (5, 9),
        (2, 3),
        (1, 2),
        ((1, 2), (3, 0)),
        {"base_dilation": (2, 3), "window_dilation": (3, 2)},
    ),
    "gaps": ((4, 5), (1, 1), (1, 1), "VALID", {"base_dilation": (1, 3)}),
}


def reduction(kind, window, strides, padding, options):
    start, combine = REDUCTIONS[kind]
    return lambda x: lax.reduce_window(x, start, combine, window, strides, padding, **options)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("name", CASES)
def test_cases(name, kind, dtype):
    shape, *parameters = CASES[name]
    fun = reduction(kind, *parameters)
    x = draw(shape, dtype)
    close(fun, x, native=False)
    ct = draw(np.asarray(fun(bnp.asarray(x))).shape, dtype)
    close(lambda x, ct: bf.vjp(fun, x)[1](ct), x, ct, native=False)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(30))
def test_random(seed):
    rng = np.random.default_rng(seed)
    ndim = int(rng.integers(1, 5))
    some = lambda low, high: tuple(int(n) for n in rng.integers(low, high, ndim))
    padding = tuple(zip(some(-1, 4), some(-1, 4), strict=True))
    options = {"base_dilation": some(1, 3), "window_dilation": some(1, 3)}
    x = draw(some(1, (40, 20, 9, 7)[ndim - 1]), ("float32", "float64")[seed % 2])
    for kind in REDUCTIONS:
        fun = reduction(kind, some(1, 4), some(1, 4), padding, options)
        ct = draw(np.asarray(fun(bnp.asarray(x))).shape, x.dtype)
        close(lambda x, ct, fun=fun: (fun(x), bf.vjp(fun, x)[1](ct)), x, ct, native=False)


def test_nan_and_infinity():
    x = draw((6, 6))
    x[0, 1] = x[1, 0] = x[3, 3] = np.nan
    x[4:] = -np.inf
    x[2, :4] = np.inf
    weights = bnp.arange(49.0).reshape(7, 7)
    for kind in ("max", "min"):
        fun = reduction(kind, (2, 2), (1, 1), ((1, 1), (1, 1)), {})
        close(fun, x, native=False)
        close(lambda x, fun=fun: bf.vjp(fun, x)[1](weights), x, native=False)


def test_native_in_a_loop():
    pool = reduction("max", (1, 2, 2, 1), (1, 1, 1, 1), "SAME", {})
    mean = reduction("sum", (1, 2, 2, 1), (1, 1, 1, 1), "SAME", {})
    step = lambda x, _: (mean(pool(x)) / 4, None)
    close(lambda x: lax.scan(step, x, None, length=5)[0], draw((2, 8, 8, 3)))


def test_views():
    close(
        lambda x: reduction("max", (2, 3), (1, 1), "VALID", {})(x.T[::-1, ::2]), draw((20, 9)), native=False
    )


def test_what_has_a_form():
    def equation(window, dtype=np.float32, stride=1):
        fun = reduction("sum", window, (stride, stride), "VALID", {})
        made = bf.make_jaxpr(fun)(bf.ShapeDtypeStruct((99, 99), dtype))
        (eqn,) = [e for e in made.eqns if e.prim.name == "reduce_window_sum"]
        return eqn

    assert has_form(equation((3, 3)))
    assert has_form(equation((33, 33), stride=33))
    assert not has_form(equation((33, 33)))  # axis by axis in NumPy
    assert not has_form(equation((3, 3), np.float16))
    assert config.host_compiler != "never"
