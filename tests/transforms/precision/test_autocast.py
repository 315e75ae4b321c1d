"""``autocast``: the precision of each operation, types, and compositions."""

import functools

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, lax, nn, tree
from blufunc.core.ir import dtypes
from blufunc.core.ir.check import check_jaxpr
from blufunc.core.ir.jaxpr import subjaxprs
from blufunc.transforms.autodiff.grad import grad, jvp, linearize, value_and_grad, vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.checkpointing.checkpoint import checkpoint
from blufunc.transforms.control_flow.cond import cond
from blufunc.transforms.control_flow.scan import scan
from blufunc.transforms.control_flow.while_loop import while_loop
from blufunc.transforms.custom_rules.custom_gradient import custom_gradient
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp
from blufunc.transforms.custom_rules.custom_vmap import custom_vmap
from blufunc.transforms.precision.autocast import autocast
from blufunc.transforms.precision.policy import autocast_table, table
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.transforms.common import arr

BF16 = dtypes.bfloat16
TOLERANCE = 2.0**-6  # a few roundings to 8 bits


def f32(*shape, seed=0):
    return arr(np.random.default_rng((seed, *shape)).normal(size=shape), np.float32)


def near(got, want, tolerance=TOLERANCE):
    """Equal structures and dtypes; values within half precision of the largest."""
    assert tree.structure(got) == tree.structure(want)
    for g, w in zip(tree.leaves(got), tree.leaves(want), strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert np.abs(g - w).max(initial=0) <= tolerance * max(np.abs(w).max(initial=0), 1e-3)


def every_eqn(jaxpr):
    for e in jaxpr.eqns:
        yield e
        for sub in subjaxprs(e.params):
            yield from every_eqn(sub)


def dtypes_of(f, name, *args):
    """The dtype of the first operand of each use of a primitive, calls included."""
    jaxpr = make_jaxpr(f)(*args)
    check_jaxpr(jaxpr)
    return [dtypes.short_name(e.invars[0].aval.dtype) for e in every_eqn(jaxpr) if e.prim.name == name]


# -- the program of a network ----------------------------------------------------------------------


def mlp(params, x):
    for w, b in params[:-1]:
        x = bnp.tanh(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def loss(params, x, y):
    logits = mlp(params, x)
    logits = logits - logits.max(-1, keepdims=True)
    log_p = logits - bnp.log(bnp.exp(logits).sum(-1, keepdims=True))
    return -(log_p * y).sum(-1).mean()


PARAMS = [
    (f32(6, 16) * 0.4, f32(16) * 0.1),
    (f32(16, 16, seed=1) * 0.25, f32(16, seed=1)),
    (f32(16, 4) * 0.25, f32(4)),
]
BATCH = (f32(8, 6, seed=2), arr(np.eye(4)[np.arange(8) % 4], np.float32))


def test_the_program_with_casts_golden(golden):
    text = "\n\n".join(
        [
            str(make_jaxpr(autocast(loss))(PARAMS[-1:], BATCH[0][:, :1].repeat(16, 1), BATCH[1])),
            autocast_table(),
        ]
    )
    golden("autocast", text)


def test_losses_and_gradients_of_a_network():
    want = value_and_grad(loss)(PARAMS, *BATCH)
    for f in (
        value_and_grad(autocast(loss)),
        autocast(value_and_grad(loss)),
        jit(value_and_grad(autocast(loss))),
        jit(autocast(value_and_grad(loss))),
        autocast(jit(value_and_grad(jit(loss)))),
        value_and_grad(jit(autocast(checkpoint(loss)))),
        value_and_grad(checkpoint(autocast(loss))),
    ):
        got = f(PARAMS, *BATCH)
        near(got, want)
        assert not np.array_equal(np.asarray(got[0]), np.asarray(want[0])), "nothing was rounded"
    each = lambda f: vmap(grad(f), (None, 0, 0))(PARAMS, BATCH[0][:, None], BATCH[1][:, None])
    near(each(autocast(loss)), each(loss))
    near(autocast(lambda: each(loss))(), each(loss))
    near(
        jvp(autocast(lambda p: loss(p, *BATCH)), (PARAMS,), (PARAMS,)),
        jvp(lambda p: loss(p, *BATCH), (PARAMS,), (PARAMS,)),
    )
    out, linear = linearize(autocast(lambda p: loss(p, *BATCH)), PARAMS)
    near(linear(PARAMS), jvp(lambda p: loss(p, *BATCH), (PARAMS,), (PARAMS,))[1])
    second = lambda f: grad(lambda x: (grad(f, 1)(PARAMS, x, BATCH[1]) ** 2).sum())(BATCH[0])
    near(second(autocast(loss)), second(loss), 4 * TOLERANCE)


def test_training_goes_the_same_way():
    def train(f):
        step = jit(lambda p: tree.map(lambda w, g: w - 0.5 * g, p, grad(f)(p, *BATCH)))
        p = PARAMS
        for _ in range(20):
            p = step(p)
        return float(loss(p, *BATCH))

    assert train(loss) < 0.3 and abs(train(autocast(loss)) - train(loss)) < 0.02


# -- what runs in which precision ------------------------------------------------------------------

X, W = f32(4, 4), f32(4, 4, seed=1)


def test_contractions_are_low_and_results_are_not():
    f = lambda x, w: x @ w
    out = autocast(f)(X, W)
    assert out.dtype == np.float32
    want = (X.astype(BF16) @ W.astype(BF16)).astype("float32")
    np.testing.assert_array_equal(np.asarray(out), np.asarray(want))
    assert dtypes_of(autocast(f), "dot_general", X, W) == ["bf16"]
    assert dtypes_of(autocast(f, "float16"), "dot_general", X, W) == ["f16"]
    image, kernel = f32(1, 2, 5, 5), f32(3, 2, 3, 3)
    conv = lambda x, k: lax.conv(x, k, (1, 1), "SAME")
    assert dtypes_of(autocast(conv), "conv_general_dilated", image, kernel) == ["bf16"]
    near(autocast(conv)(image, kernel), conv(image, kernel))
    near(
        grad(lambda k: (autocast(conv)(image, k) ** 2).sum())(kernel),
        grad(lambda k: (conv(image, k) ** 2).sum())(kernel),
    )


def test_a_declared_result_is_kept():
    low = lambda x, w: lax.dot(x, w, preferred_element_type=np.float32) + 0.0
    assert dtypes_of(autocast(low), "add", X, W) == ["bf16"]  # float32 is what it would be anyway
    f = lambda x, w: lax.dot(x, w, preferred_element_type=np.float64)
    assert dtypes_of(autocast(f), "dot_general", X, W) == ["f32"]
    assert autocast(f)(X, W).dtype == np.float64


def test_the_backward_pass_is_low_too():
    """Both products of the gradient, whichever way the two transforms are nested."""
    f = lambda x, w: bnp.tanh(x @ w).sum()
    for g in (grad(autocast(f), (0, 1)), autocast(grad(f, (0, 1)))):
        assert dtypes_of(g, "dot_general", X, W) == ["bf16"] * 3
        assert [x.dtype for x in g(X, W)] == [np.float32] * 2


CLASSES = {
    "low flows through what is cheap": (
        lambda y: bnp.tanh(-y * 2.0 + y).T.reshape(16)[::-1],
        "rev",
        ["bf16"],
    ),
    "exponentials": (lambda y: bnp.exp(y), "exp", ["f32"]),
    "sums": (lambda y: y.sum(), "reduce_sum", ["f32"]),
    "maxima": (lambda y: y.max(), "reduce_max", ["bf16"]),
    "a difference of two low values": (lambda y: y - y.T, "sub", ["f32"]),
    "a difference with one that is not": (lambda y: y - X, "sub", ["f32"]),
    "a difference with a number": (lambda y: y - 1.0, "sub", ["f32"]),
    "a quotient with one that is not": (lambda y: y / X, "div", ["f32"]),
    "a quotient by a number": (lambda y: y / 3.0, "div", ["bf16"]),
    "sums of low and not": (lambda y: X + y, "add", ["f32"]),
    "sums of low ones": (lambda y: y + y, "add", ["bf16"]),
    "powers": (lambda y: y**2.5, "pow", ["f32"]),
    "roots": (lambda y: lax.rsqrt(y * y), "rsqrt", ["f32"]),
    "running sums": (lambda y: bnp.cumsum(y, 0), "cumsum", ["f32"]),
    "joining": (lambda y: bnp.concatenate([y, X]), "concatenate", ["f32"]),
    "joining low ones": (lambda y: bnp.concatenate([y, y]), "concatenate", ["bf16"]),
    "gathers": (lambda y: y[bnp.array([0, 2])], "gather", ["bf16"]),
    "sums into places": (lambda y: X.at[bnp.array([0, 0, 1, 2])].add(y), "scatter_add", ["f32"]),
    "comparisons": (lambda y: y > X, "gt", ["f32"]),
    "sorting is as traced": (lambda y: bnp.sort(y), "sort", ["f32"]),
    "functions without a class": (lambda y: lax.lgamma(y), "lgamma", ["f32"]),
    "integers from low values": (lambda y: y.astype("int32"), "convert", ["f32", "f32", "bf16"]),
    "float64 of low values": (lambda y: y.astype("float64") * 2.0, "mul", ["f64"]),
}


@pytest.mark.parametrize("name", CLASSES)
def test_classes(name):
    after, prim, want = CLASSES[name]
    f = lambda x, w: after(x @ w)
    assert dtypes_of(autocast(f), prim, X, W) == want
    got, plain = autocast(f)(X, W), f(X, W)
    assert got.dtype == plain.dtype and got.shape == plain.shape


def test_other_dtypes_are_left_alone():
    x64 = arr(np.asarray(X), np.float64)
    f = lambda x, w: bnp.exp(x @ w)
    np.testing.assert_array_equal(np.asarray(autocast(f)(x64, x64)), np.asarray(f(x64, x64)))
    half = X.astype(BF16)
    assert autocast(f)(half, half).dtype == BF16
    assert dtypes_of(autocast(f), "exp", half, half) == ["bf16"]
    z = X.astype("complex64")
    np.testing.assert_array_equal(np.asarray(autocast(f)(z, z)), np.asarray(f(z, z)))
    n = arr([[1, 2], [3, 4]], np.int32)
    np.testing.assert_array_equal(np.asarray(autocast(lambda a: a @ a)(n)), np.asarray(n @ n))


def test_changes_of_the_table():
    f = lambda x, w: bnp.exp(bnp.tanh(x @ w))
    assert dtypes_of(autocast(f), "tanh", X, W) == ["bf16"]
    for kept in ("tanh", ("tanh",), lax.tanh_p, [lax.tanh_p]):
        assert dtypes_of(autocast(f, float32=kept), "tanh", X, W) == ["f32"]
    assert dtypes_of(autocast(f, low=("exp",)), "exp", X, W) == ["bf16"]
    assert dtypes_of(autocast(f, float32=lax.dot_general_p), "dot_general", X, W) == ["f32"]
    assert autocast(f, low=lax.exp_p)(X, W).dtype == np.float32

    @autocast(dtype="float16", float32="tanh")
    def g(x, w):
        return f(x, w)

    assert dtypes_of(g, "dot_general", X, W) == ["f16"] and g.__name__ == "g"


def test_the_table_names_primitives_once():
    from tests.core.primitives.test_completeness import PRIMITIVES

    names = [n for names in table().values() for n in names]
    assert sorted(set(names)) == sorted(names)
    assert set(names) <= {p.name for p in PRIMITIVES}
    text = autocast_table(low="exp", float32=lax.tanh_p)
    low, _, wide, _ = (part.split() for part in text.split("):")[1:])
    assert "exp" in low and "tanh" in wide and "exp" not in wide
    assert all(len(line) <= 100 for line in text.splitlines())


# -- calls -----------------------------------------------------------------------------------------


def test_each_weight_is_cast_once():
    f = lambda w, x: (x @ w) @ w + (x @ w)
    assert dtypes_of(autocast(f), "convert", W, X) == ["f32", "f32", "bf16"]


@pytest.mark.parametrize(
    "wrap", [jit, checkpoint, lambda f: jit(jit(f))], ids=["jit", "checkpoint", "jit of jit"]
)
def test_low_values_pass_through_calls(wrap):
    inner = wrap(lambda y: bnp.tanh(y) * 2.0)
    f = lambda x, w: inner(x @ w) @ w
    assert dtypes_of(autocast(f), "tanh", X, W) == ["bf16"]
    assert dtypes_of(autocast(f), "convert", X, W) == ["f32", "f32", "bf16"]
    near(autocast(f)(X, W), f(X, W))
    near(grad(lambda w: autocast(f)(X, w).sum())(W), grad(lambda w: f(X, w).sum())(W))
    near(autocast(grad(lambda w: f(X, w).sum()))(W), grad(lambda w: f(X, w).sum())(W))


def test_scan():
    """The weight is cast once, before the loop; the carry stays float32."""

    def f(w, xs):
        def step(h, x):
            h = bnp.tanh(h @ w + x)
            return h, h @ w

        return scan(step, xs[0] * 0.0, xs)

    xs = f32(5, 4)
    jaxpr = make_jaxpr(autocast(f))(W, xs)
    (loop,) = [e for e in jaxpr.eqns if e.prim.name == "scan"]
    assert [dtypes.short_name(a.aval.dtype) for a in loop.invars] == ["bf16", "f32", "f32"]
    assert [dtypes.short_name(a.aval.dtype) for a in loop.outvars] == ["f32", "bf16"]
    near(autocast(f)(W, xs), f(W, xs), 4 * TOLERANCE)
    g = lambda f: grad(lambda w, xs: (f(w, xs)[1] ** 2).sum() + f(w, xs)[0].sum(), (0, 1))
    for got in (
        g(autocast(f)),
        autocast(g(f)),
        jit(g(autocast(f))),
        g(jit(autocast(jit(f)))),
        g(autocast(checkpoint(f))),
    ):
        near(got(W, xs), g(f)(W, xs), 8 * TOLERANCE)
    batch = bnp.stack([xs, xs * 2])
    near(vmap(g(autocast(f)), (None, 0))(W, batch), vmap(g(f), (None, 0))(W, batch), 8 * TOLERANCE)
    # a weight that the body needs exactly is not cast before the loop
    both = lambda w, xs: scan(lambda h, x: (bnp.tanh(h @ w) + w.sum(), None), xs[0], xs)[0]
    jaxpr = make_jaxpr(autocast(both))(W, xs)
    (loop,) = [e for e in jaxpr.eqns if e.prim.name == "scan"]
    assert loop.invars[0].aval.dtype == np.float32
    wide = lambda w, xs: scan(
        lambda h, x: (h + w.astype("float64").sum().astype("float32"), None), xs[0], xs
    )[0]
    np.testing.assert_array_equal(np.asarray(autocast(wide)(W, xs)), np.asarray(wide(W, xs)))


def test_cond_and_while():
    def f(x, w):
        y = x @ w
        y = cond(y.sum() > 0, lambda y: y @ w, lambda y: bnp.exp(y), y)
        return while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, bnp.tanh(c[1] @ w)), (0, y))[1]

    assert dtypes_of(autocast(f), "dot_general", X, W) == ["bf16"] * 3
    near(autocast(f)(X, W), f(X, W), 4 * TOLERANCE)
    near(jit(autocast(f))(X, W), f(X, W), 4 * TOLERANCE)
    near(jvp(autocast(f), (X, W), (X, W)), jvp(f, (X, W), (X, W)), 8 * TOLERANCE)


