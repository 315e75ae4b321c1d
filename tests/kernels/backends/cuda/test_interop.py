"""Arrays that a CUDA device lends or borrows: addresses, streams, lifetimes."""

import gc

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.arrays import dlpack
from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from tests.core.arrays.lent import NAMED, Lent, values_of

COMPUTE = 1  # handle of the fake's stream


def lent(fake, values, **options):
    """A tensor of another library on the fake device."""
    values = np.asarray(values)
    (block,) = fake.source.malloc([max(values.nbytes, 1)])
    device = np.ndarray(
        values.shape, values.dtype, (memoryview(block.raw)[block.ptr - block.raw.ctypes.data :])
    )
    device[...] = values
    tensor = Lent(device, (dlpack.CUDA, 0), address=block.ptr, **options)
    tensor.block = block
    return tensor


def on(cuda, values):
    return bf.device_put(bnp.asarray(values), cuda)


def seen(capsule):
    return dlpack.unpack(capsule, "test")


# -- given -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stream, order",
    [
        (None, [("after", 1)]),
        (1, [("after", 1)]),
        (2, [("after", 2)]),
        (-1, []),
        (4096, [("after", 4096)]),
    ],
)
def test_the_consumers_stream_waits(fake, cuda, stream, order):
    x = on(cuda, np.arange(4.0, dtype=np.float32))
    assert x.__dlpack_device__() == (dlpack.CUDA, 0)
    fake.ordered.clear()
    memory = seen(x.__dlpack__(stream=stream, max_version=(1, 0)))
    assert fake.ordered == order
    assert (memory.address, memory.device, memory.strides) == (x.buffer.ptr, (dlpack.CUDA, 0), None)


@pytest.mark.parametrize("stream", [0, -2, "1", True])
def test_streams_that_are_none(cuda, stream):
    with pytest.raises(errors.InteropError, match=r"pass 1 \(legacy"):
        on(cuda, 1.0).__dlpack__(stream=stream)


@pytest.mark.parametrize("dtype", NAMED, ids=dtypes.short_name)
def test_dtypes_both_ways(fake, cuda, dtype):
    tensor = lent(fake, values_of(dtype))
    x = bnp.from_dlpack(tensor)
    assert x.device == cuda and x.buffer.ptr == tensor.address and tensor.streams == [COMPUTE]
    np.testing.assert_array_equal(np.asarray(x), values_of(dtype))
    assert seen(x.__dlpack__()).dtype == dtype


def test_a_copy_for_the_cpu_must_be_asked_for(cuda):
    x = on(cuda, np.arange(3.0, dtype=np.float32))
    memory = seen(x.__dlpack__(dl_device=(dlpack.CPU, 0), max_version=(1, 0)))
    assert memory.device == (dlpack.CPU, 0) and memory.on_host().tolist() == [0, 1, 2]
    np.testing.assert_array_equal(np.from_dlpack(x, device="cpu"), [0, 1, 2])
    with pytest.raises(BufferError, match="copy=False"):
        x.__dlpack__(dl_device=(dlpack.CPU, 0), copy=False)
    with pytest.raises(BufferError, match="device_put"):
        x.__dlpack__(dl_device=(dlpack.CUDA, 1))
    with pytest.raises((BufferError, RuntimeError), match="device"):
        np.from_dlpack(x)


def test_a_copy_is_the_consumers(cuda):
    x = on(cuda, np.ones(5, np.float32))
    memory = seen(x.__dlpack__(copy=True, max_version=(1, 0)))
    assert memory.address != x.buffer.ptr


def test_the_description_of_memory(cuda):
    x = on(cuda, np.ones((2, 3), np.float32))
    found = x.__cuda_array_interface__
    assert (found["data"], found["shape"], found["typestr"]) == ((x.buffer.ptr, False), (2, 3), "<f4")
    assert found["strides"] is None and found["stream"] == COMPUTE
    assert not hasattr(x.astype("bfloat16"), "__cuda_array_interface__")
    assert not hasattr(bnp.ones(3), "__cuda_array_interface__")


@pytest.mark.parametrize("how", ["capsule", "description"])
def test_lent_memory_is_not_reused(fake, cuda, how):
    """Neither by a donation, nor by an allocation ahead of the consumer."""
    step = bf.jit(lambda x: x * 2, donate_argnums=0)
    x = on(cuda, np.ones(2048, np.float32))
    address = x.buffer.ptr
    consumer = seen(x.__dlpack__()) if how == "capsule" else (x, x.__cuda_array_interface__)
    y = step(x)
    assert x.is_deleted() and y.buffer.ptr != address
    assert (fake.array(address, (2048,), np.dtype(np.float32)) == 1).all()
    fake.ordered.clear()
    del x, y
    gc.collect()
    assert fake.ordered == []
    if how == "capsule":
        consumer.release()
    del consumer
    z = on(cuda, np.zeros(2048, np.float32))
    assert fake.ordered == [("before", 1)], "the allocation waits for the consumer's stream"
    assert fake.source.live[z.buffer.ptr]


