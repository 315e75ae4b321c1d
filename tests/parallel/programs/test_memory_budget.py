"""``jit(memory_budget=)`` on meshes: the budget is for the program of one device."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors

P = bf.PartitionSpec
LAYERS, WIDTH, ROWS = 6, 64, 1024


def loss(params, x):
    for w in params:
        x = bnp.tanh(x @ w)
    return (x**2).mean()


def update(params, x):
    value, grads = bf.value_and_grad(loss)(params, x)
    return [p - g for p, g in zip(params, grads, strict=True)], value


@pytest.fixture
def placed(eight):
    """Parameters on each of four devices, and rows sharded over them."""
    mesh = bf.make_mesh((4,), ("data",), devices=eight[:4])
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(LAYERS)]
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return bf.device_put(params, bf.NamedSharding(mesh, P())), bf.device_put(
        x, bf.NamedSharding(mesh, P("data"))
    )


@pytest.mark.slow
def test_the_peak_of_each_device_fits(placed):
    plain = bf.jit(update)
    peak = plain.lower(*placed).memory.peak_bytes
    step = bf.jit(update, memory_budget=int(0.8 * peak))
    memory = step.lower(*placed).memory
    assert memory.peak_bytes <= 0.8 * peak and memory.bought.default_peak_bytes == peak
    assert any("f32[256,64]" in d.label for d in memory.bought.dropped)  # a quarter of the rows
    for a, b in zip(bf.tree.leaves(step(*placed)), bf.tree.leaves(plain(*placed)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    with pytest.raises(errors.MemoryBudgetError):
        bf.jit(update, memory_budget="1KB")(*placed)


def test_a_mesh_that_is_not_there():
    """``bf.plan`` also plans within the budget; collectives are not recomputed."""
    fun = lambda params, x: update(params, bf.constrain(x, P("data")))
    mesh = bf.AbstractMesh((64,), ("data",))
    shapes = (
        [bf.ShapeDtypeStruct((WIDTH, WIDTH), np.float32)] * LAYERS,
        bf.ShapeDtypeStruct((64 * ROWS, WIDTH), np.float32),
    )
    plain = bf.plan(fun, mesh, *shapes)
    tight = bf.plan(bf.jit(fun, memory_budget=int(0.6 * plain.peak_bytes)), mesh, *shapes)
    assert tight.peak_bytes <= 0.6 * plain.peak_bytes
    assert tight.memory.bought.dropped and tight.cost.flops > plain.cost.flops
    count = lambda forecast: sum(s.name == "mesh_sums" for s in forecast.cost.steps)
    assert count(tight) == count(plain) > 0
