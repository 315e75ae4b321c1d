"""Results of epilogues recomputed by other epilogues: plans, values and limits."""

import itertools

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import nn
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var, eval_jaxpr
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.elementwise import add_p
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cuda import program as cuda_program
from blufunc.kernels.backends.cuda.library import pointwise_gemm
from blufunc.kernels.backends.cuda.library.tile_gemm import COLUMNS, ROWS
from blufunc.kernels.ops.pointwise_gemm import dot_pointwise_p
from blufunc.kernels.recompute.epilogue import (
    equations,
    recomputed,
    recomputing,
    with_recomputed_results,
    with_result,
)
from blufunc.kernels.rewrites.reductions.partial_reductions import with_partial_sums
from blufunc.kernels.schedule import OpaqueStep
from tests.kernels.backends.cuda.library.test_split_gemm import products
from tests.kernels.backends.cuda.test_program import on
from tests.kernels.recompute.test_budget_cuts import gates, layers, shapes
from tests.kernels.rewrites.test_gemm_epilogue import half
from tests.kernels.rewrites.test_pointwise_epilogue import always, gated, gradients

M, N, K = 2 * ROWS, COLUMNS, 64
TOKENS = 2 * M
WITH_BOTH = "by the epilogue of another matmul"


def planned(n, tokens, width, arch="sm_90a"):
    """Layers as a function of a budget: the schedule for a GPU."""
    jaxpr = simplify(bf.jit(layers(n)).trace(*shapes(n, tokens, width)).jaxpr)
    return lambda budget: cuda_program.planned(jaxpr, (False,) * len(jaxpr.invars), arch, budget)


def opaque(made):
    return [s.eqn for s in made.steps if isinstance(s, OpaqueStep)]


def both(made):
    """The matmuls whose epilogues recompute a result of another."""
    return [e for e in opaque(made) if recomputed(e)]


# -- what a budget makes of it ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large():
    return planned(6, 32768, 768)


GELU = 32768 * 3072 * 2
"""Bytes of its result in those layers."""


