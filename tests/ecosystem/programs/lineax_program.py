"""lineax: direct and iterative solvers, differentiated, compiled and mapped."""

import jax
import jax.numpy as jnp
import lineax as lx


def results():
    key = jax.random.PRNGKey(0)
    a = 0.3 * jax.random.normal(key, (4, 4)) + 2 * jnp.eye(4)
    spd = a @ a.T + jnp.eye(4)
    b = jnp.arange(4.0)
    tall = jax.random.normal(key, (6, 3))

    def solved(matrix, solver, tag=(), b=b):
        f = lambda m: lx.linear_solve(lx.MatrixLinearOperator(m, tag), b, solver).value
        many = jnp.stack([matrix, matrix * 2])
        return f(matrix), jax.grad(lambda m: f(m).sum())(matrix), jax.jit(jax.vmap(f))(many)

    jacobian = lx.JacobianLinearOperator(lambda y, _: y**3 + a @ y, jnp.ones(4))
    return {
        "lu": solved(a, lx.LU()),
        "qr": solved(tall, lx.QR(), b=jnp.arange(6.0)),
        "svd": solved(tall, lx.SVD(), b=jnp.arange(6.0)),
        "cholesky": solved(spd, lx.Cholesky(), lx.positive_semidefinite_tag),
        "cg": solved(spd, lx.CG(1e-3, 1e-3), lx.positive_semidefinite_tag),
        "gmres": solved(a, lx.GMRES(1e-3, 1e-3, restart=2)),
        "tridiagonal": lx.linear_solve(
            lx.TridiagonalLinearOperator(4 * jnp.ones(4), jnp.ones(3), jnp.ones(3)), b
        ).value,
        "jacobian": lx.linear_solve(jacobian, b, lx.LU()).value,
        "auto": lx.linear_solve(lx.MatrixLinearOperator(a), b, lx.AutoLinearSolver(well_posed=True)).value,
        "jvp": jax.jvp(lambda m: lx.linear_solve(lx.MatrixLinearOperator(m), b).value, (a,), (jnp.eye(4),))[
            1
        ],
    }
