"""Hand-written attention on a mesh: recognised before partitioning."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import nn
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cuda.dispatch import Library
from blufunc.kernels.rewrites.select_variant import select_variants
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.partition.partition import localise
from tests.parallel.lockstep import P, divided

B, T, N, H = 4, 24, 4, 16
MESHES = [
    ((2,), ("data",), P("data")),
    ((2,), ("model",), P(None, None, "model")),
    ((2, 2), ("data", "model"), P("data", None, "model")),
]


def loss(q, k, v):
    scores = bnp.einsum("bqhd,bkhd->bhqk", q, k) / 4
    scores = bnp.where(bnp.tril(bnp.ones((T, T), bool)), scores, -bnp.inf)
    out = bnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores.astype("float32")).astype(v.dtype), v)
    return (out.astype("float32") ** 2).sum()


@pytest.mark.parametrize("shape, axes, spec", MESHES)
def test_batch_and_heads_are_divided(shape, axes, spec):
    """The loss is the only collective; values and gradients are those of one device."""
    mesh = AbstractMesh(shape, axes)
    rng = np.random.default_rng(0)
    args = [bnp.asarray(rng.standard_normal((B, T, N, H)), "bfloat16") for _ in range(3)]
    step = bf.jit(bf.value_and_grad(loss, (0, 1, 2)))
    jaxpr, notes = select_variants(step.trace(*args).jaxpr, Library("sm_90a"))
    whole, local = divided(simplify(jaxpr), args, [spec] * 3, mesh)
    value, grads = step(*args)
    for got, want in zip(whole, [value, *grads], strict=True):
        want = np.asarray(want).astype(np.float64)
        np.testing.assert_allclose(np.asarray(got).astype(np.float64), want, atol=2e-2 * abs(want).max())
    sizes = dict(zip(axes, shape, strict=True))
    share = (B // sizes.get("data", 1), T, N // sizes.get("model", 1), H)
    calls = {e.prim.name: e for e in local.eqns if e.prim.name.startswith("attention")}
    assert sorted(calls) == ["attention", "attention_grad"] and len(notes) == 2
    assert all(e.invars[0].aval.shape == share for e in calls.values())


def test_where_there_is_no_kernel_what_was_written_is_divided():
    mesh = AbstractMesh((2,), ("data",))
    avals = [bf.ShapeDtypeStruct((B, T, N, H), "bfloat16")] * 3
    traced = bf.jit(bf.grad(loss)).trace(*avals)
    assert any(e.prim.name == "either" for e in traced.jaxpr.eqns)
    made = bf.devices("cpu")[0].backend.chosen(traced.jaxpr)
    local, _ = localise(made, [NamedSharding(mesh, P("data"))] * 3, mesh)
    assert not any(e.prim.name in ("either", "attention") for e in local.eqns)


def test_on_a_mesh_of_simulated_devices(eight):
    """Arrays that lie on it: what runs is what was written, and what is shown of it."""
    rng = np.random.default_rng(0)
    args = [bnp.asarray(rng.standard_normal((B, T, N, H)), "bfloat16") for _ in range(3)]
    sharding = NamedSharding(bf.make_mesh((2,), ("data",)), P("data"))
    step = bf.jit(bf.grad(loss, (0, 1, 2)))
    there = [bf.device_put(x, sharding) for x in args]
    for got, want in zip(step(*there), step(*args), strict=True):
        want = np.asarray(want).astype(np.float64)
        np.testing.assert_allclose(np.asarray(got).astype(np.float64), want, atol=1e-2 * abs(want).max())
    assert not any(op.startswith("attention") for s in step.lower(*there).cost.steps for op in s.ops)


def test_plans_for_many_devices_have_the_kernels():
    step = bf.shard(
        bf.grad(loss, (0, 1, 2)), AbstractMesh((2,), ("data",)), (P("data"),) * 3, (P("data"),) * 3
    )
    found = bf.plan(step, AbstractMesh((2,), ("data",)), *[bf.ShapeDtypeStruct((B, T, N, H), "bfloat16")] * 3)
    ops = [op for s in found.cost.steps for op in s.ops]
    assert {"attention", "attention_grad"} <= set(ops)
    assert len(bf.collectives(step, *[bf.ShapeDtypeStruct((B, T, N, H), "bfloat16")] * 3)) == 0
