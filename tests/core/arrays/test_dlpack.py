"""DLPack capsules: written, read, and the lifetime of their memory."""

import gc

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.arrays import dlpack
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from tests.core.arrays.lent import NAMED, Lent, values_of


def address_of(x):
    return np.asarray(x).ctypes.data


@pytest.mark.parametrize("versioned", [False, True], ids=["old", "versioned"])
@pytest.mark.parametrize("dtype", NAMED, ids=dtypes.short_name)
def test_both_ways_share_the_memory(dtype, versioned):
    x = from_numpy(values_of(dtype))
    memory = dlpack.unpack(x.__dlpack__(max_version=(1, 0) if versioned else None), "test")
    assert (memory.address, memory.shape, memory.strides) == (address_of(x), (2, 3), None)
    assert memory.dtype == dtype and memory.device == (dlpack.CPU, 0)
    tensor = Lent(values_of(dtype), versioned=versioned)
    y = bnp.from_dlpack(tensor)
    assert y.dtype == dtype and address_of(y) == tensor.address
    assert np.asarray(y).tobytes() == tensor.values.tobytes()


def test_names_of_all_dtypes():
    unnamed = {dtypes.key, dtypes.float0, dtypes.float4_e2m1fn, *dtypes.WIDE_OF_NARROW}
    assert set(dtypes.ALL) - set(NAMED) == unnamed
    codes = {dtypes.bfloat16: 4, dtypes.float8_e4m3fn: 10, dtypes.float8_e5m2: 12, dtypes.bool_: 6}
    for dtype, code in codes.items():
        assert dlpack._DTYPES[code, 8 * dtype.itemsize] == dtype


@pytest.mark.parametrize(
    "options, flags",
    [({}, dlpack.READ_ONLY), ({"copy": False}, dlpack.READ_ONLY), ({"copy": True}, dlpack.COPIED)],
)
def test_flags_of_capsules(options, flags):
    x = bnp.arange(4.0)
    capsule = x.__dlpack__(max_version=(1, 1), **options)
    at = dlpack._capsule_api()[1](capsule, b"dltensor_versioned")
    managed = dlpack._Versioned.from_address(at)
    assert (managed.major, managed.flags) == (1, flags)
    assert (managed.tensor.data == address_of(x)) == (flags == dlpack.READ_ONLY)


def test_numpy_sees_read_only_memory():
    x = bnp.arange(4.0)
    seen = np.from_dlpack(x)
    assert not seen.flags.writeable and seen.ctypes.data == address_of(x)
    mine = np.from_dlpack(x, copy=True)
    mine[:] = 7
    assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1)], ids=str)
def test_shapes_at_the_edge(shape):
    x = bnp.ones(shape)
    assert np.from_dlpack(x).shape == shape
    assert bnp.from_dlpack(Lent(np.ones(shape, np.float32))).shape == shape


def test_scalars_that_programs_share_are_copied():
    capsule = bnp.asarray(1.0).__dlpack__(max_version=(1, 0))
    memory = dlpack.unpack(capsule, "test")
    assert memory.address != address_of(bnp.asarray(1.0)) and memory.on_host() == 1


def test_views_have_strides():
    x = bnp.arange(6.0).reshape(2, 3)
    for y in (x.T, x[:, ::-1], bnp.broadcast_to(x[0], (4, 3))):
        np.testing.assert_array_equal(np.from_dlpack(y), np.asarray(y))


# -- lifetimes ---------------------------------------------------------------------------------------------


def test_a_consumer_keeps_the_memory():
    x = bnp.arange(1000.0) + 1
    total = float(x.sum())
    seen = np.from_dlpack(x)
    del x
    gc.collect()
    assert seen.sum() == total


def test_the_owner_gets_its_memory_back():
    tensor = Lent(np.ones(5, np.float32))
    capsule = tensor.__dlpack__()
    assert tensor.alive == 1
    del capsule
    assert tensor.alive == 0, "a capsule that was not consumed"
    x = bnp.from_dlpack(tensor)
    y = x[1:]
    assert tensor.alive == 1
    del x
    assert y.tolist() == [1] * 4
    del y
    gc.collect()
    assert tensor.alive == 0


@pytest.mark.parametrize("direction", ["given", "taken"])
def test_donation_does_not_reuse_shared_memory(direction):
    step = bf.jit(lambda x: x * 2 + 1, donate_argnums=0)
    if direction == "given":
        x = bnp.ones(4096)
        seen = np.from_dlpack(x)
    else:
        seen = np.ones(4096, np.float32)
        x = bnp.from_dlpack(seen)
    assert float(step(x).sum()) == 3 * 4096
    assert x.is_deleted() and (seen == 1).all()


def test_what_the_owner_says_of_writing():
    frozen = np.ones(3, np.float32)
    frozen.flags.writeable = False
    assert bnp.from_dlpack(frozen, copy=False).tolist() == [1, 1, 1]
    assert bnp.from_dlpack(Lent(frozen, read_only=True)).tolist() == [1, 1, 1]


# -- errors ------------------------------------------------------------------------------------------------


def test_capsules_that_cannot_be_given():
    x = bnp.ones(3)
    with pytest.raises(BufferError, match=r"requested on cuda:0(.|\n)*device_put"):
        x.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="in no stream"):
        x.__dlpack__(stream=1)
    with pytest.raises(BufferError, match=r"key_data"):
        bf.random.key(0).__dlpack__()
    with pytest.raises(AttributeError, match="cpu:0"):
        x.__cuda_array_interface__


def test_sharded_arrays_are_given_by_shard(monkeypatch):
    monkeypatch.setattr(bf.config, "cpu_devices", 2)
    mesh = bf.make_mesh((2,), ("x",), devices=bf.devices("cpu")[:2])
    x = bf.device_put(bnp.arange(4.0), bf.NamedSharding(mesh, bf.P("x")))
    with pytest.raises(errors.InteropError, match="addressable_data"):
        np.from_dlpack(x)
    assert np.from_dlpack(x.addressable_data(1)).tolist() == [2, 3]


def patched(field, value, **options):
    """A tensor whose capsules hold what no library here writes."""

    class Odd(Lent):
        def __dlpack__(self, **given):
            capsule = super().__dlpack__(**given)
            at = dlpack._capsule_api()[1](capsule, b"dltensor_versioned")
            managed = dlpack._Versioned.from_address(at)
            setattr(managed if hasattr(managed, field) else managed.tensor, field, value)
            return capsule

    return Odd(np.ones(4, np.float32), **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "tensor, error, message",
    [
        (patched("code", 12), errors.DtypeError, "float8_e5m2 of 32 bits"),
        (patched("code", 99), errors.DtypeError, "type code 99"),
        (patched("lanes", 4), errors.DtypeError, "in 4 lanes"),
        (patched("major", 2), errors.UnsupportedError, "DLPack 2.0"),
        (Lent(np.ones(3), (10, 1)), errors.InteropError, r"ROCm, number 1(.|\n)*x.cpu\(\)"),
        (Lent(np.ones(3), (77, 0)), errors.InteropError, "DLPack type 77"),
    ],
)
def test_tensors_that_cannot_be_taken(tensor, error, message):
    for take in (bnp.from_dlpack, bnp.asarray, bnp.sin):
        with pytest.raises(error, match=message):
            take(tensor)
    gc.collect()
    assert tensor.alive == 0


def test_a_capsule_serves_once():
    capsule = Lent(np.ones(3)).__dlpack__()
    dlpack.unpack(capsule, "test").release()
    with pytest.raises(errors.ArgumentError, match="consumed before"):
        dlpack.unpack(capsule, "test")
