"""Linear algebra on a CUDA device.

In: equations of ``core.ops.linalg``. Out: their steps: kernels for small matrices. Imports the driver and
``library_kernel``. Larger matrices are those of cuSOLVER and cuBLAS, in ``cupy_ops``.
"""
