"""Analysis of one step from the times of all its kernels, for ``gpu_timeline.py``.

In: kernels of all streams of one device, as recorded by the profiler. Out: time per class of kernels, time when only
collectives ran, idle time and the kernels around it, and the slowdown of matmuls that overlap with a collective. All
times are in microseconds.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

CLASSES = {  # the first one found in a kernel's name; kernels without a match are "fused"
    "NCCL": re.compile("nccl", re.I),
    "copies": re.compile("memcpy|memset", re.I),
    "attention": re.compile("attention|flash|fmha", re.I),
    "GEMM": re.compile("gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|dot_general", re.I),
}
OTHERS = "fused"
OVERLAPPED = 0.5  # share of a matmul's time: from here on it counts as overlapped with collectives
SAME_SIZE = 1.2  # ratio of the longest to the shortest of the kernels that multiply matrices of one size
LISTED = 12  # gaps and matmuls in a summary, the most expensive first

Intervals = list[tuple[float, float]]


@dataclass(frozen=True)
class Kernel:
    """A kernel, or a copy, on the device.

    Attributes:
      name: of the function.
      start: by the profiler's clock.
      us: duration.
      stream: its index.
      grid: number of blocks per dimension.
    """

    name: str
    start: float
    us: float
    stream: int = 0
    grid: tuple[int, ...] = ()

    @property
    def end(self) -> float:
        """End of the kernel."""
        return self.start + self.us

    @property
    def kind(self) -> str:
        """Class of the kernel."""
        return next((kind for kind, found in CLASSES.items() if found.search(self.name)), OTHERS)


def kernels_of(events: Iterable[dict], device: int = 0) -> list[Kernel]:
    """Kernels and copies of a device in a trace of ``torch.profiler``, by time."""
    found = []
    for e in events:
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and e["args"].get("device") == device:
            grid = tuple(e["args"].get("grid", ()))
            found.append(Kernel(e["name"], e["ts"], e["dur"], e["args"].get("stream", 0), grid))
    return sorted(found, key=lambda k: k.start)


def events_of(kernels: Sequence[Kernel]) -> list[dict]:
    """Inverse of ``kernels_of``: events for Perfetto and chrome://tracing.

    Each stream is a row.
    """
    begin = min((k.start for k in kernels), default=0.0)
    return [
        {
            "ph": "X", "cat": "kernel", "name": k.name, "ts": round(k.start - begin, 3), "dur": k.us,
            "pid": 0, "tid": k.stream, "args": {"device": 0, "stream": k.stream, "grid": list(k.grid), "class": k.kind},
        }
        for k in kernels
    ]  # fmt: skip


def summary(kernels: Sequence[Kernel], alone: Sequence[Kernel] = ()) -> dict:
    """Figures of a step; ``alone``: the kernels of the step on one GPU, as reference."""
    if not kernels:
        raise ValueError("no kernels were recorded: the profiler did not see the device")
    kernels = sorted(kernels, key=lambda k: k.start)
    exchanges = union((k.start, k.end) for k in kernels if k.kind == "NCCL")
    work = union((k.start, k.end) for k in kernels if k.kind != "NCCL")
    busy = union((k.start, k.end) for k in kernels)
    step = busy[-1][1] - busy[0][0]
    by_class = {}
    for kind in (*CLASSES, OTHERS):
        times = [k.us for k in kernels if k.kind == kind]
        if times:
            by_class[kind] = {"kernels": len(times), "us": sum(times)}
    return {
        "step_us": step,
        "classes": by_class,
        "only_nccl_us": length(busy) - length(work),
        "nccl_beside_us": length(exchanges) - (length(busy) - length(work)),
        "idle_us": step - length(busy),
        "gaps": gaps(kernels),
        "products": products(kernels, exchanges, alone),
    }


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Merge intervals into disjoint ones, by time."""
    found: Intervals = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length(intervals: Intervals) -> float:
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def covered(start: float, end: float, intervals: Intervals) -> float:
    """Part of an interval covered by sorted, disjoint intervals."""
    first = bisect.bisect_right(intervals, (start, start)) - 1
    total = 0.0
    for a, b in intervals[max(0, first) :]:
        if a >= end:
            break
        total += max(0.0, min(b, end) - max(a, start))
    return total


def gaps(kernels: Sequence[Kernel]) -> list[dict]:
    """Idle gaps by the names of the kernels around them, the longest total first.

    The preceding kernel is the one of all streams that ended last.
    """
    found: dict[tuple[str, str], list[float]] = {}
    last = kernels[0]
    for k in kernels[1:]:
        if k.start > last.end:
            found.setdefault((last.name, k.name), []).append(k.start - last.end)
        last = max(last, k, key=lambda k: k.end)
    rows = [
        {"before": before, "after": after, "times": len(us), "us": sum(us)}
        for (before, after), us in found.items()
    ]
    return sorted(rows, key=lambda r: -r["us"])[:LISTED]


