"""GEMMs by cuBLASLt: descriptors, autotuning and calls.

Kernels, stages 6 to 8 for ``dot_general``. In: a ``Gemm``. Out: a ``Plan`` that runs it on a stream. The library is
called through ctypes, and its descriptors need no device. Of the algorithms that it proposes, the fastest is found by
running them, and stored on disk.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda.driver import driver, sm_reservation
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.cache.autotune import fastest
from blufunc.kernels.cache.disk import DiskCache, key_of
from blufunc.kernels.gemm_layout import Gemm, Side, column_major

WORKSPACE_BYTES = 32 << 20
"""Scratch memory of each stream, as the library recommends for Hopper."""

_CANDIDATES = 16
"""Number of algorithms to request."""

_MOST_REPEATS = 200
"""Maximum back-to-back runs of an algorithm to time it."""

_LONGER, _BEGINNING_MS = 2.0, 0.2
"""To reserve SMs for a trial: maximum slowdown of a GEMM, and launch delay."""

# -- the library ----------------------------------------------------------------------------------

# cublasLtMatmulDescAttributes_t, cublasLtMatrixLayoutAttribute_t, cublasLtMatmulPreferenceAttributes_t: the numbers
# are the same from CUDA 12.9 on.
_TRANSA, _TRANSB, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8
_SM_COUNT_TARGET = 15
_A_SCALE_POINTER, _B_SCALE_POINTER, _FAST_ACCUM, _A_SCALE_MODE, _B_SCALE_MODE = 17, 18, 25, 31, 32
_NO_EPILOGUE, _BIAS = 1, 4
_BATCH_COUNT, _BATCH_OFFSET = 5, 6
_MAX_WORKSPACE, _MIN_ALIGNMENT = 1, (5, 6, 7, 8)

_CUDA_TYPES: dict[np.dtype, int] = {
    dtypes.float32: 0, dtypes.float64: 1, dtypes.float16: 2, dtypes.int8: 3, dtypes.complex64: 4,
    dtypes.complex128: 5, dtypes.int32: 10, dtypes.bfloat16: 14, dtypes.float8_e4m3fn: 28, dtypes.float8_e5m2: 29,
}  # fmt: skip
"""``cudaDataType`` of library_types.h."""

_COMPUTE: dict[str, int] = {"f32": 68, "tf32": 77, "f64": 70, "i32": 72}
"""``cublasComputeType_t`` of cublas_api.h."""

_SCALE_MODES: dict[str, int] = {"tensor": 0, "row": 3, "block": 4}
"""``cublasLtMatmulMatrixScale_t``: SCALAR_32F, OUTER_VEC_32F, and VEC128_32F."""

_SCALES: dict[tuple[str, bool], tuple[np.dtype, str]] = {
    ("f32", False): (dtypes.float32, "f"), ("tf32", False): (dtypes.float32, "f"),
    ("f32", True): (dtypes.complex64, "ff"), ("tf32", True): (dtypes.complex64, "ff"),
    ("f64", False): (dtypes.float64, "d"), ("f64", True): (dtypes.complex128, "dd"),
    ("i32", False): (dtypes.int32, "i"),
}  # fmt: skip
"""Type and ``struct`` format of alpha and beta, by compute type and complex flag."""


class Algorithm(ctypes.Structure):
    """``cublasLtMatmulAlgo_t``: 64 opaque bytes, valid for one version of the library."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Result(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


