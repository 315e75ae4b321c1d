"""What the steps of a plan need of each other, and the storage behind each value.

Kernels, stage 7, below ``plan.py``. In: steps and values. Out: dependencies, views followed to the storage that they
are of, and which results may be written over which operands; a list that is no program is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

from blufunc import errors
from blufunc.kernels.memory.types import Step, Value


class Graph:
    """What the steps need of each other, and the storage behind each value.

    Attributes:
      root: for each value, the one that owns its storage: itself, unless it is a view.
      kind: for each root, what its storage is; a temporary with a view that is returned is an output.
      read_as: for each step, the views through which it reads each root.
      before: for each step, the steps that must come before it.
      temps: for each step, the temporary roots that it touches.
      touched_by: for each temporary root, the steps that touch it.
      overwrites: for each step, pairs of roots (written, read) of one size that may be in one place.
    """

    def __init__(self, steps: Sequence[Step], values: Sequence[Value]):
        self.steps, self.values = steps, values
        self.root = roots_of(values)
        self.kind = [value.kind for value in values]
        self.returned: dict[int, int] = {}  # root -> the output that it is
        for i, value in enumerate(values):
            if value.kind == "output":
                self.returned.setdefault(self.root[i], i)
        for r in self.returned:
            if self.kind[r] == "temp":
                self.kind[r] = "output"
        self.read_as: list[dict[int, set[int]]] = []
        for step in steps:
            views: dict[int, set[int]] = {}
            for v in step.reads:
                views.setdefault(self.root[v], set()).add(v)
            self.read_as.append(views)
        self.before = self._dependencies()
        self.temps = [
            tuple({r for v in (*s.reads, *s.writes) if self.kind[r := self.root[v]] == "temp"}) for s in steps
        ]
        self.touched_by: dict[int, list[int]] = {}
        for i, roots in enumerate(self.temps):
            for r in roots:
                self.touched_by.setdefault(r, []).append(i)
        self.overwrites = [
            [(self.root[w], self.root[v]) for w, v in step.inplace if self.may_overwrite(i, w, v)]
            for i, step in enumerate(steps)
        ]

    def _dependencies(self) -> list[set[int]]:
        writers: dict[int, list[int]] = {}
        readers: dict[int, list[int]] = {}
        before: list[set[int]] = []
        for i, step in enumerate(self.steps):
            needs = set(step.after)
            if not all(0 <= j < i for j in needs):
                reject(f"step {i} must come after steps {step.after}, which are not all before it")
            if not {w for w, _ in step.inplace} <= {*step.writes} or not {v for _, v in step.inplace} <= {
                *step.reads
            }:
                reject(f"step {i} has in-place pairs of what it does not write and read: {step.inplace}")
            for v in step.reads:
                r = self.root[v]
                if r in writers:
                    needs.update(writers[r])
                elif not self.is_argument(r):
                    reject(f"step {i} reads {self.name(v)}, which no step before it writes")
                readers.setdefault(r, []).append(i)
            for v in step.writes:
                r = self.root[v]
                if self.kind[r] == "argument":
                    reject(f"step {i} writes {self.name(v)}, which is the caller's")
                # A buffer that is written piece by piece, through views: keep what came before it.
                needs.update(writers.get(r, ()))
                needs.update(readers.get(r, ()))
                writers.setdefault(r, []).append(i)
            needs.discard(i)
            before.append(needs)
        for r, v in self.returned.items():
            if r not in writers and not self.is_argument(r):
                reject(f"{self.name(v)} is an output, and no step writes it")
        return before

    def updates_last(self) -> list[set[int]]:
        """``before``, and each step that updates a donated argument waits for those that read it first.

        Run too early, an update could not be made in place. These edges follow the given order, so there
        is no cycle.
        """
        readers: dict[int, set[int]] = {}
        before = []
        for i, step in enumerate(self.steps):
            needs = set(self.before[i])
            for _, v in step.inplace:
                if self.kind[self.root[v]] == "donated":
                    needs |= readers.get(self.root[v], set())
            for v in step.reads:
                if self.kind[self.root[v]] == "donated":
                    readers.setdefault(self.root[v], set()).add(i)
            before.append(needs)
        return before

    def is_argument(self, root: int) -> bool:
        return self.kind[root] in ("argument", "donated")

    def name(self, value: int) -> str:
        label = self.values[value].label
        return f"value {value} ({label})" if label else f"value {value}"

    def spans(self, order: Iterable[int]) -> dict[int, tuple[int, int]]:
        """The first and the last position at which the storage of each root is needed.

        Arguments are there from position -1; what the caller keeps is there up to the number of steps.
        """
        start: dict[int, int] = {
            r: -1 for r in range(len(self.values)) if self.is_argument(r) and self.owns(r)
        }
        end = dict(start)
        for at, i in enumerate(order):
            step = self.steps[i]
            for v in (*step.reads, *step.writes):
                r = self.root[v]
                start.setdefault(r, at)
                end[r] = at
        for r in start:
            if self.kind[r] == "argument" or r in self.returned:
                end[r] = len(self.steps)
        return {r: (start[r], end[r]) for r in start}

    def owns(self, value: int) -> bool:
        return self.root[value] == value

    def may_overwrite(self, i: int, written: int, read: int) -> bool:
        """Whether a step's pair is of one size, and harmless: it reads no other view of the operand meanwhile."""
        if self.values[self.root[written]].nbytes != self.values[self.root[read]].nbytes:
            return False
        views = self.read_as[i][self.root[read]]
        return len(views) == 1 or all((written, v) in self.steps[i].inplace for v in views)


def roots_of(values: Sequence[Value]) -> list[int]:
    roots = []
    for i, value in enumerate(values):
        root, hops = i, 0
        while (up := values[root].alias_of) is not None:
            root, hops = up, hops + 1
            if hops > len(values):
                reject(f"value {i} is a view of itself")
        if value.nbytes > values[root].nbytes:
            reject(f"value {i} has {value.nbytes} bytes, and is a view of {values[root].nbytes}")
        roots.append(root)
    return roots


def reject(what: str) -> NoReturn:
    raise errors.ValueRangeError(f"plan: {what}", why="the list of steps and values is not a program")