def test_donation_reuses_what_was_never_lent(cuda):
    step = bf.jit(lambda x: x * 2, donate_argnums=0)
    x = on(cuda, np.ones(2048, np.float32))
    address = x.buffer.ptr
    assert step(x).buffer.ptr == address


# -- taken -------------------------------------------------------------------------------------------------


def test_borrowed_memory_is_shared_and_never_donated(fake, cuda):
    tensor = lent(fake, np.ones(2048, np.float32))
    step = bf.jit(lambda x: x * 2, donate_argnums=0)
    for take in (bnp.asarray, bnp.from_dlpack, lambda x: bnp.from_dlpack(x, copy=False)):
        x = take(tensor)
        assert x.buffer.ptr == tensor.address and x.device == cuda
        part = x.reshape(2, 1024)
        y, z = step(x), step(part)
        assert (tensor.values == 1).all() and float(y.sum()) == float(z.sum()) == 4096
        assert tensor.address not in (y.buffer.ptr, z.buffer.ptr)


def test_the_owner_waits_for_readers(fake, cuda):
    tensor = lent(fake, np.ones(64, np.float32))
    x = bnp.asarray(tensor)
    y = x + 1
    fake.ordered.clear()
    fake.busy = True
    del x
    assert fake.ordered == [("after", 1)], "the owner's default stream waits at once"
    assert tensor.alive == 1, "kernels may still read"
    fake.busy = False
    keep = on(cuda, np.ones(3))  # an allocation looks, and finds the event of the busy time
    assert tensor.alive == 1
    for event, _ in cuda_memory.borrowed._waiting:
        event.done = True
    np.asarray(y)
    assert tensor.alive == 0
    del keep


@pytest.mark.parametrize("copied", [False, True])
def test_strided_memory(fake, cuda, copied):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensor = lent(fake, values)
    tensor.values = tensor.values[:, ::2]
    x = bnp.from_dlpack(tensor, copy=copied or None)
    np.testing.assert_array_equal(x, values[:, ::2])
    cuda_memory.borrowed.settle()
    assert tensor.alive == 0
    with pytest.raises(errors.InteropError, match="row-major"):
        bnp.from_dlpack(tensor, copy=False)


def test_a_copy_leaves_the_owner_free(fake, cuda):
    tensor = lent(fake, np.ones(8, np.float32))
    x, y = bnp.from_dlpack(tensor, copy=True), bnp.array(tensor)
    tensor.values[:] = 7
    assert x.tolist() == y.tolist() == [1] * 8
    cuda_memory.borrowed.settle()
    assert tensor.alive == 0


def test_wide_elements_become_narrow_in_functions(fake, cuda):
    for values, dtype in ((np.arange(3.0), "float32"), (np.arange(3), "int32")):
        x = bnp.asarray(lent(fake, values))
        assert x.dtype == dtype and x.device == cuda and x.tolist() == [0, 1, 2]
    with pytest.raises(errors.ValueRangeError, match="int64"):
        bnp.sin(lent(fake, np.asarray([1, 2**40])))


def test_other_devices(fake, cuda):
    here = bnp.from_dlpack(lent(fake, np.ones(3, np.float32)), device=bf.devices("cpu")[0])
    assert here.device.platform == "cpu" and here.tolist() == [1, 1, 1]
    there = bnp.from_dlpack(np.ones(3, np.float32), device=cuda)
    assert there.device == cuda and there.tolist() == [1, 1, 1]
    with pytest.raises(errors.InteropError, match=r"is on cuda:0: |it is on cuda:0"):
        bnp.from_dlpack(lent(fake, np.ones(3)), device=bf.devices("cpu")[0], copy=False)
    tensor = lent(fake, np.ones(3))
    tensor.device = (dlpack.CUDA, 3)
    with pytest.raises(errors.InteropError, match=r"cuda, number 3, which is none of cuda:0"):
        bnp.asarray(tensor)
    assert bnp.zeros_like(lent(fake, np.ones(3, np.float32))).device == cuda


def test_a_tensor_of_a_gpu_without_cuda():
    if cuda_memory.driver.available() is None:
        pytest.skip("this machine has CUDA")
    with pytest.raises(errors.InteropError, match=r"cannot use CUDA here(.|\n)*x.cpu\(\)"):
        bnp.asarray(Lent(np.ones(3), (dlpack.CUDA, 0)))


