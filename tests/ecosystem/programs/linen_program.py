"""flax.linen: batch statistics, dropout, recurrence, lifted transforms, bytes."""

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp


class Network(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(4, (3, 3))(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.relu(x).reshape(x.shape[0], -1)
        x = nn.Dropout(0.5, deterministic=not train)(nn.Dense(8)(x))
        return nn.Dense(3)(nn.LayerNorm()(x))


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        cell = nn.scan(
            nn.LSTMCell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1
        )(4)
        carry = cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
        return cell(carry, x)[1]


class Mapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})
        return nn.remat(layer)(3)(x)


def results():
    key = jax.random.key(0)
    x = jax.random.normal(key, (4, 6, 6, 2))
    net = Network()
    variables = net.init({"params": key, "dropout": key}, x, True)
    params, stats = variables["params"], variables["batch_stats"]

    @jax.jit
    def step(params, stats, key):
        def loss(params):
            out, new = net.apply(
                {"params": params, "batch_stats": stats},
                x,
                True,
                mutable=["batch_stats"],
                rngs={"dropout": key},
            )
            return (out**2).mean(), new["batch_stats"]

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), stats, value

    losses = []
    for k in jax.random.split(key, 5):
        params, stats, value = step(params, stats, k)
        losses.append(value)
    trained = {"params": params, "batch_stats": stats}
    restored = flax.serialization.from_bytes(trained, flax.serialization.to_bytes(trained))

    xs = jax.random.normal(key, (2, 5, 3))
    rnn, scanned = nn.RNN(nn.GRUCell(4)), Scanned()
    attention = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=8)
    mapped = Mapped()
    sums = lambda module, v: jax.tree.leaves(jax.grad(lambda v: (module.apply(v, xs) ** 2).sum())(v))
    found = {"losses": jnp.stack(losses), "restored": net.apply(restored, x, False)}
    for name, module in {"rnn": rnn, "scan": scanned, "attention": attention, "vmap": mapped}.items():
        v = module.init(key, xs)
        found[name] = module.apply(v, xs)
        found[f"{name} gradient"] = sums(module, v)
    found["table"] = len(net.tabulate({"params": key, "dropout": key}, x, True)) > 100
    return found
