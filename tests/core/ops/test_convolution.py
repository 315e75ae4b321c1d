"""Convolutions and windows: padding, layouts, executor paths, reductions, errors."""

import itertools
import math

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ops import correlation
from blufunc.transforms.autodiff.grad import grad, jvp, vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit
from tests.op_table.windows import conv_ref
from tests.transforms.common import arr, close, draw

# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "padding, want",
    [
        ("VALID", [(0, 0), (0, 0)]),
        ("SAME", [(1, 2), (0, 1)]),
        ("SAME_LOWER", [(2, 1), (1, 0)]),
        ("same", [(1, 2), (0, 1)]),
    ],
)
def test_padtype_to_pads(padding, want):
    assert lax.padtype_to_pads((5, 6), (4, 3), (1, 2), padding) == want


def test_same_padding_divides_sizes_by_strides():
    for n, window, stride in itertools.product(range(1, 9), range(1, 5), range(1, 4)):
        x = bnp.ones((1, 1, n))
        out = lax.conv(x, bnp.ones((1, 1, window)), (stride,), "SAME")
        assert out.shape == (1, 1, -(-n // stride))


def test_dimension_numbers():
    d = lax.conv_dimension_numbers((1, 2, 3, 4), (1, 2, 3, 4), ("NHWC", "HWIO", "CNHW"))
    assert (d.lhs_spec, d.rhs_spec, d.out_spec) == ((0, 3, 1, 2), (3, 2, 0, 1), (1, 0, 2, 3))
    assert lax.conv_dimension_numbers((1, 2, 3), (1, 2, 3), d) is d
    plain = lax.conv_dimension_numbers((1, 2, 3), (1, 2, 3), None)
    assert plain.lhs_spec == plain.rhs_spec == plain.out_spec == (0, 1, 2)


@pytest.mark.parametrize(
    "layout", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("WNCH", "IHOW", "HCWN")]
)
def test_layouts_are_transpositions(layout):
    x, w = draw(2, 3, 5, 6), draw(4, 3, 2, 3)  # NCHW, OIHW
    plain = lax.conv(x, w, (1, 2), "SAME")
    place = lambda a, old, new: bnp.transpose(a, [old.index(c) for c in new])
    got = lax.conv_general_dilated(
        place(x, "NCHW", layout[0]), place(w, "OIHW", layout[1]), (1, 2), "SAME", dimension_numbers=layout
    )
    close(place(got, layout[2], "NCHW"), plain)


def test_results_of_another_dtype():
    x, w = bnp.ones((1, 1, 300), "int8"), bnp.ones((1, 1, 300), "int8")
    assert lax.conv(x, w, (1,), "VALID", preferred_element_type="int32").tolist() == [[[300]]]
    assert lax.conv(x, w, (1,), "VALID").tolist() == [[[300 - 256]]]
    half = lax.conv(bnp.ones((1, 1, 300), "bfloat16"), bnp.ones((1, 1, 300), "bfloat16"), (1,), "VALID")
    assert half.dtype == "bfloat16" and float(half[0, 0, 0]) == 300
    wide = lambda x: lax.conv(x, x[:, :, :2], (1,), "VALID", preferred_element_type="float32").sum()
    assert grad(wide)(bnp.ones((1, 1, 4), "bfloat16")).dtype == "bfloat16"


def test_precisions():
    x, w = draw(1, 2, 5), draw(3, 2, 2)
    want = lax.conv(x, w, (1,), "SAME")
    for precision in (lax.Precision.HIGHEST, "high", ("default", "highest"), [lax.Precision.HIGH, None]):
        close(lax.conv(x, w, (1,), "SAME", precision), want)
        assert lax.conv_general_dilated_local(
            x, draw(3, 4, 4), (1,), "VALID", (2,), precision=precision
        ).shape == (1, 3, 4)
    with pytest.raises(errors.ArgumentError):
        lax.conv(x, w, (1,), "SAME", "exact")


# -- the executor ----------------------------------------------------------------------------------

_CASES = {
    "features-last": ((2, 6, 7, 3), (3, 2, 3, 4), ("NHWC", "HWIO", "NHWC"), 1, 1),
    "features-first": ((2, 3, 6, 7), (4, 3, 3, 2), ("NCHW", "OIHW", "NCHW"), 1, 1),
    "depthwise": ((2, 6, 7, 4), (3, 2, 1, 8), ("NHWC", "HWIO", "NHWC"), 4, 1),
    "groups": ((2, 6, 7, 8), (3, 2, 4, 20), ("NHWC", "HWIO", "NHWC"), 2, 1),
    "batch-groups": ((4, 6, 7, 3), (3, 2, 3, 6), ("NHWC", "HWIO", "NHWC"), 1, 2),
}


@pytest.mark.parametrize("name", _CASES)
def test_large_windows_are_copied_in_pieces(name, monkeypatch):
    """Same result and gradients whether windows are copied at once or in pieces."""
    shape, kernel, layout, features, batches = _CASES[name]
    x, w = draw(*shape), draw(*kernel)
    f = lambda x, w: lax.conv_general_dilated(
        x,
        w,
        (2, 1),
        "SAME",
        dimension_numbers=layout,
        feature_group_count=features,
        batch_group_count=batches,
    )
    out, pullback = vjp(f, x, w)
    ct = draw(*out.shape, seed=3)
    whole = (out, *pullback(ct))
    pads = lax.padtype_to_pads((6, 7), (3, 2), (2, 1), "SAME")
    d = lax.conv_dimension_numbers(shape, kernel, layout)
    want = conv_ref(
        np.asarray(x), np.asarray(w), window_strides=(2, 1), padding=pads, lhs_dilation=(1, 1), rhs_dilation=(1, 1),
        dimension_numbers=d, feature_group_count=features, batch_group_count=batches,
    )  # fmt: skip
    close(out, arr(want))
    for limit in (1, 1000, 5000):
        monkeypatch.setattr(correlation, "_SCRATCH", limit)
        out, pullback = vjp(f, x, w)
        close((out, *pullback(ct)), whole)


def test_operands_are_read_in_any_order():
    x, w = draw(5, 3, 7, 2), draw(3, 4, 2, 3)
    f = lambda x, w: lax.conv(
        bnp.transpose(x, (3, 1, 0, 2))[:, :, ::-1], bnp.transpose(w, (1, 0, 3, 2)), (1, 1), "SAME"
    )
    copied = lax.conv(
        arr(np.ascontiguousarray(np.asarray(x).transpose(3, 1, 0, 2)[:, :, ::-1])),
        arr(np.ascontiguousarray(np.asarray(w).transpose(1, 0, 3, 2))),
        (1, 1),
        "SAME",
    )
    close(f(x, w), copied)
    close(jit(f)(x, w), copied)


# -- further convolutions --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stride, padding", [(1, "SAME"), (2, "SAME"), (3, "SAME"), (1, "VALID"), (2, "VALID"), (5, "VALID")]
)
def test_conv_transpose_reverses_shapes(stride, padding):
    x, w = draw(1, 4, 2), draw(3, 2, 5)
    out = lax.conv_transpose(x, w, (stride,), padding)
    assert out.shape == (1, 4 * stride if padding == "SAME" else 4 * stride + max(3 - stride, 0), 5)


