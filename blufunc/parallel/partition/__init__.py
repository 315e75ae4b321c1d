"""The partitioner: a global jaxpr and shardings into the jaxpr of one device.

In: a jaxpr, shardings of its arguments and results, factor rules. Out: a local jaxpr. May import
``parallel.collectives`` and its imports.
"""
