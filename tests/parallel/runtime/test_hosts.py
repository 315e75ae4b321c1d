"""Several hosts, rehearsed on one: variables of launchers, simulated network."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from blufunc.parallel.runtime import ranks
from blufunc.parallel.runtime.watchdog import ABORTED
from tests.examples.llm import test_llm_layouts as step
from tests.parallel.launching import ROOT, needs_mpi

pytestmark = [pytest.mark.slow, needs_mpi]
PROGRAM = Path(__file__).parent / "hosts_program.py"


def run(what, launcher, network, **variables):
    """The program under ``mpirun``, without blufunc's own launcher."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "BLUFUNC_STORE")}
    environ |= {
        **ranks.ONE_HOST,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "BLUFUNC_HOST_COMPILER": "never",
        "BLUFUNC_SIMULATED_NETWORK": network,
        "BLUFUNC_TOKEN": "of-this-test",
        **variables,
    }
    command = [
        ranks.mpirun(),
        *ranks._mpirun_options(),
        "-n",
        "4",
        sys.executable,
        str(PROGRAM),
        what,
        launcher,
        str(port),
    ]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize("launcher", ["torchrun", "slurm", "mpi"])
def test_a_step_on_two_hosts_of_two_processes(launcher, monkeypatch):
    done = run("step", launcher, "2hosts,200us,1GB/s")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    words = {"torchrun": "torchrun", "slurm": "Slurm", "mpi": "Open MPI"}
    assert found["hosts"] == 2 and found["by"] == f"the variables of {words[launcher]}"
    monkeypatch.setattr(step.flags, "host_compiler", "never")
    expected = step.alone("one layer")
    assert found["losses"] == pytest.approx(expected, rel=3e-6)


def test_a_network_that_is_slower_than_the_deadline_ends_the_job():
    done = run("sum", "torchrun", "2hosts,30s,1GB/s", BLUFUNC_DEADLINE="3")
    assert done.returncode == ABORTED
    assert re.search(r"has waited 3 s in #\d all_gather over processes, 12 bytes", done.stderr)
