"""Recurrent cells: the bodies of scans that one kernel can hold.

Kernels, stage 5 for a ``scan``, below ``tiling`` and ``source``. In: the equation. Out: a ``Cell``, or why there is
none.

Without matmuls, all that a body does is pointwise, such as a linear recurrence or discounted sums.

A cell has **rows**, which do not depend on each other, and **units**. Each of its arrays has rows, columns, both or
neither; its columns are **groups** of one column per unit: unit ``u`` of an LSTM of H units has the columns ``u``, ``u
+ H``, ``u + 2 H`` and ``u + 3 H`` of the gates. All that is pointwise reads values of the same row and unit. Only the
left operands of matmuls, by weights that are constant in the loop, are read by other units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.elementwise import and_p, select_p
from blufunc.core.ops.gather_scatter import scatter_add_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.programs.simplify import simplified_body
from blufunc.kernels.backends.cuda.target import CUDA
from blufunc.kernels.fusion.fuse import Fusion, Region
from blufunc.kernels.fusion.iteration_space import Frame, scans_by, sort_of
from blufunc.kernels.loopir.access_map import Place
from blufunc.kernels.loopir.index import ZERO, Index, Range, flat, of, ranges_of, unflat
from blufunc.kernels.loopir.ir import (
    Buffer,
    Replacement,
    Value,
    choose,
    computed_in,
    const,
    held_as,
    load,
    post_order,
)
from blufunc.kernels.lower.values import Values

MOST_OPERATIONS = 1024
"""Scalar operations of a step of one unit: they must compile in seconds."""

FACTORS = (dtypes.bfloat16, dtypes.float16, dtypes.float32)
"""Dtypes of matmuls."""


class NoCellError(Exception):
    """A scan is no cell; the message says why."""


@dataclass(frozen=True)
class Array:
    """A carry, an output or a matmul as its elements at a row and unit.

    Attributes:
      axes: "row unit", "row", "unit" or "".
      indices: for each group, the position of the element.
      dtype: as kernels hold it.
      size: number of elements.
    """

    axes: str
    indices: tuple[Index, ...]
    dtype: Any
    size: int

    @property
    def groups(self) -> int:
        """Elements at one row and unit."""
        return len(self.indices)


@dataclass(frozen=True, eq=False)
class Product:
    """The matmul of a varying matrix and constant weights.

    Attributes:
      level: number of matmuls on the longest path to it in a step.
      terms, columns: sizes of the weights, multiples of the units.
      left: for each group of terms, the left operand's value at a row and unit.
      weight: the weight at ``term`` and ``column``.
      term, column: loop variables of ``weight``.
      registers: buffers of one element: a unit's results, by group.
    """

    level: int
    terms: int
    columns: int
    left: tuple[Value, ...]
    weight: Value
    term: Range
    column: Range
    registers: tuple[Buffer, ...]


@dataclass(frozen=True, eq=False)
class Cell:
    """A scan that one kernel can hold.

    Attributes:
      steps, reverse: of the scan.
      rows, units: sizes.
      row, unit: the loop variables that values depend on.
      dtype: of the operands of matmuls; None without any.
      products: in an order of dependence.
      operands: buffers of the scan's operands: constants, initial carries, and slices of inputs.
      n_consts: number of constants.
      carries: their elements, equal for old and new ones.
      old: a buffer of one element for each group of each carry.
      new: the next values of the carries.
      outputs: the stacked results, per step.
      values: their values.
      inputs: loads of a step's inputs, by the buffers of one element that stand for them.
      constants: loads that are the same in all steps, likewise.
    """

    steps: int
    reverse: bool
    rows: int
    units: int
    row: Range
    unit: Range
    dtype: Any
    products: tuple[Product, ...]
    operands: tuple[Buffer, ...]
    n_consts: int
    carries: tuple[Array, ...]
    old: tuple[tuple[Buffer, ...], ...]
    new: tuple[tuple[Value, ...], ...]
    outputs: tuple[Array, ...]
    values: tuple[tuple[Value, ...], ...]
    inputs: dict[Buffer, Value]
    constants: dict[Buffer, Value]

    @property
    def levels(self) -> int:
        """Number of matmuls, one after the other, of a step."""
        return max((1 + p.level for p in self.products), default=0)

    @property
    def registers(self) -> int:
        """Scalars of a row and unit that live through a step."""
        own = sum(a.groups for a in self.carries) + len(self.constants) + 2 * len(self.inputs)
        return own + sum(a.groups for a in self.outputs) + sum(len(p.registers) for p in self.products)


def cell_of(eqn: Eqn) -> Cell | str | None:
    """The cell of a scan, or why there is none; None without matmuls."""
    p = eqn.params
    key = "loop kernel", p["length"], p["reverse"], p["n_consts"], p["n_carry"]
    found = p["jaxpr"].memoised(key, lambda: (_found(eqn),))
    return found[0]


def _found(eqn: Eqn) -> Cell | str | None:
    body = simplified_body(eqn.params["jaxpr"])
    try:
        return _Search(eqn, body).cell()
    except NoCellError as e:
        return str(e) if any(e.prim is dot_general_p for e in body.eqns) else None


@dataclass(frozen=True)
class _Dot:
    """A matmul of the body: ``side`` is the position of its varying operand."""

    eqn: Eqn
    side: int
    level: int

    @property
    def varying(self) -> Any:
        return self.eqn.invars[self.side]

    @property
    def weight(self) -> Any:
        return self.eqn.invars[1 - self.side]

    def contracted(self, side: int) -> tuple[int, ...]:
        return tuple(self.eqn.params["dimension_numbers"][0][side])

    def sizes(self, side: int) -> tuple[list[int], list[int]]:
        """Sizes of an operand's free axes, and of its contracted ones."""
        shape, own = self.eqn.invars[side].aval.shape, self.contracted(side)
        return [n for d, n in enumerate(shape) if d not in own], [shape[d] for d in own]

    @property
    def rows(self) -> int:
        return math.prod(self.sizes(self.side)[0])

    @property
    def terms(self) -> int:
        return math.prod(self.sizes(self.side)[1])

    @property
    def columns(self) -> int:
        return math.prod(self.sizes(1 - self.side)[0])

    def place(self, side: int, free: Index, term: Index) -> Place:
        """The element of an operand at a row or column, and a term."""
        frees, terms = self.sizes(side)
        outer, inner = (
            iter(unflat(free, frees)),
            dict(zip(self.contracted(side), unflat(term, terms), strict=True)),
        )
        ndim = self.eqn.invars[side].aval.ndim
        return tuple(inner[d] if d in inner else next(outer) for d in range(ndim))

    def result(self, row: Index, column: Index) -> Index:
        """The position of a result."""
        parts = [unflat(row, self.sizes(self.side)[0]), unflat(column, self.sizes(1 - self.side)[0])]
        return flat((*parts[self.side], *parts[1 - self.side]), self.eqn.outvars[0].aval.shape)


