"""Calls to compare with JAX one by one: values, dtypes, weak types, exceptions.

In: names of functions by their signatures, and arguments by dtype, shape and option. Out: ``CALLS``, texts such as
``np.sum(f2, axis=1)`` over the names of ``ARGUMENTS`` and of the two libraries. Wrong arguments are among them.
"""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np

_RNG = np.random.default_rng(5)
_F2 = _RNG.uniform(-2, 2, (3, 4)).astype(np.float32)

ARGUMENTS = {
    "f1": np.array([0.5, -1.25, 2.0, 0.0], np.float32),
    "f2": _F2,
    "f3": _RNG.uniform(-2, 2, (2, 3, 2)).astype(np.float32),
    "f0": np.float32(0.75),
    "e1": np.zeros((0,), np.float32),
    "h1": np.array([0.5, -1.25, 2.0, 0.0], np.float16),
    "b1": np.array([0.5, -1.25, 2.0, 0.0], ml_dtypes.bfloat16),
    "i1": np.array([3, -1, 2, 0], np.int32),
    "i2": np.array([[3, -1, 2, 0], [5, 5, 1, -7], [2, 2, 2, 9]], np.int32),
    "s1": np.array([3, -1, 2, 0], np.int8),
    "u1": np.array([3, 1, 2, 0], np.uint8),
    "w1": np.array([3, 1, 2, 0], np.uint32),
    "t1": np.array([True, False, True, True]),
    "t2": _F2 > 0,
    "c1": np.array([1 + 2j, -0.5j, 0.25, -1 - 1j], np.complex64),
    "p1": np.array([0.25, 0.5, 0.75, 0.9], np.float32),
    "n1": np.array([np.nan, np.inf, -np.inf, -0.0], np.float32),
    "e2": np.zeros((0, 3), np.float32),
    "m2": np.array([[4.0, 1.0, 0.5], [1.0, 3.0, 0.25], [0.5, 0.25, 2.0]], np.float32),
}
"""Arrays by name: the letter says the dtype, the digit the rank."""

_UNARY = """
    abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh bitwise_count
    bitwise_invert bitwise_not cbrt ceil conj conjugate cos cosh deg2rad degrees exp exp2 expm1 fabs fix floor frexp i0
    imag invert iscomplex iscomplexobj isfinite isinf isnan isneginf isposinf isreal isrealobj log log10 log1p log2
    logical_not modf nan_to_num negative positive rad2deg radians real reciprocal rint round sign signbit sin sinc
    sinh spacing sqrt square tan tanh trunc unwrap ravel transpose atleast_1d atleast_2d atleast_3d copy zeros_like
    ones_like empty_like size ndim shape squeeze sort argsort flip fliplr flipud ediff1d diff cumsum cumprod
    unique trim_zeros diag diagflat nonzero argwhere flatnonzero count_nonzero median average
""".split()

_BINARY = """
    add arctan2 atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor copysign divide divmod
    equal float_power floor_divide fmax fmin fmod gcd greater greater_equal heaviside hypot lcm ldexp left_shift less
    less_equal logaddexp logaddexp2 logical_and logical_or logical_xor maximum minimum mod multiply nextafter not_equal
    pow power remainder right_shift subtract true_divide allclose isclose array_equal array_equiv dot inner outer
    polyadd polymul polysub
""".split()

_REDUCTIONS = """
    all amax amin any argmax argmin count_nonzero max mean median min nanargmax nanargmin nanmax nanmean nanmedian
    nanmin nanprod nanstd nansum nanvar prod ptp std sum var
""".split()

_LINES = "sort argsort cumsum cumprod nancumsum nancumprod flip unwrap diff softmax".split()

_SCIPY = """
    bernoulli_ digamma entr erf erfc erfinv exp1 expi expit gamma gammaln i0 i0e i1 i1e log_ndtr log_softmax logit
    logsumexp ndtr ndtri softmax spence sici
""".split()

