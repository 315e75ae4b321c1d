"""``dot_general`` on a CUDA device: a GEMM by cuBLASLt on operands in place.

Kernels, stages 6 and 8. In: a step and its operands, which may be transposes, slices or broadcasts of values: two
factors, and an optional addend. Out: a ``Product``, or None where the library has none and CuPy or the host computes
the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from blufunc import errors
from blufunc.config import config
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Var
from blufunc.core.primitives.linear_ops import transpose_p
from blufunc.kernels.backends.cuda.device_model import (
    BANDWIDTH,
    COLLECTIVE_SMS,
    GEMM_COLUMNS,
    GEMM_ROWS,
    GEMM_WAVE_SECONDS,
    H200,
    L2_BYTES,
    MATMUL,
    MATMUL_TF32,
    SM_COUNT,
)
from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.driver.memory import DeviceBuffer
from blufunc.kernels.backends.cuda.executor import ALIGNMENT, Executor, Operand, Place, Work
from blufunc.kernels.backends.cuda.library import cublaslt
from blufunc.kernels.backends.cuda.library.cupy_ops import CUPY
from blufunc.kernels.backends.cuda.library.host import HOST
from blufunc.kernels.backends.cuda.library.library_kernel import (
    Compile,
    Function,
    FunctionKernel,
    run_function,
)
from blufunc.kernels.gemm_layout import UNIT, Copies, Gemm, Layout, chunks_of, plan_dot_general
from blufunc.kernels.loopir.index import strides_of
from blufunc.kernels.ops.gemm import PRODUCTS, dot_accumulate_p, dot_bias_p, dot_promoted_p
from blufunc.kernels.precision import ALGORITHMS, ProductShape, is_tf32, resolved
from blufunc.kernels.schedule import OpaqueStep

Axes = tuple[int, ...]

_COMPUTE: dict[np.dtype, str] = {
    dtypes.float64: "f64", dtypes.complex128: "f64", dtypes.int8: "i32",
}  # fmt: skip
"""Accumulators other than float32."""


def seconds(eqn: Eqn) -> float:
    """Time of a matmul without batch axes, by the waves of tiles on all SMs.

    A wave multiplies, and then stores what it computed: short contractions are slow, and so are few tiles.
    """
    (left, _), _ = eqn.params["dimension_numbers"]
    lhs, rhs, out = (a.aval for a in (*eqn.invars, *eqn.outvars))
    terms = math.prod(lhs.shape[d] for d in left)
    rows, columns = lhs.size // terms, rhs.size // terms
    tf32 = lhs.dtype == dtypes.float32 and is_tf32(resolved(eqn.params["precision"]))
    wide = MATMUL_TF32 if tf32 else H200.products
    rate = wide if lhs.dtype.itemsize >= 4 else H200.narrow_products or wide
    times = []
    for width, relative in GEMM_COLUMNS:
        waves = -(-(-(-rows // GEMM_ROWS) * -(-columns // width)) // SM_COUNT)
        elements = SM_COUNT * GEMM_ROWS * width
        latency = GEMM_WAVE_SECONDS * width / GEMM_COLUMNS[0][0]
        stores = elements * out.dtype.itemsize / BANDWIDTH
        times.append(waves * (2 * elements * terms / (rate * relative) + latency + stores))
    moved = (lhs.nbytes + rhs.nbytes + out.nbytes) / H200.bandwidth
    return H200.launch + max(min(times), moved)


def compute_of(dtype: np.dtype, precision: Any) -> str:
    """``Gemm.compute`` for a dtype and the ``precision`` of a ``dot_general``.

    A GEMM that names an algorithm and is not split (``rewrites/split_float32``) is computed in IEEE arithmetic.
    """
    if dtype not in (dtypes.float32, dtypes.complex64):
        return _COMPUTE.get(dtype, "f32")
    return "tf32" if is_tf32(resolved(precision)) else "f32"


def split_pays(algorithm: str, shape: ProductShape) -> bool:
    """True if a float32 GEMM is estimated to be faster by a split algorithm."""
    return _PAYS[algorithm](*shape)


def _three_products_pay(batch: int, m: int, n: int, k: int, by_rows: tuple[bool, bool]) -> bool:
    """Three float16 GEMMs instead of one in IEEE arithmetic.

    Overhead: each operand is read twice, for its scales and to be split, and written. The results of all GEMMs but
    the first are read and written once more, and readers of the leading sum also read the other one.
    """
    chunks = len(chunks_of(k, ALGORITHMS["F16_F16_F32_X3"].chunk or k))
    results = 4 * batch * m * n * (2 + 2 * chunks + 2)
    operands = 4 * batch * (m * k + k * n) * 3
    flops = 2 * batch * m * n * k
    split = 3 * flops / MATMUL + (results + operands) / BANDWIDTH + (5 + chunks) * H200.launch
    return split < flops / H200.products


def _scaled_product_pays(batch: int, m: int, n: int, k: int, by_rows: tuple[bool, bool]) -> bool:
    """One float16 GEMM instead of one in TF32, which reads twice as many bytes.

    Overhead: each operand is read, and written in float16. Scales that are not per row read it once more, in three
    more launches.
    """
    elements = (batch * m * k, batch * k * n)
    scaling = sum((6 if rows else 10) * x for rows, x in zip(by_rows, elements, strict=True))
    launches = sum(1 if rows else 4 for rows in by_rows)
    flops, results = 2 * batch * m * n * k, 4 * batch * m * n
    scaled = max(flops / MATMUL, (results + 2 * sum(elements)) / BANDWIDTH)
    plain = max(flops / MATMUL_TF32, (results + 4 * sum(elements)) / BANDWIDTH)
    return scaled + scaling / BANDWIDTH + launches * H200.launch < plain


_PAYS = {"F16_F16_F32_X3": _three_products_pay, "F16_F16_F32_SCALED": _scaled_product_pays}


_TILE, _WAVES = 128, 8
"""Rows and columns of a tile, and tiles per SM that hide prologue and epilogue."""

_RESIDENT = 4 * L2_BYTES // 5
"""Maximum bytes of partial sums: each call for a chunk rereads them, best from L2."""

_MOST_SUMS = 8
"""Maximum partial sums: a thread that adds them reads elements of each."""


def partial_sums(shape: ProductShape, chunk: int) -> int:
    """Number of partial sums (split-K) that fill a device, of two or more chunks.

    It is approximate: a number that divides the terms is preferred.
    """
    tiles = shape.batch * math.ceil(shape.m / _TILE) * math.ceil(shape.n / _TILE)
    most = min(
        _WAVES * SM_COUNT // tiles,
        _RESIDENT // (4 * shape.batch * shape.m * shape.n),
        shape.k // (2 * chunk),
        _MOST_SUMS,
    )
    return next((n for n in range(most, most // 2, -1) if not shape.k % (n * UNIT)), max(most, 1))


class _Call(NamedTuple):
    """A call of the library for some or all terms, with byte offsets in the operands."""

    gemm: Gemm
    at_a: int = 0
    at_b: int = 0


class Product:
    """A step that multiplies matrices.

    Args:
      otherwise: runs the step without the library, if that has no algorithm for it.

    Attributes:
      calls: calls of the library, in order: all but the first add to the result. Empty for empty operands.
      overlapped_calls: the same for when the step overlaps with a collective.
    """

    def __init__(
        self,
        executor: Executor,
        step: OpaqueStep,
        sides: Sequence[_Side],
        third: Operand | None,
        calls: Sequence[_Call],
        otherwise: Callable[[Executor], None],
    ):
        self.device, self.calls, self.out = executor.device, calls, step.eqn.outvars[0].aval
        self.overlapped_calls: Sequence[_Call] = calls
        self._otherwise, self._refused = otherwise, False
        (value,) = step.results
        assert value is not None
        self._place: Place = executor.roots.place(value)
        self._lhs, self._rhs = sides
        self._third = third
        self._plans: dict[Gemm, Any] = {}

    @classmethod
    def of(
        cls,
        executor: Executor,
        step: OpaqueStep,
        operands: Sequence[Operand],
        otherwise: Callable[[Executor], None],
    ) -> Product | None:
        """The GEMM of an equation of ``PRODUCTS``; None if the library has none."""
        eqn, out = step.eqn, step.eqn.outvars[0].aval
        factors, third = operands[:2], (operands[2] if len(operands) > 2 else None)
        sides = [_Side(x) for x in factors]
        if not out.size or not all(x.aval.size for x in factors):
            assert third is None
            return cls(executor, step, sides, None, (), otherwise)
        numbers = eqn.params["dimension_numbers"]
        while isinstance(layout := _planned(sides, numbers), Copies):  # twice at most: copies are dense
            contract, batch = numbers
            layout = Copies(*map(_along, sides, layout, contract, batch))
            for side, order in zip(sides, layout, strict=True):
                if order is not None:
                    side.copy(order, executor)
            numbers = _moved(contract, layout), _moved(batch, layout)
        a, b = (x.aval.dtype for x in factors)
        gemm = Gemm(
            layout,
            a,
            b,
            out.dtype,
            compute_of(a, eqn.params["precision"]),
            bias=eqn.prim is dot_bias_p,
            reads_c=eqn.prim in (dot_accumulate_p, dot_promoted_p) and third is not None,
            alignment=math.gcd(*[s.alignment for s in sides], ALIGNMENT),
        )
        if gemm.refused() is not None:
            return None
        calls = _chunks(gemm, eqn.params["chunk"]) if eqn.prim is dot_promoted_p else [_Call(gemm)]
        return cls(executor, step, sides, third, calls, otherwise)

    def run(self, executor: Executor) -> None:
        """Put it on the executor's stream."""
        to = executor.address(self._place)
        if not self.calls:
            driver.fill_zero(to, self.out.nbytes, executor.work_stream())
            return
        if self._refused:
            self._otherwise(executor)
            return
        a, keep_a = self._lhs.address(executor)
        b, keep_b = self._rhs.address(executor)
        third = None if self._third is None else self._third.buffer(executor)
        at = 0 if third is None else third.ptr
        first = self.calls[0].gemm
        bias, c = at * first.bias, at * first.reads_c
        if not self._plans and not self._find_plans(executor, a, b, None if c == to else to):
            self._otherwise(executor)
            return
        for gemm, at_a, at_b in self.overlapped_calls if executor.beside_exchange else self.calls:
            plan = self._plans[gemm]
            plan.run(a + at_a, b + at_b, c, to, bias, beta=int(gemm.reads_c), stream=executor.stream)
            c = to
        del keep_a, keep_b, third  # the stream reuses memory that is freed now only after the GEMM

    def leave(self, sms: int) -> None:
        """Leave SMs to a collective that it overlaps with; call before the first run."""
        all_sms = driver.properties(self.device).sm_count
        left = max(all_sms // 2, all_sms - sms)
        self.overlapped_calls = [c._replace(gemm=replace(c.gemm, sms=left)) for c in self.calls]

    @property
    def alone(self) -> bool:
        """True if it only calls the library: no operand is copied first."""
        copied = self._third is not None and not self._third.in_place
        return not (copied or self._refused or self._lhs.copied or self._rhs.copied)

    def _find_plans(self, executor: Executor, a: int, b: int, to: int | None) -> bool:
        """Autotune at the first run, on the operands themselves.

        Trials may overwrite the result, unless the GEMM adds to it. Steps of an executor share plans without a bias,
        which hold no addresses.
        """
        plans: dict[Gemm, Any] = {}

        def find(calls: Sequence[_Call]) -> errors.UnsupportedError | None:
            try:
                for gemm, at_a, at_b in calls:
                    known = plans if gemm.bias else executor.products
                    if gemm not in known:
                        known[gemm] = cublaslt.Plan(gemm, self.device, (a + at_a, b + at_b, to))
                    plans[gemm] = known[gemm]
            except errors.UnsupportedError as e:
                return e
            return None

        refused = find(self.calls)
        if refused is not None:
            self._refused = True
            if config.shows("fusion"):
                config.show(f"a GEMM runs without cuBLASLt: {refused}")
            return False
        if self.overlapped_calls is not self.calls and find(self.overlapped_calls) is not None:
            self.overlapped_calls = self.calls
        self._plans = plans
        return True


class Matmul(FunctionKernel):
    """Matmuls by cuBLASLt; by CuPy or on the host where it has no algorithm."""

    planned = True

    def matches(self, eqn: Eqn) -> bool:
        return eqn.prim in PRODUCTS

    def function(self, eqn: Eqn, device: int, compile: Compile) -> Function:
        return _other(eqn).function(eqn, device, compile)

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        function = self.function(step.eqn, executor.device, compile)
        otherwise, name = run_function(function, step, operands), step.eqn.prim.name
        product = Product.of(executor, step, operands, otherwise)
        if product is None:
            captured = _other(step.eqn).why_not_captured(step.eqn) is None
            return Work(otherwise, name, step, captured=captured)
        if step.overlapped is not None and config.cuda_graphs and config.nccl_graphs:
            product.leave(COLLECTIVE_SMS)
        return Work(product.run, name, step, anywhere=lambda: product.alone)


def _other(eqn: Eqn) -> FunctionKernel:
    """The row that computes an equation for which the library has no algorithm."""
    return CUPY if CUPY.matches(eqn) else HOST


def _chunks(gemm: Gemm, most: int) -> list[_Call]:
    """A GEMM as calls of at most ``most`` terms each."""
    calls = []
    for n, (start, size) in enumerate(chunks_of(gemm.layout.k, most)):
        layout, at_a, at_b = gemm.layout.terms(start, size)
        at_a, at_b = at_a * gemm.a.itemsize, at_b * gemm.b.itemsize
        alignment = math.gcd(gemm.alignment, at_a, at_b)
        part = replace(gemm, layout=layout, reads_c=gemm.reads_c or n > 0, alignment=alignment)
        calls.append(_Call(part, at_a, at_b))
    return calls


class _Side:
    """An operand as the library reads it.

    Attributes:
      shape, strides: in elements.
      alignment: of its first element, in bytes.
      itemsize: of an element, in bytes.
    """

    def __init__(self, operand: Operand):
        self._operand = operand
        self.shape, self.strides = operand.layout.shape, operand.layout.strides
        self.itemsize = operand.aval.dtype.itemsize
        start = operand.layout.offset * operand.aval.dtype.itemsize
        self.alignment = math.gcd(start, ALIGNMENT)
        self._order = tuple(range(len(self.shape)))
        self._copier: Any = None

    def copy(self, order: Axes, executor: Executor) -> None:
        """Read a dense copy with the axes in this order."""
        x = self._operand
        self._order = tuple(self._order[d] for d in order)
        shape = tuple(x.aval.shape[d] for d in self._order)
        after = Var(ShapedArray(shape, x.aval.dtype))
        turn = Eqn(transpose_p, [x.atom], [after], {"permutation": self._order}, None)
        self._copier = executor.copier([*x.chain, turn])
        self.shape, self.strides, self.alignment = shape, strides_of(shape), ALIGNMENT

    @property
    def copied(self) -> bool:
        """True if the library reads a copy."""
        return self._copier is not None

    def address(self, executor: Executor) -> tuple[int, DeviceBuffer | None]:
        """Address of its first element, and what must live until it is read."""
        if self._copier is None:
            return self._operand.address(executor), None
        made = self._copier(self._operand.base(executor))
        return made.ptr, made


def _along(side: _Side, order: Axes | None, contract: Axes, batch: Axes) -> Axes | None:
    """Axis order of a copy: ``order``, or with rows and columns swapped.

    The order that keeps the innermost axis innermost makes the copy fast, and the library reads matrices of most
    dtypes in either.
    """
    if order is None or side.itemsize == 1:
        return order
    innermost = min(order, key=lambda d: (side.shape[d] == 1, abs(side.strides[d])))
    rest = order[len(batch) :]
    # contracted axes may be in another order than in ``contract``
    first = len(contract) if {*rest[: len(contract)]} == {*contract} else len(rest) - len(contract)
    other = (*rest[first:], *rest[:first])
    return (*order[: len(batch)], *other) if other and other[-1] == innermost else order


def _moved(axes: tuple, copies: Copies) -> tuple:
    """Axes of both operands as indices into the axes of the copies."""
    return tuple(
        own if order is None else tuple(order.index(d) for d in own)
        for own, order in zip(axes, copies, strict=True)
    )


def _planned(sides: Sequence[_Side], numbers: Any) -> Layout | Copies:
    (lc, rc), (lb, rb) = numbers
    lhs, rhs = sides
    negative = [any(s < 0 for s in side.strides) for side in sides]
    if any(negative):  # reversed: the library steps forward only
        orders = [
            tuple(range(len(side.shape))) if n else None for side, n in zip(sides, negative, strict=True)
        ]
        return Copies(*orders)
    return plan_dot_general(lhs.shape, lhs.strides, rhs.shape, rhs.strides, ((lc, rc), (lb, rb)))
