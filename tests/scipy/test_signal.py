"""``scipy.signal`` and ``scipy.fft`` against SciPy, and their errors."""

import numpy as np
import pytest
import scipy.fft
import scipy.signal

from blufunc import errors, tree
from blufunc.core.arrays.array import from_numpy
from blufunc.scipy import fft, signal
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.staging.jit import jit

RNG = np.random.default_rng(0)
X, Y, S = RNG.normal(size=(6, 5)), RNG.normal(size=(3, 4)), RNG.normal(size=(2, 40))
Z, W = X + 1j * RNG.normal(size=X.shape), Y + 1j * RNG.normal(size=Y.shape)


def compare(ours, theirs, name, args, options, atol=1e-12):
    f, g = getattr(ours, name), getattr(theirs, name)
    want = g(*args, **options)
    got = jit(lambda *xs: f(*xs, **options))(*map(from_numpy, args))
    for a, b in zip(tree.leaves(got), want if isinstance(want, tuple) else [want], strict=True):
        np.testing.assert_allclose(np.asarray(a), b, atol=atol, rtol=1e-9)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("mode", ["full", "same", "valid"])
@pytest.mark.parametrize("name", ["convolve", "correlate", "fftconvolve", "convolve2d", "correlate2d"])
@pytest.mark.parametrize("a, b", [(X, Y), (Y[:2], X), (Z, W)], ids=["real", "smaller first", "complex"])
def test_convolutions(name, mode, a, b):
    compare(signal, scipy.signal, name, (a, b), {"mode": mode})


@pytest.mark.parametrize("boundary", ["fill", "wrap", "symm"])
@pytest.mark.parametrize("mode", ["full", "same"])
@pytest.mark.parametrize("name", ["convolve2d", "correlate2d"])
def test_boundaries(name, mode, boundary):
    compare(signal, scipy.signal, name, (X, Y), {"mode": mode, "boundary": boundary, "fillvalue": 2})


def test_convolutions_by_fft_over_some_axes():
    compare(signal, scipy.signal, "fftconvolve", (X, Y[:, :1]), {"axes": [0]})
    compare(signal, scipy.signal, "convolve", (X, Y), {"method": "fft"})
    assert [signal.convolutions._fast_length(n) for n in (1, 7, 11, 17, 31, 241)] == [1, 8, 12, 18, 32, 243]


@pytest.mark.parametrize("options", [{}, {"bp": [3, 20]}, {"type": "constant"}, {"axis": 0}], ids=str)
def test_detrend(options):
    compare(signal, scipy.signal, "detrend", (S,), options)


SPECTRA = [
    {"nperseg": 10},
    {"nperseg": 16, "noverlap": 4, "nfft": 20, "fs": 10.0},
    {"nperseg": 15, "window": "hamming", "return_onesided": False},
    {"nperseg": 8, "window": ("gaussian", 2.0), "detrend": "linear"},
]


@pytest.mark.parametrize("options", SPECTRA, ids=str)
def test_stft(options):
    compare(signal, scipy.signal, "stft", (S,), options)
    compare(signal, scipy.signal, "stft", (S.T,), {**options, "axis": 0})


@pytest.mark.parametrize("boundary", [None, "even", "odd", "constant"])
def test_boundaries_of_stft(boundary):
    compare(signal, scipy.signal, "stft", (S,), {"nperseg": 10, "boundary": boundary, "padded": False})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("more", [{}, {"scaling": "spectrum"}, {"average": "median"}], ids=str)
@pytest.mark.parametrize("options", SPECTRA, ids=str)
def test_spectral_densities(options, more):
    compare(signal, scipy.signal, "welch", (S,), {**options, **more})
    compare(signal, scipy.signal, "csd", (S, S[::-1].copy()), {**options, **more})


@pytest.mark.parametrize("options", SPECTRA[1:], ids=str)
def test_istft_inverts(options):
    options = {k: v for k, v in options.items() if k != "detrend"}
    *_, z = scipy.signal.stft(S, **options)
    inverse = {k: v for k, v in options.items() if k != "return_onesided"}
    inverse["input_onesided"] = options.get("return_onesided", True)
    times, x = signal.istft(from_numpy(z), **inverse)
    np.testing.assert_allclose(np.asarray(x), scipy.signal.istft(z, **inverse)[1], atol=1e-12)
    np.testing.assert_allclose(np.asarray(times), np.arange(x.shape[-1]) / options.get("fs", 1), rtol=1e-12)
    np.testing.assert_allclose(np.asarray(x)[:, :40].real, S, atol=1e-10)
    moved = np.moveaxis(z, (-2, -1), (1, 0))
    got = signal.istft(from_numpy(moved), time_axis=0, freq_axis=1, **inverse)[1]
    np.testing.assert_allclose(np.asarray(got).T, np.asarray(x), atol=1e-12)


def test_segments_longer_than_the_signal():
    with pytest.warns(UserWarning, match="nperseg=40"):
        signal.welch(from_numpy(S), nperseg=64)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("norm", [None, "ortho", "forward"])
@pytest.mark.parametrize("type", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [None, 3, 8])
def test_cosine_transforms(type, n, norm):
    for name in ("dct", "idct"):
        compare(fft, scipy.fft, name, (X,), {"type": type, "n": n, "norm": norm, "axis": 0})
    for name in ("dctn", "idctn"):
        s = None if n is None else (n, 4)
        compare(fft, scipy.fft, name, (X,), {"type": type, "s": s, "norm": norm})


def test_a_cosine_transform_is_differentiated_as_a_linear_map():
    x = from_numpy(S[0, :6])
    matrix = np.asarray(jit(lambda x: fft.dct(x, norm="ortho"))(x))
    got = grad(lambda x: (fft.dct(x, norm="ortho") ** 2).sum() / 2)(x)
    np.testing.assert_allclose(
        np.asarray(got), np.asarray(fft.idct(from_numpy(matrix), norm="ortho")), atol=1e-12
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda: signal.convolve(X, X, mode="half"),
        lambda: signal.convolve(X, X[0]),
        lambda: signal.convolve2d(X[0], X[0]),
        lambda: signal.convolve(X[:2], Y[:, :2], mode="valid"),
        lambda: signal.convolve(X[:0], Y),
        lambda: signal.convolve(X, Y, method="table"),
        lambda: signal.convolve2d(X, Y, boundary="torn"),
        lambda: signal.fftconvolve(X, Y, axes=[0]),
        lambda: signal.detrend(S, type="cubic"),
        lambda: signal.detrend(S, bp=99),
        lambda: signal.stft(S, nperseg=0),
        lambda: signal.stft(S, nperseg=8, boundary="torn"),
        lambda: signal.stft(S, nperseg=8, noverlap=8),
        lambda: signal.stft(S, nperseg=8, window=np.ones(7)),
        lambda: signal.csd(S, S, average="mode"),
        lambda: signal.welch(S, scaling="log"),
        lambda: signal.istft(S[0]),
        lambda: signal.istft(S, time_axis=0, freq_axis=0),
        lambda: fft.dct(Z),
        lambda: fft.dct(X, type=5),
        lambda: fft.dct(X, norm="unit"),
        lambda: fft.dct(X, n=0),
        lambda: fft.dct(X[:, :1], type=1),
        lambda: fft.dctn(X, axes=(0, 0)),
    ],
)
def test_errors(call):
    with pytest.raises(ValueError, match="at:") as e:
        call()
    assert isinstance(e.value, errors.BlufuncError)
