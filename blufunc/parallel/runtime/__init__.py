"""Ranks at run time: engines, bootstrap, watchdog, storage of shards.

In: collectives of local programs. Out: arrays from other ranks. May import ``parallel.mesh`` and ``kernels``.
"""
