"""einops: rearrange, reduce, repeat and einsum under transforms."""

import jax
import jax.numpy as jnp
from einops import einsum, rearrange, reduce, repeat


def results():
    x = jnp.arange(24.0).reshape(2, 3, 4)
    f = lambda x: rearrange(x, "b (h w) c -> b h w c", w=1)
    return {
        "rearrange": f(x),
        "reduce": reduce(x, "b h c -> b c", "mean"),
        "repeat": repeat(x, "b h c -> b (h r) c", r=2),
        "einsum": einsum(x, x, "b h c, b k c -> b h k"),
        "jit": jax.jit(f)(x),
        "grad": jax.grad(lambda x: (reduce(x, "b h c -> b c", "max") ** 2).sum())(x),
        "vmap": jax.vmap(lambda x: rearrange(x, "h c -> c h"))(x),
    }
