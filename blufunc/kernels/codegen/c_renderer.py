"""LoopIR as C: the part that CUDA and the host share; ``backends/cpu`` and ``backends/cuda/render`` add their loops.

Kernels, stage 6. In: a ``Kernel``. Out: the text of one function. The renderer walks the statements with a stack of
scopes, one for each block of the text. A value is written where it is first needed, but in the outermost scope that
knows its loop variables and in which what it reads is finished: what does not vary over a loop stands before it, and
what several statements need is computed once. Values used once are written in place.

Whatever a block reads, it reads before it stores: an output may be the very array that an input is, as long as each
element is replaced by the block that reads it.
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
"""Below this, indices are of type ``int``: loops in strips step a little beyond the end."""

_LONGEST, _LONGEST_WHOLE = 72, 96
"""How many characters an expression may have that stands within another one, or that a statement consists of."""


class CStyle(Writer):
    """Writes one kernel. Dialects override the hooks at the end, and add to the names that are ``reserved``."""

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
        """The function, with comments before it."""
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
        """An expression of ``v`` that needs no parentheses; what it needs is written before."""
        self.need([v])
        text = self.found(v)
        assert text is not None
        return text

    def named_value(self, v: Value) -> str:
        """The same, and no longer than an identifier or literal."""
        text = self.value(v)
        if not text.isidentifier() and v.op not in ("const", "read"):
            text = self._define(self.scope, v, bare(text))
        return text

    def need(self, roots: Sequence[Value]) -> None:
        """Write what the roots need and they, where it has not been."""
        order = self._missing(roots)
        depth = {v: self.depth_of(v.ranges(), self.reads[v]) for v in order}
        user = {}
        for v in order:
            for d in outside(v):
                user[d] = v
        here = len(self.scopes) - 1
        for v in order:
            # in place only where no loop comes between
            used_at = depth[user[v]] if v in user else here
            self._write(v, depth[v], used_at == depth[v] and self._inlines(v), user.get(v))

    def _missing(self, roots: Sequence[Value]) -> list[Value]:
        """What is to be computed for the roots, in order; what a body needs is left to it."""
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
        """Whether it may stand where it is used."""
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
            apart = user is not None and user.op == "apply" and self._stands_apart(v, *user.attr)
            longest = _LONGEST if user is not None else _LONGEST_WHOLE
            if trivial or (inline and len(text) <= longest and not apart):
                self.scope.names[v] = grouped(text)
            else:
                self._define(self.scope, v, text)
        finally:
            self.scopes = inner

    @staticmethod
    def _stands_apart(v: Value, prim: Any, params: Any) -> bool:
        """Whether an operand gets a line of its own.

        Where it occurs more than once; and where it is read from memory by one side of a choice: compilers do not
        make vector instructions of what is read or not.
        """
        return scalar_ops.repeats(prim, params) or (prim is ew.select_p and v.op == "load" and not v.args)

    def _define(self, scope: Scope, v: Value, text: str) -> str:
        name = self.fresh(f"{self.named[v.attr[0]]}_at") if v.op == "load" else self.temporary()
        scope.lines.append(f"const {scalar_ops.register_type(v.dtype)} {name} = {text};")
        scope.names[v] = name
        return name

    def expression(self, v: Value) -> str:
        """The operation of ``v``, on operands that have been written."""
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
        """What a loop has found or kept."""
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
        """Whether ``low <= index < high``, as far as that is not known."""
        text, (least, most) = grouped(self.index(index)), index.bounds()
        parts = [f"{text} >= {low}"] if least < low else []
        parts += [f"{text} < {high}"] if most >= high else []
        if len(parts) == 2 and high - low == 1:
            return f"{text} == {low}"
        return " && ".join(parts) or "true"

    def _bits(self, counter: Index, width: int, key: Sequence[str]) -> str:
        """Random bits: the cipher of the counter under the key, two words folded to the width."""
        text = self.index(counter)
        high = f"uint32_t(uint64_t({text}) >> 32)" if counter.bounds()[1] >= 1 << 32 else "0u"
        words = self.temporary()
        self.line(f"const auto {words} = bf_threefry2x32({key[0]}, {key[1]}, {high}, uint32_t({text}));")
        if width == 64:
            return f"uint64_t({words}.a) << 32 | {words}.b"
        return f"uint{width}_t({words}.a ^ {words}.b)"

    def fold(self, v: Value) -> str:
        """A reduction in one lane: a loop of its own. The name of its result."""
        op, over = v.attr
        dtype = accumulator(v.dtype)
        total = self.temporary()
        start = scalar_ops.literal(identity(op, v.dtype), v.dtype)
        self.line(f"{scalar_ops.register_type(dtype)} {total} = {start};")
        with self.block(self.fold_loop(v, total), [over]):
            outside, self.inline_reads = self.inline_reads, True
            self.line(update(total, reducing(op, dtype, total, self.value(v.args[0]), v.dtype)))
            self.inline_reads = outside
        if dtype != v.dtype:
            self.line(f"{total} = round_to<{scalar_ops.storage_type(v.dtype)}>({total});")
        return total

    def turns(self, v: Value) -> str:
        """A loop of one lane: its carries are variables. What their names begin with."""
        made: Loop = v.attr
        name, turn = self.temporary(), self.temporary()
        for n, (c, x) in enumerate(zip(made.carries, made.inits(v), strict=True)):
            self.line(f"{scalar_ops.register_type(c.dtype)} {result_of(name, n)} = {bare(self.value(x))};")
        with self.block([turns_of(turn, made.most)], [made.turn]):
            before, self.inline_reads = self.inline_reads, True
            own: dict[Any, str] = {c: result_of(name, n) for n, c in enumerate(made.carries)}
            self.scope.names.update(own)
            if made.going(v).op != "const" or not made.going(v).attr:
                self.line(f"if (!{grouped(self.value(made.going(v)))}) break;")
            self.need(made.nexts(v))
            # all change at once: none is written before what reads it
            texts = [
                self.copied(x) if x in own and x is not c else self.named_value(x)
                for c, x in zip(made.carries, made.nexts(v), strict=True)
            ]
            self.scope.lines += [
                f"{own[c]} = {t};" for c, t in zip(made.carries, texts, strict=True) if own[c] != t
            ]
            self.inline_reads = before
        return name

    def copied(self, v: Value) -> str:
        """The value in a variable of its own."""
        name = self.temporary()
        self.line(f"const {scalar_ops.register_type(v.dtype)} {name} = {bare(self.value(v))};")
        return name

    def choice(self, v: Value) -> str:
        """One of two sides. What the names of the results begin with."""
        made: Branch = v.attr
        sides, given = made.sides(v), dict(zip(made.operands, outside(v)[1:], strict=True))
        name, holds = self.temporary(), bare(self.value(v.args[0]))
        names: dict[Any, str] = {c: self.named_value(x) for c, x in given.items()}
        for n, x in enumerate(sides[0]):
            self.line(f"{scalar_ops.register_type(x.dtype)} {result_of(name, n)};")

        def write(side: Sequence[Value]) -> None:
            self.scope.names.update(names)
            for n, x in enumerate(side):
                self.line(f"{result_of(name, n)} = {bare(self.value(x))};")

        self.either(holds, [made.turn], *[functools.partial(write, side) for side in sides])
        return name

    # -- indices -------------------------------------------------------------------------------

    def index(self, index: Index) -> str:
        """An index as an expression; values that it was computed from have been written."""
        terms = sorted(index.terms.items(), key=lambda term: term[1] < 0)  # what is subtracted comes last
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
        """One of the atoms of an index, without need of parentheses in a sum."""
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
        """A quotient or remainder that occurs in several indices gets a name."""
        reads = frozenset[Cell]().union(*[self.reads[v] for v in computed_in(atom.index)])
        inner = self.scopes
        self.scopes = inner[: self.depth_of(ranges_of(atom), reads) + 1]
        text = self._divided(atom)
        name = self.fresh("q" if isinstance(atom, Quotient) else "m")
        self.line(f"const {self.index_type} {name} = {text};")
        if not reads:  # else it may change, and is not kept
            self.scope.names[atom] = name
        self.scopes = inner
        return name

    def _divided(self, atom: Quotient | Remainder) -> str:
        text, d = grouped(self.index(atom.index)), atom.divisor
        negative = atom.index.bounds()[0] < 0
        if d & (d - 1) == 0:  # shifts and masks round down for negative numbers too
            shift = isinstance(atom, Quotient)
            return f"({text} >> {d.bit_length() - 1})" if shift else f"({text} & {d - 1})"
        if isinstance(atom, Quotient):
            # -1 - x is x with all bits turned: floor(x / d) of a negative x is that of the quotient of -1 - x
            return f"({text} < 0 ? ~(~{text} / {d}) : {text} / {d})" if negative else self.quotient(text, d)
        return f"(({text} % {d} + {d}) % {d})" if negative else self.remainder(text, d)

    # -- statements ----------------------------------------------------------------------------

    def body(self, statements: Sequence[Any]) -> None:
        """The statements of one block, in order; what it stores itself it stores at the end of each run of them."""
        outside = self.inline_reads
        several = sum(isinstance(s, Store) for s in statements) > 1
        stores: list[tuple[Buffer, str]] = []
        for s in statements:
            # a store that waits for others must not read anything when its turn comes
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
        """What the function does with its parameters before anything else."""

    def grid(self) -> None:
        """Come to the points, and ``self.body(self.kernel.body)`` at each."""
        raise NotImplementedError

    def finish(self) -> None:
        """What is done once, when all points are."""
        self.body(self.kernel.finish)

    def lanes(self, s: Lanes) -> None:
        """A loop over lanes, with the totals that it reduces to."""
        raise NotImplementedError

    def rows(self, s: Rows) -> None:
        """A sequential loop."""
        self.need(computed_in(s.index))
        below = s.index.bounds()[1] < s.limit
        condition = "" if below else f" && {self.index(s.index)} < {s.limit}"
        with self.block([self.loop(s.range, condition=condition)], [s.range], written_in(s.body)):
            self.body(s.body)

    def fold_loop(self, v: Value, total: str) -> list[str]:
        """The head of the loop of a fold, into the variable ``total``."""
        return [self.loop(v.attr[1])]

    def reduce(self, s: Reduce) -> None:
        """Take up the lane's value in a total."""
        raise NotImplementedError

    def take(self, s: Scan) -> None:
        """Put the lane's value where the scan finds it."""
        raise NotImplementedError

    def read_prefix(self, prefix: Prefix) -> str:
        """What a scan has found up to this lane."""
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
        """Of a number that is not negative."""
        return f"{text} / {divisor}"

    def remainder(self, text: str, divisor: int) -> str:
        """Of a number that is not negative."""
        return f"{text} % {divisor}"


