"""The source of kernels of pointwise recurrences.

Kernels, stage 6, above ``include/recurrence.cuh``. In: an equation of ``transforms/control_flow/recurrence.py``, which
results are read, and how columns are cut. Out: CUDA C++. A matrix of an affine recurrence has variables for the
entries that may differ from 0; those that only products have belong to the elements of chunks alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from blufunc.core.ir.jaxpr import Eqn
from blufunc.kernels.backends.cuda.render import device_functions
from blufunc.kernels.codegen import scalar_ops, source_files
from blufunc.kernels.codegen.source_files import DEVICE

FILE = "backends/cuda/include/recurrence.cuh"

THREADS = 128
_DEPTH = 8
_COLUMNS = 3 << 13
"""Columns that keep enough loads in flight, with one thread each."""
_THREADS_OF_CHUNKS = 1 << 17
"""Threads where columns are cut in chunks, about what all SMs hold."""
_MOST_CHUNKS = 256
"""Chunks of a column: a thread goes through those before its own."""


class Cut(NamedTuple):
    """How the columns of a recurrence are cut.

    Attributes:
      outer, steps, inner: elements before, along and after the axis.
      chunks: of a column.
      length: steps of a chunk.
    """

    outer: int
    steps: int
    inner: int
    chunks: int
    length: int

    @property
    def columns(self) -> int:
        """Number of columns."""
        return self.outer * self.inner

    @property
    def blocks(self) -> int:
        """Blocks of a launch."""
        return -(-self.columns * self.chunks // THREADS)


def cut_of(eqn: Eqn) -> Cut:
    """The cut of an equation: columns are whole if they are many."""
    shape, axis = eqn.outvars[0].aval.shape, eqn.params["axis"]
    outer, n, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    chunks = 1
    if outer * inner < _COLUMNS:
        chunks = max(1, min(_MOST_CHUNKS, n // (4 * _DEPTH), _THREADS_OF_CHUNKS // (outer * inner)))
    length = -(-n // (chunks * _DEPTH)) * _DEPTH
    return Cut(outer, n, inner, -(-n // length), length)


def element_bytes(eqn: Eqn) -> int:
    """Upper bound on the bytes of an element of a chunk."""
    return 8 * (len(_names(eqn)[0]))


def _names(eqn: Eqn) -> tuple[list[str], list[str]]:
    """The scalars of an element, and of a state."""
    k = len(eqn.outvars)
    states = [f"s{r}" for r in range(k)]
    if eqn.prim.name == "recurrence":
        return states, states
    from_products = device_closure(eqn.params["pattern"])
    return [*(f"a{r}_{s}" for r, s in from_products), *states], states


def device_closure(pattern: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The entries of powers of a matrix with a pattern, its own first."""
    found = list(pattern)
    while True:
        more = {(r, t) for r, s in found for u, t in found if s == u}.difference(found)
        if not more:
            return found
        found += sorted(more)


def source(eqn: Eqn, read: Sequence[bool]) -> str:
    """CUDA C++ of an equation; ``read`` tells which results are."""
    cut = cut_of(eqn)
    sizes = source_files.declared(
        STEPS=cut.steps, INNER=cut.inner, CHUNKS=cut.chunks, LENGTH=cut.length, DEPTH=_DEPTH, THREADS=THREADS,
        REVERSE=eqn.params["reverse"],
    )  # fmt: skip
    sizes += f"constexpr long long COLUMNS = {cut.columns};\n"
    parts = [sizes, source_files.source(FILE, "loads"), _types(eqn, read), _functions(eqn)]
    parts += [source_files.source(FILE, "kernels", "entries"), _entries(eqn, read, cut)]
    return DEVICE.with_prelude("".join(parts))


def _operands(eqn: Eqn) -> list[tuple[str, np.dtype, bool]]:
    """Name, dtype, and whether it is late, of each operand."""
    dtypes_ = [a.aval.dtype for a in eqn.invars]
    if eqn.prim.name == "recurrence":
        return [(f"s{r}", d, False) for r, d in enumerate(dtypes_)]
    pattern = eqn.params["pattern"]
    names = [f"a{r}_{s}" for r, s in pattern] + [f"s{r}" for r in range(len(eqn.outvars))]
    late = [eqn.params["late"]] * len(pattern) + [False] * len(eqn.outvars)
    return list(zip(names, dtypes_, late, strict=True))


