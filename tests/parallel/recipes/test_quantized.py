"""Collectives over two levels of links, and of 8-bit blocks: values and bytes."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import AbstractMesh, DeviceSpec, LinkSpec, P, ShapeDtypeStruct, errors, lax
from blufunc.parallel.recipes import (
    accumulated_value_and_grad,
    bucketed_psum,
    hierarchical_all_gather,
    hierarchical_psum,
    hierarchical_psum_scatter,
    quantized_all_gather,
    quantized_psum_scatter,
)

MESH = AbstractMesh((2, 4), ("host", "device"))
AXES = ("host", "device")
EACH = np.random.default_rng(0).normal(size=(8, 16, 40)).astype(np.float32)  # the value of each rank
BLOCK = 64


def on_ranks(f, x=EACH, out=P(AXES)):
    """The results of all ranks for their parts of ``x``."""
    return np.asarray(bf.shard_map(lambda v: f(v[0])[None], mesh=MESH, in_specs=P(AXES), out_specs=out)(x))


# -- two levels ----------------------------------------------------------------------------------------

LEVELS = {
    "all_gather": (
        lambda x, d: hierarchical_all_gather(x, AXES, dim=d), lambda x, d: lax.all_gather(x, AXES, axis=d, tiled=True),
    ),
    "psum_scatter": (
        lambda x, d: hierarchical_psum_scatter(x, AXES, dim=d),
        lambda x, d: lax.psum_scatter(x, AXES, scatter_dimension=d, tiled=True),
    ),
    "psum": (lambda x, d: hierarchical_psum(x[:, :3], AXES), lambda x, d: lax.psum(x[:, :3], AXES)),  # no multiple
}  # fmt: skip


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("case", LEVELS)
def test_two_levels_have_the_results_and_derivatives_of_one(case, dim):
    ours, plain = LEVELS[case]
    whole = np.round(EACH * 100)  # sums of integers are exact in any order
    np.testing.assert_array_equal(
        on_ranks(lambda x: ours(x, dim), whole), on_ranks(lambda x: plain(x, dim), whole)
    )
    weigh = lambda f: lambda x: (f(x, dim) * bnp.arange(f(x, dim).size).reshape(f(x, dim).shape)).sum()
    grads = [on_ranks(bf.grad(weigh(f)), whole) for f in (ours, plain)]
    np.testing.assert_allclose(*grads, rtol=1e-6)


@pytest.mark.parametrize("case", ["all_gather", "psum_scatter"])
def test_two_levels_of_arrays_without_elements(case):
    ours, plain = LEVELS[case]
    empty = np.zeros((8, 16, 0), np.float32)
    assert on_ranks(lambda x: ours(x, 0), empty).shape == on_ranks(lambda x: plain(x, 0), empty).shape


def rows_of(f, *args, specs):
    mapped = bf.shard_map(f, mesh=MESH, in_specs=specs, out_specs=P(AXES))
    return {(r.operation, r.axes): (r.bytes, r.sent) for r in bf.collectives(mapped, *args)}


def test_the_slow_level_carries_a_shard_of_the_fast_one():
    n = EACH[0].nbytes
    x = ShapeDtypeStruct(EACH.shape, "float32")
    got = rows_of(lambda v: hierarchical_psum(v[0], AXES)[None], x, specs=P(AXES))
    assert {k: sent for k, (_, sent) in got.items()} == {
        ("reduce_scatter", ("device",)): n * 3 / 4,
        ("all_reduce", ("host",)): 2 * n / 4 / 2,
        ("all_gather", ("device",)): n * 3 / 4,
    }
    got = rows_of(lambda v: hierarchical_psum_scatter(v[0], AXES)[None], x, specs=P(AXES))
    assert {k: sent for k, (_, sent) in got.items()} == {
        ("reduce_scatter", ("device",)): n * 3 / 4, ("reduce_scatter", ("host",)): n / 4 / 2,
    }  # fmt: skip


# -- 8 bits --------------------------------------------------------------------------------------------


def block_errors(rows, dtype):
    """The bound of the error of each element; blocks are consecutive in a row."""
    flat = abs(rows).reshape(len(rows), -1)
    padded = np.pad(flat, ((0, 0), (0, -flat.shape[1] % BLOCK))).reshape(len(rows), -1, BLOCK)
    largest = np.repeat(padded.max(-1), BLOCK, 1)[:, : flat.shape[1]]
    bound = largest / 254 if dtype == "int8" else np.maximum(flat / 16, largest / 458752)
    return (bound * (1 + 1e-5) + 1e-12).reshape(rows.shape)


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("of", ["float32", "bfloat16"])
def test_gathered_parts_are_rounded_once_and_alike_on_all_ranks(of, dtype, hierarchical):
    x = np.asarray(bnp.asarray(EACH * np.exp(EACH * 2)).astype(of).astype("float32"))  # of many magnitudes
    gather = lambda v: quantized_all_gather(
        v.astype(of), AXES, dim=1, dtype=dtype, block=BLOCK, hierarchical=hierarchical
    )
    assert bf.eval_shape(lambda x: bf.shard_map(
        lambda v: gather(v[0])[None], mesh=MESH, in_specs=P(AXES), out_specs=P(AXES))(x), x).dtype == of  # fmt: skip
    got = on_ranks(lambda v: gather(v).astype("float32"), x)
    want = np.concatenate(list(x), 1)
    np.testing.assert_array_equal(got, np.broadcast_to(got[0], got.shape))
    allowed = np.concatenate(list(block_errors(x, dtype)), 1) + (0 if of == "float32" else abs(want) * 2**-8)
    assert (abs(got[0] - want) <= allowed).all()
    assert (abs(got[0] - want) > 0).any()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_scattered_sums_are_within_the_errors_of_their_terms(dtype):
    scatter = lambda v, h: quantized_psum_scatter(v, AXES, dtype=dtype, block=BLOCK, hierarchical=h)
    parts = EACH.reshape(8, 8, 2, 40)  # terms of ranks, by the rank that adds them
    want = EACH.astype(np.float64).sum(0).reshape(8, 2, 40)
    allowed = np.stack([block_errors(term, dtype) for term in parts]).sum(0)
    got = on_ranks(lambda v: scatter(v, False))
    assert (abs(got - want) <= allowed + 1e-5).all() and (abs(got - want) > 1e-5).any()
    # of two levels, the sums of each host are rounded again, which adds the errors of sums off by the first
    hosts = parts.reshape(2, 4, 8, 2, 40).sum(1)
    second = np.stack([block_errors(abs(h) + allowed.max(), dtype) for h in hosts]).sum(0)
    assert (abs(on_ranks(lambda v: scatter(v, True)) - want) <= allowed.max() + second + 1e-5).all()


def test_zeros_subnormal_numbers_and_numbers_that_are_not_finite():
    x = np.zeros((8, 2 * BLOCK), np.float32)
    x[1, :] = 1e-43
    x[2, BLOCK + 3] = np.inf
    x[3, 5] = np.nan
    got = on_ranks(lambda v: quantized_all_gather(v, AXES, block=BLOCK), x)[0].reshape(x.shape)
    assert (got[0] == 0).all() and (abs(got[1]) <= 3e-43).all()
    assert (got[2, :BLOCK] == 0).all() and np.isnan(
        got[2, BLOCK:]
    ).all()  # nothing is hidden, in its block alone
    assert np.isnan(got[3, :BLOCK]).all() and (got[3, BLOCK:] == 0).all()


W = np.random.default_rng(1).normal(size=(32, 16)).astype(np.float32)
ROWS = np.random.default_rng(2).normal(size=(16, 32)).astype(np.float32)


def quadratic(w, x):
    return ((x @ w) ** 2).sum()


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("gradient", [None, "int8"])
@pytest.mark.parametrize("of", ["float32", "bfloat16"])
def test_fully_sharded_gradients(of, gradient, hierarchical):
    """The gradient is exact at the rounded weights; then its terms are rounded."""

    def step(w, x):
        gather = lambda w: quantized_all_gather(w, AXES, gradient=gradient, hierarchical=hierarchical)
        w = w.astype(of)
        loss = lambda w: quadratic(gather(w).astype("float32"), x)
        return bf.grad(loss)(w).astype("float32"), gather(w)[None].astype("float32")

    mapped = bf.shard_map(step, mesh=MESH, in_specs=(P(AXES), P(AXES)), out_specs=(P(AXES), P(AXES)))
    got, seen = mapped(W, ROWS)
    terms = np.stack([2 * x.T @ (x @ seen[0]) for x in ROWS.reshape(8, 2, 32)])
    # the cotangent, each sum of a level and the result are rounded to the dtype of the weights
    coarse = 0 if of == "float32" else 2**-8 * abs(terms).max((1, 2)).sum() * 3
    if gradient is None:
        np.testing.assert_allclose(got, terms.sum(0), rtol=1e-4, atol=1e-4 + coarse)
    else:
        bound = abs(terms).max((1, 2)).sum() / 254 * (2 if hierarchical else 1) + coarse
        assert 0 < abs(got - terms.sum(0)).max() <= bound
    sent = {(r.operation, r.axes): r.sent for r in bf.collectives(mapped, W, ROWS)}
    message = 64 + 4 + 192  # a rank's part of the weights, a scale, and what fills the block
    if not hierarchical and of == "float32":
        assert sent["all_gather", AXES] == 7 * message  # once, though it is read twice
        assert sent["all_to_all" if gradient else "reduce_scatter", AXES] == (
            7 * message if gradient else W.nbytes * 7 / 8
        )


# -- the recipes ---------------------------------------------------------------------------------------

PARAMS = {"w": W, "b": np.linspace(-1, 1, 16, dtype=np.float32)}


def loss(params, x):
    return (bnp.tanh(x @ params["w"] + params["b"]) ** 2).mean()


def reduced(**options):
    def step(params, x):
        grads = bf.grad(loss)(lax.pcast(params, AXES, to="reduced"), x)
        return bucketed_psum(grads, AXES, **options)

    return bf.shard_map(step, mesh=MESH, in_specs=(P(), P(AXES)), out_specs=P())


OPTIONS = {
    "hierarchical": {"hierarchical": True},
    "quantized": {"quantized": "int8"},
    "both": {"hierarchical": True, "quantized": "int8"},
    "float8": {"quantized": "float8_e4m3fn"},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_buckets_of_gradients(case):
    options = OPTIONS[case]
    want = reduced()(PARAMS, ROWS)
    got = reduced(**options)(PARAMS, ROWS)
    exact = "quantized" not in options
    largest = max(abs(x).max() for x in bf.tree.leaves(want))
    for g, w in zip(bf.tree.leaves(got), bf.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5 if exact else 0.1, atol=1e-6 if exact else 0.05 * largest)
    rows = ROWS.reshape(2, 8, 32).swapaxes(0, 1).reshape(1, 16, 32)

    def accumulated(params, batches):
        return accumulated_value_and_grad(loss, params, batches, AXES, **options)

    value, grads = bf.shard_map(accumulated, mesh=MESH, in_specs=(P(), P(None, AXES)), out_specs=P())(
        PARAMS, rows
    )
    np.testing.assert_allclose(value, loss(PARAMS, rows[0]), rtol=1e-5)
    for g, w in zip(bf.tree.leaves(grads), bf.tree.leaves(bf.grad(loss)(PARAMS, rows[0])), strict=True):
        np.testing.assert_allclose(
            g, w, rtol=1e-4 if exact else 0.1, atol=1e-6 if exact else 0.05 * abs(w).max()
        )


def test_plans_state_the_bytes_and_the_time_of_each_form():
    """8 hosts with 8 devices: bytes over the slow links, and the time of all."""
    cluster = AbstractMesh((8, 8), AXES)
    n = 2**26
    x = ShapeDtypeStruct((64, n), "float32")
    options = {"flat": {}, **OPTIONS}

    def planned(**options):
        step = lambda x: bucketed_psum(x[0], AXES, **options)
        f = bf.jit(bf.shard_map(step, mesh=cluster, in_specs=P(AXES), out_specs=P()))
        plan = bf.plan(
            f, cluster, x, device=DeviceSpec(flops=8e14, bandwidth=3e12),
            links={"host": LinkSpec(5e10, 1e-5), "device": LinkSpec(4e11, 3e-6)},
        )  # fmt: skip
        assert not plan.sight.notes and plan.sight.why_not_captured is None  # nothing runs on the host
        slow = sum(r.sent for r in plan.collectives.rows if "host" in r.axes)
        return slow / (4 * n), plan.exchange_seconds

    found = {name: planned(**o) for name, o in options.items()}
    share = {name: round(slow, 3) for name, (slow, _) in found.items()}
    assert share == {"flat": 1.969, "hierarchical": 0.219, "quantized": 0.5, "both": 0.056, "float8": 0.5}
    seconds = {name: s for name, (_, s) in found.items()}
    assert seconds["both"] < seconds["hierarchical"] < seconds["quantized"] < seconds["flat"]


# -- what is refused -----------------------------------------------------------------------------------

REFUSED = {
    "one level": (lambda x: hierarchical_psum(x, "host"), errors.ArgumentError, "axes of two levels, not 'host'"),
    "one level of buckets": (
        lambda x: bucketed_psum(x, "host", hierarchical=True), errors.ArgumentError, "axes of two levels",
    ),
    "another type": (lambda x: quantized_all_gather(x, AXES, dtype="int4"), errors.ArgumentError, "not 'int4'"),
    "another type of buckets": (
        lambda x: bucketed_psum(x, AXES, quantized="fp8"), errors.ArgumentError, "bucketed_psum sends.*not 'fp8'",
    ),
    "no block": (lambda x: quantized_all_gather(x, AXES, block=0), errors.ValueRangeError, "positive number"),
    "integers": (lambda x: quantized_psum_scatter(x.astype("int32"), AXES), errors.ArgumentError, "takes floats"),
    "integers of buckets": (
        lambda x: bucketed_psum(x.astype("int32"), AXES, quantized="int8"),
        errors.ArgumentError, r"bucketed_psum takes floats(.|\n)*quantized=None",
    ),
    "complex": (
        lambda x: bucketed_psum(x.astype("complex64"), AXES, quantized="int8"), errors.ArgumentError, "takes floats",
    ),
    "a type of no bucket": (
        lambda x: bucketed_psum({}, AXES, quantized="int4"), errors.ArgumentError, "not 'int4'(.|\n)*quantized=",
    ),
    "a type that is no name": (
        lambda x: quantized_all_gather(x, AXES, dtype=["int8"]), errors.ArgumentError, "not \\['int8'\\]",
    ),
    "a type of the cotangent": (
        lambda x: quantized_all_gather(x, AXES, gradient="int4"), errors.ArgumentError, 'gradient="int8"',
    ),
    "an axis twice": (lambda x: hierarchical_psum(x, ("host", "host")), errors.ArgumentError, "each axis once"),
    "an axis twice, quantized": (
        lambda x: quantized_all_gather(x, ("host", "host")), errors.ArgumentError, "quantized_all_gather takes each",
    ),
    "no name of an axis": (lambda x: hierarchical_psum(x, ("host", 1)), errors.ArgumentError, "names of mesh axes"),
    "no multiple": (lambda x: quantized_psum_scatter(x[:3], AXES), errors.ShapeError, "among 8 ranks"),
    "no multiple of levels": (lambda x: hierarchical_psum_scatter(x[:3], AXES), errors.ShapeError, "among 8 ranks"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    f, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message) as caught:
        on_ranks(f)
    assert "test_quantized.py" in str(caught.value)
