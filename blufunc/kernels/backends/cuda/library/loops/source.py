"""The source of loop kernels: matmuls, and the pointwise work of a cell.

Kernels, stage 6, above ``tiling`` and ``include/loop_kernel.cuh``. In: a ``Cell`` and its ``Tiling``. Out: CUDA C++.
The parameters are pointers to the operands and results of the scan, in order, and to scratch memory, whose counters
are 0 when the kernel starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda.library import mma
from blufunc.kernels.backends.cuda.library.loops.cell import Array, Cell
from blufunc.kernels.backends.cuda.library.loops.tiling import LINE, THREADS, Tiling
from blufunc.kernels.backends.cuda.schedule.vectorize import fast_exps, with_fast_exp
from blufunc.kernels.codegen import scalar_ops, source_files
from blufunc.kernels.codegen.c_renderer import CStyle
from blufunc.kernels.codegen.scopes import Scope, indented
from blufunc.kernels.codegen.source_files import DEVICE
from blufunc.kernels.loopir.index import ZERO, Index, Range
from blufunc.kernels.loopir.ir import Buffer, Kernel, Store, Value

ENTRY = "loop_kernel"

FILE = "backends/cuda/include/loop_kernel.cuh"

Statement = Callable[[str], str]
"""From a value's expression to the statement that takes it."""


class _Code(CStyle):
    """Writer of pointwise work at one row and unit.

    Args:
      targets: what takes each value.
      scalars: buffers of one element that are variables.
    """

    def __init__(self, targets: Sequence[tuple[Buffer, Value, Statement]], scalars: set[Buffer]):
        stores = tuple(Store(b, ZERO, v) for b, v, _ in targets)
        super().__init__(Kernel("code", (), (), stores))
        self.statements = {b: take for b, _, take in targets}
        self.scalars = scalars
        self.fast_exps = fast_exps(self.kernel)

    def lines(self, ranges: Mapping[Range, str]) -> list[str]:
        """The statements, where loop variables have these names."""
        self.named |= ranges
        self.taken.update(ranges.values())
        for v in self.uses:
            if isinstance(v, Value) and v.op == "load":
                self.named.setdefault(v.attr[0], v.attr[0].name)
                self.taken.add(v.attr[0].name)
        self.scopes.append(Scope(frozenset(ranges)))
        self.body(self.kernel.body)
        return self.scopes.pop().lines

    def expression(self, v: Value) -> str:
        return with_fast_exp(super().expression(v), v, self.fast_exps)

    def load(self, buffer: Buffer, index: str) -> str:
        return buffer.name if buffer in self.scalars else super().load(buffer, index)

    def store(self, buffer: Buffer, index: str, value: str) -> str:
        return self.statements[buffer](value)


