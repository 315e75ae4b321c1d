"""``linear_softmax`` by Hopper's own kernel: which of them, and as steps of a program.

Kernels, stages 5 and 8, above ``softmax_gemm_source``, which has the text. The operation is that of
``nn/vocabulary_loss_call.py``: what has no kernel here is computed in the plain form there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.linear_softmax import NAME
from blufunc.kernels.backends.cuda.driver import driver, modules
from blufunc.kernels.backends.cuda.driver.tensor_map import BYTES, Mapped
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Work
from blufunc.kernels.backends.cuda.library.softmax_gemm_source import (
    ENTRY,
    SETTLE,
    SoftmaxProduct,
    source,
)
from blufunc.kernels.backends.cuda.library.tile_gemm import Results, by_rows_of, factors_of
from blufunc.kernels.backends.cuda.library.tile_gemm_source import TERMS, VECTOR
from blufunc.kernels.schedule import OpaqueStep


def is_softmax(eqn: Eqn) -> bool:
    """Whether an equation is the operation."""
    return eqn.prim.name == NAME and eqn.prim.kind == "call"


def why_not(eqn: Eqn, arch: str) -> str | None:
    """Why there is no kernel for the operation on an architecture as ``sm_90a``; None if there is one."""
    if arch != "sm_90a":
        return "there are kernels for Hopper only"
    x, weight = (a.aval for a in eqn.invars[:2])
    if any(a.dtype != dtypes.bfloat16 for a in (x, weight)):
        return f"there are kernels for bfloat16 only, and x is {x.dtype}"
    product = _product(eqn)
    of = (("tokens", product.m, product.band), ("classes", product.n, VECTOR), ("features", product.k, TERMS))
    return next(
        (f"{n} {what} are no multiple of {least}" for what, n, least in of if not n or n % least), None
    )


def scratch_bytes(eqn: Eqn) -> int:
    """What a step works in."""
    return 4 * sum(_product(eqn).scratch)


def _product(eqn: Eqn) -> SoftmaxProduct:
    (m, k), weight, features = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, eqn.params["features"]
    return SoftmaxProduct(m, weight[1 - features], k, by_rows=features == 1)


def text(step: OpaqueStep) -> modules.Text:
    """The source of the kernels that a step will ask for, and their name."""
    features = step.eqn.params["features"]
    return _text(replace(_product(step.eqn), by_rows=by_rows_of(step, 1, (features,))))


@functools.lru_cache(64)
def _text(product: SoftmaxProduct) -> modules.Text:
    return source(product), ENTRY


class Kernel:
    """The kernels of one operation, ready to be put on streams of a device.

    Args:
      rows: of both factors, how many elements apart their rows are (of the right one, if not ``by_rows``: its terms).
    """

    def __init__(self, product: SoftmaxProduct, rows: Sequence[int], device: int):
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
          scratch: addresses of what ``SoftmaxProduct.scratch`` names.
        """
        classes, live, near = given
        slopes, losses, scales = results
        sums, tops, own, shift, again = scratch
        for mapped in self._maps:
            mapped.set(self._product.arguments, factors)
        for second in (0, 1):
            known = (shift, again) if second else (near, 0)
            _call(self._product, 2, (classes, live, *known, slopes, own, sums, tops), stream)
            self._settle.arguments.set(11, second.to_bytes(4, "little"))
            addresses = (sums, tops, near, classes, live, own, slopes, losses, scales, shift, again)
            _call(self._settle, 0, addresses, stream)


def _call(launch: driver.Launch, first: int, addresses: Sequence[int], stream: Any) -> None:
    for i, address in enumerate(addresses, first):
        launch.arguments.set_pointer(i, address)
    launch(stream.ptr)


def work(executor: Executor, step: OpaqueStep, operands: Sequence[Operand]) -> Work:
    """The step, ready to run."""
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
