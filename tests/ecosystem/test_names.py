"""The names that blufunc serves as JAX's, against those that JAX has."""

import importlib
import json
import subprocess
import sys
import warnings

import pytest

pytestmark = pytest.mark.peer

SERVED = """
import importlib, json, sys
from blufunc import as_jax
as_jax.install()
found = {}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    found[name] = [n for n in dir(module) if not n.startswith("_") and hasattr(module, n)]
print(json.dumps(found))
"""

MODULES = ["jax", "jax.numpy", "jax.lax", "jax.nn", "jax.random", "jax.tree", "jax.interpreters.partial_eval"]


@pytest.fixture(scope="module")
def served():
    command = [sys.executable, "-c", SERVED, *MODULES]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", MODULES)
def test_no_name_that_jax_lacks(served, name):
    pytest.importorskip("jax")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(name)
        extra = [n for n in served[name] if not hasattr(module, n) and not _is_module(f"{name}.{n}")]
    assert extra == []


def _is_module(name):
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
