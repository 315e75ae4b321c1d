"""Primitives: one object holds all rules of an operation.

In: definitions and rules. Out: ``Primitive``, its kinds (elementwise, reduction), scoped overrides, and the linear
operations that rules are written with. May import ``core.arrays``, ``core.ir``, ``core.pytree``.
"""
