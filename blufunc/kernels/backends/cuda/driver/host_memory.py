"""Memory of the host that may be page-locked: free and total bytes.

Kernels, stage 8, below ``memory``. In: what Linux says of the machine and of the control groups of this process. Out:
two counts. Page-locked memory cannot be swapped, and the kernel ends processes when none is left: a request that
exceeds what is free has to be refused before it is made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_NONE = 1 << 60
"""Limits from here on are none: version 1 of control groups has 2^63 less a page."""


def room(root: Path = Path("/")) -> tuple[int, int]:
    """Free and total bytes: of the machine, or of the control group with the least.

    Args:
      root: where ``proc`` and ``sys`` are.
    """
    rooms = [_machine(root), *_groups(root)]
    return max(0, min(free for free, _ in rooms)), min(total for _, total in rooms)


def _machine(root: Path) -> tuple[int, int]:
    """Counts of the machine; memory of caches that can be reclaimed is free."""
    try:
        fields = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
        free, total = (1024 * int(fields[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    except (OSError, ValueError, KeyError):
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
    return free, total


_FILES = {  # limit, use, and the part of it that the kernel would take back, by version of control groups
    "1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "2": ("memory.max", "memory.current", "inactive_file"),
}


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Counts of each control group with a limit, from that of this process up."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        version, mount = ("2", "sys/fs/cgroup") if number == "0" else ("1", "sys/fs/cgroup/memory")
        group = Path(path.strip("/"))
        for place in (group, *group.parents):
            try:
                yield _group(root / mount / place, *_FILES[version])
            except (OSError, ValueError, KeyError):  # outside of the namespace, or "max"
                continue


def _group(place: Path, limit: str, use: str, reclaimable: str) -> tuple[int, int]:
    total, used = int((place / limit).read_text()), int((place / use).read_text())
    if total >= _NONE:
        raise ValueError("no limit")
    counts = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
    return total - used + int(counts[reclaimable]), total
