"""Sorts and selections on a CUDA device, as kernels that a graph can capture.

In: equations of ``sort`` and ``top_k``. Out: their steps. Imports the driver and ``library_kernel``.
"""
