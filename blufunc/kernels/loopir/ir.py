"""LoopIR: the IR of a fused kernel, between fusion and C++.

Kernels, stage 6. In: nothing; lowering builds kernels. Out: kernels that ``codegen/c_renderer.py`` prints as CUDA or
host C++ and ``verify.py`` checks under ``config.check``; the tests have an interpreter in NumPy.

A kernel does the same work at every point of a **grid** of independent points. At a point, statements run in order:

    kernel layer_norm(x: f32[12288], scale: f32[768]) -> (y: f32[12288])
      grid r < 16
        lanes k < 768:                      # cooperate: in no order, one value a lane
          mean += x[768*r + k]              # a reduction over the lanes; read after the loop
        lanes k < 768:
          y[768*r + k] = (x[768*r + k] - mean / 768) * scale[k]

A ``Lanes`` loop is parallel: its lanes, threads on a GPU and SIMD lanes on a CPU, communicate only in reductions and
scans. Statements after a scan, in the same loop, read its prefix at their lane. A ``Rows`` loop is sequential. A
``Keep`` is one value per lane that lives as long as the grid point: registers on a GPU, a small array on a CPU. Values
are scalars and form a DAG; a shared value is computed once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as changed
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ops.elementwise import and_p, convert_p, select_p
from blufunc.core.ops.reduce import limit
from blufunc.kernels.loopir.index import Computed, Index, Range, ranges_of

# -- places ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Buffer:
    """An array in memory, as a kernel sees it: ``size`` elements, row-major.

    ``written`` tells outputs from inputs. ``name`` is an identifier of C.
    """

    name: str
    dtype: np.dtype
    size: int
    written: bool = False
    note: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {dtypes.short_name(self.dtype)}[{self.size}]"


@dataclass(frozen=True, eq=False)
class Total:
    """The result of a reduction over the lanes of a loop; ``op`` is in ``REDUCTIONS``.

    ``dtype`` is the accumulator's. An arg-extremum also has ``position``, the dtype of the index that it returns.
    """

    name: str
    dtype: np.dtype
    op: str
    position: np.dtype | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Keep:
    """One value per lane of loops over ``lanes``, private to a grid point.

    With ``op``, it starts as that reduction's identity and ``Accumulate`` updates it; without, ``Set`` writes it.
    """

    name: str
    dtype: np.dtype
    lanes: Range
    op: str | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Prefix:
    """An inclusive scan over the lanes of a loop; ``op`` is a key of ``REDUCTIONS``.

    ``dtype`` is the accumulator's. With ``reverse``, it starts at the last lane.
    """

    name: str
    dtype: np.dtype
    lanes: Range
    op: str
    reverse: bool = False

    def __str__(self) -> str:
        return self.name


Cell = Total | Keep | Prefix
"""Operands of ``read``."""

REDUCTIONS: dict[str, np.ufunc] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "logaddexp": np.logaddexp,
}
ARG_REDUCTIONS = {"argmax": np.argmax, "argmin": np.argmin}


def identity(op: str, dtype: np.dtype) -> Any:
    """The identity of a reduction, as a scalar of ``dtype``."""
    if op in ("max", "min"):
        return limit(dtype, op == "min")
    if op == "logaddexp":
        return dtype.type(-np.inf)
    if op == "and":
        return dtype.type(True) if dtypes.is_bool(dtype) else dtype.type(~dtype.type(0))
    return dtype.type(1 if op == "prod" else 0)


# -- values ----------------------------------------------------------------------------------------


class Value:
    """A scalar: an operation on other scalars. Compared by identity.

    ``op`` is one of

    - ``const``: ``attr`` is a NumPy scalar;
    - ``load``: ``attr`` is ``(buffer, index)``; with an argument, a guard: where it is false the value is 0 and
      memory is not touched;
    - ``number``: ``attr`` is an ``Index``, converted to ``dtype``;
    - ``within``: ``attr`` is ``(index, low, high)``: whether ``low <= index < high``;
    - ``apply``: ``attr`` is ``(primitive, params)``: an elementwise primitive of the core applied to the arguments;
    - ``read``: ``attr`` is a ``Total``, a ``Keep`` or a ``Prefix``;
    - ``fold``: ``attr`` is ``(reduction, range)``: the one argument reduced over a range of its own, in order;
    - ``bits``: ``attr`` is ``(counter, width)``: threefry of a counter under the key words that are the arguments;
    - ``loop``: ``attr`` is a ``Loop``; the arguments are the initial carries, the condition, and the next carries.
      ``branch``: ``attr`` is a ``Branch``; the arguments are a predicate, the operands, and the results of both sides;
    - ``carry``: ``attr`` is ``(name, turn)``: a carry of the loop, or an operand of the branch, with that ``turn``;
    - ``result``: ``attr`` is the position of a result of the loop or branch that is the argument.
    """

    __slots__ = ("_ranges", "args", "attr", "dtype", "op")

    def __init__(self, op: str, args: tuple[Value, ...], attr: Any, dtype: np.dtype):
        self.op = op
        self.args = args
        self.attr = attr
        self.dtype = dtype
        self._ranges: frozenset[Range] | None = None

    def ranges(self) -> frozenset[Range]:
        """The loop variables that the value depends on, other than through reads of cells."""
        if self._ranges is None:
            unknown = lambda v: () if v._ranges is not None else dependencies(v)
            for v in post_order([self], unknown):  # no recursion: graphs may be deep
                if v._ranges is None:
                    v._ranges = v._own_ranges().union(*[a._ranges or () for a in v.args])
                    if v.op in BODIES:
                        v._ranges -= {v.attr[1] if v.op == "fold" else v.attr.turn}
        return self._ranges  # type: ignore[return-value]

    def _own_ranges(self) -> frozenset[Range]:
        if self.op == "load":
            return ranges_of(self.attr[1])
        if self.op in ("within", "bits"):
            return ranges_of(self.attr[0])
        if self.op == "number":
            return ranges_of(self.attr)
        if self.op == "read" and isinstance(self.attr, (Keep, Prefix)):
            return frozenset((self.attr.lanes,))
        return frozenset((self.attr[1],)) if self.op == "carry" else frozenset()

    def indices(self) -> tuple[Index, ...]:
        """The value's own index expressions."""
        if self.op == "load":
            return (self.attr[1],)
        if self.op in ("within", "bits"):
            return (self.attr[0],)
        return (self.attr,) if self.op == "number" else ()

    def substitute(self, replace: Mapping[Range, Index]) -> Value:
        """The value with indices substituted for loop variables."""
        return Substitution(replace)(self)

    def __str__(self) -> str:
        texts: dict[Value, str] = {}
        for v in post_order([self]):
            text = _formatted(v, texts)
            texts[v] = text if v is self or len(text) <= _LONG else "..."
        return texts[self]

    __repr__ = __str__


