"""Rows against JAX: reductions, shapes, indexing, matmuls, sorts, searches."""

import numpy as np

from tests.peers.peer_row import A, Row

X, D = A((3, 4)), A((3, 4), distinct=True)
INDICES = A((5,), 0, 2, dtype="int32")


def of(name, *args, **more):
    """A row whose options are those of the function."""
    own = {k: more.pop(k) for k in list(more) if k in Row.__dataclass_fields__}
    return Row(name, args or (X,), options=more, **own)


def fun(name, f, *args, **more):
    """A row with a function of its own."""
    return Row(name, args or (X,), f, **more)


REDUCTIONS = [
    *(
        of(f"np.{n}")
        for n in "sum mean var std prod max min ptp median nansum nanmean nanvar nanmax nanmin".split()
    ),
    *(
        of(f"np.{n} over an axis", D, axis=1)
        for n in "sum mean var std max min cumsum cumprod median amax".split()
    ),
    *(
        of(f"np.{n}", D, axis=0, order=0)
        for n in "argmax argmin nanargmax count_nonzero any all argsort".split()
    ),
    of("np.var with ddof", ddof=1, axis=0, keepdims=True),
    of("np.average", X),
    fun("np.average with weights", lambda m, x, w: m.np.average(x, axis=1, weights=w), X, A((3, 4), 0.5, 2)),
    of("np.quantile", D, q=0.3, axis=1, tol=4),
    of("np.percentile", D, q=np.float32(70.0), axis=0, dtypes=("float32",), tol=4),
    of("np.nanmedian", D, axis=1),
    of("np.nanquantile", D, q=0.25, axis=1, tol=4),
    of("np.nanstd", D, axis=1),
    of("np.nancumsum", X, axis=1),
    of("np.cumulative_sum", X, axis=1, include_initial=True),
    of("np.cov", X, tol=2),
    of("np.corrcoef", X, tol=4),
    of("np.linalg.norm", X),
    of("np.linalg.norm of rows", X, axis=1, ord=3),
    fun("np.sum where", lambda m, x, w: m.np.sum(x, axis=1, where=w), X, A((3, 4), dtype="bool")),
    of("scipy.special.logsumexp", X, axis=1),
    *(of(f"lax.{n}", X, axis=1) for n in "cumsum cumprod cumlogsumexp".split()),
    *(of(f"lax.{n}", D, axis=1, reverse=True) for n in "cummax cummin".split()),
]
SHAPES = [
    of("np.reshape", shape=(4, 3)),
    of("np.transpose"),
    of("np.swapaxes", axis1=0, axis2=1),
    of("np.moveaxis", A((2, 3, 4)), source=0, destination=2),
    of("np.expand_dims", axis=1),
    of("np.ravel"),
    of("np.flip", axis=1),
    of("np.flipud"),
    of("np.roll", shift=2, axis=1),
    of("np.rot90"),
    of("np.repeat", repeats=3, axis=1),
    of("np.tile", reps=(2, 2)),
    of("np.broadcast_to", A((4,)), shape=(3, 4)),
    of("np.triu"),
    of("np.tril", k=1),
    of("np.diag"),
    of("np.diagonal", offset=1),
    of("np.trace"),
    of("np.diff", n=2),
    of("np.ediff1d", order=1),
    of("np.gradient", A((6,))),
    of("np.trapezoid"),
    of("np.vander", A((4,)), N=3),
    of("np.unwrap", A((6,), -9, 9)),
    of("np.apply_along_axis", X, fun=lambda m, x: m.np.apply_along_axis(lambda v: v * v.sum(), 1, x)),
    *(
        of(f"np.pad {mode}", fun=lambda m, x, mode=mode: m.np.pad(x, ((1, 2), (2, 1)), mode=mode))
        for mode in "constant edge reflect symmetric wrap linear_ramp mean maximum".split()
    ),
    fun("np.concatenate", lambda m, x, y: m.np.concatenate([x, y], axis=1), X, A((3, 2))),
    fun("np.stack", lambda m, x, y: m.np.stack([x, y], axis=1), X, X),
    fun("np.hstack", lambda m, x, y: m.np.hstack([x, y]), X, X),
    fun("np.vstack", lambda m, x, y: m.np.vstack([x, y]), X, X),
    fun("np.dstack", lambda m, x, y: m.np.dstack([x, y]), X, X),
    fun("np.column_stack", lambda m, x, y: m.np.column_stack([x, y]), A((3,)), X),
    fun("np.block", lambda m, x, y: m.np.block([[x, y], [y, x]]), X, X),
    fun("np.split", lambda m, x: m.np.split(x, 2, axis=1)),
    fun("np.array_split", lambda m, x: m.np.array_split(x, 3, axis=1)),
    fun("np.insert", lambda m, x: m.np.insert(x, 1, 5.0, axis=1)),
    fun("np.delete", lambda m, x: m.np.delete(x, 1, axis=1)),
    fun("np.append", lambda m, x, y: m.np.append(x, y, axis=0), X, X),
    fun("np.meshgrid", lambda m, x, y: m.np.meshgrid(x, y), A((3,)), A((4,))),
    fun("lax.pad", lambda m, x: m.lax.pad(x, m.np.zeros((), x.dtype), ((1, -1, 0), (0, 2, 1)))),
    fun("lax.rev", lambda m, x: m.lax.rev(x, (0, 1))),
    fun("lax.collapse", lambda m, x: m.lax.collapse(x, 0, 2)),
    fun("lax.broadcast_in_dim", lambda m, x: m.lax.broadcast_in_dim(x, (3, 2, 4), (0, 2))),
    fun("lax.slice", lambda m, x: m.lax.slice(x, (0, 1), (3, 4), (2, 1))),
    fun(
        "lax.dynamic_slice",
        lambda m, x, i: m.lax.dynamic_slice(x, (i, i), (2, 2)),
        X,
        A((), 0, 3, dtype="int32"),
    ),
    fun(
        "lax.dynamic_update_slice",
        lambda m, x, y, i: m.lax.dynamic_update_slice(x, y, (i, i)),
        X,
        A((2, 2)),
        A((), 0, 3, dtype="int32"),
    ),
]
INDEXING = [
    fun("x[i]", lambda m, x, i: x[i], X, INDICES),
    fun("x[:, i]", lambda m, x, i: x[:, i], X, INDICES),
    fun("x[i, j]", lambda m, x, i: x[i, i + 1], X, INDICES),
    fun("x[::2, None, ..., -1]", lambda m, x: x[::2, None, ..., -1]),
    fun("x[mask]", lambda m, x: x[np.array([True, False, True])]),
    fun("x.at[i].set", lambda m, x, y: x.at[np.array([2, 0])].set(y), X, A((2, 4))),
    *(
        fun(f"x.at[i].{op}", lambda m, x, y, i, op=op: getattr(x.at[i], op)(y), X, A((5, 4), 0.5, 2), INDICES)
        for op in ("add", "min", "max")
    ),
    fun(
        "x.at[i].multiply",
        lambda m, x, y: x.at[np.array([2, 0])].multiply(y, unique_indices=True),
        X,
        A((2, 4)),
    ),
    fun(
        "x.at[mask].set",
        lambda m, x, w: x.at[w].set(0.5),
        X,
        A((3, 4), dtype="bool"),
        order=0,
        jit=False,
        batch=False,
    ),
    fun(
        "x.at[i].get with fill",
        lambda m, x, i: x.at[i].get(mode="fill", fill_value=9.0),
        X,
        A((5,), -5, 5, dtype="int32"),
    ),
    fun("np.take", lambda m, x, i: m.np.take(x, i, axis=1), X, INDICES),
    fun(
        "np.take_along_axis", lambda m, x, i: m.np.take_along_axis(x, i, 1), X, A((3, 2), 0, 3, dtype="int32")
    ),
    fun(
        "np.put_along_axis",
        lambda m, x, y: m.np.put_along_axis(x, np.array([[0], [1], [3]]), y, 1, inplace=False),
        X,
        A((3, 1)),
    ),
    fun(
        "np.choose",
        lambda m, i, x, y: m.np.choose(i, [x, y], mode="clip"),
        A((3, 4), 0, 1, dtype="int32"),
        X,
        X,
    ),
    fun("np.select", lambda m, x: m.np.select([x > 1, x > 0], [x * x, -x], 3.0)),
    fun("np.piecewise", lambda m, x: m.np.piecewise(x, [x < 0, x >= 0], [lambda v: -v, lambda v: v**2])),
    fun(
        "np.compress",
        lambda m, x: m.np.compress(np.array([True, False, True]), x, axis=0),
        order=0,
        jit=False,
        batch=False,
    ),
    fun("np.nonzero with size", lambda m, x: m.np.nonzero(x > 0, size=5, fill_value=7), order=0),
    fun(
        "np.unique with size", lambda m, x: m.np.unique(x, size=4), A((9,), 0, 4, dtype="int32"), batch=False
    ),
    fun(
        "np.interp",
        lambda m, x, p: m.np.interp(x, np.linspace(-2, 2, 5).astype("float32"), p),
        A((6,)),
        A((5,)),
        dtypes=("float32",),
    ),
    fun("np.searchsorted", lambda m, x, v: m.np.searchsorted(m.np.sort(x), v), A((9,)), A((4,)), order=0),
    fun(
        "np.digitize",
        lambda m, v: m.np.digitize(v, np.array([-1.0, 0.0, 1.0], "float32")),
        A((6,)),
        order=0,
        dtypes=("float32",),
    ),
    fun("np.histogram", lambda m, x: m.np.histogram(x, bins=5, range=(-2, 2)), A((20,)), order=0),
    fun("np.bincount", lambda m, x: m.np.bincount(x, length=6), A((9,), 0, 5, dtype="int32"), batch=False),
    fun(
        "np.isin", lambda m, x, y: m.np.isin(x, y), A((9,), 0, 9, dtype="int32"), A((3,), 0, 9, dtype="int32")
    ),
    fun(
        "np.union1d with size",
        lambda m, x, y: m.np.union1d(x, y, size=9),
        A((4,), 0, 9, dtype="int32"),
        A((4,), 0, 9, dtype="int32"),
        batch=False,
    ),
    fun(
        "np.intersect1d with size",
        lambda m, x, y: m.np.intersect1d(x, y, size=4, fill_value=-1),
        A((4,), 0, 5, dtype="int32"),
        A((4,), 0, 5, dtype="int32"),
        batch=False,
    ),
]
SORTING = [
    of("np.sort", D, axis=1),
    of("np.sort of columns", D, axis=0),
    fun("np.partition", lambda m, x: m.np.sort(m.np.partition(x, 2, axis=1)[:, :2]), D, order=0),
    of("np.lexsort", order=0, fun=lambda m, x: m.np.lexsort((x[0], x[1]))),
    fun("lax.sort of several", lambda m, x, y: m.lax.sort((x, y), dimension=1, num_keys=1), D, X),
    fun("lax.top_k", lambda m, x: m.lax.top_k(x, 2), D),
]
PRODUCTS = [
    fun("np.matmul", lambda m, x, y: m.np.matmul(x, y), X, A((4, 5))),
    fun("np.matmul of batches", lambda m, x, y: x @ y, A((2, 3, 4)), A((4, 5))),
    fun("np.dot", lambda m, x, y: m.np.dot(x, y), X, A((4,))),
    fun("np.vdot", lambda m, x, y: m.np.vdot(x, y), A((4,), dtype="complex"), A((4,), dtype="complex")),
    fun("np.inner", lambda m, x, y: m.np.inner(x, y), X, A((5, 4))),
    fun("np.outer", lambda m, x, y: m.np.outer(x, y), A((3,)), A((4,))),
    fun("np.kron", lambda m, x, y: m.np.kron(x, y), A((2, 2)), A((2, 3))),
    fun("np.cross", lambda m, x, y: m.np.cross(x, y), A((4, 3)), A((4, 3))),
    fun(
        "np.tensordot",
        lambda m, x, y: m.np.tensordot(x, y, axes=((1, 2), (0, 1))),
        A((2, 3, 4)),
        A((3, 4, 5)),
    ),
    fun("np.einsum", lambda m, x, y, z: m.np.einsum("ij,jk,ik->i", x, y, z), X, A((4, 5)), A((3, 5)), tol=2),
    fun("np.einsum with a diagonal", lambda m, x: m.np.einsum("ii->i", x), A((3, 3))),
    fun("np.vecdot", lambda m, x, y: m.np.vecdot(x, y), X, X),
    fun("np.convolve", lambda m, x, y: m.np.convolve(x, y, mode="same"), A((7,)), A((3,))),
    fun("np.correlate", lambda m, x, y: m.np.correlate(x, y, mode="full"), A((7,)), A((3,))),
    fun("np.polyval", lambda m, c, x: m.np.polyval(c, x), A((4,)), A((5,))),
    fun("np.polymul", lambda m, x, y: m.np.polymul(x, y), A((4,)), A((3,))),
    fun(
        "lax.dot_general",
        lambda m, x, y: m.lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))),
        A((2, 3, 4)),
        A((2, 4, 5)),
    ),
]
ROWS = [*REDUCTIONS, *SHAPES, *INDEXING, *SORTING, *PRODUCTS]
