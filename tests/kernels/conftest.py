"""Devices and toolchains that tests of several files run on."""

import dataclasses

import pytest

import blufunc as bf
from blufunc.kernels.backends.cuda import program as cuda_program
from tests.emulation import fake_cuda
from tests.emulation.cuda_machines import Host
from tests.emulation.emulated_cuda import Device, Emulator
from tests.kernels.rewrites.test_pointwise_epilogue import always


@pytest.fixture
def fake(monkeypatch):
    """A CUDA device that is not there, and what it was asked for."""
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def cuda(fake):
    """The same as users name it."""
    return bf.devices("cuda")[0]


@pytest.fixture
def small(monkeypatch):
    """A fake device where epilogues and launches are free, and matmuls slow."""
    always(monkeypatch)
    machine = dataclasses.replace(cuda_program.TARGET.machine, launch=0.0, products=1e9, narrow_products=1e9)
    monkeypatch.setattr(cuda_program, "TARGET", dataclasses.replace(cuda_program.TARGET, machine=machine))
    return fake_cuda.install(monkeypatch)


@pytest.fixture(scope="session")
def host(tmp_path_factory):
    """A host compiler; what it has compiled serves both orders of warps."""
    return Host(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(
    scope="module", params=["host", "host, backward", pytest.param("device", marks=pytest.mark.gpu)]
)
def machine(request):
    """Runners of whole CUDA kernels: on the host, in two warp orders, or on a device."""
    if request.param == "device":
        return Device()
    return Emulator(request.getfixturevalue("host"), "backward" in request.param)