def test_solvers_are_left_alone():
    a = arr(np.asarray(W @ W.T) + 4 * np.eye(4), np.float32)
    f = lambda b: lax.custom_linear_solve(
        lambda x: a @ x, b, lambda _, b: bnp.linalg.solve(a, b), symmetric=True
    )
    b = f32(4)
    got = autocast(lambda b: f(b) @ b)(b)
    assert dtypes_of(autocast(f), "dot_general", b) == dtypes_of(f, "dot_general", b)
    near(got, f(b) @ b)


def ruled():
    """Custom rules, wrong by a factor of three, with a matmul in each."""
    jvp_f = custom_jvp(lambda y, w: bnp.tanh(y @ w))
    jvp_f.defjvp(lambda p, t: (jvp_f(*p), 3.0 * (t[0] @ p[1]) + bnp.exp(p[0]) * 0.0))
    symbolic = custom_jvp(lambda y, w: bnp.tanh(y @ w))
    symbolic.defjvp(
        lambda p, t: (symbolic(*p), 3.0 * (t[0] @ p[1]) if hasattr(t[0], "sum") else t[0]),
        symbolic_zeros=True,
    )
    vjp_f = custom_vjp(lambda y, w: bnp.tanh(y @ w))
    vjp_f.defvjp(
        lambda y, w: (vjp_f(y, w), (w, bnp.exp(y))), lambda r, ct: (3.0 * (ct @ r[0].T) + 0.0 * r[1], None)
    )
    gradient = custom_gradient(lambda y, w: (bnp.tanh(y @ w), lambda ct: (3.0 * (ct @ w.T), None)))
    return {"custom_jvp": jvp_f, "symbolic": symbolic, "custom_vjp": vjp_f, "custom_gradient": gradient}


