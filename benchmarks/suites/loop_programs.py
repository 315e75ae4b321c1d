"""Programs with loops, as one source for blufunc and JAX.

Each function takes the library and returns ``(fun, args)``: what a user would pass to ``jit``, and its arguments as
NumPy arrays. Only the library differs between two runs. ``loops.py`` times them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

Program = tuple[Callable, tuple]


def lorenz(lib: Any, shape: tuple[int, ...] = (), steps: int = 10_000) -> Program:
    """RK4 steps of Lorenz systems.

    Lorenz, J. Atmos. Sci. 20, 1963: a state of three numbers.
    """
    np_, lax = lib.numpy, lib.lax

    def slope(s):
        x, y, z = s[0], s[1], s[2]
        return np_.stack([10.0 * (y - x), x * (28.0 - z) - y, x * y - 8.0 / 3.0 * z])

    def step(_, s):
        h = 0.001
        a = slope(s)
        b = slope(s + h / 2 * a)
        c = slope(s + h / 2 * b)
        d = slope(s + h * c)
        return s + h / 6 * (a + 2 * b + 2 * c + d)

    state = np.random.default_rng(0).uniform(1, 2, (3, *shape)).astype(np.float32)
    return lambda s: lax.fori_loop(0, steps, step, s), (state,)


def pendulum(lib: Any, steps: int = 5_000) -> Program:
    """A while loop over numbers of rank 0, until the time is up."""
    np_, lax = lib.numpy, lib.lax

    def run(angle, speed, end):
        def body(s):
            t, q, p = s
            p = p - 0.001 * np_.sin(q)
            return t + 0.001, q + 0.001 * p, p

        return lax.while_loop(lambda s: s[0] < end, body, (np_.float32(0), angle, speed))

    return run, (np.float32(1.0), np.float32(0.0), np.float32(steps * 0.001))


def hmc(lib: Any, samples: int = 500, leaps: int = 10, n: int = 10) -> Program:
    """Hamiltonian Monte Carlo of a correlated normal, one chain (arXiv:1206.1901)."""
    np_, lax, random = lib.numpy, lib.lax, lib.random
    rng = np.random.default_rng(0)
    m = rng.normal(size=(n, n)).astype(np.float32)
    precision = (m @ m.T / n + np.eye(n)).astype(np.float32)

    def run(q, precision, seed):
        energy = lambda q: 0.5 * q @ (precision @ q)
        force = lib.grad(energy)

        def leap(_, s):
            q, p = s
            p = p - 0.05 * force(q)
            q = q + 0.1 * p
            return q, p - 0.05 * force(q)

        def sample(q, key):
            first, second = random.split(key)
            p = random.normal(first, q.shape)
            new, end = lax.fori_loop(0, leaps, leap, (q, p))
            before = energy(q) + 0.5 * (p * p).sum()
            after = energy(new) + 0.5 * (end * end).sum()
            taken = np_.log(random.uniform(second)) < before - after
            q = np_.where(taken, new, q)
            return q, (q, taken)

        keys = random.split(random.key(seed), samples)
        return lax.scan(sample, q, keys)[1]

    return run, (np.zeros(n, np.float32), precision, np.int32(3))


def _lstm(lib: Any, w: Any, u: Any, b: Any, xs: Any) -> Any:
    """Hidden states of an LSTM (Hochreiter & Schmidhuber, Neural Comput. 9, 1997)."""
    np_, lax = lib.numpy, lib.lax

    def cell(state, x):
        h, c = state
        i, f, g, o = np_.split(x @ w + h @ u + b, 4, axis=-1)
        c = lib.nn.sigmoid(f) * c + lib.nn.sigmoid(i) * np_.tanh(g)
        h = lib.nn.sigmoid(o) * np_.tanh(c)
        return (h, c), h

    zero = np_.zeros((xs.shape[1], u.shape[0]), xs.dtype)
    return lax.scan(cell, (zero, zero), xs)[1]


def _lstm_arguments(steps: int, batch: int, width: int) -> tuple:
    rng = np.random.default_rng(0)
    make = lambda *shape: (rng.normal(size=shape) / math.sqrt(width)).astype(np.float32)
    return make(width, 4 * width), make(width, 4 * width), make(4 * width), make(steps, batch, width)


def lstm(lib: Any, steps: int = 100, batch: int = 8, width: int = 64) -> Program:
    """Forward pass of an LSTM."""
    return functools.partial(_lstm, lib), _lstm_arguments(steps, batch, width)


def lstm_gradient(
    lib: Any, steps: int = 100, batch: int = 8, width: int = 64, dtype: str = "float32"
) -> Program:
    """Gradient of an LSTM in its weights."""
    loss = lambda w, u, b, xs: (_lstm(lib, w, u, b, xs).astype("float32") ** 2).mean()
    args = tuple(lib.numpy.asarray(a).astype(dtype) for a in _lstm_arguments(steps, batch, width))
    return lib.grad(loss, argnums=(0, 1, 2)), args


def decoder(lib: Any, tokens: int = 64, width: int = 128, heads: int = 4, vocab: int = 256) -> Program:
    """Greedy decoding by two layers with a key-value cache, in a ``fori_loop``."""
    np_, lax = lib.numpy, lib.lax
    head = width // heads
    rng = np.random.default_rng(0)
    make = lambda *shape: (rng.normal(size=shape) / math.sqrt(shape[0])).astype(np.float32)
    shapes = {
        "qkv": (width, 3 * width),
        "o": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    layers = [{name: make(*shape) for name, shape in shapes.items()} for _ in range(2)]

    def norm(x):
        return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    def run(params, table, first):
        def token(i, s):
            out, caches = s
            x = table[out[i]]
            new = []
            for p, (keys, values) in zip(params, caches, strict=True):
                q, k, v = np_.split(norm(x) @ p["qkv"], 3)
                keys = lax.dynamic_update_slice(keys, k.reshape(1, heads, head), (i, 0, 0))
                values = lax.dynamic_update_slice(values, v.reshape(1, heads, head), (i, 0, 0))
                scores = np_.einsum("hd,thd->ht", q.reshape(heads, head), keys) / math.sqrt(head)
                scores = np_.where(np_.arange(tokens) <= i, scores, -np_.inf)
                y = np_.einsum("ht,thd->hd", lib.nn.softmax(scores, axis=-1), values)
                x = x + y.reshape(width) @ p["o"]
                x = x + lib.nn.gelu(norm(x) @ p["up"]) @ p["down"]
                new.append((keys, values))
            best = np_.argmax(norm(x) @ table.T).astype(np_.int32)
            return out.at[i + 1].set(best), new

        caches = [(np_.zeros((tokens, heads, head)), np_.zeros((tokens, heads, head))) for _ in params]
        out = np_.zeros(tokens + 1, np_.int32).at[0].set(first)
        return lax.fori_loop(0, tokens, token, (out, caches))[0]

    return run, (layers, make(vocab, width), np.int32(7))


def beam_search(lib: Any, steps: int = 30, beams: int = 8, vocab: int = 500) -> Program:
    """Beam search over a table of transitions."""
    np_, lax = lib.numpy, lib.lax
    table = np.random.default_rng(0).normal(size=(vocab, vocab)).astype(np.float32)

    def run(table):
        log_p = lib.nn.log_softmax(table, axis=-1)

        def step(s, i):
            scores, last, paths = s
            best, which = lax.top_k((scores[:, None] + log_p[last]).reshape(-1), beams)
            source, token = which // vocab, which % vocab
            paths = paths[source].at[:, i].set(token)
            return (best, token, paths), None

        start = np_.where(np_.arange(beams) == 0, 0.0, -np_.inf).astype(np_.float32)
        init = (start, np_.zeros(beams, np_.int32), np_.zeros((beams, steps), np_.int32))
        return lax.scan(step, init, np_.arange(steps))[0]

    return run, (table,)


def returns(lib: Any, steps: int = 2_000, actors: int = 16) -> Program:
    """Generalized advantages (Schulman et al., arXiv:1506.02438), a scan from the end."""
    lax = lib.lax

    def run(rewards, values, done):
        def step(after, now):
            advantage, following = after
            reward, value, end = now
            delta = reward + 0.99 * following * (1 - end) - value
            advantage = delta + 0.99 * 0.95 * (1 - end) * advantage
            return (advantage, value), advantage

        zero = lib.numpy.zeros(actors)
        return lax.scan(step, (zero, zero), (rewards, values, done), reverse=True)[1]

    rng = np.random.default_rng(0)
    make = lambda: rng.normal(size=(steps, actors)).astype(np.float32)
    return run, (make(), make(), (rng.random((steps, actors)) < 0.01).astype(np.float32))


def _mlp(lib: Any, params: Any, x: Any) -> Any:
    (a, b), (c, d) = params
    return lib.numpy.tanh(x @ a + b) @ c + d


def _mlp_parameters(n: int, hidden: int) -> tuple:
    rng = np.random.default_rng(0)
    make = lambda *shape: (rng.normal(size=shape) / math.sqrt(shape[0])).astype(np.float32)
    return (make(n, hidden), np.zeros(hidden, np.float32)), (make(hidden, n), np.zeros(n, np.float32))


def neural_ode(lib: Any, steps: int = 100, n: int = 4, hidden: int = 32) -> Program:
    """Gradient through Euler steps of a small network (Chen et al., arXiv:1806.07366)."""

    def loss(params, x):
        end = lib.lax.fori_loop(0, steps, lambda i, x: x + 0.01 * _mlp(lib, params, x), x)
        return (end**2).sum()

    return lib.grad(loss), (_mlp_parameters(n, hidden), np.ones((8, n), np.float32))


def maml(lib: Any, inner: int = 10, tasks: int = 8, points: int = 10, n: int = 4) -> Program:
    """Gradient through gradient descent on a batch of tasks (arXiv:1703.03400)."""
    lax = lib.lax

    def loss(params, x, y):
        return ((_mlp(lib, params, x) - y) ** 2).mean()

    def adapted(params, x, y):
        def step(p, _):
            return lib.tree.map(lambda a, g: a - 0.1 * g, p, lib.grad(loss)(p, x, y)), None

        return loss(lax.scan(step, params, None, length=inner)[0], x, y)

    outer = lambda params, xs, ys: lib.vmap(adapted, (None, 0, 0))(params, xs, ys).mean()
    rng = np.random.default_rng(0)
    make = lambda: rng.normal(size=(tasks, points, n)).astype(np.float32)
    return lib.grad(outer), (_mlp_parameters(n, 32), make(), make())


def descent(lib: Any, steps: int = 1_000, n: int = 20) -> Program:
    """Logistic regression by gradient descent in a ``fori_loop``."""
    np_, lax = lib.numpy, lib.lax
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, n)).astype(np.float32)
    y = (rng.random(100) < 0.5).astype(np.float32)

    def run(w, x, y):
        loss = lambda w: (np_.logaddexp(0, x @ w) - y * (x @ w)).mean()
        return lax.fori_loop(0, steps, lambda i, w: w - 0.1 * lib.grad(loss)(w), w)

    return run, (np.zeros(n, np.float32), x, y)


def set_elements(lib: Any, n: int, rounds: int = 1_000) -> Program:
    """An array of n elements, updated one at a time in a ``while_loop``."""

    def run(x):
        body = lambda s: (s[0] + 1, s[1].at[s[0] % n].set(s[0] * 1.0))
        return lib.lax.while_loop(lambda s: s[0] < rounds, body, (lib.numpy.int32(0), x))[1]

    return run, (np.zeros(n, np.float32),)


def sieve(lib: Any, n: int = 1_000) -> Program:
    """Collatz lengths of the first n numbers: a while loop under ``vmap``."""
    np_, lax = lib.numpy, lib.lax

    def length(x):
        def body(s):
            k, x = s
            return k + 1, np_.where(x % 2 == 0, x // 2, 3 * x + 1)

        return lax.while_loop(lambda s: s[1] > 1, body, (np_.int32(0), x))[0]

    return lib.vmap(length), (np.arange(1, n + 1, dtype=np.int32),)


def branches(lib: Any, steps: int = 2_000) -> Program:
    """A scan whose steps take one of three branches."""
    np_, lax = lib.numpy, lib.lax
    cases = (lambda x: np_.sin(x) + 1, lambda x: 0.5 * x, lambda x: np_.cumsum(x) / 10)

    def run(x, kinds):
        return lax.scan(lambda x, k: (lax.switch(k, cases, x), x[0]), x, kinds)

    return run, (np.ones(16, np.float32), np.random.default_rng(0).integers(0, 3, steps).astype(np.int32))


PROGRAMS: dict[str, Callable[[Any], Program]] = {
    "Lorenz, one system": lorenz,
    "Lorenz, 256 systems": functools.partial(lorenz, shape=(256,), steps=2_000),
    "pendulum, while": pendulum,
    "Hamiltonian Monte Carlo": hmc,
    "LSTM": lstm,
    "LSTM, gradient": lstm_gradient,
    "decoder with a cache": decoder,
    "beam search": beam_search,
    "generalized advantages": returns,
    "neural ODE, gradient": neural_ode,
    "MAML": maml,
    "logistic regression": descent,
    "set an element, of 1e3": functools.partial(set_elements, n=1_000),
    "set an element, of 1e5": functools.partial(set_elements, n=100_000),
    "set an element, of 1e6": functools.partial(set_elements, n=1_000_000),
    "Collatz, vmap of while": sieve,
    "switch in a scan": branches,
}

GPU_PROGRAMS: dict[str, Callable[[Any], Program]] = {
    "Lorenz, 1,024 systems, 10,000 steps": functools.partial(lorenz, shape=(1_024,)),
    "LSTM 512 x 64 x 512, bfloat16, gradient": functools.partial(
        lstm_gradient, steps=512, batch=64, width=512, dtype="bfloat16"
    ),
    **PROGRAMS,
}
"""Larger ones first."""
