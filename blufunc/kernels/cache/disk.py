"""What compilers and autotuners made, kept on disk between processes.

Kernels, beside the path of a program: stage 8 asks here before it runs a compiler. In come binaries (shared
objects, cubins, plans, small blobs of JSON) with the source that they were made from; out go the same bytes, or
None. A cache can be lost, cut short or refused at any time: then things are made again, never wrong.

Any number of one user's processes may share a folder. Users must not: libraries and plans run what is in them, and a
checksum says that a file is whole, not whose it is. The folder is made for its user alone; ``distrusted`` tells of one
that others own or may write, from which plans are not loaded.

An entry is two files: ``<key>.txt``, which names the binary with its checksum and then holds the source for
people to read, and the binary, whose name has its checksum in it. Both are written aside and renamed, the
record last, so that a reader sees a whole entry or none, whoever else writes.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from blufunc.config import config

_LIMIT_BYTES = 2 << 30
_KEEP = 0.8  # pruning goes down to this share of the limit, so that it is rare
_STALE_SECONDS = 3600  # files that a dead process left half-written
_TOUCH_SECONDS = 24 * 3600  # how coarsely an entry's last use is recorded

_KEY = re.compile(r"[0-9a-f]{64}")
# no other file is ever removed
_OURS = re.compile(r"(?P<key>[0-9a-f]{64})(-[0-9a-f]{16})?\.\w+|blufunc-\w+\.tmp")
_RECORD = re.compile(rb"blufunc-cache 1 (?P<sum>[0-9a-f]{64}) (?P<name>[\w.-]+)\n")


def key_of(*parts: str) -> str:
    """The key of what is made from ``parts``: source text, architecture, compiler version, flags."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))  # so that no two lists of parts run together alike
        digest.update(data)
    return digest.hexdigest()


def _as_key(text: str) -> str:
    return text if _KEY.fullmatch(text) else key_of(text)


