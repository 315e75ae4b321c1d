"""User primitives with a definition or a C form: compiled, transformed, sharded."""

import re
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, extend, lax, testing
from blufunc.kernels.backends.cuda.program import Draft
from blufunc.parallel.mesh.mesh import AbstractMesh
from tests.parallel.lockstep import P, check

N = 1 << 17  # large enough for programs to be compiled
X = bnp.linspace(-3, 3, N)
Y = bnp.asarray([-2.0, 0.5, 3.0, 1.25], "float64")
MESH = AbstractMesh((8,), ("x",))


def soft(x):
    return x / (1 + bnp.abs(x))


softsign_p = extend.Elementwise("softsign", lambda x: x / (1 + np.abs(x)), "float", lower=soft)
defined_p = extend.Elementwise("defined_softsign", None, "float", lower=soft)
c_form_p = extend.Elementwise(
    "c_softsign",
    lambda x: x / (1 + np.abs(x)),
    "float",
    [lambda t, ans, x: t / bnp.square(1 + bnp.abs(x))],
    lower=extend.CForm({"f": "{0} / (1 + bf_abs({0}))"}),
    cost=6,
)


class RowDot(bf.Primitive):
    """Scaled row-wise dot products: a definition, a parameter, two results."""

    name = "row_dot"
    multiple_results = True

    def abstract(self, x, y, *, scale):
        if x != y or x.ndim != 2:
            raise errors.ShapeError(f"row_dot takes two matrices of one type, not {x} and {y}.")
        return [extend.ShapedArray(x.shape[:1], x.dtype), x]

    def lower(self, x, y, *, scale):
        return [scale * bnp.sum(x * y, axis=1), bnp.maximum(x, y)]

    shard = extend.Factors("r c, r c -> r, r c", c="sum")


row_dot_p = RowDot()


def between(f):
    return lambda x: f(x * 2) + 1


# -- with a definition -------------------------------------------------------------------------------


@pytest.mark.parametrize("prim", [softsign_p, defined_p, c_form_p], ids=str)
def test_values_derivatives_and_batches(prim):
    for x in (X, X[:8], X.astype("bfloat16")):
        tol = 1e-6 if x.dtype == np.float32 else 0.01
        for f in (between(prim.bind), bf.jit(between(prim.bind)), bf.vmap(between(prim.bind))):
            np.testing.assert_allclose(np.float32(f(x)), np.float32(between(soft)(x)), tol, tol)
    grads = bf.jit(bf.grad(lambda x: prim.bind(x).sum()))(X)
    np.testing.assert_allclose(grads, 1 / (1 + np.abs(X)) ** 2, 1e-5, 1e-6)
    report = testing.check_primitive(prim, Y)
    assert not report.unsupported


def test_several_results_and_parameters():
    rng = np.random.default_rng(0)
    x, y = (bnp.asarray(rng.normal(size=(4, 6)), "float64") for _ in range(2))
    report = testing.check_primitive(row_dot_p, x, y, scale=3.0)
    assert (
        "halves along 2 of 2" in report.checked["shard"] or "halves along 1 of 1" in report.checked["shard"]
    )
    dots, larger = bf.jit(lambda x, y: row_dot_p.bind(x, y, scale=3.0))(x, y)
    np.testing.assert_allclose(dots, 3 * (np.asarray(x) * y).sum(1))
    np.testing.assert_array_equal(larger, np.maximum(x, y))


def test_its_own_derivative_counts_and_not_that_of_the_definition():
    p = extend.Elementwise("own_rule", None, "float", [lambda t, ans, x: 7 * t], lower=soft)
    np.testing.assert_array_equal(bf.jit(bf.grad(lambda x: p.bind(x).sum()))(X[:4]), 7)
    np.testing.assert_array_equal(bf.grad(lambda x: bf.jit(p.bind)(x).sum())(X[:4]), 7)


def test_a_linear_definition_is_transposed():
    class Doubled(bf.Primitive):
        name = "doubled"

        def abstract(self, x):
            return x

        def lower(self, x):
            return x + x

        def jvp(self, primals, tangents):
            return self.bind(*primals), self.bind(*tangents)

    report = testing.check_primitive(Doubled(), Y)
    assert "transpose" in report.checked


def test_a_definition_may_use_others_and_runs_in_loops():
    twice_p = extend.Elementwise(
        "twice_soft", None, "float", lower=lambda x: softsign_p.bind(defined_p.bind(x))
    )
    f = bf.jit(lambda x: lax.fori_loop(0, 3, lambda i, c: twice_p.bind(c), x))
    want = X
    for _ in range(6):
        want = soft(want)
    np.testing.assert_allclose(f(X), want, 1e-5, 1e-6)
    assert "twice" not in f.lower(X).source()


