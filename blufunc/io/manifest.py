"""Manifests: what a checkpoint of a ``Checkpointer`` consists of.

Below the checkpointer. In: a folder. Out: its checkpoints, in the order in which they were saved. Checkpoint 7 of step
100 is the folder ``000007-step-100``, with a file of each process, and the manifest ``000007-step-100.json``, whose
appearance commits it. It names the files, their sizes and the digests of their headers, and is sealed (``seal.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blufunc import errors
from blufunc.io import header as headers
from blufunc.io import reading, seal, storage
from blufunc.io.writing import Written

_PREFIX = b'{"blufunc.digest":"'
_FORMAT = 1
_NAME = re.compile(r"(\d{6,})-step-(\d+)(\.json)?")
_DRAFT = re.compile(rf"\.{_NAME.pattern}\.\d+-\d+{re.escape(storage.PART)}")


@dataclass(frozen=True, order=True)
class Entry:
    """A checkpoint, or the remains of one: its number in the folder, and its step."""

    number: int
    step: int

    @property
    def folder(self) -> str:
        """Name of the folder with its files."""
        return f"{self.number:06}-step-{self.step}"

    @property
    def manifest(self) -> str:
        """Name of its manifest."""
        return self.folder + ".json"


def file_of(process: int) -> str:
    """Name of the file that a process writes."""
    return f"{process:05}.safetensors"


@dataclass(frozen=True)
class Listing:
    """The content of a folder.

    Attributes:
      committed: entries with a manifest, the latest one last.
      started: entries with a folder and no manifest.
      parts: files that a process has not finished.
    """

    committed: list[Entry]
    started: list[Entry]
    parts: list[str]

    @property
    def next_number(self) -> int:
        """A number above all others."""
        return 1 + max((e.number for e in (*self.committed, *self.started)), default=0)


def listing(folder: storage.Folder) -> Listing:
    """List a folder; empty if there is none.

    Raises:
      DataError: it cannot be read.
    """
    path = storage.shown(folder.path)
    with reading.reading(path):
        names = folder.names()
    committed, started = set(), set()
    for name in names:
        if match := _NAME.fullmatch(name):
            (committed if match[3] else started).add(Entry(int(match[1]), int(match[2])))
    parts = [name for name in names if _DRAFT.fullmatch(name)]
    return Listing(sorted(committed), sorted(started - committed), parts)


@dataclass(frozen=True)
class Manifest:
    """A committed checkpoint: its step, the files of all processes, and the facts."""

    step: int
    files: Sequence[Written]
    facts: Any


def encoded(manifest: Manifest) -> bytes:
    """The bytes of a manifest."""
    text = {
        "blufunc.digest": "0" * seal.DIGITS,
        "format": _FORMAT,
        "step": manifest.step,
        "files": [asdict(file) for file in manifest.files],
        "facts": manifest.facts,
    }
    return seal.seal(json.dumps(text, separators=(",", ":")).encode(), _PREFIX)


def read(folder: storage.Folder, entry: Entry) -> Manifest:
    """Read a manifest.

    Raises:
      DataError: it is missing or damaged.
    """
    path = folder.text(entry.manifest)
    with reading.reading(path):
        content = folder.open(entry.manifest)
        raw = bytes(content.read(0, content.size))
    try:
        if not seal.is_sealed(raw, _PREFIX) or not seal.is_whole(raw, _PREFIX):
            raise headers.Malformed("it does not have the digest that it says")
        match headers.loads(raw, "it"):
            case {"format": 1, "step": int(step), "files": [*files], "facts": facts}:
                return Manifest(step, [_file(record) for record in files], facts)
            case {"format": other}:
                raise headers.Malformed(f"it has format {other!r:.20}; this version knows {_FORMAT}")
        raise headers.Malformed("it has no files")
    except headers.Malformed as error:
        raise errors.DataError(
            f"{path} is damaged, or of another version",
            where=path,
            why=str(error),
            fix="restore an older checkpoint: restore(like, step=...)",
        ) from error


def _file(record: Any) -> Written:
    match record:
        case {"name": str(name), "size": int(size), "digest": str(digest)}:
            return Written(name, size, digest)
    raise headers.Malformed(f"it has {record!r:.60} for a file")


def opened(folder: storage.Folder, entry: Entry) -> tuple[Manifest, list[reading.File]]:
    """A checkpoint's manifest and its files, with the headers of the commit.

    Raises:
      DataError: something is missing or damaged.
    """
    manifest = read(folder, entry)
    inside = folder.below(entry.folder)
    files = []
    for written in manifest.files:
        file = reading.opened(inside, written.name)
        if file.header.digest != written.digest:
            raise errors.DataError(
                f"{file.path} is not the file that was saved",
                where=file.path,
                why="its header has another digest than the manifest says: it was replaced",
                fix="restore an older checkpoint: restore(like, step=...)",
            )
        files.append(file)
    return manifest, files


def discard(folder: storage.Folder, entry: Entry) -> None:
    """Remove a checkpoint: first its manifest, so that what a kill leaves is none."""
    folder.remove(entry.manifest)
    folder.remove(entry.folder)
