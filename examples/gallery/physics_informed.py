"""A physics-informed network that solves Burgers' equation without data.

M. Raissi et al., "Physics-informed neural networks" (2019): u_t + u u_x = v u_xx on [-1, 1], with u = -sin(pi
x) at time 0 and u = 0 at both ends. The network is a function of one point, so its derivatives are ``jvp`` of
``jvp``, and ``vmap`` makes the residuals of a batch. The Cole-Hopf transformation gives the exact solution to
compare with.

Expected at the default size: "error" below 0.02, the L2 error relative to the exact solution.
"""

from typing import NamedTuple

import numpy as np

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import lax, optim, random
from examples.gallery import app

VISCOSITY = 0.05 / np.pi


class Size(NamedTuple):
    epochs: int = 40
    steps: int = 100  # of an epoch
    points: int = 512  # in the domain, drawn anew for each step
    width: int = 32
    layers: int = 3


SIZES = {
    "tiny": Size(epochs=3, steps=20, points=64, width=8, layers=2),
    "cpu": Size(),
    "cuda": Size(epochs=200, steps=200, points=65536, width=256, layers=5),
}


def init(key, size):
    sizes = [2] + [size.width] * size.layers + [1]
    keys = random.split(key, len(sizes) - 1)
    return [
        {"w": random.normal(k, (m, n)) / m**0.5, "b": jnp.zeros(n)}
        for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def solution(params, t, x):
    """u at one point. Its form fulfils the initial and boundary conditions exactly."""
    h = jnp.stack([2 * t - 1, x])
    for layer in params[:-1]:
        h = jnp.tanh(h @ layer["w"] + layer["b"])
    network = (h @ params[-1]["w"] + params[-1]["b"])[0]
    return -jnp.sin(jnp.pi * x) + t * (1 - x**2) * network


def residual(params, t, x):
    """u_t + u u_x - v u_xx at one point."""
    u_t = bf.grad(solution, 1)(params, t, x)
    along_x = lambda f: lambda x: bf.jvp(f, (x,), (jnp.ones_like(x),))[1]
    u = lambda x: solution(params, t, x)
    return u_t + u(x) * along_x(u)(x) - VISCOSITY * along_x(along_x(u))(x)


def loss(params, t, x):
    return jnp.mean(bf.vmap(residual, (None, 0, 0))(params, t, x) ** 2)


def exact(t, x):
    """The solution by Cole and Hopf: two integrals, by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite.hermgauss(100)
    y = x[..., None] - np.sqrt(4 * VISCOSITY * t)[..., None] * nodes
    heat = weights * np.exp(-(np.cos(np.pi * y) + 1) / (2 * np.pi * VISCOSITY))
    return -np.sum(heat * np.sin(np.pi * y), -1) / np.sum(heat, -1)


def run(size, key, bar):
    init_key, train_key = random.split(key)
    params = init(init_key, size)
    optimizer = optim.adam(optim.cosine_decay_schedule(5e-3, size.epochs * size.steps))

    @bf.jit
    def epoch(params, state, key):
        def step(carry, key):
            params, state = carry
            t_key, x_key = random.split(key)
            t, x = random.uniform(t_key, (size.points,)), random.uniform(x_key, (size.points,), minval=-1.0)
            value, grads = bf.value_and_grad(loss)(params, t, x)
            updates, state = optimizer.update(grads, state, params)
            return (optim.apply_updates(params, updates), state), value

        carry, losses = lax.scan(step, (params, state), random.split(key, size.steps))
        return *carry, losses.mean()

    state, losses = optimizer.init(params), []
    for i in bar(size.epochs):
        params, state, value = epoch(params, state, random.fold_in(train_key, i))
        losses.append(value)
        bar.say(residual=value)

    t, x = np.meshgrid(np.linspace(0, 1, 61), np.linspace(-1, 1, 121), indexing="ij")
    flat = [jnp.asarray(a.ravel(), jnp.float32) for a in (t, x)]
    found = np.asarray(bf.jit(bf.vmap(solution, (None, 0, 0)))(params, *flat)).reshape(t.shape)
    truth = exact(t, x)
    figure, (left, right) = app.subplots(1, 2)
    shown = left.imshow(found.T, origin="lower", extent=(0, 1, -1, 1), aspect="auto", cmap="RdBu_r")
    figure.colorbar(shown, ax=left)
    left.set(xlabel="t", ylabel="x", title="u(t, x) of the network")
    for i in (0, 15, 30, 60):
        right.plot(x[i], truth[i], color="0.75", linewidth=3)
        right.plot(x[i], found[i], linewidth=1, label=f"t = {t[i, 0]:.2f}")
    right.set(xlabel="x", title="and the exact solution (grey)")
    right.legend(frameon=False)
    error = np.linalg.norm(found - truth) / np.linalg.norm(truth)
    return app.Result({"error": float(error), "residual": float(losses[-1])}, figure)


if __name__ == "__main__":
    app.main(run, SIZES)
