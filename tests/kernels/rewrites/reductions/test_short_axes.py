"""Short axes and generated operands: fewer kernels, and no large arrays."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc.core.arrays.array import from_numpy
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cuda.device_model import H200
from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.program import Draft
from blufunc.kernels.rewrites.parts import MOST_PARTS
from blufunc.kernels.rewrites.reductions import generated_operands
from blufunc.kernels.rewrites.reductions.short_axes import with_unrolled_short_axes

N = 300


def draw(*shape, seed=0):
    return from_numpy(np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32))


def distances(x, y):
    return ((x[:, None] - y[None]) ** 2).sum(-1)


def energy(x, m):
    d = x[:, None] - x[None]
    r = bnp.sqrt((d * d).sum(-1) + 1e-3)
    return -0.5 * (m[:, None] * m[None] / r).sum()


def forces(x, m):
    x, m = (np.asarray(a, np.float64) for a in (x, m))
    d = x[:, None] - x[None]
    r = np.sqrt((d * d).sum(-1) + 1e-3)
    return ((m[:, None] * m / r**3)[..., None] * d).sum(1)


X, Y, M = draw(N, 3), draw(N + 20, 3), draw(N)
ROWS = draw(5, 40, 300)
FIRST = draw(4, 20_000)

UNROLLED = {
    "distances": (distances, X, Y),
    "a gradient": (bf.grad(energy), X, M),
    "the last axis, broadcast": (lambda x, y: (x[:, None, :] * y[None]).max(-1), X, Y),
    "several axes": (lambda x, y: (x[:, None] - y[None]).min((0, 2)), X, Y),
    "transposed": (lambda x, y: bnp.swapaxes(x[:, None] - y[None], 0, 1).prod(-1), X, Y),
    "of parameters": (lambda x: x.sum(0), FIRST),
    "of elementwise results": (lambda x: bnp.exp(x).sum(0) * 2, FIRST),
    "an axis in between": (lambda x: (x * x + 1).sum(1), ROWS[:, :8].repeat(8, 0)),
    "short floats": (lambda x: x.astype("bfloat16").sum(0), FIRST),
    "integers": (lambda x: x.astype("int32").sum(0), FIRST),
}

WHOLE = {
    "returned": (lambda x, y: (d := x[:, None] - y[None], (d * d).sum(-1)), X, Y),
    "normalized by its sum": (lambda x: x / x.sum(0), FIRST),
    "contiguous rows": (lambda x: x.reshape(-1, 4).sum(-1), FIRST),
    "one of the rows that it reduces": (lambda x: bf.nn.softmax(x, -1).sum(0), FIRST),
    "sorted": (lambda x, y: (d := x[:, None] - y[None], bnp.sort(d, 0), (d * d).sum(-1))[1:], X, Y),
    "long": (lambda x: x.sum(0), draw(MOST_PARTS + 1, 20_000)),
    "few elements": (lambda x: x.sum(0), FIRST[:, :1000]),
}


def rewritten(f, *args):
    jaxpr = simplify(bf.jit(f).lower(*args).jaxpr)
    return jaxpr, with_unrolled_short_axes(jaxpr, {})


def short_reductions(jaxpr):
    return [
        e
        for e in jaxpr.eqns
        if e.prim.kind == "reduce"
        and any(1 < e.invars[0].aval.shape[d] <= MOST_PARTS for d in e.params["axes"])
    ]


@pytest.mark.parametrize("case", UNROLLED)
def test_short_axes_disappear(case):
    f, *args = UNROLLED[case]
    before, after = rewritten(f, *args)
    assert short_reductions(before)
    assert not short_reductions(after)


@pytest.mark.parametrize("case", WHOLE)
def test_arrays_that_are_needed_whole_stay(case):
    f, *args = WHOLE[case]
    before, after = rewritten(f, *args)
    assert after is before


@pytest.mark.parametrize("case", [*UNROLLED, *WHOLE])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_results(case, where, request):
    f, *args = {**UNROLLED, **WHOLE}[case]
    want = bf.tree.leaves(f(*args))
    if where == "cuda":
        device = request.getfixturevalue("cuda")
        args = [bf.device_put(a, device) for a in args]
    got = bf.tree.leaves(bf.jit(f)(*args))
    for a, b in zip(got, want, strict=True):
        scale = np.abs(np.asarray(b, np.float64)).max()
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=2e-5, atol=2e-5 * scale
        )


def test_one_way_for_each_component(monkeypatch):
    """A value with short axes that disagree is left as it is."""
    f = lambda x: ((d := x[:, None] - x[None]).sum(-1), bnp.swapaxes(d, 0, 2).sum(0))
    _, after = rewritten(f, X)
    assert not [e for e in after.eqns if e.prim.name == "concatenate"]
    for a, b in zip(bf.jit(f)(X), f(X)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


# -- generated operands ------------------------------------------------------------------------------


def draft(f, *args):
    return Draft(bf.jit(f).lower(*args).jaxpr, (False,) * len(args), "sm_90a")


BODIES, MASSES = draw(700, 3), draw(700)

GENERATED = {
    "energy": (energy, 2),
    "its gradient": (bf.grad(energy), 3),
    "both": (bf.value_and_grad(energy), 4),
    "a batch": (bf.vmap(bf.grad(energy)), 3),
    "nearest": (lambda x, m: distances(x, x + 1).min(1) + distances(x, x + m[:, None]).max(0), 5),
    "a mean of cosines": (lambda x, m: bnp.cos(x[:, 0, None] * m).mean(1), 2),
}


@pytest.mark.parametrize("case", GENERATED)
def test_generated_arrays_do_not_exist(case):
    f, kernels = GENERATED[case]
    args = [a[None].repeat(3, 0) for a in (BODIES, MASSES)] if case == "a batch" else [BODIES, MASSES]
    schedule = draft(f, *args).schedule
    n = BODIES.shape[0]
    assert schedule.plan.peak_bytes < 2 * n * n  # bytes: half an array of pairs, partial results included
    assert len(schedule.kernels) <= kernels


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", [*GENERATED])
def test_results_of_generated_arrays(case, cuda):
    f, _ = GENERATED[case]
    args = [a[None].repeat(3, 0) for a in (BODIES, MASSES)] if case == "a batch" else [BODIES, MASSES]
    got = bf.tree.leaves(bf.jit(f)(*[bf.device_put(a, cuda) for a in args]))
    for a, b in zip(got, bf.tree.leaves(f(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(np.asarray(b)).max())


UNITS = {  # shapes of both arrays, and the axes of the sum: kept ones of one element
    "a batch of one": ((1, 1024, 1), (1, 1, 512), (1, 2)),
    "a middle axis": ((1024, 1, 1), (1, 1, 512), (0, 2)),
    "few columns": ((1, 16384, 1), (1, 1, 32), (1, 2)),
    "everything": ((1024, 1), (1, 512), (0, 1)),
    "two units": ((1, 1024, 1, 1), (1, 1, 1, 512), (1, 3)),
}


@pytest.mark.parametrize("name", UNITS)
def test_kept_axes_of_one_element(name, cuda):
    *shapes, axes = UNITS[name]
    x, y = (np.random.default_rng(n).normal(size=s).astype(np.float32) for n, s in enumerate(shapes))
    f = lambda x, y: ((x - y) ** 2).sum(axes)
    got = np.asarray(bf.jit(f)(bf.device_put(x, cuda), bf.device_put(y, cuda)))
    want = ((x - y).astype(np.float64) ** 2).sum(axes)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_forces():
    np.testing.assert_allclose(bf.jit(bf.grad(energy))(X, M), forces(X, M), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, m: (d := x[:, 0, None] - m, d.sum(1)),  # it is returned
        lambda x, m: (d := x[:, 0, None] - m).sum(1) + (d == d.max(1)).sum(1),  # a maximum must find itself
        lambda x, m: (d := x[:, 0, None] - m).sum(1) + (d <= d.min(1, keepdims=True)).sum(1),  # as well
        lambda x, m: (x[:, 0, None] @ m[None] * x[:, 1]).sum(0),  # a matmul, which is in memory
    ],
)
def test_other_arrays_are_not_generated(f):
    jaxpr = simplify(bf.jit(f).lower(BODIES, MASSES).jaxpr)
    assert generated_operands.with_generated_operands(jaxpr, {}, H200) is jaxpr


# -- on a device -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(driver.available() is not None, reason=str(driver.available()))
@pytest.mark.parametrize("case", [*UNROLLED, *(c for c in GENERATED)])
def test_results_on_a_device(case):
    f, *args = UNROLLED.get(case) or (GENERATED[case][0], BODIES, MASSES)
    if case == "a batch":
        args = [a[None].repeat(3, 0) for a in args]
    on_device = [bf.device_put(a, bf.devices("cuda")[0]) for a in args]
    for a, b in zip(bf.tree.leaves(bf.jit(f)(*on_device)), bf.tree.leaves(f(*args)), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())
