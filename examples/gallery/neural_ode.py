"""A neural ODE that learns a pendulum from noisy measurements.

R. T. Q. Chen et al., "Neural Ordinary Differential Equations" (2018). The vector field is a network, Runge-
Kutta steps in a ``scan`` solve it, and ``checkpoint`` recomputes each step in the backward pass. Short pieces
of the curves are fitted, and whole curves from other initial states are predicted.

Expected at the default size: "error" below 0.15, the root mean square over 8 time units from states that were
not seen. "loss" ends near 0.005, twice the variance of the measurements.
"""

from typing import NamedTuple

import numpy as np

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import lax, optim, random
from examples.gallery import app

NOISE, DT, PIECE = 0.05, 0.1, 8


class Size(NamedTuple):
    steps: int = 2000
    curves: int = 32
    width: int = 64


SIZES = {
    "tiny": Size(steps=150, curves=8, width=16),
    "cpu": Size(),
    "cuda": Size(steps=10000, curves=4096, width=512),
}


def rk4(f, y, dt):
    """One step of the classical Runge-Kutta method for dy/dt = f(y)."""
    k1 = f(y)
    k2 = f(y + dt / 2 * k1)
    k3 = f(y + dt / 2 * k2)
    k4 = f(y + dt * k3)
    return y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def solve(f, y0, n):
    """States at n times after y0, DT apart: [n, ...]."""

    @bf.checkpoint
    def step(y, _):
        y = rk4(f, y, DT)
        return y, y

    return lax.scan(step, y0, None, n)[1]


def pendulum(y):
    """A pendulum with friction: the change of (angle, speed)."""
    angle, speed = y
    return jnp.stack([speed, -jnp.sin(angle) - 0.1 * speed])


def init(key, width):
    keys = random.split(key, 3)
    sizes = [(2, width), (width, width), (width, 2)]
    return [
        {"w": random.normal(k, s) / s[0] ** 0.5, "b": jnp.zeros(s[1])}
        for k, s in zip(keys, sizes, strict=True)
    ]


def field(params, y):
    for layer in params[:-1]:
        y = jnp.tanh(y @ layer["w"] + layer["b"])
    return y @ params[-1]["w"] + params[-1]["b"]


def loss(params, pieces):
    """Squared error of pieces [n, PIECE + 1, 2], each predicted from its first state."""
    predict = lambda piece: solve(lambda y: field(params, y), piece[0], PIECE) - piece[1:]
    return jnp.mean(bf.vmap(predict)(pieces) ** 2)


def curves(key, n, length):
    """Curves of the pendulum [n, length, 2], from random states."""
    y0 = random.uniform(key, (n, 2), minval=-1.5, maxval=1.5)
    return bf.vmap(lambda y: solve(pendulum, y, length))(y0)


def run(size, key, bar):
    init_key, data_key, noise_key, batch_key, test_key = random.split(key, 5)
    data = curves(data_key, size.curves, 80)
    data = data + NOISE * random.normal(noise_key, data.shape)
    params = init(init_key, size.width)
    optimizer = optim.adam(optim.cosine_decay_schedule(5e-3, size.steps))

    @bf.jit
    def step(params, state, key):
        starts = random.randint(key, (size.curves,), 0, 80 - PIECE)
        cut = lambda curve, start: lax.dynamic_slice_in_dim(curve, start, PIECE + 1)
        value, grads = bf.value_and_grad(loss)(params, bf.vmap(cut)(data, starts))
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for i in bar(size.steps):
        params, state, value = step(params, state, random.fold_in(batch_key, i))
        losses.append(value)
        bar.say(loss=value)

    truth = curves(test_key, 16, 80)
    predict = bf.jit(bf.vmap(lambda y: solve(lambda y: field(params, y), y, 79)))
    predicted = predict(truth[:, 0])
    error = jnp.sqrt(jnp.mean((predicted - truth[:, 1:]) ** 2))

    figure, (left, right) = app.subplots(1, 2, height=3.2)
    ticks = np.linspace(-2, 2, 13, dtype=np.float32)
    grid = jnp.stack(jnp.meshgrid(ticks, ticks), -1)
    arrows = field(params, grid)
    left.quiver(grid[..., 0], grid[..., 1], arrows[..., 0], arrows[..., 1], color="0.6")
    for i in range(4):
        left.plot(*truth[i].T, color=f"C{i}", linewidth=2, alpha=0.4)
        left.plot(*predicted[i].T, color=f"C{i}", linestyle="--", linewidth=1)
    left.set(xlabel="angle", ylabel="speed", title="learnt field; curves; predictions (dashed)")
    right.plot(np.asarray(losses))
    right.axhline(2 * NOISE**2, color="0.6", linewidth=0.8)
    right.set(xlabel="step", ylabel="squared error of pieces", yscale="log")
    return app.Result({"error": float(error), "loss": float(np.mean(losses[-50:]))}, figure)


if __name__ == "__main__":
    app.main(run, SIZES)
