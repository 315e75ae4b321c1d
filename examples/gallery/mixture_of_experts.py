"""A mixture of experts on a mesh, routed by two all-to-alls.

N. Shazeer et al., "Outrageously Large Neural Networks" (2017); D. Lepikhin et al., "GShard" (2021). Each
device holds a share of the experts and of the tokens. The layer is written for one device inside
``shard_map``: a router picks an expert for each token, ``all_to_all`` carries tokens to it and results back.
The task mixes eight functions of the input's region; the CPU simulates the devices.

Expected at the default size: "experts" below 0.03 and "dense" above 0.15, the test errors of the mixture and
of a single network of the size of one expert; "dropped", the share of tokens above the capacity, below 0.02.
"""

from typing import NamedTuple

import numpy as np

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import lax, nn, optim, random
from examples.gallery import app

INPUTS, OUTPUTS = 8, 8


class Size(NamedTuple):
    epochs: int = 30
    steps: int = 50  # of an epoch
    tokens: int = 512  # of a step
    width: int = 16  # of an expert
    experts: int = 8
    devices: int = 4


SIZES = {
    "tiny": Size(epochs=2, steps=10, tokens=64, width=8, experts=4, devices=2),
    "cpu": Size(),
    "cuda": Size(epochs=50, steps=200, tokens=65536, width=512, experts=8, devices=1),
}
CAPACITY = 2.0
"""Tokens that an expert accepts from a device, relative to an even share."""


def init(key, n, width):
    """A router, and n experts stacked along their first axis."""
    keys = random.split(key, 3)
    return {
        "router": random.normal(keys[0], (INPUTS, n)) / INPUTS**0.5,
        "experts": {
            "up": random.normal(keys[1], (n, INPUTS, width)) / INPUTS**0.5,
            "bias": jnp.zeros((n, width)),
            "down": random.normal(keys[2], (n, width, OUTPUTS)) / width**0.5,
        },
    }


def expert(p, x):
    return nn.gelu(x @ p["up"] + p["bias"]) @ p["down"]


def mixture(params, x):
    """The layer on one device: its tokens [t, INPUTS], its experts, the whole router.

    Returns:
      results [t, OUTPUTS]; the loss that balances experts; the share of tokens dropped; the experts chosen.
    """
    t, n = len(x), params["router"].shape[1]
    capacity = int(CAPACITY * t / n)
    probabilities = nn.softmax(x @ params["router"])
    chosen = probabilities.argmax(-1)
    assigned = nn.one_hot(chosen, n)
    place = jnp.sum(jnp.cumsum(assigned, 0) * assigned, 1).astype(jnp.int32) - 1  # in the expert's queue

    queues = jnp.zeros((n, capacity, INPUTS)).at[chosen, place].set(x, mode="drop")
    arrived = lax.all_to_all(queues, "expert", 0, 1, tiled=True)  # [n / devices, devices * capacity, d]
    results = lax.all_to_all(bf.vmap(expert)(params["experts"], arrived), "expert", 1, 0, tiled=True)
    gate = probabilities.max(-1, keepdims=True)
    y = results.at[chosen, place].get(mode="fill", fill_value=0.0) * gate

    mean = lambda v: lax.pmean(v, "expert")
    balance = n * jnp.sum(mean(assigned.mean(0)) * mean(probabilities.mean(0)))
    return y, balance, mean(jnp.mean(place >= capacity)), chosen


def on_mesh(mesh):
    """The layer as a function of all tokens."""
    params = {"router": bf.P(), "experts": bf.P("expert")}
    rows = bf.P("expert")
    return bf.shard_map(mixture, mesh=mesh, in_specs=(params, rows), out_specs=(rows, bf.P(), bf.P(), rows))


class Task(NamedTuple):
    """Regions with a random linear map each."""

    centres: bf.Array
    maps: bf.Array


def draw(task, key, n):
    """Inputs, outputs, and the region of each."""
    region_key, noise_key = random.split(key)
    region = random.randint(region_key, (n,), 0, len(task.centres))
    x = task.centres[region] + 0.5 * random.normal(noise_key, (n, INPUTS))
    return x, jnp.einsum("td,tdo->to", x, task.maps[region]), region


def run(size, key, bar):
    if bf.default_backend() == "cpu":
        bf.config.cpu_devices = max(bf.config.cpu_devices, size.devices)  # simulated
    mesh = bf.make_mesh((size.devices,), ("expert",))
    layer = on_mesh(mesh)
    keys = random.split(key, 6)
    task = Task(
        1.5 * random.normal(keys[0], (8, INPUTS)), random.normal(keys[1], (8, INPUTS, OUTPUTS)) / INPUTS**0.5
    )
    single = bf.tree.map(lambda x: x[0], init(keys[2], 1, size.width)["experts"])
    params = {"mixture": init(keys[3], size.experts, size.width), "single": single}
    optimizer = optim.adam(optim.cosine_decay_schedule(1e-2, size.epochs * size.steps))

    def errors(params, x, y):
        out, balance, dropped, chosen = layer(params["mixture"], x)
        error = lambda out: jnp.mean((out - y) ** 2)
        return error(out), error(expert(params["single"], x)), balance, dropped, chosen

    def loss(params, x, y):
        mixed, dense, balance, _, _ = errors(params, x, y)
        return mixed + dense + 0.05 * balance, (mixed, dense)

    @bf.jit
    def epoch(params, state, key):
        def step(carry, key):
            params, state = carry
            x, y, _ = draw(task, key, size.tokens)
            grads, values = bf.grad(loss, has_aux=True)(params, x, y)
            updates, state = optimizer.update(grads, state, params)
            return (optim.apply_updates(params, updates), state), values

        carry, values = lax.scan(step, (params, state), random.split(key, size.steps))
        return *carry, values

    sharded, everywhere = (bf.NamedSharding(mesh, bf.P(*axes)) for axes in (("expert",), ()))
    places = bf.tree.map(lambda _: everywhere, params)
    places["mixture"]["experts"] = bf.tree.map(lambda _: sharded, params["mixture"]["experts"])
    params = bf.device_put(params, places)
    state, curve = optimizer.init(params), []
    for i in bar(size.epochs):
        params, state, (mixed, dense) = epoch(params, state, random.fold_in(keys[4], i))
        curve.append((mixed.mean(), dense.mean()))
        bar.say(experts=curve[-1][0], dense=curve[-1][1])

    x, y, region = draw(task, keys[5], 8 * size.tokens)
    mixed, dense, _, dropped, chosen = bf.jit(errors)(params, x, y)
    figure, (left, right) = app.subplots(1, 2)
    steps = np.arange(1, size.epochs + 1) * size.steps
    for values, label in zip(np.asarray(curve).T, ("mixture", "single network"), strict=True):
        left.plot(steps, values, label=label)
    left.set(xlabel="step", ylabel="squared error", yscale="log")
    left.legend(frameon=False)
    counts = np.zeros((8, size.experts))
    np.add.at(counts, (np.asarray(region), np.asarray(chosen)), 1)
    right.imshow(counts / counts.sum(1, keepdims=True), cmap="Blues", vmin=0, vmax=1)
    right.set(xlabel="expert", ylabel="region", title="tokens of each region, by expert")
    numbers = {"experts": mixed, "dense": dense, "dropped": dropped}
    return app.Result({name: float(v) for name, v in numbers.items()}, figure)


if __name__ == "__main__":
    app.main(run, SIZES)
