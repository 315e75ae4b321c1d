"""Record every kernel of a few training steps on this process's first device.

    python -m benchmarks.peers.timeline --trace FILE --gpus 2 --layout data

Used by ``gpu_timeline.py``. It is ``gpt2_blufunc.py`` with CUPTI attached through ``torch.profiler``; PyTorch serves no
other purpose. Of several processes, the first one records. The profiler runs once before blufunc starts: it records
kernels of CUDA graphs individually only if it was active when the graphs were created. ``FILE`` has the recorded steps,
each a list of Chrome trace events.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
os.environ.setdefault("TEARDOWN_CUPTI", "0")

import torch
from torch.profiler import ProfilerActivity, profile

import blufunc as bf
from benchmarks.harness import timeline
from benchmarks.peers import clock, gpt2, gpt2_blufunc


def main() -> None:
    """Emit one row and write the trace."""
    parser = gpt2_blufunc.parser()
    parser.add_argument("--trace", required=True, help="the file for the events")
    parser.add_argument("--recorded", type=int, default=5, help="steps to record, behind the timed ones")
    o = parser.parse_args()
    activity = ProfilerActivity.CUDA if o.platform == "cuda" else ProfilerActivity.CPU
    gpt2_blufunc.start_devices(o)
    leads = bf.process_index() == 0
    if leads:
        clock.emit_versions("blufunc", "cupy-cuda13x", "torch")
        recorded(lambda: torch.zeros(1, device=o.platform), activity)
    trainer = gpt2_blufunc.trainer(o)
    trainer.start()
    trainer.load(gpt2.tokens(o))
    for i in range(1 + o.warmup):
        float(trainer.step(i))
    times = []
    for i in range(o.steps):
        begin = time.perf_counter()
        float(trainer.step(1 + o.warmup + i))
        times.append(time.perf_counter() - begin)

    def step(i):
        trainer.step(i)
        trainer.settle()

    trainer.settle()
    if not leads:
        for i in range(o.recorded):
            step(i)
    else:
        steps = [timeline.events_of(recorded(lambda i=i: step(i), activity)) for i in range(o.recorded)]
        Path(o.trace).write_text(json.dumps(steps))
        kernels = [len(s) for s in steps]
        clock.emit(
            step_ms=1e3 * statistics.median(times), kernels=max(kernels, default=0), recorded=len(steps)
        )


def recorded(step: Callable[[], Any], activity: ProfilerActivity) -> Sequence[timeline.Kernel]:
    """Kernels of the first device during a step; ``step`` waits for all of its work."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[activity]) as profiler:
            step()
        profiler.export_chrome_trace(str(path))
        return timeline.kernels_of(json.loads(path.read_text())["traceEvents"])


if __name__ == "__main__":
    main()
