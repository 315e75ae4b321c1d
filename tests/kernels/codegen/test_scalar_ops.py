"""C expressions of primitives: each dtype, compiled, against its ``impl``."""

import ctypes

import numpy as np
import pytest

from blufunc.core.arrays.errstate import ignoring_fp_errors
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops import integers, special
from blufunc.core.primitives.kinds import TYPES, Elementwise
from blufunc.core.primitives.linear_ops import add_any_p
from blufunc.kernels.backends.cpu import renderer, toolchain
from blufunc.kernels.codegen import scalar_ops
from blufunc.kernels.codegen.source_files import HOST
from blufunc.kernels.loopir.index import Range, of
from blufunc.kernels.loopir.ir import Buffer, Kernel, Store, apply, load

F32, F64, I32, U8, BOOL = dtypes.float32, dtypes.float64, dtypes.int32, dtypes.uint8, dtypes.bool_
BF16, C64 = dtypes.bfloat16, dtypes.complex64
DTYPES = [d for d in scalar_ops.STORAGE if d != dtypes.key]
N = 192

UNWRITTEN = {
    "gamma", "gammasgn", "digamma", "polygamma", "zeta", "betaln", "poch", "igamma", "igammac", "igamma_grad_a",
    "random_gamma_grad", "regularized_incomplete_beta", "bessel_i0e", "bessel_i1e", "expi", "exp1", "expn", "spence",
    "erfcx", "dawsn", "log_ndtr", "ndtri", "lgamma",
}  # fmt: skip
"""Primitives that are left to SciPy."""

PARAMS = {
    "integer_pow": [{"y": y} for y in (0, 1, 2, 3, 4, 6, 7, 8, 13, -1, -2)],
    "reduce_precision": [{"exponent_bits": e, "mantissa_bits": m} for e, m in ((8, 7), (4, 2))],
    "convert": [{"dtype": d} for d in DTYPES],
    "bitcast": [{"dtype": d} for d in DTYPES if d != BOOL],
}
ARITY = dict.fromkeys(
    """add sub mul div rem max min pow atan2 nextafter eq ne lt le gt ge and or xor shift_left shift_right_logical
    shift_right_arithmetic complex gcd logaddexp hypot add_any""".split(),
    2,
) | {"clamp": 3, "select": 3}


def primitives():
    """Every elementwise primitive of the core."""
    found = [
        p for module in (ew, integers, special) for p in vars(module).values() if isinstance(p, Elementwise)
    ]
    return list(dict.fromkeys([*found, add_any_p]))


def operands(prim, dtype):
    """The dtypes of operands."""
    first = [BOOL] if prim is ew.select_p else []
    return first + [dtype] * (ARITY.get(prim.name, 1) - len(first))


def takes(prim, dtype, params):
    """Whether the primitive itself is defined there."""
    if not TYPES[getattr(prim, "types", "number")][1](dtype) or (dtypes.is_narrow(dtype) and prim.widens):
        return False
    if prim is ew.bitcast_p:
        return dtype != BOOL and dtypes.bits_of(params["dtype"]) == dtypes.bits_of(dtype)
    return not (prim is ew.integer_pow_p and params["y"] < 0 and dtypes.is_integer(dtype))


def sample(dtype, seed):
    """Random numbers among which are the ends of the range, zeros, infinities and NaN."""
    rng = np.random.default_rng(seed)
    if dtypes.is_bool(dtype):
        return rng.integers(0, 2, N).astype(bool)
    if dtypes.is_integer(dtype):
        info = dtypes.iinfo(dtype)
        x = rng.integers(-9 if info.min < 0 else 0, 12, N).astype(dtype)
        x[rng.permutation(N)[:8]] = [info.min, info.max, info.min + 1, info.max - 1, 0, 1, 2, info.max]
        return x
    if dtypes.is_complex(dtype):
        return (rng.standard_normal(N) + 1j * rng.standard_normal(N)).astype(dtype)
    x = rng.standard_normal(N).astype(dtype)
    x[rng.permutation(N)[:13]] = np.array(
        [0, -0.0, 1, -1, 0.5, 2, np.inf, -np.inf, np.nan, 3, -3, 90, -90], dtype
    )
    return x


@pytest.fixture(scope="module")
def compiler():
    found = toolchain.find()
    if found is None:
        pytest.skip("this machine has no C++ compiler")
    return found


