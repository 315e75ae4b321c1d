"""``cond`` and ``switch``: choice, result types, shared values, DCE, errors.

Values and derivatives under every transform are in ``test_compositions.py``.
"""

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, lax, random, tree
from blufunc.core.ir import dtypes
from blufunc.core.ir.check import check_jaxpr
from blufunc.core.ir.jaxpr import subjaxprs
from blufunc.lax import cond, cond_p, switch
from blufunc.transforms.autodiff.grad import grad, jvp, linearize, value_and_grad, vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.transforms.common import arr, close, draw

TRUE, FALSE = arr(True, bool), arr(False, bool)
X = arr(0.7)


def conds(jaxpr):
    """All cond equations, at any depth."""
    found = []
    for e in jaxpr.eqns:
        found += [e] if e.prim is cond_p else []
        for sub in subjaxprs(e.params):
            found += conds(sub)
    return found


def names(jaxpr):
    return [e.prim.name for e in jaxpr.eqns]


# -- which branch runs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pred, want",
    [(True, 1), (False, 2), (1, 1), (0, 2), (0.5, 1), (0.0, 2), (np.bool_(True), 1), (TRUE, 1), (FALSE, 2),
     (arr(-3, np.int8), 1), (arr(0j, np.complex128), 2), (arr(float("nan")), 1)],
)  # fmt: skip
def test_predicates(pred, want):
    assert int(cond(pred, lambda: 1, lambda: 2)) == want
    assert int(jit(lambda p: cond(p, lambda: 1, lambda: 2))(pred)) == want


@pytest.mark.parametrize(
    "index, want", [(-(2**31), 0), (-1, 0), (0, 0), (1, 1), (2, 2), (3, 2), (2**31 - 1, 2)]
)
def test_an_index_out_of_range_takes_the_nearest_branch(index, want):
    branches = [lambda x, k=k: x + k for k in range(3)]
    assert float(switch(index, branches, 0.0)) == want
    assert float(jit(lambda i: switch(i, branches, 0.0))(index)) == want
    assert float(vmap(lambda i: switch(i, branches, 0.0))(arr([index, 0], np.int32))[0]) == want


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64"])
def test_indices_of_any_integer_dtype(dtype):
    branches = [lambda k=k: arr(k, np.int32) for k in range(300)]
    top = np.iinfo(dtype).max
    assert int(switch(arr(3, dtype), branches)) == 3
    assert int(switch(arr(top, dtype), branches)) == min(top, 299), "no wrapping around on the way to 32 bits"
    assert int(switch(arr(np.iinfo(dtype).min, dtype), branches)) == 0


@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
def test_the_other_branch_does_not_run(wrap):
    """It would never end."""
    forever = lambda x: lax.while_loop(lambda x: x == x, lambda x: x + 1, x)
    f = wrap(lambda p, x: cond(p, forever, lambda x: x * 2, x))
    assert int(f(False, 3)) == 6
    g = wrap(grad(lambda x: cond(x > 0, lambda x: x * x, lambda x: lax.while_loop(
        lambda x: x == x, lambda x: x, x, max_steps=10**7), x)))  # fmt: skip
    assert float(g(2.0)) == 4.0


def test_nan_in_the_other_branch_does_not_spoil_gradients():
    """Unlike in ``where``, whose zero times infinity is a NaN."""
    safe = lambda x: cond(x > 0, lambda x: bnp.sqrt(x), lambda x: x * 0.0, x)
    for g in (grad(safe), jit(grad(safe)), grad(grad(safe)), lambda x: jvp(safe, (x,), (1.0,))[1]):
        assert float(g(0.0)) == 0.0
    f = lambda p, x: cond(p, lambda x: x / 0.0, lambda x: x * 3.0, x).sum()
    close(vmap(grad(f, 1), (None, 0))(False, draw(3)), arr([3.0] * 3))


