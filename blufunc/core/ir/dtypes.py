"""The dtypes of blufunc, and their promotion.

Core, before tracing. In: the spellings that users give (``'bfloat16'``, ``np.float32``, ``int``), Python
scalars and NumPy arrays. Out: ``np.dtype`` objects and pairs ``(dtype, weak)``.

Values without an explicit dtype are 32-bit (``implicit``, ``scalar_dtype``,
``canonical_numpy``); explicit dtypes are honoured (``as_dtype``). ``promote`` is JAX's lattice under that
rule, which settles the two places where JAX consults its switch:

- a result known only to be "some float" (``int64`` with a weak float, or with ``uint64``) is weak float32,
  and "some complex" is weak complex64, as in JAX with x64 off;
- no promotion makes a 64-bit dtype out of narrower ones: ``uint32`` with ``int32`` is ``int32``, again as
  in JAX with x64 off.

Everything else with a 64-bit operand is as in JAX with x64 on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from blufunc.config import Memo, config
from blufunc.errors import DtypeError, ValueRangeError

DType = np.dtype[Any]

bool_: DType = np.dtype(np.bool_)
int8: DType = np.dtype(np.int8)
int16: DType = np.dtype(np.int16)
int32: DType = np.dtype(np.int32)
int64: DType = np.dtype(np.int64)
uint8: DType = np.dtype(np.uint8)
uint16: DType = np.dtype(np.uint16)
uint32: DType = np.dtype(np.uint32)
uint64: DType = np.dtype(np.uint64)
int2: DType = np.dtype(ml_dtypes.int2)
int4: DType = np.dtype(ml_dtypes.int4)
uint2: DType = np.dtype(ml_dtypes.uint2)
uint4: DType = np.dtype(ml_dtypes.uint4)
float4_e2m1fn: DType = np.dtype(ml_dtypes.float4_e2m1fn)
float8_e3m4: DType = np.dtype(ml_dtypes.float8_e3m4)
float8_e4m3: DType = np.dtype(ml_dtypes.float8_e4m3)
float8_e4m3b11fnuz: DType = np.dtype(ml_dtypes.float8_e4m3b11fnuz)
float8_e4m3fnuz: DType = np.dtype(ml_dtypes.float8_e4m3fnuz)
float8_e5m2fnuz: DType = np.dtype(ml_dtypes.float8_e5m2fnuz)
float8_e8m0fnu: DType = np.dtype(ml_dtypes.float8_e8m0fnu)
float8_e4m3fn: DType = np.dtype(ml_dtypes.float8_e4m3fn)
float8_e5m2: DType = np.dtype(ml_dtypes.float8_e5m2)
float16: DType = np.dtype(np.float16)
bfloat16: DType = np.dtype(ml_dtypes.bfloat16)
float32: DType = np.dtype(np.float32)
float64: DType = np.dtype(np.float64)
complex64: DType = np.dtype(np.complex64)
complex128: DType = np.dtype(np.complex128)

float0: DType = np.dtype([("float0", np.void, 0)])
"""Tangent dtype of non-differentiable values (integers, bools, keys): no bytes."""


class extended(np.void):  # type: ignore[misc]  # NumPy's stubs forbid what ``np.record`` does
    """Kind of the dtypes that NumPy has no arithmetic for, in ``issubdtype``."""


class prng_key(extended):  # type: ignore[misc]
    """Kind of the dtypes of random keys, in ``issubdtype``."""


key: DType = np.dtype((prng_key, [("hi", "<u4"), ("lo", "<u4")]))
"""A threefry2x32 PRNG key: the element of a key array, without arithmetic."""


WIDE_OF_NARROW: dict[DType, DType] = {int2: int8, int4: int8, uint2: uint8, uint4: uint8}
"""Integers of 2 and 4 bits, with the dtypes that they are computed in."""

_SIGNED = frozenset({int2, int4, int8, int16, int32, int64})
_UNSIGNED = frozenset({uint2, uint4, uint8, uint16, uint32, uint64})
_INTEGER = _SIGNED | _UNSIGNED
SMALL_FLOATS = (
    float4_e2m1fn, float8_e3m4, float8_e4m3, float8_e4m3b11fnuz, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2,
    float8_e5m2fnuz, float8_e8m0fnu,
)  # fmt: skip
"""Floats of a byte."""
_FLOATING = frozenset(SMALL_FLOATS) | {float16, bfloat16, float32, float64}
_COMPLEX = frozenset({complex64, complex128})
_INEXACT = _FLOATING | _COMPLEX
_NUMERIC = _INTEGER | _INEXACT

_SHORT_NAMES: dict[DType, str] = {
    bool_: "bool",
    int8: "i8", int16: "i16", int32: "i32", int64: "i64",
    uint8: "u8", uint16: "u16", uint32: "u32", uint64: "u64",
    int2: "i2", int4: "i4", uint2: "u2", uint4: "u4",
    **{d: d.name.replace("float", "f") for d in SMALL_FLOATS},
    float16: "f16", bfloat16: "bf16", float32: "f32", float64: "f64",
    complex64: "c64", complex128: "c128",
    key: "key<fry>", float0: "float0",
}  # fmt: skip
_OF_SHORT_NAMES = {name: d for d, name in _SHORT_NAMES.items()}
ALL = frozenset(_SHORT_NAMES)
"""The dtypes of arrays, and ``float0``."""

_SUPPORTED = (
    "bool, int2, int4, int8..64, uint2, uint4, uint8..64, "
    + ", ".join(d.name for d in SMALL_FLOATS)
    + ", float16, bfloat16, float32, float64, complex64, complex128"
)

_NARROWED: dict[DType, DType] = {int64: int32, uint64: uint32, float64: float32, complex128: complex64}
_WIDENED = {narrow: wide for wide, narrow in _NARROWED.items()}
_IMPLICIT = dict(_NARROWED)  # empty in the wide mode

# Equal dtypes can be distinct objects (np.longlong, unpickled ones): as_dtype returns those named above.
_CANONICAL: dict[DType, DType] = {d: d for d in _SHORT_NAMES}

# The names of Python's number types say no width, so both spellings of each take the implicit one.
_specs: dict[Any, DType] = {
    **_CANONICAL,
    bool: bool_, int: int32, float: float32, complex: complex64,
    "bool": bool_, "int": int32, "float": float32, "complex": complex64,
    "key<fry>": key, "float0": float0,
}  # fmt: skip
_SPELLINGS = dict(_specs)
_truncated: dict[DType, DType] = {}  # requested dtypes that are replaced: none under blufunc's own name


def as_dtype(spec: Any) -> DType:
    """The dtype that a user requested by ``spec``; 64-bit is honoured.

    ``set_truncating`` says where it is not.

    ``spec`` is a dtype, a NumPy or ml_dtypes scalar type, a name such as ``'bfloat16'``, or ``bool``,
    ``int``, ``float`` or ``complex``, which stand for bool, int32, float32 and complex64.
    """
    try:
        return _specs[spec]
    except (KeyError, TypeError):  # TypeError: unhashable
        return _parse_spec(spec)


def _parse_spec(spec: Any) -> DType:
    try:
        if not isinstance(spec, (str, type, np.dtype)):  # NumPy reads None as float64, an array as its dtype
            raise TypeError
        dtype = np.dtype(spec).newbyteorder("=")  # arrays are native always
        dtype = _CANONICAL[dtype]
    except (KeyError, TypeError, ValueError):
        raise DtypeError(
            f"{spec!r} is not a dtype that blufunc supports",
            fix=f"use one of {_SUPPORTED}, or bool, int (int32), float (float32), complex (complex64)",
        ) from None
    _specs[spec] = dtype = _truncated.get(dtype, dtype)
    return dtype


def implicit(dtype: DType) -> DType:
    """The dtype for a value whose dtype was not requested: 64-bit becomes 32-bit."""
    return _IMPLICIT.get(dtype, dtype)


def default(kind: type) -> DType:
    """The dtype for ``int``, ``float`` or ``complex`` where none was requested."""
    return _specs[kind]


def short_name(dtype: DType) -> str:
    """The name in printed jaxprs and messages: ``f32``, ``bf16``, ``key<fry>``."""
    return _SHORT_NAMES.get(dtype) or str(dtype)


def named(short_name: str) -> DType:
    """The dtype of ``ALL`` with this ``short_name``."""
    return _OF_SHORT_NAMES[short_name]


def is_bool(dtype: DType) -> bool:
    return dtype == bool_


def is_integer(dtype: DType) -> bool:
    """Signed or unsigned; bool is not an integer."""
    return dtype in _INTEGER


def is_unsigned(dtype: DType) -> bool:
    return dtype in _UNSIGNED


def is_narrow(dtype: DType) -> bool:
    """True for integers of 2 and 4 bits."""
    return dtype in WIDE_OF_NARROW


def bits_of(dtype: DType) -> int:
    """Bits of an element that count; one of fewer than 8 fills a byte in memory."""
    if dtype == float4_e2m1fn:
        return 4
    return int(ml_dtypes.iinfo(dtype).bits) if dtype in WIDE_OF_NARROW else 8 * dtype.itemsize


def is_floating(dtype: DType) -> bool:
    """Real floating, those of a byte included."""
    return dtype in _FLOATING


def is_complex(dtype: DType) -> bool:
    return dtype in _COMPLEX


def is_inexact(dtype: DType) -> bool:
    """Floating or complex, that is, differentiable."""
    return dtype in _INEXACT


def is_key(dtype: DType) -> bool:
    return dtype == key


def is_numeric(dtype: DType) -> bool:
    """Integer, floating or complex: not bool, key or float0."""
    return dtype in _NUMERIC


def finfo(dtype: Any) -> Any:
    """Limits of a floating or complex dtype: ``eps``, ``max``, ``tiny``, ``bits``."""
    dtype = as_dtype(dtype)
    if dtype not in _INEXACT:
        raise DtypeError(f"finfo needs a floating or complex dtype, not {dtype}", fix="iinfo(dtype)")
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def iinfo(dtype: Any) -> Any:
    """Limits of an integer dtype: ``min``, ``max``, ``bits``."""
    dtype = as_dtype(dtype)
    if dtype not in _INTEGER:
        raise DtypeError(f"iinfo needs an integer dtype, not {dtype}", fix="finfo(dtype)")
    return ml_dtypes.iinfo(dtype) if dtype in WIDE_OF_NARROW else np.iinfo(dtype)


# The wide mode: what has no dtype has 64 bits. ``as_jax`` switches it, for programs that set ``jax_enable_x64``.

_of_modes: list[Callable[[], None]] = []


def forgotten_with_mode(forget: Callable[[], None]) -> Callable[[], None]:
    """Decorator: call a function, which clears a memo, when the mode changes."""
    _of_modes.append(forget)
    return forget


def is_wide() -> bool:
    """True if what has no dtype has 64 bits."""
    return not _IMPLICIT


def set_wide(on: bool) -> None:
    """Give 64 bits, or 32, to numbers, NumPy arrays and defaults without a dtype.

    Programs that were traced before hold the dtypes of their time: drop them (``jit.clear_caches``).
    """
    _IMPLICIT.clear()
    if not on:
        _IMPLICIT.update(_NARROWED)
    _set_specs()
    for kind in (int, float, complex):
        SCALARS[kind] = (_specs[kind], True) if on else {int: _INT, float: _FLOAT, complex: _CPLX}[kind]
    for forget in _of_modes:
        forget()


_truncates: list[bool] = [False]


def set_truncating(on: bool) -> None:
    """In the narrow mode replace requested 64-bit dtypes, too, by those of 32 bits.

    Programs for JAX request dtypes of NumPy's arrays, and get what ``jax_enable_x64`` admits.
    """
    _truncates[0] = on
    _set_specs()


def _set_specs() -> None:
    """Refill the table of requests for the mode."""
    _truncated.clear()
    if _truncates[0]:
        _truncated.update(_IMPLICIT)
    found = {spec: _truncated.get(dtype, dtype) for spec, dtype in _SPELLINGS.items()}
    if is_wide():
        for kind in (int, float, complex):
            found[kind] = found[kind.__name__] = _WIDENED[_SPELLINGS[kind]]
    _specs.update(found)  # never empty: other threads read it
    for spec in _specs.keys() - found.keys():
        del _specs[spec]


# Promotion. A node of the lattice is a pair (dtype, weak). The weak nodes are what Python scalars are: a
# kind with no width of its own, shown by its 32-bit dtype.

Weak = tuple[DType, bool]

_INT: Weak = (int32, True)
_FLOAT: Weak = (float32, True)
_CPLX: Weak = (complex64, True)


def _strong(*dtypes: DType) -> list[Weak]:
    return [(d, False) for d in dtypes]


# Each node with those directly above it.
_EDGES: dict[Weak, list[Weak]] = {
    (bool_, False): [_INT],
    _INT: _strong(uint8, int8, *WIDE_OF_NARROW),
    **{(d, False): [] for d in WIDE_OF_NARROW},  # nothing above: they promote with Python integers only
    (uint8, False): _strong(int16, uint16),
    (uint16, False): _strong(int32, uint32),
    (uint32, False): _strong(
        int32, uint64
    ),  # int32, not int64 as in the wide mode: nothing widens to 64 bits
    (uint64, False): [_FLOAT],
    (int8, False): _strong(int16),
    (int16, False): _strong(int32),
    (int32, False): _strong(int64),
    (int64, False): [_FLOAT],
    _FLOAT: [*_strong(*SMALL_FLOATS, bfloat16, float16), _CPLX],
    **{
        (d, False): [] for d in SMALL_FLOATS
    },  # nothing above: they promote with integers and weak floats only
    (bfloat16, False): _strong(float32),
    (float16, False): _strong(float32),
    (float32, False): _strong(float64, complex64),
    (float64, False): _strong(complex128),
    _CPLX: _strong(complex64),
    (complex64, False): _strong(complex128),
    (complex128, False): [],
}


def _ancestors(edges: dict[Weak, list[Weak]]) -> dict[Weak, frozenset[Weak]]:
    above: dict[Weak, frozenset[Weak]] = {}

    def visit(node: Weak) -> frozenset[Weak]:
        if node not in above:
            above[node] = frozenset({node}).union(*(visit(up) for up in edges[node]))
        return above[node]

    for node in edges:
        visit(node)
    return above


_ABOVE = _ancestors(_EDGES)
_ABOVE_WIDE = _ancestors(_EDGES | {(uint32, False): _strong(int64, uint64)})

# ``numpy_dtype_promotion="strict"``: weak dtypes only have something above them.
_STRICT = _ancestors(
    {node: [] for node in _EDGES}
    | {
        _INT: [_FLOAT, *_strong(*_INTEGER)],
        _FLOAT: [_CPLX, *_strong(*_FLOATING)],
        _CPLX: _strong(*_COMPLEX),
    }
)

_NOT_PROMOTED: dict[DType, tuple[str, str | None]] = {
    key: ("a PRNG key is opaque: it has no arithmetic", "random.key_data(k) gives its uint32 words"),
    float0: ("float0 is the tangent of an integer or bool: it is zero and holds no data", None),
}

# Two operands are looked up as given; more, as a set, so that long argument lists do not fill the memo.
_promoted: dict[tuple[Weak, ...] | frozenset[Weak], Weak] = Memo("numpy_dtype_promotion")
forgotten_with_mode(_promoted.clear)


def promote(*pairs: Weak) -> Weak:
    """The dtype and weakness of arithmetic on operands of these ``(dtype, weak)``.

    Raises DtypeError where there is none: keys, float0, and 8-bit floats with other floats.
    """
    memo_key = pairs if len(pairs) <= 2 else frozenset(pairs)
    result = _promoted.get(memo_key)
    if result is None:
        dtype, weak = _promote(pairs)
        # a weak node of the lattice has no width of its own
        result = _promoted[memo_key] = (_WIDENED.get(dtype, dtype) if weak and is_wide() else dtype, weak)
    return result


def _promote(pairs: tuple[Weak, ...]) -> Weak:
    if not pairs:
        raise DtypeError("promote needs at least one operand")
    if is_key(pairs[0][0]) and len(set(pairs)) == 1:
        return pairs[0]
    for dtype, _ in pairs:
        if (dtype, False) not in _ABOVE:
            why, fix = _NOT_PROMOTED.get(dtype, (f"supported are {_SUPPORTED}", None))
            raise DtypeError(f"{short_name(dtype)} takes no part in dtype promotion", why=why, fix=fix)
    pairs = tuple((dtype, weak and dtype != bool_) for dtype, weak in pairs)  # bool has no weak form
    strict = config.numpy_dtype_promotion == "strict"
    if all(weak for _, weak in pairs) and not strict:
        # Among weak operands the dtypes decide, so that a weak value is not narrowed by another.
        return _least_upper_bound({(dtype, False) for dtype, _ in pairs}, pairs)[0], True
    nodes = {_weak_node(dtype) if weak else (dtype, False) for dtype, weak in pairs}
    return _least_upper_bound(nodes, pairs, strict)


def _weak_node(dtype: DType) -> Weak:
    return _INT if dtype in _INTEGER else _FLOAT if dtype in _FLOATING else _CPLX


def _least_upper_bound(nodes: set[Weak], pairs: tuple[Weak, ...], strict: bool = False) -> Weak:
    lattice = _STRICT if strict else _ABOVE_WIDE if is_wide() else _ABOVE
    common = frozenset.intersection(*(lattice[n] for n in nodes))
    for node in common:
        if common <= lattice[node]:
            return node
    names = ", ".join(dict.fromkeys(("weak " if weak else "") + short_name(dtype) for dtype, weak in pairs))
    if strict:
        raise DtypeError(
            f"no implicit promotion between {names}",
            why="numpy_dtype_promotion is 'strict': only Python scalars take the dtype of an array of their kind",
            fix="convert one of them: x.astype('float32')",
        )
    raise DtypeError(
        f"no implicit promotion between {names}",
        why="numbers of 8 bits and fewer have too little range to be widened, or narrowed to, unasked"
        if any(d in SMALL_FLOATS or d in WIDE_OF_NARROW for d, _ in pairs)
        else None,
        fix="convert one of them: x.astype('float32')",
    )


SCALARS: dict[type, Weak] = {bool: (bool_, False), int: _INT, float: _FLOAT, complex: _CPLX}
"""The dtype of a Python scalar in promotion, and whether it is weak, by class."""
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


def scalar_dtype(x: Any) -> Weak:
    """``(dtype, weak)`` of a Python bool, int, float or complex."""
    pair = SCALARS.get(type(x))
    if pair is None:
        pair = _scalar_subclass(x)
    if pair[0] is int64 and not -(2**63) <= x < 2**63:
        raise ValueRangeError(f"Python int {x} does not fit in int64", fix=f"asarray({x}, dtype='uint64')")
    if pair is _INT and not _INT32_MIN <= x <= _INT32_MAX:
        wide = "int64" if -(2**63) <= x < 2**63 else "uint64" if 0 <= x < 2**64 else "float32"
        raise ValueRangeError(
            f"Python int {x} does not fit in int32",
            why="numbers without a dtype are 32-bit",
            fix=f"asarray({x}, dtype='{wide}')",
        )
    return pair


def _scalar_subclass(x: Any) -> Weak:
    # IntEnum and the like. np.float64 is a float too, but a strongly typed one: canonical_numpy takes it.
    if not isinstance(x, np.generic):
        for cls, pair in SCALARS.items():
            if isinstance(x, cls):
                return pair
    raise DtypeError(
        f"{type(x).__name__} is not a Python scalar", fix="pass a bool, int, float or complex, or asarray(x)"
    )


def canonical_numpy(x: np.ndarray[Any, Any] | np.generic) -> np.ndarray[Any, Any]:
    """``x`` as an array that blufunc can hold: 64-bit becomes 32-bit.

    float64 values beyond float32 become infinite, as in any such conversion; integers that do not fit raise.
    """
    check_unmasked(x)
    x = np.asarray(x)
    dtype = _CANONICAL.get(x.dtype)
    if dtype is None:
        dtype = _CANONICAL.get(x.dtype.newbyteorder("="))
        if dtype is None:
            raise DtypeError(
                f"a NumPy array of dtype {x.dtype} cannot become a blufunc array",
                why=f"supported are {_SUPPORTED}",
                fix="make its rows equally long" if x.dtype == object else "x.astype('float32')",
            )
        x = x.astype(dtype)
    target = _IMPLICIT.get(dtype)
    if target is None:
        # NumPy's long long equals its int64, and is another object with another character
        return x if x.dtype.char == dtype.char else x.view(dtype)
    if dtype in _INTEGER:
        _check_fits(x, dtype, target)
    with np.errstate(over="ignore"):
        return x.astype(target)


def check_narrow(x: Any, dtype: DType) -> None:
    """Raise OverflowError for integers that a dtype of 2 or 4 bits lacks."""
    limits = iinfo(dtype)
    for end in (np.min(x, initial=0), np.max(x, initial=0)):
        if not limits.min <= end <= limits.max:
            raise OverflowError(f"Python integer {int(end)} out of bounds for {dtype}")


def check_unmasked(x: Any) -> None:
    """Raise DtypeError for a masked array of NumPy, whose mask would be lost."""
    if isinstance(x, np.ndarray) and x.__class__ is not np.ndarray and isinstance(x, np.ma.MaskedArray):
        raise DtypeError(
            "a masked array of NumPy cannot become a blufunc array",
            why="there are no masks: the elements behind them would count",
            fix="x.filled(value), or keep x.data and ~x.mask as two arrays: bnp.where(valid, data, 0)",
        )


def _check_fits(x: np.ndarray[Any, Any], dtype: DType, target: DType) -> None:
    if x.size == 0:
        return
    info = np.iinfo(target)
    low, high = (int(x), int(x)) if x.ndim == 0 else (int(x.min()), int(x.max()))
    if low < info.min or high > info.max:
        raise ValueRangeError(
            f"a NumPy {dtype} array holds {high if high > info.max else low}, which does not fit in {target}",
            why="arrays given without an explicit dtype become 32-bit",
            fix=f"asarray(x, dtype='{dtype}')",
        )
