"""SciPy's functions on blufunc's arrays.

A face above ``blufunc.nn``; each module has the names of SciPy's module.
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.scipy import cluster as cluster
    from blufunc.scipy import fft as fft
    from blufunc.scipy import integrate as integrate
    from blufunc.scipy import interpolate as interpolate
    from blufunc.scipy import linalg as linalg
    from blufunc.scipy import ndimage as ndimage
    from blufunc.scipy import optimize as optimize
    from blufunc.scipy import signal as signal
    from blufunc.scipy import sparse as sparse
    from blufunc.scipy import spatial as spatial
    from blufunc.scipy import special as special
    from blufunc.scipy import stats as stats
