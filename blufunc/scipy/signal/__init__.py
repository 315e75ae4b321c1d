"""``scipy.signal``: convolutions, and spectra of signals.

A face above ``blufunc.numpy`` and ``blufunc.lax``.
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.scipy.signal.convolutions import convolve as convolve
    from blufunc.scipy.signal.convolutions import convolve2d as convolve2d
    from blufunc.scipy.signal.convolutions import correlate as correlate
    from blufunc.scipy.signal.convolutions import correlate2d as correlate2d
    from blufunc.scipy.signal.convolutions import fftconvolve as fftconvolve
    from blufunc.scipy.signal.spectra import csd as csd
    from blufunc.scipy.signal.spectra import istft as istft
    from blufunc.scipy.signal.spectra import stft as stft
    from blufunc.scipy.signal.spectra import welch as welch
    from blufunc.scipy.signal.trends import detrend as detrend
