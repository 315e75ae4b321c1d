"""Emulated formats: every number, ties, blocks, random rounding, the transform."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, random
from blufunc.nn.low_precision import E2M1, E2M3, E3M2, E4M3, E5M2, MX, Format, emulate, round_to

F32 = np.float32

FORMATS = {  # formats, and the dtypes of ml_dtypes
    "float4_e2m1fn": E2M1, "float6_e2m3fn": E2M3, "float6_e3m2fn": E3M2, "float8_e4m3fn": E4M3, "float8_e5m2": E5M2,
    "float8_e3m4": Format(3, 4), "float8_e4m3": Format(4, 3), "float16": Format(5, 10), "bfloat16": Format(8, 7),
}  # fmt: skip
OTHERS = {
    "a bias": Format(4, 3, bias=11, specials="none"), "no mantissa": Format(3, 0),
    "one exponent": Format(1, 3, specials="none"),
    "nan alone": Format(3, 2, specials="nan"), "no mantissa, nan": Format(4, 0, specials="nan"), "e6m9": Format(6, 9),
    "ieee of two bits": Format(2, 2), "subnormal float32": Format(8, 3),
}  # fmt: skip


def table(f):
    """All numbers of a format from 0 on, from the meaning of its codes."""
    found = []
    for e, m in itertools.product(range(2**f.exponent), range(2**f.mantissa)):
        last = e == 2**f.exponent - 1
        if last and (f.specials == "ieee" or (f.specials == "nan" and m == 2**f.mantissa - 1)):
            continue
        fraction = m / 2**f.mantissa
        found.append(2.0 ** (1 - f.bias) * fraction if e == 0 else 2.0 ** (e - f.bias) * (1 + fraction))
    return np.array(found)


def nearest(x, numbers, powers=False):
    """The nearest of numbers by brute force; ties to the even code, or up."""
    size = np.minimum(np.abs(x.astype(np.float64)), numbers[-1])
    i = np.searchsorted(numbers, size).clip(1, len(numbers) - 1)
    low, high = size - numbers[i - 1], numbers[i] - size
    down = (low < high) | ((low == high) & ((i == 1) if powers else (i % 2 == 1)))
    return np.copysign(np.where(down, numbers[i - 1], numbers[i]), x).astype(F32)


def samples(f):
    """Numbers of a format, points halfway, their neighbours in float32, and others."""
    numbers = table(f)
    numbers = numbers if len(numbers) < 400 else np.concatenate([numbers[:200], numbers[-200:]])
    halfway = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, halfway, [f.largest * 1.01, f.largest * 4, 1e-30]])
    x = x[np.abs(x) < 3e38].astype(F32)
    x = np.concatenate([x, np.nextafter(x, F32(np.inf)), np.nextafter(x, F32(0))])
    return np.concatenate([x, -x])


@pytest.mark.parametrize("name", [*FORMATS, *OTHERS])
def test_nearest_is_the_nearest(name):
    f = (FORMATS | OTHERS)[name]
    numbers = table(f)
    assert (f.largest, f.smallest) == (numbers[-1], numbers[1]) and f.bits == 1 + f.exponent + f.mantissa
    x = samples(f)
    want = nearest(x, numbers, f.mantissa == 0)
    for run in (round_to, bf.jit(round_to, static_argnums=1)):
        got = np.asarray(run(x, f))
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(x))


@pytest.mark.parametrize("name", FORMATS)
def test_as_ml_dtypes_converts(name):
    f = FORMATS[name]
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    with np.errstate(over="ignore"):
        want = samples(f).astype(dtype).astype(F32)
    np.testing.assert_array_equal(round_to(samples(f), f, saturate=False), want)


def test_what_is_not_finite():
    x = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], F32)
    np.testing.assert_array_equal(round_to(x, E5M2), [57344, -57344, np.nan, 0, -0.0])
    np.testing.assert_array_equal(round_to(x, E5M2, saturate=False), x)
    np.testing.assert_array_equal(round_to(x, E4M3, saturate=False), [np.nan, np.nan, np.nan, 0, 0])
    np.testing.assert_array_equal(round_to(x, E2M1, saturate=False), [6, -6, np.nan, 0, 0])


@pytest.mark.parametrize("name", ["float4_e2m1fn", "float8_e5m2", "bfloat16", "a bias"])
def test_stochastic_rounding_has_the_mean(name):
    """Each result is a neighbour, and their mean is within five standard errors."""
    f = (FORMATS | OTHERS)[name]
    numbers = table(f).astype(F32)
    numbers = numbers[numbers < 1e30]
    x = np.random.default_rng(0).uniform(0, min(f.largest, 6), 40).astype(F32) * np.tile([1, -1], 20).astype(
        F32
    )
    x = np.concatenate([x, [0, f.smallest / 4, numbers[3]]]).astype(F32)
    n = 4000
    got = np.asarray(round_to(np.broadcast_to(x, (n, len(x))), f, rounding="stochastic", key=random.key(0)))
    i = np.searchsorted(numbers, np.abs(x), side="right").clip(1, len(numbers) - 1)
    low, high = numbers[i - 1], numbers[i]
    assert ((np.abs(got) == low) | (np.abs(got) == high)).all()
    chance = (np.abs(x) - low) / (high - low)
    error = np.abs((np.abs(got) == high).mean(0) - chance)
    assert (error <= 5 * np.sqrt(chance * (1 - chance) / n) + 1e-6).all()
    repeated = round_to(np.broadcast_to(x, (n, len(x))), f, rounding="stochastic", key=random.key(1))
    assert (np.asarray(repeated) != got).any()


# -- blocks ----------------------------------------------------------------------------------------


def mx(x, f, block, element):
    """MX along the last axis, by the specification, NumPy and ml_dtypes."""
    out = np.zeros_like(x)
    for index in np.ndindex(x.shape[:-1]):
        for at in range(0, x.shape[-1], block):
            part = x[index][at : at + block]
            top = np.abs(part).max()
            if top == 0:
                continue
            scale = np.float64(2.0) ** max(np.floor(np.log2(np.float64(top))) - f.most, -127)
            assert np.asarray(scale, ml_dtypes.float8_e8m0fnu).astype(np.float64) == scale
            values = np.clip(part / scale, -f.largest, f.largest).astype(F32).astype(element)
            out[index][at : at + block] = values.astype(np.float64) * scale
    return out


@pytest.mark.parametrize(
    "name", ["float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3fn", "float8_e5m2"]
)
@pytest.mark.parametrize("size", [32, 16])
def test_blocks_are_those_of_the_specification(name, size):
    f, element = FORMATS[name], np.dtype(getattr(ml_dtypes, name))
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((6, 80)) * np.exp2(rng.integers(-60, 60, (6, 1)))).astype(F32)
    x[0, :32], x[1, 3], x[2, 5] = 0, 1e-40, 1e38
    want = mx(x, f, size, element)
    np.testing.assert_array_equal(round_to(x, MX(f, size)), want)
    np.testing.assert_array_equal(bf.jit(lambda x: round_to(x, MX(f, size), axis=0))(x.T), want.T)


def test_blocks_of_empty_arrays():
    for shape in ((0, 40), (3, 0)):
        assert round_to(bnp.zeros(shape), MX(E2M1)).shape == shape


def test_scales_that_clip_nothing():
    x = np.array([[7.9, 1.0], [6.0, 1.0], [3.1, 0.5]], F32)
    np.testing.assert_array_equal(round_to(x, MX(E2M1, 2))[:, 0], [6, 6, 3])
    np.testing.assert_array_equal(round_to(x, MX(E2M1, 2, clip=False))[:, 0], [8, 6, 3])


# -- the transform ---------------------------------------------------------------------------------


def test_operands_and_gradients_are_rounded():
    rng = np.random.default_rng(0)
    x, w, ct = (rng.standard_normal(s).astype(F32) for s in ((6, 64), (64, 40), (6, 40)))
    f, g = MX(E2M1), MX(E3M2, 16)
    out, pullback = bf.vjp(emulate(bnp.matmul, f, gradients=g), x, w)
    rounded = lambda v, f: np.asarray(round_to(v, f), np.float64)
    np.testing.assert_allclose(out, rounded(x, f) @ rounded(w.T, f).T, rtol=1e-5, atol=1e-5)
    of_x, of_w = pullback(bnp.asarray(ct))
    np.testing.assert_allclose(of_x, rounded(ct, g) @ rounded(w, f).T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_w, rounded(x.T, f) @ rounded(ct.T, g).T, rtol=1e-5, atol=1e-5)


def test_the_format_of_the_operands_changes_nothing():
    """Results keep their dtype and precision, and so do gradients."""
    rng = np.random.default_rng(0)
    x, w = (bnp.asarray(rng.standard_normal(s).astype(F32)).astype("bfloat16") for s in ((6, 64), (64, 40)))
    wide = lambda x, w: bnp.matmul(x, w, preferred_element_type="float32")
    out, pullback = bf.vjp(emulate(wide, Format(8, 7), gradients=Format(8, 22)), x, w)
    want, right = bf.vjp(wide, x, w)
    np.testing.assert_array_equal(out, want)
    for got, of in zip(pullback(want), right(want), strict=True):
        assert got.dtype == of.dtype
        np.testing.assert_allclose(got.astype(F32), of.astype(F32), rtol=2**-7)
    exact = emulate(lambda x, w: bnp.matmul(x, w, precision="highest"), E4M3)
    assert "highest" in str(bf.make_jaxpr(bf.grad(lambda *a: exact(*a).sum()))(x, w))


def test_rounding_is_straight_through():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((6, 32)).astype(F32) * 1e-3, rng.standard_normal((32, 8)).astype(F32)
    for f in (E4M3, MX(E2M1)):
        for how in ({}, {"rounding": "stochastic", "key": random.key(0)}):
            slope = bf.jit(bf.grad(lambda x, f=f, how=how: bnp.sum(round_to(x, f, **how) * w[:, 0])))(x)
            np.testing.assert_array_equal(slope, np.broadcast_to(w[:, 0], x.shape))
    twice = lambda f: bf.grad(lambda w: bnp.sum(bf.grad(lambda w: bnp.sum(f(x, w) ** 2))(w) ** 2))(w)
    fine, plain = twice(emulate(bnp.matmul, Format(8, 20))), twice(bnp.matmul)
    np.testing.assert_allclose(fine, plain, rtol=1e-3, atol=1e-5 * np.abs(plain).max())


def chain(ws, x):
    h, _ = lax.scan(bf.checkpoint(lambda h, w: (bnp.tanh(h @ w), None)), x, ws)
    return bnp.sum((h @ ws[0]) ** 2)


def test_keys_of_matmuls_and_steps():
    """Keys are the only randomness, and steps have different ones."""
    rng = np.random.default_rng(0)
    ws, x = rng.standard_normal((3, 8, 8)).astype(F32) / 8, rng.standard_normal((4, 8)).astype(F32)
    noisy = bf.jit(emulate(chain, E4M3, gradients=E5M2, rounding="stochastic"))
    assert noisy(random.key(0), ws, x) == noisy(random.key(0), ws, x) != noisy(random.key(1), ws, x)
    grads = bf.jit(bf.vmap(bf.grad(noisy, 1), (0, None, None)))(random.split(random.key(2), 400), ws, x)
    want = np.asarray(bf.grad(chain)(ws, x))
    np.testing.assert_allclose(np.asarray(grads).mean(0), want, atol=0.05 * np.abs(want).max())
    same = np.broadcast_to(np.full((8, 8), 0.3, F32), (2, 8, 8))
    seen = emulate(
        lambda ws: lax.scan(lambda c, w: (c, bnp.eye(8) @ w), 0, ws)[1], E2M1, rounding="stochastic"
    )
    first, second = np.asarray(seen(random.key(0), same))
    assert (first != second).any() and set(np.unique(first)) == {0.0, 0.5}


def test_errors():
    x = bnp.ones((4, 32))
    for call, kind, message in (
        (lambda: Format(9, 3), errors.ValueRangeError, "no format"),
        (lambda: Format(1, 2), errors.ValueRangeError, "no format"),
        (lambda: MX(E2M1, 0), errors.ValueRangeError, "no format"),
        (lambda: round_to(x.astype("int32"), E2M1), errors.DtypeError, "int32"),
        (lambda: round_to(x, "float8"), errors.ArgumentError, "no format"),
        (lambda: round_to(x, E2M1, rounding="up"), errors.ArgumentError, "no rounding"),
        (lambda: round_to(x, E2M1, rounding="stochastic"), errors.ArgumentError, "needs a key"),
        (lambda: round_to(x, E2M1, key=random.key(0)), errors.ArgumentError, "takes no key"),
        (lambda: round_to(x[0, 0], MX(E2M1)), errors.AxisRangeError, "round_to: axis -1"),
        (lambda: Format(4, 3, bias=7.5), errors.ArgumentError, "bias is an int"),
        (lambda: emulate(bnp.matmul, None), errors.ArgumentError, "format is None"),
        (lambda: emulate(bnp.matmul, E2M1, where=3), errors.ArgumentError, "where is 3"),
        (
            lambda: emulate(bnp.matmul, E2M1, rounding="stochastic")(x, x.T),
            errors.ArgumentError,
            "is a random key",
        ),
        (
            lambda: emulate(lambda x: x, E2M1, rounding="stochastic")({}, x),
            errors.ArgumentError,
            "is a random key",
        ),
    ):
        with pytest.raises(kind, match=message):
            call()
    branch = lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w)
    with pytest.raises(errors.UnsupportedError, match="no key of its own"):
        emulate(branch, E2M1, rounding="stochastic")(random.key(0), x, x.T)
    np.testing.assert_array_equal(emulate(branch, E2M1)(x, x.T), x @ x.T)
