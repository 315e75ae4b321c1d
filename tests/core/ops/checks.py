"""All checks of an operation at one set of arguments, for tests with many shapes."""

import itertools

import numpy as np

from blufunc.core.arrays.array import from_numpy
from blufunc.transforms.autodiff.grad import jvp, vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit

BATCH = 3


def host(x):
    """A result as a NumPy array, checked against the abstract rule's type."""
    got = np.asarray(x)
    assert got.shape == x.aval.shape and got.dtype == x.aval.dtype
    return got


def close(got, want):
    np.testing.assert_allclose(host(got), want, rtol=1e-9, atol=1e-10)


def check(fun, args, want=None, *, vmaps=True):
    """Check value, ``jit``, forward and reverse mode, and ``vmap``.

    Forward mode is compared with central differences, reverse with forward mode, ``vmap`` with a loop.

    Args:
      fun: from arrays to an array.
      args: NumPy arrays; those of float64 are differentiated.
      want: the value, from an independent implementation, if any.
    """
    xs = [from_numpy(a) for a in args]
    out = host(fun(*xs))
    if want is not None:
        assert out.dtype == want.dtype
        np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(host(jit(fun)(*xs)), out)
    for x, a in zip(xs, args):
        np.testing.assert_array_equal(np.asarray(x), a, err_msg="an argument was written to")
    rng = np.random.default_rng(1)
    wrt = [i for i, a in enumerate(args) if a.dtype == np.float64]
    if wrt and out.dtype == np.float64:
        _check_derivatives(fun, args, wrt, rng)
    if vmaps:
        for batched in itertools.product((False, True), repeat=len(args)):
            if any(batched):
                _check_vmap(fun, args, batched, wrt, rng)


def _freeze(fun, args, wrt):
    fixed = [from_numpy(a) for a in args]

    def of_floats(*xs):
        full = list(fixed)
        for i, x in zip(wrt, xs, strict=True):
            full[i] = x
        return fun(*full)

    return of_floats


def _check_derivatives(fun, args, wrt, rng):
    f = _freeze(fun, args, wrt)
    point = [args[i] for i in wrt]
    xs = [from_numpy(p) for p in point]
    ts = [rng.standard_normal(p.shape) for p in point]
    out, out_t = jvp(f, xs, [from_numpy(t) for t in ts])
    step = 1e-6
    high, low = (host(f(*[from_numpy(p + s * t) for p, t in zip(point, ts)])) for s in (step, -step))
    np.testing.assert_allclose(host(out_t), (high - low) / (2 * step), rtol=1e-6, atol=1e-7)
    ct = rng.standard_normal(out.shape)
    value, pullback = vjp(f, *xs)
    np.testing.assert_array_equal(host(value), host(out))
    grads = pullback(from_numpy(ct))
    pairing = sum(np.vdot(host(g), t) for g, t in zip(grads, ts))
    np.testing.assert_allclose(pairing, np.vdot(ct, host(out_t)), rtol=1e-9, atol=1e-10)
    compiled = jit(lambda ct, *xs: vjp(f, *xs)[1](ct))(from_numpy(ct), *xs)
    for a, b in zip(compiled, grads):
        close(a, host(b))
    for i in range(len(xs)):  # one argument alone: the tangents of the others are symbolic zeros
        only = lambda x, i=i: f(*xs[:i], x, *xs[i + 1 :])
        (alone,) = vjp(only, xs[i])[1](from_numpy(ct))
        close(alone, host(grads[i]))


def _check_vmap(fun, args, batched, wrt, rng):
    """Each axis as the batch axis; and the gradient, with batch axes in front."""
    for axis in range(1 + max(a.ndim for a, b in zip(args, batched) if b)):
        axes = tuple(min(axis, a.ndim) if b else None for a, b in zip(args, batched))
        stacked = [_vary(a, d, rng) for a, d in zip(args, axes)]
        got = host(vmap(fun, in_axes=axes)(*map(from_numpy, stacked)))
        np.testing.assert_array_equal(got, np.stack([host(fun(*xs)) for xs in _each(stacked, axes)]))
    axes = tuple(0 if b else None for b in batched)
    stacked = [_vary(a, d, rng) for a, d in zip(args, axes)]
    out = np.asarray(fun(*map(from_numpy, args)))
    if not wrt or out.dtype != np.float64:
        return
    ct = from_numpy(rng.standard_normal(out.shape))

    def gradient(*xs):
        f = lambda *ys: fun(*[ys[wrt.index(i)] if i in wrt else x for i, x in enumerate(xs)])
        return vjp(f, *[xs[i] for i in wrt])[1](ct)

    got = jit(vmap(gradient, in_axes=axes))(*map(from_numpy, stacked))
    rows = [gradient(*xs) for xs in _each(stacked, axes)]
    for i, g in enumerate(got):
        close(g, np.stack([host(row[i]) for row in rows]))


def _vary(a, d, rng):
    """Different arguments of the same kind, stacked along ``d``."""
    if d is None:
        return a
    if a.dtype == np.float64:
        others = [rng.permutation(a.ravel()).reshape(a.shape) + 0.01 * k for k in range(BATCH - 1)]
    else:
        others = [rng.permutation(a.ravel()).reshape(a.shape) for _ in range(BATCH - 1)]
    return np.stack([a, *others], axis=d).astype(a.dtype)


def _each(stacked, axes):
    return [
        [from_numpy(x if d is None else np.take(x, k, axis=d)) for x, d in zip(stacked, axes)]
        for k in range(BATCH)
    ]