_NN = """
    celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log_sigmoid log_softmax logsumexp
    mish relu relu6 selu sigmoid silu soft_sign softmax softplus sparse_plus sparse_sigmoid squareplus standardize swish
    tanh
""".split()

_LAX_UNARY = """
    abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e bitwise_not cbrt ceil clz conj cos cosh digamma erf
    erf_inv erfc exp exp2 expm1 floor imag is_finite lgamma log log1p logistic neg population_count real reciprocal
    round rsqrt sign sin sinh sqrt square stop_gradient tan tanh
""".split()

_LAX_BINARY = """
    add atan2 bitwise_and bitwise_or bitwise_xor div eq ge gt le lt max min mul ne nextafter pow rem shift_left
    shift_right_arithmetic shift_right_logical sub complex
""".split()

_ONE = ("f1", "f2", "f0", "i1", "u1", "t1", "c1", "b1", "2", "1.5", "True", "e1")
_TWO = (
    "f1, f1", "f1, 2", "2.5, i1", "i1, i1", "i1, s1", "u1, i1", "t1, t1", "t1, f1", "c1, f1", "b1, h1", "b1, 2.0",
    "f2, f1", "i2, f1", "f1, f2[:, :3]", "2, 3", "2, 3.0", "s1, 3", "w1, i1", "f0, 2",
)  # fmt: skip
_ONE_KINDS = ("n1", "h1", "e2", "np.asarray(2)", "np.asarray(1.5)", "onp.float64(0.5)", "onp.int64(3)")
_TWO_KINDS = (
    "f1, onp.float64(2)", "i1, onp.int64(2)", "b1, np.asarray(2.0)", "i1, np.asarray(1.5)", "s1, np.asarray(3)",
    "onp.float32(2), 3", "n1, f1", "f1, n1", "e1, f0", "e2, e2", "w1, 3", "h1, 2.5", "e2, f2",
)  # fmt: skip
_REDUCED = (
    "n1", "e2, axis=1", "e2, axis=0", "np.asarray(2.0)", "onp.float64(2)", "f3, axis=(0, -1)", "f2, axis=-3",
    "f2, axis=1.5", "f2, where=t2", "f2, initial=1", "f2, axis=1, keepdims=True, where=t2, initial=0", "i2, axis=()",
    'f2, dtype="float16"', "i2, dtype=float", "f2, axis=(0, 0)",
)  # fmt: skip
_AXES = ("", ", axis=0", ", axis=-1", ", axis=(0, 1)", ", axis=2", ", axis=1, keepdims=True")

