"""Primitives: one object holds all rules of an operation.

In: definitions and rules. Out: ``Primitive``, its kinds (elementwise, reduction), scoped overrides, and the
linear operations used by rules. May import ``core.arrays``, ``core.ir``, ``core.pytree``.
"""