def test_a_replaced_impl_is_called():
    with bf.override(softsign_p, impl=lambda x: x * 0 + 5):
        np.testing.assert_array_equal(bf.jit(between(softsign_p.bind))(X), 6)
    np.testing.assert_allclose(bf.jit(between(softsign_p.bind))(X), between(soft)(X), 1e-6)


# -- generated code ----------------------------------------------------------------------------------


def code(source):
    """Without comments, which name lines and primitives."""
    return [line for line in re.sub(r"//.*", "", source).splitlines() if line.strip()]


def cuda(f, x):
    traced = bf.jit(f).trace(x)
    return Draft(traced.jaxpr, (False,), "sm_90").source()


@pytest.mark.parametrize("prim", [softsign_p, defined_p], ids=str)
@pytest.mark.parametrize(
    "transform", [lambda f: f, lambda f: bf.grad(lambda x: f(x).sum())], ids=["f", "grad"]
)
def test_the_source_is_that_of_the_plain_form(prim, transform):
    ours, plain = transform(between(prim.bind)), transform(between(soft))
    assert code(bf.jit(ours).lower(X).source()) == code(bf.jit(plain).lower(X).source())
    assert code(cuda(ours, X)) == code(cuda(plain, X))
    assert len(code(cuda(ours, X))) > 5


def test_a_c_form_fuses():
    for source in (bf.jit(between(c_form_p.bind)).lower(X).source(), cuda(between(c_form_p.bind), X)):
        assert len(re.findall(r'extern "C" (__global__ )?void', source)) == 1 and "(1 + bf_abs(v0))" in source
    half = X.astype("float16")
    assert "round_to<f16>" in cuda(between(c_form_p.bind), half)


def test_a_users_reduction_with_a_monoid_is_a_kernel():
    total_p = extend.Reduction("my_total", lambda x, axes: x.sum(axes), "float", monoid="sum")
    f = lambda x: total_p.bind(x * 2, axes=(0,)) + 1
    plain = lambda x: bnp.sum(x * 2) + 1
    assert code(cuda(f, X)) == [line.replace("reduce_sum", "my_total") for line in code(cuda(plain, X))]
    np.testing.assert_allclose(bf.jit(f)(X), plain(X), 1e-4, 0.1)


# -- sharded -----------------------------------------------------------------------------------------


def collectives(jaxpr):
    return [e.prim.name for e in jaxpr.eqns if e.prim.kind == "collective"]


@pytest.mark.parametrize("prim", [softsign_p, defined_p, c_form_p], ids=str)
def test_no_collective_on_eight_devices(prim):
    x = np.linspace(-3, 3, 64, dtype=np.float32)
    local = check(between(prim.bind), (x,), (P("x"),), MESH, [P("x")])
    assert not collectives(local)
    grads = check(lambda x: bf.grad(lambda x: prim.bind(x).sum())(x), (x,), (P("x"),), MESH, [P("x")])
    assert not collectives(grads)


def test_a_shard_rule_and_a_definition_without_one():
    class Unruled(RowDot):
        name, shard = "row_dot_unruled", None

    rng = np.random.default_rng(1)
    x, y = (rng.normal(size=(16, 6)).astype(np.float32) for _ in range(2))
    for prim in (row_dot_p, Unruled()):
        f = lambda x, y, prim=prim: prim.bind(x, y, scale=0.5)
        local = check(f, (x, y), (P("x"), P("x")), MESH, [P("x"), P("x")])
        assert not collectives(local)
        assert any(e.prim is prim for e in local.eqns) == (prim is row_dot_p)


def test_factors_reduce():
    class Total(bf.Primitive):
        name = "matmul_of_mine"
        shard = extend.Factors("i k, k j -> i j", k="sum")

        def abstract(self, x, y):
            return extend.ShapedArray((x.shape[0], y.shape[1]), x.dtype)

        def lower(self, x, y):
            return x @ y

    prim = Total()
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(4, 16)).astype(np.float32), rng.normal(size=(16, 6)).astype(np.float32)
    local = check(prim.bind, (x, y), (P(None, "x"), P("x")), MESH, [P()], rtol=1e-5, atol=1e-5)
    assert len(collectives(local)) == 1
    testing.check_primitive(prim, *(bnp.asarray(a, "float64") for a in (x, y)))


# -- only an impl ------------------------------------------------------------------------------------