@pytest.mark.second
@pytest.mark.parametrize("dtype", DTYPES, ids=dtypes.short_name)
def test_against_numpy(compiler, dtype):
    """All primitives at one dtype, as one kernel with an output for each."""
    i = Range("i", N)
    x = {(d, j): Buffer(f"x{j}_{dtypes.short_name(d)}", d, N) for d in {dtype, BOOL} for j in range(3)}
    arrays = {b: sample(b.dtype, n) for n, b in enumerate(x.values())}
    rows = []
    for prim in primitives():
        for params in PARAMS.get(prim.name, [{}]):
            in_dtypes = operands(prim, dtype)
            if not takes(prim, dtype, params) or not scalar_ops.known(prim, params, in_dtypes):
                continue
            out = prim.typed(tuple(ShapedArray((), d) for d in in_dtypes), params).dtype
            ins = [x[d, j] for j, d in enumerate(in_dtypes)]
            y = Buffer(f"y{len(rows)}", out, N, written=True)
            arrays[y] = np.zeros(N, out)
            rows.append((prim, params, ins, y))
    stores = [
        Store(y, of(i), apply(prim, [load(b, of(i)) for b in ins], params, y.dtype))
        for prim, params, ins, y in rows
    ]
    kernel = Kernel("scalars", tuple(arrays), (i,), tuple(stores))
    library = compiler.compile(renderer.render(kernel), f"scalars of {dtype}")
    library.scalars((ctypes.c_void_p * len(arrays))(*[a.ctypes.data for a in arrays.values()]), 1)
    for prim, params, ins, y in rows:
        want = np.asarray(
            ignoring_fp_errors(lambda p=prim, q=params, b=ins: p.impl(*[arrays[x] for x in b], **q))
        )
        compare(prim, params, arrays[y], want, [arrays[b] for b in ins])


def compare(prim, params, got, want, ins):
    """Equal for integers, within a few ulp for floats."""
    shown = f"{prim} {params} of {ins[0].dtype}"
    if prim is ew.bitcast_p and dtypes.is_floating(ins[0].dtype):  # there are many NaN
        got, want = (np.where(np.isnan(ins[0].astype(F64)), a.dtype.type(0), a) for a in (got, want))
    if not dtypes.is_inexact(got.dtype):
        np.testing.assert_array_equal(got, want, err_msg=shown)
        return
    eps = float(dtypes.finfo(got.dtype).eps)
    wide = np.complex128 if dtypes.is_complex(got.dtype) else F64
    with np.errstate(invalid="ignore"):  # of bits there may be signalling NaN
        got, want = got.astype(wide), want.astype(wide)
    fine = np.ones(N, bool)
    if prim is ew.complex_p:
        fine = np.isfinite(ins[1])  # by multiplication with i, NumPy makes NaN of infinite imaginary parts
    if prim is ew.logistic_p or prim is ew.integer_pow_p:
        # the definition's own steps overflow or are rounded in 8 bits
        fine = np.full(N, dtypes.finfo(ins[0].dtype).bits > 8)
    np.testing.assert_allclose(got[fine], want[fine], rtol=6 * eps, atol=2 * eps, err_msg=shown)


@pytest.mark.parametrize("prim", primitives(), ids=str)
def test_every_primitive_is_known_or_left_out_on_purpose(prim):
    missing = [
        dtypes.short_name(d)
        for d in DTYPES
        for params in PARAMS.get(prim.name, [{}])
        if takes(prim, d, params) and not scalar_ops.known(prim, params, operands(prim, d))
    ]
    if prim is ew.bitcast_p:  # of complex numbers there is one bitcast, to themselves
        missing = [d for d in missing if d not in ("c64", "c128", "f64", "i64", "u64")]
    assert bool(missing) == (prim.name in UNWRITTEN), missing


def test_the_users_own_primitives():
    """Known if they are a ufunc that the core knows, and nothing else is changed."""
    mine = Elementwise("mine", np.tanh, "inexact")
    assert scalar_ops.known(mine, {}, [F32])
    assert scalar_ops.expression(mine, {}, [F32], F32, ["x"]) == "bf_tanh(x)"
    assert not scalar_ops.known(Elementwise("tanh", lambda x: x, "inexact"), {}, [F32])
    assert not scalar_ops.known(Elementwise("odd", np.tanh, "inexact", out=BOOL), {}, [F32])
    assert not scalar_ops.known(type("Sub", (Elementwise,), {})("sub", np.subtract, "number"), {}, [F32, F32])


