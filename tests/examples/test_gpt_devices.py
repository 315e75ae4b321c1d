"""The demo on a mesh of devices: simulated ones, and processes."""

import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from blufunc import io
from blufunc.config import config
from examples.gpt import cli, model, train
from tests.parallel.launching import needs_mpi, run, start

PROGRAM = Path(__file__).parent / "gpt_nano.py"


@pytest.fixture(autouse=True, scope="module")
def nano():
    with pytest.MonkeyPatch.context() as patch:
        small = model.Config(layers=2, heads=2, width=16, context=16, vocab=256)
        patch.setitem(model.PRESETS, "nano", small)
        patch.setitem(train.RECIPES, "nano", {"steps": 12, "batch": 4, "lr": 1e-2})
        patch.setattr(train, "QUICK", 4)
        patch.setattr(train, "FULL", 16)
        yield


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    monkeypatch.setattr(config, "cpu_devices", 1)  # and as it was when the test is over


def words_in(folder):
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 100)

    def words(name, *options):
        return ["--data", str(text), "--out", str(folder / name), "--no-progress", *options]

    return words


@pytest.fixture
def words(tmp_path):
    """The arguments of a run that writes to the folder of the given name."""
    return words_in(tmp_path)


STEPS = ("--preset", "nano", "--sample-tokens", "3")
NO_SAMPLE = ("--sample-tokens", "0")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, nano):
    """The files of one device, trained once: to be copied."""
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "cpu_devices", 1)
        assert cli.main([*STEPS, *words_in(folder)("one")]) == 0
    return folder / "one"


def history(out):
    return io.Checkpointer(out / "checkpoints").facts()["history"]


def state(out):
    """The arrays of the last checkpoint, by name."""
    return io.Checkpointer(out / "checkpoints").restore()


@pytest.mark.slow
@needs_mpi
def test_two_processes_train_as_two_simulated_devices_do_and_as_one(words, tmp_path, capsys):
    assert cli.main(["--preset", "nano", *words("one", *NO_SAMPLE)]) == 0
    assert cli.main(["--preset", "nano", *words("simulated", "--mesh", "data=2")]) == 0
    simulated = capsys.readouterr().out
    assert simulated.splitlines()[-1].endswith(f"--resume {tmp_path / 'simulated'} --mesh data=2 --steps 24")
    code, out, err, _ = run("-n", 2, PROGRAM, *words("launched"))
    assert code == 0, err
    assert not err and all(line.startswith("[0] ") for line in out.splitlines())  # one of them speaks
    assert "-m blufunc.parallel.launch -n 2 -m examples.gpt --resume" in out
    one, two, launched = (history(tmp_path / name) for name in ("one", "simulated", "launched"))
    assert len(one["train"]) == 12 and one["train"][-1] < one["train"][0] - 0.5
    np.testing.assert_allclose(two["train"], one["train"], rtol=2e-5)
    np.testing.assert_allclose(np.array(two["validation"]), np.array(one["validation"]), rtol=2e-5)
    assert launched == two  # sums are made in the same order
    files = [state(tmp_path / name) for name in ("simulated", "launched")]
    assert files[0].keys() == files[1].keys()
    for name, array in files[0].items():
        assert name == "position" or array.tobytes() == files[1][name].tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--mesh", "zero1=2,model=2", "--accumulate", "2"],
        ["--mesh", "stage=2,data=2,model=2", "--accumulate", "2"],
        ["--mesh", "stage=2,fsdp=2,model=2", "--accumulate", "2", "--pipeline-schedule", "gpipe"],
        [
            "--mesh",
            "stage=2,fsdp=2",
            "--accumulate",
            "2",
            "--pipeline-schedule",
            "zb-h1",
            "--shard-vocabulary",
        ],
        ["--mesh", "stage=2,zero1=2", "--accumulate", "2", "--recompute"],
        ["--mesh", "stage=2,seq=2", "--accumulate", "2"],
        ["--mesh", "fsdp=2,seq=2", "--routing", "all_to_all", "--recompute"],
        ["--mesh", "stage=2", "--accumulate", "2", "--loss-chunk", "5"],
        ["--mesh", "fsdp=2", "--memory-budget", "200KB"],
    ],
    ids=lambda words: words[1],
)
def test_files_are_those_of_one_device_whatever_the_mesh(options, trained, words, tmp_path, capsys):
    train_on(options, trained, words, tmp_path, capsys)
    for name in ("one", "mesh"):  # each goes on where the other was
        there = options if name == "one" else []
        resume = ["--resume", str(tmp_path / name), "--steps", "15", *NO_SAMPLE]
        assert cli.main([*words(name, *resume, *there)]) == 0
    one, mesh = (history(tmp_path / name)["train"] for name in ("one", "mesh"))
    assert len(one) == len(mesh) == 15
    np.testing.assert_allclose(mesh, one, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--mesh", "fsdp=2", "--loss-chunk", "7"],
        ["--mesh", "data=2", "--loss-chunk", "64"],
        ["--memory-budget", "300KB"],
    ],
    ids=lambda words: words[1],
)
def test_chunks_of_the_loss_and_budgets_change_no_file(options, trained, words, tmp_path, capsys):
    """Their checkpoints are of meshes that others above resume."""
    train_on(options, trained, words, tmp_path, capsys)


