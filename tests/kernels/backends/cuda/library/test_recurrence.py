"""Recurrences in kernels: which scans have one, and what they compute."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from benchmarks.harness.kernel_resources import resources
from blufunc import lax
from blufunc.core.arrays.array import from_numpy
from blufunc.kernels.backends.cuda.driver import driver, nvrtc
from blufunc.kernels.backends.cuda.library.recurrence import source
from blufunc.kernels.backends.cuda.program import Draft
from blufunc.kernels.schedule import OpaqueStep
from tests.emulation.cuda_machines import needs_nvrtc

no_device = pytest.mark.skipif(driver.available() is not None, reason=str(driver.available()))


def draw(*shape, seed=0, low=-1.0):
    return from_numpy(np.random.default_rng((seed, *shape)).uniform(low, 1, shape).astype(np.float32))


def state_space(p, q):
    """``h = a h + b``."""
    return p[0] * q[0], q[0] * p[1] + q[1]


def rotation(p, q):
    """``h = a h + b`` of complex numbers, as pairs of real ones."""
    (ar, ai, hr, hi), (br, bi, gr, gi) = p, q
    return (
        ar * br - ai * bi, ar * bi + ai * br,
        br * hr - bi * hi + gr, br * hi + bi * hr + gi,
    )  # fmt: skip


def softmaxed(p, q):
    """A running maximum, and a sum of exponentials relative to it."""
    top = bnp.maximum(p[0], q[0])
    return top, p[1] * bnp.exp(p[0] - top) + q[1] * bnp.exp(q[0] - top)


def segmented(p, q):
    """A sum that begins anew where a flag is set."""
    return p[0] | q[0], bnp.where(q[0] > 0, q[1], p[1] + q[1])


def longest(p, q):
    """Paths of greatest weight: products of maxima and sums."""
    return p[0] + q[0], bnp.maximum(p[1] + q[0], q[1])


def elements(name, shape):
    x, y = draw(*shape, low=0.2), draw(*shape, seed=1)
    return {
        "state space": (state_space, (x, y)),
        "rotation": (rotation, (x * 0.7, y * 0.7, y, x)),
        "softmax": (softmaxed, (y * 3, x)),
        "longest": (longest, (x - 0.6, y)),
        "segmented": (segmented, ((y > 0.5).astype("int32"), x)),
        "bfloat16": (state_space, (x.astype("bfloat16"), y.astype("bfloat16"))),
        "sum": (lambda p, q: (p[0] + q[0],), (y,)),
    }[name]


def scanned(fn, axis, reverse):
    return lambda *xs: lax.associative_scan(fn, xs, reverse=reverse, axis=axis)


def loss(fn, axis, reverse):
    def of(*xs):
        return sum(
            (bnp.sin(y.astype("float32")) * (n + 1)).sum()
            for n, y in enumerate(scanned(fn, axis, reverse)(*xs))
        )

    return of


NAMES = ["state space", "rotation", "softmax", "longest", "segmented", "bfloat16", "sum"]
DIFFERENTIABLE = ["state space", "rotation", "softmax", "longest", "sum"]
SHAPES = {
    "columns": ((3, 37, 40), 1),
    "first axis": ((50, 70), 0),
    "rows": ((40, 64), 1),
    "rows of odd length": ((33, 67), -1),
    "in chunks": ((2, 1000, 8), 1),
    "rows in chunks": ((5, 4096), 1),
}


def recurrences(f, *args):
    """The equations of an sm_90a program that are recurrences."""
    made = Draft(bf.jit(f).lower(*args).jaxpr, (False,) * len(args), "sm_90a").schedule
    return [s.eqn for s in made.steps if isinstance(s, OpaqueStep) and "recurrence" in s.eqn.prim.name]


def agree(got, want, tolerance=1e-4):
    for a, b in zip(bf.tree.leaves(got), bf.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1, np.abs(b).max()))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_results(name, shape, reverse, fake, cuda):
    (sizes, axis), tolerance = SHAPES[shape], 3e-2 if name == "bfloat16" else 1e-4
    fn, xs = elements(name, sizes)
    f = scanned(fn, axis, reverse)
    got = bf.jit(f)(*[bf.device_put(x, cuda) for x in xs])
    assert fake.recurrences == 1
    agree(got, f(*xs), tolerance)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_derivatives(name, reverse, fake, cuda):
    fn, xs = elements(name, (3, 20, 40))
    f = loss(fn, 1, reverse)
    every = tuple(range(len(xs)))
    on_device = [bf.device_put(x, cuda) for x in xs]
    agree(bf.jit(bf.grad(f, every))(*on_device), bf.grad(f, every)(*xs))
    assert fake.recurrences >= 2
    second = lambda g: lambda *xs: sum((x * x).sum() for x in bf.grad(g, every)(*xs))
    agree(bf.jit(bf.grad(second(f), every))(*on_device), bf.grad(second(f), every)(*xs), 1e-3)


@pytest.mark.slow
def test_both_modes_and_batches():
    fn, xs = elements("state space", (3, 20, 40))
    f = loss(fn, 1, False)
    tangents = [draw(*x.shape, seed=5 + n) for n, x in enumerate(xs)]
    value, tangent = bf.jit(lambda xs, ts: bf.jvp(f, xs, ts))(xs, tuple(tangents))
    grads = bf.jit(bf.grad(f, (0, 1)))(*xs)
    agree(tangent, sum((g * t).sum() for g, t in zip(grads, tangents)), 1e-3)
    batched = bf.jit(bf.vmap(bf.grad(f, (0, 1)), in_axes=(0, None)))(bnp.stack([xs[0] / 2, xs[0]]), xs[1])
    agree([g[1] for g in batched], grads)


def test_a_gradient_is_two_recurrences():
    fn, xs = elements("state space", (64, 256, 256))
    f = lambda a, b: (scanned(fn, 1, False)(a, b)[1] * b).sum()
    forward, backward = recurrences(bf.grad(f, (0, 1)), *xs)
    assert (forward.prim.name, backward.prim.name) == ("recurrence", "affine_recurrence")
    assert backward.params["pattern"] == ((0, 0),) and backward.params["reverse"] and backward.params["late"]


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: lax.associative_scan(
            lambda p, q: p @ q, x[:, :, None] * y[:, None]
        ),  # no pointwise function
        lambda x, y: lax.associative_scan(lambda p, q: p + q * y[0], x),  # reads an outer value
        lambda x, y: lax.associative_scan(
            lambda p, q: (p[0] + q[0], p[1] + q[1]), (x, y[:, 0])
        ),  # two shapes
        lambda x, y: lax.associative_scan(bnp.add, (x.ravel()[:1] * bnp.ones(1 << 21))),  # one column
    ],
)
def test_scans_without_a_kernel(f):
    assert not recurrences(f, draw(40, 40), draw(40, 40))


@needs_nvrtc
@pytest.mark.parametrize("name", ["state space", "rotation", "softmax", "segmented", "bfloat16"])
@pytest.mark.parametrize("shape", ["columns", "rows in chunks"])
def test_sources_compile_without_spills(name, shape):
    sizes, axis = SHAPES[shape]
    fn, xs = elements(name, sizes)
    f = (
        scanned(fn, axis, False)
        if name == "segmented"
        else bf.grad(loss(fn, axis, False), tuple(range(len(xs))))
    )
    for eqn in recurrences(f, *xs):
        binary = nvrtc.build(source.source(eqn, [True] * len(eqn.outvars)))
        assert all(r.spill_stores == 0 for r in resources(binary).values())


@pytest.mark.gpu
@no_device
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, "large"])
@pytest.mark.parametrize("name", NAMES)
def test_on_a_device(name, shape, reverse):
    sizes, axis = {**SHAPES, "large": ((16, 300, 2048), 1)}[shape]
    fn, xs = elements(name, sizes)
    f = scanned(fn, axis, reverse)
    on_device = [bf.device_put(x, bf.devices("cuda")[0]) for x in xs]
    got, repeated = bf.jit(f)(*on_device), bf.jit(f)(*on_device)
    agree(got, bf.jit(f)(*xs), 3e-2 if name == "bfloat16" else 1e-4)
    for a, b in zip(got, repeated, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    if name in DIFFERENTIABLE:
        every = tuple(range(len(xs)))
        g = bf.jit(bf.grad(loss(fn, axis, reverse), every))
        agree(g(*on_device), g(*xs), 1e-3)
