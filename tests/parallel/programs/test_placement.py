"""Arrays on meshes: placement, attributes, and operations."""

import contextlib
import io
import pickle

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import NamedSharding, P, errors, lax, make_mesh
from blufunc.config import config
from blufunc.core.arrays.array import ConcreteArray
from blufunc.parallel.programs import mesh_program
from blufunc.sharding import SingleDeviceSharding


@pytest.fixture
def mesh(eight):
    return make_mesh((2, 4), ("x", "y"))


def counted(monkeypatch):
    """The local programs that are made from now on."""
    made = []
    before = mesh_program.LocalProgram.__init__
    monkeypatch.setattr(
        mesh_program.LocalProgram, "__init__", lambda self, *args: (made.append(self), before(self, *args))[0]
    )
    return made


def on_eight(spec):
    return NamedSharding(make_mesh((8,), "z"), spec)


SPECS = [P(), P("x"), P(None, "y"), P("x", "y"), P("y", "x"), P(("x", "y")), P(None, ("y", "x")), P("y")]


def test_operations_are_of_the_precision_that_is_set(mesh, monkeypatch):
    """GPUs multiply by it: a program that was made under another one is not theirs."""
    x = bf.device_put(np.ones((8, 8), "float32"), NamedSharding(mesh, P("x")))
    before, made = x @ x, counted(monkeypatch)
    for precision, programs in (("tf32", 1), ("default", 1)):
        monkeypatch.setattr(config, "matmul_precision", precision)
        np.testing.assert_array_equal(np.asarray(x @ x), np.asarray(before))
        assert len(made) == programs


# -- there and back --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 8), (5, 7), (1, 3), (0, 4), (16, 1)])
@pytest.mark.parametrize("spec", SPECS)
def test_device_put_and_back(mesh, rng, spec, shape):
    x = rng.normal(size=shape).astype("float32")
    sharding = NamedSharding(mesh, spec)
    y = bf.device_put(x, sharding)
    assert y.sharding == sharding and y.shape == shape and y.dtype == x.dtype
    assert y.is_fully_replicated == (spec == P()) and y.is_fully_addressable
    np.testing.assert_array_equal(np.asarray(y), x)
    shards = y.addressable_shards
    assert [s.device for s in shards] == bf.devices() and y.devices() == set(bf.devices())
    for i, s in enumerate(shards):
        assert s.data.device == s.device and s.index == sharding.devices_indices_map(shape)[s.device]
        np.testing.assert_array_equal(np.asarray(s.data), x[s.index])
        np.testing.assert_array_equal(np.asarray(y.addressable_data(i)), x[s.index])
    assert [s.replica_id for s in shards] == sharding.replica_ids()
    for other in SPECS:
        z = bf.device_put(y, NamedSharding(mesh, other))
        assert z.sharding.spec == other
        np.testing.assert_array_equal(np.asarray(z), x)


def test_kinds_of_values(mesh):
    s = NamedSharding(mesh, P("y"))
    for dtype in ("bool", "int8", "float64", "complex64", "bfloat16"):
        x = bnp.asarray([1, 0, 1], dtype)
        y = bf.device_put(x, s)
        assert y.dtype == x.dtype and (np.asarray(y) == np.asarray(x)).all()
    assert bf.device_put(2.0, NamedSharding(mesh, P())).weak_type
    keys = bf.random.split(bf.random.key(0), 4)
    assert (bf.random.key_data(bf.device_put(keys, s)) == bf.random.key_data(keys)).all()
    y = bf.device_put(np.arange(5.0), s)
    np.testing.assert_array_equal(np.asarray(pickle.loads(pickle.dumps(y))), np.arange(5, dtype="float32"))
    assert str(y) == str(bnp.arange(5.0)) and y.tolist() == [0, 1, 2, 3, 4] and float(y[3]) == 3


