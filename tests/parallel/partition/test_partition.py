"""Partitioned programs: values, derivatives, loops, and their collectives."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, nn
from blufunc.core.ops import sort
from blufunc.core.ops.linalg import factor as linalg_factor
from blufunc.core.ops.linalg import solve as linalg_solve
from blufunc.parallel.collectives.shard_map import shard_map
from blufunc.parallel.mesh.constrain import constrain
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.partition.partition import localise
from tests.parallel.lockstep import MESHES, P, check, collectives
from tests.parallel.partition.test_factors import random_spec


def floats(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


TOKENS = np.array([[1, 2, 6, 0], [0, 5, 3, 6], [4, 4, 1, 2]], np.int32)


def mlp(x, w, b, v):
    return bnp.tanh(x @ w + b) @ v


def lookup_loss(x, table, w):
    h = table[TOKENS] * x[:, :, None] + bnp.arange(5)
    logits = bnp.tanh(h) @ w
    return nn.softmax_cross_entropy_with_integer_labels(logits, TOKENS).mean()


def shapes(x, w):
    y = bnp.swapaxes(x.reshape(4, 3, 2, 2), 1, 2).reshape(4, 12)
    y = bnp.concatenate([y, y[:, ::-1], bnp.pad(y, ((0, 0), (1, 0)))], 1)
    return bnp.sort(y, 1) @ w, bnp.cumsum(y, 0).max(1), y.argmax(1), y.var(0)


def looped(x, w):
    def step(carry, row):
        total, h = carry
        h = bnp.tanh(h @ w + row)
        return (total + h.sum(), h), h * 2

    (total, h), ys = lax.scan(step, (0.0, x[0]), x)
    h = lax.while_loop(lambda s: (s * s).sum() > 0.1, lambda s: s * 0.5, h)
    return lax.cond(total > 0, lambda a: a @ w, lambda a: a - w[0, 0], h), ys


PROGRAMS = {
    "mlp": (mlp, [(6, 4), (4, 8), (8,), (8, 3)]),
    "lookup_loss": (lookup_loss, [(3, 4), (7, 5), (5, 7)]),
    "shapes": (shapes, [(4, 12), (37, 3)]),
    "loops": (looped, [(3, 5, 4), (4, 4)]),
}


ORDERS = ["plain", "grad", "vmap", "vmap of grad", "grad of vmap", "grad of checkpoint"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", PROGRAMS)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=12)
def test_programs_divided_at_random(name, mesh, data):
    """Random shardings of arguments, results, and annotations under transforms."""
    f, operands = PROGRAMS[name]
    args = [floats(*shape) for shape in operands]
    mesh = MESHES[mesh]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    spec = lambda x: random_spec(rng, np.ndim(x), mesh.axis_names)
    order = data.draw(st.sampled_from(ORDERS))
    inside = [spec(a) if data.draw(st.booleans()) else None for a in args]
    if data.draw(st.booleans()):
        free = lambda s: {a for a in mesh.axis_names if a not in s.axes}
        inside = [s and P(*s, unreduced=free(s)) for s in inside]

    def annotated(*xs):
        return f(*[x if s is None else constrain(x, s) for x, s in zip(xs, inside, strict=True)])

    def scalar(*xs):
        if name == "loops":  # its while_loop has no reverse mode
            return looped(*xs)[1].sum()
        return sum(bnp.sum(o * o) for o in bf.tree.leaves(annotated(*xs)) if o.dtype == np.float32)

    if "vmap" in order:
        args = [np.stack([a, a * 0.5]) for a in args]
    every = tuple(range(len(args)))
    g = {
        "plain": annotated,
        "vmap": bf.vmap(annotated),
        "grad": bf.grad(scalar, every),
        "vmap of grad": bf.vmap(bf.grad(scalar, every)),
        "grad of vmap": bf.grad(lambda *xs: bf.vmap(scalar)(*xs).sum(), every),
        "grad of checkpoint": bf.grad(bf.checkpoint(scalar), every),
    }[order]
    outs = [spec(o) for o in bf.tree.leaves(bf.eval_shape(g, *args))] if data.draw(st.booleans()) else None
    tol = 1e-4 if order in ("plain", "vmap") else 2e-3
    check(g, args, [spec(a) for a in args], mesh, outs, rtol=tol, atol=tol)


# -- collectives that are expected -------------------------------------------------------------------

X2 = MESHES["2"]
X4 = MESHES["4"]


def counted(f, args, specs, mesh=X2, outs=None):
    return collectives(check(f, args, specs, mesh, outs, rtol=1e-4, atol=1e-4))


def test_a_contraction_over_divided_factors_is_one_all_reduce():
    x, w = floats(6, 8), floats(8, 3)
    assert counted(lambda x, w: x @ w, (x, w), (P(None, "x"), P("x")), X4) == {"psum_invariant": 1}


@pytest.mark.parametrize(
    ("tokens", "exchanged"), [(64, {"all_gather": 1}), (4, {"all_to_all": 1, "psum_scatter": 1})]
)
def test_an_axis_goes_to_the_dimension_along_which_less_is_exchanged(tokens, exchanged):
    x, w = floats(tokens, 8), floats(8, 8)  # both sharded over x: the tokens, or the summed dimension
    assert counted(lambda x, w: x @ w, (x, w), (P("x"), P("x")), X4, [P("x")]) == exchanged


def test_what_owes_a_sum_is_scattered_where_the_result_is_divided():
    x, w = floats(8, 8), floats(8, 3)
    specs = (P(None, "x"), P("x"))
    assert counted(lambda x, w: 2 * (x @ w), (x, w), specs, X4, [P("x")]) == {"psum_scatter": 1}
    assert counted(lambda x, w: x @ w, (floats(7, 8), w), specs, X4, [P("x")]) == {"psum_scatter": 1}


def test_two_sums_that_are_added_are_settled_once():
    x, w = floats(6, 8), floats(8, 3)
    f = lambda x, w, v: (x @ w) * 3 - (x @ v).T.T
    assert counted(f, (x, w, w + 1), (P(None, "x"), P("x"), P("x"))) == {"psum_invariant": 1}


@pytest.mark.parametrize(("dtype", "summed"), [("float16", "float32"), ("float64", "float64")])
def test_terms_are_not_rounded_before_their_sum(dtype, summed):
    f = lambda x: x.sum(0).astype(dtype)
    local = check(f, [floats(6, 4)], [P("x")], X2, rtol=1e-2, atol=1e-2)
    (total,) = [e for e in local.eqns if e.prim.name == "psum_invariant"]
    assert total.invars[0].aval.dtype == summed


def test_an_owed_sum_that_two_read_is_settled_before():
    x, w = floats(6, 8), floats(8, 3)

    def f(x, w):
        y = x @ w
        return y * 2, y / 3

    assert counted(f, (x, w), (P(None, "x"), P("x"))) == {"psum_invariant": 1}


def test_one_dimension_to_another_is_an_all_to_all():
    x = floats(8, 12)
    assert counted(lambda x: x + 1, (x,), (P("x"),), X4, [P(None, "x")]) == {"all_to_all": 1}
    assert counted(lambda x: x + 1, (floats(7, 9),), (P("x"),), X4, [P(None, "x")]) == {"all_to_all": 1}


def test_a_large_vocabulary_is_looked_up_where_it_lies():
    table = floats(7, 4)
    assert counted(lambda t: t[TOKENS], (table,), (P("x"),), X4) == {"psum_invariant": 1}
    outside = np.array([0, 6, 7, -8, 100], np.int32)
    for mode in ("fill", "clip"):
        f = lambda t: bnp.take(t, outside, 0, mode=mode)  # noqa: B023
        assert counted(f, (table,), (P("x"),), X4) == {"psum_invariant": 1}


ROWS = {"offset_dims": (1,), "collapsed_slice_dims": (0,), "start_index_map": (0, 1)}
PLACES = np.array([[1, 9], [7, 8], [3, 2], [9, 3], [-1, 0], [2, -4]], np.int32)  # windows of 3 of a (8, 10)


@pytest.mark.parametrize("mode", ["fill", "clip"])
@pytest.mark.parametrize("spec", [P("x"), P("x", "y"), P(("y", "x"))])
def test_windows_of_a_divided_table_that_are_partly_outside(mode, spec):
    numbers = lax.GatherDimensionNumbers(**ROWS)
    look_up = lambda t: lax.gather(t, PLACES, numbers, slice_sizes=(1, 3), mode=mode)
    names = ("update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims")
    into = lax.ScatterDimensionNumbers(**dict(zip(names, ROWS.values(), strict=True)))
    updates = floats(6, 3)
    put = lambda t: lax.scatter_add(t, PLACES, updates, into, mode=mode)
    for f in (look_up, put, bf.grad(lambda t: (look_up(t)[1:4] ** 2).sum())):
        check(f, [floats(8, 10)], [spec], MESHES["2x2"])


def test_small_indices_into_a_large_divided_table():
    places = np.array([[0], [127], [90], [-3]], np.int8)
    numbers = lax.GatherDimensionNumbers(**{**ROWS, "start_index_map": (0,)})
    look_up = lambda t, i: lax.gather(t, i, numbers, slice_sizes=(1, 2), mode="clip")
    check(look_up, [floats(300, 2), places], [P("x"), P()], X4)


def test_padding_of_indices_is_not_unique():
    places = np.array(
        [4, 2, 3, 0, 1], np.int32
    )  # of the second device 0, 1 and padding, which mod 7 is 1 too
    add = lambda i, u: bnp.arange(7.0).at[i % 7].add(u, unique_indices=True, indices_are_sorted=True)
    check(add, [places, floats(5)], [P("x"), P("x")], MESHES["2"])


def test_padding_of_places_is_not_looked_up():
    x, places = floats(5, 4), np.argsort(floats(5, 4), 1).astype(np.int32)
    lu, rows, wanted = floats(5, 4, 4) + 4 * np.eye(4, dtype=np.float32), places, floats(5, 4, 2)
    uses = [
        (sort.pick_along_p, {"dimension": 1}, [x, places]),
        (sort.place_along_p, {"dimension": 1, "size": 4}, [x, places]),
        (linalg_solve.lu_solve_p, {"transposed": 0}, [lu, lu, rows, wanted]),
        (linalg_factor.lu_pivots_to_permutation_p, {"permutation_size": 4}, [places]),
    ]
    for prim, params, args in uses:
        check(lambda *xs: prim.bind(*xs, **params), args, [P("x")] * len(args), X4)  # noqa: B023


def test_a_loss_over_a_divided_vocabulary_exchanges_no_logits():
    logits = floats(3, 4, 7)
    f = lambda x: nn.softmax_cross_entropy_with_integer_labels(x, TOKENS).mean()
    specs = (P(None, None, "x"),)
    local = check(bf.value_and_grad(f), (logits,), specs, X2, outs=[None, P(None, None, "x")])
    assert collectives(local) == {"pmax_invariant": 1, "psum_invariant": 2}
    sizes = [
        e.invars[0].aval.shape for e in local.eqns if e.prim.name in ("pmax_invariant", "psum_invariant")
    ]
    assert all(len(s) < 3 for s in sizes)


def test_gradients_of_microbatches_are_summed_over_the_mesh_once():
    x, w = floats(3, 8, 4), floats(4, 2)

    def f(x, w):
        loss = lambda w, rows: bnp.tanh(rows @ w).sum()
        step = lambda total, rows: (total + bf.grad(loss)(w, rows), None)
        return lax.scan(step, bnp.zeros((4, 2)), x)[0]

    local = check(f, (x, w), (P(None, "x"), P()), X4)
    (scan,) = [e for e in local.eqns if e.prim.name == "scan"]
    assert collectives(scan.params["jaxpr"]) == {}
    assert collectives(local) == {"psum_invariant": 1}


def loop_and_all(local):
    """Collectives in one step of a local program's loop, and in the whole program."""
    (scan,) = [e for e in local.eqns if e.prim.name == "scan"]
    return collectives(scan.params["jaxpr"]), collectives(local)


