"""Kernels for decoding token by token: skinny GEMMs, attention to a cache.

In: equations of few rows. Out: launches. May import ``driver``, ``kernels.codegen`` and the rest of ``library``.
"""
