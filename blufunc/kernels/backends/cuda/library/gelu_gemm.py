"""Products with GELU, or its derivative, by Hopper's own kernel: which of them, and as steps of a program.

Kernels, stages 5 and 8, above ``gelu_gemm_source``, which has the text. What has no kernel here is the library's, with
its epilogues (``matmul``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn
from blufunc.kernels.backends.cuda.driver import driver, modules
from blufunc.kernels.backends.cuda.driver.tensor_map import BYTES, Mapped
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Work
from blufunc.kernels.backends.cuda.library import gelu_gemm_source
from blufunc.kernels.backends.cuda.library.gelu_gemm_source import ENTRY, GeluProduct
from blufunc.kernels.backends.cuda.library.library_kernel import LibraryKernel
from blufunc.kernels.backends.cuda.library.tile_gemm import Results, by_rows_of, factors_of
from blufunc.kernels.ops.split_dot import is_matrix
from blufunc.kernels.recompute.epilogue import result_of
from blufunc.kernels.rewrites.activation_epilogue import WITH_ACTIVATION, dot_bias_gelu_p, dot_dgelu_p
from blufunc.kernels.schedule import OpaqueStep


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
    further = _further(eqn)
    if len(set(further)) < len(further):
        return None
    found = GeluProduct(
        lhs.size // k, rhs.size // k, k,
        by_rows=0 not in right,
        derivative=eqn.prim is dot_dgelu_p,
        bias=eqn.prim is dot_bias_gelu_p,
        stored="argument" in further,
        summed="sums" in further,
        again="again" in further,
    )  # fmt: skip
    return found if found.fits else None


def _further(eqn: Eqn) -> list[str]:
    """What the results behind the first one are, in the words of the kernel."""
    if eqn.prim is not dot_dgelu_p:
        return ["argument"] * len(eqn.outvars[1:])
    again = result_of(eqn)
    return ["again" if v is again else "sums" for v in eqn.outvars[1:]]


class GeluGemm(LibraryKernel):
    def matches(self, eqn: Eqn) -> bool:
        return kernel_of(eqn, "sm_90a") is not None

    def sources(self, step: OpaqueStep, arch: str) -> list[modules.Text]:
        product = kernel_of(step.eqn, "sm_90a")
        contracts, _ = step.eqn.params["dimension_numbers"]
        return [_text(replace(product, by_rows=by_rows_of(step, 1, contracts[1])))]

    def bind(self, executor, step, operands, compile):
        return work(executor, step, operands, kernel_of(step.eqn, "sm_90a"))


@functools.lru_cache(256)
def _text(product: GeluProduct) -> modules.Text:
    return gelu_gemm_source.source(product), ENTRY


class Kernel:
    """A kernel, ready to be put on streams of a device.

    Args:
      rows: of both factors, how many elements apart their rows are (of the right one, if not ``by_rows``: its terms).
    """

    def __init__(self, product: GeluProduct, rows: Sequence[int], device: int):
        source, entry = _text(product)
        grid = product.grid(driver.properties(device).sm_count)
        function = modules.module(source, device, entry).kernel(entry)
        arguments = [bytes(BYTES), bytes(BYTES), 0, 0, 0, 0, 0]
        self._launch = function.prepare((grid,), (product.threads,), product.shared_bytes, arguments)
        boxes = product.boxes(*(2 * row for row in rows))
        self._maps = [Mapped(i, i, box) for i, box in enumerate(boxes)]

    def __call__(self, factors: Sequence[int], given: int, results: Sequence[int], stream: Any) -> None:
        """Put it on a stream: addresses of the factors, of a bias or GELU's argument if there is one, and of results:
        the first, the argument of GELU, the sums, GELU again; 0 for what is not wanted.
        """
        arguments = self._launch.arguments
        for mapped in self._maps:
            mapped.set(arguments, factors)
        for i, address in enumerate((given, *results), 2):
            arguments.set_pointer(i, address)
        self._launch(stream.ptr)


def work(executor: Executor, step: OpaqueStep, operands: Sequence[Operand], product: GeluProduct) -> Work:
    """The step, ready to run."""
    contracts, _ = step.eqn.params["dimension_numbers"]
    left, right = factors_of(operands[:2], contracts, product.k)
    product = replace(product, by_rows=right.by_rows)
    kernel = Kernel(product, (left.row, right.row), executor.device)
    results, names = Results(executor, step), _further(step.eqn)

    def run(executor: Executor) -> None:
        factors = [side.address(executor) for side in (left, right)]
        given = [o.buffer(executor) for o in operands[2:]]
        first, *others = results.addresses(executor)
        further = dict(zip(names, others, strict=True))
        wanted = (first, *(further.get(name, 0) for name in ("argument", "sums", "again")))
        at = given[0].ptr if given else 0
        kernel([address for address, _ in factors], at, wanted, executor.work_stream())

    copied = left.copied or right.copied or not all(o.in_place for o in operands[2:])
    return Work(run, step.eqn.prim.name, step, anywhere=lambda: not copied)