class _Element(Values):
    """Values of a body, in which operands and matmuls are in memory."""

    def __init__(self, body: Jaxpr, buffers: dict[Any, Buffer]):
        eqns = [e for e in body.eqns if e.prim is not dot_general_p]
        region = Region(Frame(1), eqns=eqns)
        super().__init__(region, Fusion(body, [region], {}, []), CUDA)
        self.inputs = dict(buffers)


@dataclass
class _Search:
    """The search for a cell.

    Attributes:
      level: of each varying variable of the body, the number of matmuls on the longest path to it.
      own: by buffer and position, the scalar that a row and unit holds.
    """

    eqn: Eqn
    body: Jaxpr
    level: dict[Any, int] = field(default_factory=dict)
    own: dict[tuple[Buffer, Index], Buffer] = field(default_factory=dict)
    inputs: dict[Buffer, Value] = field(default_factory=dict)
    constants: dict[Buffer, Value] = field(default_factory=dict)
    loads: dict[Any, Buffer] = field(default_factory=dict)

    scalars: dict[Buffer, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.replacement = Replacement(self.replaced)

    def cell(self) -> Cell:
        p, body = self.eqn.params, self.body
        n, m = p["n_consts"], p["n_consts"] + p["n_carry"]
        dots = self.dots(n)
        carries = [v.aval for v in body.invars[n:m]]
        dtype = self.one({a.aval.dtype for d in dots for a in d.eqn.invars}, "its matmuls are of {}")
        if dots and dtype not in FACTORS:
            raise NoCellError(f"its matmuls are of {dtype}")
        if dots:
            rows = self.one({d.rows for d in dots}, "its matmuls have {} rows")
            wide = [a.size // rows for a in carries if a.size > rows and a.size % rows == 0 and a.size > 1]
            units = math.gcd(*wide, *[d.terms for d in dots], *[d.columns for d in dots])
        else:
            rows, units = _sizes([*carries, *(v.aval for v in body.outvars)])
        self.row, self.unit = Range("row", rows), Range("unit", units)
        self.at = of(self.row), of(self.unit)

        operands = tuple(
            Buffer(
                f"{'const' if i < n else 'carry' if i < m else 'input'}{i}",
                held_as(v.aval.dtype),
                v.aval.size,
            )
            for i, v in enumerate(body.invars)
        )
        self.kinds = dict(
            zip(operands, ["const"] * n + ["carry"] * (m - n) + ["input"] * (len(operands) - m), strict=True)
        )
        buffers = dict(zip(body.invars, operands, strict=True))
        arrays = [self.array(a, f"the carry {a}") for a in carries]
        old = tuple(
            tuple(self.register(f"c{k}_{g}", b, i) for g, i in enumerate(array.indices))
            for k, (array, b) in enumerate(zip(arrays, operands[n:m], strict=True))
        )
        results = []
        for k, d in enumerate(dots):
            out = d.eqn.outvars[0]
            b = buffers[out] = Buffer(f"product{k}", held_as(out.aval.dtype), out.aval.size)
            self.kinds[b] = "product"
            at = [d.result(self.at[0], self.column(g)) for g in range(d.columns // units)]
            results.append(tuple(self.register(f"p{k}_{g}", b, i) for g, i in enumerate(at)))
        values = _Element(body, buffers)
        products = []
        for d, registers in zip(dots, results, strict=True):
            left = [
                self.resolved(values.at(d.varying, d.place(d.side, self.at[0], self.column(g))))
                for g in range(d.terms // units)
            ]
            term, column = Range("term", d.terms), Range("column", d.columns)
            weight = values.at(d.weight, d.place(1 - d.side, of(column), of(term)))
            self.check_weight(weight)
            products.append(
                Product(d.level, d.terms, d.columns, tuple(left), weight, term, column, registers)
            )
        new = tuple(self.values(values, v, a) for v, a in zip(body.outvars[: m - n], arrays, strict=True))
        avals = [v.aval for v in body.outvars[m - n :]]
        outputs = tuple(self.array(a, f"the output {a}") for a in avals)
        stacked = tuple(
            self.values(values, v, a) for v, a in zip(body.outvars[m - n :], outputs, strict=True)
        )
        roots = [*(v for p in products for v in p.left), *(v for many in (*new, *stacked) for v in many)]
        if len(post_order(roots)) > MOST_OPERATIONS:
            raise NoCellError("its body is too long")
        return Cell(
            p["length"], p["reverse"], rows, units, self.row, self.unit, dtype, tuple(products), operands, n,
            tuple(arrays), old, new, outputs, stacked, self.inputs, self.constants,
        )  # fmt: skip

    def dots(self, n_consts: int) -> list[_Dot]:
        """The matmuls of the body, each of a varying and a constant operand."""
        if self.eqn.effects:
            raise NoCellError("it has effects")
        self.level = dict.fromkeys(self.body.invars[n_consts:], 0)
        found = []
        for e in self.body.eqns:
            levels = [self.level.get(a) if a.__class__ is not Literal else None for a in e.invars]
            known = [x for x in levels if x is not None]
            depth = max(known, default=0)
            if e.prim is dot_general_p:
                if (
                    is_replaced(dot_general_p, "impl")
                    or e.params["dimension_numbers"][1][0]
                    or len(known) != 1
                ):
                    raise NoCellError(
                        "a matmul of its body is not one by weights that are constant in the loop"
                    )
                found.append(_Dot(e, levels.index(known[0]), depth))
                depth += 1
            elif sort_of(e) == "opaque" or scans_by(e.prim) or e.prim is scatter_add_p:
                raise NoCellError(f"{e.prim.name} is not pointwise")
            if known:
                self.level.update(dict.fromkeys(e.outvars, depth))
        return found

    @staticmethod
    def one(found: set, message: str) -> Any:
        """The only element; None if there is none."""
        if len(found) > 1:
            raise NoCellError(message.format(" and ".join(sorted(map(str, found)))))
        return next(iter(found), None)

    def column(self, group: int) -> Index:
        """The column of a group."""
        return self.at[1] + group * self.unit.extent

    def array(self, aval: ShapedArray, what: str) -> Array:
        """An array as elements of a row and unit."""
        (row, _), rows, units = self.at, self.row.extent, self.unit.extent
        if aval.size == 1:
            axes, flats = "", [ZERO]
        elif aval.size and aval.size % (rows * units) == 0:
            groups = aval.size // (rows * units)
            axes, flats = "row unit", [row * (groups * units) + self.column(g) for g in range(groups)]
        elif aval.size == rows:
            axes, flats = "row", [row]
        elif aval.size and aval.size % units == 0:
            axes, flats = "unit", [self.column(g) for g in range(aval.size // units)]
        else:
            raise NoCellError(f"{what} has no rows or columns of {rows} x {units}")
        if len(flats) > 16:
            raise NoCellError(f"{what} has {len(flats)} columns for each unit")
        return Array(axes, tuple(flats), held_as(aval.dtype), aval.size)

    def register(self, name: str, buffer: Buffer, index: Index) -> Buffer:
        """A scalar that stands for an element of a buffer."""
        made = self.own[buffer, index] = Buffer(name, buffer.dtype, 1)
        return made

    def values(self, values: Values, atom: Any, array: Array) -> tuple[Value, ...]:
        """The values of a result, by group."""
        if atom.aval.size != array.size:
            raise NoCellError("a carry changes its size")
        shape = atom.aval.shape
        return tuple(self.resolved(values.at(atom, unflat(i, shape))) for i in array.indices)

    def resolved(self, value: Value) -> Value:
        """A value in which scalars stand for all loads."""
        return self.replacement(value)

    def replaced(self, v: Value) -> Value | None:
        """Another value for a load, or for one that is known.

        A group lies inside or outside of a pad, so its conditions are constants.
        """
        args = [self.replacement.done[a] for a in v.args]
        if v.op == "within":
            index, least, end = v.attr
            low, high = index.bounds()
            known = low >= least and high < end
            return const(known, dtypes.bool_) if known or high < least or low >= end else None
        if v.op == "apply" and v.attr[0] is select_p and args[0].op == "const" and len(args) == 3:
            return args[1] if args[0].attr else args[2]
        conjunction = v.op == "apply" and v.attr[0] is and_p and dtypes.is_bool(v.dtype)
        if conjunction and any(a.op == "const" for a in args):
            if any(a.op == "const" and not a.attr for a in args):
                return const(False, dtypes.bool_)
            return next((a for a in args if a.op != "const"), args[0])
        if v.op != "load":
            return None
        if args and args[0].op == "const":
            if not args[0].attr:
                return const(0, v.dtype)
            args = []
        return self.loaded(Value("load", tuple(args), v.attr, v.dtype))

    def loaded(self, v: Value) -> Value:
        """The scalar that stands for a load."""
        buffer, index = v.attr
        if computed_in(index):
            raise NoCellError("it reads at indices that it computes")
        kind = self.kinds[buffer]
        if kind in ("carry", "product"):
            found = self.own.get((buffer, index))
            if found is None:
                what = "its carries" if kind == "carry" else "its matmuls"
                raise NoCellError(f"pointwise work reads {what} at another row or column than its own")
            scalar = self.scalar(found)
            return choose(v.args[0], scalar, const(0, v.dtype)) if v.args else scalar
        self.check_ranges(v)
        key = (buffer, index, *v.args)
        if key not in self.loads:
            table, letter = (self.constants, "k") if kind == "const" else (self.inputs, "x")
            self.loads[key] = Buffer(f"{letter}{len(table)}", v.dtype, 1)
            table[self.loads[key]] = v
        return self.scalar(self.loads[key])

    def scalar(self, register: Buffer) -> Value:
        """The value of a register."""
        return self.scalars.setdefault(register, load(register, ZERO))

    def check_ranges(self, v: Value) -> None:
        """Refuse loads in loops, and under conditions that are computed from others."""
        inside = ranges_of(v.attr[1]).union(*[a.ranges() for a in v.args]) <= {self.row, self.unit}
        if not inside or any(x.op not in ("within", "const", "apply", "number") for x in post_order(v.args)):
            raise NoCellError("it reduces over elements of other rows or columns")

    def check_weight(self, weight: Value) -> None:
        for v in post_order([weight]):
            if v.op == "load" and self.kinds[v.attr[0]] != "const":
                raise NoCellError("weights of a matmul change in the loop")


def _sizes(avals: Sequence[ShapedArray]) -> tuple[int, int]:
    """Rows and units of arrays without matmuls: those of the largest one."""
    largest = max(avals, key=lambda a: a.size, default=None)
    if largest is None or not largest.ndim:
        return 1, 1
    rows = math.prod(largest.shape[:-1])
    return rows, math.gcd(*[a.shape[-1] for a in avals if a.ndim and math.prod(a.shape[:-1]) == rows])
