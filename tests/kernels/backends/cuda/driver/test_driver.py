"""Launch arguments and the memory pool without a device; copies and graphs on one."""

import ctypes
import gc
import sys
import threading

import numpy as np
import pytest

from blufunc import errors
from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.driver import graph as cuda_graph
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory

F32 = dtypes.float32

# -- without a device ------------------------------------------------------------------------------


def test_importing_blufunc_imports_no_cupy():
    import subprocess

    library = "blufunc.kernels.backends.cuda.library"
    code = f"import sys, blufunc, {library}.cublaslt, {library}.cupy_ops; print('cupy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_where_there_is_no_cuda_the_reason_names_the_remedy():
    reason = driver.available()
    if reason is None:
        pytest.skip("there is CUDA here")
    assert "install" in reason.lower() or "update" in reason or "nvidia-smi" in reason
    assert driver.device_count() == 0
    with pytest.raises(errors.UnsupportedError, match="CUDA cannot be used here") as caught:
        cuda_memory.pool(0)
    assert caught.value.why == reason


def bytes_of(arguments, i, n):
    """Parameter ``i`` as the driver reads it, through the table of addresses."""
    table = (ctypes.c_uint64 * (i + 1)).from_address(arguments.address)
    return ctypes.string_at(table[i], n), table[i]


def test_arguments_lie_where_the_table_says():
    tensor_map = bytes(range(128))
    values = [
        1 << 40,
        np.float32(1.5),
        np.int32(-2),
        np.float16(3),
        np.int64(-5),
        tensor_map,
        np.complex64(1 - 2j),
    ]
    arguments = driver.Arguments(values)
    for i, value in enumerate(values):
        want = value.to_bytes(8, "little") if isinstance(value, int) else bytes(np.asarray(value).tobytes())
        want = tensor_map if isinstance(value, bytes) else want
        got, address = bytes_of(arguments, i, len(want))
        assert got == want
        assert address % min(64, max(8, len(want))) == 0


def test_arguments_change_in_place():
    arguments = driver.Arguments([7, np.float32(1), 9])
    before = arguments.address
    arguments.set_pointer(2, 1 << 50)
    arguments.set(1, np.float32(-4))
    assert arguments.address == before
    assert bytes_of(arguments, 0, 8)[0] == (7).to_bytes(8, "little")
    assert np.frombuffer(bytes_of(arguments, 1, 4)[0], np.float32)[0] == -4
    assert bytes_of(arguments, 2, 8)[0] == (1 << 50).to_bytes(8, "little")
    with pytest.raises(errors.ArgumentError, match="parameter 1 of a kernel has 4 bytes"):
        arguments.set(1, np.float64(1))


@pytest.mark.parametrize("value", [1.5, True, None, "x"], ids=repr)
def test_arguments_without_a_width_are_refused(value):
    with pytest.raises(errors.ArgumentError, match="a kernel cannot take"):
        driver.Arguments([value])


@pytest.mark.parametrize(
    "sizes, what",
    [((0,), "grid"), ((1, 65536), "grid"), ((1025,), "block"), ((32, 64), "block"), ((1, 1, 1, 1), "grid")],
    ids=str,
)
def test_impossible_launches_are_refused(sizes, what):
    with pytest.raises(errors.ValueRangeError, match=f"invalid launch {what}"):
        driver._three(sizes, what)
    assert driver._three((7, 2), what) == (7, 2, 1)


def test_hopper_is_compiled_for_with_its_own_instructions():
    arch = lambda *capability: driver.DeviceProperties(0, "", capability, 1, 1, 1, 1).arch
    assert [arch(8, 0), arch(9, 0), arch(10, 0)] == ["sm_80", "sm_90a", "sm_100"]


class Memory:
    def __init__(self, source, nbytes):
        self.source, self.nbytes = source, nbytes
        source.used += nbytes
        source.address += 4096
        self.ptr = source.address

    def __del__(self):
        self.source.used -= self.nbytes


