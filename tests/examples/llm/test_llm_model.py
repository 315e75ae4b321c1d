"""The models: a NumPy reference of a layer, caches against whole sequences, sizes."""

import dataclasses

import numpy as np
import pytest

import blufunc as bf
from blufunc import random, tree
from examples.llm import architectures, config, model

SMALL = dataclasses.replace(config.TINY, vocab=41, width=24, features=8, hidden=20, context=32)
SCALED = (("factor", 8.0), ("high_freq_factor", 4.0), ("low_freq_factor", 1.0),
          ("original_max_position_embeddings", 8), ("rope_theta", 100.0), ("rope_type", "llama3"))  # fmt: skip
CONFIGS = {
    "llama": dataclasses.replace(SMALL, rope=SCALED),
    "mistral": dataclasses.replace(SMALL, architecture="mistral", windows=(4, 4), tied=False),
    "qwen2": dataclasses.replace(SMALL, architecture="qwen2", qkv_bias=True, windows=(None, 4)),
    "qwen3": dataclasses.replace(SMALL, architecture="qwen3", qk_norm=True, features=6, tied=False),
    "mixtral": dataclasses.replace(SMALL, architecture="mixtral", experts=4, balance=0.02, tied=False),
    "gpt2": dataclasses.replace(
        SMALL, architecture="gpt2", features=6, key_heads=4, norm="layer", mlp="gelu", rope=None,
        qkv_bias=True, out_bias=True, mlp_bias=True,
    ),
}  # fmt: skip


def params_of(config, seed=0):
    """Parameters of which none is 0 or 1."""
    rng = np.random.default_rng(seed)
    types = bf.eval_shape(lambda: model.init(random.key(0), config))
    return tree.map(lambda t: (0.3 * rng.standard_normal(t.shape)).astype("float32"), types)


def block_of_numpy(params, x, config, window):
    """One layer of a Llama-like model, for one row [T, C], by its definition."""

    def rms(scale, x):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + config.eps) * scale

    def turned(x, position):
        half = len(x) // 2
        angles = position * 10000.0 ** (-np.arange(half) / half)
        pairs = (x[:half] + 1j * x[half:]) * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag])

    K, G, D = config.key_heads, config.heads // config.key_heads, config.features
    params = tree.map(lambda w: w.astype(np.float64), params)
    attention, mlp = params["attention"], params["mlp"]
    rows = rms(params["norm1"]["scale"], x) @ attention["qkv"]["weight"].T
    if config.qkv_bias:
        rows = rows + attention["qkv"]["bias"]
    rows = rows.reshape(len(x), (G + 2) * K, D)
    queries, keys, values = np.split(rows, [G * K, (G + 1) * K], axis=1)
    if config.qk_norm:
        queries, keys = rms(attention["q_norm"]["scale"], queries), rms(attention["k_norm"]["scale"], keys)
    seen = np.zeros((len(x), G * K, D))
    for t in range(len(x)):
        first = 0 if window is None else max(0, t - window + 1)
        for n in range(G * K):
            query, k = turned(queries[t, n], t), n // G
            scores = [query @ turned(keys[s, k], s) / np.sqrt(D) for s in range(first, t + 1)]
            weights = np.exp(scores) / np.sum(np.exp(scores))
            seen[t, n] = weights @ values[first : t + 1, k]
    x = x + seen.reshape(len(x), -1) @ attention["out"]["weight"].T
    y = rms(params["norm2"]["scale"], x)
    gate = y @ mlp["gate"]["weight"].T
    return x + (gate / (1 + np.exp(-gate)) * (y @ mlp["up"]["weight"].T)) @ mlp["down"]["weight"].T


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3"])
def test_a_layer_is_its_definition(name, rng):
    config = CONFIGS[name]
    params = params_of(config)["layers"][1]
    x = rng.standard_normal((2, 9, config.width)).astype("float32")
    window = config.window(1)
    attend = lambda q, k, v: model.within(q, k, v, window)
    got, _ = model.block(params, x, np.arange(9)[None], 9, config, attend)
    expected = [block_of_numpy(params, row, config, window) for row in x.astype(np.float64)]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_cache_gives_the_logits_of_whole_rows(name, rng):
    config = CONFIGS[name]
    params = params_of(config)
    tokens = rng.integers(0, config.vocab, (2, 14)).astype("int32")
    whole = np.asarray(bf.jit(model.forward, static_argnums=2)(params, tokens, config))
    lengths = np.array([3, 10], np.int32)
    padded = np.where(np.arange(12) < lengths[:, None], tokens[:, :12], 7)  # what pads is not looked at
    logits, cache = bf.jit(model.prefill, static_argnums=(3, 4, 5))(params, padded, lengths, config, 16, 2)
    tight = {"rtol": 1e-4, "atol": 2e-5}
    np.testing.assert_allclose(logits, whole[[0, 1], lengths - 1], **tight)
    extend = bf.jit(model.extend, static_argnums=3)
    for n in (1, 2, 1):  # one token, two at once, one again
        following = np.stack([tokens[i, at : at + n] for i, at in enumerate(lengths)])
        logits, cache = extend(params, cache, following, config)
        for i, at in enumerate(lengths):
            np.testing.assert_allclose(logits[i], whole[i, at : at + n], **tight)
        lengths = lengths + n
        np.testing.assert_array_equal(cache.lengths, lengths)


def test_fresh_parameters():
    config = dataclasses.replace(SMALL, width=48, hidden=400, layers=8)
    params = model.init(random.key(0), config, "bfloat16")
    assert {leaf.dtype.name for leaf in tree.leaves(params)} == {"bfloat16"}
    layer = tree.map(lambda w: np.asarray(w, np.float32), params["layers"][2])
    assert np.std(layer["mlp"]["up"]["weight"]) == pytest.approx(0.08, rel=0.05)  # 0.02 at a width of 768
    assert np.std(layer["mlp"]["down"]["weight"]) == pytest.approx(0.08 / 4, rel=0.05)
    loss = model.loss(params, np.zeros((2, 9), np.int32), config)
    assert np.isfinite(float(loss)) and "head" not in params


def test_the_loss_is_the_entropy_of_the_logits(rng):
    config, params = CONFIGS["llama"], params_of(CONFIGS["llama"])
    tokens = rng.integers(0, config.vocab, (2, 7)).astype("int32")
    logits = np.asarray(model.forward(params, tokens[:, :-1], config), np.float64)
    log_z = np.log(np.exp(logits).sum(-1))
    expected = (log_z - np.take_along_axis(logits, tokens[:, 1:, None], 2)[..., 0]).mean()
    assert float(model.loss(params, tokens, config)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_survives_its_json(name):
    config = dataclasses.replace(CONFIGS[name], bos=1, eos=(2, 3))
    assert architectures.from_json(architectures.to_json(config, "float32")) == config