def test_a_concrete_predicate_is_traced_all_the_same():
    ran = []
    cond(True, lambda: ran.append("true"), lambda: ran.append("false"))
    assert sorted(ran) == ["false", "true"]


# -- arguments and results -------------------------------------------------------------------------


def test_operand_by_name():
    assert float(cond(True, lambda x: x * 2, lambda x: x, operand=2.0)) == 4.0
    assert float(switch(1, [lambda x: x * 2, lambda x: x], operand=2.0)) == 2.0
    assert cond(True, lambda x: x, lambda x: x, operand=None) is None, "None is an operand like any other"
    assert int(switch(0, [lambda _: 5], operand=None)) == 5
    assert cond(True, lambda: (), lambda: ()) == ()


def test_results_have_the_weak_types_of_the_first_branch():
    """That is ``false_fun``, as in JAX."""
    one = arr(1.0, np.float32)
    for weak, on_true, on_false in [
        (True, lambda: 1, lambda: 2),
        (True, lambda: 1.0, lambda: 2.0),
        (True, lambda: one, lambda: 2.0),
        (False, lambda: 2.0, lambda: one),
    ]:
        for y in (cond(True, on_true, on_false), jit(lambda p, f=on_true, g=on_false: cond(p, f, g))(True)):
            assert y.weak_type is weak and y.dtype == np.asarray(on_true()).dtype.name[:-2] + "32"


@pytest.mark.parametrize(
    "number, array, dtype",
    [(1.0, arr(2.0), "float64"), (1, arr(2.0), "float64"), (1, arr(2, np.int8), "int8"),
     (1.0, arr(2.0, np.float16), "float16"), (True, arr(True, bool), "bool")],
)  # fmt: skip
@pytest.mark.parametrize("pred", [True, False])
def test_a_python_number_takes_the_dtype_of_the_other_branch(number, array, dtype, pred):
    for branches in ((lambda: number, lambda: array), (lambda: array, lambda: number)):
        y = cond(pred, *branches)
        assert y.dtype == dtype and not y.weak_type
        assert float(y) == float((branches[0] if pred else branches[1])())
    y = switch(2, [lambda: array, lambda: array, lambda: number])
    assert y.dtype == dtype and float(y) == float(number)


def test_integers_have_float0_tangents():
    f = lambda p, n, x: cond(p, lambda n, x: (n + 1, x * 2.0, x > 0), lambda n, x: (n, x * x, x < 0), n, x)
    zero = np.zeros((), dtypes.float0)
    args = (TRUE, arr(3, np.int32), X)
    outs, ts = jvp(f, args, (zero, zero, arr(1.0)))
    assert int(outs[0]) == 4 and ts[0].dtype == ts[2].dtype == dtypes.float0 and float(ts[1]) == 2.0
    _, pull = vjp(f, *args)
    p_ct, n_ct, x_ct = pull((zero, arr(3.0), zero))
    assert p_ct.dtype == n_ct.dtype == dtypes.float0 and float(x_ct) == 6.0
    assert np.asarray(jit(lambda *a: vjp(f, *a)[1]((zero, arr(3.0), zero))[2])(*args)) == 6.0


def test_keys_are_chosen_like_any_value():
    keys = random.split(random.key(0), 2)
    f = lambda p: cond(p, lambda k, j: (k, j), lambda k, j: (j, random.fold_in(k, 1)), keys[0], keys[1])
    for p, want in ((True, (keys[0], keys[1])), (False, (keys[1], random.fold_in(keys[0], 1)))):
        for got in (f(p), jit(f)(p)):
            assert all(
                np.array_equal(random.key_data(a), random.key_data(b)) for a, b in zip(got, want, strict=True)
            )
    batched = vmap(f)(arr([True, False], bool))
    assert np.array_equal(random.key_data(batched[0]), random.key_data(bnp.stack([keys[0], keys[1]])))


