"""Products of vectors, matrices and tensors, einsum, diagonals.

Face over ``dot_general``. Every product is a sum of products over labelled axes (``_contract``): labels
that both operands have and the result keeps are batch axes, labels that it drops are contracted. einsum
orders more than two operands with ``opt_einsum``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from blufunc import _lazy, errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import only_none
from blufunc.core.ir.trace import Array
from blufunc.core.ops import dot as dot_ops
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import shape as shape_ops
from blufunc.core.ops.reduce import reduce_or
from blufunc.core.ops.shape import iota
from blufunc.core.primitives.linear_ops import broadcast_in_dim, reduce_sum, reshape
from blufunc.core.primitives.linear_ops import transpose as permute
from blufunc.numpy import elementwise as ew
from blufunc.numpy.manipulation import moveaxis
from blufunc.numpy.promotion import (
    as_value,
    axis_in,
    broadcast_shapes,
    cast,
    constant,
    dtype_of,
    promote_dtypes,
    static_int,
    summed_dtype,
)

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike

with _lazy.modules(globals()):
    import opt_einsum

# -- contraction by labels -------------------------------------------------------------------------


def _contract(
    x: Array, x_labels: Sequence, y: Array, y_labels: Sequence, out: Sequence, precision: Any, preferred: Any
) -> Array:
    """Contract x and y: sum over the labels that are not in ``out``.

    Labels are distinct within an operand, and sizes agree except that an axis of size 1 goes along with any.
    """
    x, x_labels = _own_labels_summed(x, list(x_labels), y_labels, out)
    y, y_labels = _own_labels_summed(y, list(y_labels), x_labels, out)
    size_y = dict(zip(y_labels, y.aval.shape, strict=True))
    size_x = dict(zip(x_labels, x.aval.shape, strict=True))
    # an axis of size 1 that broadcasts is dropped: only the other operand has it
    x, x_labels = _without(x, x_labels, [k for k in x_labels if size_x[k] == 1 and size_y.get(k, 1) != 1])
    y, y_labels = _without(y, y_labels, [k for k in y_labels if size_y[k] == 1 and size_x.get(k, 1) != 1])
    x, x_labels = _own_labels_summed(x, x_labels, y_labels, out)
    y, y_labels = _own_labels_summed(y, y_labels, x_labels, out)
    shared = [k for k in x_labels if k in y_labels]
    batch = [k for k in out if k in shared]
    inner = [k for k in shared if k not in batch]
    result_labels = [
        *batch,
        *[k for k in x_labels if k not in shared],
        *[k for k in y_labels if k not in shared],
    ]
    result = _dot(
        x, y,
        (tuple([x_labels.index(k) for k in inner]), tuple([y_labels.index(k) for k in inner])),
        (tuple([x_labels.index(k) for k in batch]), tuple([y_labels.index(k) for k in batch])),
        precision, preferred,
    )  # fmt: skip
    return permute(result, tuple([result_labels.index(k) for k in out]))


def _own_labels_summed(x: Array, labels: list, others: Sequence, out: Sequence) -> tuple[Array, list]:
    """x summed over the axes that neither the other operand nor the result has."""
    gone = tuple([d for d, k in enumerate(labels) if k not in others and k not in out])
    if not gone:
        return x, labels
    fold = reduce_or if dtypes.is_bool(x.aval.dtype) else reduce_sum
    return fold(x, gone), [k for d, k in enumerate(labels) if d not in gone]


def _without(x: Array, labels: list, gone: list) -> tuple[Array, list]:
    if not gone:
        return x, labels
    kept = [(k, n) for k, n in zip(labels, x.aval.shape, strict=True) if k not in gone]
    return reshape(x, tuple([n for _, n in kept])), [k for k, _ in kept]


def _dot(x: Array, y: Array, contracted: tuple, batch: tuple, precision: Any, preferred: Any) -> Array:
    dtype = x.aval.dtype
    if y.aval.dtype != dtype and preferred is None:
        x, y = promote_dtypes("dot", x, y)
    if dtypes.is_bool(x.aval.dtype) and preferred not in (None, dtypes.bool_):
        return _dot(
            ops.convert(x, preferred), ops.convert(y, preferred), contracted, batch, precision, preferred
        )
    if dtypes.is_bool(x.aval.dtype):
        x, y = ops.convert(x, dtypes.int32), ops.convert(y, dtypes.int32)
        return ops.ne(_dot(x, y, contracted, batch, precision, None), 0)
    return dot_ops.dot_general(x, y, (contracted, batch), precision, preferred)


def _operands(name: str, x: Any, y: Any, preferred: Any) -> tuple[Array, Array, Any]:
    x, y = promote_dtypes(name, x, y)
    return x, y, dtype_of(preferred)


# -- products --------------------------------------------------------------------------------------


def matmul(
    a: ArrayLike, b: ArrayLike, *, precision: Any = None, preferred_element_type: DTypeLike | None = None
) -> Array:
    """``a @ b``: matmul over the last two axes; the leading ones broadcast.

    A vector on the left is a row, on the right a column, and the axis it lacks is missing in the result.
    ``preferred_element_type`` is the dtype of the result; ``precision`` how exactly devices multiply float32.
    """
    if not (isinstance(a, Array) and isinstance(b, Array) and a.aval.dtype is b.aval.dtype):
        a, b = promote_dtypes("matmul", as_value(a, "matmul"), as_value(b, "matmul"))
    preferred = dtype_of(preferred_element_type)
    left, right = a.aval.shape, b.aval.shape
    if not left or not right:
        raise errors.ShapeError(
            f"matmul takes operands of rank 1 at least, not {a.aval} and {b.aval}.",
            where=source.here(),
            fix="use * to multiply by a number",
        )
    if left[-1] != right[-2 if len(right) > 1 else 0]:
        place, size = ("next to last", right[-2]) if len(right) > 1 else ("only", right[0])
        raise errors.ShapeError(
            f"matmul of shapes {left} and {right}: the last axis of the first has size {left[-1]}, "
            f"the {place} axis of the second {size}.",
            where=source.here(),
            why="these are the axes that are summed over.",
            fix="transpose one of them (x.mT swaps the last two axes), or use bnp.einsum",
        )
    if len(right) <= 2:  # no batch axes on the right: all axes of a but the last are rows
        return _dot(a, b, ((len(left) - 1,), (0,)), ((), ()), precision, preferred)
    lead = broadcast_shapes(left[:-2], right[:-2])  # raises if they do not fit
    axes = list(range(len(lead)))
    a_labels: list[Any] = [*axes[len(axes) - len(left[:-2]) :], *(["m"] if len(left) > 1 else []), "k"]
    b_labels: list[Any] = [*axes[len(axes) - len(right[:-2]) :], "k", "n"]
    out = [*axes, *(["m"] if len(left) > 1 else []), "n"]
    return _contract(a, a_labels, b, b_labels, out, precision, preferred)


def dot(
    a: ArrayLike, b: ArrayLike, *, precision: Any = None, preferred_element_type: DTypeLike | None = None
) -> Array:
    """Contract the last axis of ``a`` with the next to last (or only) one of ``b``.

    The result has the other axes of ``a``, then those of ``b``; with a scalar operand, it multiplies.
    """
    x, y, preferred = _operands("dot", a, b, preferred_element_type)
    if not x.aval.ndim or not y.aval.ndim:
        result = ew.multiply(x, y)
        return result if preferred is None else ops.convert(result, preferred)
    d = max(y.aval.ndim - 2, 0)
    if x.aval.shape[-1] != y.aval.shape[d]:
        raise errors.ShapeError(
            f"dot of shapes {x.aval.shape} and {y.aval.shape}: axis {x.aval.ndim - 1} of the first and {d} of the "
            "second differ.",
            where=source.here(),
            fix="transpose one of them, or use bnp.einsum",
        )
    return _dot(x, y, ((x.aval.ndim - 1,), (d,)), ((), ()), precision, preferred)


def vdot(
    a: ArrayLike, b: ArrayLike, *, precision: Any = None, preferred_element_type: DTypeLike | None = None
) -> Array:
    """The dot product of all elements, with ``a`` conjugated: a scalar."""
    x, y, preferred = _operands("vdot", a, b, preferred_element_type)
    return dot(
        reshape(ops.conj(x), (x.aval.size,)),
        reshape(y, (y.aval.size,)),
        precision=precision,
        preferred_element_type=preferred,
    )


def vecdot(
    x: ArrayLike,
    y: ArrayLike,
    /,
    *,
    axis: int = -1,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """The dot product along one axis, with x conjugated; the other axes broadcast."""
    x, y, preferred = _operands("vecdot", x, y, preferred_element_type)
    x, y = moveaxis(x, axis, -1), moveaxis(y, axis, -1)
    if x.aval.shape[-1] != y.aval.shape[-1]:
        raise errors.ShapeError(
            f"vecdot of shapes {x.aval.shape} and {y.aval.shape} along axis {axis}.",
            where=source.here(),
            fix="the sizes along the axis must agree",
        )
    lead = broadcast_shapes(x.aval.shape[:-1], y.aval.shape[:-1])
    axes: list[Any] = list(range(len(lead)))
    labels = [[*axes[len(axes) - v.aval.ndim + 1 :], "k"] for v in (x, y)]
    return _contract(ops.conj(x), labels[0], y, labels[1], axes, precision, preferred)


def inner(
    a: ArrayLike, b: ArrayLike, *, precision: Any = None, preferred_element_type: DTypeLike | None = None
) -> Array:
    """The sum of products over the last axes of both; with a number, the product."""
    x, y, preferred = _operands("inner", a, b, preferred_element_type)
    if not x.aval.ndim or not y.aval.ndim:
        return ew.multiply(x, y)
    return tensordot(x, y, ((-1,), (-1,)), precision=precision, preferred_element_type=preferred)


def outer(a: ArrayLike, b: ArrayLike, out: None = None) -> Array:
    """The outer product of ``a`` and ``b``, both flattened."""
    only_none("outer", "out", out)
    x, y, _ = _operands("outer", a, b, None)
    m, n = x.aval.size, y.aval.size
    return ew.multiply(
        broadcast_in_dim(reshape(x, (m,)), (m, n), (0,)), broadcast_in_dim(reshape(y, (n,)), (m, n), (1,))
    )


def tensordot(
    a: ArrayLike,
    b: ArrayLike,
    axes: Any = 2,
    *,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """Contract ``axes``: last and first ones, or ``(axes of a, axes of b)``."""
    x, y, preferred = _operands("tensordot", a, b, preferred_element_type)
    if isinstance(axes, (tuple, list)):
        if len(axes) != 2:
            raise errors.ArgumentError(
                f"tensordot: axes is an int or a pair (axes of x, axes of y), not {axes!r:.60}.",
                where=source.here(),
                fix="axes=1, or axes=((1,), (0,))",
            )
        pair = [a if isinstance(a, (tuple, list)) else (a,) for a in axes]
        xs = tuple([axis_in(a, x.aval.ndim, "tensordot") for a in pair[0]])
        ys = tuple([axis_in(a, y.aval.ndim, "tensordot") for a in pair[1]])
    else:
        n = static_int(axes, "tensordot", "axes")
        if not 0 <= n <= min(x.aval.ndim, y.aval.ndim):
            raise errors.ValueRangeError(
                f"tensordot over {n} axes of {x.aval} and {y.aval}, which do not have as many.",
                where=source.here(),
                fix="pass axes= of at most the smaller rank",
            )
        xs, ys = tuple(range(x.aval.ndim - n, x.aval.ndim)), tuple(range(n))
    sizes = [tuple([v.aval.shape[a] for a in d]) for v, d in ((x, xs), (y, ys))]
    if sizes[0] != sizes[1]:
        raise errors.ShapeError(
            f"tensordot of shapes {x.aval.shape} and {y.aval.shape} over axes {xs} and {ys}: sizes {sizes[0]} and "
            f"{sizes[1]}.",
            where=source.here(),
            fix="the axes summed over must have equal sizes",
        )
    return _dot(x, y, (xs, ys), ((), ()), precision, preferred)


def kron(a: ArrayLike, b: ArrayLike) -> Array:
    """The Kronecker product: each element of ``a`` times all of ``b``, as blocks."""
    x, y = promote_dtypes("kron", a, b)
    rank = max(x.aval.ndim, y.aval.ndim)
    a, b = ((1,) * (rank - v.aval.ndim) + v.aval.shape for v in (x, y))
    wide = tuple(n for pair in zip(a, b, strict=True) for n in pair)
    odd, even = tuple(range(1, 2 * rank, 2)), tuple(range(0, 2 * rank, 2))
    product = ew.multiply(
        broadcast_in_dim(reshape(x, a), wide, even), broadcast_in_dim(reshape(y, b), wide, odd)
    )
    return reshape(product, tuple([m * n for m, n in zip(a, b, strict=True)]))


def cross(
    a: ArrayLike, b: ArrayLike, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None
) -> Array:
    """Cross products of 3-vectors (or 2-vectors) along an axis; others broadcast.

    The vectors lie along ``axisa`` of ``a``, ``axisb`` of ``b`` and ``axisc`` of the result, or along ``axis`` of all
    three. Of two vectors of two elements, only the third component of the product is returned.
    """
    x, y = promote_dtypes("cross", as_value(a, "cross"), as_value(b, "cross"))
    axis_x, axis_y, axis = (axisa, axisb, axisc) if axis is None else (axis, axis, axis)
    x, y = moveaxis(x, axis_x, -1), moveaxis(y, axis_y, -1)
    sizes = (x.aval.shape[-1:], y.aval.shape[-1:])
    if any(s not in ((2,), (3,)) for s in sizes):
        raise errors.ShapeError(
            f"cross of shapes {x.aval.shape} and {y.aval.shape}: the axis has 2 or 3 elements.",
            where=source.here(),
            fix="say along which axis the vectors lie: axis=...",
        )
    if sizes == ((2,), (2,)):
        (a, b), (c, d) = [
            [shape_ops.index_in_dim(v, i, -1, keepdims=False) for i in range(2)] for v in (x, y)
        ]
        return ew.subtract(ew.multiply(a, d), ew.multiply(b, c))
    x, y = [
        shape_ops.pad(
            v, constant(0, v.aval.dtype), [*[(0, 0, 0)] * (v.aval.ndim - 1), (0, 3 - v.aval.shape[-1], 0)]
        )
        for v in (x, y)
    ]
    a, b = ([shape_ops.slice_in_dim(v, i, i + 1, axis=-1) for i in range(3)] for v in (x, y))
    parts = [
        ew.subtract(ew.multiply(a[i], b[j]), ew.multiply(a[j], b[i])) for i, j in ((1, 2), (2, 0), (0, 1))
    ]
    return moveaxis(shape_ops.concatenate(parts, parts[0].aval.ndim - 1), -1, axis)


def _check_ranks(takes: str, x: Array, y: Array, *least: int) -> None:
    if x.aval.ndim < least[0] or y.aval.ndim < least[1]:
        raise errors.ShapeError(f"{takes}, not {x.aval} and {y.aval}.", where=source.here(), fix="x[None]")


def matvec(x: ArrayLike, y: ArrayLike, /) -> Array:
    """Matrix-vector products of ``(..., m, n)`` and ``(..., n)``, broadcast."""
    x, y, _ = _operands("matvec", x, y, None)
    _check_ranks("matvec takes matrices and vectors", x, y, 2, 1)
    product = matmul(x, reshape(y, (*y.aval.shape, 1)))
    return reshape(product, product.aval.shape[:-1])


def vecmat(x: ArrayLike, y: ArrayLike, /) -> Array:
    """Products of conjugated vectors ``(..., m)`` and matrices ``(..., m, n)``."""
    x, y, _ = _operands("vecmat", x, y, None)
    _check_ranks("vecmat takes vectors and matrices", x, y, 1, 2)
    product = matmul(reshape(ops.conj(x), (*x.aval.shape[:-1], 1, x.aval.shape[-1])), y)
    return reshape(product, (*product.aval.shape[:-2], product.aval.shape[-1]))


# -- einsum ----------------------------------------------------------------------------------------


def einsum(
    subscripts: Any,
    /,
    *operands: Any,
    out: None = None,
    optimize: Any = "auto",
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """Sums of products in Einstein's notation: ``einsum('bqd,bkd->bqk', q, k)``.

    Args:
      subscripts: labels of the axes of each operand and, after ``->``, of the result; ``...`` stands for any further
        axes, which broadcast. Without ``->``, the result has the labels that occur once, in alphabetic order. Operands
        and lists of labels may also alternate, as in NumPy.
      operands: arrays, promoted to one dtype.
      optimize: how to order more than two operands: an ``opt_einsum`` strategy, or a path, as of ``einsum_path``.
      precision, preferred_element_type: as of ``matmul``, for each product.
    """
    only_none("einsum", "out", out)
    if not isinstance(subscripts, str):
        try:
            subscripts, operands = opt_einsum.parser.convert_interleaved_input((subscripts, *operands))
        except (TypeError, KeyError, ValueError, IndexError):
            raise errors.ArgumentError(
                f"einsum takes subscripts, then arrays, not {subscripts!r:.60} first.",
                where=source.here(),
                fix="einsum('ij,jk->ik', x, y)",
            ) from None
    if not operands:
        raise errors.ArgumentError(
            "einsum needs at least one array.", where=source.here(), fix="einsum('ij,jk->ik', x, y)"
        )
    values = promote_dtypes("einsum", *operands)
    shapes = tuple([v.aval.shape for v in values])
    inputs, out = _labels(subscripts, shapes)
    _check_sizes(subscripts, inputs, shapes)
    preferred = dtype_of(preferred_element_type)
    terms: list[tuple[Array, str]] = [_diagonals(v, labels) for v, labels in zip(values, inputs, strict=True)]
    for positions in _path(inputs, out, shapes, _strategy(optimize)):
        chosen = [terms[i] for i in positions]
        terms = [t for i, t in enumerate(terms) if i not in positions]
        if len(chosen) == 1:
            terms.append(chosen[0])
            continue
        (x, a), (y, b) = chosen
        needed = set(out).union(*[labels for _, labels in terms])
        if terms:
            term = "".join(dict.fromkeys([k for k in a + b if k in needed]))
            # the axes in the order in which the product has them, so that it is not transposed
            both = [k for k in term if k in a and k in b]
            term = "".join(both + [k for k in term if k not in both])
        else:
            term = out
        terms.append((_contract(x, a, y, b, term, precision, preferred), term))
    x, labels = terms[0]
    x, kept = _own_labels_summed(x, list(labels), (), out)
    if preferred is not None:
        x = cast(x, preferred)
    return permute(x, tuple([kept.index(k) for k in out]))


def einsum_path(subscripts: Any, /, *operands: Any, optimize: Any = "greedy") -> tuple[list, Any]:
    """``einsum``'s order of contractions, by ``opt_einsum``: ``(path, report)``."""
    if not isinstance(subscripts, str) or not operands:
        raise errors.ArgumentError(
            f"einsum_path takes subscripts and arrays, not {subscripts!r:.60} first.",
            where=source.here(),
            fix="einsum_path('ij,jk,kl->il', x, y, z)",
        )
    shapes = tuple([as_value(x, "einsum_path").aval.shape for x in operands])
    inputs, out = _labels(subscripts, shapes)
    _check_sizes(subscripts, inputs, shapes)
    try:
        path, report = opt_einsum.contract_path(
            ",".join(inputs) + "->" + out, *shapes, shapes=True, optimize=optimize
        )
    except (KeyError, TypeError, ValueError) as e:
        raise errors.ArgumentError(
            f"einsum_path: optimize={optimize!r:.60}: {e}.", where=source.here(), fix="optimize='greedy'"
        ) from None
    return ["einsum_path", *path], report


