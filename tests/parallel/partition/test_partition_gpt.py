"""A transformer block with its loss, and its collectives in both directions."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import nn
from blufunc.parallel.mesh.constrain import constrain
from blufunc.parallel.mesh.mesh import AbstractMesh
from tests.parallel.lockstep import P, check, collectives

B, T, C, H, V = 8, 4, 8, 4, 16
D = C // H
SHAPES = {
    "tokens": (V, C), "scale1": (C,), "bias1": (C,), "qkv": (C, 3, H, D), "out": (H, D, C),
    "scale2": (C,), "bias2": (C,), "up": (C, 4 * C), "up_bias": (4 * C,), "down": (4 * C, C), "down_bias": (C,),
}  # fmt: skip
TENSOR = {
    "tokens": P("model"), "qkv": P(None, None, "model"), "out": P("model"),
    "up": P(None, "model"), "up_bias": P("model"), "down": P("model"),
}  # fmt: skip


def with_annotation(x, spec):
    return x if spec is None else constrain(x, spec)


def loss(params, ids, *, stream=None, heads=None, hidden=None, logits=None):
    p = params
    x = with_annotation(p["tokens"][ids[:, :-1]], stream)
    y = nn.layer_norm(x, p["scale1"], p["bias1"])
    q, k, v = with_annotation(bnp.einsum("btc,cnhd->nbthd", y, p["qkv"]), heads)
    a = nn.dot_product_attention(q, k, v, is_causal=True)
    x = with_annotation(x + bnp.einsum("bthd,hdc->btc", a, p["out"]), stream)
    y = nn.layer_norm(x, p["scale2"], p["bias2"])
    y = with_annotation(nn.gelu(y @ p["up"] + p["up_bias"], approximate=True), hidden)
    x = with_annotation(x + y @ p["down"] + p["down_bias"], stream)
    scores = with_annotation(x @ p["tokens"].T, logits)
    return nn.softmax_cross_entropy_with_integer_labels(scores, ids[:, 1:]).mean()


def partitioned(mesh, specs, ids_spec, vocabulary=V, **annotations):
    """The local program of loss and gradients, after comparing it with one device."""
    rng = np.random.default_rng(0)
    shapes = SHAPES | {"tokens": (vocabulary, C)}
    values = [(0.3 * rng.standard_normal(s)).astype(np.float32) for s in shapes.values()]
    ids = rng.integers(0, vocabulary, (B, T + 1)).astype(np.int32)

    def step(*args):
        params = dict(zip(SHAPES, args[:-1], strict=True))
        value, grads = bf.value_and_grad(lambda p: loss(p, args[-1], **annotations))(params)
        return [value, *[grads[name] for name in SHAPES]]

    of_params = [specs.get(name, P()) for name in SHAPES]
    return check(
        step, [*values, ids], [*of_params, ids_spec], mesh, outs=[None, *of_params], rtol=1e-4, atol=1e-5
    )


def floats_exchanged(local):
    """Counts of the collectives of three-dimensional floats, which are activations."""
    large = [e for e in local.eqns if e.invars and e.invars[0].aval.ndim > 2]
    return collectives(local.replace(eqns=[e for e in large if e.invars[0].aval.dtype == np.float32]))


@pytest.mark.parametrize("n", [2, 4])
def test_data_parallel_reduces_each_gradient_once(n):
    local = partitioned(AbstractMesh((n,), ("data",)), {}, P("data"))
    assert collectives(local) == {"psum_invariant": len(SHAPES) + 1}


def test_tensor_parallel_reduces_twice_a_layer_and_direction():
    local = partitioned(AbstractMesh((2,), ("model",)), TENSOR, P())
    # of the stream: the lookup, attention and network; backwards network, attention and loss
    assert floats_exchanged(local) == {"psum_invariant": 6}
    # and the loss over the divided vocabulary: the largest score, the sum, and that of the label
    assert collectives(local) == {"psum_invariant": 6 + 2, "pmax_invariant": 1}


def test_tensor_parallel_with_sequence_parallel_gathers_and_scatters_twice_a_layer_and_direction():
    local = partitioned(
        AbstractMesh((2,), ("model",)), TENSOR, P(),
        stream=P(None, "model"), hidden=P(None, None, "model"),
        heads=P(None, None, None, "model"), logits=P(None, None, "model"),
    )  # fmt: skip
    # forwards two and two, and backwards; the lookup scatters, the loss gathers, and back scatters
    assert floats_exchanged(local) == {"all_gather": 4 + 1, "psum_scatter": 4 + 2}


def test_fsdp_gathers_parameters_and_scatters_gradients():
    rows = P("data")
    specs = dict.fromkeys(SHAPES, P("data"))
    local = partitioned(
        AbstractMesh((2,), ("data",)), specs, P("data"),
        stream=rows, hidden=rows, heads=P(None, "data"), logits=rows,
    )  # fmt: skip
    # every parameter once, the table too, which is looked up and transposed for the loss; the loss is reduced
    assert collectives(local) == {"all_gather": len(SHAPES), "psum_scatter": len(SHAPES), "psum_invariant": 1}


@pytest.mark.parametrize("vocabulary", [V, V - 1])
def test_data_and_tensor_parallel_together_also_where_the_vocabulary_does_not_divide(vocabulary):
    local = partitioned(
        AbstractMesh((2, 2), ("data", "model")), TENSOR, P("data"), vocabulary,
        stream=P("data"), hidden=P("data", None, "model"),
        heads=P(None, "data", None, "model"), logits=P("data", None, "model"),
    )  # fmt: skip
    assert floats_exchanged(local)["psum_invariant"] >= 6
    assert set(collectives(local)) == {"psum_invariant", "pmax_invariant"}


def test_three_kinds_at_once():
    specs = TENSOR | {"up": P("fsdp", "model"), "down": P("model", "fsdp"), "tokens": P("model", "fsdp")}
    rows = ("data", "fsdp")
    partitioned(
        AbstractMesh((2, 2, 2), ("data", "fsdp", "model")), specs, P(rows),
        stream=P(rows, "model"), hidden=P(rows, None, "model"),
        heads=P(None, rows, None, "model"), logits=P(rows, None, "model"),
    )  # fmt: skip


def test_attention_stays_one_operation_on_the_heads_of_a_device():
    local = partitioned(AbstractMesh((2,), ("model",)), TENSOR, P())
    ((attention,), (backward,)) = (
        [e for e in local.eqns if e.prim.name == name] for name in ("attention", "attention_grad")
    )
    assert attention.invars[0].aval.shape == backward.invars[0].aval.shape == (B, T, H // 2, D)


def test_gelu_stays_one_operation_on_the_features_of_a_device():
    local = partitioned(AbstractMesh((2,), ("model",)), TENSOR, P())
    for name in ("gelu", "gelu_grad"):
        (eqn,) = [e for e in local.eqns if e.prim.name == name]
        shapes = {v.aval.shape for v in (*eqn.invars, *eqn.outvars, *eqn.params["jaxpr"].invars)}
        assert shapes == {(B, T, SHAPES["up"][-1] // 2)}