def test_trees_of_places(mesh):
    tree = {"a": np.ones((4, 4)), "b": [np.ones(8), 1.0]}
    one = bf.device_put(tree, NamedSharding(mesh, P()))
    assert all(x.is_fully_replicated for x in bf.tree.leaves(one))
    put = bf.device_put(tree, {"a": NamedSharding(mesh, P("x")), "b": bf.devices()[3]})
    assert put["a"].sharding.spec == P("x") and put["b"][0].device == bf.devices()[3]
    with mesh:
        by_spec = bf.device_put(tree, {"a": P(None, "y"), "b": [P("y"), P()]})
    assert by_spec["a"].sharding == NamedSharding(mesh, P(None, "y"))
    back = bf.device_put(put["a"], SingleDeviceSharding(bf.devices()[2]))
    assert back.device == bf.devices()[2] and back.sharding == SingleDeviceSharding(bf.devices()[2])
    assert bf.device_put(back, bf.devices()[2]) is back
    assert bf.device_put(put["a"], NamedSharding(mesh, P("x", None))) is put["a"]
    (shard,) = back.addressable_shards
    assert shard.data is back and shard.index == (slice(0, 4), slice(0, 4)) and back.is_fully_replicated


def test_a_put_array_does_not_follow_its_source(mesh):
    x = np.zeros(8, "float32")
    y = bf.device_put(x, NamedSharding(mesh, P("x")))
    x[:] = 1
    assert not np.asarray(y).any()
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(y)[0] = 1


def test_arrays_from_parts(mesh):
    x = np.arange(40, dtype="float32").reshape(5, 8)
    s, asked = NamedSharding(mesh, P("y")), []
    y = bf.make_array_from_callback((5, 8), s, lambda index: (asked.append(index), x[index])[1])
    np.testing.assert_array_equal(np.asarray(y), x)
    assert y.sharding == s and len(asked) == 4  # each part once, of which there are two replicas
    half = bf.make_array_from_callback((5, 8), s, lambda index: x[index], dtype="float16")
    assert half.dtype == "float16" and (np.asarray(half) == x).all()

    s = NamedSharding(mesh, P("x"))
    z = bf.device_put(x[:4], s)
    joined = bf.make_array_from_single_device_arrays((4, 8), s, [p.data for p in z.addressable_shards][::-1])
    np.testing.assert_array_equal(np.asarray(joined), x[:4])


def test_an_array_of_terms_that_are_owed_is_their_sum(eight):
    mesh = make_mesh((4,), ("x",))
    terms = [bf.device_put(np.full(4, i, "float32"), d) for i, d in enumerate(mesh.device_list)]
    owed = bf.make_array_from_single_device_arrays((4,), NamedSharding(mesh, P(unreduced={"x"})), terms)
    assert not owed.is_fully_replicated
    elsewhere = [NamedSharding(mesh, P("x")), NamedSharding(mesh, P()), bf.devices()[5]]
    for x in (owed, owed * 1, *(bf.device_put(owed, place) for place in elsewhere)):
        np.testing.assert_array_equal(np.asarray(x), np.full(4, 6))
    np.testing.assert_allclose(np.asarray(bnp.sin(owed)), np.sin(np.full(4, 6.0)), rtol=1e-6)


@pytest.mark.parametrize(
    "spec, given, shape", [(P("x"), (8, 3), None), (P(None, "y"), (5, 8), None), (P("y"), (5, 3), (5, 3))]
)
def test_the_part_of_the_only_process_is_the_whole(mesh, rng, spec, given, shape):
    x = rng.normal(size=given).astype("float32")
    y = bf.make_array_from_process_local_data(NamedSharding(mesh, spec), x, shape)
    assert y.sharding.spec == spec and y.shape == given and y.is_fully_addressable
    np.testing.assert_array_equal(np.asarray(y), x)


