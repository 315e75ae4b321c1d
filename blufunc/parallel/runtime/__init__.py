"""Ranks at run time: engines (simulated, MPI, NCCL), bootstrap, watchdog, storage of shards.

In: local programs' collectives. Out: exchanged arrays. May import ``parallel.mesh`` and ``kernels``.
"""
