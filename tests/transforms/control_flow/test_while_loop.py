"""``while_loop``: end, carry, bounds and reverse mode, batches, DCE, errors.

Values and derivatives under every transform are in ``test_compositions.py``.
"""

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import debug, errors, lax, random, tree
from blufunc.core.ir import dtypes
from blufunc.core.ir.check import check_jaxpr
from blufunc.core.ir.jaxpr import subjaxprs
from blufunc.lax import scan_p, while_loop, while_p
from blufunc.transforms.arguments import ShapeDtypeStruct
from blufunc.transforms.autodiff.grad import grad, jvp, linearize, vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp
from blufunc.transforms.staging.callback import io_callback
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.transforms.common import arr, close, draw

ZERO = arr(0, np.int32)
X = arr(0.7)


def found(jaxpr, prim):
    """All equations of a primitive, at any depth."""
    here = []
    for e in jaxpr.eqns:
        here += [e] if e.prim is prim else []
        for sub in subjaxprs(e.params):
            here += found(sub, prim)
    return here


def names(jaxpr):
    return [e.prim.name for e in jaxpr.eqns]


def count_to(n, step, x, **options):
    """``step`` applied to ``x`` n times."""
    return while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, step(c[1])), (ZERO, x), **options)[1]


# -- when it ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "n, max_steps, want",
    [(5, None, 32), (0, None, 1), (-3, None, 1), (5, 3, 8), (5, 5, 32), (5, 9, 32), (5, 0, 1)],
)
def test_the_number_of_steps(wrap, n, max_steps, want):
    f = wrap(lambda n, x: count_to(n, lambda x: x * 2, x, max_steps=max_steps))
    assert int(f(arr(n, np.int32), arr(1, np.int32))) == want


def test_a_loop_without_steps_returns_its_carry():
    init = {"a": draw(3), "b": (None, draw(2))}
    close(while_loop(lambda c: False, lambda c: c, init), init)
    f = lambda c: while_loop(lambda c: c["a"].sum() > 99, lambda c: tree.map(bnp.sin, c), c, max_steps=2)
    close(f(init), init)
    g = grad(lambda c: sum((x * x).sum() for x in tree.leaves(f(c))))(init)
    close(g, tree.map(lambda x: x * 2.0, init))


def test_a_carry_of_nothing():
    assert while_loop(lambda c: False, lambda c: c, ()) == ()
    assert jit(lambda: while_loop(lambda c: False, lambda c: c, None))() is None


def test_results_do_not_share_storage_with_arguments():
    step = jit(lambda x: while_loop(lambda x: x.sum() < 0, lambda x: x * 2, x), donate_argnums=0)
    kept = arr([1.0, 2.0])
    once = while_loop(lambda x: x.sum() < 0, lambda x: x * 2, kept)
    assert np.asarray(step(once)).tolist() == np.asarray(kept).tolist() == [1, 2]


# -- the carry -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "init, step, dtype, weak",
    [(0, lambda x: x + 1, "int32", True), (0.0, lambda x: x + 1, "float32", True),
     (0, lambda x: x + arr(0.5), "float64", False), (0, lambda x: x + arr(1, np.int16), "int16", False),
     (0.0, lambda x: x + arr(1, np.float16), "float16", False)],
)  # fmt: skip
def test_a_weak_carry_takes_the_dtype_that_the_body_gives_it(init, step, dtype, weak):
    for y in (
        while_loop(lambda x: x < 3, step, init),
        jit(lambda: while_loop(lambda x: x < 3, step, init))(),
    ):
        assert y.dtype == dtype and y.weak_type is ("32" in dtype) and float(y) == 3.0


def test_a_weak_carry_leaves_the_dtype_of_other_values():
    x = arr(np.ones(2), np.float16)
    y, _ = while_loop(lambda c: c[1] < 3, lambda c: (c[0] * c[1], c[1] + 1), (x, 1.0))
    assert y.dtype == np.float16 and y.tolist() == [2.0, 2.0]


