"""Names of ``jax.interpreters.ad`` and ``batching`` besides the tables of rules.

Under the face ``as_jax``. The classes are blufunc's own: libraries branch on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blufunc.as_jax.primitives import Primitive, primitive_batchers, primitive_jvps, primitive_transposes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.primitives.linear_ops import add_any, instantiate, move_dim
from blufunc.core.primitives.tangents import Zero, zero
from blufunc.errors import ClosureError
from blufunc.transforms.autodiff.jvp import JVPTracer

__all__ = [
    "CustomVJPException",
    "JVPTracer",
    "Zero",
    "add_jaxvals",
    "add_tangents",
    "bdim_at_front",
    "defbroadcasting",
    "deflinear",
    "deflinear2",
    "defvectorized",
    "instantiate_zeros",
    "not_mapped",
    "zeros_like_aval",
]

not_mapped = None
CustomVJPException = ClosureError


def instantiate_zeros(x: Any) -> Any:
    """A tangent as an array: zeros where it is symbolic."""
    return instantiate(x)


def zeros_like_aval(aval: ShapedArray) -> Any:
    """Zeros of a type."""
    return instantiate(zero(aval))


def add_jaxvals(x: Any, y: Any) -> Any:
    """The sum of two cotangents."""
    return add_any(x, y)


def add_tangents(x: Any, y: Any) -> Any:
    """The sum of two tangents, each of which may be symbolic."""
    return y if x.__class__ is Zero else x if y.__class__ is Zero else add_any(x, y)


def deflinear2(prim: Primitive, transpose_rule: Callable) -> None:
    """Rules of a linear primitive: its tangent is itself."""

    def jvp(primals, tangents, **params):
        out = prim.bind(*primals, **params)
        if all(t.__class__ is Zero for t in tangents):
            return out, [zero(o.aval) for o in out] if prim.multiple_results else zero(out.aval)
        return out, prim.bind(*map(instantiate, tangents), **params)

    primitive_jvps[prim] = jvp
    primitive_transposes[prim] = transpose_rule


def deflinear(prim: Primitive, transpose_rule: Callable) -> None:
    """As ``deflinear2``, of a rule that gets the cotangent alone."""
    deflinear2(prim, lambda ct, *args, **params: transpose_rule(ct, **params))


def bdim_at_front(x: Any, dim: int | None, size: int) -> Any:
    """``x`` with its batch axis in front, broadcast if it has none."""
    from blufunc.numpy import broadcast_to  # noqa: PLC0415

    return broadcast_to(x, (size, *x.shape)) if dim is None else move_dim(x, dim, 0)


def _same_axis(prim: Primitive, args: Sequence[Any], dims: Sequence[int | None], params: dict) -> tuple:
    (dim, *others) = {d for d in dims if d is not None}
    if others:
        size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
        args = [bdim_at_front(a, d, size) for a, d in zip(args, dims, strict=True)]
        dim = 0
    out = prim.bind(*args, **params)
    return (out, [dim] * len(out)) if prim.multiple_results else (out, dim)


def defvectorized(prim: Primitive) -> None:
    """Batch a primitive that applies to each element."""
    primitive_batchers[prim] = lambda args, dims, **params: _same_axis(prim, args, dims, params)


defbroadcasting = defvectorized
