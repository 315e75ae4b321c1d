"""Key-value caches of attention, as arrays: contiguous, ring and paged.

A face, above ``nn.attention``. A cache is a NamedTuple of the arrays of one layer, in the layout of
``dot_product_attention``; the position is an argument, which all layers of a model share. A step of decoding::

    cache = nn.cache.update(cache, key, value, position)  # [B, T, K, H] each
    out = nn.cache.attention(
        query, cache, position
    )  # queries [B, T, N, H] of the same T positions

In a loop, or a ``jit`` to which the cache is donated, ``update`` writes the new positions in place.
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.nn.cache.layouts import Contiguous as Contiguous
    from blufunc.nn.cache.layouts import Paged as Paged
    from blufunc.nn.cache.layouts import Ring as Ring
    from blufunc.nn.cache.layouts import contiguous as contiguous
    from blufunc.nn.cache.layouts import paged as paged
    from blufunc.nn.cache.layouts import ring as ring
    from blufunc.nn.cache.reads import attention as attention
    from blufunc.nn.cache.reads import mask_mod as mask_mod
    from blufunc.nn.cache.reads import view as view
    from blufunc.nn.cache.updates import update as update
