"""Several GPUs of one process as the ranks of a mesh, one thread each.

Parallel, used at stage 8. In: threads of ``simulated.run_ranks``. Out: an ``NcclEngine`` per thread, which enqueues
collectives on the stream of its GPU. The host engine only carries NCCL's identifiers while connections are made. A
rank that fails aborts the connections, so that no other rank hangs; the next program makes new ones.
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
    """Context manager: enqueue collectives of this thread on its GPU's stream."""
    host = engines.current()
    engine = _engines.get((mesh, rank))
    if engine is None:
        device = mesh.device_list[rank].index
        engine = _engines[mesh, rank] = NcclEngine(_Threads(rank, mesh.size), mesh.abstract, device)
    engine.world.host = host  # type: ignore[attr-defined]
    try:
        with engines.use(engine):
            yield engine
    except BaseException:
        for other in range(mesh.size):
            lost = _engines.pop((mesh, other), None)
            if lost is not None:
                lost.abort()
        raise


class _Threads:
    """The ranks from the view of one of them: an ``engine.Peers``.

    Attributes:
      host: the engine through which threads communicate in this run.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.members = rank, range(size)
        self.recorder = Recorder()
        # threads need no watchdog: they end with their process
        self.watchdog = types.SimpleNamespace(checks=[], aborts=[])
        self.host: Any = None

    def gather(self, name: str, value: bytes, members: Sequence[int]) -> list[bytes]:
        """Gather the values of ``members`` under ``name``: up to 254 bytes each."""
        message = np.zeros(255, np.uint8)
        message[0] = len(value)
        message[1 : 1 + len(value)] = np.frombuffer(value, np.uint8)
        rows = self.host.gather(name, message, members)
        return [row[1 : 1 + row[0]].tobytes() for row in rows]
