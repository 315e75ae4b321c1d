"""GELU recomputed by the GEMM with its derivative, within a memory budget."""

import dataclasses
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
from blufunc.kernels.backends.cuda.library import gelu_gemm
from blufunc.kernels.backends.cuda.library.tile_gemm import COLUMNS, ROWS
from blufunc.kernels.recompute.epilogue import (
    of_argument,
    result_of,
    with_activations_again,
    with_result,
)
from blufunc.kernels.rewrites.activation_epilogue import dot_bias_gelu_p, dot_dgelu_p
from blufunc.kernels.rewrites.activation_sums import with_activation_sums
from blufunc.kernels.schedule import OpaqueStep
from tests.kernels.backends.cuda.library.test_split_gemm import products
from tests.kernels.backends.cuda.test_program import on
from tests.kernels.recompute.test_recompute_cost import layers, shapes, tanhs
from tests.kernels.rewrites.test_gemm_epilogue import half

M, N, K = 2 * ROWS, COLUMNS, 64
TOKENS = 2 * M
WITH_BOTH = "by the product with its derivative"


def planned(n, tokens, width, arch="sm_90a"):
    """Layers as a function of a budget: the schedule for a GPU."""
    jaxpr = simplify(bf.jit(layers(n)).trace(*shapes(n, tokens, width)).jaxpr)
    return lambda budget: cuda_program.planned(jaxpr, (False,) * len(jaxpr.invars), arch, budget)


def opaque(made):
    return [s.eqn for s in made.steps if isinstance(s, OpaqueStep)]


def both(made):
    """The products with GELU's derivative that give GELU, too."""
    return [e for e in opaque(made) if result_of(e) is not None]


# -- what a budget makes of it ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large():
    return planned(6, 32768, 768)


GELU = 32768 * 3072 * 2
"""Bytes of its result in those layers."""


