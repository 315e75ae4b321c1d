"""The precision of each primitive under ``autocast``: the table.

Transforms, stage 2, read by ``autocast.py``. In: a primitive. Out: its ``autocast_class``, one of these:

- ``low``: contractions. Operands are cast to the low dtype; they accumulate in float32, and the result is rounded to
  the low dtype, unless the program sets ``preferred_element_type``. Attention and the tanh form of GELU, outside the
  table, do the same: each is one operation, computed in float32 inside.
- ``widest``: cheap elementwise operations, comparisons, selects, and movement: low if all operands are, by type
  promotion. One float32 operand makes the operation float32; scalars follow the arrays. So a residual stream that
  starts in float32 stays there, and blocks add their low results to it.
- ``float32``: functions that amplify rounding errors, and sums: exponentials, logarithms, powers, roots, reductions,
  cumulative sums and scatter-adds. Differences, too, since their leading digits cancel: softmax, cross entropy,
  variance and normalisation are therefore float32 throughout. Low operands are cast back.
- ``exact``: solvers, whose bodies stay unchanged: rounded matmuls would keep them from converging.

All other primitives (linear algebra, FFTs, sorts, special functions, random bits, callbacks, users' primitives) run in
the dtypes of the traced program. Only values that are float32 in the program take part: float64, and values that the
program itself made half precision, stay as they are.

The float32 class follows common practice in mixed-precision training (Micikevicius et al., 2018).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core import ops
from blufunc.core.ir import dtypes, source
from blufunc.core.primitives.kinds import AUTOCAST
from blufunc.core.primitives.primitive import Primitive, named
from blufunc.transforms import checkpointing, custom_rules


def table() -> dict[str, tuple[str, ...]]:
    """The names of the primitives of each class: a view of ``autocast_class``."""
    for package in (ops, checkpointing, custom_rules):  # whose primitives are otherwise imported on first use
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    classes: dict[str, list[str]] = {cls: [] for cls in AUTOCAST}
    for name, prim in sorted(named.items()):
        if prim.autocast_class is not None:
            classes[prim.autocast_class].append(name)
    return {cls: tuple(names) for cls, names in classes.items()}


@dataclass(frozen=True)
class Policy:
    """The table with a user's changes, for one low dtype; hashable, as a memo key."""

    dtype: np.dtype
    changes: tuple[tuple[str, str], ...] = ()

    def class_of(self, prim: Primitive) -> str | None:
        """The class of a primitive; None: as traced."""
        return dict(self.changes).get(prim.name) or prim.autocast_class

    def table(self) -> dict[str, tuple[str, ...]]:
        """The table of this policy."""
        changed, plain = dict(self.changes), table()
        own = {cls: [n for n in names if n not in changed] for cls, names in plain.items()}
        return {
            cls: tuple(sorted((*names, *[n for n in changed if changed[n] == cls])))
            for cls, names in own.items()
        }


def make_policy(dtype: Any, float32: Any = (), low: Any = ()) -> Policy:
    """Make a policy from a user's options.

    Args:
      dtype: bfloat16 or float16.
      float32: primitives, or names of primitives in the table, to run in float32.
      low: likewise, to run in the low dtype.
    Raises:
      DtypeError, ArgumentError, ValueRangeError: invalid or contradictory options.
    """
    try:
        dtype = dtypes.as_dtype(dtype)
    except errors.DtypeError as e:
        raise source.located(e) from None
    if dtype not in (dtypes.bfloat16, dtypes.float16):
        raise errors.DtypeError(
            f"autocast to {dtypes.short_name(dtype)}: the low dtype is bfloat16 or float16.",
            where=source.here(),
            fix="nn.low_precision.float8(autocast(f)) for matmuls in fp8"
            if dtype.itemsize == 1
            else "autocast(f, dtype='bfloat16')",
        )
    wide, lowered = _names(float32, "float32"), _names(low, "low")
    if both := sorted(wide & lowered):
        raise errors.ValueRangeError(
            f"autocast: {', '.join(both)} in float32= and in low=.", where=source.here(), fix="name it once"
        )
    return Policy(dtype, (*((n, "float32") for n in sorted(wide)), *((n, "low") for n in sorted(lowered))))


def _names(prims: Any, option: str) -> set[str]:
    if isinstance(prims, (str, Primitive)):
        prims = (prims,)
    if not isinstance(prims, Iterable):
        raise errors.ArgumentError(
            f"autocast: {option}= lists primitives, not {prims!r:.60}.",
            where=source.here(),
            fix=f"{option}=('add', lax.tanh_p)",
        )
    found = set()
    for p in prims:
        if not isinstance(p, (str, Primitive)):
            raise errors.ArgumentError(
                f"autocast: {option}= lists primitives or their names, not {p!r:.60}.",
                where=source.here(),
                fix=f"{option}=('add', lax.tanh_p)",
            )
        if isinstance(p, str) and not any(p in names for names in table().values()):
            raise errors.ValueRangeError(
                f"autocast: {option}= names {p!r}, which is not in the table.",
                where=source.here(),
                fix="print(bf.autocast_table()) shows the names; pass any other primitive itself: lax.erfc_p",
            )
        found.add(p if isinstance(p, str) else p.name)
    return found


_MEANINGS = {
    "low": "cast to the low dtype, summed in float32",
    "widest": "low if all operands are",
    "float32": "cast back to float32",
    "exact": "as traced, bodies included",
}


def autocast_table(dtype: Any = "bfloat16", *, float32: Any = (), low: Any = ()) -> str:
    """A printable table of the precision of each primitive under ``autocast``."""
    policy = make_policy(dtype, float32, low)
    lines = []
    for cls, names in policy.table().items():
        lines.append(f"{cls} ({_MEANINGS[cls]}):")
        row = "   "
        for name in names:
            if len(row) + 1 + len(name) > 100:
                lines.append(row)
                row = "   "
            row += f" {name}"
        lines.append(row)
    lines.append("all other primitives: the dtypes that the program was traced with")
    return "\n".join(lines)
