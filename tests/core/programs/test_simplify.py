"""Simplification passes: each preserves results and effects, and shrinks programs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as hs

import blufunc as bf
from blufunc import NamedSharding, P
from blufunc.config import config
from blufunc.core.arrays.array import from_numpy
from blufunc.core.arrays.backend import default_device
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.check import check_jaxpr
from blufunc.core.ir.jaxpr import DropVar, Literal, eval_jaxpr
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops import sort
from blufunc.core.primitives import linear_ops
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.programs import simplify as passes
from blufunc.core.programs.stage import stage
from blufunc.nn.gelu_call import gelu
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.checkpointing.checkpoint import checkpoint
from blufunc.transforms.control_flow.calls import jit_p
from blufunc.transforms.staging.jit import jit

F32 = ShapedArray((3,), dtypes.float32)
LONG = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "i32": "int32"}
S32 = ShapedArray((), dtypes.float32)


class _Shout(Primitive):
    """An identity that has an effect."""

    name, effects = "shout", frozenset({"shout"})

    def impl(self, x):
        return x

    def abstract(self, x):
        return x


shout_p = _Shout()


def names(jaxpr):
    return [e.prim.name for e in jaxpr.eqns]


def assert_same_function(before, after):
    """Both evaluate equally, and ``after`` is well formed."""
    check_jaxpr(after)
    rng = np.random.default_rng(0)
    args = [from_numpy(rng.uniform(0.5, 2, a.shape).astype(a.dtype)) for a in before.in_avals]
    for x, y in zip(eval_jaxpr(before, args), eval_jaxpr(after, args), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_equations_that_stay_are_not_made_again():
    """Passes return unchanged equations as the same objects."""
    before = stage(lambda x: [ew.sin(ew.cos(x))], [F32])
    after = passes.simplify(before)
    assert all(a is b for a, b in zip(after.eqns, before.eqns, strict=True))


# -- dce -------------------------------------------------------------------------------------------


def test_dce_drops_what_nobody_reads():
    c = from_numpy(np.ones(3, np.float32))

    def f(x):
        ew.sin(ew.mul(x, c))
        return [ew.cos(x)]

    jaxpr = stage(f, [F32])
    after = passes.dce(jaxpr)
    assert names(jaxpr) == ["mul", "sin", "cos"]
    assert names(after) == ["cos"]
    assert (len(jaxpr.consts), len(after.consts)) == (1, 0)
    assert_same_function(jaxpr, after)


def test_dce_keeps_parameters():
    jaxpr = stage(lambda x, y: [ew.sin(x)], [F32, F32])
    assert len(passes.dce(jaxpr).invars) == 2


def test_dce_for_some_of_the_outputs():
    jaxpr = stage(lambda x: [ew.sin(x), ew.cos(x), ew.exp(x)], [F32])
    after = passes.dce(jaxpr, [False, True, False])
    assert names(after) == ["cos"]
    assert len(after.outvars) == 1


def test_dce_for_none_of_the_outputs():
    jaxpr = stage(lambda x: [ew.sin(x)], [F32])
    assert names(passes.dce(jaxpr, [False])) == []


def test_dce_unnames_results_that_are_partly_read():
    jaxpr = stage(lambda x: [sort.sort((x, ew.sin(x)), 0)[1]], [F32])
    after = passes.dce(jaxpr)
    assert [type(v) is DropVar for v in after.eqns[-1].outvars] == [True, False]
    assert_same_function(jaxpr, after)


def test_dce_narrows_calls():
    inner = stage(lambda x, y: [ew.sin(x), ew.cos(y)], [F32, F32], "inner")
    jaxpr = stage(lambda x, y: [jit_p.bind(x, y, jaxpr=inner, name="inner")[1]], [F32, F32])
    after = passes.dce(jaxpr)
    (call,) = after.eqns
    assert names(call.params["jaxpr"]) == ["cos"]
    assert len(call.invars) == 1
    assert_same_function(jaxpr, after)


def test_dce_keeps_effects():
    def f(x):
        shout_p.bind(ew.sin(x))
        ew.cos(x)
        return [x]

    jaxpr = stage(f, [F32])
    assert jaxpr.effects == {"shout"}
    assert names(passes.dce(jaxpr)) == ["sin", "shout"]
    assert names(passes.dce(jaxpr, [False])) == ["sin", "shout"]


def test_dce_keeps_calls_with_effects():
    inner = stage(lambda x: [shout_p.bind(x)], [F32], "inner")

    def f(x):
        jit_p.bind(x, jaxpr=inner, name="inner")
        return [x]

    assert names(passes.dce(stage(f, [F32]))) == ["jit"]


# -- merge_constants -------------------------------------------------------------------------------


def twice_by(first, second):
    """A function whose two constants are made anew."""
    table = lambda x: from_numpy(np.array(x), default_device())
    return lambda x: [ew.add(ew.mul(x, table(first)), ew.mul(x, table(second)))]


@pytest.mark.parametrize(
    "second, merges",
    [
        (np.ones(3, np.float32), True),
        (np.array([1, 1, 2], np.float32), False),
        (np.ones(3, np.int32).view(np.float32), False),
    ],
)
def test_small_constants_of_the_same_elements_are_one(second, merges):
    jaxpr = stage(twice_by(np.ones(3, np.float32), second), [F32])
    after = passes.merge_constants(jaxpr)
    check_jaxpr(after)
    assert len(after.consts) == 2 - merges
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(eval_jaxpr(after, [x])[0], x * 1 + x * second)
    assert names(passes.simplify(after)) == (["mul", "add"] if merges else ["mul", "mul", "add"])


def test_constants_that_are_returned_or_large():
    table = from_numpy(np.ones(3, np.float32), default_device())
    copy = from_numpy(np.ones(3, np.float32), default_device())
    after = passes.merge_constants(stage(lambda x: [table, copy, ew.add(x, copy)], [F32]))
    assert len(after.consts) == 1 and [np.asarray(x).sum() for x in eval_jaxpr(after, [np.ones(3)])] == [
        3,
        3,
        6,
    ]
    large = ShapedArray((10_000,), dtypes.float32)
    jaxpr = stage(twice_by(np.ones(10_000, np.float32), np.ones(10_000, np.float32)), [large])
    assert passes.merge_constants(jaxpr) is jaxpr  # not compared


def test_constants_on_other_devices_stay_apart(monkeypatch):
    """The results of a program are where its constants are."""
    monkeypatch.setattr(config, "cpu_devices", 4)
    mesh = bf.make_mesh((4,), ("x",))
    values = np.arange(8, dtype=np.float32)
    specs = [P("x"), P(None), P("x")]
    a, b, c = (bf.device_put(values, NamedSharding(mesh, spec)) for spec in specs)
    results = bf.jit(lambda: (a, b * 2, c))()
    assert [x.sharding.spec for x in results] == specs
    assert len(passes.merge_constants(stage(lambda x: [a, b, c, x], [F32])).consts) == 2


# -- cse -------------------------------------------------------------------------------------------


def test_cse_computes_once():
    jaxpr = stage(lambda x: [ew.add(ew.sin(x), ew.sin(x)), ew.sin(x)], [F32])
    after = passes.cse(jaxpr)
    assert names(after) == ["sin", "add"]
    assert_same_function(jaxpr, after)


@pytest.mark.parametrize(
    "steps, kept",
    [
        (("bf16", "f32", "bf16"), 0), (("f16", "f32", "f16"), 0), (("f32", "f64", "f32"), 0),
        (("f32", "bf16", "f32"), 2), (("bf16", "f16", "bf16"), 2), (("bf16", "f32", "f16"), 2),
        (("i32", "f32", "i32"), 2),
    ],
    ids=str,
)  # fmt: skip
def test_fold_conversions_there_and_back(steps, kept):
    """Through a dtype that represents all values of the first."""
    first, there, back = map(dtypes.as_dtype, (LONG[s] for s in steps))
    jaxpr = stage(lambda x: [ew.convert(ew.convert(x, there), back)], [ShapedArray((3,), first)])
    after = passes.dce(passes.fold(jaxpr))
    assert names(after) == ["convert"] * kept
    assert_same_function(jaxpr, after)


def test_cse_follows_chains():
    jaxpr = stage(lambda x: [ew.add(ew.cos(ew.sin(x)), ew.cos(ew.sin(x)))], [F32])
    assert names(passes.cse(jaxpr)) == ["sin", "cos", "add"]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: [ew.add(x, 1.0), ew.add(x, 2.0)],
        lambda x: [ew.mul(x, 0.0), ew.mul(x, -0.0)],
        lambda x: [ew.convert(x, dtypes.int32), ew.convert(x, dtypes.int64)],
        lambda x: [ew.sub(x, 1.0), ew.sub(1.0, x)],
        lambda x: [ew.integer_pow(x, 3), ew.integer_pow(x, 4)],
    ],
    ids=["literals", "signed zeros", "parameters", "order", "powers"],
)
def test_cse_keeps_what_differs(f):
    jaxpr = stage(f, [F32])
    after = passes.cse(jaxpr)
    assert len(after.eqns) == len(jaxpr.eqns) == 2
    assert_same_function(jaxpr, after)


def test_cse_knows_literals_by_value():
    jaxpr = stage(lambda x: [ew.add(x, from_numpy(np.float32(0.1))), ew.add(x, 0.1)], [F32])
    assert names(passes.cse(jaxpr)) == ["add"]


def test_cse_keeps_effects():
    jaxpr = stage(lambda x: [shout_p.bind(x), shout_p.bind(x)], [F32])
    assert names(passes.cse(jaxpr)) == ["shout", "shout"]


# -- fold ------------------------------------------------------------------------------------------


def test_fold_evaluates_literals():
    two = from_numpy(np.float32(2))
    jaxpr = stage(lambda x: [ew.mul(x, ew.sqrt(ew.mul(two, 8.0)))], [F32])
    after = passes.fold(jaxpr)
    assert names(after) == ["mul"]
    assert after.eqns[0].invars[1].value == 4.0
    assert_same_function(jaxpr, after)


def test_fold_results():
    after = passes.fold(stage(lambda: [ew.add(from_numpy(np.int32(2)), 3)], []))
    assert names(after) == []
    assert isinstance(after.outvars[0], Literal)
    assert after.outvars[0].value == 5


def test_fold_makes_no_arrays():
    jaxpr = stage(lambda: [linear_ops.full((1000,), 1.0, dtypes.float32)], [])
    assert names(passes.fold(jaxpr)) == ["broadcast_in_dim"]


def test_fold_keeps_effects():
    jaxpr = stage(lambda: [shout_p.bind(from_numpy(np.float32(1)))], [])
    assert names(passes.fold(jaxpr)) == ["shout"]


# -- inline ----------------------------------------------------------------------------------------


def nested(x, y):
    a = jit(lambda p: ew.sin(p))(x)
    b = jit(lambda p, q: ew.add(jit(lambda r: ew.mul(r, q))(p), p))(a, y)
    return [b, a]


def test_inline_puts_bodies_in_the_place_of_calls():
    jaxpr = stage(nested, [F32, F32])
    assert names(jaxpr) == ["jit", "jit"]
    after = passes.inline_calls(jaxpr)
    assert names(after) == ["sin", "mul", "add"]
    assert_same_function(jaxpr, after)


def test_inline_the_same_body_twice():
    inner = jit(lambda p: ew.mul(ew.sin(p), p))
    jaxpr = stage(lambda x: [ew.add(inner(x), inner(ew.cos(x)))], [F32])
    after = passes.inline_calls(jaxpr)
    assert names(after) == ["sin", "mul", "cos", "sin", "mul", "add"]
    assert_same_function(jaxpr, after)


def test_inline_bodies_that_return_parameters_and_literals():
    inner = jit(lambda p, q: (q, p, 3.0, q))
    jaxpr = stage(lambda x, y: list(inner(x, y)), [F32, F32])
    after = passes.inline_calls(jaxpr)
    assert names(after) == []
    assert_same_function(jaxpr, after)


def test_inline_bodies_tells_what_is_computed_again():
    """By equations of the program itself, which identify them uniquely."""
    gradient = grad(lambda x: ew.sin(checkpoint(lambda p: ew.mul(ew.sin(p), p))(x)))
    after, origins = passes.inline_bodies(passes.simplify(stage(lambda x: [gradient(x)], [S32])))
    assert origins and set(origins) < set(after.eqns)


@pytest.mark.parametrize("f, gates", [(gelu, 1), (checkpoint(gelu), 2)], ids=["gelu", "checkpoint"])
def test_inline_shares_what_definitions_have_in_common(f, gates):
    """GELU and its derivative share one logistic, unless the second is rematerialized."""
    before = passes.simplify(stage(lambda x: [f(x), grad(f)(x)], [S32]))
    after, origins = passes.inline_bodies(before)
    assert names(after).count("logistic") == gates
    assert bool(origins) is (gates == 2) and set(origins) <= set(after.eqns)
    assert_same_function(before, after)


def test_inline_pointwise_leaves_other_calls():
    before = stage(lambda x: [checkpoint(ew.sin)(gelu(x))], [F32])
    after = passes.inline_pointwise(before)
    assert names(after)[-2:] == ["mul", "checkpoint"]
    assert_same_function(before, after)


def test_inline_keeps_effects_in_order():
    inner = jit(lambda p: shout_p.bind(ew.sin(p)))
    jaxpr = stage(lambda x: [inner(x), shout_p.bind(x)], [F32])
    assert names(passes.inline_calls(jaxpr)) == ["sin", "shout", "shout"]


# -- all of them -----------------------------------------------------------------------------------


def test_simplify_makes_work_for_the_next_pass():
    def f(x):
        a = jit(lambda p: ew.sin(ew.mul(p, ew.sqrt(from_numpy(np.float32(4))))))(x)
        b = jit(lambda p: ew.cos(ew.sin(ew.mul(p, 2.0))))(x)
        ew.exp(b)
        return [ew.add(a, b)]

    jaxpr = stage(f, [F32])
    after = passes.simplify(jaxpr)
    assert names(after) == ["mul", "sin", "cos", "add"]
    assert_same_function(jaxpr, after)


def test_golden_simplified(golden):
    golden("simplified", passes.simplify(stage(nested, [F32, F32])))


UNARY = [ew.sin, ew.cos, ew.neg, lambda x: ew.mul(x, 2.0), lambda x: ew.add(x, 1.0)]
BINARY = [ew.add, ew.mul, ew.sub, ew.max]


@given(hs.data())
def test_simplify_keeps_random_programs(data):
    """Random straight-line programs with nested calls, dead code and literals."""

    def block(values, n, depth):
        for _ in range(n):
            pick = hs.integers(0, len(values) - 1)
            kind = data.draw(hs.integers(0, 2 if depth < 2 else 1))
            if kind == 0:
                values.append(data.draw(hs.sampled_from(UNARY))(values[data.draw(pick)]))
            elif kind == 1:
                op = data.draw(hs.sampled_from(BINARY))
                values.append(op(values[data.draw(pick)], values[data.draw(pick)]))
            else:
                args = [values[data.draw(pick)] for _ in range(2)]
                values.append(jit(lambda *xs: block(list(xs), 3, depth + 1)[-1])(*args))
        return values

    one = from_numpy(np.float32(1.5))
    jaxpr = stage(lambda x, y: block([one, x, y], data.draw(hs.integers(1, 8)), 0)[-3:], [S32, S32])
    after = passes.simplify(jaxpr)
    assert_same_function(jaxpr, after)
    assert len(after.eqns) <= len(passes.inline_calls(jaxpr).eqns)
