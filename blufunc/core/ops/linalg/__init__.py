"""Linear algebra: factorizations, solves and spectral decompositions.

In: batches of matrices. Out: batches of factors or solutions, with derivatives. May import ``core.ops`` and
``core.primitives``.
"""
