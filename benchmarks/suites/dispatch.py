"""Dispatch cost of eager operations, jit calls and grad, against JAX on the CPU.

Arrays have 8 elements, so that arithmetic is negligible. Ratios below 1 mean that blufunc is faster.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import blufunc as bf
import blufunc.numpy as bnp
from benchmarks.harness.timing import report, row, together

MANY = 148
"""Arrays with the shapes of GPT-2's parameters."""


def small(np_like):
    """Function of a few operations, in either library."""
    return lambda x: np_like.sum(np_like.sin(x) * 2.0 + x)


class Descent:
    """Training step: each call donates the parameters returned by the previous one."""

    def __init__(self, jit, x):
        names = [f"layer{i}" for i in range(MANY)]
        self.step = jit(lambda params, grads: {n: params[n] - grads[n] for n in names}, donate_argnums=0)
        self.params, self.grads = ({n: x * i for i, n in enumerate(names)} for _ in range(2))

    def __call__(self) -> None:
        self.params = self.step(self.params, self.grads)


def main() -> None:
    """Print the table."""
    host = np.random.default_rng(0).normal(size=8).astype(np.float32)
    x, jx = bnp.asarray(host), jnp.asarray(host)
    f, jf = bf.jit(small(bnp)), jax.jit(small(jnp))
    g, jg = bf.grad(small(bnp)), jax.grad(small(jnp))
    h, jh = bf.jit(bf.grad(small(bnp))), jax.jit(jax.grad(small(jnp)))
    tree, jtree = {"a": x, "b": (x, x)}, {"a": jx, "b": (jx, jx)}
    t, jt = (
        bf.jit(lambda p: p["a"] + p["b"][0] * p["b"][1]),
        jax.jit(lambda p: p["a"] + p["b"][0] * p["b"][1]),
    )
    many, jmany = Descent(bf.jit, x), Descent(jax.jit, jx)
    cases = [
        ("eager add of two arrays", lambda: x + x, lambda: jx + jx, 2000),
        ("eager multiply by a Python scalar", lambda: x * 2.0, lambda: jx * 2.0, 2000),
        ("eager index x[2]", lambda: x[2], lambda: jx[2], 500),
        ("cached jit call", lambda: f(x), lambda: jf(jx), 2000),
        ("cached jit call on a pytree", lambda: t(tree), lambda: jt(jtree), 2000),
        (f"cached jit call on {2 * MANY} arrays, half donated", many, jmany, 200),
        ("grad of a small function", lambda: g(x), lambda: jg(jx), 50),
        ("cached jit of grad", lambda: h(x), lambda: jh(jx), 1000),
    ]
    report("dispatch", [row(name, *(1e6 * t for t in together(a, b, calls))) for name, a, b, calls in cases])


if __name__ == "__main__":
    main()
