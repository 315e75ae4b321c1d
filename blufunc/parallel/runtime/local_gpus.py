"""Several GPUs of one process as the ranks of a mesh: a thread each, with the engine that puts exchanges on its stream.

Parallel, used at stage 8. The threads are those of ``thread_engine.run_ranks``, whose engine they use to tell each
other what NCCL must know before it can connect them; all else goes from GPU to GPU. A rank that fails takes the
connections down, so that no other waits for it; the next program makes new ones.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from blufunc.parallel.mesh.mesh import Mesh
from blufunc.parallel.runtime import engine as engines
from blufunc.parallel.runtime.nccl import NcclEngine
from blufunc.parallel.runtime.watchdog import Recorder

_engines: dict[tuple[Mesh, int], NcclEngine] = {}


@contextlib.contextmanager
def engine_in_use(mesh: Mesh, rank: int) -> Iterator[engines.Engine]:
    """Context manager: collectives of this thread, which is that of ``rank``, are put on the stream of its GPU."""
    host = engines.current()
    made = _engines.get((mesh, rank))
    if made is None:
        device = mesh.device_list[rank].index
        made = _engines[mesh, rank] = NcclEngine(_Threads(rank, mesh.size), mesh.abstract, device)
    made.world.host = host  # type: ignore[attr-defined]
    try:
        with engines.use(made):
            yield made
    except BaseException:
        for other in range(mesh.size):
            lost = _engines.pop((mesh, other), None)
            if lost is not None:
                lost.abort()
        raise


class _Threads:
    """The ranks, as one of them sees them: what ``nccl_engine.Peers`` says.

    Attributes:
      host: the engine through which the threads meet in this run.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.members = rank, range(size)
        self.recorder = Recorder()
        # nobody watches over threads: they end with their process
        self.watchdog = types.SimpleNamespace(checks=[], aborts=[])
        self.host: Any = None

    def gather(self, name: str, value: bytes, members: Sequence[int]) -> list[bytes]:
        """The values that all of ``members`` give under ``name``: up to 254 bytes each."""
        given = np.zeros(255, np.uint8)
        given[0] = len(value)
        given[1 : 1 + len(value)] = np.frombuffer(value, np.uint8)
        rows = self.host.gather(name, given, members)
        return [row[1 : 1 + row[0]].tobytes() for row in rows]
