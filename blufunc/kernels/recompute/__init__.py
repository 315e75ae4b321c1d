"""Rematerialization, by default and within a memory budget.

In: a plan and its program. Out: a program with recomputation. May import ``kernels.rewrites``, ``kernels.fusion``.
"""
