"""Gather and scatter: brute-force values, derivatives, ``vmap``, JAX, messages."""

import functools

import numpy as np
import pytest

from blufunc import errors
from blufunc.config import config
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from blufunc.core.ops import gather_scatter as gs
from blufunc.core.ops.elementwise import mul
from blufunc.core.ops.windows import (
    GatherDimensionNumbers,
    GatherScatterMode,
    ScatterDimensionNumbers,
    as_scatter,
)
from blufunc.core.primitives.linear_ops import reduce_sum, zeros
from blufunc.transforms.autodiff.grad import grad, jvp, vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.core.ops.checks import check, host

G, S = GatherDimensionNumbers, ScatterDimensionNumbers


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setattr(config, "check", True)


def data(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def integers(low, high, shape, seed=0):
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)


NUMBERS = {
    # name: (operand, indices, dimension numbers of the gather, sizes)
    "vector": ((6,), (4, 1), G((), (0,), (0,)), (1,)),
    "scalar index": ((6,), (1,), G((), (0,), (0,)), (1,)),
    "embedding": ((5, 3), (2, 3, 1), G((2,), (0,), (0,)), (1, 3)),
    "columns": ((3, 5), (4, 1), G((0,), (1,), (1,)), (3, 1)),
    "middle": ((2, 4, 3), (5, 1), G((0, 2), (1,), (1,)), (2, 1, 3)),
    "points": ((4, 5), (3, 2), G((), (0, 1), (0, 1)), (1, 1)),
    "swapped points": ((4, 5), (3, 2), G((), (0, 1), (1, 0)), (1, 1)),
    "apart": ((3, 2, 4), (3, 2), G((1,), (0, 2), (0, 2)), (1, 2, 1)),
    "windows": ((6, 5), (3, 2), G((1, 2), (), (0, 1)), (3, 2)),
    "windows in front": ((6, 3), (2, 2, 1), G((0, 1), (), (0,)), (2, 3)),
    "part of an axis": ((4, 5), (3, 1), G((1,), (0,), (0,)), (1, 2)),
    "full axis indexed": ((4, 3), (2, 1), G((0, 1), (), (1,)), (4, 3)),
    "along axis 0": ((4, 3), (2, 3, 1), G((), (0,), (0,), (1,), (1,)), (1, 1)),
    "along axis 1": ((3, 4), (3, 2, 1), G((), (1,), (1,), (0,), (0,)), (1, 1)),
    "batch apart": ((2, 4, 3), (3, 2, 1), G((), (1,), (1,), (0, 2), (1, 0)), (1, 1, 1)),
    "batch and window": ((2, 5, 3), (2, 3, 1), G((1, 2), (), (1,), (0,), (0,)), (1, 2, 3)),
    "no index": ((3, 2), (0,), G((0, 1), (), ()), (3, 2)),
    "no windows": ((3, 2), (0, 1), G((1,), (0,), (0,)), (1, 2)),
}
MODES = ["clip", "fill", "promise_in_bounds"]


def arguments(name, mode="fill"):
    """Operand, indices (some of them outside, where the mode allows that) and updates."""
    shape, index_shape, d, sizes = NUMBERS[name]
    if mode == "promise_in_bounds":
        bounds = [shape[i] - sizes[i] + 1 for i in d.start_index_map]
        indices = np.random.default_rng(0).integers(0, bounds, index_shape).astype(np.int32)
    else:
        indices = integers(-2, 6, index_shape)
    out = gs.gather(from_numpy(data(*shape)), from_numpy(indices), d, sizes).shape
    return data(*shape), indices, data(*out, seed=1)


def windows(shape, indices, d, sizes, clip):
    """Batch position and operand position (None: outside) of every window."""
    for b in np.ndindex(*indices.shape[:-1]):
        start = np.zeros(len(shape), int)
        start[list(d.start_index_map)] = indices[b]
        start[list(d.operand_batching_dims)] = [b[k] for k in d.start_indices_batching_dims]
        limit = np.array(shape) - sizes
        if clip:
            start = np.clip(start, 0, limit)
        inside = ((start >= 0) & (start <= limit)).all()
        yield b, tuple(slice(s, s + n) for s, n in zip(start, sizes)) if inside else None


