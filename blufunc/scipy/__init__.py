"""SciPy's functions on blufunc's arrays.

A face above ``blufunc.nn``; each module has the names of SciPy's module.
"""

from blufunc import _lazy

_NOT_HERE = {
    "cluster": "there is no clustering yet",
    "fft": "blufunc.numpy.fft and lax.fft have the Fourier transforms; the cosine transforms are not there yet",
    "integrate": "blufunc.numpy.trapezoid integrates samples",
    "interpolate": "blufunc.numpy.interp interpolates in one dimension",
    "ndimage": "it is not there yet; lax.conv_general_dilated filters, and lax.reduce_window reduces windows",
    "signal": "it is not there yet; blufunc.numpy.convolve takes one dimension, lax.conv_general_dilated more",
    "spatial": "there is no spatial algorithm yet",
}

with _lazy.names(__name__, hints=_NOT_HERE):
    from blufunc.scipy import linalg as linalg
    from blufunc.scipy import optimize as optimize
    from blufunc.scipy import sparse as sparse
    from blufunc.scipy import special as special
    from blufunc.scipy import stats as stats
