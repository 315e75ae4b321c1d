"""Scatters on a CUDA device: deterministic, into few rows or many.

Kernels, stage 8, below ``cupy_ops``. ``op.py`` matches equations and chooses an algorithm: ``bins.py`` combines scalars
in shared memory where the result fits there; ``atomics.py`` has no order, which integers do not need;
``partitions.py`` sorts many scalars into parts of the result that fit; ``rows.py`` puts the updates in the order of
their rows and combines each row's.
"""
