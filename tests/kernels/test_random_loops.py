"""Random programs with loops: native C++, NumPy calls and no ``jit`` agree.

The same holds for their gradients, tangents and batches.

``BLUFUNC_SWEEP=1`` runs more.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.config import config
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Literal
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cpu import planning, toolchain
from blufunc.kernels.backends.cuda import replay
from blufunc.kernels.backends.cuda.library.control_flow import bodies, loops
from blufunc.kernels.schedule import OpaqueStep, Schedule
from tests.kernels import random_loops

compiled = pytest.mark.skipif(toolchain.find() is None, reason="this machine has no C++ compiler")

SWEEP = bool(os.environ.get("BLUFUNC_SWEEP"))
TOGETHER = 6
"""Programs of one function: compiling one costs as much as many."""

TOLERANCE = {"float32": 1e-5, "complex64": 1e-5, "float64": 1e-12, "bfloat16": 0.05, "float16": 5e-3}


def differences(got: Sequence[Any], want: Sequence[Any]) -> list[str]:
    """The differences between the results of one program."""
    out = []
    for n, (g, w) in enumerate(zip(map(np.asarray, got), map(np.asarray, want), strict=True)):
        if (g.shape, g.dtype) != (w.shape, w.dtype):
            out.append(f"result {n} is {g.dtype}{g.shape}, not {w.dtype}{w.shape}")
        elif g.dtype.name not in TOLERANCE:
            if g.tobytes() != w.tobytes():
                out.append(f"result {n}, {w.dtype}{w.shape}:\n{g}\nis not\n{w}")
        elif w.size:
            wide = np.complex128 if w.dtype.kind == "c" else np.float64
            g, w, rounding = g.astype(wide), w.astype(wide), TOLERANCE[g.dtype.name]
            scale = max(1.0, float(np.nanmax(np.abs(w), initial=0)))
            if not np.allclose(g, w, rtol=0, atol=rounding * scale, equal_nan=True):
                out.append(
                    f"result {n}, {w.dtype}{w.shape}, by {np.nanmax(np.abs(g - w))}:\n{g}\nis not\n{w}"
                )
    return out


def with_compiler(compiler: str, run: Callable[[], Any]) -> Any:
    before = config.host_compiler, config.check
    config.host_compiler, config.check = compiler, True
    try:
        return run()
    finally:
        config.host_compiler, config.check = before


def results(compiler: str, fun: Callable, args: Sequence[Any], **options: Any) -> list[list[Any]]:
    """The leaves of each result of a function."""
    found = with_compiler(compiler, lambda: bf.jit(lambda *xs: fun(*xs), **options)(*args))
    return [bf.tree.leaves(x) for x in found]


# -- functions of some programs ------------------------------------------------------------------------


def inexact(x: Any) -> bool:
    return dtypes.is_floating(x.dtype)


def split(args: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """The floats among the arguments, and all arguments of given floats."""
    places = [n for n, x in enumerate(args) if inexact(x)]

    def joined(floats: Sequence[Any]) -> list[Any]:
        out = list(args)
        for n, x in zip(places, floats, strict=True):
            out[n] = x
        return out

    return [args[n] for n in places], joined


def loss_of(program: Callable, args: Sequence[Any]) -> Callable:
    """A smooth function of the floats among the arguments."""
    _, joined = split(args)

    def loss(floats: Sequence[Any]) -> Any:
        leaves = [y for y in program(*joined(floats)) if inexact(y) and y.size]
        parts = [bnp.sin(y).mean().astype(np.float64) for y in leaves]
        return sum(parts, bnp.asarray(0.0, np.float64))

    return loss


def forward(programs, *args):
    return [program(*args) for program in programs]


def gradients(programs, *args):
    floats, _ = split(args)
    return [bf.grad(loss_of(program, args))(floats) for program in programs]


def tangents(programs, *args):
    floats, joined = split(args)
    moved = [bnp.cos(x) for x in floats]
    out = []
    for program in programs:
        primals, changes = bf.jvp(lambda fs, program=program: program(*joined(fs)), (floats,), (moved,))
        out.append((primals, [t for t in changes if t.dtype != dtypes.float0]))
    return out


def batches(programs, *args):
    return bf.vmap(lambda *args: forward(programs, *args))(*args)


def some_batched(programs, *args):
    """Every third argument is the same for the whole batch."""
    axes = tuple(0 if n % 3 else None for n in range(len(args)))
    given = [x if a == 0 else x[0] for x, a in zip(args, axes, strict=True)]
    return bf.vmap(lambda *args: forward(programs, *args), in_axes=axes)(*given)


def gradients_of_batches(programs, *args):
    return bf.vmap(lambda *args: gradients(programs, *args))(*args)


def points(programs, *args):
    """The same of programs of points."""
    return batches(programs, *args)


def gradients_of_points(programs, *args):
    return gradients_of_batches(programs, *args)


WAYS = {
    f.__name__: f
    for f in (
        forward, gradients, tangents, batches, some_batched, gradients_of_batches, points, gradients_of_points,
    )
}  # fmt: skip
SMOOTH = ("gradients", "tangents", "gradients_of_batches", "gradients_of_points")
BATCHED = ("batches", "some_batched", "gradients_of_batches")
POINTWISE = ("points", "gradients_of_points")


def arguments(way: str, seed: int) -> list[Any]:
    inputs, count = (random_loops.points, 300) if way in POINTWISE else (random_loops.inputs, 3)
    given = inputs(seed)
    if way in BATCHED + POINTWISE:
        many = map(inputs, range(seed, seed + count))
        given = [np.stack(xs) for xs in zip(*many, strict=True)]
    return [bnp.asarray(x, x.dtype) for x in given]  # without a dtype they become 32-bit


def wrong(way: str, seeds: Sequence[int], donate: bool = False, eager: bool = False) -> dict[int, list[str]]:
    """The programs whose results differ, by seed."""
    programs = [random_loops.Program(seed, way in SMOOTH, way in POINTWISE) for seed in seeds]
    args = arguments(way, seeds[0])
    fun = lambda *args: WAYS[way](programs, *args)
    want = results("never", fun, args)
    if eager:
        got = [bf.tree.leaves(x) for x in with_compiler("never", lambda: fun(*args))]
    elif donate:
        copies = arguments(way, seeds[0])
        got = results("always", fun, copies, donate_argnums=tuple(range(len(args))))
    else:
        got = results("always", fun, args)
    found = {}
    for seed, g, w in zip(seeds, got, want, strict=True):
        if lines := differences(g, w):
            found[seed] = lines
    return found


def group(first: int) -> range:
    return range(first * TOGETHER, (first + 1) * TOGETHER)


def assert_agrees(found: dict[int, list[str]]) -> None:
    assert not found, "\n".join(f"program {seed}: {line}" for seed, lines in found.items() for line in lines)


@compiled
@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", range(200 if SWEEP else 3))
@pytest.mark.parametrize("way", WAYS)
def test_native(way, first):
    assert_agrees(wrong(way, group(first)))


@compiled
@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", range(3, 200 if SWEEP else 6))
@pytest.mark.parametrize("way", ["forward", "gradients"])
def test_donated_arguments(way, first):
    assert_agrees(wrong(way, group(first), donate=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", range(200 if SWEEP else 4))
def test_without_jit(first):
    assert_agrees(wrong("forward", group(first), eager=True))


def wrong_on(device: Any, way: str, seeds: Sequence[int], calls: int = 3) -> dict[int, list[str]]:
    """The programs whose results differ on a device.

    Later calls replay graphs.
    """
    programs = [random_loops.Program(seed, way in SMOOTH, way in POINTWISE) for seed in seeds]
    args = arguments(way, seeds[0])
    want = results("never", lambda *args: WAYS[way](programs, *args), args)
    there = [bf.device_put(x, device) for x in args]
    fun = bf.jit(lambda *args: WAYS[way](programs, *args))
    found: dict[int, list[str]] = {}
    for call in range(calls):
        got = [bf.tree.leaves(x) for x in fun(*there)]
        for seed, g, w in zip(seeds, got, want, strict=True):
            if lines := differences(g, w):
                found.setdefault(seed, [f"call {call}:", *lines])
    return found


@pytest.fixture
def nodes(monkeypatch):
    """Loops become nodes of graphs sooner."""
    monkeypatch.setattr(loops, "MOST_NODES", 16)
    monkeypatch.setattr(loops, "HOST_ROUNDS", 2)
    monkeypatch.setattr(loops, "MOST_STEPS", 3)
    monkeypatch.setattr(bodies, "LARGE", 1)
    monkeypatch.setattr(replay, "FEWEST", 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", range(200 if SWEEP else 2))
@pytest.mark.parametrize("way", WAYS)
def test_graphs(way, first, cuda, nodes):
    """Loops and branches as nodes of graphs of a device that is not there."""
    assert_agrees(wrong_on(cuda, way, group(first)))


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(60 if SWEEP else 4))
@pytest.mark.parametrize("way", WAYS)
def test_graphs_of_a_device(way, first, nodes):
    assert_agrees(wrong_on(bf.devices("cuda")[0], way, group(first)))


@pytest.mark.slow
def test_programs_reach_what_they_are_for():
    """Carries of all kinds, three loops in each other, steps in Python."""
    seen: Counter[str] = Counter()

    def visit(made: Schedule, depth: int) -> None:
        seen[f"depth {depth}"] += 1
        for step in made.steps:
            if not isinstance(step, OpaqueStep) or not step.planned:
                continue
            eqn = step.eqn
            seen["dropped"] += None in step.results
            if not planning.is_control(eqn):
                seen[
                    "native" if planning.is_native(eqn) or eqn.prim is lax.dot_general_p else "in Python"
                ] += 1
            elif eqn.prim.name == "cond":
                for branch in planning.branches_of(eqn):
                    visit(branch, depth + 1)
            else:
                loop = planning.rounds_of(eqn)
                homes = [planning.taken(loop, k) for k in range(loop.n_carry)]
                seen["rotated"] += any(j not in (None, k) for k, j in enumerate(homes))
                seen["in place"] += any(
                    j == k and o != loop.body.inputs[loop.n_consts + k]
                    for k, (j, o) in enumerate(zip(homes, loop.body.outputs, strict=False))
                )
                seen["in two buffers"] += None in homes
                seen["literal"] += any(isinstance(o, Literal) for o in loop.body.outputs)
                seen["alias"] += any(o in loop.body.aliases for o in loop.body.outputs if isinstance(o, int))
                visit(loop.body, depth + 1)

    for seed in range(300):
        jaxpr = simplify(bf.jit(random_loops.Program(seed)).trace(*arguments("forward", 0)).jaxpr)
        visit(planning.planned(jaxpr, (True,) * len(jaxpr.invars)), 0)
    assert len(seen) == 12 and min(seen.values()) >= 2, seen
