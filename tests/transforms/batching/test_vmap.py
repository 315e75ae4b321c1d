"""``vmap``: axes as pytrees, nesting, closures, and batched operations."""

import numpy as np
import pytest

from blufunc import errors
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from blufunc.core.ops import dot, dynamic, reduce
from blufunc.core.ops import elementwise as ew
from blufunc.core.primitives import linear_ops
from blufunc.transforms.autodiff.grad import grad, jvp, vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr


def arr(x, dtype=np.float32):
    return from_numpy(np.asarray(x, dtype))


def total(x):
    return linear_ops.reduce_sum(x, tuple(range(x.ndim)))


def check(got, want, rtol=1e-6):
    got = np.asarray(got)
    assert got.shape == np.shape(want)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol)


A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.arange(6, dtype=np.float32).reshape(3, 2) - 2
V = np.array([1.0, 2.0, 4.0], np.float32)


def matvec(m, v):
    return dot.dot_general(m, v, (((1,), (0,)), ((), ())))


# -- in_axes and out_axes --------------------------------------------------------------------------


def test_the_first_axis_of_everything_by_default():
    f = lambda p: {"sum": ew.add(total(p["m"]), p["n"])}
    check(vmap(f)({"m": A, "n": np.array([10, 20], np.float32)})["sum"], [13, 32])


@pytest.mark.parametrize("in_axes", [1, -1, (1,), [1]])
def test_another_axis(in_axes):
    check(vmap(total, in_axes=in_axes)(A), A.sum(0))


def test_one_entry_per_argument():
    f = lambda x, y, z: ew.add(ew.mul(x, y), z)
    check(vmap(f, in_axes=(0, None, 1))(A, V, A.T), A * V + A)
    check(vmap(f, in_axes=(0, None, None))(A, V, V), A * V + V)


def test_in_axes_are_pytree_prefixes():
    f = lambda p, q: ew.add(ew.mul(p["a"], p["b"]), q[0])
    args = ({"a": A, "b": V}, (B, None))
    check(vmap(f, in_axes=({"a": 0, "b": None}, 1))(*args), A * V + B.T)
    check(vmap(f, in_axes=({"a": 0, "b": None}, (1, None)))(*args), A * V + B.T)


def test_keyword_arguments_are_mapped_over_their_first_axis():
    check(vmap(lambda x, *, y: ew.mul(x, y))(A, y=A), A * A)


@pytest.mark.parametrize("out_axes", [0, 1, -1, 2, -3])
def test_out_axes(out_axes):
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    got = vmap(ew.sin, out_axes=out_axes)(x)
    check(got, np.moveaxis(np.sin(x), 0, out_axes))


def test_out_axes_are_pytree_prefixes():
    f = lambda x: {"a": x, "b": (ew.neg(x), total(x))}
    out = vmap(f, out_axes={"a": 1, "b": (0, 0)})(A)
    check(out["a"], A.T)
    check(out["b"][0], -A)
    check(out["b"][1], A.sum(1))


def test_results_that_do_not_depend_on_the_batch():
    c = arr(V)
    out = vmap(lambda x: (x, c, 3.0), out_axes=(0, None, None))(A)
    check(out[1], V)
    check(out[2], 3.0)
    out = vmap(lambda x: (x, c, 3.0), out_axes=(0, 1, 0))(A)
    check(out[1], np.stack([V, V], 1))
    check(out[2], [3.0, 3.0])


def test_axis_size():
    check(vmap(lambda: arr(V), axis_size=2)(), np.stack([V, V]))
    check(vmap(lambda x: x, in_axes=None, axis_size=2)(V), np.stack([V, V]))


def test_an_empty_batch_and_a_batch_of_one():
    f = lambda x: ew.mul(total(x), x)
    check(vmap(f)(A[:1]), A[:1].sum() * A[:1])
    out = vmap(f)(A[:0])
    assert out.shape == (0, 3)


# -- nesting ---------------------------------------------------------------------------------------


def test_nested_maps_over_different_arguments():
    mm = vmap(vmap(lambda x, y: total(ew.mul(x, y)), in_axes=(None, 1)), in_axes=(0, None))
    check(mm(A, B), A @ B)


def test_inner_functions_close_over_outer_values():
    outer = lambda x: vmap(lambda y: ew.add(ew.mul(x, y), total(x)))(B)
    got = vmap(outer, in_axes=1)(A)
    check(got, np.stack([A[:, i] * B + A[:, i].sum() for i in range(3)]))


