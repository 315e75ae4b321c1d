"""Memory kinds as values: shardings, ``device_put``, programs, on the CPU."""

import copy
import pickle

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import NamedSharding, P, errors, io, lax, make_mesh
from blufunc.config import config
from blufunc.memory import Memory, Space
from blufunc.sharding import SingleDeviceSharding

HOST = {"memory_kind": "pinned_host"}


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setattr(config, "check", True)


@pytest.fixture
def device():
    return bf.devices("cpu")[0]


def x34():
    return bnp.arange(12.0).reshape(3, 4)


# -- names -------------------------------------------------------------------------------------------


def test_memories_of_a_device(device):
    assert device.default_memory() == device.memory("device") == Memory("device", device)
    assert [m.kind for m in device.addressable_memories()] == ["device", "pinned_host"]
    assert str(device.memory("pinned_host")) == "pinned_host of cpu:0"
    assert device.memory("pinned_host").addressable_by_devices() == [device]
    with pytest.raises(errors.ValueRangeError, match=r"there is no memory 'hbm'"):
        device.memory("hbm")


def test_shardings_have_a_memory(device, eight):
    mesh = make_mesh((8,), "x")
    for s in (SingleDeviceSharding(device), NamedSharding(mesh, P("x"))):
        host = s.with_memory_kind("pinned_host")
        assert (s.memory_kind, host.memory_kind) == ("device", "pinned_host")
        assert s != host and hash(s) != hash(host) and host.with_memory_kind("device") == s
        assert "memory_kind='pinned_host'" in repr(host) and "memory" not in repr(s)
    named = NamedSharding(mesh, P("x"), **HOST)
    assert named.with_spec(P()).memory_kind == "pinned_host"
    function, arguments = named.__reduce__()
    assert function(*arguments) == named
    with pytest.raises(errors.ValueRangeError, match=r"NamedSharding: there is no memory 'disk'"):
        NamedSharding(mesh, P(), memory_kind="disk")


def test_types_print_their_memory():
    x = bf.device_put(x34(), Space.Host)
    assert str(x.aval) == "f32<host>[3,4]" and x.aval.with_shape((12,)).memory == "pinned_host"
    assert x.aval.tangent() == x34().aval and x.aval.update(memory="device") is x34().aval
    assert pickle.loads(pickle.dumps(x.aval)) is x.aval
    text = str(bf.make_jaxpr(lambda x: bf.device_put(x, Space.Host))(x34()))
    assert "b:f32<host>[3,4] = offload[dst=pinned_host src=device] a" in text
    like = bf.ShapeDtypeStruct((3, 4), "float32", sharding=x.sharding)
    assert bf.jit(lambda x: x).lower(like).jaxpr.invars[0].aval is x.aval


def test_types_without_values_keep_the_memory(device):
    x, away = bf.device_put(x34(), Space.Host), lambda x: {"m": bf.device_put(x, Space.Host), "s": x.sum()}
    types = bf.eval_shape(away, x34())
    assert types == bf.jit(away).eval_shape(x34()) == bf.make_jaxpr(away, return_shape=True)(x34())[1]
    assert types["m"] == bf.ShapeDtypeStruct((3, 4), "float32", memory="pinned_host")
    assert types["m"] != types["m"].__class__((3, 4), "float32") and types["s"].memory == "device"
    assert types["m"] == pickle.loads(pickle.dumps(types["m"])) and "memory='pinned_host'" in repr(types["m"])
    assert bf.typeof(types["m"]) is x.aval
    back = lambda m: bf.device_put(m, Space.Device) + 1
    assert bf.eval_shape(back, types["m"]).memory == "device"
    assert bf.eval_shape(lambda: types)["m"] == types["m"]  # types among the results
    assert bf.jit(back).lower(types["m"]).jaxpr.invars[0].aval is x.aval
    with pytest.raises(errors.UnsupportedError, match="add was given operand 0"):
        bf.eval_shape(lambda m: m + 1, types["m"])

    there = SingleDeviceSharding(device, **HOST)
    for memory in (None, Space.Host, "pinned_host"):
        assert bf.ShapeDtypeStruct((3,), "float32", sharding=there, memory=memory).memory == "pinned_host"
    with pytest.raises(errors.ValueRangeError, match=r"its sharding is in 'pinned_host'"):
        bf.ShapeDtypeStruct((3,), "float32", sharding=there, memory="device")
    with pytest.raises(errors.ValueRangeError, match=r"there is no memory 'nvme'"):
        bf.ShapeDtypeStruct((3,), "float32", memory="nvme")


