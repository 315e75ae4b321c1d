import pytest

import blufunc as bf
from blufunc.config import config


@pytest.fixture
def eight(monkeypatch):
    """The CPU taken for eight devices."""
    monkeypatch.setattr(config, "cpu_devices", 8)
    return bf.devices("cpu")
