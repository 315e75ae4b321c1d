"""The program of the ranks of ``kills.py``.

Usage: ``spin ENGINE`` or ``train SEED RESTARTS OPTIONS...``. SIGUSR1 makes it raise an exception, SIGUSR2 exit with 3.
"""

import faulthandler
import os
import random
import signal
import sys
import threading
import time


def install():
    faulthandler.register(signal.SIGXCPU)  # says where a rank hangs

    def fail(number, frame):
        # once more if it is dropped: while MPI starts, that happened in 4 of 180 trials
        timer = threading.Timer(1.0, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()
        if number == signal.SIGUSR1:
            raise RuntimeError("injected")
        sys.exit(3)

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, fail)


def spin(engine):
    """Collectives without end."""
    import numpy as np

    from blufunc.parallel.mesh.mesh import AbstractMesh
    from blufunc.parallel.runtime import bootstrap
    from blufunc.parallel.runtime.mpi import MpiEngine

    world = bootstrap.initialize()
    if engine != "mpi":
        while True:
            world.barrier("spin")
    found = MpiEngine(world, AbstractMesh((world.size,), ("data",)))
    while True:
        found.collective("all_reduce", np.ones(1000, np.float32), ("data",))


def train(seed, restarts, *options):
    """``examples/gpt`` with a fault in each attempt that may be followed by another."""
    import blufunc as bf
    from examples.gpt import train
    from tests.examples import gpt_nano
    from tests.parallel.kills import KINDS

    train.EVALUATIONS = 1 << 30  # a checkpoint after each step
    attempt = bf.distributed.restart_count()
    draw = random.Random(f"{seed} {attempt}")
    victim, kind = draw.randrange(int(os.environ["WORLD_SIZE"])), draw.choice(list(KINDS))
    step, seconds = draw.randrange(3), draw.uniform(0.0, 0.05)
    if attempt < int(restarts) and victim == int(os.environ["RANK"]):
        make_step, calls = train.make_step, []

        def fault():
            time.sleep(seconds)
            os.kill(os.getpid(), KINDS[kind])

        def disturbed(*settings):
            inner = make_step(*settings)

            def counted(*args):
                calls.append(None)
                if len(calls) == step + 1:
                    threading.Thread(target=fault, daemon=True).start()
                return inner(*args)

            return counted

        train.make_step = disturbed
    return gpt_nano.cli.main(["--preset", "nano", *options])


if __name__ == "__main__":
    install()
    sys.exit(globals()[sys.argv[1]](*sys.argv[2:]))
