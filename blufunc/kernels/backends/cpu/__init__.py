"""The CPU: generated C++, BLAS, or NumPy calls where a program is too small to compile.

In: schedules. Out: compiled programs. May import ``kernels.pipeline`` and the packages before it.
"""
