"""Rendering: scheduled kernels as CUDA C++.

In: ``ScheduledKernel``s. Out: sources and launch shapes. It makes no decisions. May import ``schedule`` and
``kernels.codegen``.
"""
