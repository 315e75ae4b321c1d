"""C++ of native steps: the steps of a schedule as the statements of a function.

Kernels, stage 6 on the CPU. In: loops, branches, updates and library calls of a schedule, or a whole one, and the
schedules of bodies. Out: C++ functions that call the program's kernels. A value of a body lies at a constant offset in
the arena, or in an operand or result of the caller. A loop swaps the two buffers of a carry after a round, unless the
body updates it in place.

A step without a native form calls Python (``run.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Eqn, Literal
from blufunc.core.ops.barrier import optimization_barrier_p
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.primitives.override import is_replaced
from blufunc.kernels.backends.cpu import gemm, planning, scatters
from blufunc.kernels.backends.cpu.native.run import HostCall
from blufunc.kernels.backends.cpu.operands import strided
from blufunc.kernels.backends.cpu.renderer import work
from blufunc.kernels.backends.cpu.steps.forms import form_of, has_form
from blufunc.kernels.codegen import source_files
from blufunc.kernels.codegen.scopes import comment
from blufunc.kernels.loopir.ir import Kernel
from blufunc.kernels.ops.updates import UPDATES
from blufunc.kernels.schedule import KernelStep, OpaqueStep, Schedule

FILE = "backends/cpu/include/driver.h"

_STEP_NS, _HOST_NS = 5, 5_000
"""Estimated overhead of a step, native and in Python."""


class Driver:
    """Writer of the native steps of a program.

    Args:
      name_of: from a kernel to the name of its C++ function.

    Attributes:
      calls: the steps that run in Python, by number.
      uses_gemm: dtypes of matmuls of the GEMM library.
      uses: names of libraries of steps.
    """

    def __init__(self, name_of: Callable[[Kernel], str]):
        self.name_of = name_of
        self.calls: list[HostCall] = []
        self.uses_gemm: set[str] = set()
        self.uses: set[str] = set()
        self.functions: list[str] = []
        self.constants: dict[bytes, str] = {}
        self.bodies: dict[int, tuple[str, Schedule]] = {}
        self.control: dict[Eqn, str] = {}
        self.count = 0

    def source(self) -> str:
        """C++ of all steps, without the kernels that they call; empty if there are none."""
        if not self.functions:
            return ""
        pointers = [
            f"typedef void (*Product_{t})(const Product *, const void *, const void *, void *, int);\n"
            f'extern "C" Product_{t} gemm_{t};\nProduct_{t} gemm_{t};'
            for t in sorted(self.uses_gemm)
        ]
        pointers += [
            'extern "C" Library ' + f"{pointer_to(used)};\nLibrary {pointer_to(used)};"
            for used in sorted(self.uses)
        ]
        product = [source_files.source(gemm.FILE, "layout")] if self.uses_gemm else []
        constants = [
            f"alignas(16) static const unsigned char {name}[] = {{{', '.join(map(str, data)) or '0'}}};"
            for data, name in self.constants.items()
        ]
        head = source_files.source(FILE, "driver", *["library"] * bool(self.uses))
        return "\n".join([head, *product, *pointers, *constants, *self.functions]) + "\n"

    # -- steps of the program ------------------------------------------------------------------------

    def entry(self, step: OpaqueStep, values: Sequence[Any]) -> str:
        """The exported function of a native step of the program itself."""
        name = self.fresh("step")
        eqn = step.eqn
        if planning.is_control(eqn):
            inner = self.control_function(eqn)
            lines = [f"const int code = {inner}(operands, results, scratch, run);"]
        elif has_form(eqn):
            places = [f"operands[{n}]" for n in range(len(eqn.invars))]
            results = [f"results[{n}]" for n in range(len(eqn.outvars))]
            lines = [*self.library(step, values, places, results, "scratch"), "const int code = 0;"]
        else:
            places = [f"operands[{n}]" for n in range(len(eqn.invars))]
            lines = [*self.update(step, values, places, "results[0]"), "const int code = 0;"]
        self.functions.append(
            _function(
                f'extern "C" int {name}(char *const *operands, char *const *results, char *scratch, Run *run)',
                ["run->state = run->save();", *lines, "run->restore(run->state);", "return code;"],
                _where(eqn),
            )
        )
        return name

    def program(self, made: Schedule) -> None:
        """The exported function ``program``: of arrays, an arena and the run."""
        body = self.body(made, [], marked=True)
        n, m, data = len(made.inputs), len(made.outputs), f"data_of<{object.__basicsize__}>"
        head = 'extern "C" int program(const void *const *arguments, const void *const *results, char *arena, Run *run)'
        lines = [f"char *in[{max(n, 1)}], *out[{max(m, 1)}];"]
        lines.append(f"for (int i = 0; i < {n}; ++i) in[i] = {data}(arguments[i]);")
        lines.append(f"for (int i = 0; i < {m}; ++i) out[i] = {data}(results[i]);")
        lines += ["run->state = run->save();", f"const int code = {body}(arena, in, out, run);"]
        self.functions.append(_function(head, [*lines, "run->restore(run->state);", "return code;"], ""))

    def update(
        self, step: OpaqueStep, values: Sequence[Any], places: Sequence[str], result: str
    ) -> list[str]:
        """Statements of a scatter or window update.

        ``places`` are the addresses of the values of its operands.
        """
        eqn = step.eqn
        ops = [scatters.Place(base, x.strides) for base, x in self.views(step, values, places)]
        if eqn.prim in UPDATES:
            x, update, *starts = ops
            lines = scatters.updated(eqn, x, update, starts, result)
        else:
            x, indices, updates = ops
            lines = scatters.scattered(eqn, x, indices, updates, result)
        return ["{", *lines, "}"]

    @staticmethod
    def views(
        step: OpaqueStep, values: Sequence[Any], places: Sequence[str]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Address of each operand, and an array with its strides."""
        for o, base in zip(step.operands, places, strict=True):
            if isinstance(o, Literal):
                yield base, np.ascontiguousarray(o.array).reshape(o.aval.shape)
            else:
                x = strided(o, values)
                yield f"{base} + {x.offset}" if x.offset else base, x.model

    def library(
        self,
        step: OpaqueStep,
        values: Sequence[Any],
        places: Sequence[str],
        results: Sequence[str],
        scratch: str,
    ) -> list[str]:
        """Statements of a step that a library computes; ``Args`` as of ``update``."""
        form = form_of(step.eqn)
        self.uses.add(form.library)
        addresses, models = zip(*self.views(step, values, places), strict=True)
        parameters = ", ".join(map(str, form.parameters(models)))
        threads = "(int)run->threads" if form.chunks > 1 else "1"
        return [
            f"{{ static const int64_t parameters[] = {{{parameters}}};",
            f"char *const from[] = {{{', '.join(addresses)}}}, *const to[] = {{{', '.join(results)}}};",
            f"{pointer_to(form.library)}(parameters, from, to, {scratch}, {threads}); }}",
        ]

    # -- loops and branches --------------------------------------------------------------------------

    def control_function(self, eqn: Eqn) -> str:
        """The function of a loop or branch: of operands, results, scratch and the run."""
        found = self.control.get(eqn)
        if found is None:
            found = self.control[eqn] = self.fresh(eqn.prim.name)
            lines = self.branch(eqn) if eqn.prim.name == "cond" else self.loop(eqn)
            head = f"static int {found}(char *const *operands, char *const *results, char *scratch, Run *run)"
            self.functions.append(_function(head, lines, _where(eqn)))
        return found

    def branch(self, eqn: Eqn) -> list[str]:
        bodies = [self.body(b, range(len(b.outputs))) for b in planning.branches_of(eqn)]
        lines = ["const int32_t at = *(const int32_t *)operands[0];", "switch (at < 0 ? 0 : at) {"]
        for n, name in enumerate(bodies):
            label = f"case {n}" if n < len(bodies) - 1 else "default"
            lines.append(f"{label}: return {name}(scratch, operands + 1, results, run);")
        return [*lines, "}"]

    def loop(self, eqn: Eqn) -> list[str]:
        """Statements of a ``scan`` or ``while``."""
        loop, layout = planning.rounds_of(eqn), planning.layout_of(eqn)
        body, n, first = loop.body, loop.n_consts, loop.n_cond + loop.n_consts
        carries = range(loop.n_carry)
        sizes = [v.aval.nbytes for v in eqn.outvars[: loop.n_carry]]
        home = [planning.taken(loop, k) for k in carries]
        spare = [k for k in carries if home[k] is None]
        xs = range(n + loop.n_carry, len(body.inputs))
        ys = range(loop.n_carry, len(body.outputs))
        lines = [f"char *in[{max(len(body.inputs), 1)}], *out[{max(len(body.outputs), 1)}];"]
        lines += [f"in[{i}] = operands[{loop.n_cond + i}];" for i in range(n)]
        for k in carries:
            lines.append(f"copy(results[{k}], operands[{first + k}], {sizes[k]});")
            lines.append(f"in[{n + k}] = results[{k}];")
        lines += [f"out[{k}] = scratch + {layout.spares[k]};" for k in spare]
        if loop.cond is not None:
            cond = self.body(loop.cond, [0])
            lines.append(
                f"char *given[{max(len(loop.cond.inputs), 1)}], *flag[1] = {{scratch + {layout.flag}}};"
            )
            lines += [f"given[{i}] = operands[{i}];" for i in range(loop.n_cond)]
        limit = "" if loop.most is None else f"i < {loop.most}"
        lines.append(f"for (int64_t i = 0; {limit}; ++i) {{")
        if loop.cond is not None:
            lines += [f"given[{loop.n_cond + k}] = in[{n + k}];" for k in carries]
            lines.append(f"if ({cond}(scratch, given, flag, run)) return 1;")
            lines.append("if (!*flag[0]) break;")
        if xs or ys:
            lines.append(f"const int64_t at = {f'{(loop.most or 1) - 1} - i' if loop.reverse else 'i'};")
        for x in xs:
            nbytes = planning.bytes_of(body, body.inputs[x])
            lines.append(f"in[{x}] = operands[{loop.n_cond + x}] + at * {nbytes};")
        for y in ys:
            lines.append(f"out[{y}] = results[{y}] + at * {_output_bytes(body, y)};")
        name = self.body(body, [*spare, *ys])
        lines.append(f"if ({name}(scratch, in, out, run)) return 1;")
        lines += self.rotation(n, home, sizes)
        lines.append(f"if (interrupted(run, {_nanoseconds(body)})) return 1;")
        lines.append("}")
        if loop.n_carry:
            lines.append(f"static const int64_t bytes[] = {{{', '.join(map(str, sizes))}}};")
            lines.append(f"settle({loop.n_carry}, in + {n}, results, bytes);")
        return [*lines, "return 0;"]

    @staticmethod
    def rotation(n: int, home: Sequence[int | None], sizes: Sequence[int]) -> list[str]:
        """Statements after a round that give each carry its new buffer, and reuse the old."""
        moved = [k for k, j in enumerate(home) if j != k]
        free = [j for j in range(len(home)) if j not in home]
        lines = []
        for k in moved:
            j = home[k]
            lines.append(f"char *const next_{k} = {f'out[{k}]' if j is None else f'in[{n + j}]'};")
        for k in (k for k in moved if home[k] is None):
            j = next(j for j in free if sizes[j] == sizes[k])
            free.remove(j)
            lines.append(f"out[{k}] = in[{n + j}];")
        # carries are read above before any is replaced here
        return [*lines, *(f"in[{n + k}] = next_{k};" for k in moved)]

    # -- bodies --------------------------------------------------------------------------------------

    def body(self, made: Schedule, written: Sequence[int], marked: bool = False) -> str:
        """The function of a body: of its arena, operands, results and the run.

        Args:
          made: its schedule.
          written: the results that it must write to the addresses in ``out``; it leaves the others in operands.
          marked: whether recordings see its steps.
        """
        known = self.bodies.get(id(made))
        if known is not None:
            return known[0]
        name = self.fresh("body")
        self.bodies[id(made)] = (name, made)  # the schedule stays alive, and so its id
        writer = _Body(self, made)
        lines = [*writer.steps(marked), *writer.results(written), "return 0;"]
        head = f"static int {name}(char *arena, char *const *in, char *const *out, Run *run)"
        self.functions.append(_function(head, lines, ""))
        return name

    def fresh(self, stem: str) -> str:
        self.count += 1
        return f"{stem}_{self.count}"

    def constant(self, array: np.ndarray) -> str:
        """The address of a constant."""
        data = np.ascontiguousarray(array).tobytes()
        name = self.constants.setdefault(data, f"constant_{len(self.constants)}")
        return f"(char *){name}"


