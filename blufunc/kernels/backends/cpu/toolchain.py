"""Host C++ toolchain: compile sources to shared libraries through a disk cache.

Kernels, stage 8 on the CPU. In: C++ source that defines ``extern "C"`` functions. Out: a ``ctypes.CDLL``. The compiler
is found and probed at first use, and the probe's result is cached on disk. Without a compiler ``find`` returns None,
and the caller falls back to NumPy: results never require a compiler.

IEEE semantics hold (``-ffast-math`` is never used): NaN, infinities and signed zeros match NumPy, sums keep their
order, and ``x * y + z`` is not contracted into an FMA.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blufunc import errors
from blufunc.config import config
from blufunc.core.arrays import recording
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, subjaxprs
from blufunc.kernels.cache.disk import DiskCache, key_of
from blufunc.kernels.codegen import source_files

_FLAGS = (
    "-std=c++17",
    "-O3",
    "-shared",
    "-fPIC",
    "-fno-semantic-interposition",  # lets native steps inline the kernels that they call
    "-fno-math-errno",  # makes sqrt one instruction
    "-fno-trapping-math",  # allows both sides of a select to be computed, which vectorization requires
    "-ffp-contract=off",
    "-w",
)
_GATHERS = "-mtune-ctrl=use_gather,use_gather_2parts,use_gather_4parts"
"""Gathers, which GCC's tuning for AMD disables: table lookups then vectorize.

measured: float32 sin of 2^20 values, GCC 12, AMD EPYC without AVX-512: 14.8 ms, with gathers 2.8 (2026-11-23)
"""
_OPTIONAL_FLAGS = (
    ("-march=native", _GATHERS, "-fopenmp"),
    ("-march=native", "-fopenmp"),
    ("-march=native", "-fopenmp-simd"),
    ("-mcpu=native", "-fopenmp-simd"),
    ("-march=native",),
    (),
)
"""Flags beyond ``_FLAGS``: the first row that compiles and loads is used."""

_PROBE = "backends/cpu/include/probe.h"
_SECONDS = 300  # timeout: a slower compiler hangs
_ERROR = re.compile(r"<stdin>:(?P<line>\d+):(?:(?P<column>\d+):)? (?:fatal )?error: (?P<what>.*)")
_USER_LINE = re.compile(r"^\s*// at (?P<where>.+)$")


@dataclass
class Compiler:
    """A working C++ compiler.

    Attributes:
      command: the program and its first arguments.
      version: first line of its ``--version``.
      flags: compiler flags of all sources.
      openmp: True if ``#pragma omp parallel`` starts threads; otherwise it is ignored.
      cpu: the processor that ``-march=native`` selects.
      cache: disk cache of libraries.
    """

    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...]
    openmp: bool
    cpu: str = field(repr=False)
    cache: DiskCache = field(repr=False)
    _loaded: dict[str, ctypes.CDLL] = field(default_factory=dict, repr=False)

    def key(self, source: str, options: Sequence[str] = ()) -> str:
        """Cache key of the library that ``source`` compiles to."""
        return key_of(source, self.version, self.cpu, *self.flags, *options)

    def compile(
        self, source: str, name: str, options: Sequence[str] = (), symbols: Iterable[str] = ()
    ) -> ctypes.CDLL:
        """Compile and load a library; the same object for the same source and options.

        Args:
          source: C++ source with ``extern "C"`` functions.
          name: name of the source in messages.
          options: flags after those of all sources.
          symbols: functions that it defines: a library of the cache without them is compiled again.

        Raises:
          CompileError: the compiler rejected the source, or the library cannot be loaded.
        """
        key = self.key(source, options)
        library = self._loaded.get(key)
        if library is None:
            library = self._from_cache(key, symbols)
            if library is None:
                with to.span(f"C++: {name}", "compilation") if (to := recording.active) else recording.OFF:
                    library = self._make(key, source, name, options)
            self._loaded[key] = library
        return library

    def _from_cache(self, key: str, symbols: Iterable[str]) -> ctypes.CDLL | None:
        path = self.cache.path_of(key)
        try:
            library = _load(path) if path else None
        except OSError:  # another process pruned it, or the folder is mounted noexec
            return None
        return library if all(hasattr(library, symbol) for symbol in symbols) else None

    def _make(self, key: str, source: str, name: str, options: Sequence[str]) -> ctypes.CDLL:
        with tempfile.TemporaryDirectory(prefix="blufunc-") as folder:
            path = Path(folder) / "kernel.so"
            self._run(source, path, name, options)
            kept = self.cache.put(key, path.read_bytes(), source, ".so")
            for candidate in (kept, path):
                try:
                    if candidate:
                        return _load(candidate)  # the library stays loaded after the folder is deleted
                except OSError as e:
                    why = str(e)
        raise errors.CompileError(
            f"the library that {self.command[0]} compiled from {name} cannot be loaded.",
            why=why,
            fix="set BLUFUNC_CACHE_DIR and TMPDIR to folders on a file system without noexec",
        )

    def _run(self, source: str, path: Path, name: str, options: Sequence[str]) -> None:
        command = [*self.command, *self.flags, *options, "-x", "c++", "-", "-o", str(path), "-lm"]
        if config.shows("compile"):
            config.show(f"compile: {name}: {shlex.join(command)}")
        try:
            done = subprocess.run(
                command,
                input=source,
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
                env={**os.environ, "LC_ALL": "C"},  # the error pattern is English
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            raise errors.CompileError(
                f"{self.command[0]} could not compile {name}.", why=str(e), fix="set CXX to another compiler"
            ) from e
        if done.returncode or not path.exists():
            raise _refusal(self.command[0], name, source, done.stderr or f"exit status {done.returncode}")


def _refusal(compiler: str, name: str, source: str, log: str) -> errors.CompileError:
    """Error for a rejected source, with nearby lines and the user's line."""
    lines = source.splitlines()
    found = _ERROR.search(log)
    if not found:
        why, where = "\n".join(log.strip().splitlines()[-10:]), None
    else:
        at = int(found["line"])
        around = [f"{'>' if i == at else ' '} {i:4} {lines[i - 1]}"
                  for i in range(max(1, at - 2), min(len(lines), at + 2) + 1)]  # fmt: skip
        why = "\n".join([found["what"], *around])
        comments = (_USER_LINE.match(line) for line in reversed(lines[:at]))
        where = next((m["where"] for m in comments if m), None)
    return errors.CompileError(
        f"{compiler} refused the source of {name}.",
        where=where,
        why=why,
        fix="set CXX to another compiler (g++ 9 or clang++ 10, or newer); if blufunc generated the source, report it",
    )


