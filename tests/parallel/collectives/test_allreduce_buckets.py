"""Sums over ranks as early as they can be, several as one."""

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.config import config
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir.check import check_jaxpr
from blufunc.core.ir.jaxpr import communicates, eval_jaxpr
from blufunc.core.programs.simplify import simplify
from blufunc.core.programs.stage import stage
from blufunc.kernels import pipeline as steps
from blufunc.parallel.collectives import primitives as mc
from blufunc.parallel.collectives.allreduce_buckets import in_buckets
from blufunc.parallel.collectives.lowering import lower_collectives
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.runtime.simulated import run_ranks
from tests.kernels.differential import LIKE_A_GPU

MESH = AbstractMesh((2, 2), ("x", "y"))
X, Y = ({"axes": (name,), "sizes": (2,)} for name in "xy")

psum = lambda x, over=X: mc.psum_invariant_p.bind(x, src="V", dst="I", **over)
scatter = lambda x, dim=0, over=X: mc.mesh_psum_scatter_p.bind(x, src="V", dst="V", dim=dim, **over)
sin, cos = bnp.sin, bnp.cos


def late(a, b):
    """Sums after all other equations, as transforms leave them."""
    c, d = sin(a), cos(b)
    e = sin(c @ d)
    return [psum(c), psum(d), scatter(e)]


def read(a, b):
    """A sum that is read at once, while another waits and more come."""
    c = psum(sin(a))
    d = psum(cos(b))
    e = sin(d) @ b
    return [c, e, psum(e)]


def read_last(a, b):
    """No further sum comes when one is read."""
    c = psum(sin(a))
    d = psum(cos(b))
    return [c, sin(d) @ b]


def cast(a, b):
    """Sums of what was converted after all else, as where parameters are cast once."""
    c = sin(a).astype("bfloat16")
    d = b @ b
    return [psum(c.astype("float32").T), psum(d.astype("bfloat16"))]


def cast_behind(a, b):
    """For a while no equation reads the converted sums."""
    c = psum(sin(a)).astype("bfloat16").T.astype("float32")
    d = psum(cos(b @ b)).reshape(-1)
    return [c, d, c.reshape(-1) * d]


def chained(a, b):
    """Sums of sums: over one axis, moved, and over the other."""
    c = psum(sin(a))
    return [psum(c.T, Y), psum(cos(b), Y), psum(psum(b), X)]


def moved(a, b):
    """The operands of sums are moved first."""
    c = sin(a)
    return [scatter(c, dim=1), psum(cos(c @ b).reshape(-1)[:8])]


def repeated(a, b):
    """Two sums of one operand, and a sum without a reader."""
    c = sin(a)
    psum(c * 2)
    return [psum(c), scatter(c), psum(b)]


# function, bytes of a bucket, then the primitives of sums and products in their order
CASES = [
    (late, 1, "mesh_sums mesh_sums dot_general mesh_sums"),
    (late, 257, "mesh_sums dot_general mesh_sums"),
    (late, 1 << 20, "dot_general mesh_sums"),
    (read, 1 << 20, "psum_invariant dot_general mesh_sums"),
    (read, 1, "mesh_sums mesh_sums dot_general mesh_sums"),
    (read_last, 1 << 20, "mesh_sums dot_general"),
    (cast, 1, "mesh_sums dot_general mesh_sums"),
    (cast, 1 << 20, "dot_general mesh_sums"),
    (cast_behind, 1 << 20, "dot_general mesh_sums"),
    (chained, 1 << 20, "psum_invariant psum_invariant mesh_sums mesh_sums"),
    (chained, 1, "mesh_sums mesh_sums mesh_sums mesh_sums mesh_sums"),
    (moved, 1, "mesh_sums dot_general mesh_sums"),
    (repeated, 1 << 20, "mesh_sums"),
]


def staged(function):
    a = np.zeros((8, 8), np.float32)
    return simplify(stage(lambda *args: list(function(*args)), [from_numpy(a).aval] * 2, "f"))


@pytest.mark.parametrize("function, bucket, want", CASES, ids=lambda x: getattr(x, "__name__", None))
def test_where_sums_stand(monkeypatch, function, bucket, want):
    monkeypatch.setattr(config, "bucket_bytes", bucket)
    out = lower_collectives(staged(function))
    check_jaxpr(out)
    names = [e.prim.name for e in out.eqns if e.prim.kind == "collective" or e.prim.name == "dot_general"]
    assert " ".join(names) == want, out


