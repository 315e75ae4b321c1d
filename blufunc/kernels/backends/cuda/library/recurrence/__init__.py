"""Pointwise recurrences on a CUDA device: arrays are read once or twice.

Kernels, stage 8. ``op.py`` matches equations and launches; ``source.py`` writes the kernels.
"""
