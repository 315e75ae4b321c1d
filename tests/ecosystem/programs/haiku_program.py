"""haiku: modules with state, recurrent cores, and its own transforms."""

import haiku as hk
import jax
import jax.numpy as jnp


def network(x, is_training):
    x = hk.nets.MLP([8, 8], name="mlp")(x)
    x = hk.BatchNorm(True, True, 0.9)(x, is_training)
    return hk.Linear(2)(hk.dropout(hk.next_rng_key(), 0.5, x) if is_training else x)


def unrolled(xs):
    core = hk.LSTM(4)
    out, state = hk.dynamic_unroll(core, xs, core.initial_state(xs.shape[1]))
    return out


def results():
    key = jax.random.PRNGKey(0)
    x = jax.random.normal(key, (16, 3))
    net = hk.transform_with_state(network)
    params, state = net.init(key, x, True)

    @jax.jit
    def step(params, state, key):
        def loss(params):
            out, new = net.apply(params, state, key, x, True)
            return (out**2).mean(), new

        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state, value

    losses = []
    for k in jax.random.split(key, 5):
        params, state, value = step(params, state, k)
        losses.append(value)
    out, _ = net.apply(params, state, key, x, False)

    rnn = hk.without_apply_rng(hk.transform(unrolled))
    xs = jax.random.normal(key, (5, 2, 3))
    weights = rnn.init(key, xs)

    conv = hk.without_apply_rng(hk.transform(lambda x: hk.Conv2D(4, 3)(x)))
    image = jax.random.normal(key, (1, 6, 6, 2))
    kernels = conv.init(key, image)

    remat = hk.without_apply_rng(hk.transform(lambda x: hk.remat(hk.Linear(3))(x).sum()))
    w = remat.init(key, x)
    return {
        "losses": jnp.stack(losses),
        "out": out,
        "lstm": rnn.apply(weights, xs),
        "lstm gradient": jax.tree.leaves(jax.grad(lambda w: rnn.apply(w, xs).sum())(weights)),
        "conv": conv.apply(kernels, image),
        "remat gradient": jax.tree.leaves(jax.grad(remat.apply)(w, x)),
        "parameters": hk.data_structures.tree_size(params),
    }
