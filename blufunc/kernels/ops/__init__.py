"""Primitives that only rewrites make.

In: operands of other equations. Out: equations that a library, or a kernel of LoopIR, computes as one. May import
``core``.
"""