def out_window(d, ndim, b):
    """Where the window of batch position ``b`` is in the result."""
    rest = iter(b)
    return tuple(slice(None) if p in d.offset_dims else next(rest) for p in range(ndim))


def brute_gather(x, indices, d, sizes, mode, fill=np.nan):
    removed = (*d.collapsed_slice_dims, *d.operand_batching_dims)
    window = [n for i, n in enumerate(sizes) if i not in removed]
    rest_w, rest_b = iter(window), iter(indices.shape[:-1])
    ndim = len(window) + indices.ndim - 1
    out = np.full([next(rest_w if p in d.offset_dims else rest_b) for p in range(ndim)], fill, x.dtype)
    for b, at in windows(x.shape, indices, d, sizes, mode != "fill"):
        if at is not None:
            out[out_window(d, ndim, b)] = x[at].reshape(window)
    return out


COMBINE = {
    "scatter": lambda old, new: new,
    "scatter_add": np.add,
    "scatter_mul": np.multiply,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
}


def brute_scatter(op, x, indices, updates, d, sizes, mode):
    out = x.copy()
    for b, at in windows(x.shape, indices, d, sizes, mode == "clip"):
        if at is not None:
            out[at] = COMBINE[op](out[at], updates[out_window(d, updates.ndim, b)].reshape(sizes))
    return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NUMBERS)
def test_gather(name, mode):
    _, _, d, sizes = NUMBERS[name]
    x, indices, _ = arguments(name, mode)
    want = brute_gather(x, indices, d, sizes, mode, fill=7.0)
    f = lambda x, i: gs.gather(x, i, d, sizes, mode=mode, fill_value=7)
    check(f, [x, indices], want, vmaps=mode != "promise_in_bounds")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", ["scatter", "scatter_add", "scatter_min", "scatter_max"])
@pytest.mark.parametrize("name", NUMBERS)
def test_scatter(name, op, mode):
    """Repeated indices and overlapping windows act as if in sequence."""
    _, _, d, sizes = NUMBERS[name]
    args = arguments(name, mode)
    want = brute_scatter(op, *args, d, sizes, mode)
    f = functools.partial(getattr(gs, op), dimension_numbers=as_scatter(d), mode=mode)
    xs = [from_numpy(a) for a in args]
    np.testing.assert_allclose(host(f(*xs)), want, rtol=1e-14)
    check(f, args, vmaps=op in ("scatter", "scatter_add") and mode == "fill" and np.size(args[2]) < 30)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NUMBERS)
def test_scatter_mul_values(name, mode):
    _, _, d, sizes = NUMBERS[name]
    args = arguments(name, mode)
    f = functools.partial(gs.scatter_mul, dimension_numbers=as_scatter(d), mode=mode)
    got = f(*map(from_numpy, args))
    np.testing.assert_allclose(host(got), brute_scatter("scatter_mul", *args, d, sizes, mode), rtol=1e-14)


@pytest.mark.parametrize("op", ["scatter", "scatter_add", "scatter_sub", "scatter_mul", "scatter_max"])
def test_unique_indices(op):
    d = S((1,), (0,), (0,))
    args = [data(5, 3), np.array([[4], [0], [7]], np.int32), data(3, 3, seed=1)]
    f = lambda x, u: getattr(gs, op)(x, from_numpy(args[1]), u, d, unique_indices=True)
    want = args[0].copy()
    combine = np.subtract if op == "scatter_sub" else COMBINE[op]
    want[[4, 0]] = combine(want[[4, 0]], args[2][:2])
    check(f, [args[0], args[2]], want)


def test_scatter_mul_differentiates_only_unique_indices():
    x, i, u = from_numpy(data(4)), from_numpy(np.array([[1], [1]])), from_numpy(data(2))
    f = lambda x, u: gs.scatter_mul(x, i, u, S((), (0,), (0,)))
    check(lambda x: f(x, u), [data(4)])
    with pytest.raises(errors.GradError, match="only if no index repeats") as e:
        jvp(lambda u: f(x, u), (u,), (u,))
    assert "unique_indices=True" in e.value.fix


