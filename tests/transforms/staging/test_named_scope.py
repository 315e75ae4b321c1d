"""``named_scope``, ``named_call`` and ``ensure_compile_time_eval``."""

import threading

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import printer, source
from blufunc.core.ir.jaxpr import subjaxprs
from tests.transforms.common import arr, close, draw


def scopes(jaxpr, prim=None):
    """The scopes of the equations, or of those of one primitive, as text."""
    return ["/".join(e.scopes) for e in jaxpr.eqns if prim in (None, e.prim.name)]


def model(x):
    with bf.named_scope("first"):
        x = bnp.sin(x)
    with bf.named_scope("second"):
        x = bnp.exp(x)
        with bf.named_scope("inner"):
            x = x * x
    return x + 1.0


WANT = ["first", "second", "second/inner", ""]


def test_blocks_nest():
    assert scopes(bf.make_jaxpr(model)(draw(3))) == WANT
    assert scopes(bf.jit(model).lower(draw(3)).jaxpr) == WANT


def test_a_block_ends_with_an_error():
    def f(x):
        try:
            with bf.named_scope("broken"):
                raise KeyError
        except KeyError:
            return bnp.sin(x)

    assert scopes(bf.make_jaxpr(f)(1.0)) == [""]


def test_decorators():
    @bf.named_scope("layer")
    def layer(x, *, nested):
        return layer(bnp.sin(x), nested=False) if nested else bnp.cos(x)

    assert layer.__name__ == "layer"
    assert scopes(bf.make_jaxpr(lambda x: layer(x, nested=True))(1.0)) == ["layer", "layer/layer"]

    def block(x):
        return bnp.sin(x)

    for f, want in ((bf.named_call(block), "block"), (bf.named_call(block, name="b"), "b")):
        assert f.__name__ == "block"
        assert scopes(bf.make_jaxpr(f)(1.0)) == [want]
        close(f(arr(1.0)), bnp.sin(arr(1.0)))


def test_a_jitted_function_is_traced_without_the_scopes_of_its_call():
    inner = bf.jit(model)

    def outer(x):
        with bf.named_scope("a"):
            x = inner(x)
        with bf.named_scope("b"):
            return inner(x)

    jaxpr = bf.make_jaxpr(outer)(draw(3))
    assert scopes(jaxpr) == ["a", "b"]
    assert jaxpr.eqns[0].params["jaxpr"] is jaxpr.eqns[1].params["jaxpr"]
    assert scopes(jaxpr.eqns[0].params["jaxpr"]) == WANT
    assert inner.trace_count == 1
    flat = [f"{a}/{w}".rstrip("/") for a in "ab" for w in WANT]
    assert scopes(bf.jit(outer).lower(draw(3)).jaxpr) == flat
    assert scopes(bf.jit(bf.jit(outer)).lower(draw(3)).jaxpr) == flat


def test_derivatives_keep_the_scopes_of_what_they_derive():
    for f in (model, bf.jit(model)):
        lowered = bf.jit(bf.grad(lambda x, f=f: f(x).sum())).lower(draw(3)).jaxpr
        found = {(e.prim.name, "/".join(e.scopes)) for e in lowered.eqns}
        assert {("sin", "first"), ("cos", "first"), ("exp", "second"), ("add_any", "second/inner")} <= found
        backward = [e for e in lowered.eqns if e.prim.name == "mul"]
        assert [e.scopes[0] for e in backward][-1] == "first", (
            "the backward pass ends where the forward pass begins"
        )
    forward = bf.make_jaxpr(lambda x: bf.jvp(model, (x,), (x,)))(draw(3))
    assert scopes(forward, "cos") == ["first"]


def test_vmap_keeps_scopes():
    assert set(scopes(bf.make_jaxpr(bf.vmap(model))(draw(2, 3)))) == {"first", "second", "second/inner", ""}
    mapped = bf.make_jaxpr(bf.vmap(bf.jit(model)))(draw(2, 3))
    assert scopes(mapped.eqns[0].params["jaxpr"]) == WANT
    inside = bf.make_jaxpr(lambda x: bf.vmap(lambda w: w @ x)(x))
    with bf.named_scope("outside"):
        assert scopes(inside(draw(3, 3))) == [""] * len(inside(draw(3, 3)).eqns)


def test_scan_has_scopes_around_and_inside():
    def f(x):
        with bf.named_scope("loop"):
            return lax.scan(lambda c, a: (model(c) + a, None), x[0], x)[0]

    jaxpr = bf.jit(f).lower(draw(3)).jaxpr
    (loop,) = [e for e in jaxpr.eqns if e.prim.name == "scan"]
    assert loop.scopes == ("loop",)
    assert scopes(loop.params["jaxpr"])[:3] == WANT[:3]
    backward = bf.jit(bf.grad(f)).lower(draw(3)).jaxpr
    loops = [e for e in backward.eqns if e.prim.name == "scan"]
    assert [e.scopes for e in loops] == [("loop",)] * 2
    assert "first" in scopes(loops[1].params["jaxpr"])


def test_checkpoint_keeps_scopes():
    def f(x):
        with bf.named_scope("block"):
            return bf.checkpoint(bf.jit(model))(x).sum()

    lowered = bf.jit(bf.grad(f)).lower(draw(3)).jaxpr
    (call,) = [e for e in lowered.eqns if e.prim.name == "checkpoint"]
    assert call.scopes == ("block",)
    assert {"first", "second", "second/inner"} <= set(scopes(call.params["jaxpr"]))
    value = bf.jit(bf.value_and_grad(f)).lower(draw(3)).jaxpr
    assert scopes(value, "sin") == ["block/first"]


