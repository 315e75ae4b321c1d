"""``blufunc.numpy`` against ``jax.numpy``: values and derivatives to order 2."""

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc.transforms.autodiff.grad import grad, jvp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit
from tests.transforms.common import arr

pytestmark = pytest.mark.peer

RNG = np.random.default_rng(0)


def exact(x):
    """Round constants to float32, so that closing over them loses nothing."""
    return np.asarray(x, np.float32).astype(np.float64)


X, Y, V, W = (exact(RNG.normal(size=s)) for s in ((4, 5), (4, 5), 7, 3))
T = exact(np.sort(RNG.uniform(size=7)))
HOLES = np.where(RNG.random((4, 5)) < 0.3, np.nan, X)

# Each is a function of the namespace and of arrays; all are differentiated by the first.
CASES = {
    "apply_along_axis": (lambda n, x: n.apply_along_axis(lambda v: v * v.sum(), 1, x), X),
    "block": (lambda n, x: n.block([[x, x * 2], [x[:1], x[1:2]]]), X),
    "choose": (lambda n, x: n.choose(np.array([0, 1, 1, 0, 1]), [x[0], x[1]], mode="clip"), X),
    "clip": (lambda n, x: n.clip(x, -0.5, 0.5), X),
    "compress": (lambda n, x: n.compress(np.array([True, False, True, True]), x, 0), X),
    "convolve": (lambda n, x, y: n.convolve(x, y, "same"), V, W),
    "corrcoef": (lambda n, x: n.corrcoef(x), X),
    "correlate": (lambda n, x, y: n.correlate(x, y, "full"), V, W),
    "cov": (lambda n, x: n.cov(x), X),
    "cross": (lambda n, x: n.cross(x[:, :3], x[:, 2:]), X),
    "cumulative_prod": (lambda n, x: n.cumulative_prod(x, axis=1, include_initial=True), X),
    "cumulative_sum": (lambda n, x: n.cumulative_sum(x, axis=0, include_initial=True), X),
    "delete": (lambda n, x: n.delete(x, np.array([0, 2]), 0), X),
    "diff": (lambda n, x: n.diff(x, n=2, prepend=x[:, :1]), X),
    "divmod": (lambda n, x: n.divmod(x, 0.7)[1], X),
    "ediff1d": (lambda n, x: n.ediff1d(x), X),
    "extract": (lambda n, x: n.extract(np.arange(20).reshape(4, 5) % 3 == 0, x), X),
    "fill_diagonal": (lambda n, x: n.fill_diagonal(x, 3.0, inplace=False), X),
    "frexp": (lambda n, x: n.frexp(x)[0], V),
    "gradient": (lambda n, x: n.gradient(x, T[:5], axis=1), X),
    "heaviside": (lambda n, x: n.heaviside(x, 0.5), X),
    "histogram": (lambda n, x: n.histogram(T, bins=3, weights=x)[0], V),
    "hypot": (lambda n, x, y: n.hypot(x, y), X, Y),
    "i0": (lambda n, x: n.i0(x), V),
    "insert": (lambda n, x: n.insert(x, np.array([1, 3]), 2.0, axis=1), X),
    "interp": (lambda n, x: n.interp(np.arange(-2, 11) / 8, T, x), V),
    "interp-period": (lambda n, x: n.interp(np.arange(-8, 13) / 4, T, x, period=1.3), V),
    "kaiser": (lambda n, x: n.kaiser(6, x[0]), np.abs(V)),
    "kron": (lambda n, x, y: n.kron(x, y), V, W),
    "ldexp": (lambda n, x: n.ldexp(x, np.arange(7)), V),
    "logaddexp2": (lambda n, x, y: n.logaddexp2(x, y), X, Y),
    "matvec": (lambda n, x: n.matvec(x, V[:5]), X),
    "max-where": (lambda n, x: n.max(x, 1, where=Y > 0, initial=-9.0), X),
    "median": (lambda n, x: n.median(x, 0), X),
    "modf": (lambda n, x: n.modf(x)[0], V),
    "nan_to_num": (lambda n, x: n.nan_to_num(x), X),
    "nancumsum": (lambda n, x: n.nancumsum(x, 0), HOLES),
    "nanmax": (lambda n, x: n.nanmax(x, 0), HOLES),
    "nanmean": (lambda n, x: n.nanmean(x, 0), HOLES),
    "nanmedian": (lambda n, x: n.nanmedian(x, 0), HOLES),
    "nanprod": (lambda n, x: n.nanprod(x, 1), HOLES),
    "nanquantile": (lambda n, x: n.nanquantile(x, 0.3, 1), HOLES),
    "nanvar": (lambda n, x: n.nanvar(x, 1), HOLES),
    "pad-linear_ramp": (lambda n, x: n.pad(x, 2, "linear_ramp", end_values=(1, -1)), X),
    "pad-maximum": (lambda n, x: n.pad(x, 1, "maximum", stat_length=2), X),
    "pad-mean": (lambda n, x: n.pad(x, (1, 2), "mean"), X),
    "pad-reflect-odd": (lambda n, x: n.pad(x, 3, "reflect", reflect_type="odd"), X),
    "partition": (lambda n, x: n.sort(n.partition(x, 2)[:, :2]), X),
    "percentile": (lambda n, x: n.percentile(x, 30.0, axis=1), X),
    "piecewise": (lambda n, x: n.piecewise(x, [x < 0, x > 1], [lambda v: v**2, 3.0, lambda v: -v]), X),
    "place": (lambda n, x: n.place(x, Y > 0, W, inplace=False), X),
    "polyadd": (lambda n, x, y: n.polyadd(x, y), V, W),
    "polyder": (lambda n, x: n.polyder(x, 2), V),
    "polydiv": (lambda n, x, y: n.polydiv(x, y)[0], V, W),
    "polyfit": (lambda n, x: n.polyfit(T, x, 2), V),
    "polyint": (lambda n, x: n.polyint(x, 2), V),
    "polymul": (lambda n, x, y: n.polymul(x, y), V, W),
    "polyval": (lambda n, x: n.polyval(x, X), W),
    "put": (lambda n, x: n.put(x, np.array([0, 3]), W[:2], inplace=False), X),
    "put_along_axis": (
        lambda n, x: n.put_along_axis(x, np.array([[0], [1], [2], [0]]), 5.0, 1, inplace=False),
        X,
    ),
    "quantile": (lambda n, x: n.quantile(x, np.array([0.25, 0.875]), axis=0), X),
    "remainder": (lambda n, x, y: n.remainder(x, y), X, Y),
    "resize": (lambda n, x: n.resize(x, (3, 9)), X),
    "roll": (lambda n, x: n.roll(x, (1, 2), (0, 1)), X),
    "select": (lambda n, x: n.select([x > 1, x > 0], [x**2, n.sin(x)], 0.0), X),
    "sinc": (lambda n, x: n.sinc(x), X),
    "sort": (lambda n, x: n.sort(x, axis=0, descending=True), X),
    "take_along_axis": (lambda n, x: n.take_along_axis(x, np.array([[0], [1], [2], [0]]), 1), X),
    "trapezoid": (lambda n, x: n.trapezoid(x, T), V),
    "unique": (lambda n, x: n.unique(x, size=9, fill_value=0.0), V),
    "unwrap": (lambda n, x: n.unwrap(x * 5), X),
    "vander": (lambda n, x: n.vander(x, 4), W),
    "vecmat": (lambda n, x: n.vecmat(V[:4], x), X),
    "vectorize": (lambda n, x: n.vectorize(lambda v: v * v.max(), signature="(k)->(k)")(x), X),
}


