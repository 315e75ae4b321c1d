"""Quantized weights: codes, errors, matmuls, derivatives, transforms, files."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, io, nn, optim, random, tree
from blufunc.nn import quantization
from blufunc.nn.quantization import formats

FORMATS = {  # arguments of quantize, and the largest error as a part of the largest element of each block
    "int8": ({"format": "int8"}, 0.5 / 127),
    "int8 by columns": ({"format": "int8", "axis": -2}, 0.5 / 127),
    "int8 in blocks": ({"format": "int8", "block": 32}, 0.5 / 127),
    "nf4": ({"format": "nf4"}, 0.152 + 1 / 255),
    "nf4 in blocks of 32": ({"format": "nf4", "block": 32}, 0.152 + 1 / 255),
}
W = np.random.default_rng(0).standard_normal((48, 192)).astype(np.float32)
W[3] *= 100
W[5, 7] = 40  # an outlier
W[6] = 0
X = np.random.default_rng(1).standard_normal((2, 5, 192)).astype(np.float32)


@pytest.fixture(params=FORMATS)
def case(request):
    how, bound = FORMATS[request.param]
    return how, bound, quantization.quantize(W, **how)


def blocks(w, how):
    """The elements that share a scale as the last axis."""
    if how.get("axis") == -2:
        return w.T
    size = how.get("block", 64 if how["format"] == "nf4" else w.shape[-1])
    return w.reshape(-1, size)


def decoded(q):
    """The weight, by NumPy."""
    q = tree.map(np.asarray, q)
    if isinstance(q, quantization.Int8):
        repeats = [n // m for n, m in zip(q.codes.shape, q.scale.shape, strict=True)]
        return q.codes * q.scale.repeat(repeats[0], 0).repeat(repeats[1], 1)
    codes = np.stack([q.codes & 15, q.codes >> 4], -1).reshape(q.shape)
    scales = q.levels.astype(np.float32) ** 2 * q.scale
    return np.array(formats.QUANTILES, np.float32)[codes] * scales.repeat(q.block, 1)


def test_errors_are_within_half_a_step(case):
    how, bound, q = case
    assert q.shape == W.shape and all(x.dtype in ("int8", "uint8", "float32") for x in q)
    got = np.asarray(quantization.dequantize(q))
    np.testing.assert_allclose(got, decoded(q), rtol=1e-6)
    largest = np.abs(blocks(W, how)).max(-1, keepdims=True)
    error = np.abs(blocks(got, how) - blocks(W, how))
    # levels of scales are coarser in a row with an outlier: sqrt(s / max) of 255 steps
    if how["format"] == "nf4":
        of_row = largest.reshape(len(W), -1)
        steps = 255 * np.sqrt(largest.ravel() / np.maximum(of_row.max(1), 1e-9).repeat(of_row.shape[1]))
        bound = 0.152 + 1.1 / np.maximum(steps, 1)[:, None]
    assert (error <= bound * largest + 1e-7).all()
    assert not got[6].any()
    if how["format"] == "nf4":
        root = np.sqrt(np.square(got - W).mean() / np.square(W).mean())
        assert 0.05 < root < 0.15


def test_each_code_is_the_nearest(case):
    how, _, q = case
    if not isinstance(q, quantization.NF4):
        return
    scales = (np.asarray(q.levels).astype(np.float32) ** 2 * np.asarray(q.scale)).reshape(-1, 1)
    values = blocks(W, how)[scales[:, 0] > 0] / scales[scales > 0][:, None]
    distances = np.abs(values[..., None] - np.array(formats.QUANTILES, np.float32))
    codes = np.stack([np.asarray(q.codes) & 15, np.asarray(q.codes) >> 4], -1).reshape(blocks(W, how).shape)
    own = np.take_along_axis(distances, codes[scales[:, 0] > 0][..., None].astype(int), -1)[..., 0]
    assert (own <= distances.min(-1) + 1e-6).all()


def test_codes_survive_a_round_trip(case):
    how, _, q = case
    repeated = quantization.quantize(quantization.dequantize(q), **how)
    for a, b in zip(q, repeated, strict=True):
        if a.dtype == "float32":
            np.testing.assert_allclose(a, b, rtol=1e-6)
        else:
            np.testing.assert_array_equal(a, b)


def test_sizes():
    w = bf.ShapeDtypeStruct((4096, 4096), "bfloat16")
    bits = lambda format: formats.bits(bf.eval_shape(lambda w: quantization.quantize(w, format), w))
    assert bits("int8") < 8.01 and bits("nf4") < 4.14  # 4 + 8 / 64 + 32 / 4096


@pytest.mark.parametrize("transposed", [False, True])
def test_matmuls_and_gradients_are_those_of_the_dequantized_weight(case, transposed):
    _, _, q = case
    x = bnp.asarray(X if transposed else X[..., :48])
    w = quantization.dequantize(q)
    quantized = lambda x, q: (bnp.tanh(quantization.matmul(x / 200, q, transposed=transposed)) ** 2).sum()
    plain = lambda x, w: (bnp.tanh((x / 200) @ (w.T if transposed else w)) ** 2).sum()
    for fun in (bf.value_and_grad, lambda f: bf.jit(bf.value_and_grad(f))):
        got, want = fun(quantized)(x, q), fun(plain)(x, w)
        tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4), got, want)
    tangent = bnp.ones_like(x)
    got, want = (
        bf.jvp(lambda x: quantized(x, q), (x,), (tangent,)),
        bf.jvp(lambda x: plain(x, w), (x,), (tangent,)),
    )
    tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-3), got, want)


def test_residuals_are_codes(case):
    """Both directions dequantize: no float weight goes from one to the other."""
    _, _, q = case
    loss = lambda x: bnp.sum(bnp.sin(quantization.matmul(x, q, transposed=True)))
    _, pullback = bf.vjp(loss, bnp.asarray(X))
    assert all(leaf.shape != W.shape or leaf.dtype == "int8" for leaf in tree.leaves(pullback))
    program = bf.make_jaxpr(bf.grad(loss))(X)
    calls = [e for e in program.eqns if e.prim.name == "quantized_matmul"]
    assert [e.params["transposed"] for e in calls] == [True, False]
    assert not any(v.aval.shape == W.shape for e in program.eqns for v in e.outvars)


def test_vmap_over_rows_and_over_stacks(case):
    _, _, q = case
    fun = lambda x, q: quantization.matmul(x, q, transposed=True)
    want = np.asarray(fun(bnp.asarray(X), q))
    np.testing.assert_allclose(bf.vmap(fun, (1, None), 1)(bnp.asarray(X), q), want, rtol=1e-5, atol=1e-3)
    stack = tree.map(lambda a: bnp.stack([a, a]), q)
    np.testing.assert_allclose(bf.jit(bf.vmap(fun))(bnp.asarray(X), stack), want, rtol=1e-5, atol=1e-3)


def test_scan_over_a_stack_of_layers():
    w = np.random.default_rng(2).standard_normal((3, 64, 64)).astype(np.float32)
    q = quantization.quantize(w, "nf4")
    step = lambda x, layer: (bnp.tanh(quantization.matmul(x, layer, transposed=True)), None)
    got = bf.grad(lambda x: bf.lax.scan(step, x, q)[0].sum())(bnp.ones(64))
    plain = lambda x: bf.lax.scan(lambda x, w: (bnp.tanh(w @ x), None), x, quantization.dequantize(q))[
        0
    ].sum()
    np.testing.assert_allclose(got, bf.grad(plain)(bnp.ones(64)), rtol=1e-3, atol=1e-4)


def test_derivative_by_scales():
    """Scales are floats, and may be trained."""
    q, x = quantization.quantize(W, "int8"), bnp.asarray(X[0])
    fun = lambda scale: bnp.sum(
        bnp.sin(quantization.matmul(x / 100, q._replace(scale=scale), transposed=True))
    )
    plain = lambda scale: bnp.sum(bnp.sin(x / 100 @ (q.codes.astype("float32") * scale).T))
    np.testing.assert_allclose(bf.grad(fun)(q.scale), bf.grad(plain)(q.scale), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_half_precision(format):
    x, q = bnp.asarray(X[0], "bfloat16"), quantization.quantize(W, format)
    out = quantization.matmul(x, q, transposed=True)
    assert out.dtype == "bfloat16"
    low = bf.autocast(lambda x: quantization.matmul(x, q, transposed=True), "bfloat16")(bnp.asarray(X[0]))
    np.testing.assert_array_equal(np.asarray(low, np.float32), np.asarray(out, np.float32))


# -- in trees --------------------------------------------------------------------------------------


def test_adapters_of_quantized_weights(tmp_path):
    """QLoRA: init by shapes, apply, train with a mask, save and load."""
    params = {"w": bnp.asarray(W), "b": bnp.zeros(192)}
    q = quantization.quantize(params, "nf4")
    assert isinstance(q["w"], quantization.NF4) and q["b"] is params["b"]
    adapters = nn.lora.init(random.key(0), bf.eval_shape(quantization.dequantize, q), 2)
    adapted = nn.lora.apply(q, adapters, alpha=4)

    def loss(adapters):
        w = nn.lora.apply(q, adapters, alpha=4)["w"]
        return (nn.lora.matmul(X[..., :48], w, matmul=quantization.matmul) ** 2).mean()

    optimizer = optim.masked(optim.sgd(1e-3), nn.lora.mask)
    state = optimizer.init(adapted)
    grads = bf.jit(bf.grad(loss))(adapters)
    assert float(bnp.abs(grads["w"].b).max()) > 0
    whole = tree.map(bnp.zeros_like, adapted)
    whole["w"] = whole["w"]._replace(a=grads["w"].a, b=grads["w"].b)
    updates, _ = optimizer.update(whole, state, adapted)
    np.testing.assert_allclose(updates["w"].b, -1e-3 * grads["w"].b)
    io.save(tmp_path / "q.safetensors", adapted)
    found = io.load(tmp_path / "q.safetensors", like=adapted)
    tree.map(np.testing.assert_array_equal, found, adapted)
    assert tree.structure(found) == tree.structure(adapted)


def test_masks_choose_weights():
    params = {"a": bnp.ones((4, 64)), "b": bnp.ones((4, 64))}
    q = quantization.quantize(params, "int8", mask={"a": True, "b": False})
    assert isinstance(q["a"], quantization.Int8) and q["b"] is params["b"]
    whole = quantization.dequantize(q, "bfloat16")
    assert whole["a"].dtype == "bfloat16" and whole["b"].dtype == "float32"


BAD = {
    "a format": (errors.ArgumentError, "no format 'int3'", lambda: quantization.quantize(W, "int3")),
    "an axis": (errors.ArgumentError, "axis=-2, of nf4", lambda: quantization.quantize(W, axis=-2)),
    "blocks": (
        errors.ShapeError, r"params\['w'\] of shape \(4, 96\) has no blocks of 64",
        lambda: quantization.quantize({"w": np.ones((4, 96), np.float32)}),
    ),
    "integers": (errors.DtypeError, "params is int", lambda: quantization.quantize(np.ones((4, 64), np.int32))),
    "sizes": (
        errors.ShapeError, r"(?s)x of shape \(5, 48\).*transposed=False",
        lambda: quantization.matmul(bnp.ones((5, 48)), quantization.quantize(W), transposed=True),
    ),
    "a stack": (
        errors.ShapeError, r"(?s)weight of shape \(2, 4, 64\).*vmap",
        lambda: quantization.matmul(bnp.ones((5, 4)), quantization.quantize(np.ones((2, 4, 64), np.float32))),
    ),
    "integers by a weight": (
        errors.DtypeError, "x is int32",
        lambda: quantization.matmul(bnp.ones((5, 48), "int32"), quantization.quantize(W)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    error, message, call = BAD[name]
    with pytest.raises(error, match=message):
        call()
