"""The guard of a command, whose descendants end with it and with the launcher.

Parallel, before all stages; a script of its own, ``python -I -S guard.py FOLDER COMMAND...``, which imports only what
starts in 20 ms. In: a command, and a pipe from the launcher as standard input. Out: the end of the command, as its
own: its exit code, or its signal. If the command fails, if the launcher asks for it, or if the pipe closes because the
launcher is gone, all that the command has started is killed, also processes in sessions of their own whose parents
have ended: Linux makes them children of this process, a subreaper. Elsewhere they end if they are in its process group.
"""

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import sys
import threading
import time

KILL = b"k"
"""Message of the launcher: kill everything."""

_PR_SET_CHILD_SUBREAPER = 36
_LASTING = 5.0  # seconds after which what cannot be killed is left
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: list[str]) -> int:
    """Run a command; returns its exit code.

    Args:
      arguments: the folder of the job, which is removed if the launcher is gone; and the command.
    """
    folder, *command = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in _FORWARDED:  # they arrive at the whole process group, and are for the command
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, not inherited
    try:
        child = os.posix_spawnp(
            command[0],
            command,
            os.environ,
            file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores
        )
    except OSError as error:
        sys.stderr.write(f"launch: cannot run {command[0]}: {error.strerror}\n")
        return 127
    is_orphan = threading.Event()
    threading.Thread(target=_listen, args=(is_orphan,), daemon=True).start()
    code = _wait(child)
    if code:
        _end_descendants()
    if is_orphan.is_set():
        shutil.rmtree(folder, ignore_errors=True)
    if code < 0:  # end by the same signal, without a second core file
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _listen(is_orphan: threading.Event) -> None:
    """Kill everything when the launcher says so, or is gone."""
    if os.read(0, 1) != KILL:
        is_orphan.set()
    _end_descendants()


def _wait(child: int) -> int:
    """Wait for the command, and for processes whose parents have ended; the exit code."""
    while True:
        process, status = os.waitpid(-1, 0)
        if process == child:
            return os.waitstatus_to_exitcode(status)


def _end_descendants() -> None:
    end = time.monotonic() + _LASTING
    while (running := _descendants()) and time.monotonic() < end:
        for process in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def _descendants() -> list[int]:
    """The running descendants of this process; without /proc, none are known."""
    children: dict[int, list[tuple[int, bytes]]] = {}
    names = os.listdir("/proc") if os.path.isdir("/proc") else []
    for name in filter(str.isdigit, names):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]  # a name may hold spaces
            children.setdefault(int(parent), []).append((int(name), state))
    found, rest = [], [os.getpid()]
    while rest:
        for process, state in children.get(rest.pop(), ()):
            rest.append(process)
            if state not in (b"Z", b"X"):
                found.append(process)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
