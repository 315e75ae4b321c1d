"""The ported programs: results, and that only import lines differ from JAX."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

PORTS = Path(__file__).parent.parent.parent / "examples" / "ports"

# bounds of the results; and how near to JAX's they are
CHECKS = {
    "mlp_digits": {"accuracy": (0.95, 1.0), "loss": (0.0, 0.15)},
    "gaussian_process": {"error": (0.0, 0.1), "noise": (0.0, 0.1), "nll": (-30, 10)},
    "private_digits": {"accuracy": (0.8, 1.0), "longest gradient": (0.0, 1.0001)},
    "vae_digits": {"test": (0.0, 20.0), "train": (0.0, 19.5)},
    "neural_ode": {"loss": (0.0, 0.02), "gap": (0.0, 1e-4), "radius": (1.5, 1.7)},
}
pytest.importorskip("sklearn", reason="scikit-learn, which ships the digits, is not installed")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CHECKS)
def test_results(name, capsys):
    module = importlib.import_module(f"examples.ports.{name}")
    results = module.main()
    for what, (low, high) in CHECKS[name].items():
        assert low <= results[what] <= high, f"{what}: {results[what]}"
    assert capsys.readouterr().out.count("\n") >= 3


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.peer
def test_is_a_jax_program(name, capsys):
    """With jax in the import lines the same text runs, and says the same."""
    text = (PORTS / f"{name}.py").read_text(encoding="utf-8")
    head = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert sum("blufunc" in line for line in head) == text.count("blufunc") > 0
    for line in head:
        theirs = line.replace("import blufunc as jax", "import jax").replace("blufunc.optim", "optax")
        text = text.replace(line, theirs.replace("blufunc", "jax"))
    spec = importlib.util.spec_from_loader(f"jax_{name}", loader=None)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        exec(compile(text, f"{name}.py in JAX", "exec"), vars(module))
        theirs = module.main()
    finally:
        del sys.modules[spec.name]
    ours = importlib.import_module(f"examples.ports.{name}").main()
    for what in CHECKS[name]:
        tolerance = {"accuracy": 0.02, "gap": 1e-3}.get(what, 0.02 * max(1.0, abs(theirs[what])))
        assert np.isclose(ours[what], theirs[what], atol=tolerance), (what, ours[what], theirs[what])
