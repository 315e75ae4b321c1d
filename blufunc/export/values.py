"""Values of equation parameters as JSON, and back.

Below ``programs.py``, which supplies the encoding of jaxprs and rules. ``None``, booleans, integers, finite floats and
strings are themselves, a tuple is a list, and all else is an object with one key that says what it is. A class whose
instances are parameters is a row of ``ENUMS`` or ``RECORDS``: files name it by its key there, wherever it is defined.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import DEVICE, ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.primitives.primitive import Primitive
from blufunc.parallel.mesh.mesh import AbstractMesh, AxisType, Mesh, current_mesh, make_mesh
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.mesh.spec import PartitionSpec

_OPS = "blufunc.core.ops."
_POLICIES = "blufunc.transforms.checkpointing.policies"

ENUMS: dict[str, str] = {
    "GatherScatterMode": _OPS + "windows",
    "SvdAlgorithm": _OPS + "linalg.algorithms",
    "EighImplementation": _OPS + "linalg.algorithms",
    "EigImplementation": _OPS + "linalg.algorithms",
    "FftType": _OPS + "fft",
    "Precision": _OPS + "dot",
    "DotAlgorithmPreset": _OPS + "dot",
    "RoundingMethod": "blufunc.lax.strict",
    "AxisType": "blufunc.parallel.mesh.mesh",
}
"""Enumerations among parameters, and their modules."""

RECORDS: dict[str, tuple[str, str]] = {
    "ConvDimensionNumbers": (_OPS + "convolution", "ConvDimensionNumbers"),
    "RaggedDotDimensionNumbers": (_OPS + "ragged_dot", "RaggedDotDimensionNumbers"),
    "GatherDimensionNumbers": (_OPS + "windows", "GatherDimensionNumbers"),
    "ScatterDimensionNumbers": (_OPS + "windows", "ScatterDimensionNumbers"),
    "Offload": (_POLICIES, "Offload"),
    "OffloadDots": (_POLICIES, "_OffloadDots"),
    "ByName": (_POLICIES, "_ByName"),
    "SaveAndOffload": (_POLICIES, "_SaveAndOffload"),
    "Both": (_POLICIES, "_Both"),
    "AttentionMods": ("blufunc.nn.attention.mods", "Mods"),
    "CrossEntropy": ("blufunc.nn.vocabulary_loss_call", "How"),
}
"""Frozen dataclasses among parameters: module and name of each."""

FUNCTIONS: dict[str, str] = dict.fromkeys(
    ("nothing_saveable", "everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"),
    _POLICIES,
)
"""Functions among parameters, which are blufunc's, and their modules."""


class Inexpressible(Exception):
    """A value that no file can hold; its text says what it is."""


class Unreadable(Exception):
    """A file that cannot be understood; its text is the reason."""


class Encoder:
    """Values as JSON.

    Args:
      jaxpr, primitive: the numbers of a jaxpr and of a primitive in the file.
    """

    def __init__(self, jaxpr: Callable[[Jaxpr], int], primitive: Callable[[Primitive], int]):
        self._jaxpr, self._primitive = jaxpr, primitive
        classes = {name: (module, name) for name, module in ENUMS.items()} | RECORDS
        self._names = {_imported(*at): name for name, at in classes.items() if at[0] in sys.modules}

    def __call__(self, x: Any) -> Any:
        """The JSON of a value.

        Raises:
          Inexpressible: there is none.
        """
        kind = x.__class__
        if x is None or kind in (bool, int, str):
            return x
        if kind is tuple:
            return [self(v) for v in x]
        if isinstance(x, np.dtype):
            return {"dtype": dtype_name(x)}
        if kind is Jaxpr:
            return {"jaxpr": self._jaxpr(x)}
        if kind in self._names:
            return self._of_class(x, self._names[kind])
        for cls, key, encode in _ENCODED:
            if isinstance(x, cls):
                return {key: encode(self, x)}
        if getattr(x, "__name__", None) in FUNCTIONS and _imported(FUNCTIONS[x.__name__], x.__name__) is x:
            return {"function": x.__name__}
        if isinstance(x, Primitive):
            return {"primitive": self._primitive(x)}
        called = getattr(x, "__name__", None)
        raise Inexpressible(f"the {kind.__name__} {called}" if called else f"a {kind.__name__}")

    def _of_class(self, x: Any, name: str) -> Any:
        if name in ENUMS:
            return {"enum": [name, x.name]}
        fields = {f.name: self(getattr(x, f.name)) for f in dataclasses.fields(x)}
        return {"record": [name, fields]}


