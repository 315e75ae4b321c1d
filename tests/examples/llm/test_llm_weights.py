"""Folders of Hugging Face: saving and loading, and what is wrong is named."""

import dataclasses
import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import blufunc as bf
from blufunc import tree
from blufunc.errors import DataError
from examples.llm import architectures, model, placement, weights
from tests.examples.llm.test_llm_model import CONFIGS, params_of


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_survive_a_folder(name, tmp_path):
    config, params = CONFIGS[name], params_of(CONFIGS[name])
    weights.save(tmp_path / "one", params, config)
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == ["config.json", "model.safetensors"]
    weights.save(tmp_path / "several", params, config, shard_bytes=8000)
    index = json.loads((tmp_path / "several" / weights.INDEX).read_text())
    files = sorted(p.name for p in (tmp_path / "several").glob("model-*.safetensors"))
    assert len(files) > 3 and set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in tree.leaves(params))
    for folder in ("one", "several"):
        found, there = weights.load(tmp_path / folder)
        assert there == config
        tree.map(np.testing.assert_array_equal, found, params)


def test_the_tensors_are_those_of_the_names(tmp_path):
    """Rows of one matrix become three tensors; GPT-2's are transposed."""
    config, params = CONFIGS["qwen2"], params_of(CONFIGS["qwen2"])
    weights.save(tmp_path / "qwen2", params, config)
    found = safetensors.numpy.load_file(tmp_path / "qwen2" / "model.safetensors")
    rows = params["layers"][1]["attention"]["qkv"]["weight"]
    for part, at in (("q", slice(0, 32)), ("k", slice(32, 48)), ("v", slice(48, 64))):
        assert np.array_equal(found[f"model.layers.1.self_attn.{part}_proj.weight"], rows[at])
    two, _ = weights.load(tmp_path / "qwen2", config=dataclasses.replace(config, groups=2))
    grouped = np.asarray(
        two["layers"][1]["attention"]["qkv"]["weight"]
    )  # 2 queries, a key and a value; again
    assert np.array_equal(grouped[:16], rows[:16]) and np.array_equal(grouped[48:56], rows[40:48])
    config, params = CONFIGS["gpt2"], params_of(CONFIGS["gpt2"])
    weights.save(tmp_path / "gpt2", params, config)
    found = safetensors.numpy.load_file(tmp_path / "gpt2" / "model.safetensors")
    assert np.array_equal(
        found["transformer.h.0.mlp.c_fc.weight"], params["layers"][0]["mlp"]["up"]["weight"].T
    )
    bias = params["layers"][0]["attention"]["qkv"]["bias"]
    assert np.array_equal(found["transformer.h.0.attn.c_attn.bias"], bias)


def test_dtypes_are_kept_or_converted(tmp_path):
    config = CONFIGS["llama"]
    params = tree.map(lambda w: w.astype(ml_dtypes.bfloat16), params_of(config))
    weights.save(tmp_path / "m", params, config)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "bfloat16"
    kept, _ = weights.load(tmp_path / "m")
    wide, _ = weights.load(tmp_path / "m", dtype="float32")
    assert kept["embed"].dtype == "bfloat16" and wide["embed"].dtype == "float32"
    tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a, "float32"), b), kept, wide)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axes", [{"model": 2}, {"fsdp": 2}, {"fsdp": 2, "model": 2}], ids=str)
