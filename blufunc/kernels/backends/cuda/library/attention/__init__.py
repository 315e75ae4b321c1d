"""Attention kernels: forward and backward, for sm_80 and sm_90a.

In: an attention equation. Out: launches. May import ``driver``, ``kernels.codegen``.
"""
