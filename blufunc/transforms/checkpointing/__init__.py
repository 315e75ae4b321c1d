"""``checkpoint``: recompute in the backward pass, by policy.

In: functions and policies. Out: functions, and a report of residuals. May import ``transforms.control_flow`` and its
imports.
"""
