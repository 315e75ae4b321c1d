"""CUDA backend: schedules as kernel launches, library calls and graphs.

In: schedules. Out: programs on a device. Packages, bottom first: ``schedule``, ``render``, ``driver``, ``library``;
the modules here combine them. May import ``kernels.pipeline`` and the packages before it.
"""
