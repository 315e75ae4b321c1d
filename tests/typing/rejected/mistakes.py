"""Mistakes that checkers find; a marker names the error of mypy on its line."""

import functools

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import Array, lax, nn, optim, random
from blufunc.scipy import special, stats

x = jnp.ones(3)

# attributes and functions that there are not
x.foo  # error: attr-defined
x.at[0].put(1)  # error: attr-defined
jnp.sinus(x)  # error: attr-defined
bf.tree_multimap  # error: attr-defined
lax.scam  # error: attr-defined

# what is no array
jnp.sin("a")  # error: arg-type
jnp.sin([1.0, 2.0])  # error: arg-type
jnp.add(x, "a")  # error: arg-type
jnp.maximum(None, x)  # error: arg-type
jnp.sum("abc")  # error: arg-type
x + "a"  # error: operator
x @ [1.0]  # error: operator
x - "a"  # error: operator
lax.exp("a")  # error: arg-type
lax.dynamic_slice("a", (0,), (1,))  # error: arg-type
nn.softmax("a")  # error: arg-type
random.normal("key", (3,))  # error: arg-type
special.erf("a")  # error: arg-type
stats.norm.logpdf("a")  # error: arg-type
optim.sgd("fast")  # error: arg-type
jnp.zeros(2.5)  # error: arg-type
jnp.ones(3, dtype=3)  # error: arg-type
x.reshape(3).astype(3)  # error: arg-type

# numbers and names of arguments
jnp.sin(x, x, x)  # error: call-arg
jnp.sin()  # error: call-arg
jnp.mean(x, axes=0)  # error: call-arg
x.sum(axes=0)  # error: call-arg


@bf.jit
def two(x: Array, n: int = 1) -> Array:
    return x * n


@functools.partial(bf.vmap, in_axes=(0, None))
def mapped(x: Array, y: Array) -> Array:
    return x + y


@bf.checkpoint
def kept(x: Array) -> Array:
    return x


@bf.custom_vjp
def ruled(x: Array, y: Array) -> Array:
    return x


def loss(params: dict[str, Array], x: Array) -> Array:
    return jnp.sum(params["w"] * x)


def not_scalar(x: Array) -> dict[str, Array]:
    return {"x": x}


two()  # error: call-arg
two(x, 1, 2)  # error: call-arg
two(x, m=1)  # error: call-arg
two("a")  # error: arg-type
two(x).foo  # error: attr-defined
two.foo  # error: attr-defined
two.lower(x, 1, 2)  # error: call-arg
bf.jit(two)(x, 1, 2)  # error: call-arg
bf.vmap(kept)(x, x)  # error: call-arg
kept(x, x)  # error: call-arg
ruled(x)  # error: call-arg
bf.grad(loss)(x, x)  # error: arg-type
bf.grad(loss)({"w": x})  # error: call-arg
bf.grad(loss)({"w": x}, x).foo  # error: attr-defined
bf.grad(not_scalar)(x)  # error: arg-type
bf.jit(static_argnum=0)  # error: call-overload


# functions that do not fit together
def body(c: Array, x: Array) -> Array:
    return c + x


def pair(c: Array, x: Array) -> tuple[Array, Array]:
    return c, x


lax.scan(body, x, x)  # error: arg-type
lax.scan(pair, x, x)[0].foo  # error: attr-defined
lax.while_loop(kept, pair, x)  # error: arg-type
lax.fori_loop(0, 3, kept, x)  # error: arg-type
lax.map(pair, x)  # error: arg-type
lax.cond(x, x, x, x)  # error: call-overload


class Model:
    @bf.jit
    def method(self, x: Array) -> Array:
        return x


Model().method()  # error: call-arg
Model().method(x, x)  # error: call-arg
