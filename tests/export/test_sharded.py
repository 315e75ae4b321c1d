"""Exported programs with shardings, collectives and meshes."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, export, lax
from blufunc.config import config


@pytest.fixture
def mesh(monkeypatch):
    monkeypatch.setattr(config, "cpu_devices", 8)
    return bf.make_mesh((2, 4), ("x", "y"))


X = np.arange(64, dtype=np.float32).reshape(8, 8)


def reloaded(fun, *args):
    return export.deserialize(export.export(fun)(*args).serialize())


def test_shardings_of_jit(mesh):
    """Shardings of arguments and results hold after loading."""
    rows, columns = (bf.NamedSharding(mesh, bf.P(*spec)) for spec in (("x", None), (None, "y")))
    step = bf.jit(lambda a, b: (a @ b, a.sum()), in_shardings=(rows, None), out_shardings=(columns, None))
    loaded = reloaded(step, X, X)
    assert loaded.nr_devices == 8
    assert loaded.in_shardings == (rows, None) and loaded.out_shardings == (columns, None)
    product, total = loaded.call(X, X)
    assert product.sharding == columns
    np.testing.assert_allclose(product, X @ X, rtol=1e-6)
    np.testing.assert_allclose(total, X.sum(), rtol=1e-6)


def test_shard_map(mesh):
    """A ``shard_map`` with collectives, and its gradient."""

    def body(block):
        return lax.psum(block * lax.axis_index("x"), "x") + lax.ppermute(block, "x", [(0, 1), (1, 0)])

    mapped = bf.shard_map(body, mesh=mesh, in_specs=bf.P("x"), out_specs=bf.P("x"))
    fun = bf.jit(lambda v: bnp.sin(mapped(v)))
    loaded = reloaded(fun, X)
    np.testing.assert_array_equal(loaded.call(X), fun(X))
    got, want = (bf.grad(lambda v, f=f: (f(v) ** 2).sum())(X) for f in (loaded.call, fun))
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_mesh_of_the_context(mesh):
    """The current mesh is used if it has the axes of the program's."""
    spec = bf.NamedSharding(mesh, bf.P("x"))
    blob = export.export(bf.jit(lambda v: bf.constrain(v * 2, spec), in_shardings=(spec,)))(X).serialize()
    reverse = bf.Mesh(np.asarray(mesh.devices)[::-1, ::-1], ("x", "y"))
    with reverse:
        loaded = export.deserialize(blob)
    assert loaded.in_shardings == (bf.NamedSharding(reverse, bf.P("x")),)
    assert export.deserialize(blob).in_shardings == (spec,)
    np.testing.assert_array_equal(loaded.call(X), X * 2)


def test_too_few_devices(mesh, monkeypatch):
    spec = bf.NamedSharding(mesh, bf.P("x"))
    blob = export.export(bf.jit(lambda v: v * 2, in_shardings=(spec,)))(X).serialize()
    monkeypatch.setattr(config, "cpu_devices", 2)
    with pytest.raises(errors.ShardingError, match="takes 8 devices, and 2 are"):
        export.deserialize(blob)
