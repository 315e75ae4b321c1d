"""The driver of the GPU benchmarks: its programs, and records of failed ones.

No device is needed.
"""

import json
import time

import numpy as np
import pytest

import blufunc as bf
from benchmarks.harness import device_memory, programs
from benchmarks.peers import clock, gpt2, kernel_shapes
from benchmarks.suites import gpu, gpu_step_kernels, kernel_cases
from blufunc.kernels.cache import plans as plan_store
from examples.gpt import model


def options(*words):
    return gpu._parser().parse_args(words)


@pytest.mark.parametrize(
    "wanted, chosen",
    [
        ([], {"blufunc", "torch-eager", "torch-compile", "jax-xla"}),
        (["torch"], {"torch-eager", "torch-compile"}),
        (["blufunc", "torch-compile"], {"blufunc", "torch-compile"}),
        (["torch-max-autotune"], {"torch-max-autotune"}),
    ],
)
def test_which_libraries_run(wanted, chosen):
    names = ["blufunc", "torch-eager", "torch-compile", "torch-max-autotune", "jax-xla"]
    assert {n for n in names if programs.chosen(n, wanted)} == chosen


def test_training_programs_of_a_precision():
    found = list(gpu.programs("gpt2", options("--precisions", "bf16", "--warm", "all")))
    found = [p for p in found if "products" not in p.tags]
    cold = [p.library for p in found if "cache" not in p.tags]
    ours = ["blufunc", "blufunc chunk=8192+budget=9.35GB"]
    assert cold == [*ours, "torch-eager", "torch-compile", "jax-cudnn"]
    assert [p.library for p in found if "cache" in p.tags] == cold
    assert len({p.key for p in found}) == len(found)
    by_library = {}
    for p in found:
        by_library.setdefault(p.library, set()).add(p.cache)
    assert all(
        len(caches) == 1 for caches in by_library.values()
    )  # the second process finds what the first made


@pytest.fixture
def record(tmp_path, monkeypatch):
    """A function that runs programs in sequence, and returns the record on disk."""
    monkeypatch.setattr(programs, "SHORTEST", 0.1)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # bytecode of a program written twice within a second would be that of the first
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    path = tmp_path / "gpu_ops.json"

    def run(*texts, limit=20.0, uuid="GPU-1", words=()):
        given = options("--out", str(tmp_path), *words)
        planned = list(gpu.programs("ops", given))
        kept = programs.Record("ops", {"name": "a device", "uuid": uuid}, given, planned)
        for i, text in enumerate(texts):
            (tmp_path / f"fake_program_{i}.py").write_text(text)
            program = programs.Program(("blufunc", "jax")[i % 2], f"fake_program_{i}", limit=limit)
            kept.run(program, time.monotonic() + 100, tmp_path)
        kept.save()
        return json.loads(path.read_text())

    return run


GOOD = """
print('{"versions": {"thing": "1.2"}}')
print("words of a library")
print('{"what": "a", "us": 2.0}')
"""


def test_rows_and_versions_are_kept(record):
    found = record(GOOD)
    assert [(r["library"], r["what"], r["us"]) for r in found["rows"]] == [("blufunc", "a", 2.0)]
    assert found["versions"]["thing"] == "1.2"


def test_rows_before_a_failure_are_kept(record, capfd):
    found = record(GOOD + "raise ValueError('no such thing')", GOOD)
    assert [r.get("us") for r in found["rows"]] == [2.0, None, 2.0]
    assert "exit status 1" in found["rows"][1]["error"]
    assert "no such thing" in found["rows"][1]["error"]


@pytest.mark.slow
def test_rows_before_the_limit_are_kept(record, capfd):
    found = record(GOOD + "import time; time.sleep(60)", limit=2.0)
    assert found["rows"][0]["us"] == 2.0
    assert found["rows"][1]["error"].startswith("cut off after 2 s")


@pytest.mark.parametrize("uuid, kept", [("GPU-1", [5.0]), ("GPU-2", []), (None, [])])
def test_merging_keeps_rows_of_the_same_device_alone(record, uuid, kept):
    record("", GOOD.replace("2.0", "5.0"))  # jax's
    found = record("", uuid=uuid, words=("--merge", "--libraries", "blufunc"))
    assert [r["us"] for r in found["rows"]] == kept