def test_helpers_of_jobs_in_a_process_that_is_alone(mesh):
    x = bf.device_put(np.arange(8.0), NamedSharding(mesh, P("x")))
    gathered = bf.multihost.process_allgather({"x": x, "n": 2})
    assert gathered["x"].shape == (1, 8) and gathered["n"].tolist() == [2]
    assert bf.multihost.process_allgather(x, tiled=True).tolist() == list(range(8))
    assert bf.multihost.broadcast_one_to_all({"x": x})["x"].tolist() == list(range(8))
    bf.multihost.sync_global_devices("here")
    bf.multihost.assert_equal(x)
    with pytest.raises(errors.CollectiveError, match="0 sources"):
        bf.multihost.broadcast_one_to_all(1, is_source=False)


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda m, y: bf.device_put(np.ones(4), NamedSharding(m, P(None, "x"))), errors.ShardingError, "has rank 2"),
        (lambda m, y: bf.device_put(np.ones(4), P("x")), errors.ArgumentError, "P\\('x'\\) has no mesh"),
        (lambda m, y: bf.device_put(np.ones(4), "mesh"), errors.ArgumentError, "a device or a sharding"),
        (lambda m, y: bf.device_put((1, 2), [m.device_list[0]]), errors.TreeError, "structure"),
        (
            lambda m, y: bf.device_put(np.ones(4), NamedSharding(m, P(unreduced={"x"}))),
            errors.ShardingError,
            "an array cannot have the sharding",
        ),
        (
            lambda m, y: bf.device_put(np.ones(4), NamedSharding(m.abstract, P("x"))),
            errors.ShardingError,
            "no devices",
        ),
        (
            lambda m, y: y + bf.device_put(np.ones(8), on_eight(P("z"))),
            errors.ArgumentError,
            r"mesh\(x=2, y=4\) of cpu:0 to cpu:7 and on mesh\(z=8\) of cpu:0 to cpu:7",
        ),
        (
            lambda m, y: bf.jit(lambda a, b: a + b)(y, bf.device_put(np.ones(8), on_eight(P()))),
            errors.ArgumentError,
            r"<lambda> was given arrays on mesh\(x=2, y=4\) .* and on mesh\(z=8\)",
        ),
        (
            lambda m, y: bf.make_array_from_callback((8,), NamedSharding(m, P("x")), lambda i: np.ones(3)),
            errors.ShapeError,
            r"shape \(3,\)",
        ),
        (
            lambda m, y: bf.make_array_from_callback(
                (8,), NamedSharding(m, P("x")), lambda i: np.ones(4, "int8" if i[0].start else "int16")
            ),
            errors.DtypeError,
            "int16 and of int8",
        ),
        (
            lambda m, y: bf.make_array_from_process_local_data(y.sharding, np.ones(3), (8,)),
            errors.ShapeError,
            r"of shape \(3,\).*\n.*\n.*this process holds \(8,\)",
        ),
        (lambda m, y: bf.make_array_from_callback((8,), P("x"), np.ones), errors.ArgumentError, "NamedSharding"),
        (
            lambda m, y: bf.make_array_from_single_device_arrays((8,), y.sharding, [y]),
            errors.ArgumentError,
            "one on each of",
        ),
        (
            lambda m, y: bf.make_array_from_single_device_arrays(
                (16,), y.sharding, [s.data for s in y.addressable_shards]
            ),
            errors.ShapeError,
            "shards of shape",
        ),
        (
            lambda m, y: bf.make_array_from_single_device_arrays(
                (7,), y.sharding, [s.data for s in y.addressable_shards]
            ),
            errors.ShapeError,
            "evenly",
        ),
    ],
)  # fmt: skip
def test_bad_input(mesh, make, error, text):
    y = bf.device_put(np.ones(8), NamedSharding(mesh, P("x")))
    with pytest.raises(error, match=text) as caught:
        make(mesh, y)
    assert __file__ in str(caught.value)


# -- computing -------------------------------------------------------------------------------------


