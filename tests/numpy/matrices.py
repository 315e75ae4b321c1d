"""Random matrices, and their Hermitian conjugates, for tests of linear algebra."""

import numpy as np


def H(x):
    return np.conj(np.swapaxes(x, -1, -2))


def draw(*shape, seed=0, complex=False):
    rng = np.random.default_rng((seed, *shape))
    x = rng.standard_normal(shape)
    return x + 1j * rng.standard_normal(shape) if complex else x


def positive(*shape, seed=0, complex=False):
    x = draw(*shape, seed=seed, complex=complex)
    return x @ H(x) + np.eye(shape[-1])


def hermitian(*shape, seed=0, complex=False):
    x = draw(*shape, seed=seed, complex=complex)
    return x + H(x)


def single(x):
    return x.astype(np.complex64 if np.iscomplexobj(x) else np.float32)
