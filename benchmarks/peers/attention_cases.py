"""Attention cases shared by all libraries: causal, forward and with gradients.

Queries, keys, values and the cotangent of the result are random numbers from NumPy's generator, rounded to the dtype of
the case first, so every library has the same operands and the same exact results. Heads are independent: the results of
the first batch entry's first and last head are computed in float64 for comparison.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.peers import clock

SMALL, USUAL, LONG = (
    (1, 12, 512, 64),
    (16, 12, 1024, 64),
    (4, 32, 2048, 128),
)  # batch, heads, tokens, features
SHAPES = {
    "bf16": (SMALL, USUAL, LONG), "tf32": (USUAL, LONG), "fp32": (SMALL, USUAL, LONG), "float32_tc": (USUAL, LONG),
}  # fmt: skip
TINY = ((2, 2, 24, 8),)
PARTS = ("forward", "forward and backward")


@dataclass(frozen=True)
class Case:
    """A shape and a precision."""

    precision: str
    batch: int
    heads: int
    tokens: int
    features: int

    def label(self, part: str) -> str:
        """Label of a row."""
        return f"{part} {self.batch}x{self.heads}x{self.tokens}x{self.features}"

    def flops(self, part: str) -> float:
        """FLOPs of two matmuls forward and five backward, halved by the causal mask."""
        forward = 2.0 * self.batch * self.heads * self.tokens**2 * self.features
        return forward if part == PARTS[0] else 3.5 * forward

    def operands(self) -> list[np.ndarray]:
        """Query, key, value and cotangent, float32 [batch, tokens, heads, features]."""
        rng = np.random.default_rng(0)
        shape = (self.batch, self.tokens, self.heads, self.features)
        return [rng.standard_normal(shape, dtype=np.float32) for _ in range(4)]


def parser() -> argparse.ArgumentParser:
    """Options of all programs."""
    p = argparse.ArgumentParser()
    p.add_argument("--platform", choices=["cuda", "cpu"], default="cuda")
    p.add_argument("--precision", choices=list(SHAPES), default="bf16")
    p.add_argument("--tiny", action="store_true")
    return p


def cases(o: argparse.Namespace) -> Iterator[Case]:
    """Cases of a precision."""
    for shape in TINY if o.tiny else SHAPES[o.precision]:
        yield Case(o.precision, *shape)


def exact(operands: list[np.ndarray]) -> list[np.ndarray]:
    """Result and gradients of causal attention, softmax(q k^T / sqrt(D)) v.

    Args:
      operands: query, key, value, cotangent: float64 [heads, tokens, features].
    """
    q, k, v, ct = operands
    scale = q.shape[-1] ** -0.5
    scores = np.where(np.tri(q.shape[1], dtype=bool), scale * (q @ k.mT), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = weights @ v
    of_scores = weights * (ct @ v.mT - (ct * out).sum(-1, keepdims=True))
    return [out, scale * (of_scores @ k), scale * (of_scores.mT @ q), weights.mT @ ct]


def errors(operands: list[np.ndarray], results: list[np.ndarray]) -> dict[str, float]:
    """Relative root mean square errors: of the result, and of the worst gradient.

    Args:
      operands, results: as ``exact`` takes and returns them, of the heads that ``sampled`` selects.
    """
    found = [
        float(np.linalg.norm(mine - true) / np.linalg.norm(true))
        for mine, true in zip(results, exact(operands), strict=True)
    ]
    return {"out_error": found[0], "gradient_error": max(found[1:])}


def sampled(x: Any) -> np.ndarray:
    """First and last head of the first batch entry, float64.

    Args:
      x: [batch, tokens, heads, features].
    """
    return np.stack([np.asarray(x[0, :, head], np.float64) for head in (0, -1)])


def tell(case: Case, part: str, ms: float, **more: float | Callable) -> None:
    """Emit a row."""
    clock.emit(what=case.label(part), ms=ms, TFLOP_s=case.flops(part) / ms / 1e9, **more)