def test_results_do_not_share_storage_with_arguments():
    step = jit(lambda p, x: cond(p, lambda x: (x, x), lambda x: (x, x * 2.0), x), donate_argnums=1)
    a, b = step(TRUE, arr([1.0, 2.0]))
    repeated = step(TRUE, a)
    assert np.asarray(b).tolist() == np.asarray(repeated[0]).tolist() == [1.0, 2.0]


# -- what is traced, and how often -----------------------------------------------------------------


def test_branches_are_traced_once_in_each_call():
    count = []
    f = lambda x: count.append(1) or x * 2
    for k in range(1, 4):
        cond(True, f, f, 1.0)
        assert len(count) == 2 * k
    compiled = jit(lambda p, x: cond(p, f, f, x))
    for p in (True, False, True):
        compiled(p, 1.0)
    assert len(count) == 8


def test_closures_are_read_anew_in_each_call():
    w = arr(2.0)
    f = lambda: cond(True, lambda x: x * w, lambda x: x, arr(1.0))
    assert float(f()) == 2.0
    w = arr(3.0)
    assert float(f()) == 3.0


def test_a_constant_of_several_branches_is_one_operand():
    w, u = draw(3), draw(3, seed=1)
    f = lambda p, x: cond(p, lambda x: x * w + u, lambda x: x - w, x)
    (eqn,) = conds(make_jaxpr(f)(TRUE, draw(3)))
    assert len(eqn.invars) == 4, "the index, w, u and x"
    g = lambda p, x, w: cond(p, lambda x: x * w, lambda x: x - w, x).sum()
    (ahead, back) = conds(jit(value_and_grad(g, 2)).lower(TRUE, draw(3), w).jaxpr)
    assert sum(v.aval.shape == (3,) for v in back.outvars) == 1, "and has one cotangent"
    close(f(TRUE, w), w * w + u)
    close(f(FALSE, w), w - w)
    assert len(ahead.invars) == 3


def test_residuals_that_are_operands_are_not_returned():
    f = lambda p, x, w: cond(p, lambda x: x * w, lambda x: x * x * w, x).sum()
    jaxpr = jit(grad(f, (1, 2))).lower(TRUE, draw(3), draw(3)).jaxpr
    check_jaxpr(jaxpr)
    ahead, back = conds(jaxpr)
    assert len(ahead.outvars) == 1, "x * x"
    assert len([v for v in back.invars if v.aval.shape == (3,)]) <= 4


def test_branches_share_the_room_for_residuals():
    """Each has two of one type of its own: there are two slots, not four."""
    f = lambda p, x: cond(p, lambda x: bnp.sin(bnp.exp(x)), lambda x: bnp.tanh(bnp.cos(x)), x).sum()
    ahead, _ = conds(jit(value_and_grad(f, 1)).lower(TRUE, draw(3)).jaxpr)
    assert len(ahead.outvars) == 3, "the result and two slots"


def test_the_program_of_a_gradient_runs_one_branch():
    f = lambda p, x: cond(p, lambda x: bnp.sin(x) * x, lambda x: bnp.exp(x), x)
    jaxpr = jit(grad(f, 1)).lower(TRUE, X).jaxpr
    assert {"sin", "exp", "cos"}.isdisjoint(names(jaxpr)), "all of it is inside of conds"
    assert len(conds(jaxpr)) == 2


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("p_axis, chosen", [(None, False), (0, True)])
def test_a_batch_of_choices_runs_all_and_any_other_runs_one(p_axis, chosen):
    f = vmap(lambda p, x: cond(p, lambda x: bnp.sin(x), lambda x: bnp.cos(x), x), in_axes=(p_axis, 0))
    p = TRUE if p_axis is None else arr([True, False, True], bool)
    jaxpr = make_jaxpr(f)(p, draw(3))
    assert (len(conds(jaxpr)), "select" in names(jaxpr)) == ((0, True) if chosen else (1, False))


