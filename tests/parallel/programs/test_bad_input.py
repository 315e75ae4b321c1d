"""Errors of programs that cannot work on a mesh, at the user's line; never a hang.

They are raised while the program is traced or compiled, and say what to do.

``collectives/test_axis_types.py``, ``mesh/test_mesh.py`` and others test the same rules one by one; here is each kind
of mistake by every way in.
"""

import json

import numpy as np
import pytest

import blufunc as bf
from blufunc import AbstractMesh, NamedSharding, P, ShapeDtypeStruct, errors, lax
from blufunc.parallel.reports.collectives import local_program
from blufunc.parallel.runtime import consistency_check

MESH = AbstractMesh((2, 4), ("x", "y"))
X = np.ones((4, 8), np.float32)
ODD = np.ones((3, 7), np.float32)
ON = lambda *spec: NamedSharding(MESH, P(*spec))


def inside(f, x=X, spec=P("x"), out=P("x")):
    return bf.shard_map(f, mesh=MESH, in_specs=spec, out_specs=out)(x)


def divided(f, x=X, spec=P("x"), out=None):
    """A program for the mesh, which is not run."""
    return bf.plan(bf.shard(f, MESH, spec, out), MESH, x)


def annotated(spec):
    return divided(lambda a: bf.constrain(a.sum(0), spec))


DOES_NOT_DIVIDE = {
    "shard_map": (lambda: inside(lambda a: a, ODD), "dimension 0 of the argument a"),
    "psum_scatter": (
        lambda: inside(lambda a: lax.psum_scatter(a, "y", scatter_dimension=1, tiled=True), ODD[:2]),
        "dimension 1 must be a multiple",
    ),
    "all_to_all": (lambda: inside(lambda a: lax.all_to_all(a, "y", 1, 0, tiled=True), ODD[:2]), "a multiple"),
    "vmap over an axis": (
        lambda: bf.vmap(
            bf.shard_map(lambda a: a, mesh=MESH, in_specs=P(), out_specs=P()), spmd_axis_name="x"
        )(ODD),
        "vmap over 3 elements",
    ),
    "a mesh of too many devices": (lambda: bf.make_mesh((3, 400), ("x", "y")), "takes 1200 devices"),
}
TWICE = {
    "spec": (lambda: P("x", "x"), "'x' twice"),
    "one entry of a spec": (lambda: P(("x", "x")), "'x' twice"),
    "mesh": (lambda: AbstractMesh((2, 2), ("x", "x")), "'x' is used twice"),
    "collective": (lambda: inside(lambda a: lax.psum(a, ("x", "x"))), "named once each"),
    "annotation in a program": (lambda: divided(lambda a: bf.constrain(a, P("y", "y"))), "'y' twice"),
}
WRONG_RANK = {
    "constrain": (lambda: annotated(ON("x", "y")), "rank 2"),
    "reshard": (lambda: divided(lambda a: bf.reshard(a.sum(0), ON("x", "y"))), "rank 2"),
    "in_specs of shard": (lambda: divided(lambda a: a, spec=P("x", None, "y")), "rank 3"),
    "out_specs of shard": (lambda: divided(lambda a: a.sum(), out=P("x")), "rank 1"),
    "in_shardings": (lambda: bf.jit(lambda a: a, in_shardings=ON("x", None, "y")).lower(X), "rank 3"),
    "out_shardings": (lambda: bf.jit(lambda a: a.sum(), out_shardings=ON("x")).lower(X), "rank 1"),
    "in_specs of shard_map": (lambda: inside(lambda a: a, spec=P("x", None, "y")), "rank 3"),
    "out_specs of shard_map": (lambda: inside(lambda a: a.sum()), "rank 1"),
    "argument of plan": (
        lambda: bf.plan(lambda a: a, MESH, ShapeDtypeStruct((8,), "float32", sharding=ON("x", "y"))),
        "rank 2",
    ),
}
NOT_THERE = {
    "psum": (lambda: inside(lambda a: lax.psum(a, "z")), "psum over 'z'"),
    "all_gather": (lambda: inside(lambda a: lax.all_gather(a, ("x", "z"))), "all_gather over 'z'"),
    "axis_index": (lambda: inside(lambda a: a * lax.axis_index("z")), "axis_index over 'z'"),
    "outside of shard_map": (lambda: bf.jit(lambda a: lax.psum(a, "x"))(X), "no axis is named here"),
    "in an annotated program": (lambda: divided(lambda a: lax.psum(a, "x")), "no axis is named here"),
    "spec": (lambda: ON("z"), "names the axis 'z'"),
    "in_specs of shard": (lambda: divided(lambda a: a, spec=P("z")), "names the axis 'z'"),
    "in_specs of shard_map": (lambda: inside(lambda a: a, spec=P("z")), "names the axis 'z'"),
    "constrain, found when it is compiled": (lambda: annotated(P("z")), "names the axis 'z'"),
    "a position of ppermute": (lambda: inside(lambda a: lax.ppermute(a, "x", [(0, 2)])), "positions below 2"),
    "another mesh": (
        lambda: annotated(NamedSharding(AbstractMesh((8,), ("d",)), P("d"))),
        "and the program is for the mesh",
    ),
}


