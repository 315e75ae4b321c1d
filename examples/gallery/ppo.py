"""Proximal policy optimization of cart-pole, the task vectorized by vmap.

J. Schulman et al., "Proximal Policy Optimization Algorithms" (2017). The task is a pure function of one cart;
``vmap`` makes many of it and ``scan`` plays them, so that an iteration of playing and learning is one
compiled program.

Expected at the default size: "episode length" of the final greedy policy above 450 of 500 steps (a random
policy: 22).
"""

from typing import NamedTuple

import numpy as np

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import lax, nn, optim, random
from examples.gallery import app


class Size(NamedTuple):
    iterations: int = 150
    carts: int = 32
    steps: int = 64  # of each cart and iteration
    epochs: int = 4
    minibatches: int = 4
    width: int = 64


SIZES = {
    "tiny": Size(iterations=12, carts=16, steps=32, width=32),
    "cpu": Size(),
    "cuda": Size(iterations=300, carts=4096, steps=128, minibatches=16, width=256),
}
LIMIT = 500
DISCOUNT, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01

# ------------------------------------------------------------------------------------------------ the task


class Cart(NamedTuple):
    """Position and velocity of cart and pole (float32[4]), and the time (int32)."""

    physics: bf.Array
    time: bf.Array


def reset(key):
    return Cart(random.uniform(key, (4,), minval=-0.05, maxval=0.05), jnp.int32(0))


def advance(cart, action):
    """Push left (0) or right (1) for 0.02 s: the next state, and whether it fell."""
    x, v, angle, spin = cart.physics
    force = jnp.where(action == 1, 10.0, -10.0)
    pole_mass, total_mass, half_length = 0.1, 1.1, 0.5
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    push = (force + pole_mass * half_length * spin**2 * sin) / total_mass
    spin_rate = (9.8 * sin - cos * push) / (half_length * (4 / 3 - pole_mass * cos**2 / total_mass))
    rate = push - pole_mass * half_length * spin_rate * cos / total_mass
    physics = cart.physics + 0.02 * jnp.stack([v, rate, spin, spin_rate])
    fell = (jnp.abs(physics[0]) > 2.4) | (jnp.abs(physics[2]) > 0.2095)
    return Cart(physics, cart.time + 1), fell


# ---------------------------------------------------------------------------------------------- the policy


def mlp(key, sizes, scale):
    keys = random.split(key, len(sizes) - 1)
    orthogonal = nn.initializers.orthogonal
    scales = [2**0.5] * (len(sizes) - 2) + [scale]
    return [
        {"w": orthogonal(s)(k, (m, n)), "b": jnp.zeros(n)}
        for k, s, m, n in zip(keys, scales, sizes[:-1], sizes[1:], strict=True)
    ]


def apply(layers, x):
    for layer in layers[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def log_policy(params, physics):
    return nn.log_softmax(apply(params["policy"], physics))


def value(params, physics):
    return apply(params["value"], physics)[..., 0]


# ----------------------------------------------------------------------------------------------- learning


class Step(NamedTuple):
    """One step of a cart.

    Attributes:
      physics: the state before it.
      action, logp: the action, and the logarithm of its probability.
      value: value of the state before it.
      bootstrap: value of the state after it, 0 after a fall.
      done: the episode ended in it.
      time: steps of the episode so far.
    """

    physics: bf.Array
    action: bf.Array
    logp: bf.Array
    value: bf.Array
    bootstrap: bf.Array
    done: bf.Array
    time: bf.Array


def play(params, carts, key, n):
    """Play n steps of all carts: Steps of [n, carts], and the carts."""

    def step(carts, key):
        action_key, reset_key = random.split(key)
        logp = log_policy(params, carts.physics)
        action = random.categorical(action_key, logp)
        moved, fell = bf.vmap(advance)(carts, action)
        done = fell | (moved.time >= LIMIT)
        fresh = bf.vmap(reset)(random.split(reset_key, len(action)))
        pick = lambda new, old: jnp.where(done.reshape(done.shape + (1,) * (old.ndim - 1)), new, old)
        chosen = jnp.take_along_axis(logp, action[:, None], 1)[:, 0]
        after = jnp.where(fell, 0.0, value(params, moved.physics))  # running out of time is no failure
        out = Step(carts.physics, action, chosen, value(params, carts.physics), after, done, moved.time)
        return bf.tree.map(pick, fresh, moved), out

    return lax.scan(step, carts, random.split(key, n))


def advantages(steps):
    """Generalized advantage estimates, by a scan backward in time.

    The reward of each step is 1 - DISCOUNT, so that values are in [0, 1].
    """
    errors = 1.0 - DISCOUNT + DISCOUNT * steps.bootstrap - steps.value

    def back(later, x):
        error, done = x
        now = error + DISCOUNT * LAMBDA * jnp.where(done, 0.0, later)
        return now, now

    return lax.scan(back, jnp.zeros_like(errors[0]), (errors, steps.done), reverse=True)[1]


def loss(params, batch):
    steps, advantage = batch
    logps = log_policy(params, steps.physics)
    logp = jnp.take_along_axis(logps, steps.action[:, None], 1)[:, 0]
    ratio = jnp.exp(logp - steps.logp)
    gain = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy_loss = -jnp.mean(jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * gain))
    value_loss = jnp.mean((value(params, steps.physics) - (steps.value + advantage)) ** 2)
    entropy = -jnp.mean(jnp.sum(jnp.exp(logps) * logps, -1))
    return policy_loss + 0.5 * value_loss - ENTROPY * entropy


