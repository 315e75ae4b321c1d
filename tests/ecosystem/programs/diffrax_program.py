"""diffrax: explicit and implicit solvers, adaptive steps, adjoints and an SDE."""

import diffrax
import jax
import jax.numpy as jnp


def results():
    term = diffrax.ODETerm(lambda t, y, a: -a * y + jnp.sin(t))
    y0 = jnp.array([1.0, 2.0])
    fixed = {"t0": 0.0, "t1": 1.0, "dt0": 0.1, "y0": y0}
    saves = diffrax.SaveAt(ts=jnp.linspace(0, 1, 4))
    adaptive = diffrax.PIDController(1e-5, 1e-5)

    def solved(a, solver=diffrax.Tsit5(), **options):
        return diffrax.diffeqsolve(term, solver, **fixed, args=a, **options).ys

    end = lambda **options: lambda a: solved(a, **options)[-1].sum()
    path = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-3, (2,), jax.random.PRNGKey(0))
    sde = diffrax.MultiTerm(
        diffrax.ODETerm(lambda t, y, a: -y), diffrax.ControlTerm(lambda t, y, a: 0.1 * jnp.diag(y), path)
    )
    event = diffrax.Event(lambda t, y, args, **kw: y[0] - 0.7)
    stopped = diffrax.diffeqsolve(term, diffrax.Heun(), **fixed, args=1.0, event=event)
    return {
        "tsit5": solved(1.0, saveat=saves),
        "adaptive": solved(1.0, saveat=saves, stepsize_controller=adaptive),
        "kvaerno3": solved(1.0, diffrax.Kvaerno3(), stepsize_controller=adaptive),
        "gradient": jax.grad(end())(1.0),
        "backsolve": jax.grad(end(adjoint=diffrax.BacksolveAdjoint()))(1.0),
        "direct": jax.grad(end(adjoint=diffrax.DirectAdjoint()))(1.0),
        "forward": jax.jvp(end(adjoint=diffrax.ForwardMode()), (1.0,), (1.0,)),
        "jit": jax.jit(solved)(1.0),
        "vmap": jax.vmap(end(stepsize_controller=adaptive))(jnp.array([0.5, 1.0, 2.0])),
        "sde": diffrax.diffeqsolve(sde, diffrax.Heun(), **fixed).ys,
        "dense": diffrax.diffeqsolve(
            term, diffrax.Dopri5(), **fixed, args=1.0, saveat=diffrax.SaveAt(dense=True)
        ).evaluate(0.33),
        "event": stopped.ts,
    }