class _Source:
    """The source of one kernel."""

    def __init__(self, cell: Cell, tiling: Tiling):
        self.cell, self.tiling = cell, tiling
        self.scalars = {
            *(b for many in cell.old for b in many), *(b for p in cell.products for b in p.registers),
            *cell.inputs, *cell.constants,
        }  # fmt: skip
        self.ranges = {cell.row: "row", cell.unit: "unit"}
        self.now = {
            b: Buffer(f"{b.name}_now", b.dtype, b.size)
            for b in dict.fromkeys(v.attr[0] for v in cell.inputs.values())
        }

    def text(self) -> str:
        """The complete CUDA C++, but for the prelude."""
        cell, t = self.cell, self.tiling
        sizes = source_files.declared(
            ROWS=t.rows, UNITS=t.units, THREADS=THREADS, BLOCKS=t.blocks, ELEMENTS=t.elements,
            STAGE=t.stage, ALL_ROWS=cell.rows, ALL_UNITS=cell.units, STEPS=cell.steps,
        )  # fmt: skip
        tensor = bool(cell.products) and cell.dtype != dtypes.float32
        kinds = ["tensor cores" if tensor else "float32"] if cell.products else []
        own = source_files.source(FILE, "instructions", "grid", *kinds) if cell.products else ""
        before = mma.instructions(str(cell.dtype)) if tensor else ""
        body = "\n".join(indented(self.body() if cell.products else self.pointwise()))
        return f"""{sizes}{before}{own}
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    {ENTRY}({", ".join(self.parameters())}) {{
{body}
}}
"""

    def parameters(self) -> list[str]:
        cell = self.cell
        given = [f"const {scalar_ops.storage_type(b.dtype)} *__restrict__ {b.name}" for b in cell.operands]
        made = [
            f"{scalar_ops.storage_type(a.dtype)} *__restrict__ result{n}"
            for n, a in enumerate((*cell.carries, *cell.outputs))
        ]
        return [*given, *made, "unsigned char *scratch"]

    # -- pieces ------------------------------------------------------------------------------------

    def declare(self, buffers: Sequence[Buffer], prefix: str = "all_") -> list[str]:
        """Arrays with a scalar for each element of a thread."""
        return [f"{scalar_ops.register_type(b.dtype)} {prefix}{b.name}[ELEMENTS];" for b in buffers]

    def elements(
        self,
        targets: Sequence[tuple[Buffer, Value, Statement]],
        known: Sequence[Buffer] = (),
        more: Sequence[str] = (),
    ) -> list[str]:
        """A loop over the elements of a thread.

        Args:
          known: buffers whose scalars the values read.
          more: statements ahead of the values.
        """
        code = _Code(targets, self.scalars).lines(self.ranges) if targets else []
        used = "\n".join(code)
        reads = [
            f"const {scalar_ops.register_type(b.dtype)} {b.name} = all_{b.name}[e];"
            for b in known if b.name in _words(used)
        ]  # fmt: skip
        body = [*more, *reads, *self.used_where_they_are(used), *code]
        if any("row" in x for x in body):
            body = ["const int row = min(first_row + row_of(e), ALL_ROWS - 1);", *body]
        if any("unit" in x for x in body):
            body = ["const int unit = min(first_unit + unit_of(e), ALL_UNITS - 1);", *body]
        return ["#pragma unroll", "for (int e = 0; e < ELEMENTS; ++e) {", *indented(body), "}"]

    def used_where_they_are(self, code: str) -> list[str]:
        """Declarations of scalars that code reads and registers do not hold."""
        if self.tiling.held:
            return []
        cell, words = self.cell, _words(code)
        loads = [
            *((b, _moved(v, self.now)) for b, v in cell.inputs.items() if b.name in words),
            *((b, v) for b, v in cell.constants.items() if b.name in words),
        ]
        declared = [
            (b, v, lambda text, b=b: f"const {scalar_ops.register_type(b.dtype)} {b.name} = {text};")
            for b, v in loads
        ]
        code_ = _Code(declared, self.scalars).lines(self.ranges) if declared else []
        sums = [
            f"const {scalar_ops.register_type(b.dtype)} {b.name} = {self.sum(n, g)};"
            for n, p in enumerate(cell.products) for g, b in enumerate(p.registers) if b.name in words
        ]  # fmt: skip
        return [*code_, *sums]

    def sum(self, n: int, group: int) -> str:
        """A result of a matmul, from its partial sums."""
        p, q = self.cell.products[n], self.tiling.products[n]
        dtype = p.registers[group].dtype
        text = f"sum_of<{q.split}, {q.pitch}>(partial{n}, row_of(e) % ROWS, {group} * UNITS + unit_of(e))"
        return (
            f"round_to<{scalar_ops.storage_type(dtype)}>({text})"
            if scalar_ops.is_small_float(dtype)
            else text
        )

    def assigned(self, pairs: Sequence[tuple[Buffer, Value]], prefix: str = "all_") -> list:
        """Targets that set scalars of this element."""
        return [(b, v, lambda text, b=b: f"{prefix}{b.name}[e] = {text};") for b, v in pairs]

    def stored(self, array: Array, group: int, pointer: str, value: str) -> str:
        """The statement that writes an element of a result."""
        row, unit = "row" in array.axes, "unit" in array.axes
        checks = ["is_inside(e)"]
        checks += [] if row else ["row == 0"]
        checks += [] if unit else ["unit == 0"]
        index = _text(array.indices[group], {self.cell.row: "row", self.cell.unit: "unit"})
        return f"if ({' && '.join(checks)}) {pointer}[{index}] = {scalar_ops.stored(value, array.dtype)};"

    # -- the kernel --------------------------------------------------------------------------------

    def place(self) -> list[str]:
        """Declarations of the rows and units of a thread."""
        return [
            "const int first_row = blockIdx.x / BLOCKS * ROWS, first_unit = blockIdx.x % BLOCKS * UNITS;",
            "// the rows and units of a thread, within those of its block",
            "const auto row_of = [](int e) { return (e * THREADS + int(threadIdx.x)) / UNITS; };",
            "const auto unit_of = [](int e) { return (e * THREADS + int(threadIdx.x)) % UNITS; };",
            "const auto is_inside = [&](int e) {",
            "  return row_of(e) < ROWS && first_row + row_of(e) < ALL_ROWS && first_unit + unit_of(e) < ALL_UNITS;",
            "};",
        ]

    def initial(self) -> list[tuple[Buffer, Value]]:
        """Scalars of the carries, and their first values."""
        cell = self.cell
        given = zip(cell.operands[cell.n_consts :], cell.old, cell.carries, strict=False)
        return [
            (b, Value("load", (), (buffer, index), buffer.dtype))
            for buffer, many, array in given
            for b, index in zip(many, array.indices, strict=True)
        ]

    def final(self) -> list[str]:
        """Store the carries."""
        stores = [
            self.stored(a, g, f"result{n}", f"all_{b.name}[e]")
            for n, (a, bs) in enumerate(zip(self.cell.carries, self.cell.old, strict=True))
            for g, b in enumerate(bs)
        ]
        return self.elements((), more=stores) if stores else []

    def targets(self) -> list:
        """Targets that set the carries."""
        pairs = zip(self.cell.old, self.cell.new, strict=True)
        return self.assigned([(b, v) for bs, vs in pairs for b, v in zip(bs, vs, strict=True)])

    def pointwise(self) -> list[str]:
        """The kernel without matmuls: the inputs of ``depth`` steps are loaded ahead."""
        cell, depth = self.cell, self.tiling.depth
        old, constants = [b for many in cell.old for b in many], list(cell.constants)
        outputs = [
            [Buffer(f"y{n}_{g}", a.dtype, 1) for g in range(a.groups)] for n, a in enumerate(cell.outputs)
        ]
        rings = [
            f"{scalar_ops.register_type(b.dtype)} {{}}_{b.name}[{depth}][ELEMENTS];" for b in cell.inputs
        ]
        loads = [(b, _moved(v, self.now)) for b, v in cell.inputs.items()]

        def ahead(first: str, prefix: str) -> list[str]:
            if not loads:
                return []
            takes = [(b, v, lambda text, b=b: f"{prefix}_{b.name}[d][e] = {text};") for b, v in loads]
            inner = [*self.pointers("step"), *self.elements(takes)]
            body = [f"const int step = {first} + d;", "if (step < STEPS) {", *indented(inner), "}"]
            return ["#pragma unroll", f"for (int d = 0; d < {depth}; ++d) {{", *indented(body), "}"]

        held = [
            f"const {scalar_ops.register_type(b.dtype)} {b.name} = all_{b.name}[d][e];" for b in cell.inputs
        ]
        work = self.elements([*self.targets(), *self.direct(outputs)], [*old, *constants], held)
        step = ["const int step = first + d;", "if (step < STEPS) {", *indented(work), "}"]
        copies = [f"all_{b.name}[d][e] = next_{b.name}[d][e];" for b in cell.inputs]
        unrolled = ["#pragma unroll", f"for (int d = 0; d < {depth}; ++d) {{"]
        chunk = [
            *(line.format("next") for line in rings),
            *ahead(f"first + {depth}", "next"),
            *unrolled, *indented(step), "}",
            *([*unrolled, *indented(self.elements((), more=copies)), "}"] if copies else []),
        ]  # fmt: skip
        return [
            *self.place(),
            *self.declare([*old, *constants]),
            *(line.format("all") for line in rings),
            *self.elements(self.assigned([*self.initial(), *cell.constants.items()])),
            *ahead("0", "all"),
            "#pragma unroll 1",
            f"for (int first = 0; first < STEPS; first += {depth}) {{",
            *indented(chunk),
            "}",
            *self.final(),
        ]

    def body(self) -> list[str]:
        cell, t = self.cell, self.tiling
        old = [b for many in cell.old for b in many]
        pending = [
            [Buffer(f"y{n}_{g}", a.dtype, 1) for g in range(a.groups)] for n, a in enumerate(cell.outputs)
        ]
        inputs, constants = list(cell.inputs), list(cell.constants)
        known = (
            [*old, *inputs, *constants, *(b for p in cell.products for b in p.registers)] if t.held else old
        )
        lines = [
            *self.place(),
            f"unsigned *const counter = (unsigned *)(scratch + blockIdx.x / BLOCKS * {LINE});",
            *self.weights(),
            *self.declare(
                [*old, *constants, *inputs, *(b for many in pending for b in many)] if t.held else old
            ),
        ]
        lines += [
            f"float *const partial{n} = (float *)(shared_memory + {t.starts[len(cell.products) + n]});"
            for n in range(len(cell.products))
        ]
        if t.held:
            lines += self.elements(self.assigned([*self.initial(), *cell.constants.items()]))
            lines += self.inputs_at("0", "all_")
        else:
            lines += self.elements(self.assigned(self.initial()))
        at_end = self.flush(pending, "STEPS - 1") if t.held else []
        step: list[str] = []
        if t.held:
            step += self.declare([b for p in cell.products for b in p.registers])
            step += self.declare(inputs, "next_")
        else:
            step += self.pointers("step")
        for level in range(cell.levels):
            step += self.level(level, known, pending)
        targets = self.targets()
        if t.held:
            targets += self.assigned(
                [
                    (b, v)
                    for bs, vs in zip(pending, cell.values, strict=True)
                    for b, v in zip(bs, vs, strict=True)
                ]
            )
        else:
            targets += self.direct(pending)
        step += self.elements(targets, known)
        if inputs and t.held:
            copies = [f"all_{b.name}[e] = next_{b.name}[e];" for b in inputs]
            step += self.elements((), more=copies)
        lines += ["#pragma unroll 1", "for (int step = 0; step < STEPS; ++step) {", *indented(step), "}"]
        lines += at_end
        return [*lines, *self.final()]

    def weights(self) -> list[str]:
        """Declarations of the matmuls' weights, which are loaded."""
        lines, t = [], self.tiling
        for n, (p, own) in enumerate(zip(self.cell.products, t.products, strict=True)):
            target = Buffer(f"weight{n}", p.weight.dtype, 1)
            code = _Code([(target, p.weight, lambda text: f"return {text};")], set()).lines(
                {p.term: "term", p.column: "column"}
            )
            kind = (
                f"FloatWeights<{own.terms}, {own.columns}>"
                if own.itemsize == 4
                else f"TensorWeights<{own.terms}, {own.columns}, {own.split}, {str(own.kept).lower()}>"
            )
            pitch, element = own.terms, "float" if own.itemsize == 4 else "unsigned short"
            lines += [
                f"{kind} weights{n};",
                f"weights{n}.load(shared_memory + {t.starts[n]}, [&](int term, int own) -> float {{",
                f"  if (term >= {p.terms} || first_unit + own % UNITS >= ALL_UNITS) return 0;",
                "  const int column = own / UNITS * ALL_UNITS + first_unit + own % UNITS;",
                *indented(code),
                "});",
                f"{element} *const left{n} = ({element} *)(scratch + {t.left_starts[n]}) + first_row * {pitch};",
            ]
            if own.terms > p.terms:
                extra = own.terms - p.terms
                buffer = t.bands * t.rows * own.terms
                place = f"i / (ROWS * {extra}) * {buffer} + i / {extra} % ROWS * {pitch} + {p.terms} + i % {extra}"
                lines += [
                    f"for (int i = threadIdx.x; i < 2 * ROWS * {extra}; i += THREADS) left{n}[{place}] = 0;"
                ]
        return lines

    def pointers(self, step: str) -> list[str]:
        """Declarations of the inputs of a step."""
        number = self.slice(step)
        return [
            f"const auto *const {now.name} = {b.name} + {number} * {b.size};" for b, now in self.now.items()
        ]

    def slice(self, step: str) -> str:
        """The position of a step's inputs and outputs."""
        return f"int64_t(STEPS - 1 - ({step}))" if self.cell.reverse else f"int64_t({step})"

    def inputs_at(self, step: str, prefix: str) -> list[str]:
        """Load the inputs of a step."""
        loads = [(b, _moved(v, self.now)) for b, v in self.cell.inputs.items()]
        if not loads:
            return []
        return ["{", *indented([*self.pointers(step), *self.elements(self.assigned(loads, prefix))]), "}"]

    def direct(self, pending: Sequence[Sequence[Buffer]]) -> list:
        """Targets that store the outputs of a step."""
        cell, targets = self.cell, []
        for n, (a, bs, vs) in enumerate(
            zip(cell.outputs, pending, cell.values, strict=True), len(cell.carries)
        ):
            pointer = f"(result{n} + {self.slice('step')} * {a.size})"
            targets += [
                (b, v, lambda text, a=a, g=g, pointer=pointer: self.stored(a, g, pointer, text))
                for g, (b, v) in enumerate(zip(bs, vs, strict=True))
            ]
        return targets

    def flush(self, pending: Sequence[Sequence[Buffer]], step: str) -> list[str]:
        """Store the outputs of a step."""
        cell, number = self.cell, self.slice(step)
        stores = [
            self.stored(a, g, f"(result{n} + {number} * {a.size})", f"all_{b.name}[e]")
            for n, (a, bs) in enumerate(zip(cell.outputs, pending, strict=True), len(cell.carries))
            for g, b in enumerate(bs)
        ]
        return self.elements((), more=stores) if stores else []

    def level(self, level: int, known: Sequence[Buffer], pending: Sequence[Sequence[Buffer]]) -> list[str]:
        """Write left operands for all blocks of the same rows, and multiply."""
        cell, t = self.cell, self.tiling
        own = [
            (n, p, q)
            for n, (p, q) in enumerate(zip(cell.products, t.products, strict=True))
            if p.level == level
        ]
        targets = []
        for n, p, q in own:
            buffer = t.bands * t.rows * q.terms
            for g, v in enumerate(p.left):
                place = f"step % 2 * {buffer} + row_of(e) * {q.terms} + {g * cell.units} + first_unit + unit_of(e)"
                take = lambda text, n=n, q=q, place=place: (
                    f"if (is_inside(e)) left{n}[{place}] = {_bits(text, cell.dtype)};"
                )
                targets.append((Buffer(f"left{n}_{g}", v.dtype, 1), v, take))
        lines = [*self.elements(targets, known), "arrive_at_step(counter);"]
        if level == 0 and t.held:
            flush = self.flush(pending, "step - 1")
            if flush:
                lines += ["if (step > 0) {", *indented(flush), "}"]
            ahead = self.inputs_at("step + 1", "next_")
            if ahead:
                lines += ["if (step + 1 < STEPS)", *ahead]
        count = f"step * {cell.levels} + {level + 1}" if cell.levels > 1 else "step + 1"
        lines.append(f"wait_for_step(counter, BLOCKS * unsigned({count}));")
        staged = t.starts[-2]
        for n, _, q in own:
            buffer = t.bands * t.rows * q.terms
            lines += [
                f"weights{n}.multiply(left{n} + step % 2 * {buffer}, partial{n}, shared_memory + {staged});",
            ]
        lines.append("__syncthreads();")
        if not t.held:
            return lines
        sums = [f"all_{b.name}[e] = {self.sum(n, g)};" for n, p, _ in own for g, b in enumerate(p.registers)]
        return [*lines, *self.elements((), more=sums)]


def _words(code: str) -> set[str]:
    """The identifiers of a source."""
    return set(re.findall(r"[A-Za-z_]\w*", code))


def _moved(load: Value, names: Mapping[Buffer, Buffer]) -> Value:
    """A load of another buffer."""
    return Value("load", load.args, (names[load.attr[0]], load.attr[1]), load.dtype)


def _bits(text: str, dtype) -> str:
    """The bits of an element of a left operand."""
    if dtype == dtypes.float32:
        return text
    return f"(unsigned short)pack({scalar_ops.unrounded(text, dtype)}, 0)"


def _text(index: Index, names: Mapping[Range, str]) -> str:
    """An index as source: a sum of multiples of loop variables."""
    parts = [f"{names[r]} * {c}" if c > 1 else names[r] for r, c in index.terms.items()]  # type: ignore[index]
    return " + ".join([*parts, str(index.constant)] if index.constant or not parts else parts)


def source(cell: Cell, tiling: Tiling) -> str:
    """The complete CUDA C++ of a loop, but for the prelude."""
    return _Source(cell, tiling).text()


def complete(cell: Cell, tiling: Tiling) -> str:
    """The complete CUDA C++ of a loop."""
    return DEVICE.with_prelude(source(cell, tiling))
