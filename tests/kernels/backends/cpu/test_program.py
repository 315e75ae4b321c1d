"""Compiled CPU programs, with failing compilers, threads, memory and callbacks."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.config import config
from blufunc.core.arrays.array import from_numpy
from blufunc.kernels.backends.cpu import planning, toolchain
from blufunc.kernels.backends.cpu import program as host_program
from blufunc.kernels.backends.numpy.program import Program
from tests.kernels.differential import case

pytestmark = pytest.mark.skipif(toolchain.find() is None, reason="this machine has no C++ compiler")


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Compile programs of any size."""
    monkeypatch.setattr(config, "host_compiler", "always")


def draw(*shape):
    return from_numpy(np.random.default_rng(shape).normal(size=shape).astype(np.float32))


def f(x, y):
    """A program of two kernels and a matmul: (3, 4), (4, 4) -> (3, 4)."""
    return bnp.exp(x) @ y - bnp.exp(x).sum(-1, keepdims=True)


X, Y = draw(3, 4), draw(4, 4)


def expected(x, y):
    """Expected result of ``f``."""
    e = np.exp(np.asarray(x))
    return e @ np.asarray(y) - e.sum(-1, keepdims=True)


def program_of(fun, *args):
    """Program that ``jit`` runs."""
    return bf.jit(fun).lower(*args).compile().program


# -- which executor ----------------------------------------------------------------------------------


def test_small_programs_are_not_compiled(monkeypatch):
    monkeypatch.setattr(config, "host_compiler", "auto")
    assert isinstance(program_of(f, X, Y), Program)
    large = draw(300, 300)
    assert isinstance(program_of(f, large, large), host_program.HostProgram)
    monkeypatch.setattr(config, "host_compiler", "never")
    assert isinstance(program_of(f, large, large), Program)


def test_without_a_compiler_it_is_said_once(monkeypatch, capsys):
    monkeypatch.setattr(toolchain, "find", lambda: None)
    monkeypatch.setattr(toolchain, "why_none", lambda: "no C++ compiler was found")
    monkeypatch.setattr(host_program, "_said", [])
    for n in (2, 3):
        np.testing.assert_allclose(bf.jit(f)(X[:n], Y), expected(X[:n], Y), rtol=1e-6)
    assert capsys.readouterr().err.count("no C++ compiler was found. Such programs run as NumPy calls") == 1


class Refusing:
    """A compiler that rejects every source."""

    def compile(self, source, name, options=(), symbols=()):
        raise errors.CompileError(f"c++ refused the source of {name}.", why="it is Sunday")


def test_what_the_compiler_refuses_runs_as_numpy_calls(monkeypatch, capsys):
    monkeypatch.setattr(toolchain, "find", Refusing)
    monkeypatch.setattr(config, "check", False)
    monkeypatch.setattr(host_program, "_said", [])
    for n in (2, 3):
        np.testing.assert_allclose(bf.jit(f)(X[:n], Y), expected(X[:n], Y), rtol=1e-6)
    assert capsys.readouterr().err.count("f could not be compiled. Such programs run as NumPy calls") == 1
    monkeypatch.setattr(config, "debug", "compile")
    assert isinstance(program_of(f, X, Y), Program)
    said = capsys.readouterr().err
    assert "runs as NumPy calls" in said and "it is Sunday" in said


def test_what_the_compiler_refuses_is_an_error_where_we_check(monkeypatch):
    monkeypatch.setattr(toolchain, "find", Refusing)
    with pytest.raises(errors.CompileError, match="Sunday"):
        bf.jit(f)(X, Y)


def test_replaced_definitions_are_respected():
    """Kernels do not replace an operation that the user redefines."""
    with bf.override(lax.exp_p, impl=lambda x: 0 * x):
        np.testing.assert_array_equal(bf.jit(f)(X, Y), 0)
    with bf.override(lax.dot_general_p, impl=lambda x, y, **params: np.ones((3, 4), np.float32)):
        np.testing.assert_allclose(bf.jit(lambda x, y: x @ y + 1)(X, Y), 2)


# -- threads -----------------------------------------------------------------------------------------


