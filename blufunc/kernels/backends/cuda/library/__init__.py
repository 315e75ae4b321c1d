"""Kernels that are not generated from LoopIR: cuBLASLt, attention, fused GEMMs, scatter, CuPy, NCCL.

In: opaque steps. Out: work on a stream. May import ``driver`` and what that may.
"""
