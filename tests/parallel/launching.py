"""Programs under the launcher: what the tests of processes share."""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blufunc import errors
from blufunc.parallel.runtime import ranks

ROOT = Path(__file__).parents[2]


def why_no_mpi():
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'blufunc[mpi]'"
    try:
        ranks.mpirun()
    except errors.UnsupportedError as e:
        return e.what
    return None


needs_mpi = pytest.mark.skipif(why_no_mpi() is not None, reason=str(why_no_mpi()))


def start(*arguments, **variables):
    """The launcher with these arguments."""
    others = (
        "RANK",
        "WORLD_SIZE",
        "BLUFUNC_STORE",
        "BLUFUNC_TOKEN",
        "BLUFUNC_RECORDS",
        "BLUFUNC_CPU_DEVICES",
    )
    environ = {k: v for k, v in os.environ.items() if k not in others}
    environ |= {"PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen(
        [sys.executable, "-m", "blufunc.parallel.launch", *map(str, arguments)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments, **variables):
    """Exit code, output, errors, and seconds from the start, or from rank 1's ``at``."""
    began = time.time()
    process = start(*arguments, **variables)
    out, err = process.communicate(timeout=200)
    ended = time.time()
    said = [line.split()[2] for line in out.splitlines() if line.startswith("[1] at ")]
    return process.returncode, out, err, ended - float(said[0] if said else began)
