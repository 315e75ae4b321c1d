"""Benchmarks of GPT-2 training: programs, shared settings, reports of results."""

import argparse
import functools
import json
import subprocess
import sys
import time

import numpy as np
import pytest

import blufunc as bf
from benchmarks.harness import device_memory, gpu_tables, programs, text
from benchmarks.peers import attention_cases, gpt2_blufunc, products
from benchmarks.peers import gpt2 as shared
from benchmarks.suites import gpt2, gpt2_curves, gpu_attention, multi_gpu, seed_noise
from blufunc import tree

TINY = [f"--{name}={value}" for name, value in gpt2.TINY.items()] + [
    "--platform",
    "cpu",
    "--precision",
    "fp32",
]

SMALL_BF16, ACCURATE = "chunk=8192+budget=9.35GB", "chunk=2048+products=float32_tc"

# -- what runs -------------------------------------------------------------------------------------


def options(*words, tuning=420):
    parser = argparse.ArgumentParser()
    programs.add_options(parser, limit=3600)
    gpt2.add_training_options(parser, tuning=tuning)
    return parser.parse_args(words)


def planned(tmp_path, *words):
    return list(gpt2.programs(options(*words), tmp_path))


def test_one_table_has_all_libraries_and_the_slowest_last(tmp_path):
    found = planned(tmp_path)
    assert [p.library for p in found[:3]] == ["torch", "blufunc", "jax"] and all(
        "products" in p.tags for p in found[:3]
    )
    steps = [p for p in found[3:] if p.tags.get("cache") != "warm"]
    by_precision = {
        p: [s.library for s in steps if s.tags["precision"] == p] for p in ("bf16", "tf32", "fp32")
    }
    peers = ["torch-eager", "torch-compile"]
    assert by_precision == {
        "bf16": ["blufunc", f"blufunc {SMALL_BF16}", *peers, "jax-cudnn", "torch-max-autotune"],
        "tf32": ["blufunc chunk=4096", *peers, "jax-xla", "torch-max-autotune"],
        "fp32": ["blufunc", f"blufunc {ACCURATE}", *peers, "jax-xla", "torch-max-autotune"],
    }
    assert [p.library for p in found[-3:]] == ["torch-max-autotune"] * 3
    assert len({p.key for p in found}) == len(found)


def test_max_autotune_has_the_time_that_it_is_given(tmp_path):
    assert {p.limit for p in planned(tmp_path, "--autotune", "99") if p.library in programs.SLOW} == {99}
    assert not [p for p in planned(tmp_path, "--autotune", "0") if p.library in programs.SLOW]


@pytest.mark.parametrize(
    "precision, wanted, expected",
    [
        ("bf16", [], {"blufunc": [], f"blufunc {SMALL_BF16}": ["--chunk=8192", "--budget=9.35GB"]}),
        ("tf32", [], {"blufunc chunk=4096": ["--chunk=4096"]}),
        ("fp32", [], {"blufunc": [], f"blufunc {ACCURATE}": ["--chunk=2048", "--products=float32_tc"]}),
        (
            "bf16",
            ["default", "chunk=4096", "products=float32_tc"],
            {"blufunc": [], "blufunc chunk=4096": ["--chunk=4096"]},
        ),
        (
            "fp32",
            ["chunk=auto+products=float32_tc"],
            {"blufunc chunk=auto+products=float32_tc": ["--chunk=auto", "--products=float32_tc"]},
        ),
    ],
)
def test_variants(precision, wanted, expected):
    found = dict(gpt2.variants("blufunc", precision, wanted))
    assert found == expected
    for settings in found.values():  # the program knows them
        gpt2_blufunc.parser().parse_args(settings)
    assert dict(gpt2.variants("torch-eager", precision, wanted)) == {"torch-eager": []}


def test_text_is_the_same_for_all_libraries(tmp_path):
    found = planned(tmp_path, "--data", "text", "--device", "cpu", "--precisions", "bf16")
    path = str(tmp_path / "tokens.npy")
    assert all(path in p.args for p in found if "products" not in p.tags)
    o = shared.parser().parse_args([*TINY, "--tokens", path])
    assert shared.tokens(o).shape == (4, 2, 33) and shared.tokens(o).dtype == np.int32


