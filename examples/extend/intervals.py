"""Interval arithmetic as a transform: bounds of a function over a box of inputs.

    bounds(f)(Interval(lo, hi))

returns an interval that contains f(x) for every x between ``lo`` and ``hi``. A transform replaces each array in a
function by a *box*, here two arrays, and each operation on arrays by a *rule*, here the operation on intervals. Most
rules are one line: an increasing function applies to both ends, and so does any operation that only moves elements.

Rules compute with ordinary arrays, so the bound is an ordinary function: it can be compiled with ``jit``, batched with
``vmap`` and differentiated with ``grad``. Its gradient enables *certified training*: ``main`` trains a small network
not on its errors but on a bound of its errors over every perturbation of its inputs, the interval bound propagation of
Gowal et al., "On the effectiveness of interval bound propagation for training verifiably robust models" (2018).

Bounds are sound up to rounding: the ends are computed in the arithmetic of the arrays, rounded to nearest.

    python -m examples.extend.intervals
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax, random


class Interval(NamedTuple):
    """All values from ``lo`` to ``hi``, elementwise.

    A namedtuple is a pytree, which is the only requirement for a box.
    """

    lo: bf.Array
    hi: bf.Array


def point(x):
    """A plain array as an interval of width 0; integers and booleans stay as they are."""
    return Interval(x, x) if bnp.issubdtype(x.dtype, bnp.floating) else x


bounds = bf.Transform("bounds", box=Interval, lift=point)

# -- rules that apply the operation itself to each end ---------------------------------------------

increasing = [
    lax.exp_p,
    lax.expm1_p,
    lax.log_p,
    lax.log1p_p,
    lax.tanh_p,
    lax.logistic_p,
    lax.sqrt_p,
    lax.erf_p,
]
sums = [lax.add_p, lax.add_any_p, lax.reduce_sum_p, lax.cumsum_p]
extremes = [lax.max_p, lax.min_p, lax.reduce_max_p, lax.reduce_min_p, lax.clamp_p]
moves = [
    lax.reshape_p, lax.transpose_p, lax.broadcast_in_dim_p, lax.concatenate_p, lax.slice_p, lax.rev_p, lax.pad_p,
    lax.gather_p, lax.dynamic_slice_p, lax.dynamic_update_slice_p, lax.select_p, lax.copy_p,
    lax.stop_gradient_p,
]  # fmt: skip
bounds.leafwise(*increasing, *sums, *extremes, *moves)

# -- rules that swap, mix or fold the ends ---------------------------------------------------------


@bounds.rule(lax.neg_p)
def neg(x):
    return Interval(-x.hi, -x.lo)


@bounds.rule(lax.convert_p)
def convert(x, *, dtype, **params):
    """Rounding to another precision or toward zero is monotonic; ``!= 0`` is not."""
    if dtype.kind == "b":
        raise bf.errors.UnsupportedError(
            "bounds of a condition.", where=bounds.where(), fix="compare what is known"
        )
    return Interval(*[lax.convert_p.bind(v, dtype=dtype, **params) for v in x])


@bounds.rule(lax.sub_p)
def sub(x, y):
    return Interval(x.lo - y.hi, x.hi - y.lo)


@bounds.rule(lax.mul_p)
def mul(x, y):
    """Multiplication: the extrema are at corners.

    For x * x, use ``bnp.square``, which knows that both factors are equal.
    """
    corners = [a * b for a in x for b in y]
    lower = bnp.minimum(bnp.minimum(corners[0], corners[1]), bnp.minimum(corners[2], corners[3]))
    upper = bnp.maximum(bnp.maximum(corners[0], corners[1]), bnp.maximum(corners[2], corners[3]))
    return Interval(lower, upper)


@bounds.rule(lax.div_p)
def div(x, y):
    """x times 1 / y, which is unbounded where y may be zero."""
    through_zero = (y.lo <= 0) & (y.hi >= 0)
    inverse = Interval(
        bnp.where(through_zero, -bnp.inf, 1 / bnp.where(through_zero, 1, y.hi)),
        bnp.where(through_zero, bnp.inf, 1 / bnp.where(through_zero, 1, y.lo)),
    )
    product = mul(x, inverse)
    # 0 * inf is NaN: the quotient may be anything
    return Interval(
        bnp.where(bnp.isnan(product.lo), -bnp.inf, product.lo),
        bnp.where(bnp.isnan(product.hi), bnp.inf, product.hi),
    )


def _fold(x):
    """|x|: the minimum is zero if the interval contains it."""
    a, b = bnp.abs(x.lo), bnp.abs(x.hi)
    inside = (x.lo <= 0) & (x.hi >= 0)
    return Interval(bnp.where(inside, 0, bnp.minimum(a, b)), bnp.maximum(a, b))


@bounds.rule(lax.abs_p)
def absolute(x):
    return _fold(x)


@bounds.rule(lax.square_p)
def square(x):
    return Interval(*map(bnp.square, _fold(x)))


@bounds.rule(lax.integer_pow_p)
def integer_pow(x, *, y):
    """Even powers are powers of |x|, odd ones increase, negative ones are reciprocals."""
    ends = _fold(x) if y % 2 == 0 else x
    power = Interval(*[lax.integer_pow(v, abs(y)) for v in ends])
    return power if y >= 0 else div(point(bnp.ones_like(x.lo)), power)


def _wave(x, top):
    """Range of a wave of period 2 pi with its maximum, 1, at ``top``.

    It is the values at the ends, or 1 and -1 where the interval contains an extremum.
    """

    def holds(extremum):
        # true if extremum + 2 pi k lies inside for some integer k
        return bnp.floor((x.hi - extremum) / (2 * math.pi)) >= bnp.ceil((x.lo - extremum) / (2 * math.pi))

    a, b = bnp.cos(x.lo - top), bnp.cos(x.hi - top)
    return Interval(
        bnp.where(holds(top + math.pi), -1, bnp.minimum(a, b)), bnp.where(holds(top), 1, bnp.maximum(a, b))
    )


@bounds.rule(lax.sin_p)
def sin(x):
    return _wave(x, math.pi / 2)


@bounds.rule(lax.cos_p)
def cos(x):
    return _wave(x, 0.0)


@bounds.rule(lax.dot_general_p)
def dot_general(x, y, **params):
    """Midpoint-radius form of a bilinear operation.

    |x y - cx cy| <= |cx| ry + rx |cy| + rx ry: three matmuls, and two if one operand is a point.
    """
    dot = lambda a, b: lax.dot_general_p.bind(a, b, **params)
    (cx, rx), (cy, ry) = [((v.lo + v.hi) / 2, (v.hi - v.lo) / 2) for v in (x, y)]
    centre = dot(cx, cy)
    if y.lo is y.hi:  # lifted from a plain array
        radius = dot(rx, bnp.abs(cy))
    elif x.lo is x.hi:
        radius = dot(bnp.abs(cx), ry)
    else:
        radius = dot(bnp.abs(cx), ry) + dot(rx, bnp.abs(cy) + ry)
    return Interval(centre - radius, centre + radius)


# -- a network with a certificate ------------------------------------------------------------------


def init(key, sizes=(2, 32, 32, 1)):
    """Weights and biases of a network."""
    keys = random.split(key, len(sizes) - 1)
    shapes = list(itertools.pairwise(sizes))
    return [
        (random.normal(k, (m, n)) * math.sqrt(2 / m), bnp.zeros(n))
        for k, (m, n) in zip(keys, shapes, strict=True)
    ]


def network(params, x):
    """Score of one example: positive for class 1."""
    *hidden, (w, b) = params
    for v, c in hidden:
        x = bnp.maximum(x @ v + c, 0)
    return (x @ w + b)[0]


def worst_margin(params, x, label, eps):
    """Worst margin over all inputs within ``eps`` of x.

    The margin is the score times its label, 1 or -1.
    """
    score = bounds(lambda v: network(params, v))(Interval(x - eps, x + eps))
    return bnp.where(label > 0, score.lo, -score.hi)


def loss(params, xs, labels, eps):
    """Logistic loss of the worst margins, which certified training minimizes."""
    margins = bf.vmap(worst_margin, (None, 0, 0, None))(params, xs, labels, eps)
    return bnp.mean(bnp.logaddexp(0, -margins))


@bf.jit
def step(params, xs, labels, eps):
    """One step of gradient descent, through the bound."""
    grads = bf.grad(loss)(params, xs, labels, eps)
    return bf.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def data(key, n):
    """Points in two classes: inside a disc, and outside of it with a gap between."""
    k1, k2, k3 = random.split(key, 3)
    inside = random.bernoulli(k1, 0.5, (n,))
    radius = bnp.where(inside, random.uniform(k2, (n,)) * 0.8, 1.4 + 0.6 * random.uniform(k2, (n,)))
    angle = random.uniform(k3, (n,)) * 2 * math.pi
    return bnp.stack([radius * bnp.cos(angle), radius * bnp.sin(angle)], 1), bnp.where(inside, 1, -1)


def train(eps, steps=400, seed=0):
    """Train to be right within ``eps`` of every point, with ``eps`` growing gradually."""
    params = init(random.key(seed))
    xs, labels = data(random.key(seed + 1), 200)
    for i in range(steps):
        params = step(params, xs, labels, eps * min(1.0, 2 * i / steps))
    return params


def certified(params, eps, seed=2):
    """Shares of new points classified right, and provably right within ``eps``."""
    xs, labels = data(random.key(seed), 500)
    margins = lambda e: bf.vmap(worst_margin, (None, 0, 0, None))(params, xs, labels, e)
    return float((margins(0.0) > 0).mean()), float((margins(eps) > 0).mean())


def main():
    f = lambda x: bnp.sin(x) * bnp.exp(-bnp.square(x)) + x / (2 + bnp.cos(x))
    box = Interval(bnp.asarray(0.4), bnp.asarray(0.6))
    lo, hi = bounds(f)(box)
    samples = f(bnp.linspace(0.4, 0.6, 1001))
    print("f(x) = sin(x) exp(-x^2) + x / (2 + cos(x)) on [0.4, 0.6]")
    print(f"  bound   [{float(lo):.4f}, {float(hi):.4f}]")
    print(f"  sampled [{float(samples.min()):.4f}, {float(samples.max()):.4f}]\n")

    eps = 0.1
    print(f"a network of two classes, and how much of it is certain within {eps} of each input")
    for name, train_eps in (("trained on the points", 0.0), ("trained on the bound", eps)):
        right, certain = certified(train(train_eps), eps)
        print(f"  {name:<22} {right:6.1%} right, {certain:6.1%} certified")


if __name__ == "__main__":
    main()