_P, _Z = ctypes.c_void_p, ctypes.c_size_t
_SIGNATURES: dict[str, tuple] = {
    "cublasLtCreate": (_P,),
    "cublasLtMatmulDescCreate": (_P, ctypes.c_int, ctypes.c_int),
    "cublasLtMatmulDescDestroy": (_P,),
    "cublasLtMatmulDescSetAttribute": (_P, ctypes.c_int, _P, _Z),
    "cublasLtMatmulDescGetAttribute": (_P, ctypes.c_int, _P, _Z, _P),
    "cublasLtMatrixLayoutCreate": (_P, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "cublasLtMatrixLayoutDestroy": (_P,),
    "cublasLtMatrixLayoutSetAttribute": (_P, ctypes.c_int, _P, _Z),
    "cublasLtMatrixLayoutGetAttribute": (_P, ctypes.c_int, _P, _Z, _P),
    "cublasLtMatmulPreferenceCreate": (_P,),
    "cublasLtMatmulPreferenceDestroy": (_P,),
    "cublasLtMatmulPreferenceSetAttribute": (_P, ctypes.c_int, _P, _Z),
    "cublasLtMatmulAlgoGetHeuristic": (_P, _P, _P, _P, _P, _P, _P, ctypes.c_int, _P, _P),
    "cublasLtMatmulAlgoCheck": (_P, _P, _P, _P, _P, _P, _P, _P),
    "cublasLtMatmul": (_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _Z, _P),
}

_STATUS = {1: "not initialized", 3: "out of host memory", 7: "invalid value", 8: "architecture not supported",
           13: "execution failed", 14: "internal error", 15: "not supported"}  # fmt: skip


@functools.cache
def library() -> Any:
    """cuBLASLt, with its functions typed.

    Raises:
      UnsupportedError: it is not installed.
    """
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
        found = ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path)
    except (ImportError, RuntimeError, OSError) as e:
        raise errors.UnsupportedError(
            "cuBLASLt, which multiplies matrices on CUDA devices, was not found.",
            why=str(e),
            fix="pip install 'blufunc[cuda13]'",
        ) from None
    for name, signature in _SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = signature, ctypes.c_int
    found.cublasLtGetVersion.restype = ctypes.c_size_t
    return found


def version() -> int:
    """The version of the library: 130002 is 13.0.2."""
    return library().cublasLtGetVersion()


def _check(status: int, what: str) -> None:
    if status:
        raise errors.UnsupportedError(
            f"cuBLASLt cannot do this: {what}.", why=f"status {status}: {_STATUS.get(status, 'unknown')}"
        )


class Descriptors:
    """The library's description of a ``Gemm``; it needs no device.

    Raises:
      UnsupportedError: the library cannot do it.
    """

    def __init__(self, gemm: Gemm):
        reason = gemm.refused()
        if reason is not None:
            raise errors.UnsupportedError(
                f"cuBLASLt has no GEMM for {gemm}.", why=reason, fix="compute it by a kernel of your own"
            )
        self.gemm, self.lib = gemm, library()
        self._made: list[tuple[str, ctypes.c_void_p]] = []
        call = column_major(gemm)
        scale, _ = _SCALES[gemm.compute, dtypes.is_complex(gemm.a)]
        self.matmul = self._create("MatmulDesc", _COMPUTE[gemm.compute], _CUDA_TYPES[scale])
        self.set(_TRANSA, ctypes.c_int32(call.trans_a))  # CUBLAS_OP_N is 0, CUBLAS_OP_T is 1
        self.set(_TRANSB, ctypes.c_int32(call.trans_b))
        self.set(_EPILOGUE, ctypes.c_uint32(_BIAS if gemm.bias else _NO_EPILOGUE))
        self.a, self.b, self.d = (self._matrix(side, call.batch) for side in (call.a, call.b, call.d))
        if gemm.bias:  # the address stands for its alignment until there is one
            self.set(_BIAS_POINTER, ctypes.c_void_p(gemm.alignment))
        if gemm.sms:
            self.set(_SM_COUNT_TARGET, ctypes.c_int32(gemm.sms))
        if gemm.scaling:
            for attribute in (_A_SCALE_MODE, _B_SCALE_MODE):
                self.set(attribute, ctypes.c_int32(_SCALE_MODES[gemm.scaling]))
            self.set_scales(gemm.alignment, gemm.alignment)
        if gemm.fast:
            self.set(_FAST_ACCUM, ctypes.c_int8(1))

    def _create(self, kind: str, *args: Any) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        _check(getattr(self.lib, f"cublasLt{kind}Create")(ctypes.byref(handle), *args), f"create a {kind}")
        self._made.append((kind, handle))
        return handle

    def _set(self, kind: str, handle: ctypes.c_void_p, attribute: int, value: Any) -> None:
        function = getattr(self.lib, f"cublasLt{kind}SetAttribute")
        status = function(handle, attribute, ctypes.byref(value), ctypes.sizeof(value))
        _check(status, f"attribute {attribute} of a {kind} for {self.gemm}")

    def _matrix(self, side: Side, batch: int) -> ctypes.c_void_p:
        kind = "MatrixLayout"
        handle = self._create(kind, _CUDA_TYPES[side.dtype], side.rows, side.columns, side.ld)
        self._set(kind, handle, _BATCH_COUNT, ctypes.c_int32(batch))
        self._set(kind, handle, _BATCH_OFFSET, ctypes.c_int64(side.stride))
        return handle

    def set(self, attribute: int, value: Any) -> None:
        """Set an attribute of the matmul to a ctypes value."""
        self._set("MatmulDesc", self.matmul, attribute, value)

    def set_scales(self, a: int, b: int) -> None:
        """Set the addresses of the scales of A and B, which the library has swapped."""
        self.set(_A_SCALE_POINTER, ctypes.c_void_p(b))
        self.set(_B_SCALE_POINTER, ctypes.c_void_p(a))

    def get(self, attribute: int, value: Any) -> Any:
        """An attribute of the matmul, read into a ctypes value."""
        status = self.lib.cublasLtMatmulDescGetAttribute(
            self.matmul, attribute, ctypes.byref(value), ctypes.sizeof(value), None
        )
        _check(status, f"attribute {attribute} of {self.gemm}")
        return value.value

    def preference(self) -> ctypes.c_void_p:
        """Constraints on algorithms: their workspace and the alignment of operands."""
        kind = "MatmulPreference"
        handle = self._create(kind)
        self._set(kind, handle, _MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES))
        for attribute in _MIN_ALIGNMENT:
            self._set(kind, handle, attribute, ctypes.c_uint32(self.gemm.alignment))
        return handle

    def __del__(self) -> None:
        for kind, handle in getattr(self, "_made", ()):
            getattr(self.lib, f"cublasLt{kind}Destroy")(handle)