def test_functions_are_traced_once_and_the_body_again_where_a_weak_carry_is_promoted():
    count = []
    cond = lambda x: count.append("cond") or x < 3
    body = lambda x: count.append("body") or x + 1
    while_loop(cond, body, arr(0.0))
    while_loop(cond, body, 0.0)
    assert sorted(count[2:]) == ["body", "cond"]
    while_loop(cond, lambda x: body(x) + arr(0, np.float64), 0)
    assert sorted(count[4:]) == ["body", "body", "cond"]
    count.clear()
    compiled = jit(lambda x: while_loop(cond, body, x))
    compiled(arr(0.0))
    compiled(arr(1.0))
    assert len(count) == 2
    grad_of = jit(grad(lambda x: while_loop(cond, body, x, max_steps=4)))
    grad_of(arr(0.0))
    grad_of(arr(1.0))
    assert len(count) == 4


def test_closures_are_read_anew_in_each_call():
    w = arr(2.0)
    f = lambda: while_loop(lambda x: x < w, lambda x: x + w, arr(1.0))
    assert float(f()) == 3.0
    w = arr(0.5)
    assert float(f()) == 1.0


def test_random_keys_as_carry():
    def step(c):
        key, total = c
        key, use = random.split(key)
        return key, total + random.uniform(use)

    key, total = random.key(3), arr(0.0, np.float32)
    got = while_loop(lambda c: c[1] < 3, step, (key, total))
    while float(total) < 3:
        key, total = step((key, total))
    assert float(got[1]) == float(total)
    assert np.array_equal(random.key_data(got[0]), random.key_data(key))
    many = vmap(lambda k: while_loop(lambda c: c[1] < 3, step, (k, arr(0.0, np.float32))))(
        random.split(random.key(3), 4)
    )
    one = while_loop(lambda c: c[1] < 3, step, (random.split(random.key(3), 4)[2], arr(0.0, np.float32)))
    assert float(many[1][2]) == float(one[1])


# -- derivatives -----------------------------------------------------------------------------------


def test_reverse_mode_needs_a_bound():
    f = lambda x: count_to(3, bnp.sin, x)
    for g, x in (
        (grad(f), X),
        (jit(grad(f)), X),
        (vmap(grad(f)), draw(3)),
        (grad(lambda x: vmap(f)(x).sum()), draw(3)),
    ):
        with pytest.raises(errors.GradError) as info:
            g(x)
        assert "max_steps" in str(info.value) and "jvp" in str(info.value)
        assert "test_while_loop.py" in info.value.where
    value, lin = linearize(f, X)
    close(value, bnp.sin(bnp.sin(bnp.sin(X))))
    close(lin(arr(1.0)), jvp(f, (X,), (arr(1.0),))[1])


def test_a_loop_that_is_not_differentiated_needs_no_bound():
    f = lambda x: x * count_to(3, lambda n: n + 2.0, arr(1.0)) + count_to(3, bnp.sin, lax.stop_gradient(x))
    assert float(grad(f)(X)) == 7.0
    n = lambda x: count_to(3, lambda n: n + 1, (x > 0).astype("int32"))
    assert float(grad(lambda x: x * n(x))(X)) == 4.0


def test_bounds_that_are_not_reached_change_nothing():
    f = lambda k: lambda x: count_to(4, lambda x: bnp.sin(x) * 1.5, x, max_steps=k)
    for k in (4, 5, 20):
        close(grad(f(k))(X), grad(_four)(X))
        close(grad(grad(f(k)))(X), grad(grad(_four))(X))


def _four(x):
    for _ in range(4):
        x = bnp.sin(x) * 1.5
    return x


def test_spare_steps_make_no_nan():
    """After the last step the body is not run: here it would divide by zero."""
    f = lambda x: while_loop(
        lambda c: c[0] > 0,
        lambda c: (c[0] - 1, c[1] / c[0].astype("float64")),
        (arr(3, np.int32), x),
        max_steps=8,
    )[1]
    for g in (grad(f), jit(grad(f)), grad(jit(f))):
        close(g(X), arr(1 / 6))
    close(vmap(grad(f))(draw(3)), arr([1 / 6] * 3))


def test_integers_have_float0_tangents():
    f = lambda n, x: while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2.0), (n, x), max_steps=5)
    zero = np.zeros((), dtypes.float0)
    outs, ts = jvp(f, (ZERO, X), (zero, arr(1.0)))
    assert int(outs[0]) == 3 and ts[0].dtype == dtypes.float0 and float(ts[1]) == 8.0
    n_ct, x_ct = vjp(f, ZERO, X)[1]((zero, arr(1.0)))
    assert n_ct.dtype == dtypes.float0 and float(x_ct) == 8.0


