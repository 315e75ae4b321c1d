"""A tensor-parallel MLP and its gradient.

Tokens are gathered before each layer, and scattered after it.
"""

import numpy as np

import blufunc as bf
import blufunc.numpy as bnp
from blufunc.core.arrays.array import from_numpy
from blufunc.core.programs.stage import stage
from blufunc.parallel.collectives import primitives as mc

EVERYONE = {"axes": ("x", "y"), "sizes": (2, 2)}


def loss(weights, x):
    for a, b in weights:
        h = bnp.tanh(mc.mesh_all_gather_p.bind(x, src="V", dst="R", dim=0, **EVERYONE) @ a)
        x = x + mc.mesh_psum_scatter_p.bind(h @ b, src="U", dst="V", dim=0, **EVERYONE)
    return (x * x).sum()


def gradients(rng):
    """A rank's jaxpr of two layers, and its arguments: the weights, and tokens."""
    shapes = [(16, 32), (32, 16)] * 2
    args = [rng.standard_normal(s, np.float32) / 8 for s in (*shapes, (8, 16))]

    def local(*args):
        *weights, x = args
        return bf.tree.leaves(bf.grad(loss, argnums=(0, 1))(list(zip(weights[::2], weights[1::2])), x))

    return stage(local, [from_numpy(a).aval for a in args], "local"), args
