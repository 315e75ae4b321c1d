"""Callbacks: values, types, derivatives, errors; ``test_effects.py`` counts runs."""

import contextvars

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, tree
from blufunc.core.ir.jaxpr import subjaxprs
from blufunc.core.programs.simplify import simplify
from blufunc.transforms.staging.callback import pure_callback_p
from tests.transforms.common import arr, close, draw

F32 = bf.ShapeDtypeStruct((), "float32")
F64 = bf.ShapeDtypeStruct((), "float64")


def count(jaxpr, prim):
    """How often a primitive stands in a jaxpr, at any depth."""
    own = sum(e.prim is prim for e in jaxpr.eqns)
    return own + sum(count(s, prim) for e in jaxpr.eqns for s in subjaxprs(e.params))


# -- pure_callback -----------------------------------------------------------------------------------


def sine(x):
    return bf.pure_callback(np.sin, bf.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")


SAME = [lambda f: f, bf.jit, lambda f: bf.jit(bf.jit(f)), bf.checkpoint, lambda f: bf.jit(bf.checkpoint(f))]


@pytest.mark.parametrize("wrap", SAME)
def test_the_value_of_a_pure_callback(wrap):
    x = draw(3)
    close(wrap(sine)(x), bnp.sin(x))
    close(wrap(lambda x: sine(x) * 2.0 + x)(x), bnp.sin(x) * 2.0 + x)


def test_pytrees_and_keyword_arguments():
    def host(a, *, b):
        return {"sum": a[0] + b["x"], "none": None, "pair": (np.float64(3), a[1])}

    x, y = draw(2), draw(2, seed=1)
    struct = bf.ShapeDtypeStruct((2,), "float64")
    declared = {"sum": struct, "none": None, "pair": (F32, x)}
    want = {"sum": x + y, "none": None, "pair": (bnp.float32(3), y)}
    call = lambda x, y: bf.pure_callback(host, declared, (x, y), b={"x": y})
    close(call(x, y), want)
    close(bf.jit(call)(x, y), want)


def test_a_callback_is_given_arrays_that_it_may_keep():
    kept = []

    @bf.jit
    def f(x):
        y = x * 2.0
        z = bf.pure_callback(lambda y: (kept.append(y), y)[1], bf.ShapeDtypeStruct((3,), "float64"), y)
        return y + 1.0, bnp.exp(z)  # both may be written over what they read

    x = draw(3)
    close(f(x), (x * 2.0 + 1.0, bnp.exp(x * 2.0)))
    assert not isinstance(kept[0], bf.Tracer)
    close(kept[0], x * 2.0)


def test_results_are_copies():
    mine = np.zeros(3)
    f = bf.jit(lambda: bf.pure_callback(lambda: mine, bf.ShapeDtypeStruct((3,), "float64")))
    first = f()
    mine[:] = 1
    close(first, arr(np.zeros(3)))
    close(f(), arr(np.ones(3)))
    assert f.trace_count == 1


def test_a_callback_may_use_blufunc_itself():
    slope = bf.jit(bf.grad(lambda x: bnp.sin(x) * x))
    f = lambda x: bf.pure_callback(slope, x, x) + x
    x = arr(0.3)
    close(f(x), slope(x) + x)
    close(bf.jit(f)(x), slope(x) + x)
    inner = lambda c, a: (bf.pure_callback(bf.jit(lambda c: c * 2.0), c, c) + a, None)
    close(bf.jit(lambda x: lax.scan(inner, x, bnp.arange(3.0).astype("float64"))[0])(x), x * 8 + 4)


def test_keys_go_through():
    key = bf.random.key(3)
    f = lambda k: bf.pure_callback(lambda k: bf.random.fold_in(k, 1), k, k)
    want = bf.random.fold_in(key, 1)
    assert str(bf.random.key_data(bf.jit(f)(key))) == str(bf.random.key_data(want))


@pytest.mark.parametrize(
    "dtype", ["bool", "int32", "int64", "uint8", "float16", "bfloat16", "float64", "complex64"]
)
def test_dtypes(dtype):
    x = bnp.asarray([0, 1], dtype=dtype)
    out = bf.jit(lambda x: bf.pure_callback(lambda x: x, x, x))(x)
    assert out.dtype == x.dtype and out.tolist() == x.tolist()


def test_sixtyfour_bits_of_numpy_defaults_are_taken_for_32():
    give = lambda value, declared: bf.pure_callback(lambda: value, declared)
    assert give(1.5, F32).dtype == np.float32
    assert give(np.float64(1.5), F64).dtype == np.float64
    assert give(3, bf.ShapeDtypeStruct((), "int32")).dtype == np.int32
    assert give(3, bf.ShapeDtypeStruct((), "int64")).dtype == np.int64


def test_pure_callbacks_may_be_dropped():
    ran = []
    f = bf.jit(lambda x: (bf.pure_callback(lambda x: (ran.append(1), x)[1], x, x), x + 1.0)[1])
    close(f(arr(1.0)), arr(2.0))
    assert ran == []
    assert simplify(f.trace(arr(1.0)).jaxpr).eqns[0].prim.name == "add"


def test_pure_callbacks_of_constants_wait_for_the_run():
    ran = []
    f = bf.jit(lambda: bf.pure_callback(lambda x: (ran.append(1), x)[1], F32, 1.0))
    program = f.lower().compile()
    assert ran == []
    program(), program()
    assert len(ran) == 2


METHODS = {
    "sequential": [((), ())] * 3,
    "sequential_unrolled": [((), ())] * 3,
    "expand_dims": [((3,), (1,))],
    "broadcast_all": [((3,), (3,))],
    "legacy_vectorized": [((3,), ())],
}


def shapes_of(log, out=()):
    def host(a, b):
        log.append((a.shape, b.shape))
        return np.asarray(a) + np.asarray(b)

    return host


@pytest.mark.parametrize("wrap", [lambda f: f, bf.jit])
@pytest.mark.parametrize("method", METHODS)
def test_vmap_of_pure_callback(method, wrap):
    log = []
    f = lambda a, b: bf.pure_callback(shapes_of(log), F64, a, b, vmap_method=method)
    x, y = draw(3), draw()
    close(wrap(bf.vmap(f, (0, None)))(x, y), x + y)
    assert log == METHODS[method]
    close(wrap(bf.vmap(bf.jit(f), (None, 0)))(y, x), x + y)
    close(wrap(bf.vmap(f))(x, x), x + x)


@pytest.mark.parametrize("method", METHODS)
def test_nested_vmap_of_pure_callback(method):
    log = []
    f = lambda a, b: bf.pure_callback(shapes_of(log), F64, a, b, vmap_method=method)
    x, y = draw(3, 2), draw(2)
    rows = bf.vmap(bf.vmap(f), (0, None))
    if method == "legacy_vectorized":
        close(rows(x, y), x + y)
        assert log == [((3, 2), (2,))]
        return
    close(rows(x, y), x + y)
    close(bf.vmap(bf.vmap(f, (0, None)), (1, 0), out_axes=1)(x, y), x + y)
    assert log[0] == {"expand_dims": ((3, 2), (1, 2)), "broadcast_all": ((3, 2), (3, 2))}.get(
        method, ((), ())
    )


def test_a_mapped_callback_is_one_equation():
    jaxpr = bf.make_jaxpr(bf.vmap(sine))(draw(100))
    assert [e.prim for e in jaxpr.eqns] == [pure_callback_p]


def test_vmap_of_nothing_and_of_what_is_not_mapped():
    close(bf.vmap(sine, axis_size=2, in_axes=None, out_axes=None)(arr(1.0)), bnp.sin(arr(1.0)))
    assert bf.vmap(sine)(arr(np.zeros((0, 4)))).shape == (0, 4)


def test_in_a_loop():
    f = lambda x: lax.scan(lambda c, a: (sine(c) + a, sine(a)), x[0], x)
    g = lambda x: lax.scan(lambda c, a: (bnp.sin(c) + a, bnp.sin(a)), x[0], x)
    close(f(draw(3)), g(draw(3)))
    close(bf.jit(f)(draw(3)), g(draw(3)))
    close(bf.jit(bf.vmap(f))(draw(2, 3)), bf.vmap(g)(draw(2, 3)))


# -- derivatives -------------------------------------------------------------------------------------


@bf.custom_jvp
def known_sine(x):
    return sine(x)


@known_sine.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return known_sine(x), t * bf.pure_callback(np.cos, x, x, vmap_method="sequential")


def test_custom_jvp_gives_a_callback_its_derivative():
    x = draw(3)
    f, g = (lambda s: lambda x: (s(x) * x).sum())(known_sine), lambda x: (bnp.sin(x) * x).sum()
    for wrap in SAME:
        close(wrap(bf.grad(f))(x), bf.grad(g)(x))
        close(bf.grad(wrap(f))(x), bf.grad(g)(x))
    close(bf.jvp(f, (x,), (x,)), bf.jvp(g, (x,), (x,)))
    close(bf.vmap(bf.grad(f))(draw(2, 3)), bf.vmap(bf.grad(g))(draw(2, 3)))


def test_a_callback_of_what_is_not_differentiated():
    f = lambda x, y: sine(y) * x + sine(lax.stop_gradient(x))
    close(bf.grad(f)(arr(2.0), arr(3.0)), bnp.sin(arr(3.0)))
    close(bf.jit(bf.grad(f))(arr(2.0), arr(3.0)), bnp.sin(arr(3.0)))


@pytest.mark.parametrize("wrap", SAME)
@pytest.mark.parametrize("api", ["pure_callback", "io_callback"])
def test_callbacks_have_no_derivative(api, wrap):
    f = wrap(lambda x: getattr(bf, api)(np.sin, F64, x))
    for derive in (lambda: bf.grad(f)(arr(1.0)), lambda: bf.jvp(f, (arr(1.0),), (arr(1.0),))):
        with pytest.raises(errors.GradError, match=rf"{api} has no jvp: .*custom_jvp") as info:
            derive()
        assert "test_callback.py" in info.value.where


# -- errors ------------------------------------------------------------------------------------------


def test_an_error_of_the_callback_comes_through():
    class Mine(Exception):
        pass

    def broken(x):
        raise Mine("no")

    f = lambda x: bf.pure_callback(broken, F64, x)
    for g in (f, bf.jit(f), bf.jit(lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0])):
        with pytest.raises(Mine, match="no") as info:
            g(arr(1.0))
        (note,) = info.value.__notes__
        assert note.startswith("in broken, which pure_callback calls, at ") and "test_callback.py" in note
    close(bf.jit(sine)(arr(1.0)), bnp.sin(arr(1.0)))


