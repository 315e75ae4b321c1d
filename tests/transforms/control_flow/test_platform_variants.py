"""``either``: two forms of a function under transforms, one chosen at the end."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.ir.jaxpr import eval_jaxpr, subjaxprs
from blufunc.core.programs.alternatives import chosen, has_alternatives
from blufunc.core.programs.simplify import simplify
from blufunc.core.programs.stage import stage
from blufunc.transforms.control_flow.platform_variants import either_p


def plain(x, w):
    return [bnp.sin(x) * bnp.cos(x) * w]


def better(x, w):
    return [bnp.tanh(x) * w]  # not the same function, so that it shows which was taken


X = np.linspace(-1, 2, 6, dtype=np.float32)


def f(x, w=1.5, held=(False, False)):
    x, w = bnp.asarray(x), bnp.asarray(w, "float32")
    bodies = [stage(body, [x.aval.strong(), w.aval.strong()]) for body in (plain, better)]
    (out,) = either_p.bind(x, w, jaxpr=bodies[0], preferred=bodies[1], parts=(1, 0, 0), held=held)
    return out


def of(body):
    return lambda x, w=1.5: body(x, w)[0]


def total(g):
    return lambda x: g(x).sum()


PROGRAMS = {
    "value": lambda g: g,
    "grad": lambda g: bf.grad(total(g)),
    "value and grad": lambda g: bf.value_and_grad(total(g)),
    "both arguments": lambda g: lambda x: bf.grad(lambda x, w: g(x, w).sum(), (0, 1))(x, bnp.float32(0.5)),
    "second order": lambda g: bf.grad(total(bf.grad(total(g)))),
    "vmap": lambda g: lambda x: bf.vmap(g)(bnp.stack([x, x + 1])),
    "vmap of grad": lambda g: bf.vmap(bf.grad(g)),
    "one for all": lambda g: lambda x: bf.vmap(lambda w: g(x, w))(bnp.arange(3.0)),
    "jit": lambda g: bf.grad(bf.jit(total(bf.jit(g)))),
    "checkpoint": lambda g: bf.grad(total(bf.checkpoint(g))),
    "scan": lambda g: bf.grad(lambda x: lax.scan(lambda c, _: (g(c), c.sum()), x, None, 3)[0].sum()),
    "cond": lambda g: bf.grad(lambda x: lax.cond(x[0] < 0, g, lambda x: x * 2, x).sum()),
}
READ_APART = {
    "jvp": lambda g: lambda x: bf.jvp(g, (x,), (x,)),
    "linearize": lambda g: lambda x: bf.linearize(g, x)[1](x),
}
"""A preferred body without a derivative: both bodies have the same one."""


def names(jaxpr):
    found = set()
    for e in jaxpr.eqns:
        found |= {e.prim.name}.union(*map(names, subjaxprs(e.params)))
    return found


@pytest.mark.parametrize("wanted", [plain, better])
@pytest.mark.parametrize("name", {**PROGRAMS, **READ_APART})
def test_one_is_chosen_and_nothing_is_left_of_the_other(name, wanted):
    program = {**PROGRAMS, **READ_APART}[name]
    traced = bf.jit(program(f)).trace(X).jaxpr
    assert has_alternatives(traced)
    made = simplify(chosen(traced, lambda eqn: wanted is better))
    if name != "second order":  # where cotangents of what the other body keeps are zeros, but computed with
        assert {"sin", "tanh"} & names(made) == ({"sin"} if wanted is plain else {"tanh"})
    assert not has_alternatives(made) and "either" not in names(made)
    want = bf.tree.leaves(program(of(wanted))(bnp.asarray(X)))
    for got, expected in zip(eval_jaxpr(made, [bnp.asarray(X)]), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PROGRAMS)
def test_without_a_choice_it_is_what_was_written(name):
    """On the CPU, and evaluated at once."""
    program = PROGRAMS[name]
    want = bf.tree.leaves(program(of(plain))(bnp.asarray(X)))
    for run in (program(f), bf.jit(program(f))):
        for got, expected in zip(bf.tree.leaves(run(bnp.asarray(X))), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_what_only_the_plain_body_keeps_decides():
    """A backward pass that needs the plain body, and a forward pass that does not."""
    traced = bf.jit(lambda x: bf.vjp(f, x)[1](x)[0] + f(x)).trace(X).jaxpr
    backward = lambda eqn: eqn.params["parts"][1] > 0 or eqn.outvars[0].aval.shape != X.shape
    forward = [e for e in traced.eqns if e.prim is either_p and backward(e)]
    assert len(forward) == 1
    made = simplify(chosen(traced, lambda eqn: eqn in forward))
    assert "tanh" not in names(made)


def test_an_operand_without_a_good_derivative():
    """Its own tangent differentiates the plain body; other tangents, both bodies."""
    g = lambda x, w: f(x, w, held=(False, True)).sum()
    for argument, left in ((1, False), (0, True)):
        traced = bf.jit(bf.grad(g, argument)).trace(X, np.float32(2)).jaxpr
        assert has_alternatives(traced) == left


def test_transforms_of_users_see_what_was_written():
    cast = simplify(bf.jit(bf.autocast(bf.grad(total(f)))).trace(X).jaxpr)
    assert not has_alternatives(cast) and "tanh" not in names(cast)
