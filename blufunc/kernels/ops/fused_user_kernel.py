"""A user's CUDA kernel with elementwise operations inside, where it reads arguments and writes results.

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
    """What is computed of each element.

    Attributes:
      jaxpr: of one point. Of an argument, from leaves to the value that the kernel reads; of a result, from the value
        that the kernel writes, and leaves, to the one that is stored.
      numbers: for each leaf whether it is a number that all elements share.
    """

    jaxpr: Jaxpr
    numbers: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class FusedUserKernel:
    """A kernel for arguments of certain types, and what is computed inside of it.

    Attributes:
      prim, kernel: the user's call, and its parameter: ``TypedKernel``.
      readers, writers: of arguments and of results, by position.
      body: all of it as operations, which defines the value.
      places: for each operand the parameter of ``body`` that it is; None for a literal.
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
    """A call; its operands are, for each argument, itself or the leaves of its prologue, then those of epilogues."""

    name, kind, multiple_results, fresh = "cuda_kernel+elementwise", "kernel", True, True

    cuda_source: Callable
    """``(*operand types, kernel) -> CudaSource``: the CUDA backend's."""

    def reference(self, compile, *, kernel: FusedUserKernel):
        run, places = compile(kernel.body), kernel.places
        n = len(kernel.body.invars)

        def computed(buffers: list) -> Any:
            given: list[Any] = [None] * n
            for place, x in zip(places, buffers, strict=True):
                if place is not None:
                    given[place] = x
            return run(given)

        return computed

    def abstract(self, *avals, kernel: FusedUserKernel):
        return [a.strong() for a in kernel.body.out_avals]


fused_user_kernel_p = _FusedUserKernel()
