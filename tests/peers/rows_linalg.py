"""Rows against JAX: ``numpy.linalg``, ``lax.linalg``, ``scipy.linalg``, solvers.

Matrices are kept away from being singular, and eigenvalues and singular values apart. Vectors that a factorization
gives up to a sign or a phase are compared through products that do not depend on it.
"""

import numpy as np

from tests.peers.peer_row import A, Row


def fun(name, f, *args, **more):
    """A row with a function of its own."""
    return Row(name, args, f, **more)


def regular(x):
    """Far from singular."""
    return x + 3 * np.eye(x.shape[-1])


def positive(x):
    """Symmetric or Hermitian, positive definite, with eigenvalues apart."""
    n = x.shape[-1]
    return 0.2 * (x + x.swapaxes(-1, -2).conj()) + np.diag(2.0 + 1.5 * np.arange(n))


def lower(x):
    """A triangle far from singular."""
    return np.tril(regular(x))


def spread(x):
    """Singular values apart."""
    return 0.2 * x + np.eye(*x.shape) * (1.0 + 1.5 * np.arange(x.shape[-1]))


S, C = A((4, 4), -1, 1, make=regular), A((3, 3), -1, 1, "complex", make=regular)
P, H = A((4, 4), -1, 1, make=positive), A((3, 3), -1, 1, "complex", make=positive)
L, B = A((4, 4), -1, 1, make=lower), A((4, 2))
TALL, WIDE, ANY = A((5, 3), make=spread), A((3, 5), make=lambda x: spread(x.T).T), A((4, 4), -1, 1)


def herm(m, x):
    """The conjugate transpose."""
    return m.np.conj(m.np.swapaxes(x, -1, -2))


def sym(m, x):
    """Symmetrize after perturbation too, for functions that read one triangle."""
    return (x + herm(m, x)) / 2


def weighted(m, vectors, values, other=None):
    """``v f(w) v^H`` of eigenvectors and a function: independent of their signs."""
    other = herm(m, vectors) if other is None else other
    return (vectors * m.np.sin(values)) @ other


def of(m, path):
    """A function by its path."""
    for part in path.split("."):
        m = getattr(m, part)
    return m


