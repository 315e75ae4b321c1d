"""Costs of recomputation: epilogues without matmuls, sums that readers compute."""

import dataclasses

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import nn
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Jaxpr, eval_jaxpr
from blufunc.core.programs.simplify import simplify
from blufunc.kernels import pipeline as steps
from blufunc.kernels.backends.cuda import dispatch
from blufunc.kernels.backends.cuda import program as cuda_program
from blufunc.kernels.backends.cuda.library import pointwise_gemm
from blufunc.kernels.cost import cost_of, plan_seconds
from blufunc.kernels.ops.pointwise_gemm import dot_pointwise_p
from blufunc.kernels.recompute import epilogue
from blufunc.kernels.recompute.budget_cuts import Cuts
from blufunc.kernels.schedule import OpaqueStep
from tests.kernels.backends.cuda.test_program import on
from tests.kernels.rewrites.test_gemm_epilogue import half

GELU = 32768 * 3072 * 2
"""Bytes of the result of GELU in the layers below."""

EPILOGUE = dot_pointwise_p.name


WHY_NOT = pointwise_gemm.why_not


def alone(eqn):
    """As ``pointwise_gemm.why_not``, but that no kernel recomputes what another wrote."""
    reason = WHY_NOT(eqn, "sm_90a")
    return reason or ("it does not depend on the matmul" if epilogue.recomputed(eqn) else None)


TARGET = dataclasses.replace(cuda_program.TARGET, pointwise_gemm=alone)


def layers(n):
    """The gradients of a loss of residual layers: two matmuls with GELU between them."""

    def loss(x, *weights):
        for w, b, v in zip(weights[::3], weights[1::3], weights[2::3], strict=True):
            low = nn.layer_norm(x).astype(dtypes.bfloat16)
            x = x + (nn.gelu(low @ w + b) @ v).astype(x.dtype)
        return (x**2).sum()

    return lambda *args: bf.value_and_grad(loss, argnums=tuple(range(len(args))))(*args)


def shapes(n, tokens, width):
    weights = [(width, 4 * width), (4 * width,), (4 * width, width)] * n
    avals = [bf.ShapeDtypeStruct(s, dtypes.bfloat16) for s in weights]
    return [bf.ShapeDtypeStruct((tokens, width), np.float32), *avals]


@pytest.fixture(scope="module")
def planned():
    """Six layers of 32768 tokens as a function of a budget: the schedule for a GPU."""
    traced = bf.jit(layers(6)).trace(*shapes(6, 32768, 768))
    jaxpr = simplify(traced.jaxpr)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pointwise_gemm, "why_not", lambda eqn, arch: alone(eqn))
        yield lambda budget: cuda_program.planned(jaxpr, (False,) * len(jaxpr.invars), "sm_90a", budget)


def count(made, name):
    return sum(isinstance(s, OpaqueStep) and s.eqn.prim.name == name for s in made.steps)


def gates(made):
    """Kernels that compute GELU."""
    return [k for k in made.kernels if "logistic" in str(k)]


def test_an_activation_is_computed_from_its_argument(planned):
    """A kernel recomputes the GELU of one layer, and no matmul is repeated."""
    default = planned(None)
    made = planned(default.plan.peak_bytes - 2 * GELU)
    assert count(made, EPILOGUE) == count(default, EPILOGUE) == 12
    assert not gates(default) and gates(made)
    assert [d for d in made.bought.dropped if "elementwise" in d.label and d.nbytes == GELU]
    machine = made.bought.machine
    assert made.bought.flops < 0.01 * cost_of(default).flops
    product = 2 * 32768 * 768 * 3072 / machine.narrow_products
    assert 0 < made.bought.seconds < 2 * product


def test_without_room_for_the_argument_the_product_computes_both_again(planned):
    default = planned(None)
    made = planned(int(0.5 * default.plan.peak_bytes))
    assert count(made, EPILOGUE) > 12


