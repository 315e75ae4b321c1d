"""fp8 matmuls as a transform: exact values, gradients, states, transforms."""

import ml_dtypes
import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, nn, optim, random
from blufunc.nn import low_precision
from blufunc.nn.low_precision import Float8, History, delayed_float8, float8
from blufunc.nn.low_precision.scaling import scaled

E4M3, E5M2, F32 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2), np.float32
SCALINGS = ["tensor", "row", "block"]


def draw(*shape, seed=0, spread=0.0):
    """Normal values; with a spread, rows of very different sizes, and a row of zeros."""
    rng = np.random.default_rng([seed, *shape])
    x = rng.standard_normal(shape) * np.exp2(np.round(spread * rng.standard_normal((*shape[:-1], 1))))
    x[..., -1, :] *= spread == 0
    return x.astype(F32)


def reference(x, dtype, scaling):
    """A matrix rounded to fp8 and back, by NumPy and ml_dtypes."""
    most = float(ml_dtypes.finfo(dtype).max)
    out = np.zeros_like(x)
    rows = [np.s_[:]] if scaling == "tensor" else [np.s_[i : i + 1] for i in range(len(x))]
    size = 128 if scaling == "block" else max(x.shape[1], 1)
    for row in rows:
        for at in range(0, x.shape[1], size):
            part = x[row, at : at + size]
            top = float(np.abs(part).max())
            k = 0
            if top > 0:
                k = int(np.floor(np.log2(most / top)))
                k += (top * 2.0 ** (k + 1) <= most) - (top * 2.0**k > most)
            scale = F32(2.0**k)
            out[row, at : at + size] = (part * scale).astype(dtype).astype(F32) / scale
    return out


def expected(x, w, ct, recipe):
    """x @ w and both gradients, as float64 sums of exact products."""
    forward, backward = recipe.forward, recipe.backward
    rounded = lambda v, dtype: reference(np.ascontiguousarray(v), dtype, recipe.scaling).astype(np.float64)
    out = rounded(x, forward) @ rounded(w.T, forward).T
    of_x = rounded(ct, backward) @ rounded(w, forward).T
    of_w = rounded(x.T, forward) @ rounded(ct.T, backward).T
    return out, of_x, of_w


def close(got, want):
    want = np.asarray(want)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2e-5, atol=2e-6 * np.abs(want).max())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaled_values_are_those_of_ml_dtypes(scaling, dtype):
    x = draw(9, 300, spread=6)
    x[0, 0], x[1, 1] = 1.75, 1.7500001  # the largest mantissa of both formats, and one above
    for run in (scaled, bf.jit(scaled, static_argnums=(1, 2))):
        values, scale = run(x, dtype, scaling)
        values, scale = np.asarray(values).astype(F32), np.asarray(scale)
        whole = scale.T.repeat(128, 1)[:, :300] if scaling == "block" else scale
        np.testing.assert_array_equal(values * whole, reference(x, dtype, scaling))
        assert (np.frexp(scale)[0] == 0.5).all()


