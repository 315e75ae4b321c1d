"""``pmap`` on simulated devices, against ``vmap``."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.config import config

X = np.arange(12, dtype="float32").reshape(4, 3)


@pytest.fixture(autouse=True)
def four_devices(monkeypatch):
    monkeypatch.setattr(config, "cpu_devices", 4)


CASES = {
    "one": (lambda x: bnp.sin(x).sum(), 0, 0, (X,)),
    "two": (lambda x, y: x * y, 0, 0, (X, X[:, 0])),
    "not mapped": (lambda x, s: x * s, (0, None), 0, (X, 10.0)),
    "axes": (lambda x: x * 2, 1, 1, (X.T,)),
    "last": (lambda x: x * 2, -1, 0, (X.T,)),
    "results last": (lambda x: (x, bnp.outer(x, x)), 0, (-1, -2), (X,)),
    "collectives": (lambda x: x / lax.psum(x, "i") + lax.axis_index("i"), 0, 0, (X,)),
    "tree": (lambda t: {"o": t["a"] + t["b"]}, 0, 0, ({"a": X, "b": X[:, 1]},)),
}


@pytest.mark.parametrize("name", CASES)
def test_as_vmap(name):
    f, in_axes, out_axes, args = CASES[name]
    mapped = bf.pmap(f, "i", in_axes=in_axes, out_axes=out_axes)
    want = bf.vmap(f, in_axes, out_axes, axis_name="i")(*args)
    for _ in range(2):
        got = mapped(*args)
        for a, b in zip(bf.tree.leaves(got), bf.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
            assert len(a.devices()) == 4


def test_options():
    assert (
        bf.pmap(lambda x, k: x.sum() * k, static_broadcasted_argnums=1)(X, 3).tolist()
        == (X.sum(1) * 3).tolist()
    )
    assert bf.pmap(lambda x, *, z: x[0] + z)(X, z=X[:, 1]).tolist() == (X[:, 0] + X[:, 1]).tolist()
    assert bf.pmap(lambda x: lax.pmean(x, "b"), "b", out_axes=None)(X[:, 0]) == X[:, 0].mean()
    assert bf.pmap(lambda: lax.axis_index("b"), "b", axis_size=3)().tolist() == [0, 1, 2]
    reverse = bf.devices()[::-1]
    assert bf.pmap(lambda x: x, devices=reverse)(X).addressable_shards[0].data.shape[0] == 1
    x = bnp.asarray(X)
    bf.pmap(lambda x: x + 1, donate_argnums=0)(x)
    np.testing.assert_array_equal(x, X)  # its copy on the devices was donated


def test_axes_are_prefixes_of_pytrees():
    given = {"a": X, "b": {"c": X.T, "d": np.float32(2)}}
    f = lambda t, s: {"y": t["a"] * t["b"]["d"] + s, "z": (t["b"]["c"], t["b"]["d"])}
    in_axes = ({"a": 0, "b": {"c": 1, "d": None}}, None)
    out_axes = {"y": 1, "z": (0, None)}
    found = bf.pmap(f, in_axes=in_axes, out_axes=out_axes)(given, 1.0)
    want = bf.vmap(f, in_axes, out_axes)(given, 1.0)
    for a, b in zip(bf.tree.leaves(found), bf.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_derivatives():
    loss = lambda w: (bf.pmap(lambda x, w: (x * w) ** 2, in_axes=(0, None))(X, w)).sum()
    np.testing.assert_allclose(bf.grad(loss)(2.0), 4 * (X**2).sum(), rtol=1e-6)


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: bf.pmap(lambda x: x)(np.ones(5)), "size 5 on 4 devices"),
        (lambda: bf.pmap(lambda x, y: x)(np.ones(4), np.ones(3)), r"sizes \[3, 4\]"),
        (lambda: bf.pmap(lambda x: x, in_axes=None)(1.0), "no argument is mapped"),
        (lambda: bf.pmap(lambda x: x, in_axes=(0, 0))(X), "for 1 arguments"),
        (lambda: bf.pmap(lambda x: x, in_axes=({"a": "i"},))({"a": X}), "axes are ints and None"),
    ],
)
def test_errors(call, match):
    with pytest.raises(errors.ArgumentError, match=match):
        call()
