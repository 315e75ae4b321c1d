"""``linear_cross_entropy``: plain form, derivatives, transforms, memory, errors."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, nn
from blufunc.core.ir.jaxpr import Literal, subjaxprs
from blufunc.core.programs import simplify as passes
from blufunc.nn import vocabulary_loss_call as call

RNG = np.random.default_rng(0)


def plain(x, weight, labels, *, bias=None, label_smoothing=0.0, z_loss=0.0, ignore_index=None, soft_cap=None,
          reduction="mean", layout="VC", chunk=None):  # fmt: skip
    """The same with all logits at once, from basic operations."""
    logits = x @ (weight.T if layout == "VC" else weight)
    logits = logits.astype(bnp.promote_types(logits.dtype, "float32"))
    logits = logits if bias is None else logits + bias
    logits = logits if soft_cap is None else soft_cap * bnp.tanh(logits / soft_cap)
    counted = labels == labels if ignore_index is None else labels != ignore_index
    labels = bnp.where(counted, labels, 0)
    losses = nn.softmax_cross_entropy_with_integer_labels(logits, labels)
    if label_smoothing:
        even = nn.logsumexp(logits, -1) - bnp.mean(logits, -1)
        losses = (1 - label_smoothing) * losses + label_smoothing * even
    losses = losses + z_loss * nn.logsumexp(logits, -1) ** 2 if z_loss else losses
    losses = bnp.where(counted, losses, 0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / bnp.maximum(counted.sum(), 1)


def arrays(lead, C, V, dtype="float64", seed=0):
    rng = np.random.default_rng(seed)
    x, weight, bias = (bnp.asarray(rng.normal(size=s), dtype=dtype) for s in ((*lead, C), (V, C), (V,)))
    return x, weight, bias, bnp.asarray(rng.integers(0, V, lead), dtype="int32")


def both(options, labels, ct=None):
    """The loss and the plain form as scalar functions of x, weight and bias."""

    def scalar(f):
        def of(x, weight, bias):
            out = f(x, weight, labels, bias=bias, **options)
            return out if ct is None else (out * ct).sum()

        return of

    return scalar(nn.linear_cross_entropy), scalar(plain)


def same(got, expected, rtol=1e-9, atol=1e-11):
    for a, b in zip(bf.tree.leaves(got), bf.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol)


OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.02},
    "cap": {"soft_cap": 1.5},
    "ignored": {"ignore_index": 2},
    "all": {"label_smoothing": 0.3, "z_loss": 0.02, "soft_cap": 1.5, "ignore_index": 0},
}
REDUCTIONS = ("mean", "sum", "none")


# -- values and derivatives ------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_values_and_gradients_are_those_of_the_plain_form(options, reduction):
    x, weight, bias, labels = arrays((3, 4), 5, 7)
    ct = bnp.asarray(RNG.normal(size=(3, 4)), dtype="float64") if reduction == "none" else None
    ours, theirs = both({**options, "reduction": reduction, "chunk": 5}, labels, ct)
    ours, theirs = (bf.value_and_grad(f, argnums=(0, 1, 2)) for f in (ours, theirs))
    same(ours(x, weight, bias), theirs(x, weight, bias))
    same(bf.jit(ours)(x, weight, bias), theirs(x, weight, bias))


@settings(max_examples=40, deadline=None)
@given(
    lead=st.lists(st.integers(1, 4), max_size=2).map(tuple),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    chunk=st.integers(1, 9),
    options=st.sampled_from(list(OPTIONS.values())),
    reduction=st.sampled_from(REDUCTIONS),
    layout=st.sampled_from(["VC", "CV"]),
    ignored=st.sampled_from(["none", "some", "all"]),
    seed=st.integers(0, 5),
)
def test_shapes(lead, sizes, chunk, options, reduction, layout, ignored, seed):
    x, weight, bias, labels = arrays(lead, *sizes, seed=seed)
    weight = weight if layout == "VC" else weight.T
    if ignored != "none":
        drop = np.random.default_rng(seed).random(lead) < (0.5 if ignored == "some" else 2)
        labels, options = bnp.where(drop, -100, labels), {**options, "ignore_index": -100}
    ours, theirs = both({**options, "reduction": reduction, "layout": layout, "chunk": chunk}, labels, ct=1.0)
    got, expected = (bf.value_and_grad(f, argnums=(0, 1, 2))(x, weight, bias) for f in (ours, theirs))
    same(got, expected)


@pytest.mark.parametrize("n", [3, 2 * call.IN_A_ROW + 3])
def test_many_chunks_are_a_loop(n):
    x, weight, bias, labels = arrays((n,), 3, 4)
    for reduction, ct in (("mean", None), ("none", 1.0)):
        ours, theirs = both({"chunk": 2, "reduction": reduction}, labels, ct)
        f = bf.value_and_grad(ours, argnums=(0, 1, 2))
        same(f(x, weight, bias), bf.value_and_grad(theirs, argnums=(0, 1, 2))(x, weight, bias))
        inlined, _ = passes.inline_bodies(passes.simplify(bf.make_jaxpr(f)(x, weight, bias)))
        assert ("scan" in {e.prim.name for e in inlined.eqns}) is (n > 2 * call.IN_A_ROW)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 0)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_some_gradients(wanted, reduction):
    x, weight, bias, labels = arrays((6,), 3, 4)
    ours, theirs = both({"chunk": 4, "reduction": reduction}, labels, ct=2.0)
    f = bf.grad(ours, argnums=wanted)
    same(f(x, weight, bias), bf.grad(theirs, argnums=wanted)(x, weight, bias))
    # matmuls of two chunks: logits, gradients of x and weight; logits twice for individual losses
    products = 2 * (1 + len({0, 1} & set(wanted)))
    inlined, _ = passes.inline_bodies(passes.simplify(bf.make_jaxpr(f)(x, weight, bias)))
    found = sum(e.prim.name == "dot_general" for e in inlined.eqns)
    assert found == products


@pytest.mark.parametrize("reduction, ct", [("mean", None), ("none", 1.5)])
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
def test_higher_derivatives(reduction, ct, options):
    x, weight, bias, labels = arrays((5,), 3, 4)
    ts = tuple(bnp.asarray(RNG.normal(size=a.shape), dtype="float64") for a in (x, weight, bias))
    ours, theirs = both({**options, "chunk": 2, "reduction": reduction}, labels, ct)

    def products(f):
        slope = lambda *ps: sum((g * t).sum() for g, t in zip(bf.grad(f, (0, 1, 2))(*ps), ts, strict=True))
        forward = bf.jvp(f, (x, weight, bias), ts)
        over = bf.jvp(bf.grad(f, (0, 1, 2)), (x, weight, bias), ts)[1]
        return forward, over, bf.grad(slope, (0, 1, 2))(x, weight, bias), bf.hessian(f)(x, weight, bias)

    same(products(ours), products(theirs), rtol=1e-8, atol=1e-10)


def test_labels_out_of_range_are_nan_in_loss_and_gradient():
    x, weight, bias, _ = arrays((4,), 3, 5)
    labels = bnp.asarray([1, 5, -1, 4], dtype="int32")
    f = functools.partial(nn.linear_cross_entropy, labels=labels, chunk=3)
    losses = np.asarray(f(x, weight, reduction="none"))
    assert list(np.isnan(losses)) == [False, True, True, False]
    assert np.isnan(float(f(x, weight)))
    dx = np.asarray(bf.grad(lambda x: f(x, weight))(x))
    assert list(np.isnan(dx).any(-1)) == [False, True, True, False]
    kept = np.asarray(bf.grad(lambda x: f(x, weight, ignore_index=5, reduction="sum"))(x))
    assert list(np.isnan(kept).any(-1)) == [False, False, True, False]
    assert not kept[1].any()


def test_narrow_labels_reach_all_classes():
    x, weight, _, _ = arrays((3,), 2, 300)
    labels = bnp.asarray([0, 100, 255], dtype="uint8")
    same(nn.linear_cross_entropy(x, weight, labels), plain(x, weight, labels.astype("int32")))


def test_infinite_logits():
    x, weight, bias, labels = arrays((4,), 3, 6)
    labels = bnp.minimum(labels, 3)
    masked = bias.at[4:].set(-np.inf)  # padding of the vocabulary
    ours, theirs = both({"chunk": 3}, labels)
    f = bf.value_and_grad(ours, argnums=(0, 1, 2))
    value, grads = f(x, weight, masked)
    same(value, both({}, labels)[1](x, weight[:4], bias[:4]))
    assert all(np.isfinite(np.asarray(g)).all() for g in grads)
    assert not np.asarray(grads[1])[4:].any()
    assert not np.asarray(grads[2])[4:].any()
    same(theirs(x, weight, masked), value)
    impossible = nn.linear_cross_entropy(x, weight, bnp.full(4, 5), bias=masked, reduction="none")
    assert np.isposinf(np.asarray(impossible)).all()


def test_one_class_costs_nothing():
    x, weight, bias, labels = arrays((4,), 3, 1)
    value, grads = bf.value_and_grad(both({"chunk": 3}, labels)[0], argnums=(0, 1, 2))(x, weight, bias)
    assert float(value) == 0
    assert not any(np.asarray(g).any() for g in grads)


# -- precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 2e-2), ("float16", 3e-3)])
def test_precisions(dtype, tolerance):
    x, weight, bias, labels = arrays((40,), 8, 30, dtype)
    exact = [bnp.asarray(a, dtype="float64") for a in (x, weight, bias)]
    ours, theirs = both({"chunk": 7}, labels)
    value, grads = bf.value_and_grad(ours, argnums=(0, 1, 2))(x, weight, bias)
    assert value.dtype == np.float32
    assert {str(g.dtype) for g in grads} == {dtype}
    expected, of = bf.value_and_grad(theirs, argnums=(0, 1, 2))(*exact)
    np.testing.assert_allclose(float(value), float(expected), rtol=tolerance)
    for g, e in zip(grads, of, strict=True):
        e = np.asarray(e)
        np.testing.assert_allclose(np.asarray(g, np.float64), e, atol=tolerance * abs(e).max())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_gradient_of_the_weight_is_summed_in_float32(reduction):
    """4096 equal tokens: a bfloat16 sum over chunks would stagnate."""
    n, chunk = 4096, 16
    x, weight = bnp.ones((n, 1), "bfloat16"), bnp.zeros((2, 1), "bfloat16")
    f = lambda w: nn.linear_cross_entropy(x, w, bnp.zeros(n, "int32"), chunk=chunk, reduction=reduction).sum()
    expected = n / 2 if reduction == "none" else 0.5
    np.testing.assert_array_equal(np.asarray(bf.grad(f)(weight), np.float32), [[-expected], [expected]])


@pytest.mark.parametrize("cast", [False, True])
def test_float16_shares_of_many_tokens_do_not_vanish(cast):
    n = 1 << 16
    x, weight = bnp.ones((n, 1), "float16"), bnp.zeros((64, 1), "float16")
    f = lambda w, x: nn.linear_cross_entropy(x, w, bnp.zeros(n, "int32"))
    if cast:
        f, x, weight = bf.autocast(f, "float16"), x.astype("float32"), weight.astype("float32")
    dw = bf.grad(f)(weight, x)
    np.testing.assert_allclose(np.asarray(dw, np.float32)[1:], 1 / 64, rtol=1e-3)
    scaled = bf.grad(lambda x: 2.0**16 * f(weight + 1, x))(x + bnp.zeros((), x.dtype))
    assert np.isfinite(np.asarray(scaled, np.float32)).all()


def dtypes_of_products(f, *args):
    jaxpr, _ = passes.inline_bodies(passes.simplify(bf.make_jaxpr(f)(*args)))
    products = [e for e in jaxpr.eqns if e.prim.name == "dot_general"]
    return [(str(e.invars[0].aval.dtype), str(e.outvars[0].aval.dtype)) for e in products]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast(reduction):
    x, weight, bias, labels = arrays((6,), 4, 5, "float32")
    ours, theirs = both({"chunk": 3, "reduction": reduction}, labels, ct=1.0)
    f = bf.value_and_grad(bf.autocast(ours), argnums=(0, 1, 2))
    value, grads = f(x, weight, bias)
    assert {str(a.dtype) for a in (value, *grads)} == {"float32"}
    expected = bf.value_and_grad(bf.autocast(theirs), argnums=(0, 1, 2))(x, weight, bias)
    same((value, grads), expected, rtol=2e-2, atol=2e-2)
    found = dtypes_of_products(f, x, weight, bias)
    assert {low for low, _ in found} == {"bfloat16"}
    assert found.count(("bfloat16", "float32")) >= 2  # the gradient of the weight, for each chunk


# -- transforms ------------------------------------------------------------------------------------


AXES = [(0, None, None, 0), (1, None, None, None), (0, 0, 0, 0), (None, 0, None, 0)]


@pytest.mark.parametrize("in_axes", AXES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_vmap(in_axes, reduction):
    x, weight, bias, labels = arrays((6,), 3, 4)
    operands = [
        a if d is None else bnp.moveaxis(bnp.stack([a, a[::-1], a * 2 % 4]), 0, d)
        for a, d in zip((x, weight, bias, labels), in_axes, strict=True)
    ]

    def f(x, weight, bias, labels, of=nn.linear_cross_entropy):
        return of(x, weight, labels, bias=bias, chunk=4, reduction=reduction).sum()

    theirs = functools.partial(f, of=plain)
    same(bf.vmap(f, in_axes)(*operands), bf.vmap(theirs, in_axes)(*operands))
    inner, outer = (
        [bf.vmap(bf.grad(g, (0, 1, 2)), in_axes)(*operands) for g in (f, theirs)],
        [bf.grad(lambda *a, g=g: bf.vmap(g, in_axes)(*a).sum(), (0, 1, 2))(*operands) for g in (f, theirs)],
    )
    same(inner[0], inner[1])
    same(outer[0], outer[1])
    same(bf.jit(bf.vmap(bf.grad(f, (0, 1, 2)), in_axes))(*operands), inner[1])


def test_a_batch_of_examples_has_one_gradient_of_the_weight():
    x, weight, _, labels = arrays((3, 6), 5, 7)
    each = lambda w: bf.vmap(lambda x, t: nn.linear_cross_entropy(x, w, t, chunk=4))(x, labels).mean()
    jaxpr, _ = passes.inline_bodies(passes.simplify(bf.make_jaxpr(bf.grad(each))(weight)))
    assert max(v.aval.size for e in jaxpr.eqns for v in e.outvars) < 3 * weight.size
    same(bf.grad(each)(weight), bf.grad(lambda w: plain(x, w, labels))(weight))


def test_checkpoint_scan_and_linear_transpose():
    x, weight, bias, labels = arrays((6,), 3, 4)
    ours, theirs = both({"chunk": 4}, labels)

    def looped(f):
        body = lambda c, x: (c + bf.checkpoint(lambda x, w: f(x, w, bias))(x, c * weight), None)
        return lambda c: lax.scan(body, c, bnp.stack([x, 2 * x]))[0]

    c = bnp.asarray(0.5, dtype="float64")
    same(bf.value_and_grad(looped(ours))(c), bf.value_and_grad(looped(theirs))(c))
    _, pull = bf.vjp(lambda x: nn.linear_cross_entropy(x, weight, labels, chunk=4, reduction="none"), x)
    _, expected = bf.vjp(lambda x: plain(x, weight, labels, reduction="none"), x)
    same(pull(labels.astype("float64")), expected(labels.astype("float64")))


# -- memory ----------------------------------------------------------------------------------------

N, C, V, CHUNK = 4096, 16, 2048, 256


def alive(jaxpr, size):
    """The most matmul results of ``size`` elements alive at once, in program order.

    An elementwise function of one counts as one with it: a kernel overwrites its operand.
    """
    product, spans = {}, {}
    for i, eqn in enumerate(jaxpr.eqns):
        read = [product[a] for a in eqn.invars if not isinstance(a, Literal) and a in product]
        for v in eqn.outvars:
            if v.aval.size >= size and (read or eqn.prim.name == "dot_general"):
                product[v] = v if eqn.prim.name == "dot_general" else read[0]
        for v in (*read, *(product[v] for v in eqn.outvars if v in product)):
            spans[v] = (spans.get(v, (i,))[0], i)
    return max((sum(a <= i <= b for a, b in spans.values()) for i in range(len(jaxpr.eqns))), default=0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("derivative", ["value", "grad", "jvp", "grad of grad"])
@pytest.mark.parametrize("chunk", [CHUNK, CHUNK // 4])
def test_one_chunk_of_logits_is_alive(reduction, derivative, chunk):
    def f(x, w, labels):
        return nn.linear_cross_entropy(x, w, labels, chunk=chunk, reduction=reduction).sum()

    of = {
        "value": f,
        "grad": bf.grad(f, (0, 1)),
        "jvp": lambda x, w, labels: bf.jvp(lambda x, w: f(x, w, labels), (x, w), (x, w)),
        "grad of grad": bf.grad(
            lambda x, w, labels: sum((g**2).sum() for g in bf.grad(f, (0, 1))(x, w, labels)), (0, 1)
        ),
    }[derivative]
    args = [bf.ShapeDtypeStruct((N, C), "float32"), bf.ShapeDtypeStruct((V, C), "float32")]
    traced = bf.make_jaxpr(of)(*args, bf.ShapeDtypeStruct((N,), "int32"))
    jaxpr, _ = passes.inline_bodies(passes.simplify(traced))

    def bodies(jaxpr):
        yield jaxpr
        for eqn in jaxpr.eqns:
            for sub in subjaxprs(eqn.params):
                yield from bodies(passes.inline_bodies(passes.simplify(sub))[0])

    found = list(bodies(jaxpr))
    assert max(v.aval.size for j in found for e in j.eqns for v in e.outvars) <= chunk * V
    most = max(alive(j, chunk * V) for j in found)
    # a tangent of logits is a sum of two matmuls
    assert most in ((1,) if derivative in ("value", "grad") else (2, 3))


def test_the_steps_are_at_the_line_of_the_call():
    for n in (4, 5):  # definitions are shared among calls
        x, weight, _, labels = arrays((n,), 3, 4)
        f = lambda x, w, t: nn.linear_cross_entropy(x, w, t, chunk=4)
        table = str(bf.explain(bf.value_and_grad(f, (0, 1)), x, weight, labels))
        line = f.__code__.co_firstlineno
        assert table.count(f"test_linear_cross_entropy.py:{line}") >= 3


def test_planned_memory():
    args = [bf.ShapeDtypeStruct((N, C), "float32"), bf.ShapeDtypeStruct((V, C), "float32")]
    args.append(bf.ShapeDtypeStruct((N,), "int32"))
    peak = lambda f: bf.jit(bf.value_and_grad(f, (0, 1))).lower(*args).memory.peak_bytes
    logits = 4 * CHUNK * V
    small = 4 * (4 * N * C + 6 * V * C + 8 * N)
    for reduction in REDUCTIONS:
        ours = functools.partial(nn.linear_cross_entropy, chunk=CHUNK, reduction=reduction)
        assert peak(lambda *args, of=ours: of(*args).sum()) < logits + small
    assert peak(plain) > 4 * N * V


# -- errors ----------------------------------------------------------------------------------------

X, W, _, Y = arrays((4,), 3, 5, "float32")
MISTAKES = {
    "labels are floats": (errors.DtypeError, "must be integers", lambda: (X, W, X[:, 0]), {}),
    "labels of another shape": (errors.ShapeError, "one label for each row", lambda: (X, W, Y[:2]), {}),
    "the other layout": (errors.ShapeError, r"layout='CV'", lambda: (X, W.T, Y), {}),
    "other features": (errors.ShapeError, r"\[V, C\], so that C would be 2", lambda: (X, W[:, :2], Y), {}),
    "weight of one axis": (errors.ShapeError, "two axes", lambda: (X, W[0], Y), {}),
    "no classes": (errors.ShapeError, "no classes", lambda: (X, W[:0], Y), {}),
    "complex": (errors.DtypeError, "x must be real", lambda: (X.astype("complex64"), W, Y), {}),
    "bias": (errors.ShapeError, "each of the 5 classes", lambda: (X, W, Y), {"bias": bnp.zeros(3)}),
    "smoothing": (errors.ValueRangeError, "a part of each target", lambda: (X, W, Y), {"label_smoothing": 1.5}),
    "z-loss": (errors.ValueRangeError, "z_loss must be finite", lambda: (X, W, Y), {"z_loss": float("nan")}),
    "cap": (errors.ValueRangeError, "positive and finite", lambda: (X, W, Y), {"soft_cap": 0}),
    "chunk": (errors.ValueRangeError, "at least 1", lambda: (X, W, Y), {"chunk": 0}),
    "chunk of no kind": (errors.ArgumentError, "chunk is an int", lambda: (X, W, Y), {"chunk": 2.5}),
    "reduction": (errors.ValueRangeError, "'mean', 'sum' or 'none'", lambda: (X, W, Y), {"reduction": "avg"}),
    "layout": (errors.ValueRangeError, r"'VC' for a weight \[V, C\]", lambda: (X, W, Y), {"layout": "NC"}),
}  # fmt: skip


@pytest.mark.parametrize("error, message, args, options", MISTAKES.values(), ids=MISTAKES)
def test_mistakes(error, message, args, options):
    with pytest.raises(error, match=message) as caught:
        nn.linear_cross_entropy(*args(), **options)
    assert "test_linear_cross_entropy.py" in str(caught.value)


def test_traced_options_are_refused():
    with pytest.raises(errors.ArgumentError, match="label_smoothing is a number"):
        bf.jit(lambda s: nn.linear_cross_entropy(X, W, Y, label_smoothing=s))(0.1)
