"""cuDNN's graph API through ctypes: descriptors, and plans for one operation.

Kernels, stages 6 to 8, below ``plans``. In: attributes of descriptors. Out: finalized descriptors. Graphs, heuristics
and engines need no device if they are given the properties of one. The library is that of any wheel or system: one that
JAX or PyTorch loaded before is used again.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from blufunc import errors

_P = ctypes.c_void_p

# -- attributes of cudnn_graph.h, the same in all releases of cuDNN 9 -----------------------------------

CONVOLUTION, ENGINE, ENGINE_CONFIG, HEURISTICS, PLAN = 1, 2, 3, 4, 5
KNOB_CHOICE, GRAPH, VARIANT_PACK, TENSOR, DEVICE_PROPERTIES = 7, 15, 16, 17, 38
FORWARD, BACKWARD_FILTER, BACKWARD_DATA = 10, 11, 12

NUMERICAL_NOTES = {
    "tensor core": 0,
    "down-converted inputs": 1,
    "reduced precision": 2,
    "nondeterministic": 4,
}
"""Values of ``cudnnBackendNumericalNote_t`` that choices consult."""

_MODE_A, _MODE_FALLBACK = 3, 2
_CROSS_CORRELATION = 1


class Type(NamedTuple):
    """A type of attributes: its number and how C stores it."""

    number: int
    c: Any


HANDLE, DATA_TYPE, INT64 = Type(0, _P), Type(1, ctypes.c_int), Type(3, ctypes.c_int64)
FLOAT, DOUBLE = Type(4, ctypes.c_float), Type(5, ctypes.c_double)
POINTER, CONVOLUTION_MODE, HEURISTIC_MODE = Type(6, _P), Type(7, ctypes.c_int), Type(8, ctypes.c_int)
KNOB_TYPE, NUMERICAL_NOTE = Type(9, ctypes.c_int), Type(11, ctypes.c_int)
DESCRIPTOR, CHAR = Type(15, _P), Type(28, ctypes.c_char)

DATA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
"""``cudnnDataType_t`` by dtype."""


# -- the library ---------------------------------------------------------------------------------------


def _candidates() -> list[str]:
    """Names and paths of the library: of the wheel first, then of the system."""
    found = []
    try:
        spec = importlib.util.find_spec("nvidia.cudnn")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        found += [str(path) for path in Path(folder).glob("lib/libcudnn.so.9")]
    return [*found, "libcudnn.so.9"]


@functools.cache
def _loaded() -> tuple[Any, str]:
    """The library, or None and why there is none."""
    why = ""
    for name in _candidates():
        try:
            found = ctypes.CDLL(name)
            break
        except OSError as e:
            why = str(e)
    else:
        return None, why
    pointers = {
        "Create": 1, "Destroy": 1, "SetStream": 2, "BackendDestroyDescriptor": 1, "BackendFinalize": 1,
        "BackendExecute": 3,
    }  # fmt: skip
    for name, count in pointers.items():
        getattr(found, f"cudnn{name}").argtypes = (_P,) * count
    found.cudnnBackendCreateDescriptor.argtypes = (ctypes.c_int, _P)
    found.cudnnBackendSetAttribute.argtypes = (_P, ctypes.c_int, ctypes.c_int, ctypes.c_int64, _P)
    found.cudnnBackendGetAttribute.argtypes = (_P, ctypes.c_int, ctypes.c_int, ctypes.c_int64, _P, _P)
    found.cudnnGetVersion.restype = ctypes.c_size_t
    found.cudnnGetErrorString.argtypes, found.cudnnGetErrorString.restype = (ctypes.c_int,), ctypes.c_char_p
    found.cudnnGetLastErrorString.argtypes = (_P, ctypes.c_size_t)
    if found.cudnnGetVersion() < 90000:
        return None, f"cuDNN {found.cudnnGetVersion()} is older than 9.0"
    return found, ""


def why_missing() -> str | None:
    """Why there is no cuDNN; None if there is one."""
    found, why = _loaded()
    return None if found is not None else why


def library() -> Any:
    """cuDNN, with its functions typed.

    Raises:
      UnsupportedError: it is not installed.
    """
    found, why = _loaded()
    if found is None:
        raise errors.UnsupportedError(
            "cuDNN, which computes convolutions on CUDA devices, was not found.",
            why=why,
            fix="pip install 'blufunc[cuda13]'",
        )
    return found


def version() -> int:
    """The version of the library: 91400 is 9.14.0; 0 if there is none."""
    found, _ = _loaded()
    return 0 if found is None else found.cudnnGetVersion()


def check(status: int, what: str) -> None:
    """Raise UnsupportedError unless a call succeeded."""
    if status:
        last = ctypes.create_string_buffer(1024)
        library().cudnnGetLastErrorString(last, len(last))
        name = library().cudnnGetErrorString(status).decode()
        detail = last.value.decode(errors="replace").strip()
        raise errors.UnsupportedError(f"cuDNN cannot do this: {what}.", why=f"{name}. {detail}".strip())


class Descriptor:
    """A descriptor: set its attributes, then ``finalize`` it.

    Attributes:
      pointer: the library's.
    """

    def __init__(self, kind: int):
        self.pointer = _P()
        self._library, self._kept = library(), []  # type: ignore[var-annotated]
        check(
            self._library.cudnnBackendCreateDescriptor(kind, ctypes.byref(self.pointer)), f"descriptor {kind}"
        )

    def set(self, attribute: int, type: Type, *values: Any) -> Descriptor:
        """Set an attribute to some values; descriptors among them are kept alive."""
        self._kept += [v for v in values if isinstance(v, Descriptor)]
        plain = [v.pointer.value if isinstance(v, Descriptor) else v for v in values]
        array = (type.c * max(1, len(plain)))(*plain)
        self.set_array(attribute, type, array, len(plain))
        return self

    def set_array(self, attribute: int, type: Type, array: Any, count: int) -> None:
        """Set an attribute to the values of a ctypes array."""
        status = self._library.cudnnBackendSetAttribute(self.pointer, attribute, type.number, count, array)
        if status:
            check(status, f"attribute {attribute}")

    def finalize(self, what: str) -> Descriptor:
        """Check and complete the descriptor of ``what``."""
        status = self._library.cudnnBackendFinalize(self.pointer)
        if status:
            check(status, what)
        return self

    def get(self, attribute: int, type: Type, most: int = 1) -> list[Any]:
        """At most ``most`` values of an attribute."""
        array, count = (type.c * most)(), ctypes.c_int64()
        status = self._library.cudnnBackendGetAttribute(
            self.pointer, attribute, type.number, most, ctypes.byref(count), array
        )
        check(status, f"attribute {attribute}")
        return list(array[: min(most, count.value)])

    def get_descriptors(self, attribute: int, kind: int, most: int = 1) -> list[Descriptor]:
        """Descriptors of a kind that are values of an attribute."""
        made = [Descriptor(kind) for _ in range(most)]
        array = (_P * most)(*[d.pointer.value for d in made])
        count = ctypes.c_int64()
        status = self._library.cudnnBackendGetAttribute(
            self.pointer, attribute, DESCRIPTOR.number, most, ctypes.byref(count), array
        )
        check(status, f"attribute {attribute}")
        return made[: count.value]

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self._library.cudnnBackendDestroyDescriptor(self.pointer)


class Device:
    """The device that graphs are for: a handle, or only its properties.

    Attributes:
      handle: the library's context on a device; None to plan without one.
    """

    def __init__(self, handle: int | None, properties: str | None = None):
        self.handle, self._properties = handle, None
        if properties is not None:
            text = properties.encode() + b"\0"
            self._properties = Descriptor(DEVICE_PROPERTIES)
            self._properties.set_array(2702, CHAR, ctypes.create_string_buffer(text), len(text))
            self._properties.finalize("the properties of a device")

    def note_handle(self, made: Descriptor, attribute: int) -> Descriptor:
        """Set an attribute that holds a handle."""
        return made if self.handle is None else made.set(attribute, HANDLE, self.handle)

    def note_properties(self, made: Descriptor, attribute: int) -> Descriptor:
        """Set an attribute that holds properties."""
        return made if self._properties is None else made.set(attribute, DESCRIPTOR, self._properties)


def new_handle() -> int:
    """A context on the current device."""
    handle = _P()
    check(library().cudnnCreate(ctypes.byref(handle)), "open the library on this device")
    assert handle.value is not None
    return handle.value


def tensor(
    uid: int, dtype: str, shape: Sequence[int], strides: Sequence[int], alignment: int = 16
) -> Descriptor:
    """A tensor, with ``strides`` in elements."""
    made = Descriptor(TENSOR).set(906, INT64, uid).set(901, DATA_TYPE, DATA_TYPES[dtype])
    made.set(902, INT64, *shape).set(903, INT64, *strides).set(900, INT64, alignment)
    return made.finalize(f"a tensor {dtype}{list(shape)}")


def convolution(
    compute: str, strides: Sequence[int], padding: Sequence[tuple[int, int]], dilation: Sequence[int]
) -> Descriptor:
    """How a kernel slides; ``compute`` is the dtype of sums."""
    made = Descriptor(CONVOLUTION).set(106, INT64, len(strides)).set(100, DATA_TYPE, DATA_TYPES[compute])
    made.set(101, CONVOLUTION_MODE, _CROSS_CORRELATION).set(102, INT64, *dilation).set(103, INT64, *strides)
    made.set(105, INT64, *[low for low, _ in padding]).set(104, INT64, *[high for _, high in padding])
    return made.finalize("how a kernel slides")


_OPERATIONS = {
    FORWARD: {"alpha": 700, "beta": 701, "slide": 702, "w": 703, "x": 704, "y": 705},
    BACKWARD_DATA: {"alpha": 706, "beta": 707, "slide": 708, "w": 709, "x": 710, "y": 711},
    BACKWARD_FILTER: {"alpha": 712, "beta": 713, "slide": 714, "w": 715, "x": 716, "y": 717},
}


def graph(device: Device, operation: int, slide: Descriptor, **tensors: Descriptor) -> Descriptor:
    """The graph of one convolution of tensors ``x``, ``w`` and ``y``."""
    attributes = _OPERATIONS[operation]
    made = Descriptor(operation).set(attributes["slide"], DESCRIPTOR, slide)
    made.set(attributes["alpha"], FLOAT, 1.0).set(attributes["beta"], FLOAT, 0.0)
    for name, value in tensors.items():
        made.set(attributes[name], DESCRIPTOR, value)
    made.finalize("a convolution of these shapes")
    found = Descriptor(GRAPH).set(801, DESCRIPTOR, made)
    return device.note_handle(found, 800).finalize("a graph of these shapes")


class Engine(NamedTuple):
    """An engine and its settings, as stored on disk.

    Attributes:
      number: of the engine.
      knobs: types and values of its settings.
    """

    number: int
    knobs: tuple[tuple[int, int], ...]


class Candidate(NamedTuple):
    """An engine that heuristics propose, with its numerical notes."""

    engine: Engine
    notes: frozenset[int]


_MOST_KNOBS, _MOST_NOTES = 64, 16


def proposed(device: Device, of: Descriptor, most: int) -> list[Candidate]:
    """Engines for a graph, the likely fastest first; empty if there are none."""
    found: list[Candidate] = []
    for mode in (_MODE_A, _MODE_FALLBACK):
        made = Descriptor(HEURISTICS).set(201, DESCRIPTOR, of).set(200, HEURISTIC_MODE, mode)
        try:
            device.note_properties(made, 204).finalize("heuristics")
            configs = made.get_descriptors(202, ENGINE_CONFIG, most)
        except errors.UnsupportedError:
            continue
        found += [_candidate(config) for config in configs]
        if len(found) >= most:
            break
    return list({c.engine: c for c in found}.values())


def _candidate(config: Descriptor) -> Candidate:
    (engine,) = config.get_descriptors(301 - 1, ENGINE)
    (index,) = engine.get(1301, INT64)
    notes = frozenset(engine.get(1303, NUMERICAL_NOTE, _MOST_NOTES))
    knobs = tuple(
        [(*k.get(600, KNOB_TYPE), *k.get(601, INT64)) for k in config.get_descriptors(302, KNOB_CHOICE, _MOST_KNOBS)]
    )  # fmt: skip
    return Candidate(Engine(index, knobs), notes)  # type: ignore[arg-type]


def plan(device: Device, of: Descriptor, engine: Engine) -> tuple[Descriptor, int]:
    """The plan of an engine, and its workspace in bytes.

    Raises:
      UnsupportedError: the engine does not run the graph on the device.
    """
    made = Descriptor(ENGINE).set(1300, DESCRIPTOR, of).set(1301, INT64, engine.number)
    device.note_properties(made, 1307).finalize(f"engine {engine.number}")
    config = Descriptor(ENGINE_CONFIG).set(300, DESCRIPTOR, made)
    choices = [
        Descriptor(KNOB_CHOICE).set(600, KNOB_TYPE, type).set(601, INT64, value).finalize("a setting")
        for type, value in engine.knobs
    ]
    if choices:
        config.set(302, DESCRIPTOR, *choices)
    config.finalize(f"engine {engine.number} with these settings")
    found = Descriptor(PLAN).set(401, DESCRIPTOR, config)
    device.note_properties(device.note_handle(found, 400), 406 + 1).finalize(
        f"a plan of engine {engine.number}"
    )
    return found, found.get(402, INT64)[0]


_PACKS = 16
"""Sets of addresses to keep: arrays of a program recur at a few."""


class Call:
    """A plan with its operands, ready to run. Not for two threads at once.

    Args:
      uids: of the tensors, in the order of their addresses.
    """

    def __init__(self, of: Descriptor, uids: Sequence[int]):
        self._plan, self._uids = of, (ctypes.c_int64 * len(uids))(*uids)
        self._packs: dict[tuple[int, ...], Descriptor] = {}
        self._execute = library().cudnnBackendExecute

    def __call__(self, handle: int, addresses: tuple[int, ...], workspace: int) -> None:
        """Put it on the stream of a handle."""
        key = (*addresses, workspace)
        pack = self._packs.get(key)
        if pack is None:
            pack = Descriptor(VARIANT_PACK)
            pack.set_array(1000, INT64, self._uids, len(self._uids))
            pack.set(1001, POINTER, *addresses).set(1003, POINTER, workspace).finalize("addresses")
            if len(self._packs) == _PACKS:
                del self._packs[next(iter(self._packs))]
            self._packs[key] = pack
        status = self._execute(handle, self._plan.pointer, pack.pointer)
        if status:
            check(status, "run a plan")
