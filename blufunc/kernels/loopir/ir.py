"""LoopIR: the small language in which a fused kernel is written before it becomes C++.

Kernels, stage 6. In: nothing; lowering builds kernels of it. Out: ``codegen/c_renderer.py`` prints them as CUDA or host
C++, ``verify.py`` checks them under ``config.check``; the tests have an interpreter in NumPy.

A kernel does the same work at every point of a **grid** of independent points. At a point, statements run in order:

    kernel layer_norm(x: f32[12288], scale: f32[768]) -> (y: f32[12288])
      grid r < 16
        lanes k < 768:                      # cooperate: in no order, one value a lane
          mean += x[768*r + k]              # a reduction over the lanes; read after the loop
        lanes k < 768:
          y[768*r + k] = (x[768*r + k] - mean / 768) * scale[k]

A ``Lanes`` loop has no order, and its lanes meet only in reductions and scans: on a GPU they are threads, on a CPU SIMD
lanes. What a scan has found up to a lane, the statements after it read in the same loop. A ``Rows`` loop is sequential.
A ``Keep`` is one value per lane that lives as long as the grid point: registers on a GPU, a small array on a CPU.
Values are scalars and form a graph without cycles; what is shared is computed once.
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
from blufunc.core.ops.reduce import limit
from blufunc.kernels.loopir.index import Computed, Index, Range, ranges_of

# -- places ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Buffer:
    """An array in memory, as a kernel sees it: ``size`` elements in row-major order.

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
    """The result of a reduction over the lanes of one loop; ``op`` is a key of ``REDUCTIONS``.

    ``dtype`` is that of the accumulator. An arg-extremum also has the ``position`` dtype of the index it yields.
    """

    name: str
    dtype: np.dtype
    op: str
    position: np.dtype | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Keep:
    """One value for each lane of loops over ``lanes``, private to a grid point.

    With ``op``, it starts as that reduction's identity and grows by ``Accumulate``; without, it is written by ``Set``.
    """

    name: str
    dtype: np.dtype
    lanes: Range
    op: str | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Prefix:
    """At each lane of one loop, the lanes up to it combined, itself included; ``op`` is a key of ``REDUCTIONS``.

    ``dtype`` is that of the accumulator. With ``reverse``, "up to it" is from the last lane on.
    """

    name: str
    dtype: np.dtype
    lanes: Range
    op: str
    reverse: bool = False

    def __str__(self) -> str:
        return self.name


Cell = Total | Keep | Prefix
"""What ``read`` reads."""

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
    """The value that a reduction starts from, as a scalar of ``dtype``."""
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
    - ``number``: ``attr`` is an ``Index``, as a number of ``dtype``;
    - ``within``: ``attr`` is ``(index, low, high)``: whether ``low <= index < high``;
    - ``apply``: ``attr`` is ``(primitive, params)``: an elementwise primitive of the core applied to the arguments;
    - ``read``: ``attr`` is a ``Total``, a ``Keep`` or a ``Prefix``;
    - ``fold``: ``attr`` is ``(reduction, range)``: the one argument reduced over a range of its own, in order;
    - ``bits``: ``attr`` is ``(counter, width)``: threefry of a counter under the key words that are the arguments;
    - ``loop``: ``attr`` is a ``Loop``; the arguments are what its carries begin with, whether it goes on, and what
      the carries become. ``branch``: ``attr`` is a ``Branch``; the arguments are a predicate, the operands, and the
      results of the one and of the other side;
    - ``carry``: ``attr`` is ``(name, turn)``: a carry of the loop, or an operand of the branch, with that ``turn``;
    - ``result``: ``attr`` is a number: that result of the loop or branch that is the argument.
    """

    __slots__ = ("_ranges", "args", "attr", "dtype", "op")

    def __init__(self, op: str, args: tuple[Value, ...], attr: Any, dtype: np.dtype):
        self.op = op
        self.args = args
        self.attr = attr
        self.dtype = dtype
        self._ranges: frozenset[Range] | None = None

    def ranges(self) -> frozenset[Range]:
        """The loop variables that the value depends on, other than by what it reads from totals and keeps."""
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
        """The index expressions that the value itself holds."""
        if self.op == "load":
            return (self.attr[1],)
        if self.op in ("within", "bits"):
            return (self.attr[0],)
        return (self.attr,) if self.op == "number" else ()

    def substitute(self, replace: Mapping[Range, Index]) -> Value:
        """The value with other indices in the place of loop variables."""
        return Substitution(replace)(self)

    def __str__(self) -> str:
        texts: dict[Value, str] = {}
        for v in post_order([self]):
            text = _formatted(v, texts)
            texts[v] = text if v is self or len(text) <= _LONG else "..."
        return texts[self]

    __repr__ = __str__


BODIES = frozenset(("fold", "loop", "branch"))
"""The operations that compute a body: what it is made of is computed in it, as often as it takes."""


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop of one lane: for as long as a condition of its carries holds, they become something else, all at once.

    ``turn`` is what the values of its body depend on, and no index; its extent is a guess of how often the body is
    computed. ``most`` bounds the turns, None where nothing does.
    """

    carries: tuple[Value, ...]
    turn: Range
    most: int | None

    def inits(self, v: Value) -> tuple[Value, ...]:
        """What the carries begin with, of a value ``v`` that is this loop."""
        return v.args[: len(self.carries)]

    def going(self, v: Value) -> Value:
        """Whether there is another turn."""
        return v.args[len(self.carries)]

    def nexts(self, v: Value) -> tuple[Value, ...]:
        """What the carries become."""
        return v.args[len(self.carries) + 1 :]


