"""Block-wide reductions, scans and moves, on the host and on a device."""

import numpy as np
import pytest

from tests.emulation.cuda_blocks import (
    EXTREMA,
    EXTREMUM_CASES,
    LAST,
    check_extrema,
    check_moments,
    check_moves,
    check_others,
    check_reductions,
)
from tests.emulation.cuda_machines import Host, device_module
from tests.emulation.cuda_machines import launch as device_launch


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return Host(tmp_path_factory.mktemp("host"))


@pytest.fixture(params=["host", pytest.param("device", marks=pytest.mark.gpu)])
def launch(request):
    return device_launch if request.param == "device" else request.getfixturevalue("host").launch


@pytest.mark.sampled(2)
@pytest.mark.parametrize("threads", [32, 96, 256, 1024])
def test_reductions_and_scans(threads, launch, rng):
    check_reductions(launch, threads, rng)


@pytest.mark.second
@pytest.mark.parametrize("threads", [32, 96, 256, 1024])
def test_moments(threads, launch, rng):
    check_moments(launch, threads, rng)


@pytest.mark.second
@pytest.mark.parametrize("case", EXTREMUM_CASES)
@pytest.mark.parametrize("name", EXTREMA)
def test_extrema(name, case, launch):
    check_extrema(launch, name, case)


@pytest.mark.slow
def test_moves(launch, rng):
    check_moves(launch, rng)


def test_others(launch, rng):
    check_others(launch, rng)


def test_last_block_finishes_on_the_host(host, rng):
    x, partial, counter = (
        rng.standard_normal((7, 256)).astype(np.float32),
        np.zeros(7, np.float32),
        np.zeros(1, np.uint32),
    )
    for _ in range(2):  # the counter is 0 again each time
        out = host.launch(LAST, "total", [x, partial, counter], np.zeros(1, np.float32), grid=7)
        np.testing.assert_allclose(out, x.sum(), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(partial, x.sum(1), rtol=1e-4, atol=1e-4)
        assert counter[0] == 0


@pytest.mark.gpu
def test_last_block_finishes_on_a_device(rng):
    import cupy

    x = rng.standard_normal(256 * 700).astype(np.float32)
    given, partial, counter = cupy.asarray(x), cupy.zeros(700, np.float32), cupy.zeros(1, np.uint32)
    seen = set()
    for _ in range(20):  # the counter is 0 again each time
        out = cupy.zeros(1, np.float32)
        device_module(LAST).get_function("total")((700,), (256,), (given, partial, counter, out))
        seen.add(float(out[0]))
        assert int(counter[0]) == 0
    assert len(seen) == 1
    np.testing.assert_allclose(seen.pop(), x.astype(np.float64).sum(), atol=1e-2)