@pytest.mark.parametrize(
    ("prim", "dtype", "args", "text"),
    [
        (ew.add_p, F32, ["x", "(y * z)"], "x + (y * z)"),
        (ew.add_p, I32, ["x", "y"], "int32_t(uint32_t(x) + uint32_t(y))"),
        (ew.add_p, BF16, ["x", "y"], "round_to<bf16>(x + y)"),
        (ew.neg_p, BF16, ["x"], "-x"),
        (ew.max_p, F32, ["(x + y)", "z"], "bf_max(x + y, z)"),
        (ew.max_p, BOOL, ["x", "(y == z)"], "bool(x | (y == z))"),
        (ew.exp_p, F32, ["(-x)"], "bf_exp(-x)"),
        (ew.select_p, F32, ["p", "x", "y"], "p ? x : y"),
        (ew.nextafter_p, BF16, ["x", "y"], "to_float(bf_nextafter(from_float<bf16>(x), from_float<bf16>(y)))"),
        (ew.complex_p, F32, ["x", "y"], "c64{x, y}"),
    ],
    ids=lambda v: v.name if isinstance(v, Elementwise) else None,
)  # fmt: skip
def test_expressions(prim, dtype, args, text):
    in_dtypes = operands(prim, dtype)
    out = prim.typed(tuple(ShapedArray((), d) for d in in_dtypes), {}).dtype
    assert scalar_ops.expression(prim, {}, in_dtypes, out, args) == text


@pytest.mark.parametrize(
    ("y", "dtype", "text"),
    [
        (0, F32, "1.0f"),
        (3, F32, "x * (x * x)"),
        (4, F32, "(x * x) * (x * x)"),
        (-2, F32, "1.0f / (x * x)"),
        (9, F32, "bf_pow(x, 9.0f)"),
        (2, U8, "uint8_t(uint32_t(x) * uint32_t(x))"),
    ],
)  # fmt: skip
def test_integer_powers(y, dtype, text):
    assert scalar_ops.expression(ew.integer_pow_p, {"y": y}, [dtype], dtype, ["x"]) == text


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (0.1, F32, "0.1f"), (0.1, F64, "0.1"), (1, F32, "1.0f"), (-0.0, F32, "-0.0f"), (1e-30, F32, "1.0e-30f"),
        (16777216, F32, "16777216.0f"), (3e38, F32, "3.0e+38f"), (np.inf, F32, "INFINITY"),
        (-np.inf, F64, "double(-INFINITY)"), (np.nan, F32, "NAN"), (0.1, BF16, "0.100097656f"), (True, BOOL, "true"),
        (-(2**31), I32, "(-2147483647 - 1)"), (7, U8, "uint8_t(7)"), (7, dtypes.uint32, "7u"),
        (-(2**63), dtypes.int64, "int64_t(-9223372036854775807LL - 1)"), (1 - 2j, C64, "c64{1.0f, -2.0f}"),
    ],
)  # fmt: skip
def test_literals(value, dtype, text):
    assert scalar_ops.literal(np.asarray(value, dtype)[()], dtype) == text


def test_literals_are_exact():
    x = np.random.default_rng(0).integers(0, 1 << 32, 2000, np.uint32).view(np.float32)
    x = x[np.isfinite(x)]
    assert [np.float32(scalar_ops.literal(v, F32)[:-1]) for v in x] == list(x)


def test_what_expressions_need_is_in_the_prelude():
    for prim in primitives():
        for params in PARAMS.get(prim.name, [{}]):
            for dtype in DTYPES:
                in_dtypes = operands(prim, dtype)
                if takes(prim, dtype, params) and scalar_ops.known(prim, params, in_dtypes):
                    out = prim.typed(tuple(ShapedArray((), d) for d in in_dtypes), params).dtype
                    args = [f"x{i}" for i in range(len(in_dtypes))]
                    text = scalar_ops.expression(prim, params, in_dtypes, out, args)
                    assert scalar_ops.helpers(text) <= HOST.names


def test_costs_are_ordered():
    """Movement is free; then come sums, divisions, exponentials and powers."""
    costs = [p.cost for p in (ew.copy_p, ew.add_p, ew.div_p, ew.exp_p, ew.pow_p)]
    assert costs == sorted(set(costs))
    assert Elementwise("mine", np.exp, "inexact").cost == ew.exp_p.cost
