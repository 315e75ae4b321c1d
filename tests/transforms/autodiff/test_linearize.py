"""Linearization and transposition of jaxprs: the split, and its size."""

import numpy as np
import pytest

from blufunc import errors
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import eval_jaxpr
from blufunc.core.ops import dot
from blufunc.core.ops import elementwise as ew
from blufunc.core.primitives import linear_ops
from blufunc.core.primitives.primitive import Primitive, unsupported
from blufunc.core.primitives.tangents import Zero
from blufunc.core.programs.stage import stage
from blufunc.transforms.autodiff.grad import grad, jvp, linearize, vjp
from blufunc.transforms.autodiff.jvp import jvp_jaxpr
from blufunc.transforms.autodiff.linearize import linearize_flat, linearize_jaxpr
from blufunc.transforms.autodiff.transpose import backward_pass, transpose_jaxpr
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr

F = ShapedArray((3,), dtypes.float64)
X = from_numpy(np.array([0.5, -1.0, 2.0]))
T = from_numpy(np.array([1.0, 2.0, -3.0]))


def names(jaxpr):
    return [e.prim.name for e in jaxpr.eqns]


def values(xs):
    return [np.asarray(x) for x in xs]


def body(x, y):
    z = ew.mul(ew.sin(x), y)
    return [z, ew.exp(y), x]


JAXPR = stage(body, [F, F], "body")


# -- the split -------------------------------------------------------------------------------------