def test_carries_without_a_tangent_have_none_in_the_tangent_loop():
    f = lambda x: while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2.0, bnp.sin(c[2])), (ZERO, arr(1.0), x)
    )
    (eqn,) = found(make_jaxpr(lambda x, t: jvp(f, (x,), (t,))[1])(X, X), while_p)
    assert len(eqn.outvars) <= 4


def test_a_bounded_loop_in_a_divided_rule_is_transposed():
    """Where a rule's own jitted jvp mixes values and tangents in one loop."""

    @custom_jvp
    def f(x):
        return _four(x)

    @f.defjvp
    def _(primals, tangents):
        loop = lambda x: count_to(4, lambda x: bnp.sin(x) * 1.5, x, max_steps=6)
        return jit(lambda ps, ts: jvp(loop, ps, ts))(primals, tangents)

    close(grad(f)(X), grad(_four)(X))
    close(grad(grad(f))(X), grad(grad(_four))(X))


def test_a_gradient_is_two_scans():
    f = lambda x, w: while_loop(
        lambda x: (x * x).sum() < 5, lambda x: bnp.sin(x) * w + x, x, max_steps=5
    ).sum()
    jaxpr = jit(grad(f, (0, 1))).lower(draw(3), draw(3)).jaxpr
    check_jaxpr(jaxpr)
    assert found(jaxpr, while_p) == []
    ahead, back = found(jaxpr, scan_p)
    assert ahead.params["length"] == back.params["length"] == 5 and back.params["reverse"]


def test_the_value_of_a_bounded_loop_is_a_loop():
    jaxpr = jit(lambda x: count_to(3, bnp.sin, x, max_steps=1000)).lower(X).jaxpr
    assert len(found(jaxpr, while_p)) == 1 and found(jaxpr, scan_p) == []


# -- batches ---------------------------------------------------------------------------------------


def test_elements_end_at_their_own_step():
    f = lambda n, x: count_to(n, lambda x: x * 2.0, x)
    close(vmap(f)(arr([3, 0, 1, 5], np.int32), arr([1.0] * 4)), arr([8.0, 1.0, 2.0, 32.0]))
    close(vmap(f, (0, None))(arr([3, 0, 1], np.int32), arr(1.0)), arr([8.0, 1.0, 2.0]))
    g = lambda n, x: count_to(n, lambda x: x * 2.0, x, max_steps=4)
    close(vmap(g)(arr([3, 0, 9], np.int32), arr([1.0] * 3)), arr([8.0, 1.0, 16.0]))
    close(vmap(grad(g, 1))(arr([3, 0, 9], np.int32), arr([1.0] * 3)), arr([8.0, 1.0, 16.0]))


def test_elements_that_have_ended_keep_their_values():
    """A NaN that the body makes of finished elements does not reach them."""
    f = lambda x: while_loop(lambda x: x > 0.5, lambda x: bnp.sqrt(x - 0.5), x)
    xs = arr([0.1, 0.7, 3.0, 0.5])
    want = bnp.stack([f(x) for x in xs])
    assert np.isfinite(np.asarray(want)).all()
    close(vmap(f)(xs), want)
    close(jit(vmap(f))(xs), want)


@pytest.mark.parametrize("mapped, in_lock_step", [("carry", False), ("bound", True), ("factor", False)])
def test_a_loop_whose_condition_is_not_batched_stays_plain(mapped, in_lock_step):
    f = lambda bound, factor, carry: count_to(bound, lambda x: x * factor, carry)
    axes = tuple(0 if mapped == name else None for name in ("bound", "factor", "carry"))
    args = [bnp.stack([x, x]) if a == 0 else x for x, a in zip((arr(3, np.int32), X, X), axes, strict=True)]
    (eqn,) = found(make_jaxpr(vmap(f, axes))(*args), while_p)
    assert ("select" in names(eqn.params["body"])) == in_lock_step
    close(
        vmap(f, axes)(*args),
        bnp.stack(
            [f(*[a if x is None else a[i] for a, x in zip(args, axes, strict=True)]) for i in range(2)]
        ),
    )


