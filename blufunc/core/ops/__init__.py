"""Operations: primitives with all their rules, and strict functions to apply them.

In: arrays of one dtype and matching shapes. Out: arrays. One file per family; ``linalg`` has linear algebra.
May import ``core.primitives`` and its imports.
"""