class Source:
    """Memory of ``total`` bytes, of which ``cached`` require ``free_unused``."""

    def __init__(self, total, cached=0):
        self.total, self.cached, self.used, self.address, self.freed = total, cached, 0, 0, 0

    def malloc(self, sizes):
        if self.used + self.cached + sum(sizes) > self.total:
            raise MemoryError
        return [Memory(self, nbytes) for nbytes in sizes]

    def free_unused(self):
        self.freed += 1
        self.cached = 0

    def held_bytes(self):
        return self.used + self.cached

    def room(self):
        return self.total - self.used, self.total


def test_live_and_peak_bytes():
    pool = cuda_memory.Pool(0, Source(1 << 20))
    x, y = pool.allocate((100,), F32), pool.allocate((10, 10), dtypes.float64)
    assert (pool.live_bytes(), pool.peak_bytes()) == (1200, 1200)
    del x
    assert (pool.live_bytes(), pool.peak_bytes()) == (800, 1200)
    pool.reset_peak()
    z = pool.allocate((25,), F32)
    assert (pool.live_bytes(), pool.peak_bytes()) == (900, 900)
    del y, z
    gc.collect()
    assert pool.live_bytes() == 0 and pool.held_bytes() == 0


def test_views_keep_the_memory():
    pool = cuda_memory.Pool(0, Source(1 << 20))
    arena = pool.allocate((1024,), dtypes.uint8)
    part = arena.view((8, 4), F32, 256)
    assert part.ptr == arena.ptr + 256 and part.nbytes == 128 and part.shares(arena)
    del arena
    assert pool.live_bytes() == 1024
    with pytest.raises(errors.ValueRangeError, match="is out of bounds of"):
        part.view((33,), F32)
    del part
    assert pool.live_bytes() == 0


def test_arrays_without_bytes_take_none():
    pool = cuda_memory.Pool(0, Source(0))
    empty = pool.allocate((3, 0), F32, "nothing")
    assert (empty.ptr, empty.nbytes, empty.label, pool.live_bytes()) == (0, 0, "nothing", 0)


def test_cached_blocks_are_freed_before_memory_is_said_to_be_out():
    source = Source(1000, cached=600)
    pool = cuda_memory.Pool(0, source)
    x = pool.allocate((200,), F32)
    assert source.freed == 1 and pool.live_bytes() == x.nbytes


def test_out_of_memory_lists_the_largest_and_nothing_is_lost():
    pool = cuda_memory.Pool(0, Source(10 << 20))
    kept = [pool.allocate((n << 10,), F32, f"train.py:{n}, in step") for n in (100, 900, 300, 10, 20, 30, 40)]
    with pytest.raises(errors.OutOfMemoryError) as caught:
        pool.allocate((2, 1 << 20), F32, "the temporaries of step", planned_peak=9 << 20)
    text = str(caught.value)
    assert isinstance(caught.value, MemoryError)
    assert "out of memory on cuda:0: cannot allocate 8.0 MiB, for the temporaries of step" in text
    assert "arrays hold 5.5 MiB of 10.0 MiB, and 4.5 MiB are free" in text
    assert "planned to need 9.0 MiB" in text and "del x" in text
    listed = [line.split("train.py:")[1].split(",")[0] for line in text.splitlines() if "train.py" in line]
    assert listed == ["900", "300", "100", "40", "30", "20"], "the largest first, and no more than six"
    assert "3.5 MiB  f32 (921600,)  train.py:900" in text
    assert pool.live_bytes() == sum(b.nbytes for b in kept)
    del kept[1]
    assert pool.allocate((1 << 20,), F32).nbytes == 4 << 20, "it goes on when something is dropped"


