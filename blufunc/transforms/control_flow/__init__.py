"""Primitives that run jaxprs: calls, ``cond``, ``scan``, ``while_loop``.

In: functions and operands. Out: equations with bodies, with all rules. May import ``transforms.autodiff`` and its
imports.
"""
