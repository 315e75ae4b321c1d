"""Native Fourier transforms against the same programs as NumPy calls."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.kernels.backends.cpu import toolchain
from blufunc.kernels.backends.cpu.steps import fourier
from tests.kernels.backends.cpu.two_ways import by_both

pytestmark = pytest.mark.skipif(toolchain.find() is None, reason="this machine has no C++ compiler")


def draw(*shape, dtype="float32"):
    rng = np.random.default_rng(sum(shape))
    x = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if "complex" in dtype else 0)
    return x.astype(dtype)


def close(fun, *args, native=True):
    """Compare NumPy calls with the compiled program; NumPy transforms wider."""
    for want, got in by_both(fun, *args, native=native and all(x.size for x in args)):
        single = want.dtype in (np.float32, np.complex64)
        scale = np.abs(want[np.isfinite(want)]).max(initial=1) if want.size else 1
        np.testing.assert_allclose(got, want, rtol=0, atol=(3e-6 if single else 1e-14) * scale)


SHAPES = ((1,), (2,), (7,), (64,), (97,), (1000,), (3, 8), (2, 3, 5), (2, 3, 4, 6), (0, 4))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("shape", SHAPES)
def test_transforms(shape, dtype):
    z = draw(*shape, dtype=dtype)
    real = "float32" if dtype == "complex64" else "float64"
    f = bnp.fft
    for axis in range(len(shape)):
        if shape[axis]:
            close(lambda z, axis=axis: (f.fft(z, axis=axis), f.ifft(z, axis=axis)), z)
            close(lambda x, axis=axis: f.rfft(x, axis=axis), draw(*shape, dtype=real))
            n = shape[axis]
            close(lambda z, axis=axis, n=n: [f.irfft(z, m, axis=axis) for m in (n, 2 * n - 1 or 1, 2 * n)], z)
    if 0 not in shape:
        close(lambda z: (f.fftn(z), f.ifftn(z)), z)
        close(lambda x: f.irfftn(f.rfftn(x), x.shape), draw(*shape, dtype=real))


def test_views():
    z = draw(6, 8, dtype="complex64")
    for view in (lambda z: z.T, lambda z: z[::-1, ::2], lambda z: bnp.broadcast_to(z[0], (3, 8))):
        close(lambda z, view=view: (bnp.fft.fft(view(z)), bnp.fft.ifft2(view(z)), bnp.fft.irfft2(view(z))), z)


def test_derivatives():
    x = draw(4, 16)
    loss = lambda x: (bnp.abs(bnp.fft.rfft(x)) ** 2).sum() + bnp.fft.irfft(bnp.fft.rfft(x) * 2j).sum()
    close(bf.grad(loss), x, native=False)


def diffusion(x):
    """Spectral steps of the heat equation: two transforms a round."""
    decay = bnp.exp(-0.01 * bnp.arange(x.shape[-1] // 2 + 1) ** 2)
    step = lambda u, _: ((v := bnp.fft.irfft(bnp.fft.rfft(u) * decay, x.shape[-1])), v[..., 0])
    return lax.scan(step, x, None, length=10)


def test_loops():
    close(diffusion, draw(32))
    close(bf.vmap(diffusion), draw(3, 32))


def test_an_unknown_layout_runs_in_python(monkeypatch):
    monkeypatch.setattr(fourier, "_pointers", lambda name, real: None)
    x = draw(5, 12)
    close(lambda x: bnp.fft.rfft(x) * 2, x, native=False)