def test_a_primitive_with_an_impl_alone_runs_on_the_host_and_says_so_once():
    bare_p = extend.Elementwise("bare_soft", lambda x: x / (1 + np.abs(x)), "float")
    f = bf.jit(between(bare_p.bind))
    with pytest.warns(errors.HostPrimitiveWarning, match=r"bare_soft runs on the host.*Give lower=") as found:
        np.testing.assert_allclose(f(X), between(soft)(X), 1e-6)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bf.jit(lambda x: bare_p.bind(x) * 3)(X)
        bf.jit(between(softsign_p.bind))(X)
    text = str(bf.explain(f, X))
    assert "bare_soft runs on the host" in text and "test_definitions.py" in text
    assert "runs on the host" not in str(bf.explain(between(softsign_p.bind), X))


# -- bad input ---------------------------------------------------------------------------------------


def branches(x):
    return x if x > 0 else -x


def made(name, lower, impl=None, **more):
    return extend.Elementwise(name, impl, "float", lower=lower, **more)


def recursive():
    p = made("endless", lambda x: p.bind(x))
    return p


BAD = {
    "branches": (lambda: made("branchy", branches), "the definition .* of branchy cannot be traced: Concretization"),
    "numpy": (lambda: made("numpyish", lambda x: np.exp(x)), "the definition .* of numpyish cannot be traced"),
    "shape": (lambda: made("shapely", lambda x: x[None]), r"of shapely returns f64\[1,4\], and abstract says f64\[4\]"),
    "dtype": (lambda: made("typed", lambda x: x.astype("float32")), r"of typed returns f32\[4\], and abstract"),
    "nothing": (lambda: made("nothing", lambda x: None), "the definition .* of nothing cannot be traced"),
    "recursive": (recursive, "the definition .* of endless .*uses the primitive itself"),
    "captures": (lambda: made("closed", lambda x: x + Y), r"of closed captures an array of f64\[4\]"),
    "arity": (lambda: made("binary", lambda x, y: x), "the definition .* of binary cannot be traced: TypeError"),
    "reduces": (lambda: made("sharing", lambda x: x / x.sum()), "of sharing applies reduce_sum, which is not element"),
    "sorts": (lambda: made("sorted", lambda x: bf.jit(bnp.sort)(x)), "of sorted applies sort, which is not element"),
    "value": (lambda: made("off", lambda x: x * 1.01, lambda x: x * 1.0), "of off gives .* where impl gives .* 0.16"),
}  # fmt: skip


@pytest.mark.parametrize("make, message", BAD.values(), ids=BAD.keys())
def test_definitions_that_cannot_take_the_place_of_the_primitive(make, message):
    prim = make()
    with pytest.raises(errors.JaxprTypeError, match=message) as e:
        bf.jit(lambda x: prim.bind(x))(Y)
    assert __file__ in e.value.where and e.value.fix and "test_definitions.py:" in e.value.why
    with pytest.raises(errors.JaxprTypeError, match=message):  # not the derivative of something else
        bf.grad(lambda x: prim.bind(x).sum())(Y)
    with pytest.raises(AssertionError, match=message):
        testing.check_primitive(prim, Y)


def test_a_definition_that_disagrees_with_impl():
    class Off(bf.Primitive):
        name = "off"

        def abstract(self, x):
            return x

        def impl(self, x):
            return x * 1.01

        def lower(self, x):
            return x * 1.0

    prim, message = (
        Off(),
        r"the definition .* of off gives .* where impl gives .* \(result 0, element \[2\]\)",
    )
    with pytest.raises(AssertionError, match=r"the definition .* of off gives .* where impl gives"):
        testing.check_primitive(prim, Y)
    with pytest.raises(errors.JaxprTypeError, match=message) as e:  # tests run with config.check
        prim.bind(bnp.asarray([0.0, 0.0, 3.0]))
    assert __file__ in e.value.where and "correct one of them" in e.value.fix


def test_elementwise_definitions_may_branch_and_call():
    inner = bf.jit(lambda x: bnp.where(x > 0, bnp.sqrt(x), 0.0) + bnp.ones(()))
    prim = made(
        "rooted", lambda x: lax.cond(True, inner, lambda x: x, x), lambda x: np.sqrt(np.maximum(x, 0)) + 1
    )
    np.testing.assert_allclose(bf.jit(prim.bind)(Y), prim.bind(Y))


WRONG_IMPL = {
    "shape": (lambda x: x.sum(), r"the impl rule of wrong returned f64\[\], and abstract says f64\[4\]"),
    "dtype": (lambda x: x.astype("float32"), r"of wrong returned f32\[4\], and abstract says f64\[4\]"),
    "no array": (lambda x: "x", "of wrong returned 'x'"),
}


