"""Your own kernels: rotary positions in CUDA C++, a capped logit in Python.

    rotated(x)            # each pair of features turned by an angle that grows with the position
    capped(x, cap=30.0)   # cap * tanh(x / cap)

The second is a formula of scalars. ``bf.elementwise`` applies it to arrays of any shape; it is traced as any function
is, so it fuses with its neighbours and has derivatives and batches.

The first is a kernel. What it computes is defined by ``reference``, which is what runs without a GPU, and would give
the derivative and the batch as well. Here both are better than that, since a rotation has a structure:

- its derivative is the rotation backwards, that is the same kernel with the other sign;
- a batch of sequences is only more heads, that is the same kernel again.

So whatever a program does with it, it stays one launch that reads its argument once. The text of the kernel for
arguments of certain types is ``rotate.source(x, 1.0)``.

    python -m examples.extend.kernels
"""

from __future__ import annotations

import blufunc as bf
import blufunc.numpy as bnp

# -- a formula -------------------------------------------------------------------------------------


@bf.elementwise
def capped(x, cap=30.0):
    """``x`` with a soft bound on its magnitude."""
    return cap * bnp.tanh(x / cap)


# -- a kernel --------------------------------------------------------------------------------------


def reference(x, sign):
    """Pair k of position p of ``x`` (heads, positions, features) turned by sign * p / 10000 ** (2 k / features)."""
    _, positions, features = x.shape
    rates = 10000.0 ** (-bnp.arange(0, features, 2, dtype=x.dtype) / features)
    angles = sign * bnp.arange(positions, dtype=x.dtype)[:, None] * rates
    cos, sin = bnp.cos(angles), bnp.sin(angles)
    left, right = x[..., 0::2], x[..., 1::2]
    turned = bnp.stack([left * cos - right * sin, left * sin + right * cos], axis=-1)
    return turned.reshape(x.shape)


BODY = """
    const int pairs = x_shape_2 / 2;
    if (i >= x_size / 2) return;
    const int pair = i % pairs, position = i / pairs % x_shape_1;

    const x_dtype rate = pow((x_dtype)10000, (x_dtype)(-2 * pair) / x_shape_2);
    const x_dtype angle = sign[0] * position * rate, c = cos(angle), s = sin(angle);
    const x_dtype left = x[2 * i], right = x[2 * i + 1];
    out[2 * i] = left * c - right * s;
    out[2 * i + 1] = left * s + right * c;
"""


def forward(x, sign):
    """The value, and what the way back needs: the sign alone."""
    return rotate(x, sign), sign


def backward(sign, ct):
    """A rotation is undone by the other one."""
    return rotate(ct, -sign), None


def batch(size, in_batched, x, sign):
    """More sequences are more heads."""
    x_batched, sign_batched = in_batched
    if sign_batched:
        x = x if x_batched else bnp.broadcast_to(x, (size, *x.shape))
        return bnp.stack([rotate(x[b], sign[b]) for b in range(size)]), True
    return rotate(x.reshape(-1, *x.shape[2:]), sign).reshape(x.shape), True


rotate = bf.cuda_kernel(
    BODY,
    reference=reference,
    name="rotate",
    out="x",
    grid=lambda x, sign: -(-x.size // 2 // 256),
    vjp=(forward, backward),
    vmap=batch,
)


def rotated(x):
    """Rotary position embedding of ``x``, (heads, positions, features) with an even number of features."""
    return rotate(x, 1.0)


# -- the two of them -------------------------------------------------------------------------------


def logits(q, k):
    """Capped scores of queries with keys, each (heads, positions, features), by relative position."""
    return capped(rotated(q) @ bnp.swapaxes(rotated(k), 1, 2))


def main():
    q, k = (bf.random.normal(bf.random.key(i), (2, 5, 8)) for i in range(2))
    print("logits by relative position:\n", logits(q, k)[0].round(3), "\n")
    print("a step of a batch, differentiated:")
    step = bf.vmap(bf.grad(lambda q, k: logits(q, k).sum()), in_axes=(0, None))
    print(bf.jit(step).trace(bnp.stack([q, q]), k).lower().jaxpr, "\n")
    print(rotate.source(q, 1.0))


if __name__ == "__main__":
    main()
