"""jaxtyping: shapes checked at call time, in transforms too."""

# ruff: noqa: F722

import jax
import jax.numpy as jnp
from beartype import beartype
from jaxtyping import Array, Float, PRNGKeyArray, jaxtyped


@jaxtyped(typechecker=beartype)
def product(x: Float[Array, "a b"], y: Float[Array, "b c"]) -> Float[Array, "a c"]:
    return x @ y


@jaxtyped(typechecker=beartype)
def draw(key: PRNGKeyArray) -> Float[Array, "3"]:
    return jax.random.normal(key, (3,))


def results():
    x, y = jnp.arange(6.0).reshape(2, 3), jnp.ones((3, 4))
    refused = 0
    for args in ((y, x), (x.astype(int), y)):
        try:
            product(*args)
        except Exception:
            refused += 1
    return {
        "eager": product(x, y),
        "jit": jax.jit(product)(x, y),
        "vmap": jax.vmap(product)(x[None], y[None]),
        "grad": jax.grad(lambda x: product(x, y).sum())(x),
        "key": draw(jax.random.key(0)),
        "refused": refused,
    }