def test_primal_operations_run_once_and_tangent_ones_are_staged():
    outs, nonzeros, linear = linearize_flat(body, [X, T])
    for got, want in zip(outs, body(X, T), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert nonzeros == [True, True, True]
    assert set(names(linear)) <= {"mul", "add_any"}, (
        "sin, cos and exp ran; only what touches a tangent is left"
    )


def test_arguments_without_a_tangent_leave_nothing_behind():
    _, nonzeros, linear = linearize_flat(body, [X, T], [True, False])
    assert nonzeros == [True, False, True]
    assert names(linear) == ["mul", "mul"]
    assert len(linear.invars) == 1


def test_residuals_are_only_what_is_read():
    _, _, linear = linearize_flat(lambda x: [linear_ops.reduce_sum(ew.square(ew.sin(x)), (0,))], [X])
    assert len(linear.consts) == 2


def test_linearized_jaxprs_agree_with_jvp():
    primal, linear, nonzeros, n = linearize_jaxpr(JAXPR, (True, True))
    assert len(primal.outvars) == len(JAXPR.outvars) + n
    outs = eval_jaxpr(primal, [X, T])
    tangents = eval_jaxpr(linear, [*outs[3:], T, X])
    want, want_t = jvp(body, (X, T), (T, X))
    for got, w in zip(values(outs[:3]), values(want), strict=True):
        np.testing.assert_array_equal(got, w)
    for got, w in zip(values(tangents), values(want_t), strict=True):
        np.testing.assert_allclose(got, w, rtol=1e-14)


def test_jaxprs_of_transforms_are_made_once():
    assert linearize_jaxpr(JAXPR, (True, False)) is linearize_jaxpr(JAXPR, (True, False))
    assert jvp_jaxpr(JAXPR, (True, False), (False,) * 3) is jvp_jaxpr(JAXPR, (True, False), (False,) * 3)
    linear = linearize_jaxpr(JAXPR, (True, True))[1]
    key = (False,) * (len(linear.invars) - 2) + (True, True)
    assert transpose_jaxpr(linear, key, (True,) * 3) is transpose_jaxpr(linear, key, (True,) * 3)


def test_zero_tangents_are_never_computed():
    jaxpr, nonzeros = jvp_jaxpr(JAXPR, (True, False), (False,) * 3)
    assert nonzeros == (True, False, True)
    assert "exp" in names(jaxpr) and names(jaxpr).count("mul") == 3
    jaxpr, nonzeros = jvp_jaxpr(JAXPR, (True, False), (False, True, False))
    assert nonzeros == (True, True, True), "zeros are made where they are asked for"


def test_golden_linearize_jaxpr(golden):
    primal, linear, _, _ = linearize_jaxpr(JAXPR, (True, True))
    golden("linearize", f"primal\n{primal}\n\nlinear\n{linear}")


def test_golden_transpose(golden):
    linear = linearize_jaxpr(JAXPR, (True, True))[1]
    n = len(linear.invars) - 2
    back, nonzeros = transpose_jaxpr(linear, (False,) * n + (True, True), (True, False, True))
    assert nonzeros == (True, True)
    golden("transpose", back)


# -- the transpose ---------------------------------------------------------------------------------


def test_cotangents_of_a_variable_are_summed():
    jaxpr = stage(lambda x: [ew.add(ew.mul(x, 2.0), ew.sub(x, ew.neg(x)))], [F])
    (ct,) = backward_pass(jaxpr, [None], [T])
    np.testing.assert_array_equal(np.asarray(ct), 4 * np.asarray(T))


def test_cotangents_that_never_arrive_are_zero():
    jaxpr = stage(lambda x, y: [ew.neg(x), ew.neg(y)], [F, F])
    ct_x, ct_y = backward_pass(jaxpr, [None, None], [T, None])
    assert isinstance(ct_y, Zero) and not isinstance(ct_x, Zero)


def test_a_result_that_is_an_argument():
    jaxpr = stage(lambda x: [x, x], [F])
    (ct,) = backward_pass(jaxpr, [None], [T, X])
    np.testing.assert_array_equal(np.asarray(ct), np.asarray(T) + np.asarray(X))


def test_constants_of_the_linear_map_are_evaluated():
    jaxpr = stage(lambda x, c: [ew.mul(x, ew.exp(c))], [F, F])
    (ct,) = backward_pass(jaxpr, [None, X], [T])
    np.testing.assert_allclose(np.asarray(ct), np.asarray(T) * np.exp(np.asarray(X)))


def test_weight_gradients_need_no_transposition():
    """Both cotangents of a matmul are one matmul each, without a copy."""
    m = np.ones((4, 3), np.float32)
    w = np.ones((3, 5), np.float32)
    mm = lambda m, w: dot.dot_general(m, w, (((1,), (0,)), ((), ())))
    ct = np.ones((4, 5), np.float32)
    jaxpr = make_jaxpr(lambda m, w, ct: vjp(mm, m, w)[1](ct))(m, w, ct)
    assert names(jaxpr).count("dot_general") <= 3
    assert "transpose" not in names(jaxpr)


# -- gaps are named --------------------------------------------------------------------------------


class _Stubborn(Primitive):
    """Has a value and nothing else."""

    name = "stubborn"
    jvp = unsupported("its derivative is nobody's business")
    transpose = unsupported("it is not linear")

    def impl(self, x):
        return x

    def abstract(self, x):
        return x


def test_a_missing_derivative_names_the_primitive_the_reason_and_the_line():
    p = _Stubborn()
    for transform in (lambda f: grad(f)(2.0), lambda f: jvp(f, (2.0,), (1.0,)), lambda f: linearize(f, 2.0)):
        with pytest.raises(errors.GradError) as info:
            transform(p.bind)
        assert "stubborn has no jvp: its derivative is nobody's business" in info.value.what
        assert "test_linearize.py" in info.value.where


def test_a_missing_transpose_names_the_primitive_and_the_line():
    p = _Stubborn()
    jaxpr = stage(lambda x: [p.bind(x)], [F])
    with pytest.raises(errors.GradError) as info:
        backward_pass(jaxpr, [None], [T])
    assert "stubborn has no transpose: it is not linear" in info.value.what
    assert "test_linearize.py" in info.value.where


def test_elementwise_operations_say_which_operand_they_are_not_linear_in():
    jaxpr = stage(lambda x: [ew.div(T, x)], [F])
    with pytest.raises(errors.GradError, match="div is not linear in operand 1") as info:
        backward_pass(jaxpr, [None], [T])
    assert "test_linearize.py" in info.value.where


def test_a_missing_batch_rule_is_an_error_of_its_own():
    from blufunc.transforms.batching.vmap import vmap

    with pytest.raises(errors.UnsupportedError, match="stubborn has no batch rule"):
        vmap(_Stubborn().bind)(X)


def test_no_derivative_is_asked_for_where_there_is_no_tangent():
    p = _Stubborn()
    g = grad(lambda x: ew.add(ew.square(x), ew.stop_gradient(p.bind(ew.stop_gradient(x)))))
    assert float(g(3.0)) == 6.0
    assert float(jit(g)(3.0)) == 6.0
