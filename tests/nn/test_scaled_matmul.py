"""Block-scaled matmuls compared with NumPy in float32."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, nn
from blufunc.nn.scaled_matmul import quantized

OVER = (((2,), (2,)), ((0,), (0,)))


def operands():
    x, y = (bf.random.normal(bf.random.key(n), (2, rows, 64)) for n, rows in ((1, 16), (2, 32)))
    return x, y


def test_scaled_matmul():
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (2, n, 8)).astype("float32") for n in (3, 5))
    s, t = (2.0 ** rng.integers(-2, 3, (2, n, 2)) for n in (3, 5))
    want = np.einsum("bmk,bnk->bmn", a * np.repeat(s, 4, -1), b * np.repeat(t, 4, -1))
    got = nn.scaled_matmul(
        bnp.asarray(a, "float8_e4m3fn"), bnp.asarray(b, "float4_e2m1fn"), bnp.asarray(s, "float8_e8m0fnu"), t
    )
    rounded = np.asarray(bnp.asarray(b, "float4_e2m1fn").astype("float32"))
    want = np.einsum("bmk,bnk->bmn", a * np.repeat(s, 4, -1), rounded * np.repeat(t, 4, -1))
    np.testing.assert_array_equal(got, want)
    numbers = (((1,), (0,)), ((), ()))
    both = lax.scaled_dot(
        a[0], b[0].T, lhs_scale=s[0], dimension_numbers=numbers, preferred_element_type="float32"
    )
    np.testing.assert_allclose(both, (a[0] * np.repeat(s[0], 4, -1)) @ b[0].T, rtol=1e-6)
    with pytest.raises(errors.ShapeError, match="into blocks"):
        nn.scaled_matmul(a, b, s[..., :1].repeat(3, -1), t)


@pytest.mark.parametrize("mode, tolerance", [("mxfp8", 0.05), ("nvfp4", 0.15)])
def test_quantized_dot(mode, tolerance):
    x, y = operands()
    configs = [nn.get_scaled_dot_general_config(mode, bnp.array([0.5]) if mode == "nvfp4" else None)] * 3
    got, want = nn.scaled_dot_general(x, y, OVER, configs=configs), lax.dot_general(x, y, OVER)
    error = lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b)
    assert error(got, want) < tolerance
    weights = bf.random.normal(bf.random.key(3), want.shape)
    loss = lambda dot: lambda a, b: (dot(a, b) * weights).sum()
    gradients = (
        [
            bf.grad(loss(f), (0, 1))(x, y)
            for f in (
                lambda a, b: nn.scaled_dot_general(a, b, OVER, configs=configs),
                lambda a, b: lax.dot_general(a, b, OVER),
            )
        ]
        if mode == "nvfp4"
        else []
    )
    for got_slope, want_slope in zip(*gradients, strict=True) if gradients else ():
        assert error(got_slope, want_slope) < 1e-5  # of what is not quantized, and not clipped


def test_scales_bring_blocks_into_range():
    x = bnp.array([[1000.0] * 32, [1e-3] * 32, [0.0] * 32])
    data, scales = quantized(x, nn.get_scaled_dot_general_config("mxfp8"))
    assert scales.dtype == "float8_e8m0fnu" and data.dtype == "float8_e4m3fn"
    back = data.astype("float32") * scales.astype("float32")
    np.testing.assert_allclose(back, x, rtol=0.07)
    with pytest.raises(errors.ShapeError, match="multiple of 32"):
        nn.scaled_dot_general(bnp.ones((1, 2, 31)), bnp.ones((1, 2, 31)), OVER)