@pytest.mark.parametrize("name", ruled())
def test_functions_with_derivative_rules(name):
    g = ruled()[name]
    f = lambda x, w: bnp.sum(g(x @ w, w) * 2.0)
    assert set(dtypes_of(autocast(f), "dot_general", X, W)) == {"bf16"}
    assert dtypes_of(autocast(f), "tanh", X, W) == ["bf16"]
    near(autocast(f)(X, W), f(X, W), 4 * TOLERANCE)
    want = grad(f, (0, 1))(X, W)
    for make in (
        lambda f: grad(autocast(f), (0, 1)),
        lambda f: autocast(grad(f, (0, 1))),
        lambda f: jit(grad(autocast(jit(f)), (0, 1))),
        lambda f: autocast(jit(grad(f, (0, 1)))),
        lambda f: grad(autocast(checkpoint(f)), (0, 1)),
        lambda f: lambda x, w: tree.map(lambda y: y[0], vmap(grad(autocast(f), (0, 1)))(x[None], w[None])),
        lambda f: grad(lambda x, w: vmap(autocast(f))(x[None], w[None])[0], (0, 1)),
        lambda f: grad(autocast(lambda x, w: vmap(f)(x[None], w[None])[0]), (0, 1)),
    ):
        near(make(f)(X, W), want, 4 * TOLERANCE)
        assert set(dtypes_of(make(f), "dot_general", X, W)) == {"bf16"}
    near(grad(lambda x: autocast(f)(x, W))(X), want[0], 4 * TOLERANCE)
    second = lambda f: grad(lambda x: (grad(f)(x, W) ** 2).sum())
    assert second(autocast(f))(X).dtype == np.float32


