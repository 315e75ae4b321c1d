"""``example_libraries``: small optimizers and layers that older programs for JAX use.

A face above ``blufunc.nn``; ``blufunc.optim`` is the library for new programs.
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.example_libraries import optimizers as optimizers
    from blufunc.example_libraries import stax as stax
