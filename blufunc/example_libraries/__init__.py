"""``example_libraries``: optimizers and layers of older programs for JAX.

A face above ``blufunc.nn``; ``blufunc.optim`` is the library for new programs.
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.example_libraries import optimizers as optimizers
    from blufunc.example_libraries import stax as stax
