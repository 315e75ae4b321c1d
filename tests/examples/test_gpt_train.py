"""The demo end to end, on a tiny model: train, stop, resume, sample, report."""

import dataclasses
import math
import signal

import numpy as np
import pytest
from safetensors.numpy import load_file

from blufunc import io, random, tree
from blufunc.errors import DataError
from examples.gpt import cli, data, facts, model, report, sample, train

NO_SAMPLE = ("--sample-tokens", "0")
NANO = model.Config(layers=2, heads=2, width=16, context=16, vocab=256)


@pytest.fixture(autouse=True)
def nano(monkeypatch):
    monkeypatch.setitem(model.PRESETS, "nano", NANO)
    monkeypatch.setitem(train.RECIPES, "nano", {"steps": 12, "batch": 4, "lr": 1e-2})


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return path


@pytest.fixture
def run(tmp_path, text):
    """Run the program on the text, and return the output folder of that name."""

    def run(name, *options, status=0):
        out = tmp_path / name
        words = [
            "--preset",
            "nano",
            "--data",
            str(text),
            "--out",
            str(out),
            "--sample-tokens",
            "20",
            *options,
        ]
        assert cli.main([*words, "--no-progress"]) == status
        return out

    return run


def history(out):
    return io.Checkpointer(out / "checkpoints").facts()["history"]


def state(out):
    """The arrays of the last checkpoint, by name."""
    return io.Checkpointer(out / "checkpoints").restore()


# --------------------------------------------------------------------------------------------------- model


def test_the_presets_have_the_sizes_they_are_named_for():
    config = model.PRESETS["gpt2-124m"]
    params = model.init(random.key(0), dataclasses.replace(config, layers=1, vocab=64))
    block = sum(leaf.size for leaf in tree.leaves(params["blocks"]))
    assert 12 * block + (50257 + 1024) * 768 + 2 * 768 == 124_439_808
    for config in model.PRESETS.values():
        assert config.width % config.heads == 0


