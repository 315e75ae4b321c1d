"""Values to offload within a memory budget, instead of recomputing them.

Kernels, between stages 5 and 7, called by ``budget.py``. In: a planned program, and the budget that it exceeds. Out:
the program in which values that are alive at the peak, and read only long after, wait in the memory of the host.

A value qualifies if the link could move it there and back in the time in which no step reads it. Those that are unused
for longest go first: they are the first to be ready for the link and the last to be needed. Whether the link can move
all of them in time is known once the plan is made (``memory/overlap.py``): the time that steps wait is the price. All
that a program keeps on the host stays within ``config.host_memory``, so that plans do not depend on the machine that
makes them; whether that much is free is checked when it is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blufunc.config import config
from blufunc.core.ir.avals import DEVICE, PINNED_HOST
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var
from blufunc.core.ops.offload import offload_p
from blufunc.kernels.cost import step_seconds
from blufunc.kernels.machine import Machine
from blufunc.kernels.recompute.budget_cuts import Cuts
from blufunc.kernels.recompute.budget_report import Dropped
from blufunc.kernels.schedule import Schedule

_SMALL = 1 << 10
"""A value that frees less than this part of the excess is not worth two copies."""


class Offloads:
    """The values that may be offloaded, and programs that do.

    Args:
      made: the planned program, with one step per step of its fusion.
      cuts: its lifetimes around the peak.
      machine: the device, with a link to its host.

    Attributes:
      candidates: the values, unused for longest first, that the memory of the host has space for.
      hidden: bytes that the link moves out up to the peak, or back after it, whichever is less.
    """

    def __init__(self, made: Schedule, cuts: Cuts, machine: Machine):
        self.cuts = cuts
        seconds = [0.0 if _is_copy(s) else step_seconds(s, machine) for s in made.steps]
        starts = np.concatenate([[0.0], np.cumsum(seconds)])

        before_peak = min(starts[cuts.at + 1], starts[-1] - starts[cuts.at + 1])
        self.hidden = int(machine.host_link * before_peak)

        def idle(v: Var) -> float:
            return float(starts[cuts.first_late[v]] - starts[cuts.last_early[v] + 1])

        def qualifies(v: Var) -> bool:
            value = made.plan.values[made.ids[v]] if v in made.ids else None
            if value is None or value.kind != "temp" or value.on_host or v in cuts.fixed:
                return False
            if v not in cuts.maker or cuts.last_early.get(v, cuts.at) >= cuts.at:
                return False
            link = 2 * (machine.copy + v.aval.nbytes / machine.host_link)
            return v.aval.nbytes * _SMALL >= cuts.excess and idle(v) >= link

        room = config.host_memory - made.plan.host_bytes
        self.candidates = []
        for v in sorted(filter(qualifies, cuts.first_late), key=lambda v: -idle(v)):
            if v.aval.nbytes <= room:
                room -= v.aval.nbytes
                self.candidates.append(v)

    def first(self, nbytes: int) -> list[Var]:
        """As many candidates as have ``nbytes``, or all."""
        freed, chosen = 0, []
        for v in self.candidates:
            if freed >= nbytes:
                break
            chosen.append(v)
            freed += v.aval.nbytes
        return chosen

    def program(self, chosen: Sequence[Var], origins: dict[Eqn, int]) -> Jaxpr:
        """The program in which values wait on the host; ``origins`` is updated."""
        cuts, base = self.cuts, 1 + max(origins.values(), default=0)
        waiting = {v: Var(v.aval.in_memory(PINNED_HOST)) for v in chosen}
        back = {
            v: (Eqn(offload_p, [h], [v], {"src": PINNED_HOST, "dst": DEVICE}, cuts.maker[v].source),)
            for v, h in waiting.items()
        }
        jaxpr = cuts.repeated(dict.fromkeys(chosen, base), origins, instead=back, read=chosen)
        eqns = []
        for e in jaxpr.eqns:
            eqns.append(e)
            if origins.get(e) == base:
                del origins[e]  # a copy recomputes nothing
            for v in e.outvars:
                if v in waiting:
                    params = {"src": DEVICE, "dst": PINNED_HOST}
                    eqns.append(Eqn(offload_p, [v], [waiting[v]], params, e.source))
        return jaxpr.replace(eqns=eqns)

    def moved(self, chosen: Sequence[Var]) -> tuple[Dropped, ...]:
        """Entries of the report."""
        return tuple(Dropped.of(v, self.cuts.maker[v]) for v in chosen)


def _is_copy(step: object) -> bool:
    eqn = getattr(step, "eqn", None)
    return eqn is not None and eqn.prim is offload_p