def test_arrays_that_are_allocated_together():
    pool = cuda_memory.Pool(0, Source(800 << 10, cached=400 << 10))
    wanted = [((1 << n, 4), F32, f"result {n}") for n in range(12)] + [((0, 3), F32, "nothing")]
    kept = pool.allocate_all(wanted, 1 << 18)
    assert [(b.shape, b.dtype, b.label) for b in kept] == wanted
    assert len({b.ptr for b in kept}) == len(wanted) and pool.live_bytes() == sum(b.nbytes for b in kept)
    with pytest.raises(errors.OutOfMemoryError, match=r"cannot allocate 512\.0 KiB, for the second"):
        pool.allocate_all([((1 << 16,), F32, "the first"), ((1 << 17,), F32, "the second")])
    assert pool.live_bytes() == sum(b.nbytes for b in kept), "the first went back"
    assert pool.allocate((1 << 17,), F32).nbytes == 1 << 19, "and its cache with it"
    assert pool.allocate_all([]) == []


def test_books_agree_when_threads_allocate_at_once():
    pool = cuda_memory.Pool(0, Source(1 << 30))
    kept = []

    def work():
        for i in range(300):
            buffer = pool.allocate((i + 1,), F32)
            if i % 10 == 0:
                kept.append(buffer)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert pool.live_bytes() == sum(b.nbytes for b in kept)


@pytest.mark.parametrize(
    "nbytes, text",
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3072.0 GiB")],
)
def test_sizes_for_people(nbytes, text):
    assert cuda_memory.size_text(nbytes) == text


class Stream:
    ptr = 1


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr(driver, "compute_stream", lambda device: Stream)
    monkeypatch.setattr(driver, "use_device", lambda device: None)


def test_only_the_thread_that_captures_is_redirected(monkeypatch):
    monkeypatch.setattr(driver, "compute_stream", lambda device: f"compute {device}")
    other = type("Other", (), {"ptr": 9})()
    seen = []
    with driver.redirected(1, other):
        assert driver.work_stream(1) is other and driver.work_stream(0) == "compute 0"
        assert driver.is_capturing(9) and not driver.is_capturing(8)
        thread = threading.Thread(target=lambda: seen.append((driver.work_stream(1), driver.is_capturing(9))))
        thread.start()
        thread.join()
    assert seen == [("compute 1", False)]
    assert driver.work_stream(1) == "compute 1" and not driver.is_capturing(9)


def test_all_streams_of_a_capture_capture_and_have_scratch_of_their_own(monkeypatch):
    stream = lambda ptr: type("Stream", (), {"ptr": ptr})()
    monkeypatch.setattr(driver, "compute_stream", lambda device: stream(5))
    with driver.redirected(0, stream(9), [stream(7), stream(8)]):
        assert [driver.is_capturing(p) for p in (5, 7, 8, 9)] == [False, True, True, True]
        assert [driver.lane(0, p) for p in (5, 9, 7, 8)] == [5, 5, -1, -2]
    assert not driver.is_capturing(7) and driver.lane(0, 7) == 7


# -- on a device -----------------------------------------------------------------------------------

gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "float32", "bfloat16", "float8_e4m3fn", "complex64", "key"]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (600, 1000)], ids=str)
def test_copies_there_and_back(dtype, shape, rng):
    dtype = dtypes.key if dtype == "key" else dtypes.as_dtype(dtype)
    x = rng.integers(0, 2, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
    buffer = cuda_memory.to_device(x)
    assert (buffer.shape, buffer.dtype, buffer.nbytes) == (x.shape, x.dtype, x.nbytes)
    np.testing.assert_array_equal(cuda_memory.to_host(buffer).tobytes(), x.tobytes())
    copied = cuda_memory.copy(buffer)
    assert not copied.nbytes or copied.ptr != buffer.ptr
    np.testing.assert_array_equal(cuda_memory.to_host(copied).tobytes(), x.tobytes())


@gpu
def test_the_source_of_a_copy_may_change_at_once():
    buffers = []
    x = np.zeros(1000, np.float32)
    for i in range(100):  # more than there are slots
        x[:] = i
        buffers.append(cuda_memory.to_device(x))
        x[:] = -1
    assert [cuda_memory.to_host(b)[-1] for b in buffers] == list(range(100))


@gpu
def test_other_libraries_see_the_same_memory():
    import cupy

    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    buffer = cuda_memory.to_device(x)
    for seen in (cupy.asarray(buffer), cuda_memory.as_cupy(buffer)):
        assert seen.data.ptr == buffer.ptr
        np.testing.assert_array_equal(cupy.asnumpy(seen), x)
    half = cuda_memory.to_device(x.astype(dtypes.bfloat16))
    assert cuda_memory.as_cupy(half).dtype == np.uint16
    with pytest.raises(AttributeError, match="use DLPack"):
        half.__cuda_array_interface__


@gpu
def test_memory_lives_as_long_as_what_cupy_sees():
    before = cuda_memory.pool().live_bytes()
    seen = cuda_memory.as_cupy(cuda_memory.to_device(np.ones(1000, np.float32)))
    assert cuda_memory.pool().live_bytes() == before + 4000
    assert float(seen.sum()) == 1000
    back = cuda_memory.from_cupy(seen, F32)
    assert back.ptr != seen.data.ptr, "another buffer's memory is not taken over"
    del seen
    assert cuda_memory.pool().live_bytes() == before + 4000
    del back
    assert cuda_memory.pool().live_bytes() == before


@gpu
def test_a_device_that_is_full_says_so_and_goes_on():
    kept = cuda_memory.to_device(np.ones(3, np.float32), label="kept by the test")
    with pytest.raises(errors.OutOfMemoryError, match="out of memory on cuda:0"):
        cuda_memory.allocate((1 << 44,), dtypes.uint8, label="too much")
    np.testing.assert_array_equal(cuda_memory.to_host(kept), np.ones(3))


SOURCE = r"""
extern "C" __global__ void axpy(const float* x, float* y, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += a * x[i];
}
extern "C" __global__ void reversed(const float* x, float* y, int n) {
  extern __shared__ float held[];
  __shared__ volatile float more[256];  // of its own, which counts too
  more[threadIdx.x % 256] = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) held[i] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = held[n - 1 - i];
}
"""


@pytest.fixture(scope="module")
def module():
    nvrtc = pytest.importorskip("blufunc.kernels.backends.cuda.driver.nvrtc")
    driver.use_device(0)
    return driver.Module(nvrtc.compile(SOURCE, driver.properties().arch, "runtime_test"))


@gpu
def test_launches_with_changing_arguments(module):
    n, stream = 1000, driver.compute_stream()
    x = cuda_memory.to_device(np.arange(n, dtype=np.float32))
    y, z = (cuda_memory.to_device(np.zeros(n, np.float32)) for _ in range(2))
    launch = module.kernel("axpy").prepare((4,), (256,), 0, [x, y, np.float32(2), np.int32(n)])
    launch(stream.ptr)
    launch.arguments.set_pointer(1, z.ptr)
    launch.arguments.set(2, np.float32(-1))
    launch(stream.ptr)
    np.testing.assert_array_equal(cuda_memory.to_host(y), 2 * np.arange(n))
    np.testing.assert_array_equal(cuda_memory.to_host(z), -np.arange(n))


@gpu
@pytest.mark.parametrize("n", [10_000, 12_288, 20_000])  # 40, 48 and 80 kB
def test_more_shared_memory_than_a_block_has_by_itself(module, n):
    x, y = np.arange(n, dtype=np.float32), cuda_memory.to_device(np.zeros(n, np.float32))
    kernel = module.kernel("reversed")
    args = [cuda_memory.to_device(x), y, np.int32(n)]
    kernel.prepare((1,), (512,), 4 * n, args)(driver.compute_stream().ptr)
    np.testing.assert_array_equal(cuda_memory.to_host(y), x[::-1])
    with pytest.raises(errors.ValueRangeError, match="bytes of shared memory"):
        kernel.prepare((1,), (512,), 1 << 20, args)


@gpu
def test_work_becomes_a_graph(module):
    n = 256
    x, y = cuda_memory.to_device(np.ones(n, np.float32)), cuda_memory.to_device(np.zeros(n, np.float32))
    launch = module.kernel("axpy").prepare((1,), (256,), 0, [x, y, np.float32(1), np.int32(n)])

    def run(streams):
        for _ in range(3):
            launch(streams[0].ptr)

    run([driver.compute_stream()])
    graph = cuda_graph.capture(run, keep=(x, y))
    np.testing.assert_array_equal(cuda_memory.to_host(y), np.full(n, 3))
    for _ in range(4):
        graph.launch()
    np.testing.assert_array_equal(cuda_memory.to_host(y), np.full(n, 15))


@gpu
def test_streams_of_a_graph_synchronize_by_events(module):
    n = 1 << 22
    arrays = [cuda_memory.to_device(np.full(n, i, np.float32)) for i in range(3)]
    x, y, z = arrays
    add = [
        module.kernel("axpy").prepare((n // 256,), (256,), 0, [a, b, np.float32(1), np.int32(n)])
        for a, b in ((x, y), (y, z), (z, x))
    ]

    def run(streams):
        first, second = streams
        add[0](first.ptr)
        second.wait_event(driver.recorded(first))
        add[1](second.ptr)
        first.wait_event(driver.recorded(second))
        add[2](first.ptr)

    run(plain := [driver.new_stream(), driver.new_stream()])
    for stream in plain:
        stream.synchronize()
    want = [np.float32(i) for i in range(3)]
    graph = cuda_graph.capture(run, keep=(x, y, z), urgent=(False, True))
    for i, a in enumerate(arrays):
        driver.copy_in(a.ptr, np.full(n, i, np.float32))
    for _ in range(5):
        graph.launch()
        want[1] += want[0]
        want[2] += want[1]
        want[0] += want[2]
    for a, w in zip(arrays, want, strict=True):
        np.testing.assert_array_equal(cuda_memory.to_host(a), np.full(n, w))


@gpu
def test_what_cupy_does_is_captured_too():
    x = cuda_memory.to_device(np.arange(1000, dtype=np.float32))
    out = cuda_memory.allocate((1000,), F32)

    def run(streams):
        with cuda_memory.library_scope():
            cuda_memory.as_cupy(out)[...] = (cuda_memory.as_cupy(x) * 2 + 1) * 3

    run([])
    graph = cuda_graph.capture(run, keep=(x, out))
    for i in range(4):
        driver.copy_in(x.ptr, np.arange(1000, dtype=np.float32) + i)
        graph.launch()
        np.testing.assert_array_equal(cuda_memory.to_host(out), ((np.arange(1000) + i) * 2 + 1) * 3)


@gpu
def test_what_cannot_be_captured_is_an_error_of_cuda(module):
    n = 256
    x, y = cuda_memory.to_device(np.ones(n, np.float32)), cuda_memory.to_device(np.zeros(n, np.float32))
    launch = module.kernel("axpy").prepare((1,), (256,), 0, [x, y, np.float32(1), np.int32(n)])

    def run(streams):
        launch(streams[0].ptr)
        streams[0].synchronize()

    with pytest.raises(RuntimeError, match="cudaErrorStreamCapture"):
        cuda_graph.capture(run, keep=(x, y))
    launch(driver.compute_stream().ptr)
    np.testing.assert_array_equal(cuda_memory.to_host(y), np.ones(n))


@gpu
def test_time_on_the_device(module):
    n = 1 << 24
    x, y = (cuda_memory.to_device(np.zeros(n, np.float32)) for _ in range(2))
    launch = module.kernel("axpy").prepare((n // 256,), (256,), 0, [x, y, np.float32(1), np.int32(n)])
    stream = driver.compute_stream()
    assert 0 < driver.elapsed_ms(lambda: launch(stream.ptr), stream, 5) < 100
