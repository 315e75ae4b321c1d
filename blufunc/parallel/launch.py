"""``python -m blufunc.parallel.launch``: run a program as several processes.

Parallel, before all stages. In: a command line. Out: processes whose ``bootstrap.initialize`` makes them the ranks of
one job. The launcher hosts their store and prefixes each line of their output with the rank. When one process dies, all
end within seconds, and the launcher reports which one it was and what each was doing; with ``--restarts`` it starts the
job again. For several hosts use torchrun, ``mpirun`` or ``srun``: ``bootstrap`` reads their variables.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import queue
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blufunc import errors
from blufunc.parallel.runtime import job_token
from blufunc.parallel.runtime.ranks import GRACE, ONE_HOST, Mpi, Plain, Ranks
from blufunc.parallel.runtime.store_server import StoreServer
from blufunc.parallel.runtime.watchdog import ABORTED, STOPPED, last_record

HEARING = 1.0
"""Seconds to wait for the last message of a rank that has ended."""

SIGNAL_GRACE = 10.0
"""Seconds that ranks have to end after a signal, for example to save a checkpoint."""


@dataclass(frozen=True)
class _Attempt:
    """The end of a job that was started once.

    Attributes:
      code: the exit code.
      why: what ended it.
      lost: the ranks that did not end because of others.
    """

    n: int
    code: int
    why: str
    lost: frozenset[int] = frozenset()


def launch(
    n: int,
    command: Sequence[str],
    *,
    engine: str = "mpi",
    grace: float = SIGNAL_GRACE,
    restarts: int = 0,
    min_ranks: int | None = None,
) -> int:
    """Run ``command`` as ``n`` ranks; returns 0 if all ranks exit with 0.

    Args:
      engine: ``mpi`` for ranks on CPUs, ``nccl`` for ranks on GPUs.
      grace: seconds that ranks have to end after a signal.
      restarts: maximum number of times to start the job again after a failure.
      min_ranks: start again without the ranks that failed, with the largest number of ranks that divides ``n`` and is
        at least this one; default with ``n`` ranks.
    """
    local_ranks = list(range(n))
    attempts: list[_Attempt] = []
    job = {"BLUFUNC_JOB": secrets.token_hex(8)}
    with _caught_signals() as signals:
        while True:
            job["BLUFUNC_RESTARTS"] = str(len(attempts))
            attempts.append(_attempt(local_ranks, command, job, engine, grace, signals))
            last = attempts[-1]
            if last.code in (0, STOPPED) or signals or len(attempts) > restarts:
                break
            if min_ranks is not None:
                local_ranks = _left(local_ranks, last.lost, n, min_ranks)
                if not local_ranks:
                    _say(f"fewer than {min_ranks} ranks are left, so the job is not started again")
                    break
            _say(f"starting again with {len(local_ranks)} ranks, restart {len(attempts)} of {restarts}")
    if len(attempts) > 1:
        _say(f"{len(attempts)} attempts:")
        for i, attempt in enumerate(attempts, 1):
            _say(f"  {i}, with {attempt.n} ranks: {attempt.why}")
    return attempts[-1].code


def _say(text: str) -> None:
    sys.stderr.write(f"launch: {text}\n")
    sys.stderr.flush()


def _left(local_ranks: Sequence[int], lost: frozenset[int], n: int, least: int) -> list[int]:
    """The local ranks of the next attempt.

    Their number divides ``n``, so that batches and axes which n ranks share can be shared.
    """
    left = [local for rank, local in enumerate(local_ranks) if rank not in lost]
    return left[: max((k for k in range(least, len(left) + 1) if n % k == 0), default=0)]


def _attempt(
    local_ranks: Sequence[int],
    command: Sequence[str],
    job: Mapping[str, str],
    engine: str,
    grace: float,
    signals: list[int],
) -> _Attempt:
    """Run the job once."""
    n, secret = len(local_ranks), job_token.made()
    with (
        contextlib.closing(StoreServer(secret)) as server,
        tempfile.TemporaryDirectory(prefix="blufunc-", ignore_cleanup_errors=True) as name,
    ):
        environ = {
            **os.environ,
            **job,
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),  # for other libraries, not our store
            "BLUFUNC_STORE": f"127.0.0.1:{server.port}",
            job_token.VARIABLE: secret,
            "BLUFUNC_RECORDS": name,
            "PYTHONUNBUFFERED": "1",
        }
        for variable, value in ONE_HOST.items():
            environ.setdefault(variable, value)
        environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // n)))
        folder = Path(name)
        ranks = (
            Mpi(n, command, environ, folder)
            if engine == "mpi"
            else Plain(local_ranks, command, environ, folder)
        )
        exits = _await(ranks, n, server, signals, grace)
        ranks.close()
        return _verdict(exits, server, folder, signals)


def _await(ranks: Ranks, n: int, server: StoreServer, signals: list[int], grace: float) -> dict[int, int]:
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
        # already reported, unless the store was unreachable; only the first failure counts
        if code not in (0, STOPPED):
            server.fail(f"rank {rank} {_ending(code)}", rank)
    return exits


def _verdict(exits: Mapping[int, int], server: StoreServer, folder: Path, signals: Sequence[int]) -> _Attempt:
    """Find who ended the job; if it failed, print that and where each rank was."""
    n = len(exits)
    if set(exits.values()) <= {0, STOPPED}:
        code = max(exits.values())
        return _Attempt(n, code, f"all ranks have ended with exit code {code}")
    failed = [rank for rank, code in exits.items() if code not in (0, STOPPED, ABORTED)]
    if signals:
        why, code = f"{signal.Signals(signals[0]).name} has ended the job", 128 + signals[0]
    elif server.died is not None:
        died = exits[server.died]
        why = f"rank {server.died} {_ending(died)}"
        code = 128 - died if died < 0 else died  # as a shell reports it
    else:
        why = str(server.failure)
        code = next((exits[rank] for rank in failed if exits[rank] > 0), 1)
    why = why.rstrip(".")
    states = {rank: last_record(str(folder / str(rank))) for rank in sorted(exits)}
    lines = [f"launch: {why}; all {n} ranks have ended. Where each of them was:"]
    least = min(number for number, _ in states.values())
    some_ahead = any(number > least for number, _ in states.values())
    for rank, (number, text) in states.items():
        lines.append(f"  rank {rank}: {text}" + ("  <- behind the others" * (some_ahead and number == least)))
    sys.stderr.write("\n".join(lines) + "\n")
    # SIGTERM is how mpirun and this launcher end the others
    lost = {r for r in failed if exits[r] < 0 and exits[r] != -signal.SIGTERM}
    lost |= {server.lost} if server.lost is not None else set(failed[:1])
    return _Attempt(n, code or 1, why, frozenset(lost or {n - 1}))


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
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start the job again after a failure, at most N times: the program goes on from its last checkpoint",
    )
    parser.add_argument(
        "--min-ranks",
        type=int,
        metavar="M",
        help="start again without the ranks that failed, as long as M are left: with the largest number of ranks that "
        "divides -n (default: with as many ranks as before)",
    )
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module, not a file")
    parser.add_argument("program", help="a Python file, or the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the program is given")
    args = parser.parse_args(arguments)
    if args.ranks < 1:
        parser.error(f"-n {args.ranks}: a job has at least one rank")
    if args.restarts < 0:
        parser.error(f"--restarts {args.restarts}: 0 or more")
    if args.min_ranks is not None and not 1 <= args.min_ranks <= args.ranks:
        parser.error(f"--min-ranks {args.min_ranks}: from 1 to the {args.ranks} of -n")
    program = ["-m", args.program] if args.module else [args.program]
    try:
        return launch(
            args.ranks,
            [sys.executable, *program, *args.arguments],
            engine=args.engine,
            grace=args.grace,
            restarts=args.restarts,
            min_ranks=args.min_ranks,
        )
    except errors.BlufuncError as e:
        sys.stderr.write(f"launch: {e}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
