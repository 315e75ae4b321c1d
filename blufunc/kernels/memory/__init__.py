"""The memory planner: order, lifetimes, in-place reuse, offsets in one arena.

In: steps with the values that they read and write. Out: a ``Plan``. Imports nothing else of ``kernels``.
"""
