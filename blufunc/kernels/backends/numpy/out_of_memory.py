"""Errors of programs on the CPU for which the machine has no memory.

Kernels, stage 8. In: NumPy's ``MemoryError``, and the jaxpr that ran. Out: an ``OutOfMemoryError`` with the user's line
of the largest value.
"""

from __future__ import annotations

from collections.abc import Iterator

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, subjaxprs

_FIX = (
    "make it smaller: process a part at a time with lax.map(f, xs, batch_size=...), or use a narrower dtype"
)


def of_program(error: MemoryError, jaxpr: Jaxpr) -> errors.OutOfMemoryError:
    """The error of a program; one that has the line already is itself."""
    if isinstance(error, errors.OutOfMemoryError):
        return error
    made = [(v.aval.nbytes, str(v.aval), e) for e in _equations(jaxpr) for v in e.outvars]
    if not made:
        return of_operation(error, jaxpr.name)
    _, aval, eqn = max(made, key=lambda entry: entry[0])
    return errors.OutOfMemoryError(
        f"out of memory on the CPU, in {jaxpr.name or 'a program'}.",
        where=source.describe(eqn.source),
        why=f"{error}. The largest value is {aval}, of {eqn.prim} at this line.",
        fix=_FIX,
    )


def of_operation(error: MemoryError, name: str) -> errors.OutOfMemoryError:
    """The error of a single operation; one that has the line already is itself."""
    if isinstance(error, errors.OutOfMemoryError):
        return error
    return errors.OutOfMemoryError(
        f"out of memory on the CPU, in {name}.", where=source.here(), why=f"{error}.", fix=_FIX
    )


def _equations(jaxpr: Jaxpr) -> Iterator[Eqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in subjaxprs(eqn.params):
            yield from _equations(inner)