def test_results_that_are_not_batched_stay_so():
    f = lambda x, y: cond(True, lambda x, y: (x, y), lambda x, y: (x * 2, y * 3), x, y)
    jaxpr = make_jaxpr(vmap(f, in_axes=(0, None), out_axes=(0, None)))(draw(3), X)
    (eqn,) = conds(jaxpr)
    assert [v.aval.shape for v in eqn.outvars] == [(3,), ()]


def test_operands_that_all_branches_return_are_not_batched():
    f = lambda p, x, y: cond(p, lambda x, y: (x + 1, y), lambda x, y: (x, y), x, y)
    x, y = vmap(f, (0, 0, None), (0, None))(arr([True, False]), arr([0.0, 1.0]), arr(5.0))
    assert x.tolist() == [1.0, 1.0] and float(y) == 5.0


def test_a_batch_of_choices_of_constants():
    f = lambda p: cond(p, lambda: arr([1.0, 2.0]), lambda: arr([3.0, 4.0]))
    close(vmap(f)(arr([True, False], bool)), arr([[1.0, 2.0], [3.0, 4.0]]))
    close(vmap(f, out_axes=1)(arr([True, False], bool)), arr([[1.0, 3.0], [2.0, 4.0]]))


# -- unread results -------------------------------------------------------------------------------


def three(p, x, y):
    return cond(
        p,
        lambda x, y: {"s": bnp.sin(x), "e": bnp.exp(y), "k": x * y},
        lambda x, y: {"s": x, "e": y, "k": bnp.cos(x)},
        x,
        y,
    )


@pytest.mark.parametrize(
    "kept, n_in, inside",
    [("s", 2, [set(), {"sin"}]), ("e", 2, [set(), {"exp"}]), ("k", 3, [{"cos"}, {"mul"}])],
)
def test_outputs_that_nobody_reads_disappear(kept, n_in, inside):
    f = jit(lambda p, x, y: three(p, x, y)[kept])
    lowered = f.lower(TRUE, X, X).jaxpr
    check_jaxpr(lowered)
    (eqn,) = conds(lowered)
    assert len(eqn.outvars) == 1 and len(eqn.invars) == n_in
    assert [set(names(b)) for b in eqn.params["branches"]] == inside
    for p in (TRUE, FALSE):
        close(f(p, X, X), three(p, X, X)[kept])


def test_a_cond_that_nobody_reads_disappears():
    jaxpr = jit(lambda p, x: (three(p, x, x), x)[1]).lower(TRUE, X).jaxpr
    assert jaxpr.eqns == ()


def test_the_gradient_of_one_output_is_of_the_smaller_cond():
    jaxpr = jit(grad(lambda x: three(TRUE, x, x)["s"])).lower(X).jaxpr
    assert "exp" not in str(jaxpr)


def test_equations_of_branches_keep_their_lines():
    f = grad(lambda x: cond(x > 0, lambda x: bnp.sin(x), lambda x: bnp.exp(x), x))
    for eqn in conds(make_jaxpr(f)(X)):
        assert all("test_cond.py" in e.source[0].co_filename for b in eqn.params["branches"] for e in b.eqns)


def test_golden_grad_of_cond(golden):
    f = lambda p, w, x: cond(p, lambda x: bnp.sin(x * w), lambda x: x * x, x).sum()
    golden("cond_grad", jit(grad(f, (1, 2))).lower(TRUE, draw(3), draw(3)).jaxpr)


# -- rules of the user's ---------------------------------------------------------------------------


