"""The example of sparsity: patterns hold every nonzero, and Jacobians are exact."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, testing
from examples.extend import sparsity
from examples.extend.sparsity import Depends, depends, pattern
from tests.transforms.common import arr

X = arr([0.3, 0.7, 0.6, 0.9, -0.4])
EXACT = {
    "elementwise": lambda x: bnp.sin(x) * x / 2,
    "neighbours": lambda x: x[1:] * x[:-1] + 1,
    "reversed": lambda x: bnp.exp(x[::-1]),
    "sum": lambda x: x[:3].sum(),
    "matrix": lambda x: bnp.stack([x, x * x]) @ x,
    "plain matrix": lambda x: x[:2] @ arr(np.ones((2, 3))),
    "concatenated": lambda x: bnp.concatenate([x[2:], bnp.ones(2, x.dtype), x[:1]]),
    "padded": lambda x: bnp.pad(x[1:3], 1),
    "compared": lambda x: bnp.where(x > 0, x, 2 * x),
    "gathered": lambda x: x[bnp.asarray([4, 0])],
    "constant": lambda x: bnp.ones(3),
    "outer": lambda x: x[:, None] * x[None, :2],
}


@pytest.mark.parametrize("f", EXACT.values(), ids=EXACT)
def test_patterns(f):
    """Here the structure is that of the Jacobian."""
    jacobian = np.asarray(bf.jacfwd(f)(X))
    for run in (pattern, bf.jit(pattern, static_argnums=0)):
        found = np.asarray(run(f, X))
        assert found.dtype == bool and found.shape == jacobian.shape
        np.testing.assert_array_equal(found, jacobian != 0)


def test_patterns_are_for_all_values():
    assert bool(pattern(lambda x: x * (x - x[0]), X)[0, 0])
    assert not np.any(np.asarray(bf.jacfwd(lambda x: 0 * x)(X)))
    np.testing.assert_array_equal(pattern(lambda x: 0 * x, X), np.eye(5, dtype=bool))


def test_choices_depend_on_both_cases():
    f = lambda x: bnp.where(bnp.arange(5) > 2, x, x[0])
    found, jacobian = np.asarray(pattern(f, X)), np.asarray(bf.jacfwd(f)(X))
    assert np.all(found >= (jacobian != 0))
    np.testing.assert_array_equal(found, pattern(lambda x: x + x[0], X))


def test_matrices_of_inputs():
    found = pattern(lambda x: x.sum(0), arr(np.ones((2, 3))))
    np.testing.assert_array_equal(found, np.broadcast_to(np.eye(3, dtype=bool)[:, None], (3, 2, 3)))


def test_jacobians():
    for n in (6, 40):
        u = arr(np.linspace(0, 1, n) ** 2)
        jacobian, passes = sparsity.sparse_jacobian(sparsity.heat, u)
        assert passes == 3
        np.testing.assert_allclose(jacobian, bf.jacrev(sparsity.heat)(u), atol=1e-14)


def test_groups_share_no_output(rng):
    p = rng.random((30, 20)) < 0.1
    groups = sparsity.colours(p)
    for g in range(groups.max() + 1):
        assert np.all(p[:, groups == g].sum(1) <= 1)


def test_composition():
    f = lambda x: x[1:] * bnp.sin(x[:-1])
    report = testing.check_transform(depends, f, (Depends(X, bnp.eye(5, dtype=bool)),))
    assert report.unsupported.keys() <= {"grad inside"}  # it pads


def test_positions_that_depend_on_inputs_are_an_error():
    f = lambda x: lax.dynamic_slice(X, (x.astype("int32"),), (1,))
    with pytest.raises(errors.UnsupportedError, match="positions of dynamic_slice"):
        pattern(f, arr(1.0))


def test_main(capsys):
    sparsity.main()
    assert "by 3 jvp instead of 12" in capsys.readouterr().out
