"""Index algebra: integer expressions of addresses, in a normal form.

Kernels, stage 6, below LoopIR. In: loop variables, and integers that the program computes. Out: an ``Index``, a sum of
atoms with integer coefficients; atoms also are quotients and remainders of other indices. Broadcasts, reshapes,
transposes, slices and gathers become such expressions instead of copies. Constructors simplify by the bounds of atoms,
so that equal functions of the loop variables mostly become equal objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UNBOUNDED = 1 << 62


@dataclass(frozen=True, eq=False)
class Range:
    """A loop variable: 0, 1, ..., extent - 1; compared by identity, not by name."""

    name: str
    extent: int

    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest value."""
        return 0, max(self.extent - 1, 0)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Quotient:
    """``floor(index / divisor)`` of a positive divisor."""

    index: Index
    divisor: int

    def bounds(self) -> tuple[int, int]:
        """The bounds of the index, divided."""
        low, high = self.index.bounds()
        return low // self.divisor, high // self.divisor

    def __str__(self) -> str:
        return f"({self.index}) / {self.divisor}"


@dataclass(frozen=True)
class Remainder:
    """``index mod divisor`` of a positive divisor: never negative."""

    index: Index
    divisor: int

    def bounds(self) -> tuple[int, int]:
        """At most ``divisor - 1``, and at most the index itself if that is not negative."""
        low, high = self.index.bounds()
        return 0, min(self.divisor - 1, high) if low >= 0 else self.divisor - 1

    def __str__(self) -> str:
        return f"({self.index}) % {self.divisor}"


@dataclass(frozen=True, eq=False)
class Computed:
    """An integer that the program computes, such as a gather's index: a LoopIR scalar."""

    value: Any
    low: int = -UNBOUNDED
    high: int = UNBOUNDED

    def bounds(self) -> tuple[int, int]:
        """The known bounds of the value."""
        return self.low, self.high

    def substitute(self, replace: Mapping[Range, Index]) -> Computed:
        """The atom with indices substituted; itself if it has none of their variables."""
        if self.value.ranges().isdisjoint(replace):
            return self
        return Computed(self.value.substitute(replace), self.low, self.high)

    def __str__(self) -> str:
        return f"[{self.value}]"


Atom = Range | Quotient | Remainder | Computed


