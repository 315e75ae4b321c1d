"""``lower().per_device`` and ``lower().collectives``."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import NamedSharding, P, ShapeDtypeStruct, errors
from blufunc.parallel.reports.per_device import sharded_type

MESH = bf.AbstractMesh((4, 2), ("data", "model"))


def shape(dims, *spec, **axes):
    return ShapeDtypeStruct(dims, np.float32, sharding=NamedSharding(MESH, P(*spec, **axes)))


def loss(w, x):
    return jnp.sum((x @ w) ** 2)


def lowered():
    return bf.jit(bf.grad(loss)).lower(shape((16, 32), None, "model"), shape((8, 16), "data"))


def test_golden(golden):
    found = lowered().per_device
    golden("parallel/per_device", f"{found}\n\n{found.collectives}")


def test_the_local_program_and_its_collectives():
    found = lowered().per_device
    assert found.name == "loss" and found.mesh == MESH
    assert [str(v.aval) for v in found.jaxpr.invars] == ["f32[16,16]", "f32[2,16]"]
    assert [s.spec for s in found.out_shardings] == [P(None, "model")]
    (row,) = found.collectives
    assert (row.operation, row.axes) == ("all_reduce", ("data",))
    assert str(lowered().collectives) == str(found.collectives)
    assert "test_per_device.py" in found.as_text(lines=True) and "test_per" not in found.as_text()


def test_arrays_on_simulated_devices(eight):
    mesh = bf.make_mesh((4, 2), ("data", "model"), devices=eight)
    x = bf.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P("data")))
    f = bf.jit(lambda x: jnp.sum(x, 0))
    found = f.lower(x).per_device
    assert [row.operation for row in found.collectives] == ["all_reduce"]
    assert str(found.jaxpr.invars[0].aval) == "f32[2,16]"


def test_mesh_from_shard_map():
    f = bf.shard_map(lambda x: bf.lax.psum(jnp.sin(x), "data"), mesh=MESH, in_specs=P("data"), out_specs=P())
    found = bf.jit(f).lower(ShapeDtypeStruct((8,), np.float32)).per_device
    assert "f32[8@data]" in str(found) and "psum" in str(found)


def test_constants_are_named():
    table = jnp.ones((16, 4))
    found = bf.jit(lambda x: x @ table).lower(shape((8, 16), "data")).per_device
    assert found.labels == ["constant 0", "x"]


def test_another_platform_shows_one_device():
    lowered = bf.jit(bf.grad(loss)).trace(shape((16, 32), None, "model"), shape((8, 16), "data"))
    steps = lowered.lower(platform="cuda:sm_90").cost.steps
    assert [s.shape for s in steps if s.ops == ("dot_general",)] == ["f32[2,16]", "f32[16,16]"]


def test_without_a_mesh():
    plain = bf.jit(loss).lower(*[ShapeDtypeStruct((4, 4), np.float32)] * 2)
    assert len(plain.collectives) == 0
    with pytest.raises(errors.ShardingError, match="loss has no mesh"):
        _ = plain.per_device


@pytest.mark.parametrize(
    "spec, text",
    [
        (P("data"), "f32[8@data,16]"),
        (P(None, ("data", "model")), "f32[8,16@(data,model)]"),
        (P(), "f32[8,16]"),
        (P("model", unreduced={"data"}), "f32[8@model,16]{U:data}"),
        (P(unreduced={"model"}, reduced={"data"}), "f32[8,16]{U:model R:data}"),
    ],
)
def test_types(spec, text):
    aval = bf.typeof(jnp.zeros((8, 16)))
    assert sharded_type(aval, NamedSharding(MESH, spec)) == text
