"""The C++ compiler of this machine: source text becomes loaded functions, through the disk cache.

Kernels, stage 8 on the CPU. In comes C++ text that defines ``extern "C"`` functions; out comes a ``ctypes.CDLL``.
The compiler is found when it is first needed and asked once what it can do; what it said is kept on disk. Without
one ``find`` returns None, and the caller does without: blufunc never needs a compiler to be right.

IEEE semantics hold (``-ffast-math`` is never used): NaN, infinities and signed zeros are as in NumPy, sums keep
their order, and products are not contracted into fused multiply-adds, so that ``x * y + z`` is what NumPy gives.
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from blufunc import errors
from blufunc.config import config
from blufunc.core.ir.jaxpr import Jaxpr, subjaxprs
from blufunc.kernels.cache.disk import DiskCache, key_of
from blufunc.kernels.codegen import source_files

_FLAGS = (
    "-std=c++17",
    "-O3",
    "-shared",
    "-fPIC",
    "-fno-math-errno",  # sqrt is then an instruction
    "-fno-trapping-math",  # both sides of a select may be computed, without which nothing vectorises
    "-ffp-contract=off",
    "-w",
)
_GATHERS = "-mtune-ctrl=use_gather,use_gather_2parts,use_gather_4parts"
"""GCC tunes for AMD's processors with AVX2 without gathers, and then vectorizes no loop that reads a table.

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
"""What is asked for beyond ``_FLAGS``: the first row that the compiler takes and whose result can be loaded."""

_PROBE = "backends/cpu/include/probe.h"
_SECONDS = 300  # a compiler that takes longer hangs
_ERROR = re.compile(r"<stdin>:(?P<line>\d+):(?:(?P<column>\d+):)? (?:fatal )?error: (?P<what>.*)")
_USER_LINE = re.compile(r"^\s*// at (?P<where>.+)$")


@dataclass
class Compiler:
    """A C++ compiler that works.

    Attributes:
      command: the program and its first arguments.
      version: as it calls itself.
      flags: with which sources are compiled.
      openmp: whether ``#pragma omp parallel`` starts threads; else it is ignored.
      cpu: the processor that ``-march=native`` stands for.
      cache: keeps what was compiled.
    """

    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...]
    openmp: bool
    cpu: str = field(repr=False)
    cache: DiskCache = field(repr=False)
    _loaded: dict[str, ctypes.CDLL] = field(default_factory=dict, repr=False)

    def key(self, source: str, options: Sequence[str] = ()) -> str:
        """Where the cache has what ``source`` compiles to."""
        return key_of(source, self.version, self.cpu, *self.flags, *options)

    def compile(self, source: str, name: str, options: Sequence[str] = ()) -> ctypes.CDLL:
        """The library that ``source`` compiles to, loaded; the same object for the same source and options.

        Args:
          source: C++ text with ``extern "C"`` functions.
          name: what it is, for messages.
          options: flags behind those of all sources.

        Raises:
          CompileError: the compiler refused the text, or what it made cannot be loaded.
        """
        key = self.key(source, options)
        library = self._loaded.get(key)
        if library is None:
            library = self._from_cache(key) or self._make(key, source, name, options)
            self._loaded[key] = library
        return library

    def compile_many(self, sources: Sequence[tuple[str, str]]) -> list[ctypes.CDLL]:
        """``compile`` of each ``(source, name)``, at the same time in as many threads as there are processors."""
        if len(sources) < 2:
            return [self.compile(source, name) for source, name in sources]
        with ThreadPoolExecutor(min(len(sources), processors())) as pool:
            return list(pool.map(lambda item: self.compile(*item), sources))

    def _from_cache(self, key: str) -> ctypes.CDLL | None:
        path = self.cache.path_of(key)
        try:
            return _load(path) if path else None
        except OSError:  # another process pruned it, or nothing may be executed from that folder
            return None

    def _make(self, key: str, source: str, name: str, options: Sequence[str]) -> ctypes.CDLL:
        with tempfile.TemporaryDirectory(prefix="blufunc-") as folder:
            path = Path(folder) / "kernel.so"
            self._run(source, path, name, options)
            kept = self.cache.put(key, path.read_bytes(), source, ".so")
            for candidate in (kept, path):
                try:
                    if candidate:
                        return _load(candidate)  # stays loaded when the folder goes
                except OSError as e:
                    why = str(e)
        raise errors.CompileError(
            f"what {self.command[0]} made of {name} cannot be loaded.",
            why=why,
            fix="set BLUFUNC_CACHE_DIR and TMPDIR to folders from which programs may be run",
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
                env={**os.environ, "LC_ALL": "C"},  # errors are looked for in English
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            raise errors.CompileError(
                f"{self.command[0]} could not compile {name}.", why=str(e), fix="set CXX to another compiler"
            ) from e
        if done.returncode or not path.exists():
            raise _refusal(self.command[0], name, source, done.stderr or f"exit status {done.returncode}")


def _refusal(compiler: str, name: str, source: str, log: str) -> errors.CompileError:
    """The error for a source that was refused: the line, the lines around it, and the user's line above it."""
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
        fix="set CXX to another compiler (g++ 9 or clang++ 10, or newer); if the text is not your own, report it",
    )


