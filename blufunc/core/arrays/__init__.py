"""Arrays, devices, and the protocol of backends.

In: values from outside. Out: immutable ``Array``s on a ``Device``. May import ``core.ir``.
"""
