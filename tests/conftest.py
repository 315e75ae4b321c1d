"""Shared setup of all tests: checked jaxprs, fixed seeds, golden files, skips."""

import difflib
import functools
import importlib.util
import os
import random
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from blufunc.config import config
from blufunc.kernels.backends.cpu import toolchain
from tests.tiers import pytest_addoption, pytest_configure  # noqa: F401  (hooks)

GOLDENS = Path(__file__).parent / "goldens"

hypothesis.settings.register_profile(
    "blufunc",
    derandomize=True,
    deadline=None,
    max_examples=50,
    database=None,
    print_blob=False,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "blufunc"))


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """Every jaxpr that a test makes goes through ``check_jaxpr``."""
    monkeypatch.setattr(config, "check", True)
    monkeypatch.setattr(config, "debug", "")


@pytest.fixture(autouse=True)
def planned_anew(monkeypatch):
    """Isolate tests from plans on disk, of other tests or of the user."""
    monkeypatch.setattr(config, "plan_cache", False)


@pytest.fixture(autouse=True)
def small_programs_uncompiled(monkeypatch):
    """Run small programs as NumPy calls: compiling each would take 0.1 s."""
    monkeypatch.setattr(toolchain, "WORTH_CALLING", 1 << 30)


@pytest.fixture(autouse=True)
def seeded():
    """Reseed before each test, so that results do not depend on the order."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (for code under test that uses the global generator)


@pytest.fixture
def rng():
    """A separate generator for each test."""
    return np.random.default_rng(0)


@pytest.fixture
def golden():
    """``golden(name, text)`` compares ``text`` with ``tests/goldens/NAME.txt``.

    ``make goldens`` rewrites the files; it runs the tests with "golden" in their name.
    """

    def compare(name: str, text: object) -> None:
        __tracebackhide__ = True
        path = GOLDENS / f"{name}.txt"
        got = str(text).rstrip("\n") + "\n"
        if os.environ.get("BLUFUNC_UPDATE_GOLDENS") == "1":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(got, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"{path} does not exist. To write it: make goldens", pytrace=False)
        want = path.read_text(encoding="utf-8")
        if got != want:
            diff = difflib.unified_diff(
                want.splitlines(True), got.splitlines(True), f"goldens/{name}.txt", "what the code does now"
            )
            pytest.fail("".join([*diff, "\nIf the change is meant: make goldens"]), pytrace=False)

    return compare


@functools.cache
def _why_no_gpu() -> str | None:
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: pip install 'blufunc[cuda12]'"
    try:
        import cupy

        return None if cupy.cuda.runtime.getDeviceCount() else "this machine has no CUDA device"
    except Exception as e:
        return f"CUDA does not work here: {e}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and (reason := _why_no_gpu()):
            item.add_marker(pytest.mark.skip(reason=reason))
        if marker := item.get_closest_marker("peer"):
            package, extra = marker.args or ("jax", "peers")
            if importlib.util.find_spec(package) is None:
                reason = f"{package} is not installed: pip install 'blufunc[{extra}]'"
                item.add_marker(pytest.mark.skip(reason=reason))