def test_eager_operations_stay_on_the_mesh(mesh, rng, monkeypatch):
    x, w = rng.normal(size=(8, 12)).astype("float32"), rng.normal(size=(12, 6)).astype("float32")
    a = bf.device_put(x, NamedSharding(mesh, P("x", "y")))
    b = a * 2 + 1
    assert b.sharding == a.sharding
    np.testing.assert_array_equal(np.asarray(b), x * 2 + 1)
    np.testing.assert_allclose(
        np.asarray(a @ bf.device_put(w, NamedSharding(mesh, P("y")))), x @ w, rtol=1e-5
    )
    np.testing.assert_allclose(np.asarray(a.sum(0)), x.sum(0), rtol=1e-5)
    assert float(a.max()) == x.max() and np.asarray(a[3, 2:5]).tolist() == x[3, 2:5].tolist()
    np.testing.assert_array_equal(np.asarray(bnp.sort(a, axis=1)), np.sort(x, 1))
    made = counted(monkeypatch)
    a * 2 + 1
    assert not made  # the programs of single operations are kept


def test_numbers_and_arrays_on_one_device_join_the_mesh(mesh):
    a = bf.device_put(np.arange(8.0), NamedSharding(mesh, P("y")))
    elsewhere = bf.device_put(np.ones(8), bf.devices()[5])
    for b in (
        a + 1.0,
        a + np.ones(8, "float32"),
        elsewhere + a,
        a + bnp.ones(8),
        bf.jit(bnp.add)(elsewhere, a),
    ):
        assert b.device == a.device and b.sharding.spec == P("y")
        np.testing.assert_array_equal(np.asarray(b), np.arange(8) + 1)
    loss = (a * a).sum()
    assert (loss + 1).device == a.device
    assert (loss * bnp.ones(3)).device == a.device


def test_jit_follows_its_arguments(mesh, rng, monkeypatch):
    made = counted(monkeypatch)
    x, w = rng.normal(size=(8, 16)).astype("float32"), rng.normal(size=(16, 4)).astype("float32")
    f = bf.jit(lambda x, w: bnp.tanh(x @ w))
    want = np.tanh(x @ w)
    for x_spec, w_spec, exchanges in ((P("x"), P(), 0), (P(None, "y"), P("y"), 1), (P("x"), P(None, "y"), 0)):
        a, b = bf.device_put(x, NamedSharding(mesh, x_spec)), bf.device_put(w, NamedSharding(mesh, w_spec))
        for _ in range(2):
            np.testing.assert_allclose(np.asarray(f(a, b)), want, rtol=1e-5, atol=1e-6)
        assert made[-1].communicates == bool(exchanges)
        collectives = [e for e in made[-1].jaxpr.eqns if e.prim.kind == "collective"]
        assert len(collectives) == exchanges
    assert f.trace_count == 1 and len(made) == 3  # traced once, partitioned for each combination of shardings
    np.testing.assert_allclose(np.asarray(f(x, w)), want, rtol=1e-5, atol=1e-6)
    assert f(x, w).device == bf.devices()[0]


def test_what_a_function_closes_over(mesh):
    table = bnp.arange(16.0).reshape(8, 2)
    sharded = bf.device_put(np.arange(16.0).reshape(8, 2), NamedSharding(mesh, P("x")))
    np.testing.assert_array_equal(np.asarray(bf.jit(lambda a: a * table)(sharded)), np.asarray(table) ** 2)
    assert bf.jit(lambda: sharded + 1)().sharding == sharded.sharding