@pytest.mark.parametrize("impl, message", WRONG_IMPL.values(), ids=WRONG_IMPL.keys())
def test_an_impl_of_other_types_is_an_error_without_checks_too(impl, message, monkeypatch):
    monkeypatch.setattr(bf.config, "check", False)
    prim = extend.Elementwise("wrong", impl, "float", [None])
    with pytest.raises(errors.JaxprTypeError, match=message) as e:
        prim.bind(Y)
    assert __file__ in e.value.where and e.value.fix


WRONG_DERIVS = {
    "nothing": (lambda t, ans, x: None, "the derivs rule of bent returned None"),
    "shape": (lambda t, ans, x: t.sum(), r"the derivs rule of bent returned f64\[\] for a result f64\[4\]"),
    "dtype": (lambda t, ans, x: t.astype("float32"), r"of bent returned a tangent f32\[4\]"),
    "not linear": (lambda t, ans, x: t * t, "mul is linear in each operand alone"),
}


@pytest.mark.parametrize("deriv, message", WRONG_DERIVS.values(), ids=WRONG_DERIVS.keys())
def test_derivatives_that_are_none(deriv, message):
    prim = extend.Elementwise("bent", np.sin, "float", [deriv])
    with pytest.raises((errors.JaxprTypeError, errors.GradError), match=message) as e:
        bf.grad(lambda x: prim.bind(x).sum())(Y)
    assert __file__ in e.value.where and e.value.fix
    with pytest.raises(AssertionError):
        testing.check_primitive(prim, Y)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lower": 3}, "lower=3 is neither a definition nor a C form"),
        ({}, "neither impl nor a definition"),
        ({"lower": extend.CForm({"z": "{0}"})}, "the C form has a template for z"),
        ({"lower": soft, "autocast": "high"}, "autocast='high' is not an autocast class"),
        ({"lower": soft, "cost": -1}, "cost=-1"),
    ],
)
def test_options_that_are_none(options, message):
    with pytest.raises(errors.ArgumentError, match=message) as e:
        extend.Elementwise("bad", None if "C" not in message else np.exp, "float", **options)
    assert __file__ in e.value.where and e.value.fix


def test_a_c_form_of_more_operands():
    p = extend.Elementwise("wide", np.negative, "float", lower=extend.CForm({"f": "{0} + {2}"}))
    with pytest.raises(errors.ArgumentError, match="the C form of wide has 3 operands, but 1 given"):
        p.bind(Y)


def ruled(rule):
    class Ruled(bf.Primitive):
        name = "ruled"
        shard = rule

        def abstract(self, x):
            return x

        def lower(self, x):
            return x * 2

    return Ruled()


SOFT_SLOPE = c_form_p.derivs
WRONG_FORMS = {
    "value": ("{0} / (2 + bf_abs({0}))", AssertionError, "the C form .*compiled: result.0. is wrong"),
    "source": ("{0} / (1 + foo({0}))", AssertionError, "the C form .* does not compile: (.|\n)*foo"),
    "parameter": (
        "{0} / (1 + bf_abs({x}))",
        errors.ArgumentError,
        r"has \{x\}, and odd has no parameter of that name",
    ),
}


@pytest.mark.parametrize("template, error, message", WRONG_FORMS.values(), ids=WRONG_FORMS.keys())
def test_a_c_form_that_is_wrong(template, error, message):
    prim = extend.Elementwise("odd", c_form_p.impl, "float", SOFT_SLOPE, lower=extend.CForm({"f": template}))
    flags = bf.config.host_compiler, bf.config.check
    with pytest.raises(error, match=message):
        testing.check_primitive(prim, Y)
    assert flags == (bf.config.host_compiler, bf.config.check)


WRONG_RULES = {
    "text": ("i -> i", "returned 'i -> i', not a Rule"),
    "raises": (lambda self, avals, outs: avals[0].shape[1], "raises IndexError"),
    "dimensions": (extend.Factors("i j -> i j"), "names 2 dimensions"),
    "operands": (extend.Factors("i, i -> i"), "is for 2 operands, and there are 1"),
    "factor": (lambda self, avals, outs: extend.Rule((((1,),),), (((0,),),), (4,)), "names factor 1, and there are 1"),
    "size": (lambda self, avals, outs: extend.Rule((((0,),),), (((0,),),), (5,)), "has factors of size 5 for"),
    "reduced": (lambda self, avals, outs: extend.Rule((((0,),),), (((0,),),), (4,), {2: "sum"}), "reduces factor 2"),
    "no rule": (lambda self, avals, outs: "i -> i", "returned 'i -> i', not a Rule"),
}  # fmt: skip


