"""Stage 6: a fused region becomes kernels of LoopIR.

Kernels. In: a ``Region`` of a ``Fusion`` and a ``Target``. Out: ``Launch``es: one kernel; where a reduction over rows
was cut in chunks that found too much to be added up at its end, a second that does.

The frame of the region says which of three shapes its kernel has:
``lower_pointwise.py``, ``lower_rows.py`` or ``lower_total.py``. What is computed at a point is asked for by index, in
``lower_values.py``, whose rules for reading other elements are in ``lower_reads.py``; ``lower_kernel.py`` puts kernels
together, and in ``lower_windows.py`` parts of arrays become buffers.
"""

from __future__ import annotations

from blufunc.kernels.fuse import Fusion, Region
from blufunc.kernels.launches import Launch
from blufunc.kernels.lower_kernel import Lowering
from blufunc.kernels.lower_pointwise import pointwise
from blufunc.kernels.lower_rows import in_rows
from blufunc.kernels.lower_total import in_total
from blufunc.kernels.lower_windows import with_windows
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
