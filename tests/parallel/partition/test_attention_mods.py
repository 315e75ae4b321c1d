"""Attention with functions of pairs on a mesh: they get global positions."""

import numpy as np
import pytest

import blufunc as bf
from blufunc import nn
from blufunc.parallel.mesh.mesh import AbstractMesh
from tests.parallel.lockstep import P, check

B, T, N, K, H = 4, 6, 4, 2, 3


@pytest.mark.parametrize(
    "shape, axes, spec",
    [
        ((2,), ("data",), P("data")),
        ((2,), ("model",), P(None, None, "model")),
        ((2, 2), ("data", "model"), P("data", None, "model")),
    ],
)
def test_batch_and_heads_are_divided_and_their_numbers_with_them(shape, axes, spec):
    rng = np.random.default_rng(0)
    x = [rng.standard_normal((B, T, n, H)).astype(np.float32) for n in (N, K, K)]
    ids = rng.integers(0, 3, (B, T)).astype(np.int32)
    slopes = np.linspace(0.1, 1, N, dtype=np.float32)

    def f(q, k, v, ids, slopes):
        mods = {"mask_mod": nn.masks.document(ids), "score_mod": nn.score_mods.alibi(slopes)}
        return (nn.dot_product_attention(q, k, v, **mods) ** 2).sum()

    def step(*args):
        value, grads = bf.value_and_grad(lambda *x: f(*x[:3], args[3], x[3]), (0, 1, 2, 3))(
            *args[:3], args[4]
        )
        return [value, *grads]

    local = check(
        step, [*x, ids, slopes], [spec, spec, spec, P(*spec[:1]), P()], AbstractMesh(shape, axes),
        outs=[None, spec, spec, spec, P()], rtol=1e-4, atol=1e-5,
    )  # fmt: skip
    (attention,) = [e for e in local.eqns if e.prim.name == "attention"]
    sizes = dict(zip(axes, shape, strict=True))
    b, n = B // sizes.get("data", 1), N // sizes.get("model", 1)
    assert [v.aval.shape for v in attention.invars[:5]] == [
        (b, T, n, H), (b, T, n // 2, H), (b, T, n // 2, H), (b,), (n,),
    ]  # fmt: skip
