"""Matmuls that only earlier sums wait for overlap the last sum."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc.config import config
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir.check import check_jaxpr
from blufunc.core.ir.jaxpr import communicates, eval_jaxpr
from blufunc.core.programs.simplify import simplify
from blufunc.core.programs.stage import stage
from blufunc.kernels.backends.cuda.device_model import H200
from blufunc.parallel.collectives import allreduce_overlap
from blufunc.parallel.collectives import primitives as mc
from blufunc.parallel.collectives.lowering import lower_collectives
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.runtime.simulated import run_ranks

MESH = AbstractMesh((2,), ("x",))
psum = lambda x: mc.psum_invariant_p.bind(x, src="V", dst="I", axes=("x",), sizes=(2,))
LAYERS = 4


def gradients(x, *weights):
    """Sums of gradients of layers that follow an embedding; ``x`` is its table."""

    def loss(x, weights):
        for w in weights:
            x = bnp.tanh(x @ w)
        return (x * x).sum()

    table, layers = bf.grad(loss, argnums=(0, 1))(x, list(weights))
    return [psum(g) for g in (*layers, table)]


def used(x, *weights):
    """A gradient that is a result itself, and a sum that is read between."""
    *layers, table = gradients(x, *weights)
    local = x @ weights[0]
    return [*layers, table * layers[0].sum(), psum(local), local]


def staged(function, monkeypatch, seconds_of_last, rows=8 * 8):
    """Stage with a bucket per sum; ``rows`` are those of the table.

    The last sum takes as long as ``seconds_of_last`` matmuls.
    """
    x, w = (from_numpy(np.zeros((n, 8), np.float32)).aval for n in (rows, 8))
    monkeypatch.setattr(config, "bucket_bytes", 1)
    product = 2 * rows * 8 * 8 / H200.products
    monkeypatch.setattr(
        allreduce_overlap, "SUMMED", rows * 8 * 4 / (product * seconds_of_last) if seconds_of_last else 1e30
    )
    return simplify(stage(lambda *args: list(function(*args)), [x, *[w] * LAYERS], "f"))


def cast(x, *weights):
    """Of parameters that are cast once."""
    low = [a.astype("bfloat16").astype("float32") for a in (x, *weights)]
    return [g.astype("bfloat16").astype("float32") for g in gradients(*low)]


def order(jaxpr):
    names = {"mesh_sums": "s", "dot_general": "d"}
    return "".join(names.get(e.prim.name, "") for e in jaxpr.eqns)


def expected_order(n):
    """The forward pass, then for each layer the derivatives of its weights and input.

    Those of the weights of the first n layers come after the last sum.
    """
    return "dddd" + "dsd" * (LAYERS - n) + "d" * n + "s" + "ds" * n


@pytest.mark.parametrize(
    "products, rows, moved",
    [
        (0, 64, 0),
        (0.5, 64, 1),
        (1, 64, 1),
        (2, 64, 2),
        (4, 64, 4),
        # sums of the size of the last, or larger, would be waited for instead
        (1, 8, 0),
        (2, 4, 0),
        # links are busy for longer with each bucket than its products take
        (16, 64, 0),
    ],
)
def test_matmuls_after_the_last_sum(monkeypatch, products, rows, moved):
    out = lower_collectives(staged(gradients, monkeypatch, products, rows))
    check_jaxpr(out)
    assert order(out) == expected_order(moved), out


def test_what_converts_a_sum_goes_with_it(monkeypatch):
    out = lower_collectives(staged(cast, monkeypatch, 2))
    check_jaxpr(out)
    assert order(out) == expected_order(2), out


def test_what_has_an_order_is_not_moved(monkeypatch):
    """Callbacks, and loops with collectives, that only an earlier sum waits for."""

    def called(x, *weights):
        scale = bf.io_callback(lambda: np.float32(2), bf.ShapeDtypeStruct((), "float32"))
        total, _ = bf.lax.scan(lambda c, w: (c + psum(w), None), weights[0][0], weights[0])
        return [psum((x * scale).T @ (x + total)), psum(x * 2)]

    out = lower_collectives(staged(called, monkeypatch, 1))
    kept = [e.prim.name for e in out.eqns if e.effects or communicates(e) or e.prim.name == "dot_general"]
    assert kept == ["io_callback", "scan", "mesh_sums", "dot_general", "mesh_sums"]


@pytest.mark.parametrize("products", [0, 1, 4])
@pytest.mark.parametrize("function", [gradients, cast, used])
def test_what_ranks_get_is_the_same(monkeypatch, function, products):
    jaxpr = staged(function, monkeypatch, products)
    rng = np.random.default_rng(0)
    args = [
        [from_numpy(rng.standard_normal((n, 8), np.float32)) for n in (64, *[8] * LAYERS)] for _ in range(2)
    ]
    want, got = (
        run_ranks(MESH, lambda r, j=j: [np.asarray(x) for x in eval_jaxpr(j, args[r])])
        for j in (jaxpr, simplify(lower_collectives(jaxpr)))
    )
    for w, g in zip(want, got, strict=True):
        for a, b in zip(w, g, strict=True):
            np.testing.assert_array_equal(a, b)
    check_jaxpr(lower_collectives(jaxpr))


def test_one_bucket_is_left_as_it_is(monkeypatch):
    jaxpr = staged(gradients, monkeypatch, 4)
    monkeypatch.setattr(config, "bucket_bytes", 1 << 30)
    assert order(lower_collectives(jaxpr)) == "dddd" + "dd" * 4 + "s"
