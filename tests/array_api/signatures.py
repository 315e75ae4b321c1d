"""The array API standard 2024.12: signatures and dtypes of its functions.

``CATEGORIES`` gives for each elementwise function the dtypes that it must take, and the dtype of its result.
"""

MAIN = """
abs(x, /)
acos(x, /)
acosh(x, /)
add(x1, x2, /)
all(x, /, *, axis=None, keepdims=False)
any(x, /, *, axis=None, keepdims=False)
arange(start, /, stop=None, step=1, *, dtype=None, device=None)
argmax(x, /, *, axis=None, keepdims=False)
argmin(x, /, *, axis=None, keepdims=False)
argsort(x, /, *, axis=-1, descending=False, stable=True)
asarray(obj, /, *, dtype=None, device=None, copy=None)
asin(x, /)
asinh(x, /)
astype(x, dtype, /, *, copy=True, device=None)
atan(x, /)
atan2(x1, x2, /)
atanh(x, /)
bitwise_and(x1, x2, /)
bitwise_invert(x, /)
bitwise_left_shift(x1, x2, /)
bitwise_or(x1, x2, /)
bitwise_right_shift(x1, x2, /)
bitwise_xor(x1, x2, /)
broadcast_arrays(*arrays)
broadcast_to(x, /, shape)
can_cast(from_, to, /)
ceil(x, /)
clip(x, /, min=None, max=None)
concat(arrays, /, *, axis=0)
conj(x, /)
copysign(x1, x2, /)
cos(x, /)
cosh(x, /)
count_nonzero(x, /, *, axis=None, keepdims=False)
cumulative_prod(x, /, *, axis=None, dtype=None, include_initial=False)
cumulative_sum(x, /, *, axis=None, dtype=None, include_initial=False)
diff(x, /, *, axis=-1, n=1, prepend=None, append=None)
divide(x1, x2, /)
empty(shape, *, dtype=None, device=None)
empty_like(x, /, *, dtype=None, device=None)
equal(x1, x2, /)
exp(x, /)
expand_dims(x, /, *, axis=0)
expm1(x, /)
eye(n_rows, n_cols=None, /, *, k=0, dtype=None, device=None)
finfo(type, /)
flip(x, /, *, axis=None)
floor(x, /)
floor_divide(x1, x2, /)
from_dlpack(x, /, *, device=None, copy=None)
full(shape, fill_value, *, dtype=None, device=None)
full_like(x, /, fill_value, *, dtype=None, device=None)
greater(x1, x2, /)
greater_equal(x1, x2, /)
hypot(x1, x2, /)
iinfo(type, /)
imag(x, /)
isdtype(dtype, kind)
isfinite(x, /)
isinf(x, /)
isnan(x, /)
less(x1, x2, /)
less_equal(x1, x2, /)
linspace(start, stop, /, num, *, dtype=None, device=None, endpoint=True)
log(x, /)
log10(x, /)
log1p(x, /)
log2(x, /)
logaddexp(x1, x2, /)
logical_and(x1, x2, /)
logical_not(x, /)
logical_or(x1, x2, /)
logical_xor(x1, x2, /)
matmul(x1, x2, /)
matrix_transpose(x, /)
max(x, /, *, axis=None, keepdims=False)
maximum(x1, x2, /)
mean(x, /, *, axis=None, keepdims=False)
meshgrid(*arrays, indexing='xy')
min(x, /, *, axis=None, keepdims=False)
minimum(x1, x2, /)
moveaxis(x, source, destination, /)
multiply(x1, x2, /)
negative(x, /)
nextafter(x1, x2, /)
nonzero(x, /)
not_equal(x1, x2, /)
ones(shape, *, dtype=None, device=None)
ones_like(x, /, *, dtype=None, device=None)
permute_dims(x, /, axes)
positive(x, /)
pow(x1, x2, /)
prod(x, /, *, axis=None, dtype=None, keepdims=False)
real(x, /)
reciprocal(x, /)
remainder(x1, x2, /)
repeat(x, repeats, /, *, axis=None)
reshape(x, /, shape, *, copy=None)
result_type(*arrays_and_dtypes)
roll(x, /, shift, *, axis=None)
round(x, /)
searchsorted(x1, x2, /, *, side='left', sorter=None)
sign(x, /)
signbit(x, /)
sin(x, /)
sinh(x, /)
sort(x, /, *, axis=-1, descending=False, stable=True)
sqrt(x, /)
square(x, /)
squeeze(x, /, axis)
stack(arrays, /, *, axis=0)
std(x, /, *, axis=None, correction=0.0, keepdims=False)
subtract(x1, x2, /)
sum(x, /, *, axis=None, dtype=None, keepdims=False)
take(x, indices, /, *, axis=None)
take_along_axis(x, indices, /, *, axis=-1)
tan(x, /)
tanh(x, /)
tensordot(x1, x2, /, *, axes=2)
tile(x, repetitions, /)
tril(x, /, *, k=0)
triu(x, /, *, k=0)
trunc(x, /)
unique_all(x, /)
unique_counts(x, /)
unique_inverse(x, /)
unique_values(x, /)
unstack(x, /, *, axis=0)
var(x, /, *, axis=None, correction=0.0, keepdims=False)
vecdot(x1, x2, /, *, axis=-1)
where(condition, x1, x2, /)
zeros(shape, *, dtype=None, device=None)
zeros_like(x, /, *, dtype=None, device=None)
__array_namespace_info__()
"""

