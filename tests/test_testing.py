"""Checks for authors of primitives: they pass correct rules and locate wrong ones."""

import functools

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, extend, lax, testing
from tests.op_table.rows import OPS
from tests.transforms.common import arr, draw

X = arr(np.linspace(0.2, 0.9, 6).reshape(2, 3))


def wrong_cube(factor=3.01):
    """x**3 with a derivative that is off."""

    @bf.custom_jvp
    def cube(x):
        return x**3

    cube.defjvp(lambda primals, tangents: (cube(*primals), factor * primals[0] ** 2 * tangents[0]))
    return cube


# -- check_grads, check_jvp, check_vjp -------------------------------------------------------------

SMOOTH = {
    "sin": (bnp.sin, (X,)),
    "two arguments": (lambda x, y: bnp.sin(x) * y / (1 + x), (X, X + 1)),
    "trees": (lambda d, n: {"a": d["x"] * d["y"][0], "n": n, "b": bnp.exp(d["x"])}, ({"x": X, "y": [X]}, 3)),
    "scalars": (lambda x: x**3, (0.5,)),
    "complex": (lambda z: bnp.exp(z) * z, (X + 1j * X,)),
    "complex to real": (lambda z: bnp.abs(z) ** 2, (X + 1j * X,)),
    "real to complex": (lambda x: bnp.exp(1j * x), (X,)),
    "integer argument and result": (lambda x, n: (x[n], n + 1), (X, bnp.asarray(1))),
    "a matrix": (lambda x: bnp.linalg.inv(x @ x.T + bnp.eye(2, dtype=x.dtype)), (X,)),
    "a loop": (lambda x: lax.fori_loop(0, 3, lambda i, c: bnp.sin(c) + x, x), (X,)),
}


@pytest.mark.parametrize("f, args", SMOOTH.values(), ids=SMOOTH)
def test_right_derivatives_pass(f, args):
    testing.check_grads(f, args)
    testing.check_jvp(f, functools.partial(bf.jvp, f), args)
    testing.check_vjp(f, functools.partial(bf.vjp, f), args)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex64"])
def test_other_dtypes(dtype):
    testing.check_grads(lambda x: bnp.sin(x) * x, (X.astype(dtype),))


def test_to_order_four():
    testing.check_grads(lambda x: bnp.exp(bnp.sin(x)), (X,), order=4, modes=("fwd",))
    testing.check_grads(lambda x: bnp.exp(bnp.sin(x)), (X,), order=3)


@pytest.mark.parametrize(
    "modes, start", [(("fwd", "rev"), "jvp of cube"), (("rev",), "vjp of cube"), (["fwd"], "jvp of cube")]
)
def test_wrong_derivative(modes, start):
    with pytest.raises(AssertionError, match=f"^{start}.*off by") as info:
        testing.check_grads(wrong_cube(), (X,), order=1, modes=modes)
    assert "allowed" in str(info.value)
    testing.check_grads(wrong_cube(), (X,), order=1, modes=modes, rtol=0.1, atol=0.1)


def test_wrong_second_derivative():
    """A first derivative with the right value, but constant to the second."""

    @bf.custom_jvp
    def f(x):
        return x**3

    f.defjvp(lambda primals, ts: (f(*primals), 3 * lax.stop_gradient(primals[0]) ** 2 * ts[0]))
    testing.check_grads(f, (X,), order=1)
    with pytest.raises(AssertionError, match="jvp of jvp of f: tangent 0"):
        testing.check_grads(f, (X,), order=2)
    with pytest.raises(AssertionError, match="vjp of vjp of f"):
        testing.check_grads(f, (X,), order=2, modes=("rev",))


def test_the_message_names_place_and_argument():
    bend = bf.custom_jvp(lambda x: 2 * x)
    bend.defjvp(lambda ps, ts: (bend(*ps), 2 * ts[0].at[1, 2].multiply(1.5)))
    with pytest.raises(AssertionError, match=r"in 1 of 6 elements; the worst at \[1, 2\]"):
        testing.check_grads(bend, (X,), order=1, modes=("fwd",))
    with pytest.raises(AssertionError, match="most of it in argument 1"):
        testing.check_grads(lambda x, y: x + wrong_cube(4.0)(y), (X, X), order=1, modes=("rev",))


