"""Types, traces and jaxprs: the data structures of the compiler.

In: nothing. Out: ``ShapedArray``, ``Trace``, ``Jaxpr``, their checks and printer, and the user's source
lines. May import ``errors`` and ``config`` only.
"""
