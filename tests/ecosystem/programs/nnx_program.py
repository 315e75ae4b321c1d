"""flax.nnx: modules with variables, lifted transforms, splitting and merging."""

import jax
import jax.numpy as jnp
from flax import nnx


class Network(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def results():
    x = jax.random.normal(jax.random.key(0), (16, 3))
    model = Network(nnx.Rngs(0))

    @nnx.jit
    def step(model):
        value, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads)
        nnx.update(model, params)
        return value

    losses = jnp.stack([step(model) for _ in range(5)])
    model.eval()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    merged = nnx.merge(graph, params, rest)

    @nnx.vmap(in_axes=(0, None), out_axes=0)
    def ensemble(rngs, x):
        return nnx.Linear(3, 2, rngs=rngs)(x)

    stack = nnx.vmap(lambda rngs: nnx.Linear(3, 3, rngs=rngs))(nnx.Rngs(1).fork(split=4))
    scanned = nnx.scan(lambda h, layer: nnx.tanh(layer(h)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
        x, stack
    )
    shapes = nnx.eval_shape(lambda: Network(nnx.Rngs(0)))
    return {
        "losses": losses,
        "merged": merged(x),
        "running mean": model.norm.mean[...],
        "scan": scanned,
        "shapes": jax.tree.leaves(jax.tree.map(lambda s: s.size, nnx.state(shapes, nnx.Param))),
        "ensemble": ensemble(nnx.Rngs(2).fork(split=3), x),
    }
