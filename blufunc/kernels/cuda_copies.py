"""Rows on their way to shared memory, as CUDA C++: not by way of registers, and while something else is done.

Kernels, stage 6, between ``cuda_access.py`` and ``cuda_style.py``. Each thread copies the very vectors that it is going
to read, so that nobody waits for another thread: of the row that several loops read (``cuda_rereads.py``), or of the
next of those that a group takes (``cuda_rows_ahead.py``). The row that several loops read is copied in bulk where the
device can (compute capability 9.0): by one thread, a barrier counting what has come.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from blufunc.kernels import scalars
from blufunc.kernels.cuda_access import WideAccess, plus
from blufunc.kernels.cuda_rereads import RowCopy
from blufunc.kernels.cuda_rows_ahead import RowsAhead
from blufunc.kernels.cuda_schedule import Schedule, steps_of
from blufunc.kernels.cuda_vectors import Vectors
from blufunc.kernels.indices import Index, Range, constant, of
from blufunc.kernels.loopir import Buffer, Kernel, Lanes, Rows, computed_in, post_order, values_of


class RowCopies(WideAccess):
    """Writes copies of rows.

    Attributes:
      schedule, cuts: how points and lanes are dealt out.
      copy, copied_index: the row that several loops read, and the index of its elements.
      ahead, sources: the rows ahead; the buffers of which they are, with the index of their elements and the copies.
      shared_bytes: dynamic shared memory that is taken so far.
      came: the barriers at which the pieces of a row are waited for that is copied in bulk.
    """

    schedule: Schedule
    cuts: dict[Range, Vectors]
    copy: RowCopy | None
    copied_index: Index
    ahead: RowsAhead | None
    sources: Mapping[Buffer, tuple[Index, Buffer]]

    def __init__(self, kernel: Kernel, aliased: Collection[str] = ()):
        super().__init__(kernel, aliased)
        self.shared_bytes = 0
        self.came = ""

    def is_crowded(self, s: Lanes) -> bool:
        """Whether a loop reads several rows more beside one in shared memory, for which a block has all its threads and
        each of them few registers: all of them in flight at once would not fit."""
        if self.copy is None:
            return False
        loads = [v.attr[0] for x in s.body for v in post_order(values_of(x)) if v.op == "load"]
        return len({b for b in loads if b is not self.copy.source}) > 1

    def copy_row(self, cut: Vectors) -> None:
        """Begin to copy the row: in bulk; or vectors in a group each, by the thread that is going to read them."""
        copy = self.copy
        assert copy is not None
        self._make_room(copy.row, 1)
        self.need(computed_in(self.copied_index))
        if copy.bulk:
            self._copy_in_bulk(copy, cut)
        else:
            place = of(copy.slot) * cut.width
            self._copy_vectors(cut, [(copy.row, place, copy.source, self.copied_index)], "LONG", True)

    def _copy_in_bulk(self, copy: RowCopy, cut: Vectors) -> None:
        """Let one thread copy what the block has of the row: a piece for each vector that a thread has."""
        assert cut.element is not None
        made = self.schedule
        self.came = self.fresh(f"{copy.source.name}_came")
        self.line(f"__shared__ uint64_t {self.came}[{steps_of(cut, made.threads)}];")
        begin = self.index(self.copied_index.substitute({cut.vector: constant(0), cut.element: constant(0)}))
        what = f"{cut.width}, {cut.vector.extent}, {made.block}, {made.threads}"
        first = "thread - int(threadIdx.x)" if made.cluster > 1 else "0"
        source = plus(self.named[copy.source], begin)
        self.line(f"bulk_row<{what}>({self.named[copy.row]}, {source}, {first}, {self.came});")

    def wait_for_row(self, cut: Vectors, t: str) -> None:
        """Wait until the ``t``-th vector of each thread has come, in the first loop that reads the row."""
        assert self.copy is not None
        if self.copy.bulk:
            self.line(f"ptx_barrier_wait({self.came} + {t}, 0);")
        else:
            self.line(f"ptx_wait_copies({steps_of(cut, self.threads) - 1} - {t});")

    def slot(self, cut: Vectors, t: str) -> list[Range]:
        """Where the copy of a row has the ``t``-th vector of a thread, if that has a variable of its own here."""
        if self.copy is None or self.finishing or self.copy.cut is not cut or self.copy.slot is cut.vector:
            return []
        place = f"{t} * {self.schedule.block} + int(threadIdx.x)"
        self.line(f"const {self.index_type} {self.variable(self.copy.slot)} = {place};")
        return [self.copy.slot]

    def start_copies(self, s: Rows, goes_on: Callable[[Range], str]) -> None:
        """Let each group of threads begin to copy the first of its rows; ``goes_on`` says whether there is a row."""
        ring, sharing = self.ahead, self.schedule.sharing
        assert ring is not None
        turn = self.variable(ring.turn)
        for _, copies in self.sources.values():
            self._make_room(copies, sharing)
        self.line(f"int {turn} = 0;")
        with self.block(["#pragma unroll", f"for (; {turn} < {ring.depth}; ++{turn})"], [ring.turn]):
            self.copy_next(s, f"{turn} * {sharing}{' + group' if sharing > 1 else ''}", goes_on)
        self.line(f"{turn} = 0;")

    def copy_next(self, s: Rows, number: str, goes_on: Callable[[Range], str]) -> None:
        """Let each thread copy what it is going to read of the row of that number, if there is one, as a group."""
        assert self.ahead is not None
        row, lanes = Range("next", s.range.extent), self.ahead.lanes
        cut = self.cuts[lanes]
        place = of(self.ahead.turn) * lanes.extent + of(cut.vector) * cut.width
        copies = [
            (to, place, source, i.substitute({s.range: of(row)})) for source, (i, to) in self.sources.items()
        ]
        self.line(f"const {self.index_type} {self.variable(row)} = {number};")
        with self.block([f"if ({goes_on(row)})"], [row]):
            self._copy_vectors(cut, copies, "ALONE", False)
        self.line("ptx_commit_copies();")

    def _make_room(self, rows: Buffer, groups: int) -> None:
        """Take shared memory for what each group of threads copies to ``rows``."""
        kind, name = scalars.storage_type(rows.dtype), self.named[rows]
        own = f" + group * {rows.size}" if groups > 1 else ""
        self.line(f"{kind} *{name} = ({kind} *)(shared_memory + {self.shared_bytes}){own};")
        self.shared_bytes += -(-rows.size * rows.dtype.itemsize * groups // 16) * 16

    def _copy_vectors(
        self, cut: Vectors, copies: Sequence[tuple[Buffer, Index, Buffer, Index]], how: str, commit: bool
    ) -> None:
        """Copy this thread's vectors: each is ``(to, place, source, index)``; ``commit``: a group for each."""
        t, q = self.fresh("t"), self.variable(cut.vector)
        loop = f"for (int {t} = 0; {t} < {steps_of(cut, self.threads)}; ++{t})"
        with self.block(["#pragma unroll", loop]):
            self.line(f"const {self.index_type} {q} = {t} * {self.threads} + {self.thread};")
            known = [cut.vector, *self.slot(cut, t)]
            if cut.vector.extent % self.threads:
                with self.block([f"if ({q} < {cut.vector.extent})"], known):
                    self._copy_vector(cut, copies, how)
            else:
                self.scope.ranges |= {*known}
                self._copy_vector(cut, copies, how)
            if commit:
                self.line("ptx_commit_copies();")

    def _copy_vector(
        self, cut: Vectors, copies: Sequence[tuple[Buffer, Index, Buffer, Index]], how: str
    ) -> None:
        assert cut.element is not None
        for to, place, source, index in copies:
            kind, start = scalars.storage_type(source.dtype), self.index(index - of(cut.element))
            target = f"{self.named[to]} + {self.index(place)}"
            self.line(f"vec_copy<{kind}, {cut.width}, {how}>({target}, {self.named[source]} + {start});")
