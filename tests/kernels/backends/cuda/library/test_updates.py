"""Updates of a few windows: the kernel, and where its results are."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.backends.cuda.executor import Strided
from blufunc.kernels.backends.cuda.library import updates
from blufunc.kernels.backends.cuda.program import planned
from blufunc.kernels.loopir.index import strides_of
from blufunc.kernels.ops.updates import joined_updates_p, update_in_place_p
from tests.emulation.cuda_machines import needs_nvrtc
from tests.kernels.backends.cuda.test_program import on, same, uniform

X = uniform(400, 12)


def numbers(**given):
    named = {
        "update_window_dims": (),
        "inserted_window_dims": (0,),
        "scatter_dims_to_operand_dims": (0,),
        **given,
    }
    return lax.ScatterDimensionNumbers(**named)


UPDATES = {
    "an element": (lambda x, i: x.at[i, 3].set(2.0), X, np.int32(5)),
    "an element, counted from the end": (lambda x, i: x.at[i, -1].set(2.0), X, np.int32(-3)),
    "out of range": (lambda x, i: x.at[i, 3].set(2.0), X, np.int32(400)),
    "clipped": (lambda x, i: x.at[i].set(2.0, mode="clip"), X, np.int32(900)),
    "a row": (lambda x, i: x.at[i].set(x[0] * 2), X, np.int32(7)),
    "rows, twice the same": (
        lambda x, i, u: x.at[i].set(u), X, np.array([3, 399, 3, -1, 500], np.int32), uniform(5, 12)
    ),
    "many different rows": (
        lambda x, i, u: x.at[i].set(u, unique_indices=True), X, 3 * np.arange(150, dtype=np.int32), uniform(150, 12)
    ),
    "sums": (lambda x, i, u: x.at[i].add(u), X, np.array([3, 399, 3], np.int64), uniform(3, 12)),
    "sums of integers": (lambda x, i: x.at[i].add(np.int32(7)), np.arange(99, dtype=np.int32), np.array([1, 1, 5])),
    "columns": (lambda x, i, u: x.at[:, i].set(u), X, np.array([3, 0], np.int32), uniform(400, 2)),
    "elements at pairs": (
        lambda x, i, j, u: x.at[i, j].add(u), X, np.array([[3, 4], [3, 9]]), np.array([[0, 1], [0, 11]]), uniform(2, 2)
    ),
    "bfloat16": (lambda x, i: x.astype("bfloat16").at[i].set(1.5), X, np.int32(2)),
    "booleans": (lambda x, i: (x > 0).at[i, 1].set(True), X, np.uint8(200)),
    "complex": (lambda x, i: (x + 1j * x).astype("complex128").at[i, 1:3].set(1j), X, np.int32(200)),
    "a window that hangs over": (
        lambda x, u, i, j: lax.dynamic_update_slice(x, u, (i, j)),
        uniform(600, 60), uniform(3, 50), np.int32(599), np.int32(-70),
    ),
    "windows under vmap": (
        lambda x, i, u: bf.vmap(lambda x, i, u: x.at[i].set(u))(x, i, u), X, np.arange(400) % 12, X[:, 0]
    ),
    "a window of scatter": (
        lambda x, i, u: lax.scatter(x, i, u, numbers(update_window_dims=(0, 1), inserted_window_dims=())),
        X, np.array([395], np.int32), uniform(5, 12),
    ),
    "a window beyond the end": (
        lambda x, i, u: lax.scatter(x, i, u, numbers(update_window_dims=(0, 1), inserted_window_dims=())),
        X, np.array([396], np.int32), uniform(5, 12),
    ),
    "windows that overlap in part": (
        lambda x, i, u: lax.scatter(x, i, u, numbers(update_window_dims=(1, 2), inserted_window_dims=())),
        X, np.array([[4], [6], [5]], np.int32), uniform(3, 5, 12),
    ),
}  # fmt: skip


def check(name, device):
    fun, *args = UPDATES[name]
    want = bf.jit(fun)(*args)
    for donated in ((), 0):
        jitted = bf.jit(fun, donate_argnums=donated)
        for _ in range(3):
            same(jitted(*on(device, *args)), want, 1e-6)


@pytest.mark.parametrize("name", UPDATES)
def test_updates(name, cuda):
    check(name, cuda)


@pytest.mark.gpu
@pytest.mark.parametrize("name", UPDATES)
def test_updates_on_a_device(name):
    check(name, bf.devices("cuda")[0])


def dense(aval):
    return Strided(aval.shape, strides_of(aval.shape), 0)


def equation(fun, *args):
    jaxpr = bf.make_jaxpr(fun)(*[bf.ShapeDtypeStruct(a.shape, a.dtype) for a in args])
    return next(e for e in getattr(jaxpr, "jaxpr", jaxpr).eqns if "scatter" in e.prim.name)


KERNELS = {
    "rows": (lambda x, i, u: x.at[i].set(u), X, np.array([3, 399, 3, -500], np.int32), uniform(4, 12)),
    "sums": (lambda x, i, u: x.at[i].add(u), X, np.array([3, 399, 3], np.int64), uniform(3, 12)),
    "many different rows": (
        lambda x, i, u: x.at[i].set(u, unique_indices=True), X, 3 * np.arange(150, dtype=np.int32), uniform(150, 12)
    ),
    "columns": (lambda x, i, u: x.at[:, i].set(u, mode="clip"), X, np.array([3, 90], np.uint64), uniform(400, 2)),
    "a grid of indices": (
        lambda x, i, u: x.at[i].add(u), X, np.array([[3, 5, 3], [399, 0, 3]], np.int16), uniform(2, 3, 12)
    ),
    "bytes": (lambda x, i, u: x.at[i].set(u), X.astype(np.int8), np.array([3]), uniform(1, 12).astype(np.int8)),
}  # fmt: skip


@pytest.mark.second
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_on_the_host(name, host):
    fun, x, *args = KERNELS[name]
    x = np.zeros_like(x)
    eqn = equation(lambda x, i, u: fun(x, i, u), x, *args)
    assert updates.is_update(eqn)
    _, indices, given = (v.aval for v in eqn.invars)
    found = np.asarray(args[0])
    found = np.where(found < 0, found + 400, found).astype(indices.dtype).reshape(indices.shape)
    got = host.launch(
        updates.source(eqn, [dense(given)]), "update", [found, args[1]], x, grid=2, block=updates.THREADS
    )
    np.testing.assert_allclose(got, np.asarray(fun(bnp.asarray(x), *map(bnp.asarray, args))), rtol=1e-6)


@needs_nvrtc
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_compiles(name):
    eqn = equation(*KERNELS[name])
    nvrtc.build(updates.source(eqn, [dense(eqn.invars[2].aval)]), "sm_80", "update")


@pytest.mark.second
@pytest.mark.sampled(3)
@pytest.mark.parametrize("rounds", [3, 40])
@pytest.mark.parametrize(
    "body",
    [
        lambda i, x, u: x.at[i % 70].set(u[0]),
        lambda i, x, u: lax.dynamic_update_slice(x, u + x[0, 0], (i * 7, 0)),
        lambda i, x, u: x.at[i % 3].add(u[1]).at[i].set(u[0]),
        lambda i, x, u: x.at[bnp.arange(70), i].set(u[0, :70], unique_indices=True),
    ],
    ids=["a row", "a window", "two after one another", "an element of every row"],
)
def test_a_carry_is_updated_in_place(body, rounds, fake, cuda):
    """A round copies no array."""
    x, u = uniform(70, 512), uniform(2, 512)
    f = bf.jit(
        lambda x, u, n: lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, body(s[0], s[1], u)), (0, x))
    )
    want = f(x, u, np.int32(rounds))
    there = on(cuda, x, u, np.int32(rounds))
    for _ in range(3):
        fake.copies.clear()
        same(f(*there), want)
        assert fake.copies[x.nbytes] <= 4  # at the beginning and at the end of the loop


def _decoded(i, state, u):
    """Writes a row to two arrays, of which one is read."""
    keys, values, total = state
    key, value = bnp.split(u[:, i], [256], axis=1)
    at = (0, i % 40, 0)
    keys = lax.dynamic_update_slice(keys, key[:, None], at)
    values = lax.dynamic_update_slice(values, value[:, None], at)
    return keys, values, total + keys[:, 3].sum() * values[:, 2].sum()


def _run_decoded(u):
    empty = bnp.zeros((4, 100, 256), np.float32), bnp.zeros((4, 120, 128), np.float32), np.float32(0)
    return lax.fori_loop(0, 45, lambda i, state: _decoded(i, state, u), empty)


def test_updates_of_two_arrays_are_one_step(fake, cuda):
    """Also if what they write are parts of one array, which is not copied."""
    u = uniform(4, 45, 384)
    f = bf.jit(_run_decoded)
    want = f(u)
    same(f(*on(cuda, u)), want, 1e-5)
    body = bf.jit(lambda i, state, u: _decoded(i, state, u), donate_argnums=1)
    jaxpr = body.trace(np.int32(3), tuple(on(cuda, *want)), *on(cuda, u)).jaxpr
    donated = [False, True, True, True, False]
    steps = planned(jaxpr, donated, "sm_90a").steps
    assert [s.eqn.prim for s in steps if hasattr(s, "eqn")] == [joined_updates_p]


@pytest.mark.gpu
def test_updates_of_two_arrays_on_a_device():
    u = uniform(4, 45, 384)
    f = bf.jit(_run_decoded)
    for _ in range(3):
        same(f(*on(bf.devices("cuda")[0], u)), f(u), 1e-5)


def test_updates_that_are_read_between_stay_apart():
    def fun(x, y, u):
        x = lax.dynamic_update_slice(x, u, (3, 0))
        return x, lax.dynamic_update_slice(y, u + x[:1], (5, 0))

    x = np.zeros((400, 128), np.float32)
    jaxpr = bf.jit(fun).trace(x, x.copy(), x[:1]).jaxpr
    steps = planned(jaxpr, [True, True, False], "sm_90a").steps
    assert [s.eqn.prim for s in steps if hasattr(s, "eqn")] == [update_in_place_p] * 2
