"""Rows against JAX: transforms, control flow, custom rules, small programs."""

import functools

from tests.peers.peer_row import A, Row

V, X, W = A((4,)), A((3, 4)), A((4, 4), -0.7, 0.7)


def fun(name, f, *args, **more):
    """A row with a function of its own."""
    return Row(name, args or (V,), f, **more)


def mlp(m, x, w, b):
    """Two layers and a loss."""
    h = m.np.tanh(x @ w + b)
    return m.np.mean((h @ w.T - x) ** 2)


def softplus(m):
    """A function with a forward rule of its own."""

    @m.custom_jvp
    def f(x):
        return m.np.logaddexp(x, 0.0)

    @f.defjvp
    def f_jvp(primals, tangents):
        (x,), (t,) = primals, tangents
        return f(x), t * m.nn.sigmoid(x)

    return f


def clipped(m):
    """A function with a backward rule of its own."""

    @m.custom_vjp
    def f(x, s):
        return x * s

    f.defvjp(lambda x, s: (x * s, (x, s)), lambda res, ct: (m.np.clip(ct, -1, 1) * res[1], ct * res[0]))
    return f


def attention(m, q, k, v):
    """Causal attention of one head."""
    n = q.shape[0]
    scores = q @ k.T / q.shape[-1] ** 0.5
    scores = m.np.where(m.np.tril(m.np.ones((n, n), bool)), scores, -1e9)
    return m.nn.softmax(scores) @ v


def lstm(m, x, w):
    """A recurrent cell over a sequence."""

    def step(state, a):
        h, c = state
        i, f, o, g = m.np.split(m.np.concatenate([a, h]) @ w, 4)
        c = m.nn.sigmoid(f) * c + m.nn.sigmoid(i) * m.np.tanh(g)
        h = m.nn.sigmoid(o) * m.np.tanh(c)
        return (h, c), h

    zero = m.np.zeros(2, x.dtype)
    return m.lax.scan(step, (zero, zero), x)


def newton(m, x):
    """Square roots by iteration, with a number of steps that values decide."""

    def go(a):
        return m.lax.while_loop(
            lambda s: m.np.abs(s[0] * s[0] - a) > 1e-3 * a,
            lambda s: ((s[0] + a / s[0]) / 2, s[1] + 1),
            (a, 0),
        )[0]

    return m.vmap(go)(x)


def root(m, a):
    """The cube root as an implicit function."""

    def solve(f, x0):
        return m.lax.fori_loop(0, 30, lambda _, x: x - f(x) / (3 * x * x), x0)

    return m.lax.custom_root(
        lambda x: x**3 - a, m.np.ones_like(a), solve, lambda g, y: y / g(m.np.ones_like(y))
    )