_MANIPULATIONS = """
    np.reshape({2}, (4, 3)) | np.reshape({2}, -1) | np.reshape({2}, (5, -1)) | np.reshape({2}, (7,))
    np.transpose({2}, (1, 0)) | np.transpose({2}, (0, 0)) | np.transpose({2}, (1,)) | np.swapaxes({2}, 0, 1)
    np.swapaxes({2}, 0, 2) | np.moveaxis({2}, 0, -1) | np.moveaxis({2}, 0, 5) | np.expand_dims({2}, 1)
    np.expand_dims({2}, (0, 2)) | np.expand_dims({2}, 5) | np.squeeze({2}, 0) | np.squeeze({2}[None], 0)
    np.concatenate([{2}, {2}]) | np.concatenate([{2}, {2}], axis=1) | np.concatenate([{2}, {1}])
    np.concatenate([]) | np.stack([{1}, {1}]) | np.stack([{1}, {1}], axis=1) | np.stack([{1}, {2}])
    np.stack([{1}], axis=3) | np.hstack([{2}, {2}]) | np.vstack([{1}, {1}]) | np.dstack([{1}, {1}])
    np.column_stack([{1}, {1}]) | np.split({2}, 2, axis=1) | np.split({2}, 3, axis=1)
    np.array_split({2}, 3, axis=1) | np.split({1}, [1, 3]) | np.hsplit({2}, 2) | np.vsplit({2}, 3)
    np.tile({1}, 2) | np.tile({1}, (2, 2)) | np.repeat({1}, 2) | np.repeat({2}, 2, axis=0) | np.repeat({1}, -1)
    np.roll({1}, 1) | np.roll({2}, (1, 2), (0, 1)) | np.roll({2}, 1, 4) | np.rot90({2}) | np.rot90({1})
    np.flip({2}, 1) | np.flip({2}, 3) | np.broadcast_to({1}, (2, 4)) | np.broadcast_to({1}, (2, 3))
    np.broadcast_to({2}, (4,)) | np.pad({1}, 1) | np.pad({2}, ((1, 0), (0, 2))) | np.pad({1}, 1, mode="edge")
    np.pad({1}, 2, mode="reflect") | np.pad({1}, 1, mode="nothing") | np.pad({2}, (1, 2, 3))
    np.take({1}, np.array([0, 2])) | np.take({2}, 1, axis=1) | np.take({2}, 1, axis=2) | np.take({1}, 1.5)
    np.take_along_axis({2}, np.argsort({2}, axis=1), 1) | np.take_along_axis({2}, np.array([0]), 1)
    np.where({1} > 0, {1}, 0) | np.where({2} > 0, {2}, {1}) | np.where({1} > 0, {1}) | np.where(True, {1}, 1.5)
    np.clip({1}, 0, 1) | np.clip({1}, None, 1) | np.clip({2}, {1}) | np.clip({1}, 0.5, 1.5) | np.triu({2})
    np.tril({2}, -1) | np.triu({1}) | np.diag({2}) | np.diag({1}, 1) | np.diagonal({2}) | np.trace({2})
    np.diagonal({1}) | np.trace({1}) | np.searchsorted(np.sort({1}), {1}) | np.digitize({1}, np.sort({1}))
    np.insert({1}, 1, 5) | np.delete({1}, 1) | np.append({1}, {1}) | np.append({2}, {2}, axis=0)
    np.delete({1}, 9) | np.kron({1}, {1}) | np.vdot({1}, {1}) | np.inner({2}, {1}) | np.outer({1}, {1})
    np.matmul({2}, {1}) | np.matmul({1}, {2}) | np.matmul({1}, 2) | np.tensordot({2}, {2}, 2)
    np.tensordot({2}, {1}, ((1,), (0,))) | np.tensordot({2}, {1}, 2) | np.einsum("ij,j->i", {2}, {1})
    np.einsum("ij->ji", {2}) | np.einsum("ij,k", {2}, {1}) | np.einsum("ii", {2}) | np.einsum("i,j", {1})
    np.cross({1}[:3], {1}[1:]) | np.cross({1}, {1}) | np.ptp({2}, axis=0) | np.average({2}, axis=1)
    np.average({1}, weights={1}) | np.percentile({1}, 30) | np.quantile({2}, 0.5, axis=1)
    np.percentile({1}, 130) | np.histogram({1}, 3) | np.bincount({1}) | np.cov({2}) | np.corrcoef({2})
    np.convolve({1}, {1}) | np.correlate({1}, {1}) | np.interp({1}, np.arange(4.0), {1}) | np.polyval({1}, 2)
    np.vander({1}, 3) | np.cumsum({2}, axis=1) | np.cumsum({2}) | np.cumprod({2}, axis=5) | np.diff({2}, axis=0)
    np.diff({1}, 2) | np.gradient({1}) | np.ediff1d({2}) | np.unique({1}, return_counts=True)
    np.isin({1}, {1}[:2]) | np.union1d({1}, {1}) | np.setdiff1d({1}, {1}[:1]) | np.intersect1d({1}, {1})
    np.meshgrid({1}, {1}) | np.ix_({1}[:2] > 9, {1}[:2] > 9) | np.select([{1} > 0], [{1}])
    np.choose(np.array([0, 1, 0, 1]), [{1}, {1}]) | np.piecewise({1}, [{1} > 0], [1, 2])
    np.apply_along_axis(np.sum, 0, {2}) | np.vectorize(lambda a: a + a)({1}) | np.lexsort(({1}, {1}))
    np.partition({1}, 1) | np.argpartition({1}, 1) | np.partition({1}, 9) | np.nan_to_num({1})
    np.sum({2}, where={2} > 0) | np.max({2}, where={2} > 0, initial=0) | np.max({2}, where={2} > 0)
    np.mean({2}, dtype="float32") | np.sum({1}, dtype=int) | np.sum({2}, initial=3) | np.prod({1}, initial=2)
    np.std({2}, ddof=1) | np.var({2}, axis=0, ddof=1) | np.astype({1}, "float32") | {1}.astype("int32") | {1}[1]
    {1}[-1] | {1}[1:3] | {1}[::-1] | {2}[0] | {2}[:, 1] | {2}[..., None] | {2}[0, 1] | {2}[0, 1, 2]
    {1}[{1} > 0] | {1}[np.array([0, 2])] | {1}["a"] | {1}[1.5] | {2}[np.array([0, 1]), np.array([1, 2])]
    {1}[None] | {1}[()] | {1}.at[1].set(2) | {1}.at[1:3].add(1) | {1}.at[0].multiply(2) | {1}.at[9].set(1)
    {1}.at[0].max(2) | {1}.at[1].get() | {1}.at[1].set({1}) | {2}.at[0].set({1})
    {1}.at[1].apply(lambda a: a + a) | {1} + {1} | {1} * 2 | {1} / 2 | {1} // 2 | {1} % 2 | {1} ** 2 | 2 ** {1}
    -{1} | +{1} | ~{1} | {1} & {1} | {1} | {1} << 1 | abs({1}) | divmod({1}, 2) | {1} @ {1} | {1} == {1}
    {1} < 1 | {1} + 1.5 | 1 - {1} | {2} + {1} | {2} + {2}[:, :2] | {1}.sum() | {1}.mean() | {1}.max()
    {1}.std() | {2}.T | {2}.flatten() | {2}.reshape(2, 6) | {2}.reshape(5) | {1}.argmax() | {2}.argmin(1)
    {1}.sort() | {1}.dot({1}) | {2}.transpose() | {2}.swapaxes(0, 1) | {1}.cumsum() | {1}.prod() | {1}.any()
    {1}.all() | {1}.round() | {1}.clip(0, 1) | {1}.conj() | {1}.real | {1}.imag | {2}.diagonal() | {2}.trace()
    {1}.take(1) | {1}.repeat(2) | {2}.squeeze() | {1}.var() | {1}.searchsorted(1) | {1}.nonzero() | {2}.ravel()
    {1}.ptp() | {1}.item() | len({1}) | float({1}[0]) | int({1}[0]) | bool({1}) | lax.reshape({2}, (4, 3))
    lax.reshape({2}, (5,)) | lax.transpose({2}, (1, 0)) | lax.transpose({2}, (1, 1)) | lax.rev({2}, (1,))
    lax.slice({2}, (0, 1), (2, 3)) | lax.slice({2}, (0, 1), (2, 9)) | lax.slice_in_dim({2}, 1, 3, axis=1)
    lax.rev({2}, (4,)) | lax.dynamic_slice({2}, (1, 1), (2, 2)) | lax.dynamic_slice({2}, (1,), (2, 2))
    lax.dynamic_slice_in_dim({1}, 1, 2) | lax.dynamic_update_slice({2}, {2}[:1], (1, 0))
    lax.dynamic_index_in_dim({2}, 1) | lax.concatenate([{1}, {1}], 0) | lax.concatenate([{1}, {2}], 0)
    lax.pad({1}, {1}[0], [(1, 1, 0)]) | lax.pad({1}, {1}[0], [(1, 1)]) | lax.broadcast({1}, (2,))
    lax.broadcast_in_dim({1}, (2, 4), (1,)) | lax.broadcast_in_dim({1}, (2, 3), (1,))
    lax.expand_dims({1}, (0,)) | lax.squeeze({2}, (0,)) | lax.select({1} > 0, {1}, {1})
    lax.select({1} > 0, {1}, {2}) | lax.select({1}, {1}, {1}) | lax.clamp({1}[0], {1}, {1}[2])
    lax.dot({2}, {1}) | lax.dot({1}, {2}) | lax.dot_general({2}, {2}, (((1,), (1,)), ((), ()))) | lax.sort({1})
    lax.sort({2}, dimension=0) | lax.sort({1}, dimension=3) | lax.top_k({1}, 2) | lax.top_k({1}, 9)
    lax.argmax({1}, 0, "int32") | lax.argmin({2}, 1, "int32") | lax.cumsum({1}) | lax.cumprod({2}, axis=1)
    lax.cummax({1}) | lax.cummin({1}) | lax.cumsum({1}, axis=2) | lax.reduce_max({1}, (0,))
    lax.reduce_sum({2}, (0,)) | lax.reduce({1}, {1}[3], lax.add, (0,))
    lax.convert_element_type({1}, "float32") | lax.iota("int32", 4) | lax.bitcast_convert_type({1}, "int32")
    lax.full_like({1}, 2) | lax.full((2,), {1}[0]) | lax.map(lambda a: a + a, {1})
    lax.scan(lambda c, a: (c + a, c), {1}[0], {1}) | lax.scan(lambda c, a: (c, c, a), {1}[0], {1})
    lax.fori_loop(0, 3, lambda i, c: c + c, {1})
    lax.while_loop(lambda c: c[0] < 99, lambda c: c + c + c.max(), {1})
    lax.cond(True, lambda a: a + a, lambda a: a, {1}) | lax.cond({1}, lambda: 1, lambda: 2)
    lax.switch(1, [lambda a: a, lambda a: a + a], {1}) | lax.associative_scan(np.add, {1})
    lax.cond(True, lambda: {1}, lambda: {2}) | lax.fori_loop(0, 2, lambda i, c: c[None], {1})
    lax.integer_pow({1}, 2) | lax.collapse({2}, 0, 2) | jax.vmap(lambda a: a + a)({2})
    jax.vmap(np.dot)({2}, {2}) | jax.vmap(lambda a, b: a + b)({2}, {1}) | jax.vmap(np.sum, in_axes=3)({2})
    jax.jit(lambda a: a + 1)({1}) | jax.grad(lambda a: a.sum())({1}) | jax.grad(lambda a: a)({1})
    jax.jvp(np.sin, ({1},), ({1},)) | jax.jit(np.reshape, static_argnums=1)({2}, (4, 3))
    jax.jacfwd(np.sin)({1}) | jax.hessian(lambda a: (a * a * a).sum())({1})
    jax.ops.segment_sum({1}, np.array([0, 0, 1, 1])) | jax.ops.segment_max({1}, np.array([0, 0, 1, 1]), 3)
    jax.nn.one_hot({1}, 4)
"""

