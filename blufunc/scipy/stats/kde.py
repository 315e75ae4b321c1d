"""``gaussian_kde``: density estimates by Gaussian kernels.

A face, above ``blufunc.random`` and ``scipy.special``. An estimate is a mixture of normal distributions about the
points of a data set, all of one covariance: D. W. Scott, "Multivariate Density Estimation" (1992).
"""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc import errors, random
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import shape_of
from blufunc.core.ir.trace import Array
from blufunc.numpy.promotion import inexact, promote_dtypes
from blufunc.scipy import linalg, special
from blufunc.tree_util import register_pytree_node_class


@register_pytree_node_class
class gaussian_kde:
    """The density estimate of a data set; a pytree of its arrays.

    Args:
      dataset: n points of d dimensions, (d, n) or (n,).
      bw_method: the width of kernels over that of the data: ``"scott"`` (None), ``"silverman"``, a number, or a
        function of the estimate.
      weights: (n,), of the points; normalized.

    Attributes:
      neff: the effective number of points.
      dataset: (d, n).
      weights: (n,), of sum 1.
      covariance, inv_cov: of the kernels, (d, d).
    """

    def __init__(self, dataset: Any, bw_method: Any = None, weights: Any = None):
        x = inexact(bnp.asarray(dataset), "gaussian_kde")
        if dtypes.is_complex(x.dtype):
            raise errors.DtypeError(
                f"gaussian_kde takes real numbers, not {x.aval}.",
                where=source.here(),
                fix="stack x.real and x.imag as two dimensions",
            )
        x = bnp.atleast_2d(x)
        if x.ndim != 2 or not x.size:
            raise errors.ShapeError(
                f"gaussian_kde of {x.aval}.", where=source.here(), fix="n points of d dimensions: (d, n)"
            )
        d, n = x.shape
        if weights is None:
            w = bnp.full(n, 1 / n, x.dtype)
        else:
            x, w = promote_dtypes("gaussian_kde", x, weights)
            if w.shape != (n,):
                raise errors.ShapeError(
                    f"gaussian_kde of {n} points with the weights {w.aval}.", where=source.here()
                )
            w = w / bnp.sum(w)
        self.dataset, self.weights = x, w
        self.neff = 1 / bnp.sum(w**2)
        width = self._width(bw_method)
        covariance = bnp.atleast_2d(bnp.cov(x, rowvar=True, bias=False, aweights=w))
        self.covariance = covariance * width**2
        self.inv_cov = bnp.linalg.inv(covariance) / width**2

    def _width(self, method: Any) -> Any:
        power = -1 / (self.d + 4)
        if method is None or (isinstance(method, str) and method == "scott"):
            return self.neff**power
        if isinstance(method, str) and method == "silverman":
            return (self.neff * (self.d + 2) / 4) ** power
        if callable(method):
            return method(self)
        if isinstance(method, str) or bnp.ndim(method):
            raise errors.ValueRangeError(
                f"gaussian_kde: {method!r:.60} is not a method for the bandwidth.",
                where=source.here(),
                fix="bw_method='scott', 'silverman', a number or a function",
            )
        return bnp.asarray(method, self.dataset.dtype)

    def tree_flatten(self):
        """Children and static data, as a pytree node."""
        return (self.neff, self.dataset, self.weights, self.covariance, self.inv_cov), None

    @classmethod
    def tree_unflatten(cls, _, children):
        """The inverse of ``tree_flatten``."""
        made = object.__new__(cls)
        made.neff, made.dataset, made.weights, made.covariance, made.inv_cov = children
        return made

    @property
    def d(self) -> int:
        """The number of dimensions."""
        return self.dataset.shape[0]

    @property
    def n(self) -> int:
        """The number of points."""
        return self.dataset.shape[1]

    # -- densities --

    def evaluate(self, points: Any) -> Array:
        """The density at points (d, k), or (d,) for one; (k,)."""
        return bnp.exp(self.logpdf(points))

    __call__ = evaluate

    def pdf(self, x: Any) -> Array:
        """The density at points; see ``evaluate``."""
        return self.evaluate(x)

    def logpdf(self, x: Any) -> Array:
        """The logarithm of the density at points; see ``evaluate``."""
        x = self._points(x)
        return _log_sums(x, self.dataset, bnp.log(self.weights), self.covariance)

    def _points(self, points: Any) -> Array:
        x, _ = promote_dtypes("gaussian_kde", bnp.asarray(points), self.dataset, inexact=True)
        x = bnp.atleast_2d(x)
        if x.ndim == 2 and x.shape == (1, self.d) and self.d > 1:
            x = x.T  # one point
        if x.ndim != 2 or x.shape[0] != self.d:
            raise errors.ShapeError(
                f"gaussian_kde of {self.d} dimensions at points {x.aval}.",
                where=source.here(),
                fix=f"points are ({self.d}, k)",
            )
        return x

    # -- integrals --

    def integrate_gaussian(self, mean: Any, cov: Any) -> Array:
        """The integral of the density times a normal density."""
        mean = bnp.atleast_1d(bnp.squeeze(inexact(bnp.asarray(mean), "gaussian_kde")))
        cov = bnp.atleast_2d(inexact(bnp.asarray(cov), "gaussian_kde"))
        if mean.shape != (self.d,) or cov.shape != (self.d, self.d):
            raise errors.ShapeError(
                f"gaussian_kde of {self.d} dimensions, a mean {mean.aval} and a covariance {cov.aval}.",
                where=source.here(),
            )
        logs = _log_sums(mean[:, None], self.dataset, bnp.log(self.weights), self.covariance + cov)
        return bnp.exp(logs)[0]

    def integrate_box_1d(self, low: Any, high: Any) -> Array:
        """The probability of values between two bounds, of one dimension."""
        if self.d != 1:
            raise errors.ValueRangeError(
                f"integrate_box_1d of an estimate of {self.d} dimensions.", where=source.here()
            )
        sigma = bnp.sqrt(self.covariance[0, 0])
        below = lambda bound: special.ndtr((bound - self.dataset[0]) / sigma)
        return bnp.sum(self.weights * (below(high) - below(low)))

    def integrate_kde(self, other: gaussian_kde) -> Array:
        """The integral of the product of this density and another one."""
        if other.d != self.d:
            raise errors.ShapeError(
                f"integrate_kde of estimates of {self.d} and {other.d} dimensions.", where=source.here()
            )
        logs = _log_sums(
            other.dataset, self.dataset, bnp.log(self.weights), self.covariance + other.covariance
        )
        return bnp.sum(other.weights * bnp.exp(logs))

    def integrate_box(self, low_bounds: Any, high_bounds: Any, maxpts: Any = None) -> Array:
        """Not there: a box has no closed form in several dimensions."""
        raise errors.UnsupportedError(
            "integrate_box is not there.", where=source.here(), fix="integrate_box_1d, in one dimension"
        )

    def set_bandwidth(self, bw_method: Any = None) -> None:
        """Not there: an estimate is immutable."""
        raise errors.UnsupportedError(
            "set_bandwidth: an estimate is immutable.",
            where=source.here(),
            fix="gaussian_kde(x, bw_method=...)",
        )

    # -- samples --

    def resample(self, key: Any, shape: Any = ()) -> Array:
        """Samples (d, *shape) of the density, the same as JAX's."""
        shape = shape_of(shape, "resample")
        which, offset = random.split(key)
        at = random.choice(which, self.n, shape, p=self.weights)
        noise = random.multivariate_normal(
            offset, bnp.zeros(self.d, self.covariance.dtype), self.covariance, shape, self.dataset.dtype
        )
        return self.dataset[:, at] + bnp.moveaxis(noise, -1, 0)


def _log_sums(points: Array, centres: Array, log_weights: Array, covariance: Array) -> Array:
    """Log densities (k,) at points (d, k) of normals about centres (d, n)."""
    low = linalg.cholesky(covariance, lower=True)
    whitened = lambda x: linalg.solve_triangular(low, x, lower=True)
    a, b = whitened(points), whitened(centres)
    distances = bnp.sum((a[:, :, None] - b[:, None, :]) ** 2, 0)
    norm = bnp.sum(bnp.log(bnp.diag(low))) + points.shape[0] / 2 * math.log(2 * math.pi)
    return special.logsumexp(log_weights - distances / 2, axis=1) - norm
