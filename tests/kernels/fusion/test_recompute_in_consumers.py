"""Recomputation in consumers: float32 logits around a collective are not stored."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import eval_jaxpr
from blufunc.core.programs.simplify import simplify
from blufunc.core.programs.stage import stage
from blufunc.kernels.backends.cuda import program as cuda_program
from blufunc.kernels.fusion import recompute_in_consumers
from blufunc.kernels.fusion.fuse import Opaque, fuse
from blufunc.kernels.fusion.iteration_space import sort_of
from blufunc.kernels.fusion.recompute_in_consumers import computed_by_readers
from blufunc.kernels.loopir.access_map import moves
from blufunc.parallel.collectives import primitives as mc
from tests.emulation import fake_cuda

ROWS, LANES = 8, 32
F32, BF16 = np.dtype(np.float32), dtypes.bfloat16
TYPES = [((ROWS, 16), BF16), ((16, LANES), BF16), ((ROWS,), np.dtype(np.int32)), ((ROWS, LANES), BF16)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Arrays of ``ROWS * LANES`` in float32 or bfloat16 are large, rows are not."""
    monkeypatch.setattr(recompute_in_consumers, "LARGE", ROWS * LANES)


def staged(f):
    args = [from_numpy(np.zeros(shape, dtype)).aval for shape, dtype in TYPES]
    return simplify(stage(lambda *args: bf.tree.leaves(f(*args)), args, "f"))


def not_stored(jaxpr):
    """The operations whose results are not stored, in order."""
    found = computed_by_readers(jaxpr, {e: sort_of(e) for e in jaxpr.eqns})
    return [e.prim.name for e in jaxpr.eqns if found.intersection(e.outvars)]


def large_outputs(fusion):
    """Outputs of regions as large as the logits in float32."""
    written = (v for r in fusion.regions for v in r.outputs)
    return [v for v in written if v.aval.dtype == F32 and v.aval.size >= ROWS * LANES]


def by_product(m):
    return m @ bnp.ones((1, 1), F32)


def by_exchange(m):
    return mc.pmax_invariant_p.bind(m, src="V", dst="I", axes=("x",), sizes=(2,))


WALLS = {"barrier": lax.optimization_barrier, "product": by_product, "exchange": by_exchange}


def loss(wall, gradient):
    """Softmax over sharded classes: the maximum and the sum go through a barrier."""

    def f(x, w, labels, _):
        z = (x @ w).astype(F32)
        m = wall(z.max(1, keepdims=True))
        p = bnp.exp(z - m)
        s = wall(p.sum(1, keepdims=True))
        value = bnp.log(s)[:, 0] + m[:, 0] - bnp.take_along_axis(z, labels[:, None], 1)[:, 0]
        return (value, (p / s).astype(BF16)) if gradient else value

    return f


@pytest.mark.parametrize("wall", WALLS)
@pytest.mark.parametrize("gradient, found", [(False, ["convert"]), (True, ["convert", "sub", "exp"])])
def test_logits_are_converted_by_all_who_read_them(wall, gradient, found):
    jaxpr = staged(loss(WALLS[wall], gradient))
    assert not_stored(jaxpr) == found
    assert large_outputs(fuse(jaxpr)) and not large_outputs(fuse(jaxpr, read_again=True))


