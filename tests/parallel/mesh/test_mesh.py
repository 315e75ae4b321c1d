"""Meshes, partition specs and shardings: what they say, and what they refuse."""

import copy
import pickle

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import AbstractMesh, Mesh, NamedSharding, P, errors, make_mesh
from blufunc.config import Config, config, from_environment
from blufunc.core.arrays import backend, process_info
from blufunc.parallel.mesh.mesh import AxisType, current_mesh

XY = AbstractMesh((2, 4), ("x", "y"))


# -- meshes ----------------------------------------------------------------------------------------


def test_simulated_devices(eight, monkeypatch):
    assert [str(d) for d in eight] == [f"cpu:{i}" for i in range(8)]
    assert bf.device_count() == 8 and bf.devices("cpu")[3] is eight[3]
    monkeypatch.setattr(config, "cpu_devices", 2)
    assert bf.devices() == eight[:2]
    x = bf.device_put(np.arange(3), eight[1])
    assert x.device == eight[1] and (x + x).device == eight[1]


@pytest.fixture
def one_of_three(monkeypatch):
    """This process taken for the second of a job of three."""
    before = process_info.current()
    backend.join(process_info.Job(index=1, count=3, local_index=1))
    yield
    backend.join(before)


def test_devices_of_a_job(one_of_three, monkeypatch):
    first, own, last = bf.devices()
    assert [own] == bf.local_devices() == bf.local_devices(1) and own == bnp.ones(1).device
    assert bf.local_devices(2) == [last] == [bf.devices("cpu")[2]] and last != first
    assert [d.process_index for d in bf.devices()] == [d.id for d in bf.devices()] == [0, 1, 2]
    assert (bf.device_count(), bf.local_device_count()) == (3, 1)
    assert (bf.process_index(), bf.process_count()) == (1, 3)
    assert str(last) == "cpu:0 of process 2" and repr(last) == "Device(platform='cpu', index=0, process=2)"
    with pytest.raises(errors.ValueRangeError, match="there is no process 3 among 3: this one is 1"):
        bf.local_devices(3)
    with pytest.raises(errors.UnsupportedError, match="of process 2 was used in process 1") as e:
        bf.device_put(1, last)
    assert __file__ in str(e.value)

    mesh = make_mesh((3,), "x")
    assert mesh.local_ranks == (1,) and mesh.local_devices == (own,) and mesh.spans_processes
    sharding = NamedSharding(mesh, P("x"))
    assert sharding.addressable_devices == {own} and not sharding.is_fully_addressable
    assert sharding.addressable_devices_indices_map((6,)) == {own: (slice(2, 4),)}
    assert not make_mesh((1,), "x", devices=[own]).spans_processes
    elsewhere = NamedSharding(make_mesh((1,), "x"), P("x"))
    with pytest.raises(errors.ShardingError, match=r"mesh\(x=1\) has no device of process 1"):
        bf.make_array_from_process_local_data(elsewhere, np.ones(3))
    with pytest.raises(errors.CollectiveError, match="this process has left their job") as e:
        bf.device_put(np.ones(3), sharding)
    assert __file__ in str(e.value)

    monkeypatch.setattr(config, "cpu_devices", 2)
    with pytest.raises(errors.UnsupportedError, match="process 1 of 3 has 2 simulated devices") as e:
        bf.devices()
    assert "BLUFUNC_CPU_DEVICES=6" in str(e.value) and __file__ in str(e.value)


def test_the_flag():
    assert from_environment({"BLUFUNC_CPU_DEVICES": "8"}).cpu_devices == 8
    for bad in ("many", "-1", "0"):
        with pytest.raises(errors.ValueRangeError, match=r"(?i)cpu_devices"):
            from_environment({"BLUFUNC_CPU_DEVICES": bad})
    with pytest.raises(errors.ArgumentError, match="cpu_devices"):
        Config().cpu_devices = "8"
    made = Config()
    made.update("jax_num_cpu_devices", 8)
    assert made.cpu_devices == 8


