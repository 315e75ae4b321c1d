"""Fast exponentials for 16-bit results.

Kernels, stage 6, a pass on the vectorized kernel. An exponential as exact as float32 takes ten instructions, that of
the special function unit two, and kernels on 16-bit elements have no time for the difference: they are as long in
arithmetic as in memory. The fast one is less exact by far less than such elements can show.
"""

from __future__ import annotations

from dataclasses import replace

from blufunc.core.ir import dtypes
from blufunc.core.ops import elementwise as ew
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import ScheduledKernel
from blufunc.kernels.codegen.scalar_ops import is_small_float
from blufunc.kernels.loopir.ir import Kernel, Store, Value, dependencies, post_order, values_of

_PASSING_ON = frozenset((ew.mul_p, ew.add_p, ew.sub_p, ew.neg_p, ew.select_p))
"""Operations whose relative error is as small as that of an operand, compared with the operands."""


_FAST = {ew.exp_p: "bf_exp(", ew.logistic_p: "bf_logistic("}
"""Operations that have a fast form, and their functions in the prelude."""


def choose_fast_exps(s: ScheduledKernel) -> ScheduledKernel:
    """Choose the exponentials that end in 16-bit floats, and nowhere else."""
    return replace(s, fast_exps=fast_exps(s.kernel))


def fast_exps(kernel: Kernel) -> frozenset[Value]:
    """The values of a kernel that a fast exponential is exact enough for."""
    roots: list[Value] = []
    exact: set[Value] = set()
    for t in kernel.statements():
        found = values_of(t)
        roots += found
        if not isinstance(t, Store) or not is_small_float(t.buffer.dtype):
            exact.update(found)
    values = post_order(roots)
    for v in reversed(values):
        narrows = v.op == "apply" and is_small_float(v.dtype)
        passes_on = v.op == "apply" and v.attr[0] in _PASSING_ON and v not in exact and not _is_remainder(v)
        if not narrows and not passes_on:
            exact.update(dependencies(v))
    exps = (v for v in values if v.op == "apply" and v.attr[0] in _FAST)
    return frozenset(
        v for v in exps if is_small_float(v.dtype) or (v.dtype == dtypes.float32 and v not in exact)
    )


def with_fast_exp(text: str, v: Value, fast: frozenset[Value]) -> str:
    """The expression of a value, by a fast exponential if it is one of these."""
    return text.replace(name := _FAST[v.attr[0]], name.replace("bf_", "ptx_"), 1) if v in fast else text


def _is_remainder(v: Value) -> bool:
    """Whether it is what rounding to 16 bits leaves of a value: it shows digits that those 16 bits do not."""
    if v.attr[0] is not ew.sub_p or v.args[1].op != "apply" or v.args[1].attr[0] is not ew.convert_p:
        return False
    (rounded,) = v.args[1].args
    return rounded.op == "apply" and rounded.attr[0] is ew.convert_p and rounded.args[0] is v.args[0]
