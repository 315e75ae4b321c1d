"""``bnp.fft`` and ``lax.fft`` against NumPy, and their derivatives against JAX's."""

import functools

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.arrays.array import from_numpy
from blufunc.transforms.autodiff.grad import grad, jvp, vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.numpy.common import check, f32, i32, same
from tests.transforms.common import arr

ONE = ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"]
TWO = ["fft2", "ifft2", "rfft2", "irfft2"]
MANY = ["fftn", "ifftn", "rfftn", "irfftn"]
REAL = {"rfft", "ihfft", "rfft2", "rfftn"}
NORMS = pytest.mark.parametrize("norm", [None, "backward", "ortho", "forward"])


def argument(name, *shape, seed=0):
    x = f32(*shape, seed=seed)
    return x if name in REAL else (x + 1j * f32(*shape, seed=seed + 1)).astype(np.complex64)


def compare(name, x, **options):
    ours, theirs = (functools.partial(getattr(m.fft, name), **options) for m in (bnp, np))
    check(ours, theirs, x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ONE)
@NORMS
def test_along_one_axis(name, norm):
    x = argument(name, 3, 5, 4)
    for n in (None, 1, 3, 5, 8):
        for axis in (-1, 0, 1):
            compare(name, x, n=n, axis=axis, norm=norm)
    compare(name, x[0, 0], norm=norm)


@pytest.mark.parametrize("name", TWO)
@NORMS
def test_over_two_axes(name, norm):
    x = argument(name, 3, 5, 4)
    for s in (None, (3, 6), (1, 1)):
        for axes in ((-2, -1), (0, 1), (2, 0)):
            compare(name, x, s=s, axes=axes, norm=norm)


@pytest.mark.parametrize("name", MANY)
@NORMS
def test_over_several_axes(name, norm):
    x = argument(name, 2, 3, 2, 4, 3)
    compare(name, x, norm=norm)
    compare(name, x, axes=(3,), norm=norm)
    compare(name, x, axes=(1, 0, -1), norm=norm)
    compare(name, x, s=(4, 5), axes=(3, 1), norm=norm)
    compare(name, x[0, 0], s=(4, 2, 5), axes=(0, 1, 2), norm=norm)


def test_sizes_alone_are_those_of_the_last_axes():
    x = f32(3, 4, 5)
    same(bnp.fft.fftn(bnp.asarray(x), s=(2, 3)), np.fft.fftn(x, (2, 3), (1, 2)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*ONE, *MANY])
