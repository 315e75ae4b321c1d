"""Types over mesh axes that users see: ``typeof``, tracers, printed jaxprs."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.mesh.spec import P

MESH = AbstractMesh((2, 2), ("x", "y"))
X = np.arange(32, dtype=np.float32).reshape(4, 8)


def traced(body, in_spec=P("x"), out_spec=P("x")):
    """The jaxpr of a body under ``shard_map``."""
    return bf.make_jaxpr(bf.shard_map(body, mesh=MESH, in_specs=in_spec, out_specs=out_spec))(X)


SHOWN = {
    "the argument": (lambda v: v, P("x"), "f32[2,8]{V:x}"),
    "of two axes": (lambda v: v, P("x", "y"), "f32[2,4]{V:(x,y)}"),
    "replicated": (lambda v: v, P(), "f32[4,8]"),
    "a sum": (lambda v: lax.psum(v, "x"), P("x", "y"), "f32[2,4]{V:y}"),
    "unreduced": (lambda v: lax.pcast(v, "x", to="unreduced"), P("x", "y"), "f32[2,4]{V:y, U:x}"),
    "reduced": (lambda v: lax.pcast(v, "x", to="reduced"), P(None, "y"), "f32[4,4]{V:y, R:x}"),
    "joined": (lambda v: v.sum() + lax.axis_index("y"), P("x"), "f32[]{V:(x,y)}"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_typeof_and_tracers(name):
    make, spec, text = SHOWN[name]
    seen = []

    def body(v):
        out = make(v)
        seen.append((bf.typeof(out), repr(out), out.sharding))
        return v

    traced(body, spec, spec)
    aval, shown, sharding = seen[0]
    assert str(aval) == text and shown == f"Tracer<shard_map>({text})"
    kinds = aval.manual_axis_type
    assert (
        aval.vma
        == kinds.varying
        == frozenset(a for a in "xy" if text.endswith("}") and a in _after(text, "V:"))
    )
    assert sharding == bf.NamedSharding(
        MESH, P(*[None] * aval.ndim, unreduced=kinds.unreduced, reduced=kinds.reduced)
    )
    assert pickle.loads(pickle.dumps(aval)) is aval


def _after(text, mark):
    return text.partition(mark)[2].partition(", ")[0]


def test_under_transforms():
    """The types of a primal, and of an element of a batch, are those of its values."""
    seen = {}

    def body(v):
        bf.grad(lambda a: (seen.update(grad=bf.typeof(a)), a.sum())[1])(v)
        bf.jvp(lambda a: (seen.update(jvp=bf.typeof(a)), a)[1], (v,), (v,))
        bf.vmap(lambda a: (seen.update(vmap=bf.typeof(a)), a)[1])(v)
        return v

    traced(body)
    assert {k: str(v) for k, v in seen.items()} == {
        "grad": "f32[2,8]{V:x}",
        "jvp": "f32[2,8]{V:x}",
        "vmap": "f32[8]{V:x}",
    }


def test_a_type_is_a_type():
    def body(v):
        t = bf.typeof(v)
        assert t != bf.typeof(bnp.ones((2, 8))) and t == bf.typeof(v * 2)
        assert bf.eval_shape(lambda a: a @ a.T, t).shape == (2, 2)
        return v

    traced(body)
    assert bf.typeof(X).vma == frozenset() and bf.typeof(3.0).manual_axis_type.unreduced == frozenset()


def test_in_a_loop_whoever_asks_gets_the_types_of_every_step():
    seen = []

    def body(v):
        def step(c, _):
            t = bf.typeof(c)
            seen.append((str(t), t.vma))
            return c + v.sum(), None

        return v + lax.scan(step, bnp.float32(0), None, length=2)[0]

    traced(body, P("x"), P("x"))
    assert seen[-1] == ("f32[]{V:x}", {"x"})


def test_in_a_gradient_of_a_function_traced_by_itself_they_are_not_known():
    def body(v):
        return lax.custom_linear_solve(lambda x: 2 * x * len(bf.typeof(x).vma), v, lambda f, b: b / 2)

    with pytest.raises(errors.UnsupportedError, match="traced by itself, inside of a shard_map"):
        traced(body)


def test_jaxprs_show_the_types_of_bodies_and_their_loops():
    def body(v):
        c, _ = lax.scan(lambda c, _: (c + v.sum(), None), v.sum(), None, length=3)
        return lax.psum(v * c, "y")

    text = str(traced(body, P("x", "y"), P("x")))
    assert "lambda ; a:f32[2,4]{V:(x,y)} ." in text and "] a b" in text
    assert "f32[2,4]{V:x} = psum_invariant" in text
    assert "f32[]{V:(x,y)} = add" in text  # in the scan
    gradient = bf.make_jaxpr(
        bf.grad(lambda w: bf.shard_map(body, mesh=MESH, in_specs=P("x", "y"), out_specs=P("x"))(w).sum())
    )(X)
    assert str(gradient).count("{V:(x,y)}") > text.count("{V:(x,y)}")


def test_a_jaxpr_shows_no_equation_that_it_lacks():
    """Bodies that transforms make may need no casts, where types would."""
    f = bf.shard_map(lambda v: lax.psum(bnp.sin(v), "x"), mesh=MESH, in_specs=P("x"), out_specs=P())
    for order in (
        f,
        bf.grad(lambda v: f(v).sum()),
        bf.grad(lambda v: bf.grad(lambda w: f(w).sum())(v).sum()),
    ):
        jaxpr = bf.make_jaxpr(order)(X)
        bodies = [e.params["jaxpr"] for e in jaxpr.eqns if e.prim.name == "shard_map"]
        text = str(jaxpr)
        for body in bodies:
            for eqn in body.eqns:
                assert eqn.prim.name in text
        assert text.count("pcast[") == sum(e.prim.name == "pcast" for b in bodies for e in b.eqns)


KNOWN = {
    "constrain": (lambda v: bf.constrain(v, bf.NamedSharding(MESH, P("x"))), P("x", None)),
    "shard_map": (
        lambda v: bf.shard_map(lambda w: w, mesh=MESH, in_specs=P("y"), out_specs=P("y"))(v),
        P("y"),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_sharding_of_a_tracer_that_the_program_says(name):
    make, spec = KNOWN[name]
    seen = []

    def f(v):
        assert not hasattr(v, "sharding") and not hasattr(make(v) * 2, "sharding")
        seen.append(make(v).sharding)
        return v

    bf.make_jaxpr(f)(X)
    assert seen == [bf.NamedSharding(MESH, spec)]
    with pytest.raises(AttributeError, match="the sharding of the argument v is not known"):
        bf.make_jaxpr(lambda v: v.sharding)(X)


def test_sharding_of_an_argument_of_jit(monkeypatch):
    monkeypatch.setattr(bf.config, "cpu_devices", 2)
    sharding = bf.NamedSharding(bf.make_mesh((2,), ("x",), devices=bf.devices("cpu")), P("x"))
    seen = []
    bf.jit(lambda v: (seen.append(v.sharding), v)[1], in_shardings=(sharding,))(X)
    assert seen[0].spec.for_rank(2) == P("x", None) and seen[0].mesh.axis_names == ("x",)
