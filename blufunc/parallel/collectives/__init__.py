"""Collectives as equations: named axes, ``shard_map`` and its types, lowering.

In: functions of shards. Out: local jaxprs whose collectives are equations. May import ``parallel.runtime``,
``parallel.mesh``, ``transforms``.
"""