def test_transforms_of_sharded_arguments(mesh, rng):
    x, w = rng.normal(size=(8, 6)).astype("float32"), rng.normal(size=(6, 4)).astype("float32")
    a, b = bf.device_put(x, NamedSharding(mesh, P("x"))), bf.device_put(w, NamedSharding(mesh, P(None, "y")))

    def loss(w, x):
        return (bnp.tanh(x @ w) ** 2).mean()

    want_value, want = bf.value_and_grad(loss)(w, x)
    for g in (bf.value_and_grad(loss), bf.jit(bf.value_and_grad(loss))):
        value, grad = g(b, a)
        np.testing.assert_allclose(float(value), float(want_value), rtol=1e-5)
        np.testing.assert_allclose(np.asarray(grad), np.asarray(want), rtol=1e-4, atol=1e-6)
    rows = bf.jit(bf.vmap(lambda row: lax.scan(lambda c, v: (c + v, c * v), 0.0, row)))(a)
    for got, wanted in zip(rows, bf.vmap(lambda row: lax.scan(lambda c, v: (c + v, c * v), 0.0, row))(x)):
        np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiler", ["always", "never"])
def test_training_by_compiled_programs(mesh, rng, monkeypatch, compiler):
    """The ranks of one compiled program run at the same time, and donate their shards."""
    monkeypatch.setattr(bf.config, "host_compiler", compiler)
    x, w = rng.normal(size=(32, 16)).astype("float32"), rng.normal(size=(16, 8)).astype("float32")
    v = rng.normal(size=(8, 4)).astype("float32")

    def step(params, x):
        def loss(params):
            w, v = params
            return (bnp.tanh(bnp.tanh(x @ w) @ v) ** 2).mean()

        value, grads = bf.value_and_grad(loss)(params)
        return bf.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    def train(params, x):
        run, losses = bf.jit(step, donate_argnums=0), []
        for _ in range(4):
            params, value = run(params, x)
            losses.append(float(value))
        return [*map(np.asarray, params)], losses

    want, want_losses = train((bnp.asarray(w), bnp.asarray(v)), bnp.asarray(x))
    with mesh:
        got, losses = train(bf.device_put((w, v), (P(None, "y"), P("y"))), bf.device_put(x, P("x")))
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    for g, p in zip(got, want):
        np.testing.assert_allclose(g, p, rtol=1e-4, atol=1e-6)


def test_donation(mesh):
    place = NamedSharding(mesh, P("x"))
    f = bf.jit(lambda a, b: (a + 1, b), donate_argnums=0)
    a = bf.device_put(np.arange(8.0), place)
    shard, copy = a.addressable_shards[0].data, a + 0
    out, _ = f(a, 0)
    assert a.is_deleted() and np.asarray(out).tolist() == list(range(1, 9))
    assert np.asarray(shard).tolist() == [0, 1, 2, 3] and np.asarray(copy).tolist() == list(range(8))
    c = bf.device_put(np.arange(8.0), place)
    other = ConcreteArray(c.buffer, c.aval, c.device)
    assert np.asarray(f(c, 0)[0]).tolist() == list(range(1, 9)) and c.is_deleted()
    assert np.asarray(other).tolist() == list(range(8)), "an array of the same buffer"
    b = bf.device_put(np.arange(8.0), place)
    out, same = f(b, b)
    assert np.asarray(out).tolist() == list(range(1, 9)) and np.asarray(same).tolist() == list(range(8))


def test_what_programs_show(mesh):
    a = bf.device_put(np.ones((8, 4)), NamedSharding(mesh, P("x")))
    scale = bf.device_put(np.full(4, 2.0), NamedSharding(mesh, P()))
    f = bf.jit(lambda a: (a * scale).sum(0))
    lowered = f.lower(a)
    assert "f32[4,4]" not in lowered.as_text()  # the program as it was written
    assert "mesh_sums" in str(lowered.fusion) and "mesh_sums" in lowered.source()
    assert lowered.cost.bytes < f.lower(np.ones((8, 4))).cost.bytes  # of one device, which holds half
    compiled = lowered.compile()
    np.testing.assert_array_equal(np.asarray(compiled(a)), [16] * 4)
    assert "mesh_sums" in compiled.source()
    for x in (a, bf.device_put(a, NamedSharding(mesh, P("y")))):
        assert any("mesh_sums" in step.name for step in compiled.timings(x))
    assert "mesh_sums" in str(bf.explain(f, a))


