"""NVRTC: compile CUDA C++ to cubins.

Kernels, end of stage 6. In: the source of a kernel. Out: a cubin for one architecture, from the disk cache if compiled
before. It needs neither a GPU nor a driver, so kernels compile anywhere. The library is located in wheels, the toolkit
or the system at the first compile.

Fixed options: C++17, functions on the device by default, denormals kept, IEEE division and roots, multiply-adds
contracted (``--fmad=true``). CUDA's headers, such as ``cuda_bf16.h``, are on the include path. Sources that use neither
headers nor CUDA's runtime compile without the declarations of the latter (``--minimal``), which take NVRTC as long as a
small kernel does.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blufunc import errors
from blufunc.config import config
from blufunc.core.arrays import recording
from blufunc.kernels.cache.disk import DiskCache, key_of

_OPTIONS = ("--std=c++17", "-default-device", "--fmad=true", "--ptxas-options=-v")
_MINIMAL, _MINIMAL_SINCE = "--minimal", (12, 4)
# headers, the runtime's types and functions, launches, textures and surfaces
_NOT_MINIMAL = re.compile(r"#\s*include\b|\bcuda[A-Z]|<<<|\btex|\bsurf")
_INSTALL = "pip install blufunc[cuda13] (or cuda12, to match the driver)"

_INCLUDE = re.compile(r"^\s*#\s*include\b", re.MULTILINE)
_COMMENT = re.compile(r"^[ \t]*//.*\n", re.MULTILINE)
# raw strings, block comments, line continuations, line numbers
_NOT_LINES = re.compile(r'R"|/\*|\\\r?\n|\?\?/|_LINE|source_location|(?<!static_)assert')
_USER_LINE = re.compile(r"//\s*at (.+:\d+.*)")
_ERROR = re.compile(r"\((?P<line>\d+)\): (?:catastrophic )?error: (?P<what>.*)")
_PTXAS_ERROR = re.compile(r"ptxas .*(?:error|fatal)\s*: (?P<what>.*)")
_CONTEXT = 2  # lines of source shown on each side of an error


@dataclass(frozen=True)
class Binary:
    """Result of a compilation.

    Attributes:
      cubin: the binary.
      log: output of NVRTC and ptxas.
    """

    cubin: bytes
    log: str


# -- the library -----------------------------------------------------------------------------------


_loading = threading.Lock()


@functools.cache
def _library() -> ctypes.CDLL:
    """NVRTC with typed functions; raises the errors that ``available`` describes."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    with _loading:  # also loads NVRTC's own dependency: both must be visible to other threads together
        path = load_nvidia_dynamic_lib("nvrtc").abs_path
    if path is None:
        raise OSError("NVRTC was found without a path")
    library = ctypes.CDLL(path)
    handle, size, text = ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.c_char_p
    number, strings = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_char_p)
    for name, arguments in {
        "nvrtcVersion": [number, number],
        "nvrtcGetNumSupportedArchs": [number],
        "nvrtcGetSupportedArchs": [number],
        "nvrtcCreateProgram": [ctypes.POINTER(handle), text, text, ctypes.c_int, strings, strings],
        "nvrtcDestroyProgram": [ctypes.POINTER(handle)],
        "nvrtcCompileProgram": [handle, ctypes.c_int, strings],
        "nvrtcGetProgramLogSize": [handle, size],
        "nvrtcGetProgramLog": [handle, text],
        "nvrtcGetCUBINSize": [handle, size],
        "nvrtcGetCUBIN": [handle, text],
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    library.nvrtcGetErrorString.argtypes = [ctypes.c_int]
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


@functools.cache
def available() -> str | None:
    """Reason that NVRTC is unavailable; None if it is available."""
    try:
        _library()
    except ImportError:
        return "the package cuda-pathfinder, which finds CUDA's libraries, is not installed"
    except (OSError, RuntimeError) as e:  # DynamicLibNotFoundError is a RuntimeError
        return f"NVRTC, CUDA's run-time compiler, was not found ({str(e).splitlines()[0]:.100})"
    return None


def _loaded() -> ctypes.CDLL:
    if reason := available():
        raise errors.UnsupportedError("CUDA kernels cannot be compiled here.", why=reason, fix=_INSTALL)
    return _library()


def _check(status: int, what: str) -> None:
    if status:
        text = _library().nvrtcGetErrorString(status).decode()
        raise errors.CompileError(f"NVRTC could not {what}: {text}.", fix=_INSTALL)


@functools.cache
def version() -> tuple[int, int]:
    """Major and minor version of NVRTC."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_loaded().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "say its version")
    return major.value, minor.value


@functools.cache
def supported_architectures() -> tuple[str, ...]:
    """Architectures that this NVRTC targets, as ``sm_90``, which implies ``sm_90a``."""
    library, count = _loaded(), ctypes.c_int()
    _check(library.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "count its architectures")
    numbers = (ctypes.c_int * count.value)()
    _check(library.nvrtcGetSupportedArchs(numbers), "list its architectures")
    return tuple(f"sm_{n}" for n in numbers)


@functools.cache
def include_directory() -> str | None:
    """Directory of CUDA's headers: wheel, toolkit, ``CUDA_HOME`` or ``CUDA_PATH``."""
    from cuda.pathfinder import find_nvidia_header_directory

    if found := find_nvidia_header_directory("cudart"):
        return found
    roots = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    folders = [str(Path(root) / "include") for root in roots]
    return next((f for f in folders if (Path(f) / "cuda_bf16.h").exists()), None)


# -- compiling -------------------------------------------------------------------------------------


@functools.cache
def _disk() -> DiskCache:
    return DiskCache(None)


def compile(
    source: str,
    arch: str = "sm_90a",
    name: str = "kernel",
    options: Sequence[str] = (),
    cache: DiskCache | None = None,
) -> bytes:
    """Compile a source to a cubin, through the disk cache.

    Args:
      source: CUDA C++. A comment ``// at file.py:12 (function)`` names the user's line that the lines below it come
        from; messages quote it.
      arch: architecture, such as ``sm_90a``.
      name: name of the program in messages.
      options: NVRTC options after the fixed ones.
      cache: disk cache; default: that of the user.

    Raises:
      CompileError: the source is invalid, or exceeds limits of the architecture.
      UnsupportedError: NVRTC is missing, or does not target ``arch``.
    """
    disk = _disk() if cache is None else cache
    key = key_of(_code_of(source), arch, repr(version()), *_OPTIONS, *options)
    cubin = disk.get(key)
    if cubin is None:
        with to.span(f"NVRTC: {name}", "compilation") if (to := recording.active) else recording.OFF:
            cubin = build(source, arch, name, options).cubin
        disk.put(key, cubin, source, ".cubin")
    return cubin


def _code_of(source: str) -> str:
    """Source without comment lines, for the cache key: binaries do not depend on them.

    Sources in which such a line might not be a comment are returned unchanged.
    """
    return source if _NOT_LINES.search(source) else _COMMENT.sub("", source)


def compile_many(
    sources: Iterable[tuple[str, str]],
    arch: str = "sm_90a",
    workers: int | None = None,
    options: Sequence[str] = (),
    cache: DiskCache | None = None,
) -> Iterator[bytes]:
    """Compile pairs of source and name on ``workers`` threads; default: one per core.

    Cubins are yielded in order as they become available, so they can be loaded while others compile. The first error
    in that order is raised.
    """
    sources = list(sources)
    if len(sources) == 1:
        (text, name), *_ = sources
        yield compile(text, arch, name, options, cache)
        return
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        jobs = [pool.submit(compile, text, arch, name, options, cache) for text, name in sources]
        for job in jobs:
            yield job.result()


def build(source: str, arch: str = "sm_90a", name: str = "kernel", options: Sequence[str] = ()) -> Binary:
    """Compile a source without the disk cache; arguments and errors of ``compile``."""
    _loaded()
    if arch.rstrip("af") not in supported_architectures():
        raise errors.UnsupportedError(
            f"NVRTC {'.'.join(map(str, version()))} does not compile for {arch}.",
            why=f"it supports {', '.join(supported_architectures())}.",
            fix=f"install a CUDA version that supports the device: {_INSTALL}",
        )
    flags = [f"--gpu-architecture={arch}", *_OPTIONS, *options]
    if _INCLUDE.search(source) and (folder := include_directory()):
        flags.append(f"--include-path={folder}")
    if config.shows("compile"):
        config.show(f"compile: {name}: nvrtc {' '.join(flags)}")
    if version() >= _MINIMAL_SINCE and not _NOT_MINIMAL.search(source):
        binary, _ = _run(source, name, [*flags, _MINIMAL])
        if binary is not None:
            return binary
    binary, log = _run(source, name, flags)
    if binary is None:
        if config.shows("source"):
            config.show(source)
        raise _error(source, name, arch, log)
    return binary


def _run(source: str, name: str, flags: Sequence[str]) -> tuple[Binary | None, str]:
    """The binary and the log of one compilation; no binary if it failed."""
    library, program = _library(), ctypes.c_void_p()
    _check(
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None
        ),
        "take the program",
    )
    try:
        encoded = (ctypes.c_char_p * len(flags))(*[flag.encode() for flag in flags])
        status = library.nvrtcCompileProgram(
            program, len(flags), encoded
        )  # without the GIL, as all ctypes calls
        log = _read(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
        text = log.rstrip(b"\0").decode(errors="replace")
        if status:
            return None, text or library.nvrtcGetErrorString(status).decode()
        return Binary(_read(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program), text), text
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(size_of: Any, read: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)), "say how long its result is")
    buffer = ctypes.create_string_buffer(size.value)
    _check(read(program, buffer), "hand out its result")
    return buffer.raw