RECIPES = {s: Float8(scaling=s) for s in SCALINGS} | {
    "e4m3 gradients": Float8(scaling="block", backward="float8_e4m3fn"),
    "e5m2 operands": Float8(forward="float8_e5m2", backward="float8_e4m3fn"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_values_and_gradients_are_exact(name):
    x, w, ct = draw(24, 160, spread=3), draw(160, 40, seed=1, spread=3), draw(24, 40, seed=2, spread=3)
    want = expected(x, w, ct, RECIPES[name])
    for wrap in (lambda f: f, bf.jit):
        out, pullback = bf.vjp(wrap(float8(bnp.matmul, RECIPES[name])), x, w)
        for got, right in zip((out, *pullback(bnp.asarray(ct))), want, strict=True):
            close(got, right)


DOTS = {  # operands, and a matmul of them
    "a transposed weight": (((6, 32), (8, 32)), lambda x, w: x @ w.T),
    "leading axes": (((2, 3, 32), (32, 8)), lambda x, w: x @ w),
    "several contracted axes": (((5, 4, 8), (4, 8, 3)), lambda x, w: bnp.einsum("bij,ijk->bk", x, w)),
    "a weight of heads": (((5, 32), (32, 2, 4)), lambda x, w: bnp.einsum("bi,ihd->bhd", x, w)),
    "a weight on the left": (((8, 32), (32, 5)), lambda w, x: w @ x),
    "an outer axis contracted": (((32, 6), (32, 8)), lambda x, w: bnp.einsum("ki,kj->ij", x, w)),
}


@pytest.mark.parametrize("name", DOTS)
def test_matmuls_of_any_axes(name):
    """As in float32 on operands that fp8 holds exactly."""
    shapes, fun = DOTS[name]
    rng = np.random.default_rng(0)
    args = [rng.integers(-4, 5, s).astype(F32) for s in shapes]
    loss = lambda f: lambda *xs: (f(*xs) * rng_weights[: f(*xs).size].reshape(f(*xs).shape)).sum()
    rng_weights = bnp.asarray(rng.integers(-2, 3, 400).astype(F32))
    got, want = (bf.value_and_grad(loss(f), (0, 1))(*args) for f in (float8(fun), fun))
    bf.tree.map(np.testing.assert_array_equal, got, want)


def test_which_matmuls():
    """Those with batch axes, with rules of their own or without rows stay."""
    x, w = draw(8, 32), draw(32, 32, seed=1)
    relu = bf.custom_jvp(lambda x: bnp.maximum(x @ w, 0))
    relu.defjvp(lambda p, t: (relu(*p), t[0]))

    def count(f, *args, **how):
        eqns = bf.make_jaxpr(float8(f, Float8(**how)))(*args).eqns
        return sum(e.prim.name == "custom_vjp_call" for e in eqns)

    assert count(lambda x, w: x @ w @ w, x, w) == 2
    assert count(lambda x: bnp.einsum("bij,bjk->bik", x, x), draw(2, 8, 8)) == 0
    assert count(lambda x, y: x @ y, x, draw(1, 32)[0]) == 0
    assert count(relu, x) == 0
    assert count(lambda x, w: x.astype("int32") @ w.astype("int32"), x, w) == 0
    assert count(lambda x, w: (x @ w) @ w[:, :4], x, w, where=lambda x, y: y.shape[-1] > 4) == 1


def model(params, x):
    """A scan of checkpointed layers, a branch, and a compiled function."""

    @bf.checkpoint
    def layer(h, w):
        return bnp.tanh(h @ w), None

    h, _ = lax.scan(layer, x, params["layers"])
    h = lax.cond(h[0, 0] > -9, lambda h: h @ params["branch"], lambda h: h, h)
    return bf.jit(lambda h: bnp.mean(bnp.square(h @ params["last"])))(h)


def parameters():
    return {
        "layers": draw(3, 32, 32) / 6, "branch": draw(32, 32, seed=1) / 6, "last": draw(32, 16, seed=2) / 6,
    }  # fmt: skip


def test_bodies_are_rewritten():
    """The transformed program has the values of the same functions called by hand."""
    params, x = parameters(), draw(8, 32, seed=3)
    low = float8(bnp.matmul)

    def by_hand(params, x):
        h = x
        for w in params["layers"]:
            h = bnp.tanh(low(h, w))
        return bnp.mean(bnp.square(low(low(h, params["branch"]), params["last"])))

    want = bf.value_and_grad(by_hand)(params, x)
    for f in (float8(model), bf.jit(float8(model)), float8(bf.jit(model))):
        bf.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7),
            bf.value_and_grad(f)(params, x),
            want,
        )


