"""Scheduling: LoopIR and a device's limits become a ``ScheduledKernel``.

In: a kernel of LoopIR. Out: threads, vectors, staging in shared memory, prefetch, clusters, and the LoopIR that they
need. ``passes.py`` lists the passes. May import ``device_model``, ``kernels.loopir`` and ``kernels.codegen``'s facts
on scalars.
"""
