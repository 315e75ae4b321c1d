"""Every row of the operation table, sharded at random, against one device."""

import zlib

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import random
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ops import random_bits
from blufunc.core.primitives.primitive import Primitive
from blufunc.parallel.collectives.shard_map_equation import shard_map_p
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.transforms.control_flow.cond import cond_p
from blufunc.transforms.control_flow.scan import scan_p
from blufunc.transforms.control_flow.while_loop import while_p
from tests.core.primitives.test_completeness import primitives
from tests.op_table.rows import OPS
from tests.parallel.lockstep import MESHES, P, check

# Not reproducible, or without comparable results: effects, and device memory.
LEFT_OUT = {"pure_callback", "io_callback", "debug_callback", "offload"}


def random_spec(rng: np.random.Generator, ndim: int, axes: tuple[str, ...]) -> P:
    """A spec that uses each axis along some dimension, or nowhere."""
    entries: list[tuple[str, ...]] = [() for _ in range(ndim)]
    for axis in rng.permutation(axes):
        d = int(rng.integers(-1, ndim))
        if d >= 0:
            entries[d] += (str(axis),)
    return P(*entries)


def rows():
    seen = set()
    for op in OPS:
        if isinstance(op.prim, Primitive) and op.prim.name not in LEFT_OUT and op.id not in seen:
            seen.add(op.id)
            yield op


@pytest.mark.parametrize("mesh", ["2", "2x2", "another"])
@pytest.mark.parametrize("op", list(rows()), ids=lambda op: op.id)
def test_operations_divided_at_random(op, mesh):
    rng = np.random.default_rng([zlib.crc32(op.id.encode()), len(mesh)])
    draws = 1 if mesh == "another" else 2
    mesh = str(rng.choice(["1", "4", "2x2x2"])) if mesh == "another" else mesh
    dtype = next((d for d in op.dtypes if d in ("float32", "complex64", "int32")), op.dtypes[0])
    args = op.sample(dtype)
    tol = {"rtol": 2e-4, "atol": 2e-4} if dtype != "bfloat16" else {"rtol": 0.05, "atol": 0.05}
    for _ in range(draws):
        specs = [random_spec(rng, a.ndim, MESHES[mesh].axis_names) for a in args]
        check(op.apply, args, specs, MESHES[mesh], **tol)
    ranks = [np.ndim(x) for x in results(op, args)]
    outs = [random_spec(rng, ndim, MESHES[mesh].axis_names) for ndim in ranks]
    check(op.apply, args, [P()] * len(args), MESHES[mesh], outs, **tol)


ORDERS = {
    "grad": lambda f, wrt: bf.grad(f, wrt),
    "grad of checkpoint": lambda f, wrt: bf.grad(bf.checkpoint(f), wrt),
    "vmap of grad": lambda f, wrt: bf.vmap(bf.grad(f, wrt)),
    "grad of vmap": lambda f, wrt: bf.grad(lambda *xs: bf.vmap(f)(*xs).sum(), wrt),
    "grad of a jvp": lambda f, wrt: bf.grad(lambda *xs: bf.jvp(f, xs, xs)[1], wrt),
}


def differentiable(op):
    """Whether the row has derivatives of float32 operands alone."""
    kinds = {a.dtype or "float32" for a in op.args}
    return op.grad >= 2 and "float32" in op.dtypes and op.wrt is None and kinds == {"float32"}


@pytest.mark.parametrize("op", [op for op in rows() if differentiable(op)], ids=lambda op: op.id)
def test_derivatives_and_batches_of_operations_annotated_at_random(op):
    """A function that is annotated, transformed, and then partitioned."""
    rng = np.random.default_rng([zlib.crc32(op.id.encode()), 1])
    args = op.sample("float32")
    mesh = MESHES[str(rng.choice(["2", "4", "2x2", "2x2x2"]))]
    order = str(rng.choice(list(ORDERS)))
    inside = [random_spec(rng, a.ndim, mesh.axis_names) for a in args]

    def scalar(*xs):
        outs = op.apply(*[bf.constrain(x, s) for x, s in zip(xs, inside, strict=True)])
        outs = bf.tree.map(lambda o: (o * bnp.conj(o)).real, bf.tree.leaves(outs))
        specs = [random_spec(np.random.default_rng(o.ndim), o.ndim, mesh.axis_names) for o in outs]
        return sum(bf.constrain(o, s).sum() for o, s in zip(outs, specs, strict=True))

    if "vmap" in order:
        args = [np.stack([a, a]) for a in args]
    specs = [random_spec(rng, a.ndim, mesh.axis_names) for a in args]
    check(ORDERS[order](scalar, tuple(range(len(args)))), args, specs, mesh, rtol=5e-3, atol=5e-3)


def results(op, args):
    out = op.apply(*[from_numpy(np.asarray(a)) for a in args])
    return out if op.prim.multiple_results else [out]


def test_every_primitive_has_a_rule_or_a_reason():
    found = set()
    for prim in primitives():
        reason = getattr(prim.shard, "reason", None)
        assert reason is None or len(reason) > 10, prim
        by_partitioner = prim.body is not None or prim in (scan_p, cond_p, while_p, shard_map_p)
        if prim.shard is None and not by_partitioner and prim.kind != "collective":
            found.add(prim.name)
    assert not found


@pytest.mark.parametrize("width", [8, 16, 32, 64])
def test_random_bits_do_not_depend_on_the_mesh_and_no_device_makes_all(width):
    keys = random.split(random.key(7), 3)
    f = lambda k: random_bits.random_bits_p.bind(k, shape=(5, 2, 4), bit_width=width)
    local = check(f, [np.asarray(keys)], [P()], MESHES["2x2"], [P("y", "x")])
    assert all(v.aval.size <= 2 * 3 * 2 * 4 * 2 for e in local.eqns for v in e.outvars)


def test_axes_of_one_device_exchange_nothing():
    mesh = AbstractMesh((1, 2), ("one", "x"))
    x, w = np.ones((4, 6), np.float32), np.ones((6, 3), np.float32)
    local = check(lambda x, w: x @ w, (x, w), (P(None, "one"), P("one")), mesh, [P("one")])
    assert [e.prim.name for e in local.eqns] == ["dot_general"]
