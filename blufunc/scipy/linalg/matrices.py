"""Special matrices: of vectors, and of a size alone.

Face over ``bnp``. Matrices of a size alone are made by SciPy on the host, and are float32 where JAX has no other dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import _lazy, errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import static_int
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.shape import concatenate, iota, pad, rev, slice_
from blufunc.core.primitives.linear_ops import broadcast_in_dim
from blufunc.numpy.manipulation import atleast_1d, atleast_2d
from blufunc.numpy.picking import take
from blufunc.numpy.promotion import as_value, broadcast_shapes, inexact, promote_dtypes, stretch

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike

with _lazy.modules(globals()):
    import scipy.linalg

# -- of vectors --------------------------------------------------------------------------------------


def block_diag(*arrs: Any) -> Array:
    """The block-diagonal matrix of the given matrices; vectors are rows."""
    if not arrs:
        raise errors.ArgumentError("block_diag takes one matrix at least.", where=source.here())
    blocks = [atleast_2d(x) for x in promote_dtypes("block_diag", *arrs)]
    if any(b.aval.ndim > 2 for b in blocks):
        raise errors.ShapeError(
            f"block_diag of {', '.join(str(b.aval) for b in blocks)}: blocks are matrices.",
            where=source.here(),
            fix="use vmap for batches",
        )
    width, before, rows = sum(b.aval.shape[1] for b in blocks), 0, []
    for b in blocks:
        n = b.aval.shape[1]
        rows.append(pad(b, ew.zeros_of(b), [(0, 0, 0), (before, width - before - n, 0)]))
        before += n
    return concatenate(rows, 0)


def toeplitz(c: ArrayLike, r: ArrayLike | None = None) -> Array:
    """Toeplitz matrices (..., m, n) of first columns c (..., m) and rows r (..., n).

    ``r[0]`` is not read. By default r is the conjugate of c, and the matrix is Hermitian.
    """
    c = atleast_1d(as_value(c, "toeplitz"))
    r = ew.conj(c) if r is None and dtypes.is_inexact(c.aval.dtype) else c if r is None else r
    c, r = promote_dtypes("toeplitz", c, atleast_1d(as_value(r, "toeplitz")))
    lead = broadcast_shapes(c.aval.shape[:-1], r.aval.shape[:-1])
    m, n = c.aval.shape[-1], r.aval.shape[-1]
    c, r = stretch(c, (*lead, m)), stretch(r, (*lead, n))
    if not m or not n:
        return broadcast_in_dim(ew.zeros_of(c), (*lead, m, n), ())
    d, start = len(lead), (0,) * len(lead)
    # what stands on the diagonals, from the lowest to the highest
    values = concatenate([rev(c, (d,)), slice_(r, (*start, 1), (*lead, n))], d)
    row, column = iota(dtypes.int32, (m, n), 0), iota(dtypes.int32, (m, n), 1)
    return take(values, ew.add(ew.sub(column, row), m - 1), axis=d)


def circulant(c: ArrayLike) -> Array:
    """Circulant matrices (..., n, n) of first columns c (..., n)."""
    c = atleast_1d(as_value(c, "circulant"))
    n = c.aval.shape[-1]
    i = bnp.arange(n)
    return take(c, (i[:, None] - i) % max(n, 1), axis=-1)


def hankel(c: ArrayLike, r: ArrayLike | None = None) -> Array:
    """Hankel matrices (..., m, n) of first columns c and last rows r, 0 by default.

    ``r[0]`` is not read.
    """
    c = atleast_1d(as_value(c, "hankel"))
    c, r = promote_dtypes("hankel", c, bnp.zeros_like(c) if r is None else atleast_1d(as_value(r, "hankel")))
    lead = broadcast_shapes(c.aval.shape[:-1], r.aval.shape[:-1])
    m, n = c.aval.shape[-1], r.aval.shape[-1]
    values = bnp.concatenate([stretch(c, (*lead, m)), stretch(r, (*lead, n))[..., 1:]], -1)
    return take(values, bnp.arange(m)[:, None] + bnp.arange(n), axis=-1)


def companion(a: ArrayLike) -> Array:
    """Companion matrices of polynomials a (..., n), highest power first."""
    a = inexact(a, "companion")
    _at_least(a, 2, "companion")
    n = a.aval.shape[-1] - 1
    first = -a[..., 1:] / a[..., :1]
    below = bnp.broadcast_to(bnp.eye(n - 1, n, dtype=a.dtype), (*a.aval.shape[:-1], n - 1, n))
    return bnp.concatenate([first[..., None, :], below], -2)


def fiedler(a: ArrayLike) -> Array:
    """The matrices of ``abs(a[i] - a[j])``."""
    a = atleast_1d(as_value(a, "fiedler"))
    return bnp.abs(a[..., :, None] - a[..., None, :])


def fiedler_companion(a: ArrayLike) -> Array:
    """Pentadiagonal companion matrices of a polynomial a, highest power first.

    M. Fiedler, "A note on companion matrices" (2003).
    """
    a = inexact(a, "fiedler_companion")
    _at_least(a, 2, "fiedler_companion")
    c = a / a[..., :1]
    n = c.aval.shape[-1] - 1
    zero, one = bnp.zeros_like(c[..., 0]), bnp.ones_like(c[..., 0])
    rows = [[zero] * n for _ in range(n)]
    rows[0][0] = -c[..., 1]
    for i in range(1, n):
        # odd rows below the first hold a one on the left, even ones a coefficient
        rows[i][i - 1] = one if i == 1 else zero
    for j in range(0, n - 1, 2):  # the coefficients c[j + 2], and the ones of their rows
        rows[j][j + 1] = -c[..., j + 2]
        if j + 2 < n:
            rows[j][j + 2] = one
    for j in range(1, n - 1, 2):
        rows[j + 1][j] = -c[..., j + 2]
        if j + 2 < n:
            rows[j + 2][j] = one
    return bnp.stack([bnp.stack(row, -1) for row in rows], -2)


def leslie(f: Any, s: Any) -> Array:
    """Leslie matrices of fecundities f (..., n) and survivals s (..., n - 1)."""
    f, s = promote_dtypes("leslie", atleast_1d(as_value(f, "leslie")), atleast_1d(as_value(s, "leslie")))
    n = f.aval.shape[-1]
    if s.aval.shape[-1] != n - 1 or n < 2:
        raise errors.ShapeError(
            f"leslie of {f.aval} and {s.aval}.",
            where=source.here(),
            fix="f has two elements or more, s one less than f",
        )
    lead = broadcast_shapes(f.aval.shape[:-1], s.aval.shape[:-1])
    f, s = stretch(f, (*lead, n)), stretch(s, (*lead, n - 1))
    below = s[..., None] * bnp.eye(n - 1, n, dtype=s.dtype)
    return bnp.concatenate([f[..., None, :], below], -2)


def convolution_matrix(a: ArrayLike, n: int, mode: str = "full") -> Array:
    """The matrix A with ``A @ v = convolve(a, v, mode)`` for v (n,)."""
    a = atleast_1d(as_value(a, "convolution_matrix"))
    n = _size(n, "convolution_matrix", 1)
    if mode not in ("full", "same", "valid"):
        raise errors.ValueRangeError(
            f"convolution_matrix: mode is {mode!r:.60}.",
            where=source.here(),
            fix="use 'full', 'same' or 'valid'",
        )
    _at_least(a, 1, "convolution_matrix")
    m = a.aval.shape[-1]
    start, count = {
        "full": (0, n + m - 1),
        "same": ((min(n, m) - 1) // 2, max(n, m)),
        "valid": (min(n, m) - 1, abs(n - m) + 1),
    }[mode]
    at = bnp.arange(count)[:, None] + start - bnp.arange(n)
    inside = (at >= 0) & (at < m)
    return bnp.where(inside, take(a, bnp.clip(at, 0, m - 1), axis=-1), bnp.zeros((), a.dtype))


def _at_least(a: Array, n: int, name: str) -> None:
    if not a.aval.ndim or a.aval.shape[-1] < n:
        raise errors.ShapeError(
            f"{name} of {a.aval}.", where=source.here(), fix=f"a vector of {n} elements or more"
        )


# -- of a size ---------------------------------------------------------------------------------------


def _size(n: Any, name: str, least: int = 0) -> int:
    n = static_int(n, name, "n")
    if n < least:
        raise errors.ValueRangeError(f"{name}: n = {n}.", where=source.here(), fix=f"give {least} or more")
    return n


def _kind(kind: Any, name: str) -> str:
    kind = "symmetric" if kind is None else kind
    if kind not in ("symmetric", "lower", "upper"):
        raise errors.ValueRangeError(
            f"{name}: {kind!r:.60} is not a kind.",
            where=source.here(),
            fix="kind='symmetric', 'lower' or 'upper'",
        )
    return kind


def hilbert(n: int) -> Array:
    """The float32 matrix with elements ``1 / (i + j + 1)``."""
    n = _size(n, "hilbert")
    return 1 / (
        bnp.arange(n, dtype=dtypes.default(float))[:, None] + bnp.arange(n, dtype=dtypes.default(float)) + 1
    )


def invhilbert(n: int) -> Array:
    """The inverse of ``hilbert(n)``, rounded to float32."""
    return bnp.asarray(scipy.linalg.invhilbert(_size(n, "invhilbert", 1)), dtype=dtypes.default(float))


def pascal(n: int, kind: str | None = None) -> Array:
    """Pascal's matrix in float32: ``"symmetric"`` (None), ``"lower"``, ``"upper"``."""
    return bnp.asarray(
        scipy.linalg.pascal(_size(n, "pascal"), _kind(kind, "pascal"), exact=False),
        dtype=dtypes.default(float),
    )


