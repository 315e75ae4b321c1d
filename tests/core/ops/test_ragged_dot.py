"""Matmuls of groups: axes, sizes, group offsets, errors, and a mixture of experts."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import errors, lax, nn, random

SIZES = np.array([3, 0, 4, 2], np.int32)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype="float64")


def numbers(contract, batch=((), ()), ragged=(0,), groups=()):
    return lax.RaggedDotDimensionNumbers((contract, batch), ragged, groups)


def masked(x, axis, prefix, sizes):
    """``x`` with a leading axis of groups, zero outside of the group.

    Args:
      axis: the ragged axis.
      prefix: the axes that sizes have, in their order.
    """
    x, sizes = np.asarray(x), np.asarray(sizes)
    if sizes.ndim == 1:
        sizes = np.broadcast_to(sizes, (*(x.shape[a] for a in prefix), len(sizes)))
    out = np.zeros((sizes.shape[-1], *x.shape))
    for at in np.ndindex(sizes.shape[:-1]):
        ends = np.cumsum([0, *np.maximum(sizes[at], 0)])
        for g in range(sizes.shape[-1]):
            where = [slice(None)] * x.ndim
            for a, i in zip(prefix, at, strict=True):
                where[a] = i
            where[axis] = slice(*np.minimum(ends[g : g + 2], x.shape[axis]))
            out[(g, *where)] = x[tuple(where)]
    return out


RNG = np.random.default_rng(1)
BXG, XG = (RNG.integers(0, 5, s).astype(np.int32) for s in ((2, 3, 4), (3, 4)))
GENERAL = {  # shapes, sizes, dimension numbers; einsum of the masked lhs, its ragged axis and prefix, and of the rhs
    "rows": ((12, 5), (4, 5, 6), SIZES, numbers(((1,), (1,)), groups=(0,)), "gmk,gkn->mn", (0, ()), None),
    "a batch": (
        (2, 12, 5), (4, 2, 5, 6), BXG[:, 0], numbers(((2,), (2,)), ((0,), (1,)), (1,), (0,)), "gbmk,gbkn->bmn",
        (1, (0,)), None,
    ),
    "axes ahead of the rows and after": (
        (2, 3, 12, 2, 5), (6, 4, 2, 5), BXG, numbers(((4,), (3,)), ((0,), (2,)), (2,), (1,)), "gbxmyk,ngbk->bxmyn",
        (2, (0, 1)), None,
    ),
    "axes ahead, shared matrices": (
        (3, 12, 5), (4, 5, 6), XG, numbers(((2,), (1,)), ragged=(1,), groups=(0,)), "gxmk,gkn->xmn", (1, (0,)), None,
    ),
    "contracted": ((12, 5), (12, 6), SIZES, numbers(((0,), (0,))), "gmk,gmn->gkn", (0, ()), (0, ())),
    "contracted with others": (
        (2, 3, 12, 2, 5), (3, 12, 2, 6, 2), BXG, numbers(((1, 2, 3), (0, 1, 2)), ((0,), (4,)), (2,)),
        "gbxmyk,gxmynb->gbkn", (2, (0, 1)), (1, (4, 0)),
    ),
    "a batch axis": ((4, 7, 5), (4, 5, 6), SIZES, numbers(((2,), (1,)), ((0,), (0,))), "gbmk,bkn->bmn", None, None),
}  # fmt: skip


@pytest.mark.parametrize("name", GENERAL)
def test_any_axes(name):
    """Against an einsum of operands that are zero outside of a group."""
    left, right, sizes, d, equation, of_left, of_right = GENERAL[name]
    x, w = draw(*left), draw(*right)
    f = lambda x, w: lax.ragged_dot_general(x, w, jnp.asarray(sizes), d)
    wide = masked(x, of_left[0], of_left[1], sizes) if of_left else np.asarray(x)[None]
    other = masked(w, of_right[0], of_right[1], sizes) if of_right else np.asarray(w)
    want = np.einsum(equation, wide, other)
    got = bf.jit(f)(x, w)
    np.testing.assert_allclose(got, want, atol=1e-12)
    bf.testing.check_grads(f, (x, w), order=2, modes=("fwd", "rev"))


def test_sizes():
    x, w = draw(9, 3), draw(4, 3, 2)
    whole = np.asarray(lax.ragged_dot(x, w, SIZES))
    np.testing.assert_allclose(lax.ragged_dot(x, w, SIZES.astype(np.int8)), whole)
    np.testing.assert_allclose(lax.ragged_dot(x, w, np.array([3, -7, 4, 200], np.int64)), whole)
    short = np.asarray(lax.ragged_dot(x, w, np.array([3, 0, 2, 1], np.uint8)))
    assert (short[6:] == 0).all() and (short[:3] == whole[:3]).all()
    many = draw(300, 3)
    np.testing.assert_allclose(  # sizes of int8 whose sum is none
        lax.ragged_dot(many, w, np.array([100, 100, 50, 50], np.int8)),
        lax.ragged_dot(many, w, np.array([100, 100, 50, 50], np.int32)),
    )


@pytest.mark.parametrize("first", [-1, 0, 1, 2, 4, 9])
def test_group_offset(first):
    """Some of the matrices, as a device has them."""
    x, w = draw(9, 3), draw(4, 3, 2)
    own = w[max(first, 0) :][:2]
    own = jnp.concatenate([own, jnp.ones((2 - len(own), 3, 2), "float64")])
    got = lax.ragged_dot(x, own, SIZES, group_offset=jnp.array([first]))
    held = np.isin(np.arange(4), np.arange(max(first, 0), max(first, 0) + 2))
    np.testing.assert_allclose(got, lax.ragged_dot(x, w * held[:, None, None], SIZES), atol=1e-12)
    y = draw(9, 2)
    d = numbers(((0,), (0,)))
    sums = lax.ragged_dot_general(x, y, SIZES, d, group_offset=first)
    whole = np.asarray(lax.ragged_dot_general(x, y, SIZES, d))
    shifted = np.concatenate([whole[min(max(first, 0), 4) :], np.zeros((4, 3, 2))])[:4]
    np.testing.assert_allclose(sums, shifted, atol=1e-12)


EMPTY = [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, None), (None, 0, 0), (0, 0, 0)]


@pytest.mark.parametrize("axes", EMPTY)
def test_empty_batches(axes):
    args = jnp.ones((6, 3)), jnp.ones((2, 3, 4)), jnp.array([2, 3], "int32")
    given = [jnp.zeros((0, *a.shape), a.dtype) if d == 0 else a for a, d in zip(args, axes, strict=True)]
    assert bf.vmap(lax.ragged_dot, axes)(*given).shape == (0, 6, 4)
    loss = lambda x, w, sizes: (lax.ragged_dot(x, w, sizes) ** 2).sum()
    grads = bf.vmap(bf.grad(loss, (0, 1)), axes)(*given)
    assert [g.shape for g in grads] == [(0, 6, 3), (0, 2, 3, 4)]


def test_preferred_element_type():
    x, w = draw(9, 3).astype("bfloat16"), draw(4, 3, 2).astype("bfloat16")
    f = lambda x, w: lax.ragged_dot(x, w, SIZES, preferred_element_type="float32")
    assert f(x, w).dtype == "float32"
    grads = bf.grad(lambda x, w: (f(x, w) ** 2).sum(), (0, 1))(x, w)
    assert [g.dtype for g in grads] == ["bfloat16"] * 2


WRONG = {  # a call, the error, and what it says
    "float sizes": (lambda x, w: lax.ragged_dot(x, w, SIZES.astype("f4")), errors.DtypeError, "are integers"),
    "other groups": (lambda x, w: lax.ragged_dot(x, w, SIZES[:3]), errors.ShapeError, "has 4 groups"),
    "no groups": (lambda x, w: lax.ragged_dot(x, w, np.int32(3)), errors.ShapeError, r"not of shape \(groups,\)"),
    "fewer matrices": (lambda x, w: lax.ragged_dot(x, w[:2], SIZES), errors.ShapeError, "has 2 groups"),
    "terms": (lambda x, w: lax.ragged_dot(x, w[:, :2], SIZES), errors.ShapeError, "contracts axis 1"),
    "dtypes": (lambda x, w: lax.ragged_dot(x, w.astype("f4"), SIZES), errors.DtypeError, "one dtype"),
    "an offset": (
        lambda x, w: lax.ragged_dot(x, w, SIZES, group_offset=jnp.ones(2)), errors.ArgumentError, "one integer"
    ),
    "no ragged axis": (
        lambda x, w: lax.ragged_dot_general(x, w, SIZES, numbers(((1,), (1,)), ragged=(), groups=(0,))),
        errors.ShapeError, "not one axis of the lhs",
    ),
    "no group axis": (
        lambda x, w: lax.ragged_dot_general(x, w, SIZES, numbers(((1,), (1,)))), errors.ShapeError,
        "rhs_group_dimensions",
    ),
    "groups of a sum": (
        lambda x, w: lax.ragged_dot_general(x, x, SIZES, numbers(((0,), (0,)), groups=(1,))), errors.ShapeError,
        "has no groups",
    ),
    "plain numbers": (
        lambda x, w: lax.ragged_dot_general(x, w, SIZES, (((1,), (1,)), ((), ()))), errors.ArgumentError,
        "RaggedDotDimensionNumbers",
    ),
    "no pairs": (lambda x, w: lax.RaggedDotDimensionNumbers(3, (0,), (0,)), errors.ArgumentError, "two pairs"),
    "a precision": (lambda x, w: lax.ragged_dot(x, w, SIZES, "exact"), errors.ArgumentError, "not a precision"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    call, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        call(draw(9, 3), draw(4, 3, 2))


# -- a mixture of experts ------------------------------------------------------------------------------

EXPERTS, CHOSEN = 5, 2


def mixture(params, x):
    """Each token by its best experts, without products with one-hot arrays."""
    weights, experts = lax.top_k(nn.softmax(x @ params["router"]), CHOSEN)
    experts = experts.reshape(-1)
    order = jnp.argsort(experts)
    tokens, sizes = order // CHOSEN, jnp.bincount(experts, length=EXPERTS)
    hidden = nn.gelu(lax.ragged_dot(x[tokens], params["up"], sizes))
    y = lax.ragged_dot(hidden, params["down"], sizes) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[tokens].add(y)


def dense_mixture(params, x):
    """The same by all experts for all tokens."""
    weights, experts = lax.top_k(nn.softmax(x @ params["router"]), CHOSEN)
    gates = (nn.one_hot(experts, EXPERTS, dtype=x.dtype) * weights[..., None]).sum(1)
    hidden = nn.gelu(jnp.einsum("tc,ech->teh", x, params["up"]))
    return jnp.einsum("teh,ehc,te->tc", hidden, params["down"], gates)


def trained(layer, steps=5):
    """Losses and parameters."""
    keys = random.split(random.key(0), 5)
    shapes = {"router": (8, EXPERTS), "up": (EXPERTS, 8, 16), "down": (EXPERTS, 16, 8)}
    params = {n: random.normal(k, s, "float64") / 3 for k, (n, s) in zip(keys, shapes.items(), strict=False)}
    x, y = (random.normal(k, (40, 8), "float64") for k in keys[3:])
    loss = lambda p: jnp.mean((layer(p, x) - y) ** 2)

    @bf.jit
    def step(p):
        value, grads = bf.value_and_grad(loss)(p)
        return bf.tree.map(lambda p, g: p - 0.3 * g, p, grads), value

    losses = []
    for _ in range(steps):
        params, value = step(params)
        losses.append(float(value))
    return losses, params


def test_a_mixture_trains_as_the_dense_one():
    losses, params = trained(mixture)
    want, dense = trained(dense_mixture)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses, want, rtol=1e-12)
    for name in params:
        np.testing.assert_allclose(params[name], dense[name], rtol=0, atol=1e-12)