def test_a_mesh(eight):
    mesh = make_mesh((2, 4), ("x", "y"))
    assert mesh.shape == {"x": 2, "y": 4} and mesh.size == 8 and mesh.devices.shape == (2, 4)
    assert mesh.axis_names == ("x", "y") and mesh.axis_sizes == (2, 4)
    assert mesh.abstract == XY and hash(mesh.abstract) == hash(XY)
    assert (
        mesh == Mesh(np.array(eight).reshape(2, 4), ("x", "y"))
        and len({mesh, make_mesh((2, 4), ("x", "y"))}) == 1
    )
    assert mesh != make_mesh((2, 4), ("y", "x")) and mesh != make_mesh((4, 2), ("x", "y"))
    assert mesh != Mesh(np.array(eight[::-1]).reshape(2, 4), ("x", "y"))
    assert mesh.coordinates(6) == {"x": 1, "y": 2} and mesh.size_of(("x", "y")) == 8
    assert make_mesh((2,), "x", devices=eight[4:]).device_list == tuple(eight[4:6])
    with pytest.raises(ValueError, match="read-only"):
        mesh.devices[0, 0] = eight[1]


def test_a_size_of_minus_one_uses_all_devices(eight):
    assert make_mesh((-1, 2), ("x", "y")).axis_sizes == (4, 2)
    assert make_mesh((2, -1, 1), ("x", "y", "z"), devices=eight[:6]).axis_sizes == (2, 3, 1)
    assert make_mesh((-1,), "x", devices=eight[:1]).axis_sizes == (1,)


def test_the_current_mesh(eight):
    a, b = make_mesh((8,), ("x",)), make_mesh((2,), ("x",))
    assert current_mesh() is None
    with a:
        with b, a:
            assert current_mesh() is a
        assert current_mesh() is a
        with pytest.raises(ZeroDivisionError), b:
            1 / 0
        assert current_mesh() is a
    assert current_mesh() is None


def test_traces_of_meshes_are_kept_apart(eight):
    seen = []
    f = bf.jit(lambda x: seen.append(current_mesh()) or x)
    a, b = make_mesh((8,), ("x",)), make_mesh((2,), ("x",))
    for mesh in (a, b, a):
        with mesh:
            f(1.0)
    assert seen == [a, b]


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: make_mesh((4, 4), ("x", "y")), errors.ShardingError, "takes 16 devices, and 8 are"),
        (lambda: make_mesh((2,), ("x", "y")), errors.ShardingError, "2 names, .* for 1 axes"),
        (lambda: make_mesh((2, 2), ("x", "x")), errors.ShardingError, "'x' is used twice"),
        (lambda: make_mesh((2, 0), ("x", "y")), errors.ShardingError, r"sizes \(2, 0\)"),
        (
            lambda: make_mesh((-1, 3), ("x", "y")),
            errors.ShardingError,
            r"8 devices cannot be .* shape \(-1, 3\)",
        ),
        (
            lambda: make_mesh((-1, 0), ("x", "y")),
            errors.ShardingError,
            r"8 devices cannot be .* shape \(-1, 0\)",
        ),
        (lambda: make_mesh((-1, 16), ("x", "y")), errors.ShardingError, "8 devices cannot be"),
        (lambda: make_mesh((-1, -1), ("x", "y")), errors.ShardingError, r"sizes \(-1, -1\)"),
        (lambda: make_mesh((2,), (1,)), errors.ArgumentError, "axis_names holds strings"),
        (lambda: make_mesh((2.5,), ("x",)), errors.ArgumentError, "axis_sizes"),
        (lambda: Mesh([0, 1], ("x",)), errors.ArgumentError, "an array of devices, and 0 is none"),
        (lambda: Mesh(bf.devices(), ("x", "y")), errors.ShardingError, "2 names"),
        (lambda: Mesh([bf.devices()[0]] * 2, ("x",)), errors.ShardingError, "cpu:0 is twice"),
        (lambda: AbstractMesh((2, -1), ("x", "y")), errors.ShardingError, r"sizes \(2, -1\)"),
        (lambda: AbstractMesh((2,), ("x", "y")), errors.ShardingError, "2 names"),
    ],
)
def test_bad_meshes(eight, make, error, text):
    with pytest.raises(error, match=text) as caught:
        make()
    assert __file__ in str(caught.value)


