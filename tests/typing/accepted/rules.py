"""Custom rules, derivatives of all modes, vmap, shard_map, named calls."""

import functools
from collections.abc import Callable
from typing import assert_type

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import Array, P, lax
from blufunc.custom_batching import custom_vmap


@bf.custom_vjp
def clipped(x: Array, bound: Array) -> Array:
    return x


def clipped_fwd(x: Array, bound: Array) -> tuple[Array, Array]:
    return x, bound


def clipped_bwd(bound: Array, ct: Array) -> tuple[Array, None]:
    return jnp.clip(ct, -bound, bound), None


clipped.defvjp(clipped_fwd, clipped_bwd)
assert_type(clipped(jnp.ones(3), bound=jnp.ones(())), Array)


@functools.partial(bf.custom_jvp, nondiff_argnums=(1,))
def power(x: Array, n: int) -> Array:
    return x**n


@power.defjvp
def power_jvp(n: int, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (t,) = primals, tangents
    return power(x, n), n * x ** (n - 1) * t


cubed: Array = power(jnp.ones(3), 2)


@custom_vmap
def sine(x: Array) -> Array:
    return jnp.sin(x)


@sine.def_vmap
def sine_vmap(axis_size: int, in_batched: list[bool], x: Array) -> tuple[Array, bool]:
    return jnp.sin(x), True


assert_type(bf.vmap(sine)(jnp.ones(3)), Array)


def energy(x: Array) -> Array:
    return jnp.sum(jnp.cos(x) ** 2)


def dynamics(state: dict[str, Array], t: Array) -> dict[str, Array]:
    return {"x": state["v"], "v": -state["x"] * t}


x, t = jnp.ones(3), jnp.zeros(())
assert_type(bf.grad(jnp.sin)(1.0), Array)
assert_type(bf.vmap(bf.grad(jnp.tanh))(x), Array)
assert_type(bf.grad(bf.grad(jnp.exp))(2.0), Array)
assert_type(bf.hessian(energy)(x), Array)
assert_type(bf.jacfwd(energy)(x) + bf.jacrev(energy)(x), Array)
assert_type(bf.jvp(energy, (x,), (x,)), tuple[Array, Array])
out, pullback = bf.vjp(dynamics, {"x": x, "v": x}, t)
assert_type(out, dict[str, Array])
(of_state, of_t) = pullback(out)
value, derivative = bf.linearize(energy, x)
assert_type(derivative(x), Array)
assert_type(bf.vmap(dynamics, in_axes=({"x": 0, "v": 0}, None))({"x": x, "v": x}, t), dict[str, Array])
per_example = bf.vmap(bf.grad(lambda p, x: jnp.sum(p * x)), in_axes=(None, 0))(x, jnp.ones((2, 3)))
first, second = bf.grad(lambda a, b: jnp.sum(a * b), argnums=(0, 1))(x, x)
bf.value_and_grad(lambda x: x**2)(3.0)
print(bf.make_jaxpr(energy)(x), bf.eval_shape(energy, x).shape)

mesh = bf.make_mesh((2,), ("data",))


@bf.shard_map(mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
def local_sum(x: Array, scale: Array) -> Array:
    return x * scale + lax.psum(jnp.sum(x), "data")


assert_type(bf.jit(local_sum)(jnp.ones(4), t), Array)
global_mean = bf.shard_map(lambda x: lax.pmean(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())


def with_mesh(state: dict[str, Array]) -> dict[str, Array]:
    state = lax.psum(state, "data")
    assert_type(lax.all_gather(state["x"], "data", tiled=True), Array)
    return bf.with_sharding_constraint(state, P("data"))


@functools.partial(bf.named_call, name="residual")
def residual(x: Array, f: Callable[[Array], Array]) -> Array:
    return x + f(x)


assert_type(bf.autocast(energy)(x), Array)
squared: Array = bf.elementwise(power)(x, 2)