def test_a_condition_that_becomes_batched_in_the_loop():
    """The carry that it reads gets its batch from another, two steps later."""
    f = lambda x: while_loop(
        lambda c: (c[0] < 1.0) & (c[3] < 9),
        lambda c: (c[0] + c[1], c[2], x, c[3] + 1),
        (arr(0.0), arr(0.0), arr(0.0), ZERO),
    )
    xs = arr([0.2, 0.5, 0.3])
    close(vmap(f)(xs), tree.map(lambda *ys: bnp.stack(ys), *[f(x) for x in xs]))


# -- unread results -------------------------------------------------------------------------------


def test_carries_that_nobody_needs_disappear():
    def f(x, y, z):
        c = while_loop(
            lambda c: c["n"] < 3,
            lambda c: {
                "n": c["n"] + 1,
                "x": bnp.sin(c["x"]),
                "y": bnp.exp(c["y"] * c["z"]),
                "z": bnp.cos(c["z"]),
            },
            {"n": ZERO, "x": x, "y": y, "z": z},
        )
        return c

    for kept, inside, n in (
        ("x", {"sin"}, 2),
        ("z", {"cos"}, 2),
        ("y", {"exp", "mul", "cos"}, 3),
        ("n", set(), 1),
    ):
        g = jit(lambda *a: f(*a)[kept])  # noqa: B023
        lowered = g.lower(X, X, X).jaxpr
        check_jaxpr(lowered)
        (eqn,) = found(lowered, while_p)
        assert set(names(eqn.params["body"])) == inside | {"add"} and len(eqn.outvars) == n
        close(g(X, X, X), f(X, X, X)[kept])


def test_a_loop_that_nobody_reads_disappears():
    assert jit(lambda x: (count_to(3, bnp.sin, x), x)[1]).lower(X).jaxpr.eqns == ()


def test_equations_keep_their_lines():
    jaxpr = make_jaxpr(grad(lambda x: count_to(3, bnp.sin, x, max_steps=3)))(X)
    for eqn in found(jaxpr, scan_p):
        for sub in subjaxprs(eqn.params):
            assert all("test_while_loop.py" in e.source[0].co_filename for e in sub.eqns)


def test_golden_vmap_of_while(golden):
    f = vmap(lambda n, x: count_to(n, lambda x: bnp.sin(x), x), (0, None))
    golden("while_vmap", jit(f).lower(arr([1, 2], np.int32), X).jaxpr)


# -- errors ----------------------------------------------------------------------------------------