def test_scatter_min_shares_the_tangent_of_ties():
    d = S((), (0,), (0,))
    x, i = from_numpy(np.array([1.0, 2.0, 9.0])), from_numpy(np.array([[0], [0], [1]], np.int32))
    u = from_numpy(np.array([1.0, 1.0, 0.0]))
    _, pullback = vjp(lambda x, u: gs.scatter_min(x, i, u, d), x, u)
    gx, gu = pullback(from_numpy(np.array([3.0, 5.0, 7.0])))
    assert gx.tolist() == [1.0, 0.0, 7.0]
    assert gu.tolist() == [1.0, 1.0, 5.0]


def test_the_last_update_stays_and_gets_the_gradient():
    d = S((1,), (0,), (0,))
    x = from_numpy(np.zeros((2, 2)))
    i = from_numpy(np.array([[1], [0], [1], [5]], np.int32))
    u = from_numpy(np.arange(8.0).reshape(4, 2))
    out, pullback = vjp(lambda x, u: gs.scatter(x, i, u, d), x, u)
    assert out.tolist() == [[2, 3], [4, 5]]
    gx, gu = pullback(from_numpy(np.array([[1.0, 2.0], [3.0, 4.0]])))
    assert gx.tolist() == [[0, 0], [0, 0]]
    assert gu.tolist() == [[0, 0], [1, 2], [3, 4], [0, 0]]


def random_numbers(rng):
    """Random but valid operand, indices, dimension numbers and sizes."""
    ndim = int(rng.integers(1, 5))
    shape = rng.integers(1, 5, ndim)
    dims = rng.permutation(ndim)
    n_along = int(rng.integers(0, min(2, ndim) + 1))
    along, rest = sorted(dims[:n_along].tolist()), dims[n_along:].tolist()
    indexed = rest[: rng.integers(0, len(rest) + 1)]
    batch = rng.integers(1, 4, n_along + rng.integers(0, 3))
    indices_along = rng.permutation(len(batch))[:n_along].tolist()
    batch[indices_along] = shape[along]
    sizes = np.where(rng.random(ndim) < 0.5, rng.integers(1, shape + 1), shape)
    collapsed = [i for i in range(ndim) if i not in along and rng.random() < 0.5]
    sizes[collapsed + along] = 1
    window = ndim - n_along - len(collapsed)
    offset = sorted(rng.permutation(window + len(batch))[:window].tolist())
    d = G(*map(tuple, (offset, collapsed, indexed, along, indices_along)))
    return tuple(shape.tolist()), (*batch.tolist(), len(indexed)), d, tuple(sizes.tolist())


@pytest.mark.parametrize("seed", range(40))
def test_random_dimension_numbers(seed):
    rng = np.random.default_rng(seed)
    shape, index_shape, d, sizes = random_numbers(rng)
    x, indices = rng.standard_normal(shape), rng.integers(-2, 5, index_shape).astype(np.int32)
    for mode in MODES:
        got = host(gs.gather(from_numpy(x), from_numpy(indices), d, sizes, mode=mode))
        np.testing.assert_array_equal(got, brute_gather(x, indices, d, sizes, mode))
        updates = rng.standard_normal(got.shape)
        for op in COMBINE:
            got = getattr(gs, op)(*map(from_numpy, (x, indices, updates)), as_scatter(d), mode=mode)
            want = brute_scatter(op, x, indices, updates, d, sizes, mode)
            np.testing.assert_allclose(host(got), want, rtol=1e-13)


# -- dtypes, storage, speed ------------------------------------------------------------------------

EMBEDDING = {"dimension_numbers": G((1,), (0,), (0,)), "slice_sizes": (1, 2)}
OPTIONS = {"indices_are_sorted": False, "unique_indices": False, "mode": GatherScatterMode.CLIP}
ROWS = S((1,), (0,), (0,))


@pytest.mark.parametrize(
    "dtype, fill",
    [
        ("bool", True), ("int8", -128), ("uint16", 65535), ("int32", -(2**31)), ("float32", np.nan),
        ("bfloat16", np.nan), ("complex64", np.nan), ("key<fry>", None),
    ],
)  # fmt: skip
def test_gather_and_scatter_of_every_dtype(dtype, fill):
    dtype = dtypes.as_dtype(dtype)
    raw = np.arange(6, dtype=np.uint64).reshape(3, 2)
    a = raw.view(dtype) if dtypes.is_key(dtype) else raw.astype(dtype)
    x, i = from_numpy(a), from_numpy(np.array([[2], [3], [0]], np.int32))
    got = host(gs.gather(x, i, **EMBEDDING))
    np.testing.assert_array_equal(got[[0, 2]], a[[2, 0]])
    if fill is not None:
        np.testing.assert_array_equal(got[1].astype(np.complex128), np.full(2, fill, np.complex128))
    flipped = host(gs.scatter(x, i, from_numpy(a), ROWS))
    np.testing.assert_array_equal(flipped, a[[2, 1, 0]])