ONE_TRIANGLE = (
    "derivatives of what reads one triangle are those of that function; "
    "JAX takes perturbations to be symmetric"
)
DERIVATIVES = ("jvp", "vjp", "jvp of vjp", "vmap of vjp")
NUMPY = [
    *(
        fun(f"np.linalg.{n}", lambda m, x, n=n: of(m.np.linalg, n)(x), S)
        for n in "inv det slogdet pinv".split()
    ),
    *(
        fun(f"np.linalg.{n} of complex numbers", lambda m, x, n=n: of(m.np.linalg, n)(x), C)
        for n in "inv det".split()
    ),
    fun("np.linalg.slogdet of complex numbers", lambda m, x: m.np.linalg.slogdet(x), C),
    fun("np.linalg.det of a batch", lambda m, x: m.np.linalg.det(x), A((2, 3, 3), make=regular)),
    fun(
        "np.linalg.det of a singular matrix",
        lambda m, x: m.np.linalg.det(x),
        A((3, 3), make=lambda x: x[:, [0, 0, 1]]),
        order=1,
    ),
    fun("np.linalg.solve", lambda m, a, b: m.np.linalg.solve(a, b), S, B),
    fun("np.linalg.solve of a vector", lambda m, a, b: m.np.linalg.solve(a, b), S, A((4,))),
    fun(
        "np.linalg.solve of complex numbers",
        lambda m, a, b: m.np.linalg.solve(a, b),
        C,
        A((3, 2), dtype="complex"),
    ),
    fun(
        "np.linalg.solve of batches",
        lambda m, a, b: m.np.linalg.solve(a, b),
        A((2, 3, 3), -1, 1, make=regular),
        A((3, 2)),
    ),
    fun("np.linalg.cholesky", lambda m, a: m.np.linalg.cholesky(a), P),
    fun("np.linalg.cholesky upper", lambda m, a: m.np.linalg.cholesky(a, upper=True), P),
    fun("np.linalg.cholesky of complex numbers", lambda m, a: m.np.linalg.cholesky(a), H),
    fun("np.linalg.eigvalsh", lambda m, a: m.np.linalg.eigvalsh(a), P, tol=2),
    fun("np.linalg.eigvalsh of complex numbers", lambda m, a: m.np.linalg.eigvalsh(a), H, tol=2),
    fun("np.linalg.eigh", lambda m, a: (lambda w, v: weighted(m, v, w))(*m.np.linalg.eigh(a)), P, tol=2),
    fun(
        "np.linalg.eigh of complex numbers",
        lambda m, a: (lambda w, v: weighted(m, v, w))(*m.np.linalg.eigh(a)),
        H,
        tol=2,
    ),
    fun(
        "np.linalg.eigh of the upper triangle",
        lambda m, a: (lambda w, v: weighted(m, v, w))(
            *m.np.linalg.eigh(sym(m, a), UPLO="U", symmetrize_input=False)
        ),
        P,
        tol=2,
    ),
    fun(
        "np.linalg.eigvals", lambda m, a: m.np.linalg.eigvals(a).sum(), A((3, 3), make=spread), tol=2, order=1
    ),
    fun(
        "np.linalg.eig",
        lambda m, a: m.np.sum(m.np.sin(m.np.linalg.eig(a)[0])),
        A((3, 3), make=spread),
        tol=2,
        order=0,
    ),
    fun("np.linalg.svdvals", lambda m, a: m.np.linalg.svdvals(a), TALL, tol=2),
    fun(
        "np.linalg.svd",
        lambda m, a: (lambda u, s, v: weighted(m, u, s, v))(*m.np.linalg.svd(a, full_matrices=False)),
        TALL,
        tol=2,
    ),
    fun(
        "np.linalg.svd of a wide matrix",
        lambda m, a: (lambda u, s, v: weighted(m, u, s, v))(*m.np.linalg.svd(a, full_matrices=False)),
        WIDE,
        tol=2,
    ),
    fun(
        "np.linalg.svd of complex numbers",
        lambda m, a: (lambda u, s, v: weighted(m, u, s, v))(*m.np.linalg.svd(a, full_matrices=False)),
        A((4, 3), -1, 1, "complex", make=spread),
        tol=4,
    ),
    fun(
        "np.linalg.svd full",
        lambda m, a: (lambda u, s, v: (u @ herm(m, u), s, herm(m, v) @ v))(*m.np.linalg.svd(a)),
        TALL,
        order=0,
    ),
    fun(
        "np.linalg.qr",
        lambda m, a: (lambda q, r: (q @ herm(m, q) @ m.np.cos(a), m.np.abs(r)))(*m.np.linalg.qr(a)),
        TALL,
    ),
    fun(
        "np.linalg.qr of complex numbers",
        lambda m, a: (lambda q, r: (q @ herm(m, q) @ m.np.cos(a), m.np.real(r * m.np.conj(r))))(
            *m.np.linalg.qr(a)
        ),
        A((4, 3), -1, 1, "complex", make=spread),
        tol=2,
    ),
    fun(
        "np.linalg.qr complete",
        lambda m, a: (lambda q, r: (q @ r, q @ q.T))(*m.np.linalg.qr(a, mode="complete")),
        TALL,
        order=0,
    ),
    fun("np.linalg.pinv of a tall matrix", lambda m, a: m.np.linalg.pinv(a), TALL, tol=2),
    fun("np.linalg.pinv of a wide matrix", lambda m, a: m.np.linalg.pinv(a), WIDE, tol=2),
    fun("np.linalg.pinv hermitian", lambda m, a: m.np.linalg.pinv(sym(m, a), hermitian=True), P, order=1),
    fun("np.linalg.lstsq", lambda m, a, b: m.np.linalg.lstsq(a, b)[0], TALL, A((5, 2)), tol=4),
    fun("np.linalg.lstsq residuals", lambda m, a, b: m.np.linalg.lstsq(a, b)[1:], TALL, A((5, 2)), order=0),
    fun("np.linalg.cond", lambda m, a: m.np.linalg.cond(a), S, tol=2),
    fun("np.linalg.cond of order 1", lambda m, a: m.np.linalg.cond(a, 1), S, tol=2),
    fun(
        "np.linalg.matrix_rank",
        lambda m, a: m.np.linalg.matrix_rank(a),
        A((4, 4), make=lambda x: x[:, [0, 1, 2, 2]]),
        order=0,
    ),
    *(
        fun(f"np.linalg.matrix_power {n}", lambda m, a, n=n: m.np.linalg.matrix_power(a, n), S)
        for n in (0, 1, 5, -2)
    ),
    fun(
        "np.linalg.multi_dot",
        lambda m, a, b, c: m.np.linalg.multi_dot([a, b, c]),
        A((3, 4)),
        A((4, 5)),
        A((5, 2)),
    ),
    fun(
        "np.linalg.tensorsolve",
        lambda m, a, b: m.np.linalg.tensorsolve(a, b),
        A((2, 3, 6), -1, 1, make=lambda x: regular(x.reshape(6, 6)).reshape(2, 3, 2, 3)),
        A((2, 3)),
    ),
    fun(
        "np.linalg.tensorinv",
        lambda m, a: m.np.linalg.tensorinv(a),
        A((2, 3, 6), -1, 1, make=lambda x: regular(x.reshape(6, 6)).reshape(2, 3, 2, 3)),
    ),
    *(
        fun(f"np.linalg.norm of order {o}", lambda m, a, o=o: m.np.linalg.norm(a, o), S)
        for o in (1, -1, 2, -2, np.inf, -np.inf, "fro", "nuc")
    ),
    *(
        fun(
            f"np.linalg.vector_norm of order {o}",
            lambda m, a, o=o: m.np.linalg.vector_norm(a, ord=o, axis=0, keepdims=True),
            A((3, 4), 0.3, 2),
        )
        for o in (1, 2, 3, 0.5, np.inf, -np.inf)
    ),
    fun(
        "np.linalg.norm of order 0",
        lambda m, a: m.np.linalg.norm(a, 0, axis=0),
        A((3, 4), make=lambda x: x * (x > 0)),
        order=0,
    ),
    fun("np.linalg.norm of complex numbers", lambda m, a: m.np.linalg.norm(a), A((5,), dtype="complex")),
    fun("np.linalg.norm at zero", lambda m, a: m.np.linalg.norm(a), A((3,), make=np.zeros_like), order=1),
    fun("np.linalg.matrix_norm", lambda m, a: m.np.linalg.matrix_norm(a), A((2, 3, 4))),
    fun("np.linalg.cross", lambda m, a, b: m.np.linalg.cross(a, b), A((4, 3)), A((4, 3))),
    fun("np.linalg.outer", lambda m, a, b: m.np.linalg.outer(a, b), A((4,)), A((3,))),
    fun("np.linalg.trace", lambda m, a: m.np.linalg.trace(a, offset=1), A((2, 3, 4))),
    fun("np.linalg.diagonal", lambda m, a: m.np.linalg.diagonal(a, offset=-1), A((2, 3, 4))),
]
LAX = [
    fun("lax.linalg.cholesky", lambda m, a: m.lax.linalg.cholesky(a), P),
    fun(
        "lax.linalg.cholesky as it is",
        lambda m, a: m.lax.linalg.cholesky(sym(m, a), symmetrize_input=False),
        P,
    ),
    fun("lax.linalg.lu", lambda m, a: m.lax.linalg.lu(a), S),
    fun("lax.linalg.lu of a tall matrix", lambda m, a: m.lax.linalg.lu(a), TALL),
    fun("lax.linalg.lu of a wide matrix", lambda m, a: m.lax.linalg.lu(a), WIDE),
    fun("lax.linalg.eigh", lambda m, a: (lambda v, w: weighted(m, v, w))(*m.lax.linalg.eigh(a)), P, tol=2),
    fun(
        "lax.linalg.eig",
        lambda m, a: m.np.sum(m.np.sin(m.lax.linalg.eig(a, compute_left_eigenvectors=False)[0])),
        A((3, 3), make=spread),
        tol=2,
        order=0,
    ),
    fun(
        "lax.linalg.svd",
        lambda m, a: (lambda u, s, v: weighted(m, u, s, v))(*m.lax.linalg.svd(a, full_matrices=False)),
        TALL,
        tol=2,
    ),
    fun(
        "lax.linalg.qr",
        lambda m, a: (lambda q, r: q @ m.np.sin(r / q[:1].T * q[:1].T))(
            *m.lax.linalg.qr(a, full_matrices=False)
        ),
        TALL,
        order=0,
    ),
    *(
        fun(
            f"lax.linalg.triangular_solve {left=} {trans=} {conj=} {unit=}",
            lambda m, a, b, left=left, trans=trans, conj=conj, unit=unit: m.lax.linalg.triangular_solve(
                a,
                b if left else m.np.swapaxes(b, -1, -2),
                left_side=left,
                lower=True,
                transpose_a=trans,
                conjugate_a=conj,
                unit_diagonal=unit,
            ),
            A((3, 3), -1, 1, "complex", make=lower),
            A((3, 2), dtype="complex"),
        )
        for left in (True, False)
        for trans, conj in ((False, False), (True, False), (True, True))
        for unit in (False, True)
    ),
    fun(
        "lax.linalg.triangular_solve upper",
        lambda m, a, b: m.lax.linalg.triangular_solve(a.T, b, left_side=True, lower=False),
        L,
        B,
    ),
    fun(
        "lax.linalg.tridiagonal_solve",
        lambda m, a, b, c, d: m.lax.linalg.tridiagonal_solve(a, b, c, d),
        A((5,), -1, 1),
        A((5,), 3, 4),
        A((5,), -1, 1),
        A((5, 2)),
        order=0,
    ),
    fun(
        "lax.linalg.lu_pivots_to_permutation",
        lambda m, a: m.lax.linalg.lu_pivots_to_permutation(m.lax.linalg.lu(a)[1], 6),
        A((6, 4)),
        order=0,
    ),
]
SCIPY = [
    fun("scipy.linalg.cholesky", lambda m, a: m.scipy.linalg.cholesky(sym(m, a)), P),
    fun(
        "scipy.linalg.cholesky of one triangle",
        lambda m, a: m.scipy.linalg.cholesky(a),
        P,
        differs=(ONE_TRIANGLE, DERIVATIVES),
    ),
    fun(
        "lax.linalg.eigh of one triangle",
        lambda m, a: m.lax.linalg.eigh(a, symmetrize_input=False)[1],
        P,
        differs=(ONE_TRIANGLE, DERIVATIVES),
    ),
    fun("scipy.linalg.cholesky lower", lambda m, a: m.scipy.linalg.cholesky(sym(m, a), lower=True), P),
    fun(
        "scipy.linalg.cho_solve",
        lambda m, a, b: m.scipy.linalg.cho_solve(m.scipy.linalg.cho_factor(sym(m, a)), b),
        P,
        B,
    ),
    fun("scipy.linalg.lu", lambda m, a: m.scipy.linalg.lu(a), S),
    fun("scipy.linalg.lu permuted", lambda m, a: m.scipy.linalg.lu(a, permute_l=True), S),
    fun("scipy.linalg.lu_factor", lambda m, a: m.scipy.linalg.lu_factor(a)[0], S),
    *(
        fun(
            f"scipy.linalg.lu_solve {t}",
            lambda m, a, b, t=t: m.scipy.linalg.lu_solve(m.scipy.linalg.lu_factor(a), b, trans=t),
            C,
            A((3, 2), dtype="complex"),
        )
        for t in (0, 1, 2)
    ),
    fun("scipy.linalg.solve", lambda m, a, b: m.scipy.linalg.solve(a, b), S, B),
    fun(
        "scipy.linalg.solve positive",
        lambda m, a, b: m.scipy.linalg.solve(sym(m, a), b, assume_a="pos"),
        P,
        B,
    ),
    *(
        fun(
            f"scipy.linalg.solve_triangular {t}",
            lambda m, a, b, t=t: m.scipy.linalg.solve_triangular(a, b, trans=t, lower=True),
            A((3, 3), -1, 1, "complex", make=lower),
            A((3, 2), dtype="complex"),
        )
        for t in (0, 1, 2)
    ),
    fun("scipy.linalg.inv", lambda m, a: m.scipy.linalg.inv(a), S),
    fun("scipy.linalg.det", lambda m, a: m.scipy.linalg.det(a), S),
    fun("scipy.linalg.eigh values", lambda m, a: m.scipy.linalg.eigh(sym(m, a), eigvals_only=True), P, tol=2),
    fun("scipy.linalg.svd", lambda m, a: m.scipy.linalg.svd(a, compute_uv=False), TALL, tol=2),
    fun(
        "scipy.linalg.qr",
        lambda m, a: (lambda q, r: (q @ herm(m, q) @ m.np.cos(a), m.np.abs(r)))(
            *m.scipy.linalg.qr(a, mode="economic")
        ),
        TALL,
    ),
    fun("scipy.linalg.expm", lambda m, a: m.scipy.linalg.expm(a), ANY, tol=2, order=1),
    fun(
        "scipy.linalg.expm of large matrices",
        lambda m, a: m.scipy.linalg.expm(a),
        A((3, 3), -6, 6),
        tol=40,
        order=1,
    ),
    fun("scipy.linalg.expm_frechet", lambda m, a, e: m.scipy.linalg.expm_frechet(a, e), ANY, ANY, order=0),
    fun("scipy.linalg.block_diag", lambda m, a, b: m.scipy.linalg.block_diag(a, b), A((2, 3)), A((1, 2))),
    fun("scipy.linalg.toeplitz", lambda m, c, r: m.scipy.linalg.toeplitz(c, r), A((4,)), A((3,))),
]
MORE = [
    fun("scipy.linalg.sqrtm", lambda m, a: m.scipy.linalg.sqrtm(a), P, order=0, tol=4),
    *(
        fun(
            f"scipy.linalg.solve_sylvester {method}",
            lambda m, a, b, c, method=method: m.scipy.linalg.solve_sylvester(a, b, c, method=method),
            S,
            A((2, 2), -1, 1, make=regular),
            A((4, 2)),
            order=0,
            batch=False,
            tol=4,
        )
        for method in ("schur", "eigen")
    ),
    fun("scipy.linalg.funm", lambda m, a: m.scipy.linalg.funm(a, m.np.exp), S, order=0, batch=False, tol=10),
    fun("scipy.linalg.hessenberg", lambda m, a: m.scipy.linalg.hessenberg(a, calc_q=True), S, order=0, tol=4),
    fun(
        "scipy.linalg.schur",
        lambda m, a: (lambda t, z: (z @ t @ z.T, m.np.diag(t)))(*m.scipy.linalg.schur(a)),
        P,
        order=0,
        batch=False,
        tol=4,
    ),
    fun(
        "scipy.linalg.eigh_tridiagonal",
        lambda m, d, e: m.scipy.linalg.eigh_tridiagonal(d, e, eigvals_only=True),
        A((5,)),
        A((4,)),
        order=0,
        tol=10,
    ),
    fun(
        "scipy.linalg.qr_multiply",
        lambda m, a, c: m.scipy.linalg.qr_multiply(a, c),
        TALL,
        A((2, 5)),
        order=0,
        batch=False,
        tol=2,
    ),
    *(
        fun(f"scipy.linalg.{n}", lambda m, c, n=n: getattr(m.scipy.linalg, n)(c), A((5,), 0.5, 2), order=1)
        for n in ("circulant", "hankel", "companion", "fiedler_companion", "fiedler")
    ),
    fun("scipy.linalg.leslie", lambda m, f, s: m.scipy.linalg.leslie(f, s), A((4,)), A((3,)), order=1),
    fun(
        "lax.linalg.reflectors",
        lambda m, a, c: (lambda h: (m.lax.linalg.householder_product(*h), m.lax.linalg.ormqr(*h, c)))(
            m.lax.linalg.hessenberg(a)
        ),
        A((4, 4), -1, 1, make=lambda x: regular(x)),
        A((4, 2)),
        order=0,
        tol=4,
    ),
    fun("lax.linalg.qdwh", lambda m, a: m.lax.linalg.qdwh(a)[:2], TALL, order=0, batch=False, tol=10),
    fun("np.linalg.qr raw", lambda m, a: tuple(m.np.linalg.qr(a, mode="raw")), TALL, order=0, tol=2),
]
SOLVERS = [
    fun(
        "scipy.sparse.linalg.cg",
        lambda m, a, b: m.scipy.sparse.linalg.cg(lambda v: a @ v, b, tol=1e-10)[0],
        P,
        A((4,)),
        tol=10,
        dtypes=("float64",),
    ),
    fun(
        "scipy.sparse.linalg.cg of a matrix",
        lambda m, a, b: m.scipy.sparse.linalg.cg(a, b, tol=1e-6, maxiter=8)[0],
        P,
        A((4,)),
        tol=4,
        order=1,
    ),
    fun(
        "scipy.sparse.linalg.bicgstab",
        lambda m, a, b: m.scipy.sparse.linalg.bicgstab(lambda v: a @ v, b, tol=1e-13)[0],
        S,
        A((4,)),
        tol=100,
        dtypes=("float64",),
    ),
    fun(
        "scipy.sparse.linalg.gmres",
        lambda m, a, b: m.scipy.sparse.linalg.gmres(lambda v: a @ v, b, tol=1e-13)[0],
        S,
        A((4,)),
        tol=100,
        dtypes=("float64",),
    ),
    fun(
        "scipy.optimize.minimize",
        lambda m, x: (lambda r: (r.x, r.success))(
            m.scipy.optimize.minimize(
                lambda x: m.np.sum((x - 1) ** 4 + (x - 1) ** 2), x, method="BFGS", options={"gtol": 1e-10}
            )
        ),
        A((3,)),
        order=0,
        tol=100,
        dtypes=("float64",),
    ),
]
ROWS = [*NUMPY, *LAX, *SCIPY, *MORE, *SOLVERS]
