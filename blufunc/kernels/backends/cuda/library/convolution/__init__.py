"""Convolutions on a CUDA device: by cuDNN, or by an implicit GEMM.

Kernels, stages 6 to 8, above ``library_kernel`` and ``mma``; ``op`` is the row of the registry.
"""
