"""A row of the table of operations: primitive, arguments, definition, rules.

Below ``tests/op_table/rows.py``, which holds the rows. A row knows how to make arguments on which a comparison is fair:
inside the domain, and away from kinks and ties, so that finite differences converge.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.primitives.primitive import Primitive

FLOATS = ("float64", "float32", "float16", "bfloat16")
COMPLEX = ("complex128", "complex64")
INEXACT = FLOATS + COMPLEX
KEY = "key<fry>"
INTS = ("int32", "int8", "int64", "uint8", "uint32")
BITS = (*INTS, "bool")
NUMBERS = ("float64", "float32", "bfloat16", "complex128", "int32", "uint8")
ANY = (*NUMBERS, "bool", KEY)


@dataclass(frozen=True)
class Arg:
    """How to make one argument.

    Attributes:
      shape: its shape.
      low, high: its range.
      dtype: its dtype; None for that of the run.
      avoid: points, kinks of the function, to keep away from.
      step, offset: values are multiples of ``step`` plus ``offset``: never near those of another offset.
      distinct: no two elements are near each other; of integers, no two along ``axis`` are equal.
    """

    shape: tuple[int, ...] = (2, 3)
    low: float = -2.0
    high: float = 2.0
    dtype: str | None = None
    avoid: tuple[float, ...] = ()
    step: float = 0.0
    offset: float = 0.0
    distinct: bool = False
    axis: int = 0

    def aval(self, dtype: str) -> ShapedArray:
        """The type of the argument."""
        return ShapedArray(self.shape, dtypes.as_dtype(self.dtype or dtype))

    def sample(self, rng: np.random.Generator, dtype: str, batch: tuple[int, ...] = ()) -> np.ndarray:
        """An argument, with extra axes ``batch`` in front."""
        d = dtypes.as_dtype(self.dtype or dtype)
        shape = batch + self.shape
        if dtypes.is_key(d):
            return rng.integers(0, 2**32, (*shape, 2), np.uint32).view(dtypes.key)[..., 0]
        if dtypes.is_bool(d):
            return rng.random(shape) < 0.5
        if dtypes.is_integer(d):
            low = max(math.ceil(self.low), 0) if dtypes.is_unsigned(d) else math.ceil(self.low)
            if self.distinct:
                n = self.shape[self.axis]
                range_ = np.arange(low, max(math.floor(self.high) + 1, low + n))
                lines = rng.permuted(np.broadcast_to(range_, (math.prod(shape) // n, len(range_))), axis=1)
                rest = np.delete(shape, len(batch) + self.axis)
                return np.moveaxis(lines[:, :n].reshape(*rest, n), -1, len(batch) + self.axis).astype(d)
            return rng.integers(low, math.floor(self.high) + 1, shape).astype(d)
        x = self._reals(rng, batch)
        if dtypes.is_complex(d):
            x = x + 1j * self._reals(rng, batch)
        return x.astype(d)

    def _reals(self, rng: np.random.Generator, batch: tuple[int, ...]) -> np.ndarray:
        shape = batch + self.shape
        if self.distinct:
            n = math.prod(self.shape)
            grid = np.linspace(self.low, self.high, n)
            return np.asarray([rng.permutation(grid) for _ in range(math.prod(batch))]).reshape(shape)
        x = rng.uniform(self.low, self.high, shape)
        if self.step:
            x = np.round(x / self.step) * self.step + self.offset
        for kink in self.avoid:
            x = np.where(np.abs(x - kink) < 0.1, np.where(x < kink, kink - 0.2, kink + 0.2), x)
        return x


@dataclass(frozen=True)
class Op:
    """One row.

    Attributes:
      prim: the primitive.
      args: its arguments.
      ref: an independent definition on NumPy arrays: floats arrive in float64, the rest as they are. None where
        the primitive's own ``impl`` is all there is.
      params: its parameters.
      name: tells this row from the primitive's others.
      grad: how often it can be differentiated.
      dtypes: what to run it in.
      out: the dtype of the result: a name, a function of the dtype of the run, or None for the same.
      refuses: dtypes that it must not take.
      tol: a factor on the usual tolerances of values.
      mixes: whether operands of different dtypes are allowed.
      linear: whether it must be transposable where it happens to be linear.
      wrt: the arguments to differentiate with respect to; None for all that are inexact.
    """

    prim: Primitive
    args: tuple[Arg, ...]
    ref: Callable | None = None
    params: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    grad: int = 0
    dtypes: tuple[str, ...] = FLOATS
    out: str | Callable[[str], str] | None = None
    refuses: tuple[str, ...] = ()
    tol: float = 1.0
    mixes: bool = False
    linear: bool = True
    wrt: tuple[int, ...] | None = None

    @property
    def id(self) -> str:
        """The name of the test."""
        return f"{self.prim.name}-{self.name}" if self.name else self.prim.name

    def apply(self, *args: Any) -> Any:
        """The primitive on values."""
        return self.prim.bind(*args, **self.params)

    def sample(self, dtype: str, batch: tuple[int, ...] = (), salt: int = 0) -> list[np.ndarray]:
        """Arguments, the same in every run."""
        rng = np.random.default_rng([zlib.crc32(self.id.encode()), salt])
        return [a.sample(rng, dtype, batch) for a in self.args]

    def out_dtype(self, dtype: str) -> str:
        """The dtype of the result in a run in ``dtype``."""
        if self.out is None:
            return dtype
        return self.out(dtype) if callable(self.out) else self.out
