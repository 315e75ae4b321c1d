"""Bootstrap: rank discovery and the connection to the other ranks.

Parallel, before stage 3. In: explicit arguments, or the variables of a launcher (``python -m blufunc.parallel.launch``,
torchrun, Open MPI, Slurm). Out: a ``World`` with the rank, a store shared by all ranks, and a watchdog, on which
engines (``mpi``, ``nccl``) are built. One process is one rank. ``job_token.py`` has the secret of the job.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import sys
import threading
import traceback
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from blufunc import errors
from blufunc.core.arrays import backend
from blufunc.core.arrays.process_info import Job
from blufunc.core.ir.axes import static_int
from blufunc.parallel.runtime import job_token
from blufunc.parallel.runtime import store as stores
from blufunc.parallel.runtime.store_server import StoreServer
from blufunc.parallel.runtime.watchdog import ABORTED, Recorder, Watchdog

if TYPE_CHECKING:
    from blufunc.parallel.mesh.mesh import Mesh
    from blufunc.parallel.runtime.engine import Engine


@dataclass(frozen=True)
class Placement:
    """The position of a process in its job.

    Attributes:
      rank, size: the index of the process, and the number of processes.
      local_rank, local_size: the same within its host; ``local_rank`` is the index of its GPU.
      host, port: the address of the store.
      hosted: True if a launcher runs the store; otherwise rank 0 does.
      by: the source of these values, for messages.
    """

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    hosted: bool = False
    by: str = "explicit arguments"


class World:
    """The processes of a job, from the view of one of them.

    Attributes:
      placement, rank, size, local_rank: see ``Placement``.
      store: the store shared by all ranks.
      recorder: the log to which engines write their collectives.
      engines: one per mesh of these processes, made on first use.
      watchdog: ends this process when others have failed.
    """

    def __init__(self, placement: Placement, *, deadline: float):
        self.placement = placement
        self.rank, self.size, self.local_rank = placement.rank, placement.size, placement.local_rank
        self.deadline = deadline
        self.engines: dict[Mesh, Engine] = {}
        self._server: StoreServer | None = None
        host, port = placement.host, placement.port
        secret = job_token.of_job(os.environ, placement.size, port, hosted=placement.hosted)
        if not placement.hosted and self.rank == 0:
            self._server = _serve(secret, host, port)
            host, port = self._server.host, self._server.port
        records = os.environ.get("BLUFUNC_RECORDS")
        self.recorder = Recorder(os.path.join(records, str(self.rank)) if records else None)
        self.store = stores.Store(host, port, secret, deadline=deadline)
        self.store.join(self.rank, f"process {os.getpid()} on {socket.gethostname()}")
        self.watchdog = Watchdog(self.rank, self.store, self.recorder, deadline=deadline)
        try:
            self.barrier("start")
        except BaseException:
            self.close()
            raise

    @property
    def members(self) -> Sequence[int]:
        """All ranks."""
        return range(self.size)

    def barrier(self, name: str = "") -> None:
        """Wait until all ranks have called it.

        Raises:
          CollectiveError: a rank has failed, or does not arrive.
        """
        self.store.barrier(name, self.rank, self.members)

    def gather(self, name: str, value: bytes, members: Sequence[int] | None = None) -> list[bytes]:
        """Gather the values of ``members``, default all ranks, under ``name``."""
        return self.store.gather(name, value, self.rank, self.members if members is None else members)

    def close(self) -> None:
        """Leave the job. If rank 0 hosts the store, it stays until the others have left."""
        self.watchdog.close()
        self.store.close()
        if self._server is not None:
            self._server.close(self.deadline)


def _serve(secret: str, host: str, port: int) -> StoreServer:
    """The store of rank 0, on the interface by which the others know it."""
    if host in ("localhost", "::1") or host.startswith("127."):
        return StoreServer(secret, host, port)
    with contextlib.suppress(OSError):
        addresses = [found[4][0] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        if own := next((a for a in map(str, addresses) if not (a.startswith("127.") or a == "::1")), None):
            with socket.socket(socket.AF_INET6 if ":" in own else socket.AF_INET) as probe:
                probe.bind(
                    (own, 0)
                )  # OSError: the address of a router or a service, which forwards to this host
            return StoreServer(secret, own, port)
    # its own name is a loopback address here, and is another one elsewhere
    sys.stderr.write(f"blufunc: {host} is no interface of this host, so the store listens on all of them.\n")
    return StoreServer(secret, "", port)


_world: World | None = None
_lock = threading.Lock()


def initialize(
    address: str | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    local_rank: int | None = None,
    *,
    deadline: float | None = None,
) -> World:
    """Join the job of this process; later calls return the same ``World``.

    Missing arguments come from the variables of the launcher; without these, the process is a job by itself.

    Args:
      address: ``host:port`` of the job's store, on the host of rank 0.
      world_size: the number of processes.
      rank: the index of this process.
      local_rank: its index on its host.
      deadline: seconds to wait for other ranks, here and in every collective; default ``BLUFUNC_DEADLINE`` or 300.
    Raises:
      ArgumentError, ValueRangeError: inconsistent arguments or variables of a launcher.
      CollectiveError: the others do not arrive within ``deadline``.
    """
    global _world
    with _lock:
        if _world is None:
            placement = find_placement(os.environ, address, world_size, rank, local_rank)
            if deadline is None:
                deadline = _seconds(os.environ, "BLUFUNC_DEADLINE", stores.DEADLINE)
            _world = World(placement, deadline=deadline)
            backend.join(Job(placement.rank, placement.size, placement.local_rank))
            _end_together(_world)
        return _world


def world() -> World | None:
    """The job that this process has joined, or None."""
    return _world


def shutdown() -> None:
    """Leave the job; called automatically at exit."""
    global _world
    with _lock:
        if _world is not None:
            _world.close()
            _world = None
            backend.join(Job())


def _end_together(world: World) -> None:
    """Install a hook: an uncaught exception ends the other ranks too."""
    atexit.register(shutdown)
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        previous(kind, value, trace)
        if _world is world and world.size > 1:
            last = traceback.format_exception_only(kind, value)[0].strip().splitlines()[0]
            world.watchdog.fail(f"rank {world.rank} has failed: {last}")
            sys.stdout.flush()
            sys.stderr.flush()
            # a normal exit would wait for the other ranks in the communication library
            os._exit(ABORTED if world.store.failed else 1)

    sys.excepthook = hook


# -- placement -------------------------------------------------------------------------------------


def find_placement(
    environ: Mapping[str, str],
    address: str | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    local_rank: int | None = None,
) -> Placement:
    """Find the placement, from explicit arguments or a launcher's variables.

    Raises:
      ArgumentError, ValueRangeError: inconsistent values.
    """
    if address is not None or world_size is not None or rank is not None:
        if address is None or world_size is None or rank is None:
            raise errors.ArgumentError(
                "initialize() takes address, world_size and rank together, or none of them.",
                fix="initialize('host0:29500', world_size=4, rank=0)",
            )
        host, port = _address(address)
        rank, size = (
            static_int(rank, "initialize", "rank"),
            static_int(world_size, "initialize", "world_size"),
        )
        local = rank if local_rank is None else static_int(local_rank, "initialize", "local_rank")
        found = Placement(rank, size, local, size, host, port)
    else:
        # Open MPI before Slurm: inside a Slurm job mpirun starts its daemons with srun, not the ranks
        found = (
            _torchrun(environ) or _open_mpi(environ) or _slurm(environ) or Placement(0, 1, by="no launcher")
        )
    if not 0 <= found.rank < found.size:
        raise errors.ValueRangeError(
            f"rank {found.rank} is out of range for {found.size} processes ({found.by}).",
            fix="ranks are 0 to world_size - 1",
        )
    if "BLUFUNC_STORE" in environ and address is None:
        host, port = _address(environ["BLUFUNC_STORE"])
        found = replace(found, host=host, port=port, hosted=True)
    elif address is None and found.local_size >= found.size:
        found = replace(found, host="127.0.0.1")  # all are on this host: its store listens nowhere else
    return found


def restart_count(environ: Mapping[str, str]) -> int:
    """Number of times that the launcher has started the job again."""
    for name in ("BLUFUNC_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        if name in environ:
            return _int(environ, name, "the variables of the launcher")
    return 0


def job_id(environ: Mapping[str, str]) -> str | None:
    """The launcher's id of the job, which restarts do not change."""
    if found := environ.get("BLUFUNC_JOB"):
        return found
    if (found := environ.get("TORCHELASTIC_RUN_ID", "none")) != "none":  # its default, the same for all jobs
        return found
    if "SLURM_JOB_ID" in environ:
        return f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}"
    return None


