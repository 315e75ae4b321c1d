"""The program of test_hosts.py: steps of examples/llm on two hosts.

Usage: ``mpirun -n 4 hosts_program.py step|sum LAUNCHER PORT``. MPI moves the data, and LAUNCHER names whose variables
say where a process is: they are those that it sets on two hosts. ``sum`` is one collective alone.
"""

import json
import os
import sys

import numpy as np

import blufunc as bf
from blufunc.parallel.runtime import bootstrap, consistency_check

SIZE, LOCAL = 4, 2


def variables(launcher, rank, port):
    """Variables of a process that a launcher sets."""
    host, local = divmod(rank, LOCAL)
    at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {
        "torchrun": at | {"RANK": rank, "WORLD_SIZE": SIZE, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": LOCAL},
        "slurm": {
            "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": SIZE, "SLURM_LOCALID": local, "SLURM_NODEID": host,
            "SLURM_STEP_TASKS_PER_NODE": f"{LOCAL}(x2)", "SLURM_STEP_NODELIST": "127.0.0.1,127.0.0.2",
            "SLURM_JOB_ID": 7, "BLUFUNC_PORT": port,
        },
        "mpi": at | {
            "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": SIZE, "OMPI_COMM_WORLD_LOCAL_RANK": local,
            "OMPI_COMM_WORLD_LOCAL_SIZE": LOCAL,
        },
    }[launcher]  # fmt: skip


def main(what, launcher, port):
    """Train, and print what a test compares, from the first rank."""
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    for name in [name for name in os.environ if name.startswith("OMPI_COMM_WORLD_")]:
        del os.environ[name]
    os.environ.update({name: str(value) for name, value in variables(launcher, rank, port).items()})
    bf.distributed.initialize()
    if what == "sum":
        bf.multihost.process_allgather(np.ones(3, np.float32))
        return
    from tests.examples.llm import test_llm_layouts as step

    world, compared = bootstrap.world(), []
    check = consistency_check.check_agreement

    def counted(jaxpr, *peers):
        compared.append(consistency_check.digest(jaxpr))
        check(jaxpr, *peers)

    consistency_check.check_agreement = counted
    losses = step.trained(step.CONFIGS["one layer"], {"data": 2, "fsdp": 2}, {}, evaluates=False)
    # all processes have compared the same programs, and log their collectives for the watchdog
    bf.multihost.assert_equal([int(digest[:7], 16) for digest in compared])
    last = world.recorder.records[-1]
    assert compared and last.sequence > 20 and last.is_over()
    if rank == 0:
        place = world.placement
        print(
            json.dumps({"by": place.by, "hosts": place.size // place.local_size, "losses": losses}),
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