@pytest.mark.parametrize("index_dtype", ["int8", "uint8", "int64", "uint64"])
def test_indices_of_every_dtype(index_dtype):
    x, big = from_numpy(data(3, 2)), np.iinfo(index_dtype).max
    i = from_numpy(np.array([[1], [big], [2]], index_dtype))
    np.testing.assert_array_equal(host(gs.gather(x, i, **EMBEDDING, mode="clip")), data(3, 2)[[1, 2, 2]])
    assert np.isnan(host(gs.gather(x, i, **EMBEDDING))).tolist() == [[False] * 2, [True] * 2, [False] * 2]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("rows", [3, 100])
def test_scatter_add_of_every_dtype(dtype, rows):
    """Few and many updates, and a zero operand, use different code paths: all agree."""
    dtype = dtypes.as_dtype(dtype)
    rng = np.random.default_rng(0)
    i = rng.integers(0, 10, (rows, 1)).astype(np.int32)
    u, x = (rng.integers(0, 4, s).astype(dtype) for s in ((rows, 2), (10, 2)))
    want = np.zeros((10, 2), np.complex128)
    np.add.at(want, i[:, 0], u.astype(np.complex128))
    for operand in (from_numpy(x), zeros(from_numpy(x).aval)):
        total = want + np.asarray(operand).astype(np.complex128)
        total = total.real if not dtypes.is_complex(dtype) else total
        total = total.astype(np.int64) if dtypes.is_integer(dtype) else total
        got = gs.scatter_add(operand, from_numpy(i), from_numpy(u), ROWS)
        np.testing.assert_array_equal(host(got), total.astype(dtype))


def test_half_precision_is_summed_in_single():
    ones = from_numpy(np.ones((1000, 1), dtypes.bfloat16))
    x, i = zeros(from_numpy(np.ones((1, 1), dtypes.bfloat16)).aval), from_numpy(np.zeros((1000, 1), np.int32))
    assert float(gs.scatter_add(x, i, ones, ROWS).tolist()[0][0]) == 1000.0


def test_infinities_stay_in_their_row():
    u = np.array([[np.inf], [1.0], [np.nan]], np.complex64)
    x = from_numpy(np.zeros((4, 1), np.complex64))
    got = host(gs.scatter_add(x, from_numpy(np.array([[0], [1], [2]])), from_numpy(u), ROWS))
    np.testing.assert_array_equal(got[:, 0], [np.inf, 1, np.nan, 0])


def test_gather_from_views():
    """Transposed and broadcast tables, from which few and many rows are read."""
    a = data(6, 50)
    for rows in (2, 80):
        i = integers(0, 50, (rows, 1))
        numbers = {**EMBEDDING, **OPTIONS, "slice_sizes": (1, 6), "fill_value": None}
        np.testing.assert_array_equal(gs.gather_p.impl(a.T, i, **numbers), a.T[i[:, 0]])
        b = np.broadcast_to(a[0], (6, 50)).T
        np.testing.assert_array_equal(gs.gather_p.impl(b, i, **numbers), b[i[:, 0]])


def test_results_never_share_storage_with_operands():
    """``fresh`` promises the executor that it may overwrite results."""
    a, i, none = data(3, 2), np.zeros((1, 1), np.int32), np.zeros((0, 1), np.int32)
    for indices in (i, none):
        out = gs.gather_p.impl(a, indices, **EMBEDDING, **OPTIONS, fill_value=None)
        assert not np.shares_memory(out, a)
        for prim in (gs.scatter_p, gs.scatter_add_p, gs.scatter_mul_p, gs.scatter_max_p):
            u = np.ones((len(indices), 2))
            assert not np.shares_memory(prim.impl(a, indices, u, dimension_numbers=ROWS, **OPTIONS), a)


