"""Writing: blocks and scalars into one file, by several threads.

Above the file format. In: what this process writes of a pytree. Out: a file under its name, whole, with its digest.
Each block is brought to the host as soon as the one before is, so that devices are free early; threads hash and write
its chunks meanwhile. The header comes last, since it has the digests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.io import header as headers
from blufunc.io import reading, seal, storage
from blufunc.io.header import Header
from blufunc.io.leaves import Block, Leaves
from blufunc.io.reading_back import ReadBack


@dataclass(frozen=True)
class Written:
    """A file that was written: its name, size, and the digest of its header."""

    name: str
    size: int
    digest: str


def write(
    folder: storage.Folder,
    name: str,
    leaves: Leaves,
    facts: Any = None,
    check: bool = False,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> Written:
    """Write a file, all or nothing.

    Args:
      check: read it back from the disk ahead of giving it its name; locally, while the rest is written.
      metadata: further strings of the header.
    Raises:
      ArgumentError: the facts are not JSON, or the metadata are not strings.
      DataError: it cannot be written, or the disk returns other bytes.
    """
    blocks = {block.stored.key: block for block in leaves.blocks}
    arrays = headers.laid_out([block.stored for block in leaves.blocks])
    blank = headers.encoded(Header(arrays, leaves.scalars, facts, metadata=metadata))
    size = len(blank) + (arrays[-1].stop if arrays else 0)
    path = folder.text(name)
    with storage.writing(path):
        draft = folder.draft(name, size)
        threaded = draft if isinstance(draft, storage.DraftAtOffsets) else None
        back = ReadBack(threaded) if check and threaded is not None else None
        try:
            digests = _write_arrays(threaded, len(blank), arrays, blocks, back)
            complete = tuple(replace(a, digests=tuple(d)) for a, d in zip(arrays, digests, strict=True))
            head = headers.encoded(Header(complete, leaves.scalars, facts, metadata=metadata))
            draft.write(head, 0)
            if threaded is None:
                _write_in_order(draft, len(head), arrays, blocks)
            draft.sync()
            digest = head[headers.LENGTH_BYTES + len(headers.PREFIX) :][: seal.DIGITS].decode()
            if back is not None and threaded is not None:
                damaged = back.finish()
                _check(path, ["its header"] if threaded.read(0, len(head)) != head else damaged)
            elif check:
                found = reading.File(draft.reader(), path)
                _check(path, ["its header"] if found.header.digest != digest else found.damaged())
            draft.commit()
        finally:
            if back is not None:
                back.stop()
            draft.discard()
    return Written(name, size, digest)


def _write_arrays(
    draft: storage.DraftAtOffsets | None,
    offset: int,
    arrays: Sequence[headers.Stored],
    blocks: dict[str, Block],
    back: ReadBack | None,
) -> list[list[str]]:
    """Digests of all chunks.

    Args:
      draft: where chunks are also written, to be compared by ``back``; None keeps them.
    """
    futures: list[list[Future[str]]] = []
    try:
        for a in arrays:
            data = _bytes_of(blocks[a.key].read())
            if draft is not None:
                del blocks[a.key]  # with its last chunk, the host's memory is free
            else:
                blocks[a.key] = blocks[a.key]._replace(read=lambda data=data: data)  # type: ignore[misc]
            assert len(data) == a.nbytes, f"{a.key}: {len(data)} bytes instead of {a.nbytes}"

            def done(i: int, a: headers.Stored = a, data: memoryview = data) -> str:
                part, start = data[i * a.chunk : (i + 1) * a.chunk], offset + a.start + i * a.chunk
                if draft is not None:
                    draft.write(part, start)
                digest = seal.digest(part)
                if back is not None:
                    back.wrote(a.leaf, start, start + len(part), digest)
                return digest

            submit = reading.pool().submit
            futures.append([submit(done, i) for i in range(headers.n_chunks(a.nbytes, a.chunk))])
        return [[f.result() for f in of_array] for of_array in futures]
    except BaseException:
        every = [f for of_array in futures for f in of_array]
        for f in every:
            f.cancel()
        wait(every, return_when=FIRST_EXCEPTION)
        wait(every)  # none writes to a file that is closed
        raise


def _write_in_order(
    draft: storage.Draft, offset: int, arrays: Sequence[headers.Stored], blocks: dict[str, Block]
) -> None:
    for a in arrays:
        data: Any = blocks.pop(a.key).read()
        draft.write(data, offset + a.start)


def _bytes_of(x: np.ndarray) -> memoryview:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def _check(path: str, damaged: list[str]) -> None:
    """DataError if the disk returns parts of a file differently."""
    if damaged:
        raise errors.DataError(
            f"{path} was written, and reads differently: {', '.join(damaged[:3])}",
            where=path,
            why="the disk, its controller or the memory of this machine is faulty",
            fix="choose another disk; earlier checkpoints are as they were",
        )