def test_nans_are_found(mesh, monkeypatch):
    monkeypatch.setattr(bf.config, "debug_nans", True)
    a = bf.device_put(np.arange(8.0), NamedSharding(mesh, P("x")))
    with pytest.raises(errors.NanError, match="log"):
        bf.jit(lambda a: bnp.log(a - 1) + 1)(a)


# -- pictures --------------------------------------------------------------------------------------


def drawn(*args):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        bf.visualize_sharding(*args)
    return out.getvalue()


def test_pictures_golden(mesh, golden):
    uneven = bf.device_put(np.ones((8, 10)), NamedSharding(mesh, P("x", "y")))
    cube = bf.AbstractMesh((2, 2, 2), ("x", "y", "z"))
    golden(
        "sharding_pictures",
        drawn(uneven)
        + drawn((8, 10), NamedSharding(mesh, P("y")))
        + drawn((8,), NamedSharding(mesh, P("y")))
        + drawn((), NamedSharding(mesh, P()))
        + drawn((8, 3, 6, 3), NamedSharding(cube, P("x", None, "y", "z")))
        + drawn(bnp.ones((2, 3))),
    )
    golden("sharding_svg", bf.sharding_svg(uneven))


def test_pictures_in_colour(mesh, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    text = drawn((8, 10), NamedSharding(mesh, P("x", "y")))
    assert "\x1b[" in text and "0:4" in text and "9:10" in text


def test_bad_pictures(mesh):
    with pytest.raises(errors.ArgumentError, match="a shape and a sharding"):
        bf.visualize_sharding((8, 10))
    with pytest.raises(errors.ShardingError, match="has rank 2"):
        bf.sharding_svg((8,), NamedSharding(mesh, P(None, "x")))


# name, the function of an array, what each element is
LIKE = {
    "zeros_like": (bnp.zeros_like, 0),
    "ones_like": (bnp.ones_like, 1),
    "empty_like": (bnp.empty_like, 0),
    "full_like": (lambda a: bnp.full_like(a, 2.5), 2.5),
    "full_like an array": (lambda a: bnp.full_like(a, bnp.array([3.0])), 3),
}


@pytest.mark.parametrize("name", LIKE)
def test_what_is_made_like_an_array_is_divided_as_it_is(mesh, name):
    function, value = LIKE[name]
    for spec, shape in ((P("x", "y"), (8, 8)), (P("y"), (6, 3)), (P(), (4,)), (P(None, ("y", "x")), (2, 9))):
        a = bf.device_put(np.ones(shape, np.float32), NamedSharding(mesh, spec))
        out = function(a)
        assert out.sharding == a.sharding and out.dtype == a.dtype, spec
        np.testing.assert_array_equal(np.asarray(out), np.full(shape, value))
        assert float(out.sum()) == value * out.size, "what is beyond the edge does not count"


@pytest.mark.parametrize("traced", [False, True])
def test_a_sharding_says_where_an_array_is_made(mesh, traced):
    place = NamedSharding(mesh, P("x", "y"))

    def make():
        return (
            bnp.zeros((4, 8), device=place),
            bnp.ones((4, 8), "int32", device=place),
            bnp.full((4, 8), 7, device=place),
            bnp.full((4, 8), bnp.arange(8), device=place),
        )

    outs = bf.jit(make)() if traced else make()
    for out, want in zip(outs, (0, 1, 7, np.arange(8)), strict=True):
        np.testing.assert_array_equal(np.asarray(out), np.broadcast_to(want, (4, 8)))
        assert traced or out.sharding == place
    with pytest.raises(errors.ShardingError):
        bnp.zeros(4, device=place)
