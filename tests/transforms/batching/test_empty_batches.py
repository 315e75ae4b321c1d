"""``vmap`` over an axis of size 0, and Python numbers that are not mapped."""

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import lax, nn, ops, random
from blufunc.core.arrays.array import from_numpy
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.eval_shape import eval_shape
from blufunc.transforms.staging.jit import jit
from tests.op_table.rows import OPS


def _shapes(x):
    return [(tuple(v.shape), v.dtype) for v in (x if isinstance(x, (tuple, list)) else [x])]


@pytest.mark.parametrize("op", [pytest.param(op, id=op.id) for op in OPS if op.args])
def test_primitives(op):
    """Every argument alone, and all together."""
    args = [from_numpy(x) for x in op.sample(op.dtypes[0])]
    want = [((0, *shape), dtype) for shape, dtype in _shapes(eval_shape(op.apply, *args))]
    n = len(args)
    for mapped in {*[tuple(i == j for i in range(n)) for j in range(n)], (True,) * n}:
        axes = tuple(0 if m else None for m in mapped)
        xs = [
            from_numpy(np.zeros((0, *a.shape), a.dtype)) if m else a
            for m, a in zip(mapped, args, strict=True)
        ]
        f = vmap(op.apply, in_axes=axes)
        assert _shapes(f(*xs)) == want
        if all(mapped):
            assert _shapes(jit(f)(*xs)) == want


FUNCTIONS = {
    "x[i]": lambda x, i: x[i],
    "x.at[i].set": lambda x, i: x.at[i].set(1.0),
    "x.at[i].add": lambda x, i: x.at[i].add(x[0]),
    "x.at[i].max": lambda x, i: x.at[i].max(2.0),
    "take": lambda x, i: bnp.take(x, i),
    "dynamic_slice": lambda x, i: lax.dynamic_slice(x, (i,), (2,)),
    "dynamic_update_slice": lambda x, i: lax.dynamic_update_slice(x, x[:1], (i,)),
    "segment_sum": lambda x, i: ops.segment_sum(x, bnp.asarray([0, 1, 1]) + i, 2),
    "grad of x[i]": lambda x, i: grad(lambda x: x[i] ** 2)(x),
    "convolve": lambda x, i: bnp.convolve(x, x),
    "cond": lambda x, i: lax.cond(i > 0, bnp.sin, bnp.cos, x),
    "fori_loop": lambda x, i: lax.fori_loop(0, i, lambda _, c: c * 2, x),
    "attention": lambda x, i: nn.dot_product_attention(*[bnp.broadcast_to(x, (4, 1, 3))] * 3),
    "normal": lambda x, i: random.normal(random.fold_in(random.key(0), i), (2,)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    f = FUNCTIONS[name]
    x, i = bnp.zeros((0, 3)), bnp.zeros((0,), "int32")
    ((shape, dtype),) = _shapes(eval_shape(f, bnp.zeros(3), bnp.asarray(0)))
    want = [((0, *shape), dtype)]
    cases = [
        (vmap(f), (x, i)), (vmap(f, in_axes=(0, None)), (x, bnp.asarray(0))),
        (vmap(f, in_axes=(None, 0)), (bnp.zeros(3), i)),
    ]  # fmt: skip
    for g, args in cases:
        if name == "normal" and not args[1].ndim:
            continue  # it would not be mapped
        assert _shapes(g(*args)) == _shapes(jit(g)(*args)) == want
    nested = vmap(vmap(f))(bnp.zeros((2, 0, 3)), bnp.zeros((2, 0), "int32"))
    assert _shapes(nested) == [((2, 0, *shape), dtype)]


def doubled_if(x, positive):
    return x * 2 if positive > 0 else x


@pytest.mark.parametrize("number", [1.0, 1, True, -1.0])
def test_numbers_that_are_not_mapped(number):
    """They stay Python numbers, also under ``jit``."""
    x = bnp.ones(2)
    want = [2.0, 2.0] if number > 0 else [1.0, 1.0]
    seen = []

    def f(x, h):
        seen.append(type(h))
        return doubled_if(x, h)

    cases = [
        lambda x: vmap(f, in_axes=(0, None))(x, number),
        lambda x: vmap(lambda d: f(d["x"], d["h"]), in_axes=({"x": 0, "h": None},))({"x": x, "h": number}),
        lambda x: vmap(vmap(f, in_axes=(0, None)), in_axes=(0, None))(x[None], number)[0],
        lambda x: vmap(grad(lambda x, h: f(x, h)), in_axes=(0, None))(x, number),
    ]
    for case in cases:
        assert case(x).tolist() == jit(case)(x).tolist() == want
    assert set(seen) == {type(number)}
    assert vmap(lambda x, h: (x, h), in_axes=(0, None))(x, number)[1].tolist() == [number, number]
