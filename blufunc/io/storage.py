"""Folders of files: on this machine, or an object store through fsspec.

Below reading and writing. In: a path, or a URL such as ``s3://bucket/run``. Out: a ``Folder`` with the few operations
that checkpoints need. A file appears under its name whole or not at all: on a local disk by a rename after a sync, in
an object store because objects do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import posixpath
import re
import shutil
import stat
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blufunc import errors
from blufunc.core.ir import source

PART = ".part"
"""Ending of files that are being written."""

_numbers = itertools.count()


class Draft(ABC):
    """A file that is being written, and has no name yet."""

    @abstractmethod
    def write(self, data: Any, offset: int) -> None:
        """Write bytes at an offset; in order, from one thread."""

    @abstractmethod
    def sync(self) -> None:
        """Wait until the bytes are on the disk, and drop them from the page cache."""

    @abstractmethod
    def reader(self) -> Content:
        """The whole file, once it is synced."""

    @abstractmethod
    def commit(self) -> None:
        """Give the file its name."""

    @abstractmethod
    def discard(self) -> None:
        """Remove the file, if it was not committed."""


class DraftAtOffsets(Draft):
    """A draft that several threads write to, in any order, and read back."""

    @abstractmethod
    def settle(self, start: int, stop: int) -> None:
        """Wait until written bytes are on the disk, and uncache them."""

    @abstractmethod
    def read(self, start: int, stop: int) -> bytes:
        """Bytes that were written: from the disk, if they are settled."""


class Content(ABC):
    """The bytes of a file.

    Attributes:
      size: their number.
    """

    size: int

    @abstractmethod
    def read(self, start: int, stop: int) -> memoryview:
        """Some of them; a view where the file is memory-mapped."""


class Folder(ABC):
    """A folder.

    Attributes:
      path: as the user named it.
    """

    path: str

    @abstractmethod
    def make(self) -> None:
        """Make the folder."""

    @abstractmethod
    def names(self) -> list[str]:
        """Names of what is in it; empty if it does not exist."""

    @abstractmethod
    def draft(self, name: str, size: int) -> Draft:
        """Begin a file of this many bytes."""

    @abstractmethod
    def open(self, name: str) -> Content:
        """A file; OSError if it cannot be read."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file or a folder with all that is in it."""

    @abstractmethod
    def below(self, name: str) -> Folder:
        """A folder in this one."""

    @abstractmethod
    def lock(self) -> Lock | None:
        """Keep other processes from writing here; None where there are no locks."""

    def text(self, name: str) -> str:
        """The path of a file, for messages."""
        return shown(posixpath.join(self.path, name))

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        draft = self.draft(name, len(data))
        try:
            draft.write(data, 0)
            draft.sync()
            draft.commit()
        finally:
            draft.discard()


def shown(path: Any) -> str:
    """A path for messages, which may hold bytes that are not UTF-8."""
    return os.fsencode(os.fspath(path)).decode(errors="backslashreplace")


_URL = re.compile(r"[A-Za-z][\w+.-]*(::[\w+.-]+)*://")
_HALF_A_URL = re.compile(r"[A-Za-z][\w+.-]+:/(?!/)")


def text_of(path: Any) -> str:
    """A path or URL as text, with ``~`` replaced by the home folder.

    Raises:
      ArgumentError: it is neither.
    """
    try:
        text = os.fsdecode(os.fspath(path))
    except TypeError:
        raise errors.ArgumentError(
            f"{path!r:.60} is no path.", where=source.here(), fix="pass a path, or the URL of an object store"
        ) from None
    if "\0" in text:
        raise errors.ArgumentError(
            f"{shown(text)!r:.60} has a null byte.", where=source.here(), fix="remove it"
        )
    if _HALF_A_URL.match(text):
        scheme, _, rest = text.partition(":/")
        raise errors.ArgumentError(
            f"{shown(text)!r} is half a URL.",
            where=source.here(),
            fix=f"{scheme}://{rest}; or ./{text} for a folder of this name",
        )
    return text if _URL.match(text) else os.path.expanduser(text)


def folder_of(path: Any) -> Folder:
    """The folder at a path or URL."""
    text = text_of(path)
    return Remote(text) if _URL.match(text) else Local(text)