def test_a_step_out_of_the_domain_is_named():
    with pytest.raises(AssertionError, match="leave the domain"):
        testing.check_grads(bnp.log, (arr([1e-9]),), order=1)


def test_wrong_values_and_shapes_of_derivatives():
    f = bnp.sin
    check_jvp = functools.partial(testing.check_jvp, f, args=(X,))
    check_vjp = functools.partial(testing.check_vjp, f, args=(X,))
    with pytest.raises(AssertionError, match="my rule: jvp of sin: value 0"):
        check_jvp(f_jvp=lambda ps, ts: (ps[0], ts[0]), err_msg="my rule: ")
    with pytest.raises(AssertionError, match=r"tangent 0 is f64\[3\]"):
        check_jvp(f_jvp=lambda ps, ts: (bnp.sin(ps[0]), ts[0][0]))
    with pytest.raises(AssertionError, match="must return"):
        check_jvp(f_jvp=lambda ps, ts: ps[0])
    with pytest.raises(AssertionError, match=r"cotangent 0 is f32\[2,3\]"):
        check_vjp(f_vjp=lambda x: (bnp.sin(x), lambda ct: ((ct * bnp.cos(x)).astype("float32"),)))
    with pytest.raises(AssertionError, match="a different structure"):
        check_vjp(f_vjp=lambda x: (bnp.sin(x), lambda ct: ct * bnp.cos(x)))
    with pytest.raises(AssertionError, match="must return"):
        check_vjp(f_vjp=bnp.sin)


@pytest.mark.parametrize(
    "call",
    [
        lambda: testing.check_grads(3, (X,)),
        lambda: testing.check_grads(bnp.sin, X),
        lambda: testing.check_grads(bnp.sin, (X,), order=0),
        lambda: testing.check_grads(bnp.sin, (X,), order=1.5),
        lambda: testing.check_grads(bnp.sin, (X,), modes=("forward",)),
        lambda: testing.check_grads(bnp.sin, (X,), modes="fwd"),
        lambda: testing.check_grads(lambda n: n, (3,)),
        lambda: testing.check_grads(lambda x: x > 0, (X,)),
        lambda: testing.check_grads(lambda x: "a", (X,)),
        lambda: testing.check_grads(bnp.sin, ("a",)),
        lambda: testing.check_jvp(bnp.sin, None, (X,)),
        lambda: testing.check_vjp(bnp.sin, None, (X,)),
        lambda: testing.check_grads(bnp.sin, (X,), atol="a"),
        lambda: testing.check_grads(bnp.sin, (X,), rtol=-1),
        lambda: testing.check_jvp(bnp.sin, functools.partial(bf.jvp, bnp.sin), (X,), eps=0),
        lambda: testing.check_vjp(bnp.sin, functools.partial(bf.vjp, bnp.sin), (X,), eps=True),
        lambda: testing.check_transform(bf.jit, bnp.sin, (X,), atol="a"),
        lambda: testing.check_transform(bf.jit, bnp.sin, ("a",)),
        lambda: testing.check_primitive(bnp.sin, X),
        lambda: testing.check_primitive(lax.sin_p),
        lambda: testing.check_primitive(lax.sin_p, "a"),
        lambda: testing.check_primitive(lax.sin_p, X, order=-1),
        lambda: testing.check_primitive(lax.sin_p, X, wrt=(1,)),
        lambda: testing.check_primitive(lax.sin_p, X, wrt=0),
        lambda: testing.check_transform(None, bnp.sin, (X,)),
        lambda: testing.check_transform(bf.jit, None, (X,)),
        lambda: testing.check_transform(bf.jit, bnp.sin, X),
    ],
)
def test_bad_input(call):
    with pytest.raises(errors.BlufuncError) as info:
        call()
    assert "test_testing.py" in info.value.where


