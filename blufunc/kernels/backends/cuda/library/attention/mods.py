"""Source of ``mask_mod`` and ``score_mod`` for CUDA attention kernels.

Kernels, stage 6, above ``include/attention_mods.cuh``, below ``kernels``. In: the ``mods`` of an equation, jaxprs of
scalars, and the types of their tables. Out: ``Code``, which precedes the body of a kernel: the functions, and
``Pairs``, which the bodies call at the indices of a query and a key.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr, Literal
from blufunc.core.programs.simplify import used
from blufunc.kernels.backends.cuda.render.device_functions import function, plain, why_not
from blufunc.kernels.codegen import scalar_ops, source_files

FILE = "backends/cuda/include/attention_mods.cuh"
TILES = ((FILE, "tiles"),)
"""The kernel that lists the tiles a mask leaves."""

_NUMBERS = ("b", "h", "q", "k")
_TILE = ("b", "h", "q0", "q1", "k0", "k1")


class Code(NamedTuple):
    """Generated code for the mods of an attention kernel.

    Attributes:
      source: constants, functions, and the macros of parameters.
      mods: the equation's mods; None if there are none.
      tables: the types of the arrays that it reads.
      masked: whether there is a mask: a kernel then iterates over tile lists.
      scored: whether scores are modified.
      sloped: whether the derivative of a score is not 1.
      by_batch, by_head: whether the mask depends on the batch entry or the head, which then have tile lists each.
    """

    source: str
    mods: Any = None
    tables: tuple[ShapedArray, ...] = ()
    masked: bool = False
    scored: bool = False
    sloped: bool = False
    by_batch: bool = False
    by_head: bool = False

    @property
    def operands(self) -> tuple[str, ...]:
        """The array parameters that follow a kernel's own."""
        return ("batch_numbers", "head_numbers", "lists", *(f"t{n}" for n in range(len(self.tables))))


@functools.lru_cache(256)
def code_of(mods: Any, tables: tuple[ShapedArray, ...]) -> Code | str:
    """The code of an equation's ``mods``; or why there is none.

    Args:
      mods: has jaxprs ``mask`` and ``score``, or None, and ``slope``. Their parameters are tables, the score, and the
        indices of ``_NUMBERS``; ``mask_tables`` are the tables of the mask. The jaxpr ``bounds``, or None, ends with
        the values of ``_TILE``.
      tables: the types of all tables.
    """
    n = mods.mask_tables
    bodies = {"mask_mod": mods.mask, "score_mod": mods.score, "score_and_slope": mods.slope}
    made = {name: plain(jaxpr) for name, jaxpr in bodies.items() if jaxpr is not None}
    for name, jaxpr in made.items():
        if reason := why_not(jaxpr):
            return f"{'mask_mod' if name == 'mask_mod' else 'score_mod'} has no code in a kernel: {reason}"
    mask, score, slope = (made.get(name) for name in bodies)
    if score is not None and score.outvars[0].aval.dtype != dtypes.float32:
        return f"score_mod computes in {score.outvars[0].aval.dtype}, and scores in a kernel are float32"
    parts, calls = [], dict.fromkeys(("mask", "bounds", "score", "slope"), "")
    place = "b, h, min(q, queries - 1), min(k, keys - 1)"
    if mask is not None:
        parts.append(function(mask, "mask_mod", n, _NUMBERS, ["seen"]))
        calls["mask"] = f"mask_mod(tables, {place}, seen);"
        if mods.bounds is not None and why_not(bounds := plain(mods.bounds)) is None:
            parts.append(function(bounds, "mask_bounds", n, _TILE, ["possible", "certain"]))
            calls["bounds"] = f"mask_bounds(tables, {', '.join(_TILE)}, possible, certain);"
    sloped = False
    if score is not None and slope is not None:
        numbers = ["before", *_NUMBERS]
        parts.append(function(score, "score_mod", len(tables) - n, numbers, ["score"], n))
        calls["score"] = calls["slope"] = f"score_mod(tables, score, {place}, score);"
        sloped = not _is_one(slope.outvars[1])
        if sloped:
            parts.append(function(slope, "score_and_slope", len(tables) - n, numbers, ["score", "slope"], n))
            calls["slope"] = f"score_and_slope(tables, score, {place}, score, slope);"
    types = [scalar_ops.storage_type(a.dtype) for a in tables]
    flags = {
        "MASKED": mask is not None, "SCORED": score is not None, "SLOPED": sloped,
        "BY_BATCH": _asks(mask, "b"), "BY_HEAD": _asks(mask, "h"),
    }  # fmt: skip
    tables_of = " ".join(f"const {t} *t{i};" for i, t in enumerate(types))
    head = source_files.declared(**flags) + f"struct Tables {{ {tables_of} }};\n"
    pairs = source_files.source(
        FILE, "pairs",
        **{name.upper(): call for name, call in calls.items()},
        TABLE_PARAMETERS="".join(f"const {t} *t{i}, " for i, t in enumerate(types)),
        TABLES=", ".join(f"t{i}" for i in range(len(types))),
    )  # fmt: skip
    return Code(head + "".join(parts) + pairs, mods, tables, *flags.values())


def _asks(jaxpr: Jaxpr | None, number: str) -> bool:
    """True if a mask depends on one of its indices."""
    return jaxpr is not None and jaxpr.invars[_NUMBERS.index(number) - len(_NUMBERS)] in used(jaxpr)


def _is_one(atom: Any) -> bool:
    return atom.__class__ is Literal and atom.value == 1


def list_ints(code: Code, batch: int, heads: int, rows: int, columns: int) -> int:
    """Number of int32 in the lists: a length and all column tiles, per row tile."""
    if not code.masked:
        return 0
    return (batch if code.by_batch else 1) * (heads if code.by_head else 1) * rows * (columns + 1)


def lists(code: Code, batch: int, heads: int, rows: int) -> int:
    """Number of lists: per row tile, and per batch entry and head the mask depends on."""
    return list_ints(code, batch, heads, rows, 0)
