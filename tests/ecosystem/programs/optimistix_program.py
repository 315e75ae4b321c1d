"""optimistix: roots, fixed points, least squares and minima, and their gradients."""

import jax
import jax.numpy as jnp
import optimistix as optx


def results():
    root = lambda a: optx.root_find(lambda y, a: y**2 - a, optx.Newton(1e-6, 1e-6), jnp.array(1.0), a).value
    fixed = lambda a: (
        optx.fixed_point(lambda y, a: jnp.cos(y) * a, optx.FixedPointIteration(1e-6, 1e-6), 0.5, a).value
    )
    residuals = lambda y, a: jnp.array([10 * (y[1] - y[0] ** 2), a - y[0]])
    start = jnp.array([-1.0, 1.0])
    fit = lambda a: optx.least_squares(residuals, optx.LevenbergMarquardt(1e-6, 1e-6), start, a).value
    newton = lambda a: optx.least_squares(residuals, optx.GaussNewton(1e-6, 1e-6), start, a).value
    valley = lambda y, a: (residuals(y, a) ** 2).sum()
    low = lambda a: optx.minimise(valley, optx.BFGS(1e-6, 1e-6), start, a, max_steps=512).value
    bisect = optx.root_find(
        lambda y, _: y**3 - 2, optx.Bisection(1e-5, 1e-5), 1.0, options={"lower": 0.0, "upper": 2.0}
    )
    return {
        "newton": (root(2.0), jax.grad(root)(2.0), jax.vmap(jax.grad(root))(jnp.array([2.0, 3.0]))),
        "fixed point": (fixed(0.9), jax.grad(fixed)(0.9)),
        "levenberg": (fit(1.0), jax.jacfwd(fit)(1.0)),
        "gauss newton": (newton(1.0), jax.jit(newton)(1.0)),
        "bfgs": low(1.0),
        "bisection": bisect.value,
    }
