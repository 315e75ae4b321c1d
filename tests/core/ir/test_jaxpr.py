"""Jaxprs: ``check_jaxpr``, printing, evaluation and hoisting."""

import numpy as np
import pytest

from blufunc import errors
from blufunc.core.arrays.array import from_numpy, scalar
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.check import check_jaxpr
from blufunc.core.ir.jaxpr import DropVar, Eqn, Jaxpr, Literal, Var, eval_jaxpr, subjaxprs
from blufunc.core.ir.printer import to_text
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops import sort
from blufunc.core.primitives import linear_ops
from blufunc.core.programs.stage import stage
from blufunc.transforms.control_flow.calls import jit_p

F32 = ShapedArray((3,), dtypes.float32)
I32 = ShapedArray((3,), dtypes.int32)
WIDE = ShapedArray((4,), dtypes.float32)


def eqn(prim, invars, outvars, **params):
    return Eqn(prim, invars, outvars, params, None)


def make(invars, eqns, outvars, **kw):
    return Jaxpr(invars, eqns, outvars, **kw)


X, Y, Z, N = Var(F32), Var(F32), Var(F32), Var(I32)
SIN = eqn(ew.sin_p, [X], [Y])
ONE = Literal(scalar(1.0, dtypes.float32))
BODY = make([X], [SIN], [Y])
CONST = Var(F32)
CLOSED_OVER = make([X], [], [CONST], constvars=[CONST], consts=[from_numpy(np.ones(3, np.float32))])

WELL_FORMED = {
    "empty": make([], [], []),
    "identity": make([X], [], [X]),
    "literal": make([], [], [ONE]),
    "chain": make([X], [SIN, eqn(ew.mul_p, [Y, ONE], [Z])], [Z, X, ONE]),
    "dropped": make([X], [eqn(ew.sin_p, [X], [DropVar(F32)]), eqn(ew.cos_p, [X], [DropVar(F32)])], [X]),
    "constant": CLOSED_OVER,
    "call": make([Z], [eqn(jit_p, [Z], [N1 := Var(F32)], jaxpr=BODY, name="f")], [N1]),
    "twice the same result": make([X], [SIN], [Y, Y]),
}

ILL_FORMED = {
    "unbound operand": (make([], [SIN], [Y]), "reads a variable that is not bound"),
    "unbound result": (make([X], [], [Y]), "a result is a variable that is not bound"),
    "used before it is made": (make([X], [eqn(ew.sin_p, [Z], [Y]), eqn(ew.sin_p, [X], [Z])], [Y]), "not bound"),
    "parameter bound twice": (make([X, X], [], [X]), "a parameter is bound twice"),
    "result bound twice": (make([X], [SIN, eqn(ew.cos_p, [X], [Y])], [Y]), "bound twice"),
    "result over a parameter": (make([X], [eqn(ew.sin_p, [X], [X])], [X]), "bound twice"),
    "wrong dtype": (make([X], [eqn(ew.sin_p, [X], [N])], [N]), "binds a i32[3], its rule gives f32[3]"),
    "wrong shape": (make([X], [eqn(ew.sin_p, [X], [w := Var(WIDE)])], [w]), "binds a f32[4]"),
    "too many outputs": (make([X], [eqn(ew.sin_p, [X], [Y, Z])], [Y]), "has 2 outputs, its rule gives 1"),
    "too few outputs": (make([X], [eqn(sort.sort_p, [X], [], dimension=0, is_stable=True, num_keys=1)], [X]),
                        "has 0 outputs, its rule gives 1"),
    "missing constants": (make([X], [], [CONST], constvars=[CONST]), "0 constants for 1 variables"),
    "body with constants": (make([X], [eqn(jit_p, [X], [Y], jaxpr=CLOSED_OVER, name="f")], [Y]),
                            "holds a jaxpr with attached constants"),
    "body that is ill-formed": (make([X], [eqn(jit_p, [X], [Y], jaxpr=make([X], [], [Y]), name="f")], [Y]),
                                "a result is a variable that is not bound"),
}  # fmt: skip


@pytest.mark.parametrize("name", WELL_FORMED)
def test_well_formed(name):
    check_jaxpr(WELL_FORMED[name])


@pytest.mark.parametrize("name", ILL_FORMED)
def test_ill_formed(name):
    jaxpr, message = ILL_FORMED[name]
    with pytest.raises(errors.JaxprTypeError) as info:
        check_jaxpr(jaxpr)
    assert message in info.value.what
    assert "lambda" in info.value.what, "the jaxpr is in the message"