def test_per_example_gradients():
    loss = lambda w, x, y: ew.square(ew.sub(total(ew.mul(w, x)), y))
    y = np.array([1, 2], np.float32)
    got = vmap(grad(loss), in_axes=(None, 0, 0))(V, A, y)
    check(got, 2 * ((A @ V - y)[:, None] * A))


def test_jacobians():
    f = lambda x: ew.mul(ew.sin(x), total(x))
    x = arr(V, np.float64)
    eye = arr(np.eye(3), np.float64)
    want = np.diag(np.cos(V.astype(float)) * V.sum()) + np.sin(V.astype(float))[:, None]
    check(vmap(lambda t: jvp(f, (x,), (t,))[1], out_axes=1)(eye), want, 1e-12)
    check(vmap(lambda ct: vjp(f, x)[1](ct)[0])(eye), want, 1e-12)


def test_maps_of_jitted_functions_batch_their_bodies():
    f = jit(lambda x, y: ew.mul(ew.sin(x), y))
    check(vmap(f, in_axes=(0, None))(A, V), np.sin(A) * V)
    check(jit(vmap(vmap(f), in_axes=(0, None)))(A, V), np.sin(A) * V)
    assert f.trace_count == 2, "at vectors, and at numbers; not again"


def test_indices_may_be_batched():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    at = np.array([2, 0, 3], np.int32)
    check(vmap(lambda x, i: dynamic.dynamic_index_in_dim(x, i, 0, False))(x, at), x[range(3), at])
    check(vmap(lambda i: dynamic.dynamic_index_in_dim(arr(x), i, 1, False))(at), x[:, at].T)


def test_reductions_keep_their_axes():
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    for d in range(3):
        check(vmap(lambda y: reduce.reduce_max(y, (1,)), in_axes=d)(x), np.moveaxis(x, d, 0).max(2))


# -- what becomes of operations --------------------------------------------------------------------


def primitives(fun, *args):
    return [e.prim.name for e in make_jaxpr(fun)(*args).eqns]


def test_elementwise_operations_move_nothing():
    f = lambda x, y: ew.add(ew.mul(ew.sin(x), y), 2.0)
    for axes in (0, 1):
        assert primitives(vmap(f, in_axes=axes, out_axes=axes), A, A) == ["sin", "mul", "add"]


def test_what_is_not_mapped_is_computed_once():
    names = make_jaxpr(vmap(lambda x, v: ew.mul(x, ew.exp(v)), in_axes=(0, None)))(A, V)
    (exp,) = [e for e in names.eqns if e.prim.name == "exp"]
    assert exp.outvars[0].aval.shape == (3,)


def test_a_batch_of_products_is_one_product():
    assert primitives(vmap(matvec, in_axes=(None, 0)), A, np.stack([V] * 4)).count("dot_general") == 1
    batch = np.stack([A] * 4)
    assert primitives(vmap(matvec), batch, np.stack([V] * 4)) == ["dot_general"]


def test_golden_vmap(golden):
    f = lambda w, x: total(ew.tanh(matvec(w, x)))
    x = np.ones((4, 3), np.float32)
    golden("vmap_of_grad", make_jaxpr(vmap(grad(f), in_axes=(None, 0)))(A, x))


def test_golden_vmap_of_jit(golden):
    f = jit(lambda x, y: ew.mul(ew.sin(x), y))
    golden("vmap_of_jit", make_jaxpr(vmap(f, in_axes=(1, None)))(A, np.ones(2, np.float32)))


# -- dtypes ----------------------------------------------------------------------------------------


def test_keys_and_booleans_are_mapped():
    k = from_numpy(np.zeros((3,), dtypes.key))
    assert vmap(lambda k: k)(k).dtype == dtypes.key
    check(vmap(lambda b: ew.select(b, 1.0, 2.0))(np.array([True, False])), [1, 2])


def test_weak_types_do_not_survive_a_batch():
    out = make_jaxpr(vmap(lambda x: ew.mul(x, 2.0)))(A)
    assert not any(v.aval.weak_type for v in out.outvars)


# -- errors that only vmap has ---------------------------------------------------------------------


def test_out_axes_none_needs_an_unmapped_result():
    with pytest.raises(errors.VmapSizeError, match="out_axes is None"):
        vmap(lambda x: x, out_axes=None)(A)


def test_out_axes_out_of_range():
    with pytest.raises(errors.VmapSizeError, match="out_axes 2"):
        vmap(total, out_axes=2)(A)