def run(size, key, bar):
    policy_key, value_key, reset_key, key = random.split(key, 4)
    params = {
        "policy": mlp(policy_key, (4, size.width, size.width, 2), 0.01),
        "value": mlp(value_key, (4, size.width, size.width, 1), 1.0),
    }
    updates = size.iterations * size.epochs * size.minibatches
    schedule = optim.linear_schedule(1e-3, 0.0, updates)
    optimizer = optim.chain(optim.clip_by_global_norm(0.5), optim.adam(schedule, eps=1e-5))

    @bf.jit
    def iteration(params, state, carts, length, key):
        play_key, shuffle_key = random.split(key)
        carts, steps = play(params, carts, play_key, size.steps)
        flat = bf.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (steps, advantages(steps)))

        def update(carry, batch):
            params, state = carry
            grads = bf.grad(loss)(params, batch)
            changes, state = optimizer.update(grads, state, params)
            return (optim.apply_updates(params, changes), state), None

        def epoch(carry, key):
            order = random.permutation(key, size.carts * size.steps).reshape(size.minibatches, -1)
            return lax.scan(update, carry, bf.tree.map(lambda x: x[order], flat))

        (params, state), _ = lax.scan(epoch, (params, state), random.split(shuffle_key, size.epochs))
        ended = steps.done.sum()
        lasted = jnp.where(steps.done, steps.time, 0).sum() / jnp.maximum(ended, 1)
        return params, state, carts, jnp.where(ended > 0, lasted, length)

    state, carts = optimizer.init(params), bf.vmap(reset)(random.split(reset_key, size.carts))
    length, lengths = jnp.float32(0), []
    for i in bar(size.iterations):
        params, state, carts, length = iteration(params, state, carts, length, random.fold_in(key, i))
        lengths.append(length)
        bar.say(length=length)

    alive, path = bf.jit(lambda params, key: greedy(params, key, 64))(params, key)
    lasted = alive.sum(0)
    figure, (left, right) = app.subplots(1, 2)
    left.plot(np.arange(1, size.iterations + 1) * size.carts * size.steps, np.asarray(lengths))
    left.set(xlabel="steps played", ylabel="length of the episodes that ended")
    shown = np.where(np.asarray(alive)[..., None], np.asarray(path), np.nan)
    right.plot(shown[:, :8, 0], linewidth=0.8)
    right.set(xlabel="time", ylabel="position of eight carts, greedy policy")
    return app.Result({"episode length": float(lasted.mean()), "shortest": float(lasted.min())}, figure)


def greedy(params, key, n):
    """Play the likeliest actions: over time, which of n carts are up, and states."""

    def step(carry, _):
        carts, alive = carry
        moved, fell = bf.vmap(advance)(carts, log_policy(params, carts.physics).argmax(-1))
        alive = alive & ~fell
        return (moved, alive), (alive, moved.physics)

    start = bf.vmap(reset)(random.split(key, n)), jnp.ones(n, bool)
    return lax.scan(step, start, None, LIMIT)[1]


if __name__ == "__main__":
    app.main(run, SIZES)
