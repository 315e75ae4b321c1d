"""Host toolchain: compilation, disk cache, and missing or broken compilers."""

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors
from blufunc.config import config
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cpu import toolchain
from blufunc.kernels.cache.disk import DiskCache

ADD = """
extern "C" int add(int x, int y) { return x + y; }
"""
PARALLEL = """
extern "C" long total(long n, int threads) {
  long sum = 0;
  #pragma omp parallel for reduction(+ : sum) num_threads(threads)
  for (long i = 0; i < n; ++i) sum += i;
  return sum;
}
"""


@pytest.fixture(scope="module")
def real():
    """A compiler of this machine."""
    found = toolchain.find()
    if found is None:
        pytest.skip("this machine has no C++ compiler")
    return found


@pytest.fixture
def compiler(real, tmp_path):
    """The compiler with its own cache."""
    return toolchain.search(real.command, DiskCache(tmp_path / "cache"))


def script(path, text):
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def counted(tmp_path, compiler):
    """A compiler wrapper, and a function that counts its runs."""
    log = tmp_path / "runs"
    program = shutil.which(compiler.command[0])
    text = f'echo run >> "{log}"\nexec "{program}" "$@"\n'
    return script(tmp_path / "counted", text), lambda: log.read_text().count("run") if log.exists() else 0


def test_compiles_and_runs(compiler):
    library = compiler.compile(ADD, "add")
    assert library.add(2, 3) == 5
    assert compiler.compile(ADD, "add") is library


def test_options_make_another_library(compiler):
    source = 'extern "C" int number() { return NUMBER; }'
    two, three = (compiler.compile(source, "number", (f"-DNUMBER={n}",)) for n in (2, 3))
    assert (two.number(), three.number()) == (2, 3)


def test_threads_compile_at_once(compiler):
    sources = [(f'extern "C" int f() {{ return {i}; }}', f"f{i}") for i in range(6)]
    with ThreadPoolExecutor(3) as pool:
        libraries = list(pool.map(lambda item: compiler.compile(*item), sources))
    assert [library.f() for library in libraries] == list(range(6))


def test_a_warm_start_runs_no_compiler(tmp_path, real):
    program, runs = counted(tmp_path, real)
    cold = toolchain.search([program], DiskCache(tmp_path / "cache"))
    cold.compile(ADD, "add")
    assert runs() >= 3
    before = runs()
    warm = toolchain.search([program], DiskCache(tmp_path / "cache"))
    assert warm.compile(ADD, "add").add(1, 1) == 2
    assert runs() == before and (warm.version, warm.flags, warm.openmp) == (
        cold.version,
        cold.flags,
        cold.openmp,
    )


def test_the_source_is_kept_for_people(compiler):
    compiler.compile(ADD, "add")
    assert any(ADD in path.read_text() for path in compiler.cache.folder.glob("*.txt"))


def test_a_cached_library_without_its_function_is_compiled_again(tmp_path, real):
    program, runs = counted(tmp_path, real)
    first = toolchain.search([program], DiskCache(tmp_path / "cache"))
    other = first.compile('extern "C" int other() { return 7; }', "other")
    stale = first.cache.path_of(first.key('extern "C" int other() { return 7; }')).read_bytes()
    first.cache.put(first.key(ADD), stale, ADD, ".so")
    before = runs()
    second = toolchain.search([program], DiskCache(tmp_path / "cache"))
    assert second.compile(ADD, "add", symbols=["add"]).add(2, 3) == 5 and other.other() == 7
    assert runs() == before + 1
    third = toolchain.search([program], DiskCache(tmp_path / "cache"))
    assert third.compile(ADD, "add", symbols=["add"]).add(2, 3) == 5 and runs() == before + 1


@pytest.mark.filterwarnings("ignore:what blufunc compiles is not kept")
def test_libraries_in_a_folder_that_others_may_write_to_are_not_loaded(compiler):
    key = compiler.key(ADD)
    compiler.cache.put(key, b"not a library", ADD, ".so")
    compiler.cache.folder.chmod(0o777)
    assert compiler.compile(ADD, "add", symbols=["add"]).add(2, 3) == 5
    compiler.cache.folder.chmod(0o700)
    assert compiler.cache.get(key) == b"not a library"


@pytest.mark.parametrize(
    "blob", [b"{}", b"[1]", b"oops", b"[" * 99_999, b'{"version": 3, "flags": [], "openmp": true}']
)
def test_a_remembered_compiler_of_another_version_is_probed_again(tmp_path, real, blob):
    cache = DiskCache(tmp_path / "cache")
    program = shutil.which(real.command[0])
    cache.put(toolchain._probe_key(real.command, program), blob, "", ".json")
    assert toolchain._remembered(real.command, program, cache) is None


def _remove(path):
    path.unlink()


def _replace(path):
    path.unlink()  # the old file is in use
    path.write_bytes(b"\x7fELF" + bytes(100))


