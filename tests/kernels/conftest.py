"""What tests of several files here run on."""

import pytest

import blufunc as bf
from tests.kernels import fake_cuda
from tests.kernels.emulated_cuda import Device, Emulator


@pytest.fixture
def fake(monkeypatch):
    """A CUDA device that is not there, and what it was asked for."""
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def cuda(fake):
    """The same as users name it."""
    return bf.devices("cuda")[0]


@pytest.fixture(
    scope="module", params=["host", "host, backward", pytest.param("device", marks=pytest.mark.gpu)]
)
def machine(request, tmp_path_factory):
    """Where whole CUDA kernels run: block after block on the host, in two orders of warps, or on a device."""
    if request.param == "device":
        return Device()
    return Emulator(tmp_path_factory.mktemp("cuda"), "backward" in request.param)
