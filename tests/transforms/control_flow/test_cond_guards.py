"""``vmap`` of ``cond`` skips a costly branch that no element takes."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.config import config
from blufunc.transforms.control_flow import guards

RNG = np.random.default_rng(0)
W = (RNG.normal(size=(6, 6)) / 3).astype(np.float32)
XS = RNG.normal(size=(5, 6)).astype(np.float32)


def costly(x, w):
    return lax.fori_loop(0, 3, lambda i, x: bnp.tanh(w @ x + i), x)


def of_two(x, w, limit):
    return lax.cond(x[0] > limit, lambda x: costly(x, w), lambda x: 2 * x, x)


def of_three(x, w, limit):
    kind = bnp.where(x[0] > limit, 2, bnp.where(x[1] > 0, 1, 0))
    return lax.switch(kind, [lambda x: x, lambda x: bnp.sort(x), lambda x: costly(x, w)], x)


def unsafe(x, w, limit):
    """The derivative of the branch is infinite at zero."""
    return lax.cond(x[0] > limit, lambda x: bnp.sqrt(w @ (0 * x)), lambda x: x, x)


def in_a_loop(x, w, limit):
    return lax.fori_loop(0, 3, lambda i, x: of_two(x, w, limit) + i, x)


PROGRAMS = {f.__name__: f for f in (of_two, of_three, in_a_loop)}


@pytest.fixture
def always(monkeypatch):
    """Guards of branches of any cost."""
    monkeypatch.setattr(guards, "LEAST_COST", 0)
    monkeypatch.setattr(guards, "_LEAST_INTENSITY", 0)


def conds(jaxpr):
    inner = [j for e in jaxpr.eqns for j in e.params.values() if hasattr(j, "eqns")]
    return sum(e.prim.name == "cond" for e in jaxpr.eqns) + sum(map(conds, inner))


@pytest.mark.parametrize("limit", [-9.0, 0.0, 9.0], ids=["all", "some", "none"])
@pytest.mark.parametrize("compiler", ["never", "auto"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients(name, compiler, limit, always, monkeypatch):
    fun = PROGRAMS[name]
    monkeypatch.setattr(config, "host_compiler", compiler)
    many = lambda xs, w: bf.vmap(fun, (0, None, None))(xs, w, limit)
    loss = lambda xs, w: (many(xs, w) ** 2).sum()
    assert conds(bf.make_jaxpr(many)(XS, W)) >= 1
    want = np.stack([fun(bnp.asarray(x), bnp.asarray(W), limit) for x in XS])
    np.testing.assert_allclose(bf.jit(many)(XS, W), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(many(XS, W), want, rtol=1e-5, atol=1e-6)
    each = lambda x, w: (fun(x, w, limit) ** 2).sum()
    dx, dw = zip(*[bf.grad(each, (0, 1))(x, W) for x in XS], strict=True)
    for got in (bf.jit(bf.grad(loss, (0, 1)))(XS, W), bf.grad(loss, (0, 1))(XS, W)):
        np.testing.assert_allclose(got[0], np.stack(dx), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got[1], sum(map(np.asarray, dw)), rtol=1e-4, atol=1e-5)


def test_other_transforms(always):
    many = lambda xs, w: bf.vmap(of_two, (0, None, None))(xs, w, 0.0)
    both = bf.vmap(many, (0, None))(np.stack([XS, -XS]), W)
    np.testing.assert_allclose(both[1], many(-XS, W), rtol=1e-5, atol=1e-6)
    out, tangent = bf.jvp(lambda xs: many(xs, W), (XS,), (XS,))
    _, plain = zip(*[bf.jvp(lambda x: of_two(x, W, 0.0), (x,), (x,)) for x in XS], strict=True)
    np.testing.assert_allclose(tangent, np.stack(plain), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out, many(XS, W), rtol=1e-6)
    per = bf.vmap(bf.grad(lambda x: of_two(x, W, 0.0).sum()))(XS)
    want = [bf.grad(lambda x: of_two(x, W, 0.0).sum())(x) for x in XS]
    np.testing.assert_allclose(per, np.stack(want), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("limit", [9.0, 0.0])
def test_infinite_derivatives_of_others_do_not_spread(limit, always):
    loss = lambda w: bf.vmap(unsafe, (0, None, None))(XS, w, limit).sum()
    assert np.isfinite(bf.grad(loss)(W)).all() == (limit == 9.0)


@pytest.mark.parametrize(
    ("branch", "size", "skipped"),
    [
        (lambda x: x @ bnp.ones((512, 512)), 512, True),
        (lambda x: bnp.linalg.solve(bnp.eye(256) + x[0], x), 256, True),
        (lambda x: lax.fori_loop(0, 400, lambda i, x: bnp.sort(x) + i, x), 256, True),
        (lambda x: x @ bnp.ones((4, 4)), 4, False),
        (lambda x: lax.fori_loop(0, 10_000, lambda i, x: bnp.sin(x) + i, x), 256, False),  # points
        (lambda x: 2 * x.sum() + x, 65_536, False),  # no work per element
    ],
)
def test_what_is_skipped(branch, size, skipped):
    many = bf.vmap(lambda x: lax.cond(x[0] > 0, branch, lambda x: x, x))
    assert conds(bf.make_jaxpr(many)(bf.ShapeDtypeStruct((8, size), np.float32))) == skipped


def test_not_where_branches_are_not_native(monkeypatch):
    monkeypatch.setattr(config, "cpu_devices", 2)
    many = bf.vmap(lambda x: lax.cond(x[0] > 0, lambda x: x @ bnp.ones((512, 512)), lambda x: x, x))
    assert not conds(bf.make_jaxpr(many)(bf.ShapeDtypeStruct((8, 512), np.float32)))