def test_merging_keeps_rows_of_the_same_facts_alone(tmp_path):
    o = options("--out", str(tmp_path), "--merge")
    for steps, kept in ((200, 0), (200, 1), (100, 0)):
        found = programs.Record("ops", {"name": "a device", "uuid": "GPU-1"}, o, [], steps=steps)
        assert len(found.contents["rows"]) == kept
        found.contents["rows"] = [{"library": "jax", "of": []}]
        found.save()


def test_merging_replaces_what_is_run_again(record):
    record(GOOD)
    found = record(GOOD.replace("2.0", "3.0"), words=("--merge", "--libraries", "blufunc"))
    assert [r["us"] for r in found["rows"]] == [3.0]


def test_rows_have_the_most_memory_of_the_device(record, monkeypatch):
    answers = iter([1e9, 3.5e9])
    monkeypatch.setattr(device_memory, "reader", lambda: lambda: next(answers, 2e9))
    found = record(GOOD + "import time; time.sleep(0.3)")
    assert [r["most_GB"] for r in found["rows"]] == [2.5]


# -- what the programs share -----------------------------------------------------------------------


def test_initial_weights_are_those_of_the_model():
    o = gpt2.parser().parse_args(["--layers=2", "--width=8", "--heads=2", "--vocab=16", "--context=4"])
    found = gpt2.weights(o)
    config = model.Config(o.layers, o.heads, o.width, o.context, o.vocab)
    like = bf.eval_shape(lambda key: model.init(key, config), bf.random.key(0))
    assert bf.tree.structure(found) == bf.tree.structure(like)
    assert [x.shape for x in bf.tree.leaves(found)] == [x.shape for x in bf.tree.leaves(like)]
    assert all(x.dtype == np.float32 for x in bf.tree.leaves(found))
    assert sum(x.size for x in bf.tree.leaves(found)) == gpt2.count(o)


def test_adamw_is_timed_on_all_of_gpt2():
    o = gpt2.parser().parse_args([])
    assert sum(np.prod(s) for s in kernel_shapes.ADAMW.values()) == gpt2.count(o)
    assert kernel_shapes.adamw_label(kernel_shapes.ADAMW) == "adamw, 124M parameters"


@pytest.mark.parametrize("shape", [(16, 1024, 16384), (16384, 128256), (8192, 50304), (3, 5)], ids=str)
def test_repeated_blocks_fill_the_shape(shape, monkeypatch):
    monkeypatch.setattr(kernel_shapes, "BLOCK", kernel_shapes.BLOCK >> 8)
    rows, repeats = kernel_shapes.block((shape[0], *(n >> 6 or 1 for n in shape[1:])), seed=0)
    assert rows.shape[0] * repeats == shape[0]
    assert rows.size <= kernel_shapes.BLOCK or repeats == shape[0]


def test_model_flops():
    # 6 for each weight of a product and token, 12 T C for each layer's attention, halved by the mask
    o = gpt2.parser().parse_args(
        ["--layers=1", "--width=2", "--heads=1", "--vocab=3", "--context=4", "--batch=5"]
    )
    assert gpt2.model_flops(o) == 20 * (6 * (12 * 4 + 6) + 6 * 2 * 4)


def test_every_kernel_has_a_shape():
    lib = kernel_cases.in_blufunc()
    assert {name for name, _ in kernel_shapes.CASES} <= kernel_cases.kernels(lib).keys()
    assert clock.copies(kernel_cases.kernels(lib)["sum of rows"].nbytes((16384, 768))) > 1


def test_constants_that_are_set_take_no_plans_from_disk(monkeypatch):
    """They are not part of what plans are kept under."""
    monkeypatch.setattr(bf.config, "plan_cache", True)
    monkeypatch.setattr(plan_store, "WORTH", plan_store.WORTH)
    gpu_step_kernels.change("cache.plans.WORTH", "7")
    assert plan_store.WORTH == 7 and not bf.config.plan_cache
