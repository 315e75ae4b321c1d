"""Errors of float32 matmuls on tensor cores and of SGEMM, by a NumPy model.

    python -m benchmarks.suites.float32_errors [--out FILE]

Needs no GPU. Each matmul consists of the equations that a CUDA device would get (``with_split_products``), evaluated in
NumPy, except for split-K partial sums, which only shorten the chains of additions. A float64 model of a tensor core
evaluates the matmuls of parts:

- operands and their products are exact; TF32 cores take float32 operands rounded to 11 bits;
- 16 terms at a time (8 for TF32) and the accumulator are aligned to their largest exponent, truncated 2 bits below the
  24 of float32, added, and the result is truncated to 24 bits: no step rounds to nearest.

Fasi, Higham, Mikaitis and Pranesh (2021) found this behaviour, with the extra bits of later tensor cores. SGEMM is
modelled as a chain of fused multiply-adds. An error has two measures, for results C of A and B:
``rms`` = |C - C64|_F / |C64|_F, and ``worst``, the largest |C - C64| / (|A| |B|) of an element. Bounds of IEEE
arithmetic are stated in terms of ``worst``: unlike rms, it shows losses where rows differ in scale.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import blufunc as bf
from benchmarks import report
from benchmarks.harness.timing import RESULTS
from blufunc.core.ir.jaxpr import Jaxpr, Literal
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.gemm_layout import chunks_of
from blufunc.kernels.ops.gemm import PRODUCTS
from blufunc.kernels.precision import ALGORITHMS
from blufunc.kernels.rewrites.split_float32 import with_split_products

SIDE = 48
TERMS = (768, 3072, 32768, 50304)
EXTRA_BITS = 2

# -- arithmetic ------------------------------------------------------------------------------------


def _cut(x: np.ndarray, top: np.ndarray, bits: int) -> np.ndarray:
    """``x`` truncated to multiples of a unit, relative to the leading bit of ``top``."""
    step = np.ldexp(1.0, np.maximum(np.frexp(top)[1] - bits, -149))
    return np.trunc(x / step) * step


def by_tensor_core(x: np.ndarray, y: np.ndarray, at_a_time: int) -> np.ndarray:
    """Matmul of (m, k) and (k, n) matrices, as float32."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    total = np.zeros((x.shape[0], y.shape[1]))
    for k in range(0, x.shape[1], at_a_time):
        part = slice(k, k + at_a_time)
        terms = x[:, part, None] * y[None, part]
        top = np.maximum(np.abs(terms).max(1), np.abs(total))
        total = _cut(terms, top[:, None], 24 + EXTRA_BITS).sum(1) + _cut(total, top, 24 + EXTRA_BITS)
        total = _cut(total, np.abs(total), 24)
    with np.errstate(over="ignore"):
        return total.astype(np.float32)