class Described:
    """An array that has only ``__cuda_array_interface__``."""

    def __init__(self, tensor, **fields):
        self.tensor = tensor
        v = tensor.values
        self.__cuda_array_interface__ = {
            "shape": v.shape, "typestr": v.dtype.str, "data": (tensor.address, False), "version": 3,
            "strides": None, "stream": 2, **fields,
        }  # fmt: skip

    @property
    def __cuda_array_interface__(self):
        return self._description

    @__cuda_array_interface__.setter
    def __cuda_array_interface__(self, value):
        self._description = value


def test_arrays_that_are_only_described(fake, cuda):
    tensor = lent(fake, np.ones((2, 3), np.float32))
    fake.ordered.clear()
    x = bnp.asarray(Described(tensor))
    assert x.buffer.ptr == tensor.address and fake.ordered == [("before", 2)]
    assert bnp.sin(Described(tensor, stream=None)).shape == (2, 3)
    with pytest.raises(errors.InteropError, match="mask"):
        bnp.sin(Described(tensor, mask=tensor))
    with pytest.raises(errors.DtypeError):
        bnp.sin(Described(tensor, typestr="<V4"))


def test_strides_that_a_library_garbles(fake, cuda):
    """CuPy's capsules hold negative strides as huge positive ones."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    whole = lent(fake, values)

    class Reversed(Described):
        def __dlpack_device__(self):
            return (dlpack.CUDA, 0)

        def __dlpack__(self, **options):
            capsule = whole.__dlpack__(**options)
            at = dlpack._capsule_api()[1](capsule, b"dltensor_versioned")
            dlpack._Versioned.from_address(at).tensor.strides[0] = (2**64 - 16) // 4
            return capsule

    first = whole.address + 2 * 16
    x = bnp.asarray(Reversed(whole, data=(first, False), strides=(-16, 4)))
    np.testing.assert_array_equal(x, values[::-1])


# -- on a device -------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_cupy_both_ways():
    import cupy

    own = bf.devices("cuda")[0]
    given = cupy.arange(12, dtype=cupy.float32).reshape(3, 4)
    for x in (bnp.asarray(given), bnp.from_dlpack(given), bf.jit(lambda v: v)(given)):
        assert x.device == own
        np.testing.assert_array_equal(x, given.get())
    assert bnp.asarray(given).buffer.ptr == given.data.ptr
    x = bf.device_put(bnp.arange(1000.0), own) + 1
    for back in (cupy.asarray(x), cupy.from_dlpack(x)):
        assert back.data.ptr == x.buffer.ptr and float(back.sum()) == 500500
    np.testing.assert_array_equal(bnp.asarray(given.T), given.get().T)
    np.testing.assert_array_equal(bnp.asarray(given[::-1, ::2]), given.get()[::-1, ::2])
    assert bnp.asarray(cupy.arange(3.0)).dtype == "float32" and bnp.sin(given).device == own
    assert (x[:12].reshape(3, 4) + given).device == own


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32", "bool", "complex64"]
)
def test_pytorch_both_ways(name):
    torch = pytest.importorskip("torch")
    given = torch.arange(6, device="cuda").reshape(2, 3).to(getattr(torch, name))
    x = bnp.from_dlpack(given)
    back = torch.from_dlpack(x)
    assert x.device.platform == "cuda" and x.dtype == name
    assert back.is_cuda and back.dtype == given.dtype and back.data_ptr() == given.data_ptr()
    assert torch.equal(back.view(torch.uint8), given.view(torch.uint8))
    if name != "bool":
        assert torch.from_dlpack(x + x).is_cuda


@pytest.mark.gpu
def test_pytorch_streams_and_lifetimes():
    """Values are ready on the consumer's stream, and memory stays while it is read."""
    torch = pytest.importorskip("torch")
    n = 1 << 24
    step = bf.jit(lambda x: x * 2 + 1)
    side = torch.cuda.Stream()
    for use in (torch.cuda.default_stream(), side):
        with torch.cuda.stream(use):
            for i in range(20):
                a = torch.full((n,), float(i), device="cuda")
                out = torch.from_dlpack(step(a))
                del a
                junk = torch.full((n,), -1.0, device="cuda")  # PyTorch reuses what it has back
                assert float(out.min()) == float(out.max()) == 2 * i + 1
                del out, junk
    t = torch.ones(n, device="cuda")
    y = step(t)
    t.zero_()  # on the default stream, which waits for what has read the tensor
    assert float(y.min()) == 3


@pytest.mark.gpu
def test_jax_both_ways():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    x = bf.device_put(bnp.arange(6.0), bf.devices("cuda")[0]) * 2
    there = jax.numpy.from_dlpack(x)
    assert "cuda" in str(there.device).lower()
    assert there.unsafe_buffer_pointer() == x.buffer.ptr
    back = bnp.from_dlpack(there)
    assert back.buffer.ptr == x.buffer.ptr and back.tolist() == [0, 2, 4, 6, 8, 10]
    assert bnp.asarray(jax.numpy.ones(3, "bfloat16")).dtype == "bfloat16"