def test_what_does_not_fit_is_named(tmp_path, capsys):
    o = options("--out", str(tmp_path), "--libraries", "torch-max-autotune")
    found = [p for p in gpt2.programs(o, tmp_path) if p.library in programs.SLOW][:1]
    record = programs.Record("gpt2", {"name": "a device"}, o, found)
    record.run_all(found, time.monotonic() + 100, tmp_path)  # less than tuning needs
    assert "left out" in (printed := capsys.readouterr().out)
    assert "Not run for lack of time: torch-max-autotune bf16." in printed
    assert json.loads((tmp_path / "gpu_gpt2.json").read_text())["left_out"] == [
        ["torch-max-autotune", {"precision": "bf16"}]
    ]


def test_several_gpus_in_every_layout_and_both_forms():
    o = multi_gpu._parser().parse_args(["--gpus", "4", "--libraries", "blufunc"])
    several = [p for p in multi_gpu.programs(o) if p.tags["gpus"] > 1]
    module = "benchmarks.peers.gpt2_blufunc"
    assert [(p.tags["layout"], p.module) for p in several] == [
        *((layout, m) for layout in ("data", "fsdp", "tensor") for m in (module, "blufunc.parallel.launch")),
        *((layout, module) for layout in ("zero1", "zero2")),
        *((layout, module) for layout in ("context", "pipeline") for _ in range(3)),
        ("experts", module),
    ]
    for p in several:
        own = p.args[p.args.index("benchmarks.peers.gpt2_blufunc") + 1 :] if "-m" in p.args else p.args
        parsed = gpt2_blufunc.parser().parse_args(own)
        batch = 2 if p.tags["layout"] == "context" else 32
        assert (parsed.gpus, parsed.layout, parsed.batch) == (4, p.tags["layout"], batch)


def test_heads_that_do_not_divide_are_left_out():
    o = multi_gpu._parser().parse_args(["--gpus", "8"])
    found = [p for p in multi_gpu.programs(o) if p.tags["gpus"] > 1]
    assert "tensor" not in {p.tags["layout"] for p in found}
    assert {p.library for p in found if p.tags["layout"] == "context"} >= {f"{multi_gpu.ONE}, context, ring"}
    layers = {a for p in found if p.tags["layout"] == "pipeline" for a in p.args if a.startswith("--layers")}
    assert layers == {"--layers=12", "--layers=16"}  # the latter counts: two chunks on each of eight


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--layouts", "context,contxt"], "'contxt' is no layout"), (["--gpus", "0"], "0 is less than 1")],
    ids=["layout", "gpus"],
)
def test_other_layouts_and_numbers_of_gpus_are_refused(words, said, capsys):
    with pytest.raises(SystemExit):
        multi_gpu._parser().parse_args(words)
    assert said in capsys.readouterr().err


def test_libraries_and_layouts_are_chosen():
    words = ["--gpus", "2", "--libraries", "torch", "--layouts", "context,zero1"]
    found = [
        (p.library, p.tags.get("work")) for p in multi_gpu.programs(multi_gpu._parser().parse_args(words))
    ]
    assert found == [
        ("torch-compile", None),
        ("torch-compile zero1", None),
        ("torch-compile", "context"),
        ("torch-eager", "context"),
        ("torch-eager context", "context"),
        ("torch-compile context", "context"),
    ]


