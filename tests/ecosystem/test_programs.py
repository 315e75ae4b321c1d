"""Libraries for JAX, unmodified: each program of ``programs`` against JAX.

Both run in processes of their own, as the two cannot share the name ``jax``.
"""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.peer

PROGRAMS = {  # program: the module that it needs, and relative and absolute tolerances
    "einops": ("einops", 1e-6, 1e-6),
    "jaxtyping": ("jaxtyping", 1e-6, 1e-6),
    "optax": ("optax", 1e-4, 1e-5),
    "chex": ("chex", 1e-6, 1e-6),
    "haiku": ("haiku", 1e-4, 1e-5),
    "linen": ("flax", 1e-4, 1e-5),
    "numpyro": ("numpyro", 1e-3, 1e-4),
    "distrax": ("distrax", 1e-5, 1e-5),
    "equinox": ("equinox", 1e-4, 1e-5),
    "lineax": ("lineax", 1e-3, 1e-5),
    "optimistix": ("optimistix", 1e-3, 1e-4),
    "diffrax": ("diffrax", 1e-3, 1e-4),
    "nnx": ("flax", 1e-4, 1e-5),
    "x64": ("optimistix", 1e-8, 1e-9),
}


def computed(backend, program, path):
    """The results of a program, by name."""
    command = [sys.executable, "-m", "tests.ecosystem.run", backend, program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, f"{program} on {backend}:\n{done.stderr[-3000:]}"
    return dict(np.load(path))


@pytest.mark.parametrize("program", PROGRAMS)
def test_as_on_jax(program, tmp_path):
    module, rtol, atol = PROGRAMS[program]
    for needed in ("jax", module):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: pip install 'blufunc[ecosystem]'")
    got = computed("blufunc", program, tmp_path / "blufunc.npz")
    expected = computed("jax", program, tmp_path / "jax.npz")
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol, atol, err_msg=name)