def test_functions_with_batching_rules():
    g = custom_vmap(lambda y: y * 2.0)
    g.def_vmap(lambda size, batched, y: (bnp.exp(y) @ bnp.ones((4, 4)), True))
    f = lambda x, w: g(x @ w)
    near(autocast(f)(X, W), f(X, W))
    for make in (
        lambda f: vmap(autocast(f), (0, None)),
        lambda f: autocast(vmap(f, (0, None))),
        lambda f: vmap(jit(autocast(f)), (0, None)),
        lambda f: lambda x, w: vmap(grad(lambda x: autocast(f)(x, w).sum()))(x),
    ):
        assert set(dtypes_of(make(f), "dot_general", X, W)) == {"bf16"}
    near(vmap(autocast(f), (0, None))(X, W), vmap(f, (0, None))(X, W), 4 * TOLERANCE)
    each = lambda f: vmap(grad(lambda x: f(x, W).sum()))(X)
    near(each(autocast(f)), each(f), 8 * TOLERANCE)


def test_functions_of_nn():
    def block(p, x):
        x = nn.layer_norm(x, p["scale"], p["bias"])
        return nn.softmax(nn.relu(x @ p["w"]) + nn.gelu(x @ p["w"]))

    p = {"scale": f32(4), "bias": f32(4, seed=1), "w": W}
    near(autocast(block)(p, X), block(p, X), 4 * TOLERANCE)
    total = lambda f: grad(lambda p: (f(p, X) ** 2).sum())(p)
    near(total(autocast(block)), total(block), 8 * TOLERANCE)
    near(autocast(lambda: total(block))(), total(block), 8 * TOLERANCE)
    assert set(dtypes_of(autocast(block), "exp", p, X)) <= {"f32"}