def test_a_mesh_reads_its_shards(axes, tmp_path, monkeypatch, rng):
    monkeypatch.setattr(bf.config, "cpu_devices", 4)
    config = dataclasses.replace(CONFIGS["qwen2"], vocab=42)
    params = params_of(config)
    weights.save(tmp_path / "m", params, config, shard_bytes=8000)
    mesh = bf.make_mesh(tuple(axes.values()), tuple(axes))
    sizes = []
    part = weights.Folder.part

    def counted(self, stored, index):
        found = part(self, stored, index)
        sizes.append(found.nbytes)
        return found

    monkeypatch.setattr(weights.Folder, "part", counted)
    shardings, grouped = placement.placed(config, mesh)
    placed, _ = weights.load(tmp_path / "m", shardings, config=grouped)
    largest = max(leaf.nbytes for leaf in tree.leaves(params))
    assert max(sizes) <= largest // 2  # the embeddings, in parts
    qkv = placed["layers"][0]["attention"]["qkv"]["weight"]
    assert qkv.sharding.shard_shape(qkv.shape) == (64 // axes.get("model", 1), 24 // axes.get("fsdp", 1))
    weights.save(tmp_path / "again", placed, grouped)
    tree.map(np.testing.assert_array_equal, weights.load(tmp_path / "again")[0], params)
    tokens = rng.integers(0, config.vocab, (2, 9)).astype("int32")
    whole = model.forward(params, tokens, config)
    np.testing.assert_allclose(
        bf.jit(model.forward, static_argnums=2)(placed, tokens, grouped), whole, rtol=1e-4, atol=1e-5
    )


def test_a_mesh_that_does_not_divide_the_model(monkeypatch):
    monkeypatch.setattr(bf.config, "cpu_devices", 4)
    with pytest.raises(DataError, match="2 key heads cannot be divided among 4 devices"):
        placement.placed(CONFIGS["qwen2"], bf.make_mesh((4,), ("model",)))


# -- bad input -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A model in several files."""
    config = CONFIGS["llama"]
    weights.save(tmp_path / "m", params_of(config), config, shard_bytes=8000)
    return tmp_path / "m"


def change(path, **changes):
    """Change entries of a JSON file; None removes one."""
    found = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


def rewrite(folder, tensor, value):
    """Replace a tensor in its file; None removes it."""
    index = json.loads((folder / weights.INDEX).read_text())["weight_map"]
    file = folder / index.get(tensor, min(index.values()))
    found = dict(safetensors.numpy.load_file(file))
    found.pop(tensor, None)
    safetensors.numpy.save_file(found | ({} if value is None else {tensor: value}), file)
    change(
        folder / weights.INDEX,
        weight_map={k: v for k, v in index.items() if k != tensor or value is not None},
    )


NORM = "model.layers.1.input_layernorm.weight"
TABLE = {
    "no folder": (shutil.rmtree, r"there is no .*config\.json", "name a folder of a model"),
    "no index": (
        lambda f: (f / weights.INDEX).unlink(),
        r"lacks model\.safetensors\.index\.json",
        "fetch model.saf",
    ),
    "no weights": (
        lambda f: [p.unlink() for p in f.glob("model*")],
        "has no weights",
        "fetch model.safetensors",
    ),
    "a broken index": (
        lambda f: (f / weights.INDEX).write_text("[]"),
        "is not an index",
        "fetch the file again",
    ),
    "a missing file": (
        lambda f: min(f.glob("model-*")).unlink(),
        "there is no .*model-00001",
        "fetch that file",
    ),
    "a missing tensor": (lambda f: rewrite(f, NORM, None), f"index.json lacks {NORM}", "compare config.json"),
    "an extra tensor": (
        lambda f: rewrite(f, "model.layers.1.self_attn.q_proj.bias", np.ones(3, "float32")),
        r"model-00001.* also has model\.layers\.1\.self_attn\.q_proj\.bias",
        "check config.json",
    ),
    "another shape": (
        lambda f: rewrite(f, NORM, np.ones(23, "float32")),
        rf"{NORM} has shape \[23\], not \[24\]",
        "fetch config.json and the weights",
    ),
    "integers": (
        lambda f: rewrite(f, NORM, np.ones(24, "int8")),
        f"{NORM} holds int8",
        "in bfloat16 or float32",
    ),
    "a wrong index": (
        lambda f: change(f / weights.INDEX, weight_map={NORM: min(p.name for p in f.glob("model-*"))}),
        f"has no tensor {NORM}",
        "fetch the index",
    ),
    "no architecture": (
        lambda f: change(f / "config.json", model_type="mamba"),
        "the architecture 'mamba' is unknown",
        "add a row to architectures.TABLE",
    ),
    "an activation": (
        lambda f: change(f / "config.json", hidden_act="relu"),
        "hidden_act is 'relu'",
        "another check",
    ),
    "no size": (
        lambda f: change(f / "config.json", hidden_size=None),
        "hidden_size is missing",
        "fetch the file",
    ),
    "rope": (
        lambda f: change(f / "config.json", rope_parameters={"rope_type": "spiral"}),
        "rotary positions",
        "rope_type is one of",
    ),
    "heads": (
        lambda f: change(f / "config.json", num_key_value_heads=3),
        "cannot share 3 key heads",
        "a multiple",
    ),
    "no json": (
        lambda f: (f / "config.json").write_text("{"),
        "config.json is not JSON",
        "fetch the file again",
    ),
}


@pytest.mark.parametrize("what", TABLE)
def test_a_wrong_folder_is_explained(what, folder):
    wrong, message, fix = TABLE[what]
    wrong(folder)
    with pytest.raises(DataError, match=message) as caught:
        weights.load(folder)
    assert str(folder) in caught.value.where and fix in caught.value.fix


def test_tensors_that_follow_from_the_configuration_are_ignored(folder):
    rewrite(folder, "model.layers.0.self_attn.rotary_emb.inv_freq", np.ones(4, "float32"))
    rewrite(folder, "lm_head.weight", np.ones((41, 24), "float32"))  # tied
    assert "head" not in weights.load(folder)[0]


def test_gpt2_of_the_first_files_has_no_prefix(tmp_path):
    config, params = CONFIGS["gpt2"], params_of(CONFIGS["gpt2"])
    weights.save(tmp_path / "m", params, config)
    path = tmp_path / "m" / "model.safetensors"
    found = {k.removeprefix("transformer."): v for k, v in safetensors.numpy.load_file(path).items()}
    found["h.0.attn.bias"] = np.ones((1, 1, 4, 4), "float32")  # the causal mask
    safetensors.numpy.save_file(found, path)
    tree.map(np.testing.assert_array_equal, weights.load(tmp_path / "m")[0], params)


def test_a_folder_with_a_model_is_not_written_to(folder):
    params, config = weights.load(folder)
    with pytest.raises(DataError, match="holds a model already"):
        weights.save(folder, params, config)


def test_windows_of_qwen_by_layer():
    raw = architectures.to_json(CONFIGS["qwen2"], "float32")
    raw.pop("layer_types")
    assert architectures.from_json(raw | {"max_window_layers": 1}).windows == (None, 4)
    assert architectures.from_json(raw | {"use_sliding_window": False}).windows == ()
    with pytest.raises(DataError, match="layer_types has 1 entries"):
        architectures.from_json(raw | {"layer_types": ["full_attention"]})