@pytest.mark.parametrize("divided", [False, True])
def test_sums_that_a_loop_stacks_are_settled_behind_it_unless_only_shares_are_kept(divided):
    x, w = floats(3, 6, 8), floats(8, 4)
    f = lambda x, w: lax.scan(lambda _, rows: (None, 2 * (rows @ w)), None, x)[1]
    outs = [P(None, None, "x")] if divided else None
    local = check(f, (x, w), (P(None, None, "x"), P("x")), X4, outs)
    want = ({"psum_scatter": 1},) * 2 if divided else ({}, {"psum_invariant": 1})
    assert loop_and_all(local) == want


def test_a_stacked_zero_owes_nothing():
    x, w = floats(3, 6, 8), floats(8, 4)
    f = lambda x, w: lax.scan(lambda _, rows: (None, bnp.broadcast_to(0.0, (6, 4))), None, x)[1]
    assert counted(f, (x, w), (P(None, None, "x"), P("x"))) == {}


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "checkpointed"])
def test_a_loop_accumulates_the_unreduced_sums_of_a_call(recomputed):
    x, w = floats(3, 8, 4), floats(4, 2)

    def f(x, w):
        layer = lambda w, rows: bnp.tanh(rows @ w)
        loss = lambda w, rows: (bf.checkpoint(layer) if recomputed else layer)(w, rows).sum()
        step = lambda total, rows: (total + bf.grad(loss)(w, rows), None)
        return lax.scan(step, bnp.zeros((4, 2)), x)[0]

    local = check(f, (x, w), (P(None, "x"), P()), X4)
    assert loop_and_all(local) == ({}, {"psum_invariant": 1})


