"""Products with GELU, or its derivative, by Hopper's own kernel: which of them, and as steps of a program.

Kernels, stages 5 and 8, above ``cuda_gelu_product``, which has the text. What has no kernel here is the library's, with
its epilogues (``cuda_product``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from blufunc.core import dtypes
from blufunc.core.jaxpr import Eqn
from blufunc.kernels import cuda_gelu_product, cuda_modules, cuda_runtime
from blufunc.kernels.activation_epilogue import WITH_ACTIVATION, dot_bias_gelu_p, dot_dgelu_p
from blufunc.kernels.cuda_executor import Executor, Operand, Work
from blufunc.kernels.cuda_gelu_product import GeluProduct
from blufunc.kernels.split_dot import is_matrix
from blufunc.kernels.steps import OpaqueStep
from blufunc.kernels.tensor_maps import BYTES

ENTRY = "gelu_product"


def kernel_of(eqn: Eqn, arch: str) -> GeluProduct | None:
    """The kernel for an equation on an architecture as ``sm_90a``; None if there is none."""
    if arch != "sm_90a" or eqn.prim not in WITH_ACTIVATION:
        return None
    lhs, rhs = (a.aval for a in eqn.invars[:2])
    (left, right), (batch, _) = eqn.params["dimension_numbers"]
    pairs = sorted(zip(left, right, strict=True))
    if batch or not pairs or any(a.aval.dtype != dtypes.bfloat16 for a in (*eqn.invars, eqn.outvars[0])):
        return None
    left, right = zip(*pairs, strict=True)
    if not (is_matrix(left, lhs.ndim) and is_matrix(right, rhs.ndim)) or 0 in left:
        return None
    k = math.prod(lhs.shape[d] for d in left)
    derivative, several = eqn.prim is dot_dgelu_p, len(eqn.outvars) == 2
    found = GeluProduct(
        lhs.size // k, rhs.size // k, k,
        by_rows=0 not in right,
        derivative=derivative,
        bias=eqn.prim is dot_bias_gelu_p,
        stored=several and not derivative,
        summed=several and derivative,
    )  # fmt: skip
    return found if found.refused() is None else None


@functools.lru_cache(256)
def text(product: GeluProduct) -> cuda_modules.Text:
    """The source of a kernel, and its name."""
    return cuda_gelu_product.source(product), ENTRY


class Kernel:
    """A kernel, ready to be put on streams of a device."""

    def __init__(self, product: GeluProduct, device: int):
        source, entry = text(product)
        blocks = cuda_runtime.properties(device).sm_count // product.cluster
        grid = product.cluster * min(blocks, product.clusters)
        function = cuda_modules.module(source, device, entry).kernel(entry)
        arguments = [bytes(BYTES), bytes(BYTES), 0, 0, 0, 0]
        self._launch = function.prepare((grid,), (product.threads,), product.shared_bytes, arguments)
        row = 2 * product.k
        self._boxes = product.boxes(row, row if product.by_rows else 2 * product.n)

    def __call__(self, factors: Sequence[int], given: int, results: Sequence[int], stream: Any) -> None:
        """Put it on a stream: addresses of the factors, of a bias or GELU's argument if there is one, and of results:
        the first, the argument of GELU, the sums; 0 for what is not wanted.
        """
        arguments = self._launch.arguments
        for i, (box, address) in enumerate(zip(self._boxes, factors, strict=True)):
            arguments.set(i, box.map(address))
        for i, address in enumerate((given, *results), 2):
            arguments.set_pointer(i, address)
        self._launch(stream.ptr)


def work(executor: Executor, step: OpaqueStep, operands: Sequence[Operand], product: GeluProduct) -> Work:
    """The step, ready to run."""
    places = [None if r is None else executor.roots.place(r) for r in step.results]
    outs = [v.aval for v in step.eqn.outvars]
    spare = [
        executor.own(a, "a result that nobody wants") if p is None else None
        for a, p in zip(outs, places, strict=True)
    ]
    kernel = Kernel(product, executor.device)

    def run(executor: Executor) -> None:
        held = [o.buffer(executor) for o in operands]
        found = zip(places, spare, strict=True)
        results = [executor.address(p) if p is not None else b.ptr for p, b in found]  # type: ignore[union-attr]
        out, *second = results
        argument, sums = (
            second[0] if second and wanted else 0 for wanted in (product.stored, product.summed)
        )
        given = held[2].ptr if len(held) > 2 else 0
        kernel([held[0].ptr, held[1].ptr], given, (out, argument, sums), executor.work_stream())

    executor.keep(spare)
    return Work(run, step.eqn.prim.name, step, anywhere=lambda: all(o.in_place for o in operands))
