"""Classes of jaxprs, and helpers to read them, under JAX's names.

Face over ``core`` and ``transforms``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ir import jaxpr as ir
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.check import check_jaxpr
from blufunc.core.ir.jaxpr import DropVar, Jaxpr, Literal, Var
from blufunc.core.ir.jaxpr import Eqn as JaxprEqn
from blufunc.core.ir.trace import Array, Trace, Tracer, set_trace, state
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.programs.interpret import jaxpr_as_fun
from blufunc.errors import JaxprTypeError
from blufunc.extend.core import primitives
from blufunc.transforms.batching.batch import NamedAxis

__all__ = [
    "ClosedJaxpr",
    "DropVar",
    "Effect",
    "Effects",
    "Jaxpr",
    "JaxprEqn",
    "JaxprTypeError",
    "Literal",
    "Primitive",
    "Var",
    "array_types",
    "check_jaxpr",
    "concrete_or_error",
    "find_top_trace",
    "gensym",
    "get_opaque_trace_state",
    "jaxpr_as_fun",
    "jaxprs_in_params",
    "mapped_aval",
    "new_jaxpr_eqn",
    "no_effects",
    "nonempty_axis_env_DO_NOT_USE",
    "primal_dtype_to_tangent_dtype",
    "primitives",
    "set_current_trace",
    "subjaxprs",
    "unmapped_aval",
    "unsafe_get_axis_names_DO_NOT_USE",
    "valid_jaxtype",
]

ClosedJaxpr = Jaxpr  # a jaxpr has its constants
set_current_trace = set_trace

Effect = str
Effects = frozenset[str]
no_effects: Effects = frozenset()

array_types = frozenset({Array, np.ndarray, *(np.dtype(d).type for d in dtypes.ALL if d.fields is None)})
"""The types of values that are arrays, Python's numbers aside."""


# -- jaxprs ------------------------------------------------------------------------------------------


def gensym(suffix: str = "") -> Callable[[ShapedArray], Var]:
    """A function from types to new variables; printing names them, and no ``suffix``."""
    return Var


def new_jaxpr_eqn(
    invars: Sequence[Any],
    outvars: Sequence[Var],
    primitive: Primitive,
    params: dict[str, Any],
    effects: Effects = no_effects,
    source_info: source.Source | None = None,
) -> JaxprEqn:
    """An equation, at the user's line by default.

    Raises:
      ArgumentError: ``effects`` are not those of the primitive with these ``params``.
    """
    eqn = JaxprEqn(primitive, tuple(invars), tuple(outvars), params, source_info or source.current())
    if frozenset(effects) != eqn.effects:
        raise errors.ArgumentError(
            f"new_jaxpr_eqn: {primitive} has the effects {sorted(eqn.effects)}, not {sorted(effects)}.",
            where=source.here(),
            fix="define effects in the primitive",
        )
    return eqn


def jaxprs_in_params(params: dict[str, Any]) -> list[Jaxpr]:
    """The jaxprs among the parameters of an equation."""
    return list(ir.subjaxprs(params))


def subjaxprs(jaxpr: Jaxpr) -> list[Jaxpr]:
    """The jaxprs in the equations of a jaxpr, those inside of them left out."""
    return [sub for eqn in jaxpr.eqns for sub in ir.subjaxprs(eqn.params)]


# -- types -------------------------------------------------------------------------------------------


def mapped_aval(size: int, axis: int | None, aval: ShapedArray) -> ShapedArray:
    """The type of one element of a batch along ``axis``; None: all of it."""
    if axis is None:
        return aval
    if not 0 <= axis < aval.ndim or aval.shape[axis] != size:
        raise errors.ShapeError(
            f"mapped_aval: axis {axis} of {aval} has not the size {size}.", where=source.here()
        )
    return aval.with_shape(aval.shape[:axis] + aval.shape[axis + 1 :])


def unmapped_aval(size: int, axis: int | None, aval: ShapedArray) -> ShapedArray:
    """The type of a batch of ``size`` values along ``axis``; None: of one value."""
    if axis is None:
        return aval
    if not 0 <= axis <= aval.ndim:
        raise errors.AxisRangeError(
            f"unmapped_aval: there is no axis {axis} to add to {aval}.", where=source.here()
        )
    return aval.with_shape((*aval.shape[:axis], size, *aval.shape[axis:]))


def primal_dtype_to_tangent_dtype(primal_dtype: Any) -> np.dtype:
    """The dtype of tangents of values of a dtype: itself, or float0."""
    dtype = dtypes.as_dtype(primal_dtype)
    return dtype if dtypes.is_inexact(dtype) else dtypes.float0


def valid_jaxtype(x: Any) -> bool:
    """True if x is an array or a number."""
    try:
        lift(x)
    except errors.BlufuncError:
        return False
    return True


def concrete_or_error(force: Callable[[Any], Any] | None, val: Any, context: str = "") -> Any:
    """``force(val)``, or ``val`` if ``force`` is None, of a value that is known.

    Raises:
      ConcretizationError: ``val`` is traced; the message has the ``context``.
    """
    if isinstance(val, Tracer):
        raise val._not_concrete(context or "this function", "compute it outside of the transform")
    return val if force is None else force(val)


# -- traces ------------------------------------------------------------------------------------------


class OpaqueTraceState(NamedTuple):
    """The trace in force, and the named axes."""

    trace: Trace
    axes: tuple[Hashable, ...]


def get_opaque_trace_state(convention: str | None = None) -> OpaqueTraceState:
    """A value to compare with that of another place; ``convention`` is not read."""
    return OpaqueTraceState(state.trace, tuple(unsafe_get_axis_names_DO_NOT_USE()))


def find_top_trace(xs: Sequence[Any]) -> Trace:
    """The trace that operations go to: the current one, whatever the values."""
    return state.trace


def unsafe_get_axis_names_DO_NOT_USE() -> list[Hashable]:
    """The named axes in force, outermost first."""
    return [e.name for e in state.context if isinstance(e, NamedAxis)]


def nonempty_axis_env_DO_NOT_USE() -> bool:
    """True if a named axis is in force."""
    return bool(unsafe_get_axis_names_DO_NOT_USE())