def test_structures_keywords_and_constants():
    c = W
    f = lambda p, *, scale: {"y": [p["x"] @ c * scale, None], "c": c, "n": p["n"] + 1, "two": 2.0}
    p = {"x": X, "n": arr(3, np.int32)}
    got = autocast(f)(p, scale=2.0)
    want = f(p, scale=2.0)
    assert got["n"].dtype == np.int32 and int(got["n"]) == 4 and float(got["two"]) == 2.0
    np.testing.assert_array_equal(np.asarray(got["c"]), np.asarray(c))
    near(got["y"][0], want["y"][0])
    nested = autocast(autocast(f))(p, scale=2.0)
    np.testing.assert_array_equal(np.asarray(nested["y"][0]), np.asarray(got["y"][0]))
    assert vjp(autocast(lambda x: x @ c), X)[1](X)[0].dtype == np.float32
    assert functools.partial(autocast, dtype="float16")(lambda x: x)(X).dtype == np.float32


ERRORS = {
    "no function": (lambda: autocast(3), errors.ArgumentError, "takes a function"),
    "dtype": (lambda: autocast(lambda x: x, "float32"), errors.DtypeError, "bfloat16 or float16"),
    "no dtype": (lambda: autocast(lambda x: x, "low"), errors.DtypeError, "low"),
    "dtype None": (lambda: autocast(lambda x: x, None), errors.DtypeError, "None"),
    "name": (lambda: autocast(lambda x: x, low="sinus"), errors.ValueRangeError, "'sinus'"),
    "no primitive": (lambda: autocast(lambda x: x, low=(np.sin,)), errors.ArgumentError, "low="),
    "no list": (lambda: autocast(lambda x: x, float32=3), errors.ArgumentError, "float32="),
    "both": (lambda: autocast(lambda x: x, low="exp", float32="exp"), errors.ValueRangeError, "exp in"),
    "no array": (lambda: autocast(lambda x: x)("a"), errors.ArgumentError, "argument x"),
    "a value": (
        lambda: autocast(lambda x: x if x > 0 else -x)(X[0, 0]),
        errors.ConcretizationError,
        "concrete",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, error, says = ERRORS[name]
    with pytest.raises(error, match=says) as info:
        call()
    assert "test_autocast.py" in info.value.where