LINALG = """
cholesky(x, /, *, upper=False)
cross(x1, x2, /, *, axis=-1)
det(x, /)
diagonal(x, /, *, offset=0)
eigh(x, /)
eigvalsh(x, /)
inv(x, /)
matmul(x1, x2, /)
matrix_norm(x, /, *, keepdims=False, ord='fro')
matrix_power(x, n, /)
matrix_rank(x, /, *, rtol=None)
matrix_transpose(x, /)
outer(x1, x2, /)
pinv(x, /, *, rtol=None)
qr(x, /, *, mode='reduced')
slogdet(x, /)
solve(x1, x2, /)
svd(x, /, *, full_matrices=True)
svdvals(x, /)
tensordot(x1, x2, /, *, axes=2)
trace(x, /, *, offset=0, dtype=None)
vecdot(x1, x2, /, *, axis=-1)
vector_norm(x, /, *, axis=None, keepdims=False, ord=2)
"""

FFT = """
fft(x, /, *, n=None, axis=-1, norm='backward')
ifft(x, /, *, n=None, axis=-1, norm='backward')
fftn(x, /, *, s=None, axes=None, norm='backward')
ifftn(x, /, *, s=None, axes=None, norm='backward')
rfft(x, /, *, n=None, axis=-1, norm='backward')
irfft(x, /, *, n=None, axis=-1, norm='backward')
rfftn(x, /, *, s=None, axes=None, norm='backward')
irfftn(x, /, *, s=None, axes=None, norm='backward')
hfft(x, /, *, n=None, axis=-1, norm='backward')
ihfft(x, /, *, n=None, axis=-1, norm='backward')
fftfreq(n, /, *, d=1.0, dtype=None, device=None)
rfftfreq(n, /, *, d=1.0, dtype=None, device=None)
fftshift(x, /, *, axes=None)
ifftshift(x, /, *, axes=None)
"""

METHODS = """
__abs__()
__add__(other, /)
__and__(other, /)
__array_namespace__(*, api_version=None)
__bool__()
__complex__()
__dlpack__(*, stream=None, max_version=None, dl_device=None, copy=None)
__dlpack_device__()
__eq__(other, /)
__float__()
__floordiv__(other, /)
__ge__(other, /)
__getitem__(key, /)
__gt__(other, /)
__index__()
__int__()
__invert__()
__le__(other, /)
__lshift__(other, /)
__lt__(other, /)
__matmul__(other, /)
__mod__(other, /)
__mul__(other, /)
__ne__(other, /)
__neg__()
__or__(other, /)
__pos__()
__pow__(other, /)
__rshift__(other, /)
__sub__(other, /)
__truediv__(other, /)
__xor__(other, /)
__radd__(other, /)
__rand__(other, /)
__rfloordiv__(other, /)
__rlshift__(other, /)
__rmatmul__(other, /)
__rmod__(other, /)
__rmul__(other, /)
__ror__(other, /)
__rpow__(other, /)
__rrshift__(other, /)
__rsub__(other, /)
__rtruediv__(other, /)
__rxor__(other, /)
to_device(device, /, *, stream=None)
"""

