"""Scientific libraries under ``jax_enable_x64``: solvers, roots, fits, a network."""

import jax

jax.config.update("jax_enable_x64", True)

import diffrax  # noqa: E402
import equinox as eqx  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import lineax as lx  # noqa: E402
import optimistix as optx  # noqa: E402


def results():
    term = diffrax.ODETerm(lambda t, y, a: -a * y + jnp.sin(t))
    control = diffrax.PIDController(1e-9, 1e-9)

    def end(a):
        return diffrax.diffeqsolve(
            term, diffrax.Dopri8(), 0.0, 1.0, 0.1, jnp.array([1.0, 2.0]), a, stepsize_controller=control
        ).ys[-1]

    root = lambda a: optx.root_find(lambda y, a: y**3 - a, optx.Newton(1e-12, 1e-12), 1.0, a).value
    a = jax.random.normal(jax.random.key(0), (4, 4)) + 4 * jnp.eye(4)
    solve = lambda a: lx.linear_solve(lx.MatrixLinearOperator(a), jnp.arange(4.0), lx.QR()).value
    model = eqx.nn.MLP(3, 2, 8, 2, key=jax.random.key(1))
    x = jnp.linspace(0, 1, 3)
    return {
        "ode": end(1.0),
        "ode gradient": jax.grad(lambda a: end(a).sum())(1.0),
        "root": (root(2.0), jax.grad(root)(2.0)),
        "qr": (solve(a), jax.jacobian(solve)(a), jax.jit(jax.vmap(solve))(jnp.stack([a, 2 * a]))),
        "mlp": model(x),
        "mlp gradient": jax.tree.leaves(eqx.filter_grad(lambda m: (m(x) ** 2).sum())(model)),
        "widths": [v.dtype.itemsize for v in (end(1.0), root(2.0), solve(a), model(x), jnp.arange(3), a)],
    }