# -- finding it ------------------------------------------------------------------------------------


@functools.cache
def find() -> Compiler | None:
    """Compiler of this process: ``$CXX``, else c++, g++ or clang++; None if absent."""
    return search(_candidates(), DiskCache())


def _candidates() -> list[str]:
    chosen = os.environ.get("CXX")
    return [chosen] if chosen else ["c++", "g++", "clang++"]


def why_none() -> str:
    """Reason that ``find`` returned None, for messages."""
    if os.name != "posix":
        return "compiling requires a POSIX system"
    tried = _candidates()
    found = [text for text in tried if _program_of(text)[1]]
    if "CXX" in os.environ and not found:
        return f"the C++ compiler that CXX names was not found: {tried[0]}"
    return (
        f"this C++ compiler does not work: {found[0]}"
        if found
        else f"no C++ compiler was found ({', '.join(tried)})"
    )


def _program_of(text: str) -> tuple[tuple[str, ...], str | None]:
    """Words of a command and the path of its program; None if not found."""
    try:
        command = tuple(shlex.split(text))
    except ValueError:  # unbalanced quotes
        return (), None
    return command, shutil.which(command[0]) if command else None


def search(commands: Sequence[str], cache: DiskCache) -> Compiler | None:
    """First of ``commands`` that compiles; the probe's result is cached on disk."""
    if os.name != "posix":
        return None
    for text in commands:
        command, program = _program_of(text)
        if program:
            compiler = _remembered(command, program, cache) or _probe(command, program, cache)
            if compiler:
                return compiler
        if config.shows("compile"):
            config.show(f"compile: {text}: {'does not compile' if program else 'not found'}")
    return None


def _probe_key(command: tuple[str, ...], program: str) -> str:
    """Cache key of the probe: identifies the program without running it."""
    real = Path(program).resolve()
    stat = real.stat()
    flags = [*_FLAGS, *(" ".join(row) for row in _OPTIONAL_FLAGS)]
    return key_of("probe", *command, str(real), str(stat.st_mtime_ns), str(stat.st_size), cpu(), *flags)


def _remembered(command: tuple[str, ...], program: str, cache: DiskCache) -> Compiler | None:
    blob = cache.get(_probe_key(command, program))
    if blob is None:
        return None
    match _json(blob):
        case {"version": str(version), "flags": [*flags], "openmp": bool(openmp)}:
            return Compiler(command, version, tuple(map(str, flags)), openmp, cpu(), cache)
    return None  # of another version