keep = lambda c: c
ERRORS = {
    "a condition with extent": (
        lambda: while_loop(lambda x: x > 0, keep, draw(3)),
        errors.ArgumentError,
        ("boolean of rank 0", "bool[3]", ".all()"),
    ),
    "a condition that is a number": (
        lambda: while_loop(lambda x: x, keep, X),
        errors.ArgumentError,
        ("boolean of rank 0", "f64[]"),
    ),
    "a condition that is a pair": (
        lambda: while_loop(lambda x: (x > 0, x), keep, X),
        errors.ArgumentError,
        ("boolean of rank 0",),
    ),
    "a condition that is None": (
        lambda: while_loop(lambda x: None, keep, X),
        errors.ArgumentError,
        ("boolean of rank 0", "None"),
    ),
    "another dtype": (
        lambda: while_loop(lambda c: True, lambda c: {"a": [c["a"][0].astype("float32")]}, {"a": [X]}),
        errors.CarryError,
        ("['a'][0]", "f64[]", "f32[]", "while_loop"),
    ),
    "another shape": (
        lambda: while_loop(lambda c: True, lambda c: (c[0], bnp.stack([c[1], c[1]])), (X, X)),
        errors.CarryError,
        ("[1]", "f64[]", "f64[2]"),
    ),
    "a different structure": (
        lambda: while_loop(lambda c: True, lambda c: [c[0]], (X,)),
        errors.CarryError,
        ("different structure", "while_loop"),
    ),
    "a number that becomes an array": (
        lambda: while_loop(lambda c: True, lambda c: c + draw(2), 0.0),
        errors.CarryError,
        ("f64[2]",),
    ),
    "no condition": (
        lambda: while_loop(True, keep, X),
        errors.ArgumentError,
        ("while_loop takes a function",),
    ),
    "no body": (
        lambda: while_loop(lambda x: True, None, X),
        errors.ArgumentError,
        ("while_loop takes a function",),
    ),
    "a carry of no arrays": (
        lambda: while_loop(lambda x: True, keep, {"a": "text"}),
        errors.ArgumentError,
        ("init_val['a']", "str"),
    ),
    "a result of no arrays": (
        lambda: while_loop(lambda x: True, lambda x: "text", X),
        errors.ArgumentError,
        ("result", "str"),
    ),
    "a negative bound": (
        lambda: while_loop(lambda x: True, keep, X, max_steps=-1),
        errors.ValueRangeError,
        ("max_steps=-1",),
    ),
    "a bound that is no integer": (
        lambda: while_loop(lambda x: True, keep, X, max_steps=2.5),
        errors.ArgumentError,
        ("max_steps", "2.5"),
    ),
    "an if on the carry": (
        lambda: while_loop(lambda x: True, lambda x: x if x > 0 else -x, X),
        errors.ConcretizationError,
        ("bool[]",),
    ),
    "a Python and in the condition": (
        lambda: while_loop(lambda x: x > 0 and x < 1, keep, X),
        errors.ConcretizationError,
        ("bool[]",),
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
    assert "test_while_loop.py" in info.value.where


def test_a_traced_bound_is_an_error():
    with pytest.raises(errors.ConcretizationError):
        jit(lambda n: while_loop(lambda x: True, keep, X, max_steps=n))(3)


def test_a_body_that_leaks_is_found():
    kept = []
    while_loop(lambda x: x > 9, lambda x: kept.append(x) or x, X)
    with pytest.raises(errors.LeakedTracerError):
        kept[0] + 1.0


# -- the peer --------------------------------------------------------------------------------------


@pytest.mark.peer
def test_against_jax():
    """Without JAX's reverse mode: values, forward mode to order 2, batches."""
    import jax

    def program(np_, loop):
        def f(w, x, n):
            body = lambda c: (c[0] + 1, np_.tanh(w @ c[1]) * 1.5 + x)
            return loop(lambda c: (c[0] < n) & ((c[1] ** 2).sum() < 4), body, (0, x))[1]

        return f

    ours, theirs = program(bnp, while_loop), program(jax.numpy, jax.lax.while_loop)
    rng = np.random.default_rng(0)
    w = rng.normal(size=(3, 3)).astype(np.float32)
    x = rng.normal(size=(5, 3)).astype(np.float32) * np.float32(0.4)
    n = np.array([0, 1, 3, 8, 20], np.int32)
    one = lambda jvp, f: lambda w, x, n: jvp(lambda w, x: f(w, x, n), (w, x), (w, x))[1]
    two = lambda jvp, f: one(jvp, one(jvp, f))
    for order in (lambda jvp, f: f, one, two):
        a = vmap(order(jvp, ours), (None, 0, 0))(w, x, n)
        b = jax.vmap(order(jax.jvp, theirs), (None, 0, 0))(w, x, n)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrap", [lambda f: f, jit])
def test_elements_that_have_ended_have_no_part_in_gradients(wrap):
    """At 0.5 the body has no derivative; its loop has ended before the first step."""
    f = lambda x, w: while_loop(lambda c: c > 1.0, lambda c: bnp.sqrt(c - w), x, max_steps=3)
    g = wrap(grad(lambda x, w: vmap(f, (0, None))(x, w).sum(), (0, 1)))
    one = grad(f, (0, 1))(arr(4.0), arr(1.0))
    close(g(arr([4.0, 0.5, 1.0]), arr(1.0)), (bnp.stack([one[0], arr(1.0), arr(1.0)]), one[1]))


def test_a_linearized_loop_without_a_bound_does_not_repeat_effects():
    seen = []
    note = lambda v: debug.callback(lambda x: seen.append(float(x)), v)

    def body(v):
        note(v)
        return v * v

    f = lambda x: while_loop(lambda v: v < 50.0, body, x)
    y, tangent = linearize(f, arr(2.0))
    close((y, tangent(arr(1.0))), (arr(256.0), arr(1024.0)))
    assert seen == [2.0, 4.0, 16.0]
    acting = lambda x: while_loop(
        lambda v: v < 50.0,
        lambda v: v * io_callback(lambda: np.float64(3), ShapeDtypeStruct((), "float64")),
        x,
    )
    with pytest.raises(errors.UnsupportedError, match="happen twice"):
        linearize(acting, arr(2.0))