_CREATION = """
    np.zeros(3) | np.zeros((2, 3), "int8") | np.ones(2, bool) | np.zeros(-1) | np.zeros(1.5) | np.zeros("a")
    np.full(2, 3) | np.full(2, 3.5) | np.full((2, 2), 1, "float32") | np.full(2, f1) | np.full((2, 4), f1)
    np.eye(3) | np.eye(2, 3, 1) | np.eye(3, dtype=int) | np.identity(2) | np.arange(4) | np.arange(1, 4)
    np.arange(0, 1, 0.25) | np.arange(4.0) | np.arange(5, 1, -2) | np.arange(3, dtype="float32")
    np.arange(True) | np.arange(0, 3, 0) | np.linspace(0, 1, 5) | np.linspace(0, 1, 5, endpoint=False)
    np.linspace(0, 1, 3, retstep=True) | np.linspace(0, 5, 6, dtype=int) | np.linspace(0, 1, -1)
    np.logspace(0, 2, 3) | np.geomspace(1, 8, 4) | np.tri(3) | np.tri(2, 3, dtype=int) | np.array(1)
    np.array(1.5) | np.array(True) | np.array([1, 2]) | np.array([1, 2.5]) | np.array([[1], [2]])
    np.array([1, [2]]) | np.array("a") | np.array(None) | np.array([1, 2], "float32") | np.array([1.5], int)
    np.array(1j) | np.asarray([True, 2]) | np.asarray(f1) | np.array(f1, ndmin=2) | np.array([])
    np.array([f0, 1]) | np.array(1, "uint8") | np.array(300, "uint8") | np.array(2**31) | np.float32(2)
    np.int8(3) | np.bool_(1) | np.int32(2.7) | np.uint8(f1) | np.complex64(1) | np.bfloat16(1.5)
    np.indices((2, 2)) | np.fromfunction(lambda i, j: i + j, (2, 2)) | np.tril_indices(3) | np.diag_indices(2)
    np.hanning(4) | np.hamming(4) | np.blackman(4) | np.bartlett(4) | np.kaiser(4, 2.0)
    np.zeros_like(f1, dtype=int) | np.ones_like(i1) | np.full_like(i1, 2.5) | np.full_like(f1, 2)
    np.empty((2, 0)) | np.iinfo("int8").max | np.finfo("float32").eps | np.result_type("int8", "float32")
    np.result_type(1, "int8") | np.result_type("int32", "uint32") | np.promote_types("int8", "uint8")
    np.promote_types("bfloat16", "float16") | np.can_cast("int8", "int32")
    np.issubdtype("float32", np.floating) | np.dtype("float7") | np.r_[0:3] | np.c_[f1, f1] | np.mgrid[0:2, 0:3]
    np.ogrid[0:3] | np.unravel_index(i1 % 2, (2, 2)) | np.ravel_multi_index((i1 % 2, i1 % 2), (2, 2))
    np.linalg.inv(m2) | np.linalg.inv(f2) | np.linalg.det(m2) | np.linalg.det(f1) | np.linalg.norm(f1)
    np.linalg.norm(f2) | np.linalg.norm(f2, 1) | np.linalg.norm(f2, "nuc") | np.linalg.norm(f2, "what")
    np.linalg.norm(f3, axis=(0, 1)) | np.linalg.norm(i1) | np.linalg.cholesky(m2) | np.linalg.cholesky(f2)
    np.linalg.solve(m2, m2[0]) | np.linalg.solve(m2, f1) | np.linalg.eigvalsh(m2)
    np.linalg.svd(m2, compute_uv=False) | np.linalg.matrix_power(m2, 3) | np.linalg.matrix_power(m2, -1)
    np.linalg.matrix_power(m2, 1.5) | np.linalg.matrix_rank(m2) | np.linalg.slogdet(m2) | np.linalg.pinv(m2)
    np.linalg.lstsq(m2, m2[0])[0] | np.linalg.multi_dot([m2, m2, m2]) | np.linalg.cond(m2)
    np.linalg.qr(m2, "r") | np.linalg.inv(i2[:, :3]) | np.linalg.trace(m2) | np.linalg.diagonal(m2)
    np.linalg.outer(f1, f1) | np.linalg.cross(f1[:3], f1[1:]) | np.linalg.vector_norm(f2)
    np.linalg.matrix_norm(f2) | np.fft.fft(f1) | np.fft.ifft(c1) | np.fft.rfft(f1) | np.fft.irfft(c1)
    np.fft.fft2(f2) | np.fft.fftn(f2) | np.fft.fft(f1, 6) | np.fft.fft(f1, axis=3) | np.fft.fft(f1, -1)
    np.fft.fft(i1) | np.fft.rfft(c1) | np.fft.fftshift(f1) | np.fft.ifftshift(f2, 1) | np.fft.fftfreq(4)
    np.fft.rfftfreq(4, 0.5) | np.fft.hfft(c1) | jax.scipy.linalg.expm(m2) | jax.scipy.linalg.det(m2)
    jax.scipy.linalg.solve_triangular(m2, f1[:3]) | jax.scipy.linalg.block_diag(f2, f1)
    jax.scipy.linalg.toeplitz(f1) | jax.scipy.special.gammainc(p1, p1) | jax.scipy.special.betainc(p1, p1, p1)
    jax.scipy.special.xlogy(f1, p1) | jax.scipy.special.beta(p1, p1) | jax.scipy.special.zeta(p1 + 1, 1.0)
    jax.scipy.special.polygamma(1, p1) | jax.scipy.special.logsumexp(f2, axis=1)
    jax.scipy.special.logsumexp(f2, axis=3) | jax.scipy.special.multigammaln(p1 + 3, 2)
    jax.scipy.stats.norm.pdf(f1) | jax.scipy.stats.norm.cdf(f1, 1, 2) | jax.scipy.stats.beta.logpdf(p1, 2, 3)
    jax.scipy.stats.poisson.pmf(i1, 2.0) | jax.scipy.stats.t.pdf(f1, 3) | jax.scipy.stats.expon.logpdf(f1)
    jax.scipy.stats.gamma.pdf(p1, 2.0) | jax.scipy.stats.uniform.pdf(p1) | jax.scipy.stats.laplace.cdf(f1)
    jax.scipy.stats.cauchy.pdf(f1) | jax.random.key_data(jax.random.key(3))
    jax.random.normal(jax.random.key(0), (3,)) | jax.random.uniform(jax.random.key(0))
    jax.random.randint(jax.random.key(0), (3,), 0, 9) | jax.random.normal(jax.random.key(0), (3,), int)
    jax.random.normal(3) | jax.random.bernoulli(jax.random.key(0), 0.3, (4,))
    jax.random.permutation(jax.random.key(0), 5) | jax.random.choice(jax.random.key(0), 5, (3,))
    jax.random.choice(jax.random.key(0), f1, (9,), replace=False) | jax.random.gumbel(jax.random.key(0))
    jax.random.split(f1) | jax.random.key_data(jax.random.split(jax.random.key(0), 3))
    jax.random.key_data(jax.random.fold_in(jax.random.key(0), 7))
    jax.random.uniform(jax.random.key(0), (2,), minval=2.0) | jax.random.categorical(jax.random.key(0), f1)
    jax.random.exponential(jax.random.key(0), (2,)) | jax.random.truncated_normal(jax.random.key(0), -1.0, 1.0)
    jax.random.key("a") | jax.tree.map(np.add, {"a": f1}, {"a": 2}) | jax.tree.map(np.add, {"a": f1}, {"b": 2})
    jax.tree.leaves([1, (2, None), {"k": 3}]) | jax.tree.reduce(lambda a, b: a + b, [1, 2, 3])
    jax.tree.unflatten(jax.tree.structure([1, 2]), [1])
    jax.tree.transpose(jax.tree.structure([0]), jax.tree.structure([0]), [[1]]) | jax.tree.all([True, False])
    jax.nn.dot_product_attention(f3[None], f3[None], f3[None]) | jax.nn.softmax(f2, axis=0)
    jax.nn.softmax(f2, axis=4) | jax.nn.one_hot(2, 3) | jax.nn.one_hot(i1, 4, axis=0)
    jax.nn.gelu(f1, approximate=False) | jax.nn.leaky_relu(f1, 0.3) | jax.nn.standardize(f2, axis=0)
    jax.nn.glu(f2, axis=1) | jax.nn.glu(m2) | jax.nn.softmax(f2, where=t2) | jax.jit(3) | jax.grad(3)
    jax.vmap(3) | jax.jit(lambda x: x + "a")(f1) | jax.jit(lambda x: float(x))(f0)
    jax.jit(lambda x: x if x > 0 else -x)(f0) | jax.jit(lambda x: "a")(f1) | jax.grad(lambda x: x * 2)(3)
    jax.grad(lambda x: 1.0)(2.0) | jax.grad(lambda x: x, argnums=2)(1.0) | jax.grad(lambda x: (x, x))(1.0)
    jax.value_and_grad(lambda x: x * x)(3.0) | jax.grad(lambda x: x * x)(f0)
    jax.grad(lambda x: x, has_aux=True)(1.0) | jax.grad(np.sin)(c1[0]) | jax.vmap(lambda x: x)(2.0)
    jax.vmap(lambda x: x, in_axes=(0, 0))(f1) | jax.vmap(lambda x: x, out_axes=3)(f1)
    jax.vmap(lambda x, y: x)(f1, f2) | jax.jvp(np.sin, (1.0,), (f1,)) | jax.jvp(np.sin, [1.0], [1.0])
    jax.vjp(np.sin, 1.0)[1](f1) | jax.linear_transpose(lambda x: x * x, f1)(f1) | jax.jacrev(lambda x: x)(f1)
    jax.eval_shape(np.dot, f2, f1).shape | jax.eval_shape(np.dot, f2, f2) | jax.device_get(f1).tolist()
    jax.jit(lambda x, n: x * n, static_argnums=1)(f1, 3) | jax.jit(lambda x, n: x, static_argnums=1)(f1, [3])
    jax.jit(lambda x, n: x, static_argnames="k")(f1, 1) | jax.jit(lambda: 1.5)() | jax.jit(lambda x: x * 2)(1.5)
    jax.jit(lambda x: x)(True) | jax.jit(lambda x: (x, 1, None))(2) | jax.jit(lambda x: {"a": x})(f1)
    jax.checkpoint(np.sin)(1.0) | jax.jit(np.sum)([1, 2])
"""