ILL_TYPED = {
    "operand of a wrong dtype": (make([N], [eqn(ew.sin_p, [N], [Y])], [Y]), errors.DtypeError),
    "operands of two dtypes": (make([X, N], [eqn(ew.add_p, [X, N], [Y])], [Y]), errors.DtypeError),
    "operands of two shapes": (make([X, w], [eqn(ew.add_p, [X, w], [Y])], [Y]), errors.ShapeError),
    "parameters out of range": (
        make([X], [eqn(linear_ops.reduce_sum_p, [X], [Y], axes=(1,))], [Y]),
        errors.ShapeError,
    ),
}


@pytest.mark.parametrize("name", ILL_TYPED)
def test_operands_that_the_primitive_refuses(name):
    jaxpr, error = ILL_TYPED[name]
    with pytest.raises(error):
        check_jaxpr(jaxpr)


# -- printing --------------------------------------------------------------------------------------


def test_golden_printing(golden):
    """Weak and literal scalars, dropped results, parameters, nested jaxprs."""

    def f(x, n, pred):
        y = ew.mul(ew.sin(x), 2.0)
        total = linear_ops.reduce_sum(y, (0,))
        values, _ = sort.sort((y, n), 0)
        z = ew.select(pred, linear_ops.broadcast_to(total, (3,)), values)
        inner = stage(lambda a: [ew.add(a, 1.5)], [F32], "inner")
        (w,) = jit_p.bind(z, jaxpr=inner, name="inner")
        return [w, ew.convert(n, dtypes.bfloat16), total, scalar(3, dtypes.int32)]

    jaxpr = stage(f, [F32, I32, ShapedArray((3,), dtypes.bool_)])
    check_jaxpr(jaxpr)
    golden("printing", jaxpr)


def test_names_depend_on_the_program_alone():
    f = lambda x: [ew.sin(ew.cos(x))]
    assert str(stage(f, [F32])) == str(stage(f, [F32]))
    assert str(stage(f, [F32])).splitlines()[0] == "{ lambda ; a:f32[3] . let"


def test_names_go_on_after_z():
    def f(x):
        for _ in range(30):
            x = ew.sin(x)
        return [x]

    text = str(stage(f, [F32]))
    assert "z:f32[3] = sin y" in text
    assert "aa:f32[3] = sin z" in text
    assert "ae:f32[3] = sin ad" in text


def test_source_lines_are_printed_on_request():
    jaxpr = stage(lambda x: [ew.sin(x)], [F32])
    assert "test_jaxpr.py" not in to_text(jaxpr)
    assert "= sin a  # test_jaxpr.py:" in to_text(jaxpr, lines=True)
    assert "test_source_lines" in to_text(jaxpr, lines=True) or "<lambda>" in to_text(jaxpr, lines=True)


def test_keys_and_small_dtypes_print():
    f = lambda x: [ew.convert(x, dtypes.float8_e4m3fn), scalar(np.zeros((), dtypes.key)[()], dtypes.key)]
    assert "f8_e4m3fn[3] = convert[dtype=f8_e4m3fn]" in str(stage(f, [F32]))
    assert "key(0, 0):key<fry>[]" in str(stage(f, [F32]))


# -- use -------------------------------------------------------------------------------------------


def test_eval_jaxpr():
    x = np.arange(3, dtype=np.float32)
    jaxpr = stage(lambda x: [ew.mul(ew.sin(x), 2.0), x], [F32])
    y, same = eval_jaxpr(jaxpr, [from_numpy(x)])
    np.testing.assert_allclose(np.asarray(y), 2 * np.sin(x), rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(same), x)


def test_hoisted_constants_become_leading_parameters():
    c = from_numpy(np.ones(3, np.float32))
    jaxpr = stage(lambda x: [ew.add(ew.mul(x, c), c)], [F32], labels=["x"])
    assert len(jaxpr.consts) == 1, "one variable for one array, however often it is used"
    assert jaxpr.consts[0] is c
    closed, consts = jaxpr.hoist()
    assert (consts, closed.consts, len(closed.invars)) == ((c,), (), 2)
    assert closed.arg_names == ("", "x")
    check_jaxpr(closed)


def test_scalars_become_literals_and_arrays_do_not():
    jaxpr = stage(lambda x: [ew.add(ew.mul(x, 3.0), from_numpy(np.float32(2)))], [F32])
    assert jaxpr.consts == ()
    assert [a.value for e in jaxpr.eqns for a in e.invars if isinstance(a, Literal)] == [3.0, 2.0]


def test_parameters_must_be_hashable():
    with pytest.raises(errors.ArgumentError, match="axes is not"):
        linear_ops.reduce_sum_p.bind(from_numpy(np.ones(3)), axes=[0])


def test_subjaxprs_are_found_in_parameters_and_tuples_of_them():
    assert list(subjaxprs({"jaxpr": BODY, "branches": (BODY, BODY), "n": 3})) == [BODY] * 3


def test_effects_of_calls_are_those_of_their_bodies():
    assert BODY.effects == frozenset()
    assert WELL_FORMED["call"].effects == frozenset()
