"""``linear_softmax`` for Hopper: GEMM with row softmax; logits never reach memory.

Kernels, stages 5, 6 and 8, above ``tile_gemm``, with the source of ``include/softmax_gemm.cuh``. In: equations of
``nn/vocabulary_loss_call.py``, whose plain form runs wherever this module has no kernel. Out: sources, and steps that
are ready to run.

From logits ``t``, a matmul rounded to bfloat16, and a class for each row, it computes

    slopes   exp(t - shift), and at the class of the row minus the sum of the others': the gradient of the row's
             cross-entropy with respect to its logits, but for
    factors  1 / (the sum of all exponentials of the row), and
    losses   that cross-entropy

A softmax needs the largest logit of a row before the first exponential. Any nearby value works, as bfloat16 has the
range of float32: ``near``, the logit of the row's class, computed separately. A row whose maximum exceeds it by
``FAR`` or more has an equally large cross-entropy and is recomputed with that maximum; so is one whose class's logit
was rounded to ``BELOW`` less. Rows that do not count are not recomputed. Of the four launches, the last two mostly
find nothing to do:

    product  exponentials by ``near``, and for each row and tile their sum and the largest logit
    settle   adds up, flags rows that were too far off, and writes minus the sum at the class of each row
    product  bands of rows with a flagged one
    settle   likewise
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import DropVar, Eqn
from blufunc.core.ops.linear_softmax import BELOW, FAR, NAME
from blufunc.kernels.backends.cuda.driver import driver, modules
from blufunc.kernels.backends.cuda.driver.tensor_map import BYTES, Mapped
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Results, Work
from blufunc.kernels.backends.cuda.library import tile_gemm
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, LibraryKernel
from blufunc.kernels.backends.cuda.library.tile_gemm import (
    ROWS,
    TERMS,
    VECTOR,
    TileGemm,
    by_rows_of,
    factors_of,
)
from blufunc.kernels.codegen import source_files
from blufunc.kernels.schedule import OpaqueStep

_FILE = "backends/cuda/include/softmax_gemm.cuh"

ENTRY, SETTLE = "softmax_gemm", "softmax_settle"

_SHARES = 4


@dataclass(frozen=True)
class SoftmaxGemm(TileGemm):
    """Sizes: (rows m, features k) by (k, classes n)."""

    raster_bands: ClassVar[int] = 16

    @property
    def band(self) -> int:
        """The rows of a cluster."""
        return ROWS * self.cluster

    @property
    def settlers(self) -> int:
        """The threads of a block of ``settle``."""
        return _SHARES * self.band

    @property
    def scratch(self) -> tuple[int, int, int, int, int]:
        """Scratch sizes in words: tile sums, tile maxima, class logits, shifts, flags."""
        return (of_tiles := self.columns * self.m), of_tiles, self.m, self.m, self.bands


def source(p: SoftmaxGemm) -> str:
    """The complete CUDA C++ of one GEMM: two kernels."""
    epilogue = source_files.source(_FILE)
    return tile_gemm.source(p, epilogue, FAR=FAR, BELOW=BELOW, SHARES=_SHARES)


class LinearSoftmax(LibraryKernel):
    """``linear_softmax`` by a GEMM whose epilogue accumulates softmax statistics."""

    composite = True

    def matches(self, eqn: Eqn) -> bool:
        return eqn.prim.name == NAME and eqn.prim.kind == "call"

    def why_not(self, eqn: Eqn, arch: str) -> str | None:
        if eqn.outvars[0].__class__ is DropVar:
            return "its gradients are not read: losses alone are a GEMM and a kernel"
        if arch != "sm_90a":
            return "there are kernels for Hopper only"
        x, weight = (a.aval for a in eqn.invars[:2])
        if any(a.dtype != dtypes.bfloat16 for a in (x, weight)):
            return f"there are kernels for bfloat16 only, and x is {x.dtype}"
        product = _product(eqn)
        of = (
            ("tokens", product.m, product.band),
            ("classes", product.n, VECTOR),
            ("features", product.k, TERMS),
        )
        return next(
            (f"{n} {what} are no multiple of {least}" for what, n, least in of if not n or n % least), None
        )

    def note(self, line: str, reason: str | None) -> str | None:
        if reason is None:
            return None
        return f"a chunk of linear_cross_entropy at {line} reads its logits for their softmax: {reason}"

    def scratch_bytes(self, eqn: Eqn, arch: str) -> int:
        return 4 * sum(_product(eqn).scratch)

    def sources(self, step: OpaqueStep, arch: str) -> list[modules.Text]:
        features = step.eqn.params["features"]
        return [_text(replace(_product(step.eqn), by_rows=by_rows_of(step, 1, (features,))))]

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        product, features = _product(step.eqn), step.eqn.params["features"]
        left, right = factors_of(operands[:2], ((1,), (features,)), product.k)
        product = replace(product, by_rows=right.by_rows)
        kernel = Kernel(product, (left.row, right.row), executor.device)
        results = Results(executor, step)
        assert step.scratch is not None
        working = executor.roots.place(step.scratch)
        starts = [4 * n for n in itertools.accumulate(product.scratch[:-1], initial=0)]

        def run(executor: Executor) -> None:
            factors = [side.address(executor) for side in (left, right)]
            given = [o.buffer(executor) for o in operands[2:]]
            kernel(
                [address for address, _ in factors],
                [b.ptr for b in given],
                results.addresses(executor),
                [executor.address(working) + start for start in starts],
                executor.work_stream(),
            )

        copied = left.copied or right.copied or not all(o.in_place for o in operands[2:])
        return Work(run, step.eqn.prim.name, step, anywhere=lambda: not copied)


def _product(eqn: Eqn) -> SoftmaxGemm:
    (m, k), weight, features = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, eqn.params["features"]
    return SoftmaxGemm(m, weight[1 - features], k, by_rows=features == 1)


@functools.lru_cache(64)
def _text(product: SoftmaxGemm) -> modules.Text:
    return source(product), ENTRY


class Kernel:
    """The kernels of one operation, ready to be put on streams of a device.

    Args:
      rows: strides between the rows of both factors in elements (of the right one's columns, if not ``by_rows``).
    """

    def __init__(self, product: SoftmaxGemm, rows: Sequence[int], device: int):
        text, entry = _text(product)
        module = modules.module(text, device, entry)
        grid = product.grid(driver.properties(device).sm_count)
        self._product = module.kernel(ENTRY).prepare(
            (grid,), (product.threads,), product.shared_bytes, [bytes(BYTES), bytes(BYTES), *[0] * 8]
        )
        self._settle = module.kernel(SETTLE).prepare(
            (product.bands,), (product.settlers,), 0, [*[0] * 11, bytes(4)]
        )
        self._maps = [Mapped(i, i, box) for i, box in enumerate(product.boxes(*(2 * row for row in rows)))]

    def __call__(
        self,
        factors: Sequence[int],
        given: Sequence[int],
        results: Sequence[int],
        scratch: Sequence[int],
        stream: Any,
    ) -> None:
        """Put them on a stream.

        Args:
          factors, given, results: addresses, of x and the weight, of classes, live and near, and of slopes, losses
            and factors.
          scratch: addresses of the arrays that ``SoftmaxGemm.scratch`` names.
        """
        classes, live, near = given
        slopes, losses, scales = results
        sums, tops, own, shift, flags = scratch
        for mapped in self._maps:
            mapped.set(self._product.arguments, factors)
        for second in (0, 1):
            known = (shift, flags) if second else (near, 0)
            self._product.run((classes, live, *known, slopes, own, sums, tops), stream, first=2)
            self._settle.arguments.set(11, second.to_bytes(4, "little"))
            addresses = (sums, tops, near, classes, live, own, slopes, losses, scales, shift, flags)
            self._settle.run(addresses, stream)
