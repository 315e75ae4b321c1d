"""GELU as one operation: the primitives behind ``nn.gelu(x, approximate=True)``.

A face, below ``activations.py``. An equation holds its definition as a jaxpr, as attention's does. Every compiler puts
the definitions in their place, where they fuse like any elementwise operations, with matmuls too. Two primitives:

    gelu       x -> gelu(x)
    gelu_grad  x, t -> gelu'(x) * t

The second is the derivative of the first in either direction, as each element of the result is of one element of x:
it is linear in t, and its own transpose. So what reverse mode keeps is x.

    gelu(x) = x * gate,  gate = logistic(2 (c x + c3 x**3)),  c = sqrt(2 / pi),  c3 = 0.044715 c

is the tanh formula of Hendrycks & Gimpel, arXiv:1606.08415, without its cancellation where x is negative.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import eval_jaxpr
from blufunc.core.primitives.linear_ops import add_any, move_dim
from blufunc.core.primitives.sharding import Rule
from blufunc.core.primitives.tangents import Zero, is_linear, zero
from blufunc.transforms.control_flow.calls import jit_p
from blufunc.transforms.control_flow.composite import Composite

_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR


def gelu(x: Any) -> Any:
    """The tanh formula of an array of any shape and inexact dtype; half precisions are rounded once, at the end."""
    if x.aval.weak_type:  # operations have strong results
        return x * _gate(x, bnp.square(x))
    (out,) = gelu_p.at(x)
    return out


# -- definitions -----------------------------------------------------------------------------------


def _wide(x: Any) -> Any:
    """Half precisions in float32, where both functions are computed."""
    return x.astype(bnp.promote_types(x.dtype, dtypes.float32))


def _gate(x: Any, square: Any) -> Any:
    return lax.logistic(x * (square * _CUBIC + _LINEAR))


def _gelu(x: Any) -> list[Any]:
    wide = _wide(x)
    return [(wide * _gate(wide, bnp.square(wide))).astype(x.dtype)]


def _gelu_grad(x: Any, t: Any) -> list[Any]:
    """gate' = gate (1 - gate) inner', and inner' = 2 c + 6 c3 x**2."""
    wide = _wide(x)
    square = bnp.square(wide)
    gate = _gate(wide, square)
    # far out the first factor is 0, and the others are large
    slope = wide * (gate - gate * gate) * (square * (3 * _CUBIC) + _LINEAR) + gate
    return [(_wide(t) * slope).astype(x.dtype)]


# -- primitives ------------------------------------------------------------------------------------


class _Pointwise(Composite):
    """A composite that computes each element of the result by itself; operands have one type."""

    pointwise = True
    linearize = split = None  # type: ignore[assignment]  # it has one result, and a jvp rule of its own

    def evaluate(self, args, params):
        """Equation by equation, as any function of arrays outside of a program."""
        return eval_jaxpr(params["jaxpr"], args)

    def batch(self, axis, args, dims, *, jaxpr):
        if len(set(dims)) == 1:
            return self.at(*args), dims[:1]
        moved = [
            bnp.broadcast_to(a, (axis.size, *a.aval.shape)) if d is None else move_dim(a, d, 0)
            for a, d in zip(args, dims, strict=True)
        ]
        return self.at(*moved), [0]

    def autocast(self, cells, dtype, *, jaxpr):
        """In the low dtype: what comes from products is, and what goes into them will be."""
        return self.at(*[c.cast(dtype) for c in cells])

    def shard(self, avals, outs, *, jaxpr) -> Rule:
        """Every dimension may be divided."""
        shape = outs[0].shape
        dims = tuple((i,) for i in range(len(shape)))
        return Rule((dims,) * len(avals), (dims,), shape, linear=self.linear, params=self.restaged(avals))

    linear: tuple[frozenset[int], ...] = ()
    """The operands in which it is linear."""


class _Gelu(_Pointwise):
    name, definition = "gelu", _gelu

    def jvp(self, primals, tangents, *, jaxpr):
        return self.bind(*primals, jaxpr=jaxpr), gelu_grad_p.at(*primals, *tangents)


class _GeluGrad(_Pointwise):
    name, definition, linear = "gelu_grad", _gelu_grad, (frozenset([1]),)

    def jvp(self, primals, tangents, *, jaxpr):
        """The derivative by x is that of the definition."""
        x, t = primals
        dx, dt = tangents
        terms = []
        if dt.__class__ is not Zero:
            terms += self.at(x, dt)
        if dx.__class__ is not Zero:
            terms += jit_p.jvp(primals, [dx, zero(t.aval)], jaxpr=jaxpr, name=self.name)[1]
        return self.bind(*primals, jaxpr=jaxpr), [functools.reduce(add_any, terms)]

    def transpose(self, cts, x, t, *, jaxpr):
        (ct,) = cts
        if is_linear(t) and ct.__class__ is not Zero:
            t.add(*self.at(x, ct))


gelu_p, gelu_grad_p = _Gelu(), _GeluGrad()