# -- check_primitive -------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [pytest.param(op, id=op.id) for op in OPS])
def test_our_own_primitives_pass(op):
    """All rows of the op table; ``test_op_table.py`` tests them more thoroughly."""
    dtype = next((d for d in ("float64", "complex128") if d in op.dtypes), op.dtypes[0])
    order = min(op.grad, 1) if dtype in ("float64", "complex128") else 0
    args = list(map(arr_of, op.sample(dtype)))
    report = testing.check_primitive(op.prim, *args, order=order, wrt=op.wrt, **op.params)
    assert {"rules", "types", "jit"} <= set(report.checked)
    assert "vmap" in report.checked or not op.args
    if order:
        assert {"jvp", "vjp", "vmap of derivatives"} <= set(report.checked)


def arr_of(x):
    return arr(x, x.dtype)


def test_the_report_reads_well():
    report = testing.check_primitive(lax.top_k_p, X, k=2)
    text = repr(report)
    assert text.startswith("top_k: 9 checks passed, 1 not supported\n")
    assert report.unsupported.keys() == {"transpose"}
    assert "not supported: it is not linear" in text
    assert "f64[2,2], i32[2,2]" in report.checked["types"]


class Scaled(extend.Primitive):
    """2 x, broken rule by rule."""

    name, fresh = "scaled", True

    def impl(self, x):
        return np.multiply(x, 2)

    def abstract(self, x):
        return x

    def jvp(self, primals, tangents):
        (x,), (t,) = primals, tangents
        return self.bind(x), self.bind(t)

    def transpose(self, ct, x):
        x.add(self.bind(ct))

    def batch(self, axis, args, dims):
        return self.bind(*args), dims[0]


def test_a_right_primitive():
    report = testing.check_primitive(Scaled(), X)
    assert not report.unsupported
    assert "operand 0" in report.checked["transpose"]


SPOILT = {
    "no batch": ({"batch": extend.Primitive.batch}, "lacks rules: batch"),
    "no reason": ({"batch": extend.unsupported("no")}, "gives no reason"),
    "impl raises": ({"impl": lambda self, x: x.nothing}, "impl raises AttributeError"),
    "impl's dtype": ({"impl": lambda self, x: (2 * x).astype(np.float32)}, r"f32\[2,3\]"),
    "impl's shape": ({"impl": lambda self, x: (2 * x)[0]}, "abstract says"),
    "impl writes": ({"impl": lambda self, x: np.multiply(x, 2, out=x)}, "writes to operand 0"),
    "impl is not fresh": ({"impl": lambda self, x: x[...]}, "returns storage of operand 0"),
    "random": ({"impl": lambda self, x: x + np.random.default_rng().normal()}, "second time"),
    "jvp": (
        {"jvp": lambda self, ps, ts: (self.bind(*ps), self.bind(self.bind(*ts)))},
        "jvp of scaled: tangent 0",
    ),
    "jvp's value": ({"jvp": lambda self, ps, ts: (ps[0], self.bind(*ts))}, "jvp of scaled: value 0"),
    "transpose": ({"transpose": lambda self, ct, x: x.add(ct)}, "vjp of scaled"),
    "transpose is silent": ({"transpose": lambda self, ct, x: None}, "vjp of scaled"),
    "batch's dim": (
        {"batch": lambda self, axis, args, dims: (self.bind(*args), 0)},
        "vmap of scaled, in_axes=.1",
    ),
    "batch's value": (
        {"batch": lambda self, axis, args, dims: (args[0], dims[0])},
        "vmap of scaled, in_axes=.0",
    ),
    "batch raises": ({"batch": lambda self, axis, args, dims: lax.add(X, 1j)}, "raises DtypeError"),
    "jvp gives no pair": ({"jvp": lambda self, ps, ts: ps[0]}, "jvp rule of scaled returned .* not a pair"),
    "abstract gives a tuple": (
        {"abstract": lambda self, x: (x,)},
        "abstract rule of scaled returned a tuple",
    ),
    "transpose's type": (
        {"transpose": lambda self, ct, x: x.add(ct.astype("float32"))},
        r"transpose rule of scaled added f32\[2,3\]",
    ),
}