def test_custom_rules_in_branches():
    @custom_jvp
    def f(x):
        return bnp.sin(x)

    f.defjvp(lambda ps, ts: (f(*ps), 10.0 * ts[0]))
    g = lambda p, x: cond(p, f, lambda x: x * x, x)
    for p, want in ((TRUE, 10.0), (FALSE, 1.4)):
        for h in (grad(g, 1), jit(grad(g, 1)), grad(jit(g), 1)):
            assert abs(float(h(p, X)) - want) < 1e-12
        assert abs(float(jvp(lambda x: g(p, x), (X,), (arr(1.0),))[1]) - want) < 1e-12  # noqa: B023
    close(vmap(grad(g, 1))(arr([True, False], bool), arr([0.7, 0.7])), arr([10.0, 1.4]))


def test_a_custom_rule_in_a_branch_may_not_close_over_what_is_differentiated():
    def g(w):
        @custom_jvp
        def f(x):
            return x * w

        f.defjvp(lambda ps, ts: (f(*ps), ts[0]))
        return cond(True, f, lambda x: x, X)

    with pytest.raises(errors.GradError, match="closes over"):
        grad(g)(X)


def test_linearize_of_a_jitted_cond_is_linear():
    f = jit(lambda p, x: cond(p, lambda x: (bnp.sin(x), x * W), lambda x: (x, x * x * 2.0), x))
    for p in (TRUE, FALSE):
        x, t = draw(3), draw(3, seed=4)
        outs, lin = linearize(lambda x: f(p, x), x)  # noqa: B023
        close(outs, f(p, x))
        close(lin(t), jvp(lambda x: f(p, x), (x,), (t,))[1])  # noqa: B023
        close(lin(t * 2.0), tree.map(lambda y: y * 2.0, lin(t)))


W = draw(3, seed=2)


# -- errors ----------------------------------------------------------------------------------------

