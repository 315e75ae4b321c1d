"""Platform variants: the computation as written, or one with library kernels.

Kernels, before stage 5. In: a jaxpr with variants, from recognizers (``core/programs/alternatives.py``) or from an
operation itself (``nn/vocabulary_loss_call.py``). Out: the jaxpr in the chosen variants. Recognizers run once more
here, after all transforms: they have not seen code that is not differentiated.
"""

from __future__ import annotations

from typing import Protocol

from blufunc.core.ir.jaxpr import Eqn, Jaxpr, line_of
from blufunc.core.programs.alternatives import chosen, recognised_everywhere
from blufunc.core.programs.simplify import inline_calls


class Library(Protocol):
    """The registry of a device's library kernels, as far as a choice depends on it."""

    def is_composite(self, eqn: Eqn) -> bool:
        """True if an equation has a definition, and a kernel on some architecture."""

    def why_not(self, eqn: Eqn) -> str | None:
        """The reason why a composite has no kernel on the device; None if it has one."""

    def note(self, eqn: Eqn, line: str, reason: str | None) -> str | None:
        """The line of ``explain`` on a composite at a user's line: a kernel, or why none."""

    def needs_all(self, eqn: Eqn) -> bool:
        """True if a variant requires a kernel for every such call, not just for some."""


def select_variants(jaxpr: Jaxpr, library: Library) -> tuple[Jaxpr, tuple[str, ...]]:
    """A jaxpr in the variants that a library has kernels for.

    Returns:
      the jaxpr, and a line for each variant taken and for each near miss, with its reason.
    """
    found, misses = recognised_everywhere(jaxpr)
    notes: dict[str, None] = {}

    def prefers(eqn: Eqn) -> bool:
        calls = [e for e in inline_calls(eqn.params["preferred"]).eqns if library.is_composite(e)]
        reasons = [reason for e in calls if (reason := library.why_not(e)) is not None]
        if calls:
            note = library.note(calls[0], line_of(eqn), reasons[0] if reasons else None)
            notes.update({note: None} if note else {})
        return len(reasons) < (1 if calls and library.needs_all(calls[0]) else len(calls))

    made = chosen(found, prefers)
    return made, (*sorted(notes), *misses)
