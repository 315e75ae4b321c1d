"""Types of arguments and results of stages, as JAX's have them.

Transforms, stages 2 to 7. A mixin of ``stages.py``: all of it follows from the trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import struct_of


@dataclass(frozen=True)
class ArgInfo:
    """An argument of a staged function.

    Attributes:
      shape, dtype: of the argument.
      donated: whether results may reuse its memory.
    """

    _aval: ShapedArray
    donated: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, a tuple of int."""
        return self._aval.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype."""
        return self._aval.dtype


class MemoryStats(NamedTuple):
    """Planned memory of a program, in bytes: ``compile().memory_analysis()``.

    Attributes:
      argument_size_in_bytes: the arguments, donated or not.
      output_size_in_bytes: all results.
      alias_size_in_bytes: results in the memory of donated arguments.
      temp_size_in_bytes: everything else.
      peak_memory_in_bytes: the most at once, arguments included.
    """

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    peak_memory_in_bytes: int


class Signed:
    """Properties of a stage that follow from its trace."""

    def _trace(self) -> Any:
        return self.traced  # type: ignore[attr-defined]

    @property
    def in_tree(self) -> tree.TreeDef:
        """The structure of ``(args, kwargs)``; static arguments have no leaves."""
        return self._trace()._in_tree

    @property
    def out_tree(self) -> tree.TreeDef:
        """The structure of the results."""
        return self._trace().entry.out_tree

    @property
    def in_avals(self) -> Any:
        """The types of the arguments, as the pair ``(args, kwargs)``."""
        return tree.unflatten(self.in_tree, self._trace().entry.key.types)

    @property
    def args_info(self) -> Any:
        """The arguments as ``ArgInfo``, as the pair ``(args, kwargs)``."""
        entry = self._trace().entry
        pairs: Iterator[tuple[ShapedArray, bool]] = zip(entry.key.types, entry.donated, strict=True)
        return tree.unflatten(self.in_tree, [ArgInfo(*pair) for pair in pairs])

    @property
    def out_info(self) -> Any:
        """The results as ``ShapeDtypeStruct``."""
        avals = self._trace().entry.out_avals
        return tree.unflatten(self.out_tree, [struct_of(a) for a in avals])

    @property
    def out_avals(self) -> Any:
        """The types of the results."""
        return tree.unflatten(self.out_tree, self._trace().entry.out_avals)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The positions of donated arguments."""
        return tuple(sorted(self._trace().owner.donate_nums))


class Analysed(Signed):
    """Reports on a lowered program under JAX's names."""

    def cost_analysis(self) -> dict[str, float]:
        """Arithmetic and bytes moved, of all steps: ``cost`` has them one by one."""
        cost = self.sight().cost  # type: ignore[attr-defined]
        return {"flops": float(cost.flops), "bytes accessed": float(cost.bytes)}

    def memory_analysis(self) -> MemoryStats:
        """The planned memory, which ``memory`` explains."""
        memory = self.sight().memory  # type: ignore[attr-defined]
        results = sum(a.nbytes for a in self._trace().entry.out_avals)
        return MemoryStats(
            memory.argument_bytes,
            results,
            max(results - memory.output_bytes, 0),
            memory.arena_bytes + memory.unplanned_bytes,
            memory.peak_bytes,
        )

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """The jaxpr that is compiled; there is no StableHLO.

        Raises:
          UnsupportedError: ``dialect`` is another than None or ``"jaxpr"``.
        """
        if dialect not in (None, "jaxpr"):
            raise errors.UnsupportedError(
                f"compiler_ir({dialect!r:.60}): programs are jaxprs, then C++ or CUDA.",
                where=source.here(),
                fix="compiler_ir() is the jaxpr, and source() the C++ or CUDA",
            )
        return self.jaxpr  # type: ignore[attr-defined]