def _json(blob: bytes) -> Any:
    try:
        return json.loads(blob)
    except (ValueError, RecursionError):
        return None


def _probe(command: tuple[str, ...], program: str, cache: DiskCache) -> Compiler | None:
    try:
        said = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = (said.stdout.splitlines() or ["unknown"])[0]
    for extra in _OPTIONAL_FLAGS:
        probe = source_files.source(_PROBE)
        compiler = Compiler(command, version, (*_FLAGS, *extra), "-fopenmp" in extra, cpu(), cache)
        try:
            answer = compiler.compile(
                probe, "a probe of the compiler", symbols=["blufunc_probe"]
            ).blufunc_probe(10)
        except errors.CompileError as e:
            if config.shows("compile"):
                config.show(e)
            continue
        if answer == 45:
            facts = {"version": version, "flags": compiler.flags, "openmp": compiler.openmp}
            cache.put(_probe_key(command, program), json.dumps(facts).encode(), probe, ".json")
            return compiler
    return None


@functools.cache
def cpu() -> str:
    """Processor identity for cache keys: model and instruction sets."""
    said = [platform.machine(), platform.processor()]
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return " ".join(said)
    fields = dict(re.findall(r"^([\w ]+?)\s*:\s*(.*)$", first, flags=re.M))
    return " ".join(
        [*said, *(fields.get(k, "") for k in ("model name", "cpu family", "model", "flags", "Features"))]
    )


# -- threads ---------------------------------------------------------------------------------------

_forked = False
_load_lock = threading.Lock()
_SPINNING = {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "0"}
"""OpenMP settings (GNU and LLVM): idle workers spin for microseconds, then sleep.

With GNU's default, workers spin while BLAS runs. Workers that sleep at once delay each small kernel. measured:
alternating kernels and matmuls 8x slower by default; 15 us per kernel asleep (2 cores)
"""


def processors() -> int:
    """Number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads() -> int:
    """Threads of a kernel (``num_threads``): ``$OMP_NUM_THREADS``, else one per core.

    It is 1 in a forked child: GNU OpenMP's threads stay with the parent, and a parallel region would hang.
    """
    if _forked:
        return 1
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return max(1, int(asked)) if asked.strip().isdigit() else processors()


def _note_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def _load(path: Path) -> ctypes.CDLL:
    """Load a library; the first load starts OpenMP with short spinning.

    The runtime reads its settings when it is loaded. Settings of the user take precedence.
    """
    own = any(name in os.environ for name in ("OMP_WAIT_POLICY", *_SPINNING))
    with _load_lock, _settings({} if own else _SPINNING):
        return ctypes.CDLL(str(path))


@contextmanager
def _settings(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables temporarily, visible to C as well."""
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]


WORTH_COMPILING = 1 << 18
"""Programs touching at least this many bytes are compiled."""

WORTH_CALLING = 8
"""Programs of at least this many calls of NumPy are compiled, if that leaves none.

measured: a call takes 1 to 2 us, a compiled program of small arrays 5 us (2026-11-27)
"""

_CALLS = {
    "elementwise": 1, "reduce": 1, "index": 2, "contract": 4, "cumulative": 1, "random": 8, "movement": 0, "barrier": 0,
}  # fmt: skip
"""Kinds of primitives that compiled programs compute, and their NumPy calls."""

_BYTES_OF_CALL = 1 << 12
"""Bytes computed that count for a call.

One kernel computes a chain in a fifth of NumPy's time.
"""

_COMPUTED = ("elementwise", "reduce", "cumulative")
"""Kinds of primitives whose bytes count: NumPy copies as fast."""

_SHORT = 16
"""Elements of a row below which NumPy's sum of it is slow: 5 ns and more."""

_ROWS_OF_CALL = 1 << 8
"""Sums of short rows that count for a call."""

CALLS_OF = {
    "pad": 5, "concatenate": 3,
    "gather": 24, "scatter": 24, "scatter_add": 24, "scatter_mul": 24, "scatter_min": 24, "scatter_max": 24, "sort": 4,
    "top_k": 8, "fft": 24, "lu": 24, "lu_solve": 24, "lu_pivots_to_permutation": 4, "cholesky": 24, "qr": 24,
    "eigh": 24, "svd": 24, "triangular_solve": 24, "tridiagonal_solve": 24, "conv_general_dilated": 24,
    "reduce_window_sum": 24, "reduce_window_max": 24, "reduce_window_min": 24, "window_argmax": 24, "window_argmin": 24,
}  # fmt: skip
"""Primitives whose NumPy definition takes several calls, and their number.

measured: rows of a table take 12 us as NumPy calls and 5 us compiled, a solve of 20 x 20 51 us and 7 us (2026-11-27)
"""