def split(path: Any) -> tuple[Folder, str]:
    """The folder and the name of a file."""
    text = text_of(path)
    if url := _URL.match(text):
        parent, name = posixpath.split(text[url.end() :])
        parent = url[0] + parent
    else:
        parent, name = os.path.split(text)
    if not name:
        raise errors.ArgumentError(
            f"{shown(text)!r} is no name of a file.", fix="end the path with a file name"
        )
    return folder_of(parent or os.curdir), name


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Turn a failure to write into an error that explains it."""
    try:
        yield
    except OSError as error:
        raise errors.DataError(
            f"cannot write to {path}",
            where=path,
            why=error.strerror or str(error) or type(error).__name__,
            fix=_way_out(error),
        ) from error


def _way_out(error: OSError) -> str:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "a file is in the way: choose another folder"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a folder that you may write to"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free some of the disk, or raise its quota; earlier checkpoints are as they were"
    if error.errno == errno.ENOENT:
        return "make the folder again: it was removed"
    return "choose another folder; earlier checkpoints are as they were"


# -- this machine ----------------------------------------------------------------------------------


class Local(Folder):
    """A folder of this machine's file systems."""

    def __init__(self, path: str):
        self.path = path
        self._folder = Path(path)

    def make(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self._folder))
        except (FileNotFoundError, NotADirectoryError):
            if self._folder.exists():  # it is a file
                raise
            return []

    def draft(self, name: str, size: int) -> Draft:
        return _LocalDraft(self._folder, name, size)

    def open(self, name: str) -> Content:
        return Mapped(self._folder / name)

    def remove(self, name: str) -> None:
        path = self._folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def below(self, name: str) -> Folder:
        return Local(os.path.join(self.path, name))

    def lock(self) -> Lock | None:
        return Lock(self._folder / ".lock")


