"""SciPy's functions on blufunc's arrays.

A face above ``blufunc.nn``; each module has the names of SciPy's module.
"""

from blufunc.scipy import linalg as linalg
from blufunc.scipy import optimize as optimize
from blufunc.scipy import sparse as sparse
from blufunc.scipy import special as special
from blufunc.scipy import stats as stats
