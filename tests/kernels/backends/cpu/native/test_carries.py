"""Native loops whose carries share memory, or have none: each was wrong once."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.config import config
from blufunc.kernels.backends.cpu import toolchain

pytestmark = pytest.mark.skipif(toolchain.find() is None, reason="this machine has no C++ compiler")

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def aliases(x):
    """Two carries become one value under two names, and then one of them is updated."""

    def body(i, c):
        a, b, total = c
        b = b.at[i].add(1)
        return b, lax.optimization_barrier(b), total.at[i].set(a[i] + b[i])

    return lax.fori_loop(0, 3, body, (x, x + 1, x * 2))


def passed_through_under_another_name(x):
    def body(i, c):
        a, _, total = c
        return a, lax.optimization_barrier(a), total + a

    once = lax.fori_loop(0, 2, body, (x, x + 1, x))
    return lax.fori_loop(0, 3, lambda i, c: (c[0].at[i].set(c[1][i] + i), c[1], c[2] + c[0]), once)


def only_an_alias(x):
    return lax.fori_loop(0, 3, lambda i, c: lax.optimization_barrier(bnp.sin(c) + 1), x[0, 0])


def constants_through_barriers(x):
    def body(i, c):
        y, _ = lax.optimization_barrier((3.0, c[0]))
        y, x = lax.optimization_barrier((y, c[0]))
        return x * 0.1 + y, y

    return lax.fori_loop(0, 3, body, (x, np.float32(1)))


def empty_beside_others(x):
    """An empty carry has no memory, and so perhaps the address of another."""

    def outer(i, c):
        swap = lambda i, c: (bnp.tanh(c[0]), bnp.tanh(c[1]), bnp.sin(c[2]) + 1)
        z, y, w = lax.fori_loop(0, 3, swap, (*c, c[1] * 2))
        z, y, w = lax.fori_loop(0, 1, swap, (z, y + w, w))
        return z, y + w.sum()

    return lax.fori_loop(0, 3, outer, (bnp.zeros((0, 3)), x))


PROGRAMS = {
    f.__name__: f
    for f in (
        aliases, passed_through_under_another_name, only_an_alias, constants_through_barriers,
        empty_beside_others,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_carries(name, monkeypatch):
    results = {}
    for compiler in ("never", "always"):
        monkeypatch.setattr(config, "host_compiler", compiler)
        monkeypatch.setattr(config, "check", True)
        results[compiler] = bf.tree.leaves(bf.jit(lambda x: PROGRAMS[name](x))(X))
    for got, want in zip(results["always"], results["never"], strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5)
