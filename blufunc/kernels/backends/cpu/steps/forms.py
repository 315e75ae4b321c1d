"""The native form of an equation, if it has one.

Kernels, stage 6 on the CPU. In: an equation. Out: its ``Form``, from the tables of ``linalg.py``, ``sorting.py``,
``fourier.py``, ``convolution.py``, ``windows.py`` and ``ragged_dot.py``.
"""

from __future__ import annotations

from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.primitives.override import is_replaced
from blufunc.kernels.backends.cpu.steps import convolution, fourier, linalg, ragged_dot, sorting, windows
from blufunc.kernels.backends.cpu.steps.form import Form

_TABLES = (linalg, sorting, fourier, convolution, windows, ragged_dot)

_FORMS = {prim: (table.accepts, make) for table in _TABLES for prim, make in table.FORMS.items()}

LIBRARIES = {name: library for table in _TABLES for name, library in table.LIBRARIES.items()}
"""Libraries by name."""


def has_form(eqn: Eqn) -> bool:
    """True for an equation that a library computes."""
    found = _FORMS.get(eqn.prim)
    return found is not None and found[0](eqn) and not is_replaced(eqn.prim, "impl")


def limits_threads(eqn: Eqn) -> bool:
    """True for an equation whose form should call LAPACK on one thread."""
    return eqn.prim in linalg.FORMS and has_form(eqn) and linalg.limits_threads(eqn)


def form_of(eqn: Eqn) -> Form:
    """The native form of an equation that has one."""
    return _FORMS[eqn.prim][1](eqn)
