"""Cases of the breadth suite: a program, its arguments, and the same in PyTorch.

One source serves blufunc and JAX, with the library as first argument. Arguments are NumPy arrays, so that all libraries
get the same values. Whether results agree is decided from samples of every result (``samples``, ``difference``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
PERIOD = 1_048_573  # a prime, so that rows of no array repeat
SAMPLES = 64
TOLERANCES = {"bfloat16": 4e-2, "float16": 1e-2}
DEFAULT_TOLERANCE = 2e-3
"""Largest difference over the largest sampled magnitude.

Sums of thousands of terms are in another order.
"""


@dataclass(frozen=True)
class Case:
    """A program to time.

    Attributes:
      program: ``program(lib, *arguments)`` for blufunc and JAX.
      make: returns the arguments: NumPy arrays, in trees.
      torch: ``torch(torch, *arguments)``, if PyTorch has the operation; arguments are its tensors.
      prepare: ``prepare(torch, *arguments)``, run once: layouts that PyTorch's users choose ahead of a loop.
      compiled: the same as ``torch``, with what matters under ``torch.compile``.
      tolerance: of the comparison; None for that of the arguments' narrowest dtype.
      carried: leading arguments that the first results replace, as in a training loop; donated.
      ieee: float32 matmuls are IEEE's in every library; False for models of 16 bits, whose last layers JAX may then
        compute in TF32, its default.
      comparable: PyTorch's results are the same; its random bits and weights are not.
      compared: number of the last results that are compared; None: all.
    """

    program: Callable[..., Any]
    make: Callable[[], tuple]
    torch: Callable[..., Any] | None = None
    prepare: Callable[..., tuple] | None = None
    compiled: Callable[..., Any] | None = None
    tolerance: float | None = None
    carried: int = 0
    ieee: bool = True
    comparable: bool = True
    compared: int | None = None


LOW: dict[str, Any] = {"tolerance": 0.15, "ieee": False}
"""Options of models that compute in bfloat16.

Samples of gradients differ by some roundings of activations.
"""


class Sizes:
    """Full or tiny sizes: ``n(4096, 16)`` is the first in full size."""

    def __init__(self, tiny: bool):
        self.tiny = tiny

    def __call__(self, full: Any, tiny: Any) -> Any:
        """The one of both that applies."""
        return tiny if self.tiny else full


def _pool(seed: int) -> np.ndarray:
    found = _POOLS.get(seed)
    if found is None:
        rng = np.random.default_rng(seed)
        found = _POOLS[seed] = rng.standard_normal(PERIOD, dtype=np.float32)
    return found


_POOLS: dict[int, np.ndarray] = {}


def normal(*shape: int, dtype: Any = F32, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Normal values. Large arrays repeat a million of them, which are quick to make."""
    values = _pool(seed).astype(dtype) if scale == 1.0 else (_pool(seed) * np.float32(scale)).astype(dtype)
    return np.resize(values, shape)


def weight(*shape: int, dtype: Any = F32, seed: int = 0) -> np.ndarray:
    """Normal weights; the last axis has the outputs, all others are summed over."""
    return normal(*shape, dtype=dtype, seed=seed, scale=float(np.prod(shape[:-1])) ** -0.5)


def positive(*shape: int, dtype: Any = F32, seed: int = 0) -> np.ndarray:
    """Uniform values in (0.5, 1.5)."""
    values = np.random.default_rng(seed).random(min(PERIOD, int(np.prod(shape))), dtype=np.float32)
    return np.resize((values + np.float32(0.5)).astype(dtype), shape)


def integers(high: int, *shape: int, dtype: Any = np.int32, seed: int = 0, low: int = 0) -> np.ndarray:
    """Random integers in [low, high)."""
    return np.random.default_rng(seed).integers(low, high, shape, dtype=dtype)


def distinct(rows: int, columns: int) -> np.ndarray:
    """Rows of distinct values: libraries order equal ones differently."""
    order = np.random.default_rng(0).permutation(columns).astype(np.float32)
    shifts = 7919 * np.arange(rows, dtype=np.int64)[:, None]
    return order[(np.arange(columns) + shifts) % columns]


def definite(*shape: int, seed: int = 0) -> np.ndarray:
    """Well-conditioned positive definite matrices."""
    x = normal(*shape, seed=seed)
    return (x @ x.swapaxes(-1, -2) / shape[-1] + np.eye(shape[-1], dtype=np.float32)).astype(np.float32)


# -- agreement -------------------------------------------------------------------------------------


def samples(leaves: list[np.ndarray]) -> list[dict]:
    """Evenly spaced elements of each of the results, and their dtypes."""
    each = max(1, SAMPLES // max(1, len(leaves)))
    found = []
    for leaf in leaves[:SAMPLES]:
        flat = np.asarray(leaf).reshape(-1)
        picked = flat[np.linspace(0, flat.size - 1, min(each, flat.size)).astype(np.int64)]
        values = picked.astype(np.complex128).view(np.float64) if picked.dtype.kind == "c" else picked
        found.append(
            {
                "dtype": str(leaf.dtype),
                "shape": list(leaf.shape),
                "values": [float(v) for v in values],
            }
        )
    return found


def difference(one: list[dict], other: list[dict]) -> float:
    """Largest difference of two results, relative to each one's magnitude."""
    if [r["shape"] for r in one] != [r["shape"] for r in other]:
        return float("inf")
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        left, right = np.array(a["values"]), np.array(b["values"])
        if not np.array_equal(np.isfinite(left), np.isfinite(right)):
            return float("inf")
        finite = np.isfinite(left)
        if not finite.any():
            worst = worst if not left.size else float("inf")  # nothing was computed that could differ
            continue
        scale = np.abs(right[finite]).max() or 1.0
        worst = max(worst, float(np.abs(left[finite] - right[finite]).max() / scale))
    return worst


def tolerance(case: Case, leaves: list[Any]) -> float:
    """The case's tolerance, or that of the narrowest of these arguments or results."""
    if case.tolerance is not None:
        return case.tolerance
    return max((TOLERANCES.get(str(leaf.dtype), 0.0) for leaf in leaves), default=0.0) or DEFAULT_TOLERANCE
