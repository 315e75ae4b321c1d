"""Each collective and cast against its transpose, on 4 simulated ranks.

The inner product of two values over the mesh depends on their types: varying values differ, so that all ranks count;
invariant ones are the same everywhere, so that one counts; an unreduced value is a sum, and is multiplied by one that
is the same everywhere.
"""

from __future__ import annotations

import numpy as np
import pytest

from blufunc import errors
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import eval_jaxpr
from blufunc.core.programs.stage import stage
from blufunc.parallel.collectives import primitives as ops
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.runtime.simulated import run_ranks
from blufunc.transforms.autodiff.jvp import jvp_jaxpr
from blufunc.transforms.autodiff.transpose import transpose_jaxpr
from blufunc.transforms.batching.batch import Axis, batch_jaxpr

N = 4
MESHES = {
    "one axis": (AbstractMesh((4,), ("x",)), ("x",)),
    "both axes, in the other order": (AbstractMesh((2, 2), ("x", "y")), ("y", "x")),
}
PERM = ((0, 2), (1, 0), (3, 1))
ROWS = [
    (ops.psum_invariant_p, "V", "I", {}),
    (ops.psum_invariant_p, "U", "I", {}),
    (ops.psum_invariant_p, "U", "R", {}),
    (ops.pcast_p, "I", "V", {}),
    (ops.pcast_p, "I", "R", {}),
    (ops.pcast_p, "V", "U", {}),
    (ops.pcast_p, "R", "V", {}),
    (ops.pcast_p, "R", "I", {}),
    (ops.keep_first_p, "I", "U", {}),
    (ops.mesh_all_gather_p, "V", "V", {"dim": 1}),
    (ops.mesh_all_gather_p, "V", "I", {"dim": 1}),
    (ops.mesh_all_gather_p, "V", "R", {"dim": 0}),
    (ops.mesh_psum_scatter_p, "V", "V", {"dim": 1}),
    (ops.mesh_psum_scatter_p, "U", "V", {"dim": 0}),
    (ops.shard_slice_p, "I", "V", {"dim": 1}),
    (ops.shard_slice_p, "R", "V", {"dim": 0}),
    (ops.shard_pad_p, "V", "U", {"dim": 1}),
    (ops.mesh_ppermute_p, "V", "V", {"perm": PERM}),
    (ops.mesh_all_to_all_p, "V", "V", {"split_dim": 0, "concat_dim": 1}),
    (ops.mesh_all_to_all_p, "V", "V", {"split_dim": 1, "concat_dim": 1}),
]
IDS = [f"{prim}-{src}-{dst}-{'-'.join(map(str, more.values()))}" for prim, src, dst, more in ROWS]
SHAPE = (4, 8)


