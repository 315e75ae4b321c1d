"""Which form of a computation a CUDA device takes: what was written, or the one that it has kernels for.

Kernels, before stage 5; what there is to take, recognisers have found (``core/programs/recognizers.py``), or an
operation has brought with it (``nn/vocabulary_loss_call.py``). Recognisers are asked once more here, when all
transforms are done: what nobody differentiates was not looked at before.
"""

from __future__ import annotations

from blufunc.core.ir.jaxpr import Eqn, Jaxpr, line_of
from blufunc.core.programs.alternatives import chosen
from blufunc.core.programs.recognizers import recognised_everywhere
from blufunc.core.programs.simplify import inline_calls
from blufunc.kernels.backends.cuda.library import softmax_gemm
from blufunc.kernels.backends.cuda.library.attention.op import is_attention, why_not
from blufunc.kernels.backends.cuda.library.softmax_gemm import is_softmax


def in_kernels(jaxpr: Jaxpr, arch: str) -> tuple[Jaxpr, tuple[str, ...]]:
    """A jaxpr in the forms that a device of an architecture has kernels for; and a line for each of them, and for each
    that is like one but is not, which says why."""
    found, misses = recognised_everywhere(jaxpr)
    notes: dict[str, None] = {}

    def prefers(eqn: Eqn) -> bool:
        made = inline_calls(eqn.params["preferred"]).eqns
        softmax = [e for e in made if is_softmax(e)]
        if softmax:
            reasons = [reason for e in softmax if (reason := softmax_gemm.why_not(e, arch)) is not None]
            if reasons and arch == "sm_90a":
                notes[f"a chunk of linear_cross_entropy reads its logits for their softmax: {reasons[0]}"] = (
                    None
                )
            return len(reasons) < len(softmax)  # a chunk without a kernel is computed by the definition
        calls = [e for e in made if is_attention(e)]
        reasons = [reason for e in calls if (reason := why_not(e, arch)) is not None]
        if reasons:
            notes[f"attention at {line_of(eqn)} runs as it is written, without a kernel: {reasons[0]}"] = None
        elif calls:
            notes[f"recognised as attention at {line_of(eqn)}"] = None
        return bool(calls) and not reasons

    made = chosen(found, prefers)
    return made, (*sorted(notes), *misses)