TRANSFORMS = [
    fun("grad", lambda m, x: m.grad(lambda x: m.np.sum(m.np.sin(x) ** 2))(x)),
    fun("grad of grad", lambda m, x: m.grad(lambda x: m.grad(lambda x: m.np.sum(x**4))(x).sum())(x)),
    fun("value_and_grad", lambda m, x: m.value_and_grad(lambda x: m.np.prod(x))(x)),
    fun("jvp of jvp", lambda m, x: m.jvp(lambda x: m.jvp(m.np.tanh, (x,), (x,))[1], (x,), (x,))),
    fun("jacfwd", lambda m, x: m.jacfwd(lambda x: m.np.outer(x, m.np.sin(x)))(x)),
    fun("jacrev", lambda m, x: m.jacrev(lambda x: m.np.outer(x, m.np.sin(x)))(x)),
    fun("hessian", lambda m, x: m.hessian(lambda x: m.np.sum(x**3) * x[0])(x)),
    fun("linearize", lambda m, x: m.linearize(m.np.exp, x)[1](x)),
    fun("linear_transpose", lambda m, x: m.linear_transpose(lambda y: y[::2] * 3, x)(x[:2])),
    fun("vmap in the middle", lambda m, x, w: m.vmap(lambda r: m.np.tanh(w @ r), 0, 1)(x), X, W),
    fun("vmap over the second axis", lambda m, x: m.vmap(lambda c: c / c.sum(), 1, 1)(x), A((3, 4), 0.5, 2)),
    fun(
        "per-example gradients",
        lambda m, x, w: m.vmap(m.grad(lambda w, r: m.np.sum(m.np.tanh(w @ r))), (None, 0))(w, x),
        X,
        W,
    ),
    fun("jit in vmap", lambda m, x: m.vmap(m.jit(lambda r: m.np.sin(r) * r.sum()))(x), X),
    fun("checkpoint", lambda m, x, w: m.checkpoint(lambda x: m.np.sin(m.np.sin(x @ w) @ w))(x), X, W),
    fun(
        "grad of checkpoint",
        lambda m, x: m.grad(lambda x: m.checkpoint(lambda x: m.np.exp(m.np.sin(x)))(x).sum())(x),
    ),
    fun("custom_jvp", lambda m, x: softplus(m)(x)),
    fun("custom_jvp in scan", lambda m, x: m.lax.scan(lambda c, a: (softplus(m)(c + a), c), x[0], x)),
    fun("custom_vjp", lambda m, x: m.grad(lambda x: m.np.sum(clipped(m)(x, 3.0 * x)))(x), order=0),
    fun("custom_vjp in vmap", lambda m, x: m.vmap(m.grad(lambda x: clipped(m)(x, 2.0) ** 2))(x), order=0),
    fun("stop_gradient", lambda m, x: x * m.lax.stop_gradient(x)),
]
NAMED = [
    fun("psum", lambda m, x: m.vmap(lambda r: r / m.lax.psum(r, "i"), axis_name="i")(x), A((3, 4), 0.5, 2)),
    fun("pmean", lambda m, x: m.vmap(lambda r: r * m.lax.pmean(r, "i"), axis_name="i")(x), X),
    fun(
        "pmax",
        lambda m, x: m.vmap(lambda r: r - m.lax.pmax(m.lax.stop_gradient(r), "i"), axis_name="i")(x),
        X,
    ),
    fun("all_gather", lambda m, x: m.vmap(lambda r: m.lax.all_gather(r, "i") * r, axis_name="i")(x), X),
    fun(
        "ppermute",
        lambda m, x: m.vmap(lambda r: r * m.lax.ppermute(r, "i", [(0, 1), (1, 2), (2, 0)]), axis_name="i")(x),
        X,
    ),
    fun("axis_index", lambda m, x: m.vmap(lambda r: r * m.lax.axis_index("i"), axis_name="i")(x), X),
]
CONTROL = [
    fun("cond", lambda m, x: m.lax.cond(x.sum() > 0, m.np.sin, lambda x: x**2, x)),
    fun("cond on each", lambda m, x: m.vmap(lambda a: m.lax.cond(a > 0, m.np.sin, lambda a: a**2, a))(x)),
    fun("cond that closes over", lambda m, x, w: m.lax.cond(x[0] > 0, lambda: w @ x, lambda: x * 2), V, W),
    fun(
        "switch",
        lambda m, i, x: m.lax.switch(i, [m.np.sin, m.np.cos, lambda x: x * x], x),
        A((), -1, 4, dtype="int32"),
        V,
    ),
    fun("fori_loop", lambda m, x: m.lax.fori_loop(0, 4, lambda i, v: m.np.sin(v) * x + i, x)),
    fun(
        "fori_loop with traced bounds",
        lambda m, n, x: m.lax.fori_loop(0, n, lambda i, v: v * x, x),
        A((), 0, 4, dtype="int32"),
        V,
        order=0,
    ),
    fun("while_loop", newton, A((4,), 0.5, 9), order=0),
    fun(
        "jvp of while_loop",
        lambda m, x: m.jvp(functools.partial(newton, m), (x,), (x,)),
        A((4,), 0.5, 9),
        order=0,
        tol=4,
    ),
    fun("scan", lambda m, x: m.lax.scan(lambda c, a: (c * m.np.sin(a), c + a), x[0], x), X),
    fun(
        "scan in reverse",
        lambda m, x: m.lax.scan(lambda c, a: (c * m.np.sin(a), c + a), x[0], x, reverse=True),
        X,
    ),
    fun(
        "scan in scan",
        lambda m, x: m.lax.scan(
            lambda c, r: m.lax.scan(lambda c, a: (m.np.tanh(c + a), c), c, r), x[0, 0], x
        ),
        X,
    ),
    fun(
        "scan of cond",
        lambda m, x: m.lax.scan(lambda c, a: (m.lax.cond(a > 0, lambda c: c * a, m.np.sin, c), c), x[0], x),
    ),
    fun(
        "cond of scan",
        lambda m, x: m.lax.cond(
            x[0] > 0, lambda x: m.lax.scan(lambda c, a: (c * a, c), x[1], x)[1], m.np.sin, x
        ),
    ),
    fun(
        "checkpoint of scan",
        lambda m, x: m.checkpoint(lambda x: m.lax.scan(lambda c, a: (m.np.sin(c) * a, c), x[0], x)[1])(x),
    ),
    fun(
        "scan of checkpoint",
        lambda m, x: m.lax.scan(m.checkpoint(lambda c, a: (m.np.sin(c) * a, c)), x[0], x),
    ),
    fun("map", lambda m, x: m.lax.map(lambda r: r * r.sum(), x), X),
    fun("map in batches", lambda m, x: m.lax.map(lambda r: r * r.sum(), x, batch_size=2), X),
    fun("associative_scan", lambda m, x: m.lax.associative_scan(m.np.multiply, x), A((7,))),
    fun(
        "associative_scan of matrices",
        lambda m, x: m.lax.associative_scan(m.np.matmul, x),
        A((5, 3, 3), -1, 1),
        tol=2,
    ),
    fun("custom_root", root, A((), 0.5, 3), order=1, tol=4),
    fun(
        "custom_linear_solve",
        lambda m, w, b: m.lax.custom_linear_solve(
            lambda v: w @ v + 4 * v,
            b,
            lambda mv, b: m.np.linalg.solve(m.jacfwd(mv)(b), b),
            lambda mv, b: m.np.linalg.solve(m.jacfwd(mv)(b), b),
        ),
        W,
        V,
        tol=4,
    ),
]
PROGRAMS = [
    fun("an MLP", mlp, X, W, V, tol=2),
    fun(
        "the gradient of an MLP",
        lambda m, x, w, b: m.grad(functools.partial(mlp, m), (1, 2))(x, w, b),
        X,
        W,
        V,
        tol=2,
    ),
    fun("attention", attention, X, X, X, tol=2),
    fun("an LSTM", lstm, A((5, 2)), A((4, 8)), tol=4),
    fun(
        "layer norm",
        lambda m, x: (x - x.mean(-1, keepdims=True)) * m.lax.rsqrt(x.var(-1, keepdims=True) + 1e-3),
        X,
        tol=10,
    ),
    fun(
        "cross entropy",
        lambda m, x, i: -m.np.take_along_axis(m.nn.log_softmax(x), i[:, None], 1).mean(),
        X,
        A((3,), 0, 3, dtype="int32"),
    ),
    fun(
        "a Gaussian log density",
        lambda m, x, s: -0.5 * m.np.sum((x / s) ** 2 + 2 * m.np.log(s)),
        V,
        A((4,), 0.5, 2),
    ),
    fun(
        "Euler steps",
        lambda m, x: m.lax.fori_loop(0, 10, lambda _, y: y + 0.1 * m.np.stack([y[1], -m.np.sin(y[0])]), x),
        A((2,)),
    ),
    fun(
        "a power iteration",
        lambda m, w, x: m.lax.fori_loop(0, 5, lambda _, v: w @ v / m.np.linalg.norm(w @ v), x),
        A((4, 4), 0.2, 1),
        A((4,), 0.5, 1),
        tol=10,
    ),
    fun(
        "pairwise distances", lambda m, x: m.vmap(lambda a: m.vmap(lambda b: m.np.sum((a - b) ** 2))(x))(x), X
    ),
]
ROWS = [*TRANSFORMS, *NAMED, *CONTROL, *PROGRAMS]
