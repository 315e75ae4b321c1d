"""Collectives over named axes of ``vmap``, against the same code with arrays."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, tree
from blufunc.transforms.autodiff.grad import grad, jvp, vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.control_flow.scan import scan
from blufunc.transforms.staging.jit import jit
from tests.transforms.common import close, draw

N = 4
X = draw(N, 2 * N, N)


def shifted(x):
    return bnp.concatenate([x[3:], x[:1] * 0, x[1:3]])


# a function of one element, and what it is for all elements at once
CASES = {
    "psum": (lambda x: lax.psum(x * x, "i"), lambda x: bnp.broadcast_to((x * x).sum(0), x.shape)),
    "psum of what is the same everywhere": (
        lambda x: x * lax.psum(bnp.ones((), x.dtype), "i"),
        lambda x: x * N,
    ),
    "psum of a number": (lambda x: x * lax.psum(1, "i"), lambda x: x * N),
    "pmean": (lambda x: lax.pmean(x, "i") * x, lambda x: x.mean(0) * x),
    "pmax": (lambda x: lax.pmax(x, "i") * x, lambda x: x.max(0) * x),
    "pmin": (lambda x: lax.pmin(x, "i") * x, lambda x: x.min(0) * x),
    "all_gather": (lambda x: lax.all_gather(x, "i") * 2, lambda x: bnp.stack([x * 2] * N)),
    "all_gather at the end": (
        lambda x: lax.all_gather(x, "i", axis=-1),
        lambda x: bnp.stack([bnp.moveaxis(x, 0, -1)] * N),
    ),
    "all_gather tiled": (
        lambda x: lax.all_gather(x, "i", axis=1, tiled=True),
        lambda x: bnp.stack([bnp.concatenate(list(x), 1)] * N),
    ),
    "psum_scatter": (lambda x: lax.psum_scatter(x, "i", scatter_dimension=1), lambda x: x.sum(0).T),
    "psum_scatter tiled": (
        lambda x: lax.psum_scatter(x, "i", tiled=True),
        lambda x: x.sum(0).reshape(N, 2, N),
    ),
    "all_to_all": (
        lambda x: lax.all_to_all(x, "i", 1, 0),
        lambda x: bnp.transpose(x, (2, 0, 1)),
    ),
    "all_to_all tiled": (
        lambda x: lax.all_to_all(x, "i", 0, 1, tiled=True),
        lambda x: bnp.transpose(x.reshape(N, N, 2, N), (1, 2, 0, 3)).reshape(N, 2, N * N),
    ),
    "pswapaxes": (lambda x: lax.pswapaxes(x, "i", 1), lambda x: bnp.transpose(x, (2, 1, 0))),
    "over no axis": (
        lambda x: x * lax.psum(lax.pmean(lax.pmin(x, ()), ()), ()) + lax.axis_index(()) * lax.axis_size(()),
        lambda x: x * x,
    ),
    "ppermute": (lambda x: lax.ppermute(x, "i", [(3, 0), (1, 2), (2, 3)]), shifted),
    "pshuffle": (lambda x: lax.pshuffle(x, "i", [2, 0, 3, 1]), lambda x: x[bnp.array([2, 0, 3, 1])]),
    "axis_index": (
        lambda x: x * lax.axis_index("i"),
        lambda x: x * bnp.arange(N)[:, None, None],
    ),
    "axis_size": (lambda x: x * lax.axis_size("i"), lambda x: x * N),
    "in jit": (
        jit(lambda x: x * lax.axis_index("i") + lax.psum(x, "i")),
        lambda x: x * bnp.arange(N)[:, None, None] + x.sum(0),
    ),
    "in jit, of constants": (
        lambda x: x * jit(lambda: lax.axis_index("i") + 1)(),
        lambda x: x * (bnp.arange(N) + 1)[:, None, None],
    ),
    "in checkpoint": (
        bf.checkpoint(lambda x: bnp.sin(lax.psum(x, "i")) * x),
        lambda x: bnp.sin(x.sum(0)) * x,
    ),
    "in scan": (
        lambda x: scan(lambda c, a: (c + lax.psum(c * a, "i"), c), bnp.ones(N, x.dtype), x),
        lambda x: tree.map(
            lambda a, axis: bnp.moveaxis(a, axis, 0) if axis else a,
            scan(
                lambda c, a: (c + (c * a).sum(0), c),
                bnp.ones((N, N), x.dtype),
                bnp.moveaxis(x, 0, 1),
            ),
            (0, 1),
        ),
    ),
    "in cond": (
        lambda x: lax.cond(True, lambda x: x * lax.psum(x, "i"), lambda x: x, x),
        lambda x: x * x.sum(0),
    ),
    "in while": (
        lambda x: lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, lax.pmean(c[1], "i") + x), (0, x), max_steps=3
        )[1],
        lambda x: ((x.mean(0) + x).mean(0) + x).mean(0) + x,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_derivatives(name):
    one, together = CASES[name]
    mapped = vmap(one, axis_name="i")
    close(mapped(X), together(X))
    close(jit(mapped)(X), together(X))
    close(jvp(mapped, (X,), (X + 1,)), jvp(together, (X,), (X + 1,)), 1e-10)
    ct = tree.map(lambda y: draw(*y.shape), together(X))
    close(vjp(mapped, X)[1](ct), vjp(together, X)[1](ct), 1e-10)
    loss = lambda f: lambda x: sum((y * y).sum() for y in tree.leaves(f(x)))
    along = lambda f: lambda x: jvp(grad(loss(f)), (x,), (x * x,))[1]
    close(along(mapped)(X), along(together)(X), 1e-9)
    # an axis around it, and elsewhere in front
    several = bnp.stack([X, X + 1], 2)
    close(vmap(mapped, 2)(several), vmap(together, 2)(several))
    elsewhere = vmap(one, 1, axis_name="i")(bnp.moveaxis(X, 0, 1))
    close(elsewhere, together(X))


def test_several_axes_of_vmaps_are_gathered_as_one():
    x = draw(3, 4)
    got = vmap(vmap(lambda x: lax.all_gather(x, ("i", "j")), axis_name="j"), axis_name="i")(x)
    np.testing.assert_array_equal(got, np.broadcast_to(np.asarray(x).ravel(), (3, 4, 12)))


def test_names_find_their_own_axis():
    f = lambda x: (lax.psum(x, ("i", "j")), lax.psum(x, "j"), lax.pmax(x, "i"), lax.axis_index(("i", "j")))
    x = draw(3, 4)
    outs = vmap(vmap(f, axis_name="j"), axis_name="i")(x)
    all_, rows, columns, place = map(np.asarray, outs)
    np.testing.assert_allclose(all_, np.full((3, 4), np.asarray(x).sum()))
    np.testing.assert_allclose(rows, np.repeat(np.asarray(x).sum(1)[:, None], 4, 1))
    np.testing.assert_allclose(columns, np.repeat(np.asarray(x).max(0)[None], 3, 0))
    np.testing.assert_array_equal(place, np.arange(12).reshape(3, 4))


def test_an_inner_axis_hides_an_outer_one_of_its_name():
    x = draw(3, 4)
    inner = vmap(vmap(lambda x: lax.psum(x, "i"), axis_name="i"), axis_name="i")(x)
    np.testing.assert_allclose(np.asarray(inner), np.repeat(np.asarray(x).sum(1)[:, None], 4, 1))


def test_derivatives_of_one_element_go_to_all():
    """Members are differentiated together: a sum passes on every cotangent."""
    g = vmap(lambda x, w: grad(lambda x: w * lax.psum(x * x, "i"))(x), axis_name="i")
    x, w = draw(N), draw(N, seed=1)
    close(g(x, w), 2 * x * w.sum(), 1e-12)


def test_extrema_share_their_derivative():
    x = bnp.array([1.0, 3.0, 3.0])
    g = grad(lambda x: vmap(lambda x: lax.pmax(x, "i"), axis_name="i")(x)[0])
    np.testing.assert_allclose(np.asarray(g(x)), [0.0, 0.5, 0.5])


def test_a_jit_is_traced_for_each_size_of_the_axis():
    f = jit(lambda x: x / lax.axis_size("i"))
    for n in (2, 3):
        np.testing.assert_allclose(
            np.asarray(vmap(f, axis_name="i")(bnp.ones(n))), np.full(n, 1 / n, np.float32)
        )
    assert f.trace_count == 2


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda x: lax.psum(x, "j"), errors.AxisNameError, "'i'"),
        (lambda x: lax.axis_index("j"), errors.AxisNameError, "axis_name='j'"),
        (lambda x: lax.psum(x, ("i", "i")), errors.ArgumentError, "once each"),
        (lambda x: lax.ppermute(x, "i", [(0, 1), (0, 2)]), errors.ValueRangeError, "twice"),
        (lambda x: lax.ppermute(x, "i", [(0, 9)]), errors.ValueRangeError, "below 4"),
        (lambda x: lax.pshuffle(x, "i", [0, 0, 1, 2]), errors.ValueRangeError, "permutation"),
        (lambda x: lax.pshuffle(x, "i", [1, 0]), errors.ValueRangeError, "permutation of the 4 positions"),
        (lambda x: lax.all_gather(x, ()), errors.ArgumentError, "over no axis"),
        (lambda x: lax.psum_scatter(x, "i", tiled=True, scatter_dimension=1), errors.ShapeError, "multiple"),
        (lambda x: lax.psum_scatter(x, "i"), errors.ShapeError, "size of the axis"),
        (lambda x: lax.all_to_all(x, "i", 0, 1), errors.ShapeError, "tiled"),
        (
            lambda x: lax.psum(x, "i", axis_index_groups=[[0, 1]]),
            errors.ValueRangeError,
            "each index below 4 once",
        ),
        (lambda x: lax.all_gather(x, ("i", "k")), errors.AxisNameError, "'k'"),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error, match=words) as caught:
        vmap(call, axis_name="i")(draw(4, 8, 3))
    assert "test_named_axes.py" in str(caught.value)


def test_outside_of_any_axis():
    with pytest.raises(errors.AxisNameError, match="no axis is named here"):
        lax.psum(1.0, "i")


def test_spmd_axis_name_names_axes_of_a_mesh():
    close(vmap(bnp.sin, spmd_axis_name=("data", "model"))(X), bnp.sin(X))
    with pytest.raises(errors.ArgumentError, match="mesh"):
        vmap(bnp.sin, spmd_axis_name=3)


def test_the_size_and_name_of_an_axis_are_checked():
    assert vmap(lambda: bnp.ones(()), in_axes=(), axis_size=np.int64(7))().shape == (7,)
    assert type(bnp.zeros((7,)).shape[0]) is int  # types are interned: a NumPy integer would stay for good
    for size, error in (
        ("a", errors.ArgumentError),
        (2.5, errors.ArgumentError),
        (-1, errors.ValueRangeError),
    ):
        with pytest.raises(error, match="axis_size"):
            vmap(lambda: bnp.ones(()), in_axes=(), axis_size=size)()
    with pytest.raises(errors.ArgumentError, match="hashable"):
        vmap(lambda x: x, axis_name=["i"])
    with pytest.raises(errors.ArgumentError, match="True"):
        vmap(lambda x: x, in_axes=True)(X)
    close(vmap(lambda x: x, out_axes=np.int64(1))(X), bnp.moveaxis(X, 0, 1))