def test_no_kernel_computes_gelu(large):
    """A matmul recomputes the GELU of one layer for the time to write it."""
    default = large(None)
    made = large(default.plan.peak_bytes - GELU // 2)
    assert both(made) and not both(default) and not gates(made)
    assert len(opaque(made)) == len(opaque(default)) and len(made.kernels) == len(default.kernels)
    assert [d for d in made.bought.dropped if WITH_BOTH in d.label and d.nbytes == GELU]
    assert WITH_BOTH in made.bought.report()
    machine = made.bought.machine
    assert made.bought.seconds == pytest.approx(len(both(made)) * GELU / machine.bandwidth)
    assert made.bought.bytes == len(both(made)) * GELU


def test_the_weights_gradient_follows_it(large):
    """While the matmul runs, its argument and both results do not overlap in memory."""
    default = large(None)
    made = large(default.plan.peak_bytes - GELU // 2)
    ran = opaque(made)
    for eqn in both(made):
        (repeated,) = recomputed(eqn)
        (reader,) = [e for e in ran if repeated in e.invars]
        assert reader.prim is dot_general_p and ran.index(eqn) < ran.index(reader)
        places = [made.plan.placement[made.ids[v]] for v in (eqn.invars[2], eqn.outvars[0], repeated)]
        begins = sorted(p.offset for p in places)
        assert all(b - a >= GELU for a, b in itertools.pairwise(begins))
    assert made.plan.peak_bytes <= made.bought.budget


def test_a_product_before_the_peak_does_not_help(monkeypatch):
    """Its result would have to be saved as well."""
    always(monkeypatch)

    def fun(x, w, b, dy, v, p):
        g = nn.gelu(h := x @ w + b)
        (d,) = bf.vjp(nn.gelu, h)[1](dy @ v)
        wide = (d @ w.T) @ p  # the peak
        return h, g.T @ (wide @ p.T)

    sizes = [(32768, 768), (768, 3072), (3072,), (32768, 768), (768, 3072), (768, 9216)]
    traced = bf.jit(fun).trace(*[bf.ShapeDtypeStruct(s, dtypes.bfloat16) for s in sizes])
    plan = lambda budget: cuda_program.planned(simplify(traced.jaxpr), (False,) * 6, "sm_90a", budget)
    default = plan(None)
    made = plan(default.plan.peak_bytes - GELU // 2)
    assert gates(made) and not gates(default) and not both(made)


@pytest.mark.second
@pytest.mark.parametrize("share", [0.9, 0.75, 0.5])
def test_less_memory(share, large):
    """Plans fit, also if matmuls are repeated and the peak moves after some of them."""
    peak = large(None).plan.peak_bytes
    made = large(int(share * peak))
    assert made.plan.peak_bytes <= share * peak and both(made) and not gates(made)


# -- what it computes -----------------------------------------------------------------------------------


def steps(n, missing, mixed=False, tokens=TOKENS):
    """Layers without a budget and within one for fewer GELUs, and arguments."""
    args = [half(*a.shape, seed=i) / (8 if i else 1) for i, a in enumerate(shapes(n, tokens, COLUMNS))]
    args = [x.astype(np.float32) if mixed or not i else x for i, x in enumerate(args)]
    fun, there = bf.autocast(layers(n)) if mixed else layers(n), on(bf.devices("cuda")[0], *args)
    plain = bf.jit(fun)
    peak = plain.lower(*there).memory.peak_bytes
    return plain, bf.jit(fun, memory_budget=int(peak - missing * tokens * 4 * COLUMNS * 2)), there


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mixed", [False, True])
def test_gradients_are_those_without_a_budget(mixed, small):
    """To the bit, as the argument is that of the forward pass; with graphs, too."""
    plain, tight, there = steps(4, 1, mixed)
    bought = tight.lower(*there).memory.bought
    assert both(bought.made) and not gates(bought.made)
    assert {len(e.outvars) for e in both(bought.made)} == {2 + mixed}  # of mixed precision: sums as well
    want = bf.tree.leaves(plain(*there))
    for _ in range(4):
        for a, b in zip(want, bf.tree.leaves(tight(*there)), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.gpu
@pytest.mark.parametrize("mixed", [False, True])
def test_gradients_on_a_device(mixed, monkeypatch):
    """Up to what the library's choice of algorithms makes."""
    always(monkeypatch)
    plain, tight, there = steps(4, 1, mixed, tokens=32768)
    assert both(tight.lower(*there).memory.bought.made)
    want = bf.tree.leaves(plain(*there))
    for _ in range(4):
        for a, b in zip(want, bf.tree.leaves(tight(*there)), strict=True):
            a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
            assert np.abs(a - b).max() <= 0.02 * np.abs(a).max()


def test_a_gated_layer_recomputes_its_product(monkeypatch):
    """From the gate and the matmul that its derivative reads: nothing runs twice."""
    always(monkeypatch)
    sizes = [(8192, 2048), (2048, 5632), (2048, 5632), (5632, 2048)]

    def loss(x, *layers):
        for gate, up, down in layers:
            x = x + gated(x, gate, up, down)
        return (x.astype(np.float32) ** 2).sum()

    avals = [bf.ShapeDtypeStruct(s, dtypes.bfloat16) for s in sizes]
    jaxpr = simplify(
        bf.jit(bf.grad(loss, argnums=(1, 2, 3, 4))).trace(avals[0], *[tuple(avals[1:])] * 4).jaxpr
    )
    plan = lambda budget: cuda_program.planned(jaxpr, (False,) * len(jaxpr.invars), "sm_90a", budget)
    default = plan(None)
    made = plan(default.plan.peak_bytes - 8192 * 5632 * 2)
    assert both(made) and not both(default) and len(opaque(made)) == len(opaque(default))
    assert {len(recomputed(e)) for e in both(made)} == {1} and {len(e.outvars) for e in both(made)} == {3}


# -- equations ------------------------------------------------------------------------------------------


@pytest.fixture
def pair(small):
    """A matmul with GELU that stores its argument, and one with its derivative there."""
    forward = lambda x, w, b: (nn.gelu(h := x @ w + b), h)
    back = lambda h, dy, v: bf.vjp(nn.gelu, h)[1](dy @ v)[0]
    (gelu,) = products(forward, half(M, K), half(K, N), half(N))
    (matmul,) = products(back, half(M, N), half(M, K), half(K, N))
    return gelu, matmul.with_invars([*matmul.invars[:2], gelu.outvars[1]])


@pytest.mark.parametrize("sums_first", [False, True])
def test_sums_and_recomputed_results(sums_first, pair):
    """There is a kernel with both, in either order; sums are its last result."""
    gelu, matmul = pair
    (call,) = recomputing(gelu)
    both = [_summed, lambda eqn: with_result(eqn, call)]
    first, second = both if sums_first else both[::-1]
    eqn = second(first(matmul))
    assert pointwise_gemm.why_not(eqn, "sm_90a") is None
    assert recomputed(eqn) == call.outvars == eqn.outvars[1:2] and recomputed(matmul) == []
    values = [half(*a.aval.shape) * 2 for a in matmul.invars]
    want, found = (e.prim.impl(*values, **e.params) for e in (matmul, eqn))
    np.testing.assert_array_equal(found[0], want[0])
    np.testing.assert_array_equal(found[1], np.asarray(nn.gelu(bnp.asarray(values[2]))))
    bands = want[0].astype(np.float32).reshape(-1, ROWS, N).sum(1)
    np.testing.assert_allclose(found[2], bands, rtol=1e-5, atol=1e-4)


def _summed(matmul):
    """The matmul with sums of its first result."""
    total = lambda d: d.astype(dtypes.float32).sum((0,))
    body = simplify(bf.jit(total).trace(np.zeros((M, N), dtypes.bfloat16)).jaxpr)
    place = dict(zip(body.invars, matmul.outvars[:1], strict=True))
    after = [e.with_invars([place.get(a, a) for a in e.invars]) for e in body.eqns]
    jaxpr = Jaxpr(matmul.invars, [matmul, *after], [*matmul.outvars, *body.outvars])
    eqn, *rest = with_partial_sums(jaxpr, {}, lambda e: ROWS * (e.prim is dot_pointwise_p)).eqns
    assert [e for e in rest if e.invars == eqn.outvars[-1:]]
    return eqn


def test_what_is_recomputed_of_each(small):
    """Only results that depend on values in memory, without the matmul."""
    back = gradients(gated)
    args = half(2, 128, 64), half(64, 128), half(64, 128, seed=2), half(128, 64)
    forward, backward = [e for e in products(back, *args) if e.prim is dot_pointwise_p]
    (call,) = recomputing(forward)
    assert call.outvars == forward.outvars[:1] and set(call.invars) == {forward.outvars[1], forward.invars[2]}
    values = [half(*v.aval.shape) for v in call.invars]
    (found,) = eval_jaxpr(
        Jaxpr(call.invars, list(equations(call)), call.outvars), [bnp.asarray(x) for x in values]
    )
    u, g = values if call.invars[0] is forward.outvars[1] else values[::-1]
    np.testing.assert_array_equal(np.asarray(found), np.asarray(nn.silu(bnp.asarray(g)) * bnp.asarray(u)))
    assert recomputing(backward) == []


class _Printing(Primitive):
    effects = frozenset({"print"})


PRINTING = _Printing("printing")
ORDERS = {  # the equations after the call, and their order in the result
    "the reader follows": ("dr", "Dr"),
    "the reader is before": ("rd", "Dr"),
    "what reads the reader": ("rsd", "Drs"),
    "others stay": ("rod", "oDr"),
    "the product reads the reader": ("rnp", "grnp"),
    "two such products": ("rde", "Dre"),
    "no such product": ("r", "gr"),
    "a reader with effects": ("wd", "gwd"),
    "effects of others": ("rud", "uDr"),
}


@pytest.mark.parametrize("name", ORDERS)
def test_where_readers_go(name, pair):
    """``D`` is the matmul with both results, ``g`` GELU by equations of its own."""
    given, wanted = ORDERS[name]
    gelu, product = pair
    (call,), (lhs, rhs, x) = recomputing(gelu), product.invars
    (g,) = call.outvars
    r, n, numbers = Var(g.aval), Var(lhs.aval), {"dimension_numbers": (((1,), (1,)), ((), ()))}
    other = lambda prim, *invars: Eqn(prim, invars, [Var(g.aval)], {}, None)
    repeated = lambda lhs: Eqn(
        dot_pointwise_p, [lhs, rhs, x], [Var(v.aval) for v in product.outvars], product.params, product.source
    )
    letters = {
        "r": Eqn(add_p, [g, g], [r], {}, None),  # reads GELU
        "s": other(add_p, r, g),
        "o": other(add_p, x, x),
        "d": repeated(lhs),
        "e": repeated(lhs),
        "n": Eqn(dot_general_p, [r, rhs], [n], numbers, None),
        "p": repeated(n),
        "w": other(PRINTING, g),
        "u": other(PRINTING, x),
    }
    followers = [letters[letter] for letter in given]
    jaxpr = Jaxpr([x, lhs, rhs], [call, *followers], [e.outvars[0] for e in followers])
    origins = {e: i for i, e in enumerate(followers)} | {call: 99}
    made = with_recomputed_results(jaxpr, origins, lambda eqn: True)
    names = {e.outvars[0]: letter for letter, e in letters.items()}
    found = ["D" if recomputed(e) else names.get(e.outvars[0], "g") for e in made.eqns]
    assert "".join(letter for letter, _ in itertools.groupby(found)) == wanted
    old = {e.outvars[0]: e for e in followers}
    assert all(origins[e] == origins[old.get(e.outvars[0], call)] for e in made.eqns)
    known = {x, lhs, rhs}
    for e in made.eqns:  # in order of dependence
        assert known.issuperset(a for a in e.invars if isinstance(a, Var))
        known.update(e.outvars)
    assert made.outvars == jaxpr.outvars
