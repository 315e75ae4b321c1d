"""``shard``, ``reshard``, ``jit`` with shardings: layouts, values, and errors."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import NamedSharding, P, errors, lax, make_mesh


@pytest.fixture
def mesh(eight):
    return make_mesh((2, 4), ("x", "y"))


def floats(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def network(params, x):
    h = bnp.tanh(x @ params["up"] + params["bias"])
    return h @ params["down"], (h * h).mean()


PARAMS = {"up": floats(6, 8), "bias": floats(8), "down": floats(8, 4)}
SPECS = {"up": P(None, "y"), "bias": P("y"), "down": P("y")}
X = floats(4, 6)


def same(got, expected, tol=1e-5):
    for g, e in zip(bf.tree.leaves(got), bf.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(g), np.asarray(e), rtol=tol, atol=tol)


def specs_of(x):
    return bf.tree.map(lambda a: a.sharding.spec, x)


# -- shard -----------------------------------------------------------------------------------------


def test_shard_lays_out_arguments_and_results(mesh):
    f = bf.shard(network, mesh, (SPECS, P("x")), (P("x"), P()))
    for args in ((PARAMS, X), bf.device_put((PARAMS, X), NamedSharding(mesh, P()))):
        out = f(*args)
        same(out, network(PARAMS, X))
        assert specs_of(out) == (P("x"), P())


def test_specs_are_prefixes_and_none_leaves_it_to_the_program(mesh):
    f = bf.shard(network, mesh, (None, P("x")), None)
    y, mean = f(PARAMS, X)
    assert specs_of((y, mean)) == (P("x"), P())
    g = bf.shard(bnp.sin, mesh, P("x"), P(None, "y"))  # one for all arguments, here the one
    assert g(X).sharding.spec == P(None, "y")
    assert bf.shard(lambda xs: xs, mesh, (P("x"),), P("y"))([X, {"a": X}])[1]["a"].sharding.spec == P("y")


def scalar(params, x):
    y, mean = network(params, x)
    return (y * y).sum() + mean


def through(wrap):
    """``scalar``, its derivative and a batch, with ``wrap`` around each or around all."""
    return lambda params, xs: bf.vmap(bf.value_and_grad(wrap(scalar)), (None, 0))(params, xs)


def test_shard_before_and_after_other_transforms(mesh):
    xs = np.stack([X, X * 0.5])
    expected = through(lambda f: f)(PARAMS, xs)
    of_grads = bf.tree.map(lambda s: P(None, *s), SPECS)
    inner = lambda f: bf.shard(f, mesh, (SPECS, P("x")), P())
    outer = bf.shard(through(lambda f: f), mesh, (SPECS, P(None, "x")), (P(), of_grads))
    between = lambda params, xs: bf.vmap(
        bf.shard(bf.value_and_grad(bf.checkpoint(scalar)), mesh, (SPECS, P("x")), (P(), SPECS)), (None, 0)
    )(params, xs)
    for f in (
        through(inner),
        through(lambda f: bf.checkpoint(inner(f))),
        through(lambda f: inner(bf.checkpoint(f))),
        bf.jit(through(inner)),
        outer,
        bf.jit(outer),
        between,
        through(lambda f: bf.jit(lambda *args: inner(f)(*args))),
    ):
        got = f(PARAMS, xs)
        same(got, expected, 1e-4)
        assert specs_of(got[1]) == of_grads


def test_second_derivatives_and_forward_mode(mesh):
    f = lambda x: bnp.sin(x @ PARAMS["up"]).sum()
    g = bf.shard(f, mesh, P("x", "y"), P())
    tangent = floats(4, 6, seed=1)
    same(bf.jvp(g, (X,), (tangent,)), bf.jvp(f, (X,), (tangent,)))
    product = lambda h: bf.jvp(bf.grad(h), (X,), (tangent,))
    same(product(g), product(f), 1e-4)


def test_gradients_lie_like_the_arguments_of_a_sharded_function(mesh):
    specs = {"up": P("x"), "bias": P("x"), "down": P("x")}
    f = bf.shard(lambda p, x: scalar(p, x), mesh, (specs, P("x")), P())
    grads = bf.grad(f)(PARAMS, X)
    assert specs_of(grads) == specs
    same(grads, bf.grad(scalar)(PARAMS, X), 1e-4)


def test_annotations_inside_are_of_the_mesh_of_shard(mesh):
    f = bf.shard(lambda x: bf.constrain(bnp.sin(x), P(None, "y")) * 2, mesh, P("x"), None)
    assert f(X).sharding.spec == P(None, "y")


def test_shard_inside_of_jit_runs_on_the_mesh(mesh):
    f = bf.jit(lambda x: bf.shard(bnp.cos, mesh, P("x"), P("x"))(x + 1) * 2)
    assert f(X).sharding == NamedSharding(mesh, P("x"))
    same(f(X), np.cos(X + 1) * 2)


def test_shard_of_loops_and_branches(mesh):
    def f(x, w):
        step = lambda h, row: (bnp.tanh(h @ w + row), h.sum())
        h, sums = lax.scan(step, x[0], x)
        return lax.cond(h.sum() > 0, lambda h: h * 2, lambda h: h @ w, h), sums

    w = floats(6, 6)
    g = bf.shard(f, mesh, (P("x"), P(None, "y")), (P("y"), P("x")))
    same(g(X, w), f(X, w))
    assert specs_of(g(X, w)) == (P("y"), P("x"))


def test_an_abstract_mesh_serves_for_programs_that_are_not_run():
    mesh = bf.AbstractMesh((64,), ("x",))
    jaxpr = bf.make_jaxpr(bf.shard(network, mesh, (None, P("x")), (P("x"), P())))(PARAMS, X)
    assert "reshard" in str(jaxpr)


def test_wrong_specs_of_shard(mesh):
    for specs, match in (
        ((SPECS,), r"in_specs of network is not a pytree prefix(.*\n)*.*test_shard.py"),
        ((SPECS, P("q")), "names the axis 'q'"),
        ((SPECS, P(None, None, "x")), r"network: argument \[1\]: .*rank 3"),
        (({**SPECS, "bias": P(None, "x")}, None), r"network: argument \[0\]\['bias'\].*rank 2"),
    ):
        with pytest.raises((errors.ShardingError, errors.TreeError), match=match):
            bf.shard(network, mesh, specs, None)(PARAMS, X)
    with pytest.raises(errors.ArgumentError, match="in_specs of network holds 'x'"):
        bf.shard(network, mesh, (SPECS, "x"), None)(PARAMS, X)
    with pytest.raises(errors.ShardingError, match=r"network: result \[0\]: .*rank 3"):
        bf.shard(network, mesh, None, (P(None, None, "x"), None))(PARAMS, X)
    with pytest.raises(errors.TreeError, match="out_specs of network"):
        bf.shard(network, mesh, None, (P(),))(PARAMS, X)
    with pytest.raises(errors.ArgumentError, match="takes a mesh"):
        bf.shard(network, (2, 4), None, None)
    with pytest.raises(errors.ArgumentError, match="takes a function"):
        bf.shard(3, mesh, None, None)


# -- reshard ---------------------------------------------------------------------------------------


def test_reshard_moves_arrays_now(mesh):
    at = lambda *spec: NamedSharding(mesh, P(*spec))
    x = bf.reshard(X, at("x"))
    assert x.sharding == at("x")
    y = bf.reshard({"a": x, "b": X, "c": X}, {"a": at(None, "y"), "b": at(), "c": None})
    assert specs_of({k: y[k] for k in "ab"}) == {"a": P(None, "y"), "b": P()}
    assert not y["c"].device.joint
    same(y, {"a": X, "b": X, "c": X})
    with mesh:
        assert bf.reshard(x, P("y")).sharding == at("y")
    other = NamedSharding(make_mesh((4,), "z"), P("z"))
    assert bf.reshard(x, other).sharding == other


def test_reshard_inside_of_programs_is_an_equation(mesh):
    f = lambda x: bf.reshard(bnp.sin(x), NamedSharding(mesh, P(None, "y"))) * 2
    assert "reshard" in str(bf.make_jaxpr(f)(X))
    for x in (X, bf.device_put(X, NamedSharding(mesh, P("x")))):
        y = bf.jit(f)(x)
        assert y.sharding.spec == P(None, "y")
        same(y, np.sin(X) * 2)
    z = bf.jit(bf.vmap(f))(np.stack([X, X]))
    assert z.sharding.spec == P(None, None, "y")
    batched = bf.vmap(f)(bf.device_put(np.stack([X, X]), NamedSharding(mesh, P("x"))))
    assert batched.sharding.spec == P("x", None, "y")
    same(bf.grad(lambda x: (f(x) ** 2).sum())(X), 8 * np.sin(X) * np.cos(X))
    same(bf.jit(bf.grad(lambda x: (f(x) ** 2).sum()))(X), 8 * np.sin(X) * np.cos(X))


def test_wrong_reshards(mesh):
    with pytest.raises(errors.ArgumentError, match=r"P\('x'\), which has no mesh"):
        bf.reshard(X, P("x"))
    with pytest.raises(errors.ShardingError, match="rank 3"):
        bf.reshard(X, NamedSharding(mesh, P(None, None, "x")))
    with pytest.raises(errors.ShardingError, match="no unreduced"):
        bf.reshard(X, NamedSharding(mesh, P(unreduced={"x"})))
    with pytest.raises(errors.ShardingError, match="no devices"):
        bf.reshard(X, NamedSharding(mesh.abstract, P("x")))
    with pytest.raises(errors.ArgumentError, match="holds 3"):
        bf.reshard(X, 3)


# -- jit -------------------------------------------------------------------------------------------


def test_jit_with_shardings_of_arguments_and_results(mesh):
    at = lambda *spec: NamedSharding(mesh, P(*spec))
    params = bf.tree.map(lambda s: NamedSharding(mesh, s), SPECS)
    f = bf.jit(network, in_shardings=(params, at("x")), out_shardings=(at("x"), None))
    laid = bf.device_put((PARAMS, X), (params, at("x")))
    for args in ((PARAMS, X), laid, (laid[0], X)):
        out = f(*args)
        same(out, network(PARAMS, X))
        assert out[0].sharding == at("x")
    assert f.trace_count == 1
    gradient = bf.grad(lambda p: f(p, X)[0].sum())(PARAMS)
    assert specs_of(gradient) == SPECS
    same(gradient, bf.grad(lambda p: network(p, X)[0].sum())(PARAMS))


def test_jit_results_alone_say_where_it_runs(mesh):
    f = bf.jit(lambda x: {"a": x + 1, "b": x * 2}, out_shardings=NamedSharding(mesh, P("x", "y")))
    assert specs_of(f(X)) == {"a": P("x", "y"), "b": P("x", "y")}
    with mesh:
        g = bf.jit(lambda x: x + 1, in_shardings=P("x"), out_shardings=P())
        assert g(X).sharding == NamedSharding(mesh, P())


def test_jit_shardings_with_static_and_donated_arguments(mesh):
    at = lambda *spec: NamedSharding(mesh, P(*spec))
    f = bf.jit(
        lambda x, n, y: (x * n, y), static_argnums=1, donate_argnums=0, in_shardings=(at("x"), at("y")),
        out_shardings=at("x"),
    )  # fmt: skip
    x = bf.device_put(X, at("x"))
    a, b = f(x, 3, X)
    same((a, b), (X * 3, X))
    assert a.sharding == b.sharding == at("x")
    with pytest.raises(errors.BlufuncError, match="donated"):
        np.asarray(x)
    decorated = bf.jit(in_shardings=at("x"), out_shardings=None)(lambda x: x + 1)
    assert decorated(X).sharding == at("x")


def test_stages_of_jit_with_shardings(mesh):
    at = lambda *spec: NamedSharding(mesh, P(*spec))
    f = bf.jit(lambda x, w: x @ w, in_shardings=(at(None, "x"), at("x")), out_shardings=at())
    w = floats(6, 8)
    lowered = f.lower(bf.ShapeDtypeStruct((4, 6), np.float32), w)
    assert lowered.traced.layouts == (at(None, "x"), at("x"))
    compiled = lowered.compile()
    same(compiled(X, w), X @ w)
    assert compiled(X, w).sharding == at()


def test_arguments_that_lie_otherwise_are_refused(mesh):
    at = lambda *spec: NamedSharding(mesh, P(*spec))
    f = bf.jit(network, in_shardings=(None, at("x")))
    for wrong in (at("y"), at(None, "x"), NamedSharding(make_mesh((8,), "z"), P())):
        with pytest.raises(
            errors.ShardingError, match=r"argument x of network is placed as P(.*\n)*.*test_shard.py"
        ) as e:
            f(PARAMS, bf.device_put(X, wrong))
        assert "bf.reshard" in e.value.fix
    with pytest.raises(errors.ShardingError, match="is placed as cpu:3"):
        f(PARAMS, bf.device_put(X, bf.devices()[3]))
    one = make_mesh((1, 2), ("one", "x"))
    g = bf.jit(bnp.sin, in_shardings=NamedSharding(one, P("x", "one")))
    g(bf.device_put(X, NamedSharding(one, P("x"))))  # an axis of one device divides nothing


def test_wrong_shardings_of_jit(mesh):
    at = lambda *spec: NamedSharding(mesh, P(*spec))
    cases = [
        ({"in_shardings": (at(),)}, errors.TreeError, "1 entries, and the call 2"),
        (
            {"in_shardings": ({"up": at()}, at())},
            errors.TreeError,
            "in_shardings of network is not a pytree prefix",
        ),
        ({"in_shardings": (None, at(None, None, "x"))}, errors.ShardingError, r"argument \[1\]: .*rank 3"),
        ({"in_shardings": (None, "cpu")}, errors.ArgumentError, "holds 'cpu'"),
        ({"in_shardings": (None, P("x"))}, errors.ArgumentError, "has no mesh"),
        ({"out_shardings": (at(),)}, errors.TreeError, "out_shardings of network is not a pytree prefix"),
        ({"out_shardings": (at(), at("x"))}, errors.ShardingError, r"result \[1\]: .*rank 1"),
    ]
    for options, error, match in cases:
        with pytest.raises(error, match=rf"{match}(.*\n)*.*test_shard.py"):
            bf.jit(network, **options)(PARAMS, X)
    with pytest.raises(errors.ArgumentError, match=r"called with x="):
        bf.jit(network, in_shardings=(None, at()))(PARAMS, x=X)
