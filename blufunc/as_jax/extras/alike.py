"""``jax.experimental.shard_alike``: two values with one sharding.

Under the face ``as_jax``. The primitive is the identity on two values, and by its sharding rule their dimensions are
shared.
"""

from __future__ import annotations

from typing import Any

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import source
from blufunc.core.primitives.linear_ops import instantiate, move_dim
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.primitives.sharding import Factoring
from blufunc.core.primitives.tangents import is_linear

__all__ = ["shard_alike"]


class _SameSharding(Primitive):
    """Both operands, which are sharded in one way."""

    name, kind, multiple_results = "shard_alike", "movement", True

    def impl(self, x, y):
        return [x, y]

    def abstract(self, x, y):
        if x.shape != y.shape:
            raise errors.ShapeError(f"shard_alike of {x} and {y}: the shapes differ.")
        return [x, y]

    def shard(self, avals, outs, **params):
        b = Factoring()
        dims = b.each(avals[0].shape)
        return b.rule([dims, dims], [dims, dims])

    def jvp(self, primals, tangents):
        return self.bind(*primals), self.bind(*map(instantiate, tangents))

    def transpose(self, cts, x, y):
        for operand, ct in zip((x, y), cts, strict=True):
            if is_linear(operand):
                operand.add(ct)

    def batch(self, axis, args, dims):
        fronts = [move_dim(a, d, 0) for a, d in zip(args, dims, strict=True) if d is not None]
        if len(fronts) < 2:
            raise errors.UnsupportedError(
                "shard_alike of values of which vmap maps one.", where=source.here()
            )
        return self.bind(*fronts), [0, 0]

    lower = staticmethod(lambda x, y: [x, y])


_same_sharding_p = _SameSharding()


def shard_alike(x: Any, y: Any) -> tuple[Any, Any]:
    """Two arrays of one shape, both sharded as either of them is."""
    return tuple(_same_sharding_p.bind(lift(x), lift(y)))
