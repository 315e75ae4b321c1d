"""Headers of safetensors files: arrays, their digests, scalars and facts.

The file format, below reading and writing. In: descriptions of arrays. Out: the bytes that precede the arrays; and
back, with every property checked that reading relies on. A file of another program has no digests, and is read as such.

A file is the length of the JSON text as 8 bytes, the text, and the bytes of all arrays without gaps. The text maps
names to ``{"dtype", "shape", "data_offsets"}``, and ``__metadata__`` to strings. A file of blufunc begins with

    blufunc.digest   SHA-256 of length and text (``seal.py``)
    blufunc.format   "1"
    blufunc.chunk    bytes with one digest
    blufunc.arrays   JSON: for each array ``sha256`` of its chunks; ``dtype`` where safetensors does not say it;
                     ``weak``; for a part of a sharded array ``leaf``, ``origin`` and ``whole`` (name, indices and
                     shape)
    blufunc.scalars  JSON: Python scalars by name, as pairs of type and text (``elements.py``)
    blufunc.facts    JSON: what the program saved with the arrays
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.io import elements, seal
from blufunc.io.names import RESERVED

PREFIX = b'{"__metadata__":{"blufunc.digest":"'
FORMAT = "1"
_ALIGNED = 64
LENGTH_BYTES = 8


@dataclass(frozen=True)
class Stored:
    """An array in a file, or a part of one.

    Attributes:
      key: name in the file.
      leaf: name of the leaf that it is, or is a part of.
      dtype, shape: of the array, or the part.
      start, stop: bytes from the end of the header.
      whole: shape of the leaf.
      origin: index of the part's first element in the leaf.
      weak: True for a weak type.
      digests: of each chunk; None without.
      chunk: bytes of a chunk.
    """

    key: str
    leaf: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    whole: tuple[int, ...]
    origin: tuple[int, ...]
    weak: bool = False
    digests: tuple[str, ...] | None = None
    chunk: int = field(default_factory=lambda: seal.CHUNK)

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Header:
    """The header of a file.

    Attributes:
      arrays: in the order of their bytes.
      scalars: Python values by name.
      facts: what was saved with them; None without.
      size: bytes of the header, where the arrays begin.
      digest: of the header; "" if another program wrote it.
      metadata: further strings, for other programs; written, and not read.
    """

    arrays: tuple[Stored, ...]
    scalars: Mapping[str, Any]
    facts: Any
    size: int = 0
    digest: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


# -- writing ---------------------------------------------------------------------------------------


def laid_out(arrays: Sequence[Stored]) -> tuple[Stored, ...]:
    """Assign places: the widest elements first, so that every array is aligned."""

    def width(a: Stored) -> int:
        return elements.CODES[elements.stored_as(a.dtype)[0]].itemsize

    at, out = 0, []
    for a in sorted(arrays, key=lambda a: (-width(a), a.key)):
        stop = at + math.prod(a.shape) * a.dtype.itemsize
        out.append(replace(a, start=at, stop=stop))
        at = stop
    return tuple(out)


def n_chunks(nbytes: int, chunk: int) -> int:
    """Number of chunks of an array."""
    return -(-nbytes // chunk)


def encoded(header: Header) -> bytes:
    """The bytes of a header; their number does not depend on the digests.

    Raises:
      ArgumentError: the facts are not JSON, or the metadata are not strings.
    """
    records: dict[str, dict[str, Any]] = {}
    text: dict[str, Any] = {}
    for a in header.arrays:
        code, per_element = elements.stored_as(a.dtype)
        record: dict[str, Any] = {"sha256": a.digests or ["0" * seal.DIGITS] * n_chunks(a.nbytes, a.chunk)}
        if elements.CODES[code] != a.dtype:
            record["dtype"] = elements.name_of(a.dtype)
        if a.weak:
            record["weak"] = True
        if a.key != a.leaf:
            record |= {"leaf": a.leaf, "origin": a.origin, "whole": a.whole}
        records[a.key] = record
        shape = a.shape if per_element == 1 else (*a.shape, per_element)
        text[a.key] = {"dtype": code, "shape": shape, "data_offsets": (a.start, a.stop)}
    metadata = {
        "blufunc.digest": "0" * seal.DIGITS,
        "blufunc.format": FORMAT,
        "blufunc.chunk": str(seal.CHUNK),
        "blufunc.arrays": _json(records),
    }
    if header.scalars:
        metadata["blufunc.scalars"] = _json({k: elements.scalar_text(v) for k, v in header.scalars.items()})
    if header.facts is not None:
        metadata["blufunc.facts"] = facts_text(header.facts)
    _check_strings(header.metadata)
    metadata |= header.metadata
    body = _json({RESERVED: metadata, **text}).encode()
    body += b" " * (-(LENGTH_BYTES + len(body)) % _ALIGNED)
    length = len(body).to_bytes(LENGTH_BYTES, "little")
    return length + seal.seal(body, PREFIX, length)


def _check_strings(metadata: Mapping[str, str]) -> None:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str) or key.startswith("blufunc."):
            raise errors.ArgumentError(
                f"the metadata of a file have {key!r:.60}: {value!r:.60}.",
                why="safetensors maps strings to strings there; names that begin with blufunc. are taken.",
                fix='metadata={"format": "pt"}; anything else goes into facts',
            )


def facts_text(facts: Any) -> str:
    """Facts as JSON.

    Raises:
      ArgumentError: JSON cannot express them.
    """
    try:
        text = _json(facts)
        _check_keys(facts)
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.ArgumentError(
            "the facts of a file are not JSON.",
            why=str(error),
            fix="facts are dicts with string keys, lists, strings, numbers, True, False and None",
        ) from error


def _check_keys(value: Any) -> None:
    """JSON would turn other keys into strings, without a word."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is no string")
            _check_keys(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_keys(inner)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


# -- reading ---------------------------------------------------------------------------------------


class Malformed(Exception):
    """A header that cannot be read; its text is the reason."""


def parsed(raw: bytes, size: int) -> Header:
    """Read a header: ``raw`` is the start of a file of ``size`` bytes.

    Raises:
      Malformed: it contradicts itself, or the size of the file.
    """
    text = raw[LENGTH_BYTES:]
    digest = ""
    if seal.is_sealed(text, PREFIX):
        if not seal.is_whole(text, PREFIX, raw[:LENGTH_BYTES]):
            raise Malformed("its header does not have the digest that it says")
        digest = text[len(PREFIX) :][: seal.DIGITS].decode()
    found = _object(loads(text, "its header"), "its header")
    metadata = _object(found.pop(RESERVED, {}), RESERVED)
    records: dict[str, Any] = {}
    chunk = seal.CHUNK
    scalars, facts = {}, None
    if digest:
        if metadata.get("blufunc.format") != FORMAT:
            raise Malformed(
                f"it has format {metadata.get('blufunc.format')!r:.20}; this version knows {FORMAT}"
            )
        chunk = _natural(loads(metadata.get("blufunc.chunk"), "the chunk"), "the chunk") or 1
        records = _object(loads(metadata.get("blufunc.arrays"), "the list of arrays"), "the list of arrays")
        texts = _object(loads(metadata.get("blufunc.scalars", "{}"), "the scalars"), "the scalars")
        scalars = {name: _scalar(name, record) for name, record in texts.items()}
        facts = loads(metadata.get("blufunc.facts", "null"), "the facts")
    arrays = [_array(key, value, records.get(key), chunk) for key, value in found.items()]
    arrays.sort(key=lambda a: (a.start, a.stop))
    at = 0
    for a in arrays:
        if a.start != at:
            raise Malformed(f"{a.key} begins at byte {a.start} of the arrays, where {at} was due")
        at = a.stop
    if len(raw) + at != size:
        cut = next((a.leaf for a in arrays if len(raw) + a.stop > size), None)
        what = f"{cut} and what follows are cut off" if cut is not None else "something was appended"
        raise Malformed(f"it is {size:,} bytes long, and its header says {len(raw) + at:,}: {what}")
    return Header(tuple(arrays), scalars, facts, len(raw), digest)


def loads(text: Any, what: str) -> Any:
    """Parse JSON of a file, which may be anything.

    Raises:
      Malformed: it is not JSON.
    """
    try:
        return json.loads(text)
    except (TypeError, ValueError) as error:
        raise Malformed(f"{what} is not JSON: {error}") from error
    except RecursionError as error:
        raise Malformed(f"{what} is nested too deeply") from error


def _array(key: str, value: Any, record: Any, chunk: int) -> Stored:
    value = _object(value, key)
    code = value.get("dtype")
    shape = _naturals(value.get("shape"), f"the shape of {key}")
    offsets = _naturals(value.get("data_offsets"), f"the offsets of {key}")
    if not isinstance(code, str) or code not in elements.CODES:
        raise Malformed(f"{key} has dtype {code!r:.20}, which no array here has")
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * elements.CODES[code].itemsize:
        raise Malformed(f"{key} of {code} {list(shape)} is said to be at bytes {list(offsets)}")
    if math.prod(n or 1 for n in shape) * elements.CODES[code].itemsize > sys.maxsize:
        raise Malformed(f"{key} of {code} {list(shape)} has more elements than an array can have")
    plain = Stored(key, key, elements.CODES[code], shape, *offsets, whole=shape, origin=(0,) * len(shape))
    if record is None:
        return plain
    record = _object(record, key)
    dtype = plain.dtype
    if "dtype" in record:
        try:
            dtype = elements.named(record["dtype"])
        except ValueError as error:
            raise Malformed(f"{key}: {error}") from error
        stored, per_element = elements.stored_as(dtype)
        if stored != code or (per_element > 1 and shape[-1:] != (per_element,)):
            raise Malformed(f"{key} of {dtype} cannot be {code} {list(shape)}")
        shape = shape[:-1] if per_element > 1 else shape
    whole = _naturals(record.get("whole", shape), f"the whole of {key}")
    origin = _naturals(record.get("origin", (0,) * len(shape)), f"the origin of {key}")
    if not len(shape) == len(whole) == len(origin) or any(
        i + n > m for i, n, m in zip(origin, shape, whole, strict=True)
    ):
        raise Malformed(f"{key} is no part of an array of shape {list(whole)}")
    digests, leaf = record.get("sha256"), record.get("leaf", key)
    if not isinstance(digests, list) or len(digests) != n_chunks(plain.nbytes, chunk):
        raise Malformed(f"{key} has not one digest for each chunk")
    if not isinstance(leaf, str):
        raise Malformed(f"{key} is part of {leaf!r:.60}, which is no name")
    return Stored(
        key, leaf, dtype, shape, *offsets, whole=whole, origin=origin, weak=record.get("weak") is True,
        digests=tuple(map(str, digests)), chunk=chunk,
    )  # fmt: skip


def _scalar(name: str, record: Any) -> Any:
    try:
        return elements.scalar_of(record)
    except (ValueError, OverflowError) as error:
        raise Malformed(f"{name}: {error}") from error


def _object(value: Any, what: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise Malformed(f"{what} is {value!r:.60}, not named values")


def _natural(value: Any, what: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise Malformed(f"{what} has {value!r:.60} for a size")


def _naturals(value: Any, what: str) -> tuple[int, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(_natural(n, what) for n in value)
    raise Malformed(f"{what} is {value!r:.60}")