def test_conv_transpose_is_the_gradient_of_a_convolution():
    w = draw(3, 2, 4, 5)
    layout = ("NHWC", "HWIO", "NHWC")
    pads = [(1, 1), (0, 1)]
    forward = lambda x: lax.conv_general_dilated(x, w, (2, 1), pads, dimension_numbers=layout)
    out, pullback = vjp(forward, draw(2, 5, 6, 4))
    ct = draw(*out.shape, seed=1)
    back = lax.conv_transpose(ct, w, (2, 1), pads, transpose_kernel=True, use_consistent_padding=True)
    close(back, pullback(ct)[0])


def test_patches_and_local_kernels():
    x = draw(2, 3, 6, 5)
    patches = lax.conv_general_dilated_patches(x, (2, 3), (2, 1), "VALID")
    assert patches.shape == (2, 18, 3, 3)
    for n, i, j in np.ndindex(2, 3, 3):
        close(patches[n, :, i, j], x[n, :, 2 * i : 2 * i + 2, j : j + 3].reshape(-1))
    w = draw(4, 18, 3, 3)
    local = lax.conv_general_dilated_local(x, w, (2, 1), "VALID", (2, 3))
    close(local, bnp.einsum("nkhw,okhw->nohw", patches, w), 1e-12)
    shared = draw(4, 3, 2, 3)
    same = bnp.broadcast_to(shared.reshape(4, 18, 1, 1), (4, 18, 3, 3))
    got = lax.conv_general_dilated_local(x, same, (2, 1), "VALID", (2, 3))
    close(got, lax.conv(x, shared, (2, 1), "VALID"))