def test_initial_parameters():
    config = dataclasses.replace(NANO, width=768 // 16, layers=8)
    params = model.init(random.key(0), config)
    params = tree.map(np.asarray, params)
    assert np.std(params["tokens"]) == pytest.approx(0.08, rel=0.05)  # GPT-2's 0.02 at its width of 768
    block = params["blocks"][3]
    assert np.std(block["attention"]["qkv"]["weight"]) == pytest.approx(0.08, rel=0.05)
    for projection in (block["attention"]["out"], block["mlp"]["down"]):
        assert np.std(projection["weight"]) == pytest.approx(0.08 / 4, rel=0.05)
        assert not np.any(projection["bias"])
    assert np.all(np.asarray(block["norm1"]["scale"]) == 1)
    assert not np.array_equal(params["blocks"][0]["mlp"]["up"]["weight"], block["mlp"]["up"]["weight"])


def test_logits_depend_on_the_past_alone_and_start_out_uniform():
    params = model.init(random.key(0), NANO)
    tokens = np.random.default_rng(0).integers(256, size=(2, 16)).astype(np.int32)
    changed = tokens.copy()
    changed[:, 9] += 1
    before, after = (np.asarray(model.forward(params, t, NANO)) for t in (tokens, changed % 256))
    assert before.shape == (2, 16, 256)
    np.testing.assert_allclose(before[:, :9], after[:, :9], atol=1e-6)
    assert np.abs(before[:, 9:] - after[:, 9:]).max() > 1e-3
    assert float(model.loss(params, tokens, NANO)) == pytest.approx(math.log(256), abs=0.3)


# ------------------------------------------------------------------------------------------------ training


def test_a_run_from_end_to_end(run, capsys):
    out = run("run", "--steps", "40")
    losses = history(out)["train"]
    assert len(losses) == 40 and losses[-1] < losses[0] - 1
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    shapes = {name: array.shape for name, array in load_file(out / "weights.safetensors").items()}
    assert shapes["tokens"] == (256, 16) and shapes["blocks.1.mlp.up.weight"] == (16, 64)
    said = capsys.readouterr().out
    for expected in (
        "nats a byte =",
        "bits a byte",
        "a sample",
        "loss.png",
        "weights.safetensors",
        "bytes/s",
    ):
        assert expected in said
    (command,) = (line for line in said.splitlines() if line.startswith("to continue"))
    assert command.endswith(f"-m examples.gpt --resume {out} --steps 80")
    assert "the learning rate, now at its lowest, rises again" in said
    assert f"validation loss  {history(out)['validation'][-1][1]:.3f}" in said


@pytest.mark.slow
def test_the_same_settings_give_the_same_run_and_another_seed_another(run):
    first, second, other = run("a"), run("b"), run("c", "--seed", "1")
    assert history(first) == history(second)
    assert history(first)["train"] != history(other)["train"]


def interrupting(monkeypatch, *calls, times=1):
    """Let these calls of the step interrupt the run."""
    make_step, count = train.make_step, iter(range(1000))

    def interrupted(*settings):
        step = make_step(*settings)

        def counted(*args):
            if next(count) in calls:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return step(*args)

        return counted

    monkeypatch.setattr(train, "make_step", interrupted)


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_equals_never_having_stopped(run, monkeypatch, capsys):
    whole = run("whole")
    capsys.readouterr()
    with monkeypatch.context() as patch:
        interrupting(patch, 4)
        out = run("parts", status=io.STOPPED)
    said = capsys.readouterr().out
    assert "interrupted      after 5 of 12 steps, which are saved" in said
    assert f"--resume {out}\n" in said  # no --steps: the run has steps left
    assert len(history(out)["train"]) == 5 and not (out / "weights.safetensors").exists()

    run("parts")
    assert "steps 6 to 12" in capsys.readouterr().out
    assert history(out)["train"] == history(whole)["train"]
    assert history(out)["validation"][-1] == history(whole)["validation"][-1]
    files = state(out), state(whole)
    assert files[0].keys() == files[1].keys() and files[0]["position"] == 12
    for name, array in files[0].items():
        assert name == "position" or array.tobytes() == files[1][name].tobytes(), name


@pytest.mark.slow
def test_anew_and_other_settings_start_again(run, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        interrupting(patch, 4)
        out = run("run", status=io.STOPPED)
    run("run", "--steps", "7", status=2)
    assert "holds another run, which has taken 5 of its" in capsys.readouterr().err
    for options in (["--anew", "--steps", "6"], ["--steps", "7"]):
        capsys.readouterr()
        run("run", *options)
        assert f"steps 1 to {options[-1]}" in capsys.readouterr().out
        assert len(history(out)["train"]) == int(options[-1])


@pytest.mark.slow
def test_a_batch_whose_loss_diverges_is_skipped(run, monkeypatch, capsys):
    """The run goes back to the last checkpoint, and past the batch."""
    make_step, seen = train.make_step, []

    def poisoned(*settings):
        step = make_step(*settings)

        def counted(params, state, tokens):
            seen.append(np.asarray(tokens).tobytes())
            params, state, loss = step(params, state, tokens)
            return params, state, math.nan if len(seen) == 8 else loss

        return counted

    monkeypatch.setattr(train, "make_step", poisoned)
    out = run("run")
    losses = history(out)["train"]
    assert len(losses) == 12 and all(map(math.isfinite, losses)) and state(out)["position"] == 13
    assert len(seen) == 13 and len(set(seen)) == 13  # a checkpoint after each step: one batch is skipped


@pytest.mark.slow
def test_a_new_run_does_not_go_back_to_the_checkpoint_of_the_one_it_replaces(run, monkeypatch, capsys):
    out = run("run", "--steps", "4", *NO_SAMPLE)
    replaced = state(out)
    monkeypatch.setattr(train, "diverges", lambda loss, losses: True)
    run("run", "--steps", "4", "--anew", *NO_SAMPLE, status=2)
    assert (
        "the loss of step 1 is" in (said := capsys.readouterr().err) and "from each of 0 checkpoints" in said
    )
    assert all(np.array_equal(x, replaced[name]) for name, x in state(out).items())  # which are still there


@pytest.mark.slow
def test_a_job_that_is_restarted_goes_on_with_its_run(run, monkeypatch, capsys):
    """Also if it has begun anew, and if it was at its end."""
    run("run", *NO_SAMPLE)
    monkeypatch.setenv("BLUFUNC_JOB", "second")
    with monkeypatch.context() as patch:
        interrupting(patch, 4)
        out = run("run", "--anew", status=io.STOPPED)
    monkeypatch.setenv("BLUFUNC_RESTARTS", "1")
    capsys.readouterr()
    for first in ("steps 6 to 12", "steps 13 to 12"):
        run("run", "--anew", *NO_SAMPLE)
        assert first in capsys.readouterr().out
        assert len(history(out)["train"]) == 12 and len(history(out)["validation"]) == 12
    saves = io.Checkpointer(out / "checkpoints")
    assert cli._is_restarted(saves)
    monkeypatch.setenv("BLUFUNC_JOB", "third")
    assert not cli._is_restarted(saves)


@pytest.mark.slow
def test_a_run_that_always_diverges_ends_with_an_error(run, monkeypatch, capsys):
    monkeypatch.setattr(train, "diverges", lambda loss, losses: len(losses) >= 6)
    out = run("run", status=2)
    said = capsys.readouterr().err
    assert "the loss of step" in said and "from each of 2 checkpoints" in said and "--lr" in said
    assert len(history(out)["train"]) == 6


def test_spikes_diverge_and_noise_does_not():
    flat = [2.0, 2.5] * 30
    assert train.diverges(math.inf, []) and train.diverges(7.6, flat)
    assert not train.diverges(7.4, flat) and not train.diverges(100.0, flat[:49])


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once_and_says_what_was_saved(run, monkeypatch, capsys):
    interrupting(monkeypatch, 3, 15, times=2)
    before = signal.getsignal(signal.SIGINT)
    run("early", "--steps", "400", status=130)  # saves at every 40th step
    assert capsys.readouterr().err == "interrupted: no checkpoint was saved\n"
    out = run("late", status=130)  # at every one
    said = capsys.readouterr().err
    assert "the last checkpoint, of step" in said and said.endswith(f"is in {out / 'checkpoints'}\n")
    assert 0 < len(history(out)["train"]) < 12
    assert signal.getsignal(signal.SIGINT) is before


def test_minutes_stop_a_run(run, capsys):
    out = run("run", "--minutes", "1e-6")
    assert len(history(out)["train"]) == 1
    assert "minutes are over, after 1 of 12 steps" in capsys.readouterr().out


@pytest.mark.slow
def test_a_finished_run_wants_more_steps(run, capsys):
    out = run("run")
    assert cli.main(["--resume", str(out)]) == 2
    said = capsys.readouterr().err
    assert "has taken 12 of its 12 steps" in said and "--steps 24" in said
    assert cli.main(["--resume", str(out), "--steps", "14", "--no-progress"]) == 0
    assert len(history(out)["train"]) == 14


@pytest.mark.slow
def test_a_moved_run_goes_on_where_it_lies(run, tmp_path):
    moved = run("run").rename(tmp_path / "moved")
    assert cli.main(["--resume", str(moved), "--steps", "14", "--no-progress"]) == 0
    assert len(history(moved)["train"]) == 14
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_goes_on_from_any_folder(run, text, tmp_path, monkeypatch):
    monkeypatch.chdir(text.parent)
    out = run("run", "--data", text.name)
    assert io.Checkpointer(out / "checkpoints").facts()["settings"]["data"] == str(text)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli.main(["--resume", str(out), "--steps", "14", "--no-progress"]) == 0


@pytest.mark.slow
def test_a_run_on_token_shards(tmp_path, capsys):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 600
    tokens = np.random.default_rng(0).integers(300, size=600).astype("<u2")
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes(header.tobytes() + tokens.tobytes())
    words = ["--preset", "nano", "--data", str(tmp_path), "--out", str(tmp_path / "run"), "--steps", "2"]
    assert cli.main([*words, "--no-progress"]) == 2
    assert "outside the vocabulary of 256" in capsys.readouterr().err
    assert cli.main([*words, "--vocab", "320", "--no-progress"]) == 0
    said = capsys.readouterr().out
    assert "nats a token\n" in said and "bits" not in said


# ------------------------------------------------------------------------------------------------ sampling


def test_sampling_traces_once_and_goes_beyond_the_context(monkeypatch):
    config = dataclasses.replace(NANO, layers=1, context=12)  # sizes that no other test compiles
    params = model.init(random.key(0), config)
    forward, traces = model.forward, []
    monkeypatch.setattr(model, "forward", lambda *args: traces.append(1) or forward(*args))
    tokens = sample.generate(params, config, [1, 2, 3], 30, random.key(1))
    assert len(tokens) == 30 and all(0 <= token < 256 for token in tokens)
    assert tokens == sample.generate(params, config, [1, 2, 3], 30, random.key(1))
    assert tokens != sample.generate(params, config, [1, 2, 3], 30, random.key(2))
    assert len(traces) == 1


def test_the_likeliest_token_is_the_greedy_choice():
    params = model.init(random.key(0), NANO)
    prompt = [5, 6, 7]
    (greedy,) = sample.generate(params, NANO, prompt, 1, random.key(1), top_k=1)
    logits = model.forward(params, np.array([prompt], np.int32), NANO)[0, -1]
    assert greedy == int(np.argmax(np.asarray(logits)))
    with pytest.raises(ValueError, match="the prompt is empty"):
        sample.generate(params, NANO, [], 1, random.key(1))


# ----------------------------------------------------------------------------------------------- reporting


def test_smoothing_keeps_lines_straight():
    line = list(np.linspace(5.0, 1.0, 200))
    np.testing.assert_allclose(report.smooth(line), line)
    np.testing.assert_allclose(report.smooth([3.0]), [3.0])
    zigzag = np.array([1.0, 2.0] * 100)
    np.testing.assert_allclose(report.smooth(list(zigzag))[5:-5], 1.5, atol=0.05)


@pytest.mark.parametrize(
    "seconds, text", [(3.4, "3 s"), (61, "1 min 01 s"), (179.6, "3 min 00 s"), (7500, "2 h 05 min")]
)
def test_durations(seconds, text):
    assert report.duration(seconds) == text


def test_the_bar_shows_step_loss_speed_and_time_left(monkeypatch, capsys):
    terminal = report.Console(force_terminal=True, width=120)
    monkeypatch.setattr(report, "console", terminal)
    with report.watch(0, steps=4, tokens_per_step=10, unit="byte", bar=True) as update:
        for step in range(1, 5):
            update(step, 2.5, None if step < 4 else 2.25)
    said = capsys.readouterr().out
    for expected in ("4/4", "loss 2.500", "validation 2.250", "bytes/s", "0:00:00"):
        assert expected in said


# ----------------------------------------------------------------------------------------------- bad input


def test_bad_data_is_a_message_and_not_a_traceback(run, tmp_path, capsys):
    run("run", "--data", str(tmp_path / "nothing.txt"), status=2)
    said = capsys.readouterr().err
    assert "nothing.txt" in said and "fix:" in said and "Traceback" not in said


def test_empty_paths_are_not_this_folder(run, capsys):
    run("run", "--data", "", status=2)
    assert "the path of the data is empty" in capsys.readouterr().err
    run("run", "--resume", "", status=2)
    assert "the path of the run is empty" in capsys.readouterr().err


@pytest.mark.slow
def test_a_checkpoint_of_a_preset_that_is_gone(run, monkeypatch, capsys):
    out = run("run")
    monkeypatch.delitem(model.PRESETS, "nano")
    assert cli.main(["--resume", str(out), "--steps", "20"]) == 2
    said = capsys.readouterr().err
    assert "another version" in said and "its preset is 'nano', and this version knows tiny" in said


@pytest.mark.slow
def test_a_checkpoint_of_another_preset(run, tmp_path, capsys):
    out = run("run")
    assert cli.main(["--resume", str(out), "--preset", "tiny", "--steps", "20"]) == 2
    said = capsys.readouterr().err
    assert str(out / "checkpoints") in said and "blocks" in said


def test_a_folder_without_checkpoints(run, tmp_path, capsys):
    assert cli.main(["--resume", str(tmp_path), "--steps", "20"]) == 2
    assert f"there is no checkpoint in {tmp_path / 'checkpoints'}" in capsys.readouterr().err


@dataclasses.dataclass
class Recipe:
    steps: int
    data: str | None
    losses: list[float]


RECIPE = {"steps": 3, "data": None, "losses": [1.5]}


@pytest.mark.parametrize(
    "found, why",
    [
        (None, "have no recipe"),
        ({"recipe": 3}, "have no recipe"),
        ({"recipe": {"zzz": 1}}, "recipe in its facts lacks data, losses, steps, and also has zzz"),
        ({"recipe": RECIPE | {"steps": "3"}}, "recipe in its facts has '3' for steps"),
        ({"recipe": RECIPE | {"losses": 3}}, "recipe in its facts has 3 for losses"),
    ],
)
def test_facts_of_another_version(tmp_path, found, why):
    assert facts.fact({"recipe": RECIPE}, "recipe", Recipe, tmp_path) == Recipe(**RECIPE)
    with pytest.raises(DataError, match=why) as caught:
        facts.fact(found, "recipe", Recipe, tmp_path)
    assert "another version" in str(caught.value) and "--anew" in caught.value.fix


def test_a_folder_that_cannot_be_written_is_found_out_before_training(run, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.delattr(train, "train")
    run("file", status=2)
    said = capsys.readouterr().err
    assert f"cannot write to {tmp_path / 'file'}" in said and "--out DIR" in said


@pytest.mark.parametrize(
    "words",
    [
        ["--steps", "0"],
        ["--batch", "x"],
        ["--lr", "-1"],
        ["--lr", "nan"],
        ["--preset", "huge"],
        ["--seed", "-1"],
    ],
)
def test_bad_options(words, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert f"argument {words[0]}" in capsys.readouterr().err


def test_a_text_too_short_for_a_batch(run, text, capsys):
    text.write_text("short")
    run("run", status=2)
    assert "is too short" in capsys.readouterr().err


def test_a_run_counts_as_many_windows_as_it_has(text):
    train_windows, validation = data.windows(data.load(text), NANO.context, NANO.vocab)
    assert len(train_windows) + len(validation) == len(text.read_bytes()) - 2 * NANO.context