def pointer_to(library: str) -> str:
    """Name of the pointer to the function of a library."""
    return f"library_{library}"


def is_whole(made: Schedule) -> bool:
    """True if all steps of a program are native, and results in their own memory."""
    for step in made.steps:
        if isinstance(step, KernelStep):
            continue
        assert isinstance(step, OpaqueStep)
        eqn = step.eqn
        matmul = (
            eqn.prim is dot_general_p and step.planned and gemm.layout_of_step(step, made.values) is not None
        )
        barrier = (
            eqn.prim is optimization_barrier_p and not step.planned and not is_replaced(eqn.prim, "impl")
        )
        if not (matmul or barrier or planning.is_native(eqn)):
            return False
    return all(isinstance(o, Literal) or o in made.inputs or _is_returned(made, o) for o in made.outputs)


def _is_returned(made: Schedule, o: int) -> bool:
    place = made.place(o)
    if place is None or place.offset or o in made.aliases:
        return False
    if place.space == "output":
        return place.owner == o
    return place.space == "argument" and planning.bytes_of(made, o) == planning.bytes_of(made, place.owner)


class _Body:
    """Writer of the steps of one schedule."""

    def __init__(self, driver: Driver, made: Schedule):
        self.driver, self.made = driver, made
        self.where_in = {i: n for n, i in reversed([*enumerate(made.inputs)])}
        self.where_out: dict[int, int] = {}  # an alias has the place of its root
        self.literals: dict[int, str] = {}  # results of barriers
        for n, o in enumerate(made.outputs):
            if isinstance(o, int):
                self.where_out.setdefault(made.root(o), n)

    def address(self, i: int, offset: int = 0) -> str:
        """The address of a value, as an expression."""
        if i in self.literals:
            base, at = self.literals[i], offset
        elif i in self.where_in:
            base, at = f"in[{self.where_in[i]}]", offset
        else:
            place = self.made.place(i)
            assert place is not None, self.made.values[i]
            owner = {
                "arena": lambda: "arena",
                "output": lambda: f"out[{self.where_out[place.owner]}]",
                "argument": lambda: f"in[{self.where_in[place.owner]}]",
            }
            base, at = owner[place.space](), place.offset + offset
        return f"{base} + {at}" if at else base

    def operand(self, o: Any) -> str:
        """The address of the value of an operand."""
        return self.driver.constant(np.asarray(o.array)) if isinstance(o, Literal) else self.address(o[0])

    def steps(self, marked: bool) -> Iterator[str]:
        for n, step in enumerate(self.made.steps):
            if marked:
                yield f"mark(run, {n});"
            if isinstance(step, KernelStep):
                yield from self.kernel(step)
            else:
                assert isinstance(step, OpaqueStep)
                yield from self.opaque(step)
        if marked:
            yield f"mark(run, {len(self.made.steps)});"

    def kernel(self, step: KernelStep) -> Iterator[str]:
        table = [f"(void *)({self.address(i, o)})" for i, o in zip(step.values, step.offsets, strict=True)]
        name = self.driver.name_of(step.kernel)
        yield f"{{ void *table[] = {{{', '.join(table)}}}; {name}(table, (int)run->threads); }}"

    def opaque(self, step: OpaqueStep) -> Iterator[str]:
        eqn = step.eqn
        if not step.planned:
            assert eqn.prim is optimization_barrier_p
            for o, r in zip(step.operands, step.results, strict=True):  # the others are aliases
                if r is not None and (isinstance(o, Literal) or o[0] in self.literals):
                    self.literals[r] = self.operand(o)
            return
        results = [None if r is None else self.address(r) for r in step.results]
        if planning.is_control(eqn):
            yield from self.control(step, results)
        elif has_form(eqn):
            yield from self.library(step, results)
        elif planning.is_native(eqn):
            places = [self.operand(o) for o in step.operands]
            yield from self.driver.update(step, self.made.values, places, str(results[0]))
        else:
            yield from self.product(step, str(results[0]) if results else "") or self.host(step, results)

    def library(self, step: OpaqueStep, results: Sequence[str | None]) -> list[str]:
        scratch = "nullptr" if step.scratch is None else self.address(step.scratch)
        places = [self.operand(o) for o in step.operands]
        return self.driver.library(step, self.made.values, places, self.wanted(step, results), scratch)

    def wanted(self, step: OpaqueStep, results: Sequence[str | None]) -> list[str]:
        """Addresses of the results of a step; unread ones are in its scratch memory."""
        if None not in results:
            return list(results)  # type: ignore[arg-type]
        scratch = (
            "arena" if step.scratch is None else self.address(step.scratch)
        )  # empty results have no scratch
        dropped = planning.dropped_of(step.eqn)
        return [f"{scratch} + {dropped[n]}" if r is None else r for n, r in enumerate(results)]

    def control(self, step: OpaqueStep, results: Sequence[str | None]) -> Iterator[str]:
        assert step.scratch is not None
        scratch = self.address(step.scratch)
        operands = [self.operand(o) for o in step.operands]
        wanted = self.wanted(step, results)
        name = self.driver.control_function(step.eqn)
        yield (
            f"{{ char *operands[] = {{{', '.join(operands) or '0'}}}, *results[] = {{{', '.join(wanted) or '0'}}}; "
            f"if ({name}(operands, results, {scratch}, run)) return 1; }}"
        )

    def product(self, step: OpaqueStep, result: str) -> list[str] | None:
        """A matmul by the GEMM library; None if it has none."""
        eqn = step.eqn
        if eqn.prim is not dot_general_p or is_replaced(eqn.prim, "impl"):
            return None
        found = gemm.layout_of_step(step, self.made.values)
        if found is None:
            return None
        layout, lhs, rhs = found
        dtype = eqn.outvars[0].aval.dtype.name
        self.driver.uses_gemm.add(dtype)
        left, right = self.address(lhs.value, lhs.offset), self.address(rhs.value, rhs.offset)
        threads = "(int)run->threads" if layout.threads(2) > 1 else "1"
        call = f"gemm_{dtype}(&p, {left}, {right}, {result}, {threads});"
        return [f"{{ static const Product p = {layout.initializer()}; {call} }}"]

    def host(self, step: OpaqueStep, results: Sequence[str | None]) -> list[str]:
        """A step in Python."""
        values = self.made.values
        operands: list[Any] = []
        addresses = []
        for o in step.operands:
            if isinstance(o, Literal):
                operands.append(np.asarray(o.array))
            else:
                operands.append((values[o[0]].aval, o[1]))  # type: ignore[union-attr]
                addresses.append(self.address(o[0]))
        number = len(self.driver.calls)
        self.driver.calls.append(HostCall(step.eqn, operands))
        table = ", ".join(f"(void *)({a})" for a in [*addresses, *(r or "0" for r in results)])
        return [f"{{ void *table[] = {{{table or '0'}}}; if (host(run, {number}, table)) return 1; }}"]

    def results(self, written: Sequence[int]) -> Iterator[str]:
        """Copies of results that are not at the addresses in ``out``."""
        for n in written:
            o = self.made.outputs[n]
            if isinstance(o, Literal):
                array = np.asarray(o.array)
                yield f"memcpy(out[{n}], {self.driver.constant(array)}, {array.nbytes});"
                continue
            address = self.address(o)
            if address != f"out[{n}]":
                yield f"memcpy(out[{n}], {address}, {_output_bytes(self.made, n)});"


