"""The list of JAX's public names is that of the JAX installed."""

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'blufunc[peers]'")
if jax.__version__ != "0.10.2":
    pytest.skip("the names are those of JAX 0.10.2", allow_module_level=True)

from tests.jax_names import read  # noqa: E402

pytestmark = pytest.mark.peer


def test_names():
    assert read.text() == read.NAMES.read_text(), "python -m tests.jax_names.read"