@pytest.mark.parametrize("scaling", SCALINGS)
def test_vmap_is_a_loop(scaling):
    """Each example has scales of its own, over either operand or both."""
    xs = draw(3, 8, 32) * np.exp2(np.arange(3.0) * 5).reshape(3, 1, 1).astype(F32)
    ws = draw(3, 32, 16, seed=1)
    fun = bf.grad(lambda x, w: bnp.sum(bnp.sin(float8(bnp.matmul, Float8(scaling=scaling))(x, w))), (0, 1))
    for axes, args in (((0, None), (xs, ws[0])), ((None, 0), (xs[0], ws)), ((0, 0), (xs, ws))):
        got = bf.vmap(fun, axes)(*args)
        for i in range(3):
            want = fun(*[a if d is None else a[i] for a, d in zip(args, axes, strict=True)])
            for of_all, of_one in zip(got, want, strict=True):
                np.testing.assert_allclose(of_all[i], of_one, rtol=1e-4, atol=1e-4)


def test_nonfinite_values_reach_the_result():
    x, w = draw(4, 32), draw(32, 8, seed=1)
    x[1, 3] = np.inf
    x[2, 4] = np.nan
    for f in (float8(bnp.matmul, Float8(scaling="row")), delayed_float8(bnp.matmul)):
        state = (f.init(x, w),) if hasattr(f, "init") else ()
        out = np.asarray(f(*state, x, w))
        assert np.isfinite(out[[0, 3]]).all() and not np.isfinite(out[1]).any() and np.isnan(out[2]).all()


def test_results_have_the_preferred_dtype():
    """A float32 result of bfloat16 operands is not rounded on its way."""
    x, w = draw(8, 32).astype("bfloat16"), draw(32, 16, seed=1).astype("bfloat16")
    wide = lambda x, w: bnp.matmul(x, w, preferred_element_type="float32")
    out, pullback = bf.vjp(float8(wide), x, w)
    close(out, float8(bnp.matmul)(x.astype(F32), w.astype(F32)))
    assert out.dtype == F32 and (out != out.astype("bfloat16")).any()
    assert [g.dtype for g in pullback(bnp.ones_like(out))] == [x.dtype, w.dtype]


@pytest.mark.parametrize("delayed", [False, True])
def test_second_derivatives_are_refused(delayed):
    x, w = draw(8, 32), draw(32, 16, seed=1)
    loss = lambda w, x: bnp.mean((x @ w) ** 2)
    state = (delayed_float8(loss).init(w, x),) if delayed else ()
    low = delayed_float8(loss) if delayed else float8(loss)
    square = lambda w: bnp.sum(bf.grad(low, len(state))(*state, w, x) ** 2)
    for run in (bf.grad, lambda f: bf.jit(bf.grad(f))):
        with pytest.raises(errors.GradError, match="second derivative of a matmul in fp8") as caught:
            run(square)(w)
        assert "test_float8.py" in caught.value.where
    left_out = float8(loss, Float8(where=lambda x, y: False))
    twice = lambda f: bf.grad(lambda w: bnp.sum(bf.grad(f)(w, x) ** 2))(w)
    np.testing.assert_array_equal(twice(left_out), twice(loss))


def test_an_infinity_stays_in_its_row():
    """Finite elements alongside it are clipped, as e4m3 has no infinity."""
    x = np.full((3, 32), 1000.0, F32)
    x[0, 0] = np.inf
    for scaling, beyond in (("tensor", 448.0), ("row", 1000.0)):
        out = np.asarray(float8(bnp.matmul, Float8(scaling=scaling))(x, np.eye(32, dtype=F32)))
        assert not np.isfinite(out[0]).any()
        np.testing.assert_allclose(out[1:], np.full((2, 32), beyond), rtol=0.04)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_small_matrices_keep_their_precision(dtype):
    """Down to the smallest normal numbers, products with scales are bfloat16 numbers."""
    x = draw(8, 32)
    for k in (90, 110, 118):
        small = x * F32(2.0**-k)
        values, scale = scaled(small, dtype, "tensor")
        got = np.asarray(values).astype(F32) * np.asarray(scale)
        want = reference(x, dtype, "tensor") * F32(2.0**-k)
        if k < 118:
            np.testing.assert_array_equal(got, want)
        as_bfloat16 = got.astype(ml_dtypes.bfloat16).astype(F32)
        np.testing.assert_array_equal(as_bfloat16, got)
        assert (got[:-1] != 0).mean() > 0.8 and np.asarray(scale) >= 2.0**-117


