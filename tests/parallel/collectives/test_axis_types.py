"""Types over mesh axes: misuse is an error that names the user's line."""

from __future__ import annotations

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.programs.stage import stage
from blufunc.parallel.collectives.axis_types import typed
from blufunc.parallel.collectives.primitives import mesh_ppermute_p
from blufunc.parallel.collectives.shard_map import shard_map
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.mesh.spec import P

MESH = AbstractMesh((2, 2), ("x", "y"))
X = np.arange(32, dtype=np.float32).reshape(4, 8)


def unreduced(v, axis="x"):
    return lax.pcast(v, axis, to="unreduced")


@bf.custom_vjp
def summed(v):
    return lax.psum(v, "x")


summed.defvjp(lambda v: (lax.psum(v, "x"), None), lambda _, ct: (ct,))

# a function of a shard that is sharded over x, part of the message
REFUSED = {
    "a nonlinear operation": (lambda v: bnp.exp(unreduced(v)), "exp of a value unreduced over 'x'"),
    "a product of two": (lambda v: unreduced(v) * unreduced(v), "mul of a value unreduced"),
    "a product with what varies": (lambda v: unreduced(v) * v, "and a varying operand 1"),
    "a matrix product of two": (lambda v: unreduced(v) @ unreduced(v).T, "dot_general of a value unreduced"),
    "division by it": (lambda v: 1.0 / unreduced(v), "div of a value unreduced over 'x'"),
    "rounding to integers": (lambda v: unreduced(v).astype("int32"), "convert of a value unreduced over 'x'"),
    "a truth value": (lambda v: unreduced(v).astype("bool"), "convert of a value unreduced over 'x'"),
    "a division of integers": (lambda v: lax.div(unreduced(v.astype("int32")), 2), "div of a value unreduced over 'x'"),
    "a lookup with a fill": (
        lambda v: unreduced(v).at[bnp.array([0, 9])].get(mode="fill", fill_value=1.0),
        "gather of a value unreduced over 'x'",
    ),
    "a sum with what varies": (lambda v: unreduced(v) + v, "add of a value unreduced over 'x' and what is varying"),
    "a sum with a number": (lambda v: unreduced(v) + 1.0, "add of a value unreduced over 'x' and what is invariant"),
    "a sum over unequal axes": (
        lambda v: unreduced(v) + unreduced(lax.pcast(lax.psum(v, "x"), "y", to="varying"), "y"),
        "add of a value unreduced over",
    ),
    "the maximum": (lambda v: lax.pmax(unreduced(v), "x"), "pmax of a value unreduced"),
    "the maximum over another axis": (lambda v: lax.pmax(unreduced(v), "y"), "pmax of a value unreduced"),
    "a gather": (lambda v: lax.all_gather(unreduced(v), "x"), "all_gather of a value unreduced"),
    "a predicate of cond": (
        lambda v: lax.cond(v.sum() > 0, lambda: lax.psum(v, "x"), lambda: v),
        "the predicate of a cond varies over 'x'",
    ),
    "a predicate of while_loop": (
        lambda v: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + lax.pmean(v, "x"), v),
        "the predicate of a while_loop varies over 'x'",
    ),
    "a predicate around a jitted collective": (
        lambda v: lax.cond(v.sum() > 0, bf.jit(lambda: lax.psum(v, ("y", "x"))), lambda: v),
        "the predicate of a cond varies over 'x'",
    ),
    "paths of two types": (
        lambda v: lax.cond(lax.psum(v.sum(), "x") > 0, lambda: unreduced(v), lambda: v),
        "unreduced over 'x' on one path and varying on the other",
    ),
    "a cast that takes communication": (
        lambda v: lax.pcast(v, "x", to="invariant"), "varying over 'x' is not invariant",
    ),
    "a cast of what is unreduced": (
        lambda v: lax.pcast(unreduced(v), "x", to="varying"), "unreduced over 'x' is not varying",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    local, message = REFUSED[what]
    with pytest.raises((errors.ShardingError, errors.UnsupportedError)) as e:
        shard_map(local, mesh=MESH, in_specs=P("x"), out_specs=P("x"))(X)
    assert message in str(e.value)
    assert "test_axis_types.py" in e.value.where


# what is not there, or stands in the wrong place
ABSENT = {
    "psum": lambda v: lax.psum(v, "z"),
    "all_gather": lambda v: lax.all_gather(v, "i"),
    "axis_index": lambda v: v * lax.axis_index("data"),
    "pcast": lambda v: lax.pcast(v, "z", to="varying"),
    "a cast over a mapped axis": lambda v: bf.vmap(lambda r: lax.pcast(r, "i", to="varying"), axis_name="i")(
        v
    ),
}


@pytest.mark.parametrize("what", ABSENT)
def test_axes_that_are_not_there(what):
    with pytest.raises(errors.AxisNameError) as e:
        shard_map(ABSENT[what], mesh=MESH, in_specs=P("x"), out_specs=P("x"))(X)
    assert "test_axis_types.py" in e.value.where


def test_outside_of_shard_map_there_is_no_axis():
    with pytest.raises(errors.AxisNameError, match="no axis is named here"):
        lax.psum(X, "x")


RESULTS = {
    "varying, said invariant": (lambda v: v, P(), "varies over 'x', and its spec P() does not say so"),
    "a number that is cast": (lambda v: lax.pcast(2.0, "x", to="varying"), P(), "varies over 'x'"),
    "a zero that is cast": (lambda v: lax.pcast(0.0, "x", to="unreduced"), P(), "is unreduced over 'x'"),
    "varying, said reduced": (lambda v: v, P(reduced={"x"}), "varies over 'x'"),
    "varying, said unreduced": (lambda v: v, P(unreduced={"x"}), "says that it is unreduced"),
    "unreduced, not said": (unreduced, P(), "is unreduced over 'x'"),
    "unreduced, said varying": (unreduced, P("x"), "is unreduced over 'x'"),
    "a spec of another rank": (lambda v: v, P("x", None, "y"), "the spec of the result"),
    "an axis that is not there": (lambda v: v, P("z"), "names the axis 'z'"),
}


@pytest.mark.parametrize("what", RESULTS)
def test_results_that_are_not_what_their_spec_says(what):
    local, spec, message = RESULTS[what]
    with pytest.raises(errors.ShardingError) as e:
        shard_map(local, mesh=MESH, in_specs=P("x"), out_specs=spec)(X)
    assert message in str(e.value)
    assert "test_axis_types.py" in e.value.where


ARGUMENTS = {
    "an axis that is not there": (P("z"), errors.ShardingError, "the argument v: .* names the axis 'z'"),
    "a spec of another rank": (P(None, None, "x"), errors.ShardingError, "the argument v: .* has rank 3"),
    "no multiple": (P(("x", "y"), None), errors.ShardingError, "dimension 0 of the argument v"),
    "no spec": ("x", errors.ArgumentError, "in_specs holds partition specs, not 'x'"),
    "None": (None, errors.ShardingError, "the argument v has no sharding on the mesh"),
    "not manual": (P("y"), errors.ShardingError, "'y' is not among its axis_names"),
    "no prefix": ((P(), P()), errors.TreeError, "in_specs is not a pytree prefix"),
}


@pytest.mark.parametrize("what", ARGUMENTS)
def test_specs_that_do_not_fit_the_arguments(what):
    spec, error, message = ARGUMENTS[what]
    axes = {"x"} if what == "not manual" else None
    with pytest.raises(error, match=message):
        shard_map(lambda v: v, mesh=MESH, in_specs=spec, out_specs=P(), axis_names=axes)(X[:3])


def test_options():
    with pytest.raises(errors.ArgumentError, match="takes a mesh"):
        shard_map(lambda v: v, mesh="x", in_specs=P(), out_specs=P())
    with pytest.raises(errors.ArgumentError, match="check_vma is True or False"):
        shard_map(lambda v: v, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=1)
    with pytest.raises(errors.ArgumentError, match="takes a function"):
        shard_map(3, mesh=MESH, in_specs=P(), out_specs=P())
    with pytest.raises(errors.ArgumentError, match="to is one of"):
        shard_map(lambda v: lax.pcast(v, "x", to="V"), mesh=MESH, in_specs=P(), out_specs=P())(X)
    with pytest.raises(errors.ArgumentError, match="to is one of varying, invariant, reduced"):
        shard_map(lambda v: lax.all_gather(v, "x", to="unreduced"), mesh=MESH, in_specs=P(), out_specs=P())(X)


def test_one_inside_of_another():
    inner = shard_map(lambda v: v, mesh=MESH, in_specs=P(), out_specs=P())
    with pytest.raises(errors.ShardingError, match=r"has no axis left, .* can be are none"):
        shard_map(inner, mesh=MESH, in_specs=P(), out_specs=P())(X)
    nested = shard_map(lambda v: v, in_specs=P(), out_specs=P(), axis_names={"x"})
    with pytest.raises(errors.ShardingError, match=r"names 'x' as manual, .* can be are 'y'"):
        shard_map(nested, mesh=MESH, in_specs=P(), out_specs=P(), axis_names={"x"})(X)
    other = shard_map(lambda v: v, mesh=bf.AbstractMesh((2,), ("z",)), in_specs=P(), out_specs=P())
    with pytest.raises(errors.ShardingError, match="inside of another over"):
        shard_map(other, mesh=MESH, in_specs=P(), out_specs=P(), axis_names={"x"})(X)


@pytest.mark.parametrize(
    "n, message", [(3, "cannot be sharded over"), (2, "'q', which the mesh")], ids=["size", "name"]
)
def test_vmaps_that_do_not_fit_the_mesh(n, message):
    mapped = shard_map(lambda v: v * 2, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(errors.ShardingError, match=message):
        bf.vmap(mapped, spmd_axis_name="y" if n == 3 else "q")(np.zeros((n, 4)))


def test_a_divided_vmap_over_an_axis_in_use():
    mapped = shard_map(lambda v: v * 2, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(errors.ShardingError, match="uses the axis 'x' twice"):
        bf.vmap(mapped, spmd_axis_name="x")(np.zeros((2, 4)))


def test_terms_of_sums_that_are_owed_have_no_derivatives_of_their_own():
    def local(v, w):
        return lax.psum((unreduced(v @ w) * lax.psum(bnp.tanh(w).sum(), "x")).sum(), "x")

    f = shard_map(local, mesh=MESH, in_specs=(P(None, "x"), P("x")), out_specs=P())
    first = bf.grad(f, 1)(X, X.T)
    assert first.shape == (8, 4)
    with pytest.raises(errors.GradError, match="second derivatives of functions of unreduced values") as e:
        bf.grad(lambda w: bf.grad(f, 1)(X, w).sum())(X.T)
    assert "test_axis_types.py" in e.value.where


# -- types -----------------------------------------------------------------------------------------


def types_after(fun, *in_types):
    """Result types of ``fun`` of vectors, and the inserted casts and collectives."""
    aval = ShapedArray((4,), np.dtype(np.float32))
    jaxpr, types = typed(stage(fun, [aval] * len(in_types)), MESH, [tuple(t) for t in in_types])
    typed_again, types_again = typed(jaxpr, MESH, [tuple(t) for t in in_types])
    assert str(typed_again) == str(jaxpr)
    assert types_again == types
    put_in = [f"{e.prim.name} {e.params['src']}{e.params['dst']}" for e in jaxpr.eqns if "src" in e.params]
    return ["".join(t) for t in types], put_in


def test_joins():
    assert types_after(lambda a, b: [a * b], "VI", "II") == (["VI"], ["pcast IV"])
    assert types_after(lambda a, b: [a * b], "VI", "IV") == (["VV"], ["pcast IV", "pcast IV"])
    assert types_after(lambda a, b: [a * b], "RI", "II") == (["RI"], ["pcast IR"])
    assert types_after(lambda a, b: [a * b], "RI", "VI") == (["VI"], ["pcast RV"])
    assert types_after(lambda a, b: [a * b], "UI", "II") == (["UI"], ["pcast IR"])
    assert types_after(lambda a, b: [a * b], "UV", "RI") == (["UV"], ["pcast IV"])
    assert types_after(lambda a, b: [a + b], "UI", "UI") == (["UI"], [])
    assert types_after(lambda a: [bnp.exp(a) + 1], "RV") == (["RV"], [])


def test_numbers_and_integers_need_no_casts():
    assert types_after(lambda a: [a * 2.0, bnp.where(bnp.arange(4) < 2, a, a)], "VI") == (["VI", "VI"], [])


def test_zeros_can_be_added_to_what_is_unreduced():
    assert types_after(lambda a: [a + bnp.zeros(4, "float32")], "UI") == (["UI"], ["keep_first IU"])


def test_numbers_that_are_converted_without_being_cut_off_stay_unreduced():
    def local(v):
        n = unreduced(v.astype("int32"))
        return lax.psum([n.astype("int16"), n.astype("float32") / 2, unreduced(v).astype("bfloat16")], "x")

    found = shard_map(local, mesh=MESH, in_specs=P("x"), out_specs=P())(X)
    total = X[:2] + X[2:]
    for got, want in zip(found, (total, total / 2, total), strict=True):
        np.testing.assert_array_equal(np.asarray(got).astype(np.float32), want)


def test_a_sum_of_bools_is_no_bool():
    with pytest.raises(errors.DtypeError, match="pcast to unreduced takes numbers, not bool") as e:
        shard_map(lambda v: unreduced(v > 1), mesh=MESH, in_specs=P("x"), out_specs=P(unreduced={"x"}))(X)
    assert "test_axis_types.py" in e.value.where


def test_loops_find_the_types_of_their_carry():
    def loop(a, b):
        return lax.fori_loop(0, 3, lambda i, c: (c[1], c[0] * b), (a, a))

    assert types_after(loop, "II", "VI")[0] == ["VI", "VI"]


def test_the_predicate_makes_results_vary():
    def either(a, b):
        return [lax.cond(a.sum() > 0, lambda: b, lambda: 2 * b)]

    types, casts = types_after(either, "VI", "II")
    assert types == ["VI"]
    assert casts == ["pcast IV"]  # outside of the branches: its transpose is a sum of all ranks


def test_what_is_joined_is_unreduced_together():
    def joined(a, b):
        return [bnp.concatenate([a, b])]

    assert types_after(joined, "UI", "UI") == (["UI"], [])
    assert types_after(lambda a: [bnp.concatenate([a, bnp.zeros(2, "float32")])], "UI") == (
        ["UI"],
        ["keep_first IU"],
    )
    with pytest.raises(errors.ShardingError, match="concatenate of a value unreduced over 'x'"):
        types_after(joined, "UI", "VI")


def test_typed_collectives_in_a_function_with_rules_take_what_varies():
    def rolled(v):
        over = {"axes": ("x",), "sizes": (2,)}
        return mesh_ppermute_p.bind(v, src="V", dst="V", perm=((0, 1), (1, 0)), **over)

    function = bf.custom_vjp(lambda a, b: rolled(a) * b)
    function.defvjp(
        lambda a, b: (function(a, b), (a, b)), lambda kept, ct: (rolled(ct * kept[1]), ct * rolled(kept[0]))
    )
    assert types_after(lambda a, b: [function(a, b)], "II", "II")[0] == ["VI"]
    assert types_after(lambda a, b: [function(a, b)], "VI", "RV")[0] == ["VV"]
    assert types_after(lambda a, b: [function(a, b)], "VU", "VI")[0] == ["VU"]

    mapped = shard_map(
        lambda a, b: lax.psum(function(a, b).sum(), "x"), mesh=MESH, in_specs=(P("x"), P()), out_specs=P()
    )
    a, b = X, X[:2] + 1
    got = bf.grad(mapped, (0, 1))(a, b)
    want = bf.grad(lambda a, b: (a[:2] * b + a[2:] * b).sum(), (0, 1))(a, b)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w)


def test_a_sum_of_what_varies_and_is_unreduced_is_one_collective():
    mapped = shard_map(
        lambda v: lax.psum(unreduced(v), ("x", "y")), mesh=MESH, in_specs=P("x", "y"), out_specs=P()
    )
    jaxpr = bf.make_jaxpr(mapped)(X)
    assert str(jaxpr).count("psum_invariant") == 1
    np.testing.assert_array_equal(mapped(X), X[:2, :4] + X[:2, 4:] + X[2:, :4] + X[2:, 4:])
