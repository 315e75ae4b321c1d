"""Keyword parameters of NumPy's functions: accepted, or refused by name."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, nn
from blufunc.scipy import special

X = bnp.asarray([[3.0, 1.0, 2.0], [1.5, 0.5, 2.5]])

# Functions with ``out``, which has nothing to write to.
WITH_OUT = """
    all amax amin any argmax argmin cumprod cumsum max mean median min nanargmax nanargmin nancumprod nancumsum nanmax
    nanmean nanmedian nanmin nanprod nanstd nansum nanvar prod ptp round std sum trace var isposinf isneginf modf
""".split()


@pytest.mark.parametrize("name", WITH_OUT)
def test_out(name):
    function = getattr(bnp, name)
    with pytest.raises(errors.UnsupportedError, match=f"{name.replace('am', 'm')} does not support out="):
        function(X, out=np.zeros(3))
    for a, b in zip(bf.tree.leaves(function(X, out=None)), bf.tree.leaves(function(X)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_other_refusals():
    q = bnp.ones((2, 3, 1, 4))
    refused = [
        (bnp.sort, (X,), {"order": "name"}),
        (bnp.quantile, (X, 0.5), {"overwrite_input": True}),
        (bnp.linalg.svd, (X,), {"subset_by_index": (0, 1)}),
        (lax.linalg.eigh, (bnp.eye(2),), {"subset_by_index": (0, 1)}),
        (nn.dot_product_attention, (q, q, q), {"implementation": "cudnn"}),
        (nn.dot_product_attention, (q, q, q), {"return_residual": True}),
    ]
    for function, args, options in refused:
        (option,) = options
        with pytest.raises(errors.UnsupportedError, match=f"{option}="):
            function(*args, **options)
    with pytest.raises(errors.ValueRangeError, match="kind"):
        bnp.argsort(X, kind="fast")
    for function, option in ((lax.linalg.svd, "algorithm"), (lax.linalg.eig, "implementation")):
        with pytest.raises(errors.ArgumentError, match="is not one of"):
            function(bnp.eye(2), **{option: "fastest"})


def test_names():
    assert bnp.sum(a=X, axis=0, keepdims=True).shape == (1, 3)
    assert bnp.max(X, 1, None, True).shape == (2, 1)
    assert bnp.matmul(a=X, b=X.T).shape == (2, 2)
    assert bnp.concatenate(arrays=(X, X), axis=1, dtype="float16").dtype == "float16"
    assert bnp.array(object=[1, 2]).tolist() == [1, 2] and bnp.asarray(a=3).ndim == 0
    assert bnp.searchsorted(a=bnp.arange(3), v=1) == 1
    assert lax.slice(operand=X, start_indices=(0, 1), limit_indices=(2, 2)).shape == (2, 1)
    assert lax.clamp(min=1.0, x=X, max=2.0).tolist() == [[2.0, 1.0, 2.0], [1.5, 1.0, 2.0]]
    assert lax.squeeze(array=lax.expand_dims(array=X, dimensions=(0,)), dimensions=(0,)).shape == (2, 3)


def test_argsort_dtype():
    assert bnp.argsort(X, dtype="int8").dtype == "int8" and bnp.argsort(X, kind="stable").dtype == "int32"
    with pytest.raises(errors.DtypeError, match="positions"):
        bnp.argsort(X, dtype="float32")


def test_ravel_multi_index_dtype():
    at = bnp.ravel_multi_index((bnp.asarray([1, 0]), bnp.asarray([2, 1])), (2, 3), dtype="uint8")
    assert at.dtype == "uint8" and at.tolist() == [5, 1]


def test_lax_dot_with_dimension_numbers():
    got = lax.dot(X, X, dimension_numbers=(((1,), (1,)), ((), ())))
    np.testing.assert_allclose(got, np.asarray(X) @ np.asarray(X).T)


def test_standardize_where():
    mask = np.asarray([[True, True, False], [True, True, True]])
    kept = np.ma.masked_array(np.asarray(X), ~mask)
    want = (np.asarray(X) - kept.mean(1, keepdims=True)) / np.sqrt(kept.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(nn.standardize(X, where=mask), want.data, rtol=1e-5)
    with pytest.raises(errors.ValueRangeError, match="algorithm"):
        nn.standardize(X, algorithm="quick")


def test_signed_logsumexp():
    value, sign = nn.logsumexp(X, axis=1, b=bnp.asarray([-1.0, 1.0, 1.0]), return_sign=True)
    total = (np.exp(np.asarray(X)) * [-1, 1, 1]).sum(1)
    np.testing.assert_allclose(value, np.log(abs(total)), rtol=1e-5)
    np.testing.assert_array_equal(sign, np.sign(total))
    for a, b in zip(special.logsumexp(X, 1, return_sign=True), (nn.logsumexp(X, 1), np.ones(2)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_lax_round():
    x = np.asarray([0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997, 8388609.0, np.inf, 3.2, -3.7], np.float32)
    np.testing.assert_array_equal(lax.round(x), [1, -1, 2, 3, -3, 0, 8388609.0, np.inf, 3, -4])
    np.testing.assert_array_equal(lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), np.rint(x))
    with pytest.raises(errors.ValueRangeError, match="rounding method"):
        lax.round(x, 7)
    with pytest.raises(errors.DtypeError):
        lax.round(bnp.arange(3))