def draw(seed: int, kind: str, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Values of all ranks, of one type: whole numbers, so that sums are exact."""
    rng = np.random.default_rng(seed)
    parts = [rng.integers(-8, 8, shape).astype(np.float32) for _ in range(N)]
    return parts if kind in "VU" else [parts[0]] * N


def inner(a: list[np.ndarray], b: list[np.ndarray], kind: str) -> float:
    """The inner product of a value of a type and a cotangent of it."""
    ranks = range(1) if kind == "I" else range(N)
    return float(sum(np.vdot(a[r], b[r]) for r in ranks))


def on_ranks(mesh, jaxpr, parts):
    """A jaxpr of one operand and one result on all ranks."""
    return run_ranks(mesh, lambda r: np.asarray(eval_jaxpr(jaxpr, [parts[r]])[0]))


def staged(prim, mesh, axes, src, dst, more, shape=SHAPE):
    sizes = tuple(mesh.shape[a] for a in axes)
    params = {"axes": axes, "sizes": sizes, "src": src, "dst": dst, **more}
    return stage(lambda x: [prim.bind(x, **params)], [ShapedArray(shape, np.dtype(np.float32))])


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("prim, src, dst, more", ROWS, ids=IDS)
def test_dot_product(prim, src, dst, more, mesh):
    """<f(x), y> == <x, f^T(y)>."""
    mesh, axes = MESHES[mesh]
    forward = staged(prim, mesh, axes, src, dst, more)
    backward, _ = transpose_jaxpr(forward, (True,), (True,))
    x = draw(0, src, SHAPE)
    out = on_ranks(mesh, forward, x)
    y = draw(1, ops.COTANGENT[dst], out[0].shape)
    ct = on_ranks(mesh, backward, y)
    assert inner(out, y, dst) == inner(x, ct, src) != 0
    for values, kind in ((out, dst), (ct, ops.COTANGENT[src])):
        if kind in "IR":
            assert all(np.array_equal(v, values[0]) for v in values)


@pytest.mark.parametrize("prim, src, dst, more", ROWS, ids=IDS)
def test_transposing_twice(prim, src, dst, more):
    mesh, axes = MESHES["one axis"]
    forward = staged(prim, mesh, axes, src, dst, more)
    backward, _ = transpose_jaxpr(forward, (True,), (True,))
    twice, _ = transpose_jaxpr(backward, (True,), (True,))
    assert str(twice) == str(forward)


@pytest.mark.parametrize("prim, src, dst, more", ROWS, ids=IDS)
def test_jvp_is_the_operation_itself(prim, src, dst, more):
    mesh, axes = MESHES["one axis"]
    forward = staged(prim, mesh, axes, src, dst, more)
    derived, _ = jvp_jaxpr(forward, (True,), (False,))
    x, t = draw(0, src, SHAPE), draw(1, src, SHAPE)
    both = run_ranks(mesh, lambda r: [np.asarray(v) for v in eval_jaxpr(derived, [x[r], t[r]])])
    for (_, got), want in zip(both, on_ranks(mesh, forward, t), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("prim, src, dst, more", ROWS, ids=IDS)
def test_batch(prim, src, dst, more):
    mesh, axes = MESHES["one axis"]
    forward = staged(prim, mesh, axes, src, dst, more)
    batched, flags = batch_jaxpr(forward, Axis(3), (True,))
    assert flags == (True,)
    x = draw(0, src, (3, *SHAPE))
    together = on_ranks(mesh, batched, x)
    for i in range(3):
        for got, want in zip(together, on_ranks(mesh, forward, [p[i] for p in x]), strict=True):
            np.testing.assert_array_equal(got[i], want)


def test_psum_transposed_to_psum_would_be_caught():
    """The classic error: a gradient that is too large by the number of ranks."""
    mesh, axes = MESHES["one axis"]
    forward = staged(ops.psum_invariant_p, mesh, axes, "V", "I", {})
    x, y = draw(0, "V", SHAPE), draw(1, "I", SHAPE)
    wrong = on_ranks(mesh, forward, y)
    assert inner(x, wrong, "V") == N * inner(on_ranks(mesh, forward, x), y, "I") != 0


def test_vouched_invariance_shares_the_cotangent():
    mesh, axes = MESHES["one axis"]
    forward = staged(ops.pcast_p, mesh, axes, "V", "I", {})
    backward, _ = transpose_jaxpr(forward, (True,), (True,))
    x, y = draw(0, "I", SHAPE), draw(1, "I", SHAPE)  # the same everywhere, as the user says
    assert inner(on_ranks(mesh, forward, x), y, "I") == inner(x, on_ranks(mesh, backward, y), "V")


@pytest.mark.parametrize("prim, op", [(ops.pmax_invariant_p, np.max), (ops.pmin_invariant_p, np.min)])
def test_extrema_share_their_derivative(prim, op):
    mesh, axes = MESHES["one axis"]
    forward = staged(prim, mesh, axes, "V", "I", {})
    x, t = draw(0, "V", SHAPE), draw(1, "V", SHAPE)
    derived, _ = jvp_jaxpr(forward, (True,), (False,))
    outs = run_ranks(mesh, lambda r: [np.asarray(v) for v in eval_jaxpr(derived, [x[r], t[r]])])
    best = op(x, axis=0)
    chosen = np.stack(x) == best
    for out, tangent in outs:
        np.testing.assert_array_equal(out, best)
        np.testing.assert_allclose(tangent, (np.stack(t) * chosen).sum(0) / chosen.sum(0), rtol=1e-6)


def test_axis_index_counts_in_the_order_of_the_axes():
    mesh, axes = MESHES["both axes, in the other order"]
    params = {"axes": axes, "sizes": (2, 2)}
    assert run_ranks(mesh, lambda r: int(ops.mesh_axis_index_p.bind(**params))) == [0, 2, 1, 3]


def test_types_that_there_are_not():
    mesh, axes = MESHES["one axis"]
    with pytest.raises(errors.ValueRangeError, match="psum_invariant has no I->V"):
        staged(ops.psum_invariant_p, mesh, axes, "I", "V", {})


def test_shapes_that_cannot_be_divided():
    mesh, axes = MESHES["one axis"]
    with pytest.raises(errors.ShapeError, match="divided among 4 ranks"):
        staged(ops.shard_slice_p, mesh, axes, "I", "V", {"dim": 0}, (6,))
    with pytest.raises(errors.ShapeError, match="no dimension 2"):
        staged(ops.mesh_all_gather_p, mesh, axes, "V", "V", {"dim": 2})