def _imported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _float(encoder: Encoder, x: float) -> Any:
    return x.hex() if math.isfinite(x) else repr(x)


def _array_text(x: Any) -> list:
    return [dtype_name(x.dtype), np.asarray(x).tobytes().hex()]


def _axes(mesh: Any) -> list:
    return [list(mesh.axis_sizes), list(mesh.axis_names), [t.name for t in mesh.axis_types]]


def _spec(encoder: Encoder, x: PartitionSpec) -> list:
    return [[encoder(e) for e in x], sorted(x.unreduced), sorted(x.reduced)]


def _set(encoder: Encoder, x: frozenset) -> list:
    return sorted((encoder(v) for v in x), key=json.dumps)


_ENCODED: list[tuple[type, str, Callable[[Encoder, Any], Any]]] = [
    (np.generic, "scalar", lambda e, x: _array_text(x)),
    (float, "float", _float),
    (complex, "complex", lambda e, x: [_float(e, x.real), _float(e, x.imag)]),
    (bytes, "bytes", lambda e, x: x.hex()),
    (type(Ellipsis), "ellipsis", lambda e, x: None),
    (slice, "slice", lambda e, x: [e(x.start), e(x.stop), e(x.step)]),
    (range, "range", lambda e, x: [x.start, x.stop, x.step]),
    (ShapedArray, "type", lambda e, x: aval_text(x)),
    (PartitionSpec, "spec", _spec),
    (NamedSharding, "sharding", lambda e, x: [e(x.mesh), _spec(e, x.spec)]),
    (Mesh, "mesh", lambda e, x: _axes(x)),
    (AbstractMesh, "abstract_mesh", lambda e, x: _axes(x)),
    (list, "list", lambda e, x: [e(v) for v in x]),
    (frozenset, "set", _set),
    (dict, "dict", lambda e, x: [[e(k), e(v)] for k, v in x.items()]),
]
"""Classes with one encoding each; the first that fits."""


class Decoder:
    """JSON as values; the inverse of ``Encoder``.

    Args:
      jaxpr, primitive, rule: what the numbers of a file stand for.
    """

    def __init__(
        self,
        jaxpr: Callable[[int], Jaxpr],
        primitive: Callable[[int], Primitive],
        rule: Callable[[int], Any],
    ):
        self._by_number = {"jaxpr": jaxpr, "primitive": primitive, "rule": rule}

    def __call__(self, x: Any) -> Any:
        """The value.

        Raises:
          Unreadable: there is none.
        """
        if x.__class__ is list:
            return tuple([self(v) for v in x])
        if x.__class__ is not dict:
            return x
        if len(x) != 1:
            raise Unreadable(f"{x!r:.60} is no value")
        ((key, body),) = x.items()
        if key in self._by_number:
            return self._by_number[key](body)
        decode = _DECODED.get(key)
        if decode is None:
            raise Unreadable(f"{key!r:.60} is no kind of value")
        return decode(self, body)


def _enum(decoder: Decoder, body: Any) -> Any:
    name, member = body
    if name not in ENUMS:
        raise Unreadable(f"{name!r:.60} is no enumeration")
    return _imported(ENUMS[name], name)[member]


