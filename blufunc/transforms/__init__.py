"""Transforms of functions: derivatives, batching, control flow, compilation.

In: functions or jaxprs. Out: functions or jaxprs. Packages, bottom first: ``batching``, ``autodiff``, ``control_flow``,
``checkpointing``, ``custom_rules``, ``staging``, ``precision``, ``extension``; all use ``arguments``.
"""
