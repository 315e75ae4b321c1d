"""Checks of extensions: derivatives, primitives, transforms.

Face. In: functions, primitives and transforms, with an example of their arguments. Out: a report of what was
checked, or an ``AssertionError`` that says what is wrong, where and by how much. No test runner is needed.
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.testing.gradients import check_grads, check_jvp, check_vjp
    from blufunc.testing.primitives import check_primitive
    from blufunc.testing.report import Report
    from blufunc.testing.transforms import check_transform

__all__ = ["Report", "check_grads", "check_jvp", "check_primitive", "check_transform", "check_vjp"]
