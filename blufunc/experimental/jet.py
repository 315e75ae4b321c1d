"""``jet``: derivatives of any order, by arithmetic of truncated Taylor series.

A face above ``blufunc.lax``. In: a function, a point and the Taylor coefficients of a curve through it. Out: those of
the image of the curve. The function is staged, and each equation maps series to series: linear operations coefficient
by coefficient, bilinear ones by Cauchy's product, and the functions in ``_RECURRENCES`` by that of their differential
equation (A. Griewank and A. Walther, "Evaluating Derivatives" (2008), chapter 13), at a cost of O(k^2) in the order k.
Any other operation is the integral of its derivative, whose series is that of its ``jvp``, of one order less. Bodies of
loops and branches carry series.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.programs.stage import stage
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import FlatFunction, check_callable, name_of
from blufunc.transforms.autodiff.jvp import jvp_jaxpr
from blufunc.transforms.control_flow.calls import Call
from blufunc.transforms.control_flow.cond import cond_p
from blufunc.transforms.control_flow.scan import scan_p
from blufunc.transforms.control_flow.while_loop import while_p

__all__ = ["jet"]


class _Series:
    """Taylor coefficients of orders 0 to n; None for those that are always 0."""

    def __init__(self, terms: Sequence[Any]):
        self.terms = tuple(terms)

    @property
    def order(self) -> int:
        return len(self.terms) - 1

    def dense(self) -> list[Any]:
        """All coefficients as arrays."""
        return [bnp.zeros_like(self.terms[0]) if t is None else t for t in self.terms]

    def derivative(self) -> _Series:
        """The series of the derivative, one order shorter."""
        return _Series([None if t is None else t * k for k, t in enumerate(self.terms)][1:])

    def shortened(self) -> _Series:
        """The series without its last term."""
        return _Series(self.terms[:-1])


Value = Any  # an array, or a _Series


def _first(x: Value) -> Any:
    return x.terms[0] if isinstance(x, _Series) else x


def _total(terms: Sequence[Any]) -> Any:
    """A sum in which None is 0."""
    there = [t for t in terms if t is not None]
    return sum(there[1:], start=there[0]) if there else None


# -- rules -------------------------------------------------------------------------------------------


def _times(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a * b


def _exp(x: _Series) -> list[Any]:
    """``y' = y x'``."""
    y: list[Any] = [bnp.exp(x.terms[0])]
    dx = x.derivative().terms
    for k in range(1, x.order + 1):
        total = _total([_times(y[j], dx[k - 1 - j]) for j in range(k)])
        y.append(None if total is None else total / k)
    return y


def _log(x: _Series) -> list[Any]:
    """``x y' = x'``."""
    x0 = x.terms[0]
    y: list[Any] = [bnp.log(x0)]
    for k in range(1, x.order + 1):
        inner = _total([_times(_times(y[j], x.terms[k - j]), j) for j in range(1, k)])
        rest = _total([x.terms[k], None if inner is None else inner * (-1 / k)])
        y.append(None if rest is None else rest / x0)
    return y


def _sin_cos(x: _Series) -> tuple[list[Any], list[Any]]:
    """``s' = c x'`` and ``c' = -s x'``."""
    s: list[Any] = [bnp.sin(x.terms[0])]
    c: list[Any] = [bnp.cos(x.terms[0])]
    dx = x.derivative().terms
    for k in range(1, x.order + 1):
        up = _total([_times(c[j], dx[k - 1 - j]) for j in range(k)])
        down = _total([_times(s[j], dx[k - 1 - j]) for j in range(k)])
        s.append(None if up is None else up / k)
        c.append(None if down is None else down / -k)
    return s, c


def _by_slope(value: Callable, slope: tuple[int, int, int]) -> Callable:
    """``y' = slope(y) x'``, where the slope is a polynomial ``a + b y + c y^2``."""

    def rule(x: _Series) -> list[Any]:
        a, b, c = slope
        y, dx, z = [value(x.terms[0])], x.derivative().terms, []
        for k in range(1, x.order + 1):
            i = k - 1
            square = _total([_times(y[j], y[i - j]) for j in range(i + 1)])
            constant = a * bnp.ones_like(y[0]) if a and not i else None
            z.append(_total([constant, _times(y[i], b) if b else None, _times(square, c)]))
            total = _total([_times(z[j], dx[i - j]) for j in range(k)])
            y.append(None if total is None else total / k)
        return y

    return rule


def _div(x: Value, y: Value) -> list[Any]:
    """``z y = x``."""
    order = max(v.order for v in (x, y) if isinstance(v, _Series))
    xs = x.terms if isinstance(x, _Series) else [x, *[None] * order]
    ys = y.terms if isinstance(y, _Series) else [y, *[None] * order]
    z: list[Any] = []
    for k in range(order + 1):
        inner = _total([_times(z[j], ys[k - j]) for j in range(k)])
        rest = _total([xs[k], None if inner is None else -inner])
        z.append(None if rest is None else rest / ys[0])
    return z


def _power(x: _Series, value: Any, r: Any) -> list[Any]:
    """``x y' = r y x'`` for ``y = x^r``, x not 0."""
    y, x0 = [value], x.terms[0]
    for k in range(1, x.order + 1):
        total = _total([_times(_times(y[k - j], x.terms[j]), (r * j - (k - j)) / k) for j in range(1, k + 1)])
        y.append(None if total is None else total / x0)
    return y


def _integer_power(x: _Series, y: int) -> list[Any]:
    """By repeated products, which are right at 0, too."""
    if y < 0:
        return _div(bnp.ones_like(x.terms[0]), _Series(_integer_power(x, -y)))
    result: Any = None
    base = list(x.terms)
    while y:
        if y & 1:
            result = base if result is None else _cauchy(lambda a, b: a * b, result, base)
        base = _cauchy(lambda a, b: a * b, base, base) if y > 1 else base
        y >>= 1
    return [bnp.ones_like(x.terms[0]), *[None] * x.order] if result is None else result


def _cauchy(product: Callable, a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    return [
        _total([None if a[j] is None or b[k - j] is None else product(a[j], b[k - j]) for j in range(k + 1)])
        for k in range(len(a))
    ]


_RECURRENCES: dict[Primitive, Callable] = {
    lax.exp_p: _exp,
    lax.log_p: _log,
    lax.sin_p: lambda x: _sin_cos(x)[0],
    lax.cos_p: lambda x: _sin_cos(x)[1],
    lax.tanh_p: _by_slope(bnp.tanh, (1, 0, -1)),
    lax.logistic_p: _by_slope(lax.logistic, (0, 1, -1)),
    lax.div_p: _div,
    lax.integer_pow_p: _integer_power,
    lax.sqrt_p: lambda x: _power(x, bnp.sqrt(x.terms[0]), 0.5),
    lax.rsqrt_p: lambda x: _power(x, lax.rsqrt(x.terms[0]), -0.5),
}


# -- evaluation --------------------------------------------------------------------------------------


def _run(jaxpr: Jaxpr, args: Sequence[Value], order: int) -> list[Value]:
    """Evaluate a jaxpr on series of one order, and arrays."""
    env: dict[Any, Value] = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    read = lambda a: a.array if a.__class__ is Literal else env[a]
    previous = source.replay.line
    try:
        for eqn in jaxpr.eqns:
            source.replay.line = eqn.source
            env.update(zip(eqn.outvars, _equation(eqn, [read(a) for a in eqn.invars], order), strict=True))
    finally:
        source.replay.line = previous
    return [read(a) for a in jaxpr.outvars]


def _equation(eqn: Eqn, ins: list[Value], order: int) -> list[Value]:
    prim, params = eqn.prim, eqn.params
    bind = lambda *xs: list(prim.bind(*xs, **params)) if prim.multiple_results else [prim.bind(*xs, **params)]
    moving = [i for i, x in enumerate(ins) if isinstance(x, _Series)]
    if not moving:
        return bind(*ins)
    if order == 0:  # values alone
        return [_Series([x]) if dtypes.is_inexact(x.aval.dtype) else x for x in bind(*map(_first, ins))]
    if not any(dtypes.is_inexact(v.aval.dtype) for v in eqn.outvars):
        return bind(*map(_first, ins))
    if isinstance(prim, Call) and "jaxpr" in params:
        return _run(params["jaxpr"], ins, order)
    if prim in _CONTROL:
        return _CONTROL[prim](eqn, ins, order)
    if prim in _RECURRENCES:
        return [_Series(_RECURRENCES[prim](*ins, **{} if prim is not lax.integer_pow_p else params))]
    groups = prim.linear_in([_first(x).aval for x in ins], [v.aval for v in eqn.outvars], **params)
    for group in groups:
        if set(moving) <= set(group):
            return _linear(bind, ins, group, order)
    if len(moving) == 2 and all(frozenset({i}) in map(frozenset, groups) for i in moving):
        return _bilinear(bind, ins, moving, order)
    return _integrated(eqn, bind, ins, moving, order)


def _linear(bind: Callable, ins: list[Value], group: Any, order: int) -> list[Value]:
    columns: list[Any] = []
    for k in range(order + 1):
        at = lambda x, k=k: x.terms[k] if isinstance(x, _Series) else x if k == 0 else None
        terms = [at(x) if i in group else x for i, x in enumerate(ins)]
        if all(t is None for i, t in enumerate(terms) if i in group):
            columns.append(None)
            continue
        columns.append(
            bind(*[bnp.zeros_like(_first(x)) if t is None else t for t, x in zip(terms, ins, strict=True)])
        )
    n = len(columns[0])  # the value itself is never left out
    return [_Series([None if c is None else c[i] for c in columns]) for i in range(n)]


def _bilinear(bind: Callable, ins: list[Value], moving: list[int], order: int) -> list[Value]:
    i, j = moving

    def product(a, b):
        operands = list(ins)
        operands[i], operands[j] = a, b
        return bind(*operands)[0]

    return [_Series(_cauchy(product, ins[i].terms, ins[j].terms))]


def _integrated(eqn: Eqn, bind: Callable, ins: list[Value], moving: list[int], order: int) -> list[Value]:
    """The integral of the derivative along the curve."""
    avals = [_first(x).aval.strong() for x in ins]
    values = bind(*map(_first, ins))
    whole = stage(lambda *xs: bind(*xs), avals, eqn.prim.name)
    nonzeros = tuple([i in moving for i in range(len(ins))])
    slopes, out_nonzeros = jvp_jaxpr(whole, nonzeros, (False,) * len(values))
    points = [x.shortened() if isinstance(x, _Series) else x for x in ins]
    velocities = [_Series(ins[i].derivative().dense()) for i in moving]
    outs = _run(slopes, [*points, *velocities], order - 1)
    rest = iter(outs[len(values) :])
    results: list[Value] = []
    for value, nonzero in zip(values, out_nonzeros, strict=True):
        if not nonzero:
            results.append(value)
            continue
        slope = next(rest)
        terms = slope.terms if isinstance(slope, _Series) else (slope, *[None] * (order - 1))
        results.append(_Series([value, *(None if t is None else t / (k + 1) for k, t in enumerate(terms))]))
    return results


# -- control flow ------------------------------------------------------------------------------------


def _packed(x: Value, order: int) -> Any:
    """A value as a pytree: all coefficients of what is inexact."""
    if isinstance(x, _Series):
        return tuple(x.dense())
    x = lift(x)
    if not dtypes.is_inexact(x.aval.dtype):
        return x
    return (x, *[bnp.zeros_like(x)] * order)


def _unpacked(x: Any) -> Value:
    return _Series(x) if isinstance(x, tuple) else x


def _body(jaxpr: Jaxpr, order: int) -> Callable:
    """A jaxpr as a function of packed values."""
    return lambda xs: [_packed(y, order) for y in _run(jaxpr, [_unpacked(x) for x in xs], order)]


def _cond(eqn: Eqn, ins: list[Value], order: int) -> list[Value]:
    index, *operands = ins
    branches = [_body(b, order) for b in eqn.params["branches"]]
    return [_unpacked(y) for y in lax.switch(index, branches, [_packed(x, order) for x in operands])]


def _scan(eqn: Eqn, ins: list[Value], order: int) -> list[Value]:
    params = dict(eqn.params)
    jaxpr, n_consts, n_carry = (params.pop(k) for k in ("jaxpr", "n_consts", "n_carry"))
    packed = [_packed(x, order) for x in ins]
    consts, carry, xs = packed[:n_consts], packed[n_consts : n_consts + n_carry], packed[n_consts + n_carry :]
    body = _body(jaxpr, order)

    def step(carry, xs):
        outs = body([*consts, *carry, *xs])
        return outs[:n_carry], outs[n_carry:]

    carry, ys = lax.scan(step, carry, xs, **params)
    return [_unpacked(y) for y in (*carry, *ys)]


def _while(eqn: Eqn, ins: list[Value], order: int) -> list[Value]:
    params = eqn.params
    n_cond, n = params["n_cond"], params["n_cond"] + params["n_body"]
    packed = [_packed(x, order) for x in ins]
    points = [_first(x) for x in ins[:n_cond]]
    step = _body(params["body"], order)
    first = lambda x: x[0] if isinstance(x, tuple) else x
    going = lambda carry: _run(params["cond"], [*points, *map(first, carry)], 0)[0]
    outs = lax.while_loop(
        going, lambda carry: step([*packed[n_cond:n], *carry]), packed[n:], max_steps=params["max_steps"]
    )
    return [_unpacked(y) for y in outs]


_CONTROL: dict[Primitive, Callable] = {cond_p: _cond, scan_p: _scan, while_p: _while}


# -- the function ------------------------------------------------------------------------------------


def jet(
    fun: Callable, primals: Sequence[Any], series: Sequence[Any], factorial_scaled: bool = True, **_: Any
) -> tuple[Any, Any]:
    """The value and the higher derivatives of ``fun`` along a curve.

        # sin(t) at 0.5: its value, and three derivatives
        y, (d1, d2, d3) = jet(bnp.sin, (0.5,), ((1.0, 0.0, 0.0),))

    Args:
      fun: a function of arrays, which returns a pytree of arrays.
      primals: the point, an array for each argument.
      series: for each argument, the derivatives of orders 1 to k of the curve there.
      factorial_scaled: False: ``series`` and the result have Taylor coefficients, derivatives over factorials.
    Returns:
      the value, and a pytree of its structure with a list of k derivatives for each array.
    """
    check_callable(fun, "jet")
    primals, series = list(primals), [list(s) for s in series]
    if len(primals) != len(series):
        raise errors.ArgumentError(
            f"jet: {len(primals)} primals and {len(series)} series.",
            where=source.here(),
            fix="give each argument a series",
        )
    orders = {len(s) for s in series}
    if len(orders) > 1:
        raise errors.ArgumentError(
            f"jet: the series have {', '.join(map(str, sorted(orders)))} terms.",
            where=source.here(),
            fix="give all arguments series of one length; zeros for terms that vanish",
        )
    order = orders.pop() if orders else 0
    values = [lift(p, f"primal {i} of jet") for i, p in enumerate(primals)]
    args: list[Value] = []
    for value, terms in zip(values, series, strict=True):
        if not dtypes.is_inexact(value.aval.dtype):
            raise errors.GradError(
                f"jet with respect to {value.aval}: primals are floats or complex numbers.",
                where=source.here(),
            )
        shaped = [bnp.broadcast_to(bnp.asarray(t, value.aval.dtype), value.aval.shape) for t in terms]
        scale = [1 / math.factorial(k + 1) if factorial_scaled else 1 for k in range(order)]
        args.append(_Series([value, *(t * s for t, s in zip(shaped, scale, strict=True))]))
    leaves, in_tree = tree.flatten((tuple(values), {}))
    flat = FlatFunction(fun, in_tree)
    jaxpr = stage(flat, [v.aval for v in values], name_of(fun))
    outs = _run(jaxpr, args, order)
    firsts = [lift(_first(y)) for y in outs]
    terms = []
    for y, value in zip(outs, firsts, strict=True):
        dtype = value.aval.dtype if dtypes.is_inexact(value.aval.dtype) else dtypes.float32
        zero = bnp.zeros(value.aval.shape, dtype)
        own = y.dense()[1:] if isinstance(y, _Series) else [zero] * order
        terms.append([t * math.factorial(k + 1) if factorial_scaled else t for k, t in enumerate(own)])
    return tree.unflatten(flat.out_tree, firsts), tree.unflatten(flat.out_tree, terms)
