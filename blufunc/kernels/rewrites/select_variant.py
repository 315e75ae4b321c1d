"""Choice between platform variants: the original code, or library kernels.

Kernels, before stage 5. Recognizers have found the variants (``core/programs/alternatives.py``), or an operation
supplied its own (``nn/vocabulary_loss_call.py``). Recognizers run once more here, after all transforms, since they have
not seen code that is not differentiated.
"""

from __future__ import annotations

from typing import Protocol

from blufunc.core.ir.jaxpr import Eqn, Jaxpr, line_of
from blufunc.core.programs.alternatives import chosen, recognised_everywhere
from blufunc.core.programs.simplify import inline_calls


class Library(Protocol):
    """The registry of a device's library kernels."""

    def is_composite(self, eqn: Eqn) -> bool:
        """True for an operation with a definition and a kernel for some architecture."""

    def why_not(self, eqn: Eqn) -> str | None:
        """The reason that a composite has no kernel on the device, or None."""

    def note(self, eqn: Eqn, line: str, reason: str | None) -> str | None:
        """The line of ``explain`` for a composite: its kernel, or why it has none."""

    def needs_all(self, eqn: Eqn) -> bool:
        """True if a variant needs a kernel for every such call, not only for some."""


def select_variants(jaxpr: Jaxpr, library: Library) -> tuple[Jaxpr, tuple[str, ...]]:
    """The jaxpr in the variants with kernels, and a line per variant and near miss."""
    found, misses = recognised_everywhere(jaxpr)
    notes: dict[str, None] = {}

    def prefers(eqn: Eqn) -> bool:
        if eqn.prim.by_platform:
            return True
        calls = [e for e in inline_calls(eqn.params["preferred"]).eqns if library.is_composite(e)]
        reasons = [reason for e in calls if (reason := library.why_not(e)) is not None]
        if calls:
            note = library.note(calls[0], line_of(eqn), reasons[0] if reasons else None)
            notes.update({note: None} if note else {})
        return len(reasons) < (1 if calls and library.needs_all(calls[0]) else len(calls))

    made = chosen(found, prefers)
    return made, (*sorted(notes), *misses)
