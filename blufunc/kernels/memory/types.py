"""Types of the memory plan: steps, values, placements and the plan.

Kernels, stage 7, input and output of ``plan.py``. In: nothing; ``pipeline.py`` makes steps and values. Out: a ``Plan``,
which executors and reports read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Step:
    """One launch or library call.

    Attributes:
      reads: ids of the values read.
      writes: ids of the values written.
      inplace: pairs (written id, read id) that may share storage if the value read dies here.
      scratch: bytes needed during the step only.
      after: indices of steps that must come first without a shared value (effects).
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    inplace: tuple[tuple[int, int], ...] = ()
    scratch: int = 0
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Value:
    """A value that steps read or write; its id is its position in the list of values.

    Attributes:
      nbytes: the size.
      kind: ``"argument"`` (the caller's memory: read only), ``"donated"`` (an argument whose storage is free
        after its last read), ``"output"`` (returned to the caller: in no arena) or ``"temp"``.
      label: its name and the user's line, for reports; default empty.
      alias_of: the value that it is a view of: one storage, alive while either is needed; default None.
      on_host: whether it is in the memory of the host; default False.
    """

    nbytes: int
    kind: str
    label: str = ""
    alias_of: int | None = None
    on_host: bool = False


@dataclass(frozen=True)
class Placement:
    """The memory of a value: ``offset`` bytes into a block.

    Attributes:
      space: ``"arena"``; ``"host"``, the arena in the memory of the host; ``"output"``, an allocation of its own that
        output ``owner`` is returned in; or ``"argument"``, the storage of argument ``owner``.
      owner: the id of that output or argument; -1 in the arenas.
      offset: in bytes. A view has the offset of what it is a view of.
    """

    space: str
    owner: int
    offset: int


@dataclass(frozen=True)
class Plan:
    """A memory plan: the place of every value, and the order of the steps.

    Attributes:
      order: the indices of the steps as they run.
      placement: for each value that some step touches, and each argument, its memory.
      scratch: for each step with scratch, its memory.
      allocations: for each output that takes over no donated argument, the bytes to allocate for it.
      arena_bytes: the size of the one arena.
      arena_bound: peak bytes needed in the arena at once; no packing can be smaller.
      output_bytes: the sum of ``allocations``.
      argument_bytes: bytes of the caller's arguments, donated or not.
      peak_bytes: ``argument_bytes + output_bytes + arena_bytes``.
      peak_step: the index of a step at which ``arena_bound`` is needed; None without steps.
      host_arena_bytes, host_output_bytes, host_argument_bytes: the same in the memory of the host, which is no part of
        the sums above.
    """

    order: tuple[int, ...]
    placement: dict[int, Placement]
    scratch: dict[int, Placement]
    allocations: dict[int, int]
    arena_bytes: int
    arena_bound: int
    output_bytes: int
    argument_bytes: int
    peak_step: int | None
    values: Sequence[Value] = field(repr=False)
    spans: dict[int, tuple[int, int]] = field(repr=False)  # first and last position; views with their root
    host_arena_bytes: int = 0
    host_output_bytes: int = 0
    host_argument_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        """Bytes in the memory of the host while the program runs."""
        return self.host_arena_bytes + self.host_output_bytes + self.host_argument_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes of memory while the program runs: arguments, outputs and the arena."""
        return self.argument_bytes + self.output_bytes + self.arena_bytes

    def live_at(self, step: int) -> list[tuple[int, int]]:
        """The values in memory while a step runs, as (id, bytes), the largest first.

        Views are left out, and so are an operand that the step overwrites and what is in the memory of the host.
        Arguments that are not donated are always included.
        """
        at = self.order.index(step)
        holds: dict[Placement, int] = {}
        for value, (start, end) in self.spans.items():
            if start <= at <= end and not self.values[value].on_host:
                place = self.placement[value]
                if place not in holds or self.spans[holds[place]][0] < start:
                    holds[place] = value
        live = [(value, self.values[value].nbytes) for value in holds.values()]
        return sorted(live, key=lambda pair: (-pair[1], pair[0]))

    def report(self, n: int = 10) -> str:
        """A table of the ``n`` largest values alive at the peak, with their labels."""
        lines = [
            f"planned peak {_size(self.peak_bytes)}: arguments {_size(self.argument_bytes)}, "
            f"outputs {_size(self.output_bytes)}, arena {_size(self.arena_bytes)} "
            f"({_size(self.arena_bound)} of it in use at once)"
        ]
        if self.host_bytes:
            lines.append(
                f"in the memory of the host {_size(self.host_bytes)}: arguments {_size(self.host_argument_bytes)}, "
                f"outputs {_size(self.host_output_bytes)}, arena {_size(self.host_arena_bytes)}"
            )
        if self.peak_step is None:
            return "\n".join(lines)
        live = self.live_at(self.peak_step)
        at = self.order.index(self.peak_step)
        lines.append(f"alive at step {at + 1} of {len(self.order)}, where the arena is fullest:")
        for value, nbytes in live[:n]:
            info = self.values[value]
            lines.append(f"  {_size(nbytes):>10}  {info.kind:<8}  {info.label or f'value {value}'}")
        if len(live) > n:
            rest = sum(nbytes for _, nbytes in live[n:])
            lines.append(f"  {_size(rest):>10}  in {len(live) - n} smaller")
        return "\n".join(lines)


def _size(nbytes: int) -> str:
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{size:.2f} {unit}"
