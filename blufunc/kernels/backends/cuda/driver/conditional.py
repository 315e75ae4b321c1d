"""Conditional nodes of CUDA graphs, which repeat or are skipped.

Kernels, stage 8, next to ``graph.py``. In: a stream that is being captured, and functions that enqueue the work of the
bodies. Out: nodes of its graph. A kernel sets the value of a node's condition on the device, by its handle. CuPy has no
such calls: we make them through ctypes, whose functions have been the same since CUDA 12.4.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from blufunc.kernels.backends.cuda.driver import driver

IF, WHILE = 0, 1
"""``CUgraphConditionalNodeType``: run if, or while, the value is not 0."""

_CONDITIONAL = 13  # CU_GRAPH_NODE_TYPE_CONDITIONAL
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_SET_DEPENDENCIES = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES
_OLDEST = 12040


class _NodeParams(ctypes.Structure):
    """``CUgraphNodeParams`` of a conditional node."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("reserved", ctypes.c_int * 3),
        ("handle", ctypes.c_uint64),
        ("kind", ctypes.c_int),
        ("size", ctypes.c_uint),
        ("bodies", ctypes.POINTER(ctypes.c_void_p)),
        ("context", ctypes.c_void_p),
        ("padding", ctypes.c_char * 200),
        ("reserved_too", ctypes.c_int64),
    )


_P, _I, _Z = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_SIGNATURES: dict[str, tuple] = {
    "cuCtxGetCurrent": (_P,),
    "cuStreamGetCaptureInfo_v2": (_P, _P, _P, _P, _P, _P),
    "cuStreamUpdateCaptureDependencies": (_P, _P, _Z, ctypes.c_uint),
    "cuStreamBeginCaptureToGraph": (_P, _P, _P, _P, _Z, _I),
    "cuStreamEndCapture": (_P, _P),
    "cuGraphConditionalHandleCreate": (_P, _P, _P, ctypes.c_uint, ctypes.c_uint),
    "cuGraphAddNode": (_P, _P, _P, _Z, _P),
}


@functools.cache
def why_not() -> str | None:
    """Reason that there are no conditional nodes; None if there are.

    None too if there is no driver to ask.
    """
    if driver.available() is not None:
        return None
    import cupy

    version = cupy.cuda.runtime.driverGetVersion()
    if version < _OLDEST:
        return f"the driver supports CUDA {version // 1000}.{version % 1000 // 10}, and they need 12.4"
    return None


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    for name, signature in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = signature, ctypes.c_int
    return library


def _call(name: str, *args: Any) -> None:
    status = getattr(_library(), name)(*args)
    if status:
        raise RuntimeError(f"{name} returned {status}")


def _capture_of(stream: Any) -> tuple[ctypes.c_void_p, Any, int]:
    """The graph of a capture, and the nodes that the next one follows."""
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    nodes, count = ctypes.c_void_p(), ctypes.c_size_t()
    pointers = [ctypes.byref(x) for x in (status, number, graph, nodes, count)]
    _call("cuStreamGetCaptureInfo_v2", stream.ptr, *pointers)
    assert graph, "a conditional node belongs to a capture"
    return graph, nodes, count.value


def condition(stream: Any) -> int:
    """Handle of a new condition, for one node of the graph of a capture.

    A kernel must set its value before the node.
    """
    graph, _, _ = _capture_of(stream)
    handle = ctypes.c_uint64()
    _call("cuGraphConditionalHandleCreate", ctypes.byref(handle), graph, _context(), 0, 0)
    return handle.value


def add(stream: Any, handle: int, kind: int, body: Callable[[], object], device: int = 0) -> None:
    """Add a node that runs ``body`` to the graph that ``stream`` is captured into.

    Args:
      handle: of its condition.
      kind: ``IF`` or ``WHILE``.
      body: puts work on the device's work stream, which is another one meanwhile.
    """
    graph, nodes, count = _capture_of(stream)
    params = _NodeParams(type=_CONDITIONAL, handle=handle, kind=kind, size=1, context=_context())
    node = ctypes.c_void_p()
    _call("cuGraphAddNode", ctypes.byref(node), graph, nodes, count, ctypes.byref(params))
    _call("cuStreamUpdateCaptureDependencies", stream.ptr, ctypes.byref(node), 1, _SET_DEPENDENCIES)
    inner = driver.new_stream(device)
    with driver.redirected(device, inner), inner:
        _call("cuStreamBeginCaptureToGraph", inner.ptr, params.bodies[0], None, None, 0, _RELAXED)
        try:
            body()
        finally:
            done = ctypes.c_void_p()
            status = _library().cuStreamEndCapture(inner.ptr, ctypes.byref(done))
    if status:
        raise RuntimeError(f"cuStreamEndCapture returned {status}")


def _context() -> ctypes.c_void_p:
    found = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(found))
    return found