def test_a_table_compares_each_layout_with_one_gpu_that_takes_its_step():
    of = lambda library, layout, gpus, rate, **more: {
        "library": library, "layout": layout, "gpus": gpus, "tokens_s": rate, "precision": "bf16", **more
    }  # fmt: skip
    pipeline = {"work": "pipeline"}
    rows = [
        of("blufunc", "one", 1, 100.0, losses=[9.0]),
        of(multi_gpu.SAME, "one", 1, 90.0, losses=[3.0]),
        of("blufunc", "one", 1, 50.0, losses=[9.0], **pipeline),
        of(multi_gpu.SAME, "one", 1, 45.0, losses=[4.0], **pipeline),
        of("blufunc, one process", "data", 2, 190.0, losses=[3.0]),
        of(f"{multi_gpu.ONE}, pipeline, zb-h1", "pipeline", 2, 80.0, losses=[4.001], bubble=0.04, **pipeline),
        of("blufunc", "one", 1, 30.0, losses=[5.0], work="context"),
        of(f"{multi_gpu.ONE}, context, ring", "context", 2, 54.0, losses=[5.0], work="context"),
    ]
    lines = gpu_tables._several({}, rows)
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in lines if "|" in line]
    by_library = {row[0]: row for row in cells}
    assert by_library["blufunc, one process"][4:] == ["0.950", "-", "0.0e+00", ""]
    assert by_library[f"{multi_gpu.ONE}, pipeline, zb-h1"][4:] == ["0.800", "-", "1.0e-03", "0.040"]
    assert by_library[f"{multi_gpu.ONE}, context, ring"][4:7] == ["0.900", "-", "0.0e+00"]


def test_attention_in_each_precision():
    parser = argparse.ArgumentParser()
    programs.add_options(parser, limit=60)
    parser.add_argument("--precisions", type=programs.names, default=["bf16", "float32_tc"])
    found = [(p.tags["precision"], p.library) for p in gpu_attention.programs(parser.parse_args([]))]
    half = ["blufunc", "torch", "torch-flash", "torch-cudnn", "torch-efficient", "torch-compile", "jax-cudnn"]
    assert found == [("bf16", name) for name in half] + [("float32_tc", "blufunc")]


# -- what the programs share -----------------------------------------------------------------------


@pytest.mark.slow
def test_text_is_bytes_of_python_sources(tmp_path):
    (tmp_path / "b.py").write_text("zzz")
    (tmp_path / "a.py").write_text("abcd")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text("left out")
    assert bytes(text.sources(6, tmp_path)) == b"abcdzz"
    with pytest.raises(ValueError, match="has 7 bytes"):
        text.sources(8, tmp_path)
    found = text.windows(10, 5)
    whole = text.sources(41)
    starts = {tuple(whole[i : i + 5]) for i in range(0, 40, 4)}
    assert found.shape == (10, 5) and {tuple(w) for w in found} == starts
    np.testing.assert_array_equal(found, text.windows(10, 5))


@pytest.mark.parametrize("shape, top", [((3, 2, 32), 95), ((3, 1, 33), 95), ((3, 2, 33), 256)], ids=str)
def test_tokens_of_another_shape_or_vocabulary_are_refused(shape, top, tmp_path):
    np.save(tmp_path / "t.npy", np.full(shape, top, np.int32))
    o = shared.parser().parse_args([*TINY, "--tokens", str(tmp_path / "t.npy")])
    with pytest.raises(ValueError, match="wanted are batches of"):
        shared.tokens(o)


def test_an_order_of_the_data_has_the_same_sequences():
    tokens = np.arange(24).reshape(3, 2, 4)
    one, other = (shared.ordered(tokens, seed) for seed in (0, 1))
    assert one.shape == tokens.shape and not np.array_equal(one, other)
    for found in (one, other):
        np.testing.assert_array_equal(np.sort(found.reshape(6, 4), 0), tokens.reshape(6, 4))


def fake(calls):
    """A trainer that says what is asked of it."""
    return shared.Trainer(
        start=lambda: calls.append("start"),
        load=lambda tokens: calls.append(("load", int(tokens.flat[0]))),
        step=lambda i: calls.append(i) or float(i),
        settle=lambda: None,
        gradients=lambda: (2.5, {"a": [np.ones(2)], "b": {"c": np.zeros(1)}}),
        after=lambda: {"peak_GB": 1.0},
    )


