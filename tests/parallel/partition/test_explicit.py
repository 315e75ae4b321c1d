"""Explicit mesh axes: stated layouts hold, and ambiguity lists the candidates."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import AbstractMesh, NamedSharding, P, errors, lax, make_mesh
from blufunc.parallel.partition.partition import localise
from blufunc.sharding import AxisType
from tests.parallel.lockstep import check, collectives
from tests.parallel.partition.test_factors import random_spec
from tests.parallel.partition.test_partition import PROGRAMS

EXPLICIT = AbstractMesh((2, 2), ("x", "y"), axis_types=AxisType.Explicit)
MIXED = AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))


def floats(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


A, B, W = floats(4, 6), floats(4, 6, seed=1), floats(6, 8)


def to(x, *spec):
    return bf.reshard(x, NamedSharding(EXPLICIT, P(*spec)))


# -- what goes through -----------------------------------------------------------------------------

AGREE = {
    "one is whole": (lambda a, b: a + b, (A, B), (P("x"), P())),
    "both alike": (lambda a, b: bnp.sin(a) * b, (A, B), (P("x", "y"), P("x", "y"))),
    "one is divided further": (lambda a, b: a - b, (A, B), (P("x"), P("x", "y"))),
    "other dimensions": (lambda a, b: a * b, (A, B), (P("x"), P(None, "y"))),
    "a divided contraction": (lambda a, w: a @ w, (A, W), (P("x", "y"), P("y"))),
    "resharded before": (lambda a, b: to(a, None, "x") + b, (A, B), (P("x"), P(None, "x"))),
    "a loop that divides its carry": (
        lambda a, b: lax.scan(lambda c, row: (c * row, c.sum()), b[0], a),
        (A, B),
        (P(None, "y"), P()),
    ),
    "branches of which one is whole": (
        lambda a, b: lax.cond(b.sum() > 0, lambda a, b: a * 2, lambda a, b: b, a, b),
        (A, B),
        (P("x"), P()),
    ),
    "while": (
        lambda a, b: lax.while_loop(lambda c: c.sum() > 1, lambda c: c * 0.5 - abs(b), a),
        (A, B),
        (P("x"), P()),
    ),
}


@pytest.mark.parametrize("case", AGREE)
def test_operands_that_agree(case):
    f, args, specs = AGREE[case]
    check(f, args, specs, EXPLICIT, rtol=1e-4, atol=1e-4)
    check(f, args, specs, MIXED, rtol=1e-4, atol=1e-4) if case != "resharded before" else None
    total = lambda *args: sum((x * x).sum() for x in bf.tree.leaves(f(*args)))
    if case != "while":
        check(bf.grad(total, (0, 1)), args, specs, EXPLICIT, rtol=1e-3, atol=1e-3)


def results(f, args, specs, mesh):
    """How the results lie."""
    jaxpr = bf.make_jaxpr(f)(*args)
    return [s.spec for s in localise(jaxpr, [NamedSharding(mesh, s) for s in specs], mesh)[1]]


def test_results_lie_like_operands_and_not_like_what_reads_them():
    f = lambda a, b: ((c := bnp.sin(a)), c + b)
    assert results(f, (A, B), (P(), P("x")), EXPLICIT) == [P(), P("x")]
    assert results(f, (A, B), (P(), P("x")), EXPLICIT.abstract) == [P(), P("x")]
    assert results(lambda a, w: a @ w, (A, W), (P("x"), P(None, "y")), EXPLICIT) == [P("x", "y")]
    assert results(lambda a: a.T.reshape(3, 2, 4), (A,), (P("x"),), EXPLICIT) == [P(None, None, "x")]


# -- what is refused -------------------------------------------------------------------------------

AMBIGUOUS = {
    "one axis along two dimensions": (
        lambda a, b: a + b, (A, B), (P("x"), P(None, "x")),
        r"add of operands sharded as P\('x', None\) and P\(None, 'x'\)",
        r"P\('x', None\) or as P\(None, 'x'\)",
    ),
    "two axes along one dimension": (
        lambda a, b: a * b, (A, B), (P("x"), P("y")), "mul of operands", r"P\('x', None\) or as P\('y', None\)",
    ),
    "the order of axes": (
        lambda a, b: a * b, (A, B), (P(("x", "y")), P(("y", "x"))), "mul of operands",
        r"P\(\('x', 'y'\), None\) or as P\(\('y', 'x'\), None\)",
    ),
    "rows of a batch and columns of a weight": (
        lambda a, w: a @ w, (A, W), (P("x"), P(None, "x")), "dot_general of operands",
        r"P\('x', None\) or as P\(None, 'x'\)",
    ),
    "rows of a batch and rows of a weight": (
        lambda a, w: a @ w, (A, W), (P("x"), P("x")), "dot_general of operands",
        r"P\('x', None\) or as P\(None, None\)",
    ),
    "in a loop": (
        lambda a, b: lax.scan(lambda c, r: (c, c + r), a, bnp.stack([b, b]))[1], (A, B), (P("x"), P(None, "x")),
        "add of operands", r"P\('x', None\) or as",
    ),
    "a carry that turns": (
        lambda a, b: lax.scan(lambda c, _: (to(c, None, "x"), None), a, None, length=2)[0], (A, B), (P("x"), P()),
        "carry 0 of scan is sharded as", r"P\('x', None\) or as P\(None, 'x'\)",
    ),
    "branches": (
        lambda a, b: lax.cond(a.sum() > 0, lambda a, b: a, lambda a, b: b, a, b), (A, B), (P("x"), P(None, "x")),
        "result 0 of the branches", r"P\(None, 'x'\) or as P\('x', None\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_operands_that_disagree_are_an_error_with_the_candidates(case):
    f, args, specs, what, candidates = AMBIGUOUS[case]
    with pytest.raises(
        errors.ShardingError, match=f"{what}.*; the result could be sharded as {candidates}"
    ) as caught:
        check(f, args, specs, EXPLICIT)
    assert "test_explicit.py" in str(caught.value.where) and "Explicit" in caught.value.why
    assert "reshard" in caught.value.fix
    auto = AbstractMesh((2, 2), ("x", "y"))
    if "turns" not in case:
        check(f, args, specs, auto, rtol=1e-4, atol=1e-4)


def test_along_an_auto_axis_of_the_same_mesh_the_order_decides():
    check(lambda a, b: a + b, (A, B), (P("y"), P(None, "y")), MIXED)
    with pytest.raises(errors.ShardingError, match="ambiguous"):
        check(lambda a, b: a + b, (A, B), (P("x"), P(None, "x")), MIXED)


def test_errors_come_at_the_line_of_the_user_also_outside_of_jit(eight):
    mesh = make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    a = bf.device_put(A, NamedSharding(mesh, P("x")))
    b = bf.device_put(B, NamedSharding(mesh, P(None, "x")))
    for f in (lambda a, b: a + b, bf.jit(lambda a, b: a + b)):
        with pytest.raises(errors.ShardingError, match=r"ambiguous(.*\n)*.*test_explicit.py"):
            f(a, b)
    c = a + bf.reshard(b, NamedSharding(mesh, P("x")))
    assert c.sharding.spec == P("x")


# -- derivatives -----------------------------------------------------------------------------------


def test_parameters_that_are_gathered_by_hand_have_their_gradients_scattered():
    def step(params, x):
        def loss(params):
            up, down = (to(w) for w in params)
            return (bnp.tanh(x @ up) @ down).sum()

        return [w - 0.1 * g for w, g in zip(params, bf.grad(loss)(params), strict=True)]

    f = lambda up, down, x: step((up, down), x)
    local = check(f, (W, floats(8, 4), A), (P(None, "x"), P("x"), P("x")), EXPLICIT, rtol=1e-4, atol=1e-4)
    assert collectives(local) == {"all_gather": 2, "psum_scatter": 2}


def test_what_is_made_of_a_loose_cotangent_alone_is_loose():
    def loss(p, z, w):
        return (to(p * 3, None, "x") * z).sum() + (p * w).sum()  # both ways back meet in a sum

    check(bf.grad(loss), [A, B, B], [P("x"), P(None, "x"), P("x")], EXPLICIT)


def test_the_cotangent_of_what_was_moved_goes_back_to_where_the_primal_lay():
    f = lambda a, b: (bnp.sin(to(bnp.cos(a) * a, None, "x")) * b).sum()
    check(bf.grad(f, (0, 1)), (A, B), (P("x"), P(None, "x")), EXPLICIT, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PROGRAMS)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), derive=st.booleans())
@hypothesis.settings(max_examples=15)
def test_programs_are_right_or_refused(name, seed, derive):
    f, operands = PROGRAMS[name]
    rng = np.random.default_rng(seed)
    args = [floats(*shape) for shape in operands]
    specs = [random_spec(rng, len(shape), EXPLICIT.axis_names) for shape in operands]
    if derive:
        outs = lambda *xs: f(*xs)[1] if name == "loops" else f(*xs)  # its while_loop has no reverse mode
        squares = lambda *xs: sum((o * o).sum() for o in bf.tree.leaves(outs(*xs)) if o.dtype == np.float32)
        run = bf.grad(squares, tuple(range(len(args))))
    else:
        run = f
    refused = None
    try:
        check(run, args, specs, EXPLICIT, rtol=2e-3, atol=2e-3)
    except errors.ShardingError as e:
        refused = e
    assert refused is None or "the result could be sharded as" in refused.what


# -- axis types ------------------------------------------------------------------------------------


def test_axes_are_auto_unless_said_otherwise(eight):
    assert make_mesh((2, 4), ("x", "y")).axis_types == (AxisType.Auto,) * 2
    mesh = make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto, AxisType.Explicit))
    assert mesh.explicit == mesh.abstract.explicit == {"y"}
    assert mesh != make_mesh((2, 4), ("x", "y")) and mesh.abstract != AbstractMesh((2, 4), ("x", "y"))
    assert eval(repr(EXPLICIT), {"AbstractMesh": AbstractMesh, "AxisType": AxisType}) == EXPLICIT
    with pytest.raises(errors.ArgumentError, match="holds axis types"):
        make_mesh((2,), ("x",), axis_types=("auto",))
    with pytest.raises(errors.ShardingError, match="2 axis types for 1 axes"):
        make_mesh((2,), ("x",), axis_types=(AxisType.Auto,) * 2)