@pytest.fixture(scope="module")
def jnp():
    jax = pytest.importorskip("jax")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield jax.numpy
    jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("name", CASES)
def test_values_and_derivatives(name, jnp):
    import jax

    f, *args = CASES[name]

    def close(got, want):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-9, atol=1e-10)

    ours = [arr(a) for a in args]
    want = f(jnp, *map(jnp.asarray, args))
    close(f(bnp, *ours), want)
    close(jit(lambda *a: f(bnp, *a))(*ours), want)
    weights = np.cos(np.arange(want.size)).reshape(want.shape)

    def loss(n, w):
        return lambda x, *rest: (n.sin(f(n, x, *rest)) * w).sum()

    mine, theirs = loss(bnp, arr(weights)), loss(jnp, weights)
    theirs_args = [jnp.asarray(a) for a in args]
    first = jax.grad(theirs)(*theirs_args)
    close(grad(mine)(*ours), first)
    t = np.where(np.isnan(args[0]), 0, np.sin(np.arange(args[0].size)).reshape(args[0].shape))
    rest = ours[1:]
    tangent = jvp(lambda x: mine(x, *rest), (ours[0],), (arr(t),))[1]
    close(tangent, (np.asarray(first) * t).sum())
    second = jax.grad(lambda x: (jax.grad(theirs)(x, *theirs_args[1:]) * t).sum())(theirs_args[0])
    close(grad(lambda x: (grad(mine)(x, *rest) * arr(t)).sum())(ours[0]), second)
    if args[0].ndim and name not in ("extract", "compress"):
        batch = np.stack([args[0], args[0] * 1.5])
        want = np.stack([np.asarray(f(jnp, jnp.asarray(b), *theirs_args[1:])) for b in batch])
        close(vmap(lambda x: f(bnp, x, *rest))(arr(batch)), want)
