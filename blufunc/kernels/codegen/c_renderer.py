"""C renderer: the part of LoopIR's printing that CUDA and the host share.

Kernels, stage 6. In: a ``Kernel``. Out: the source of one function; ``backends/cpu`` and ``backends/cuda/render`` add
their loops. The renderer walks the statements with a stack of scopes, one per block of source. A value is written where
it is first needed, in the outermost scope that has its loop variables and in which its reads are final: loop-invariant
values precede their loop, and a shared value is computed once. Values used once are inlined.

Each block reads before it stores: an output may alias an input if each element is replaced by the block that reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.special import logaddexp_p
from blufunc.kernels.codegen import scalar_ops
from blufunc.kernels.codegen.scalar_ops import bare, grouped
from blufunc.kernels.codegen.scopes import Scope, Survey, Writer, comment, indented, written_in
from blufunc.kernels.loopir.index import Atom, Computed, Index, Quotient, Range, Remainder, ranges_of
from blufunc.kernels.loopir.ir import (
    ARG_REDUCTIONS,
    BODIES,
    Accumulate,
    Branch,
    Buffer,
    Cell,
    Keep,
    Kernel,
    Lanes,
    Loop,
    Prefix,
    Reduce,
    Rows,
    Scan,
    Set,
    Store,
    Total,
    Value,
    computed_in,
    identity,
    outside,
    values_of,
)

_REDUCING = {
    "sum": ew.add_p,
    "prod": ew.mul_p,
    "max": ew.max_p,
    "min": ew.min_p,
    "and": ew.and_p,
    "or": ew.or_p,
    "xor": ew.xor_p,
    "logaddexp": logaddexp_p,
}
_LARGEST_INT = (1 << 31) - (1 << 16)
"""Indices below this are ``int``: strip-mined loops overshoot a little."""

_LONGEST, _LONGEST_WHOLE = 72, 96
"""Longest inlined expression, and longest whole expression, in characters."""


class CStyle(Writer):
    """Renderer of one kernel. Dialects override hooks, and extend ``reserved``."""

    def __init__(self, kernel: Kernel):
        survey = Survey(kernel)
        super().__init__(kernel.name, survey.reads)
        self.kernel = kernel
        self.uses = survey.uses
        self.inline_reads = True
        for buffer in kernel.buffers:
            self.name(buffer, buffer.name)
        self.wide = survey.largest >= _LARGEST_INT
        self.index_type = "int64_t" if self.wide else "int"

    def render(self) -> str:
        """The function, after comments."""
        self.scopes.append(Scope(frozenset()))
        self.parameters()
        self.grid()
        if self.kernel.finish:
            self.finish()
        body = self.scopes.pop().lines
        notes = [comment(note) for note in self.kernel.notes]
        return "\n".join([*notes, f"{self.signature()} {{", *indented(body), "}"]) + "\n"

    # -- values --------------------------------------------------------------------------------

    def value(self, v: Value) -> str:
        """An expression of ``v`` without parentheses; its operands are written first."""
        self.need([v])
        text = self.found(v)
        assert text is not None
        return text

    def named_value(self, v: Value) -> str:
        """The value as an identifier or literal."""
        text = self.value(v)
        if not text.isidentifier() and v.op not in ("const", "read"):
            text = self._define(self.scope, v, bare(text))
        return text

    def need(self, roots: Sequence[Value]) -> None:
        """Write the roots and their dependencies, if not yet written."""
        order = self._missing(roots)
        depth = {v: self.depth_of(v.ranges(), self.reads[v]) for v in order}
        user = {}
        for v in order:
            for d in outside(v):
                user[d] = v
        here = len(self.scopes) - 1
        for v in order:
            # inline only if no loop comes between
            used_at = depth[user[v]] if v in user else here
            self._write(v, depth[v], used_at == depth[v] and self._inlines(v), user.get(v))

    def _missing(self, roots: Sequence[Value]) -> list[Value]:
        """Values to compute for the roots, in order; a body computes its own."""
        done: dict[Value, None] = {}
        stack = [(v, False) for v in reversed(roots)]
        while stack:
            v, ready = stack.pop()
            if v in done or self.found(v) is not None:
                continue
            if ready:
                done[v] = None
                continue
            stack.append((v, True))
            stack.extend((d, False) for d in reversed(outside(v)))
        return list(done)

    def _inlines(self, v: Value) -> bool:
        """True if a value may be inlined at its use."""
        if v.op in BODIES or self.uses[v] > 1:
            return False
        memory = v.op == "load" or (v.op == "read" and not isinstance(v.attr, Total))
        return self.inline_reads or not memory

    def _write(self, v: Value, at: int, inline: bool, user: Value | None) -> None:
        """Compute ``v`` in the scope ``at``."""
        inner, self.scopes = self.scopes, self.scopes[: at + 1]
        try:
            if v.op in BODIES:
                self.scope.names[v] = {"fold": self.fold, "loop": self.turns, "branch": self.choice}[v.op](v)
                return
            text = self.expression(v)
            trivial = text.isidentifier() or v.op == "const" or (v.op == "read" and isinstance(v.attr, Total))
            own_line = user is not None and user.op == "apply" and self._has_own_line(v, *user.attr)
            longest = _LONGEST if user is not None else _LONGEST_WHOLE
            if trivial or (inline and len(text) <= longest and not own_line):
                self.scope.names[v] = grouped(text)
            else:
                self._define(self.scope, v, text)
        finally:
            self.scopes = inner

    @staticmethod
    def _has_own_line(v: Value, prim: Any, params: Any) -> bool:
        """True if an operand gets a line of its own.

        It occurs more than once; or one side of a select loads it, as compilers do not vectorize conditional loads.
        """
        return scalar_ops.repeats(prim, params) or (prim is ew.select_p and v.op == "load" and not v.args)

    def _define(self, scope: Scope, v: Value, text: str) -> str:
        name = self.fresh(f"{self.named[v.attr[0]]}_at") if v.op == "load" else self.temporary()
        scope.lines.append(f"const {scalar_ops.register_type(v.dtype)} {name} = {text};")
        scope.names[v] = name
        return name

    def expression(self, v: Value) -> str:
        """The operation of ``v``, on operands already written."""
        args = [self.found(a) or "" for a in v.args]
        if v.op == "apply":
            prim, params = v.attr
            return scalar_ops.expression(prim, params, [a.dtype for a in v.args], v.dtype, args)
        if v.op == "const":
            return scalar_ops.literal(v.attr, v.dtype)
        if v.op == "load":
            buffer, index = v.attr
            text = self.load(buffer, self.index(index))
            return (
                f"{args[0]} ? {text} : {scalar_ops.literal(np.zeros((), v.dtype)[()], v.dtype)}"
                if args
                else text
            )
        if v.op == "number":
            return self._number(v.attr, v.dtype)
        if v.op == "within":
            return self.within(*v.attr)
        if v.op == "read":
            return self.read(v.attr)
        if v.op == "result":
            return result_of(args[0], v.attr)
        if v.op == "bits":
            return self._bits(v.attr[0], v.attr[1], args)
        raise AssertionError(f"LoopIR has no operation {v.op}")

    def read(self, cell: Cell) -> str:
        """The value of a cell."""
        if isinstance(cell, Total):
            return self.read_total(cell)
        return self.read_keep(cell) if isinstance(cell, Keep) else self.read_prefix(cell)

    def _number(self, index: Index, dtype: np.dtype) -> str:
        text = f"{scalar_ops.register_type(dtype)}({self.index(index)})"
        return (
            f"round_to<{scalar_ops.storage_type(dtype)}>({text})"
            if scalar_ops.is_small_float(dtype)
            else text
        )

    def within(self, index: Index, low: int, high: int) -> str:
        """The condition ``low <= index < high``, without the known parts."""
        text, (least, most) = grouped(self.index(index)), index.bounds()
        parts = [f"{text} >= {low}"] if least < low else []
        parts += [f"{text} < {high}"] if most >= high else []
        if len(parts) == 2 and high - low == 1:
            return f"{text} == {low}"
        return " && ".join(parts) or "true"

    def _bits(self, counter: Index, width: int, key: Sequence[str]) -> str:
        """Random bits: the cipher of the counter under the key, folded to the width."""
        text = self.index(counter)
        high = f"uint32_t(uint64_t({text}) >> 32)" if counter.bounds()[1] >= 1 << 32 else "0u"
        words = self.temporary()
        self.line(f"const auto {words} = bf_threefry2x32({key[0]}, {key[1]}, {high}, uint32_t({text}));")
        if width == 64:
            return f"uint64_t({words}.a) << 32 | {words}.b"
        return f"uint{width}_t({words}.a ^ {words}.b)"

    def fold(self, v: Value) -> str:
        """Write a loop that reduces in one lane; returns the name of its result."""
        op, over = v.attr
        dtype = accumulator(v.dtype)
        total = self.temporary()
        self.line(f"{scalar_ops.register_type(dtype)} {total} = {start_of(op, v.dtype)};")
        with self.block(self.fold_loop(v, total), [over]):
            outside, self.inline_reads = self.inline_reads, True
            self.line(update(total, reducing(op, dtype, total, self.value(v.args[0]), v.dtype)))
            self.inline_reads = outside
        if dtype != v.dtype:
            self.line(f"{total} = round_to<{scalar_ops.storage_type(v.dtype)}>({total});")
        return total

    def turns(self, v: Value) -> str:
        """Write a loop of one lane, its carries as variables; returns their common prefix."""
        loop: Loop = v.attr
        name, turn = self.temporary(), self.temporary()
        for n, (c, x) in enumerate(zip(loop.carries, loop.inits(v), strict=True)):
            self.line(f"{scalar_ops.register_type(c.dtype)} {result_of(name, n)} = {bare(self.value(x))};")
        with self.block([turns_of(turn, loop.most)], [loop.turn]):
            before, self.inline_reads = self.inline_reads, True
            own: dict[Any, str] = {c: result_of(name, n) for n, c in enumerate(loop.carries)}
            self.scope.names.update(own)
            if loop.going(v).op != "const" or not loop.going(v).attr:
                self.line(f"if (!{grouped(self.value(loop.going(v)))}) break;")
            self.need(loop.nexts(v))
            # carries change at once: no carry is written before its readers
            texts = [
                self.copied(x) if x in own and x is not c else self.named_value(x)
                for c, x in zip(loop.carries, loop.nexts(v), strict=True)
            ]
            self.scope.lines += [
                f"{own[c]} = {t};" for c, t in zip(loop.carries, texts, strict=True) if own[c] != t
            ]
            self.inline_reads = before
        return name

    def copied(self, v: Value) -> str:
        """The value in a variable of its own."""
        name = self.temporary()
        self.line(f"const {scalar_ops.register_type(v.dtype)} {name} = {bare(self.value(v))};")
        return name

    def choice(self, v: Value) -> str:
        """Write both sides of a branch; returns the common prefix of the results' names."""
        branch: Branch = v.attr
        sides, operands = branch.sides(v), dict(zip(branch.operands, outside(v)[1:], strict=True))
        name, holds = self.temporary(), bare(self.value(v.args[0]))
        names: dict[Any, str] = {c: self.named_value(x) for c, x in operands.items()}
        for n, x in enumerate(sides[0]):
            self.line(f"{scalar_ops.register_type(x.dtype)} {result_of(name, n)};")

        def write(side: Sequence[Value]) -> None:
            self.scope.names.update(names)
            for n, x in enumerate(side):
                self.line(f"{result_of(name, n)} = {bare(self.value(x))};")

        self.either(holds, [branch.turn], *[functools.partial(write, side) for side in sides])
        return name

    # -- indices -------------------------------------------------------------------------------

    def index(self, index: Index) -> str:
        """An index as an expression; the values it is computed from are already written."""
        terms = sorted(index.terms.items(), key=lambda term: term[1] < 0)  # negative terms last
        const = index.constant
        text = ""
        if terms and terms[0][1] < 0 < const:
            text, const = str(const), 0
        for atom, c in terms:
            part = self.atom(atom)
            part = (
                part
                if abs(c) == 1
                else f"{abs(c)}{'LL' * (self.wide and abs(c) >= 1 << 31)} * {grouped(part)}"
            )
            if not text:
                text = part if c > 0 else f"-{grouped(part)}" if c == -1 else f"-{part}"
            else:
                text += f" {'+' if c > 0 else '-'} {part}"
        if not text:
            return f"{const}{'LL' * (abs(const) >= 1 << 31)}"
        return f"{text} {'+' if const > 0 else '-'} {abs(const)}" if const else text

    def atom(self, atom: Atom) -> str:
        """An atom of an index, without parentheses in a sum."""
        if isinstance(atom, Range):
            return self.variable(atom)
        if isinstance(atom, Computed):
            text = self.found(atom.value)
            assert text is not None
            same = self.index_type == {dtypes.int32: "int", dtypes.int64: "int64_t"}.get(atom.value.dtype)
            return text if same else f"{self.index_type}({bare(text)})"
        seen = self.found(atom)
        if seen is not None:
            return seen
        if self.uses[atom] < 2:
            return self._divided(atom)
        return self._shared(atom)

    def _shared(self, atom: Quotient | Remainder) -> str:
        """Define a name for a quotient or remainder that occurs in several indices."""
        reads = frozenset[Cell]().union(*[self.reads[v] for v in computed_in(atom.index)])
        inner = self.scopes
        self.scopes = inner[: self.depth_of(ranges_of(atom), reads) + 1]
        text = self._divided(atom)
        name = self.fresh("q" if isinstance(atom, Quotient) else "m")
        self.line(f"const {self.index_type} {name} = {text};")
        if not reads:  # else it may change
            self.scope.names[atom] = name
        self.scopes = inner
        return name

    def _divided(self, atom: Quotient | Remainder) -> str:
        text, d = grouped(self.index(atom.index)), atom.divisor
        negative = atom.index.bounds()[0] < 0
        if d & (d - 1) == 0:  # shifts and masks round down for negative integers too
            shift = isinstance(atom, Quotient)
            return f"({text} >> {d.bit_length() - 1})" if shift else f"({text} & {d - 1})"
        if isinstance(atom, Quotient):
            # -1 - x is x with all bits turned: floor(x / d) of a negative x is that of the quotient of -1 - x
            return f"({text} < 0 ? ~(~{text} / {d}) : {text} / {d})" if negative else self.quotient(text, d)
        return f"(({text} % {d} + {d}) % {d})" if negative else self.remainder(text, d)

    # -- statements ----------------------------------------------------------------------------

    def body(self, statements: Sequence[Any]) -> None:
        """Write the statements of a block, in order; each run of stores comes last."""
        outside = self.inline_reads
        several = sum(isinstance(s, Store) for s in statements) > 1
        stores: list[tuple[Buffer, str]] = []
        for s in statements:
            # a delayed store must not read memory that an earlier one overwrites
            self.inline_reads = not isinstance(s, Store) or (s is statements[-1] and not several)
            if isinstance(s, (Lanes, Rows)):
                self._flush(stores)
                self.lanes(s) if isinstance(s, Lanes) else self.rows(s)
            elif isinstance(s, Store):
                stores.append((s.buffer, self._store(s)))
            elif isinstance(s, Reduce):
                self.reduce(s)
            elif isinstance(s, Scan):
                self.take(s)
            else:
                self.set_keep(s)
                self.forget(frozenset((s.keep,)))
        self._flush(stores)
        self.inline_reads = outside

    def _flush(self, stores: list[tuple[Buffer, str]]) -> None:
        self.scope.lines += [text for _, text in stores]
        self.forget(frozenset(buffer for buffer, _ in stores))
        stores.clear()

    def _store(self, s: Store) -> str:
        self.need(values_of(s))
        text = self.store(s.buffer, self.index(s.index), bare(self.value(s.value)))
        return text if s.guard is None else f"if ({bare(self.value(s.guard))}) {text}"

    def loop(self, over: Range, start: str = "0", end: str = "", condition: str = "") -> str:
        """The head of a loop."""
        i = self.variable(over)
        return f"for ({self.index_type} {i} = {start}; {i} < {end or over.extent}{condition}; ++{i})"

    # -- hooks ---------------------------------------------------------------------------------

    def signature(self) -> str:
        """The head of the function."""
        raise NotImplementedError

    def parameters(self) -> None:
        """Hook: setup from the parameters, before all else."""

    def grid(self) -> None:
        """Iterate over the points, with ``self.body(self.kernel.body)`` at each."""
        raise NotImplementedError

    def finish(self) -> None:
        """Write the finish, which runs once, after all points."""
        self.body(self.kernel.finish)

    def lanes(self, s: Lanes) -> None:
        """Write a loop over lanes, with the totals that it reduces."""
        raise NotImplementedError

    def rows(self, s: Rows) -> None:
        """Write a sequential loop."""
        self.need(computed_in(s.index))
        below = s.index.bounds()[1] < s.limit
        condition = "" if below else f" && {self.index(s.index)} < {s.limit}"
        with self.block([self.loop(s.range, condition=condition)], [s.range], written_in(s.body)):
            self.body(s.body)

    def fold_loop(self, v: Value, total: str) -> list[str]:
        """The head of a fold's loop, which accumulates in the variable ``total``."""
        return [self.loop(v.attr[1])]

    def reduce(self, s: Reduce) -> None:
        """Accumulate the lane's value in a total."""
        raise NotImplementedError

    def take(self, s: Scan) -> None:
        """Pass the lane's value to the scan."""
        raise NotImplementedError

    def read_prefix(self, prefix: Prefix) -> str:
        """The prefix of a scan at this lane."""
        raise NotImplementedError

    def read_total(self, total: Total) -> str:
        """A total after its loop."""
        raise NotImplementedError

    def set_keep(self, s: Set | Accumulate) -> None:
        """Write this lane's value of a keep."""
        text, place = self.value(s.value), self.read_keep(s.keep)
        if isinstance(s, Accumulate):
            assert s.keep.op is not None
            text = reducing(s.keep.op, s.keep.dtype, place, text, s.value.dtype)
        self.line(update(place, bare(text)))

    def read_keep(self, keep: Keep) -> str:
        """This lane's value of a keep."""
        raise NotImplementedError

    def load(self, buffer: Buffer, index: str) -> str:
        """An element of a buffer, in its register type."""
        return scalar_ops.loaded(f"{self.named[buffer]}[{index}]", buffer.dtype)

    def store(self, buffer: Buffer, index: str, value: str) -> str:
        """The statement that writes an element."""
        return f"{self.named[buffer]}[{index}] = {scalar_ops.stored(value, buffer.dtype)};"

    def quotient(self, text: str, divisor: int) -> str:
        """The quotient of a nonnegative integer."""
        return f"{text} / {divisor}"

    def remainder(self, text: str, divisor: int) -> str:
        """The remainder of a nonnegative integer."""
        return f"{text} % {divisor}"