# -- pieces ----------------------------------------------------------------------------------------


def turns_of(turn: str, most: int | None) -> str:
    """The head of a loop that ends after so many turns, if nothing ends it before."""
    return "for (;;)" if most is None else f"for (int64_t {turn} = 0; {turn} < {most}; ++{turn})"


def result_of(name: str, n: int) -> str:
    """The variable of one result of a loop or branch."""
    return f"{name}_{n}"


def accumulator(dtype: np.dtype) -> np.dtype:
    """What a reduction to ``dtype`` is computed in: float32 for smaller floats."""
    return dtypes.float32 if scalar_ops.is_small_float(dtype) else dtype


def reducing(op: str, dtype: np.dtype, total: str, value: str, of: np.dtype) -> str:
    """The reduction of a total of ``dtype`` and a value of the dtype ``of``, as expressions."""
    if scalar_ops.register_type(of) != scalar_ops.register_type(dtype):
        value = f"{scalar_ops.register_type(dtype)}({bare(value)})"
    # complex numbers have no +=, which ``update`` makes of what begins with the total
    operands = [value, total] if dtypes.is_complex(dtype) else [total, value]
    return scalar_ops.expression(_REDUCING[op], {}, [dtype, dtype], dtype, operands)


def update(place: str, text: str) -> str:
    """The statement that writes an expression to a place."""
    for op in "+*":
        if text.startswith(f"{place} {op} "):
            return f"{place} {op}= {bare(text[len(place) + 3 :])};"
    return f"{place} = {text};"


def is_arg(total: Total) -> bool:
    """Whether the total is a position."""
    return total.op in ARG_REDUCTIONS
