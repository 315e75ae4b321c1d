"""The example of kernels."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.testing import check_grads, check_vjp
from blufunc.transforms.extension.kernel_call import cuda_kernel_p
from examples.extend import kernels
from examples.extend.kernels import capped, logits, reference, rotate, rotated
from tests.emulation.kernels_on_host import run_on_host
from tests.transforms.common import arr, close, draw


def by_complex_numbers(x):
    heads, positions, features = x.shape
    rates = 10000.0 ** (-np.arange(0, features, 2) / features)
    z = np.asarray(x).reshape(heads, positions, -1, 2)
    turned = (z[..., 0] + 1j * z[..., 1]) * np.exp(1j * np.arange(positions)[:, None] * rates)
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def test_rotations():
    x = draw(2, 3, 4)
    np.testing.assert_allclose(rotated(x), by_complex_numbers(x), rtol=1e-12)
    np.testing.assert_allclose(rotate(rotated(x), -1.0), x, rtol=1e-12)


def test_the_kernel_computes_what_the_reference_does(tmp_path):
    x = draw(3, 50, 6)
    (got,) = run_on_host(rotate, (x, arr(-1.0)), tmp_path)
    np.testing.assert_allclose(got, reference(x, -1.0), rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(nvrtc.available() is not None, reason=nvrtc.available() or "")
def test_it_compiles():
    assert rotate.compile(bf.ShapeDtypeStruct((12, 1024, 64), "float32"), 1.0)


def test_its_rules_are_the_kernel():
    x = draw(2, 3, 4)
    check_vjp(rotated, lambda x: bf.vjp(rotated, x), (x,))
    check_grads(capped, (x,), 2)
    close(bf.grad(lambda x: (rotated(x) ** 3).sum())(x), bf.grad(lambda x: (reference(x, 1.0) ** 3).sum())(x))
    many = draw(4, 2, 3, 4)
    close(bf.vmap(rotated)(many), bf.vmap(lambda x: reference(x, 1.0))(many))
    for size in (None, 4):
        close(
            bf.vmap(rotate, (None if size is None else 0, 0))(x if size is None else many, bnp.arange(4.0)),
            bf.vmap(reference, (None if size is None else 0, 0))(
                x if size is None else many, bnp.arange(4.0)
            ),
        )
    step = bf.jit(bf.vmap(bf.grad(lambda q: logits(q, x).sum()))).trace(many).lower()
    assert sum(e.prim is cuda_kernel_p for e in step.jaxpr.eqns) == 3  # q, k, and back


def test_it_runs(capsys):
    kernels.main()
    assert "cuda_kernel[kernel=rotate]" in capsys.readouterr().out