@pytest.mark.parametrize("harm", [_remove, _replace])
def test_a_damaged_library_is_made_again(compiler, harm):
    compiler.compile(ADD, "add")
    harm(compiler.cache.path_of(compiler.key(ADD)))
    found = toolchain.search(compiler.command, DiskCache(compiler.cache.folder))
    assert found.compile(ADD, "add").add(2, 2) == 4


def test_without_a_cache(real, tmp_path):
    (tmp_path / "file").write_text("in the way")
    compiler = toolchain.search(real.command, DiskCache(tmp_path / "file" / "cache"))
    assert compiler.compile(ADD, "add").add(20, 1) == 21


def test_the_key_tells_machines_and_flags_apart(compiler):
    from dataclasses import replace

    others = [replace(compiler, cpu="another"), replace(compiler, version="another"),
              replace(compiler, flags=("-O1",))]  # fmt: skip
    assert len({c.key(ADD) for c in [compiler, *others]}) == 4


def test_no_compiler(tmp_path):
    assert toolchain.search([str(tmp_path / "absent"), "no-such-compiler", ""], DiskCache(tmp_path)) is None


@pytest.mark.parametrize(
    "text",
    [
        "exit 1\n",
        'echo "fake 1.0"\nexit 0\n',
        'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo rubbish > "$2"; shift; done\nexit 0\n',
    ],
    ids=["fails", "writes nothing", "writes rubbish"],
)
def test_broken_compiler(tmp_path, text):
    program = script(tmp_path / "broken", text)
    assert toolchain.search([program], DiskCache(tmp_path / "cache")) is None


def test_the_next_one_is_tried(tmp_path, real):
    program = script(tmp_path / "broken", "exit 1\n")
    found = toolchain.search([program, *real.command], DiskCache(tmp_path / "cache"))
    assert found.command == real.command


@pytest.mark.parametrize(
    "lacks, has", [("-fopenmp", "-march=native"), ("-march=native", "")], ids=["openmp", "march"]
)
def test_compiler_that_lacks_a_flag(tmp_path, real, lacks, has):
    refuse = f'for a; do [ "$a" = {lacks} ] && {{ echo "unknown option {lacks}" >&2; exit 1; }}; done\n'
    program = script(tmp_path / "poor", f'{refuse}exec "{shutil.which(real.command[0])}" "$@"\n')
    found = toolchain.search([program], DiskCache(tmp_path / "cache"))
    assert lacks not in found.flags and (not has or has in found.flags) and not found.openmp
    library = found.compile(PARALLEL, "total")
    library.total.restype = ctypes.c_long
    assert library.total(ctypes.c_long(10), 2) == 45


def test_the_command_may_have_arguments(tmp_path, real):
    found = toolchain.search([f"{real.command[0]} -DTWO=2"], DiskCache(tmp_path))
    assert found.compile('extern "C" int two() { return TWO; }', "two").two() == 2


