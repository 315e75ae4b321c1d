"""Cotangents of slices, joined outside of programs."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc.testing import check_grads
from blufunc.transforms.autodiff.slice_cotangents import joined

SHAPE = (6, 4)
LAYOUTS = {  # windows as (starts, shape), and the operations that join them
    "all rows": ([((i, 0), (1, 4)) for i in range(6)], ["concatenate"]),
    "all columns": ([((0, i), (6, 1)) for i in range(4)], ["concatenate"]),
    "one row": ([((2, 0), (1, 4))], ["pad"]),
    "two rows, apart": ([((1, 0), (1, 4)), ((4, 0), (2, 4))], ["concatenate"]),
    "the whole": ([((0, 0), (6, 4))], []),
    "the whole and a row": ([((0, 0), (6, 4)), ((3, 0), (1, 4))], ["pad", "add_any"]),
    "elements of a row": ([((3, i), (1, 1)) for i in range(4)], ["concatenate", "pad"]),
    "elements of a grid": ([((i, j), (1, 1)) for i in range(6) for j in range(4)], ["concatenate"] * 7),
    "overlapping": ([((0, 0), (5, 4)), ((1, 0), (5, 4))], ["pad", "pad", "add_any"]),
    "rows, and overlapping pairs": (
        [((i, 0), (1, 4)) for i in range(6)] + [((i, 0), (2, 4)) for i in (0, 2, 4)],
        ["concatenate", "concatenate", "add_any"],
    ),
    "blocks": ([((i, j), (3, 2)) for i in (0, 3) for j in (0, 2)], ["concatenate"] * 3),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_joined_is_the_sum_of_padded_windows(name):
    windows, operations = LAYOUTS[name]
    rng = np.random.default_rng(0)
    cts = [rng.normal(size=size).astype(np.float32) for _, size in windows]
    expected = np.zeros(SHAPE, np.float32)
    for ((i, j), (n, m)), ct in zip(windows, cts, strict=True):
        expected[i : i + n, j : j + m] += ct
    join = lambda *cts: joined(dict(zip(windows, cts, strict=True)), SHAPE)
    np.testing.assert_allclose(join(*map(bnp.asarray, cts)), expected, rtol=1e-6)
    found = [e.prim.name for e in bf.make_jaxpr(join)(*cts).eqns if e.prim.name != "broadcast_in_dim"]
    assert sorted(found) == sorted(operations)


FUNCTIONS = {
    "rows of a recurrence": lambda x: sum((x[i] * x[i - 1]).sum() for i in range(6)),
    "a row read twice": lambda x: (x[2] * bnp.sin(x[2])).sum() + x[0].sum(),
    "split": lambda x: sum((p**k).sum() for k, p in enumerate(bnp.split(x, 3), 1)),
    "neighbours": lambda x: (x[1:] * x[:-1] ** 2).sum() + (x[:, 1:] * x[:, :-1]).sum(),
    "elements": lambda x: x[0, 0] * x[5, 3] + x[2, 1] ** 3,
    "strided": lambda x: (x[::2] * x[1::2]).sum() + x[3].sum(),
    "empty": lambda x: x[2:2].sum() + x[1].sum(),
    "the array, too": lambda x: (x * x).sum() + x[1].sum() * x[1, 2],
    "loop": lambda x: bf.lax.fori_loop(0, 3, lambda i, c: c * x[2, 1], x[0, 0]) * x[1, 1],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_outside_of_programs_are_those_of_programs(name):
    x = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
    f = FUNCTIONS[name]
    eager = bf.grad(f)(x)
    np.testing.assert_allclose(eager, bf.jit(bf.grad(f))(x), rtol=1e-5, atol=1e-6)
    check_grads(f, (x,), order=2, modes=("rev",))
    batch = np.stack([x, 2 * x])
    np.testing.assert_allclose(bf.vmap(bf.grad(f))(batch)[0], eager, rtol=1e-5, atol=1e-6)


def test_a_recurrence_adds_no_padded_steps(monkeypatch):
    padded = []
    impl = bf.lax.pad_p.impl
    monkeypatch.setattr(bf.lax.pad_p, "impl", lambda *a, **k: padded.append(1) or impl(*a, **k))

    def loss(xs):
        h = xs[0]
        for t in range(1, 40):
            h = bnp.tanh(h + xs[t])
        return h.sum()

    bf.grad(loss)(np.ones((40, 3), np.float32))
    assert not padded