# -- specs -----------------------------------------------------------------------------------------


def test_specs():
    assert repr(P("x", None)) == "P('x', None)" and repr(P(("x", "y"))) == "P(('x', 'y'))"
    assert repr(P("x", unreduced={"z", "y"})) == "P('x', unreduced={'y', 'z'})"
    assert P("x") == P("x", None) and hash(P("x")) == hash(P("x", None, None))
    assert P("x") != P("y") and P("x") != P("x", unreduced={"y"})
    assert P(("x",), ()) == P("x", None) and P(["x", "y"]) == P(("x", "y"))
    assert P("x") != ("x",) and P("x", unreduced={"y"}) != P("x", reduced={"y"})
    assert tuple(P("x", None)) == ("x", None) and len(P()) == 0
    assert P("x", ("y", "z")).axes == ("x", "y", "z")
    spec = P(None, ("x", "y"), unreduced={"z"}, reduced={"w"})
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert tuple(P("x", None, None).for_rank(1)) == ("x",) and tuple(P("x").for_rank(2)) == ("x", None)
    assert bf.tree.leaves({"a": P("x"), "b": [P()]}) == [P("x"), P()]  # leaves of pytrees


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: P("x", "x"), errors.ShardingError, "'x' twice"),
        (lambda: P(("x", "y"), "y"), errors.ShardingError, "'y' twice"),
        (lambda: P("x", unreduced={"x"}), errors.ShardingError, "'x' twice"),
        (lambda: P(unreduced={"x"}, reduced={"x"}), errors.ShardingError, "'x' twice"),
        (lambda: P(1), errors.ArgumentError, "not 1"),
        (lambda: P(("x", 1)), errors.ArgumentError, "not"),
        (lambda: P(unreduced="x"), errors.ArgumentError, "unreduced is a sequence of names"),
        (lambda: P("x", None, "y").for_rank(2), errors.ShardingError, "has rank 3, and the array has rank 2"),
    ],
)
def test_bad_specs(make, error, text):
    with pytest.raises(error, match=text) as caught:
        make()
    assert __file__ in str(caught.value)


# -- shardings -------------------------------------------------------------------------------------


def test_shards_of_even_shapes():
    s = NamedSharding(XY, P("y", "x"))
    assert s.shard_shape((8, 6)) == (2, 3) and s.is_even((8, 6)) and not s.is_fully_replicated
    assert s.indices((8, 6))[5] == (slice(2, 4), slice(3, 6))  # rank 5 is at x=1, y=1
    assert s.replica_ids() == [0] * 8
    both = NamedSharding(XY, P(("y", "x")))
    assert both.shard_shape((16, 3)) == (2, 3)
    assert [i[0].start for i in both.indices((16, 3))] == [0, 4, 8, 12, 2, 6, 10, 14]  # y counts slowest


def test_shards_of_uneven_shapes():
    s = NamedSharding(XY, P("y"))
    assert s.shard_shape((10,)) == (3,) and not s.is_even((10,))
    assert [(i.start, i.stop) for (i,) in s.indices((10,))[:4]] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [(i.start, i.stop) for (i,) in s.indices((5,))[:4]] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert s.shard_shape((0, 2)) == (0, 2)


def test_replicas():
    s = NamedSharding(XY, P(None, "x"))
    assert s.replica_ids() == [0, 1, 2, 3] * 2
    assert NamedSharding(XY, P()).is_fully_replicated and NamedSharding(XY, P()).replica_ids() == list(
        range(8)
    )
    one = AbstractMesh((1, 2), ("a", "b"))
    assert NamedSharding(one, P("a")).is_fully_replicated
    assert not NamedSharding(one, P(unreduced={"b"})).is_fully_replicated


