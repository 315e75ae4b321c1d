"""Exponentials of which 16 bits are kept.

Kernels, stage 6, before ``cuda_style.py``. An exponential as exact as float32 takes ten instructions, the device's own
two, and kernels that read and write elements of 16 bits have no time for the difference: they compute as long as
memory takes. The device's own is less exact by far less than such elements can show.
"""

from __future__ import annotations

from blufunc.core import dtypes
from blufunc.core.ops import elementwise as ew
from blufunc.kernels.loopir import Kernel, Store, Value, dependencies, post_order, values_of
from blufunc.kernels.scalars import is_small_float

_PASSING_ON = frozenset((ew.mul_p, ew.add_p, ew.sub_p, ew.neg_p, ew.select_p))
"""What makes of a small relative error of an operand an error that is as small beside the operands."""


def is_widened(v: Value) -> bool:
    """Whether a float32 is what was read of a narrower float."""
    is_read = v.op == "apply" and v.attr[0] is ew.convert_p and v.args[0].op == "load"
    return v.dtype == dtypes.float32 and (is_small_float(v.args[0].dtype) if is_read else False)


def narrow_exponentials(kernel: Kernel) -> frozenset[Value]:
    """The exponentials of float32 in a kernel that end in a narrower float, and nowhere else."""
    roots: list[Value] = []
    exact: set[Value] = set()
    for s in kernel.statements():
        found = values_of(s)
        roots += found
        if not isinstance(s, Store) or not is_small_float(s.buffer.dtype):
            exact.update(found)
    values = post_order(roots)
    for v in reversed(values):
        narrows = v.op == "apply" and is_small_float(v.dtype)
        passes_on = v.op == "apply" and v.attr[0] in _PASSING_ON and v not in exact and not _is_remainder(v)
        if not narrows and not passes_on:
            exact.update(dependencies(v))
    exps = (v for v in values if v.op == "apply" and v.attr[0] is ew.exp_p and v.dtype == dtypes.float32)
    return frozenset(v for v in exps if v not in exact)


def _is_remainder(v: Value) -> bool:
    """Whether it is what rounding to a narrower float leaves of a number: it shows digits that those 16 bits do not."""
    if v.attr[0] is not ew.sub_p or v.args[1].op != "apply" or v.args[1].attr[0] is not ew.convert_p:
        return False
    (rounded,) = v.args[1].args
    return rounded.op == "apply" and rounded.attr[0] is ew.convert_p and rounded.args[0] is v.args[0]