def test_forward_mode_and_mixed_order():
    x, w = draw(8, 32), draw(32, 16, seed=1)
    with pytest.raises(errors.GradError, match="forward-mode"):
        bf.jvp(lambda x: float8(bnp.matmul)(x, w), (x,), (x,))
    loss = lambda w, x: bnp.sum(bnp.tanh(x @ w))
    inside = bf.grad(float8(bf.autocast(loss)))(w, x)
    outside = bf.grad(bf.autocast(float8(loss)))(w, x)
    assert inside.dtype == outside.dtype == F32
    error = lambda a, b: float(bnp.linalg.norm(a - b) / bnp.linalg.norm(b))
    assert error(inside, bf.grad(loss)(w, x)) < 0.25 and error(outside, inside) < 0.15


# -- delayed scaling -------------------------------------------------------------------------------


def test_the_gradient_by_the_state_is_the_next_state():
    x, w, ct = draw(16, 32), draw(32, 16, seed=1), draw(16, 16, seed=2)
    scaled_fun = delayed_float8(lambda x, w: bnp.sum((x @ w) * ct), history=3)
    state = scaled_fun.init(bf.ShapeDtypeStruct(x.shape, "float32"), w)
    assert len(state) == 1 and [h.shape for h in state[0]] == [(3,), (3,), (3,), ()]
    assert not any(h.any() for h in state[0])
    step = bf.jit(bf.value_and_grad(scaled_fun, (0, 1, 2)))
    tops = []
    for n in range(5):
        given = x * F32(2.0 ** (3 * n))
        value, (state, of_x, of_w) = step(state, given, w)
        tops.insert(0, np.abs(given).max())
        np.testing.assert_array_equal(state[0].lhs, (tops + [0, 0])[:3])
        np.testing.assert_array_equal(state[0].cotangent, ([np.abs(ct).max()] * (n + 1) + [0, 0])[:3])
    # a history of the largest elements so far: with the inputs of the last step, its numbers are those of float8
    current = float8(lambda x, w: bnp.sum((x @ w) * ct))
    want = bf.value_and_grad(current, (0, 1))(given, w)
    value, (_, *grads) = step(state, given, w)
    bf.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), (value, tuple(grads)), want)


def test_elements_beyond_a_scale_are_clipped():
    x, w = np.full((4, 16), 7.0, F32), np.eye(16, dtype=F32)
    f = delayed_float8(bnp.matmul, history=2)
    history = bnp.array([1.0, 0.5])
    out = f((History(history, history, history, 1.0),), x, w)
    np.testing.assert_array_equal(out, np.full((4, 16), 448 / 256, F32))
    _, pullback = bf.vjp(f, (History(history, history, history, bnp.float32(1)),), x * np.inf, w)
    (state,) = pullback(bnp.ones((4, 16)))[0]
    np.testing.assert_array_equal(state.lhs, [1.0, 1.0])  # what is not finite is not kept


def in_a_scan(grad):
    def step(state, w, xs):
        add = lambda sums, x: (bf.tree.map(bnp.add, sums, grad(state, w, x)), None)
        return lax.scan(add, bf.tree.map(bnp.zeros_like, (state, w)), xs)[0]

    return step


def by_devices(grad):
    mesh = bf.make_mesh((2,), ("d",), devices=bf.devices()[:2])
    halves = lambda state, w, xs: grad(state, w, xs.reshape(-1, xs.shape[-1]))
    return bf.shard_map(halves, mesh=mesh, in_specs=(bf.P(), bf.P(), bf.P("d")), out_specs=bf.P())


def in_a_batch(grad):
    return lambda state, w, xs: bf.grad(
        lambda s, w: bf.vmap(scaled_mean_square, (None, None, 0))(s, w, xs).sum(), (0, 1)
    )(state, w)


