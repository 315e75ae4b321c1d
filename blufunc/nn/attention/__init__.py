"""Attention: the operation, functions of pairs, and pattern recognition.

``dot_product`` is the face and ``call`` the primitives below it; ``mods`` and ``bounds`` trace functions of
pairs. ``recognised`` finds attention in a jaxpr by ``patterns``, on ``point_graph`` and ``position_masks``.
Imports numpy, lax and transforms, and of nn only ``activations`` and ``masks``.
"""

from blufunc.nn.attention import recognised as recognised  # registers the recogniser