def _torchrun(environ: Mapping[str, str]) -> Placement | None:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    by = "the variables of torchrun"
    port = _int(environ, "MASTER_PORT", by, 29500)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1  # torchrun itself listens at MASTER_PORT
    local_size = _int(environ, "LOCAL_WORLD_SIZE", by, 1)
    return _placed(environ, by, ("RANK", "WORLD_SIZE", "LOCAL_RANK"), local_size, port)


def _open_mpi(environ: Mapping[str, str]) -> Placement | None:
    """OMPI_COMM_WORLD_RANK, _SIZE, ...; on several hosts MASTER_ADDR."""
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    by = "the variables of Open MPI"
    size = _int(environ, "OMPI_COMM_WORLD_SIZE", by)
    local_size = _int(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", by, size)
    if local_size < size and "MASTER_ADDR" not in environ:
        raise errors.ArgumentError(
            f"{size} processes on several hosts, and no MASTER_ADDR ({by}).",
            fix="mpirun -x MASTER_ADDR=$(hostname) ...: the host of rank 0",
        )
    job = environ.get("PMIX_NAMESPACE", environ.get("OMPI_MCA_ess_base_jobid", ""))
    names = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"
    return _placed(environ, by, names, local_size, _int(environ, "MASTER_PORT", by, _port_of(job)))


def _slurm(environ: Mapping[str, str]) -> Placement | None:
    """SLURM_PROCID, SLURM_STEP_NUM_TASKS, ...: set by srun, not by sbatch."""
    if "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    by = "the variables of Slurm"
    nodes = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", "127.0.0.1"))
    job = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    tasks = re.match(r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))  # "4(x2),3"
    port = _int(environ, "MASTER_PORT", by, _port_of(job))
    names = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"
    return _placed(environ, by, names, int(tasks[0]) if tasks else 1, port, first_host(nodes))