one, two = (lambda x: x), (lambda x: x * 2)
ERRORS = {
    "a predicate with extent": (
        lambda: cond(arr([True]), one, two, X),
        errors.ArgumentError,
        ("rank 0", ".all()"),
    ),
    "a predicate that is no number": (
        lambda: cond("yes", one, two, X),
        errors.ArgumentError,
        ("predicate of cond", "str"),
    ),
    "a predicate that is a key": (
        lambda: cond(random.key(0), one, two, X),
        errors.ArgumentError,
        ("predicate of cond",),
    ),
    "None as a predicate": (lambda: cond(None, one, two, X), errors.ArgumentError, ("NoneType",)),
    "no function": (lambda: cond(True, X, two, X), errors.ArgumentError, ("cond takes a function",)),
    "operands twice": (
        lambda: cond(True, one, two, X, operand=X),
        errors.ArgumentError,
        ("by name", "by place"),
    ),
    "operands of switch twice": (
        lambda: switch(0, [one], X, operand=None),
        errors.ArgumentError,
        ("switch", "by place"),
    ),
    "a different structure": (
        lambda: cond(True, lambda x: {"a": x}, lambda x: {"b": x}, X),
        errors.BranchError,
        ("different structures", "['a']", "['b']"),
    ),
    "another shape": (
        lambda: cond(True, lambda x: {"u": (x, x)}, lambda x: {"u": (x, bnp.stack([x, x]))}, X),
        errors.BranchError,
        ("['u'][1]", "f64[]", "f64[2]"),
    ),
    "another dtype": (
        lambda: cond(True, one, lambda x: x.astype("float32"), X),
        errors.BranchError,
        ("f64[]", "f32[]", "astype"),
    ),
    "a number of another kind": (
        lambda: cond(True, lambda: 1.5, lambda: arr(1, np.int32)),
        errors.BranchError,
        ("i32[]", "f32[]"),
    ),
    "a result that is no array": (
        lambda: cond(True, one, lambda x: {"a": "text"}["a"], X),
        errors.ArgumentError,
        ("result", "str"),
    ),
    "an operand that is no array": (
        lambda: cond(True, one, two, {"a": "text"}),
        errors.ArgumentError,
        ("operands[0]['a']", "str"),
    ),
    "no branches": (lambda: switch(0, [], X), errors.ArgumentError, ("sequence of functions",)),
    "branches that are no sequence": (
        lambda: switch(0, one, X),
        errors.ArgumentError,
        ("sequence of functions",),
    ),
    "an index that is no integer": (
        lambda: switch(0.0, [one, two], X),
        errors.ArgumentError,
        ("index of switch", "integer"),
    ),
    "a boolean index": (
        lambda: switch(True, [one, two], X),
        errors.ArgumentError,
        ("index of switch", "integer"),
    ),
    "an index with extent": (
        lambda: switch(arr([0], np.int32), [one, two], X),
        errors.ArgumentError,
        ("index of switch", "i32[1]"),
    ),
    "an if on an operand": (
        lambda: cond(True, lambda x: x if x > 0 else -x, one, X),
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
    assert "test_cond.py" in info.value.where


def test_a_branch_that_leaks_is_found():
    kept = []
    cond(True, lambda x: kept.append(x) or x, lambda x: x, X)
    with pytest.raises(errors.LeakedTracerError):
        kept[0] + 1.0


# -- the peer --------------------------------------------------------------------------------------


@pytest.mark.peer
def test_against_jax():
    import jax

    def program(np_, lax_):
        def f(i, w, x):
            branches = [
                lambda x: np_.sin(w @ x),
                lambda x: lax_.cond(x.sum() > 0, lambda x: x * w[0], lambda x: x - w[1], x),
                lambda x: np_.ones(3, x.dtype),
            ]
            return (lax_.switch(i, branches, x) ** 2).sum()

        return f

    ours, theirs = program(bnp, lax), program(jax.numpy, jax.lax)
    rng = np.random.default_rng(0)
    i = np.array([-1, 0, 1, 1, 2, 5], np.int32)
    w = rng.normal(size=(3, 3)).astype(np.float32)
    x = rng.normal(size=(6, 3)).astype(np.float32)
    same = lambda x, y: [
        np.testing.assert_allclose(np.asarray(p), np.asarray(q), rtol=2e-5, atol=1e-5)
        for p, q in zip(tree.leaves(x), jax.tree.leaves(y), strict=True)
    ]
    axes = (0, None, 0)
    same(vmap(ours, axes)(i, w, x), jax.vmap(theirs, axes)(i, w, x))
    same(vmap(grad(ours, (1, 2)), axes)(i, w, x), jax.vmap(jax.grad(theirs, (1, 2)), axes)(i, w, x))
    for k in range(6):
        hvp = lambda grad, jvp, f: jvp(lambda x: grad(f, 1)(i[k], w, x), (x[k],), (x[k],))[1]  # noqa: B023
        same(hvp(grad, jvp, ours), hvp(jax.grad, jax.jvp, theirs))


@pytest.mark.parametrize("wrap", [lambda f: f, jit])
def test_a_branch_that_an_element_does_not_take_has_no_part_in_its_gradient(wrap):
    """Unselected infinite derivatives give no NaN, for unmapped operands too."""
    f = lambda x, w: cond(x > 0, lambda x: bnp.sqrt(x) * w + w / x, lambda x: x * 2.0, x)
    g = wrap(grad(lambda x, w: vmap(f, (0, None))(x, w).sum(), (0, 1)))
    close(g(arr([0.0, 4.0, -1.0]), arr(3.0)), (arr([2.0, 0.75 - 3 / 16, 2.0]), arr(2.25)))
    three = lambda x: switch(
        bnp.sign(x).astype("int32") + 1, [lambda x: bnp.log(x - 4.0), bnp.sqrt, lambda x: x], x
    )
    close(wrap(grad(lambda x: vmap(three)(x).sum()))(arr([4.0])), arr([1.0]))


def test_guards_of_branches_are_gone_from_programs():
    text = jit(vmap(lambda x: cond(x > 0, lambda x: x * 2, lambda x: x, x))).lower(arr([1.0])).source()
    assert "stop_gradient" not in text and text.count("select") == 1
