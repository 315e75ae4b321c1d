"""Names of ``jax.core`` and ``jax.extend.core`` that blufunc spells otherwise.

Under the face ``as_jax``. A jaxpr of blufunc has its constants: it is JAX's ``ClosedJaxpr`` and its ``Jaxpr``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from blufunc.core.arrays.array import ConcreteArray, lift
from blufunc.core.ir import avals
from blufunc.core.ir import jaxpr as ir
from blufunc.core.ir.trace import EVAL, Array, Trace, Tracer, set_trace, state
from blufunc.errors import InconclusiveDimensionOperation
from blufunc.extend import core
from blufunc.transforms.arguments import abstract

__all__ = [
    "ClosedJaxpr",
    "InconclusiveDimensionOperation",
    "Jaxpr",
    "ShapedArray",
    "TraceTag",
    "call_impl",
    "canonicalize_dtype_handlers",
    "is_concrete",
    "pytype_aval_mappings",
    "set_current_trace",
    "take_current_trace",
    "trace_state_clean",
    "unmapped_aval",
]


ShapedArray = avals.ShapedArray


def unmapped_aval(size: int, axis: int | None, aval: avals.ShapedArray, *rest: Any, **options: Any) -> Any:
    """The type of a batch; JAX has arguments for explicit shardings besides."""
    return core.unmapped_aval(size, axis, aval)


class _OfJaxprs(type):
    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, ir.Jaxpr)


class ClosedJaxpr(metaclass=_OfJaxprs):
    """A jaxpr with its constants."""

    def __new__(cls, jaxpr: ir.Jaxpr, consts: Sequence[Any]):
        return jaxpr.replace(consts=[lift(c) for c in consts]) if jaxpr.constvars else jaxpr


class Jaxpr(metaclass=_OfJaxprs):
    """A jaxpr whose constants are given when it is evaluated, or by ``ClosedJaxpr``."""

    def __new__(cls, constvars, invars, outvars, eqns, effects=core.no_effects, debug_info=None, **options):
        return ir.Jaxpr(invars, eqns, outvars, constvars, [None] * len(constvars))


pytype_aval_mappings: dict[type, Callable] = dict.fromkeys(
    (bool, int, float, complex, np.ndarray, Array, ConcreteArray), abstract
)
"""Functions from values to types, by class, to which libraries add."""

canonicalize_dtype_handlers: dict[type, Callable] = dict.fromkeys(pytype_aval_mappings, lift)
"""Functions from values to arrays, by class; likewise."""


def call_impl(f: Any, *args: Any, **params: Any) -> Any:
    """Call a wrapped function."""
    return f.call_wrapped(*args)


class TraceTag:
    """Identifies the traces of one call of a transform."""


def is_concrete(x: Any) -> bool:
    """True unless ``x`` is traced."""
    return not isinstance(x, Tracer)


def trace_state_clean() -> bool:
    """True outside of all transforms."""
    return state.trace is EVAL


@contextlib.contextmanager
def take_current_trace() -> Iterator[Trace]:
    """The current trace, with evaluation current in the block."""
    trace = state.trace
    with set_trace(EVAL):
        yield trace


def set_current_trace(trace: Trace, **options: Any) -> Any:
    """Make a trace current in a block."""
    return set_trace(trace)