def test_gradient_of_an_embedding():
    """A gather, and one scatter_add into zeros that are never stored."""
    table, i, w = data(7, 2), integers(0, 7, (20, 1)), data(20, 2, seed=1)
    f = lambda t: reduce_sum(mul(gs.gather(t, from_numpy(i), **EMBEDDING), from_numpy(w)), (0, 1))
    want = np.zeros_like(table)
    np.add.at(want, i[:, 0], w)
    np.testing.assert_allclose(host(jit(grad(f))(from_numpy(table))), want, rtol=1e-13)
    prims = [str(e.prim) for e in make_jaxpr(grad(f))(from_numpy(table)).eqns]
    assert prims.count("scatter_add") == 1 and "add_any" not in prims


def test_modes():
    mode = GatherScatterMode
    assert [mode.from_any(m) for m in (None, "fill", "drop", "clip", "promise_in_bounds", mode.CLIP)] == [
        mode.FILL_OR_DROP, mode.FILL_OR_DROP, mode.FILL_OR_DROP, mode.CLIP, mode.PROMISE_IN_BOUNDS, mode.CLIP,
    ]  # fmt: skip
    with pytest.raises(errors.ValueRangeError, match="'wrap' is not a mode"):
        mode.from_any("wrap")


def _gather(x, d=EMBEDDING["dimension_numbers"], sizes=(1, 2), index=(2, 1), dtype=np.int32):
    return gs.gather(x, from_numpy(np.zeros(index, dtype)), d, sizes)


def _put(x, updates, d=ROWS, op=gs.scatter):
    return op(x, from_numpy(np.zeros((2, 1), np.int32)), from_numpy(updates), d)


ERRORS = [
    (errors.DtypeError, "integer indices", lambda x: _gather(x, dtype=np.float32)),
    (errors.ShapeError, "have 2 components", lambda x: _gather(x, index=(2, 2))),
    (errors.ShapeError, "at least one axis", lambda x: _gather(x, index=())),
    (errors.ShapeError, "windows of", lambda x: _gather(x, sizes=(1, 3))),
    (errors.ShapeError, "windows of", lambda x: _gather(x, sizes=(2, 2))),
    (errors.ShapeError, "offset_dims are", lambda x: _gather(x, G((0, 1), (0,), (0,)))),
    (errors.ShapeError, "rising", lambda x: _gather(x, G((1, 0), (), (0,)))),
    (errors.ShapeError, "axes of the operand", lambda x: _gather(x, G((1,), (2,), (0,)))),
    (errors.ShapeError, "nor an axis twice", lambda x: _gather(x, G((), (0,), (0,), (0,), (0,)))),
    (errors.ShapeError, "pair up", lambda x: _gather(x, G((), (0,), (0,), (1,), ()))),
    (errors.ShapeError, "not the last", lambda x: _gather(x, G((), (0,), (0,), (1,), (1,)))),
    (errors.ShapeError, "differ in size", lambda x: _gather(x, G((), (1,), (1,), (0,), (0,)))),
    (errors.ShapeError, "cannot take updates", lambda x: _put(x, data(2, 3))),
    (errors.ShapeError, "cannot take updates", lambda x: _put(x, data(2))),
    (errors.ShapeError, "cannot take updates", lambda x: _put(x, data(3, 2))),
    (errors.ShapeError, "update_window_dims", lambda x: _put(x, data(2, 2), S((0, 1), (0,), (0,)))),
    (errors.DtypeError, "of its dtype", lambda x: _put(x, np.zeros((2, 2), np.int32))),
    (errors.DtypeError, "scatter_add takes numbers", lambda x: _put(
        from_numpy(np.zeros((3, 2), bool)), np.zeros((2, 2), bool), op=gs.scatter_add)),
    (errors.DtypeError, "scatter_max takes real numbers", lambda x: _put(
        from_numpy(np.zeros((3, 2), np.complex64)), np.zeros((2, 2), np.complex64), op=gs.scatter_max)),
]  # fmt: skip


@pytest.mark.parametrize("error, text, f", ERRORS)
def test_errors(error, text, f):
    with pytest.raises(error, match=text) as e:
        f(from_numpy(data(3, 2)))
    assert e.value.fix and e.value.where


# -- against JAX -----------------------------------------------------------------------------------