def _output_bytes(made: Schedule, n: int) -> int:
    o = made.outputs[n]
    return int(np.asarray(o.array).nbytes) if isinstance(o, Literal) else planning.bytes_of(made, o)


def _nanoseconds(made: Schedule) -> int:
    """Estimated time of the steps of a body, without its loops."""
    total = _STEP_NS
    for step in made.steps:
        if isinstance(step, KernelStep):
            total += _STEP_NS + work(step.kernel) // 4
            continue
        assert isinstance(step, OpaqueStep)
        if step.eqn.prim is dot_general_p:
            total += _STEP_NS + _multiplications(step.eqn) // 8
        elif has_form(step.eqn):
            total += _STEP_NS + int(form_of(step.eqn).nanoseconds)
        elif not planning.is_control(step.eqn):
            total += _HOST_NS
    return total


def _multiplications(eqn: Eqn) -> int:
    lhs = eqn.invars[0].aval
    return eqn.outvars[0].aval.size * math.prod(lhs.shape[d] for d in eqn.params["dimension_numbers"][0][0])


def _where(eqn: Eqn) -> str:
    return comment(f"at {source.summary(eqn.source)}") if eqn.source is not None else ""


def _function(head: str, lines: Sequence[str], note: str) -> str:
    """A C++ function, indented by its braces."""
    out, depth = [*[note] * bool(note), f"{head} {{"], 1
    for line in lines:
        closes = line.startswith("}")
        out.append("  " * (depth - closes) + line)
        depth += line.count("{") - line.count("}")
    return "\n".join([*out, "}"])
