"""A bound on the number of files that one small kernel goes through."""

import re
import subprocess
import sys

BOUNDS = {"C++": 55, "CUDA": 65}
"""There were 83 and 103."""

PASSED = {
    "C++": {"kernels/backends/cpu/renderer.py", "kernels/backends/cpu/toolchain.py"},
    "CUDA": {"kernels/backends/cuda/render/kernel.py"},
}


def test_few_files_lead_to_a_kernel():
    # in a fresh process: nothing is traced or planned yet
    command = [sys.executable, "-m", "benchmarks.suites.files_entered"]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = dict(re.findall(r"^(\S+): \d+ files\n((?:  \S+\n)+)", report, flags=re.M))
    files = {target: lines.split() for target, lines in found.items()}
    assert files.keys() == BOUNDS.keys()
    for target, bound in BOUNDS.items():
        assert set(files[target]) >= PASSED[target]
        assert len(files[target]) <= bound, files[target]
