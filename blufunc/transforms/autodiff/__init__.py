"""Derivatives: ``jvp``, ``linearize``, ``grad``, ``vjp``, ``jacfwd``, ...

In: functions or linear jaxprs. Out: functions or jaxprs. May import ``transforms.batching``, ``transforms.arguments``.
"""
