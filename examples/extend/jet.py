"""Taylor series as a transform: directional derivatives of any order in one pass.

    taylor(n)(f)(Series((x, v)))    # terms c_k of  f(x + v t) = c_0 + c_1 t + ... + c_n t^n + ...

Nesting ``jvp`` n times costs 2^n; a rule for series costs n^2. The rules are the classic recurrences (Griewank and
Walther, "Evaluating Derivatives", chapter 13): where v = g(u), the chain rule v' = g'(u) u' read term by term says

    k v_k = sum over j = 1..k of  j u_j d_(k-j),        d = the series of g'(u).

For exp, d is v itself; for tanh it is 1 - v^2; for sin it is cos, whose d is -sin. Terms of d up to k - 1 are known
when v_k is computed, so each rule is a Python loop, unrolled while it is traced.

``solve`` applies it: the Taylor series of the solution of x' = f(x) follows term by term, since x_(k+1) is term k of
f(x) divided by k + 1. Steps of such a series make an integrator of any order.

    python -m examples.extend.jet
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax


class Series(NamedTuple):
    """c_0 + c_1 t + c_2 t^2 + ...: arrays of one shape. Missing terms are zero."""

    terms: tuple

    def padded(self, n):
        """The first n terms."""
        zero = bnp.zeros_like(self.terms[0])
        return Series((*self.terms, *[zero] * (n - len(self.terms)))[:n])


def constant(x):
    """A plain array as a series; non-floating arrays, such as indices, are left alone."""
    return Series((x,)) if bnp.issubdtype(x.dtype, bnp.floating) else x


@functools.cache
def taylor(order):
    """The transform for series up to t^order."""
    t = bf.Transform(
        f"taylor({order})",
        Series,
        constant,
        like=lambda x: x.terms[0],
        settle=lambda x, _: x.padded(order + 1),
    )
    t.leafwise(*EACH_TERM)
    for p in LINEAR:
        t.rule(p)(functools.partial(linear, p))
    for p in BILINEAR:
        t.rule(p)(functools.partial(product, order, p))
    for p in OF_VALUES:
        t.rule(p)(functools.partial(of_values, p))
    for p, rule in SERIES.items():
        t.rule(p)(functools.partial(rule, order))
    return t


# -- rules for many primitives at once -------------------------------------------------------------

EACH_TERM = [
    lax.neg_p, lax.reduce_sum_p, lax.cumsum_p, lax.broadcast_in_dim_p, lax.reshape_p, lax.transpose_p, lax.slice_p,
    lax.rev_p, lax.gather_p, lax.dynamic_slice_p, lax.convert_p, lax.copy_p,
]  # fmt: skip
LINEAR = [lax.add_p, lax.sub_p, lax.add_any_p, lax.concatenate_p, lax.select_p, lax.pad_p]
BILINEAR = [lax.mul_p, lax.dot_general_p]
OF_VALUES = [
    lax.lt_p, lax.le_p, lax.gt_p, lax.ge_p, lax.eq_p, lax.ne_p, lax.sign_p, lax.floor_p, lax.stop_gradient_p,
]  # fmt: skip


def linear(prim, *xs, **params):
    """Apply term by term; operands that are not series (a predicate) join each term."""
    n = max(len(x.terms) for x in xs if isinstance(x, Series))
    columns = [x.padded(n).terms if isinstance(x, Series) else [x] * n for x in xs]
    return Series(tuple(prim.bind(*row, **params) for row in zip(*columns, strict=True)))


def product(order, prim, x, y, **params):
    """Cauchy product, for any bilinear operation."""
    n = min(len(x.terms) + len(y.terms) - 1, order + 1)
    return Series(
        tuple(
            total(
                prim.bind(x.terms[i], y.terms[k - i], **params)
                for i in range(len(x.terms))
                if 0 <= k - i < len(y.terms)
            )
            for k in range(n)
        )
    )


def of_values(prim, *xs, **params):
    """Operations that depend only on the values and are locally constant."""
    return prim.bind(*[x.terms[0] if isinstance(x, Series) else x for x in xs], **params)


def total(xs):
    return functools.reduce(bnp.add, xs)


# -- recurrences -----------------------------------------------------------------------------------


def chained(order, u, value, derivative):
    """Series of g(u), from its first term and a recurrence for g'(u).

    Args:
      value: the first term.
      derivative: ``derivative(v, k)`` is term k of g'(u), from v up to term k.
    """
    if len(u.terms) == 1:
        return Series((value,))
    u = u.padded(order + 1).terms
    v, d = [value], []
    for k in range(1, order + 1):
        d.append(derivative(v, k - 1))
        v.append(total(j * u[j] * d[k - j] for j in range(1, k + 1)) / k)
    return Series(tuple(v))


def square_term(v, k):
    """Term k of v^2."""
    return total(v[i] * v[k - i] for i in range(k + 1))


def exp(order, u):
    return chained(order, u, bnp.exp(u.terms[0]), lambda v, k: v[k])


def tanh(order, u):
    return chained(order, u, bnp.tanh(u.terms[0]), lambda v, k: (1 if k == 0 else 0) - square_term(v, k))


def logistic(order, u):
    value = lax.logistic(u.terms[0])
    return chained(order, u, value, lambda v, k: v[k] - square_term(v, k))


def wave(which):
    """sin and cos together, since each is the other's derivative."""

    def rule(order, u):
        if len(u.terms) == 1:
            return Series(((bnp.sin, bnp.cos)[which](u.terms[0]),))
        u = u.padded(order + 1).terms
        sin, cos = [bnp.sin(u[0])], [bnp.cos(u[0])]
        for k in range(1, order + 1):
            sin.append(total(j * u[j] * cos[k - j] for j in range(1, k + 1)) / k)
            cos.append(-total(j * u[j] * sin[k - j] for j in range(1, k + 1)) / k)
        return Series(tuple((sin, cos)[which]))

    return rule


