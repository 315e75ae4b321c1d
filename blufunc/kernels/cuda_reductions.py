"""Reductions over lanes as CUDA C++: each thread takes up its own lanes, then threads put together what they have.

Kernels, stage 6, below ``cuda_style.py``. Threads of a warp meet through shuffles, warps through shared memory, blocks
of a cluster in each other's memory, always in the order of their numbers. Two totals of one kind are exchanged at once;
so are a maximum with the sum under it (``cuda_row_passes.py``), and a sum with the squares about its mean
(``cuda_moments.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from blufunc.kernels import scalars
from blufunc.kernels.cstyle import accumulator, is_arg, reducing, update
from blufunc.kernels.cuda_access import WideAccess
from blufunc.kernels.cuda_moments import Spread, sums_of_spreads
from blufunc.kernels.cuda_narrow import is_widened
from blufunc.kernels.cuda_row_passes import OnlineSum
from blufunc.kernels.cuda_scans import REDUCERS
from blufunc.kernels.cuda_schedule import Schedule, steps_of
from blufunc.kernels.cuda_vectors import Vectors
from blufunc.kernels.loopir import Kernel, Lanes, Reduce, Total, identity
from blufunc.kernels.scalars import bare, grouped

_WARP = 32


class ThreadReductions(WideAccess):
    """Writes reductions, and the exchanges between threads that they need.

    Attributes:
      schedule: how points and lanes are dealt out.
      repeated: whether a block reduction comes again without another one between.
      exchanges: those among the blocks of a cluster, so far.
    """

    schedule: Schedule

    def __init__(self, kernel: Kernel, aliased: Collection[str] = ()):
        super().__init__(kernel, aliased)
        self.repeated, self.exchanges = False, 0
        self._own_means: dict[Total, str] = {}
        pairs = sums_of_spreads(kernel)
        self._with_spreads = {*pairs, *pairs.values()}

    def declare_totals(self, s: Lanes, cut: Vectors) -> None:
        """Begin the totals of a loop over lanes that have been cut."""
        for total in (*_totals(s), *_masses(s).values()):
            self._declare(total)
        for r in s.body:
            if isinstance(r, Spread):
                self._declare_own_mean(r, cut)

    def exchange_totals(self, s: Lanes, cut: Vectors) -> None:
        """Let every thread of the group have the totals of a loop that each has run for its own lanes."""
        masses = _masses(s)
        owns = {top: self.fresh(f"{self.named[top]}_own") for top in masses}
        for top, own in owns.items():
            self.line(f"const {scalars.register_type(top.dtype)} {own} = {self.named[top]};")
        self._reduce_threads([t for t in _totals(s) if t not in self._with_spreads], masses)
        for r in s.body:
            if isinstance(r, Spread):
                self._reduce_moments(r, cut)
        for top, mass in masses.items():
            name = self.named[mass]
            self.line(f"{name} = under_top({name}, {owns[top]}, {self.named[top]});")
        self._reduce_threads(list(masses.values()), masses.values())
        if self._in_cluster():
            for top, mass in masses.items():
                self._gather_online(top, mass)

    def _declare(self, total: Total) -> None:
        dtype = accumulator(total.dtype)
        name, kind = self.name(total, total.name), scalars.register_type(dtype)
        if is_arg(total):
            self.line(f"Arg<{kind}, {self.index_type}> {name} = {{{kind}(0), -1}};")
        else:
            self.line(f"{kind} {name} = {scalars.literal(identity(total.op, total.dtype), total.dtype)};")

    def _in_cluster(self) -> bool:
        """Whether the threads of a group are several blocks."""
        return self.schedule.cluster > 1 and not self.finishing

    def _gather_online(self, top: Total, mass: Total) -> None:
        """Let the cluster have the maximum and the sum under it of all its blocks."""
        found = self._sent(self.named[top], f"vec<{scalars.register_type(top.dtype)}, 2>")
        names = f"{self.named[top]}, {self.named[mass]}"
        self.line(f"cluster_under_top<{self.exchanges - 1}>({names}, {found}, met);")

    def _sent(self, name: str, kind: str) -> str:
        """Memory for what the blocks of a cluster send to each other: before the first time, all have begun."""
        if not self.exchanges:
            self.line("ptx_cluster_wait();")
        self.exchanges += 1
        found = self.fresh(f"{name}_found")
        self.line(f"__shared__ Sent<{kind}> {found}[{self.schedule.cluster}];")
        return found

    def _reduce_threads(self, totals: Sequence[Total], apart: Collection[Total] = ()) -> None:
        """Let every thread of the group have the totals of all.

        Of those ``apart``, the threads of a cluster have the totals of their block.
        """
        kinds: dict[tuple[str, str, bool], list[Total]] = {}
        for total in totals:
            kind = scalars.register_type(accumulator(total.dtype))
            kind = f"Arg<{kind}, {self.index_type}>" if is_arg(total) else kind
            gathered = self._in_cluster() and total not in apart
            kinds.setdefault((REDUCERS[total.op], kind, gathered), []).append(total)
        for (op, kind, gathered), some in kinds.items():
            names = [self.named[t] for t in some]
            if self.threads > _WARP:
                for first in range(0, len(names), 2):
                    self._block_reduce(op, kind, names[first : first + 2], gathered)
            elif self.threads > 1:
                for name in names:
                    self.line(f"{name} = warp_reduce<{op}, {self.threads}>({name});")
        for total in totals:
            if scalars.is_small_float(total.dtype) and not is_arg(total):
                name = self.named[total]
                self.line(f"{name} = round_to<{scalars.storage_type(total.dtype)}>({name});")

    def _block_reduce(self, op: str, kind: str, names: Sequence[str], gathered: bool) -> None:
        """One exchange, of one total or of two, in a block or among all of a cluster."""
        memory, made, reused = self.fresh(f"{names[0]}_shared"), self.schedule, self.repeated
        threads = made.block if made.cluster > 1 else self.threads
        mine = names[0]
        if len(names) > 1:
            mine, op, kind = self.fresh(f"{names[0]}_both"), f"Each<{op}>", f"vec<{kind}, 2>"
        self.line(f"__shared__ {kind} {memory}[{threads // _WARP}];")
        if len(names) > 1:
            self.line(f"{kind} {mine} = {{{{{', '.join(names)}}}}};")
        if gathered:
            found = self._sent(names[0], kind)
            text = f"cluster_reduce<{op}, {threads}, {self.exchanges - 1}>({mine}, {memory}, {found}, met)"
        else:
            text = f"block_reduce<{op}, {threads}, {'true' if reused else 'false'}>({mine}, {memory})"
        self.line(f"{mine} = {text};")
        for i, name in enumerate(names if len(names) > 1 else ()):
            self.line(f"{name} = {mine}.x[{i}];")

    def _lanes_of_thread(self, cut: Vectors) -> int:
        """How many lanes each thread has."""
        return steps_of(cut, self.threads) * cut.width

    def _declare_own_mean(self, s: Spread, cut: Vectors) -> None:
        """The mean of the values of this thread."""
        assert s.sum is not None
        kind = scalars.register_type(s.sum.dtype)
        own = self._own_means[s.total] = self.fresh(f"{self.named[s.sum]}_own")
        part = scalars.literal(s.sum.dtype.type(1 / self._lanes_of_thread(cut)), s.sum.dtype)
        self.line(f"const {kind} {own} = {self.named[s.sum]} * {part};")

    def _reduce_moments(self, s: Spread, cut: Vectors) -> None:
        """Let every thread of the group have a sum and a spread of all: one exchange."""
        assert s.sum is not None
        names, n = f"{self.named[s.sum]}, {self.named[s.total]}", self._lanes_of_thread(cut)
        if self.threads <= _WARP:
            self.line(f"warp_moments<{n}, {self.threads}>({names});")
            return
        memory = self.fresh(f"{self.named[s.sum]}_shared")
        kind = scalars.register_type(s.sum.dtype)
        self.line(f"__shared__ vec<{kind}, 2> {memory}[{self.threads // _WARP}];")
        self.line(f"block_moments<{n}, {self.threads}>({names}, {memory});")

    def reduce(self, s: Reduce) -> None:
        name, value = self.named[s.total], self.value(s.value)
        if isinstance(s, OnlineSum):
            self._reduce_online(s, value)
            return
        if isinstance(s, Spread):
            apart = self.temporary()
            kind = scalars.register_type(s.total.dtype)
            self.line(f"const {kind} {apart} = {grouped(value)} - {self._own_means[s.total]};")
            self.line(f"{name} += {apart} * {apart};")
            return
        if not is_arg(s.total):
            text = reducing(s.total.op, accumulator(s.total.dtype), name, value, s.value.dtype)
            self.line(update(name, bare(text)))
            return
        assert s.position is not None
        kind = scalars.register_type(accumulator(s.total.dtype))
        here = f"Arg<{kind}, {self.index_type}>{{{bare(value)}, {self.index(s.position)}}}"
        self.line(f"{name} = {REDUCERS[s.total.op]}::combine({name}, {here});")

    def _reduce_online(self, s: OnlineSum, value: str) -> None:
        """Put a value beside those of the vector's other elements, which are taken up together."""
        assert s.mass is not None
        take_up = "take_up<true>" if is_widened(s.value) else "take_up"
        kind, both = scalars.register_type(s.value.dtype), f"{self.named[s.total]}, {self.named[s.mass]}"
        values = self.fresh(f"{self.named[s.total]}_of")
        if self.inner is None or self.inner.element is None:
            self.line(f"const {kind} {values}[1] = {{{bare(value)}}};")
            self.line(f"{take_up}({both}, {values});")
            return
        self.scopes[-2].lines.append(f"{kind} {values}[{self.inner.width}];")
        self.line(f"{values}[{self.variable(self.inner.element)}] = {bare(value)};")
        self.after.append(f"{take_up}({both}, {values});")

    def read_total(self, total: Total) -> str:
        if total.position is None:
            return self.named[total]
        return f"{scalars.register_type(total.position)}({self.named[total]}.index)"


def _totals(s: Lanes) -> list[Total]:
    """What a loop reduces, but for the sums of its ``OnlineSum``s."""
    return list(dict.fromkeys(r.total for r in s.body if isinstance(r, Reduce)))


def _masses(s: Lanes) -> dict[Total, Total]:
    """Of the ``OnlineSum``s of a loop, the maxima and the sums under them."""
    return {r.total: r.mass for r in s.body if isinstance(r, OnlineSum) and r.mass is not None}
