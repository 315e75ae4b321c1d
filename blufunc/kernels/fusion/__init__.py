"""A jaxpr into regions, each of which will be a kernel.

In: a jaxpr after the rewrites. Out: a ``Fusion``: regions and opaque equations. May import ``kernels.codegen``,
``kernels.loopir``.
"""