def test_sums_are_scattered_into_rows_before_they_are_settled():
    # the gradient of positions: updates that are sums over the batch, and that are divided themselves
    batch, rows = floats(8, 4, 3), np.array([3, 1, 0, 1], np.int32)
    f = lambda x: bnp.zeros((5, 3)).at[rows].add(x.sum(0))
    mesh = MESHES["2x2"]
    local = check(f, (batch,), (P("x", "y"),), mesh)
    assert [e.params["axes"] for e in local.eqns if e.prim.name == "psum_invariant"] == [("x", "y")]
    # rows of a table that is there count once
    f = lambda x, table: table.at[rows].add(x.sum(0))
    check(f, (batch, floats(5, 3)), (P("x", "y"), P()), mesh)


def test_sums_that_may_stay_owed_are_scattered_once_behind_the_loop():
    """ZeRO-1 against ZeRO-2: they differ in a constraint between loop and result."""
    x, w = floats(3, 8, 4), floats(4, 2)

    def summed(x, w, spec=None):
        loss = lambda w, rows: bnp.tanh(rows @ w).sum()
        step = lambda total, rows: (total + bf.grad(loss)(w, rows), None)
        total = lax.scan(step, bnp.zeros((4, 2)), x)[0]
        return total if spec is None else constrain(total, spec)

    ends = (P(None, "x"), P()), X4, [P("x")]
    assert loop_and_all(check(summed, (x, w), *ends)) == ({"psum_scatter": 1},) * 2
    later = lambda x, w: 2 * summed(x, w, P(unreduced={"x"}))
    assert loop_and_all(check(later, (x, w), *ends)) == ({}, {"psum_scatter": 1})
    whole = lambda x, w: 2 * summed(x, w, P())
    assert loop_and_all(check(whole, (x, w), *ends)) == ({}, {"psum_invariant": 1})


