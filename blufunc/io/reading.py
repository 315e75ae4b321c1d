"""Reading: a file as its header and verified arrays.

Above the file format. In: a folder and a name. Out: the elements at an index of an array, of which only the chunks that
they touch are read and compared with their digests. On a local disk these are views of a memory-mapped file.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.io import header as headers
from blufunc.io import seal, storage

Index = tuple[slice, ...]

_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()
_THREADS = min(8, max(4, (os.cpu_count() or 1) // 2))
"""Threads that hash, write and read: together as fast as a disk."""


def pool() -> ThreadPoolExecutor:
    """The threads of this process that hash and write chunks."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(_THREADS, "blufunc io")
        return _pool


def _start_anew() -> None:
    """Forget the threads of the parent: a forked child has none of them."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


class File:
    """A file that is open for reading.

    Args:
      content: its bytes.
      path: for messages.
      verify: compare what is read with its digests; a file without is refused.
    Raises:
      DataError: its header is damaged, or has no digests.

    Attributes:
      header: its header.
      bytes_read: of its arrays, by ``read`` so far; a chunk counted once.
    """

    def __init__(self, content: storage.Content, path: str, verify: bool = True):
        self.path, self._content, self._verify = path, content, verify
        self.header = self._header()
        self._good: dict[str, set[int]] = {}
        self.bytes_read = 0
        if verify and not self.header.digest:
            raise errors.DataError(
                f"{path} has no digests",
                where=path,
                why="another program wrote it, or the beginning of its header is damaged",
                fix="load(path, verify=False) takes it as it is",
            )

    def _header(self) -> headers.Header:
        size = self._content.size
        try:
            if size < headers.LENGTH_BYTES:
                raise headers.Malformed(f"it is {size} bytes long, and has no header")
            length = int.from_bytes(self._content.read(0, headers.LENGTH_BYTES), "little")
            if length > size - headers.LENGTH_BYTES:
                raise headers.Malformed(f"it is {size:,} bytes long, and its header would be {length:,}")
            return headers.parsed(bytes(self._content.read(0, headers.LENGTH_BYTES + length)), size)
        except headers.Malformed as error:
            raise errors.DataError(
                f"{self.path} is not a whole safetensors file",
                where=self.path,
                why=str(error),
                fix="it may be cut short by a copy or download: fetch it again, or load an older checkpoint",
            ) from error

    def read(self, a: headers.Stored, index: Index | None = None) -> np.ndarray:
        """The elements of an array at an index, read-only; a view where possible.

        Raises:
          DataError: a chunk that they are in is damaged.
        """
        index = tuple(slice(0, n) for n in a.shape) if index is None else index
        if not a.nbytes or any(s.start >= s.stop for s in index):
            return np.empty([max(0, s.stop - s.start) for s in index], a.dtype)
        touched = chunks_of(a, index)
        if isinstance(self._content, storage.Mapped):
            self._check(a, touched)
            raw = np.frombuffer(self._content.read(self._at(a, 0), self._at(a, a.nbytes)), np.uint8)
        else:  # only the touched pages of this array come to exist
            raw = np.empty(a.nbytes, np.uint8)
            self._check(a, touched, raw)
            raw.flags.writeable = False
        whole: Any = raw.view(a.dtype).reshape(a.shape)
        return whole[(*index, ...)]  # an array, also of rank 0

    def damaged(self) -> list[str]:
        """Names of the leaves with chunks that have another digest."""
        every = [(a, i) for a in self.header.arrays for i in range(headers.n_chunks(a.nbytes, a.chunk))]
        fine = pool().map(lambda chunk: self._is_good(*chunk), every)
        bad = {a.leaf for (a, _), good in zip(every, fine, strict=True) if not good}
        return [a.leaf for a in self.header.arrays if a.leaf in bad]

    def _at(self, a: headers.Stored, offset: int) -> int:
        return self.header.size + a.start + offset

    def _is_good(self, a: headers.Stored, i: int, into: np.ndarray | None = None) -> bool:
        """Read a chunk, store it in ``into``, and compare its digest."""
        start, stop = i * a.chunk, min((i + 1) * a.chunk, a.nbytes)
        data = self._content.read(self._at(a, start), self._at(a, stop))
        if into is not None:
            into[start:stop] = np.frombuffer(data, np.uint8)
        return not self._verify or a.digests is None or seal.digest(data) == a.digests[i]

    def _check(self, a: headers.Stored, chunks: Iterable[int], into: np.ndarray | None = None) -> None:
        """Read chunks, verify them, and store them in ``into``."""
        good = self._good.setdefault(a.key, set())
        wanted = [i for i in chunks if into is not None or i not in good]
        is_good = lambda i: self._is_good(a, i, into)
        each = map(is_good, wanted) if len(wanted) < 2 else pool().map(is_good, wanted)
        bad = [i for i, fine in zip(wanted, each, strict=True) if not fine]
        self.bytes_read += sum(min(a.chunk, a.nbytes - i * a.chunk) for i in set(wanted) - good)
        good.update(set(wanted).difference(bad))
        if bad:
            start = bad[0] * a.chunk
            raise errors.DataError(
                f"{a.leaf} is damaged in {self.path}",
                where=self.path,
                why=f"bytes {start:,} to {min(start + a.chunk, a.nbytes):,} of its {a.nbytes:,} do not have the digest "
                "that was saved with them",
                fix="load an older checkpoint, or fetch the file again",
            )


def chunks_of(a: headers.Stored, index: Index) -> list[int]:
    """The chunks that hold elements of a non-empty index, ascending."""
    d = len(a.shape)
    run = a.dtype.itemsize
    while d and index[d - 1] == slice(0, a.shape[d - 1]):  # dimensions that are whole: one run of bytes
        d -= 1
        run *= a.shape[d]
    starts = np.zeros((), np.int64)
    stride = run
    for k in reversed(range(d)):
        if k == d - 1:  # a run takes what it has of the last other dimension
            n, first = index[k].stop - index[k].start, index[k].start
            starts, stride, run = starts + first * stride, stride * a.shape[k], run * n
        else:
            steps = np.arange(index[k].start, index[k].stop, dtype=np.int64) * stride
            starts, stride = (steps[:, None] + starts.reshape(1, -1)).reshape(-1), stride * a.shape[k]
    starts = starts.reshape(-1)
    # difference of the number of runs that cover each chunk
    edges = np.zeros(headers.n_chunks(a.nbytes, a.chunk) + 1, np.int64)
    np.add.at(edges, starts // a.chunk, 1)
    np.add.at(edges, (starts + run - 1) // a.chunk + 1, -1)
    return np.flatnonzero(np.cumsum(edges[:-1])).tolist()


def opened(folder: storage.Folder, name: str, verify: bool = True) -> File:
    """Open a file.

    Raises:
      DataError: it is missing, unreadable or damaged.
    """
    path = folder.text(name)
    with reading(path):
        return File(folder.open(name), path, verify)


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn a failure to read into an error that names the file."""
    try:
        yield
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise errors.DataError(
            f"there is no {path}" if missing else f"cannot read {path}",
            where=path,
            why=None if missing else error.strerror or str(error),
            fix="check the path" if missing else "check that it is a file, and that you may read it",
        ) from error
