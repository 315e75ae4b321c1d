"""Embedding and loss over a divided vocabulary, against those of one device."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import P, errors, lax, nn
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.recipes import (
    pad_vocabulary,
    vocabulary_parallel_cross_entropy,
    vocabulary_parallel_embedding,
)
from tests.parallel.exchanged import exchanged, same, same_with_gradients, weighted

B, T, C = 2, 5, 6
RNG = np.random.default_rng(0)


def model(n, V):
    """Loss of embedded tokens, with logits from the same table, on ``n`` ranks."""

    def local(table, x, ids, labels):
        x = x + vocabulary_parallel_embedding(table, ids, "v")
        return vocabulary_parallel_cross_entropy(x @ table.T, labels, "v", V)

    mapped = bf.shard_map(
        local, mesh=AbstractMesh((n,), ("v",)), in_specs=(P("v"), P(), P(), P()), out_specs=P()
    )
    return lambda table, x, *ids: mapped(pad_vocabulary(table, n), x, *ids)


def whole(table, x, ids, labels):
    x = x + table[ids]
    return nn.softmax_cross_entropy_with_integer_labels(x @ table.T, labels)


def operands(V):
    table, x = (RNG.standard_normal(s).astype(np.float32) for s in ((V, C), (B, T, C)))
    ids, labels = (RNG.integers(0, V, (B, T)).astype(np.int32) for _ in range(2))
    ids[0, :2], labels[0, :2] = (0, V - 1), (V - 1, 0)  # the ends
    return table, x, ids, labels


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("V", [12, 11, 9])
def test_values_and_gradients(n, V):
    table, x, ids, labels = operands(V)
    same_with_gradients(
        lambda t, x: model(n, V)(t, x, ids, labels), lambda t, x: whole(t, x, ids, labels), (table, x)
    )


def test_the_vocabulary_of_gpt_2():
    """50257 classes on two ranks: 25129 each, the last of which is padding."""
    V = 50257
    table, x, ids, labels = operands(V)
    assert pad_vocabulary(table, 2).shape == (50258, C)
    same(model(2, V)(table, x, ids, labels), whole(table, x, ids, labels))
    gradient = bf.grad(lambda t: model(2, V)(t, x, ids, labels).mean())(table)
    same(gradient, bf.grad(lambda t: whole(t, x, ids, labels).mean())(table))


def test_collectives():
    """Per token: a sum of embeddings, the maximum, two scalars; backward one of ``x``."""
    args, tokens = operands(12), B * T * 4
    forward = {"psum_invariant": (2, C * tokens + 2 * tokens), "pmax_invariant": (1, tokens)}
    f = model(4, 12)
    assert exchanged(f, *args) == forward
    both = {**forward, "psum_invariant": (3, 2 * C * tokens + 2 * tokens)}
    assert exchanged(bf.value_and_grad(weighted(f), (0, 1)), *args) == both


def test_embeddings_divided_along_the_tokens():
    table, _, ids, _ = operands(12)
    ids = ids[:, :4]
    f = bf.shard_map(
        lambda t: vocabulary_parallel_embedding(t, ids, "v", scatter_dim=1),
        mesh=AbstractMesh((4,), ("v",)), in_specs=P("v"), out_specs=P(None, "v"),
    )  # fmt: skip
    same_with_gradients(f, lambda t: t[ids], (table,))
    assert exchanged(f, table) == {"psum_scatter": (1, ids.size * C * 4)}


def test_large_logits_and_half_precision():
    def loss(logits, labels):
        return vocabulary_parallel_cross_entropy(logits, labels, "v")

    f = bf.shard_map(loss, mesh=AbstractMesh((2,), ("v",)), in_specs=(P(None, None, "v"), P()), out_specs=P())
    logits = bnp.asarray(100 * RNG.standard_normal((B, T, 8)), "bfloat16")
    labels = RNG.integers(0, 8, (B, T))
    got = f(logits, labels)
    assert got.dtype == np.float32
    same(got, nn.softmax_cross_entropy_with_integer_labels(logits, labels))


def test_ids_out_of_range_have_zeros():
    f = bf.shard_map(
        lambda t, i: vocabulary_parallel_embedding(t, i, "v"),
        mesh=AbstractMesh((2,), ("v",)), in_specs=(P("v"), P()), out_specs=P(),
    )  # fmt: skip
    table = np.ones((4, 3), np.float32)
    np.testing.assert_array_equal(f(table, np.array([-1, 0, 4]))[:, 0], [0, 1, 0])


def test_labels_out_of_range_have_no_loss():
    """As on one device; and none of what is padding."""
    f = bf.shard_map(
        lambda x, i: vocabulary_parallel_cross_entropy(x, i, "v", 7),
        mesh=AbstractMesh((2,), ("v",)), in_specs=(P(None, "v"), P()), out_specs=P(),
    )  # fmt: skip
    got = f(RNG.standard_normal((5, 8)).astype(np.float32), np.array([-100, -1, 6, 7, 8]))
    np.testing.assert_array_equal(np.isnan(got), [True, True, False, False, True])
    np.testing.assert_array_equal(np.isinf(got), [False, False, False, True, False])


def test_errors():
    mesh = AbstractMesh((2,), ("v",))
    # each rank has ids of its own, and parts of the rows of all: the sum would be of rows of several tokens
    looked_up = lambda t, i: vocabulary_parallel_embedding(t, i, "v")
    in_loop = lambda t, i: lax.scan(lambda _, row: (None, looked_up(t, row)), None, i)[1]
    for f in (looked_up, in_loop):
        with pytest.raises(errors.ShardingError, match="varying over 'v' is not invariant") as e:
            bf.shard_map(f, mesh=mesh, in_specs=(P("v"), P(None, "v")), out_specs=P())(
                np.ones((4, 3), np.float32), np.zeros((2, 4), np.int32)
            )
        assert "test_vocabulary_parallel.py" in e.value.where
    for spec, classes, message, error in (
        (P("v"), None, "varying over 'v' is not invariant", errors.ShardingError),
        (P(), 9, "a vocabulary of 9, and logits of 8 classes", errors.ValueRangeError),
        (P(), 0, "a vocabulary of 0", errors.ValueRangeError),
    ):
        with pytest.raises(error, match=message):
            bf.shard_map(
                lambda x, i, classes=classes: vocabulary_parallel_cross_entropy(x, i[:2], "v", classes),
                mesh=mesh, in_specs=(P(None, "v"), spec), out_specs=P(),
            )(np.ones((2, 8), np.float32), np.zeros(4, np.int32))  # fmt: skip
    table, x, ids, labels = operands(12)
    with pytest.raises(errors.DtypeError, match="the ids must be integers"):
        model(2, 12)(table, x, x[..., 0], labels)
    with pytest.raises(errors.DtypeError, match="the labels must be integers"):
        model(2, 12)(table, x, ids, x[..., 0])
    with pytest.raises(errors.ShapeError, match=r"need labels of shape \(2, 5\), not \(2, 3\)"):
        model(2, 12)(table, x, ids, labels[:, :3])
