"""Iterative solvers of linear systems: ``cg``, ``bicgstab``, ``gmres``.

A face above ``blufunc.lax``. The matrix is a function from a pytree to one of the same structure (or an array of rank
2); the solution has the derivatives of a solution, not of the iteration, through ``lax.custom_linear_solve``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import static_int
from blufunc.core.pytree import tree
from blufunc.flatten_util import ravel_pytree

Operator = Callable[[Any], Any]


def cg(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    tol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
) -> tuple[Any, None]:
    """Solve ``A x = b`` by conjugate gradients, for Hermitian positive definite A.

    Args:
      A: a function from x to ``A x``, or an array of rank 2.
      b: a pytree of inexact arrays.
      x0: where to begin; zeros by default.
      tol, atol: it ends when the norm of the residual is at most ``max(tol * norm(b), atol)``,
      maxiter: or after this number of steps; 10 times the number of unknowns by default.
      M: an approximation of the inverse of A, in the same form: the preconditioner.
    Returns:
      the solution, and None instead of SciPy's code.
    """
    return _solve(_conjugate_gradients, "cg", A, b, x0, tol, atol, maxiter, M, symmetric=True)


def bicgstab(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    tol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
) -> tuple[Any, None]:
    """Solve ``A x = b`` by BiCGSTAB, for any invertible A; arguments of ``cg``.

    H. A. van der Vorst, "Bi-CGSTAB" (1992). Where it breaks down it ends with what it has.
    """
    return _solve(_bicgstab, "bicgstab", A, b, x0, tol, atol, maxiter, M, symmetric=False)


def gmres(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    tol: float = 1e-5,
    atol: float = 0.0,
    restart: int = 20,
    maxiter: int | None = None,
    M: Any = None,
    solve_method: str = "batched",
) -> tuple[Any, None]:
    """Solve ``A x = b`` by GMRES, for any invertible A; arguments of ``cg``.

    Y. Saad and M. H. Schultz, "GMRES" (1986), restarted.

    Args:
      restart: the number of directions to keep before a restart from the current solution.
      maxiter: the number of restarts.
      solve_method: "batched" or "incremental", as in JAX: here they are the same.
    """
    if solve_method not in ("batched", "incremental"):
        raise errors.ValueRangeError(
            f"gmres: solve_method is 'batched' or 'incremental', not {solve_method!r}.", where=source.here()
        )
    size = static_int(restart, "gmres", "restart")
    if size < 1:
        raise errors.ValueRangeError(f"gmres: restart={size} is not positive.", where=source.here())

    def iterate(matvec, b, x, precondition, bound, maxiter):
        return _gmres(matvec, b, x, precondition, bound, maxiter, min(size, b.aval.size))

    return _solve(iterate, "gmres", A, b, x0, tol, atol, maxiter, M, symmetric=False)


# -- from pytrees to vectors -----------------------------------------------------------------------


def _solve(iterate, name, A, b, x0, tol, atol, maxiter, M, symmetric) -> tuple[Any, None]:
    """Solve on vectors: ``iterate(matvec, b, x, precondition, bound, maxiter) -> x``."""
    flat_b, unravel = ravel_pytree(b)
    if not flat_b.aval.size or not dtypes.is_inexact(flat_b.aval.dtype):
        raise errors.DtypeError(
            f"{name}: b holds floats or complex numbers, not {flat_b.aval}.", where=source.here()
        )
    dtype = flat_b.aval.dtype
    matvec = _operator(A, name, "A", unravel, dtype)
    precondition = (lambda v: v) if M is None else _operator(M, name, "M", unravel, dtype)
    if x0 is None:
        start = bnp.zeros_like(flat_b)
    else:
        if tree.structure(x0) != tree.structure(b):
            raise errors.TreeError(f"{name}: x0 has a different structure from b.", where=source.here())
        start = ravel_pytree(x0)[0].astype(dtype)
        if start.aval.shape != flat_b.aval.shape:
            raise errors.ShapeError(
                f"{name}: x0 has {start.aval.size} elements and b has {flat_b.aval.size}.",
                where=source.here(),
            )
    start = lax.stop_gradient(start)
    steps = 10 * flat_b.aval.size if maxiter is None else static_int(maxiter, name, "maxiter")

    def solve(matvec, b):
        return iterate(matvec, b, start, precondition, bnp.maximum(tol * _norm(b), atol), steps)

    x = lax.custom_linear_solve(matvec, flat_b, solve, solve, symmetric=symmetric)
    return unravel(x), None


def _operator(A: Any, name: str, what: str, unravel: Callable, dtype: Any) -> Operator:
    """A matrix or function of pytrees as a function of vectors."""
    if callable(A):

        def apply(v):
            out = ravel_pytree(A(unravel(v)))[0]
            if out.aval.shape != v.aval.shape:
                raise errors.ShapeError(
                    f"{name}: {what} returns {out.aval.size} elements for {v.aval.size}.", where=source.here()
                )
            return out.astype(dtype)

        return apply
    matrix = lift(A, f"the argument {what} of {name}")
    if matrix.aval.ndim != 2 or matrix.aval.shape[0] != matrix.aval.shape[1]:
        raise errors.ShapeError(
            f"{name}: {what} is a function or a square matrix, not {matrix.aval}.", where=source.here()
        )
    return lambda v: (matrix @ v).astype(dtype)


def _norm(x: Any) -> Any:
    return bnp.sqrt(bnp.sum(bnp.real(x * bnp.conj(x))))


def _dot(x: Any, y: Any) -> Any:
    return bnp.sum(bnp.conj(x) * y)


def _ratio(x: Any, y: Any) -> Any:
    """``x / y``, and 0 where y is: a breakdown makes no NaN."""
    return bnp.where(y == 0, 0, x / bnp.where(y == 0, 1, y))


# -- the iterations --------------------------------------------------------------------------------


def _conjugate_gradients(matvec, b, x, precondition, bound, maxiter):
    """Y. Saad, "Iterative Methods for Sparse Linear Systems" (2003), algorithm 9.1."""
    r = b - matvec(x)
    z = precondition(r)

    def going(state):
        _, r, _, _, k = state
        return (_norm(r) > bound) & (k < maxiter)

    def step(state):
        x, r, p, rz, k = state
        ap = matvec(p)
        alpha = _ratio(rz, _dot(p, ap))
        x, r = x + alpha * p, r - alpha * ap
        z = precondition(r)
        new = _dot(r, z)
        return x, r, z + _ratio(new, rz) * p, new, k + 1

    return lax.while_loop(going, step, (x, r, z, _dot(r, z), 0))[0]


def _bicgstab(matvec, b, x, precondition, bound, maxiter):
    """Y. Saad (2003), algorithm 7.7, preconditioned from the right."""
    r = b - matvec(x)
    shadow = r

    def going(state):
        _, r, _, rho, k = state
        return (_norm(r) > bound) & (k < maxiter) & (rho != 0)

    def step(state):
        x, r, p, rho, k = state
        p_hat = precondition(p)
        v = matvec(p_hat)
        alpha = _ratio(rho, _dot(shadow, v))
        s = r - alpha * v
        s_hat = precondition(s)
        t = matvec(s_hat)
        omega = _ratio(_dot(t, s), _dot(t, t))
        x = x + alpha * p_hat + omega * s_hat
        r = s - omega * t
        new = _dot(shadow, r)
        beta = _ratio(new, rho) * _ratio(alpha, omega)
        return x, r, r + beta * (p - omega * v), new, k + 1

    return lax.while_loop(going, step, (x, r, r, _dot(shadow, r), 0))[0]


def _gmres(matvec, b, x, precondition, bound, maxiter, size):
    """Restarted: per cycle, ``size`` modified Gram-Schmidt steps and least squares."""
    n = b.aval.size
    dtype = b.aval.dtype
    tiny = bnp.finfo(dtype).eps

    def extend(j, state):
        """One more direction: column j of the Hessenberg matrix."""
        basis, hessenberg = state
        w = matvec(precondition(basis[:, j]))
        before = _norm(w)
        column = bnp.zeros(size + 1, dtype)
        for _ in range(2):  # the second time for what rounding left
            projection = bnp.conj(basis).T @ w
            w = w - basis @ projection
            column = column + projection
        norm = _norm(w)
        exhausted = norm <= tiny * before  # the space holds the solution: nothing is left to add
        w = bnp.where(exhausted, 0, w / bnp.where(exhausted, 1, norm)).astype(dtype)
        column = column.at[j + 1].set(bnp.where(exhausted, 0, norm).astype(dtype))
        return basis.at[:, j + 1].set(w), hessenberg.at[:, j].set(column)

    def restart(state):
        x, r, k = state
        beta = _norm(r)
        first = (r / bnp.where(beta == 0, 1, beta)).astype(dtype)
        basis = bnp.zeros((n, size + 1), dtype).at[:, 0].set(first)
        hessenberg = bnp.zeros((size + 1, size), dtype)
        basis, hessenberg = lax.fori_loop(0, size, extend, (basis, hessenberg))
        target = bnp.zeros(size + 1, dtype).at[0].set(beta.astype(dtype))
        weights = bnp.linalg.lstsq(hessenberg, target)[0]
        x = x + precondition(basis[:, :-1] @ weights)
        return x, b - matvec(x), k + 1

    going = lambda state: (_norm(state[1]) > bound) & (state[2] < maxiter)
    return lax.while_loop(going, restart, (x, b - matvec(x), 0))[0]


__all__ = ["bicgstab", "cg", "gmres"]
