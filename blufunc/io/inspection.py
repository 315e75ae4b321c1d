"""Inspection: what files and checkpoints hold, and whether it is intact.

A face over reading and manifests; ``python -m blufunc.io`` prints it. In: a file, the folder of a ``Checkpointer``, or
a manifest in it. Out: lines that describe it, or the names of damaged leaves.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

from blufunc import errors
from blufunc.core.ir import dtypes
from blufunc.io import elements, reading, storage
from blufunc.io import manifest as manifests
from blufunc.io.restoring import Source


def verify(path: Any) -> None:
    """Compare every digest of a file, or of all checkpoints in a folder.

    Raises:
      DataError: something is damaged; the error names all damaged leaves of the first such checkpoint.
    """
    for where, files in _checkpoints(path):
        with reading.reading(where):
            Source(files, where)
            found = [(file, name) for file in files for name in file.damaged()]
        if found:
            raise errors.DataError(
                f"{where} is damaged",
                where=where,
                why="; ".join(f"{name} in {file.path}" for file, name in found[:20]),
                fix="restore an older checkpoint, or fetch the file again",
            )


def described(path: Any) -> Iterator[str]:
    """Describe a file, or all checkpoints in a folder, in lines.

    Raises:
      DataError: a header or manifest is damaged.
    """
    for where, files in _checkpoints(path, verify=False):
        source = Source(files, where)
        total = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in source.arrays.values())
        sealed = "" if all(file.header.digest for file in files) else ", without digests"
        yield f"{where}: {len(source.arrays)} arrays, {total:,} bytes, {len(files)} file(s){sealed}"
        for leaf in source.arrays.values():
            parts = f"  in {len(leaf.parts)} parts" if len(leaf.parts) > 1 else ""
            yield f"  {leaf.name}  {dtypes.short_name(leaf.dtype)}{list(leaf.shape)}{parts}"
        for name, value in source.scalars.items():
            kind, text = elements.scalar_text(value)
            yield f"  {name}  {kind} {text:.60}"


def _checkpoints(path: Any, verify: bool = True) -> Iterator[tuple[str, list[reading.File]]]:
    """Each checkpoint at a path: where it is, and its open files."""
    text = storage.text_of(path)
    inside, name, found = storage.folder_of(text), "", []
    if not os.path.isfile(text):
        found = manifests.listing(inside).committed
    if not found and not os.path.isdir(text):
        inside, name = storage.split(text)
        found = [entry for entry in manifests.listing(inside).committed if entry.manifest == name]
    for entry in found:
        yield inside.text(entry.manifest), manifests.opened(inside, entry)[1]
    if found:
        return
    if not name or name not in inside.names():
        raise errors.DataError(
            f"there is no checkpoint at {storage.shown(text)}",
            where=storage.shown(text),
            fix="name a safetensors file, the folder of a Checkpointer, or a manifest in it",
        )
    file = reading.opened(inside, name, verify)
    yield file.path, [file]
