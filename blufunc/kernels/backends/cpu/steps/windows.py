"""Native form of reductions of windows: sums, extrema and their positions.

Kernels, stage 6 on the CPU. In: operations of ``core.ops.reduce_window`` in float32 or float64. Out: their forms, lists
of slides as of convolutions. A line of results accumulates one element of all of its windows at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.reduce_window import (
    reduce_window_max_p,
    reduce_window_min_p,
    reduce_window_sum_p,
    window_argmax_p,
    window_argmin_p,
)
from blufunc.kernels.backends.cpu.steps.convolution import FILE, GEMM, axes_of, joined, phases
from blufunc.kernels.backends.cpu.steps.form import Form, Library
from blufunc.kernels.loopir.index import strides_of

_REALS = {"float32": "float", "float64": "double"}

_KINDS = {
    reduce_window_sum_p: ("sum", "SUM", "<", "0"),
    reduce_window_max_p: ("max", "EXTREMUM", ">", "-__builtin_inf()"),
    reduce_window_min_p: ("min", "EXTREMUM", "<", "__builtin_inf()"),
    window_argmax_p: ("argmax", "POSITION", ">", "-__builtin_inf()"),
    window_argmin_p: ("argmin", "POSITION", "<", "__builtin_inf()"),
}
"""Name, kind, comparison (unused by sums) and identity of each primitive."""

_BLOCKS = 16
"""Maximum number of blocks of lines."""

_LARGE, _OVERLAP = 32, 4
"""Largest window, or most reads of an element: for others axis by axis is faster."""

_MOST_SLIDES = 64
"""Maximum number of slides of an operation."""


def _library(kind: str, beats: str, identity: str, real: str) -> Library:
    constants = (
        *(
            ("SUM", 0),
            ("EXTREMUM", 1),
            ("POSITION", 2),
            ("KIND", {"SUM": 0, "EXTREMUM": 1, "POSITION": 2}[kind]),
        ),
        *(("REAL", real), ("RESULT", "int32_t" if kind == "POSITION" else real)),
        *(("BEATS", beats), ("IDENTITY", f"({identity})")),
    )
    return Library(FILE, ("slides", "windows"), "windows", constants, before=((GEMM, ("layout", "gemm")),))


LIBRARIES = {
    f"windows_{name}_{dtype}": _library(kind, beats, identity, real)
    for name, kind, beats, identity in _KINDS.values()
    for dtype, real in _REALS.items()
}
"""Libraries by name."""


def accepts(eqn: Eqn) -> bool:
    """True for an equation of ``FORMS`` that its form computes."""
    x, out, p = eqn.invars[0].aval, eqn.outvars[0].aval, eqn.params
    if x.dtype.name not in _REALS or not x.size or not out.size or not 0 < x.ndim <= 9:
        return False
    window = math.prod(p["window_dimensions"])
    slides = math.prod(
        h // math.gcd(s, h) for s, h in zip(p["window_strides"], p["base_dilation"], strict=True)
    )
    small = window <= _LARGE or out.size * window <= _OVERLAP * x.size
    return window > 0 and slides <= _MOST_SLIDES and small


def _slides(eqn: Eqn, x: Sequence[int]) -> list[list[int]]:
    """Parameters of all slides, given strides of the operand in elements."""
    p, aval, out = eqn.params, eqn.invars[0].aval, eqn.outvars[0].aval
    axes = zip(
        out.shape, p["window_dimensions"], p["window_strides"], [low for low, _ in p["padding"]], p["base_dilation"],
        p["window_dilation"], strict=True,
    )  # fmt: skip
    places, results = strides_of(p["window_dimensions"]), strides_of(out.shape)
    made = []
    for taps in itertools.product(*(phases(*axis) for axis in axes)):
        found = axes_of(taps, aval.shape, x, places, results)
        n_terms = math.prod(d.extent for d in found.terms)
        positions, terms = joined(found.positions), joined(found.terms if n_terms else [])
        lines = math.prod(d.extent for d in positions[:-1])
        numbers = [
            *(1, 0, 0, 0, 1, 0, 0, 1, 0, 0, *found.offsets, 0, 0, 0),
            *(lines, -(-lines // _BLOCKS), n_terms, 1, 1, n_terms, -1, 0),
            *(len(found.padded), len(positions), len(terms)),
        ]
        made.append([*numbers, *itertools.chain(*found.padded, *positions, *terms)])
    return made


def _windows(eqn: Eqn) -> Form:
    x, out = eqn.invars[0].aval, eqn.outvars[0].aval
    holes = math.prod(eqn.params["base_dilation"])
    nanoseconds = 100 + out.size * (1 + math.prod(eqn.params["window_dimensions"]) / holes / 2)

    def strides(models: Sequence[np.ndarray]) -> list[int]:
        slides = _slides(eqn, [s // x.dtype.itemsize for s in models[0].strides])
        return [len(slides), *itertools.chain(*slides)]

    return Form(f"windows_{_KINDS[eqn.prim][0]}_{x.dtype.name}", (_BLOCKS,), (), strides, nanoseconds)


FORMS = dict.fromkeys(_KINDS, _windows)
"""Makers of the forms of primitives."""
