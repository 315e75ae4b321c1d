"""Time to import blufunc and to a first result in a new process, against JAX.

Times are CPU seconds of the whole process, user and system, including Python's own start. An uncounted run writes the
bytecode of both.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from benchmarks.harness.timing import report, row

REPEATS = 9

OURS = "import blufunc as lib, blufunc.numpy as np"
THEIRS = "import jax as lib, jax.numpy as np"
FIRST = "f = lambda x: np.sum(np.sin(x) * 2.0)"

CASES = [
    ("import", ""),
    ("import, first array", "np.ones(8).block_until_ready()"),
    ("import, first jit call", f"{FIRST}; lib.jit(f)(np.ones(8)).block_until_ready()"),
    ("import, first jit of grad", f"{FIRST}; lib.jit(lib.grad(f))(np.ones(8)).block_until_ready()"),
]


def cpu_seconds(program: str) -> float:
    """CPU time of a process that runs a program."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"the program failed: {program}")
    return used.ru_utime + used.ru_stime


def medians(ours: str, theirs: str) -> tuple[float, float]:
    """The medians of both programs, run in turns."""
    pairs = [(cpu_seconds(ours), cpu_seconds(theirs)) for _ in range(REPEATS + 1)][1:]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def main() -> None:
    """Print the table."""
    rows = [row(what, *medians(f"{OURS}\n{code}", f"{THEIRS}\n{code}"), "s") for what, code in CASES]
    report("import_time", rows)


if __name__ == "__main__":
    main()
