"""Reports: fusion, cost, memory and timings, as ``explain`` and ``lower()`` show them.

In: schedules and programs. Out: tables. May import all of ``kernels``.
"""