def div(order, x, y):
    """From v y = x: v_k = (x_k - sum over j = 1..k of y_j v_(k-j)) / y_0."""
    y0, *rest = y.terms
    n = len(x.terms) if not rest else order + 1
    v = []
    for k, xk in enumerate(x.padded(n).terms):
        known = [y.terms[j] * v[k - j] for j in range(1, min(k + 1, len(y.terms)))]
        v.append((xk - total(known) if known else xk) / y0)
    return Series(tuple(v))


def log(order, u):
    """From u v' = u'."""
    if len(u.terms) == 1:
        return Series((bnp.log(u.terms[0]),))
    u = u.padded(order + 1).terms
    v = [bnp.log(u[0])]
    for k in range(1, order + 1):
        known = [j * v[j] * u[k - j] for j in range(1, k)]
        v.append((u[k] - total(known) / k if known else u[k]) / u[0])
    return Series(tuple(v))


def sqrt(order, u):
    """From v^2 = u."""
    if len(u.terms) == 1:
        return Series((bnp.sqrt(u.terms[0]),))
    u = u.padded(order + 1).terms
    v = [bnp.sqrt(u[0])]
    for k in range(1, order + 1):
        known = [v[j] * v[k - j] for j in range(1, k)]
        v.append((u[k] - total(known) if known else u[k]) / (2 * v[0]))
    return Series(tuple(v))


def integer_pow(order, x, *, y):
    """Repeated squaring; negative powers are reciprocals."""
    if y < 0:
        return div(order, constant(bnp.ones_like(x.terms[0])), integer_pow(order, x, y=-y))
    if y == 0:
        return constant(bnp.ones_like(x.terms[0]))
    half = integer_pow(order, x, y=y // 2)
    squared = product(order, lax.mul_p, half, half)
    return product(order, lax.mul_p, squared, x) if y % 2 else squared


def power(order, x, y):
    """exp(y log x)."""
    return exp(order, product(order, lax.mul_p, y, log(order, x)))


def extremum(choose):
    """max and min: the series of the selected operand."""

    def rule(order, x, y):
        first = choose(x.terms[0], y.terms[0])
        return linear(lax.select_p, first, x, y)

    return rule


SERIES = {
    lax.exp_p: exp,
    lax.log_p: log,
    lax.tanh_p: tanh,
    lax.logistic_p: logistic,
    lax.sin_p: wave(0),
    lax.cos_p: wave(1),
    lax.div_p: div,
    lax.sqrt_p: sqrt,
    lax.square_p: lambda order, x: product(order, lax.mul_p, x, x),
    lax.integer_pow_p: integer_pow,
    lax.pow_p: power,
    lax.max_p: extremum(lambda a, b: a >= b),
    lax.min_p: extremum(lambda a, b: a <= b),
    lax.abs_p: lambda order, x: linear(lax.select_p, x.terms[0] >= 0, x, linear(lax.neg_p, x)),
}

# -- applications ----------------------------------------------------------------------------------


def derivatives(f, x, order):
    """f(x), f'(x), ..., up to the given order, for elementwise f."""
    x = bnp.asarray(x)
    series = taylor(order)(f)(Series((x, bnp.ones_like(x)))).padded(order + 1)
    return [math.factorial(k) * c for k, c in enumerate(series.terms)]


def solution(f, x, order):
    """Taylor series of the solution of x' = f(x) that begins at x."""
    terms = [x]
    for k in range(order):
        terms.append(taylor(k)(f)(Series(tuple(terms))).padded(k + 1).terms[k] / (k + 1))
    return Series(tuple(terms))


def solve(f, x, time, steps, order):
    """Solution of x' = f(x) after ``time``, by steps of its Taylor series."""
    h = time / steps

    def step(x, _):
        terms = solution(f, x, order).terms
        return functools.reduce(lambda acc, c: acc * h + c, reversed(terms)), None

    return lax.scan(step, x, None, length=steps)[0]


def pendulum(x):
    """Angle and angular velocity."""
    return bnp.stack([x[1], -bnp.sin(x[0])])


def energy(x):
    return x[1] ** 2 / 2 - bnp.cos(x[0])


def main():
    f = lambda x: bnp.exp(bnp.sin(x)) / (1 + x * x)
    print("derivatives of exp(sin x) / (1 + x^2) at 0.5, by one pass of series and by nested grad")
    nested, g = [], f
    for _ in range(5):
        nested.append(float(g(0.5)))
        g = bf.grad(g)
    for k, (a, b) in enumerate(zip(derivatives(f, 0.5, 4), nested, strict=True)):
        print(f"  order {k}: {float(a):12.6f} {b:12.6f}")

    start = bnp.asarray([1.0, 0.0], "float64")
    print("\na pendulum after 10 units of time in 20 steps: how much its energy is off")
    for order in (2, 4, 8, 16):
        end = bf.jit(functools.partial(solve, pendulum, time=10.0, steps=20, order=order))(start)
        print(f"  order {order:2}: {abs(float(energy(end) - energy(start))):.1e}")
    final_angle = lambda a: solve(pendulum, bnp.stack([a, 0 * a]), 10.0, 20, 8)[0]
    slope = bf.grad(final_angle)(bnp.asarray(1.0, "float64"))
    print(f"the derivative of the last angle by the first, through the solver: {float(slope):.6f}")


if __name__ == "__main__":
    main()
