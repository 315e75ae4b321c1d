"""``scipy.sparse``: linear systems whose matrix is given as a function."""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.scipy.sparse import linalg as linalg
