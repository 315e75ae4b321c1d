"""Jaxprs in two parts: what some results depend on, and the rest."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.ir.jaxpr import eval_jaxpr
from blufunc.transforms.autodiff.linearize import linearize_jaxpr
from blufunc.transforms.autodiff.transpose import transpose_jaxpr
from blufunc.transforms.checkpointing.split_outputs import split_outputs

RNG = np.random.default_rng(0)
B, C, H, L = 5, 6, 8, 3


def normal(*shape):
    return (0.3 * RNG.standard_normal(shape)).astype(np.float32)


X, CT = normal(B, C), normal(B, C)
LAYERS = {"bias": normal(L, H), "down": normal(L, H, C), "up": normal(L, C, H)}
SCALE = {"scale": normal(C), **LAYERS}


def block(x, p):
    return x + bnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]


def over_layers(block):
    return lambda layers, x: lax.scan(lambda x, p: (block(x, p), None), x, layers)[0]


def with_constant(params, x):
    """A cotangent that a loop sums in a carry for which no other waits."""
    layers = {k: v for k, v in params.items() if k != "scale"}
    return lax.scan(lambda x, p: (block(x * params["scale"], p), None), x, layers)[0]


def unrolled(layers, x):
    for i in range(L):
        x = block(x, {k: v[i] for k, v in layers.items()})
    return x


def twice(layers, x):
    """A loop in a loop."""
    return lax.scan(lambda x, _: (over_layers(block)(layers, x), None), x, None, length=2)[0]


def transposed(fun, params, x):
    """The backward pass as a jaxpr, its residuals, and a flag per result."""
    jaxpr = bf.make_jaxpr(fun)(params, x)
    n = len(params) + 1
    primal, linear, _, count = linearize_jaxpr(jaxpr, (True,) * n, (True,))
    backward, _ = transpose_jaxpr(linear, (False,) * count + (True,) * n, (True,), (True,) * n)
    closed, consts = primal.hoist()
    _, *residuals = eval_jaxpr(closed, [*consts, *[params[k] for k in sorted(params)], x])
    return backward, residuals, (*[False] * len(params), True)


CASES = {
    "loop": (over_layers(block), LAYERS, 1),
    "loop with a constant": (with_constant, SCALE, 1),
    "rematerialized": (bf.checkpoint(over_layers(block)), LAYERS, 1),
    "rematerialized layers": (over_layers(bf.checkpoint(block)), LAYERS, 1),
    "unrolled": (unrolled, LAYERS, 0),
    "loop in a loop": (twice, LAYERS, 1),
    "jit": (bf.jit(over_layers(bf.jit(block))), LAYERS, 1),
}


def matmuls(jaxpr):
    def of(jaxpr, times):
        for e in jaxpr.eqns:
            inner = times * e.params.get("length", 1) if e.prim.name == "scan" else times
            for body in (v for v in e.params.values() if hasattr(v, "eqns")):
                yield from of(body, inner)
            if e.prim.name == "dot_general":
                yield times

    return sum(of(jaxpr, 1))


@pytest.mark.parametrize("name", CASES)
def test_the_parts_together_are_the_whole(name):
    fun, params, _ = CASES[name]
    backward, residuals, needed = transposed(fun, params, X)
    want = eval_jaxpr(backward, [*residuals, CT])
    halves = split_outputs(backward, needed)
    of_x, *kept = eval_jaxpr(halves.first, [*residuals, CT])
    of_params = eval_jaxpr(halves.second, [*residuals, CT, *kept])
    for got, value in zip([*of_params, of_x], want, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(value), rtol=2e-4, atol=1e-5)
    assert split_outputs(backward, needed) is halves


@pytest.mark.parametrize("name", CASES)
def test_no_matmul_runs_twice(name):
    """Those of weights are in the second part, the others in the first."""
    fun, params, _ = CASES[name]
    backward, _, needed = transposed(fun, params, X)
    halves = split_outputs(backward, needed)
    passes = 2 * L if name == "loop in a loop" else L
    assert matmuls(halves.second) == 2 * passes
    assert matmuls(halves.first) + matmuls(halves.second) == matmuls(backward)


def test_values_that_are_cheap_are_computed_again():
    """Cotangents of matmuls' results are kept, not casts or functions of residuals."""

    def cast(params, x):
        return bnp.tanh(x.astype("bfloat16") @ params["w"].astype("bfloat16")).astype("float32")

    backward, _, needed = transposed(cast, {"w": normal(C, C)}, X)
    halves = split_outputs(backward, needed)
    n = len(backward.invars)
    assert [str(v.aval) for v in halves.second.invars[n:]] == ["bf16[5,6]"]


def test_results_that_one_operation_makes_are_in_the_first_part():
    """A sort makes both of its results at once."""
    jaxpr = bf.make_jaxpr(lambda x: lax.sort((x, -x), num_keys=1))(X[0])
    halves = split_outputs(jaxpr, (True, False))
    assert [e.prim.name for e in halves.first.eqns] == ["neg", "sort"] and not halves.second.eqns
    first, kept = eval_jaxpr(halves.first, [X[0]])
    np.testing.assert_array_equal(np.asarray(first), np.sort(X[0]))
    (second,) = eval_jaxpr(halves.second, [X[0], kept])
    np.testing.assert_array_equal(np.asarray(second), -np.sort(X[0]))
