"""``scipy.cluster.vq``: the nearest codes of observations.

A face above ``blufunc.numpy``.
"""

from __future__ import annotations

from typing import Any

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.trace import Array
from blufunc.numpy.promotion import promote_dtypes

__all__ = ["vq"]


def vq(obs: Any, code_book: Any, check_finite: bool = True) -> tuple[Array, Array]:
    """The nearest code of each observation, and its distance.

    Args:
      obs: (m, n), or (m,) for numbers.
      code_book: (k, n), or (k,).
      check_finite: accepted, without effect.
    Returns:
      indices, int32 (m,), and Euclidean distances (m,).
    """
    obs, code_book = promote_dtypes("vq", obs, code_book, inexact=True)
    if obs.aval.ndim != code_book.aval.ndim or obs.aval.ndim not in (1, 2):
        raise errors.ShapeError(
            f"vq of {obs.aval} with the codes {code_book.aval}.",
            where=source.here(),
            fix="both are of rank 2, (m, n) and (k, n)",
        )
    if obs.aval.ndim == 1:
        obs, code_book = obs[:, None], code_book[:, None]
    if obs.shape[1] != code_book.shape[1]:
        raise errors.ShapeError(
            f"vq: observations have {obs.shape[1]} features, codes {code_book.shape[1]}.", where=source.here()
        )
    distances = bnp.linalg.norm(obs[:, None] - code_book, axis=-1)
    return bnp.argmin(distances, -1).astype(dtypes.default(int)), bnp.min(distances, -1)