def invpascal(n: int, kind: str | None = None) -> Array:
    """The inverse of ``pascal(n, kind)``, rounded to float32."""
    n = _size(n, "invpascal", 1)
    return bnp.asarray(scipy.linalg.invpascal(n, _kind(kind, "invpascal"), exact=False), dtype="float32")


def helmert(n: int, full: bool = False) -> Array:
    """Helmert's orthonormal matrix, float32; without ``full`` less its first row."""
    return bnp.asarray(scipy.linalg.helmert(_size(n, "helmert", 1), full), dtype=dtypes.default(float))


def hadamard(n: int, dtype: DTypeLike = int) -> Array:
    """Hadamard's matrix of n rows, by Sylvester's construction; n is a power of 2."""
    n = _size(n, "hadamard", 1)
    if n & (n - 1):
        raise errors.ValueRangeError(
            f"hadamard: n = {n} is not a power of 2.", where=source.here(), fix=f"n = {1 << n.bit_length()}"
        )
    return bnp.asarray(scipy.linalg.hadamard(n), dtype=dtypes.as_dtype(dtype))


def dft(n: int, scale: str | None = None, *, dtype: DTypeLike | None = None) -> Array:
    """The matrix of the discrete Fourier transform: ``dft(n) @ x`` is ``fft(x)``.

    Args:
      scale: ``"sqrtn"``: unitary; ``"n"``: divided by n; None.
      dtype: complex64 by default.
    """
    if scale not in (None, "sqrtn", "n"):
        raise errors.ValueRangeError(
            f"dft: {scale!r:.60} is not a scale.", where=source.here(), fix="scale=None, 'sqrtn' or 'n'"
        )
    return bnp.asarray(scipy.linalg.dft(_size(n, "dft", 1), scale), dtype=dtype or dtypes.complex64)


__all__ = [
    "block_diag", "circulant", "companion", "convolution_matrix", "dft", "fiedler", "fiedler_companion", "hadamard",
    "hankel", "helmert", "hilbert", "invhilbert", "invpascal", "leslie", "pascal", "toeplitz",
]  # fmt: skip
