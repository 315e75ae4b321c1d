"""``python -m blufunc.parallel.launch -n 4 script.py``: several processes of one program on this machine.

Parallel, before everything: it starts the processes whose ``bootstrap.initialize`` makes them the ranks of one job, and
keeps their store. What ranks print comes out with their number before each line. When one dies, all end within
seconds, and the launcher says which one it was and what it was doing. For several hosts use torchrun, ``mpirun`` or
``srun``: ``bootstrap`` knows their variables.
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
from typing import Any, BinaryIO, NamedTuple

from blufunc import errors
from blufunc.parallel.runtime.store import StoreServer
from blufunc.parallel.runtime.watchdog import ABORTED, last_record

HEARING = 1.0
"""The seconds that the last words of a rank take at most."""

GRACE = 2.0
"""The seconds that ranks have to end by themselves once one has failed."""

SIGNAL_GRACE = 10.0
"""The seconds that they have when a signal has asked them to end: they may want to save what they have."""


_ONE_HOST = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,tcp"}
"""How Open MPI moves bytes within a host: by memory. To look for networks takes it a second at every start."""


class _Exit(NamedTuple):
    """A rank has ended; negative codes are signals, as in ``subprocess``."""

    rank: int
    code: int


class _Ranks:
    """The processes of a job, started; ``exits`` tells who ends, in that order."""

    def __init__(self) -> None:
        self.exits: queue.Queue[_Exit] = queue.Queue()
        self.readers: list[threading.Thread] = []

    def signal(self, number: int) -> None:
        """Send a signal to all that still run."""
        raise NotImplementedError

    def close(self) -> None:
        """Wait until all that they printed is forwarded; a process that a rank left behind may keep its pipe open."""
        end = time.monotonic() + 2.0
        for thread in self.readers:
            thread.join(max(0.0, end - time.monotonic()))


class _Plain(_Ranks):
    """Ranks as children of the launcher: for NCCL, which needs no launcher of its own."""

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
                start_new_session=True,  # an interrupt at the terminal is forwarded, and comes once
            )
            self.processes.append(process)
            self.readers.append(_forward(process.stdout, sys.stdout, rank))
            self.readers.append(_forward(process.stderr, sys.stderr, rank))
            threading.Thread(target=self._wait, args=(rank, process), daemon=True).start()

    def _wait(self, rank: int, process: subprocess.Popen) -> None:
        self.exits.put(_Exit(rank, process.wait()))

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
"""What mpirun starts for each rank: it tells the launcher how the rank ended before mpirun ends the others.

(``<>`` does not wait for a reader: the launcher itself may be gone. Signals are for the program, after whose end the
shell still has something to say.)
"""


class _Mpi(_Ranks):
    """Ranks as children of Open MPI's launcher, which MPI needs. Named pipes bring what they print and how they end."""

    def __init__(self, n: int, command: Sequence[str], environ: Mapping[str, str], folder: Path):
        super().__init__()
        self.started = False
        self.leaders: dict[int, int] = {}  # of the ranks that run: the processes that lead their groups
        self.held: list[int] = []  # our ends, so that a pipe is not at its end before a rank has opened it
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
                self.exits.put(_Exit(int(rank), 128 - code if code > 128 else code))

    def _wait(self, n: int, states: threading.Thread) -> None:
        assert self.process.stdout is not None
        said = list(self.process.stdout)
        code = self.process.wait()
        for end in self.held:
            os.close(end)
        states.join(GRACE)
        if not self.started:  # then mpirun says why
            sys.stderr.write(b"".join(said).decode(errors="replace"))
        for rank in range(n):  # those that mpirun ended with their shell, and those that it did not start
            self.exits.put(_Exit(rank, -signal.SIGTERM if rank in self.leaders else code or 1))

    def signal(self, number: int) -> None:
        groups = list(self.leaders.values())  # mpirun itself would not leave them the time to end
        if number == signal.SIGKILL or not groups:
            groups.append(self.process.pid)
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)


