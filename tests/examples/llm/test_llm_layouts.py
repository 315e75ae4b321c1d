"""The finetuning step under each layout: its losses are those of one device."""

import dataclasses
import functools
import re

import numpy as np
import pytest

import blufunc as bf
from blufunc import tree
from blufunc.config import config as flags
from examples.llm import cli, finetune, layouts, placement, weights
from examples.llm.config import TINY
from tests.examples.llm.test_llm_model import params_of

DENSE = dataclasses.replace(TINY, vocab=48, width=16, features=4, hidden=24, context=32)
OTHERS = {
    "gpt2": dataclasses.replace(
        DENSE, architecture="gpt2", key_heads=4, norm="layer", mlp="gelu", rope=None,
        qkv_bias=True, out_bias=True, mlp_bias=True,
    ),
    "windows": dataclasses.replace(DENSE, architecture="mistral", windows=(5, 5), tied=False),
    "qwen3": dataclasses.replace(DENSE, architecture="qwen3", qk_norm=True, tied=False),
    "experts": dataclasses.replace(DENSE, architecture="mixtral", experts=4, balance=0.02, tied=False),
    "one layer": dataclasses.replace(DENSE, layers=1),
    "deep": dataclasses.replace(DENSE, layers=4),
}  # fmt: skip
CONFIGS = {"llama": DENSE, **OTHERS}
B, T, STEPS = 8, 16, 3
SETTINGS = finetune.Settings(None, None, steps=8, batch=B, length=T, lr=1e-2)
TOKENS = np.random.default_rng(0).integers(0, DENSE.vocab, (STEPS, B, T + 1)).astype(np.int32)


@pytest.fixture(autouse=True)
def one_device_again(monkeypatch):
    monkeypatch.setattr(flags, "cpu_devices", 1)
    monkeypatch.setattr(flags, "host_compiler", "never")  # NumPy: what is tested is the partition


def trained(config, axes, how, settings=SETTINGS, evaluates=True):
    """Losses of the first steps; an evaluation gives the first one, too."""
    layout = layouts.layout(axes, config, B, T, recompute=settings.recompute, **how)
    settings = dataclasses.replace(settings, accumulate=how.get("microbatches", 1))
    optimizer, loss = (
        finetune.make_optimizer(settings),
        finetune.make_loss(layout, settings, None),
    )
    params = params_of(dataclasses.replace(config, groups=1))
    start = placement.in_groups(params, layout.config)
    values, frozen = layout.placed(start), None
    if settings.rank:
        values, frozen = layout.replicated(finetune.init_adapters(start, settings)), values
    state = layout.state(optimizer.init, values)
    step = finetune.make_step(loss, optimizer, layout, settings, None)
    evaluated = float(bf.jit(loss)(values, frozen, layout.divided(TOKENS[0]))) if evaluates else None
    losses = []
    for tokens in TOKENS:
        values, state, loss = step(values, state, frozen, layout.divided(tokens))
        losses.append(float(loss))
    if not evaluates:
        return losses
    apart = (
        config.experts and settings.accumulate > 1
    )  # the balance loss is one of the tokens of a microbatch
    assert evaluated == pytest.approx(losses[0], rel=1e-3 if apart else 2e-6)
    return losses


@functools.cache
def alone(name, settings=SETTINGS, microbatches=1):
    return trained(CONFIGS[name], None, {"microbatches": microbatches}, settings)


