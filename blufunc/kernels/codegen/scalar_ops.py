"""C expressions of elementwise primitives, the same for CPU and GPU.

Kernels, stage 6, called by ``c_renderer.py``. In: an ``apply`` of LoopIR. Out: its C expression: plain C where it
suffices (``x + y``, ``x < y``), else a call of ``bf_<primitive>``, which each dialect's prelude defines. The templates
belong to the primitives, as their C forms (``core/primitives/c_form.py``).

A scalar's variable has its **register type**: ``float`` for float16, bfloat16 and the 8-bit floats, which it holds
exactly; results are rounded to the narrow type at once, as NumPy does. Integers of 4 and 2 bits are held in 8 bits,
with their sign. ``storage_type`` is the type in memory. Integer arithmetic uses unsigned types, where overflow is
defined and wraps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.primitives.c_form import CForm

# -- types -----------------------------------------------------------------------------------------

STORAGE: dict[np.dtype, str] = {
    dtypes.bool_: "bool",
    dtypes.int8: "int8_t", dtypes.int16: "int16_t", dtypes.int32: "int32_t", dtypes.int64: "int64_t",
    dtypes.uint8: "uint8_t", dtypes.uint16: "uint16_t", dtypes.uint32: "uint32_t", dtypes.uint64: "uint64_t",
    dtypes.int2: "i2_t", dtypes.int4: "i4_t", dtypes.uint2: "u2_t", dtypes.uint4: "u4_t",
    dtypes.float8_e4m3fn: "e4m3", dtypes.float8_e5m2: "e5m2",
    dtypes.float4_e2m1fn: "e2m1", dtypes.float8_e3m4: "e3m4", dtypes.float8_e4m3: "e4m3i",
    dtypes.float8_e4m3b11fnuz: "e4m3b", dtypes.float8_e4m3fnuz: "e4m3z", dtypes.float8_e5m2fnuz: "e5m2z",
    dtypes.float8_e8m0fnu: "e8m0",
    dtypes.float16: "f16", dtypes.bfloat16: "bf16", dtypes.float32: "float", dtypes.float64: "double",
    dtypes.complex64: "c64", dtypes.complex128: "c128",
    dtypes.key: "prng_key",
}  # fmt: skip
"""The type of an element in memory."""


def storage_type(dtype: np.dtype) -> str:
    """The C type of an element in memory."""
    return STORAGE[dtype]


def is_small_float(dtype: np.dtype) -> bool:
    """True for floats narrower than 32 bits, which we compute in ``float``."""
    return dtypes.is_floating(dtype) and dtype.itemsize < 4


def register_type(dtype: np.dtype) -> str:
    """The C type of a variable that holds a scalar."""
    if is_small_float(dtype):
        return "float"
    return STORAGE[dtypes.WIDE_OF_NARROW.get(dtype, dtype)]


def _rounded(text: str, dtype: np.dtype) -> str:
    if dtypes.is_narrow(dtype):
        return f"wrap_to<{STORAGE[dtype]}>({text})"
    return f"round_to<{STORAGE[dtype]}>({text})" if is_small_float(dtype) else text


def loaded(text: str, dtype: np.dtype) -> str:
    """An element in memory as a scalar."""
    if dtypes.is_narrow(dtype):
        return f"to_int({text})"
    return f"to_float({text})" if is_small_float(dtype) else text


def stored(text: str, dtype: np.dtype) -> str:
    """A scalar as an element in memory."""
    if dtypes.is_narrow(dtype):
        return f"from_int<{STORAGE[dtype]}>({register_type(dtype)}({text}))"
    return f"from_float<{STORAGE[dtype]}>({unrounded(text, dtype)})" if is_small_float(dtype) else text


def unrounded(text: str, dtype: np.dtype) -> str:
    """A scalar without the rounding that a store of this dtype repeats."""
    rounds = f"round_to<{STORAGE[dtype]}>("
    return text[len(rounds) : -1] if text.startswith(rounds) and grouped(text) == text else text


def literal(value: Any, dtype: np.dtype) -> str:
    """A constant, exactly: floats in the shortest decimals that read back the same."""
    if dtypes.is_bool(dtype):
        return "true" if value else "false"
    if dtypes.is_key(dtype):
        return f"prng_key{{{int(value['hi'])}u, {int(value['lo'])}u}}"
    if dtypes.is_complex(dtype):
        part = dtypes.float32 if dtype == dtypes.complex64 else dtypes.float64
        return f"{STORAGE[dtype]}{{{_float(value.real, part)}, {_float(value.imag, part)}}}"
    if dtypes.is_floating(dtype):
        wide = dtypes.float64 if dtype == dtypes.float64 else dtypes.float32
        return _float(wide.type(value), wide)
    return _integer(int(value), dtype)


def _float(x: Any, dtype: np.dtype) -> str:
    single = dtype == dtypes.float32
    if not np.isfinite(x):
        text = "NAN" if np.isnan(x) else "INFINITY" if x > 0 else "-INFINITY"
        return text if single else f"double({text})"
    size = abs(float(x))
    plain = size == 0 or 1e-4 <= size < 1e8
    text = np.format_float_positional(x, trim="0") if plain else np.format_float_scientific(x, trim="0")
    return text + "f" * single


def _integer(n: int, dtype: np.dtype) -> str:
    dtype = dtypes.WIDE_OF_NARROW.get(dtype, dtype)
    info = dtypes.iinfo(dtype)
    if dtype == dtypes.int32:
        return str(n) if n > info.min else f"({n + 1} - 1)"  # C has no literal for the least integer
    if dtype == dtypes.uint32:
        return f"{n}u"
    if n == info.min < 0:
        return f"{STORAGE[dtype]}({n + 1}{'LL' * (info.bits == 64)} - 1)"
    suffix = "" if info.bits < 64 else "ULL" if dtypes.is_unsigned(dtype) else "LL"
    return f"{STORAGE[dtype]}({n}{suffix})"


# -- text ------------------------------------------------------------------------------------------


def grouped(text: str) -> str:
    """An expression in parentheses, unless it is one term."""
    return text if _is_term(text) else f"({text})"


def bare(text: str) -> str:
    """An expression without the parentheses that enclose all of it."""
    return text[1:-1] if text.startswith("(") and _is_term(text) else text


def _is_term(text: str) -> bool:
    """True for a name, a number, a call, or an expression in parentheses."""
    if text.startswith("-"):
        return False
    level = 0
    for i, c in enumerate(text):
        if c in "([{":
            level += 1
        elif c in ")]}":
            level -= 1
            if level == 0 and text[0] == "(" and i < len(text) - 1:
                return False
        elif c == " " and level == 0:
            return False
    return True


def _filled(template: str, args: Sequence[str], **names: str) -> str:
    """A template with operands, bare if a slot stands between parentheses or commas."""

    def operand(slot: re.Match) -> str:
        before, after = template[: slot.start()], template[slot.end() :]
        alone = before.endswith(("(", "{", ", ")) and after.startswith((")", "}", ","))
        return bare(args[int(slot[1])]) if alone else args[int(slot[1])]

    text = re.sub(r"\{(\d)\}", operand, template)
    return re.sub(r"\{([A-Za-z_]+)\}", lambda slot: names[slot[1]], text)


# -- expressions ------------------------------------------------------------------------------------

_POWERS = 8
_INTEGER_POWERS = 64
"""Largest powers written as products; beyond, floats call ``bf_pow``."""


def _kind(dtype: np.dtype) -> str:
    if dtypes.is_bool(dtype):
        return "b"
    if dtypes.is_integer(dtype):
        return "i"
    if dtypes.is_floating(dtype):
        return "f"
    return "c" if dtypes.is_complex(dtype) else "k"


def _form(prim: Any) -> CForm | None:
    """The C form of a primitive."""
    return prim.lower if isinstance(prim.lower, CForm) else None


def known(prim: Any, params: Mapping[str, Any], in_dtypes: Sequence[np.dtype]) -> bool:
    """True if ``prim`` has a C form for operands of ``in_dtypes``."""
    form = _form(prim)
    if form is None or not in_dtypes or any(d not in STORAGE for d in in_dtypes):
        return False
    if form.special:
        return _WRITES[form.special](params, in_dtypes[0])
    return _kind(in_dtypes[-1]) in form.templates


def expression(
    prim: Any,
    params: Mapping[str, Any],
    in_dtypes: Sequence[np.dtype],
    out_dtype: np.dtype,
    args: Sequence[str],
) -> str:
    """The C expression of an application, of the register type of ``out_dtype``.

    Args:
      prim: an elementwise primitive for which ``known`` holds.
      params: its parameters.
      in_dtypes: of the operands.
      out_dtype: of the result.
      args: an expression of register type per operand, with parentheses if needed; it may occur more than once if
        ``repeats`` holds.
    """
    form: CForm = prim.lower
    if form.special:
        return _SPECIAL[form.special](params, in_dtypes[0], out_dtype, args)
    dtype = in_dtypes[-1]
    template, names = form.templates[_kind(dtype)], {k: str(n) for k, n in params.items()}
    if form.stored:
        return loaded(_filled(template, [stored(bare(a), dtype) for a in args], **names), dtype)
    unsigned = "uint64_t" if dtype.itemsize == 8 else "uint32_t"
    text = _filled(template, args, **names, T=register_type(out_dtype), U=unsigned)
    return text if form.exact else _rounded(text, out_dtype)


def repeats(prim: Any, params: Mapping[str, Any]) -> bool:
    """True if an expression contains an operand more than once."""
    form: CForm = prim.lower
    return form.holds_twice() and not (form.special == "integer_pow" and params["y"] in (-1, 0, 1))


def _convert(params: Mapping[str, Any], source: np.dtype, target: np.dtype, args: Sequence[str]) -> str:
    (x,) = args
    a, b = _kind(source), _kind(target)
    if source == target:
        return x
    if b == "b":
        return f"{x} != 0" if a != "c" else f"{x}.re != 0 || {x}.im != 0"
    if b == "c":
        part = "float" if target == dtypes.complex64 else "double"
        re, im = (f"{x}.re", f"{part}({x}.im)") if a == "c" else (x, "0")
        return f"{STORAGE[target]}{{{part}({re}), {im}}}"
    if a == "c":
        part_dtype = dtypes.float32 if source == dtypes.complex64 else dtypes.float64
        return _convert(params, part_dtype, target, [f"{x}.re"])
    if dtypes.is_narrow(target):
        wide = dtypes.WIDE_OF_NARROW[target]
        if a == "f":  # saturating
            limits, of = dtypes.iinfo(target), dtypes.float64 if source == dtypes.float64 else dtypes.float32
            low, high = (literal(float(n), of) for n in (limits.min, limits.max))
            return f"bf_convert<{STORAGE[wide]}>(bf_min(bf_max({x}, {low}), {high}))"
        text = _convert(params, source, wide, args)
        return f"wrap_to<{STORAGE[target]}>({register_type(wide)}({text}))"
    if a == "f" and b == "i":
        return f"bf_convert<{STORAGE[target]}>({x})"
    if source == dtypes.float64 and is_small_float(target):
        return f"to_float(bf_convert<{STORAGE[target]}>({x}))"
    if a == "b":  # compilers vectorize a select, but not a conversion
        return f"{x} ? {literal(1, target)} : {literal(0, target)}"
    if register_type(source) == register_type(target):
        return _rounded(x, target)
    return _rounded(f"{register_type(target)}({x})", target)


def _bitcast(params: Mapping[str, Any], source: np.dtype, target: np.dtype, args: Sequence[str]) -> str:
    if source == target:
        return args[0]
    return loaded(f"bf_bitcast<{STORAGE[target]}>({stored(args[0], source)})", target)


def _integer_pow(params: Mapping[str, Any], source: np.dtype, target: np.dtype, args: Sequence[str]) -> str:
    n, kind = params["y"], _kind(source)
    one = literal(1, source)
    if kind == "f" and abs(n) > _POWERS:
        wide = dtypes.float64 if source == dtypes.float64 else dtypes.float32
        return _rounded(f"bf_pow({args[0]}, {literal(n, wide)})", target)
    if n == 0:
        return one
    if kind != "i":
        product = _power(args[0], abs(n))
        return _rounded(product if n > 0 else f"{one} / {grouped(product)}", target)
    unsigned = "uint64_t" if source.itemsize == 8 else "uint32_t"
    return f"{register_type(target)}({_power(f'{unsigned}({args[0]})', n)})"


def _power(x: str, n: int) -> str:
    """``x`` to the power ``n >= 1``, by squaring: compilers share equal factors."""
    if n == 1:
        return x
    half = grouped(_power(x, n // 2))
    return f"{half} * {half}" if n % 2 == 0 else f"{half} * {half} * {x}" if n > 3 else f"{x} * ({x} * {x})"


def _writes_integer_pow(params: Mapping[str, Any], source: np.dtype) -> bool:
    kind = _kind(source)
    return kind in "fc" or (kind == "i" and 0 <= params["y"] <= _INTEGER_POWERS)


_SPECIAL = {"convert": _convert, "bitcast": _bitcast, "integer_pow": _integer_pow}
_WRITES = {
    "convert": lambda params, x: not dtypes.is_key(x) and not dtypes.is_key(params["dtype"]),
    "bitcast": lambda params, x: x.itemsize == params["dtype"].itemsize and _kind(x) not in "bck",
    "integer_pow": _writes_integer_pow,
}
"""For forms that depend on parameters: the writer of each, and its domain."""

# -- names of the prelude ---------------------------------------------------------------------------

_HELPER = re.compile(
    r"\b(bf_\w+|round_to|to_float|from_float|to_int|from_int|wrap_to|u?int\d+_t|bf16|f16|e4m3|e5m2"
    r"|e3m4|e4m3i|e4m3b|e4m3z|e5m2z|e2m1|e8m0|[iu][24]_t|c64|c128|INFINITY|NAN)\b"
)


def helpers(text: str) -> set[str]:
    """The names of the prelude that a piece of C uses."""
    return set(_HELPER.findall(text))