def gathered(a):
    return lax.pmean(a, "x") + a


VARIES = {
    "cond": (lambda: inside(lambda a: lax.cond(a.sum() > 0, gathered, lambda a: a, a)), "of a cond"),
    "switch": (
        lambda: inside(lambda a: lax.switch(lax.axis_index("x"), [gathered, lambda a: gathered(2 * a)], a)),
        "of a cond",
    ),
    "while_loop": (
        lambda: inside(lambda a: lax.while_loop(lambda c: c.sum() < 100, gathered, a)),
        "of a while_loop",
    ),
    "in the condition of a while_loop": (
        lambda: inside(lambda a: lax.while_loop(lambda c: gathered(c).sum() < 3, lambda c: c + 1, a)),
        "of a while_loop",
    ),
    "fori_loop": (
        lambda: inside(lambda a: lax.fori_loop(0, lax.axis_index("x"), lambda i, a: gathered(a), a)),
        "of a while_loop",
    ),
    "under jit": (
        lambda: inside(bf.jit(lambda a: lax.cond(a.sum() > 0, gathered, lambda a: a, a))),
        "of a cond",
    ),
    "under checkpoint": (
        lambda: inside(bf.checkpoint(lambda a: lax.cond(a.sum() > 0, gathered, lambda a: a, a))),
        "of a cond",
    ),
    "in a scan": (
        lambda: inside(
            lambda a: lax.scan(
                lambda c, _: (lax.cond(c.sum() > 0, gathered, lambda a: a, c), None), a, length=2
            )[0]
        ),
        "of a cond",
    ),
    "two choices": (
        lambda: inside(
            lambda a: lax.cond(
                a.sum() > 0,
                lambda a: lax.cond(lax.psum(a.sum(), "y") > 0, gathered, lambda a: a, a),
                lambda a: a,
                a,
            )
        ),
        "of a cond",
    ),
    "Python's if": (lambda: inside(lambda a: a if a.sum() > 0 else -a), "a truth value"),
    "a result": (lambda: inside(lambda a: a, out=P()), "varies over 'x'"),
}
ALL = {
    "does not divide": DOES_NOT_DIVIDE,
    "an axis twice": TWICE,
    "wrong rank": WRONG_RANK,
    "an axis that is not there": NOT_THERE,
    "a predicate that varies": VARIES,
}
CASES = [
    pytest.param(*case, id=f"{kind}: {what}") for kind, cases in ALL.items() for what, case in cases.items()
]


@pytest.mark.parametrize("call, message", CASES)
def test_it_is_an_error_at_the_users_line(call, message):
    with pytest.raises(errors.BlufuncError) as e:
        call()
    assert message in str(e.value)
    assert "test_bad_input.py" in e.value.where
    assert e.value.fix


def test_a_choice_over_an_axis_may_meet_along_another():
    found = inside(lambda a: lax.cond(a.sum() > 0, lambda a: lax.pmean(a, "y"), lambda a: -a, a))
    np.testing.assert_array_equal(found, X)


# -- ranks that run different things -----------------------------------------------------------------


class World:
    """Rank 0 of two, whose peer runs another program."""

    rank = 0

    def __init__(self, peer):
        self.peer = [*consistency_check.parameters(peer), *consistency_check.collectives(peer)]
        self.digest = consistency_check.digest(peer)

    def gather(self, name, value, members):
        return [value, (self.digest if name == "a program" else json.dumps(self.peer)).encode()]


def program(f=lambda a: a.sum(0), n=8, spec=P("x")):
    x = ShapeDtypeStruct((n, 8), "float32", sharding=NamedSharding(MESH, spec))
    return local_program(f, "test", MESH, (x,), {}).jaxpr


DIFFERENT = {
    "shapes": (program(n=16), "their parameter 1 is not the same", "f32[8,8]"),
    "operations": (program(lambda a: a.max(0)), "their collective 1 is not the same", "pmax_invariant"),
    "axes": (program(spec=P(("x", "y")), n=32), "their collective 1 is not the same", "over x, y"),
    "one that ends before": (program(lambda a: a * 2), "their collective 1 is not the same", "no further"),
    "one more": (
        program(lambda a: (a - a.sum(0)).max(0)),
        "their collective 2 is not the same",
        "pmax_invariant over x",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_run_different_programs(what):
    peer, message, theirs = DIFFERENT[what]
    with pytest.raises(errors.CollectiveError, match=message) as e:
        consistency_check.check_agreement(program(), World(peer), [0, 1])
    assert theirs in e.value.why.splitlines()[1] and e.value.fix
    assert "test_bad_input.py" in e.value.where
    if "collective" in message:
        assert "test_bad_input.py" in e.value.why.splitlines()[0] + e.value.why.splitlines()[1]


def test_ranks_that_run_the_same_program_agree():
    consistency_check.check_agreement(program(), World(program()), [0, 1])
