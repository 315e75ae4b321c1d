"""``vmap``: functions of one example become functions of a batch.

In: functions and batch axes. Out: functions. May import ``transforms.arguments`` and ``core``.
"""