def products(kernels: Sequence[Kernel], exchanges: Intervals, alone: Sequence[Kernel] = ()) -> dict:
    """Slowdown of matmuls overlapped with collectives.

    The reference is the same matmuls on one GPU. Kernels of one name and grid may multiply matrices of different
    sizes. Kernels at the same position are the same if both runs have the same order; otherwise, only groups with
    similar durations count. Without a run on one GPU, the reference is this run's kernels of the same name and grid
    without an overlapping collective. In the result, "us" is the time of overlapped kernels, "alone_us" their
    expected time; "kernels" lists the worst.
    """
    free = {
        k: covered(k.start, k.end, exchanges) / k.us if k.us else 0.0 for k in kernels if k.kind == "GEMM"
    }
    usual = _paired(free, alone) if alone else _means(free)
    overlapped: dict[tuple, list[Kernel]] = {}
    for k, share in free.items():
        if share >= OVERLAPPED and k in usual:
            overlapped.setdefault(_same(k), []).append(k)
    rows = [
        {
            "name": name,
            "grid": list(grid),
            "times": len(found),
            "us": sum(k.us for k in found),
            "alone_us": sum(usual[k] for k in found),
        }
        for (name, grid), found in overlapped.items()
    ]
    unknown = sum(share >= OVERLAPPED and k not in usual for k, share in free.items())
    rows.sort(key=lambda r: r["alone_us"] - r["us"])
    total = {name: sum(r[name] for r in rows) for name in ("times", "us", "alone_us")}
    return total | {"unknown": unknown, "kernels": rows[:LISTED]}


def _same(k: Kernel) -> tuple:
    return (k.name, k.grid)


def _groups(kernels: Iterable[Kernel]) -> dict[tuple, list[Kernel]]:
    """Kernels by name and grid, by time."""
    found: dict[tuple, list[Kernel]] = {}
    for k in sorted(kernels, key=lambda k: k.start):
        found.setdefault(_same(k), []).append(k)
    return found


def _paired(kernels: Iterable[Kernel], alone: Iterable[Kernel]) -> dict[Kernel, float]:
    """Reference times from another run: by position if the order matches.

    Otherwise the mean over one name and grid, if those kernels take similar times.
    """
    here, others = (
        [k for k in sorted(ks, key=lambda k: k.start) if k.kind == "GEMM"] for ks in (kernels, alone)
    )
    if [_same(k) for k in here] == [_same(k) for k in others]:
        return {k: other.us for k, other in zip(here, others, strict=True)}
    groups = {key: [k.us for k in found] for key, found in _groups(others).items()}
    similar = {key: float(np.mean(us)) for key, us in groups.items() if max(us) <= SAME_SIZE * min(us)}
    return {k: similar[_same(k)] for k in here if _same(k) in similar}


def _means(free: dict[Kernel, float]) -> dict[Kernel, float]:
    """Mean time of kernels of the same name and grid that overlap with nothing."""
    found = {}
    for here in _groups(free).values():
        times = [k.us for k in here if not free[k]]
        found.update(dict.fromkeys(here, float(np.mean(times))) if times else {})
    return found


def middle(steps: Sequence[Sequence[Kernel]]) -> list[Kernel]:
    """The recorded step of median length."""
    span = lambda kernels: max(k.end for k in kernels) - min(k.start for k in kernels)
    found = sorted((list(kernels) for kernels in steps if kernels), key=span)
    return found[len(found) // 2] if found else []


def report(found: dict) -> str:
    """Format a summary for the terminal."""
    step = found["step_us"]
    share = lambda us: f"{us / 1e3:9.3f} ms {100 * us / step:5.1f}%"
    lines = [f"step {share(step)}"]
    lines += [
        f"  {kind:<12}{share(of['us'])}  {of['kernels']} kernels" for kind, of in found["classes"].items()
    ]
    lines += [
        f"  only NCCL   {share(found['only_nccl_us'])}",
        f"  overlapped  {share(found['nccl_beside_us'])}",
    ]
    lines += [f"  idle        {share(found['idle_us'])}"]
    lines += [
        f"    {g['us']:8.1f} us in {g['times']:3d} gaps between {g['before'][:48]} and {g['after'][:48]}"
        for g in found["gaps"]
    ]
    slower = found["products"]
    if slower["times"]:
        lines.append(
            f"  matmuls overlapped with NCCL: {slower['times']}, {slower['us'] / 1e3:.3f} ms for "
            f"{slower['alone_us'] / 1e3:.3f} alone ({slower['us'] / slower['alone_us']:.2f}x)"
        )
        lines += [
            f"    {r['us'] / r['alone_us']:5.2f}x {r['times']:3d} times {r['us'] / r['times']:8.1f} us, "
            f"{r['name'][:60]} {'x'.join(map(str, r['grid']))}"
            for r in slower["kernels"]
        ]
    if slower["unknown"]:
        lines.append(f"  and {slower['unknown']} without a counterpart on one GPU")
    return "\n".join(lines)
