"""``axis_index_groups``, and collectives over several axes of vmaps."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import AbstractMesh, P, errors, lax, shard_map

N = 8
MESH = AbstractMesh((N,), ("x",))
GROUPS = [[0, 3, 5, 6], [7, 1, 2, 4]]
UNEVEN = [[4, 0, 2], [1], [3, 7, 5, 6]]
X = np.random.default_rng(0).standard_normal((N, 4)).astype(np.float32)
GROUP_OF = {i: g for g in GROUPS for i in g}
UNEVEN_OF = {i: g for g in UNEVEN for i in g}


def rows(combine, group_of):
    """The result of each index: ``combine(rows of its group, its place)``."""
    return np.stack([combine(X[group_of[i]], group_of[i].index(i)) for i in range(N)])


# Each row: the function of one index and its groups, and the same on all rows of a group.
CASES = {
    "psum": (lax.psum, GROUPS, lambda g, _: g.sum(0)),
    "pmean": (lax.pmean, GROUPS, lambda g, _: g.mean(0)),
    "pmax": (lax.pmax, GROUPS, lambda g, _: g.max(0)),
    "pmin": (lax.pmin, GROUPS, lambda g, _: g.min(0)),
    "psum, uneven": (lax.psum, UNEVEN, lambda g, _: g.sum(0)),
    "pmean, uneven": (lax.pmean, UNEVEN, lambda g, _: g.mean(0)),
    "pmax, uneven": (lax.pmax, UNEVEN, lambda g, _: g.max(0)),
    "pmin, uneven": (lax.pmin, UNEVEN, lambda g, _: g.min(0)),
    "all_gather": (lax.all_gather, GROUPS, lambda g, _: g),
    "psum_scatter": (lax.psum_scatter, GROUPS, lambda g, k: g.sum(0)[k]),
    "all_to_all": (
        lambda x, axis, axis_index_groups: lax.all_to_all(x, axis, 0, 0, axis_index_groups=axis_index_groups),
        GROUPS,
        lambda g, k: g[:, k],
    ),
}


@pytest.mark.parametrize("over", ["mesh", "vmap"])
@pytest.mark.parametrize("case", CASES)
def test_collectives_within_groups(case, over):
    f, groups, combine = CASES[case]
    one = lambda x: f(x, "x", axis_index_groups=groups)
    if over == "vmap":
        mapped = bf.vmap(one, axis_name="x")
    else:
        mapped = shard_map(lambda x: one(x[0])[None], mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    want = rows(combine, UNEVEN_OF if groups is UNEVEN else GROUP_OF)
    np.testing.assert_allclose(mapped(X), want, rtol=1e-5, atol=1e-6)
    weights = np.random.default_rng(1).standard_normal(want.shape).astype(np.float32)
    got = bf.grad(lambda x: (mapped(x) * weights).sum())(X)
    step = 1e-2 * np.random.default_rng(2).standard_normal(X.shape).astype(np.float32)
    change = (mapped(X + step) - mapped(X - step)) * weights / 2
    np.testing.assert_allclose((got * step).sum(), change.sum(), rtol=1e-2, atol=1e-4)


def test_python_numbers_and_integers():
    one = lambda x: lax.psum(1, "x", axis_index_groups=GROUPS) + 0 * x
    np.testing.assert_array_equal(bf.vmap(one, axis_name="x")(np.arange(N)), [4] * N)
    one = lambda x: lax.psum(1, "x", axis_index_groups=UNEVEN) + 0 * x
    np.testing.assert_array_equal(bf.vmap(one, axis_name="x")(np.arange(N)), [3, 1, 3, 4, 3, 4, 4, 4])
    top = bf.vmap(lambda x: lax.pmax(x, "x", axis_index_groups=UNEVEN), axis_name="x")(-np.arange(N))
    np.testing.assert_array_equal(top, [0, -1, 0, -3, 0, -3, -3, -3])


def test_all_of_a_group_have_the_same_bits():
    sums = shard_map(
        lambda x: lax.psum(x, "x", axis_index_groups=UNEVEN), mesh=MESH, in_specs=P("x"), out_specs=P("x")
    )(X)
    for group in UNEVEN:
        assert len({sums[i].tobytes() for i in map(int, group)}) == 1


BAD = {
    "an index is missing": (lax.psum, [[0, 1], [2]], errors.ValueRangeError, "each index below 8 once"),
    "an index is twice": (lax.psum, [[0, 1, 2, 3], [3, 4, 5, 6, 7]], errors.ValueRangeError, "each index"),
    "sizes differ": (lax.all_gather, UNEVEN, errors.ValueRangeError, "have one size, not"),
    "no lists": (lax.psum, 3, errors.ArgumentError, "axis_index_groups"),
}


@pytest.mark.parametrize("case", BAD)
def test_groups_that_are_wrong(case):
    f, groups, error, message = BAD[case]
    with pytest.raises(error, match=message):
        bf.vmap(lambda x: f(x, "x", axis_index_groups=groups), axis_name="x")(X)


def test_groups_of_what_is_gathered_invariantly():
    with pytest.raises(errors.UnsupportedError, match="other groups have other values"):
        shard_map(
            lambda x: lax.all_gather(x, "x", to="invariant", axis_index_groups=GROUPS),
            mesh=MESH,
            in_specs=P("x"),
            out_specs=P(),
        )(X)


# -- several axes, of vmaps and of a mesh ----------------------------------------------------------

SQUARE = np.random.default_rng(3).standard_normal((2, 3, 6, 5)).astype(np.float32)
FLAT = SQUARE.reshape(6, 6, 5)

SEVERAL = {
    "all_gather": (lambda x: lax.all_gather(x, ("i", "j")), np.broadcast_to(FLAT, (6, 6, 6, 5))),
    "all_gather tiled": (
        lambda x: lax.all_gather(x, ("i", "j"), axis=1, tiled=True),
        np.broadcast_to(np.concatenate(FLAT, 1), (6, 6, 30)),
    ),
    "psum_scatter": (lambda x: lax.psum_scatter(x, ("i", "j")), FLAT.sum(0)),
    "all_to_all": (lambda x: lax.all_to_all(x, ("i", "j"), 0, 0), FLAT.swapaxes(0, 1)),
    "all_to_all to the end": (
        lambda x: lax.all_to_all(x, ("i", "j"), 0, 1),
        FLAT.swapaxes(0, 1).swapaxes(1, 2),
    ),
}


@pytest.mark.parametrize("inner", ["vmap", "mesh"])
@pytest.mark.parametrize("case", SEVERAL)
def test_over_several_axes(case, inner):
    f, want = SEVERAL[case]
    if inner == "vmap":
        mapped = bf.vmap(bf.vmap(f, axis_name="j"), axis_name="i")
    else:  # the first axis is of a mesh, the second of a vmap
        mesh = AbstractMesh((2,), ("i",))
        over = lambda x: bf.vmap(f, axis_name="j")(x[0])[None]
        mapped = shard_map(over, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    np.testing.assert_allclose(mapped(SQUARE).reshape(want.shape), want, rtol=1e-5, atol=1e-6)
    weights = bnp.asarray(np.random.default_rng(4).standard_normal(want.shape).astype(np.float32))
    got = bf.grad(lambda x: (mapped(x).reshape(want.shape) * weights).sum())(SQUARE)
    linear = (mapped(SQUARE).reshape(want.shape) * weights).sum()
    np.testing.assert_allclose((got * SQUARE).sum(), linear, rtol=1e-3, atol=1e-3)


def test_a_joint_permutation_of_axes_of_vmaps_is_refused():
    with pytest.raises(errors.UnsupportedError, match="only mesh axes have a joint permutation"):
        bf.vmap(bf.vmap(lambda x: lax.ppermute(x, ("i", "j"), [(0, 1)]), axis_name="j"), axis_name="i")(
            SQUARE
        )
