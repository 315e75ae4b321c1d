"""``save`` and ``load``: one pytree in one file.

A face over writing and restoring.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blufunc.io import reading, storage
from blufunc.io.leaves import leaves_of
from blufunc.io.restoring import Source
from blufunc.io.writing import write


def save(path: Any, tree: Any, *, facts: Any = None, metadata: Mapping[str, str] | None = None) -> None:
    """Save a pytree as a safetensors file, all or nothing.

    Every leaf is stored under its key path: ``params.blocks.0.weight``. A file of this name is replaced once the new
    one is on the disk.

    Args:
      path: the file; or a URL of an object store (``pip install 'blufunc[fsspec]'``). Its folder is made.
      tree: a pytree of arrays, NumPy arrays, numbers, strings and bytes. Arrays on a mesh are stored whole.
      facts: anything that JSON expresses, for ``io.facts``.
      metadata: strings of the header that other programs look for: transformers requires ``{"format": "pt"}``.
    Raises:
      ArgumentError: a leaf that no file can hold, named; facts that are not JSON; metadata that are not strings.
      DataError: the file cannot be written.
      UnsupportedError: an array of several processes: ``Checkpointer`` saves these.
    """
    folder, name = storage.split(path)
    leaves = leaves_of(tree, together=False)
    with storage.writing(folder.text(name)):
        folder.make()
    write(folder, name, leaves, facts, metadata=metadata or {})


def load(path: Any, like: Any = None, *, verify: bool = True) -> Any:
    """Load a file, and verify all that is read.

    Args:
      path: a file of ``save``, or with ``verify=False`` any safetensors file; or a URL.
      like: a pytree of the same structure, whose leaves say what to make: arrays or ``ShapeDtypeStruct`` (an array, on
        their device or by their sharding, of which each process reads its shards), NumPy arrays, Python scalars.
        Default: a dict of NumPy arrays and scalars by name. The arrays are read-only, and memory-mapped if the file is
        on this machine.
      verify: compare digests. Without, damage goes unnoticed.
    Raises:
      DataError: the file is missing, damaged (the error names the leaf), of another format, or not like ``like``.
    """
    folder, name = storage.split(path)
    file = reading.opened(folder, name, verify)
    with reading.reading(file.path):
        source = Source([file], file.path)
        return source.flat() if like is None else source.restored(like)


def facts(path: Any) -> Any:
    """The facts of a file; reads only its header.

    Raises:
      DataError: the file is missing, or its header is damaged.
    """
    folder, name = storage.split(path)
    return reading.opened(folder, name).header.facts