def _placed(
    environ: Mapping[str, str],
    by: str,
    names: Sequence[str],
    local_size: int,
    port: int,
    host: str = "127.0.0.1",
) -> Placement:
    """The placement by the variables ``names`` of rank, size and local rank."""
    rank, size, local_rank = (
        _int(environ, names[0], by),
        _int(environ, names[1], by),
        _int(environ, names[2], by, 0),
    )
    host, port = environ.get("MASTER_ADDR", host), _int(environ, "BLUFUNC_PORT", by, port)
    return Placement(rank, size, local_rank, local_size, host, port, by=by)


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: ``node[07-09],login`` gives ``node07``."""
    match = re.match(r"([^\[,]+)(?:\[([^\]\-,]+)[^\]]*\]([^\[,]*))?", nodes)
    return match[1] + (match[2] or "") + (match[3] or "") if match else nodes


def _port_of(job: str) -> int:
    """A port for a job, the same in all its processes, below the ephemeral range."""
    return 15000 + zlib.crc32(job.encode()) % 15000


def _address(text: Any) -> tuple[str, int]:
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not host or not port.isdigit() or int(port) > 65535:
        raise errors.ValueRangeError(
            f"{text!r:.60} is not the address of a store.", fix="host:port, 'host0:29500'"
        )
    return host.strip("[]"), int(port)


def _int(environ: Mapping[str, str], name: str, by: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise errors.ArgumentError(f"{name} is missing among {by}.", fix=f"export {name}=...")
        return default
    if not text.strip().isdigit():
        raise errors.ValueRangeError(f"{name} is {text!r:.60}, and must be an integer ({by}).")
    return int(text)


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise errors.ValueRangeError(f"{name} is {text!r:.60}, and must be a positive number of seconds.")
    return seconds
