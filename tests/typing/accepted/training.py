"""A training step: jit, gradients, an optimizer, checkpoint; methods."""

import functools
from typing import Any, NamedTuple, assert_type

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import Array, lax, nn, optim, random, tree


class Params(NamedTuple):
    w: Array
    b: Array


def predict(params: Params, x: Array) -> Array:
    return nn.relu(x @ params.w + params.b)


def loss(params: Params, x: Array, y: Array) -> Array:
    return jnp.mean((predict(params, x) - y) ** 2)


def loss_with_logs(params: Params, x: Array, y: Array) -> tuple[Array, dict[str, Array]]:
    value = loss(params, x, y)
    return value, {"loss": value}


@bf.jit
def step(params: Params, x: Array, y: Array) -> tuple[Params, Array]:
    value, grads = bf.value_and_grad(loss)(params, x, y)
    assert_type(value, Array)
    assert_type(grads, Params)
    return tree.map(jnp.subtract, params, grads), value


@functools.partial(bf.jit, static_argnames=("n",), donate_argnums=0)
def steps(params: Params, x: Array, y: Array, n: int = 3) -> Params:
    for _ in range(n):
        params, _ = step(params, x, y)
    return params


optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3, weight_decay=0.1))


@bf.jit(max_traces=1)
def optimizer_step(params: Params, state: Any, x: Array, y: Array) -> tuple[Params, Any, dict[str, Array]]:
    (_, logs), grads = bf.value_and_grad(loss_with_logs, has_aux=True)(params, x, y)
    assert_type(logs, dict[str, Array])
    updates, state = optimizer.update(grads, state, params)
    return optim.apply_updates(params, updates), state, logs


def train(key: Array) -> float:
    keys = random.split(key, 3)
    params = Params(random.normal(keys[0], (3, 2)), jnp.zeros(2))
    x, y = random.normal(keys[1], (8, 3)), jnp.ones((8, 2), jnp.float32)
    params, value = step(params, x, y)
    assert_type(params, Params)
    assert_type(value, Array)
    params = steps(params, x, y, n=2)
    state = optimizer.init(params)
    params, state, logs = optimizer_step(params, state, x, y)
    gradient, aux = bf.grad(loss_with_logs, has_aux=True)(params, x, y)
    assert_type(gradient, Params)
    assert_type(aux, dict[str, Array])
    of_x = bf.grad(loss, argnums=1)(params, x, y)
    of_both = bf.grad(loss, argnums=(0, 1))(params, x=x, y=y)
    print(step.lower(params, x, y).as_text(), of_x, of_both, lax.stop_gradient(params).w.shape)
    return float(logs["loss"])


@bf.checkpoint
def block(params: Params, x: Array) -> Array:
    return predict(params, x)


@bf.checkpoint(policy=bf.checkpoint_policies.dots_saveable)
def saving_block(params: Params, x: Array, *, scale: float = 1.0) -> Array:
    return predict(params, x) * scale


class Model:
    """Transforms as decorators of methods."""

    def __init__(self, params: Params) -> None:
        self.params = params

    @bf.jit
    def __call__(self, x: Array) -> Array:
        return block(self.params, x) + saving_block(self.params, x, scale=2.0)

    @functools.partial(bf.jit, static_argnums=0)
    def scaled(self, x: Array, scale: float) -> Array:
        return x * scale


def use(model: Model, x: Array) -> Array:
    assert_type(model(x), Array)
    scaled: Array = model.scaled(x, 2.0)  # mypy does not see through partial of an overloaded function
    return bf.block_until_ready(model(x) + scaled)
