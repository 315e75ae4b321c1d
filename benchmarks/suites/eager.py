"""Programs without ``jit`` on the CPU, against JAX.

    python -m benchmarks.suites.eager [--only LSTM]

One source for both libraries, the same arguments, results compared ahead of timing. Loops are Python loops, so a row
measures the cost of an operation, of its derivative and of its transposition. The geometric mean comes last.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness.gpu_tables import geometric_mean
from benchmarks.harness.timing import report
from benchmarks.suites.loop_programs import Program
from benchmarks.suites.loops import check, compared


def _normal(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(len(shape) + sum(shape))
    return (rng.normal(size=shape) / math.sqrt(shape[-2] if len(shape) > 1 else 1)).astype(np.float32)


def lstm(lib: Any, batch: int = 8, width: int = 64, steps: int = 200) -> Program:
    """Loss of an LSTM, whose steps are a Python loop."""
    np_ = lib.numpy

    def loss(params, xs):
        w, u, b = params
        h = c = np_.zeros((batch, width))
        for t in range(steps):
            i, f, g, o = np_.split(xs[t] @ w + h @ u + b, 4, axis=-1)
            c = lib.nn.sigmoid(f) * c + lib.nn.sigmoid(i) * np_.tanh(g)
            h = lib.nn.sigmoid(o) * np_.tanh(c)
        return (h**2).mean()

    params = _normal(width, 4 * width), _normal(width, 4 * width), np.zeros(4 * width, np.float32)
    return loss, (params, _normal(steps, batch, width))


def rnn(lib: Any, batch: int = 8, width: int = 64, steps: int = 200) -> Program:
    """Loss of a plain recurrence."""

    def loss(params, xs):
        w, u = params
        h = lib.numpy.zeros((batch, width))
        for t in range(steps):
            h = lib.numpy.tanh(xs[t] @ w + h @ u)
        return (h**2).mean()

    return loss, ((_normal(width, width), _normal(width, width)), _normal(steps, batch, width))


def mlp(lib: Any, depth: int = 8, width: int = 64) -> Program:
    """Loss of a classifier of many small layers."""
    np_ = lib.numpy

    def loss(params, x, y):
        for layer in params:
            x = np_.maximum(x @ layer["w"] + layer["b"], 0)
        logits = x - x.max(-1, keepdims=True)
        return -(logits - np_.log(np_.exp(logits).sum(-1, keepdims=True)))[np_.arange(32), y].mean()

    params = [{"w": _normal(width, width), "b": np.zeros(width, np.float32)} for _ in range(depth)]
    return loss, (params, _normal(32, width), np.arange(32, dtype=np.int32))


def pointwise(lib: Any, n: int = 1_000, rounds: int = 100) -> Program:
    """Leapfrog steps of a pendulum, operation by operation."""

    def run(q, p):
        for _ in range(rounds):
            p = p - 0.01 * lib.numpy.sin(q)
            q = q + 0.01 * p
        return q, p

    return run, (_normal(n), _normal(n))


def indexing(lib: Any, n: int = 50) -> Program:
    """Reads, reductions and updates of the rows of a matrix."""

    def run(x):
        for i in range(n):
            row = x[i] - x[i - 1].mean()
            x = x.at[i].set(row / (1 + lib.numpy.abs(row).sum()))
        return x

    return run, (_normal(n, 16),)


def adam(lib: Any, n: int = 24) -> Program:
    """A step of Adam over a tree of parameters."""
    np_, tree = lib.numpy, lib.tree

    def step(params, grads, m, v):
        m = tree.map(lambda a, g: 0.9 * a + 0.1 * g, m, grads)
        v = tree.map(lambda a, g: 0.999 * a + 0.001 * g * g, v, grads)
        return tree.map(lambda p, a, b: p - 1e-3 * a / (np_.sqrt(b) + 1e-8), params, m, v), m, v

    params = {f"layer{i}": _normal(32, 32) for i in range(n)}
    return step, (params, params, params, tree_of_squares(params))


def tree_of_squares(params: dict) -> dict:
    """Second moments that are not negative."""
    return {k: x * x for k, x in params.items()}


def distances(lib: Any) -> Program:
    """A small function of pairs, under two ``vmap``."""
    np_ = lib.numpy
    distance = lambda a, b: np_.sqrt(((a - b) ** 2).sum() + 1e-6)
    return lib.vmap(lib.vmap(distance, (None, 0)), (0, None)), (_normal(32, 3), _normal(16, 3))


def curvature(lib: Any, width: int = 32) -> Program:
    """A product with the Hessian: forward over reverse mode."""

    def run(params, x, v):
        loss = lambda p: (lib.numpy.tanh(x @ p[0]) @ p[1]).mean()
        return lib.jvp(lib.grad(loss), (params,), (v,))[1]

    params = _normal(width, width), _normal(width, width)
    return run, (params, _normal(8, width), params)


def gradients(lib: Any, program: Callable, argnums: Any = 0, **sizes: int) -> Program:
    """The gradient of another program, by default in its first argument."""
    loss, args = program(lib, **sizes)
    return lib.grad(loss, argnums), args


def per_example(lib: Any) -> Program:
    """Gradients of single examples: ``vmap`` of ``grad``."""
    loss = lambda p, x: (lib.numpy.tanh(x @ p[0]) @ p[1]).sum()
    return lib.vmap(lib.grad(loss), (None, 0)), ((_normal(16, 16), _normal(16, 16)), _normal(32, 16))


PROGRAMS: dict[str, Callable[[Any], Program]] = {
    "LSTM 8 x 64": lstm,
    "LSTM 8 x 64, gradient": functools.partial(gradients, program=lstm),
    "LSTM 64 x 512, gradient": functools.partial(gradients, program=lstm, batch=64, width=512),
    "tanh RNN 8 x 64, gradient": functools.partial(gradients, program=rnn),
    "tanh RNN 64 x 512, gradient": functools.partial(gradients, program=rnn, batch=64, width=512),
    "tanh RNN 64 x 512, gradient in inputs": functools.partial(
        gradients, program=rnn, argnums=(0, 1), batch=64, width=512
    ),
    "classifier of 8 layers, gradient": functools.partial(gradients, program=mlp),
    "pendulums, pointwise": pointwise,
    "pendulums, gradient": lambda lib: gradients(lib, _summed),
    "rows of a matrix": indexing,
    "Adam over 24 arrays": adam,
    "vmap of vmap": distances,
    "Hessian-vector product": curvature,
    "gradients of examples": per_example,
}


def _summed(lib: Any) -> Program:
    run, args = pointwise(lib)
    return lambda q, p: (run(q, p)[0] ** 2).mean(), args


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="the programs with this in their names")
    parser.add_argument("--repeats", type=int, default=5, help="blocks of each side")
    options = parser.parse_args()
    import jax

    import blufunc

    names = [name for name in PROGRAMS if options.only in name]
    pairs = {name: [PROGRAMS[name](lib) for lib in (blufunc, jax)] for name in names}
    rows = [compared(name, pair, options.repeats, check, jitted=False) for name, pair in pairs.items()]
    print(f"geometric mean {geometric_mean([r['ratio'] for r in rows]):.3f}")
    report("eager", rows)


if __name__ == "__main__":
    main()