# -- pieces ----------------------------------------------------------------------------------------


def turns_of(turn: str, most: int | None) -> str:
    """The head of a loop of at most ``most`` iterations; endless if None."""
    return "for (;;)" if most is None else f"for (int64_t {turn} = 0; {turn} < {most}; ++{turn})"


def result_of(name: str, n: int) -> str:
    """The variable of one result of a loop or branch."""
    return f"{name}_{n}"


def accumulator(dtype: np.dtype) -> np.dtype:
    """The accumulator dtype of a reduction to ``dtype``: float32 for smaller floats."""
    return dtypes.float32 if scalar_ops.is_small_float(dtype) else dtype


def start_of(op: str, dtype: np.dtype) -> str:
    """The identity of a reduction, as a literal of its accumulator.

    Extrema start at those of the narrow dtype, which are the result of none. Sums do not: float8_e8m0fnu has no zero.
    """
    wide = accumulator(dtype)
    start = identity(op, dtype if op in ("max", "min") else wide)
    return scalar_ops.literal(wide.type(start), wide)


def as_type(value: str, of: np.dtype, dtype: np.dtype) -> str:
    """A value of the dtype ``of``, bare, in the register type of ``dtype``."""
    return bare(value) if of == dtype else f"{scalar_ops.register_type(dtype)}({bare(value)})"


def reducing(op: str, dtype: np.dtype, total: str, value: str, of: np.dtype) -> str:
    """The reduction of a total of ``dtype`` and a value of the dtype ``of``."""
    if scalar_ops.register_type(of) != scalar_ops.register_type(dtype):
        value = f"{scalar_ops.register_type(dtype)}({bare(value)})"
    # complex types have no +=, which ``update`` writes if the total comes first
    operands = [value, total] if dtypes.is_complex(dtype) else [total, value]
    return scalar_ops.expression(_REDUCING[op], {}, [dtype, dtype], dtype, operands)


def update(place: str, text: str) -> str:
    """The statement that writes an expression to a place."""
    for op in "+*":
        if text.startswith(f"{place} {op} "):
            return f"{place} {op}= {bare(text[len(place) + 3 :])};"
    return f"{place} = {text};"


def is_arg(total: Total) -> bool:
    """True if the total is a position."""
    return total.op in ARG_REDUCTIONS
