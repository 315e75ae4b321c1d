"""``scipy.cluster``: vector quantization.

A face above ``blufunc.numpy``.
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.scipy.cluster import vq as vq
