"""The native form of an equation, if it has one.

Kernels, stage 6 on the CPU. In: an equation. Out: its ``Form``, from the tables of ``linalg.py`` and ``sorting.py``.
"""

from __future__ import annotations

from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.primitives.override import is_replaced
from blufunc.kernels.backends.cpu.steps import linalg, sorting
from blufunc.kernels.backends.cpu.steps.form import Form

_TABLES = tuple({p: (table.accepts, make) for p, make in table.FORMS.items()} for table in (linalg, sorting))
_FORMS = {**_TABLES[0], **_TABLES[1]}

LIBRARIES = {**linalg.LIBRARIES, **sorting.LIBRARIES}
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