def _split(text: str) -> list[str]:
    """The calls of a table; ``|`` alone stands between them, and spaces around it."""
    parts = [part.strip() for line in text.strip().splitlines() for part in line.split(" | ")]
    return [part for part in parts if part]


def _calls() -> list[str]:
    calls = [f"np.{name}({x})" for name in _UNARY for x in _ONE]
    calls += [f"np.{name}({xs})" for name in _BINARY for xs in _TWO]
    calls += [f"np.{name}({x}{axis})" for name in _REDUCTIONS for x in ("f2", "i2", "t2") for axis in _AXES]
    calls += [f"np.{name}({x})" for name in _REDUCTIONS for x in ("f0", "e1", "c1", "u1", "b1", "2", "1.5")]
    calls += [f"np.{name}({x})" for name in _UNARY for x in _ONE_KINDS]
    calls += [f"np.{name}({xs})" for name in _BINARY for xs in _TWO_KINDS]
    calls += [f"np.{name}({x})" for name in _REDUCTIONS for x in _REDUCED]
    calls += [
        f"lax.{name}({x})"
        for name in _LAX_UNARY
        for x in ("n1", "np.asarray(2)", "onp.float32(2)", "u1", "h1")
    ]
    calls += [f"np.{name}(f2, axis={axis})" for name in _LINES[:-1] for axis in (0, -1, 1, 2, "None")]
    calls += [
        f"jax.scipy.special.{name}({x})" for name in _SCIPY[1:] for x in ("p1", "b1", "i1", "0.5", "c1", "1")
    ]
    calls += [f"jax.nn.{name}({x})" for name in _NN for x in ("f1", "b1", "i1", "0.5", "1")]
    calls += [f"lax.{name}({x})" for name in _LAX_UNARY for x in ("f1", "i1", "t1", "c1", "b1", "1.5", "2")]
    calls += [
        f"lax.{name}({x})"
        for name in _LAX_BINARY
        for x in ("f1, f1", "i1, i1", "f1, i1", "t1, t1", "c1, c1", "f1, 2.0", "i1, 2", "2.0, 3.0", "f1, f2")
    ]
    kinds = ("f", "i")
    for call, kind in itertools.product(_split(_MANIPULATIONS), kinds):
        calls.append(call.replace("{1}", f"{kind}1").replace("{2}", f"{kind}2"))
    calls += _split(_CREATION)
    return list(dict.fromkeys(calls))


CALLS = _calls()
"""The calls, each once."""
