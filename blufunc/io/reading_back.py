"""Reading back: written chunks, compared with what the disk returns.

Used by writing. In: the places and digests of chunks as they are written. Out: the leaves whose chunks the disk returns
differently. Chunks are synced, dropped from the page cache and read while later ones are being written, so that a
checked file takes hardly longer than an unchecked one.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from blufunc.io import seal, storage

_THREADS = 4
"""Threads that read and hash.

They are not those that write: reads would wait until all is written.
"""

_WINDOW = 1 << 26
"""Bytes that are synced together: a sync takes milliseconds at least."""


class _Chunk(NamedTuple):
    leaf: str
    start: int
    stop: int
    digest: str


class ReadBack:
    """Compares chunks of a draft with their digests, in threads."""

    def __init__(self, draft: storage.DraftAtOffsets):
        self._draft = draft
        self._pool = ThreadPoolExecutor(_THREADS, "blufunc read back")
        self._written: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._damaged: set[str] = set()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="blufunc read back", daemon=True)
        self._thread.start()

    def wrote(self, leaf: str, start: int, stop: int, digest: str) -> None:
        """These bytes of the file have been written."""
        self._written.put(_Chunk(leaf, start, stop, digest))

    def finish(self) -> list[str]:
        """Names of the leaves that read differently, once all chunks have been read.

        Raises:
          OSError: the disk did not take them, or does not return them.
        """
        self.stop()
        if self._error is not None:
            raise self._error
        return sorted(self._damaged)

    def stop(self) -> None:
        """End the threads' work on the draft; again does nothing."""
        self._written.put(None)
        self._thread.join()
        self._pool.shutdown()

    def _run(self) -> None:
        futures: list[Future[None]] = []
        waiting: list[_Chunk] = []
        try:
            while (chunk := self._written.get()) is not None:
                waiting.append(chunk)
                if sum(c.stop - c.start for c in waiting) >= _WINDOW:
                    futures += self._compare(waiting)
                    waiting = []
            futures += self._compare(waiting)
            for f in futures:
                f.result()
        except BaseException as error:
            self._error = error
            for f in futures:
                f.cancel()
            for f in futures:
                f.cancelled() or f.exception()  # none reads a file that is closed

    def _compare(self, chunks: list[_Chunk]) -> list[Future[None]]:
        """Sync chunks, and submit their comparison."""
        if chunks:
            self._draft.settle(min(c.start for c in chunks), max(c.stop for c in chunks))
        return [self._pool.submit(self._compare_one, c) for c in chunks]

    def _compare_one(self, c: _Chunk) -> None:
        if seal.digest(self._draft.read(c.start, c.stop)) != c.digest:
            self._damaged.add(c.leaf)