def test_gradients_per_example():
    """``vmap`` of ``grad`` in the kernel: one group of features for each example."""
    x, w = draw(4, 5, 5, 2), draw(3, 3, 2, 3)
    f = lambda w, x: (
        lax.conv_general_dilated(x[None], w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) ** 2
    ).sum()
    each = vmap(grad(f), in_axes=(None, 0))(w, x)
    close(each, bnp.stack([grad(f)(w, x[i]) for i in range(4)]))
    close(jit(vmap(grad(f), in_axes=(None, 0)))(w, x), each)


# -- windows ---------------------------------------------------------------------------------------


def test_ties_of_extrema_go_to_the_first():
    x = arr([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    f = lambda x: lax.reduce_window(x, -math.inf, lax.max, (2, 2), (1, 1), "VALID")
    assert vjp(f, x)[1](arr([[1.0, 10.0]]))[0].tolist() == [[1, 10, 0], [0, 0, 0]]
    g = lambda x: lax.reduce_window(x, math.inf, lax.min, (2, 2), (1, 1), "VALID")
    assert vjp(g, x)[1](arr([[1.0, 10.0]]))[0].tolist() == [[0, 0, 10], [0, 1, 0]]


def test_nan_is_an_extremum():
    x = arr([0.0, np.nan, 3.0, 1.0])
    f = lambda x: lax.reduce_window(x, -math.inf, lax.max, (2,), (1,), "VALID")
    np.testing.assert_array_equal(np.asarray(f(x)), [np.nan, np.nan, 3])
    _, t = jvp(f, (x,), (arr([1.0, 2.0, 3.0, 4.0]),))
    assert t.tolist() == [2, 2, 3]


def test_padding_has_no_derivative():
    f = lambda x: lax.reduce_window(x, -math.inf, lax.max, (2,), (2,), [(3, 1)])
    x = arr([2.0, 1.0])
    assert f(x).tolist() == [-math.inf, 2, 1]
    assert vjp(f, x)[1](arr([5.0, 1.0, 2.0]))[0].tolist() == [1, 2]


_FUNCTIONS = {
    "add": (lax.add, 0, np.add),
    "mul": (lax.mul, 1, np.multiply),
    "max": (lax.max, -math.inf, np.maximum),
    "min": (lax.min, math.inf, np.minimum),
    "python": (lambda x, y: x + y, 0, np.add),
    "compound": (lambda x, y: x + y + x * y, 0, lambda x, y: x + y + x * y),
}


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_reduce_by_any_function(name):
    f, init, ref = _FUNCTIONS[name]
    x = draw(3, 5, 2)
    for axes in [(0,), (1,), (0, 2), (0, 1, 2), ()]:
        want = np.asarray(x)
        for a in sorted(axes, reverse=True):
            want = fold(ref, want, a)
        close(lax.reduce(x, init, f, axes), arr(want))
    assert grad(lambda x: lax.reduce(x, init, f, (0, 1, 2)))(x).shape == x.shape


def fold(ref, x, axis):
    """A sequential fold of the elements along an axis."""
    out = np.take(x, 0, axis)
    for i in range(1, x.shape[axis]):
        out = ref(out, np.take(x, i, axis))
    return out


@pytest.mark.parametrize("name", _FUNCTIONS)
@pytest.mark.parametrize(
    "slide",
    [((3,), (1,), [(0, 0)]), ((4,), (2,), [(1, 2)]), ((1,), (3,), [(0, 0)]), ((7,), (1,), [(0, 0)])],
)
def test_windows_by_any_function(name, slide):
    f, init, ref = _FUNCTIONS[name]
    x = draw(7)
    (window,), (stride,), ((low, high),) = slide
    padded = np.pad(np.asarray(x), (low, high), constant_values=init)
    want = [fold(ref, padded[i : i + window], 0) for i in range(0, len(padded) - window + 1, stride)]
    close(lax.reduce_window(x, init, f, *slide), arr(want))
    twice = vmap(lambda x: lax.reduce_window(x, init, f, *slide))(bnp.stack([x, 2 * x]))
    close(twice[0], arr(want))


def test_initial_values_join_once():
    x = bnp.asarray([1, 2, 3, 4])
    assert lax.reduce(x, 10, lax.add, (0,)).tolist() == 20
    assert lax.reduce(x, 3, lax.max, (0,)).tolist() == 4
    assert lax.reduce_window(x, 10, lax.add, (2,), (2,), [(1, 1)]).tolist() == [11, 15, 14]
    assert lax.reduce_window(x, 2, lax.mul, (2,), (2,), [(1, 1)]).tolist() == [2, 12, 8]
    assert lax.reduce(bnp.ones((0, 2)), 7.0, lambda x, y: x + y + x * y, (0,)).tolist() == [7, 7]


def test_logical_and_bitwise_functions():
    flags = bnp.asarray([True, False, True, True])
    assert lax.reduce(flags, True, lax.bitwise_and, (0,)).tolist() is False
    assert lax.reduce_window(flags, True, lax.bitwise_and, (2,), (1,), "VALID").tolist() == [
        False,
        False,
        True,
    ]
    assert lax.reduce_window(flags, False, lax.bitwise_or, (2,), (2,), [(1, 1)]).tolist() == [
        True,
        True,
        True,
    ]
    bits = bnp.asarray([1, 3, 6], "uint8")
    assert lax.reduce(bits, 0, lax.bitwise_xor, (0,)).tolist() == 4
    assert lax.reduce_window(bits, 255, lax.bitwise_and, (2,), (1,), [(1, 0)]).tolist() == [1, 1, 2]


def test_several_operands():
    """The position of the largest element, by a function of pairs."""

    def larger(a, b):
        (x, i), (y, j) = a, b
        keep = x >= y
        return bnp.where(keep, x, y), bnp.where(keep, i, j)

    x = draw(3, 6)
    i = bnp.broadcast_to(bnp.arange(6), (3, 6))
    value, at = lax.reduce((x, i), (-math.inf, -1), larger, (1,))
    assert at.tolist() == np.asarray(x).argmax(1).tolist()
    close(value, bnp.max(x, axis=1))
    value, at = lax.reduce_window((x, i), (-math.inf, -1), larger, (1, 3), (1, 3), "VALID")
    assert at.tolist() == [[int(row[k : k + 3].argmax()) + k for k in (0, 3)] for row in np.asarray(x)]


def test_functions_may_close_over_what_is_differentiated():
    x = draw(5)
    f = lambda c: lax.reduce(x, 0, lambda a, b: a + b + c * a * b, (0,))
    step = 1e-6
    want = (float(f(arr(0.3 + step))) - float(f(arr(0.3 - step)))) / (2 * step)
    np.testing.assert_allclose(float(grad(f)(arr(0.3))), want, rtol=1e-6)


# -- reduce_precision, bits ------------------------------------------------------------------------


def test_reduce_precision():
    x = bnp.asarray([1.00390625, 1e30, 65520.0, 65519.0, 6e-8, -0.0, math.inf, math.nan])
    got = np.asarray(lax.reduce_precision(x, 5, 10))
    np.testing.assert_array_equal(
        got, np.float32([1.00390625, np.inf, np.inf, 65504, 0, -0.0, np.inf, np.nan])
    )
    assert np.signbit(got[5])
    assert lax.reduce_precision(bnp.asarray([1.25, 1.75, -1.25]), 8, 1).tolist() == [1.0, 2.0, -1.0]


def test_bits_of_other_widths():
    x = bnp.asarray([1.0, -2.0])
    parts = lax.bitcast_convert_type(x, "uint8")
    assert parts.shape == (2, 4)
    assert lax.bitcast_convert_type(parts, "float32").tolist() == [1.0, -2.0]
    over_last = vmap(lambda p: lax.bitcast_convert_type(p, "float32"), in_axes=1)(parts.T)
    assert over_last.tolist() == [1.0, -2.0]


# -- errors ----------------------------------------------------------------------------------------

X, W = bnp.ones((2, 3, 5)), bnp.ones((4, 3, 2))

WRONG = {
    "rank": (lambda: lax.conv(X, bnp.ones((4, 3)), (1,), "VALID"), errors.ShapeError),
    "features": (lambda: lax.conv(X, bnp.ones((4, 2, 2)), (1,), "VALID"), errors.ShapeError),
    "dtypes": (lambda: lax.conv(X, W.astype("float16"), (1,), "VALID"), errors.DtypeError),
    "strides": (lambda: lax.conv(X, W, (1, 1), "VALID"), errors.ShapeError),
    "zero stride": (lambda: lax.conv(X, W, (0,), [(0, 0)]), errors.ValueRangeError),
    "padding name": (lambda: lax.conv(X, W, (1,), "SOME"), errors.ValueRangeError),
    "padding": (lambda: lax.conv(X, W, (1,), [1]), errors.ArgumentError),
    "padding of holes": (lambda: lax.conv_general_dilated(X, W, (1,), "SAME", (2,)), errors.UnsupportedError),
    "letters": (lambda: lax.conv_dimension_numbers(X.shape, W.shape, ("NCH", "OIW", "NCH")), errors.ShapeError),
    "two letters": (lambda: lax.conv_dimension_numbers(X.shape, W.shape, ("NCH", "OIH")), errors.ArgumentError),
    "groups": (lambda: lax.conv_general_dilated(X, W, (1,), "VALID", feature_group_count=2), errors.ShapeError),
    "both groups": (
        lambda: lax.conv_general_dilated(X, W, (1,), "VALID", feature_group_count=3, batch_group_count=2),
        errors.ShapeError,
    ),
    "transposed rank": (lambda: lax.conv_transpose(bnp.ones(3), W, (1,), "SAME"), errors.ShapeError),
    "window": (lambda: lax.reduce_window(X, 0.0, lax.add, (2,)), errors.ShapeError),
    "empty window": (lambda: lax.reduce_window(X, 0.0, lax.add, (0, 1, 1)), errors.ValueRangeError),
    "initial value": (lambda: lax.reduce_window(X, bnp.ones(2), lax.add, (1, 1, 1)), errors.ShapeError),
    "kind of initial value": (lambda: lax.reduce(bnp.arange(3), 0.5, lax.add, (0,)), errors.DtypeError),
    "function": (lambda: lax.reduce(X, 0.0, None, (0,)), errors.ArgumentError),
    "result": (lambda: lax.reduce(X, 0.0, lambda x, y: (x, y), (0,)), errors.TreeError),
    "kind of result": (lambda: lax.reduce(X, 0.0, lambda x, y: x > y, (0,)), errors.DtypeError),
    "trees": (lambda: lax.reduce((X, X), 0.0, lax.add, (0,)), errors.TreeError),
    "axes": (lambda: lax.reduce(X, 0.0, lax.add, (3,)), errors.ValueRangeError),
    "bits": (lambda: lax.reduce_precision(X, 0, 3), errors.ValueRangeError),
    "width": (lambda: lax.bitcast_convert_type(bnp.ones((2, 3), "int8"), "int32"), errors.ShapeError),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    call, error = WRONG[name]
    with pytest.raises(error) as caught:
        call()
    assert caught.value.where and "test_convolution.py" in caught.value.where and caught.value.fix


# -- against JAX -----------------------------------------------------------------------------------

_CONVOLUTIONS = {
    "same": ((2, 3, 6, 5), (4, 3, 3, 2), (1, 2), "SAME", {}),
    "same-lower": ((2, 3, 6, 5), (4, 3, 3, 2), (2, 2), "SAME_LOWER", {}),
    "dilated": ((1, 2, 7, 6), (3, 2, 2, 3), (1, 1), "VALID", {"rhs_dilation": (2, 2)}),
    "holes": ((1, 2, 4, 3), (3, 2, 2, 3), (2, 1), [(1, 2), (0, -1)], {"lhs_dilation": (2, 3)}),
    "groups": ((2, 6, 5, 4), (9, 2, 2, 2), (1, 1), "SAME", {"feature_group_count": 3}),
    "batch-groups": ((4, 2, 5, 4), (6, 2, 2, 2), (1, 2), "SAME", {"batch_group_count": 2}),
    "features-last": ((2, 6, 5, 3), (3, 2, 3, 4), (1, 1), "SAME", {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}),
    "one-axis": ((2, 3, 6), (4, 3, 3), (2,), "SAME", {}),
    "no-axis": ((2, 3), (4, 3), (), "VALID", {}),
}  # fmt: skip


def _same_as_jax(ours, theirs, args, rtol):
    """Values and cotangents."""
    import jax

    out, pullback = vjp(ours, *map(from_numpy, args))
    want, their_pullback = jax.vjp(theirs, *args)
    ct = np.random.default_rng(5).standard_normal(out.shape).astype(out.dtype)
    for g, w in zip((out, *pullback(from_numpy(ct))), (want, *their_pullback(ct)), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=rtol, atol=rtol)


@pytest.mark.peer
@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128"])
@pytest.mark.parametrize("name", _CONVOLUTIONS)
def test_convolutions_against_jax(name, dtype):
    jax = pytest.importorskip("jax")
    x, w, strides, padding, options = _CONVOLUTIONS[name]
    rng = np.random.default_rng(7)
    args = [rng.standard_normal(s) + (1j * rng.standard_normal(s) if "c" in dtype else 0) for s in (x, w)]
    with jax.enable_x64(True):
        _same_as_jax(
            lambda x, w: lax.conv_general_dilated(x, w, strides, padding, **options),
            lambda x, w: jax.lax.conv_general_dilated(x, w, strides, padding, **options),
            [a.astype(dtype) for a in args],
            1e-5 if dtype == "float32" else 1e-12,
        )


@pytest.mark.peer
@pytest.mark.parametrize("padding", ["SAME", "VALID", [(1, 2), (0, 1)]], ids=str)
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize(
    "options", [{}, {"transpose_kernel": True}, {"use_consistent_padding": True}], ids=str
)
def test_transposed_convolutions_against_jax(padding, stride, options):
    jax = pytest.importorskip("jax")
    x = np.asarray(draw(2, 4, 3, 3), np.float32)
    w = np.asarray(draw(3, 2, 3, 3), np.float32)
    got = lax.conv_transpose(from_numpy(x), from_numpy(w), (stride, 1), padding, **options)
    want = np.asarray(jax.lax.conv_transpose(x, w, (stride, 1), padding, **options))
    assert got.shape == want.shape
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-5)


@pytest.mark.peer
def test_patches_against_jax():
    jax = pytest.importorskip("jax")
    x = np.asarray(draw(2, 6, 5, 3), np.float32)
    options = {"rhs_dilation": (1, 2), "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    got = lax.conv_general_dilated_patches(from_numpy(x), (3, 2), (2, 1), "SAME", **options)
    want = jax.lax.conv_general_dilated_patches(x, (3, 2), (2, 1), "SAME", **options)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-6)


_WINDOWS = {
    "pairs": ((2, 2), (2, 2), "VALID"),
    "overlapping": ((3, 2), (1, 2), "SAME"),
    "padded": ((2, 3), (2, 1), [(1, 0), (2, 1)]),
}


@pytest.mark.peer
@pytest.mark.parametrize("name", ["add", "max", "min"])
@pytest.mark.parametrize("slide", _WINDOWS)
def test_windows_against_jax(name, slide):
    """With many ties, whose derivative goes to the same element."""
    jax = pytest.importorskip("jax")
    x = np.random.default_rng(2).integers(-2, 3, (6, 7)).astype(np.float64)
    init = {"add": 0.0, "max": -math.inf, "min": math.inf}[name]
    with jax.enable_x64(True):
        _same_as_jax(
            lambda x: lax.reduce_window(x, init, getattr(lax, name), *_WINDOWS[slide]),
            lambda x: jax.lax.reduce_window(x, init, getattr(jax.lax, name), *_WINDOWS[slide]),
            [x],
            1e-14,
        )


@pytest.mark.peer
@pytest.mark.parametrize("bits", [(8, 7), (5, 10), (4, 3), (2, 1), (1, 0), (8, 23), (11, 52)])
def test_reduce_precision_against_jax(bits):
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng(0)
    x = rng.standard_normal(500) * np.exp(rng.uniform(-80, 80, 500))
    with jax.enable_x64(True):
        for dtype in (np.float64, np.float32):
            got = np.asarray(lax.reduce_precision(from_numpy(x.astype(dtype)), *bits))
            np.testing.assert_array_equal(got, np.asarray(jax.lax.reduce_precision(x.astype(dtype), *bits)))