def mpirun() -> str:
    """Open MPI's launcher: that of this Python's environment, or else of PATH.

    Raises:
      UnsupportedError: there is none, or it is that of another MPI.
    """
    beside = str(Path(sys.executable).parent)
    found = shutil.which("mpirun", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    fix = "pip install 'blufunc[mpi]', or Debian's openmpi-bin; or --engine nccl, where ranks run on GPUs"
    if found is None:
        raise errors.UnsupportedError("ranks on CPUs exchange through MPI, and there is no mpirun.", fix=fix)
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in version and "OpenRTE" not in version:
        raise errors.UnsupportedError(f"{found} is not the launcher of Open MPI.", fix=fix)
    return found


def _mpirun_options() -> list[str]:
    options = ["--oversubscribe", "--bind-to", "none"]
    return [*options, "--allow-run-as-root"] if os.getuid() == 0 else options


_writing = threading.Lock()


def _forward(pipe: Any, to: Any, rank: int) -> threading.Thread:
    """A thread that writes the lines of ``pipe`` to a stream of ours, with the rank before each."""

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
    """Run ``command`` as ``n`` ranks; returns the exit code: 0 if that of all ranks is.

    Args:
      engine: ``mpi`` for ranks on CPUs, ``nccl`` for ranks on GPUs.
      grace: the seconds that ranks have to end when a signal has asked them to.
    """
    server = StoreServer()
    with tempfile.TemporaryDirectory(prefix="blufunc-") as name, _caught_signals() as signals:
        environ = {
            **os.environ,
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),  # for what else the program runs: our store is the next line
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
    """The exit codes of all ranks, in the order in which they ended; the end of one with an error ends the others."""
    exits: dict[int, int] = {}
    end, last = math.inf, signal.SIGTERM
    forwarded = 0
    while len(exits) < n:
        with contextlib.suppress(queue.Empty):
            exit = ranks.exits.get(timeout=0.1)
            exits.setdefault(exit.rank, exit.code)
            if exit.code:  # it may have told the store why, which may not have come to that yet
                server.hear_out(exit.rank, HEARING)
            if exit.code not in (0, ABORTED) and server.failure is None:
                server.fail(f"rank {exit.rank} {_ending(exit.code)}", exit.rank)
        for number in signals[forwarded:]:
            ranks.signal(number)
            forwarded += 1
        if end == math.inf and (server.failure is not None or forwarded):
            end = time.monotonic() + (grace if forwarded else GRACE)
        if time.monotonic() > end:
            ranks.signal(last)
            end, last = time.monotonic() + 1.0, signal.SIGKILL
    for rank, code in exits.items():
        if code:  # heard of by now, unless the store was out of reach: only the first is kept
            server.fail(f"rank {rank} {_ending(code)}", rank)
    return exits


def _verdict(exits: Mapping[int, int], server: StoreServer, folder: Path, signals: Sequence[int]) -> int:
    """Say who ended the job, and where everybody was; returns the exit code of the launcher."""
    if not any(exits.values()):
        return 0
    if signals:
        why, code = f"{signal.Signals(signals[0]).name} has ended the job", 128 + signals[0]
    elif server.died is not None:
        why, code = f"rank {server.died} {_ending(exits[server.died])}", _code(exits[server.died])
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


def _code(code: int) -> int:
    """The exit code of a shell: signals are above 128."""
    return 128 - code if code < 0 else code


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """The signals that ask the job to end, as they come."""
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
    given = parser.parse_args(arguments)
    if given.ranks < 1:
        parser.error(f"-n {given.ranks}: a job has at least one rank")
    program = ["-m", given.program] if given.module else [given.program]
    try:
        return launch(
            given.ranks, [sys.executable, *program, *given.arguments], engine=given.engine, grace=given.grace
        )
    except errors.BlufuncError as e:
        sys.stderr.write(f"launch: {e}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
