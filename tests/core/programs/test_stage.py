"""Tracing: Python values, source lines of equations, and nested traces."""

import threading

import numpy as np
import pytest

from blufunc import errors
from blufunc.config import config
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.check import check_jaxpr
from blufunc.core.ir.trace import EVAL, state
from blufunc.core.ops import elementwise as ew
from blufunc.core.primitives import linear_ops
from blufunc.transforms.arguments import ShapeDtypeStruct
from blufunc.transforms.autodiff.grad import grad, jvp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.eval_shape import eval_shape
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr

X = np.array([0.5, -1.0, 2.0], np.float32)


def total(x):
    return linear_ops.reduce_sum(x, tuple(range(x.ndim)))


# -- make_jaxpr and eval_shape ---------------------------------------------------------------------


def test_golden_make_jaxpr(golden):
    def f(p, x):
        return {"y": ew.mul(ew.sin(p["w"]), x), "x": x}

    golden("make_jaxpr", make_jaxpr(f)({"w": X}, 2.0))


def test_arguments_are_named_after_the_users():
    jaxpr = make_jaxpr(lambda params, *rest, scale: total(params["w"]["b"]))(
        {"w": {"a": X, "b": X}}, X, (X, X), scale=1.0
    )
    assert jaxpr.arg_names == (
        "params['w']['a']", "params['w']['b']", "rest[0]", "rest[1][0]", "rest[1][1]", "scale",
    )  # fmt: skip


def test_make_jaxpr_takes_static_arguments_and_shapes():
    jaxpr = make_jaxpr(lambda x, n: ew.integer_pow(x, n), static_argnums=1)(
        ShapeDtypeStruct((3,), "bfloat16"), 3
    )
    assert jaxpr.in_avals == [ShapedArray((3,), dtypes.bfloat16)]
    assert jaxpr.eqns[0].params == {"y": 3}


def test_return_shape():
    jaxpr, shape = make_jaxpr(lambda x: (x, [total(x)]), return_shape=True)(X)
    assert shape == (ShapeDtypeStruct((3,), "float32"), [ShapeDtypeStruct((), "float32")])
    assert len(jaxpr.outvars) == 2


def test_eval_shape_computes_nothing():
    ran = []

    def f(x):
        ran.append(type(x).__name__)
        return {"y": ew.convert(linear_ops.reshape(x, (500, 2000)), dtypes.bfloat16)}

    out = eval_shape(f, ShapeDtypeStruct((1000, 1000), "float64"))
    assert out == {"y": ShapeDtypeStruct((500, 2000), "bfloat16")}
    assert ran == ["StagedTracer"]


# -- outside values --------------------------------------------------------------------------------


def test_weak_types_follow_python_numbers():
    jaxpr = make_jaxpr(lambda x: (x, ew.sin(x), linear_ops.broadcast_to(x, (2,))))(1.0)
    assert [v.aval.weak_type for v in jaxpr.outvars] == [True, True, False]
    assert not make_jaxpr(lambda x: x)(np.float32(1.0)).in_avals[0].weak_type
    assert not make_jaxpr(lambda x: x)(True).in_avals[0].weak_type


def test_weak_types_do_not_change_what_is_computed():
    f = lambda x, y: ew.add(x, y)
    out = jit(f)(1.0, from_numpy(np.float32(2)))
    assert out.dtype == np.float32 and not out.weak_type


def test_python_numbers_take_the_dtype_that_they_meet():
    for d in (dtypes.bfloat16, dtypes.float64, dtypes.int8):
        jaxpr = make_jaxpr(lambda x: ew.add(x, 1))(ShapeDtypeStruct((3,), d))
        assert jaxpr.out_avals == [ShapedArray((3,), d)]


def test_arrays_from_outside_are_constants():
    c = from_numpy(X)
    jaxpr = make_jaxpr(lambda x: ew.add(ew.mul(x, c), c))(X)
    assert jaxpr.consts == (c,)


def test_arrays_made_inside_are_equations():
    jaxpr = make_jaxpr(lambda: linear_ops.full((3,), 2.0, dtypes.float32))()
    assert [e.prim.name for e in jaxpr.eqns] == ["broadcast_in_dim"]
    assert jaxpr.consts == ()


