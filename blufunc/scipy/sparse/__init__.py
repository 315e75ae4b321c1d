"""Linear systems whose matrix is only known as a function, under the names of ``scipy.sparse``."""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.scipy.sparse import linalg as linalg
