"""Stage 6: a fused region becomes kernels of LoopIR.

Kernels. In: a ``Region`` of a ``Fusion`` and a ``Target``. Out: ``Launch``es: one kernel; where a reduction over rows
was cut in chunks that found too much to be added up at its end, a second that does.

The frame of the region says which of three shapes its kernel has:
``pointwise.py``, ``rows.py`` or ``total.py``. What is computed at a point is asked for by index, in
``values.py``, whose rules for reading other elements are in ``indexed_reads.py``; ``kernel.py`` puts kernels
together, and in ``subbuffers.py`` parts of arrays become buffers.
"""

from __future__ import annotations

from blufunc.kernels.fusion.fuse import Fusion, Region
from blufunc.kernels.loopir.launch import Launch
from blufunc.kernels.lower.kernel import Lowering
from blufunc.kernels.lower.pointwise import pointwise
from blufunc.kernels.lower.rows import in_rows
from blufunc.kernels.lower.subbuffers import with_windows
from blufunc.kernels.lower.total import in_total
from blufunc.kernels.target import Target


def lower(region: Region, fusion: Fusion, target: Target) -> list[Launch]:
    """The kernels of a region."""
    return [with_windows(launch) for launch in _lowered(region, fusion, target)]


def _lowered(region: Region, fusion: Fusion, target: Target) -> list[Launch]:
    low = Lowering(region, fusion, target)
    if region.frame.total:
        return [in_total(low)]
    if region.frame.lanes:
        return in_rows(low)
    return [pointwise(low)]
