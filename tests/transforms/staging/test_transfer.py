"""Moving pytrees between host and device."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors


def test_devices():
    (cpu,) = bf.devices("cpu")
    assert (cpu.platform, cpu.index, str(cpu)) == ("cpu", 0, "cpu:0")
    assert bf.devices()[0] == bnp.zeros(2).device
    with pytest.raises(errors.ValueRangeError, match="no backend is called 'tpu'"):
        bf.devices("tpu")


def test_put_and_get_round_trip():
    host = {"a": np.arange(3, dtype=np.float32), "b": (1, 2.5)}
    put = bf.device_put(host)
    assert all(isinstance(x, bf.Array) for x in bf.tree.leaves(put))
    host["a"][0] = 7  # the copy is not affected
    got = bf.device_get(put)
    np.testing.assert_array_equal(got["a"], [0, 1, 2])
    assert got["b"][1] == 2.5
    assert bf.device_put(put["a"]) is put["a"]
    assert bf.block_until_ready(put) is put


def test_what_cannot_be_put():
    with pytest.raises(errors.ArgumentError, match="takes a device"):
        bf.device_put(np.zeros(2), "cpu")
