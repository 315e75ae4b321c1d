"""Adapters in the files of PEFT: names, shapes, products, errors."""

import dataclasses
import json

import numpy as np
import pytest

import blufunc as bf
from blufunc import io, nn, random, tree
from blufunc.errors import DataError
from examples.llm import finetune, model, peft
from tests.examples.llm.test_llm_model import CONFIGS, params_of

NAMES = {  # of layer 0, as PEFT writes them: the module's path in the model, in "base_model.model"
    "gpt2": {
        "qkv": ["transformer.h.0.attn.c_attn"], "out": ["transformer.h.0.attn.c_proj"],
        "up": ["transformer.h.0.mlp.c_fc"], "down": ["transformer.h.0.mlp.c_proj"],
    },
    "llama": {
        "qkv": [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"],
        "out": ["model.layers.0.self_attn.o_proj"], "gate": ["model.layers.0.mlp.gate_proj"],
        "up": ["model.layers.0.mlp.up_proj"], "down": ["model.layers.0.mlp.down_proj"],
    },
}  # fmt: skip


def settings(targets, rank=3):
    return finetune.Settings(
        None, None, steps=1, batch=1, length=8, lr=1.0, rank=rank, targets=tuple(targets), alpha=8.0
    )


def adapters_of(params, targets):
    """Adapters of which no factor is 0."""
    leaves, treedef = tree.flatten(finetune.init_adapters(params, settings(targets)))
    keys = random.split(random.key(1), len(leaves))
    return tree.unflatten(treedef, [random.normal(k, x.shape) / 4 for k, x in zip(keys, leaves, strict=True)])


def own_config(name, **changes):
    return dataclasses.replace(CONFIGS[name], layers=2, **changes)


@pytest.mark.parametrize("name", NAMES)
def test_the_files_are_those_of_peft(name, tmp_path):
    config = own_config(name)
    params, targets = params_of(config), list(NAMES[name])
    adapters = adapters_of(params, targets)
    peft.save(tmp_path, adapters, config, 8.0, "base")
    facts = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (facts["peft_type"], facts["r"], facts["lora_alpha"], facts["fan_in_fan_out"]) == (
        "LORA",
        3,
        8,
        name == "gpt2",
    )
    tensors = io.load(tmp_path / "adapter_model.safetensors")
    assert set(facts) >= {"task_type", "base_model_name_or_path", "target_modules", "bias", "lora_dropout"}
    modules = [m for part in NAMES[name].values() for m in part]
    expected = {f"base_model.model.{m}.lora_{side}.weight" for m in modules for side in "AB"}
    assert {n for n in tensors if ".0." in n} == expected and len(tensors) == 2 * len(expected)
    # each target is the end of its modules' names, and of no others
    matched = {m for m in modules if any(m.endswith(f".{t}") for t in facts["target_modules"])}
    assert matched == set(modules)
    # the layers of the files, in a plain forward pass: W + alpha / r * B @ A
    module = modules[0]
    a, b = (tensors[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
    whole = adapters["layers"][0]["attention"]["qkv"]["weight"]
    np.testing.assert_array_equal(a, np.asarray(whole.a).T)
    assert b.shape[1] == 3 and b.shape[0] == (
        a.shape[1] * 3 if name == "gpt2" else config.heads * config.features
    )
    found, alpha = peft.load(tmp_path, config)
    assert alpha == 8.0
    tree.map(np.testing.assert_array_equal, found, adapters)
    with pytest.raises(DataError, match="holds adapters already"):
        peft.save(tmp_path, adapters, config, 8.0)


def test_rows_of_groups_are_those_of_the_layers(tmp_path):
    """Queries, keys and values of several groups, in the order of the weight's rows."""
    config = own_config("mistral", groups=2)
    adapters = adapters_of(params_of(config), ["qkv"])
    peft.save(tmp_path, adapters, config, 8.0)
    tree.map(np.testing.assert_array_equal, peft.load(tmp_path, config)[0], adapters)
    one = dataclasses.replace(config, groups=1)
    regrouped, _ = peft.load(tmp_path, one)
    b = io.load(tmp_path / peft.WEIGHTS)["base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"]
    start = config.heads * config.features
    np.testing.assert_array_equal(
        np.asarray(regrouped["layers"][0]["attention"]["qkv"]["weight"].b).T[start : start + len(b)], b
    )


def write(folder, tensors, **facts):
    folder.mkdir(exist_ok=True)
    io.save(folder / peft.WEIGHTS, {f"base_model.model.{n}.weight": v for n, v in tensors.items()})
    (folder / peft.CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 6, **facts}))


Q, V, UP = (f"model.layers.1.{m}_proj" for m in ("self_attn.q", "self_attn.v", "mlp.up"))


def factors(config):
    rng = np.random.default_rng(0)
    C, heads = config.width, (config.heads, config.key_heads)
    sizes = {Q: (heads[0] * config.features, 2), V: (heads[1] * config.features, 5), UP: (config.hidden, 2)}
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    return {
        f"{m}.lora_{side}": draw(r, C) if side == "A" else draw(n, r)
        for m, (n, r) in sizes.items()
        for side in "AB"
    }


@pytest.mark.parametrize(
    ("facts", "scales"),
    [
        ({}, (3, 6 / 5, 3)),
        ({"use_rslora": True}, (6 / 2**0.5, 6 / 5**0.5, 6 / 2**0.5)),
        (
            {"rank_pattern": {"v_proj": 5}, "alpha_pattern": {"self_attn.v_proj": 20, "up_proj": 1}},
            (3, 4, 0.5),
        ),
    ],
)
def test_layers_with_factors_of_their_own(facts, scales, tmp_path):
    """Adapters of queries and values alone, of other ranks: the weight gets their sum."""
    config = own_config("llama")
    params, given = params_of(config), factors(config)
    write(tmp_path, given, **facts)
    adapters, alpha = peft.load(tmp_path, config)
    got = peft.applied(params, adapters, alpha)
    product = {
        m: s * given[f"{m}.lora_B"] @ given[f"{m}.lora_A"] for m, s in zip((Q, V, UP), scales, strict=True)
    }
    layer, old = got["layers"][1], params["layers"][1]
    zeros = np.zeros((config.key_heads * config.features, config.width))
    want = np.concatenate([product[Q], zeros, product[V]])  # one group: queries, keys, values
    change = lambda *path: np.asarray(tree.map(lambda a, b: a - b, layer, old)[path[0]][path[1]]["weight"])
    assert config.groups == 1
    np.testing.assert_allclose(change("attention", "qkv"), want, atol=1e-5)
    np.testing.assert_allclose(change("mlp", "up"), product[UP], atol=1e-5)
    assert not change("mlp", "down").any()
    tokens = np.arange(6)[None]
    separate = nn.lora.apply(params, adapters, alpha=alpha)
    np.testing.assert_allclose(
        model.forward(separate, tokens, config), model.forward(got, tokens, config), atol=1e-3
    )


WRONG = {
    "no file": (lambda f, c: (f / peft.WEIGHTS).unlink(), "there is no .*adapter_model"),
    "no configuration": (lambda f, c: (f / peft.CONFIG).write_text("{}"), "lora_alpha"),
    "another type": (lambda f, c: write(f, factors(c), peft_type="IA3"), "the type IA3"),
    "weights of norms": (lambda f, c: write(f, factors(c), use_dora=True), "use_dora is True"),
    "trained biases": (lambda f, c: write(f, factors(c), bias="all"), "bias is 'all'"),
    "an unknown layer": (lambda f, c: write(f, {"model.layers.7.mlp.up_proj.lora_A": np.ones((2, 3))}), "layers.7"),
    "one factor": (lambda f, c: write(f, {f"{UP}.lora_A": factors(c)[f"{UP}.lora_A"]}), "the factors of"),
    "another width": (
        lambda f, c: write(f, {f"{UP}.lora_A": np.ones((2, 3)), f"{UP}.lora_B": np.ones((c.hidden, 2))}),
        r"lora_A is \[r",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name, tmp_path):
    config = own_config("llama")
    write(tmp_path, factors(config))
    change, message = WRONG[name]
    change(tmp_path, config)
    with pytest.raises(DataError, match=message):
        peft.load(tmp_path, config)


def test_no_adapters(tmp_path):
    with pytest.raises(DataError, match="there are no adapters"):
        peft.save(
            tmp_path, bf.tree.map(lambda x: None, params_of(own_config("llama"))), own_config("llama"), 8.0
        )