def by_fma(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The same in float32, one term after another."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    total = np.zeros((x.shape[0], y.shape[1]), np.float32)
    for k in range(x.shape[1]):
        total = (total + x[:, k, None] * y[k]).astype(np.float32)
    return total


def tf32(x: np.ndarray) -> np.ndarray:
    """float32 rounded to 11 bits, to nearest."""
    bits = x.view(np.int32)
    return (bits + 0xFFF + ((bits >> 13) & 1) & ~0x1FFF).view(np.float32)


def _product(
    x: np.ndarray,
    y: np.ndarray,
    *addend: np.ndarray,
    chunk: int = 1 << 30,
    dimension_numbers: Any = (((1,), (0,)), ()),
    **_: Any,
) -> np.ndarray:
    x, y = (
        v if axes == (axis,) else v.T
        for v, axes, axis in zip((x, y), dimension_numbers[0], (1, 0), strict=True)
    )
    if x.dtype == np.float32:
        x, y = tf32(x), tf32(y)
    total = addend[0] if addend else np.float32(0)
    for start, size in chunks_of(x.shape[1], chunk):
        part = slice(start, start + size)
        total = total + by_tensor_core(x[:, part], y[part], 8 if x.dtype == np.float32 else 16)
    return total


def evaluated(jaxpr: Jaxpr, *args: np.ndarray) -> np.ndarray:
    """Result of a program, with the model for its matmuls."""
    env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        ins = [np.asarray(a.value) if isinstance(a, Literal) else env[a] for a in eqn.invars]
        function: Callable = _product if eqn.prim in PRODUCTS else eqn.prim.impl
        env[eqn.outvars[0]] = function(*ins, **eqn.params)
    return env[jaxpr.outvars[0]]


def by_algorithm(name: str, chunk: int | None = None) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Matmuls as on a CUDA device; ``chunk`` overrides the algorithm's."""

    def run(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        traced = bf.jit(lambda x, y: bf.numpy.matmul(x, y, precision=name)).trace(x, y)
        usual = ALGORITHMS[name]
        ALGORITHMS[name] = replace(usual, chunk=chunk or usual.chunk)
        try:
            jaxpr = with_split_products(simplify(traced.jaxpr), {}, lambda *sizes: True)
        finally:
            ALGORITHMS[name] = usual
        with np.errstate(all="ignore"):
            return evaluated(jaxpr, x, y)

    return run


METHODS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "SGEMM": by_fma,
    "TF32": _product,
    "F16_F16_F32_SCALED": by_algorithm("F16_F16_F32_SCALED"),
    "F16_F16_F32_X3": by_algorithm("F16_F16_F32_X3"),
    "F16 X3, chunks of 128": by_algorithm("F16_F16_F32_X3", 128),
    "F16 X3, chunks of 1024": by_algorithm("F16_F16_F32_X3", 1024),
    "F16 X3, one chunk": by_algorithm("F16_F16_F32_X3", 1 << 24),
}

# -- operands --------------------------------------------------------------------------------------


def _spread(rng: np.random.Generator, bits: int, *shape: int) -> np.ndarray:
    """Powers of two between ``2^-bits`` and ``2^bits``."""
    return np.exp2(rng.integers(-bits, bits + 1, shape))


def _normal(rng, k):
    return rng.standard_normal((SIDE, k)), rng.standard_normal((k, SIDE))


def _positive(rng, k):
    return rng.random((SIDE, k)), rng.random((k, SIDE))


def _rows(rng, k):
    x, y = _normal(rng, k)
    return x * _spread(rng, 60, SIDE, 1), y * _spread(rng, 40, 1, SIDE)


def _elements(rng, k):
    x, y = _normal(rng, k)
    return x * _spread(rng, 12, SIDE, k), y * _spread(rng, 12, k, SIDE)


def _contracted(bits: int) -> Callable:
    def operands(rng, k):
        x, y = _normal(rng, k)
        scale = _spread(rng, bits, k)
        return x * scale, y / scale[:, None]

    return operands


def _loss_gradient(rng, k):
    """Class probabilities minus the one-hot label, and class weights."""
    logits = 3 * rng.standard_normal((SIDE, k))
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(SIDE), rng.integers(0, k, SIDE)] -= 1
    return p / (32 * 1024), 0.02 * rng.standard_normal((k, SIDE))


def _subnormal(rng, k):
    x, y = _normal(rng, k)
    return x * 2.0**-130, y * 2.0**100


def _large(rng, k):
    x, y = _normal(rng, k)
    return np.clip(x, -3, 3) * 2.0**126, y * 2.0**-30


OPERANDS: dict[str, Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]] = {
    "normal": _normal,
    "positive": _positive,
    "rows scaled by 2^±60, columns by 2^±40": _rows,
    "elements scaled by 2^±12": _elements,
    "a loss's gradient": _loss_gradient,
    "subnormal": _subnormal,
    "near the largest": _large,
    "contracted axis scaled by 2^±12 and its inverse": _contracted(12),
    "contracted axis scaled by 2^±30 and its inverse": _contracted(30),
}

# -- the record ------------------------------------------------------------------------------------


def errors_of(
    operands: str, terms: int, methods: Iterable[str] = tuple(METHODS)
) -> dict[str, dict[str, float]]:
    """Errors ``rms`` and ``worst``, by method."""
    rng = np.random.default_rng([terms, len(operands)])
    x, y = (np.ascontiguousarray(v, np.float32) for v in OPERANDS[operands](rng, terms))
    exact = x.astype(np.float64) @ y.astype(np.float64)
    bound = np.abs(x).astype(np.float64) @ np.abs(y).astype(np.float64)
    found = {}
    for name in methods:
        error = np.abs(METHODS[name](x, y) - exact)
        rms = float(np.linalg.norm(error / np.abs(exact).max()) / np.linalg.norm(exact / np.abs(exact).max()))
        found[name] = {"rms": rms, "worst": float((error / bound).max())}
    return found


def main() -> None:
    """Compute all errors, print the table and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "float32_errors-cpu.json")
    parser.add_argument("--terms", type=int, nargs="+", default=TERMS)
    options = parser.parse_args()
    rows = []
    for operands in OPERANDS:
        for terms in options.terms:
            rows.append({"operands": operands, "terms": terms, "errors": errors_of(operands, terms)})
            print(f"{operands}, {terms} terms", flush=True)
    record = {
        "benchmark": "float32_errors",
        "date": datetime.date.today().isoformat(),
        "side": SIDE,
        "extra_bits": EXTRA_BITS,
        "rows": rows,
    }
    assert all(math.isfinite(e[m]) for r in rows for e in r["errors"].values() for m in ("rms", "worst"))
    print(report.errors(record))
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
