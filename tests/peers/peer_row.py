"""A row of the comparison with JAX, and its comparisons.

In comes a function written against a namespace (``m.np``, ``m.lax``, ``m.grad``, ...), so that one text is run by both
libraries; out come values, both derivatives, a second derivative, and the function over a batch, as NumPy arrays.
"""

from __future__ import annotations

import functools
import operator
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

TOLERANCE = {"float32": 2e-5, "float64": 1e-12}
"""Allowed error relative to the largest element; tenfold for derivatives."""


@dataclass(frozen=True)
class A:
    """An argument: floats uniform in [low, high], unless ``dtype`` says otherwise.

    Attributes:
      shape: its shape.
      low, high: its range; of integers it includes both.
      dtype: None for that of the run; "complex" for complex numbers of that precision; or a dtype.
      make: what to do with the random array, as symmetrizing a matrix.
      distinct: whether no two elements are near each other.
    """

    shape: tuple[int, ...] = (2, 3)
    low: float = -2.0
    high: float = 2.0
    dtype: str | None = None
    make: Callable[[np.ndarray], np.ndarray] | None = None
    distinct: bool = False

    def sample(self, rng: np.random.Generator, dtype: str) -> np.ndarray:
        """An argument for a run in ``dtype``."""
        kind = np.dtype(self.dtype if self.dtype not in (None, "complex") else dtype)
        if kind.kind == "b":
            x = rng.random(self.shape) < 0.5
        elif kind.kind in "iu":
            x = rng.integers(int(self.low), int(self.high) + 1, self.shape)
        elif self.distinct:
            n = int(np.prod(self.shape))
            x = rng.permutation(np.linspace(self.low, self.high, n)).reshape(self.shape)
        else:
            x = rng.uniform(self.low, self.high, self.shape)
            if self.dtype == "complex":
                x = x + 1j * rng.uniform(self.low, self.high, self.shape)
                kind = np.result_type(kind, np.complex64)
        if self.make is not None:
            x = self.make(x)
        return np.asarray(x, kind)


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
      name: unique; the path of the function in the namespace if ``fun`` is None, before a space if there is one.
      args: its arguments, ``A``; those that are inexact are differentiated.
      fun: ``fun(m, *args)``, or None for the function of that name.
      options: keyword arguments.
      order: how often it is differentiated: 0, 1 or 2.
      batch: whether it is mapped.
      jit: whether it is compiled; False where it is not possible, as where shapes depend on values.
      dtypes: what to run it in.
      tol: a factor on the tolerances.
      differs: why some of it cannot agree, with what to leave out: (reason, names of results).
    """

    name: str
    args: tuple[A, ...] = (A(),)
    fun: Callable | None = None
    options: dict[str, Any] = field(default_factory=dict)
    order: int = 2
    batch: bool = True
    jit: bool = True
    dtypes: tuple[str, ...] = ("float32", "float64")
    tol: float = 1.0
    differs: tuple[str, tuple[str, ...]] | None = None

    def function(self, m: SimpleNamespace) -> Callable:
        """The function in one library."""
        if self.fun is not None:
            return functools.partial(self.fun, m, **self.options)
        return functools.partial(operator.attrgetter(self.name.split(" ")[0])(m), **self.options)

    def sample(self, dtype: str, salt: int = 0) -> list[np.ndarray]:
        """Arguments, the same in every run."""
        rng = np.random.default_rng([zlib.crc32(self.name.encode()), salt])
        return [a.sample(rng, dtype) for a in self.args]


def probe(m: SimpleNamespace, row: Row, dtype: str) -> dict[str, list[np.ndarray]]:
    """Everything that is compared, computed by one library."""
    f = row.function(m)
    point, other = row.sample(dtype), row.sample(dtype, 1)
    wrt = [i for i, a in enumerate(point) if a.dtype.kind in "fc"]
    flat = lambda out: [x for x in m.tree.leaves(out) if hasattr(x, "dtype")]
    lift = functools.partial(_lift, m)

    def of_inexact(*xs):
        args = [lift(a) for a in point]
        for i, x in zip(wrt, xs, strict=True):
            args[i] = x
        return [x for x in flat(f(*args)) if np.dtype(x.dtype).kind in "fc"]

    ins = [lift(point[i]) for i in wrt]
    rng = np.random.default_rng(7)
    tangents = [_like(m, rng, x) for x in ins]
    differentiable = row.order and wrt

    def everything(args, ins, tangents, cts, batches):
        results = {"value": flat(f(*args))}
        if differentiable:
            results["jvp"] = m.jvp(of_inexact, tuple(ins), tuple(tangents))[1]
            pullback = lambda *xs: list(m.vjp(of_inexact, *xs)[1](cts))
            results["vjp"] = pullback(*ins)
            if row.order > 1:
                results["jvp of vjp"] = m.jvp(pullback, tuple(ins), tuple(tangents))[1]
        if row.batch:
            results["vmap"] = flat(m.vmap(f)(*batches))
            if differentiable:
                one = lambda *xs: list(m.vjp(of_inexact, *xs)[1](cts))
                results["vmap of vjp"] = m.vmap(one)(*[batches[i] for i in wrt])
        return results

    cts: list = []
    if differentiable:
        cts = [_like(m, rng, x) for x in m.eval_shape(of_inexact, *ins)]
    args = [lift(a) for a in point]
    batches = [lift(np.stack([a, b])) for a, b in zip(point, other, strict=True)]
    operands = (args, ins, tangents, cts, batches)
    results = {}
    if not (m.compile and row.jit):
        results = {k: list(map(np.asarray, xs)) for k, xs in everything(*operands).items()}
    if row.jit:
        compiled = {k: list(map(np.asarray, xs)) for k, xs in m.jit(everything)(*operands).items()}
        # the peer's compiled program stands for both: that it agrees with itself is not in question
        results = results or compiled
        results |= {f"jit of {k}": xs for k, xs in compiled.items()}
    return results


def _like(m: SimpleNamespace, rng: np.random.Generator, x: Any) -> Any:
    """A random tangent or cotangent."""
    t = rng.standard_normal(x.shape)
    if np.dtype(x.dtype).kind == "c":
        t = t + 1j * rng.standard_normal(x.shape)
    return _lift(m, t.astype(x.dtype))


def _lift(m: SimpleNamespace, x: np.ndarray) -> Any:
    """A NumPy array as a library's, in its own dtype: blufunc's default is 32-bit."""
    return m.np.asarray(x, dtype=x.dtype)


def error_of(got: np.ndarray, want: np.ndarray) -> float:
    """The largest relative difference; infinite where only one is NaN or infinite."""
    got, want = (np.asarray(x) for x in (got, want))
    if got.shape != want.shape or got.dtype != want.dtype:
        return np.inf
    if got.dtype.kind not in "fc":
        return 0.0 if np.array_equal(got, want) else np.inf
    kind = np.complex128 if got.dtype.kind == "c" else np.float64
    got, want = got.astype(kind), want.astype(kind)
    finite = np.isfinite(want)
    if not np.array_equal(finite, np.isfinite(got)) or not np.array_equal(
        got[~finite], want[~finite], equal_nan=True
    ):
        return np.inf
    if not finite.any():
        return 0.0
    scale = max(np.abs(want[finite]).max(), 1e-3)
    return float(np.abs(got[finite] - want[finite]).max() / scale)