BODIES = frozenset(("fold", "loop", "branch"))
"""Operations with a body, which is computed inside them, as often as they run it."""


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop of one lane: while a condition holds, all carries are updated at once.

    ``turn`` is the loop variable that values of the body depend on; it is in no index, and its extent estimates the
    iterations. ``most`` bounds them; None if there is no bound.
    """

    carries: tuple[Value, ...]
    turn: Range
    most: int | None

    def inits(self, v: Value) -> tuple[Value, ...]:
        """The initial carries of this loop's value ``v``."""
        return v.args[: len(self.carries)]

    def going(self, v: Value) -> Value:
        """The condition under which another iteration runs."""
        return v.args[len(self.carries)]

    def nexts(self, v: Value) -> tuple[Value, ...]:
        """The carries after an iteration."""
        return v.args[len(self.carries) + 1 :]


@dataclass(frozen=True, eq=False)
class Branch:
    """A choice of two sides, with operands and ``turn`` as in ``Loop``."""

    operands: tuple[Value, ...]
    turn: Range

    def sides(self, v: Value) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
        """The results of this branch's value ``v`` if the predicate holds, and if not."""
        results = v.args[len(self.operands) + 1 :]
        return results[: len(results) // 2], results[len(results) // 2 :]


def outside(v: Value) -> Sequence[Value]:
    """The values computed before ``v``, not in its body."""
    if v.op == "loop":
        return v.attr.inits(v)
    if v.op == "branch":
        return v.args[: len(v.attr.operands) + 1]
    return () if v.op == "fold" else dependencies(v)


def computed_in(index: Index) -> list[Value]:
    """The values that an index is computed from: the loads of gathers."""
    found: list[Value] = []
    pending: list[Any] = list(index.terms)
    while pending:
        atom = pending.pop()
        if hasattr(atom, "value"):
            found.append(atom.value)
        elif hasattr(atom, "index"):
            pending.extend(atom.index.terms)
    return found


def dependencies(value: Value) -> list[Value]:
    """The arguments of a value, and the values that its indices are computed from."""
    out = list(value.args)
    for index in value.indices():
        out.extend(computed_in(index))
    return out


def post_order(
    roots: Sequence[Value], edges: Callable[[Value], Iterable[Value]] = dependencies
) -> list[Value]:
    """The roots and their dependencies, each once, after its own dependencies.

    ``edges`` gives the dependencies of a value.
    """
    done: dict[Value, None] = {}
    stack: list[tuple[Value, bool]] = [(v, False) for v in reversed(roots)]
    while stack:
        v, ready = stack.pop()
        if v in done:
            continue
        if ready:
            done[v] = None
            continue
        stack.append((v, True))
        stack.extend((a, False) for a in reversed(tuple(edges(v))) if a not in done)
    return list(done)


class Substitution:
    """Substitute indices for loop variables in values; shared values stay shared."""

    def __init__(self, replace: Mapping[Range, Index]):
        self.replace = replace
        self.done: dict[Value, Value] = {}
        self._computed: dict[Computed, Computed] = {}

    def __call__(self, value: Value) -> Value:
        for v in post_order([value]):
            if v not in self.done:
                self.done[v] = self._rebuilt(v) if not v.ranges().isdisjoint(self.replace) else v
        return self.done[value]

    def index(self, index: Index) -> Index:
        """The index after substitution."""
        return index.substitute(self.replace, self._of_computed)

    def statement(self, s: Any) -> Any:
        """The statement after substitution; loops keep their ranges."""
        if isinstance(s, Store):
            return Store(s.buffer, self.index(s.index), self(s.value), s.guard and self(s.guard))
        if isinstance(s, Lanes):
            return changed(s, body=tuple(map(self.statement, s.body)))
        if isinstance(s, Rows):
            return Rows(s.range, tuple(map(self.statement, s.body)), self.index(s.index), s.limit)
        if isinstance(s, Reduce):
            return changed(s, value=self(s.value), position=s.position and self.index(s.position))
        if isinstance(s, Scan):
            return Scan(self.cell(s.prefix), self(s.value))
        return type(s)(self.cell(s.keep), self(s.value))

    def cell(self, cell: Any) -> Any:
        """The keep or prefix after substitution: the same, unless a subclass changes it."""
        return cell

    def _of_computed(self, atom: Computed) -> Computed:
        found = self._computed.get(atom)
        if found is None:
            value = self(atom.value)
            found = atom if value is atom.value else Computed(value, atom.low, atom.high)
            self._computed[atom] = found
        return found

    def _rebuilt(self, v: Value) -> Value:
        attr = v.attr
        if v.op == "load":
            attr = (attr[0], self.index(attr[1]))
        elif v.op in ("within", "bits"):
            attr = (self.index(attr[0]), *attr[1:])
        elif v.op == "number":
            attr = self.index(attr)
        return Value(v.op, tuple(self.done.get(a, a) for a in v.args), attr, v.dtype)


class Replaced(Substitution):
    """Substitute indices for loop variables, and values for the keys of ``done``."""

    def __call__(self, value: Value) -> Value:
        for v in post_order([value]):
            if v not in self.done:
                moved = not v.ranges().isdisjoint(self.replace)
                same = all(self.done[a] is a for a in v.args)
                self.done[v] = v if same and not moved else self._rebuilt(v)
        return self.done[value]


class Replacement(Substitution):
    """Replace each value for which ``rule`` gives another; indices stay the same."""

    def __init__(self, rule: Callable[[Value], Value | None]):
        super().__init__({})
        self.rule = rule

    def __call__(self, value: Value) -> Value:
        for v in post_order([value]):
            if v not in self.done:
                args = tuple(self.done[a] for a in v.args)
                same = all(a is b for a, b in zip(args, v.args, strict=True))
                self.done[v] = self.rule(v) or (v if same else Value(v.op, args, v.attr, v.dtype))
        return self.done[value]

    def index(self, index: Index) -> Index:
        return index


def loads_replaced(s: Lanes, found: Mapping[tuple[Buffer, Index], Value]) -> Lanes:
    """The loop with other values in place of loads without guards."""
    return Replacement(lambda v: found.get(v.attr) if v.op == "load" and not v.args else None).statement(s)


def reads_replaced(found: Mapping[Cell, Value]) -> Replacement:
    """A replacement of reads of totals, keeps and prefixes."""
    return Replacement(lambda v: found.get(v.attr) if v.op == "read" else None)


# -- builders --------------------------------------------------------------------------------------

KEY = np.dtype(np.uint64)
"""The dtype in which kernels hold keys."""


def held_as(dtype: np.dtype) -> np.dtype:
    """The dtype in which kernels hold values of ``dtype``: uint64 for keys."""
    return KEY if dtypes.is_key(dtype) else dtype


def wide_for(dtype: np.dtype, op: str) -> np.dtype:
    """The dtype in which a reduction accumulates."""
    if op in ("sum", "prod", "logaddexp") and dtype.itemsize <= 2 and dtypes.is_floating(dtype):
        return np.dtype(np.float32)
    return dtype


def const(value: Any, dtype: np.dtype) -> Value:
    """A constant, as kernels hold it."""
    array = np.asarray(value, dtype)
    held = array.view(KEY) if dtypes.is_key(dtype) else array
    return Value("const", (), held[()], held.dtype)


def load(buffer: Buffer, index: Index, guard: Value | None = None) -> Value:
    """An element of a buffer; 0 where a guard is false."""
    return Value("load", () if guard is None else (guard,), (buffer, index), buffer.dtype)


def number(index: Index, dtype: np.dtype) -> Value:
    """An index as a scalar of ``dtype``."""
    return Value("number", (), index, dtype)


def within(index: Index, low: int, high: int) -> Value | None:
    """The condition ``low <= index < high``; None if it always holds."""
    least, most = index.bounds()
    if low <= least and most < high:
        return None
    return Value("within", (), (index, low, high), dtypes.bool_)


def apply(prim: Any, args: Sequence[Value], params: Mapping[str, Any], dtype: np.dtype) -> Value:
    """An elementwise primitive of the core applied to scalars."""
    return Value("apply", tuple(args), (prim, dict(params)), dtype)


def both(a: Value | None, b: Value | None) -> Value | None:
    """The conjunction of two conditions; None is true."""
    if a is None or b is None:
        return b if a is None else a
    return apply(and_p, (a, b), {}, dtypes.bool_)


def choose(condition: Value, yes: Value, no: Value) -> Value:
    """A select: ``yes`` where a condition holds, else ``no``."""
    return apply(select_p, (condition, yes, no), {}, yes.dtype)


def or_identity(condition: Value | None, value: Value, op: str) -> Value:
    """A value where a condition holds, elsewhere the identity of a reduction."""
    if condition is None:
        return value
    return choose(condition, value, const(identity(op, value.dtype), value.dtype))


def converted(value: Value, dtype: np.dtype) -> Value:
    """A value converted to another dtype."""
    return value if value.dtype == dtype else apply(convert_p, (value,), {"dtype": dtype}, dtype)


def read(cell: Cell) -> Value:
    """The value of a total after its loop, of a keep, or of a prefix after its scan."""
    return Value("read", (), cell, (cell.position if isinstance(cell, Total) else None) or cell.dtype)


def fold(op: str, over: Range, body: Value) -> Value:
    """A sequential reduction within one lane."""
    return Value("fold", (body,), (op, over), body.dtype)


def carried(name: str, turn: Range, dtype: np.dtype) -> Value:
    """A carry of the loop, or an operand of the branch, with that ``turn``."""
    return Value("carry", (), (name, turn), dtype)


def loop(attr: Loop, inits: Sequence[Value], going: Value, nexts: Sequence[Value]) -> list[Value]:
    """The results of a loop: its carries at the end."""
    whole = Value("loop", (*inits, going, *nexts), attr, dtypes.bool_)
    return [Value("result", (whole,), n, c.dtype) for n, c in enumerate(attr.carries)]


def branch(
    attr: Branch, predicate: Value, operands: Sequence[Value], yes: Sequence[Value], no: Sequence[Value]
) -> list[Value]:
    """The results of a branch: ``yes`` if the predicate holds, else ``no``."""
    whole = Value("branch", (predicate, *operands, *yes, *no), attr, dtypes.bool_)
    return [Value("result", (whole,), n, v.dtype) for n, v in enumerate(yes)]


# -- statements ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Store:
    """``buffer[index] = value``, where the guard holds."""

    buffer: Buffer
    index: Index
    value: Value
    guard: Value | None = None


@dataclass(frozen=True)
class Reduce:
    """In lanes: a total accumulates a value, an arg-extremum with its ``position``."""

    total: Total
    value: Value
    position: Index | None = None

    @property
    def suffix(self) -> str:
        """The end of the statement's text: further effects of a backend's own reduction."""
        return ""


@dataclass(frozen=True)
class Scan:
    """In lanes: a prefix accumulates a value. A loop's scans go in one direction."""

    prefix: Prefix
    value: Value


@dataclass(frozen=True)
class Set:
    """In lanes: ``keep[lane] = value``."""

    keep: Keep
    value: Value


@dataclass(frozen=True)
class Accumulate:
    """In lanes: ``keep[lane] = op(keep[lane], value)``."""

    keep: Keep
    value: Value


@dataclass(frozen=True)
class Lanes:
    """A parallel loop over lanes."""

    range: Range
    body: tuple[Any, ...]  # Store, Reduce, Scan, Set, Accumulate
    note: str = ""

    @property
    def head(self) -> str:
        """The first line of the loop's text."""
        return f"lanes {self.range} < {self.range.extent}:"


@dataclass(frozen=True)
class Rows:
    """A sequential loop over ``range``, while ``index`` is below ``limit``."""

    range: Range
    body: tuple[Any, ...]  # Lanes, Store
    index: Index
    limit: int


Statement = Store | Reduce | Scan | Set | Accumulate | Lanes | Rows


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel: its buffers, its grid and its statements.

    Attributes:
      name: an identifier of C.
      buffers: its parameters, in order; an output may alias an input.
      grid: the ranges of the grid, outermost first; the last one varies fastest in memory.
      body: the statements of a point.
      finish: the statements after all points, which may read what the points stored; default none.
      over: ranges of the grid: the finish runs at each of their points, when all grid points that share it are done;
        default none, to run it once.
      notes: comments: the equations it came from and the user's lines.
    """

    name: str
    buffers: tuple[Buffer, ...]
    grid: tuple[Range, ...]
    body: tuple[Any, ...]
    notes: tuple[str, ...] = field(default=())
    finish: tuple[Any, ...] = field(default=())
    over: tuple[Range, ...] = field(default=())
    memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def memoised(self, key: Any, make: Callable[[], Any]) -> Any:
        """``make()``, computed once per ``key``; identical regions share a kernel."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def statements(self) -> Iterator[Statement]:
        """All statements, outer ones first."""
        pending = list(reversed((*self.body, *self.finish)))
        while pending:
            s = pending.pop()
            yield s
            pending.extend(reversed(getattr(s, "body", ())))

    def roots(self) -> list[Value]:
        """The values that statements use."""
        out: list[Value] = []
        for s in self.statements():
            out.extend(values_of(s))
        return out

    @property
    def points(self) -> int:
        """The number of grid points."""
        return math.prod(r.extent for r in self.grid)

    @property
    def ends(self) -> int:
        """The number of times that the finish runs."""
        return math.prod(r.extent for r in self.over) if self.finish else 0

    @property
    def key(self) -> tuple:
        """The key of equal kernels: the text, and dtypes and primitives it leaves out."""
        return self.memoised("key", self._key)

    def _key(self) -> tuple:
        values = post_order(self.roots())
        return str(self), *[(v.dtype, v.attr[0] if v.op == "apply" else None) for v in values]

    def __str__(self) -> str:
        return to_text(self)


def values_of(statement: Statement) -> list[Value]:
    """The values that a statement itself uses, those of its index first."""
    if isinstance(statement, Store):
        guard = [] if statement.guard is None else [statement.guard]
        return [*computed_in(statement.index), *guard, statement.value]
    if isinstance(statement, Rows):
        return computed_in(statement.index)
    if isinstance(statement, Reduce) and statement.position is not None:
        return [*computed_in(statement.position), statement.value]
    return [] if isinstance(statement, Lanes) else [statement.value]


# -- text ------------------------------------------------------------------------------------------

_LONG = 72  # characters of an expression, before its operands get names


def to_text(kernel: Kernel) -> str:
    """The kernel as text; shared and long values get a line of their own.

    The text is complete: kernels of equal text and dtypes are equal.
    """
    ins = ", ".join(str(b) for b in kernel.buffers if not b.written)
    outs = ", ".join(str(b) for b in kernel.buffers if b.written)
    lines = [f"kernel {kernel.name}({ins}) -> ({outs})"]
    lines += [f"  # {note}" for note in kernel.notes]
    lines.append("  grid " + (", ".join(f"{r} < {r.extent}" for r in kernel.grid) or "once"))
    writer = _Writer(kernel)
    writer.block(kernel.body, "    ", {})
    if kernel.finish:
        each = ", ".join(f"{r} < {r.extent}" for r in kernel.over)
        writer.lines.append(f"  finish each {each}" if each else "  finish")
        writer.block(kernel.finish, "    ", {})
    return "\n".join(lines + writer.lines) + "\n"


class _Writer:
    """Write statements as lines; names are visible in their loop and in nested ones."""

    def __init__(self, kernel: Kernel):
        roots = kernel.roots()
        self.uses = Counter(roots)
        for v in post_order(roots):
            self.uses.update(v.args)
        self.lines: list[str] = []
        self.named = 0

    def block(self, body: Sequence[Any], indent: str, texts: dict[Value, str]) -> None:
        """Write the statements of a loop; ``texts`` are the names and inlined expressions."""
        for s in body:
            self.define(values_of(s), indent, texts)
            self.lines.append(indent + statement_text(s, texts))
            if isinstance(s, (Lanes, Rows)):
                self.block(s.body, indent + "  ", dict(texts))

    def define(self, roots: Sequence[Value], indent: str, texts: dict[Value, str]) -> None:
        """Write lines that name the dependencies of the roots."""
        for v in post_order(roots):
            if v in texts:
                continue
            text = texts[v] = _formatted(v, texts)
            shared = self.uses[v] > 1 and v.op not in ("const", "read", "number", "carry")
            if shared or (len(text) > _LONG and v not in roots):
                texts[v] = f"v{self.named}"
                self.named += 1
                self.lines.append(f"{indent}{texts[v]} = {text}")


def statement_text(s: Statement, texts: Mapping[Value, str] | None = None) -> str:
    """One line: the statement, or the head of a loop; ``texts`` are names for values."""
    shown = lambda v: (texts or {}).get(v) or str(v)
    computed = lambda atom: f"[{shown(atom.value)}]"
    if isinstance(s, Lanes):
        return f"{s.head}{'  # ' + s.note if s.note else ''}"
    if isinstance(s, Rows):
        return f"rows {s.range} < {s.range.extent} while {s.index.text(computed)} < {s.limit}:"
    if isinstance(s, Store):
        guard = f" if {shown(s.guard)}" if s.guard is not None else ""
        return f"{s.buffer.name}[{s.index.text(computed)}] = {shown(s.value)}{guard}"
    if isinstance(s, Reduce):
        at = f" at {_cast(s.total.position)}({s.position.text(computed)})" if s.position is not None else ""
        return f"{s.total}{_other(s.total, s.value)} {s.total.op}= {shown(s.value)}{at}{s.suffix}"
    if isinstance(s, Scan):
        way = " from the end" if s.prefix.reverse else ""
        prefix = f"{s.prefix}[{s.prefix.lanes}]{_other(s.prefix, s.value)}"
        return f"{prefix} scans {s.prefix.op} of {shown(s.value)}{way}"
    sign = "=" if isinstance(s, Set) else f"{s.keep.op}="
    return f"{s.keep}[{s.keep.lanes}]{_other(s.keep, s.value)} {sign} {shown(s.value)}"


def _cast(dtype: np.dtype | None) -> str:
    return "" if dtype is None else dtypes.short_name(dtype)


def _other(cell: Cell, value: Value) -> str:
    """The dtype of an accumulator, if it is not the value's."""
    return "" if cell.dtype == value.dtype else f": {dtypes.short_name(cell.dtype)}"


def _formatted(v: Value, texts: Mapping[Value, str]) -> str:
    """The value as an operation on the texts of its arguments."""
    args = [texts[a] for a in v.args]
    computed = lambda atom: f"[{texts[atom.value]}]"
    from_ = ", ".join(args)
    if v.op == "load":
        return f"{v.attr[0].name}[{v.attr[1].text(computed)}]" + (f" if {from_}" if args else "")
    if v.op == "number":
        return f"{dtypes.short_name(v.dtype)}({v.attr.text(computed)})"
    if v.op == "within":
        index, low, high = v.attr
        return f"({low} <= {index.text(computed)} < {high})"
    if v.op == "fold":
        return f"{v.attr[0]}({v.attr[1]} < {v.attr[1].extent}: {from_})"
    if v.op == "bits":
        return f"bits{v.attr[1]}({from_}; {v.attr[0].text(computed)})"
    if v.op == "carry":
        return f"{v.attr[1]}.{v.attr[0]}"
    if v.op == "result":
        return f"{from_}.{v.attr}"
    if v.op in ("loop", "branch"):
        return _with_body(v, texts)
    if v.op != "apply":
        return str(v.attr)
    prim, params = v.attr
    shown = "".join(f", {k}={x}" for k, x in params.items())
    return f"{prim.name}({from_}{shown})"


def _with_body(v: Value, texts: Mapping[Value, str]) -> str:
    """A loop or a branch."""
    shown = lambda values: ", ".join(texts.get(x) or str(x) for x in values)
    attr = v.attr
    if v.op == "loop":
        most = "" if attr.most is None else f", at most {attr.most} times"
        head = f"{shown(attr.carries)} = {shown(attr.inits(v))} while {shown([attr.going(v)])}{most}"
        return f"loop({head}: {shown(attr.nexts(v))})"
    yes, no = attr.sides(v)
    operands = f"{shown(attr.operands)} = {shown(outside(v)[1:])}: " if attr.operands else ""
    return f"branch({operands}{shown(yes)} if {texts[v.args[0]]} else {shown(no)})"
