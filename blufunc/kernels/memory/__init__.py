"""The memory planner: order, lifetimes, in-place reuse, offsets in one arena.

In: steps with the values that they read and write. Out: a ``Plan``. May import nothing of ``kernels``.
"""
