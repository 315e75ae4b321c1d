"""All cases of the breadth suite, by name."""

from __future__ import annotations

from benchmarks.cases.arrays import of_arrays
from benchmarks.cases.case import Case, Sizes
from benchmarks.cases.convolutions import of_images
from benchmarks.cases.products import of_products
from benchmarks.cases.science import of_science
from benchmarks.cases.sequences import of_sequences
from benchmarks.cases.vision import of_vision


def models(tiny: bool) -> dict[str, Case]:
    """Whole programs, whose memory is measured: one process each."""
    n = Sizes(tiny)
    return of_vision(n) | of_sequences(n) | of_science(n)


def operations(tiny: bool) -> dict[str, Case]:
    """Single operations, which share processes."""
    n = Sizes(tiny)
    return of_images(n) | of_arrays(n) | of_products(n)
