"""Finetuning and the command line, on tiny models."""

import dataclasses
import re
import signal

import numpy as np
import pytest

import blufunc as bf
from blufunc import tree
from blufunc.errors import DataError
from examples.gpt import data
from examples.llm import cli, finetune, generate, model, placement, weights
from examples.llm.config import TINY
from tests.examples.llm.test_llm_model import params_of

NANO = dataclasses.replace(TINY, width=16, features=8, heads=2, key_heads=1, hidden=24, layers=1, context=32)
SETTINGS = finetune.Settings(None, None, steps=6, batch=4, length=16, lr=1e-2)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    return path


@pytest.fixture
def folder(tmp_path):
    weights.save(tmp_path / "model", params_of(NANO), NANO)
    return tmp_path / "model"


def trained(settings, out, text, **how):
    parts = finetune.windows(data.load(text), settings, NANO)
    return finetune.run(params_of(NANO), NANO, parts, settings, out, **how)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_a_run_lowers_the_loss_and_goes_on_to_the_bit(rank, tmp_path, text):
    settings = dataclasses.replace(SETTINGS, steps=8, rank=rank, targets=finetune.TARGETS)
    whole = trained(settings, tmp_path / "whole", text)
    (_, before), (_, after) = whole.history.validation
    assert after < before - (0.05 if rank else 0.2) and len(whole.history.train) == 8

    def stop(step, loss, validation):
        if step == 5:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(finetune.Stopped):
        trained(settings, tmp_path / "again", text, watch=stop)
    steps = []
    resumed = trained(settings, tmp_path / "again", text, watch=lambda *step: steps.append(step[0]))
    assert steps == [6, 7, 8] and resumed.history == whole.history
    tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    with pytest.raises(DataError, match="has checkpoints of other settings"):
        trained(dataclasses.replace(settings, lr=1.0), tmp_path / "again", text)


@pytest.mark.slow
def test_adapters_are_all_that_is_trained(tmp_path, text):
    settings = dataclasses.replace(SETTINGS, rank=4, targets=("qkv", "down"))
    start = params_of(NANO)
    result = trained(settings, tmp_path / "run", text)
    assert len(tree.leaves(result.adapters)) == 2 * 2
    changed = tree.map(lambda a, b: not np.array_equal(a, b), start, result.params)
    layer = changed["layers"][0]
    assert layer["attention"]["qkv"]["weight"] and layer["mlp"]["down"]["weight"]
    assert sum(tree.leaves(changed)) == 2
    adapter = result.adapters["layers"][0]["attention"]["qkv"]["weight"]
    assert adapter.a.shape == (16, 4) and adapter.b.shape == (4, 32)
    expected = start["layers"][0]["attention"]["qkv"]["weight"] + (4.0 * adapter.a @ adapter.b).T
    np.testing.assert_allclose(result.params["layers"][0]["attention"]["qkv"]["weight"], expected, atol=1e-6)
    tokens = np.arange(10)[None]
    applied = bf.nn.lora.apply(start, result.adapters, alpha=settings.alpha)
    np.testing.assert_allclose(
        model.forward(applied, tokens, NANO), model.forward(result.params, tokens, NANO), rtol=1e-4, atol=1e-4
    )


def test_gradients_of_frozen_weights_are_no_arrays():
    settings = dataclasses.replace(SETTINGS, rank=2, targets=finetune.TARGETS)
    params = params_of(NANO)
    grad = bf.grad(finetune.make_loss(placement.Layout(config=NANO), settings, None))
    program = bf.make_jaxpr(grad)(
        finetune.init_adapters(params, settings), params, np.zeros((2, 9), np.int32)
    )
    made = [v.aval.shape for eqn in program.eqns for v in eqn.outvars if eqn.prim.name == "dot_general"]
    assert made and (24, 16) not in made and (16, 24) not in made


