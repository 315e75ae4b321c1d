"""Exported programs as the bytes of a safetensors file.

Above ``programs.py``, with the file format of ``blufunc.io``: constants are the arrays, with digests, and the tables of
a ``Document`` are the facts of the header, which has a digest of its own.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays import backend
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import source
from blufunc.export.programs import Document
from blufunc.io import header as headers
from blufunc.io import reading, seal, storage

FORMAT = 1
"""Version of the tables; another one is refused."""

_KIND = "blufunc.export"


def to_bytes(document: Document, about: dict[str, Any]) -> bytearray:
    """The bytes of a file: a program, and what is to be known about it."""
    stored: list[headers.Stored] = []
    data: dict[str, Any] = {}
    for n, c in enumerate(document.constants):
        name, x = f"constants.{n}", np.ascontiguousarray(np.asarray(c))
        data[name] = x.reshape(-1).view(np.uint8)
        whole, origin = c.aval.shape, (0,) * c.aval.ndim
        stored.append(headers.Stored(name, name, x.dtype, whole, 0, 0, whole, origin, weak=c.aval.weak_type))
    placed = headers.laid_out(stored)
    pieces = [data[a.key][i : i + a.chunk] for a in placed for i in range(0, a.nbytes, a.chunk)]
    found = iter(reading.pool().map(seal.digest, pieces))
    digested = [replace(a, digests=tuple(islice(found, headers.n_chunks(a.nbytes, a.chunk)))) for a in placed]
    facts = {"kind": _KIND, "format": FORMAT, **about, **document.tables}
    head = headers.encoded(headers.Header(tuple(digested), {}, facts))
    return bytearray().join([head, *pieces])


def from_bytes(raw: Any) -> tuple[Document, dict[str, Any]]:
    """The program of a file, its constants verified, and what is said about it.

    Raises:
      ArgumentError: ``raw`` is not bytes.
      DataError: the bytes are damaged, another kind of file, or of another version of the format.
    """
    if not isinstance(raw, (bytes, bytearray, memoryview)):
        raise errors.ArgumentError(
            f"deserialize takes bytes, not a {type(raw).__name__}.",
            where=source.here(),
            fix='export.deserialize(open("program.bf", "rb").read())',
        )
    try:
        file = reading.File(storage.InMemory(raw), "the exported program")
        facts = file.header.facts
        if not isinstance(facts, dict) or facts.get("kind") != _KIND:
            raise damaged("it is a safetensors file of something else")
        if facts.get("format") != FORMAT:
            raise errors.DataError(
                f"the exported program has format {facts.get('format')!r:.20}, and this version reads {FORMAT}",
                where=source.here(),
                why=f"blufunc {facts.get('version')!r:.40} wrote it",
                fix="load it with that version, or export it again with this one",
            )
        arrays = {a.key: from_numpy(file.read(a), backend.host_device(), a.weak) for a in file.header.arrays}
    except errors.DataError as error:
        if "format" in error.what:
            raise
        raise damaged(error.why or error.what) from error
    constants = [arrays[f"constants.{n}"] for n in range(len(arrays))]
    return Document(facts, constants), facts


def damaged(why: str) -> errors.DataError:
    """The error for bytes that are no exported program."""
    return errors.DataError(
        "these bytes are not a whole exported program",
        where=source.here(),
        why=why,
        fix="copy the file again, or serialize the program again",
    )
