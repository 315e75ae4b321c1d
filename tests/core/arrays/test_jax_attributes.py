"""Attributes of arrays that programs for JAX read."""

import ctypes

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors
from blufunc.config import config

X = np.arange(6, dtype="float32").reshape(2, 3)


def test_memory():
    x = bnp.asarray(X)
    assert x.is_ready() and x.platform() == "cpu" and not x.committed and not x._committed
    assert x.on_device_size_in_bytes() == x.nbytes == 24
    assert (ctypes.c_float * 6).from_address(x.unsafe_buffer_pointer())[5] == 5
    assert x.tobytes() == X.tobytes() and x.tobytes("F") == X.tobytes("F")
    np.testing.assert_array_equal(x.byteswap().byteswap(), X)
    assert np.asarray(x.byteswap()).tobytes() == X.byteswap().tobytes()
    x.copy_to_host_async()
    assert [s.data.shape for s in x.global_shards] == [(2, 3)]


def test_arrays_on_meshes(monkeypatch):
    monkeypatch.setattr(config, "cpu_devices", 2)
    x = bf.device_put(bnp.ones(4), bf.NamedSharding(bf.make_mesh((2,), ("i",)), bf.P("i")))
    assert x.committed and x.is_ready() and len(x.global_shards) == 2
    assert bf.device_put(bnp.ones(4), bf.devices()[1]).committed
    with pytest.raises(errors.InteropError):
        x.unsafe_buffer_pointer()


def test_deletion():
    x, scalar = bnp.asarray(X), bnp.float32(3)
    x.delete()
    x.delete()
    assert x.is_deleted() and "donated" in repr(x)
    for use in (lambda: x + 1, x.is_ready, lambda: np.asarray(x), lambda: bf.jit(bnp.sin)(x)):
        with pytest.raises(RuntimeError, match=r"delete\(\) at test_jax_attributes"):
            use()
    scalar.delete()  # the same object for all programs
    assert bnp.float32(3) == 3


def test_methods():
    x, keep = bnp.asarray(X), np.array([True, False])
    np.testing.assert_array_equal(x.compress(keep, axis=0), X[:1])
    np.testing.assert_array_equal(x.compress(keep, axis=0, size=2, fill_value=7), [X[0], [7] * 3])
    np.testing.assert_array_equal(bnp.array([1, 0]).choose([bnp.zeros(2), bnp.ones(2)]), [1, 0])
    np.testing.assert_array_equal(x.argpartition(1), bnp.argpartition(x, 1))
    np.testing.assert_array_equal(bf.jit(lambda x: x.clone())(x), X)


def test_zeros_of_no_bytes_are_equal():
    g = bf.grad(lambda i: (i * 1.0).sum(), allow_int=True)(bnp.arange(3))
    assert (g == g).tolist() == [True] * 3 and (g != g).tolist() == [False] * 3
    with pytest.raises(TypeError):
        g == bnp.ones(3)


POSITIONS = [
    -1,
    [-1, 2],
    [-6, 4],
    (slice(1, None), -1),
    (Ellipsis, [-1, 0]),
    (None, -1, slice(0, 2)),
    [[True] * 3] * 4,
]


@pytest.mark.parametrize("index", POSITIONS, ids=str)
def test_negative_positions_out_of_range(index):
    parts = index if isinstance(index, tuple) else (index,)
    parts = [bnp.array(e) if isinstance(e, list) else e for e in parts]
    index = tuple(parts)
    far = [bnp.where(bnp.array(e) < 0, 99, e) if isinstance(e, (int, bf.Array)) else e for e in parts]
    far = index if getattr(index[0], "dtype", "") == "bool" else tuple(far)
    x = bnp.arange(12.0).reshape(4, 3)
    for how in ("set", "add", "max"):
        got = getattr(x.at[index], how)(100.0, wrap_negative_indices=False)
        np.testing.assert_array_equal(got, getattr(x.at[far], how)(100.0))
    got = x.at[index].get(mode="fill", fill_value=-5.0, wrap_negative_indices=False)
    np.testing.assert_array_equal(got, x.at[far].get(mode="fill", fill_value=-5.0))


def test_negative_positions_along_an_axis():
    x = bnp.arange(4.0)
    got = bnp.take_along_axis(
        x, bnp.array([-1, 1]), 0, mode="fill", fill_value=9.0, wrap_negative_indices=False
    )
    assert got.tolist() == [9, 1]
    small = bnp.array([-1, 2], "int8")
    assert x.at[small].set(7, wrap_negative_indices=False).tolist() == [0, 1, 7, 3]
    assert bf.jit(lambda i: x.at[i].get(wrap_negative_indices=False))(small).tolist() == [0, 2]
