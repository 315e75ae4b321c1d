"""Scheduling: LoopIR and device limits become a ``ScheduledKernel``.

In: a kernel of LoopIR. Out: threads, vectors, staging in shared memory, prefetch, clusters, and the LoopIR that they
require. ``passes.py`` lists the passes. May import ``device_model``, ``kernels.loopir`` and the scalar facts of
``kernels.codegen``.
"""
