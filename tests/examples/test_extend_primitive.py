"""The examples of a primitive and of rules in a scope."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, testing
from examples.extend import primitive, scope
from examples.extend.primitive import banded_matvec, banded_solve, banded_solve_p, transposed
from tests.transforms.common import arr


def system(rng, n=6, width=1, k=2, batch=()):
    """Bands of a well-conditioned matrix, the matrix itself, and right-hand sides."""
    bands = rng.uniform(-1, 1, (*batch, 2 * width + 1, n))
    bands[..., width, :] += 4
    dense = np.zeros((*batch, n, n))
    for i in range(n):
        for j in range(max(0, i - width), min(n, i + width + 1)):
            dense[..., i, j] = bands[..., width + i - j, j]
    return bands, dense, rng.uniform(-1, 1, (*batch, n, k))


@pytest.mark.parametrize("width", [0, 1, 2])
def test_against_dense_matrices(rng, width):
    bands, dense, b = system(rng, width=width)
    np.testing.assert_allclose(banded_solve(arr(bands), arr(b)), np.linalg.solve(dense, b), rtol=1e-10)
    np.testing.assert_allclose(
        banded_solve(arr(bands), arr(b[:, 0])), np.linalg.solve(dense, b[:, 0]), rtol=1e-10
    )
    np.testing.assert_allclose(banded_matvec(arr(bands), arr(b)), dense @ b, rtol=1e-10)
    np.testing.assert_allclose(
        banded_matvec(transposed(arr(bands)), arr(b)), dense.T @ b, rtol=1e-10, atol=1e-14
    )


@pytest.mark.parametrize("width, dtype", [(0, "float64"), (1, "float64"), (2, "float64"), (1, "float32")])
def test_every_rule(rng, width, dtype):
    bands, _, b = system(rng, width=width)
    report = testing.check_primitive(banded_solve_p, arr(bands, dtype), arr(b, dtype))
    assert not report.unsupported
    assert "transpose" in report.checked


def test_batches_of_systems(rng):
    bands, dense, b = system(rng, batch=(3,))
    testing.check_primitive(banded_solve_p, arr(bands), arr(b), order=1)
    got = bf.vmap(banded_solve)(arr(bands), arr(b))
    np.testing.assert_allclose(got, np.linalg.solve(dense, b), rtol=1e-10)


def test_one_matrix_is_factorised_once(rng):
    """Right-hand sides over a batch become columns."""
    bands, dense, b = system(rng, k=5)
    f = bf.vmap(lambda v: banded_solve(arr(bands), v), in_axes=1, out_axes=1)
    (eqn,) = [e for e in bf.make_jaxpr(f)(arr(b)).eqns if e.prim is banded_solve_p]
    assert [v.aval.shape for v in eqn.invars] == [(3, 6), (6, 5)]
    np.testing.assert_allclose(f(arr(b)), np.linalg.solve(dense, b), rtol=1e-10)


def test_singular_systems_give_nan():
    assert np.all(np.isnan(np.asarray(banded_solve(bnp.zeros((3, 4)), bnp.ones(4)))))


def test_bad_operands():
    x = bnp.ones((3, 4))
    for bands, b, error in [
        (x, bnp.ones((5, 1)), errors.ShapeError),
        (x[:2], bnp.ones((4, 1)), errors.ShapeError),
        (x[0], bnp.ones((4, 1)), errors.ShapeError),
        (x, bnp.ones((4, 1), "float64"), errors.DtypeError),
        (x.astype("int32"), bnp.ones((4, 1), "int32"), errors.DtypeError),
    ]:
        with pytest.raises(error) as info:
            banded_solve(bands, b)
        assert "primitive.py" in info.value.where


def test_smoothing():
    signal = arr(np.random.default_rng(0).normal(0, 1, 50))
    np.testing.assert_allclose(primitive.smooth(signal, 0.0), signal)
    np.testing.assert_allclose(primitive.smooth(signal, 7.0).sum(), signal.sum(), rtol=1e-12)
    testing.check_grads(primitive.smooth, (signal, arr(2.0)))


def test_straight_through():
    before, after = scope.train(60)
    assert before == after
    with bf.override(lax.round_p, jvp=scope.straight_through):
        learned = scope.train(60)
    assert learned[1] < 0.2 * before
    assert scope.train(5) == (before, before)


def test_tempered():
    likelihood = lambda p: bnp.log(p).sum()
    p = bnp.asarray([2.0, 0.5, 1e-4])
    with bf.override(lax.log_p, jvp=scope.tempered):
        np.testing.assert_allclose(bf.grad(likelihood)(p), [0.5, 1, 1])
        np.testing.assert_allclose(bf.jit(bf.grad(lambda x: likelihood(lax.stop_gradient(x))))(p), 0)
    np.testing.assert_allclose(bf.grad(likelihood)(p), [0.5, 2, 1e4], rtol=1e-5)


@pytest.mark.parametrize("module", [primitive, scope])
def test_main(module, capsys):
    module.main()
    assert capsys.readouterr().out
