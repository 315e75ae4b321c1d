"""CUDA devices: schedules as launches, library calls and graphs.

In: schedules. Out: programs on a device. Packages, bottom first: ``schedule``, ``render``, ``driver``, ``library``; the
modules here put them together. May import ``kernels.pipeline`` and the packages before it.
"""
