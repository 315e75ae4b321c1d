"""Disk cache of binaries, plans and autotuning results, shared by processes.

Kernels, stage 8 asks here before it runs a compiler. In: binaries (shared objects, cubins, plans, small blobs of JSON)
with the source that they were made from. Out: the same bytes, or None. An entry may be lost, truncated or refused at
any time: then it is made again, and never wrong.

All processes of one user may share a folder. Users must not: loading libraries, cubins and plans runs code, and a
checksum verifies integrity, not ownership. The folder is created for its user alone. One that other users own or may
write to (``distrusted``) is neither read nor written, nor are files of others read.

An entry is two files: the binary, whose name contains its checksum, and ``<key>.txt``, which names the binary with its
checksum, followed by the source for people to read. Both are written to temporary files and renamed, the record last,
so that a reader sees a whole entry or none, even with concurrent writers.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from blufunc.config import config

_LIMIT_BYTES = 2 << 30
_KEEP = 0.8  # pruning shrinks the folder to this share of the limit, so that it is rare
_STALE_SECONDS = 3600  # files that a dead process left half-written
_TOUCH_SECONDS = 24 * 3600  # resolution of an entry's last use

_KEY = re.compile(r"[0-9a-f]{64}")
# pruning removes no other files
_CACHE_FILE = re.compile(r"(?P<key>[0-9a-f]{64})(-[0-9a-f]{16})?\.\w+|blufunc-\w+\.tmp")
_RECORD = re.compile(rb"blufunc-cache 1 (?P<sum>[0-9a-f]{64}) (?P<name>[\w.-]+)\n")


def key_of(*parts: str) -> str:
    """The key of a binary: a hash of source, architecture, compiler version, flags."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogatepass")  # a path may have bytes that are not UTF-8
        digest.update(
            len(data).to_bytes(8, "little")
        )  # so that different lists of parts have different bytes
        digest.update(data)
    return digest.hexdigest()


def _as_key(text: str) -> str:
    return text if _KEY.fullmatch(text) else key_of(text)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file of this user; PermissionError if another user owns it."""
    with path.open("rb") as f:
        if hasattr(os, "geteuid") and os.fstat(f.fileno()).st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to another user")
        yield f


def default_folder() -> Path | None:
    """The user's cache folder: ``$BLUFUNC_CACHE_DIR``, ``$XDG_CACHE_HOME`` or home."""
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

    Threads and processes may share a folder. If it cannot be written, ``put`` does nothing and entries can still be
    read; ``BLUFUNC_DEBUG=cache`` says so once.

    Args:
      folder: the folder, created on the first ``put``; default ``default_folder()``.
      limit_bytes: above this size the least recently used entries are removed; default 2 GiB.

    Attributes:
      refused: the error of the last write to the folder; empty if it succeeded.
    """

    def __init__(self, folder: Path | None = None, limit_bytes: int = _LIMIT_BYTES):
        self.folder = folder if folder is not None else default_folder()
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._size: int | None = None  # bytes in the folder; not known before the first put
        self.refused = ""

    def get(self, key: str) -> bytes | None:
        """The binary stored under ``key``; None if there is no whole one."""
        found = self._find(key)
        return found[1] if found else None

    def path_of(self, key: str) -> Path | None:
        """The file of the binary stored under ``key``, for callers such as ``dlopen``."""
        found = self._find(key)
        return found[0] if found else None

    def put(self, key: str, binary: bytes, source: str = "", suffix: str = ".bin") -> Path | None:
        """Store ``binary`` under ``key``, with ``source`` for people to read.

        Args:
          key: from ``key_of``; any other text is hashed.
          binary: the bytes that ``get`` will return.
          source: the source of the binary; default empty.
          suffix: of the binary's file: ``.so``, ``.cubin``, ``.json``; default ``.bin``.

        Returns:
          The binary's file, or None if it cannot be stored.
        """
        if self.folder is None:
            self._refuse("there is no home folder")
            return None
        if reason := self.distrusted():
            self._refuse(reason)
            _warn_once(reason)
            return None
        checksum = hashlib.sha256(binary).hexdigest()
        path = self.folder / f"{_as_key(key)}-{checksum[:16]}{suffix}"
        record = f"blufunc-cache 1 {checksum} {path.name}\n{source}".encode(errors="backslashreplace")
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
        """The reason that other users could have written the entries; else empty."""
        if self.folder is None or not hasattr(os, "geteuid"):  # Windows: a home is its user's
            return ""
        try:
            found = self.folder.stat()
        except OSError:
            return ""  # it does not exist, and will be private
        if found.st_uid != os.geteuid():
            return f"{self.folder} belongs to another user"
        if found.st_mode & 0o022:
            return f"others may write to {self.folder}: run chmod go-w on it"
        return ""

    def _record(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{_as_key(key)}.txt"

    def _find(self, key: str) -> tuple[Path, bytes] | None:
        """The binary's file and bytes; a broken entry is removed."""
        if self.folder is None or self.distrusted():
            return None
        record = self._record(key)
        try:
            with _opened(record) as f:
                head = _RECORD.match(f.readline())
        except OSError:
            return None
        path = self.folder / head["name"].decode() if head else None
        try:
            binary = b""
            if path:
                with _opened(path) as f:
                    binary = f.read()
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
        """Write a file atomically."""
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
        """Record that an entry was used, at most once a day, as the record's mtime."""
        with suppress(OSError):
            if time.time() - record.stat().st_mtime > _TOUCH_SECONDS:
                os.utime(record)

    def _account(self, added: int) -> None:
        """Track the folder's size; it is listed once per process, and when full."""
        with self._lock:
            self._size = self.size() if self._size is None else self._size + added
            if self._size > self.limit_bytes:
                self._prune()
                self._size = self.size()

    def _files(self) -> list[tuple[re.Match[str], os.stat_result]]:
        """The cache files in the folder: name match, size and times."""
        assert self.folder is not None
        files = []
        with suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if file := _CACHE_FILE.fullmatch(entry.name):
                    with suppress(OSError):  # another process may be pruning too
                        files.append((file, entry.stat()))
        return files

    def size(self) -> int:
        """Bytes in the folder."""
        return sum(stat.st_size for _, stat in self._files())

    def _prune(self) -> None:
        """Remove the least recently used entries, and temporary files of dead processes."""
        entries: dict[str, list[tuple[str, os.stat_result]]] = {}  # by key: a record and its binary
        for file, stat in self._files():
            if file["key"]:
                entries.setdefault(file["key"], []).append((file.string, stat))
            elif time.time() - stat.st_mtime > _STALE_SECONDS:
                self._remove(file.string)
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


_warned: set[str] = set()


def _warn_once(reason: str) -> None:
    """Say that every start compiles anew; nothing else would show it."""
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"what blufunc compiles is not kept: {reason}. BLUFUNC_CACHE_DIR names another folder.",
            RuntimeWarning,
            stacklevel=2,
        )
