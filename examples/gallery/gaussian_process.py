"""A Gaussian process that continues a seasonal series, with a composed kernel.

C. E. Rasmussen and C. K. I. Williams, "Gaussian Processes for Machine Learning" (2006), chapter 5. A kernel
is a function of two points, and sums and products of kernels are kernels. L-BFGS maximizes the marginal
likelihood.

Expected at the default size: "error" below 0.6 over the last third of the series, which was not seen (the
trend is not known there), "inside" between 0.85 and 1: the share of its points within two standard
deviations, and a "period" of 1.
"""

from typing import NamedTuple

import numpy as np

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import optim, random
from blufunc.scipy import linalg
from examples.gallery import app


class Size(NamedTuple):
    steps: int = 60
    points: int = 240
    samples: int = 3


SIZES = {
    "tiny": Size(steps=10, points=60),
    "cpu": Size(),
    "cuda": Size(steps=100, points=6000),
}

# --------------------------------------------------------------------------------------------- the kernels


def smooth(p, x, y):
    return p["amplitude"] ** 2 * jnp.exp(-0.5 * ((x - y) / p["scale"]) ** 2)


def periodic(p, x, y):
    return jnp.exp(-2 * (jnp.sin(jnp.pi * (x - y) / p["period"]) / p["scale"]) ** 2)


def kernel(params, x, y):
    """A trend, and a season that changes slowly."""
    season = smooth(params["drift"], x, y) * periodic(params["season"], x, y)
    return smooth(params["trend"], x, y) + season


def covariance(params, xs, ys):
    return bf.vmap(lambda x: bf.vmap(lambda y: kernel(params, x, y))(ys))(xs)


# --------------------------------------------------------------------------------------------- the process


def factor(params, x):
    noise = params["noise"] ** 2 + 1e-5
    return linalg.cholesky(covariance(params, x, x) + noise * jnp.eye(len(x)), lower=True)


def negative_log_likelihood(log_params, x, y):
    """-log p(y | x) / n, for the logarithms of the parameters."""
    chol = factor(bf.tree.map(jnp.exp, log_params), x)
    white = linalg.solve_triangular(chol, y, lower=True)
    return (0.5 * white @ white + jnp.log(jnp.diag(chol)).sum()) / len(x) + 0.5 * jnp.log(2 * jnp.pi)


def posterior(log_params, x, y, at):
    """Mean and covariance of the function at the points ``at``."""
    params = bf.tree.map(jnp.exp, log_params)
    chol = factor(params, x)
    cross = linalg.solve_triangular(chol, covariance(params, x, at), lower=True)
    white = linalg.solve_triangular(chol, y, lower=True)
    return cross.T @ white, covariance(params, at, at) - cross.T @ cross


def series(key, n):
    """Times in years, and a series with a trend, a season of one year, and noise."""
    t = jnp.linspace(0.0, 10.0, n)
    season = jnp.sin(2 * jnp.pi * t) + 0.4 * jnp.cos(4 * jnp.pi * t)
    return t, season + 0.8 * jnp.sin(0.5 * t) + 0.15 * random.normal(key, t.shape)


def run(size, key, bar):
    data_key, sample_key = random.split(key)
    t, values = series(data_key, size.points)
    seen = size.points * 2 // 3
    x, y = t[:seen], values[:seen]
    start = {
        "trend": {"amplitude": 1.0, "scale": 2.0},
        "drift": {"amplitude": 1.0, "scale": 8.0},
        "season": {"period": 1.1, "scale": 1.0},
        "noise": 0.3,
    }
    params = bf.tree.map(lambda v: jnp.log(jnp.float32(v)), start)
    loss = lambda params: negative_log_likelihood(params, x, y)
    optimizer = optim.lbfgs()
    value_and_grad = optim.value_and_grad_from_state(loss)

    @bf.jit
    def step(params, state):
        value, grad = value_and_grad(params, state=state)
        updates, state = optimizer.update(grad, state, params, value=value, grad=grad, value_fn=loss)
        return optim.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for _ in bar(size.steps):
        params, state, value = step(params, state)
        losses.append(value)
        bar.say(likelihood=-value)

    mean, cov = bf.jit(posterior)(params, x, y, t)
    noise = jnp.exp(params["noise"])
    spread = jnp.sqrt(jnp.diag(cov) + noise**2)
    eigenvalues, vectors = jnp.linalg.eigh(cov)  # a Cholesky factor would need more jitter
    root = vectors * jnp.sqrt(jnp.maximum(eigenvalues, 0))
    samples = mean + random.normal(sample_key, (size.samples, len(t))) @ root.T

    figure, axes = app.subplots(height=3.2)
    axes.fill_between(t, mean - 2 * spread, mean + 2 * spread, color="C0", alpha=0.15, linewidth=0)
    axes.plot(t, np.asarray(samples).T, color="C0", linewidth=0.5, alpha=0.6)
    axes.plot(t, mean, color="C0", label="mean; two standard deviations; samples")
    axes.plot(x, y, "k.", markersize=3, label="seen")
    axes.plot(t[seen:], values[seen:], ".", color="C3", markersize=3, label="not seen")
    axes.set(xlabel="year")
    axes.legend(frameon=False, loc="lower left", ncols=3)
    error = (mean - values)[seen:]
    numbers = {
        "error": jnp.sqrt(jnp.mean(error**2)),
        "inside": jnp.mean(jnp.abs(error) < 2 * spread[seen:]),
        "period": jnp.exp(params["season"]["period"]),
        "noise": noise,
        "log likelihood per point": -value,
    }
    return app.Result({name: float(v) for name, v in numbers.items()}, figure)


if __name__ == "__main__":
    app.main(run, SIZES)