def printed(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_steps_are_timed(capsys):
    calls = []
    shared.run(shared.parser().parse_args([*TINY, "--warmup=1", "--steps=2"]), fake(calls))
    assert calls[0] == "start" and calls[2:] == [0, 1, 2, 3]
    (row,) = printed(capsys)
    assert row["losses"] == [0, 1, 2, 3] and row["peak_GB"] == 1.0 and row["tokens_s"] > 0


def test_every_order_starts_anew(capsys):
    calls = []
    shared.run(shared.parser().parse_args([*TINY, "--steps=2", "--orders=0,1"]), fake(calls))
    assert [c for c in calls if isinstance(c, int | str)] == ["start", 0, 1, "start", 0, 1]
    assert [(r["order"], r["losses"], r["last"]) for r in printed(capsys)] == [(0, [0, 1], 1), (1, [0, 1], 1)]


def test_other_ranks_take_the_same_steps_and_print_nothing(capsys):
    calls = []
    shared.run(shared.parser().parse_args([*TINY, "--warmup=1", "--steps=2"]), fake(calls), leads=False)
    assert calls[2:] == [0, 1, 2, 3] and not printed(capsys)


def test_gradients_go_to_a_file(tmp_path, capsys):
    path = tmp_path / "g.npz"
    shared.run(shared.parser().parse_args([*TINY, "--gradients", str(path)]), fake([]))
    with np.load(path) as found:
        assert set(found.files) == {"a.0", "b.c"}
    assert printed(capsys) == [{"loss": 2.5}]


def test_products_are_those_of_the_model():
    """Three times the operations of the forward pass: 2 for each weight and token."""
    o = shared.parser().parse_args(["--layers=2", "--width=3", "--vocab=5", "--context=7", "--batch=2"])
    o.square = 4
    found = list(products.cases(o))
    assert len({c.product for c in found}) == len(found) == 16
    weights = o.layers * 12 * o.width**2 + o.vocab * o.width
    assert sum(c.count * c.flops for c in found) == 6 * o.batch * o.context * weights
    assert found[0].flops == 2 * 4**3
    for c in found:
        m, n = products.FORMS[c.form](np.zeros(c.x), np.zeros(c.y)).shape
        terms = c.x[0] if c.form == "x.T @ y" else c.x[1]
        assert 2 * m * n * terms == c.flops


# -- blufunc's program -----------------------------------------------------------------------------


def trained(*words):
    """Losses of three steps, and the loss and gradients of the first batch."""
    o = gpt2_blufunc.parser().parse_args([*TINY, *words])
    gpt2_blufunc.start_devices(o)
    trainer = gpt2_blufunc.trainer(o)
    trainer.start()
    trainer.load(shared.tokens(o))
    value, grads = trainer.gradients()
    return [float(trainer.step(i)) for i in range(3)], float(value), grads


@pytest.fixture(autouse=True)
def usual_settings(monkeypatch):
    monkeypatch.setattr(bf.config, "cpu_devices", bf.config.cpu_devices)
    monkeypatch.setattr(bf.config, "matmul_precision", bf.config.matmul_precision)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", ["--chunk=auto", "--chunk=32", "--recompute=1", "--budget=1GB", "--products=float32_tc"]
)
def test_variants_train_alike(settings):
    losses, value, grads = trained()
    assert value == pytest.approx(losses[0], rel=1e-6)
    found, _, of_variant = trained(settings)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for one, other in zip(tree.leaves(grads), tree.leaves(of_variant), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


def dry():
    """The programs of blufunc in one process, at tiny sizes, and their references."""
    words = ["--gpus", "2", "--device", "cpu", "--precision", "fp32", "--libraries", "blufunc"]
    found = list(multi_gpu.programs(multi_gpu._parser().parse_args(words)))
    own = {p.library: p for p in found if p.module == multi_gpu.OURS and p.tags["gpus"] > 1}
    whole = {p.tags.get("work"): p for p in found if p.library == multi_gpu.SAME}
    whole["context"] = next(p for p in found if p.library == "blufunc" and p.tags.get("work") == "context")
    return own, whole


OWN, WHOLE = dry()


def losses_of(program):
    """Losses of two steps, the second of which depends on gradients."""
    o = gpt2_blufunc.parser().parse_args(program.args)
    gpt2_blufunc.start_devices(o)
    trainer = gpt2_blufunc.trainer(o)
    trainer.start()
    trainer.load(shared.tokens(o))
    return [float(trainer.step(i)) for i in range(2)]


@functools.cache
def reference(work):
    return losses_of(WHOLE[work])


@pytest.mark.slow
@pytest.mark.parametrize("library", OWN)
def test_programs_of_the_suite_have_the_losses_of_one_device(library, monkeypatch):
    monkeypatch.setattr(bf.config, "host_compiler", "never")
    expected = reference(OWN[library].tags.get("work"))
    np.testing.assert_allclose(losses_of(OWN[library]), expected, rtol=1e-5)


def test_a_divided_vocabulary_has_no_chunks():
    with pytest.raises(ValueError, match="--chunk with the layout tensor"):
        trained("--gpus=2", "--layout=tensor", "--chunk=32")


def test_a_start_is_a_start_again():
    o = gpt2_blufunc.parser().parse_args(TINY)
    trainer = gpt2_blufunc.trainer(o)
    trainer.load(shared.tokens(o))
    runs = []
    for _ in range(2):
        trainer.start()
        runs.append([float(trainer.step(i)) for i in range(2)])
        trainer.settle()
    assert runs[0] == runs[1]


@pytest.mark.peer
def test_gradients_agree_with_pytorch_in_float64(tmp_path):
    pytest.importorskip("torch")
    for module, *words in (("gpt2_blufunc",), ("gpt2_torch", "--float64")):
        given = [*TINY, *words, "--gradients", str(tmp_path / f"{module}.npz")]
        subprocess.run([sys.executable, "-m", f"benchmarks.peers.{module}", *given], check=True, timeout=120)
    found = gpt2_curves.errors(tmp_path / "gpt2_blufunc.npz", tmp_path / "gpt2_torch.npz")
    assert 0 < found["gradients"] < 2e-6 and found["worst"] < 1e-5


# -- what is made of results -----------------------------------------------------------------------


def test_errors_of_gradients(tmp_path):
    exact = {"a": np.array([3.0, 0.0]), "b": np.array([4.0])}
    np.savez(tmp_path / "exact.npz", **exact)
    np.savez(tmp_path / "ours.npz", a=np.array([3.0, 0.3], np.float32), b=np.array([4.4], np.float32))
    np.savez(tmp_path / "less.npz", a=np.array([3.0, 0.0]))
    found = gpt2_curves.errors(tmp_path / "ours.npz", tmp_path / "exact.npz")
    assert found == {
        "gradients": pytest.approx(0.1),
        "worst": pytest.approx(0.1),
        "worst_of": found["worst_of"],
    }
    with pytest.raises(ValueError, match="other parameters"):
        gpt2_curves.errors(tmp_path / "less.npz", tmp_path / "exact.npz")


def test_errors_stand_in_the_rows_of_programs_that_left_gradients(tmp_path):
    o = gpt2_curves._parser().parse_args(["--device", "cpu", "--precisions", "fp32", "--steps", "20"])
    reference, *others = gpt2_curves.gradients(o, tmp_path)
    assert [p.library for p in others] == ["blufunc", f"blufunc {ACCURATE}", "torch-eager"]
    assert reference.library.startswith("torch") and "--float64" in reference.args
    rows = {p.library: [{"loss": loss}] for p, loss in zip([reference, *others], (2.0, 2.5, 2.0, 2.0))}
    for p in [reference, others[0]]:  # the others failed
        np.savez(gpt2_curves.gradients_file(tmp_path, p.library, "fp32"), a=np.ones(2))
        assert p.args[p.args.index("--gradients") + 1] == str(
            gpt2_curves.gradients_file(tmp_path, p.library, "fp32")
        )
    for p in [reference, *others]:
        gpt2_curves.beside_float64(p, rows[p.library], tmp_path)
    assert rows[reference.library] == [{"loss": 2.0}]
    assert rows["blufunc"][0] | {"worst_of": ""} == {
        "loss": 2.5, "loss_error": 0.25, "gradients": 0.0, "worst": 0.0, "worst_of": "",
    }  # fmt: skip
    assert rows["torch-eager"] == [{"loss": 2.0}]


def test_curves_are_of_one_text_for_all(tmp_path):
    o = gpt2_curves._parser().parse_args(["--device", "cpu", "--precisions", "bf16", "--steps", "20"])
    found = list(gpt2_curves.curves(o, tmp_path))
    assert [p.library for p in found] == ["blufunc", f"blufunc {SMALL_BF16}", "torch-eager"]
    assert np.load(tmp_path / "tokens.npy").shape == (20, 2, 33)
    assert all(p.args[p.args.index("--orders") + 1] == "0,1,2" for p in found)


def test_smoothing():
    np.testing.assert_allclose(seed_noise.smoothed([1.0, 2.0, 3.0, 6.0], 2), [1.5, 2.5, 4.5])


@pytest.mark.parametrize("noise, within", [(0.01, True), (1.0, False)])
def test_differences_are_measured_by_the_spread_of_seeds(noise, within):
    rng = np.random.default_rng(0)
    curve = np.linspace(5.0, 3.0, 100)
    theirs = {seed: (curve + 0.1 * rng.standard_normal(100)).tolist() for seed in (0, 1, 2)}
    ours = {seed: (np.array(x) + noise * rng.standard_normal(100)).tolist() for seed, x in theirs.items()}
    assert seed_noise.compare(ours, theirs).within_noise is within


def test_one_order_of_the_data_is_no_spread():
    assert seed_noise.compare({0: [1.0, 2.0]}, {0: [1.0, 2.0], 1: [2.0, 1.0]}) is None


def test_the_exact_attention_is_that_of_the_library():
    rng = np.random.default_rng(0)
    q, k, v, ct = operands = [rng.standard_normal((2, 6, 4)) for _ in range(4)]
    of_library = lambda x: bf.numpy.asarray(x.swapaxes(0, 1), dtype="float64")  # [T, N, H]
    attend = lambda *args: bf.nn.dot_product_attention(*args, is_causal=True)
    out, pullback = bf.vjp(attend, *(of_library(x) for x in (q, k, v)))
    expected = [np.asarray(x).swapaxes(0, 1) for x in (out, *pullback(of_library(ct)))]
    for mine, theirs in zip(attention_cases.exact(operands), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-12)
    assert attention_cases.errors(operands, expected)["gradient_error"] < 1e-12
    wrong = [expected[0], 1.1 * expected[1], *expected[2:]]
    assert attention_cases.errors(operands, wrong)["gradient_error"] == pytest.approx(0.1)


@pytest.mark.parametrize("seen, peak", [([100, 100, 700, 300], 600), ([500, 100, 200], 100), ([100], 0)])
def test_the_most_memory_that_was_taken(seen, peak, monkeypatch):
    """Beyond the least: what the program before has left may still go."""
    monkeypatch.setattr(device_memory, "INTERVAL", 0.0)
    answers = iter(seen)
    last = seen[-1]

    def used():
        nonlocal last
        last = next(answers, last)
        return last

    with device_memory.Watch("cuda", used) as watch:
        time.sleep(0.05)
    assert watch.peak == peak


def test_a_driver_that_stops_answering_leaves_no_figure(monkeypatch):
    monkeypatch.setattr(device_memory, "INTERVAL", 0.0)
    answers = iter([100, 700])

    def used():
        try:
            return next(answers)
        except StopIteration:
            raise OSError("error 15") from None

    with device_memory.Watch("cuda", used) as watch:
        time.sleep(0.05)
    assert watch.peak is None


def test_a_cpu_has_no_device_memory():
    with device_memory.Watch("cpu") as watch:
        pass
    assert watch.peak is None


@pytest.mark.parametrize("visible, first", [("", 0), ("2,3", 2), ("1", 1), ("GPU-5a", 0)])
def test_the_device_that_is_watched_is_the_one_that_programs_have(visible, first, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_memory.first_device() == first
