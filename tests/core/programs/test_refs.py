"""Refs: cells that programs carry."""

import threading

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


def test_jit_keeps_its_options():
    step = bf.jit(lambda c, x: c[...] + x, max_traces=2)
    r = bf.new_ref(bnp.ones(2))
    step(r, 1.0), step(r, 2.0)
    assert step.trace_count == 1
    step(bnp.ones(2), 1.0), step(bnp.ones(2), 2.0)  # without cells
    step(r, 3.0)
    assert step.trace_count == 2
    with pytest.raises(errors.RetraceError, match="2 times already"):
        step(bf.new_ref(bnp.ones(3)), 1.0)
    step.clear_cache()
    with pytest.raises(errors.RetraceError):
        step(r, 1.0)
    with pytest.raises(errors.MemoryBudgetError):
        bf.jit(lambda x: bnp.sin(x) + r[0], memory_budget=64)(bnp.ones(1000))
    mesh = bf.make_mesh((1,), ("a",))
    for name in ("in_shardings", "out_shardings"):
        with pytest.raises(errors.UnsupportedError, match="Refs, and has in_shardings or out"):
            bf.jit(lambda x: r[...] + x, **{name: bf.NamedSharding(mesh, bf.P())})(bnp.ones(2))


def test_shapes_with_cells():
    own, closed = bf.new_ref(bnp.arange(3.0)), bf.new_ref(bnp.arange(2.0))

    def f(r, x):
        r[...] *= x
        closed[0] = x
        return r[...] + closed[1]

    jitted = bf.jit(f)
    for shapes in (bf.eval_shape(f, own, 2.0), jitted.eval_shape(own, 2.0)):
        assert (shapes.shape, shapes.dtype) == ((3,), np.float32)
    assert (own[...].tolist(), closed[...].tolist()) == ([0, 1, 2], [0, 1])  # nothing ran
    jitted(own, 3.0)
    jitted.eval_shape(own, 3.0)
    assert (own[...].tolist(), closed[...].tolist(), jitted.trace_count) == ([0, 3, 6], [3, 1], 1)


def test_only_written_cells_are_results():
    read, written, unused = (bf.new_ref(bnp.arange(3.0)) for _ in range(3))

    def step(c, x):
        written[0] += read[1] + c
        return c + read[1], x

    calls = {
        "jit": lambda: bf.jit(lambda r: step(r[1], 0))(read),
        "scan": lambda: lax.scan(step, 1.0, bnp.arange(2.0)),
        "jit of scan": bf.jit(lambda: lax.scan(step, 1.0, bnp.arange(2.0))),
        "while": lambda: lax.while_loop(lambda c: c < 3 * read[1], lambda c: step(c, 0)[0], 1.0, max_steps=4),
        "cond": lambda: lax.cond(read[1] > 0, lambda: step(1.0, 0)[0], lambda: unused[0]),
        "switch": lambda: lax.switch(1, [lambda: unused[0], lambda: step(1.0, 0)[0]]),
    }
    for name, call in calls.items():
        before = read[...], unused[...]
        written[...] = 0
        call()
        assert read[...] is before[0] and unused[...] is before[1], name
        assert written[...].tolist() == [5 if name in ("scan", "jit of scan", "while") else 2, 0, 0], name
    with pytest.raises(errors.UnsupportedError, match="cond_fun of while_loop writes"):
        lax.while_loop(lambda c: ref.swap(read, 0, c) < 3, lambda c: c + 1, 0.0)


def test_cells_keep_their_values_in_other_threads():
    cell, seen = bf.new_ref(1.0), []

    def step(c, x):
        cell[...] = c
        other = threading.Thread(target=lambda: seen.append(float(cell[...])))
        other.start()
        other.join()
        return c + x, cell[...]

    bf.jit(lambda: lax.scan(step, 2.0, bnp.ones(2)))()
    assert seen and set(seen) == {1.0} and cell[...] == 3


@pytest.mark.parametrize("loop", ["jit", "scan", "cond"])
def test_traces_do_not_depend_on_the_number_of_cells(loop):
    cells, traces = [bf.new_ref(float(i)) for i in range(6)], []

    def add(*_):
        traces.append(1)
        for c in cells:
            c[...] += 1
        return 0, None

    run = {
        "jit": bf.jit(add),
        "scan": lambda: lax.scan(add, 0, None, length=1),
        "cond": lambda: lax.cond(bnp.array(True), add, lambda: (0, None)),
    }[loop]
    run()
    assert [float(c[...]) for c in cells] == [1, 2, 3, 4, 5, 6] and len(traces) == 3


@pytest.mark.parametrize("n_cells", [1, 5])
def test_traces_of_nested_loops(n_cells):
    cells, traces = [bf.new_ref(0) for _ in range(n_cells)], [0, 0, 0]

    def loop(depth):
        def body(i, carry):
            traces[depth] += 1
            if depth < 2:
                lax.fori_loop(0, 2, loop(depth + 1), 0)
            else:
                for c in cells:
                    c[...] += 1
            return carry

        return body

    lax.fori_loop(0, 2, loop(0), 0)
    assert traces == [3, 6, 10] and all(c[...] == 8 for c in cells)


def test_in_place():
    cell = bf.new_ref(0)
    step = bf.jit(lambda: cell.addupdate(..., 1))
    for _ in range(2):
        with bf.disable_jit():
            step()
            lax.fori_loop(0, 2, lambda i, c: (step(), c)[1], 0)
        step()
    assert cell[...] == 8


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