INFO = """
capabilities()
default_device()
default_dtypes(*, device=None)
devices()
dtypes(*, device=None, kind=None)
"""

ATTRIBUTES = ("dtype", "device", "mT", "ndim", "shape", "size", "T")
CONSTANTS = {"e": 2.718281828459045, "inf": float("inf"), "pi": 3.141592653589793, "newaxis": None}

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
REAL_FLOATS, COMPLEX = ("float32", "float64"), ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *REAL_FLOATS, *COMPLEX)
KINDS = {
    "bool": ("bool",),
    "integers": INTEGERS,
    "bits": ("bool", *INTEGERS),
    "floating": REAL_FLOATS + COMPLEX,
    "real floating": REAL_FLOATS,
    "real": INTEGERS + REAL_FLOATS,
    "numeric": INTEGERS + REAL_FLOATS + COMPLEX,
    "complex": COMPLEX,
    "all": DTYPES,
}
UNARY = {  # name: (kind of dtypes, the result's dtype: same, bool, or that of a part of a complex number)
    **dict.fromkeys(
        (
            "acos acosh asin asinh atan atanh cos cosh exp expm1 log log10 log1p log2 reciprocal "
            "sin sinh sqrt tan tanh"
        ).split(),
        ("floating", "same"),
    ),
    **dict.fromkeys("negative positive sign square round".split(), ("numeric", "same")),
    **dict.fromkeys("ceil floor trunc".split(), ("real", "same")),
    **dict.fromkeys("isfinite isinf isnan".split(), ("numeric", "bool")),
    "abs": ("numeric", "part"),
    "bitwise_invert": ("bits", "same"),
    "conj": ("numeric", "same"),
    "imag": ("complex", "part"),
    "real": ("numeric", "part"),
    "logical_not": ("bool", "bool"),
    "signbit": ("real floating", "bool"),
}  # fmt: skip
BINARY = {
    **dict.fromkeys("add subtract multiply pow".split(), ("numeric", "same")),
    **dict.fromkeys("atan2 copysign hypot logaddexp nextafter".split(), ("real floating", "same")),
    **dict.fromkeys("bitwise_and bitwise_or bitwise_xor".split(), ("bits", "same")),
    **dict.fromkeys("bitwise_left_shift bitwise_right_shift".split(), ("integers", "same")),
    **dict.fromkeys("equal not_equal".split(), ("all", "bool")),
    **dict.fromkeys("greater greater_equal less less_equal".split(), ("real", "bool")),
    **dict.fromkeys("floor_divide remainder maximum minimum".split(), ("real", "same")),
    **dict.fromkeys("logical_and logical_or logical_xor".split(), ("bool", "bool")),
    "divide": ("floating", "same"),
}
OPERATORS = {
    "add": "+", "subtract": "-", "multiply": "*", "divide": "/", "floor_divide": "//", "remainder": "%", "pow": "**",
    "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "bitwise_left_shift": "<<", "bitwise_right_shift": ">>",
    "equal": "==", "not_equal": "!=", "less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">=",
}  # fmt: skip
PROMOTION = {  # what the standard says of two dtypes, in either order; what it does not say is absent
    **{(a, b): INTEGERS[max(i, j)] for i, a in enumerate(INTEGERS[:4]) for j, b in enumerate(INTEGERS[:4])},
    **{
        (a, b): INTEGERS[4 + max(i, j)]
        for i, a in enumerate(INTEGERS[4:])
        for j, b in enumerate(INTEGERS[4:])
    },
    **{
        (a, b): INTEGERS[max(i + 1, j)]
        for i, a in enumerate(INTEGERS[4:7])
        for j, b in enumerate(INTEGERS[:4])
    },
    ("bool", "bool"): "bool",
    ("float32", "float32"): "float32",
    ("float32", "float64"): "float64",
    ("float64", "float64"): "float64",
    ("float32", "complex64"): "complex64",
    ("float32", "complex128"): "complex128",
    ("float64", "complex64"): "complex128",
    ("float64", "complex128"): "complex128",
    ("complex64", "complex64"): "complex64",
    ("complex64", "complex128"): "complex128",
    ("complex128", "complex128"): "complex128",
}
DEPARTS = {("uint32", "int8"): "int32", ("uint32", "int16"): "int32", ("uint32", "int32"): "int32"}
"""Pairs that blufunc does not widen to 64 bits (docs/array-api.md)."""
