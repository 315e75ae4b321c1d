"""The counter of energy: calls of NVML, with a library that is made up, and on a device."""

import pytest

from blufunc.kernels import cuda_runtime, device_power
from blufunc.kernels.device_power import Meter


class Nvml:
    """Answers as NVML would; ``failing`` is a function that does not."""

    def __init__(self, failing=""):
        self.failing, self.asked = failing, []

    def __getattr__(self, name):
        def call(*args):
            self.asked.append((name, args[0] if args else None))
            if name == self.failing:
                return 3  # NVML_ERROR_NOT_SUPPORTED
            if name == "nvmlDeviceGetEnforcedPowerLimit":
                args[1]._obj.value = 700_000
            if name == "nvmlDeviceGetTotalEnergyConsumption":
                args[1]._obj.value = 12_345
            return 0

        return call


def test_units_are_watts_and_joules():
    nvml = Nvml()
    meter = Meter("0000:1B:00.0", nvml)
    assert (meter.limit, meter.joules()) == (700.0, 12.345)
    assert ("nvmlDeviceGetHandleByPciBusId_v2", b"0000:1B:00.0") in nvml.asked


@pytest.mark.parametrize(
    "failing",
    [
        "nvmlInit_v2",
        "nvmlDeviceGetHandleByPciBusId_v2",
        "nvmlDeviceGetEnforcedPowerLimit",
        "nvmlDeviceGetTotalEnergyConsumption",
    ],
)
def test_a_device_without_a_counter_has_no_meter(failing):
    with pytest.raises(OSError, match="NVML could not .*: error 3"):
        Meter("0000:1B:00.0", Nvml(failing))


@pytest.mark.gpu
def test_the_counter_goes_up_while_a_device_works():
    import time

    cuda_runtime.require()
    meter = device_power.meter(0)
    if meter is None:
        pytest.skip("this device has no counter of energy")
    before = meter.joules()
    time.sleep(0.3)  # an idle device takes energy, too
    spent = meter.joules() - before
    assert 0 < spent < meter.limit
