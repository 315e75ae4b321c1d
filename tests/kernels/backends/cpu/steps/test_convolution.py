"""Native convolutions against the same programs as NumPy calls."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.kernels.backends.cpu import toolchain
from blufunc.kernels.backends.cpu.steps import convolution
from blufunc.kernels.backends.cpu.steps.forms import form_of, has_form
from tests.kernels.backends.cpu.two_ways import by_both

pytestmark = pytest.mark.skipif(toolchain.find() is None, reason="this machine has no C++ compiler")

NHWC, NWC, NDHWC = ("NHWC", "HWIO", "NHWC"), ("NWC", "WIO", "NWC"), ("NDHWC", "DHWIO", "NDHWC")
SAME = ((1, 1), (1, 1))
CASES = {  # shapes of operands, strides, padding, and other parameters
    "3 x 3": ((2, 8, 16, 16), (20, 8, 3, 3), (1, 1), SAME, {}),
    "3 x 3, features last": ((2, 16, 16, 8), (3, 3, 8, 20), (1, 1), SAME, {"dimension_numbers": NHWC}),
    "many features": ((2, 9, 9, 40), (3, 3, 40, 200), (1, 1), SAME, {"dimension_numbers": NHWC}),
    "one input feature": ((2, 28, 28, 1), (5, 5, 1, 16), (1, 1), "VALID", {"dimension_numbers": NHWC}),
    "one output feature": ((2, 12, 12, 32), (3, 3, 32, 1), (1, 1), SAME, {"dimension_numbers": NHWC}),
    "strides": ((2, 12, 16, 16), (9, 12, 3, 3), (2, 2), SAME, {}),
    "strides, features last": ((2, 15, 16, 3), (7, 7, 3, 8), (2, 3), ((3, 3), (2, 4)), {"dimension_numbers": NHWC}),
    "depthwise": ((2, 20, 9, 40), (20, 1, 3, 3), (1, 1), SAME, {"feature_group_count": 20}),
    "depthwise, features last": (
        (2, 9, 10, 40), (3, 3, 1, 40), (1, 1), SAME, {"dimension_numbers": NHWC, "feature_group_count": 40},
    ),
    "two outputs of each feature": (
        (2, 9, 10, 20), (3, 3, 1, 40), (1, 1), SAME, {"dimension_numbers": NHWC, "feature_group_count": 20},
    ),
    "groups": ((2, 8, 9, 9), (12, 2, 3, 3), (1, 1), SAME, {"feature_group_count": 4}),
    "groups of the batch": ((6, 4, 9, 9), (12, 4, 3, 3), (1, 1), SAME, {"batch_group_count": 3}),
    "causal": ((2, 40, 16), (5, 16, 16), (1,), ((4, 0),), {"dimension_numbers": NWC}),
    "dilated kernel": (
        (2, 16, 16, 4), (3, 3, 4, 4), (1, 1), ((2, 2), (2, 2)), {"dimension_numbers": NHWC, "rhs_dilation": (2, 2)},
    ),
    "dilated operand": (
        (2, 8, 8, 8), (3, 3, 8, 4), (1, 1), ((1, 2), (1, 2)), {"dimension_numbers": NHWC, "lhs_dilation": (2, 2)},
    ),
    "holes wider than the kernel": ((1, 2, 5), (3, 2, 2), (1,), ((1, 4),), {"lhs_dilation": (4,)}),
    "cropped": ((2, 3, 12, 12), (4, 3, 3, 3), (1, 1), ((-2, 1), (0, -3)), {}),
    "padding alone": ((1, 2, 3, 3), (2, 2, 2, 2), (3, 1), ((6, 6), (0, 0)), {}),
    "3 axes": ((1, 4, 6, 7, 8), (5, 4, 3, 3, 3), (1, 1, 1), ((1, 1),) * 3, {}),
    "3 axes, features last": ((1, 6, 7, 8, 4), (3, 3, 3, 4, 5), (1, 2, 1), ((1, 1),) * 3, {"dimension_numbers": NDHWC}),
    "no windows": ((2, 3, 2, 2), (4, 3, 3, 3), (1, 1), "VALID", {}),
    "no batch": ((0, 3, 5, 5), (4, 3, 3, 3), (1, 1), SAME, {}),
    "no features": ((2, 0, 5, 5), (4, 0, 3, 3), (1, 1), SAME, {}),
}  # fmt: skip


def draw(shape, dtype="float32"):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def with_gradients(fun):
    def call(x, w, ct):
        y, pullback = bf.vjp(fun, x, w)
        return (y, *pullback(ct))

    return call


def close(fun, *args, native=True):
    """Compare NumPy calls with the compiled program."""
    for want, got in by_both(fun, *args, native=native):
        scale = np.abs(want[np.isfinite(want)]).max(initial=1)
        np.testing.assert_allclose(
            got, want, rtol=0, atol=(2e-5 if want.dtype == np.float32 else 1e-13) * scale
        )


def check(x, w, strides, padding, options):
    """Values and both gradients."""
    fun = lambda x, w: lax.conv_general_dilated(x, w, strides, padding, **options)
    y = np.asarray(fun(bnp.asarray(x), bnp.asarray(w)))
    close(with_gradients(fun), x, w, draw(y.shape, x.dtype), native=bool(x.size and y.size))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_cases(name, dtype):
    x, w, strides, padding, options = CASES[name]
    check(draw(x, dtype), draw(w, dtype), strides, padding, options)


def laid_out(spec, sizes):
    return tuple(n for _, n in sorted(zip(spec, sizes, strict=True)))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(60))
def test_random(seed):
    rng = np.random.default_rng(seed)
    some = lambda *choices: int(rng.choice(choices))
    ndim = some(1, 2, 2, 3)
    axes = range(ndim)
    groups, c, o = some(1, 1, 1, 2, 3), some(1, 2, 3, 8, 17, 20), some(1, 2, 3, 7, 33, 40)
    if seed % 4 == 0:
        groups, c, o = some(8, 16, 33, 40), 1, some(1, 1, 2)
    feature_groups, batch_groups = (1, groups) if seed % 5 == 0 else (groups, 1)
    sizes = [some(*range(1, (30, 14, 7)[ndim - 1])) for _ in axes]
    kernel = [some(1, 2, 3, 4) for _ in axes]
    specs = [tuple(map(int, rng.permutation(ndim + 2))) for _ in range(3)]
    dtype = ("float32", "float64")[seed % 2]
    x = draw(laid_out(specs[0], [some(1, 2, 3) * batch_groups, c * feature_groups, *sizes]), dtype)
    w = draw(laid_out(specs[1], [o * groups, c, *kernel]), dtype)
    options = {
        "lhs_dilation": [some(1, 1, 2, 3) for _ in axes],
        "rhs_dilation": [some(1, 1, 2, 3) for _ in axes],
        "dimension_numbers": lax.ConvDimensionNumbers(*specs),
        "feature_group_count": feature_groups,
        "batch_group_count": batch_groups,
    }
    padding = [(some(*range(-2, 5)), some(*range(-2, 5))) for _ in axes]
    check(x, w, [some(1, 2, 3) for _ in axes], padding, options)


def test_operands_with_strides():
    x, w = draw((2, 9, 20, 8)), draw((8, 12, 3, 3))
    conv = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), SAME)
    close(
        lambda x, w: conv(x.transpose(0, 3, 1, 2)[:, :, ::-1, ::2], w.transpose(1, 0, 2, 3)[..., ::-1]), x, w
    )


def test_in_a_loop():
    x, w = draw((2, 10, 10, 8)), draw((3, 3, 8, 8)) / 10

    def loss(x, w):
        step = lambda x, _: (
            bnp.tanh(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)),
            x[0, 0],
        )
        y, seen = lax.scan(step, x, None, length=4)
        return (y**2).sum() + seen.sum()

    close(loss, x, w)
    close(bf.grad(loss, (0, 1)), x, w)


def equation(x, w, **options):
    fun = lambda x, w: lax.conv_general_dilated(
        x, w, **{"window_strides": (1, 1), "padding": SAME, **options}
    )
    (eqn,) = bf.make_jaxpr(fun)(bf.ShapeDtypeStruct(*x), bf.ShapeDtypeStruct(*w)).eqns
    return eqn


def test_what_has_a_form():
    shapes = (2, 3, 8, 8), (4, 3, 3, 3)
    assert has_form(equation(*((s, np.float32) for s in shapes)))
    assert not has_form(equation(*((s, np.complex64) for s in shapes)))
    assert not has_form(equation(*((s, np.float16) for s in shapes)))
    assert not has_form(equation(*((s, np.float32) for s in shapes), preferred_element_type=np.float64))
    assert not has_form(equation(*((s, np.float32) for s in shapes), lhs_dilation=(9, 9)))  # too many slides


def slide_of(eqn):
    """The first slide by field names: its method, parts and so on."""
    models = [np.empty(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    names = [
        *(
            "groups",
            "x_group",
            "w_group",
            "out_group",
            "batches",
            "x_batch",
            "out_batch",
            "features",
            "w_feature",
        ),
        *(
            "out_feature",
            "x",
            "w",
            "out",
            "method",
            "direct",
            "lines",
            "positions",
            "block",
            "terms",
            "feature_block",
        ),
        *("parts", "part", "packed", "sums"),
    ]
    parameters = form_of(eqn).parameters(models)
    return dict(zip(names, parameters[4 + parameters[3] + 1 :], strict=False))


def test_methods():
    f32 = np.float32
    of = lambda x, w, **options: slide_of(equation((x, f32), (w, f32), **options))
    assert of((8, 32, 32, 32), (64, 32, 3, 3))["method"] == convolution._BY_COLUMNS
    features_last = of((8, 32, 32, 32), (3, 3, 32, 64), dimension_numbers=NHWC)
    assert (features_last["method"], features_last["direct"]) == (convolution._BY_ROWS, 1)
    one = of((8, 32, 32, 32), (3, 3, 32, 1), dimension_numbers=NHWC)
    assert one["method"] == convolution._BY_TERMS
    depthwise = of((8, 32, 32, 32), (3, 3, 1, 32), dimension_numbers=NHWC, feature_group_count=32)
    assert depthwise["method"] == convolution._BY_GROUPS
    # the gradient in the kernel: few results, each a long sum
    gradient = of((8, 32, 32, 32), (32, 32, 64, 8), dimension_numbers=("CHWN", "HWOI", "HWNC"))
    assert gradient["parts"] > 1


def test_slides_of_a_dilated_operand():
    """Each result sees the elements of the kernel that meet elements of the operand."""
    for n, kernel, stride, low, holes, dilation in [
        (9, 3, 1, 1, 2, 1), (9, 4, 2, 3, 3, 2), (5, 1, 1, 0, 4, 1), (7, 3, 2, -1, 2, 3), (6, 5, 3, 2, 6, 4)
    ]:  # fmt: skip
        seen = set()
        for taps in convolution.phases(n, kernel, stride, low, holes, dilation):
            (m, first, every), (k, tap, apart) = taps.positions, taps.taps
            for i in range(m):
                for j in range(k):
                    seen.add(
                        (
                            first + every * i,
                            tap + apart * j,
                            taps.start + i * taps.steps[0] + j * taps.steps[1],
                        )
                    )
        assert seen == {
            (y, k, (y * stride - low + k * dilation) // holes)
            for y in range(n)
            for k in range(kernel)
            if (y * stride - low + k * dilation) % holes == 0
        }
