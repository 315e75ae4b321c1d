"""CPU backend: generated C++, BLAS, or NumPy calls for short programs.

In: schedules. Out: compiled programs. May import ``kernels.pipeline`` and the packages before it.
"""