def test_copies_of_meshes_and_shardings(eight):
    types = (AxisType.Auto, AxisType.Explicit)
    for mesh in (
        AbstractMesh((2, 4), ("x", "y"), axis_types=types),
        make_mesh((2, 4), ("x", "y"), axis_types=types),
    ):
        assert mesh.shape["y"] == 4  # is kept in the mesh
        for x in (mesh, NamedSharding(mesh, P("x", ("y",)))):
            assert copy.deepcopy(x) == x and hash(copy.deepcopy(x)) == hash(x)
            text = pickle.dumps(x)
            assert (
                pickle.loads(text) == x and b"_hash" not in text
            )  # hashes of strings are those of a process


def test_named_shardings_are_keys(eight):
    mesh = make_mesh((2, 4), ("x", "y"))
    a, b = NamedSharding(mesh, P("x")), NamedSharding(make_mesh((2, 4), ("x", "y")), P("x", None))
    assert (
        a == b and hash(a) == hash(b) and a != NamedSharding(mesh, P("y")) and a != NamedSharding(XY, P("x"))
    )
    assert repr(a) == "NamedSharding(mesh(x=2, y=4), P('x'))"
    assert a.device_set == set(eight)
    assert a.devices_indices_map((4, 2))[eight[7]] == (slice(2, 4), slice(0, 2))


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: NamedSharding(XY, P("z")), errors.ShardingError, r"'z', which the mesh \(x=2, y=4\)"),
        (lambda: NamedSharding(XY, P(unreduced={"z"})), errors.ShardingError, "'z'"),
        (lambda: NamedSharding(XY, "x"), errors.ArgumentError, "a spec, not 'x'"),
        (lambda: NamedSharding((2, 4), P("x")), errors.ArgumentError, r"a mesh, not \(2, 4\)"),
        (lambda: NamedSharding(XY, P(None, "x")).shard_shape((4,)), errors.ShardingError, "of rank 2"),
        (
            lambda: NamedSharding(XY, P(P.UNCONSTRAINED)).shard_shape((4,)),
            errors.ShardingError,
            "of an array",
        ),
        (lambda: NamedSharding(XY, P()).devices_indices_map((4,)), errors.ShardingError, "no devices"),
    ],
)
def test_bad_shardings(make, error, text):
    with pytest.raises(error, match=text) as caught:
        make()
    assert __file__ in str(caught.value)


def test_kinds_of_meshes():
    explicit = AbstractMesh((2, 4), ("x", "y"), axis_types=AxisType.Explicit)
    for mesh, found in ((XY, (False, True, False)), (explicit, (False, False, True)),
                        (AbstractMesh((), ()), (True, False, False))):  # fmt: skip
        assert (mesh.empty, mesh.are_all_axes_auto, mesh.are_all_axes_explicit) == found


def test_unconstrained_dimensions(eight):
    spec = P("x", P.UNCONSTRAINED)
    assert spec.axes == ("x",) and spec != P("x") and pickle.loads(pickle.dumps(spec)) == spec
    with make_mesh((2, 4), ("x", "y")):
        f = bf.jit(lambda x: bf.constrain(x * 2, spec), in_shardings=P(None, "y"))
        assert f(np.ones((4, 8), np.float32)).sharding.spec == P("x", "y")


def test_results_have_the_spec_that_the_program_states(eight):
    stated = NamedSharding(make_mesh((2, 1), ("x", "y")), P("x", "y"))  # an axis of size 1 included
    assert bf.jit(lambda x: x * 2, out_shardings=stated)(np.ones((4, 4), np.float32)).sharding == stated


def test_equivalent_shardings(eight):
    mesh = make_mesh((4, 2, 1), ("x", "y", "z"))
    of = lambda *entries: NamedSharding(mesh, P(*entries))
    flat = NamedSharding(make_mesh((8,), ("i",)), P("i"))
    assert of(("x", "y"), "z").is_equivalent_to(flat, 2) and flat.is_equivalent_to(of(("x", "y")), 1)
    assert not of(("y", "x")).is_equivalent_to(flat, 1) and not of("x").is_equivalent_to(flat, 1)
    alone = bf.sharding.SingleDeviceSharding(eight[0])
    assert NamedSharding(make_mesh((1,), ("i",)), P("i")).is_equivalent_to(alone, 3)
    assert not of().is_equivalent_to(alone, 1)
