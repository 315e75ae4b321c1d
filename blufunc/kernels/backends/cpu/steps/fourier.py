"""Native forms of Fourier transforms, by the loops of NumPy's ufuncs.

Kernels, stages 6 and 8 on the CPU. In: equations of ``fft``. Out: their forms. NumPy exports no C function for its
transforms, but the object of a ufunc holds the addresses of its loops. They need neither Python nor its lock, and read
and write planned memory with any strides. If the object does not look as expected, transforms run in Python.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.fft import FftType, fft_p
from blufunc.kernels.backends.cpu.steps.form import Form, Library
from blufunc.kernels.loopir.index import strides_of

FILE = "backends/cpu/include/fourier.h"

_UFUNCS = ("fft", "ifft", "rfft_n_even", "rfft_n_odd", "irfft")
_TYPES = {"float32": ("ff->F", "Ff->F", "Ff->f"), "float64": ("dd->D", "Dd->D", "Dd->d")}
"""Signatures of loops by real dtype: of rfft, of fft and ifft, and of irfft."""


class _Ufunc(ctypes.Structure):
    """The first fields of ``PyUFuncObject``."""

    _fields_ = [
        ("head", ctypes.c_byte * object.__basicsize__),
        *((name, ctypes.c_int) for name in ("nin", "nout", "nargs", "identity")),
        ("functions", ctypes.POINTER(ctypes.c_void_p)),
        ("data", ctypes.POINTER(ctypes.c_void_p)),
        ("ntypes", ctypes.c_int),
    ]


@functools.cache
def _pointers(name: str, real: str) -> tuple[int, int] | None:
    """The loop of a ufunc and its argument; None if NumPy has another layout."""
    try:
        ufunc: Any = getattr(np.fft._pocketfft_umath, name)  # type: ignore[attr-defined]
        rfft, fft, irfft = _TYPES[real]
        at = ufunc.types.index(irfft if name == "irfft" else rfft if name.startswith("rfft") else fft)
    except (AttributeError, ValueError):
        return None
    seen = _Ufunc.from_address(id(ufunc))
    if (seen.nin, seen.nout, seen.nargs, seen.ntypes) != (ufunc.nin, ufunc.nout, ufunc.nargs, ufunc.ntypes):
        return None
    if (ufunc.nin, ufunc.nout) != (2, 1) or not seen.functions or not seen.functions[at]:
        return None
    return seen.functions[at], (seen.data[at] or 0) if seen.data else 0


def _address(routine: str) -> int:
    real, name, which = routine.split()
    found = _pointers(name, real)
    assert found is not None
    return found[int(which)]


LIBRARIES = {
    f"fourier_{real}": Library(
        FILE,
        ("fourier",),
        "transform",
        (("REAL", {"float32": "float", "float64": "double"}[real]),),
        tuple(f"{real} {name} {which}" for name in _UFUNCS for which in (0, 1)),
        _address,
    )
    for real in _TYPES
}
"""Libraries by name."""


def _real(eqn: Eqn) -> str:
    return {"complex64": "float32", "complex128": "float64"}.get(*[eqn.invars[0].aval.dtype.name] * 2)


def accepts(eqn: Eqn) -> bool:
    """True for an equation of ``FORMS`` that its form computes."""
    real = _real(eqn)
    return 0 not in eqn.invars[0].aval.shape and all(_pointers(name, real) is not None for name in _UFUNCS)


def _fft(eqn: Eqn) -> Form:
    x, out = eqn.invars[0].aval, eqn.outvars[0].aval
    kind, lengths, real = eqn.params["type"], eqn.params["lengths"], _real(eqn)
    axes = range(x.ndim - len(lengths), x.ndim)
    last = x.ndim - 1
    if kind is FftType.RFFT:
        first = ("rfft_n_odd" if lengths[-1] % 2 else "rfft_n_even", last)
        passes = [first, *(("fft", d) for d in reversed(axes[:-1]))]
    elif kind is FftType.IRFFT:
        passes = [*(("ifft", d) for d in axes[:-1]), ("irfft", last)]
    else:
        passes = [(kind.value, d) for d in reversed(axes)]
    through = kind is FftType.IRFFT and len(passes) > 1
    middle = x if through else out
    size = math.prod(lengths)
    nanoseconds = max(out.size, x.size) * (1 + math.log2(size)) + 50 * len(passes)
    sizes = [len(passes)]

    def strides(models: Sequence[np.ndarray]) -> list[int]:
        found = []
        source, shape, steps = 0, list(x.shape), models[0].strides
        for n, (name, d) in enumerate(passes):
            ends = n == len(passes) - 1
            aval = out if ends else middle
            target = 1 if ends or not through else 2
            to = [s * aval.dtype.itemsize for s in strides_of(aval.shape)]
            others = [a for a in range(x.ndim) if a != d]
            scaled = int(name in ("ifft", "irfft"))
            lengths_of = (shape[d], aval.shape[d])
            found += [_UFUNCS.index(name), *lengths_of, scaled, source, target, steps[d], to[d], len(others)]
            found += [*(aval.shape[a] for a in others), *(steps[a] for a in others), *(to[a] for a in others)]
            source, shape, steps = target, list(aval.shape), tuple(to)
        return found

    scratch = x.nbytes if through else 0
    return Form(f"fourier_{real}", (), sizes, strides, nanoseconds, scratch, False)


FORMS = {fft_p: _fft}
"""Makers of the forms of primitives."""