def jax_gather_numbers(d, lax):
    return lax.GatherDimensionNumbers(
        d.offset_dims,
        d.collapsed_slice_dims,
        d.start_index_map,
        d.operand_batching_dims,
        d.start_indices_batching_dims,
    )


def jax_scatter_numbers(d, lax):
    return lax.ScatterDimensionNumbers(
        d.offset_dims,
        d.collapsed_slice_dims,
        d.start_index_map,
        d.operand_batching_dims,
        d.start_indices_batching_dims,
    )


def compare(ours, theirs, xs, indices):
    """Value, jvp and vjp with respect to ``xs``, and vmap over the indices."""
    import jax

    rng = np.random.default_rng(2)
    ts = [rng.standard_normal(x.shape).astype(np.float32) for x in xs]
    batch = np.stack([indices, indices[::-1]]) if indices.ndim else indices

    def all_of(jvp, vjp, vmap, f):
        def run(xs, ts, indices, batch, ct):
            g = lambda *xs: f(*xs, indices)
            return (*jvp(g, tuple(xs), tuple(ts)), *vjp(g, *xs)[1](ct), vmap(lambda i: f(*xs, i))(batch))

        return run

    ct = rng.standard_normal(np.shape(theirs(*xs, indices))).astype(np.float32)
    want = jax.jit(all_of(jax.jvp, jax.vjp, jax.vmap, theirs))(xs, ts, indices, batch, ct)
    got = jit(all_of(jvp, vjp, vmap, ours))(xs, ts, indices, batch, ct)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(host(g), np.asarray(w), rtol=2e-5, atol=1e-5)


PEER = ["embedding", "middle", "apart", "windows", "along axis 1", "batch apart", "batch and window"]


@pytest.mark.peer
@pytest.mark.parametrize("name, mode", [*[(n, "fill") for n in PEER], ("windows", "clip")])
def test_gather_is_that_of_jax(name, mode):
    from jax import lax

    _, _, d, sizes = NUMBERS[name]
    x, indices, _ = arguments(name, mode)
    compare(
        lambda x, i: gs.gather(x, i, d, sizes, mode=mode),
        lambda x, i: lax.gather(x, i, jax_gather_numbers(d, lax), sizes, mode=mode),
        [x.astype(np.float32)],
        indices,
    )


@pytest.mark.peer
@pytest.mark.parametrize(
    "name, op",
    [
        *zip(PEER, ["scatter", "scatter_add", "scatter_max"] * 3),
        ("windows", "scatter_max"),
    ],
)
def test_scatter_is_that_of_jax(name, op):
    from jax import lax

    _, _, d, _ = NUMBERS[name]
    x, indices, updates = arguments(name)
    compare(
        lambda x, u, i: getattr(gs, op)(x, i, u, as_scatter(d)),
        lambda x, u, i: getattr(lax, op)(x, i, u, jax_scatter_numbers(d, lax)),
        [x.astype(np.float32), updates.astype(np.float32)],
        indices,
    )


@pytest.mark.peer
def test_fill_values_are_those_of_jax():
    from jax import lax

    i = np.array([[9]], np.int32)
    for dtype in (np.int8, np.uint16, np.int32, np.float32, np.complex64, np.bool_):
        x = np.zeros(3, dtype)
        d = G((), (0,), (0,))
        want = np.asarray(lax.gather(x, i, jax_gather_numbers(d, lax), (1,), mode="fill"))
        np.testing.assert_array_equal(host(gs.gather(from_numpy(x), from_numpy(i), d, (1,))), want)


def test_a_gather_of_few_rows_of_a_view_fills():
    """A small gather from an operand that is not row-major, and not copied."""
    x = np.arange(2000.0).reshape(5, 4, 100).transpose(2, 1, 0)
    d = gs.GatherDimensionNumbers(offset_dims=(0, 1), collapsed_slice_dims=(2,), start_index_map=(2,))
    out = gs.gather_p.impl(
        x,
        np.array([[1], [-1], [5]], np.int32),
        dimension_numbers=d,
        slice_sizes=(100, 4, 1),
        indices_are_sorted=False,
        unique_indices=False,
        mode=gs.GatherScatterMode.FILL_OR_DROP,
        fill_value=None,
    )
    np.testing.assert_array_equal(out[:, :, 0], x[:, :, 1])
    assert np.isnan(out[:, :, 1:]).all()
