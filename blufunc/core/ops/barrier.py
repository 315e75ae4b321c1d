"""Optimization barrier: values that simplification must not remove or merge.

Core operation. In: several values of any types. Out: the same values; passes neither merge two barriers, nor fold
one, nor look through it. It is the identity to every transform, which adds barriers on tangents and cotangents.
"""

from __future__ import annotations

from typing import TypeVar

from blufunc.core.arrays.array import lift
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.primitives.sharding import one_by_one
from blufunc.core.primitives.tangents import Zero, is_linear, zero
from blufunc.core.pytree import tree

T = TypeVar("T")


class _OptimizationBarrier(Primitive):
    """All operands, unchanged."""

    name, kind, multiple_results, opaque = "optimization_barrier", "barrier", True, True
    any_memory = True

    shard = staticmethod(one_by_one)

    def impl(self, *xs):
        return list(xs)

    def abstract(self, *xs):
        return list(xs)

    def jvp(self, primals, tangents):
        return self.bind(*primals), self._on_nonzeros(tangents)

    def _on_nonzeros(self, tangents):
        present = [t for t in tangents if t.__class__ is not Zero]
        outs = iter(self.bind(*present) if present else [])
        return [zero(t.aval) if t.__class__ is Zero else next(outs) for t in tangents]

    def transpose(self, cts, *args):
        for ct, a in zip(self._on_nonzeros(cts), args, strict=True):
            if is_linear(a) and ct.__class__ is not Zero:
                a.add(ct)

    def batch(self, axis, args, dims):
        return self.bind(*args), list(dims)


optimization_barrier_p = _OptimizationBarrier()


def optimization_barrier(operand: T, /) -> T:
    """A pytree of arrays, unchanged; uses are not merged with the originals' uses.

    Raises:
      ArgumentError: a leaf is no array or number.
    """
    leaves, treedef = tree.flatten(operand)
    values = [lift(x, f"leaf {i} of the operand") for i, x in enumerate(leaves)]
    return tree.unflatten(treedef, optimization_barrier_p.bind(*values) if values else [])
