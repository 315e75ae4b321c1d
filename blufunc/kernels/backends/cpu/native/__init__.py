"""Native steps and programs: loops, branches and updates as C++ functions.

In: steps of a schedule and the schedules of their bodies. Out: C++ that calls the program's kernels, and the Python
functions that it calls back. May import the modules of ``backends.cpu`` except ``program`` and ``backend``.
"""
