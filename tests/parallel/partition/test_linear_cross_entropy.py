"""``nn.linear_cross_entropy`` of sharded tokens, or of a sharded weight."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax, nn
from blufunc.parallel.mesh.mesh import AbstractMesh
from tests.parallel.lockstep import P, check, collectives

T, C, V = 4, 6, 12


def operands(B, seed=0):
    rng = np.random.default_rng(seed)
    x, weight, bias = (rng.normal(size=s).astype(np.float32) for s in ((B, T, C), (V, C), (V,)))
    return [x, weight, bias, rng.integers(-1, V, (B, T)).astype(np.int32)]


def step(reduction):
    def loss(x, weight, bias, labels):
        options = {"bias": bias, "ignore_index": -1, "z_loss": 0.1, "chunk": 3, "reduction": reduction}
        return nn.linear_cross_entropy(x, weight, labels, **options).mean()

    return lambda *args: bf.value_and_grad(loss, argnums=(0, 1, 2))(*args)


# mesh, layouts of x, weight, bias and labels, and the collectives of the mean
CASES = {
    "data": ((2,), [P("a"), P(), P(), P("a")], {"psum_invariant": 4}),
    "data and sequence": ((2, 2), [P("a", "b"), P(), P(), P("a", "b")], {"psum_invariant": 4}),
    "sequence": ((2,), [P(None, "a"), P(), P(), P(None, "a")], {"psum_invariant": 4}),
    "data and FSDP": (
        (2,),
        [P("a"), P("a"), P(), P("a")],
        {"all_gather": 1, "psum_scatter": 1, "psum_invariant": 3},
    ),
    "vocabulary": ((2,), [P(), P("a"), P("a"), P()], {"all_gather": 2}),
}


@pytest.mark.parametrize("B", [4, 3])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("shape, specs, exchanged", CASES.values(), ids=CASES)
def test_divided(shape, specs, exchanged, reduction, B):
    mesh = AbstractMesh(shape, ("a", "b")[: len(shape)])
    local = check(step(reduction), operands(B), specs, mesh, outs=[None, *specs[:3]], rtol=1e-4, atol=1e-5)
    if reduction == "mean":
        assert collectives(local) == exchanged
    if B % 2 == 0:  # each device has the chunks of its tokens
        (grads,) = [e for e in local.eqns if e.prim.name == "linear_cross_entropy_grads"]
        parts = 1 if specs[3] == P() else mesh.size
        assert grads.invars[0].aval.size * parts == B * T * C


def test_in_shard_map(eight):
    mesh = bf.make_mesh((2,), ("data",), devices=eight[:2])
    x, weight, bias, labels = map(bnp.asarray, operands(4))

    def local(x, weight, labels):
        losses = nn.linear_cross_entropy(x, weight, labels, chunk=3, ignore_index=-1, reduction="sum")
        return lax.psum(losses, "data")

    f = bf.shard_map(local, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P())
    whole = lambda x, w, t: nn.linear_cross_entropy(x, w, t, ignore_index=-1, reduction="sum")
    got = bf.jit(bf.value_and_grad(f, argnums=(0, 1)))(x, weight, labels)
    expected = bf.value_and_grad(whole, argnums=(0, 1))(x, weight, labels)
    for a, b in zip(bf.tree.leaves(got), bf.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)
