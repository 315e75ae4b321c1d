"""The partitioner: a global jaxpr and shardings into the jaxpr of one device.

In: a jaxpr, shardings of its ends, factor rules. Out: a local jaxpr. May import ``parallel.collectives`` and what that
may.
"""