def test_a_sum_is_computed_by_its_reader(planned):
    """For half of the float32 stream, the same kernels read one more summand."""
    default = planned(None)
    stream = 32768 * 768 * 4
    made = planned(default.plan.peak_bytes - stream // 4)
    assert [d for d in made.bought.dropped if d.nbytes == stream]
    assert len(made.kernels) == len(default.kernels) and not gates(made)
    assert made.bought.bytes <= 1.1 * stream


@pytest.fixture(scope="module")
def cut():
    """The choices for four layers with a budget of 3/4 of the peak, and their plan."""
    traced = bf.jit(layers(4)).trace(*shapes(4, 32768, 768))
    jaxpr = simplify(traced.jaxpr)
    donated = (False,) * len(jaxpr.invars)
    planning = steps.Planning(jaxpr, donated, TARGET, dispatch.Library("sm_90a").planned)
    made = planning.default()
    estimate = planning.schedule(made.jaxpr, estimate=True)
    return Cuts(estimate, estimate.plan.peak_bytes * 3 // 4, cuda_program.TARGET.machine), estimate, made


def test_what_an_activation_takes(cut):
    """Its time: to read the argument and to write the result; the matmul takes longer."""
    cuts, _, _ = cut
    assert len(cuts.elementwise) == 4
    for result, link in cuts.elementwise.items():
        assert link.maker.prim is dot_pointwise_p and link.maker.outvars == [result, *link.operands]
        assert link.seconds == pytest.approx(cuts.machine.launch + 2 * GELU / cuts.machine.bandwidth)
        assert link.seconds < 0.5 * cuts.seconds[link.maker]


def test_an_activation_or_its_product(cut):
    """As rates rise, first an activation is recomputed, then its matmul; never both."""
    cuts, _, _ = cut
    for segments in cuts.levels[:3]:
        found = [cuts.choose(segments, 2 ** (k / 4) / cuts.machine.bandwidth) for k in range(-12, 48)]
        ways = [
            [(y in c.instead, link.operands[0] in c.recomputed) for y, link in cuts.elementwise.items()]
            for c in found
        ]
        assert {(True, False), (False, True)} <= {way for row in ways for way in row}
        assert not any(way == (True, True) for row in ways for way in row)
        assert all(
            y in c.recomputed
            for c in found
            for y, link in cuts.elementwise.items()
            if link.operands[0] in c.recomputed
        )
        assert not any(instead for instead, _ in ways[0] + ways[-1])


def test_the_time_of_a_plan_is_that_of_its_cost(cut):
    """And of launches, and of activations that products do not hide."""
    cuts, estimate, made = cut
    launches = cost_of(made).launches * cuts.machine.launch
    assert plan_seconds(estimate, cuts.machine) == pytest.approx(
        cost_of(made).seconds(cuts.machine) + launches, rel=0.03
    )


# -- what they compute ----------------------------------------------------------------------------------


def test_the_equations_are_the_definition(small):
    """From the argument as it is stored they give the bits of the definition."""
    traced = bf.jit(layers(1)).trace(*shapes(1, 256, 64))
    made = cuda_program.planned(simplify(traced.jaxpr), (False,) * len(traced.jaxpr.invars), "sm_90a")
    eqn = next(s.eqn for s in made.steps if isinstance(s, OpaqueStep) and s.eqn.prim is dot_pointwise_p)
    result, argument = eqn.outvars
    (call,) = epilogue.recomputing(eqn)
    x = half(*argument.aval.shape) * 4
    (found,) = eval_jaxpr(
        Jaxpr([argument], list(epilogue.equations(call)), [result], name="recomputed"), [bnp.asarray(x)]
    )
    np.testing.assert_array_equal(np.asarray(found), np.asarray(nn.gelu(bnp.asarray(x))))


@pytest.mark.slow
def test_a_step_within_a_budget_is_right_and_the_same_each_time(small, monkeypatch):
    """Gradients equal those without a budget, up to rounding of the argument."""
    monkeypatch.setattr(pointwise_gemm, "why_not", lambda eqn, arch: alone(eqn))
    cuda = bf.devices("cuda")[0]
    args = [
        half(256, 64).astype(np.float32),
        *(half(*a.shape, seed=i) / 4 for i, a in enumerate(shapes(6, 256, 64)[1:])),
    ]
    plain = bf.jit(layers(6))
    there = on(cuda, *args)
    memory = plain.lower(*there).memory
    tight = bf.jit(layers(6), memory_budget=int(memory.peak_bytes - 3 * 256 * 256 * 2))
    bought = tight.lower(*there).memory.bought
    assert gates(bought.made) and count(bought.made, EPILOGUE) == 12
    want, first = plain(*there), tight(*there)
    for a, b, c in zip(*map(bf.tree.leaves, (want, first, tight(*there))), strict=True):
        a, b, c = (np.asarray(x).astype(np.float64) for x in (a, b, c))
        assert np.abs(b - a).max() <= 0.02 * np.abs(a).max()
        np.testing.assert_array_equal(b, c)
