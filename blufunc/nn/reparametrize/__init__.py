"""Reparametrisations of weights, as functions of trees of parameters.

A face, above ``nn.group_norms``. Each replaces weights in a tree, and returns a tree; a model stays a function of plain
parameters::

    split = nn.reparametrize.weight_norm(params)  # what is trained
    loss = lambda split: model(nn.reparametrize.weights(split), x)
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.nn.reparametrize.spectral import spectral_norm as spectral_norm
    from blufunc.nn.reparametrize.spectral import spectral_vectors as spectral_vectors
    from blufunc.nn.reparametrize.weights import WeightNorm as WeightNorm
    from blufunc.nn.reparametrize.weights import weight_norm as weight_norm
    from blufunc.nn.reparametrize.weights import weights as weights