def test_checkpoint_gathers_again_for_the_backward_pass():
    x, w = floats(64, 4), floats(4, 8)
    g = bf.value_and_grad(lambda w, x: bf.checkpoint(lambda w: bnp.sin(bnp.sin(x @ w)))(w).sum())
    assert counted(g, (w, x), (P("x"), P("x")), X2, [P(), P("x")]) == {
        "all_gather": 2,
        "psum_scatter": 1,
        "psum_invariant": 1,
    }


# -- annotations -------------------------------------------------------------------------------------


def test_constrain_is_the_identity_and_so_are_its_derivatives():
    x = floats(4, 6)
    f = lambda x: (constrain(x, P("x")) ** 2).sum()
    np.testing.assert_array_equal(bf.grad(f)(x), 2 * x)
    np.testing.assert_array_equal(bf.jit(bf.vmap(lambda r: constrain(r, P("x")) * 2))(x), 2 * x)
    tangent = bf.jvp(lambda x: constrain({"a": x}, {"a": P("x")})["a"], (x,), (x + 1,))[1]
    np.testing.assert_array_equal(tangent, x + 1)
    f = lambda x: (constrain(x, P(None, "x", unreduced={"y"})) ** 2).sum()
    np.testing.assert_array_equal(bf.grad(f)(x), 2 * x)
    check(bf.value_and_grad(f), (x,), (P("y"),), MESHES["2x2"])


def test_annotations_divide_values_and_their_cotangents():
    x = floats(4, 6)
    f = lambda x: bnp.sin(constrain(bnp.sin(x), P(None, "x"))).sum()
    local = check(bf.grad(f), (x,), (P(),), X2, outs=[P(None, "x")])
    assert collectives(local) == {}
    assert all(v.aval.shape == (4, 3) for e in local.eqns if e.prim.name in ("sin", "cos") for v in e.outvars)


