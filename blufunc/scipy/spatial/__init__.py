"""``scipy.spatial``: rotations.

A face above ``blufunc.numpy``.
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.scipy.spatial import transform as transform