def test_operations_on_constants_run_at_once_under_grad_and_vmap():
    """They depend on no argument of the transform: the parent trace runs them."""
    c = from_numpy(X)
    seen = []

    def f(x):
        seen.append(ew.sin(c))
        return total(ew.mul(x, seen[-1]))

    grad(f)(X)
    vmap(f)(np.stack([X, X]))
    for value in seen:
        np.testing.assert_array_equal(np.asarray(value), np.asarray(ew.sin(c)))


# -- lines -----------------------------------------------------------------------------------------


def line_of(eqn):
    return source.summary(eqn.source)


def test_equations_carry_the_users_line():
    def f(x):
        y = ew.sin(x)
        return ew.cos(y)

    first = f.__code__.co_firstlineno
    jaxpr = make_jaxpr(f)(X)
    assert [line_of(e) for e in jaxpr.eqns] == [f"test_stage.py:{first + k} (f)" for k in (1, 2)]


def test_derivatives_carry_the_line_that_they_come_from():
    def f(x):
        y = ew.sin(x)
        return total(y)

    first = f.__code__.co_firstlineno
    jaxpr = make_jaxpr(lambda x: jvp(f, (x,), (x,)))(X)
    assert line_of(jaxpr.eqns[0]) == f"test_stage.py:{first + 1} (f)"
    cos = next(e for e in jaxpr.eqns if e.prim.name == "cos")
    assert line_of(cos) == f"test_stage.py:{first + 1} (f)"


def test_bodies_keep_their_lines_through_transforms():
    @jit
    def f(x):
        return ew.sin(x)

    first = f.fun.__code__.co_firstlineno
    for g in (vmap(f), lambda x: jvp(f, (x,), (x,)), lambda x: jit(f)(x)):
        text = [line_of(e) for e in jit(g).lower(X).jaxpr.eqns]
        assert f"test_stage.py:{first + 2} (f)" in text


def test_lines_are_those_of_the_innermost_function_of_the_user():
    def helper(x):
        return ew.sin(x)

    jaxpr = make_jaxpr(lambda x: helper(x))(X)
    assert line_of(jaxpr.eqns[0]).endswith("(helper)")


# -- traces ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [grad, jit, vmap, make_jaxpr])
def test_the_outer_trace_is_current_again_afterwards(transform):
    transform(lambda x: x)(X if transform is vmap else 1.0)
    assert state.trace is EVAL and source.replay.line is None
    with pytest.raises(ZeroDivisionError):
        transform(lambda x: 1 / 0)(X if transform is vmap else 1.0)
    assert state.trace is EVAL and source.replay.line is None


def test_each_thread_has_its_own_trace():
    results, started, done = {}, threading.Event(), threading.Event()

    def inside(x):
        started.set()
        done.wait(5)
        return ew.sin(x)

    thread = threading.Thread(target=lambda: results.update(jaxpr=make_jaxpr(inside)(X)))
    thread.start()
    started.wait(5)
    results["eager"] = ew.cos(from_numpy(X))
    done.set()
    thread.join()
    assert [e.prim.name for e in results["jaxpr"].eqns] == ["sin"]
    np.testing.assert_allclose(np.asarray(results["eager"]), np.cos(X), rtol=1e-6)


def test_deep_nesting():
    f = ew.sin
    for _ in range(8):
        f = jit(f)
    jaxpr = make_jaxpr(f)(X)
    depth = 0
    while jaxpr.eqns[0].prim.name == "jit":
        jaxpr, depth = jaxpr.eqns[0].params["jaxpr"], depth + 1
    assert depth == 8
    np.testing.assert_allclose(np.asarray(vmap(jit(grad(f)))(X)), np.cos(X), rtol=1e-6)


def test_stage_checks_what_it_makes(monkeypatch):
    """The check after every trace (``config.check``) finds a contradictory rule."""
    monkeypatch.setattr(ew.sin_p, "typed", lambda avals, params: ShapedArray((7,), dtypes.float32))
    monkeypatch.setattr(config, "check", False)
    jaxpr = make_jaxpr(ew.sin)(X)
    monkeypatch.undo()
    with pytest.raises(errors.JaxprTypeError, match=r"binds a f32\[7\], its rule gives f32\[3\]"):
        check_jaxpr(jaxpr)