def _labels(subscripts: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[list[str], str]:
    """The labels of each operand and of the result, with ``...`` spelled out."""
    text = subscripts.replace(" ", "")
    left, arrow, out = text.partition("->")
    inputs = left.split(",")

    def bad(why: str, fix: str | None = None) -> errors.ShapeError:
        return errors.ShapeError(
            f"einsum({subscripts!r}) of shapes {', '.join(map(str, shapes))}: {why}.",
            where=source.here(),
            fix=fix,
        )

    if len(inputs) != len(shapes):
        raise bad(f"{len(inputs)} terms for {len(shapes)} operands", "separate the terms with commas")
    used = set(text)
    free = [c for c in map(chr, range(ord("A"), ord("Z") + 1)) if c not in used]
    free += [chr(c) for c in range(0x100, 0x140)]
    extra = [
        len(s) - len(t.replace("...", "")) if "..." in t else 0 for t, s in zip(inputs, shapes, strict=True)
    ]
    rest = "".join(free[: max([0, *extra])])
    spelled = []
    for term, s, n in zip(inputs, shapes, extra, strict=True):
        plain = term.replace("...", rest[len(rest) - n :] if n > 0 else "")
        if "." in plain or not all(c.isalnum() for c in plain):
            raise bad(f"{term!r} is not made of letters, digits and one '...'")
        if len(plain) != len(s) or n < 0:
            raise bad(f"{term!r} labels {len(term.replace('...', ''))} axes of an operand of rank {len(s)}")
        spelled.append(plain)
    every = "".join(spelled)
    if arrow:
        result = out.replace("...", rest)
        for c in result:
            if c not in every or result.count(c) > 1:
                raise bad(f"the result has {c!r} {'twice' if c in every else 'and no operand has it'}")
    else:
        result = rest + "".join(sorted(c for c in set(every) if every.count(c) == 1 and c not in rest))
    return spelled, result


def _check_sizes(subscripts: str, inputs: list[str], shapes: Sequence[tuple[int, ...]]) -> None:
    sizes: dict[str, tuple[int, int]] = {}
    for i, (labels, s) in enumerate(zip(inputs, shapes, strict=True)):
        for k, n in zip(labels, s, strict=True):
            first, known = sizes.setdefault(k, (i, n))
            if known == 1:
                sizes[k] = (i, n)
            elif n not in (1, known):
                raise errors.ShapeError(
                    f"einsum({subscripts!r}): label {k!r} has size {known} in operand {first} of shape "
                    f"{shapes[first]} and {n} in operand {i} of shape {s}.",
                    where=source.here(),
                    why="axes of one label go along with each other.",
                    fix="check the order of the labels, or use another label",
                )


def _diagonals(x: Array, labels: str) -> tuple[Array, str]:
    """x with axes of one label merged into their diagonal."""
    for k in dict.fromkeys(labels):
        while labels.count(k) > 1:
            a = labels.index(k)
            b = labels.index(k, a + 1)
            x = diagonal(x, 0, a, b)
            labels = labels[:a] + labels[a + 1 : b] + labels[b + 1 :] + k
    return x, labels


def _strategy(optimize: Any) -> Any:
    """A strategy, or a path as ``einsum_path`` returns it, as part of a key."""
    if optimize is None or isinstance(optimize, (str, bool)):
        return optimize
    return tuple([tuple(step) for step in optimize if step != "einsum_path"])


def _path(inputs: list[str], out: str, shapes: tuple, optimize: Any) -> Sequence[tuple[int, ...]]:
    """The order of pairwise products."""
    if len(inputs) == 1:
        return [(0,)]
    if len(inputs) == 2:
        return [(0, 1)]
    return _optimized(",".join(inputs) + "->" + out, shapes, optimize)


@functools.lru_cache(1024)
def _optimized(subscripts: str, shapes: tuple, optimize: Any) -> Sequence[tuple[int, ...]]:
    if optimize is False or optimize is None:
        n = len(shapes)
        return [(0, 1)] + [(0, k) for k in range(n - 2, 0, -1)]
    strategy = "auto" if optimize is True else list(optimize) if isinstance(optimize, tuple) else optimize
    path, _ = opt_einsum.contract_path(subscripts, *shapes, shapes=True, optimize=strategy)
    pairs: list[tuple[int, ...]] = []
    for step in path:  # opt_einsum may take three at once where order does not matter
        step = tuple(sorted(step))
        if len(step) <= 2:
            pairs.append(step)
            continue
        raise errors.UnsupportedError(f"einsum path with a product of {len(step)} operands: {step}.")
    return pairs


# -- diagonals -------------------------------------------------------------------------------------


def diagonal(a: ArrayLike, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Array:
    """The elements whose position on ``axis2`` is that on ``axis1`` plus ``offset``."""
    x = as_value(a, "diagonal")
    if x.aval.ndim < 2:
        raise errors.ShapeError(
            f"diagonal of {x.aval}.", where=source.here(), fix="x needs two axes at least"
        )
    a, b = axis_in(axis1, x.aval.ndim, "diagonal"), axis_in(axis2, x.aval.ndim, "diagonal")
    offset = static_int(offset, "diagonal", "offset")
    x = moveaxis(x, (a, b), (-2, -1))
    *lead, m, n = x.aval.shape
    size = max(0, min(m, n - offset) if offset >= 0 else min(m + offset, n))
    row, column = max(-offset, 0), max(offset, 0)
    rank = len(lead)
    if not size:
        return broadcast_in_dim(constant(0, x.aval.dtype), (*lead, 0), ())
    # in row-major order, a square's diagonal comes every size + 1 elements: a reshape and a strided slice
    x = shape_ops.slice_(x, (*[0] * rank, row, column), (*lead, row + size, column + size))
    x = reshape(x, (*lead, size * size))
    return shape_ops.slice_in_dim(x, 0, size * size, size + 1, axis=rank)


def diag(v: ArrayLike, k: int = 0) -> Array:
    """Diagonal ``k`` of a matrix; or a matrix with a vector on diagonal ``k``."""
    x = as_value(v, "diag")
    k = static_int(k, "diag", "k")
    if x.aval.ndim == 2:
        return diagonal(x, k)
    if x.aval.ndim != 1:
        raise errors.AxisRangeError(
            f"diag of {x.aval}.", where=source.here(), fix="x has rank 1 or 2; see diagonal"
        )
    n = x.aval.size
    before, after = max(k, 0), max(-k, 0)
    line = shape_ops.pad(x, constant(0, x.aval.dtype), [(before, after, 0)])
    size = n + abs(k)
    row, column = (iota(dtypes.int32, (size, size), d) for d in (0, 1))
    mask = ops.eq_p.bind(ops.add(row, k) if k else row, column)
    return ops.select(mask, broadcast_in_dim(line, (size, size), (1,)), constant(0, x.aval.dtype))


def diagflat(v: ArrayLike, k: int = 0) -> Array:
    """The matrix with the elements of ``v`` on diagonal ``k``."""
    x = as_value(v, "diagflat")
    return diag(reshape(x, (x.aval.size,)), k)


def trace(
    a: ArrayLike,
    offset: int = 0,
    axis1: int = 0,
    axis2: int = 1,
    dtype: DTypeLike | None = None,
    out: None = None,
) -> Array:
    """Sum a diagonal: positions ``i`` on ``axis1``, ``i + offset`` on ``axis2``."""
    only_none("trace", "out", out)
    x = as_value(a, "trace")
    want = summed_dtype(x.aval.dtype) if dtype is None else dtypes.as_dtype(dtype)
    line = diagonal(cast(x, dtypes.int32 if dtypes.is_bool(want) else want), offset, axis1, axis2)
    return cast(reduce_sum(line, (line.aval.ndim - 1,)), want)