def test_rules_of_the_users_add_scopes_to_those_of_the_call():
    @bf.custom_vjp
    def f(x):
        return bnp.sin(x)

    def bwd(x, ct):
        with bf.named_scope("bwd"):
            return (bf.jit(lambda x, ct: ct * bnp.cos(x))(x, ct),)

    f.defvjp(lambda x: (bnp.sin(x), x), bwd)

    def loss(x):
        with bf.named_scope("layer"):
            return f(x)

    lowered = bf.jit(bf.grad(bf.jit(loss))).lower(arr(1.0)).jaxpr
    assert scopes(lowered, "cos") == ["layer/bwd"]


def test_scopes_are_shown_with_the_lines():
    jaxpr = bf.make_jaxpr(model)(1.0)
    text = printer.to_text(jaxpr, lines=True)
    assert "(model) in second/inner" in text
    assert " in first" not in str(jaxpr)
    program = bf.jit(model).lower(1.0).compile().source()
    assert [line.rpartition("(model)")[2] for line in program.splitlines() if "(model)" in line] == [
        " in first", " in second", " in second/inner", "",
    ]  # fmt: skip
    assert source.scopes_of(None) == () and source.within(("a",), None) is None


def test_scopes_belong_to_their_thread():
    found = []
    with bf.named_scope("here"):
        thread = threading.Thread(
            target=lambda: found.extend(scopes(bf.make_jaxpr(lambda x: bnp.sin(x))(1.0)))
        )
        thread.start()
        thread.join()
    assert found == [""]


def test_scopes_do_not_change_what_is_computed_or_how_often_it_is_traced():
    f = bf.jit(model)
    close(f(draw(3)), model(draw(3)))
    with bf.named_scope("around"):
        close(f(draw(3)), model(draw(3)))
        close(bf.grad(lambda x: f(x).sum())(draw(3)), bf.grad(lambda x: model(x).sum())(draw(3)))
    assert f.trace_count == 1


NO_NAMES = {
    3: errors.ArgumentError,
    None: errors.ArgumentError,
    "": errors.ValueRangeError,
    "a\nb": errors.ValueRangeError,
}


@pytest.mark.parametrize("name, error", NO_NAMES.items())
def test_names_that_are_none(name, error):
    with pytest.raises(error) as info:
        bf.named_scope(name)
    assert "test_named_scope.py" in info.value.where and info.value.fix
    if name is not None:
        with pytest.raises(error):
            bf.named_call(model, name=name)
    with pytest.raises(errors.ArgumentError, match="takes a function"):
        bf.named_call(name)


# -- ensure_compile_time_eval ------------------------------------------------------------------------


def known(n):
    with bf.ensure_compile_time_eval():
        table = bnp.cumsum(bnp.arange(n))
        assert not isinstance(table, bf.Tracer)
        return table if table[-1] > 0 else -table


def names(jaxpr):
    own = [e.prim.name for e in jaxpr.eqns]
    return own + [n for e in jaxpr.eqns for s in subjaxprs(e.params) for n in names(s)]


@pytest.mark.parametrize("wrap", [lambda f: f, bf.jit, bf.checkpoint, bf.vmap, lambda f: bf.jit(bf.jit(f))])
def test_known_values_are_computed_while_tracing(wrap):
    table, x = arr([0.0, 1.0, 3.0]), draw(2, 3)
    f = lambda x: (x * known(3).astype("float64")).sum()
    close(wrap(f)(x), (x * table).sum(1) if wrap is bf.vmap else (x * table).sum())
    close(wrap(lambda x: bf.grad(f)(x))(x), bnp.broadcast_to(table, (2, 3)))


def test_known_values_are_constants_of_the_program():
    jaxpr = bf.make_jaxpr(lambda x: lax.scan(lambda c, a: (c * known(3)[-1], None), x, None, length=2))(1.0)
    assert "cumsum" not in names(jaxpr) and "cumsum" in names(
        bf.make_jaxpr(lambda: bnp.cumsum(bnp.arange(3)))()
    )


def test_jitted_functions_run_in_the_block():
    @bf.jit
    def f(x):
        with bf.ensure_compile_time_eval():
            n = int(bf.jit(lambda: bnp.asarray(3) + 1)())
        return x + float(n)

    close(f(arr(1.0)), arr(5.0))
    assert names(f.trace(arr(1.0)).jaxpr) == ["add"]


def test_as_a_decorator_and_after_an_error():
    double = bf.ensure_compile_time_eval()(lambda x: x * 2)

    @bf.jit
    def f(x):
        try:
            with bf.ensure_compile_time_eval():
                raise KeyError
        except KeyError:
            return bnp.sin(x) * float(double(3))

    close(f(arr(1.0)), bnp.sin(arr(1.0)) * 6.0)


@pytest.mark.parametrize("wrap", [bf.jit, bf.grad, lambda f: lambda x: bf.vmap(f)(x[None])])
def test_traced_values_are_traced_in_the_block(wrap):
    def f(x):
        with bf.ensure_compile_time_eval():
            return x * float(bnp.sum(bnp.ones(2)))

    close(bnp.squeeze(wrap(f)(arr(1.0))), 2.0)


@pytest.mark.peer
def test_scopes_as_jax():
    import jax
    import jax.numpy as jnp

    def f(np_, scope):
        def g(x):
            with scope("first"):
                x = np_.sin(x)
            with scope("second"):
                with scope("inner"):
                    return np_.exp(x)

        return g

    theirs = jax.make_jaxpr(f(jnp, jax.named_scope))(np.float32(1.0))
    mine = bf.make_jaxpr(f(bnp, bf.named_scope))(np.float32(1.0))
    assert scopes(mine) == [str(e.source_info.name_stack) for e in theirs.eqns]
