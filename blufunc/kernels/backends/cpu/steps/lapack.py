"""LAPACK and BLAS routines as pointers, which SciPy exports for Cython.

Kernels, stage 8 on the CPU. In: the name of a routine. Out: its address, or the sizes of its workspaces. All arguments
are pointers, and integers have 32 bits.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from typing import Any

import numpy as np

_PREFIXES = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}
_UNITARY = {"orgqr": "ungqr", "syevd": "heevd"}
"""Names of routines for complex matrices."""

ROUTINES = ("getrf", "potrf", "trsm", "geqrf", "orgqr", "syevd", "gesdd", "gtsv")
"""The routines that libraries call; the order is that in ``include/linalg.h``."""


def routine(name: str, dtype: np.dtype) -> str:
    """Name of a routine for a dtype: ``zheevd`` for "syevd" of complex128."""
    return _PREFIXES[dtype.name] + (_UNITARY.get(name, name) if dtype.kind == "c" else name)


@functools.cache
def address(name: str) -> int:
    """Address of a routine."""
    for module in ("scipy.linalg.cython_lapack", "scipy.linalg.cython_blas"):
        capsule = importlib.import_module(module).__pyx_capi__.get(name)
        if capsule is not None:
            name_of, pointer_of = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
            name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
            pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
            return pointer_of(capsule, name_of(capsule))
    raise LookupError(name)


@functools.cache
def workspaces(name: str, dtype: np.dtype, *arguments: Any) -> tuple[int, ...]:
    """Sizes that a routine asks for.

    Args:
      name: of the routine, for all dtypes.
      dtype: of the matrix.
      arguments: in order: a letter or an integer; None for an array that a query does not read; "work" for an array of
        ``dtype``, "reals" for one of its real type and "integers" for one of integers, whose size follows as -1.
    """
    kept: list[Any] = []
    answers = []
    real = np.zeros(0, dtype).real.dtype
    for a in arguments:
        if isinstance(a, int):
            kept.append(np.array([a], np.int32))
        elif a is None or len(a) == 1:
            kept.append(np.frombuffer(bytearray((a or "x").encode() * 16), np.uint8))
        else:
            kept.append(np.zeros(2, {"work": dtype, "reals": real, "integers": np.int32}[a]))
            answers.append(kept[-1])
    info = np.zeros(1, np.int32)
    pointers = [x.ctypes.data for x in (*kept, info)]
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(pointers))
    function(address(routine(name, dtype)))(*pointers)
    assert not info[0], (name, arguments, info)
    return tuple(max(1, int(x[0].real)) for x in answers)