_SORTED = 256
"""Elements of a sort that count for a call.

measured: NumPy takes 20 to 40 ns an element, a compiled program 5 (2026-11-27)
"""

_RANDOM_BYTES = 64
"""Bytes that a random byte counts for: the cipher computes that long."""

_ROUNDS = 128
"""Assumed rounds of a loop without a known number."""

_ROUNDS_OF_CALL = 4
"""Rounds of a loop in which a call counts for one.

Short loops, as in tests, gain less than their first call loses.
"""

_CALL_BYTES = 512
"""Minimum bytes that an operation in a loop counts for.

The time of a NumPy call touches several times as many.
"""


def worth_compiling(jaxpr: Jaxpr) -> bool:
    """True if a program is large enough to gain by compiling."""
    return jaxpr.memoised(
        "worth compiling",
        lambda: _bytes_of(jaxpr, 0) >= WORTH_COMPILING or (_calls_of(jaxpr) or 0) >= WORTH_CALLING,
    )


def _bytes_of(jaxpr: Jaxpr, least: int) -> int:
    """Bytes that a program touches; an operation counts for ``least`` at least."""
    total = 0
    for e in jaxpr.eqns:
        # reductions read more than they write
        variables = (*e.invars, *e.outvars) if e.prim.kind == "reduce" else e.outvars
        nbytes = sum(v.aval.size * v.aval.dtype.itemsize for v in variables)
        total += max(least, nbytes * (_RANDOM_BYTES if e.prim.kind == "random" else 1))
        rounds = rounds_of(e)
        inner = least if rounds is None else _CALL_BYTES
        total += (rounds or 1) * sum(_bytes_of(body, inner) for body in subjaxprs(e.params))
    return total


def _calls_of(jaxpr: Jaxpr) -> int | None:
    """Calls of NumPy that a program makes; None if compiling would leave some of them."""
    total = 0
    for e in jaxpr.eqns:
        if e.effects:
            return None
        if bodies := list(subjaxprs(e.params)):
            if e.prim.kind not in ("control", "call"):
                return None
            times = max(1, min(rounds_of(e) or 1, _ROUNDS) // _ROUNDS_OF_CALL)
            for body in bodies:
                inside = _calls_of(body)
                if inside is None:
                    return None
                total += times * inside
        elif (calls := CALLS_OF.get(e.prim.name, _CALLS.get(e.prim.kind))) is None:
            return None
        else:
            total += calls + _calls_of_data(e)
    return total


def _calls_of_data(eqn: Eqn) -> int:
    """Calls of NumPy that take as long as an operation on its data."""
    given, made = eqn.invars[0].aval if eqn.invars else eqn.outvars[0].aval, eqn.outvars[0].aval
    if eqn.prim.kind == "sort":
        return given.size // _SORTED
    if eqn.prim.kind not in _COMPUTED:
        return 0
    variables = (*eqn.invars, *eqn.outvars) if eqn.prim.kind == "reduce" else eqn.outvars
    calls = sum(v.aval.size * v.aval.dtype.itemsize for v in variables) // _BYTES_OF_CALL
    if eqn.prim.kind == "reduce" and given.size < made.size * _SHORT:
        calls += made.size // _ROWS_OF_CALL
    return calls


def rounds_of(eqn: Eqn) -> int | None:
    """The rounds of a loop; None if it is none."""
    if eqn.prim.kind != "control" or eqn.prim.name not in ("scan", "while"):
        return None
    return eqn.params["length"] if eqn.prim.name == "scan" else _ROUNDS


def compiles(jaxpr: Jaxpr) -> bool:
    """True if a program is compiled where a compiler exists."""
    return config.host_compiler == "always" or (config.host_compiler == "auto" and worth_compiling(jaxpr))


def why_as_numpy(jaxpr: Jaxpr) -> str:
    """Why a program runs as NumPy calls; empty if it is compiled."""
    if config.host_compiler == "never":
        return "config.host_compiler is 'never'"
    if not compiles(jaxpr):
        return (
            "its arrays are too small, its loops too short and its operations too few, or not all of them native, to "
            "gain from compiling; config.host_compiler = 'always' compiles it anyway"
        )
    return "" if find() is not None else why_none()
