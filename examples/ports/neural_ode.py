"""A neural ODE: learnt dynamics, with gradients by the adjoint equation.

R. T. Q. Chen et al., "Neural Ordinary Differential Equations" (2018): the backward pass solves another equation,
backward in time, and saves only the results of the forward pass.
"""

from functools import partial

import numpy as np

import blufunc as jax
import blufunc.numpy as jnp
import blufunc.optim as optax
from blufunc import jit, lax, random

SUBSTEPS = 3
STEPS = 160


def rk4(f, y, t, dt):
    """One step of the classical Runge-Kutta method for a pytree."""
    add = lambda scale, k: jax.tree.map(lambda a, b: a + scale * b, y, k)
    k1 = f(y, t)
    k2 = f(add(dt / 2, k1), t + dt / 2)
    k3 = f(add(dt / 2, k2), t + dt / 2)
    k4 = f(add(dt, k3), t + dt)
    return jax.tree.map(lambda a, p, q, r, s: a + dt / 6 * (p + 2 * q + 2 * r + s), y, k1, k2, k3, k4)


def advance(f, y, t0, t1):
    """Integrate from time t0 to t1."""
    dt = (t1 - t0) / SUBSTEPS
    return lax.fori_loop(0, SUBSTEPS, lambda i, y: rk4(f, y, t0 + i * dt, dt), y)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def odeint(f, y0, ts, params):
    """States at times ``ts`` of dy/dt = f(y, t, params), from y0 at the first time."""

    def step(y, interval):
        y = advance(lambda y, t: f(y, t, params), y, interval[0], interval[1])
        return y, y

    _, ys = lax.scan(step, y0, jnp.stack([ts[:-1], ts[1:]], 1))
    return jnp.concatenate([y0[None], ys])


def odeint_fwd(f, y0, ts, params):
    ys = odeint(f, y0, ts, params)
    return ys, (ys, ts, params)


def odeint_bwd(f, res, g):
    ys, ts, params = res

    def reversed_dynamics(state, minus_t):
        """Dynamics of state, adjoint and parameter gradient, in reversed time."""
        y, adjoint, _ = state
        value, pullback = jax.vjp(lambda y, p: f(y, -minus_t, p), y, params)
        of_y, of_params = pullback(adjoint)
        return -value, of_y, of_params

    def step(carry, x):
        adjoint, of_params = carry
        y, g, t1, t0 = x
        _, adjoint, of_params = advance(reversed_dynamics, (y, adjoint, of_params), -t1, -t0)
        return (adjoint + g, of_params), None

    carry = (g[-1], jax.tree.map(jnp.zeros_like, params))
    xs = (ys[1:], g[:-1], ts[1:], ts[:-1])
    (of_y0, of_params), _ = lax.scan(step, carry, xs, reverse=True)
    return of_y0, jnp.zeros_like(ts), of_params


odeint.defvjp(odeint_fwd, odeint_bwd)


def dynamics(y, t, params):
    h = jnp.tanh(y @ params["w1"] + params["b1"])
    return h @ params["w2"]


def spiral(y, t, params):
    return jnp.array([[-0.1, 2.0], [-2.0, -0.1]]) @ y


def loss(params, ts, target):
    return jnp.mean((odeint(dynamics, target[0], ts, params) - target) ** 2)


optimizer = optax.adam(2e-2)


@jit
def update(params, state, ts, target):
    value, grads = jax.value_and_grad(loss)(params, ts, target)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def main():
    ts = jnp.linspace(0.0, 2.0, 11)
    target = odeint(spiral, jnp.array([2.0, 0.0]), ts, ())
    k1, k2 = random.split(random.key(0))
    params = {
        "w1": random.normal(k1, (2, 32)) * 0.5,
        "b1": jnp.zeros(32),
        "w2": random.normal(k2, (32, 2)) * 0.3,
    }
    # adjoint equation and differentiated solver differ by the discretization error
    through = lambda p: jnp.mean((odeint.__wrapped__(dynamics, target[0], ts, p) - target) ** 2)
    adjoint, direct = jax.grad(loss)(params, ts, target), jax.grad(through)(params)
    gap = max(
        float(jnp.abs(a - d).max() / jnp.abs(d).max())
        for a, d in zip(jax.tree.leaves(adjoint), jax.tree.leaves(direct), strict=True)
    )
    print(f"adjoint gradient against the solver's own: {gap:.1e}")
    state = optimizer.init(params)
    first = float(loss(params, ts, target))
    for step in range(STEPS):
        params, state, value = update(params, state, ts, target)
        if step % 40 == 39:
            print(f"step {step + 1:3d}: loss {float(value):.5f}")
    return {"first": first, "loss": float(value), "gap": gap, "radius": float(np.linalg.norm(target[-1]))}


if __name__ == "__main__":
    main()