# -- logs ------------------------------------------------------------------------------------------


def _error(source: str, name: str, arch: str, log: str) -> errors.CompileError:
    """First error of a log, with nearby generated lines and the user's line."""
    lines = source.split("\n")
    found = _ERROR.search(log)
    if not found:  # errors of ptxas and of options name no line
        said = _PTXAS_ERROR.search(log)
        what = said["what"] if said else log.strip().split("\n")[0]
        return errors.CompileError(f"the CUDA kernel {name!r} does not compile for {arch}: {what}", fix=_FIX)
    number = min(int(found["line"]), len(lines))
    first = max(number - 1 - _CONTEXT, 0)
    shown = [
        f"{'>' if i + 1 == number else ' '} {i + 1:4} | {lines[i]}"
        for i in range(first, min(number + _CONTEXT, len(lines)))
    ]
    above = (_USER_LINE.search(line) for line in reversed(lines[:number]))
    where = next((m[1].strip() for m in above if m), None)
    return errors.CompileError(
        f"the CUDA kernel {name!r} does not compile for {arch}: {found['what']}",
        where=where,
        why="in the generated source:\n" + "\n".join(shown),
        fix=_FIX,
    )


_FIX = "correct that line if it is yours, else report it; BLUFUNC_DEBUG=source prints the whole source"
