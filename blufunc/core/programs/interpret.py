"""Interpretation of jaxprs by users' programs, with JAX's signatures.

Core, for users of jaxprs: for interpreters that read equations one by one, and for values that stand for programs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import jaxpr as ir
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.trace import EVAL, Trace, Tracer, set_trace, state

Value = Any
ParamDict = dict[str, Any]


def eval_jaxpr(jaxpr: ir.Jaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
    """The results of a jaxpr on arrays or traced values, equation by equation.

    Args:
      jaxpr: as from ``make_jaxpr``.
      consts: the values of its ``constvars``.
      args: the values of its ``invars``, flat.
    Raises:
      ArgumentError: there are more or fewer values than variables.
    """
    for what, given, wanted in (("constants", consts, jaxpr.constvars), ("arguments", args, jaxpr.invars)):
        if len(given) != len(wanted):
            raise errors.ArgumentError(
                f"eval_jaxpr: {len(given)} {what} for {len(wanted)} variables.",
                where=source.here(),
                fix="eval_jaxpr(jaxpr, jaxpr.consts, *args), with all leaves of the arguments",
            )
    bound = jaxpr.replace(consts=tuple([lift(c, "a constant") for c in consts]))
    return ir.eval_jaxpr(bound, [lift(a, "an argument") for a in args])


def jaxpr_as_fun(closed_jaxpr: ir.Jaxpr) -> Callable[..., list[Any]]:
    """The function of flat arguments that a jaxpr with its constants is."""
    return lambda *args: eval_jaxpr(closed_jaxpr, closed_jaxpr.consts, *args)


class _CompileTimeTrace(Trace):
    """Evaluates operations on known values, and sends the others outward."""

    __slots__ = ("parent",)
    name = "compile time"

    def __init__(self, parent: Trace):
        super().__init__()
        self.parent = parent

    def process(self, prim, args, params):
        known = not any(isinstance(a, Tracer) for a in args)
        with set_trace(EVAL if known else self.parent) as trace:
            return trace.process(prim, args, params)

    def typed(self, fun, primals):
        return self.parent.typed(fun, primals)

    def typed_body(self, body):
        return self.parent.typed_body(body)

    def typed_cotangent(self, ct, primal):
        return self.parent.typed_cotangent(ct, primal)


@contextlib.contextmanager
def ensure_compile_time_eval() -> Iterator[None]:
    """Context manager for eager evaluation inside ``jit`` and other transforms.

    For values that a traced function derives from known ones alone: tables, positions, shapes. The results are
    concrete, so Python may branch on them, and the program holds them as constants. Operations on traced values are
    traced as outside of the block. Also a decorator.
    """
    with set_trace(_CompileTimeTrace(state.trace)), source.own_lines():
        yield


eval_context = ensure_compile_time_eval


def get_aval(x: Any) -> ShapedArray:
    """The type of an array, traced value or scalar."""
    return lift(x).aval


def max_dim(d1: int, d2: int) -> int:
    """The larger of two sizes."""
    return max(d1, d2)


def min_dim(d1: int, d2: int) -> int:
    """The smaller of two sizes."""
    return min(d1, d2)