class _LocalDraft(DraftAtOffsets):
    def __init__(self, folder: Path, name: str, size: int):
        self._folder, self._to = folder, folder / name
        self._path: Path | None = folder / f".{name}.{os.getpid()}-{next(_numbers)}{PART}"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, data: Any, offset: int) -> None:
        view = memoryview(data).cast("B") if not isinstance(data, bytes) else memoryview(data)
        while view:
            n = os.pwrite(self._file, view, offset)
            view, offset = view[n:], offset + n

    def sync(self) -> None:
        os.fsync(self._file)
        self._drop(0, 0)

    def settle(self, start: int, stop: int) -> None:
        _sync_data(self._file)
        self._drop(start, stop - start)

    def _drop(self, start: int, size: int) -> None:
        if hasattr(os, "posix_fadvise"):  # not on macOS: a check then reads from the page cache
            os.posix_fadvise(self._file, start, size, os.POSIX_FADV_DONTNEED)

    def read(self, start: int, stop: int) -> bytes:
        parts = []
        while start < stop:
            part = os.pread(self._file, stop - start, start)
            if not part:
                raise OSError(errno.EIO, f"the file ends at byte {start:,}")
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def reader(self) -> Content:
        assert self._path is not None
        return Mapped(self._path)

    def commit(self) -> None:
        assert self._path is not None
        os.replace(self._path, self._to)
        self._path = None
        sync_folder(self._folder)

    def discard(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._path is not None:
            with contextlib.suppress(OSError):  # the folder may be gone or read-only: that is the first error
                self._path.unlink(missing_ok=True)
            self._path = None


_sync_data = getattr(os, "fdatasync", os.fsync)  # not on macOS


def sync_folder(folder: Path) -> None:
    """Let new names reach the disk, where the file system allows it."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


class Mapped(Content):
    """A file of this machine, memory-mapped."""

    def __init__(self, path: Path):
        # Not blocking: to open a pipe would wait for a writer.
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        try:
            found = os.fstat(opened)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            self.size = found.st_size
            self._map = mmap.mmap(opened, self.size, access=mmap.ACCESS_READ) if self.size else b""
        finally:
            os.close(opened)

    def read(self, start: int, stop: int) -> memoryview:
        return memoryview(self._map)[start:stop]


class InMemory(Mapped):
    """The bytes of a file that is in memory already."""

    def __init__(self, raw: bytes | bytearray | memoryview):
        self._map, self.size = raw, len(raw)  # type: ignore[assignment]


class Lock:
    """A record lock, which ends with the process; forked children do not inherit it.

    The system keeps out other processes, ``_held`` the other locks of this one: closing any of their files would end
    the lock of all.
    """

    def __init__(self, path: Path):
        with _lock:
            key = str(path.resolve())
            if key in _held:
                raise _taken(path, "another Checkpointer of this process")
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(self._file)
                self._file = -1
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise _taken(path, "another process") from error
                # file systems without locks, as some of networks: nothing keeps a second run out
            else:
                _held.add(key)
        self._release = weakref.finalize(self, _unlock, self._file, key, os.getpid())

    def close(self) -> None:
        self._release()


_held: set[str] = set()
_lock = threading.Lock()
os.register_at_fork(after_in_child=_held.clear)


def _unlock(file: int, key: str, process: int) -> None:
    if file >= 0 and process == os.getpid():
        os.close(file)
        _held.discard(key)


def _taken(path: Path, by: str) -> errors.DataError:
    folder = shown(path.parent)
    return errors.DataError(
        f"{by} writes checkpoints to {folder}",
        where=folder,
        why="two runs in one folder would remove each other's checkpoints",
        fix="wait for it to end, or close it, or choose another folder",
    )


# -- object stores ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise the errors of a store as OSError: each store has its own classes."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


class Remote(Folder):
    """A prefix of an object store."""

    def __init__(self, path: str):
        try:
            import fsspec
        except ImportError as error:
            raise errors.UnsupportedError(
                f"{path} is in an object store, and fsspec is not installed.",
                fix="pip install 'blufunc[fsspec]', and the package of the store: s3fs, gcsfs, adlfs",
            ) from error
        self.path = path
        try:
            self._store, self._root = fsspec.core.url_to_fs(path)
        except ImportError as error:
            raise errors.UnsupportedError(
                f"{path}: {error}.", fix="pip install the package of the store: s3fs, gcsfs, adlfs"
            ) from error
        except Exception as error:  # each store has its own
            raise errors.ArgumentError(
                f"{path} is no URL of an object store: {error}.", fix="s3://bucket/run, or a path"
            ) from error

    def make(self) -> None:
        with _as_os_errors():
            self._store.makedirs(self._root, exist_ok=True)

    def names(self) -> list[str]:
        self._store.invalidate_cache()
        try:
            with _as_os_errors():
                found = self._store.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return sorted(posixpath.basename(name.rstrip("/")) for name in found)

    def draft(self, name: str, size: int) -> Draft:
        return _RemoteDraft(self._store, posixpath.join(self._root, name))

    def open(self, name: str) -> Content:
        return _Ranges(self._store, posixpath.join(self._root, name))

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), _as_os_errors():
            self._store.rm(posixpath.join(self._root, name), recursive=True)

    def below(self, name: str) -> Folder:
        return Remote(posixpath.join(self.path, name))

    def lock(self) -> Lock | None:
        return None  # object stores have no locks


class _RemoteDraft(Draft):
    """An object: it appears when the stream is closed."""

    def __init__(self, store: Any, path: str):
        self._store, self._path = store, path
        with _as_os_errors():
            self._stream = store.open(path, "wb")

    def write(self, data: Any, offset: int) -> None:
        assert offset == self._stream.tell()
        with _as_os_errors():
            self._stream.write(data)

    def sync(self) -> None:
        """Complete the object: it is visible from here on, and a manifest names it later."""
        with _as_os_errors():
            self._stream.close()
        self._stream = None

    def reader(self) -> Content:
        self._store.invalidate_cache()
        return _Ranges(self._store, self._path)

    def commit(self) -> None:
        assert self._stream is None

    def discard(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(Exception):  # a failed upload: the first error is the one to see
                self._stream.discard()
            self._stream = None


class _Ranges(Content):
    """An object, of which ranges are requested."""

    def __init__(self, store: Any, path: str):
        self._store, self._path = store, path
        with _as_os_errors():
            self.size = int(store.size(path))

    def read(self, start: int, stop: int) -> memoryview:
        with _as_os_errors():
            return memoryview(self._store.cat_file(self._path, start=start, end=stop))