def default_folder() -> Path | None:
    """``$BLUFUNC_CACHE_DIR``, else ``$XDG_CACHE_HOME/blufunc``, else ``~/.cache/blufunc``; None without a home."""
    if chosen := os.environ.get("BLUFUNC_CACHE_DIR"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "blufunc"
    try:
        return Path.home() / ".cache" / "blufunc"
    except RuntimeError:
        return None


class DiskCache:
    """A folder of binaries by key.

    Any number of threads and processes may use one folder. Where it cannot be written, ``put`` does nothing and
    what is there can still be read; ``BLUFUNC_DEBUG=cache`` says so once.

    Attributes:
      refused: why the folder could not be written when that was last tried; empty if it could.

    Args:
      folder: where; made on the first ``put``. None for ``default_folder()``.
      limit_bytes: above this size the entries that were not used for longest go.
    """

    def __init__(self, folder: Path | None = None, limit_bytes: int = _LIMIT_BYTES):
        self.folder = folder if folder is not None else default_folder()
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._size: int | None = None  # bytes in the folder; not known before the first put
        self.refused = ""

    def get(self, key: str) -> bytes | None:
        """The binary that was put under ``key``; None if there is none that is whole."""
        found = self._find(key)
        return found[1] if found else None

    def path_of(self, key: str) -> Path | None:
        """The file with the binary that was put under ``key``, for those who must name a file, as ``dlopen`` must."""
        found = self._find(key)
        return found[0] if found else None

    def put(self, key: str, binary: bytes, source: str = "", suffix: str = ".bin") -> Path | None:
        """Keep ``binary`` under ``key``, and ``source`` beside it for people to read.

        Args:
          key: from ``key_of``; of any other text the key is taken first.
          binary: the bytes that ``get`` shall return.
          source: what they were made from.
          suffix: ends the name of the binary's file: ``.so``, ``.cubin``, ``.json``.

        Returns:
          The binary's file, or None if it cannot be kept.
        """
        if self.folder is None:
            self._refuse("there is no home folder")
            return None
        checksum = hashlib.sha256(binary).hexdigest()
        path = self.folder / f"{_as_key(key)}-{checksum[:16]}{suffix}"
        record = f"blufunc-cache 1 {checksum} {path.name}\n{source}".encode()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # code is loaded from it
            self._write(path, binary)
            self._write(self._record(key), record)
        except OSError as e:
            self._refuse(str(e))
            return None
        self._account(len(binary) + len(record))
        return path

    def distrusted(self) -> str:
        """Why what lies in the folder may be somebody else's; empty if only its user writes there."""
        if self.folder is None or not hasattr(os, "geteuid"):  # Windows: a home is its user's
            return ""
        try:
            found = self.folder.stat()
        except OSError:
            return ""  # nothing is there, and it will be made for nobody else
        if found.st_uid != os.geteuid():
            return f"{self.folder} belongs to another user"
        if found.st_mode & 0o022:
            return f"others may write to {self.folder}: chmod go-w makes it yours alone"
        return ""

    def _record(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{_as_key(key)}.txt"

    def _find(self, key: str) -> tuple[Path, bytes] | None:
        """The binary's file and bytes; an entry that is not whole is removed."""
        if self.folder is None:
            return None
        record = self._record(key)
        try:
            with record.open("rb") as f:
                head = _RECORD.match(f.readline())
        except OSError:
            return None
        path = self.folder / head["name"].decode() if head else None
        try:
            binary = path.read_bytes() if path else b""
        except OSError:
            binary = b""
        if head and path and hashlib.sha256(binary).hexdigest() == head["sum"].decode():
            self._touch(record)
            return path, binary
        self._remove(record.name)
        if path:
            self._remove(path.name)
        return None

    def _write(self, path: Path, data: bytes) -> None:
        """Write all or nothing: what is at ``path`` is replaced in one step."""
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix="blufunc-", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as f:
                f.write(data)
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _refuse(self, why: str) -> None:
        if not self.refused and config.shows("cache"):
            config.show(f"cache: {self.folder} cannot be written: {why}. Nothing is kept between processes.")
        self.refused = f"{self.folder} cannot be written: {why}"

    def _touch(self, record: Path) -> None:
        """Note that an entry was used, at most once a day: pruning goes by the record's time."""
        with suppress(OSError):
            if time.time() - record.stat().st_mtime > _TOUCH_SECONDS:
                os.utime(record)

    def _account(self, added: int) -> None:
        """Keep count of the folder's size; the folder is listed once a process, and when it is full."""
        with self._lock:
            self._size = self._measure() if self._size is None else self._size + added
            if self._size > self.limit_bytes:
                self._prune()
                self._size = self._measure()

    def _files(self) -> list[tuple[re.Match[str], os.stat_result]]:
        """The names, matched, and the sizes and times of our own files in the folder."""
        assert self.folder is not None
        files = []
        with suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if ours := _OURS.fullmatch(entry.name):
                    with suppress(OSError):  # another process may be pruning too
                        files.append((ours, entry.stat()))
        return files

    def _measure(self) -> int:
        return sum(stat.st_size for _, stat in self._files())

    def _prune(self) -> None:
        """Remove what was not used for longest, and what dead processes left half-written."""
        entries: dict[str, list[tuple[str, os.stat_result]]] = {}  # by key: a record and its binary
        for ours, stat in self._files():
            if ours["key"]:
                entries.setdefault(ours["key"], []).append((ours.string, stat))
            elif time.time() - stat.st_mtime > _STALE_SECONDS:
                self._remove(ours.string)
        total = sum(stat.st_size for files in entries.values() for _, stat in files)
        for files in sorted(entries.values(), key=lambda files: max(stat.st_mtime for _, stat in files)):
            if total <= self.limit_bytes * _KEEP:
                break
            for name, stat in files:
                self._remove(name)
                total -= stat.st_size

    def _remove(self, name: str) -> None:
        assert self.folder is not None
        with suppress(OSError):
            (self.folder / name).unlink()
