"""``mask_mod`` and ``score_mod`` in the texts of attention on a CUDA device.

Kernels, stage 6, below ``kernels``. In: the ``mods`` of an equation, jaxprs of single numbers, and the types of
their tables. Out: ``Code``, what stands in a kernel's text before its body: the functions, and ``Pairs``, which the
bodies call at the numbers of a query and a key; and ``TILES``, a kernel that finds out which tiles the mask leaves.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr, Literal
from blufunc.core.programs.simplify import used
from blufunc.kernels.backends.cuda.render.device_functions import function, plain, why_not
from blufunc.kernels.codegen import scalar_ops

_NUMBERS = ("b", "h", "q", "k")
_TILE = ("b", "h", "q0", "q1", "k0", "k1")


class Code(NamedTuple):
    """The text that a kernel has for its mods.

    Attributes:
      text: constants, functions, and the macros of parameters.
      mods: what it is the code of; None: of none.
      tables: the types of the arrays that it reads.
      masked: whether there is a mask: a kernel then goes through lists of tiles.
      scored: whether scores are changed.
      sloped: whether a derivative of a score is not 1.
      by_batch, by_head: whether the mask asks for the batch entry, or for the head: there are as many lists.
    """

    text: str
    mods: Any = None
    tables: tuple[ShapedArray, ...] = ()
    masked: bool = False
    scored: bool = False
    sloped: bool = False
    by_batch: bool = False
    by_head: bool = False

    @property
    def operands(self) -> tuple[str, ...]:
        """The parameters of a kernel, behind its own, that are arrays."""
        return ("batch_numbers", "head_numbers", "lists", *(f"t{n}" for n in range(len(self.tables))))


NONE = """
constexpr bool MASKED = false, SCORED = false, SLOPED = false, BY_BATCH = false, BY_HEAD = false;
struct Pairs {
  inline bool seen(int, int) const { return true; }
  inline float score(float score, int, int) const { return score; }
  inline float score(float score, int, int, float &) const { return score; }
};
#define EXTRAS
#define LISTS nullptr
#define PAIRS_OF(batch, head) Pairs{}
"""
"""What stands in the place of a ``Code``'s text where there are no mods."""

_PAIRS = """
struct Pairs {{  // those of one batch entry and head; beyond the last query or key it is that one that is asked for
  Tables tables;
  int b, h, queries, keys;
  inline bool seen(int q, int k) const {{
    bool seen = true;
    {mask}
    return seen;
  }}
  // in a whole tile: 1: a pair is seen, 2: one is not, 3: both, or it is to be asked for each
  inline unsigned seen(int q0, int q1, int k0, int k1) const {{
    bool possible = true, certain = false;
    {bounds}
    return (possible ? 1 : 0) | (certain ? 0 : 2);
  }}
  inline float score(float score, int q, int k) const {{
    {score}
    return score;
  }}
  inline float score(float score, int q, int k, float &slope) const {{
    {slope}
    return score;
  }}
}};
#define EXTRAS const int *batch_numbers, const int *head_numbers, const int *lists, {parameters}
#define LISTS lists
#define PAIRS_OF(batch, head) Pairs{{{{{tables}}}, batch_numbers[batch], head_numbers[head], p.queries, p.keys}}
"""


@functools.lru_cache(256)
def code_of(mods: Any, tables: tuple[ShapedArray, ...]) -> Code | str:
    """The code of an equation's ``mods``; or why there is none.

    Args:
      mods: has jaxprs ``mask`` and ``score``, or None, and ``slope``, with the numbers of ``_NUMBERS`` as their last
        parameters; before these the score, and before it the tables, of which ``mask_tables`` are the mask's. In
        ``bounds``, or None, ``_TILE`` are the last numbers.
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
    head = f"\nconstexpr bool {', '.join(f'{k} = {str(v).lower()}' for k, v in flags.items())};\n"
    head += f"struct Tables {{ {' '.join(f'const {t} *t{i};' for i, t in enumerate(types))} }};\n"
    pairs = _PAIRS.format(
        **calls,
        parameters="".join(f"const {t} *t{i}, " for i, t in enumerate(types)),
        tables=", ".join(f"t{i}" for i in range(len(types))),
    )
    text = head + "".join(parts) + pairs
    return Code(text, mods, tables, *flags.values())


def _asks(jaxpr: Jaxpr | None, number: str) -> bool:
    """Whether a mask depends on one of its numbers."""
    return jaxpr is not None and jaxpr.invars[_NUMBERS.index(number) - len(_NUMBERS)] in used(jaxpr)


def _is_one(atom: Any) -> bool:
    return atom.__class__ is Literal and atom.value == 1


def list_ints(code: Code, batch: int, heads: int, rows: int, columns: int) -> int:
    """How many integers lists have: of each tile of rows its length, and room for all tiles of columns."""
    if not code.masked:
        return 0
    return (batch if code.by_batch else 1) * (heads if code.by_head else 1) * rows * (columns + 1)


def lists(code: Code, batch: int, heads: int, rows: int) -> int:
    """How many lists there are: for each tile of rows one, of each batch entry and head that the mask asks for."""
    return list_ints(code, batch, heads, rows, 0)


TILES = r"""
// For each tile of rows, the tiles of the other side in which a pair is seen; see Visits.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_tiles(EXTRAS const Problem p) {
  const int all_rows = OF_KEYS ? p.keys : p.queries, all_columns = OF_KEYS ? p.queries : p.keys;
  const int tiles = (all_rows + ROWS - 1) / ROWS, columns = (all_columns + COLUMNS - 1) / COLUMNS;
  const int plane = blockIdx.x / tiles, first = blockIdx.x % tiles * ROWS, heads = BY_HEAD ? p.heads : 1;
  const Pairs pairs = PAIRS_OF(plane / heads, plane % heads);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int *list = (int *)LISTS + (long long)blockIdx.x * (columns + 1), length = 0;
  __shared__ unsigned found[THREADS / 32];
  for (int begin = 0; begin < columns; begin += THREADS / 32) {
    const int first_column = (begin + warp) * COLUMNS, end = min(first + ROWS, all_rows) - 1;
    const int end_column = min(first_column + COLUMNS, all_columns) - 1;
    const int q0 = OF_KEYS ? first_column : first, q1 = OF_KEYS ? end_column : end;
    const int k0 = OF_KEYS ? first : first_column, k1 = OF_KEYS ? end : end_column;
    unsigned state = first_column < all_columns ? pairs.seen(q0, q1, k0, k1) : 0;
    if (CAUSAL && state) state = k0 > q1 ? 2 : k1 > q0 ? state | 2 : state;
    const bool known = state != 3;
    if (!known) state = 0;
    for (int j = lane; j < COLUMNS && !known; j += 32)
      for (int i = 0; i < ROWS; ++i) {
        const int row = first + i, column = first_column + j;
        const int query = OF_KEYS ? column : row, key = OF_KEYS ? row : column;
        if (query < p.queries && key < p.keys)
          state |= pairs.seen(query, key) && (!CAUSAL || key <= query) ? 1 : 2;
      }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) state |= __shfl_xor_sync(0xffffffffu, state, mask);
    if (lane == 0) found[warp] = state;
    __syncthreads();
    if (threadIdx.x == 0)
      for (int w = 0; w < THREADS / 32; ++w)
        if (found[w] & 1) list[++length] = (begin + w) * 2 + found[w] / 2;
    __syncthreads();
  }
  if (threadIdx.x == 0) list[0] = length;
}
"""
