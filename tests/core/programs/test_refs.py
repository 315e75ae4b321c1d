"""Refs: cells that programs carry."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, ref
from blufunc.experimental import random as stateful


def test_reading_and_writing():
    r = bf.new_ref(bnp.zeros(3))
    r[0] = 1.0
    r[1:] += 2.0
    r.addupdate(..., 1.0)
    assert r[...].tolist() == [2, 3, 3] and r.shape == (3,) and r.dtype == "float32"
    assert ref.swap(r, 0, 9.0) == 2 and ref.get(r).tolist() == [9, 3, 3]
    r.at[1:][0] = 5
    assert ref.get(r, bf.ds(1, 2)).tolist() == [5, 3]
    assert bf.freeze(r).tolist() == [9, 5, 3]
    with pytest.raises(errors.ArgumentError, match="after freeze"):
        r[0]


def test_jit_carries_arguments_and_closures():
    total, traces = bf.new_ref(0), []

    @bf.jit
    def step(r, x):
        traces.append(1)
        total[...] += 1
        r[...] = r[...] * 2 + x
        return r[0] + total[...]

    r = bf.new_ref(bnp.ones(2))
    assert [float(step(r, 1.0)) for _ in range(3)] == [4.0, 9.0, 18.0]
    assert r[...].tolist() == [15, 15] and total[...] == 3
    before = len(traces)
    step(r, 2.0)
    assert len(traces) == before
    assert bf.jit(lambda i: r[bf.ds(i, 1)])(1).shape == (1,)
    assert bf.jit(lambda x: step(r, x) + step(r, x))(0.0) == 4 * 32 + 2 * 32 + 5 + 6


def control(x):
    cell = bf.new_ref(x)

    def triple():
        cell[...] = cell[...] * 3

    def add(i, total):
        cell.addupdate(..., 1.0)
        return total + cell[...] * i

    lax.cond(x > 0, triple, lambda: None)
    total = lax.fori_loop(0, 3, add, 0.0)
    lax.while_loop(lambda i: i < 2, lambda i: add(i, i * 0.0) * 0 + i + 1, 0.0, max_steps=3)
    _, seen = lax.scan(lambda c, y: (c, ref.swap(cell, ..., y)), 0, bnp.arange(2.0))
    lax.switch(1, [lambda: None, lambda: cell.addupdate(..., 10.0)])
    return cell[...] + total + seen.sum()


def by_hand(x):
    cell = 3 * x if x > 0 else x
    total = sum((cell + i + 1) * i for i in range(3))
    return 1 + 10 + total + (cell + 5) + 0


@pytest.mark.parametrize("x", [2.0, -1.0])
def test_loops_and_branches(x):
    assert control(x) == bf.jit(control)(x) == by_hand(x)
    slope = 12.0 if x > 0 else 4.0
    assert bf.grad(control)(x) == bf.jit(bf.grad(control))(x) == slope
    np.testing.assert_allclose(bf.vmap(control)(bnp.array([x, x + 0.5])), [by_hand(x), by_hand(x + 0.5)])


def test_grad_under_jit_reads_a_cell():
    scale, calls = bf.new_ref(3.0), bf.new_ref(0)

    def f(x):
        calls[...] += 1
        return lax.fori_loop(0, 2, lambda i, y: y * scale[...], x) * x

    for slope in (bf.grad(f), bf.jit(bf.grad(f)), bf.jit(bf.value_and_grad(f))):
        scale[...] = 3.0
        assert np.ravel(slope(2.0))[-1] == 36
        scale[...] = 1.0
        assert np.ravel(slope(2.0))[-1] == 4
    assert calls[...] == 6


def test_uses_that_nothing_carries():
    r = bf.new_ref(bnp.arange(3))
    with pytest.raises(errors.LeakedTracerError, match="written into a Ref from outside"):
        bf.vmap(lambda x: ref.set(r, 0, x))(bnp.arange(2))
    with pytest.raises(errors.UnsupportedError, match="does not carry it"):
        bf.checkpoint(lambda x: x * r[0])(1.0)
    with pytest.raises(errors.UnsupportedError, match="where an array is wanted"):
        bnp.sin(r)
    with pytest.raises(errors.DtypeError, match="written into a Ref"):
        r[0] = 1.5
    with pytest.raises(errors.UnsupportedError, match="static or donated"):
        bf.jit(lambda n, c: c[n], static_argnums=0)(1, r)


def test_generator_with_state():
    rng, draw = stateful.stateful_rng(0), bf.jit(lambda g: g.normal(size=2))
    samples = [rng.normal(size=2), draw(rng), draw(rng)]
    keys = [bf.random.fold_in(bf.random.key(0), i) for i in range(3)]
    for x, key in zip(samples, keys, strict=True):
        np.testing.assert_allclose(x, bf.random.normal(key, (2,)), rtol=1e-6)
    assert rng.integers(5, size=(2, 3)).shape == (2, 3) and rng.uniform(bnp.zeros(4), 1).shape == (4,)
    assert len({int(g.integers(2**30)) for g in rng.spawn(3)}) == 3
    with pytest.raises(errors.ShapeError, match="split"):
        rng.split(2).key()
