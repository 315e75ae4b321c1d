"""Functions whose derivative, batching or solver rule the user gives.

In: functions and rules. Out: functions with these rules. May import ``transforms.control_flow`` and what that may.
"""
