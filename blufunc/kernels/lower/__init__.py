"""Regions into LoopIR.

In: a region and a ``Target``. Out: launches of kernels. May import ``kernels.fusion``, ``kernels.loopir``.
"""