def test_the_environment_chooses(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    monkeypatch.setenv("BLUFUNC_CACHE_DIR", str(tmp_path))
    assert toolchain.find.__wrapped__() is None


ABSENCES = {
    "not found": ("absent", "the C++ compiler that CXX names was not found: absent"),
    "an open quotation mark": ('c++ "', "the C++ compiler that CXX names was not found"),
    "refuses everything": ("false", "this C++ compiler does not work: false"),
}


@pytest.mark.parametrize("command, why", ABSENCES.values(), ids=ABSENCES)
def test_why_there_is_none(command, why, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CXX", command)
    monkeypatch.setattr(config, "debug", "compile")
    assert toolchain.search([command], DiskCache(tmp_path)) is None
    assert why in toolchain.why_none()
    said = capsys.readouterr().err
    assert f"compile: {command}: " in said and ("refused" in said) == (command == "false")


def test_why_there_is_none_of_several(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert toolchain.why_none() == "no C++ compiler was found (c++, g++, clang++)"


def test_refused_source_shows_the_line_and_where_it_came_from(compiler):
    source = (
        "// at model.py:12 (loss)\nint good;\n// at model.py:14 (norm)\nint bad = nonsense;\nint after;\n"
    )
    with pytest.raises(errors.CompileError) as caught:
        compiler.compile(source, "kernel 7")
    error = caught.value
    assert "kernel 7" in error.what and error.where == "model.py:14 (norm)" and error.fix
    assert ">    4 int bad = nonsense;" in error.why and "nonsense" in error.why.splitlines()[0]
    with pytest.raises(RuntimeError):
        compiler.compile(source, "kernel 7")


def test_what_is_done_can_be_shown(compiler, monkeypatch, capsys):
    monkeypatch.setattr(config, "debug", "compile")
    compiler.compile(ADD + "// shown", "add")
    assert "compile: add: " in capsys.readouterr().err


def test_numbers_are_as_in_numpy(compiler):
    """Flags preserve NaN, signed zeros, summation order and rounding."""
    source = """
    extern "C" void f(const float* x, float* y, long n) {
      float sum = 0;
      for (long i = 0; i < n; ++i) {
        y[i] = x[i] != x[i] ? 1.0f : x[i] + 0.0f;
        sum += x[i] * x[i] - x[i] * x[i];
      }
      y[n] = sum;
    }
    """
    x = np.array([np.nan, -0.0, 1e-45, 1.1, 3e38], np.float32)
    y = np.empty(6, np.float32)
    compiler.compile(source, "f").f(
        ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_long(5)
    )
    np.testing.assert_array_equal(y, np.array([1, 0, 1e-45, 1.1, 3e38, np.nan], np.float32))
    assert not np.signbit(y[1])
    y = np.empty(2, np.float32)
    x = np.array([1.1], np.float32)
    compiler.compile(source, "f").f(
        ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_long(1)
    )
    assert y[1] == 0, "a fused multiply-add would leave the rounding error of the product"


WORTH_CALLING = toolchain.WORTH_CALLING
"""The number, which other tests run without."""


def loop(rounds, operations):
    """Jaxpr of a loop of small operations."""

    def body(i, x):
        for _ in range(operations):
            x = bnp.sin(x)
        return x

    return bf.jit(lambda x: bf.lax.fori_loop(0, rounds, body, x)).trace(np.float32(1)).jaxpr


@pytest.mark.parametrize(
    ("rounds", "operations", "pays"),
    [
        (100, 2, True),
        (30, 1, True),
        (12, 2, True),
        (10, 2, False),
        (3, 5, False),
        (2, 8, True),
        (1000, 1, True),
    ],
)
def test_loops_are_compiled_by_their_calls(rounds, operations, pays, monkeypatch):
    monkeypatch.setattr(toolchain, "WORTH_CALLING", WORTH_CALLING)
    assert toolchain.worth_compiling(loop(rounds, operations)) is pays


SMALL = {  # a program, shapes of its arguments, and whether it is compiled
    "a sum of numbers": (lambda x: x + 1, [()], False),
    "a chain": (lambda x: bnp.tanh(x * 2 + 1) * x - bnp.exp(-x) / x, [(9,)], True),
    "a large difference": (lambda x, y: x[:, None] - y[None], [(200,), (200,)], True),
    "a small difference": (lambda x, y: x[:, None] - y[None], [(20,), (20,)], False),
    "norms of short rows": (lambda x: bnp.sqrt((x * x).sum(1)), [(2000, 3)], True),
    "norms of few short rows": (lambda x: bnp.sqrt((x * x).sum(1)), [(20, 3)], False),
    "a matmul": (lambda x, y: x @ y, [(16, 16), (16, 16)], False),
    "two matmuls": (lambda x, y: x @ (y @ y), [(16, 16), (16, 16)], True),
    "a pad and a join": (lambda x: bnp.roll(bnp.pad(x, 2), 1), [(90,)], True),
    "a transpose": (lambda x: x.T.reshape(-1), [(100, 100)], False),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_programs_are_compiled_by_their_calls(name, monkeypatch):
    monkeypatch.setattr(toolchain, "WORTH_CALLING", WORTH_CALLING)
    fun, shapes, expected = SMALL[name]
    jaxpr = simplify(bf.jit(fun).trace(*(np.ones(s, np.float32) for s in shapes)).jaxpr)
    assert toolchain.worth_compiling(jaxpr) is expected


def test_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert toolchain.threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert toolchain.threads() == toolchain.processors() >= 1
    monkeypatch.setattr(toolchain, "_forked", True)
    assert toolchain.threads() == 1


IN_A_CHILD = """
import ctypes, os, sys
from blufunc.kernels.backends.cpu import toolchain
before = dict(os.environ)
compiler = toolchain.find()
library = compiler.compile(sys.argv[1], "total")
library.total.restype = ctypes.c_long
assert library.total(ctypes.c_long(1000), 2) == 499500
assert dict(os.environ) == before, "settings for the runtime are taken back"
child = os.fork()
if child == 0:
    right = library.total(ctypes.c_long(1000), toolchain.threads()) == 499500
    os._exit(0 if right else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_does_not_wait_for_threads_that_it_has_not(real):
    command = [sys.executable, "-c", IN_A_CHILD, PARALLEL]
    done = subprocess.run(
        command, env=dict(os.environ), timeout=60, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("own", [None, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_the_users_own_settings_of_the_runtime_stand(monkeypatch, own):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    if own:
        monkeypatch.setenv(own, "7")
    seen = []
    monkeypatch.setattr(ctypes, "CDLL", lambda path: seen.append(dict(os.environ)))
    toolchain._load("library.so")
    changed = {k: v for k, v in seen[0].items() if os.environ.get(k) != v}
    assert changed == ({} if own else {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "0"})