@pytest.mark.parametrize("copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy])
def test_copies_of_arrays_keep_the_memory(copied):
    x = bf.device_put({"a": x34(), "b": bnp.ones(2)}, {"a": Space.Host, "b": Space.Device})
    y = copied(x)
    assert [v.sharding.memory_kind for v in y.values()] == ["pinned_host", "device"]
    np.testing.assert_array_equal(y["a"], x34())


# -- device_put --------------------------------------------------------------------------------------

PLACES = {
    "space": lambda d: Space.Host,
    "memory": lambda d: d.memory("pinned_host"),
    "sharding": lambda d: SingleDeviceSharding(d, **HOST),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("traced", [False, True])
def test_device_put_to_a_memory(place, traced, device):
    to = PLACES[place](device)
    f = lambda x: bf.device_put(x, to)
    y = (bf.jit(f) if traced else f)(x34())
    assert y.sharding == SingleDeviceSharding(device, **HOST)
    assert f(y) is y and bf.device_put(y, Space.Any) is y
    back = lambda y: bf.device_put(y, Space.Device)
    np.testing.assert_array_equal((bf.jit(back) if traced else back)(y) + 1, x34() + 1)
    assert bf.device_put(y, device).sharding.memory_kind == "device"


def test_device_put_of_a_tree(device):
    places = {"a": Space.Host, "b": device}
    y = bf.device_put({"a": x34(), "b": 2.0}, places)
    assert (y["a"].sharding.memory_kind, y["b"].sharding.memory_kind) == ("pinned_host", "device")


def test_on_a_mesh(eight):
    mesh = make_mesh((8,), "x")
    on_device, on_host = NamedSharding(mesh, P("x")), NamedSharding(mesh, P("x"), **HOST)
    x = bf.device_put(np.arange(13, dtype=np.float32), on_host)
    assert x.sharding == on_host and x.addressable_shards[6].data.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(x.addressable_shards[6].data, [12.0])
    f = bf.jit(lambda x: bf.device_put(bf.device_put(x, Space.Device) * 2, Space.Host))
    assert f(x).sharding == on_host
    np.testing.assert_array_equal(f(x), 2 * np.arange(13.0))
    for out in (on_device, on_host):
        g = bf.jit(lambda x: bf.device_put(x, Space.Device) + 1, in_shardings=on_host, out_shardings=out)
        for argument in (x, np.arange(13, dtype=np.float32)):
            assert g(argument).sharding == out
            np.testing.assert_array_equal(g(argument), np.arange(13.0) + 1)
    assert bnp.zeros_like(x).sharding == on_host
    assert bf.device_put(x, NamedSharding(mesh, P())).sharding == NamedSharding(mesh, P())
    made = bf.make_array_from_callback((8,), on_host, lambda i: np.arange(8.0, dtype=np.float32)[i])
    assert made.sharding == on_host
    shards = [s.data for s in made.addressable_shards]
    with pytest.raises(errors.ArgumentError, match=r"a shard is in the memory 'pinned_host'"):
        bf.make_array_from_single_device_arrays((8,), on_device, shards)


def test_checkpoints_keep_the_memory(tmp_path, device, eight):
    mesh = make_mesh((8,), "x")
    values = {
        "one": bf.device_put(x34(), Space.Host),
        "many": bf.device_put(np.arange(8.0), NamedSharding(mesh, P("x"), **HOST)),
    }
    io.save(tmp_path / "a.safetensors", values)
    found = io.load(tmp_path / "a.safetensors", like=values)
    for name, x in values.items():
        assert found[name].sharding == x.sharding
        np.testing.assert_array_equal(found[name], x)


# -- programs ----------------------------------------------------------------------------------------

USES = {
    "add": lambda x: x + 1,
    "matmul": lambda x: x @ x.T,
    "sum": lambda x: x.sum(),
    "reshape": lambda x: x.reshape(-1),
    "index": lambda x: x[0],
    "mixed": lambda x: bnp.ones((3, 4)) * x,
    "body": lambda x: lax.fori_loop(0, 2, lambda i, c: c + x, bnp.zeros((3, 4))),
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("use", USES)
def test_nothing_computes_on_the_host_unasked(use, traced):
    f = bf.jit(USES[use]) if traced else USES[use]
    with pytest.raises(errors.UnsupportedError, match=r"in the memory 'pinned_host'") as e:
        f(bf.device_put(x34(), Space.Host))
    assert "bf.device_put(x, bf.memory.Space.Device)" in str(e.value)


def test_calls_and_loops_pass_values_along():
    m = bf.device_put(x34(), Space.Host)
    inner = bf.jit(lambda m, x: (m, bf.device_put(m, Space.Device) + x))

    def f(m, x):
        same, y = inner(m, x)
        (same, y), _ = lax.scan(lambda c, _: (inner(*c), None), (same, y), None, length=2)
        return lax.cond(True, inner, lambda m, x: (m, x), same, bf.checkpoint(lambda x: x * 2)(y))

    for g in (f, bf.jit(f)):
        same, y = g(m, bnp.zeros((3, 4)))
        assert same.sharding.memory_kind == "pinned_host" and y.sharding.memory_kind == "device"
        np.testing.assert_array_equal(y, 7 * x34())


def test_derivatives_are_on_the_device():
    m = bf.device_put(x34(), Space.Host)
    f = lambda m: (bf.device_put(m, Space.Device) ** 3).sum() + bf.device_put(m, Space.Device).sum()
    g = bf.grad(f)(m)
    assert g.sharding.memory_kind == "device"
    np.testing.assert_array_equal(g, 3 * x34() ** 2 + 1)
    np.testing.assert_array_equal(bf.jit(bf.grad(f))(m), g)
    _, tangent = bf.jvp(f, (m,), (bnp.ones((3, 4)),))
    np.testing.assert_allclose(tangent, g.sum())
    np.testing.assert_allclose(np.asarray(bf.hessian(f)(m)).sum(), (6 * x34()).sum())


@pytest.mark.parametrize("axis, out_axis", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_batches(axis, out_axis):
    f = lambda x: bf.device_put(bf.device_put(x, Space.Host), Space.Device) * 2
    got = bf.vmap(f, axis, out_axis)(x34())
    np.testing.assert_array_equal(got, 2 * (x34() if axis == out_axis else x34().T))
    g = bf.vmap(lambda m: bf.device_put(m, Space.Device) + 1)
    np.testing.assert_array_equal(g(bf.device_put(x34(), Space.Host)), x34() + 1)


def test_a_cpu_says_that_there_is_one_memory(device):
    policy = bf.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device",
        offload_dst="pinned_host",
    )  # fmt: skip
    kept = bf.checkpoint_policies.save_only_these_names("h")

    def loss(policy):
        layer = lambda x: bnp.sin(bf.checkpoint_name(bnp.tanh(x), "h"))
        return bf.grad(lambda x: bf.checkpoint(layer, policy=policy)(x).sum())

    x = bnp.ones((1 << 16,))
    offloading, keeping = (bf.jit(loss(p)).lower(x) for p in (policy, kept))
    assert offloading.memory.peak_bytes == keeping.memory.peak_bytes and not offloading.memory.host_bytes
    notes = offloading.sight(device).notes
    assert notes == (
        "offload: there is one memory here: 1 value stays where computed, and nothing is copied",
    )
    assert keeping.sight(device).notes == ()
    np.testing.assert_array_equal(bf.jit(loss(policy))(x), bf.jit(loss(kept))(x))


def test_policies_name_memories_that_exist():
    with pytest.raises(errors.ValueRangeError, match=r"there is no memory 'nvme'"):
        bf.checkpoint_policies.offload_dot_with_no_batch_dims("device", "nvme")


# -- loops and branches ------------------------------------------------------------------------------


def _moved(m):
    """The update of a careless body, in the memory where it was computed."""
    return bf.device_put(m, Space.Device) * 0.5


LOOPS = {
    "scan": lambda body, m: lax.scan(lambda c, _: ({"m": body(c["m"])}, None), {"m": m}, None, 3)[0]["m"],
    "while_loop": lambda body, m: lax.while_loop(
        lambda c: c["n"] < 3, lambda c: {"m": body(c["m"]), "n": c["n"] + 1}, {"m": m, "n": bnp.int32(0)}
    )["m"],
    "fori_loop": lambda body, m: lax.fori_loop(0, 3, lambda i, c: {"m": body(c["m"])}, {"m": m})["m"],
    "a traced fori_loop": lambda body, m: bf.jit(
        lambda n, m: lax.fori_loop(0, n, lambda i, c: {"m": body(c["m"])}, {"m": m})["m"]
    )(bnp.int32(3), m),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("start", [Space.Host, Space.Device])
def test_a_carry_stays_in_its_memory(loop, start):
    m, run = bf.device_put(x34(), start), LOOPS[loop]
    body = _moved if start is Space.Host else lambda m: bf.device_put(m * 0.5, Space.Host)
    with pytest.raises(errors.CarryError) as error:
        run(body, m)
    text, here = str(error.value), {Space.Host: "f32<host>[3,4]", Space.Device: "f32[3,4]"}
    there = here[Space.Device if start is Space.Host else Space.Host]
    assert f"['m'] as {here[start]} and returns it as {there}" in text
    assert f"bf.device_put(value, bf.memory.{start!r})" in text and "test_memories.py:" in text
    got = run(lambda m: bf.device_put(body(m), start), m)
    assert got.sharding.memory_kind == start.value
    np.testing.assert_array_equal(bf.device_put(got, Space.Device), x34() / 8)


BRANCHES = {
    "cond": lambda *fs: lambda m: lax.cond(True, *fs, m),
    "switch": lambda *fs: lambda m: lax.switch(0, fs, m),
}


@pytest.mark.parametrize("which", BRANCHES)
def test_branches_return_values_in_one_memory(which):
    m, stay, move = bf.device_put(x34(), Space.Host), lambda m: {"m": m}, lambda m: {"m": _moved(m)}
    with pytest.raises(errors.BranchError) as error:
        BRANCHES[which](stay, move)(m)
    text = str(error.value)
    assert "the result['m'] is f32" in text and "f32<host>[3,4] from <lambda>" in text
    assert "bf.device_put(value, bf.memory.Space." in text and "test_memories.py:" in text
    back = lambda m: {"m": bf.device_put(move(m)["m"], Space.Host)}
    assert BRANCHES[which](stay, back)(m)["m"].sharding.memory_kind == "pinned_host"


def test_cotangents_are_on_the_device():
    f = lambda m: bf.device_put(m, Space.Host)
    (g,) = bf.linear_transpose(f, x34())(x34())
    np.testing.assert_array_equal(g, x34())
    for pull in (bf.linear_transpose(f, x34()), bf.vjp(f, x34())[1]):
        with pytest.raises(errors.GradError, match=r"must be f32\[3,4\] like .* not f32<host>\[3,4\]"):
            pull(f(x34()))


def test_the_filler_of_a_slot_is_in_its_memory():
    """One branch offloads a residual, and the other fills its slot."""
    policy = bf.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device",
        offload_dst="pinned_host",
    )  # fmt: skip
    layer = bf.checkpoint(lambda x: bnp.sin(bf.checkpoint_name(bnp.tanh(x), "h")), policy=policy)
    f = bf.jit(bf.grad(lambda x, p: lax.cond(p, layer, lambda x: x, x).sum()))
    want = bf.grad(lambda x: bnp.sin(bnp.tanh(x)).sum())(x34())
    np.testing.assert_allclose(f(x34(), True), want, rtol=1e-6)
    np.testing.assert_array_equal(f(x34(), False), np.ones((3, 4)))