PIPELINE = {"microbatches": 4}
INTERLEAVED = {"microbatches": 4, "schedule": "interleaved", "chunks": 2}
CASES = {  # the model, the axes, the options
    "data": ("llama", {"data": 2}, {}),
    "data, microbatches": ("llama", {"data": 2}, {"microbatches": 2}),
    "zero1": ("llama", {"zero1": 2}, {"microbatches": 2}),
    "zero2": ("llama", {"zero2": 2}, {"microbatches": 2}),
    "fsdp": ("qwen3", {"fsdp": 4}, {}),
    "tensor and sequence": ("llama", {"model": 2}, {}),
    "tensor, GPT-2": ("gpt2", {"model": 4}, {}),
    "data x fsdp x tensor": ("qwen3", {"data": 2, "fsdp": 2, "model": 2}, {}),
    "context, ring": ("llama", {"seq": 2}, {}),
    "context, all_gather": ("gpt2", {"seq": 4}, {"routing": "all_gather"}),
    "context, all_to_all": ("llama", {"seq": 2}, {"routing": "all_to_all"}),
    "context with windows": ("windows", {"seq": 2}, {}),
    "fsdp x context x tensor": ("llama", {"fsdp": 2, "seq": 2, "model": 2}, {}),
    "pipeline, 1f1b": ("llama", {"stage": 2}, PIPELINE),
    "pipeline, gpipe, GPT-2": ("gpt2", {"stage": 2}, PIPELINE | {"schedule": "gpipe"}),
    "pipeline, interleaved": ("deep", {"stage": 2}, INTERLEAVED),
    "pipeline, zb-h1": ("deep", {"stage": 2, "data": 2}, PIPELINE | {"schedule": "zb-h1"}),
    "pipeline, sharded vocabulary": ("qwen3", {"stage": 2, "data": 2}, PIPELINE | {"sharded_ends": True}),
    "pipeline x fsdp": ("qwen3", {"stage": 2, "fsdp": 2}, PIPELINE),
    "pipeline x tensor": ("gpt2", {"stage": 2, "model": 2}, PIPELINE),
    "pipeline x context, windows": ("windows", {"stage": 2, "seq": 2}, PIPELINE),
    "pipeline x experts": ("experts", {"stage": 2, "expert": 2}, PIPELINE),
    "experts": ("experts", {"expert": 4}, {}),
    "experts x data x fsdp": ("experts", {"expert": 2, "data": 2, "fsdp": 2}, {}),
    "experts x tensor": ("experts", {"expert": 2, "model": 2}, {}),
    "experts, replicated": ("experts", {"data": 2}, {}),
}


def check(name):
    kind, axes, how = CASES[name]
    count = how.get("microbatches", 1) if kind == "experts" else 1
    np.testing.assert_allclose(trained(CONFIGS[kind], axes, how), alone(kind, SETTINGS, count), rtol=3e-6)


def family(axis, *others):
    """Cases with an axis, and without the others."""
    return [name for name, (_, axes, _) in CASES.items() if axis in axes and not axes.keys() & set(others)]


REST = [name for name, (_, axes, _) in CASES.items() if not axes.keys() & {"model", "seq", "stage", "expert"}]


# Tests of their own, so that each tier has some of each.
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", REST)
def test_losses_with_sharded_batches_are_those_of_one_device(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", family("model", "seq", "stage", "expert"))
def test_losses_with_sharded_features_are_those_of_one_device(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", family("seq", "stage"))
def test_losses_with_sharded_sequences_are_those_of_one_device(name):
    check(name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", family("stage", "expert"))
def test_losses_of_pipelines_are_those_of_one_device(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", family("expert"))
def test_losses_with_sharded_experts_are_those_of_one_device(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "how"),
    [
        ({"stage": 2}, INTERLEAVED),
        ({"stage": 2, "model": 2}, PIPELINE),
        ({"expert": 2, "fsdp": 2}, {}),
    ],
    ids=["interleaved", "stage x model", "expert x fsdp"],
)
def test_files_are_read_and_written_in_the_form_of_one_device(axes, how, tmp_path):
    config = OTHERS["deep"] if "stage" in axes else OTHERS["experts"]
    params = params_of(config)
    weights.save(tmp_path / "m", params, config, shard_bytes=8000)
    layout = layouts.layout(axes, config, B, T, **how)
    order = placement.order(config.layers, layout.plan)
    read, _ = weights.load(tmp_path / "m", layout.places(), None, layout.config, order=order)
    tree.map(np.testing.assert_array_equal, read, layout.placed(placement.in_groups(params, layout.config)))
    table = next(leaf for leaf in tree.leaves(read["layers"]) if leaf.ndim > 2)
    assert np.prod(table.sharding.shard_shape(table.shape)) < table.size
    weights.save(tmp_path / "again", layout.whole(read), layout.config)
    tree.map(np.testing.assert_array_equal, weights.load(tmp_path / "again")[0], params)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"fsdp": 2, "model": 2}, {"zero1": 2, "seq": 2}], ids=str)
def test_adapters(axes):
    settings = dataclasses.replace(SETTINGS, rank=2, recompute=True)
    np.testing.assert_allclose(trained(DENSE, axes, {}, settings), alone("llama", settings), rtol=3e-6)


