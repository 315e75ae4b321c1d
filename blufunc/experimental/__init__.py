"""``experimental``: transforms and libraries under the names of JAX's package.

A face above ``blufunc.numpy`` and ``blufunc.transforms``.
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.experimental import checkify as checkify
    from blufunc.experimental import jet as jet
    from blufunc.experimental import ode as ode
    from blufunc.experimental import random as random
    from blufunc.experimental import rnn as rnn
    from blufunc.experimental import sparse as sparse