def _types(eqn: Eqn, read: Sequence[bool]) -> str:
    """The structs of elements and states, and those that load and store them."""
    operands = _operands(eqn)
    wide = scalar_ops.register_type
    elements, states = _names(eqn)
    given = {n: wide(d) for n, d, _ in operands}
    of_states = {s: v.aval.dtype for s, v in zip(states, eqn.outvars, strict=True)}
    first = wide(eqn.outvars[0].aval.dtype)
    kept = [(s, d) for (s, d), r in zip(of_states.items(), read, strict=True) if r]
    fields = " ".join(f"{given.get(n, first)} {n};" for n in elements)
    loads = "\n".join(
        f"    load_steps<{str(late).lower()}>(o.{n}, at, step, count, {n});" for n, _, late in operands
    )
    taken = "\n".join(f"    e.{n} = {scalar_ops.loaded(f'{n}[d]', d)};" for n, d, _ in operands)
    rest = "\n".join(f"    e.{n} = 0;" for n in elements if n not in given)
    return f"""
struct Element {{ {fields} }};
struct State {{ {" ".join(f"{wide(d)} {s};" for s, d in of_states.items())} }};
struct Operands {{ {" ".join(f"const {scalar_ops.storage_type(d)} *{n};" for n, d, _ in operands)} }};
struct Results {{ {" ".join(f"{scalar_ops.storage_type(d)} *{s};" for s, d in kept)} }};
struct Loaded {{
  {" ".join(f"{scalar_ops.storage_type(d)} {n}[DEPTH];" for n, d, _ in operands)}
  __device__ void load(const Operands &o, long long at, int step, int count) {{
{loads}
  }}
  __device__ Element at(int d) const {{
    Element e;
{taken}
{rest}
    return e;
  }}
}};
struct Stored {{
  {" ".join(f"{scalar_ops.storage_type(d)} {s}[DEPTH];" for s, d in kept)}
  __device__ void set(int d, const State &y) {{
    {" ".join(f"{s}[d] = {scalar_ops.stored(f'y.{s}', d)};" for s, d in kept)}
  }}
  __device__ void store(const Results &r, long long at, int count) {{
    {" ".join(f"store_steps(r.{s}, at, count, {s});" for s, d in kept)}
  }}
}};
"""


def _functions(eqn: Eqn) -> str:
    """``combined``, ``advanced`` and ``started``."""
    elements, states = _names(eqn)
    started = "\n".join(f"  y.{s} = e.{s};" for s in states)
    start = f"__device__ State started(const Element &e) {{\n  State y;\n{started}\n  return y;\n}}\n"
    if eqn.prim.name == "recurrence":
        numbers = [*(f"x{r}" for r in range(len(states))), *(f"y{r}" for r in range(len(states)))]
        results = [f"z{r}" for r in range(len(states))]
        body = device_functions.function(
            device_functions.plain(eqn.params["combine"]), "pair", 0, numbers, results, indices=False
        )
        call = lambda a, b, c: ", ".join(
            [*(f"{a}.{s}" for s in states), *(f"{b}.{s}" for s in states), *(f"{c}.{s}" for s in states)]
        )
        return f"""
struct Tables {{}};
{body}
__device__ Element combined(const Element &a, const Element &b) {{
  Element c;
  pair(Tables(), {call("a", "b", "c")});
  return c;
}}
__device__ State advanced(const State &y, const Element &e) {{
  State z;
  pair(Tables(), {call("y", "e", "z")});
  return z;
}}
{start}"""
    pattern = eqn.params["pattern"]
    every, k = device_closure(pattern), range(len(states))
    dots = lambda r, a, y: "".join(f" + {a}.a{r}_{s} * {y}.s{s}" for s in k if (r, s) in every)
    matrix = []
    for r, t in every:
        terms = [f"b.a{r}_{s} * a.a{s}_{t}" for s in k if (r, s) in every and (s, t) in every]
        matrix.append(f"  c.a{r}_{t} = {' + '.join(terms) or '0'};")
    offsets = [f"  c.s{r} = b.s{r}{dots(r, 'b', 'a')};" for r in k]
    # the elements of chunks have all entries; those of single steps only the entries of the pattern
    advanced = [f"  z.s{r} = e.s{r}{dots(r, 'e', 'y')};" for r in k]
    join = "\n".join
    return f"""
__device__ Element combined(const Element &a, const Element &b) {{
  Element c;
{join(matrix)}
{join(offsets)}
  return c;
}}
__device__ State advanced(const State &y, const Element &e) {{
  State z;
{join(advanced)}
  return z;
}}
{start}"""


def _entries(eqn: Eqn, read: Sequence[bool], cut: Cut) -> str:
    """The kernels: of chunks if there are several, and of states."""
    operands = _operands(eqn)
    kept = [(f"s{r}", v.aval.dtype) for r, v in enumerate(eqn.outvars) if read[r]]
    given = ", ".join(f"const {scalar_ops.storage_type(d)} *{n}" for n, d, _ in operands)
    made = ", ".join(f"{scalar_ops.storage_type(d)} *y_{n}" for n, d in kept)
    held = f"const Operands operands{{{', '.join(n for n, _, _ in operands)}}};"
    head = 'extern "C" __global__ void __launch_bounds__(THREADS)'
    first = f"{head} reduce_chunks({given}, Element *chunks) {{\n  {held}\n  reduce(operands, chunks);\n}}\n"
    last = f"""{head} scan_chunks({given}, const Element *chunks, {made}) {{
  {held}
  const Results results{{{", ".join(f"y_{n}" for n, _ in kept)}}};
  scan(operands, chunks, results);
}}
"""
    return (first if cut.chunks > 1 else "") + last


def why_not(eqn: Eqn) -> str | None:
    """Why a recurrence has no kernel; None if it has one."""
    cut = cut_of(eqn)
    if cut.columns * cut.chunks < _LEAST_THREADS and cut.length > _LONGEST:
        return f"{cut.columns} columns of {cut.steps} steps leave most of the GPU idle"
    if eqn.prim.name == "recurrence":
        return device_functions.why_not(device_functions.plain(eqn.params["combine"]))
    return None


_LEAST_THREADS, _LONGEST = 1 << 11, 4096
"""Fewer threads with longer chunks are slower than a scan of logarithmic depth."""