@pytest.mark.parametrize("bucket", [1, 300, 1 << 20])
@pytest.mark.parametrize("function", [late, read, read_last, cast, cast_behind, chained, moved, repeated])
def test_what_ranks_get_is_the_same(monkeypatch, function, bucket):
    monkeypatch.setattr(config, "bucket_bytes", bucket)
    jaxpr = staged(function)
    rng = np.random.default_rng(0)
    parts = [[from_numpy(rng.standard_normal((8, 8), np.float32)) for _ in range(2)] for _ in range(4)]
    want, got = (
        run_ranks(MESH, lambda r, j=j: [np.asarray(x) for x in eval_jaxpr(j, parts[r])])
        for j in (jaxpr, simplify(lower_collectives(jaxpr)))
    )
    for w, g in zip(want, got, strict=True):
        for x, y in zip(w, g, strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_full_bucket_goes_before_what_comes_next(monkeypatch):
    """Each bucket follows its last operand, and partial buckets come at the end."""
    monkeypatch.setattr(config, "bucket_bytes", 2 * 8 * 8 * 4)

    def layers(a, b):
        found = []
        for _ in range(5):
            a = sin(a @ b)
            found.append(a)
        return [psum(x) for x in found]

    out = in_buckets(staged(layers))
    names = ["sums" if e.prim is mc.mesh_sums_p else e.prim.name for e in out.eqns]
    names = [n for n in names if n in ("sums", "dot_general")]
    assert names == ["dot_general"] * 2 + ["sums"] + ["dot_general"] * 2 + ["sums", "dot_general", "sums"]
    assert [len(e.invars) for e in out.eqns if e.prim is mc.mesh_sums_p] == [2, 2, 1]


def test_kernels_around_buckets_wait_for_no_other_bucket():
    """Each bucket's gradients take one launch before its sum, and one after."""

    def update(*args):
        grads = [x.astype("bfloat16").astype("float32") * 3 for x in args]
        how = {"kinds": ("all_reduce",) * 4, "lines": mc.Lines((None,) * 4), **X}
        summed = [mc.mesh_sums_p.bind(*grads[i : i + 4], **how) for i in (0, 4)]
        return [sin(g) * 2 for many in summed for g in many]

    avals = [from_numpy(np.zeros((n, 8), np.float32)).aval for n in range(1, 9)]
    jaxpr = simplify(stage(update, avals, "update"))
    made = steps.schedule(jaxpr, (False,) * 8, LIKE_A_GPU, lambda eqn: eqn.prim is mc.mesh_sums_p)
    kinds = ["sums" if isinstance(s, steps.OpaqueStep) else len(s.members) for s in made.steps]
    assert sorted(map(str, kinds)) == ["4", "4", "4", "4", "sums", "sums"]
    place = made.plan.placement
    for step in (s for s in made.steps if isinstance(s, steps.OpaqueStep)):
        assert [place[o[0]] for o in step.operands] == [place[r] for r in step.results], "sums are in place"


def read_by_a_kernel(a, b):
    """One kernel could write the first sum's operand and read the second's result."""
    u = sin(a)
    return [psum(u), u * psum(b)]


def read_by_alike(a, b):
    """One launch of structurally identical kernels could do so."""
    shapes = [(8, 8), (4, 16), (16, 4), (2, 32), (32, 2)]
    return [psum(sin(a)), *[sin(psum(b.reshape(s))) for s in shapes]]


def in_a_loop(a, b):
    u = sin(a)
    total, _ = lax.scan(lambda c, row: (c + psum(row), None), b[0], b)
    return [lax.scan(lambda c, row: (c * psum(row), None), u[0], u)[0], u * total]


@pytest.mark.parametrize("function", [read_by_a_kernel, read_by_alike, in_a_loop])
def test_compiled_programs_come_to_exchanges_in_their_order(function):
    """As ranks must, whatever each of them computes between."""
    jaxpr = staged(function)
    made = steps.schedule(jaxpr, (False,) * 2, LIKE_A_GPU, lambda eqn: eqn.prim.kind == "collective")
    ran = [s.eqn for s in made.steps if isinstance(s, steps.OpaqueStep)]
    want = [e.outvars for e in jaxpr.eqns if communicates(e)]
    assert [e.outvars for e in ran if communicates(e)] == want and len(want) > 1


def test_alike_kernels_behind_exchanges_are_one_launch_whatever_is_before():
    made = steps.schedule(
        staged(read_by_alike), (False,) * 2, LIKE_A_GPU, lambda eqn: eqn.prim.kind == "collective"
    )
    assert [len(s.members) for s in made.steps if isinstance(s, steps.GroupStep)] == [5]
