"""Sparse arrays compared with dense ones."""

import itertools

import numpy as np
import pytest
import scipy.sparse

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.experimental import sparse

RNG = np.random.default_rng(0)


def dense(*shape, share=0.4):
    return bnp.asarray((RNG.random(shape) * (RNG.random(shape) < share)).astype("float32"))


def same(found, wanted):
    np.testing.assert_allclose(np.asarray(sparse.todense(found)), np.asarray(wanted), rtol=1e-5, atol=1e-6)


M = dense(2, 3, 4, 5)
R = dense(2, 4, 5, 6, share=1)
LAYOUTS = [(b, d) for b, d in itertools.product(range(5), repeat=2) if b + d <= 4]
FUNCTIONS = {
    "sum": (lambda x: sparse.bcoo_reduce_sum(x, axes=(0, 2)), lambda m: m.sum((0, 2))),
    "slice": (lambda x: x[1:, 0:3:2, 1, 1:4], lambda m: m[1:, 0:3:2, 1, 1:4]),
    "dynamic slice": (
        lambda x: sparse.bcoo_dynamic_slice(x, (1, 1, 0, 3), (1, 2, 3, 2)),
        lambda m: lax.dynamic_slice(m, (1, 1, 0, 3), (1, 2, 3, 2)),
    ),
    "rev": (lambda x: sparse.bcoo_rev(x, (0, 1, 3)), lambda m: m[::-1, ::-1, :, ::-1]),
    "times dense": (lambda x: x * M, lambda m: m * M),
    "times sparse": (lambda x: x * x, lambda m: m * m),
    "arithmetic": (lambda x: 2 * x / 4 - (-x), lambda m: 1.5 * m),
    "duplicates": (lambda x: (x + x).sum_duplicates(), lambda m: 2 * m),
    "order": (lambda x: (x + x).sort_indices(), lambda m: 2 * m),
    "extract": (lambda x: sparse.bcoo_extract(x, 3 * M), lambda m: 3 * m),
    "new batches": (
        lambda x: sparse.bcoo_broadcast_in_dim(x, shape=(7, 2, 3, 4, 5), broadcast_dimensions=(1, 2, 3, 4)),
        lambda m: bnp.broadcast_to(m, (7, 2, 3, 4, 5)),
    ),
    "new dimension": (
        lambda x: sparse.bcoo_broadcast_in_dim(x, shape=(2, 3, 2, 4, 5), broadcast_dimensions=(0, 1, 3, 4)),
        lambda m: bnp.broadcast_to(m[:, :, None], (2, 3, 2, 4, 5)),
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_functions_of_each_layout(layout):
    x = sparse.BCOO.fromdense(M, n_batch=layout[0], n_dense=layout[1])
    same(x, M)
    for name, (of_sparse, of_dense) in FUNCTIONS.items():
        np.testing.assert_allclose(
            np.asarray(of_sparse(x).todense()), np.asarray(of_dense(M)), rtol=1e-5, atol=1e-6, err_msg=name
        )
    for n_batch, n_dense in LAYOUTS[:: 1 + len(LAYOUTS) // 5]:
        same(x.update_layout(n_batch=n_batch, n_dense=n_dense), M)
    for d in range(4 - layout[1]):
        same(sparse.bcoo_concatenate([x, x], dimension=d), bnp.concatenate([M, M], d))


@pytest.mark.parametrize("n_batch", [0, 1])
@pytest.mark.parametrize("n_dense", [0, 1, 2])
def test_contractions(n_batch, n_dense):
    x = sparse.BCOO.fromdense(M, n_batch=n_batch, n_dense=n_dense)
    over = (((2, 3), (1, 2)), ((0,), (0,)) if n_batch else ((), ()))
    want = lax.dot_general(M, R, over)
    same(sparse.bcoo_dot_general(x, R, dimension_numbers=over), want)
    same(sparse.bcoo_dot_general(x, sparse.BCOO.fromdense(R, n_batch=n_batch), dimension_numbers=over), want)
    turned = tuple(pair[::-1] for pair in over)
    same(sparse.bcoo_dot_general(R, x, dimension_numbers=turned), lax.dot_general(R, M, turned))


A, B, V = dense(5, 6), dense(6, 3), dense(6, share=1)


@pytest.mark.parametrize("kind", ["BCOO", "BCSR", "COO", "CSR", "CSC"])
def test_matrices(kind):
    x = getattr(sparse, kind).fromdense(A)
    same(x, A)
    for got, want in ((x @ B, A @ B), (x @ V, A @ V), (B.T @ x.T, B.T @ A.T), (x.T, A.T)):
        same(got, want)
    same(bf.jit(lambda y: y @ B)(x), A @ B)
    same(sparse.eye(4, 5, 1, sparse_format=kind.lower()), bnp.eye(4, 5, 1))


def test_reshape_and_transpose():
    x = sparse.BCOO.fromdense(M)
    same(x.reshape(6, -1), M.reshape(6, 20))
    same(x.transpose((2, 0, 3, 1)), M.transpose(2, 0, 3, 1))
    same(sparse.BCOO.fromdense(M, n_batch=2).reshape(6, 20), M.reshape(6, 20))
    with pytest.raises(errors.UnsupportedError, match="update_layout"):
        sparse.BCOO.fromdense(M, n_batch=1).T


def test_derivatives():
    x, f = sparse.BCOO.fromdense(A), lambda m, v: bnp.tanh(m @ v).sum()
    want = bf.grad(f)(A, V) * (A != 0)
    same(sparse.grad(f)(x, V), want)
    value, slope = sparse.value_and_grad(f)(x, V)
    same(slope, want)
    np.testing.assert_allclose(value, f(A, V), rtol=1e-6)
    for transform in (sparse.jacrev, sparse.jacfwd):
        same(transform(lambda m: m @ V)(x), bf.jacrev(lambda m: m @ V)(A) * (A != 0))


def test_vmap():
    m = dense(3, 5, 6)
    for kind in (sparse.BCOO, sparse.BCSR):
        x = kind.fromdense(m, n_batch=1)
        same(bf.jit(bf.vmap(lambda y: y @ V))(x), m @ V)
    same(bf.vmap(lambda y: 2 * y)(sparse.BCOO.fromdense(m, n_batch=1)), 2 * m)


def test_sparsify():
    x = sparse.BCOO.fromdense(A)
    same(sparse.sparsify(lambda y, v: -(2 * y + y).T.sum(1))(x, V), -(3 * A).T.sum(1))
    same(bf.jit(sparse.sparsify(lambda y, v: bnp.sin(y) @ (v * 2)))(x, V), bnp.sin(A) @ (V * 2))
    with pytest.raises(errors.UnsupportedError, match="sparsify of a function with cos"):
        sparse.sparsify(bnp.cos)(x)


def test_making():
    same(sparse.BCOO.from_scipy_sparse(scipy.sparse.csr_matrix(np.asarray(A))), A)
    same(sparse.empty((2, 3)), bnp.zeros((2, 3)))
    x = sparse.random_bcoo(bf.random.key(0), (4, 5), nse=0.4, n_batch=1)
    assert x.nse == 2 and (sparse.todense(x) != 0).sum() == 8
    with pytest.raises(errors.ShapeError, match="no array of shape"):
        sparse.BCOO((bnp.ones(3), bnp.zeros((2, 2), "int32")), shape=(4, 4))
    at = bnp.array([[0, 1], [3, 2]])
    sampled = sparse.bcoo_dot_general_sampled(A, B, at, dimension_numbers=(((1,), (0,)), ((), ())))
    np.testing.assert_allclose(sampled, np.asarray(A @ B)[[0, 3], [1, 2]], rtol=1e-6)


def test_iteration_ends_and_arrays_are_asked_for():
    m = sparse.BCOO.fromdense(np.eye(2, dtype=np.float32))
    assert [row.todense().tolist() for row in m] == [[1, 0], [0, 1]]
    with pytest.raises(errors.UnsupportedError, match="quotient of sparse arrays"):
        m / m
    with pytest.raises(errors.BlufuncError):
        bnp.asarray(m)
    assert float(m.sum()) == 2.0 and m.sum(0).todense().tolist() == [1, 1]


INDICES = [
    np.int64(-1),
    (bnp.int32(-3), np.array(1)),
    (..., 0),
    (0, ...),
    ...,
    (slice(1, None), ..., np.int32(0)),
]


@pytest.mark.parametrize("index", INDICES)
def test_static_indices(index):
    dense = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    got = sparse.BCOO.fromdense(dense)[index]
    np.testing.assert_array_equal(got.todense(), dense[index])


@pytest.mark.parametrize("index", [(..., ...), True, (0, 0, 0, 0), np.array([0, 1]), bnp.ones((), bool), 1.0])
def test_indices_that_are_refused(index):
    m = sparse.BCOO.fromdense(np.ones((3, 2, 2), np.float32))
    with pytest.raises(errors.UnsupportedError, match="BCOO"):
        m[index]


@pytest.mark.parametrize(
    ("shape", "index", "axis"),
    [((3, 2), 3, 0), ((3, 2), -4, 0), ((3, 2), (0, bnp.int32(2)), 1), ((0, 2), 0, 0), ((0, 2), -1, 0)],
)
def test_indices_out_of_range(shape, index, axis):
    m = sparse.BCOO((np.zeros(0, np.float32), np.zeros((0, 2), np.int32)), shape=shape)
    with pytest.raises(errors.IndexRangeError, match=f"axis {axis} of a BCOO"):
        m[index]


def test_powers_and_comparisons():
    twice = sparse.BCOO((bnp.array([1.0, 2.0]), bnp.array([[1], [1]])), shape=(3,))
    np.testing.assert_array_equal((twice**2).todense(), [0, 9, 0])
    for exponent in (np.int32(2), bnp.float32(2), np.array(2.0)):
        np.testing.assert_array_equal((twice**exponent).todense(), [0, 9, 0])
    with pytest.raises(errors.UnsupportedError, match="power of a sparse"):
        bf.jit(lambda n: (twice**n).todense())(2.0)
    for exponent in (0, -1, np.nan, "a", 1j, bnp.zeros(()), bnp.ones(3), twice):
        with pytest.raises(errors.UnsupportedError, match="power of a sparse"):
            twice**exponent
    for other in (0, np.ones(3), twice):
        with pytest.raises(errors.UnsupportedError, match="comparison of a sparse"):
            twice == other
    assert twice != "a name"