@pytest.mark.parametrize("rules, message", SPOILT.values(), ids=SPOILT)
def test_a_wrong_rule_is_found(rules, message):
    prim = type("Spoilt", (Scaled,), rules)()
    with pytest.raises(AssertionError, match=message):
        testing.check_primitive(prim, X)


def test_what_is_unsupported_is_reported():
    reason = "it is only an example here"
    for rule, gone in [("transpose", "vjp"), ("jvp", "jvp"), ("batch", "vmap")]:
        prim = type("Partial", (Scaled,), {rule: extend.unsupported(reason)})()
        report = testing.check_primitive(prim, X)
        assert report.unsupported[rule] == reason
        assert gone not in report.checked
        assert reason in repr(report)


def test_a_transposition_that_only_the_dot_product_finds():
    """Reverse mode uses another operation; the rule itself is wrong."""
    rules = {
        "jvp": lambda self, ps, ts: (self.bind(*ps), lax.mul(ts[0], 2)),
        "transpose": lambda self, ct, x: x.add(lax.mul(ct, 3)),
    }
    with pytest.raises(AssertionError, match=r"transpose in operand 0 is wrong: .* off by"):
        testing.check_primitive(type("Spoilt", (Scaled,), rules)(), X)


def test_rules_in_a_scope_are_checked():
    testing.check_primitive(lax.sin_p, X)
    with bf.override(lax.sin_p, jvp=lambda ps, ts: (lax.sin_p.bind(*ps), ts[0])):
        with pytest.raises(AssertionError, match="jvp of sin"):
            testing.check_primitive(lax.sin_p, X)


def test_what_to_differentiate():
    div = testing.check_primitive(lax.div_p, X, X + 1, wrt=(0,))
    assert "operand 0" in div.checked["transpose"]
    with pytest.raises(AssertionError, match="jvp of stop_gradient"):
        testing.check_primitive(lax.stop_gradient_p, X)
    assert testing.check_primitive(lax.stop_gradient_p, X, order=0).checked.keys() == {
        "rules",
        "types",
        "jit",
        "C form",
        "vmap",
        "shard",
    }


def test_without_floats():
    report = testing.check_primitive(lax.lt_p, X, X)
    assert report.checked["derivatives"].startswith("none")
    report = testing.check_primitive(lax.iota_p, dtype=np.dtype("int32"), shape=(3,), dimension=0)
    assert "vmap" not in report.checked and report.unsupported["batch"]


# -- check_transform -------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [bf.jit, bf.checkpoint, lambda f: f])
def test_our_own_transforms_pass(t):
    report = testing.check_transform(t, lambda x, y: (bnp.sin(x) * y, x), (X, X + 1))
    assert len(report.checked) == 12
    assert not report.unsupported


def test_a_transform_that_does_not_compose():
    """It inspects its arguments at the first call, and keeps them."""
    seen = []

    def remembering(f):
        def g(x):
            seen.append(f(x))
            keeps = not isinstance(seen[0], bf.Tracer) and seen[0].shape == f(x).shape
            return seen[0] if keeps else f(x)

        return g

    with pytest.raises(AssertionError, match=r"remembering\(sin\): .*vmap"):
        testing.check_transform(remembering, bnp.sin, (X,))


def test_what_a_transform_lacks_is_in_the_report():
    t = bf.Transform("twofold", box=tuple)
    t.leafwise(lax.sin_p)
    report = testing.check_transform(t, bnp.sin, ((draw(3), draw(3)),))
    assert report.unsupported.keys() == {"grad inside"}
    assert "no rule for cos" in report.unsupported["grad inside"]
    assert "twofold(sin): 11 checks passed, 1 not supported" in repr(report)


def test_a_wrong_rule_of_a_transform_is_found():
    """A rule with right values at first, whose derivative disagrees with its values."""
    t = bf.Transform("stuck")
    t.rule(lax.sin_p)(lambda x: lax.stop_gradient(bnp.sin(x)) + x - lax.stop_gradient(x))
    t.default(lambda prim, *xs, **params: prim.bind(*xs, **params))
    with pytest.raises(AssertionError, match=r"stuck\(sin\)"):
        testing.check_transform(t, bnp.sin, (X,))
