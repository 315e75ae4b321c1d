"""Loops and branches on a CUDA device.

In: equations of ``scan``, ``while``, ``cond`` and calls. Out: steps that run their bodies, nodes of a graph where that
can be. Imports the driver and ``library_kernel``.
"""