@dataclass(frozen=True, eq=False)
class Branch:
    """One of two sides is computed. ``operands`` stand for the operands in both; ``turn`` is as that of a loop."""

    operands: tuple[Value, ...]
    turn: Range

    def sides(self, v: Value) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
        """The results where the predicate holds, and where it does not, of a value ``v`` that is this branch."""
        results = v.args[len(self.operands) + 1 :]
        return results[: len(results) // 2], results[len(results) // 2 :]


def outside(v: Value) -> Sequence[Value]:
    """What must be there before ``v`` is computed; what has a body computes that itself."""
    if v.op == "loop":
        return v.attr.inits(v)
    if v.op == "branch":
        return v.args[: len(v.attr.operands) + 1]
    return () if v.op == "fold" else dependencies(v)


def computed_in(index: Index) -> list[Value]:
    """The values that an index was computed from: those that gathers read."""
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
    """The values that must be there before ``value``: its arguments, and what its indices are computed from."""
    out = list(value.args)
    for index in value.indices():
        out.extend(computed_in(index))
    return out


def post_order(
    roots: Sequence[Value], edges: Callable[[Value], Iterable[Value]] = dependencies
) -> list[Value]:
    """Everything that the roots depend on, and they, each once and after what it depends on.

    ``edges`` may hide some of what a value depends on.
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
    """Puts indices in the place of loop variables, in values; shared values stay shared."""

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
        """The same of an index."""
        return index.substitute(self.replace, self._of_computed)

    def statement(self, s: Any) -> Any:
        """The same of a statement; loops keep their ranges."""
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
        """The same of a keep or a prefix."""
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
    """Puts indices in the place of loop variables, and in the place of the values in ``done`` what is given there."""

    def __call__(self, value: Value) -> Value:
        for v in post_order([value]):
            if v not in self.done:
                moved = not v.ranges().isdisjoint(self.replace)
                same = all(self.done[a] is a for a in v.args)
                self.done[v] = v if same and not moved else self._rebuilt(v)
        return self.done[value]


def const(value: Any, dtype: np.dtype) -> Value:
    """A constant."""
    return Value("const", (), np.asarray(value, dtype)[()], dtype)


def load(buffer: Buffer, index: Index, guard: Value | None = None) -> Value:
    """An element of a buffer; 0 where a guard is false."""
    return Value("load", () if guard is None else (guard,), (buffer, index), buffer.dtype)


def number(index: Index, dtype: np.dtype) -> Value:
    """An index as a number."""
    return Value("number", (), index, dtype)


def within(index: Index, low: int, high: int) -> Value | None:
    """Whether ``low <= index < high``; None if that is known to be so."""
    least, most = index.bounds()
    if low <= least and most < high:
        return None
    return Value("within", (), (index, low, high), dtypes.bool_)


def apply(prim: Any, args: Sequence[Value], params: Mapping[str, Any], dtype: np.dtype) -> Value:
    """An elementwise primitive of the core."""
    return Value("apply", tuple(args), (prim, dict(params)), dtype)


def read(cell: Cell) -> Value:
    """The value of a total, after its loop, of a keep, or of a prefix, after its scan in the same loop."""
    return Value("read", (), cell, (cell.position if isinstance(cell, Total) else None) or cell.dtype)


def fold(op: str, over: Range, body: Value) -> Value:
    """A reduction inside of one lane, in order."""
    return Value("fold", (body,), (op, over), body.dtype)


def carried(name: str, turn: Range, dtype: np.dtype) -> Value:
    """A carry of the loop, or an operand of the branch, with that ``turn``."""
    return Value("carry", (), (name, turn), dtype)


def loop(made: Loop, inits: Sequence[Value], going: Value, nexts: Sequence[Value]) -> list[Value]:
    """What the carries of a loop are at its end."""
    whole = Value("loop", (*inits, going, *nexts), made, dtypes.bool_)
    return [Value("result", (whole,), n, c.dtype) for n, c in enumerate(made.carries)]


def branch(
    made: Branch, predicate: Value, operands: Sequence[Value], yes: Sequence[Value], no: Sequence[Value]
) -> list[Value]:
    """The results ``yes`` where a predicate holds, ``no`` where it does not."""
    whole = Value("branch", (predicate, *operands, *yes, *no), made, dtypes.bool_)
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
    """In lanes: the total takes up the lane's value. An arg-extremum takes up the lane's ``position`` with it."""

    total: Total
    value: Value
    position: Index | None = None

    @property
    def suffix(self) -> str:
        """The end of the statement as text: what a reduction that a backend has made does besides."""
        return ""


@dataclass(frozen=True)
class Scan:
    """In lanes: the prefix takes up the lane's value. All scans of a loop go one way, and read none of its prefixes."""

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
    """For all lanes, in no order."""

    range: Range
    body: tuple[Any, ...]  # Store, Reduce, Scan, Set, Accumulate
    note: str = ""

    @property
    def head(self) -> str:
        """The loop's first line as text."""
        return f"lanes {self.range} < {self.range.extent}:"


@dataclass(frozen=True)
class Rows:
    """In order, for ``range``; only while ``index`` is below ``limit``."""

    range: Range
    body: tuple[Any, ...]  # Lanes, Store
    index: Index
    limit: int


Statement = Store | Reduce | Scan | Set | Accumulate | Lanes | Rows


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel.

    Attributes:
      name: an identifier of C.
      buffers: its parameters, in order; an output may be the very array that an input is.
      grid: the ranges of the grid, outermost first; the last one varies fastest in memory.
      body: what is done at a point.
      finish: what is done when points are done; what they stored can be read there.
      over: the ranges of the grid for each of whose points the finish is done, when all points of the grid that share
        it are; none of them: it is done once.
      notes: lines for people: the equations it came from and the user's lines.
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
        """``make()``, computed once for this kernel and ``key``: alike regions share a kernel."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def statements(self) -> Iterator[Statement]:
        """All statements, outer ones before those in them."""
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
        """How many grid points there are."""
        return math.prod(r.extent for r in self.grid)

    @property
    def ends(self) -> int:
        """How often the finish is done."""
        return math.prod(r.extent for r in self.over) if self.finish else 0

    @property
    def key(self) -> tuple:
        """What equal kernels have in common: the text, which does not say of what dtype a constant is."""
        return self.memoised("key", self._key)

    def _key(self) -> tuple:
        values = post_order(self.roots())
        return str(self), *[(v.dtype, v.attr[0] if v.op == "apply" else None) for v in values]

    def __str__(self) -> str:
        return to_text(self)


def values_of(statement: Statement) -> list[Value]:
    """The values that one statement uses itself, those that its index is computed from first."""
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
    """The kernel as text; values that are used more than once, or are long, get a line of their own.

    The text says all that a kernel does: kernels of one text are one kernel.
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
    """Writes statements as lines; names hold in the loop in which they are given, and in those in it."""

    def __init__(self, kernel: Kernel):
        roots = kernel.roots()
        self.uses = Counter(roots)
        for v in post_order(roots):
            self.uses.update(v.args)
        self.lines: list[str] = []
        self.named = 0

    def block(self, body: Sequence[Any], indent: str, texts: dict[Value, str]) -> None:
        """The statements of one loop; ``texts`` are names, and the short expressions that stay where they are."""
        for s in body:
            self.define(values_of(s), indent, texts)
            self.lines.append(indent + statement_text(s, texts))
            if isinstance(s, (Lanes, Rows)):
                self.block(s.body, indent + "  ", dict(texts))

    def define(self, roots: Sequence[Value], indent: str, texts: dict[Value, str]) -> None:
        """Lines that give names to what the roots depend on."""
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
    """One line: the statement, or the head of a loop. ``texts`` are what to write for values, if not all of them."""
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
    """The dtype of an accumulator, where that is not the value's."""
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
    made = v.attr
    if v.op == "loop":
        most = "" if made.most is None else f", at most {made.most} times"
        head = f"{shown(made.carries)} = {shown(made.inits(v))} while {shown([made.going(v)])}{most}"
        return f"loop({head}: {shown(made.nexts(v))})"
    yes, no = made.sides(v)
    given = f"{shown(made.operands)} = {shown(outside(v)[1:])}: " if made.operands else ""
    return f"branch({given}{shown(yes)} if {texts[v.args[0]]} else {shown(no)})"