class Index:
    """``constant + sum of coefficient * atom``: atoms distinct, no coefficient 0.

    Attributes:
      terms: from atoms to coefficients; never changed.
      constant: the constant term.
    """

    __slots__ = ("_bounds", "_hash", "constant", "terms")

    def __init__(self, terms: Mapping[Atom, int], constant: int):
        self.terms = terms
        self.constant = constant
        self._hash: int | None = None
        self._bounds: tuple[int, int] | None = None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Index)
            and self.constant == other.constant
            and hash(self) == hash(other)
            and self.terms == other.terms
        )

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.constant, frozenset(self.terms.items())))
        return self._hash

    def text(self, computed: Callable[[Computed], str] = str) -> str:
        """The index as text; ``computed`` formats the integers that the program computes."""
        parts = []
        for atom, c in self.terms.items():
            part = computed(atom) if isinstance(atom, Computed) else str(atom)
            if isinstance(atom, (Quotient, Remainder)):
                part = f"({atom.index.text(computed)}) {'/' if isinstance(atom, Quotient) else '%'} {atom.divisor}"
                part = part if c == 1 else f"({part})"
            parts.append(part if c == 1 else f"{c}*{part}")
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts)

    __str__ = __repr__ = text

    def bounds(self) -> tuple[int, int]:
        """A range that holds every value: exact if atoms vary independently."""
        if self._bounds is None:
            low = high = self.constant
            for atom, c in self.terms.items():
                a, b = atom.bounds()
                low += c * (a if c > 0 else b)
                high += c * (b if c > 0 else a)
            self._bounds = low, high
        return self._bounds

    # -- arithmetic ----------------------------------------------------------------------------

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.terms, self.constant + other) if other else self
        if not other.terms:
            return self + other.constant
        if not self.terms:
            return other + self.constant
        terms = dict(self.terms)
        for atom, c in other.terms.items():
            total = terms.get(atom, 0) + c
            if total:
                terms[atom] = total
            else:
                del terms[atom]
        return _joined(terms, self.constant + other.constant)

    __radd__ = __add__

    def __sub__(self, other: Index | int) -> Index:
        return self + (-other if isinstance(other, int) else other * -1)

    def __mul__(self, factor: int) -> Index:
        if factor == 1:
            return self
        if factor == 0:
            return ZERO
        return Index({a: c * factor for a, c in self.terms.items()}, self.constant * factor)

    __rmul__ = __mul__

    def __floordiv__(self, divisor: int) -> Index:
        """The quotient, rounded down."""
        if divisor == 1:
            return self
        outside, inside = self._split(divisor)
        low, high = inside.bounds()
        if low // divisor == high // divisor:
            return outside + low // divisor
        step, coarse, _ = inside._coarse(divisor)
        if step > 1:
            return outside + coarse // (divisor // step)
        for atom, c in inside.terms.items():
            if c == 1 and isinstance(atom, Quotient):
                # floor((u + floor(x / a)) / b) is floor((a u + x) / (a b))
                rest = inside - of(atom)
                return outside + (rest * atom.divisor + atom.index) // (atom.divisor * divisor)
        atom = inside._single()
        if isinstance(atom, Remainder) and atom.divisor % divisor == 0:
            # (x mod (d q)) / d is (x / d) mod q
            return outside + (atom.index // divisor) % (atom.divisor // divisor)
        return outside + Index({Quotient(inside, divisor): 1}, 0)

    def __mod__(self, divisor: int) -> Index:
        """The remainder, never negative."""
        if divisor == 1:
            return ZERO
        _, inside = self._split(divisor)
        low, high = inside.bounds()
        if low // divisor == high // divisor:
            return inside - low // divisor * divisor
        step, coarse, fine = inside._coarse(divisor)
        if step > 1:
            return coarse % (divisor // step) * step + fine
        atom = inside._single()
        if isinstance(atom, Remainder) and atom.divisor % divisor == 0:
            return atom.index % divisor
        return Index({Remainder(inside, divisor): 1}, 0)

    def _split(self, divisor: int) -> tuple[Index, Index]:
        """``outside, inside``: ``self == divisor * outside + inside``."""
        outside, inside = {}, {}
        for atom, c in self.terms.items():
            q, r = divmod(c, divisor)
            if r > divisor // 2 and r * 2 != divisor and q < 0:
                q, r = q + 1, r - divisor  # a small negative coefficient says more than a large positive one
            if q:
                outside[atom] = q
            if r:
                inside[atom] = r
        q, r = divmod(self.constant, divisor)
        return _joined(outside, q), _joined(inside, r)

    def _coarse(self, divisor: int) -> tuple[int, Index, Index]:
        """``step, coarse, fine``: ``self == step * coarse + fine``, 0 <= fine < step.

        ``step`` divides ``divisor``, so that quotients and remainders only concern ``coarse``. The largest such step; 1
        if there is none.
        """
        for step in sorted({math.gcd(c, divisor) for c in self.terms.values()}, reverse=True):
            if step == 1:
                break
            rest = self.constant % step
            fine = Index({a: c for a, c in self.terms.items() if c % step}, rest)
            low, high = fine.bounds()
            if low >= 0 and high < step:
                terms = {a: c // step for a, c in self.terms.items() if c % step == 0}
                return step, _joined(terms, (self.constant - rest) // step), fine
        return 1, self, ZERO

    def _single(self) -> Atom | None:
        """The atom that the index consists of, if it is a single one."""
        if self.constant or len(self.terms) != 1:
            return None
        ((atom, c),) = self.terms.items()
        return atom if c == 1 else None

    # -- questions -----------------------------------------------------------------------------

    def coefficient(self, variable: Range) -> int | None:
        """The coefficient of ``variable``; None if the index is not linear in it."""
        for atom in self.terms:
            if not isinstance(atom, Range) and variable in ranges_of(atom):
                return None
        return self.terms.get(variable, 0)

    def substitute(
        self, replace: Mapping[Range, Index], computed: Callable[[Computed], Computed] | None = None
    ) -> Index:
        """The index with indices substituted for loop variables.

        ``computed`` substitutes in integers that the program computes, and can keep shared values shared.
        """
        total: Index = constant(self.constant)
        for atom, c in self.terms.items():
            total = total + _substituted(atom, replace, computed or (lambda a: a.substitute(replace))) * c
        return total

    def at(self, values: Mapping[Range, Any], computed: Callable[[Computed], Any] | None = None) -> Any:
        """The index at ``values`` of loop variables: integers, or arrays that broadcast.

        ``computed`` evaluates the integers that the program computes.
        """
        total: Any = self.constant
        for atom, c in self.terms.items():
            if isinstance(atom, Range):
                x = values[atom]
            elif isinstance(atom, Computed):
                assert computed is not None, f"{self} has the computed part {atom}"
                x = computed(atom)
            else:
                x = atom.index.at(values, computed)
                x = x // atom.divisor if isinstance(atom, Quotient) else x % atom.divisor
            total = total + c * x
        return total


def _joined(terms: dict[Atom, int], const: int) -> Index:
    """The index with ``k d (x / d) + k (x mod d)`` simplified to ``k x``."""
    for atom in terms:
        if isinstance(atom, Remainder):
            k = terms[atom]
            quotient = atom.index // atom.divisor
            if _contains(terms, quotient, k * atom.divisor):
                rest = Index({a: c for a, c in terms.items() if a is not atom}, const)
                return rest - quotient * (k * atom.divisor) + atom.index * k
    return Index(terms, const)


def _contains(terms: Mapping[Atom, int], part: Index, factor: int) -> bool:
    """True if ``factor * part``, constants aside, is among the terms."""
    return bool(part.terms) and all(terms.get(a) == c * factor for a, c in part.terms.items())


def _substituted(
    atom: Atom, replace: Mapping[Range, Index], computed: Callable[[Computed], Computed]
) -> Index:
    if isinstance(atom, Range):
        return replace.get(atom) or of(atom)
    if isinstance(atom, Quotient):
        return atom.index.substitute(replace, computed) // atom.divisor
    if isinstance(atom, Remainder):
        return atom.index.substitute(replace, computed) % atom.divisor
    return of(computed(atom))


def constant(value: int) -> Index:
    """A constant index."""
    return Index({}, int(value))


def of(atom: Atom) -> Index:
    """An atom as an index."""
    if isinstance(atom, Range) and atom.extent <= 1:
        return ZERO
    return Index({atom: 1}, 0)


ZERO = constant(0)


def ranges_of(x: Index | Atom) -> frozenset[Range]:
    """The loop variables that ``x`` depends on."""
    if isinstance(x, Index):
        return frozenset().union(*map(ranges_of, x.terms))
    if isinstance(x, Range):
        return frozenset((x,))
    return x.value.ranges() if isinstance(x, Computed) else ranges_of(x.index)


# -- between the axes of an array and positions in its row-major order --------------------------------------------


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def flat(index: Iterable[Index], shape: Sequence[int]) -> Index:
    """The row-major position of an element."""
    total = ZERO
    for i, n, stride in zip(index, shape, strides_of(shape), strict=True):
        if n != 1:
            total = total + i * stride
    return total


def unflat(position: Index, shape: Sequence[int]) -> tuple[Index, ...]:
    """The index along each axis of the element at a row-major position."""
    if 0 in shape:
        return (ZERO,) * len(shape)  # there are no positions
    out = []
    for axis, (n, stride) in enumerate(zip(shape, strides_of(shape), strict=True)):
        if n <= 1:
            out.append(ZERO)
            continue
        i = position // stride
        # the outermost axis that is not of size 1 needs no remainder: positions lie inside the array
        out.append(i if all(m == 1 for m in shape[:axis]) else i % n)
    return tuple(out)
