"""``platform_dependent``: each device takes its function, under every transform."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.programs.alternatives import chosen
from blufunc.kernels.rewrites.select_variant import select_variants

X = np.linspace(0.1, 1.0, 6, dtype=np.float32)


def both(x):
    return lax.platform_dependent(
        x, cpu=lambda v: {"y": v**2}, cuda=lambda v: {"y": v**3}, tpu=lambda v: 1 / 0
    )


def on_cuda(fun, *args):
    """The results of the program for CUDA devices, computed on the CPU."""
    jaxpr = bf.make_jaxpr(fun)(*args)
    selected, _ = select_variants(bf.jit(fun).lower(*args).jaxpr, None)
    assert "platform_dependent" not in str(selected) and "platform_dependent" in str(jaxpr)
    return bf.core.eval_jaxpr(selected, [], *bf.tree.leaves(args))


def test_values():
    assert both(X)["y"].tolist() == bf.jit(both)(X)["y"].tolist() == bnp.square(X).tolist()
    np.testing.assert_allclose(on_cuda(both, X)[0], X**3, rtol=1e-6)


def test_derivatives_and_batches():
    total = lambda x: both(x)["y"].sum()
    np.testing.assert_allclose(bf.grad(total)(X), 2 * X, rtol=1e-6)
    np.testing.assert_allclose(bf.jit(bf.grad(total))(X), 2 * X, rtol=1e-6)
    np.testing.assert_allclose(on_cuda(bf.grad(total), X)[0], 3 * X**2, rtol=1e-6)
    np.testing.assert_allclose(on_cuda(bf.vmap(lambda x: both(x)["y"]), X)[0], X**3, rtol=1e-6)
    np.testing.assert_allclose(bf.jvp(total, (X,), (X,))[1], (2 * X * X).sum(), rtol=1e-6)
    looped = lambda x: lax.scan(lambda c, _: (both(c)["y"], None), x, None, length=2)[0]
    np.testing.assert_allclose(bf.jit(looped)(X), X**4, rtol=1e-6)
    np.testing.assert_allclose(on_cuda(looped, X)[0], X**9, rtol=1e-5)


def test_default():
    fun = lambda x: lax.platform_dependent(x, cuda=bnp.sin, default=bnp.cos)
    np.testing.assert_allclose(fun(X), np.cos(X), rtol=1e-6)
    np.testing.assert_allclose(on_cuda(fun, X)[0], np.sin(X), rtol=1e-6)


def test_no_function():
    """A platform without a function is an error where it would run, and only there."""
    only = lambda x: lax.platform_dependent(x, gpu=bnp.sin)
    np.testing.assert_allclose(on_cuda(bf.vmap(only), X)[0], np.sin(X), rtol=1e-6)
    for run in (only, bf.jit(only), bf.vmap(only), lambda x: bf.grad(lambda v: only(v).sum())(x)):
        with pytest.raises(errors.UnsupportedError, match="has functions for cuda, and runs on cpu"):
            run(X)
    assert "sin" not in str(chosen(bf.make_jaxpr(only)(X)))


def test_bad_arguments():
    for attempt, error, match in [
        (lambda: lax.platform_dependent(X, cpu=bnp.sin, gcu=bnp.sin), errors.ArgumentError, "no platform 'gcu'"),
        (lambda: lax.platform_dependent(X, tpu=bnp.sin), errors.ArgumentError, "no function for cpu or cuda"),
        (lambda: lax.platform_dependent(X, cpu=3, cuda=bnp.sin), errors.ArgumentError, "takes a function"),
        (lambda: lax.platform_dependent(X, cpu=bnp.sin, cuda=bnp.sum), errors.BranchError, "for cpu, f32"),
        (lambda: lax.platform_dependent(X, cpu=bnp.sin, cuda=lambda v: (v,)), errors.BranchError, "different results"),
    ]:  # fmt: skip
        with pytest.raises(error, match=match):
            attempt()