def test_annotations_under_vmap_leave_the_batch_free():
    x = floats(4, 6)
    f = bf.vmap(lambda r: bnp.sin(constrain(bnp.sin(r), P("y"))))
    local = check(f, (x,), (P("x"),), MESHES["2x2"], outs=[P("x", "y")])
    assert collectives(local) == {}


def test_wrong_annotations_name_the_line_of_the_user():
    x = floats(4, 6)
    with pytest.raises(errors.ShardingError, match=r"rank 3.*\n.*test_partition.py"):
        constrain(x, P(None, None, "x"))
    with pytest.raises(errors.ShardingError, match="axis 'x' twice"):
        constrain(x, P("x", "x"))
    with pytest.raises(errors.ArgumentError, match="takes a partition spec"):
        constrain(x, ("x",))
    with pytest.raises(errors.ShardingError, match="takes no reduced axes"):
        constrain(x, P(reduced={"x"}))
    with pytest.raises(errors.ShardingError, match=r"names the axis 'q'.*\n.*test_partition.py"):
        check(lambda x: constrain(x, P(unreduced={"q"})) + 1, (x,), (P(),), X2)
    with pytest.raises(errors.ShardingError, match=r"names the axis 'q'.*\n.*test_partition.py"):
        check(lambda x: constrain(x, P("q")) + 1, (x,), (P(),), X2)
    with pytest.raises(errors.ShardingError, match="is for the mesh"):
        check(lambda x: constrain(x, NamedSharding(X4, P("x"))) + 1, (x,), (P(),), X2)


def test_shardings_of_another_mesh_or_rank_are_refused():
    jaxpr = bf.make_jaxpr(lambda x: x + 1)(floats(4))
    with pytest.raises(errors.ShardingError, match="parameter x is on the mesh"):
        localise(jaxpr, [NamedSharding(X4, P("x"))], X2)
    with pytest.raises(errors.ShardingError, match="rank 2"):
        localise(jaxpr, [NamedSharding(X2, P(None, "x"))], X2)


def test_parameters_and_results_may_owe_sums():
    x = floats(4, 6)
    jaxpr = bf.make_jaxpr(lambda x: x.T * 2)(x)
    owing = NamedSharding(X2, P(unreduced={"x"}))
    local, (out,) = localise(jaxpr, [owing], X2, [owing])
    assert collectives(local) == {} and out.spec.unreduced == {"x"}
    local, _ = localise(jaxpr, [owing], X2)
    assert collectives(local) == {"psum_invariant": 1}


def test_a_thousand_devices_need_no_devices():
    mesh = AbstractMesh((64, 64), ("data", "model"))
    jaxpr = bf.make_jaxpr(lambda x, w: bnp.tanh(x @ w).sum())(floats(128, 64), floats(64, 128))
    local, _ = localise(jaxpr, [NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "model"))], mesh)
    assert collectives(local) == {"psum_invariant": 1}
    assert local.invars[0].aval.shape == (2, 64)


def test_a_function_of_shards_inside_of_a_divided_program():
    x, w = floats(8, 6), floats(6, 4)

    def f(x, w):
        product = shard_map(
            lambda a, b: lax.psum(a @ b, "x"), mesh=X2, in_specs=(P(None, "x"), P("x")), out_specs=P()
        )
        return (bnp.tanh(product(bnp.sin(x), w)) ** 2).sum()

    assert counted(f, (x, w), (P(None, "x"), P("x"))) == {"psum_invariant": 1}
    check(bf.grad(f, (0, 1)), (x, w), (P("x"), P()), X2, outs=[P("x"), P("x")])
    with pytest.raises(errors.ShardingError, match=r"shard_map is for the mesh.*\n.*test_partition.py"):
        check(f, (x, w), (P(), P()), X4)


def test_a_part_of_a_dimension_that_is_not_its_first_stays_whole():
    x, w = floats(4, 24), floats(24)
    f = lambda x, w: bnp.sin(x + w).reshape(4, 3, 4, 2) * 2
    local = check(f, (x, w), (P(), P()), X4, outs=[P(None, None, "x")])
    assert collectives(local) == {}
    check(f, (x, w), (P(None, "x"), P("x")), MESHES["2x2"], outs=[P(None, None, ("y", "x"))])