# -- running ---------------------------------------------------------------------------------------

_lock = threading.Lock()
_handles: dict[int, ctypes.c_void_p] = {}
_workspaces: dict[tuple[int, int], cuda_memory.DeviceBuffer] = {}
_chosen: dict[tuple[int, Gemm], bytes] = {}


def _handle(device: int) -> ctypes.c_void_p:
    """The library's context on a device."""
    with _lock:
        handle = _handles.get(device)
        if handle is None:
            driver.use_device(device)
            handle = ctypes.c_void_p()
            _check(library().cublasLtCreate(ctypes.byref(handle)), "open the library on this device")
            _handles[device] = handle
    return handle


def workspace(device: int, stream: int) -> int:
    """Address of the scratch memory of a stream."""
    lane = driver.lane(device, stream)
    found = _workspaces.get((device, lane))
    if found is None:
        made = cuda_memory.allocate((WORKSPACE_BYTES,), dtypes.uint8, device, "the workspace of cuBLASLt")
        found = _workspaces.setdefault((device, lane), made)
    return found.ptr


Addresses = tuple[int, int, int | None]


class Plan:
    """A ``Gemm`` with its algorithm, ready to run. Not for two threads at once.

    Args:
      gemm: the GEMM.
      device: index of the CUDA device.
      addresses: of A, B and D, to time algorithms with; D is overwritten, and None stands for random values. Nothing
        runs if the choice is known in this process or on disk.
    Raises:
      UnsupportedError: the library has no algorithm for it.
    """

    def __init__(self, gemm: Gemm, device: int = 0, addresses: Addresses | None = None):
        self.gemm, self.device = gemm, device
        self._descriptors = Descriptors(gemm)
        self._algorithm = Algorithm()
        self._needs = 0
        self._bias = -1
        self._scales: tuple[int, int] | None = None
        _, code = _SCALES[gemm.compute, dtypes.is_complex(gemm.a)]
        self._code = code
        self._alpha, self._beta = (ctypes.create_string_buffer(16) for _ in range(2))
        self._numbers: tuple[Any, Any] = (None, None)
        self._handle = _handle(device)
        self._call = library().cublasLtMatmul
        self._choose(addresses)

    def run(
        self,
        a: int,
        b: int,
        c: int,
        d: int,
        bias: int = 0,
        alpha: complex = 1,
        beta: complex = 0,
        stream: int = 0,
        scales: tuple[int, int] | None = None,
    ) -> None:
        """Put one GEMM on a stream.

        Args:
          a, b, c, d, bias: device addresses; ``c`` is not read where beta is 0, and may be ``d``.
          alpha, beta: scalars.
          stream: the stream's handle.
          scales: device addresses of those of A and B.
        """
        made = self._descriptors
        if bias != self._bias and self.gemm.bias:
            made.set(_BIAS_POINTER, ctypes.c_void_p(bias))
            self._bias = bias
        if scales is not None and scales != self._scales:
            made.set_scales(*scales)
            self._scales = scales
        if (alpha, beta) != self._numbers:
            self._alpha.raw, self._beta.raw = (_number(x, self._code) for x in (alpha, beta))
            self._numbers = (alpha, beta)
        scratch = workspace(self.device, stream) if self._needs else 0
        # the library is column-major: operands swap (``gemm_layout.column_major``)
        status = self._call(
            self._handle, made.matmul, self._alpha, b, made.a, a, made.b, self._beta, c or d, made.d, d, made.d,
            ctypes.byref(self._algorithm), scratch, self._needs, stream,
        )  # fmt: skip
        if status:
            _check(status, f"run {self.gemm}")

    # -- which algorithm -------------------------------------------------------------------------------

    def _choose(self, addresses: Addresses | None) -> None:
        known = _chosen.get((self.device, self.gemm))
        if known is not None and self._accept(known):
            return
        name = driver.properties(self.device).name
        left = self.gemm.sms
        how = f"cublaslt, by warm devices{f' on {left} multiprocessors beside a kernel' if left else ''}"
        cache, key = DiskCache(), key_of(how, str(self.gemm), name, str(version()))
        kept = cache.get(key)
        if kept is None or not self._accept(kept):
            kept, report = self._tune(addresses)
            if report:
                cache.put(key, kept, f"{self.gemm}\n{name}\n{report}", ".gemm")
            self._accept(kept)
        _chosen[self.device, self.gemm] = kept

    def _accept(self, kept: bytes) -> bool:
        """Select an algorithm that ``_tune`` returned, if this library knows it."""
        if len(kept) != ctypes.sizeof(Algorithm):
            return False
        ctypes.memmove(ctypes.byref(self._algorithm), kept, len(kept))
        made, result = self._descriptors, _Result()
        status = library().cublasLtMatmulAlgoCheck(
            self._handle, made.matmul, made.a, made.b, made.d, made.d, ctypes.byref(self._algorithm),
            ctypes.byref(result),
        )  # fmt: skip
        self._needs = result.workspace
        return status == 0 and result.workspace <= WORKSPACE_BYTES

    def _tune(self, addresses: Addresses | None) -> tuple[bytes, str]:
        """The fastest algorithm, and a table of times (empty without memory for a run)."""
        proposed = self._proposed()
        if len(proposed) == 1:
            return bytes(proposed[0].algorithm), "the only one proposed"
        try:
            run, keep = self._trial(addresses)
        except errors.OutOfMemoryError:
            # large GEMMs leave no memory for timing: take the library's first guess
            return bytes(proposed[0].algorithm), ""
        stream = driver.compute_stream(self.device)
        given = self.gemm.sms
        others = driver.properties(self.device).sm_count - given if given else 0
        begun: set[bytes] = set()

        def look(algorithm: bytes, budget: float) -> tuple[float, float] | None:
            if not self._accept(algorithm):
                return None
            try:
                if algorithm not in begun:
                    run()  # exclude the loading of the kernel
                    begun.add(algorithm)
                return _timed(run, stream, budget, others)
            except errors.UnsupportedError:
                return None

        times = fastest([bytes(r.algorithm) for r in proposed], look)
        del keep
        if not times:
            raise errors.UnsupportedError(
                f"cuBLASLt runs none of the algorithms it proposes for {self.gemm}.",
                fix="compute it by a kernel of your own",
            )
        lines = [f"{ms:10.4f} ms  {algorithm.hex()}" for algorithm, ms in times.items()]
        return next(iter(times)), "\n".join(lines)

    def _proposed(self) -> list[_Result]:
        made, results, count = self._descriptors, (_Result * _CANDIDATES)(), ctypes.c_int()
        status = library().cublasLtMatmulAlgoGetHeuristic(
            self._handle, made.matmul, made.a, made.b, made.d, made.d, made.preference(), _CANDIDATES,
            ctypes.byref(results), ctypes.byref(count),
        )  # fmt: skip
        found = [r for r in results[: count.value] if r.state == 0]
        if status or not found:
            raise errors.UnsupportedError(
                f"cuBLASLt has no algorithm for {self.gemm}.",
                why=f"status {status}: {_STATUS.get(status, 'none was found')}",
                fix="pad or copy the operands, or compute it by a kernel of your own",
            )
        return found

    def _trial(self, addresses: Addresses | None) -> tuple[Any, list]:
        """A function that runs the GEMM once, and the buffers that it needs."""
        g, device = self.gemm, self.device
        call, keep = column_major(g), []

        def scratch(count: int, dtype: np.dtype) -> int:
            keep.append(random_buffer(count, dtype, device))
            return keep[-1].ptr

        given = addresses or (None, None, None)
        a, b, d = (
            scratch(_extent(side, call.batch), side.dtype) if address is None else address
            for side, address in zip((call.b, call.a, call.d), given, strict=True)
        )
        bias = scratch(max(call.d.rows, call.d.columns), g.d) if g.bias else 0
        scales = None
        if g.scaling:  # of most layouts fewer are read
            counts = [n * -(-call.a.rows // 128) for n in (call.b.columns, call.a.columns)]
            scales = (scratch(counts[0], dtypes.float32), scratch(counts[1], dtypes.float32))
        beta = 1 if g.reads_c else 0
        stream = driver.compute_stream(device).ptr
        return lambda: self.run(a, b, d, d, bias, 1, beta, stream, scales), keep


def _timed(run: Callable[[], object], stream: Any, budget: float, others: int = 0) -> tuple[float, float]:
    """Milliseconds of a run, and those spent to time it, about ``budget``.

    Args:
      others: number of SMs that another kernel occupies.
    """
    ms = driver.elapsed_ms(run, stream)
    # a GEMM takes less time than its launch: time many in a row
    repeats = min(int(budget / ms), _MOST_REPEATS)
    spent = ms * (repeats + 2)
    if others:
        repeats = max(1, repeats)
        kept = _LONGER * ms * repeats + _BEGINNING_MS
        with sm_reservation.taken(stream.device_id, others, kept):
            return driver.elapsed_ms(run, stream, repeats), ms + kept
    return (driver.elapsed_ms(run, stream, repeats) if repeats > 1 else ms), spent


def _number(x: complex, code: str) -> bytes:
    """A scalar as alpha or beta, in 16 bytes."""
    parts = (x.real, x.imag)[: len(code)] if code != "i" else (int(x.real),)
    return struct.pack(code, *parts).ljust(16, b"\0")


def _extent(side: Side, batch: int) -> int:
    """Elements from the first of a batch of matrices to the last."""
    return (batch - 1) * side.stride + (side.columns - 1) * side.ld + side.rows


def random_buffer(count: int, dtype: np.dtype, device: int = 0) -> cuda_memory.DeviceBuffer:
    """Repeated normally distributed values to time GEMMs with: zeros draw less power."""
    block = np.random.default_rng(0).standard_normal(min(count, 1 << 16))
    if dtypes.is_integer(dtype):
        block = block * 20
    host = block.astype(dtype)
    out = cuda_memory.allocate((count,), dtype, device, "operands to time a GEMM with")
    stream = driver.compute_stream(device)
    driver.copy_in(out.ptr, host, device)
    done = host.nbytes
    while done < out.nbytes:
        step = min(done, out.nbytes - done)
        driver.copy_on_device(out.ptr + done, out.ptr, step, stream)
        done += step
    return out