scaled_mean_square = delayed_float8(lambda w, x: bnp.mean((x @ w) ** 2), history=3)
SUMS = {"microbatches": in_a_scan, "devices": by_devices, "a batch": in_a_batch}


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_states_are_averaged(name, monkeypatch):
    """Over more steps than the history is long, scales stay those of the operands."""
    monkeypatch.setattr(bf.config, "cpu_devices", 2)
    w, xs = draw(32, 16), draw(4, 8, 32, seed=1)
    step = bf.jit(SUMS[name](bf.grad(scaled_mean_square, (0, 1))))
    state = scaled_mean_square.init(w, xs[0])
    for _ in range(8):
        state, of_w = step(state, w, xs)
    (history,) = state
    assert history.uses == (2 if name == "devices" else 4)
    np.testing.assert_allclose(history.rhs / history.uses, np.full(3, np.abs(w).max()), rtol=1e-6)
    tops = np.abs(xs).max((1, 2))
    assert (tops.min() <= history.lhs / history.uses).all() and (
        history.lhs / history.uses <= tops.max()
    ).all()
    want = bf.grad(lambda w: sum(bnp.mean((x @ w) ** 2) for x in xs))(w) / (2 if name == "devices" else 1)
    assert bnp.linalg.norm(of_w - want) < 0.1 * bnp.linalg.norm(want)


def test_matmuls_without_cotangents_have_scales_of_their_own_in_float8():
    x, w = 1000 * draw(8, 32), draw(32, 16, seed=1)

    def loss(target):
        return lambda w, x: bnp.mean((x @ (w + 1) - lax.stop_gradient(target(x, w))) ** 2)

    values = {}
    for name, target in (("plain", bnp.matmul), ("wrapped", float8(bnp.matmul))):
        scaled_fun = delayed_float8(loss(target), history=2)
        state = scaled_fun.init(w, x)
        for _ in range(3):
            values[name], state = bf.value_and_grad(scaled_fun)(state, w, x)
        assert [float(h.uses) for h in state] == ([1, 0] if name == "plain" else [1])
    want = float8(loss(bnp.matmul))(w, x)
    assert abs(values["wrapped"] - want) < 0.05 * want < abs(values["plain"] - want)  # the limit of a history


def test_states_of_scans_and_branches():
    params, x = parameters(), draw(8, 32, seed=3)
    scaled_fun = delayed_float8(model, history=2)
    state = scaled_fun.init(params, x)
    assert [h.lhs.shape for h in state] == [(3, 2), (2,)]  # a branch has none
    step = bf.jit(bf.value_and_grad(scaled_fun, (0, 1)))
    for _ in range(3):
        value, (state, grads) = step(state, params, x)
    np.testing.assert_array_equal(state[0].rhs[:, 0], np.abs(params["layers"]).max((1, 2)))
    want = bf.value_and_grad(float8(model))(params, x)
    bf.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.1, atol=1e-4), (value, grads), want)


# -- training --------------------------------------------------------------------------------------

TOKENS = np.array([list(b"the quick brown fox jumps over the lazy dog and runs away. ")] * 2).reshape(-1) % 32


def gpt_init():
    keys = iter(random.split(random.key(0), 8))
    draw = lambda *shape: random.normal(next(keys), shape) / shape[-2] ** 0.5
    layers = {"qkv": draw(2, 32, 96), "out": draw(2, 32, 32), "up": draw(2, 32, 64), "down": draw(2, 64, 32)}
    return {"embed": draw(32, 32), "layers": layers, "head": draw(32, 32)}


