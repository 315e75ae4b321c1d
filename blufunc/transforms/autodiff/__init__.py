"""Derivatives: ``jvp``, ``linearize``, ``transpose``, and the user's ``grad``, ``vjp``, ``jacfwd`` and others.

In: functions or linear jaxprs. Out: functions or jaxprs. May import ``transforms.batching``, ``transforms.arguments``.
"""
