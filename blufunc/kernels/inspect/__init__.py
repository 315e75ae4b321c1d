"""Reports of fusion, cost, memory and timings: ``explain`` and ``lower()``.

In: schedules and programs. Out: tables. May import all of ``kernels``.
"""
