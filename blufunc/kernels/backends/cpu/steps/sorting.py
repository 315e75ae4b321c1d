"""Native forms of sorts and selections: stable, by digits of unsigned keys.

Kernels, stage 6 on the CPU. In: equations of ``sort`` and ``top_k``. Out: their forms. A key is an integer whose order
is that of the values; NaN is last. Lines of up to 64 results are selected from in one pass.
"""

from __future__ import annotations

import math

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.sort import sort_p, top_k_p
from blufunc.kernels.backends.cpu.steps.form import Form, Library, bytes_of
from blufunc.kernels.loopir.index import strides_of

FILE = "backends/cpu/include/sorting.h"

_INFINITIES = {
    "float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF0000000000000,
}  # fmt: skip
"""Bits of infinity in the floating dtypes that have keys."""

_MOST = 1 << 31
"""Limit of the length of a line: positions have 32 bits."""


def _has_keys(dtype: np.dtype) -> bool:
    return dtype.name in _INFINITIES or dtype.kind in "iub"


def _kind(dtype: np.dtype) -> tuple[int, int, int]:
    """``Kind`` of ``include/sorting.h``."""
    signed = dtypes.is_integer(dtype) and not dtypes.is_unsigned(dtype)
    return dtype.itemsize, int(signed), _INFINITIES.get(dtype.name, 0)


def _library(dtype: np.dtype) -> Library:
    size, signed, infinity = _kind(dtype)
    pair, word = "Long" if size == 8 else "Short", f"uint{8 * size}_t"
    constants = (
        ("BYTES", size),
        ("IS_SIGNED", bool(signed)),
        ("INFINITE", str(infinity)),
        ("WORD", word),
        ("PAIR", pair),
    )
    return Library(FILE, ("keys", "top_k"), "top_k", constants)


_ORDERED = [np.dtype(d) for d in (*"?bhilBHILefd", dtypes.bfloat16)]

LIBRARIES = {
    "sort": Library(FILE, ("keys", "sort"), "sort"),
    **{f"top_k_{dtype.name}": _library(dtype) for dtype in _ORDERED},
}
"""Libraries by name."""


def _scratch(n: int, is_long: bool) -> int:
    pair = 16 if is_long else 8
    return bytes_of((n, pair), (n, pair))


def _sort(eqn: Eqn) -> Form:
    avals = [v.aval for v in eqn.invars]
    d, n_keys, shape = eqn.params["dimension"], eqn.params["num_keys"], avals[0].shape
    batch, n = shape[:d] + shape[d + 1 :], shape[d]
    is_long = any(a.dtype.itemsize == 8 for a in avals[:n_keys])
    kinds = [x for a in avals[:n_keys] for x in _kind(a.dtype)]
    kinds += [x for a in avals[n_keys:] for x in (a.dtype.itemsize, 0, 0)]
    axes = (*(i for i in range(len(shape)) if i != d), d)

    def strides(models):
        pairs = zip(models, avals, strict=True)
        # each operand's, then those of its result
        both = [(x.strides, [s * a.dtype.itemsize for s in strides_of(shape)]) for x, a in pairs]
        return [s[i] for pair in both for s in pair for i in axes]

    time = math.prod(shape) * (4 + 4 * n_keys + 2 * len(avals)) + 20 * math.prod(batch)
    sizes = (n, len(avals), n_keys, int(is_long), *kinds)
    return Form("sort", batch, sizes, strides, time, _scratch(n, is_long))


def _top_k(eqn: Eqn) -> Form:
    x, k = eqn.invars[0].aval, eqn.params["k"]
    *batch, n = x.shape
    time = math.prod(x.shape) + math.prod(batch) * (20 + 10 * k)
    sizes, scratch = (n, k), _scratch(n, x.dtype.itemsize == 8)
    return Form(f"top_k_{x.dtype.name}", tuple(batch), sizes, lambda models: models[0].strides, time, scratch)


def accepts(eqn: Eqn) -> bool:
    """True for an equation of ``FORMS`` that its form computes."""
    x = eqn.invars[0].aval
    if eqn.prim is top_k_p:
        return x.shape[-1] < _MOST and _has_keys(x.dtype) and eqn.params["k"] > 0
    avals = [v.aval for v in eqn.invars]
    keys = avals[: eqn.params["num_keys"]]
    n = x.shape[eqn.params["dimension"]]
    sizes = all(a.dtype.itemsize in (1, 2, 4, 8, 16) for a in avals)
    return 0 < n < _MOST and sizes and all(_has_keys(a.dtype) for a in keys)


FORMS = {sort_p: _sort, top_k_p: _top_k}
"""Makers of the forms of primitives."""
