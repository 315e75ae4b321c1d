"""Rendering: scheduled kernels as CUDA C++.

In: ``ScheduledKernel``s. Out: sources and launch shapes. It decides nothing. May import ``schedule`` and
``kernels.codegen``.
"""
