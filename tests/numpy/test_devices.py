"""``device=`` of creation functions, eager, under transforms and in programs."""

import functools

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit

CREATE = {
    "zeros": (lambda d: bnp.zeros(3, device=d), np.zeros(3)),
    "ones": (lambda d: bnp.ones((2, 2), "int32", device=d), np.ones((2, 2))),
    "empty": (lambda d: bnp.empty(3, device=d), np.zeros(3)),
    "full": (lambda d: bnp.full(3, 2.5, device=d), np.full(3, 2.5)),
    "full of a vector": (lambda d: bnp.full((2, 2), np.arange(2.0), device=d), [[0, 1], [0, 1]]),
    "lax.full": (lambda d: lax.full((2,), 1.5, device=bnp.zeros(1, device=d).device), [1.5, 1.5]),
    "zeros_like": (lambda d: bnp.zeros_like(np.ones(3), device=d), np.zeros(3)),
    "full_like": (lambda d: bnp.full_like(np.ones(3), 2, device=d), np.full(3, 2)),
    "arange": (lambda d: bnp.arange(3, device=d), np.arange(3)),
    "arange in steps": (lambda d: bnp.arange(1, 9, 3, device=d), np.arange(1, 9, 3)),
    "arange of floats": (lambda d: bnp.arange(0, 1, 0.25, device=d), np.arange(0, 1, 0.25)),
    "linspace": (lambda d: bnp.linspace(0, 1, 5, device=d), np.linspace(0, 1, 5)),
    "full of an array": (lambda d: bnp.full((2,), bnp.asarray(1.5), device=d), [1.5, 1.5]),
    "eye": (lambda d: bnp.eye(3, k=1, device=d), np.eye(3, k=1)),
    "asarray": (lambda d: bnp.asarray([1.0, 2.0], device=d), [1, 2]),
    "asarray of a number": (lambda d: bnp.asarray(2.0, device=d), 2.0),
    "array": (lambda d: bnp.array(np.ones(2), device=d), [1, 1]),
}


@pytest.fixture
def devices(monkeypatch):
    monkeypatch.setattr(bf.config, "cpu_devices", 2)
    return bf.devices()


@pytest.mark.parametrize("name", CREATE)
def test_device(name, devices):
    f, want = CREATE[name]
    for d in (*devices, "cpu:1"):
        create = functools.partial(f, d)
        mapped = vmap(lambda x, create=create: create(), out_axes=None)
        for g in (create, jit(create), lambda mapped=mapped: mapped(bnp.ones(2))):
            got = g()
            assert str(got.device) == str(d)
            np.testing.assert_array_equal(got, want)


def test_programs_run_where_their_arguments_are(devices):
    x = bnp.ones(3, device=devices[1])
    for f in (
        lambda x: x + bnp.arange(3, device=devices[1]),
        lambda x: x + bnp.zeros(3, device=x.device),
        lambda x: x + bnp.zeros_like(x),
        lambda x: x + bnp.linspace(0, 1, 3),
    ):
        assert jit(f)(x).device == devices[1]
    assert grad(lambda x: (x * bnp.ones(3, device=devices[1])).sum())(x).device == devices[1]


def test_traced_values_do_not_move(devices):
    x = bnp.ones(3)
    for f in (
        lambda x: bnp.asarray(x, device=devices[1]),
        lambda x: bnp.astype(x, "int32", device=devices[1]),
        lambda x: bnp.full((2, 3), x, device=devices[1]),
        lambda x: bnp.linspace(x, 1.0, 4, device=devices[1]),
    ):
        assert f(x).device == devices[1]
        with pytest.raises(errors.UnsupportedError, match="for a traced value"):
            jit(f)(x)
    assert jit(lambda x: bnp.asarray(x, device=devices[0]))(x).device == devices[0]
