"""A user-defined primitive: a banded solve with structured derivative and batch.

    banded_solve(bands, b)      # x with A x = b, A given by its diagonals

A tridiagonal system of a million unknowns takes milliseconds; the dense matrix would not fit into memory. No
composition of array operations achieves that, so it is a primitive: its ``impl`` is LAPACK's solver, and three rules
integrate it:

- ``jvp``, by differentiating A x = b:  A x' = b' - A' x. The derivative is another banded solve and a banded matvec,
  which is an ordinary composition (``banded_matvec``) with its own derivatives.
- ``transpose``, since x is linear in b: the cotangent of b solves the transposed system, which is banded too.
- ``batch``: many right-hand sides of one matrix are columns of one solve, which factorizes A once; many matrices are a
  batch.

``jit``, ``grad`` of any order, ``vmap`` and all other transforms follow. ``bf.testing.check_primitive`` checks every
rule against the definition.

    python -m examples.extend.primitive
"""

from __future__ import annotations

import time

import numpy as np
import scipy.linalg

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, extend, lax, testing


def shifted(x, d):
    """Elements along the last axis shifted by d places, padded with zeros."""
    widths = [(0, 0, 0)] * (x.ndim - 1) + [(d, -d, 0)]
    return lax.pad(x, bnp.zeros((), x.dtype), widths)


def banded_matvec(bands, x):
    """A x, column by column: ``bands[w + i - j, j]`` is A[i, j], x is (n, k)."""
    width = bands.shape[-2] // 2
    columns = bnp.swapaxes(x, -1, -2)  # the elements of a vector along the last axis
    terms = [shifted(bands[..., width + d, None, :] * columns, d) for d in range(-width, width + 1)]
    return bnp.swapaxes(sum(terms[1:], terms[0]), -1, -2)


def transposed(bands):
    """Bands of the transposed matrix: diagonals in reverse order, shifted."""
    width = bands.shape[-2] // 2
    rows = [shifted(bands[..., width - d, :], -d) for d in range(-width, width + 1)]
    return bnp.stack(rows, -2)


class BandedSolve(bf.Primitive):
    """Solve: ``bands`` (*batch, 2w+1, n) and ``b`` (*batch, n, k) to x (*batch, n, k)."""

    name, kind, fresh = "banded_solve", "linalg", True

    def impl(self, bands, b):
        """LAPACK's solver, for each matrix of the batch; NaN if singular."""
        width = bands.shape[-2] // 2
        x = np.empty_like(b)
        for i in np.ndindex(b.shape[:-2]):
            try:
                x[i] = scipy.linalg.solve_banded((width, width), bands[i], b[i])
            except np.linalg.LinAlgError:
                x[i] = np.nan
        return x

    def abstract(self, bands, b):
        if bands.dtype != b.dtype or bands.dtype not in (np.float32, np.float64):
            raise errors.DtypeError(
                f"banded_solve takes two arrays of float32 or of float64, not {bands} and {b}.",
                fix="convert: x.astype('float32')",
            )
        fits = bands.ndim >= 2 and b.ndim == bands.ndim and bands.shape[-2] % 2 == 1
        if not fits or b.shape[:-1] != (*bands.shape[:-2], bands.shape[-1]):
            raise errors.ShapeError(
                f"banded_solve takes bands (..., 2w+1, n) and right-hand sides (..., n, k), not {bands} and {b}.",
                fix="one right-hand side is b[:, None]",
            )
        return extend.ShapedArray(b.shape, b.dtype)

    def jvp(self, primals, tangents):
        bands, b = primals
        bands_t, b_t = tangents  # either may be a symbolic zero
        x = self.bind(bands, b)
        if not isinstance(bands_t, extend.Zero):
            change = -banded_matvec(bands_t, x)
            b_t = extend.add_tangents(b_t, change)
        if isinstance(b_t, extend.Zero):
            return x, extend.zero(x.aval)
        return x, self.bind(bands, b_t)

    def transpose(self, ct, bands, b):
        if extend.is_linear(bands):
            raise errors.GradError(
                "banded_solve is not linear in its matrix: that goes through its derivative."
            )
        b.add(self.bind(transposed(bands), ct))

    def batch(self, axis, args, dims):
        bands, b = args
        bands_dim, b_dim = dims
        if bands_dim is None and bands.ndim == 2:
            # one matrix: the batch joins the columns
            columns = bnp.moveaxis(b, b_dim, -1)
            n, *k = columns.shape
            return self.bind(bands, columns.reshape(n, -1)).reshape(n, *k), 2
        front = [extend.batched_front(axis, x, d) for x, d in zip(args, dims, strict=True)]
        return self.bind(*front), 0


banded_solve_p = BandedSolve()


def banded_solve(bands, b):
    """Solve A x = b for a banded A.

    Args:
      bands: (2w+1, n), the diagonals of A in LAPACK's order: A[i, j] is at [w + i - j, j].
      b: (n,) or (n, k).
    """
    bands, b = bnp.asarray(bands), bnp.asarray(b)
    if b.ndim == 1:
        return banded_solve_p.bind(bands, b[:, None])[:, 0]
    return banded_solve_p.bind(bands, b)


# -- smoothing a long signal -----------------------------------------------------------------------


def smooth(signal, stiffness):
    """Smooth a signal: solve (1 + stiffness L) x = signal, L the path's Laplacian."""
    n = signal.shape[0]
    inner = bnp.ones(n, signal.dtype)
    degree = inner.at[bnp.asarray([0, n - 1])].add(-0.5) * 2
    off = -stiffness * inner
    return banded_solve(bnp.stack([off, 1 + stiffness * degree, off]), signal)


def main():
    bands = bnp.asarray(np.random.default_rng(0).uniform(-1, 1, (3, 6)), "float64").at[1].add(4)
    b = bnp.asarray(np.random.default_rng(1).uniform(-1, 1, (6, 2)), "float64")
    print(testing.check_primitive(banded_solve_p, bands, b), "\n")

    n = 200_000
    rng = np.random.default_rng(2)
    truth = np.sin(np.linspace(0, 20, n))
    noisy, truth = bnp.asarray(truth + rng.normal(0, 0.5, n), "float64"), bnp.asarray(truth, "float64")

    def error(log_stiffness):
        return bnp.mean(bnp.square(smooth(noisy, bnp.exp(log_stiffness)) - truth))

    step = bf.jit(bf.value_and_grad(error))
    print(f"the best stiffness for a noisy signal of {n} points, by gradient descent on its logarithm")
    log_stiffness = bnp.asarray(0.0, "float64")
    began = time.perf_counter()
    for i in range(12):
        value, slope = step(log_stiffness)
        if i % 3 == 0:
            print(f"  stiffness {float(bnp.exp(log_stiffness)):10.1f}  error {float(value):.6f}")
        log_stiffness = log_stiffness - slope / value  # the error is proportional to powers of the stiffness
    print(f"  12 solves and their derivatives in {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
