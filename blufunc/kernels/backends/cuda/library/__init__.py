"""Non-generated kernels: cuBLASLt, attention, fused GEMMs, scatter, CuPy, NCCL.

In: opaque steps. Out: work on a stream. May import ``driver`` and its dependencies.
"""
