"""User-written kernels: rotary positions in CUDA C++, and a capped logit.

    rotated(x)            # each pair of features rotated by an angle proportional to the position
    capped(x, cap=30.0)   # cap * tanh(x / cap)

The second is a function of scalars. ``bf.elementwise`` applies it to arrays of any shape. It is traced like any
function, so it fuses with its neighbours and has derivatives and batching rules.

The first is a kernel. ``reference`` defines it, runs without a GPU, and could supply the derivative and the batching
rule. Here both have better forms, since a rotation has structure:

- its derivative is the inverse rotation, the same kernel with the other sign;
- a batch of sequences is only more heads, the same kernel again.

Under any transform it therefore stays one launch that reads its argument once. ``rotate.source(x, 1.0)`` returns the
kernel's source for given argument types.

    python -m examples.extend.kernels
"""

from __future__ import annotations

import blufunc as bf
import blufunc.numpy as bnp

# -- a function of scalars ------------------------------------------------------------------------------


@bf.elementwise
def capped(x, cap=30.0):
    """``x`` with a soft bound on its magnitude."""
    return cap * bnp.tanh(x / cap)


# -- a kernel --------------------------------------------------------------------------------------


def reference(x, sign):
    """Rotate pair k at position p by sign * p / 10000 ** (2 k / features).

    Args:
      x: (heads, positions, features).
      sign: 1, or -1 for the inverse.
    """
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
    """The value, and the residual of the backward rule: only the sign."""
    return rotate(x, sign), sign


def backward(sign, ct):
    """The inverse rotation of the cotangent."""
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
    """Rotary position embedding of (heads, positions, features), features even."""
    return rotate(x, 1.0)


# -- both together ---------------------------------------------------------------------------------


def logits(q, k):
    """Capped attention scores by relative position.

    Args:
      q, k: (heads, positions, features).
    """
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