def test_a_callback_sees_the_context_of_its_caller():
    variable = contextvars.ContextVar("variable", default="unset")
    seen = []
    f = bf.jit(lambda x: bf.debug.callback(lambda x: seen.append(variable.get()), x))
    loop = lambda x: lax.scan(lambda c, a: (c, f(a)), None, x)[0]
    token = variable.set("set")
    f(1.0)
    bf.debug.callback(lambda: seen.append(variable.get()))
    loop(draw(1))
    bf.jit(loop)(draw(1))
    variable.reset(token)
    f(1.0)
    assert seen == ["set"] * 4 + ["unset"]


WRONG_RESULTS = {
    "structure": (lambda: (1.0, 2.0), errors.TreeError, "different structure"),
    "nothing": (lambda: None, errors.TreeError, "different structure"),
    "shape": (
        lambda: np.ones(3, np.float32),
        errors.ShapeError,
        r"is f32\[3\], result_shape_dtypes says f32\[\]",
    ),
    "dtype": (lambda: np.int32(1), errors.DtypeError, r"is i32\[\], result_shape_dtypes says f32\[\]"),
    "text": (lambda: "a", errors.DtypeError, "result of <lambda>"),
    "object": (object, errors.DtypeError, "result of object"),
}


@pytest.mark.parametrize("wrap", [lambda f: f, bf.jit])
@pytest.mark.parametrize("name", WRONG_RESULTS)
def test_wrong_results(name, wrap):
    host, error, text = WRONG_RESULTS[name]
    for api in (bf.pure_callback, bf.io_callback):
        with pytest.raises(error, match=text) as info:
            wrap(lambda api=api: api(host, F32))()
        assert "test_callback.py" in info.value.where and info.value.fix


