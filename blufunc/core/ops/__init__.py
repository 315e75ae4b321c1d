"""The operations: primitives with all their rules, and strict functions that apply them.

In: arrays of one dtype and matching shapes. Out: arrays. One file a family; ``linalg`` has linear algebra. May import
``core.primitives`` and what that may.
"""
