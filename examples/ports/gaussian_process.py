"""Gaussian process regression, trained by the gradient of the marginal likelihood."""

import numpy as np

import blufunc.numpy as jnp
import blufunc.scipy.linalg as linalg
from blufunc import grad, jit, vmap

STEPS = 300
STEP_SIZE = 0.01
MOMENTUM = 0.9


def softplus(x):
    return jnp.logaddexp(x, 0.0)


def exp_quadratic(x1, x2):
    return jnp.exp(-0.5 * jnp.sum((x1 - x2) ** 2))


def covariances(kernel, xs, ys):
    return vmap(lambda x: vmap(lambda y: kernel(x, y))(ys))(xs)


def process(params, x, y, xtest=None):
    """Negative log marginal likelihood, or the mean and variance at ``xtest``."""
    noise, amplitude, lengthscale = (softplus(params[k]) for k in ("noise", "amplitude", "lengthscale"))
    kernel = lambda a, b: amplitude * exp_quadratic(a / lengthscale, b / lengthscale)
    mean = jnp.mean(y)
    centred = y - mean
    train_cov = covariances(kernel, x, x) + jnp.eye(len(x)) * (noise + 1e-5)
    chol = linalg.cholesky(train_cov, lower=True)
    weights = linalg.cho_solve((chol, True), centred)
    if xtest is not None:
        cross = covariances(kernel, x, xtest)
        v = linalg.solve_triangular(chol, cross, lower=True)
        variance = jnp.diag(covariances(kernel, xtest, xtest)) - jnp.sum(v * v, axis=0)
        return mean + jnp.dot(cross.T, weights), variance
    ml = -0.5 * jnp.dot(centred, weights) - jnp.sum(jnp.log(jnp.diag(chol)))
    return -(ml - 0.5 * len(x) * jnp.log(2.0 * jnp.pi))


gradient = jit(grad(process))
predict = jit(process)


def main():
    rng = np.random.RandomState(0)
    x = (rng.uniform(size=(25, 1)) * 5.0).astype(np.float32)
    y = (np.sin(x[:, 0]) + 0.1 * rng.normal(size=25)).astype(np.float32)
    params = {"noise": jnp.float32(0.0), "amplitude": jnp.float32(0.0), "lengthscale": jnp.float32(0.0)}
    momentums = dict.fromkeys(params, 0.0)
    for step in range(STEPS):
        grads = gradient(params, x, y)
        momentums = {k: MOMENTUM * momentums[k] + grads[k] for k in params}
        params = {k: params[k] - STEP_SIZE * momentums[k] / len(x) for k in params}
        if step % 50 == 49:
            print(f"step {step + 1:3d}: negative log likelihood {float(process(params, x, y)):.3f}")
    xtest = np.linspace(0, 5, 50, dtype=np.float32)[:, None]
    mean, variance = predict(params, x, y, xtest)
    error = float(jnp.sqrt(jnp.mean((mean - np.sin(xtest[:, 0])) ** 2)))
    deviation = float(jnp.mean(jnp.sqrt(variance)))
    print(f"root mean square error against the truth {error:.3f}, mean deviation {deviation:.3f}")
    return {"nll": float(process(params, x, y)), "error": error, "noise": float(softplus(params["noise"]))}


if __name__ == "__main__":
    main()