# -- finding it ------------------------------------------------------------------------------------


@functools.cache
def find() -> Compiler | None:
    """The compiler of this process: ``$CXX``, else the first of c++, g++ and clang++ that works; None without one."""
    return search(_candidates(), DiskCache())


def _candidates() -> list[str]:
    chosen = os.environ.get("CXX")
    return [chosen] if chosen else ["c++", "g++", "clang++"]


def why_none() -> str:
    """Where ``find`` looked in vain, for messages."""
    if os.name != "posix":
        return "no C++ compiler is looked for on this system"
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
    """A command's words, and the path of its program; None if there is none."""
    try:
        command = tuple(shlex.split(text))
    except ValueError:  # a quotation mark without its partner
        return (), None
    return command, shutil.which(command[0]) if command else None


def search(commands: Sequence[str], cache: DiskCache) -> Compiler | None:
    """The first of ``commands`` (programs, with arguments if need be) that compiles; what it can do is cached."""
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
    """Changes when the program is replaced, so that a warm start runs no compiler at all."""
    real = Path(program).resolve()
    stat = real.stat()
    wanted = [*_FLAGS, *(" ".join(row) for row in _OPTIONAL_FLAGS)]
    return key_of("probe", *command, str(real), str(stat.st_mtime_ns), str(stat.st_size), cpu(), *wanted)


def _remembered(command: tuple[str, ...], program: str, cache: DiskCache) -> Compiler | None:
    blob = cache.get(_probe_key(command, program))
    if blob is None:
        return None
    said = json.loads(blob)
    return Compiler(command, said["version"], tuple(said["flags"]), said["openmp"], cpu(), cache)


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
            answer = compiler.compile(probe, "a probe of the compiler").blufunc_probe(10)
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
    """What distinguishes this processor from others to a compiler: its model and its instruction sets."""
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
"""A worker that waits spins for some microseconds, then sleeps: settings of the runtimes of GNU and LLVM.

With GNU's default a kernel and a matrix product in turn take 8 times as long on 2 processors, because the workers
keep BLAS from them; if they sleep at once, each small kernel takes 15 microseconds longer.
"""


def processors() -> int:
    """How many processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads() -> int:
    """How many threads a kernel should ask for (``num_threads``): ``$OMP_NUM_THREADS``, else one a processor.

    In the child of a fork it is 1: the threads of GNU OpenMP stay with the parent, and waiting for them would
    never end.
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
    """Load a library, and with the first one the OpenMP runtime, whose threads shall not spin for long.

    That runtime reads its settings when it is loaded. The user's own are respected.
    """
    own = any(name in os.environ for name in ("OMP_WAIT_POLICY", *_SPINNING))
    with _load_lock, _settings({} if own else _SPINNING):
        return ctypes.CDLL(str(path))


@contextmanager
def _settings(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables set for a while, for C too."""
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]


WORTH_COMPILING = 1 << 18
"""From how many bytes in the arrays of a program on it is compiled."""


def worth_compiling(jaxpr: Jaxpr) -> bool:
    """Whether a program's arrays are large enough for compiled loops to gain what compiling takes."""
    return jaxpr.memoised("array bytes", lambda: _bytes_of(jaxpr)) >= WORTH_COMPILING


def _bytes_of(jaxpr: Jaxpr) -> int:
    total = 0
    for e in jaxpr.eqns:
        # of what a reduction takes in it writes little
        variables = (*e.invars, *e.outvars) if e.prim.kind == "reduce" else e.outvars
        total += sum(v.aval.size * v.aval.dtype.itemsize for v in variables)
        total += sum(_bytes_of(body) for body in subjaxprs(e.params))
    return total


def compiles(jaxpr: Jaxpr) -> bool:
    """True for a program that is compiled, where there is a compiler."""
    return config.host_compiler == "always" or (config.host_compiler == "auto" and worth_compiling(jaxpr))


def why_as_numpy(jaxpr: Jaxpr) -> str:
    """Why a program runs as NumPy calls; empty if it is compiled."""
    if config.host_compiler == "never":
        return "config.host_compiler is 'never'"
    if not compiles(jaxpr):
        return "its arrays are too small to gain from compiling; config.host_compiler = 'always' does so all the same"
    return "" if find() is not None else why_none()