def test_threads_call_one_program_at_once():
    """Each call has its own memory."""
    step = bf.jit(lambda x: bnp.cumsum(bnp.exp(x), 0)[::-1] * 2 + bnp.exp(x).sum(0))
    xs = [draw(40, 30) + i for i in range(4)]
    want = [np.asarray(step(x)) for x in xs]
    wrong = []

    def work(i):
        for _ in range(60):
            if not np.array_equal(np.asarray(step(xs[i])), want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


IN_A_CHILD = """
import os, sys
import numpy as np
import blufunc as bf, blufunc.numpy as bnp
x = bnp.asarray(np.linspace(0, 1, 1 << 20, dtype=np.float32).reshape(1024, 1024))
step = bf.jit(lambda x: (bnp.exp(bnp.sin(x)) * x).sum(0))
want = np.asarray(step(x))
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(np.asarray(step(x)), want) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_program_of_the_parent_runs_in_a_forked_child():
    """A forked child has none of the parent's threads."""
    env = {**os.environ, "OMP_NUM_THREADS": "2", "BLUFUNC_HOST_COMPILER": "always"}
    command = [sys.executable, "-W", "ignore", "-c", IN_A_CHILD]
    done = subprocess.run(command, env=env, timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- users' functions --------------------------------------------------------------------------------


def test_a_program_that_calls_itself():
    """Reentrant through a callback: the inner call has its own memory."""
    depth = []

    def back(x):
        if len(depth) < 2:
            depth.append(x)
            return np.asarray(step(from_numpy(x)))
        return x

    def program(x):
        y = bnp.exp(x) * 2
        z = bf.pure_callback(back, bf.ShapeDtypeStruct(x.shape, x.dtype), bnp.sin(y))
        return y + z.sum(0) + y.sum(1, keepdims=True)

    def by_numpy(x, depth):
        y = np.exp(x) * 2
        z = np.sin(y)
        z = by_numpy(z, depth - 1) if depth else z
        return y + z.sum(0) + y.sum(1, keepdims=True)

    step = bf.jit(program)
    np.testing.assert_allclose(step(X), by_numpy(np.asarray(X), 2), rtol=1e-5)


# -- arguments and results ---------------------------------------------------------------------------


def test_arguments_that_are_not_in_order():
    """Loop bodies get views: rows of a transposed array, NumPy scalars, broadcasts."""
    program = program_of(lambda x, s: (bnp.exp(x) * s).sum(0), X, bnp.asarray(np.float32(2)))
    x = np.asarray(X)
    for view in (np.asfortranarray(x), np.repeat(x, 2, 1)[:, ::2], np.broadcast_to(x[:1], x.shape)):
        (got,) = program([view, np.float32(2)])
        np.testing.assert_allclose(got, (np.exp(view) * 2).sum(0), rtol=1e-6)


def test_scalars_of_a_scan():
    """A scan slices vectors into NumPy scalars, which have no stable address."""
    xs = draw(64)
    got = lax.scan(lambda c, x: (c * 0.5 + bnp.exp(x), bnp.sin(x) * c), xs[0], xs)
    c, ys = np.asarray(xs)[0], []
    for x in np.asarray(xs):
        ys.append(np.sin(x) * c)
        c = c * np.float32(0.5) + np.exp(x)
    compiled = bf.jit(lambda xs: lax.scan(lambda c, x: (c * 0.5 + bnp.exp(x), bnp.sin(x) * c), xs[0], xs))(xs)
    for result in (got, compiled):
        np.testing.assert_allclose(result[0], c, rtol=1e-5)
        np.testing.assert_allclose(result[1], ys, rtol=1e-4, atol=1e-5)


RETURNED = {
    "an argument": lambda x, y: (x, y + x),
    "an argument twice": lambda x, y: (x, x, y * 2),
    "donated ones exchanged": lambda x, y: (y, x),
    "what a barrier passes on": lambda x, y: (lax.optimization_barrier(x), x * 2 + y),
    "a barrier's temporary": lambda x, y: (lax.optimization_barrier(x * 3), bnp.abs(x) * y, -x),
    "a result twice": lambda x, y: ((z := x + y), z, z * x),
    "a view": lambda x, y: (x.T, (x * y).T, x[1:]),
    "literals": lambda x, y: (bnp.float32(3), x * y),
}


@pytest.mark.parametrize("name", RETURNED)
@pytest.mark.parametrize("donated", [(), (0,), (0, 1)], ids=["nothing", "one", "both"])
def test_results_have_memory_of_their_own(name, donated):
    """Results are correct for any donation, and no two share memory."""
    x, y = np.arange(12, dtype=np.float32).reshape(3, 4), np.ones((3, 4), np.float32)
    made = case(RETURNED[name], from_numpy(x), from_numpy(y), donate=donated, name=name)
    flags = [i in donated for i in range(2)]
    program = host_program.HostProgram(made.jaxpr, flags, toolchain.find())
    given = [x.copy(), y.copy()]
    results = list(program(list(given)))
    want = made.expected()
    for i, (got, right) in enumerate(zip(results, want, strict=True)):
        np.testing.assert_array_equal(got, right)
        results[i] = got if got.flags.writeable else got.copy()
        results[i][...] = -1
    for a, flag, before in zip(given, flags, (x, y), strict=True):
        assert flag or np.array_equal(a, before), "an argument that was not donated was written to"


def test_donated_arrays_whose_memory_others_see():
    x = draw(6, 5)
    view = np.asarray(x)
    before = view.copy()
    step = bf.jit(lambda x: x * 2 + 1, donate_argnums=0)
    np.testing.assert_array_equal(step(x), before * 2 + 1)
    np.testing.assert_array_equal(view, before)


EMPTY = {
    "nothing at all": (lambda x: bnp.exp(x), (0, 3)),
    "sums of nothing": (lambda x: (x.sum(0), x.sum(1), x.sum()), (0, 3)),
    "no lanes": (lambda x: (x.sum(1), x * 2), (3, 0)),
    "empty and nonempty": (lambda x: (bnp.concatenate([x, bnp.ones((2, 3), x.dtype)]) * 2, x), (0, 3)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_empty_arrays(name):
    fun, shape = EMPTY[name]
    x = from_numpy(np.ones(shape, np.float32))
    for got, want in zip(bf.tree.leaves(bf.jit(fun)(x)), bf.tree.leaves(fun(x)), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


# -- the text ----------------------------------------------------------------------------------------


def test_golden_huge_indices(golden):
    """Positions beyond 2**31 use 64-bit indices; nothing that large is allocated."""
    shape = bf.ShapeDtypeStruct((3, 1 << 30), np.float32)
    lowered = bf.jit(lambda x: x[:, ::-1] + 1).lower(shape)
    golden("host_huge", host_program.source_of(planning.planned(lowered.jaxpr, [False]))[0])


def test_reductions_of_large_arrays_are_compiled(monkeypatch):
    """They read much and write little; moving a few elements does neither."""
    monkeypatch.setattr(config, "host_compiler", "auto")
    large = draw(300, 300)
    assert isinstance(program_of(lambda x: x.sum(1), large), host_program.HostProgram)
    assert isinstance(program_of(lambda x: x[3] + 1, large), Program)


WORTH_CALLING = toolchain.WORTH_CALLING
"""The number, which other tests run without."""

GATHERS = (
    lambda x, i: x[i],
    lambda x, i: x.at[i].set(0),
    lambda x, i: bnp.take_along_axis(x, i[:, None], 1),
)


def test_small_programs_of_several_numpy_calls_are_compiled(monkeypatch):
    monkeypatch.setattr(toolchain, "WORTH_CALLING", WORTH_CALLING)
    monkeypatch.setattr(config, "host_compiler", "auto")
    x, i = np.eye(10, dtype=np.float32), np.arange(10) // 2
    compiled = lambda fun, *args: isinstance(program_of(fun, *args), host_program.HostProgram)
    for fun in (bnp.linalg.inv, bnp.linalg.det, bnp.linalg.cholesky, bnp.linalg.svdvals):
        assert compiled(fun, x)
    assert all(compiled(fun, x, i) for fun in GATHERS)
    assert compiled(lambda x: lax.top_k(x, 3), draw(50, 100))
    assert not compiled(bnp.linalg.eigvals, x)  # no native form
    assert not compiled(lambda x: bnp.sort(x) + 1, x)
