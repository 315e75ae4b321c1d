"""Rotation of pairs of features as one operation: the primitive of ``rope``.

A face, below ``rope.py``. An equation holds its definition as a jaxpr, which compilers inline. The transpose of a
rotation is the rotation by the negative angles. Derived from the definition, it would join halves that are computed
apart, which is one kernel more and an array in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import blufunc.numpy as bnp
from blufunc.core.primitives.linear_ops import add_any, move_dim
from blufunc.core.primitives.sharding import Rule
from blufunc.core.primitives.tangents import Zero, is_linear, zero
from blufunc.transforms.control_flow.calls import jit_p
from blufunc.transforms.control_flow.composite import Composite


def rotated(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """``x`` [..., D] with its pairs turned, in the dtype of ``cos``, and rounded once.

    Args:
      cos, sin: of the angle of each pair, [..., D/2], with at most the axes of ``x``.
      interleaved: whether pairs are features 2i and 2i + 1, or i and i + D/2.
    """
    joined = _joined(cos, cos, interleaved), _joined(-sin, sin, interleaved)
    (out,) = rotation_p.at(x, *joined, interleaved=interleaved)
    return out


def _joined(a: Any, b: Any, interleaved: bool) -> Any:
    """The first and the second features of all pairs."""
    if interleaved:
        return bnp.stack([a, b], -1).reshape((*a.shape[:-1], 2 * a.shape[-1]))
    return bnp.concatenate([a, b], -1)


def _rotation(x: Any, cos: Any, sin: Any, *, interleaved: bool) -> list[Any]:
    """``x * cos + partners * sin``, with the negative sine for the first of a pair.

    Partners are moved ahead of the multiplication, so that one kernel reads ``x`` twice and stores the result.
    """
    wide, n = x.astype(cos.dtype), x.shape[-1] // 2
    first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else (wide[..., :n], wide[..., n:])
    return [(wide * cos + _joined(second, first, interleaved) * sin).astype(x.dtype)]


class _Rotation(Composite):
    name, definition = "rotation", _rotation
    linearize = split = None  # type: ignore[assignment]  # it has one result, and a jvp rule of its own

    def jvp(self, primals, tangents, *, jaxpr, interleaved):
        """Linear in ``x``; the derivative by the tables is that of the definition."""
        x, cos, sin = primals
        dx, *of_tables = tangents
        terms = []
        if dx.__class__ is not Zero:
            terms += self.at(dx, cos, sin, interleaved=interleaved)
        if any(t.__class__ is not Zero for t in of_tables):
            terms += jit_p.jvp(primals, [zero(x.aval), *of_tables], jaxpr=jaxpr, name=self.name)[1]
        return self.bind(*primals, jaxpr=jaxpr, interleaved=interleaved), [functools.reduce(add_any, terms)]

    def transpose(self, cts, x, cos, sin, *, jaxpr, interleaved):
        (ct,) = cts
        if is_linear(x) and ct.__class__ is not Zero:
            x.add(*self.at(ct, cos, -sin, interleaved=interleaved))

    def batch(self, axis, args, dims, *, jaxpr, interleaved):
        x, *tables = args
        rank = x.aval.ndim + (dims[0] is None)
        if dims[0] is None:
            x = bnp.broadcast_to(x, (axis.size, *x.aval.shape))
        else:
            x = move_dim(x, dims[0], 0)
        moved = []
        for t, d in zip(tables, dims[1:], strict=True):
            if d is not None:
                t = move_dim(t, d, 0)
                t = bnp.reshape(t, (axis.size, *(1,) * (rank - t.aval.ndim), *t.aval.shape[1:]))
            moved.append(t)
        return self.at(x, *moved, interleaved=interleaved), [0]

    def autocast(self, cells, dtype, *, jaxpr, interleaved):
        """In the low dtype, like the adjacent matmuls, by tables of float32."""
        x, cos, sin = cells
        return self.at(x.cast(dtype), cos.traced(), sin.traced(), interleaved=interleaved)

    def shard(self, avals, outs, *, jaxpr, interleaved) -> Rule:
        """Every dimension but that of the features may be sharded."""
        shape = outs[0].shape
        last = len(shape) - 1

        def dims(of: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
            places = range(len(shape) - len(of), len(shape))
            return tuple(
                [(d,) if d != last and n == shape[d] else () for d, n in zip(places, of, strict=True)]
            )

        operands = tuple([dims(a.shape) for a in avals])
        linear = (frozenset({0}),)
        return Rule(operands, (dims(shape),), shape, linear=linear, params=self.restaged(avals))


rotation_p = _Rotation()
"""x, cos, sin -> x, of tables [..., D]: sines change their sign within a pair."""