def test_no_kernel_computes_gelu(large):
    """With a budget that drops one layer's GELU, a GEMM stores it."""
    default = large(None)
    made = large(default.plan.peak_bytes - GELU // 2)
    assert both(made) and not both(default) and not tanhs(made)
    assert len(opaque(made)) == len(opaque(default)) and len(made.kernels) == len(default.kernels)
    assert [d for d in made.bought.dropped if WITH_BOTH in d.label and d.nbytes == GELU]
    assert WITH_BOTH in made.bought.report()
    machine = made.bought.machine
    assert made.bought.seconds == pytest.approx(len(both(made)) * GELU / machine.bandwidth)
    assert made.bought.bytes == len(both(made)) * GELU


def test_the_weights_gradient_comes_behind_it(large):
    """And while the product runs, its argument and both results are apart in memory."""
    default = large(None)
    made = large(default.plan.peak_bytes - GELU // 2)
    ran = opaque(made)
    for eqn in both(made):
        recomputed = result_of(eqn)
        (reader,) = [e for e in ran if recomputed in e.invars]
        assert reader.prim is dot_general_p and ran.index(eqn) < ran.index(reader)
        places = [made.plan.placement[made.ids[v]] for v in (eqn.invars[2], eqn.outvars[0], recomputed)]
        begins = sorted(p.offset for p in places)
        assert all(b - a >= GELU for a, b in itertools.pairwise(begins))
    assert made.plan.peak_bytes <= made.bought.budget


ELSEWHERE = {  # tokens, width, the architecture: what has no kernel with both
    "another architecture": (32768, 768, "sm_80"),
    "Hopper, in general": (32768, 768, "sm_90"),
    "columns of another number": (32768, 800, "sm_90a"),
    "rows of another number": (32768 + 128, 768, "sm_90a"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_elsewhere_it_is_a_kernel(name):
    tokens, width, arch = ELSEWHERE[name]
    plan = planned(4, tokens, width, arch)
    default = plan(None)
    made = plan(default.plan.peak_bytes - tokens * width * 4)
    assert tanhs(made) and not tanhs(default) and not both(made)
    assert [d for d in made.bought.dropped if "from its argument" in d.label]


def test_a_product_before_the_peak_does_not_help():
    """Its output would have to be saved as well."""

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
    assert tanhs(made) and not tanhs(default) and not both(made)


@pytest.mark.parametrize("share", [0.9, 0.75, 0.5])
def test_less_memory(share, large):
    """Plans fit, also where matmuls are repeated and the peak moves past some of them."""
    peak = large(None).plan.peak_bytes
    made = large(int(share * peak))
    assert made.plan.peak_bytes <= share * peak and both(made) and not tanhs(made)


# -- what it computes -----------------------------------------------------------------------------------


def steps(n, missing, mixed=False, tokens=TOKENS):
    """Layers without a budget, and with one that drops some GELUs and arguments."""
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
    assert both(bought.made) and not tanhs(bought.made)
    assert {len(e.outvars) for e in both(bought.made)} == {2 + mixed}  # of mixed precision: sums as well
    want = bf.tree.leaves(plain(*there))
    for _ in range(4):
        for a, b in zip(want, bf.tree.leaves(tight(*there)), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_without_the_kernel_its_definition_runs(small, monkeypatch):
    """All results of it: a library would give the first one alone."""
    plain, tight, there = steps(4, 1)
    n = len(both(tight.lower(*there).memory.bought.made))
    want = bf.tree.leaves(plain(*there))
    monkeypatch.setattr(
        gelu_gemm, "kernel_of", lambda eqn, arch: None
    )  # which planning has under its own name
    small.epilogues.clear()
    for a, b in zip(want, bf.tree.leaves(tight(*there)), strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        assert np.abs(a - b).max() <= 0.02 * np.abs(a).max()
    assert 0 < n < 4
    assert [small.epilogues.count(name) for name in ("gelu_aux_bias", "dgelu")] == [4, 4 - n]


@pytest.mark.gpu
@pytest.mark.parametrize("mixed", [False, True])
def test_gradients_on_a_device(mixed):
    """Up to what the library's choice of algorithms makes."""
    plain, tight, there = steps(4, 1, mixed, tokens=32768)
    assert both(tight.lower(*there).memory.bought.made)
    want = bf.tree.leaves(plain(*there))
    for _ in range(4):
        for a, b in zip(want, bf.tree.leaves(tight(*there)), strict=True):
            a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
            assert np.abs(a - b).max() <= 0.02 * np.abs(a).max()


# -- equations ------------------------------------------------------------------------------------------


@pytest.fixture
def equations(small):
    """A GEMM with GELU that stores its argument, and one with its derivative there."""
    forward = lambda x, w, b: (nn.gelu(h := x @ w + b), h)
    back = lambda h, dy, v: bf.vjp(nn.gelu, h)[1](dy @ v)[0]
    (gelu,) = [e for e in products(forward, half(M, K), half(K, N), half(N)) if e.prim is dot_bias_gelu_p]
    (product,) = [e for e in products(back, half(M, N), half(M, K), half(K, N)) if e.prim is dot_dgelu_p]
    return gelu, product.with_invars([*product.invars[:2], gelu.outvars[1]])


@pytest.mark.parametrize("sums_first", [False, True])
def test_sums_and_gelu_in_any_order(sums_first, equations):
    """The equation is the kernel with both; its first result is unchanged."""
    gelu, product = equations
    kernel = lambda eqn: gelu_gemm.kernel_of(eqn, "sm_90a")
    call = of_argument(gelu)
    both = [lambda eqn: _summed(eqn, kernel), lambda eqn: with_result(eqn, call)]
    first, second = both if sums_first else both[::-1]
    eqn = second(first(product))
    found = kernel(eqn)
    assert (found.summed, found.again, found.stored) == (True, True, False)
    assert dataclasses.replace(found, summed=False, again=False) == kernel(product)
    recomputed = result_of(eqn)
    at = eqn.outvars.index(recomputed)
    assert at == 1 + sums_first and recomputed is call.outvars[0] and result_of(product) is None
    values = [bnp.asarray(half(*a.aval.shape) * 2) for a in product.invars]
    want, found = (eval_jaxpr(e.params["jaxpr"], values) for e in (product, eqn))
    np.testing.assert_array_equal(np.asarray(found[0]), np.asarray(want[0]))
    np.testing.assert_array_equal(np.asarray(found[at]), np.asarray(nn.gelu(values[2])))
    bands = np.asarray(want[0]).astype(np.float32).reshape(-1, ROWS, N).sum(1)
    np.testing.assert_allclose(np.asarray(found[3 - at]), bands, rtol=1e-5, atol=1e-4)
    assert [v.aval for v in eqn.outvars] == [a.aval for a in eqn.params["jaxpr"].outvars]


def _summed(product, kernel):
    """The product with sums of its first result."""

    total = lambda d: d.astype(dtypes.float32).sum((0,))
    body = simplify(bf.jit(total).trace(np.zeros((M, N), dtypes.bfloat16)).jaxpr)
    place = dict(zip(body.invars, product.outvars[:1], strict=True))
    rest = [e.with_invars([place.get(a, a) for a in e.invars]) for e in body.eqns]
    jaxpr = Jaxpr(product.invars, [product, *rest], [*product.outvars, *body.outvars])
    eqn, *rest = with_activation_sums(jaxpr, {}, kernel).eqns
    assert [e for e in rest if e.invars == eqn.outvars[-1:]]
    return eqn


class _Printing(Primitive):
    effects = frozenset({"print"})


PRINTING = _Printing("printing")
ORDERS = {  # the equations after the call, and their order in the result
    "the reader is behind": ("dr", "Dr"),
    "the reader is before": ("rd", "Dr"),
    "what reads the reader": ("rsd", "Drs"),
    "others stay": ("rod", "oDr"),
    "the product reads the reader": ("rnp", "grnp"),
    "two such products": ("rde", "grde"),
    "no such product": ("r", "gr"),
    "a reader with effects": ("wd", "gwd"),
    "effects of others": ("rud", "uDr"),
}


@pytest.mark.parametrize("name", ORDERS)
def test_where_readers_go(name, equations):
    """``D`` is the product with both results, ``g`` GELU by equations of its own."""
    given, wanted = ORDERS[name]
    gelu, product = equations
    call, (lhs, rhs, x) = of_argument(gelu), product.invars
    (g,) = call.outvars
    r, n, numbers = Var(g.aval), Var(lhs.aval), {"dimension_numbers": (((1,), (1,)), ((), ()))}
    other = lambda prim, *invars: Eqn(prim, invars, [Var(g.aval)], {}, None)
    repeated = lambda lhs: Eqn(
        dot_dgelu_p, [lhs, rhs, x], [Var(v.aval) for v in product.outvars], product.params, product.source
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
    rest = [letters[letter] for letter in given]
    jaxpr = Jaxpr([x, lhs, rhs], [call, *rest], [e.outvars[0] for e in rest])
    origins = {e: i for i, e in enumerate(rest)} | {call: 99}
    made = with_activations_again(jaxpr, origins)
    names = {e.outvars[0]: letter for letter, e in letters.items()}
    found = ["D" if result_of(e) else names.get(e.outvars[0], "g") for e in made.eqns]
    assert "".join(letter for letter, _ in itertools.groupby(found)) == wanted
    old = {e.outvars[0]: e for e in rest}
    assert all(origins[e] == origins[old.get(e.outvars[0], call)] for e in made.eqns)
    known = {x, lhs, rhs}
    for e in made.eqns:  # in order of dependence
        assert known.issuperset(a for a in e.invars if isinstance(a, Var))
        known.update(e.outvars)
    assert made.outvars == jaxpr.outvars