def gpt_loss(params, tokens):
    def layer(h, p):
        q, k, v = bnp.split(nn.layer_norm(h, -1) @ p["qkv"], 3, -1)
        scores = bnp.einsum("bqd,bkd->bqk", q, k) / 32**0.5 + bnp.where(bnp.tri(h.shape[1]) > 0, 0.0, -1e9)
        h = h + (nn.softmax(scores, -1) @ v) @ p["out"]
        return h + nn.gelu(nn.layer_norm(h, -1) @ p["up"]) @ p["down"], None

    h, _ = lax.scan(bf.checkpoint(layer), params["embed"][tokens[:, :-1]], params["layers"])
    logits = nn.layer_norm(h, -1) @ params["head"]
    return nn.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def trained(loss, state=None, steps=60):
    """Losses of a tiny GPT."""
    optimizer = optim.adam(3e-3)
    params = gpt_init()
    carried = optimizer.init(params)
    tokens = np.stack([TOKENS[i : i + 17] for i in range(0, 96, 8)])
    state = loss.init(params, tokens) if isinstance(loss, low_precision.DelayedFloat8) else ()
    full = (lambda s, p: loss(s, p, tokens)) if state else lambda s, p: loss(p, tokens)

    @bf.jit
    def step(params, carried, state):
        value, (state, grads) = bf.value_and_grad(full, (0, 1))(state, params)
        updates, carried = optimizer.update(grads, carried, params)
        return optim.apply_updates(params, updates), carried, state, value

    losses = []
    for _ in range(steps):
        params, carried, state, value = step(params, carried, state)
        losses.append(float(value))
    return np.array(losses)


@pytest.fixture(scope="module")
def in_float32():
    return trained(gpt_loss)


TRAINED = {
    "current": lambda: float8(gpt_loss),
    "autocast": lambda: float8(bf.autocast(gpt_loss)),
    "block": lambda: float8(gpt_loss, Float8(scaling="block")),
    "delayed": lambda: delayed_float8(gpt_loss, history=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_gpt_trains_as_in_float32(name, in_float32):
    losses = trained(TRAINED[name]())
    assert in_float32[0] > 3.3 and in_float32[-1] < 1.0
    assert np.isfinite(losses).all()
    assert abs(losses[-5:].mean() - in_float32[-5:].mean()) < 0.1


# -- errors ----------------------------------------------------------------------------------------

BAD = {
    "a scaling": (lambda: Float8(scaling="column"), errors.ValueRangeError, "column"),
    "a format": (lambda: Float8(forward="bfloat16"), errors.ValueRangeError, "forward is bf16"),
    "two of e5m2": (lambda: Float8(forward="float8_e5m2"), errors.ValueRangeError, "both e5m2"),
    "a margin": (lambda: Float8(margin=-1), errors.ValueRangeError, "margin"),
    "no predicate": (lambda: Float8(where=3), errors.ArgumentError, "where is 3"),
    "a recipe": (lambda: float8(bnp.matmul, "row"), errors.ArgumentError, "the recipe is a str"),
    "rows with a history": (lambda: delayed_float8(bnp.matmul, Float8(scaling="row")), errors.ValueRangeError, "row"),
    "no history": (lambda: delayed_float8(bnp.matmul, history=0), errors.ValueRangeError, "0 steps"),
    "autocast": (lambda: bf.autocast(bnp.matmul, "float8_e4m3fn"), errors.DtypeError, r"(?s)low .*low_precision"),
    "no function": (lambda: float8(3), errors.BlufuncError, "float8"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    call, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        call()


def test_a_state_of_another_program_is_refused():
    x, w = draw(8, 32), draw(32, 16, seed=1)
    f = delayed_float8(bnp.matmul, history=2)
    state = f.init(x, w)
    with pytest.raises(errors.TreeError, match="has 2 histories"):
        f((*state, *state), x, w)
    with pytest.raises(errors.TreeError, match=r"history 0, of the matmul at .* has shapes"):
        f(delayed_float8(bnp.matmul, history=3).init(x, w), x, w)
    for dtype in ("bfloat16", "int32"):
        with pytest.raises(errors.DtypeError, match="the state has arrays of"):
            f(bf.tree.map(lambda h, dtype=dtype: h.astype(dtype), state), x, w)
    with pytest.raises(errors.ArgumentError, match="the first argument is a state"):
        f(x, state, w)
