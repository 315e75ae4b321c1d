"""Linear systems whose matrix is only known as a function, under the names of ``scipy.sparse``."""

from blufunc.scipy.sparse import linalg as linalg
