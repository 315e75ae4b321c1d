"""The gallery: each program at its tiny size, its command line, and its page."""

import math
import sys

import numpy as np
import pytest

import blufunc as bf
from blufunc.config import config
from examples.gallery import app
from website import gallery

pytest.importorskip("sklearn", reason="scikit-learn, which ships the digits, is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

# bounds of the figures at the tiny size, seed 0
CHECKS = {
    "diffusion": {"loss": (0.6, 0.9), "recognized": (0.0, 1.0)},
    "ppo": {"episode length": (50, 500), "shortest": (10, 500)},
    "vae": {"bound": (25.0, 29.0), "tighter bound": (24.5, 28.5)},
    "vit": {"accuracy": (0.08, 1.0), "loss": (1.5, 2.35)},
    "resnet": {"accuracy": (0.2, 1.0), "loss": (0.5, 2.3)},
    "neural_ode": {"loss": (0.005, 0.04), "error": (0.1, 1.3)},
    "gaussian_process": {"error": (0.0, 0.8), "inside": (0.6, 1.0), "noise": (0.05, 0.4)},
    "physics_informed": {"error": (0.2, 0.6), "residual": (0.2, 0.8)},
    "maml": {"adapted": (1.0, 6.0), "after ten steps": (0.5, 6.0)},
    "mixture_of_experts": {"experts": (0.5, 1.9), "dense": (0.5, 2.2), "dropped": (0.0, 0.2)},
    "state_space": {"accuracy": (0.1, 1.0), "loss": (1.5, 2.6), "gap": (0.0, 1e-4)},
}


def program(name):
    return __import__(f"examples.gallery.{name}", fromlist=["run"])


def test_every_program_is_tested():
    """Programs are all files but the shared one, and each has a page with its picture."""
    assert {p.stem for p in gallery.programs("gallery")} - {"app"} == set(CHECKS)
    pages = gallery.pages()
    for name in CHECKS:
        picture = gallery.picture("gallery", name)
        assert picture is not None and picture.stat().st_size < 60_000
        assert f"(../../docs/assets/gallery/{name}.png)" in pages[f"examples/gallery/{name}.md"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_figures(name, monkeypatch, tmp_path):
    monkeypatch.setattr(config, "cpu_devices", config.cpu_devices)  # the mixture sets it
    module = program(name)
    result = module.run(module.SIZES["tiny"], bf.random.key(0), app.Bar(shown=False))
    assert all(math.isfinite(value) for value in result.numbers.values())
    for what, (low, high) in CHECKS[name].items():
        assert low <= result.numbers[what] <= high, f"{what}: {result.numbers[what]}"
    result.figure.savefig(tmp_path / "picture.png")


@pytest.mark.slow
def test_command_line(monkeypatch, tmp_path, capsys):
    module = program("physics_informed")
    options = ["--size", "tiny", "--epochs", "2", "--steps", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["program", *options])
    app.main(module.run, module.SIZES)
    out = capsys.readouterr().out
    assert "2/2   residual" in out and "error" in out
    assert (tmp_path / "physics_informed.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_size_names_the_others(monkeypatch, capsys):
    module = program("physics_informed")
    monkeypatch.setattr(sys, "argv", ["program", "--size", "huge"])
    with pytest.raises(SystemExit):
        app.main(module.run, module.SIZES)
    assert "tiny" in capsys.readouterr().err


@pytest.mark.slow
def test_a_mesh_does_not_change_the_mixture(monkeypatch):
    """Two devices compute what one does; tokens above the capacity are dropped."""
    monkeypatch.setattr(config, "cpu_devices", 2)
    mixture = program("mixture_of_experts")
    params = mixture.init(bf.random.key(0), 4, 8)
    x = bf.random.normal(bf.random.key(1), (64, mixture.INPUTS))
    monkeypatch.setattr(mixture, "CAPACITY", 4.0)  # of all tokens
    one, two = (mixture.on_mesh(bf.make_mesh((n,), ("expert",)))(params, x) for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(mixture, "CAPACITY", 0.5)  # 8 tokens of 64 for each of 4 experts
    y, _, dropped, _ = mixture.on_mesh(bf.make_mesh((1,), ("expert",)))(params, x)
    assert dropped >= 0.5 and dropped == np.mean(np.all(np.asarray(y) == 0, axis=1))