RUN = ["finetune", "--steps", "2", "--batch", "4", "--length", "16", "--no-progress"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--mesh", "fsdp=2,model=2", "--autocast", "bfloat16"],
        ["--mesh", "stage=2", "--layers", "4", "--accumulate", "2", "--pipeline-schedule", "interleaved"],
        ["--mesh", "expert=2", "--experts", "4"],
    ],
    ids=lambda options: options[1],
)
def test_commands(options, text, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main([*RUN, *options, "--data", text, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    before = re.search(r"validation loss +(\S+) before", said)
    assert before
    if "fsdp=2,model=2" in options:  # heads in groups are the same model
        assert cli.main([*RUN, *options[2:], "--data", text, "--out", str(tmp_path / "one")]) == 0
        assert f" {before[1]} before" in capsys.readouterr().out
    assert cli.main(["generate", "--model", str(out), "--bytes", "--tokens", "3"]) == 0
    for name in ("config.json", weights.SINGLE):
        (out / name).unlink()
    repeated = [*RUN, *options[2:], "--data", text, "--out", str(out)]
    if "stage=2" in options:
        assert cli.main([*repeated, "--mesh", "stage=4", "--accumulate", "4", "--chunks", "1"]) == 2
    elif "expert=2" in options:  # the form of one device, on which the run goes on
        assert cli.main(repeated) == 0
    else:
        assert cli.main(repeated) == 2
        assert "has checkpoints of another form" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--mesh", "model=3"],
            r"2 key heads cannot be divided among 3 devices.*the axis 'model' divides.*model=2",
        ),
        (["--mesh", "stage=4"], r"2 layers cannot be divided among 4 devices.*stage=2"),
        (["--mesh", "expert=2"], r"a llama model has no experts.*--experts of the random model"),
        (["--mesh", "expert=3", "--experts", "4"], r"4 experts cannot be divided among 3 devices.*expert=2"),
        (["--mesh", "data=3"], r"a batch of 4 cannot be divided among 3 devices.*--batch 6"),
        (["--mesh", "fsdp=5,data=1"], r"64 features cannot be divided among 5 devices.*fsdp=4"),
        (
            ["--mesh", "seq=3"],
            r"16 tokens of a context cannot be divided into 6 parts.*along seq.*4 instead of 6",
        ),
        (
            ["--mesh", "seq=4", "--routing", "all_to_all"],
            r"2 key heads cannot be divided among 4 devices.*--routing ring",
        ),
        (
            ["--mesh", "seq=2,model=2", "--routing", "all_to_all"],
            r"2 key heads cannot be divided among 4 devices.*--routing ring",
        ),
        (["--chunks", "2"], r"--chunks 2 without an axis stage.*leave --chunks out"),
        (["--accumulate", "3"], r"a batch of 4 cannot.*--accumulate 3.*--batch 6"),
        (
            ["--mesh", "stage=2", "--pipeline-schedule", "interleaved"],
            r"2 layers cannot be divided into 4 parts.*2 instead of 4",
        ),
        (["--routing", "all_gather"], r"--routing all_gather without an axis seq.*--mesh seq=2"),
        (
            ["--mesh", "stage=2", "--lora", "4"],
            r"adapters are not trained in a pipeline.*--mesh stage=2.*fsdp and model",
        ),
        (["--mesh", "data=2", "--qlora"], r"quantized weights are on one device.*--mesh data=2.*codes"),
        (["--experts", "4", "--qlora"], r"matrices of experts are not quantized"),
        (["--experts", "4", "--lora", "2", "--targets", "up"], r"up of experts has no adapters"),
        (["--layers", "3", "--model", "somewhere"], r"--layers with a model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_combine_is_explained(options, message, text, tmp_path, capsys):
    out = str(tmp_path / "out")
    if "interleaved" in options:
        options = [*options, "--accumulate", "2"]
    assert cli.main([*RUN, *options, "--data", text, "--out", out]) == 2
    said = capsys.readouterr()
    assert re.search(f"(?s){message}", said.err)
    assert "parameters" not in said.out  # before weights are read


def test_the_size_of_an_axis_can_be_that_of_all_devices(monkeypatch, capsys):
    monkeypatch.setattr(bf.config, "cpu_devices", 2)
    assert cli.main(["generate", "--mesh", "model=-1", "--tokens", "2"]) == 0
    monkeypatch.setattr(bf.config, "cpu_devices", 3)
    assert cli.main(["generate", "--mesh", "model=-1"]) == 2
    assert "2 key heads cannot be divided among 3 devices" in capsys.readouterr().err


def test_an_axis_of_one_device_needs_no_experts(monkeypatch):
    monkeypatch.setattr(bf.config, "cpu_devices", 1)
    found = layouts.layout({"expert": 1}, DENSE, 4, 16)
    assert dict(found.plan.mesh.shape) == {"expert": 1}


def test_a_token_is_not_generated_along_stages(capsys):
    assert cli.main(["generate", "--mesh", "stage=2"]) == 2
    assert "tokens are not generated along stage" in capsys.readouterr().err
