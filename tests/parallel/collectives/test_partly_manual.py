"""``shard_map`` over some axes of a mesh, and one inside of another."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import AbstractMesh, NamedSharding, P, errors, lax, make_mesh, shard_map
from blufunc.as_jax.meshes import get_abstract_mesh
from blufunc.sharding import AxisType

MESH = AbstractMesh((2, 4), ("a", "b"))


def floats(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


X, UP, DOWN = floats(8, 16), floats(16, 32) / 4, floats(32, 16) / 4


@pytest.fixture
def mesh(eight):
    return make_mesh((2, 4), ("a", "b"))


def placed(mesh, x, *spec):
    return bf.device_put(x, NamedSharding(mesh, P(*spec)))


def mlp(x, up, down):
    return (bnp.tanh(x @ up) @ down).sum(0)


def tensor_parallel(mesh):
    """Manual along a; along b the compiler shards the features, as the weights are."""
    return shard_map(
        lambda *args: lax.psum(mlp(*args), "a"),
        mesh=mesh,
        in_specs=(P("a"), P(), P()),
        out_specs=P(),
        axis_names={"a"},
    )


def loss_of(f):
    return lambda *args: (f(*args) ** 2).sum()


def rows_of(table):
    return sorted((r.operation, r.axes) for r in table)


def test_automatic_axes_are_partitioned_and_gradients_stay_sharded(mesh):
    args = placed(mesh, X, "a"), placed(mesh, UP, None, "b"), placed(mesh, DOWN, "b")
    f = tensor_parallel(mesh)
    np.testing.assert_allclose(bf.jit(f)(*args), mlp(X, UP, DOWN), rtol=1e-4, atol=1e-4)
    assert rows_of(bf.collectives(f, *args)) == [("all_reduce", ("a",)), ("all_reduce", ("b",))]
    gradient = bf.grad(loss_of(f), (1, 2))
    assert rows_of(bf.collectives(gradient, *args)) == [("all_reduce", ("a",))] * 3 + [("all_reduce", ("b",))]
    got, want = bf.jit(gradient)(*args), bf.grad(loss_of(mlp), (1, 2))(X, UP, DOWN)
    assert [g.sharding.spec for g in got] == [P(None, "b"), P("b")]
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-3, atol=1e-3)


def test_on_other_arrays_ranks_along_automatic_axes_compute_the_same():
    np.testing.assert_allclose(tensor_parallel(MESH)(X, UP, DOWN), mlp(X, UP, DOWN), rtol=1e-4, atol=1e-4)


def test_shards_that_automatic_axes_do_not_divide(mesh):
    """A shard of 3 rows along a, of 6, is not divided by 4."""
    x = placed(mesh, X[:6], "a", "b")
    f = shard_map(
        lambda x: bnp.cumsum(x, 0) * (1 + lax.axis_index("a")),
        mesh=mesh,
        in_specs=P("a"),
        out_specs=P("a"),
        axis_names={"a"},
    )
    want = np.concatenate([X[:3].cumsum(0), 2 * X[3:6].cumsum(0)])
    np.testing.assert_allclose(bf.jit(f)(x), want, rtol=1e-5, atol=1e-5)
    y = placed(mesh, X[:6].T.copy(), None, "b")
    g = shard_map(lambda y: y * 2, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    np.testing.assert_allclose(bf.jit(g)(y), 2 * X[:6].T)


def test_effects_happen_once_for_each_manual_rank(mesh, capfd):
    def f(x):
        bf.debug.print("row {}", lax.axis_index("a"))
        return x

    mapped = shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    bf.jit(mapped)(placed(mesh, X, "a", "b")).block_until_ready()
    bf.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")[:-1]) == ["row 0", "row 1"]


def test_constraints_along_automatic_axes(mesh):
    def f(x, spec):
        return lax.psum(bf.constrain(x, spec), "a")

    over = lambda spec: shard_map(
        lambda x: f(x, spec), mesh=mesh, in_specs=P("a"), out_specs=P(), axis_names={"a"}
    )
    got = bf.jit(over(P(None, "b")))(placed(mesh, X, "a"))
    np.testing.assert_allclose(got, X[:4] + X[4:], rtol=1e-6)
    assert got.sharding.spec == P(None, "b")
    with pytest.raises(errors.ShardingError, match="names the axis 'a', which is manual"):
        bf.jit(over(P("a")))(placed(mesh, X, "a"))


# -- one inside of another -------------------------------------------------------------------------

NESTED = {
    "a sum": (lambda x: lax.psum((x**2).sum(0), "b"), P("b"), P(), lambda x: (x**2).sum(0)),
    "shards": (lambda x: bnp.sin(x) * (1 + x), P(None, "b"), P(None, "b"), lambda x: bnp.sin(x) * (1 + x)),
    "whole in": (
        lambda x: lax.psum(x * lax.axis_index("b"), "b"), P(), P(), lambda x: 6 * x
    ),
    "whole in, shards out": (
        lambda x: lax.psum_scatter(bnp.tanh(x), "b", tiled=True), P(), P("b"), lambda x: 4 * bnp.tanh(x)
    ),
}  # fmt: skip


@pytest.mark.parametrize("where", ["simulated", "devices"])
@pytest.mark.parametrize("case", NESTED)
def test_inside_of_another(case, where, mesh):
    local, ins, outs, whole = NESTED[case]

    def outer(x, w):
        y = shard_map(local, in_specs=ins, out_specs=outs, axis_names={"b"})(x @ w)
        return lax.psum((y * y.mean()).sum(), "a")

    f = shard_map(
        outer,
        mesh=mesh if where == "devices" else MESH,
        in_specs=(P("a"), P()),
        out_specs=P(),
        axis_names={"a"},
    )

    def want(x, w):
        ys = [whole(rows @ w) for rows in (x[:4], x[4:])]
        return sum((y * y.mean()).sum() for y in ys)

    w = UP[:, :16]
    x = placed(mesh, X, "a", "b") if where == "devices" else X
    np.testing.assert_allclose(bf.jit(f)(x, w), want(X, w), rtol=1e-4)
    second = lambda f: lambda x, w: (bf.grad(f, 1)(x, w) ** 2).sum()
    for g, h in ((f, want), (second(f), second(want))):
        for got, expected in zip(bf.grad(g, (0, 1))(x, w), bf.grad(h, (0, 1))(X, w), strict=True):
            scale = float(abs(expected).max())
            np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4 * scale)


INNER = shard_map(lambda x: lax.psum(x * x, "b"), in_specs=P("b"), out_specs=P(), axis_names={"b"})
BODIES = {  # which are traced by themselves, and nothing else in them asks for types
    "scan": (
        lambda x: lax.scan(lambda c, _: (c + INNER(x), None), x[:2], None, length=2)[0],
        lambda x: x[:2] + 2 * (x.reshape(4, 2, -1) ** 2).sum(0),
    ),
    "cond": (
        lambda x: lax.cond(x.shape[0] * lax.axis_size("a") > 3, INNER, lambda x: x[:2], x),
        lambda x: (x.reshape(4, 2, -1) ** 2).sum(0),
    ),
    "checkpoint": (lambda x: bf.checkpoint(INNER)(x), lambda x: (x.reshape(4, 2, -1) ** 2).sum(0)),
}  # fmt: skip


@pytest.mark.parametrize("case", BODIES)
def test_in_a_body_inside_of_another(case):
    f, want = BODIES[case]
    x = floats(16, 3)
    got = shard_map(f, mesh=MESH, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})(x)
    np.testing.assert_allclose(got, np.concatenate([want(x[:8]), want(x[8:])]), rtol=1e-5)


def test_in_a_loop_and_a_gradient_inside_of_another():
    def outer(x, w):
        def step(w, _):
            loss = lambda w: shard_map(
                lambda x, w: lax.psum((bnp.tanh(x @ w) ** 2).sum(), "b"),
                in_specs=(P("b"), P()),
                out_specs=P(),
                axis_names={"b"},
            )(x, w)
            return w - 0.01 * bf.grad(loss)(w), None

        return lax.scan(step, w, None, length=2)[0]

    f = shard_map(outer, mesh=MESH, in_specs=(P("a"), P()), out_specs=P(), axis_names={"a"})
    w = UP
    for _ in range(2):
        w = w - 0.01 * bf.grad(lambda w: (bnp.tanh(X @ w) ** 2).sum())(w)
    np.testing.assert_allclose(f(X, UP), w, rtol=1e-4, atol=1e-5)


# -- what the function sees ------------------------------------------------------------------------


def test_the_mesh_inside():
    seen = []

    def f(x):
        seen.append(get_abstract_mesh())
        return x

    shard_map(f, mesh=MESH, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})(X)
    assert seen[0].manual_axes == ("a",) and seen[0].auto_axes == ("b",) and not seen[0].empty
    assert seen[0].axis_types == (AxisType.Manual, AxisType.Auto)
    assert get_abstract_mesh().empty and get_abstract_mesh().explicit_axes == ()


def test_a_collective_over_an_automatic_axis_is_an_error():
    f = shard_map(lambda x: lax.psum(x, "b"), mesh=MESH, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    with pytest.raises(errors.AxisNameError, match="psum over 'b', and there is no axis of that name"):
        f(X)


def test_specs_of_the_arguments(mesh):
    f = shard_map(lambda x: lax.psum(x.sum(0), "a"), mesh=mesh, out_specs=P(), axis_names={"a"})
    np.testing.assert_allclose(f(placed(mesh, X, "a", "b")), X.sum(0), rtol=1e-5, atol=1e-5)
    with pytest.raises(errors.ShardingError, match="in_specs is None, and the argument x has no sharding"):
        f(X)