@pytest.mark.parametrize("rule, message", WRONG_RULES.values(), ids=WRONG_RULES.keys())
def test_shard_rules_that_name_what_is_not_there(rule, message):
    prim = ruled(rule)
    x = np.arange(4.0, dtype=np.float32)
    with pytest.raises(errors.ShardingError, match=f"the shard rule of ruled {message}") as e:
        check(lambda x: prim.bind(x), (x,), (P(),), MESH, [P()])
    assert __file__ in e.value.where and "Factors" in e.value.fix
    with pytest.raises(AssertionError, match=f"the shard rule of ruled {message}"):
        testing.check_primitive(prim, Y)


def test_a_shard_rule_that_is_not_true_is_found():
    class Shifted(bf.Primitive):
        name, shard = "shifted", extend.Factors("i -> i")

        def abstract(self, x):
            return x

        def lower(self, x):
            return bnp.roll(x, 1)

    with pytest.raises(AssertionError, match="shifted: the shard rule, computed on halves of factor 0"):
        testing.check_primitive(Shifted(), Y)


@pytest.mark.parametrize(
    "spec, reduced, message",
    [
        ("i j", {}, "is not operands -> results"),
        ("i -> i", {"k": "sum"}, "it reduces k, and 'i -> i' names no such dimension"),
        ("i k -> i k", {"k": "sum"}, "it reduces k, which every result has"),
        ("i k -> i", {"k": "mean"}, "k='mean' is not a reduction"),
    ],
)
def test_factors_that_make_no_rule(spec, reduced, message):
    with pytest.raises(errors.ShardingError, match=message) as e:
        extend.Factors(spec, **reduced)
    assert __file__ in e.value.where and e.value.fix


class Centered(bf.Primitive):
    """A definition that reads a named axis."""

    name = "centered"

    def abstract(self, x):
        return x

    def lower(self, x):
        return x - lax.pmean(x, "i")


def test_a_definition_is_traced_for_each_named_axis():
    prim = Centered()
    for transform in (bf.vmap, lambda f, axis_name: bf.jit(bf.vmap(f, axis_name=axis_name))):
        for n in (4, 2, 3):
            x = bnp.arange(float(n))
            np.testing.assert_allclose(transform(prim.bind, axis_name="i")(x), np.arange(n) - (n - 1) / 2)
    with pytest.raises(errors.JaxprTypeError, match="there is no axis of that name"):
        bf.jit(prim.bind)(1.0)


def test_threads_trace_one_definition():
    class Slow(bf.Primitive):
        name = "slow_sine"

        def abstract(self, x):
            return x

        def lower(self, x):
            time.sleep(0.02)
            return bnp.sin(x)

    prim = Slow()
    for f in (bf.vmap(prim.bind), lambda x: bf.jvp(prim.bind, (x,), (x,))[0]):
        with ThreadPoolExecutor(3) as pool:
            for result in pool.map(f, [X[:4]] * 3):
                np.testing.assert_allclose(result, np.sin(X[:4]), rtol=1e-6)


def test_parameters_of_a_definition_are_hashable():
    class Scaled(bf.Primitive):
        name = "scaled_by_list"

        def abstract(self, x, *, by):
            return x

        def lower(self, x, *, by):
            return x * by[0]

    with pytest.raises(errors.ArgumentError, match="hashable"):
        bf.vmap(lambda x: Scaled().bind(x, by=[2.0]))(X[:4])


def test_a_c_form_of_other_dtypes_is_not_said_to_agree():
    prim = extend.Elementwise(
        "form_of_floats", np.negative, "number", [None], lower=extend.CForm({"f": "-{0}"})
    )
    report = testing.check_primitive(prim, bnp.arange(4), order=0)
    assert "no template" in report.unsupported["C form"]


@pytest.mark.parametrize("host_compiler", ["never", "always"])
@pytest.mark.parametrize("impl", [lambda x: np.sin(x)[:2], lambda x: np.sin(x).astype(np.float64)])
def test_types_of_a_compiled_impl_are_checked(impl, host_compiler, monkeypatch):
    monkeypatch.setattr(bf.config, "host_compiler", host_compiler)
    prim = extend.Elementwise("wrong_type", impl, "float", [None])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.HostPrimitiveWarning)
        with pytest.raises(errors.JaxprTypeError, match="abstract says"):
            bf.jit(lambda x: prim.bind(x) + 1)(X[:4])
