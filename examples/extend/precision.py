"""Mixed precision as a transform: a table maps primitives to dtypes.

    lowered(f)(params, x)

runs the matmuls of f in bfloat16 and precision-sensitive operations in float32, without changes to f. The library has
such a transform, ``bf.autocast``; this one shows that it needs no internals.

A box is simply an array, possibly of another dtype than the one it replaces: ``box=None`` boxes every argument. Three
more arguments of ``Transform`` appear: ``default`` is the rule of all primitives without their own, ``lower`` converts
results to the dtype that f would have returned, and ``settle`` does the same for loop carries, whose type must not
change between iterations.

    python -m examples.extend.precision
"""

from __future__ import annotations

import itertools

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax, random

LOW, WIDE = bnp.bfloat16, bnp.float32


def as_stated(x, aval):
    """The box as the array that it replaces."""
    return x.astype(aval.dtype)


lowered = bf.Transform("lowered", lower=as_stated, settle=as_stated)


def cast(x, dtype):
    """x in ``dtype`` if it is float32 or bfloat16."""
    return x.astype(dtype) if x.dtype in (LOW, WIDE) else x


@lowered.rule(lax.dot_general_p)
def contract(x, y, **params):
    """Low precision, accumulated in float32 and rounded once, as on tensor cores."""
    params["preferred_element_type"] = None  # the dtype of the operands
    return lax.dot_general_p.bind(cast(x, LOW), cast(y, LOW), **params)


def widened(prim):
    """float32, for differences of close values, long sums and steep functions."""

    def rule(*xs, **params):
        return prim.bind(*[cast(x, WIDE) for x in xs], **params)

    return rule


for p in (
    lax.exp_p, lax.expm1_p, lax.log_p, lax.log1p_p, lax.pow_p, lax.rsqrt_p, lax.sqrt_p, lax.div_p, lax.erf_p,
    lax.reduce_sum_p, lax.reduce_prod_p, lax.cumsum_p, lax.cumprod_p, lax.cumlogsumexp_p,
):  # fmt: skip
    lowered.rule(p)(widened(p))


@lowered.rule(lax.convert_p)
def convert(x, **params):
    """Conversions that the function requests stay."""
    return lax.convert_p.bind(x, **params)


@lowered.default
def as_wide_as_the_operands(prim, *xs, **params):
    """Other operations use the widest operand dtype; scalars adapt to arrays."""
    arrays = [x for x in xs if x.ndim] or xs
    wide = any(x.dtype == WIDE for x in arrays)
    return prim.bind(*[cast(x, WIDE if wide else LOW) for x in xs], **params)


# -- a network in both precisions ------------------------------------------------------------------


def init(key, sizes=(8, 64, 64, 1)):
    shapes = list(itertools.pairwise(sizes))
    keys = random.split(key, len(shapes))
    return [random.normal(k, shape) / shape[0] ** 0.5 for k, shape in zip(keys, shapes, strict=True)]


def loss(params, x, y):
    """Mean square error of a network with normalized hidden layers."""
    for w in params[:-1]:
        x = bnp.tanh(x @ w)
        x = x / bnp.sqrt(bnp.mean(bnp.square(x), -1, keepdims=True) + 1e-6)
    return bnp.mean(bnp.square((x @ params[-1])[:, 0] - y))


def train(loss, steps=300):
    """Loss after some steps of gradient descent on a teacher's outputs."""
    params, k = init(random.key(0)), random.key(1)
    x = random.normal(k, (256, 8))
    y = bnp.sin(x[:, 0]) * x[:, 1] + 0.5 * x[:, 2]

    @bf.jit
    def step(params):
        value, grads = bf.value_and_grad(loss)(params, x, y)
        return bf.tree.map(lambda p, g: p - 0.05 * g, params, grads), value

    for _ in range(steps):
        params, value = step(params)
    return params, float(value)


def dtypes_by_primitive(jaxpr):
    """Count of each primitive by result dtype."""
    table = {}
    for eqn in jaxpr.eqns:
        key = (eqn.prim.name, str(eqn.outvars[0].aval.dtype))
        table[key] = table.get(key, 0) + 1
    return table


def main():
    params, x = init(random.key(0)), random.normal(random.key(1), (4, 8))
    table = dtypes_by_primitive(bf.make_jaxpr(lowered(loss))(params, x, bnp.zeros(4)))
    print("what runs in which precision:")
    for (name, dtype), n in sorted(table.items(), key=lambda item: (item[0][1], item[0][0])):
        print(f"  {dtype:<9} {name:<18} x{n}")
    print("\nloss after 300 steps")
    print(f"  float32            {train(loss)[1]:.5f}")
    print(f"  bfloat16 products  {train(lowered(loss))[1]:.5f}")


if __name__ == "__main__":
    main()