WRONG_CALLS = {
    "no function": (lambda: bf.pure_callback(3, F32), errors.ArgumentError, "takes a function, not 3"),
    "no shape": (lambda: bf.io_callback(np.sin, "f32"), errors.ArgumentError, "has no shape and dtype"),
    "no array": (
        lambda: bf.pure_callback(lambda x, y: y, F32, 1.0, {"a": "text"}),
        errors.ArgumentError,
        r"pure_callback: the argument y\['a'\] is a str",
    ),
    "no method": (
        lambda: bf.pure_callback(np.sin, F32, 1.0, vmap_method="parallel"),
        errors.ArgumentError,
        "'parallel' is not a method",
    ),
    "unhashable method": (
        lambda: bf.pure_callback(np.sin, F32, 1.0, vmap_method=[]),
        errors.ArgumentError,
        "is not a method",
    ),
    "sharding": (lambda: bf.io_callback(np.sin, F32, 1.0, sharding=1), errors.UnsupportedError, "sharding"),
    "no way to map": (
        lambda: bf.vmap(lambda x: bf.pure_callback(np.sin, F32, x))(draw(3)),
        errors.UnsupportedError,
        "does not say how to map it",
    ),
    "ordered under vmap": (
        lambda: bf.vmap(lambda x: bf.io_callback(np.sin, F32, x, ordered=True))(draw(3)),
        errors.UnsupportedError,
        "vmap of an ordered io_callback",
    ),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls(name):
    call, error, text = WRONG_CALLS[name]
    with pytest.raises(error, match=text) as info:
        call()
    assert "test_callback.py" in info.value.where and info.value.fix


def test_effects_barrier():
    assert bf.effects_barrier() is None


@pytest.mark.peer
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
@pytest.mark.parametrize("method", METHODS)
def test_vmap_methods_as_jax(method, axes):
    import jax

    mine, theirs = [], []
    a, b = (np.ones(3, np.float32) if d == 0 else np.float32(2) for d in axes)
    f = lambda a, b: bf.pure_callback(shapes_of(mine), F32, a, b, vmap_method=method)
    struct = jax.ShapeDtypeStruct((), "float32")
    g = lambda a, b: jax.pure_callback(shapes_of(theirs), struct, a, b, vmap_method=method)
    got, want = bf.vmap(f, axes)(a, b), jax.vmap(g, axes)(a, b)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert mine == theirs


def test_lists_are_pytrees_of_results():
    out = bf.io_callback(lambda: [np.zeros(2), None], [bf.ShapeDtypeStruct((2,), "float32"), None])
    assert tree.structure(out) == tree.structure([0, None])


def test_lists_stand_for_tuples():
    declared = (F32, {"a": [F32, None]})
    f = bf.jit(lambda: bf.pure_callback(lambda: [1.0, {"a": (2.0, None)}], declared))
    assert tree.structure(f()) == tree.structure(declared)
    assert [float(x) for x in tree.leaves(f())] == [1.0, 2.0]
    with pytest.raises(errors.TreeError, match="different structure"):
        bf.pure_callback(lambda: [1.0, {"b": (2.0, None)}], declared)