def _record(decoder: Decoder, body: Any) -> Any:
    name, fields = body
    if name not in RECORDS:
        raise Unreadable(f"{name!r:.60} is no record")
    cls = _imported(*RECORDS[name])
    if set(fields) != {f.name for f in dataclasses.fields(cls)}:
        raise Unreadable(f"the fields of {name} are {', '.join(fields)}")
    made = object.__new__(cls)  # as it was: a constructor may convert what it is given
    for field, value in fields.items():
        object.__setattr__(made, field, decoder(value))
    return made


def _function(decoder: Decoder, body: Any) -> Any:
    if body not in FUNCTIONS:
        raise Unreadable(f"{body!r:.60} is no function of a parameter")
    return _imported(FUNCTIONS[body], body)


def _mesh(decoder: Decoder, body: Any) -> Mesh:
    sizes, names, types = body
    abstract = _abstract_mesh(decoder, body)
    current = current_mesh()
    if current is not None and current.abstract == abstract:
        return current
    return make_mesh(tuple(sizes), tuple(names), axis_types=[AxisType[t] for t in types])


def _abstract_mesh(decoder: Decoder, body: Any) -> AbstractMesh:
    sizes, names, types = body
    return AbstractMesh(tuple(sizes), tuple(names), axis_types=[AxisType[t] for t in types])


def _spec_of(decoder: Decoder, body: Any) -> PartitionSpec:
    entries, unreduced, reduced = body
    return PartitionSpec(*[decoder(e) for e in entries], unreduced=unreduced, reduced=reduced)


_DECODED: dict[str, Callable[[Decoder, Any], Any]] = {
    "float": lambda d, x: float.fromhex(x),
    "complex": lambda d, x: complex(*map(float.fromhex, x)),
    "bytes": lambda d, x: bytes.fromhex(x),
    "ellipsis": lambda d, x: Ellipsis,
    "slice": lambda d, x: slice(*map(d, x)),
    "range": lambda d, x: range(*x),
    "scalar": lambda d, x: scalar_of(*x),
    "dtype": lambda d, x: dtype_of(x),
    "type": lambda d, x: aval_of(x),
    "spec": _spec_of,
    "sharding": lambda d, x: NamedSharding(d(x[0]), _spec_of(d, x[1])),
    "mesh": _mesh,
    "abstract_mesh": _abstract_mesh,
    "list": lambda d, x: list(map(d, x)),
    "set": lambda d, x: frozenset(map(d, x)),
    "dict": lambda d, x: {d(k): d(v) for k, v in x},
    "enum": _enum,
    "record": _record,
    "function": _function,
}


# -- types -----------------------------------------------------------------------------------------


def dtype_name(dtype: np.dtype) -> str:
    """The name of a dtype in files."""
    if dtype not in dtypes.ALL:
        raise Inexpressible(f"the dtype {dtype}")
    return dtypes.short_name(dtype)


def dtype_of(name: str) -> np.dtype:
    """The dtype with this name."""
    try:
        return dtypes.named(name)
    except (KeyError, TypeError):
        raise Unreadable(f"{name!r:.60} is no dtype") from None


def aval_text(aval: ShapedArray) -> list:
    """A type: dtype, shape and, if it is weak, True."""
    if aval.memory != DEVICE:
        raise Inexpressible(f"the type {aval}, in the memory of a host")
    return [dtype_name(aval.dtype), list(aval.shape), *([True] if aval.weak_type else [])]


def aval_of(text: Any) -> ShapedArray:
    """The type that ``aval_text`` wrote."""
    name, shape, *weak = text
    if not all(n.__class__ is int and n >= 0 for n in shape):
        raise Unreadable(f"{shape!r:.60} is no shape")
    return ShapedArray(tuple(shape), dtype_of(name), weak == [True])


def scalar_of(name: str, text: str) -> Any:
    """A NumPy scalar from its dtype and bytes."""
    dtype = dtype_of(name)
    raw = bytes.fromhex(text)
    if len(raw) != dtype.itemsize:
        raise Unreadable(f"{text!r:.60} is no {name}")
    return np.frombuffer(raw, dtype)[0] if raw else np.zeros((), dtype)[()]