both = lambda z: (lax.optimization_barrier(z.max(1, keepdims=True)) + z).sum(1)
widened = lambda y: both(y.astype(F32))
grouped_of = lambda y: y.astype(F32).reshape(2, ROWS // 2, 4, LANES // 4)
grouped = lambda z: (z := z.reshape(2, ROWS // 2, 4, LANES // 4)) - z.sum((1, 3), keepdims=True)
centred = lambda z: ((d := z - z.sum((1, 3), keepdims=True)) * d).sum((1, 3))
exps = lambda y, n: exps(bnp.exp(y), n - 1) if n else y

CASES = {  # of a product in bfloat16: what is not stored
    "of both sides": (widened, ["convert"]),
    "moved between": (lambda y: widened(y.T.reshape(LANES, ROWS)), ["convert"]),
    "moved behind": (lambda y: both(y.astype(F32).T), ["convert"]),
    "two at a time": (lambda y: both(y.astype(F32) + y.astype(F32)), ["convert", "add"]),
    "of one number a row": (lambda y: both(y.astype(F32) + y[:, :1].astype(F32)), ["convert", "add"]),
    "of one number a row that the row makes": (lambda y: both((z := y.astype(F32)) - z.sum(1, keepdims=True)), []),
    "a product, which sums round or not": (lambda y: both(y.astype(F32) * 3), []),
    "compared behind": (lambda y: (z := y.astype(F32)) * (z == lax.optimization_barrier(z.max(1, keepdims=True))), []),
    "the place of the greatest": (lambda y: (z := y.astype(F32)).argmax(1) + both(z).astype(np.int32), []),
    "of a parameter": (lambda y, p: both(p.astype(F32)), ["convert"]),
    "of two that take as much": (lambda y, p: both(y.astype(F32) + p.astype(F32)), ["convert", "convert", "add"]),
    "all readers on one side": (lambda y: (z := y.astype(F32)).max(1) + z.sum(1), []),
    "all readers behind": (lambda y: (z := lax.optimization_barrier(y).astype(F32)).max(1) + z.sum(1), []),
    "a result": (lambda y: (widened(y), y.astype(F32)), []),
    "a result that is moved": (lambda y: (widened(y), y.astype(F32).T), []),
    "a barrier reads it": (lambda y: (z := y.astype(F32), both(z), lax.optimization_barrier(z).sum(1))[1:], []),
    "a product reads a view of it": (lambda y: (z := y.astype(F32), both(z), z.T @ z)[1:], []),
    "of more memory": (lambda y: both((y @ bnp.ones((LANES, LANES), BF16)).astype(dtypes.float8_e4m3fn)), []),
    "smaller": (lambda y, p: widened(y @ p.reshape(LANES, ROWS)[:, :4]), []),
    "of three that take more": (
        lambda y, p: both((y.astype(F32) + p.astype(F32)) * (y @ y.T @ p).astype(F32)),
        ["convert", "convert", "add"],
    ),
    "joined": (lambda y, p: both(bnp.concatenate([y[:, :9], p[:, 9:]], 1).astype(F32)), ["convert"]),
    "made before, read after": (
        lambda y: (bnp.exp(y.astype(F32)) * lax.optimization_barrier(y).astype(F32)).sum(1), ["convert", "exp"]
    ),
    "made after, of more memory than what is read": (
        lambda y: (lax.optimization_barrier(y) * bnp.exp(y + y[::-1] * 2)).sum(1), []
    ),
    "as many operations as may be": (lambda y: both(exps(y.astype(F32), 7)), ["convert"] + ["exp"] * 7),
    "too many operations": (lambda y: both(exps(y.astype(F32), 8)), []),
    "of a group": (lambda y: (grouped(y.astype(F32))), ["convert"]),
    "of groups and less their mean": (lambda y: centred(grouped_of(y)), ["convert", "sub", "mul"]),
    "of what a region computes": (lambda y: both(bnp.cumsum(y.astype(F32), 1) + y.astype(F32)), []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_stored(name):
    f, found = CASES[name]
    given = lambda x, w, labels, p: (x @ w, p)[: f.__code__.co_argcount]
    assert not_stored(staged(lambda *args: f(*given(*args)))) == found


def test_numbers_of_rows_that_are_made_of_themselves_are_looked_at_once():
    def f(x, w, labels, p):
        z, s = (x @ w).astype(F32), p[:, 0].astype(F32)
        for _ in range(60):
            s = s * (s + 1)
        return both(z - s[:ROWS, None])

    begin = time.perf_counter()
    assert not_stored(staged(f)) == ["convert", "sub"]
    assert time.perf_counter() - begin < 2  # by way of each operand: 2^60


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("wall", ["barrier", "product"])
def test_a_device_gets_the_same(monkeypatch, rng, wall, gradient):
    f = loss(WALLS[wall], gradient)
    args = [
        rng.standard_normal(s).astype(t) if t != np.int32 else np.arange(3, 3 + s[0], dtype=t)
        for s, t in TYPES
    ]
    want = bf.tree.leaves(bf.jit(f)(*args))
    fake_cuda.install(monkeypatch)
    got = bf.tree.leaves(bf.jit(f)(*bf.device_put(args, bf.devices("cuda")[0])))
    for g, w in zip(got, want, strict=True):
        rtol = 1e-2 if w.dtype == BF16 else 1e-5
        np.testing.assert_allclose(*(np.asarray(x).astype(F32) for x in (g, w)), rtol=rtol)


OPERATIONS = {  # of two values, in float32 or bfloat16; all exact, or rounded once
    "add": lambda a, b: a + b,
    "maximum": lambda a, b: bnp.maximum(a, -b),
    "narrow": lambda a, b: a.astype(BF16),
    "widen": lambda a, b: a.astype(F32),
    "moved": lambda a, b: a[::-1] + b,
    "rows": lambda a, b: a + b.max(1, keepdims=True),
    "wall": lambda a, b: lax.optimization_barrier(a),
    "wall of rows": lambda a, b: a + lax.optimization_barrier(b.max(1, keepdims=True)),
}


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.sampled_from(list(OPERATIONS)), st.integers(1, 4), st.integers(1, 4)), max_size=10),
    st.integers(1, 3),
)
@settings(max_examples=200)
def test_whatever_is_not_stored_results_are_the_same(operations, wanted):
    def f(x):
        values = [x] * 4
        for name, i, j in operations:
            values.append(OPERATIONS[name](values[-i], values[-j]))
        return values[-wanted:]

    x = np.random.default_rng(0).standard_normal((ROWS, LANES)).astype(BF16)
    jaxpr = simplify(stage(lambda x: bf.tree.leaves(f(x)), [from_numpy(x).aval], "f"))
    want = [np.asarray(a) for a in eval_jaxpr(jaxpr, [from_numpy(x)])]
    in_memory(jaxpr)
    with pytest.MonkeyPatch.context() as patch:
        fake_cuda.install(patch)
        device = bf.devices("cuda")[0]
        got = cuda_program.CudaProgram(jaxpr, (False,))([bf.device_put(x, device).buffer])
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(device.backend.to_host(g), w)


def in_memory(jaxpr):
    """Assert that all inputs of steps are in memory."""
    found = computed_by_readers(jaxpr, {e: sort_of(e) for e in jaxpr.eqns})
    views = {e.outvars[0]: e.invars[0] for e in jaxpr.eqns if moves(e)}
    fusion = fuse(jaxpr, read_again=True)
    there = {*jaxpr.invars, *jaxpr.constvars}
    for step in fusion.steps:
        assert there.issuperset(step.inputs)
        there.update(step.outputs)
        if isinstance(step, Opaque):
            assert found.isdisjoint(step.inputs)
    assert found.isdisjoint(there)
    for v in jaxpr.outvars:
        while v in views:
            v = views[v]
        assert v not in found
