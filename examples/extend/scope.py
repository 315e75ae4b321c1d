"""Scoped rules: gradients through rounding, and gradients clipped at their source.

    with bf.override(lax.round_p, jvp=straight_through):
        grads = bf.grad(loss)(params)

The derivative of ``round`` is zero, so a network with rounded weights learns nothing from its true gradient. The
straight-through estimator (Bengio, Leonard and Courville, 2013) uses the derivative of the identity instead. As a
scoped rule it needs no change of the network and no second rounding function: inside the block every ``round`` uses
it, after the block nothing does, and programs compiled inside are not used outside.

    python -m examples.extend.scope
"""

from __future__ import annotations

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import extend, lax, random


def straight_through(primals, tangents):
    """The jvp rule of rounding as if it were the identity."""
    (x,), (t,) = primals, tangents
    return lax.round_p.bind(x), t


LIMIT = 1.0


def tempered(primals, tangents):
    """The jvp rule of log with a derivative of at most LIMIT in magnitude.

    No example near zero then dominates the others.
    """
    (x,), (t,) = primals, tangents
    value = lax.log_p.bind(x)
    if isinstance(t, extend.Zero):
        return value, extend.zero(value.aval)
    return value, t * bnp.clip(1 / x, -LIMIT, LIMIT)


# -- a network whose weights are multiples of a quarter --------------------------------------------


def rounded(w):
    """Weights rounded to the nearest quarter."""
    return bnp.round(4 * w) / 4


def loss(params, x, y):
    w, v = map(rounded, params)
    return bnp.mean(bnp.square(bnp.tanh(x @ w) @ v - y))


@bf.jit
def step(params, x, y):
    value, grads = bf.value_and_grad(loss)(params, x, y)
    return bf.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def train(steps=200):
    """Loss before and after training."""
    k1, k2, k3 = random.split(random.key(0), 3)
    params = (random.normal(k1, (4, 16)) / 2, random.normal(k2, (16,)) / 4)
    x = random.normal(k3, (256, 4))
    y = bnp.sin(x[:, 0]) + 0.5 * x[:, 1]
    values = []
    for _ in range(steps):
        params, value = step(params, x, y)
        values.append(float(value))
    return values[0], values[-1]


def main():
    print("a network with weights rounded to quarters: the loss before and after 200 steps")
    print("  true derivatives    {:.4f} {:.4f}".format(*train()))
    with bf.override(lax.round_p, jvp=straight_through):
        print("  straight through    {:.4f} {:.4f}".format(*train()))
    print("  and after the block {:.4f} {:.4f}\n".format(*train()))

    likelihood = lambda p: -bnp.mean(bnp.log(p))
    p = bnp.asarray([0.9, 0.5, 1e-4])
    print("gradient of -mean log p   ", bf.grad(likelihood)(p))
    with bf.override(lax.log_p, jvp=tempered):
        print("with a limit on 1/p       ", bf.grad(likelihood)(p))


if __name__ == "__main__":
    main()
