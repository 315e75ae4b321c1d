"""Asynchronous copies of rows to shared memory, as CUDA C++.

Kernels, stage 6, functions of a ``CudaWriter`` for ``kernel.py``. In: a staged row or a prefetch ring
(``schedule/shared_rows.py``). Out: lines of CUDA. Each thread copies the vectors that it reads, so threads need not
synchronize. From compute capability 9.0, one thread copies a staged row in bulk, and mbarriers count the bytes that
have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blufunc.kernels.backends.cuda.render.writer import CudaWriter, plus
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import StagedRow, Vectors
from blufunc.kernels.codegen import scalar_ops
from blufunc.kernels.loopir.index import Index, Range, constant, of
from blufunc.kernels.loopir.ir import Buffer, Rows, computed_in

Copy = tuple[Buffer, Index, Buffer, Index]
"""``(to, place, source, index)`` of a vector."""


def copy_row(w: CudaWriter, row: StagedRow) -> None:
    """Start the copy of a staged row: in bulk, or one commit group per vector."""
    _declare(w, row.row, 1)
    w.need(computed_in(row.index))
    if row.bulk:
        _copy_in_bulk(w, row)
    else:
        _copy_vectors(
            w, row.cut, [(row.row, of(row.slot) * row.cut.width, row.source, row.index)], "LONG", True
        )


def _copy_in_bulk(w: CudaWriter, row: StagedRow) -> None:
    """Bulk copy of the block's share of a row by one thread, in vector-sized pieces."""
    cut, mapping = row.cut, w.mapping
    assert cut.element is not None
    w.pieces = w.fresh(f"{row.source.name}_came")
    w.line(f"__shared__ uint64_t {w.pieces}[{cut.steps(mapping.threads)}];")
    begin = w.index(row.index.substitute({cut.vector: constant(0), cut.element: constant(0)}))
    sizes = f"{cut.width}, {cut.vector.extent}, {mapping.block}, {mapping.threads}"
    first = "thread - int(threadIdx.x)" if mapping.cluster > 1 else "0"
    source = plus(w.named[row.source], begin)
    w.line(f"bulk_row<{sizes}>({w.named[row.row]}, {source}, {first}, {w.pieces});")


def wait_for_row(w: CudaWriter, row: StagedRow, t: str) -> None:
    """Wait for the ``t``-th vector of each thread, in the first loop over the row."""
    if row.bulk:
        w.line(f"ptx_barrier_wait({w.pieces} + {t}, 0);")
    else:
        w.line(f"ptx_wait_copies({row.cut.steps(w.threads) - 1} - {t});")


def slot(w: CudaWriter, cut: Vectors, t: str) -> list[Range]:
    """Define the slot of a thread's ``t``-th vector, if it has its own variable here."""
    row = w.scheduled.staged
    if row is None or w.finishing or row.cut is not cut or row.slot is cut.vector:
        return []
    w.line(f"const {w.index_type} {w.variable(row.slot)} = {t} * {w.mapping.block} + int(threadIdx.x);")
    return [row.slot]


def start_prefetch(w: CudaWriter, s: Rows, goes_on: Callable[[Range], str]) -> None:
    """Start copying each group's first rows; ``goes_on`` is the bounds check of a row."""
    ring, sharing = w.scheduled.prefetch, w.mapping.sharing
    assert ring is not None
    turn = w.variable(ring.turn)
    for _, copies in ring.sources.values():
        _declare(w, copies, sharing)
    w.line(f"int {turn} = 0;")
    with w.block(["#pragma unroll", f"for (; {turn} < {ring.depth}; ++{turn})"], [ring.turn]):
        prefetch_next(w, s, f"{turn} * {sharing}{' + group' if sharing > 1 else ''}", goes_on)
    w.line(f"{turn} = 0;")


def prefetch_next(w: CudaWriter, s: Rows, row_index: str, goes_on: Callable[[Range], str]) -> None:
    """Copy each thread's vectors of the row at an index, if any, as a commit group."""
    ring = w.scheduled.prefetch
    assert ring is not None
    row, cut = Range("next", s.range.extent), w.cuts[ring.lanes]
    place = of(ring.turn) * ring.lanes.extent + of(cut.vector) * cut.width
    copies = [
        (to, place, source, i.substitute({s.range: of(row)})) for source, (i, to) in ring.sources.items()
    ]
    w.line(f"const {w.index_type} {w.variable(row)} = {row_index};")
    with w.block([f"if ({goes_on(row)})"], [row]):
        _copy_vectors(w, cut, copies, "ALONE", False)
    w.line("ptx_commit_copies();")


def _declare(w: CudaWriter, rows: Buffer, groups: int) -> None:
    """Declare a thread group's part of copies of rows."""
    own = f" + group * {rows.size}" if groups > 1 else ""
    w.shared_pointer(w.named[rows], scalar_ops.storage_type(rows.dtype), w.scheduled.shared[rows], own)


def _copy_vectors(w: CudaWriter, cut: Vectors, copies: Sequence[Copy], how: str, commit: bool) -> None:
    """Copy this thread's vectors; ``commit`` ends a commit group after each."""
    t, q = w.fresh("t"), w.variable(cut.vector)
    loop = f"for (int {t} = 0; {t} < {cut.steps(w.threads)}; ++{t})"
    with w.block(["#pragma unroll", loop]):
        w.line(f"const {w.index_type} {q} = {t} * {w.threads} + {w.thread};")
        known = [cut.vector, *slot(w, cut, t)]
        if cut.vector.extent % w.threads:
            with w.block([f"if ({q} < {cut.vector.extent})"], known):
                _copy_vector(w, cut, copies, how)
        else:
            w.scope.ranges |= {*known}
            _copy_vector(w, cut, copies, how)
        if commit:
            w.line("ptx_commit_copies();")


def _copy_vector(w: CudaWriter, cut: Vectors, copies: Sequence[Copy], how: str) -> None:
    assert cut.element is not None
    for to, place, source, index in copies:
        kind, start = scalar_ops.storage_type(source.dtype), w.index(index - of(cut.element))
        target = f"{w.named[to]} + {w.index(place)}"
        w.line(f"vec_copy<{kind}, {cut.width}, {how}>({target}, {w.named[source]} + {start});")
