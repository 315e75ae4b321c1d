"""Free memory of the host: of the machine, and of control groups of both versions."""

import pytest

from blufunc.kernels.backends.cuda.driver import host_memory, memory

GIB = 1 << 30
MEMINFO = f"MemTotal: {16 * GIB >> 10} kB\nMemFree: 1 kB\nMemAvailable: {8 * GIB >> 10} kB\n"


def group(limit, used, cached, version=2):
    names = ("memory.max", "memory.current", "") if version == 2 else (
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
    )  # fmt: skip
    return {names[0]: limit, names[1]: used, "memory.stat": f"anon 5\n{names[2]}inactive_file {cached}\n"}


CASES = {
    "no groups": ({}, "", (8 * GIB, 16 * GIB)),
    "no limit": ({"a": group("max", GIB, 0)}, "0::/a\n", (8 * GIB, 16 * GIB)),
    "a limit": ({"a": group(4 * GIB, 3 * GIB, GIB)}, "0::/a\n", (2 * GIB, 4 * GIB)),
    "a limit further up": (
        {"a/b": group("max", GIB, 0), "a": group(3 * GIB, GIB, 0)}, "0::/a/b\n", (2 * GIB, 3 * GIB),
    ),
    "the least of both": (
        {"a/b": group(2 * GIB, 0, 0), "a": group(9 * GIB, 8 * GIB, 0)}, "0::/a/b\n", (GIB, 2 * GIB),
    ),
    "a limit above the machine": ({"a": group(99 * GIB, GIB, 0)}, "0::/a\n", (8 * GIB, 16 * GIB)),
    "more used than allowed": ({"a": group(GIB, 2 * GIB, 0)}, "0::/a\n", (0, GIB)),
    "another namespace": ({"": group(4 * GIB, GIB, 0)}, "0::/elsewhere\n", (3 * GIB, 4 * GIB)),
    "version 1": (
        {"memory/a": group(4 * GIB, GIB, 0, 1)}, "4:cpu:/a\n3:cpu,memory:/a\n0::/\n", (3 * GIB, 4 * GIB),
    ),
    "version 1 without a limit": (
        {"memory/a": group(2**63 - 4096, GIB, 0, 1)}, "3:memory:/a\n", (8 * GIB, 16 * GIB),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_free_and_total_bytes(case, tmp_path):
    groups, own, want = CASES[case]
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": own}
    files |= {f"sys/fs/cgroup/{g}/{name}": text for g, many in groups.items() for name, text in many.items()}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}")
    assert host_memory.room(tmp_path) == want


def test_a_system_without_these_files(tmp_path):
    free, total = host_memory.room(tmp_path)
    assert 0 < free <= total


def test_no_more_is_page_locked_than_is_free(monkeypatch):
    """Refused before a driver is asked."""
    monkeypatch.setattr(host_memory, "room", lambda: (10_000, 20_000))
    source = memory.PinnedSource(0)
    assert source.room() == (10_000, 20_000)
    with pytest.raises(MemoryError):
        source.malloc([10_001])
    assert source.held_bytes() == 0
