"""``fori_loop`` and ``map``: steps, primitives, dtypes, and errors.

Values and derivatives under every transform are in ``test_compositions.py``.
"""

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, lax, random, tree
from blufunc.lax import fori_loop, scan_p, while_p
from blufunc.transforms.autodiff.grad import grad, jvp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.transforms.common import arr, close, draw

X = arr(0.7)


def prims(jaxpr):
    return [e.prim for e in jaxpr.eqns]


# -- fori_loop -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lower, upper", [(0, 4), (2, 5), (-3, 2), (3, 3), (5, 1), (2**31 - 3, 2**31 - 1)])
@pytest.mark.parametrize("how", ["static", "arrays", "dynamic", "one dynamic"])
def test_the_steps(lower, upper, how):
    f = lambda a, b: fori_loop(a, b, lambda i, c: (c[0] * 3 + i, c[1] + 1), (0, 0))
    run = {
        "static": lambda: f(lower, upper),
        "arrays": lambda: f(arr(lower, np.int32), bnp.asarray(upper)),
        "dynamic": lambda: jit(f)(lower, upper),
        "one dynamic": lambda: jit(f, static_argnums=0)(lower, upper),
    }[how]
    total, steps = 0, 0
    for i in range(lower, upper):
        total, steps = total * 3 + i, steps + 1
    got = run()
    assert int(got[1]) == steps and int(got[0]) == (total + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize(
    "bounds, dtype",
    [((0, 3), "int32"), ((arr(0, np.int64), 3), "int64"), ((arr(0, np.uint8), 3), "uint8"),
     ((arr(0, np.int8), arr(3, np.int16)), "int16"), ((np.int64(0), np.int64(3)), "int32")],
)  # fmt: skip
def test_the_type_of_the_index(bounds, dtype):
    """From static int32 bounds it is weak, like a Python int; else as the first."""
    seen = []

    def body(i, c):
        seen.append(i.aval)
        return c + i.astype("float64")

    assert float(fori_loop(*bounds, body, arr(0.0))) == 3.0
    assert float(jit(lambda a, b: fori_loop(a, b, body, arr(0.0)))(*bounds)) == 3.0
    assert {a.dtype.name for a in seen} == {dtype}
    assert [a.weak_type for a in seen] == [dtype == "int32", bounds[0].__class__ is int]


def test_the_index_takes_the_dtype_of_what_it_meets():
    for dtype in ("int8", "bfloat16", "float64"):
        x = arr([1, 2], dtype)
        assert fori_loop(0, 3, lambda i, c: c * i, x).dtype == dtype
        assert jit(lambda n, x=x: fori_loop(0, n, lambda i, c: c * i, x))(3).dtype == dtype


def test_static_bounds_make_a_scan_and_traced_ones_a_while_loop():
    f = lambda n, x: fori_loop(0, n, lambda i, x: bnp.sin(x), x)
    static = make_jaxpr(lambda x: f(3, x))(X)
    assert scan_p in prims(static) and while_p not in prims(static)
    traced = make_jaxpr(f)(3, X)
    assert while_p in prims(traced) and scan_p not in prims(traced)


def test_static_bounds_are_static_under_jit_too():
    f = lambda x: fori_loop(0, 3, lambda i, x: bnp.sin(x), x)
    want = grad(lambda x: bnp.sin(bnp.sin(bnp.sin(x))))(X)
    for g in (grad(f), jit(grad(f)), grad(jit(f))):
        close(g(X), want)
    close(jit(vmap(grad(f)))(X[None]), want[None])


def test_reverse_mode_of_a_traced_count_is_an_error_that_says_what_to_do():
    f = lambda n, x: fori_loop(0, n, lambda i, x: bnp.sin(x), x)
    with pytest.raises(errors.GradError) as info:
        jit(grad(f, 1))(3, X)
    assert "static bounds" in str(info.value)
    close(jit(lambda n, x: jvp(lambda x: f(n, x), (x,), (arr(1.0),))[1])(3, X), grad(lambda x: f(3, x))(X))


def test_a_weak_carry_takes_the_dtype_that_the_body_gives_it():
    for run in (lambda g: g(3), lambda g: jit(g)(3)):
        assert run(lambda n: fori_loop(0, n, lambda i, c: c + 0.5, 0)).dtype == np.float32
        assert run(lambda n: fori_loop(0, n, lambda i, c: c + i, 0)).dtype == np.int32
        assert run(lambda n: fori_loop(0, n, lambda i, c: c + arr(0.5), 0.0)).dtype == np.float64


def test_the_body_is_traced_once():
    count = []
    body = lambda i, x: count.append(1) or bnp.sin(x)
    fori_loop(0, 3, body, X)
    assert len(count) == 1
    compiled = jit(lambda n: fori_loop(0, n, body, X))
    compiled(3)
    compiled(4)
    assert len(count) == 2


def test_pytrees_and_keys():
    def body(i, c):
        key, d = c
        return random.fold_in(key, i), {"x": d["x"] * random.uniform(key), "n": None}

    key, d = random.key(0), {"x": arr(1.0, np.float32), "n": None}
    got = fori_loop(0, 3, body, (key, d))
    for i in range(3):
        key, d = body(i, (key, d))
    assert np.array_equal(random.key_data(got[0]), random.key_data(key))
    close(got[1], d, 1e-6)


def test_unroll_is_handed_on():
    jaxpr = make_jaxpr(lambda x: fori_loop(0, 4, lambda i, x: x * 2, x, unroll=2))(X)
    (eqn,) = [e for e in jaxpr.eqns if e.prim is scan_p]
    assert eqn.params["unroll"] == 2


# -- map -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 1, 2, 3, 4, 5, 7, 99])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_map(batch_size, n):
    xs = {"a": draw(n, 3), "n": arr(np.arange(n), np.int32)}
    f = lambda x: (x["a"].sum() * x["n"], {"k": x["n"] + 1, "a": bnp.sin(x["a"])}, None)
    want = vmap(f)(xs) if n else (arr(np.zeros(0)), {"k": arr(np.zeros(0), np.int32), "a": draw(0, 3)}, None)
    close(lax.map(f, xs, batch_size=batch_size), want)
    close(jit(lambda xs: lax.map(f, xs, batch_size=batch_size))(xs), want)
    loss = lambda a: lax.map(f, {**xs, "a": a}, batch_size=batch_size)[1]["a"].sum()
    close(grad(loss)(xs["a"]), bnp.cos(xs["a"]))


def test_map_does_one_batch_after_the_other():
    """The program does not grow with the length, nor do temporary arrays."""
    xs = draw(100, 4)
    jaxpr = jit(lambda xs: lax.map(lambda x: bnp.outer(x, x).sum(), xs, batch_size=10)).lower(xs).jaxpr
    (eqn,) = [e for e in jaxpr.eqns if e.prim is scan_p]
    assert eqn.params["length"] == 10
    inside = [v.aval.shape for e in eqn.params["jaxpr"].eqns for v in e.outvars]
    assert (10, 4, 4) in inside and not any(s[:1] == (100,) for s in inside)


def test_map_over_keys_and_of_results_without_arrays():
    keys = random.split(random.key(0), 5)
    want = bnp.stack([random.normal(k, (2,)) for k in keys])
    for size in (None, 2, 5):
        close(lax.map(lambda k: random.normal(k, (2,)), keys, batch_size=size), want)
        assert lax.map(lambda k: (), keys, batch_size=size) == ()


# -- errors ----------------------------------------------------------------------------------------

keep = lambda i, x: x
ERRORS = {
    "a bound that is no integer": (
        lambda: fori_loop(0, 2.5, keep, X),
        errors.ArgumentError,
        ("bounds of fori_loop", "f32[]"),
    ),
    "a bound with extent": (
        lambda: fori_loop(arr([0], np.int32), 2, keep, X),
        errors.ArgumentError,
        ("bounds of fori_loop", "i32[1]"),
    ),
    "a bound that is no number": (
        lambda: fori_loop("a", 2, keep, X),
        errors.ArgumentError,
        ("lower bound of fori_loop", "str"),
    ),
    "a boolean bound": (
        lambda: fori_loop(0, True, keep, X),
        errors.ArgumentError,
        ("bounds of fori_loop", "bool"),
    ),
    "no body": (lambda: fori_loop(0, 2, X, X), errors.ArgumentError, ("fori_loop takes a function",)),
    "another dtype": (
        lambda: fori_loop(0, 2, lambda i, c: {"a": c["a"].astype("float32")}, {"a": X}),
        errors.CarryError,
        ("['a']", "f64[]", "f32[]", "<lambda>"),
    ),
    "a different structure": (
        lambda: fori_loop(0, 2, lambda i, c: (c, c), X),
        errors.CarryError,
        ("different structure", "<lambda>"),
    ),
    "another dtype in a loop of a traced length": (
        lambda: jit(lambda n: fori_loop(0, n, lambda i, c: c.astype("float32"), X))(3),
        errors.CarryError,
        ("f64[]", "f32[]", "<lambda>"),
    ),
    "unroll of a traced length": (
        lambda: jit(lambda n: fori_loop(0, n, keep, X, unroll=2))(3),
        errors.ArgumentError,
        ("unroll needs static bounds",),
    ),
    "unroll that is no integer": (
        lambda: fori_loop(0, 3, keep, X, unroll="a"),
        errors.ArgumentError,
        ("unroll", "'a'"),
    ),
    "map of no function": (lambda: lax.map(3, draw(2)), errors.ArgumentError, ("map takes a function",)),
    "map over a number": (lambda: lax.map(bnp.sin, X), errors.ShapeError, ("rank 0",)),
    "map over a number by twos": (
        lambda: lax.map(bnp.sin, X, batch_size=2),
        errors.ShapeError,
        ("one leading axis size", "f64[]"),
    ),
    "map over different lengths": (
        lambda: lax.map(lambda x: x, {"a": draw(2), "b": draw(3)}),
        errors.ShapeError,
        ("['a']", "['b']"),
    ),
    "map over different lengths by twos": (
        lambda: lax.map(lambda x: x, {"a": draw(2), "b": draw(3)}, batch_size=2),
        errors.ShapeError,
        ("xs['a'] f64[2]", "xs['b'] f64[3]"),
    ),
    "map over nothing": (lambda: lax.map(lambda x: x, (), batch_size=2), errors.ShapeError, (", not none",)),
    "a batch of zero": (
        lambda: lax.map(bnp.sin, draw(3), batch_size=0),
        errors.ValueRangeError,
        ("batch_size=0",),
    ),
    "a batch that is no integer": (
        lambda: lax.map(bnp.sin, draw(3), batch_size=1.5),
        errors.ArgumentError,
        ("batch_size", "1.5"),
    ),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("wrap", [lambda f: f(), lambda f: jit(f)()], ids=["eager", "jit"])
def test_errors(name, wrap):
    run, error, says = ERRORS[name]
    with pytest.raises(error) as info:
        wrap(run)
    for text in says:
        assert text in str(info.value)
    assert "test_loops.py" in info.value.where


# -- the peer --------------------------------------------------------------------------------------


@pytest.mark.peer
def test_against_jax():
    import jax

    def program(np_, lax_):
        def f(w, xs):
            rows = lax_.map(lambda x: np_.tanh(w @ x), xs, batch_size=2)
            body = lambda i, c: (c[0] + rows[i].sum() * i, np_.sin(c[1] + rows[i]))
            total, h = lax_.fori_loop(1, 5, body, (0.0, rows[0]))
            return total + (h**2).sum()

        return f

    ours, theirs = program(bnp, lax), program(jax.numpy, jax.lax)
    rng = np.random.default_rng(0)
    w, xs = rng.normal(size=(3, 3)).astype(np.float32), rng.normal(size=(5, 3)).astype(np.float32)
    same = lambda x, y: [
        np.testing.assert_allclose(np.asarray(p), np.asarray(q), rtol=1e-4, atol=1e-5)
        for p, q in zip(tree.leaves(x), jax.tree.leaves(y), strict=True)
    ]
    same(jit(ours)(w, xs), theirs(w, xs))
    same(jit(grad(ours, (0, 1)))(w, xs), jax.grad(theirs, (0, 1))(w, xs))