def test_dtypes(name):
    f = getattr(bnp.fft, name)
    real_result = name in ("irfft", "hfft", "irfftn")
    for dtype, parts in (("float32", 32), ("float64", 64), ("int32", 32), ("bool", 32), ("bfloat16", 32),
                         ("complex64", 32), ("complex128", 64)):  # fmt: skip
        if "complex" in dtype and name in REAL | {"ihfft"}:
            continue
        out = f(bnp.ones((4, 4), dtype))
        assert out.dtype == (f"float{parts}" if real_result else f"complex{2 * parts}")
    check(f, getattr(np.fft, name), i32(4, 6), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_frequencies(n):
    for ours, theirs in ((bnp.fft.fftfreq, np.fft.fftfreq), (bnp.fft.rfftfreq, np.fft.rfftfreq)):
        for d in (1.0, 0.25, 3):
            same(ours(n, d), theirs(n, d))
            same(jit(lambda d, f=ours: f(n, d))(np.float32(d)), theirs(n, d))
        assert ours(n, dtype="float64").dtype == np.float64
    for x in (f32(n), f32(n, 3), f32(2, n, 4)):
        for axes in (None, 0, (0, -1) if x.ndim > 1 else (0,)):
            for name in ("fftshift", "ifftshift"):
                ours, theirs = (functools.partial(getattr(m.fft, name), axes=axes) for m in (bnp, np))
                check(ours, theirs, x)


def test_lax_fft():
    x = argument("fft", 2, 4, 6)
    got = lax.fft(bnp.asarray(x), lax.FftType.FFT, (4, 6))
    same(got, np.fft.fftn(x, axes=(1, 2)), rtol=1e-4, atol=1e-5)
    same(lax.fft(bnp.asarray(x), "ifft", 6), np.fft.ifft(x), rtol=1e-4, atol=1e-5)
    same(lax.fft(bnp.asarray(x.real), "RFFT", (6,)), np.fft.rfft(x.real), rtol=1e-4, atol=1e-5)
    same(lax.fft(bnp.asarray(x), 3, (4, 10)), np.fft.irfftn(x, (4, 10), (1, 2)), rtol=1e-4, atol=1e-5)
    assert str(make_jaxpr(lambda x: bnp.fft.rfft(x))(bnp.ones(4))).count(" fft") == 1


@pytest.mark.parametrize("name", [*ONE, *MANY])
def test_parseval(name):
    """The gradient of half a unitary transform's energy is the argument."""
    if name in ("fft", "ifft", "fftn", "ifftn"):
        f = functools.partial(getattr(bnp.fft, name), norm="ortho")
        x = arr(argument(name, 4, 6), np.complex128)
        g = grad(lambda x: 0.5 * bnp.sum(bnp.real(f(x) * bnp.conj(f(x)))))(x)
        np.testing.assert_allclose(np.asarray(g), np.conj(np.asarray(x)), atol=1e-12)
    else:
        # forward and reverse mode agree
        f = getattr(bnp.fft, name)
        kind = np.float64 if name in REAL else np.complex128
        x, t = arr(argument(name, 4, 5), kind), arr(argument(name, 4, 5, seed=5), kind)
        out, out_t = jvp(f, (x,), (t,))
        np.testing.assert_allclose(np.asarray(out_t), np.asarray(f(t)), atol=1e-12)
        ct = from_numpy(np.asarray(argument("fft", *out.shape, seed=9), out.dtype) if out.dtype.kind == "c"
                        else f32(*out.shape, seed=9).astype(out.dtype))  # fmt: skip
        (back,) = vjp(f, x)[1](ct)
        left, right = (np.sum(np.asarray(a) * np.asarray(b)).real for a, b in ((back, t), (ct, out_t)))
        np.testing.assert_allclose(left, right, rtol=1e-12)


def test_vmap_and_order_two():
    x = arr(f32(3, 4, 5), np.float64)
    host = np.asarray(x)
    got = vmap(bnp.fft.rfft, in_axes=1, out_axes=1)(x)  # of matrices (3, 5), along their last axis
    np.testing.assert_allclose(np.asarray(got), np.fft.rfft(host), atol=1e-12)
    got = vmap(functools.partial(bnp.fft.fft2, axes=(1, 0)), in_axes=2)(x)
    np.testing.assert_allclose(np.asarray(got), np.moveaxis(np.fft.fft2(host, axes=(1, 0)), 2, 0), atol=1e-12)
    energy = lambda x: bnp.sum(bnp.abs(bnp.fft.rfft(x)) ** 4)
    t = arr(f32(5, seed=1), np.float64)
    point = x[0, 0]
    got = np.asarray(jvp(grad(energy), (point,), (t,))[1])
    plus, minus = (np.asarray(grad(energy)(point + s * 1e-5 * t)) for s in (1, -1))
    np.testing.assert_allclose(got, (plus - minus) / 2e-5, rtol=1e-6)


WRONG = {
    "complex": (lambda: bnp.fft.rfft(bnp.ones(3, "complex64")), errors.DtypeError),
    "no points": (lambda: bnp.fft.fft(bnp.ones(3), n=0), errors.ValueRangeError),
    "empty": (lambda: bnp.fft.fft(bnp.ones((3, 0))), errors.ValueRangeError),
    "one point of a half": (lambda: bnp.fft.irfft(bnp.ones(1)), errors.ValueRangeError),
    "norm": (lambda: bnp.fft.fft(bnp.ones(3), norm="both"), errors.ValueRangeError),
    "axis": (lambda: bnp.fft.fft(bnp.ones(3), axis=1), errors.ValueRangeError),
    "an axis twice": (lambda: bnp.fft.fft2(bnp.ones((3, 3)), axes=(0, -2)), errors.ValueRangeError),
    "sizes": (lambda: bnp.fft.fftn(bnp.ones((3, 3)), s=(2,), axes=(0, 1)), errors.ValueRangeError),
    "too many sizes": (lambda: bnp.fft.fftn(bnp.ones(3), s=(2, 2)), errors.ValueRangeError),
    "frequencies": (lambda: bnp.fft.fftfreq(0), errors.ValueRangeError),
    "a spacing": (lambda: bnp.fft.fftfreq(3, bnp.ones(2)), errors.ShapeError),
    "a dtype of frequencies": (lambda: bnp.fft.fftfreq(3, dtype="int32"), errors.DtypeError),
    "lengths": (lambda: lax.fft(bnp.ones(3, "complex64"), "fft", (4,)), errors.ShapeError),
    "half lengths": (lambda: lax.fft(bnp.ones(3, "complex64"), "irfft", (3,)), errors.ShapeError),
    "a dtype": (lambda: lax.fft(bnp.ones(3), "fft", (3,)), errors.DtypeError),
    "a type": (lambda: lax.fft(bnp.ones(3), "dct", (3,)), errors.ArgumentError),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    call, error = WRONG[name]
    with pytest.raises(error) as caught:
        call()
    assert "test_fft.py" in caught.value.where and caught.value.fix


@pytest.mark.peer
@pytest.mark.parametrize("name", [*ONE, *TWO, *MANY])
@NORMS
def test_peer(name, norm):
    """Values and pullbacks are JAX's, in single precision."""
    jax = pytest.importorskip("jax")
    f, g = (functools.partial(getattr(m.fft, name), norm=norm) for m in (bnp, jax.numpy))
    for n in (None, 3, 6):
        sizes = {} if n is None else {"n": n} if name in ONE else {"s": (n, n), "axes": (0, -1)}
        x = argument(name, 3, 4, 5)
        out, back = vjp(functools.partial(f, **sizes), bnp.asarray(x))
        want, back_jax = jax.vjp(functools.partial(g, **sizes), jax.numpy.asarray(x))
        np.testing.assert_allclose(np.asarray(out), want, rtol=2e-5, atol=2e-5)
        ct = argument("fft" if np.iscomplexobj(want) else "rfft", *want.shape, seed=4)
        scale = max(1.0, float(np.max(np.abs(back_jax(ct)[0]))))
        np.testing.assert_allclose(
            np.asarray(back(bnp.asarray(ct))[0]), back_jax(ct)[0], rtol=2e-5, atol=1e-6 * scale
        )