def test_windows_longer_than_the_context(text):
    with pytest.raises(
        DataError, match=r"(?s)windows of 33 tokens do not fit the context of 32.*--length 32"
    ):
        finetune.windows(data.load(text), dataclasses.replace(SETTINGS, length=33), NANO)


def test_text_becomes_tokens(text):
    class Words:
        place, size = "words", 256

        def encode(self, text, special=True):
            return [len(word) for word in text.split()]

    dataset = finetune.tokenized(data.load(text), Words())
    assert dataset.train[0].tokens[:9].tolist() == [3, 5, 5, 3, 5, 4, 3, 4, 3] and dataset.unit == "token"


# -- the command line ------------------------------------------------------------------------------


def test_finetune_and_generate(folder, tmp_path, text, capsys):
    out = str(tmp_path / "out")
    words = [
        "--model",
        str(folder),
        "--bytes",
        "--data",
        str(text),
        "--steps",
        "3",
        "--batch",
        "2",
        "--length",
        "16",
    ]
    run = ["finetune", *words, "--lora", "2", "--out", out, "--no-progress"]
    assert cli.main(run) == 0
    said = capsys.readouterr().out
    assert (
        re.search(r"validation loss +\d\.\d{3} before, \d\.\d{3} after", said)
        and f"--model {out} --bytes" in said
    )
    adapter = str(tmp_path / "out" / "adapter")
    options = ["--model", str(folder), "--adapter", adapter, "--bytes", "--tokens", "5", "--prompt", "the "]
    assert cli.main(["generate", *options]) == 0
    by_adapter = capsys.readouterr().out.splitlines()[1]
    assert cli.main(["generate", "--model", out, "--bytes", "--tokens", "5", "--prompt", "the "]) == 0
    said = capsys.readouterr().out
    assert by_adapter == said.splitlines()[1]
    params, config = weights.load(out)
    expected = bytes(generate.generate(params, config, [list(b"the ")], 5)[0]).decode(errors="replace")
    assert f"the {expected}\n" in said and re.search(r"rate +[\d,.]+ tokens/s, 1 rows", said)
    assert cli.main(run) == 2
    assert "holds a model already" in capsys.readouterr().err


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        ["--temperature", "0.8", "--top-k", "5", "--prompt", "a", "--prompt", "bcd"],
        ["--draft", "same", "--ahead", "2"],
        ["--mesh", "model=1", "--dtype", "bfloat16"],
    ],
    ids=lambda options: options[0],
)
def test_ways_to_generate(options, folder, capsys):
    options = [str(folder) if word == "same" else word for word in options]
    assert cli.main(["generate", "--model", str(folder), "--bytes", "--tokens", "6", *options]) == 0
    said = capsys.readouterr().out
    assert "tokens/s" in said and ("a round and row" in said) == ("--draft" in options)


@pytest.mark.slow
def test_a_model_need_not_be_given(monkeypatch, capsys):
    monkeypatch.setattr(cli, "TINY", NANO)
    assert cli.main(["generate", "--tokens", "3"]) == 0
    assert "a random model of bytes: llama" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["generate", "--model", "nowhere"], "there is no nowhere/config.json"),
        (["generate", "--model", "FOLDER"], "has no tokenizer"),
        (["generate", "--model", "FOLDER", "--bytes", "--tokens", "40"], "do not fit the context of 32"),
        (
            ["generate", "--model", "FOLDER", "--bytes", "--mesh", "model=2"],
            "1 key heads cannot be divided among 2",
        ),
        (["finetune", "--model", "FOLDER", "--bytes", "--targets", "q"], "'q' is no matrix of a layer"),
        (["finetune", "--model", "FOLDER", "--bytes", "--out", "FOLDER"], "holds a model already"),
    ],
)
def test_invalid_input_is_a_message(words, message, folder, monkeypatch, capsys):
    monkeypatch.setattr(bf.config, "cpu_devices", 2)
    assert cli.main([str(folder) if word == "FOLDER" else word for word in words]) == 2
    assert message in capsys.readouterr().err
