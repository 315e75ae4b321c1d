"""User-written CUDA kernels with fused elementwise prologues and epilogues.

Kernels, below the rewrites: only ``rewrites/user_kernel_fusion.py`` makes the primitive, and the CUDA backend writes
its source (``backends/cuda/render/user_accessors.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.primitives.primitive import Primitive


@dataclass(frozen=True, eq=False)
class Points:
    """An elementwise function fused into a kernel.

    Attributes:
      jaxpr: of scalars. For an argument: from leaves to the value that the kernel reads. For a result: from the value
        that the kernel writes, and leaves, to the value that is stored.
      numbers: by leaf, whether it is a scalar that all elements share.
    """

    jaxpr: Jaxpr
    numbers: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class FusedUserKernel:
    """A kernel for arguments of fixed types, with its fused functions.

    Attributes:
      prim, kernel: the user's call, and its parameter: ``TypedKernel``.
      readers, writers: by position, the functions of arguments and of results.
      body: the definition as operations.
      places: by operand, the index of its parameter of ``body``; None for a literal.
    """

    prim: Primitive
    kernel: Any
    readers: Mapping[int, Points]
    writers: Mapping[int, Points]
    body: Jaxpr
    places: tuple[int | None, ...]

    def __repr__(self) -> str:
        return f"{self.kernel}, {len(self.readers)} prologues, {len(self.writers)} epilogues"


class _FusedUserKernel(Primitive):
    """Operands: each argument, or the leaves of its prologue; then those of epilogues."""

    name, kind, multiple_results, fresh = "cuda_kernel+elementwise", "kernel", True, True

    cuda_source: Callable
    """``(*operand types, kernel) -> CudaSource``: the CUDA backend's."""

    def reference(self, compile, *, kernel: FusedUserKernel):
        run = compile(kernel.body)

        def computed(buffers: list) -> Any:
            by_place = dict(zip(kernel.places, buffers, strict=True))
            return run([by_place[n] for n in range(len(kernel.body.invars))])

        return computed

    def abstract(self, *avals, kernel: FusedUserKernel):
        return [a.strong() for a in kernel.body.out_avals]


fused_user_kernel_p = _FusedUserKernel()