def train_on(options, trained, words, folder, capsys):
    """A run on a mesh, in "mesh" next to the one of one device, whose files it has."""
    shutil.copytree(trained, folder / "one")
    assert cli.main([*STEPS, *words("mesh", *options)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"{' '.join(options)} --steps 24")
    one, mesh = (load_file(folder / name / "weights.safetensors") for name in ("one", "mesh"))
    assert {name: x.shape for name, x in one.items()} == {name: x.shape for name, x in mesh.items()}
    losses = [history(folder / name)["train"] for name in ("mesh", "one")]
    np.testing.assert_allclose(*losses, rtol=2e-5)
    np.testing.assert_allclose(mesh["tokens"], one["tokens"], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@needs_mpi
def test_processes_with_divided_parameters(words, tmp_path):
    options = ["--mesh", "fsdp=2", *NO_SAMPLE]
    assert cli.main(["--preset", "nano", *words("simulated", *options)]) == 0
    code, _, err, _ = run("-n", 2, PROGRAM, *words("launched", *options))
    assert code == 0, err
    assert history(tmp_path / "launched") == history(tmp_path / "simulated")
    files = [load_file(tmp_path / name / "weights.safetensors") for name in ("simulated", "launched")]
    assert {k: x.tobytes() for k, x in files[0].items()} == {k: x.tobytes() for k, x in files[1].items()}


@pytest.mark.slow
@needs_mpi
def test_a_signal_stops_all_processes_at_the_same_step(words, tmp_path):
    process = start("-n", 2, PROGRAM, *words("run", "--steps", "1000", "--sample-tokens", "0"))
    seen = [process.stdout.readline() for _ in range(4)]  # the last comes after 50 steps
    assert "step" in seen[3]
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert process.returncode == io.STOPPED and "interrupted      after" in out, err
    done = len(history(tmp_path / "run")["train"])
    code, out, err, _ = run(
        "-n", 2, PROGRAM, *words("run", "--resume", tmp_path / "run", "--steps", str(done + 2))
    )
    assert code == 0, err
    assert len(history(tmp_path / "run")["train"]) == done + 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--mesh", "data=3"], "a batch of 4 cannot be divided among 3 devices"),
        (["--mesh", "data=-1,model=-1"], "-1 is the size of one axis at most"),
        (["--mesh", "data=-1,model=2"], "1 devices cannot be divided by the other axes, 2"),
        (["--mesh", "rows=2"], "'rows' is no axis that a run can be divided along: data, zero1"),
        (["--mesh", "data=0"], "0 is less than 1"),
        (["--mesh", "data=2,data=2"], "data stands there twice"),
        (["--mesh", "data=2", "--accumulate", "3"], "a batch of 4 cannot be divided among 2 devices in 3"),
        (["--mesh", "model=4"], "2 heads cannot be divided into 4 parts"),
        (["--mesh", "seq=16"], "16 tokens of a context cannot be divided into 32 parts"),
        (["--mesh", "stage=3"], "2 layers cannot be divided into 3 parts"),
        (["--mesh", "model=2", "--loss-chunk", "8"], "--loss-chunk 8 with an axis model"),
        (["--loss-chunk", "-1"], "-1 is less than 0"),
        (["--memory-budget", "12"], "'12' is no size, as 12GB and 500MiB are"),
        (["--memory-budget", "1KB"], "no plan of step fits memory_budget=1000 B"),
        (["--mesh", "stage=2,zero2=2"], "fix: --mesh stage=2,zero1=2"),
        (["--mesh", "zero1=2,zero2=2"], "gradients that are divided for each microbatch, and are not"),
        (
            ["--mesh", "data=2", "--pipeline-schedule", "gpipe"],
            "--pipeline-schedule gpipe without an axis stage",
        ),
        (["--mesh", "data=2", "--shard-vocabulary"], "--shard-vocabulary without an axis stage"),
        (
            ["--mesh", "stage=2", "--pipeline-schedule", "interleaved"],
            "1 microbatches are too few to interleave on 2",
        ),
        (
            ["--mesh", "stage=2", "--chunks", "2"],
            "fix: --pipeline-schedule interleaved, or leave --chunks out",
        ),
        (
            ["--mesh", "stage=2", "--accumulate", "2", "--pipeline-schedule", "interleaved"],
            "2 layers cannot be divided into 4 parts",
        ),
        (["--mesh", "stage=2,model=2", "--shard-vocabulary"], "--shard-vocabulary with an axis model"),
        (
            ["--mesh", "stage=2", "--shard-vocabulary", "--loss-chunk", "8"],
            "--shard-vocabulary with --loss-chunk 8",
        ),
        (["--routing", "all_to_all"], "fix: --mesh seq=2, or leave --routing out"),
        (["--mesh", "expert=2"], "the model has no experts"),
        (["--mesh", "expert=2", "--experts", "3"], "3 experts cannot be divided into 2 parts"),
    ],
)
def test_bad_meshes(words, options, text, capsys):
    try:
        code = cli.main(["--preset", "nano", *words("run", *options)])
    except SystemExit as e:
        code = e.code
    assert code == 2
    assert text in capsys.readouterr().err


@pytest.mark.slow
@needs_mpi
def test_another_number_of_processes_than_of_devices(words):
    code, _, err, _ = run("-n", 2, PROGRAM, *words("run", "--mesh", "data=4"))
    assert code == 2
    assert "a mesh of 4 devices for 2 processes" in err and "fix: --mesh data=2" in err
