"""``sparsify``, derivatives in sparse arguments, and arrays to begin with.

A face, above the transforms. ``sparsify`` traces a function with dense types and evaluates its jaxpr on sparse arrays:
the operations in ``RULES`` have sparse results, and any other takes dense operands only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import blufunc.numpy as bnp
from blufunc import errors, lax, random
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Jaxpr, Literal
from blufunc.core.ir.trace import Array
from blufunc.core.programs.simplify import inline_calls
from blufunc.core.pytree import tree
from blufunc.experimental.sparse import bcoo, products
from blufunc.experimental.sparse.base import JAXSparse, refused
from blufunc.experimental.sparse.bcoo import BCOO
from blufunc.experimental.sparse.compressed import BCSR
from blufunc.experimental.sparse.matrices import COO, CSC, CSR
from blufunc.transforms.arguments import ShapeDtypeStruct
from blufunc.transforms.autodiff import grad as dense_grad
from blufunc.transforms.autodiff import jacobian as dense_jacobian
from blufunc.transforms.staging.make_jaxpr import make_jaxpr

__all__ = [
    "empty", "eye", "grad", "jacfwd", "jacobian", "jacrev", "random_bcoo", "sparsify", "todense", "value_and_grad",
]  # fmt: skip

_FORMATS = {"bcoo": BCOO, "bcsr": BCSR, "coo": COO, "csr": CSR, "csc": CSC}


def _is_sparse(x: Any) -> bool:
    return isinstance(x, JAXSparse)


def todense(arr: Any) -> Array:
    """The array with all elements, of a sparse or a dense one."""
    return arr.todense() if _is_sparse(arr) else bnp.asarray(arr)


def _of_format(x: BCOO, kind: str) -> Any:
    if kind == "bcoo":
        return x
    if kind not in _FORMATS:
        raise errors.ValueRangeError(
            f"there is no sparse format {kind!r:.60}.", where=source.here(), fix=" or ".join(_FORMATS)
        )
    if kind == "csc":
        return _of_format(x.transpose(), "csr").transpose()
    if kind == "coo":
        return COO((x.data, x.indices[:, 0], x.indices[:, 1]), shape=x.shape)
    rows = BCSR.from_bcoo(x)
    return rows if kind == "bcsr" else CSR((rows.data, rows.indices, rows.indptr), shape=x.shape)


def empty(
    shape: Sequence[int],
    dtype: Any = "float32",
    index_dtype: Any = "int32",
    sparse_format: str = "bcoo",
    **options: Any,
) -> Any:
    """An array without specified elements.

    Returns:
      a sparse array of that format.
    """
    return _of_format(
        bcoo.bcoo_fromdense(bnp.zeros(shape, dtype), nse=0, index_dtype=index_dtype, **options), sparse_format
    )


def eye(
    N: int,
    M: int | None = None,
    k: int = 0,
    dtype: Any = "float32",
    index_dtype: Any = "int32",
    sparse_format: str = "bcoo",
    **options: Any,
) -> Any:
    """A matrix with ones on a diagonal.

    Returns:
      a sparse matrix of that format, of N rows.
    """
    columns = N if M is None else M
    count = max(0, min(N + min(k, 0), columns - max(k, 0)))
    row = bnp.arange(count, dtype=index_dtype) + max(-k, 0)
    found = BCOO(
        (bnp.ones(count, dtype), bnp.stack([row, row + k], -1)),
        shape=(N, columns),
        indices_sorted=True,
        unique_indices=True,
    )
    return _of_format(bcoo.bcoo_update_layout(found, **options) if options else found, sparse_format)


def random_bcoo(
    key: Any,
    shape: Sequence[int],
    *,
    dtype: Any = "float32",
    indices_dtype: Any = None,
    nse: float = 0.2,
    n_batch: int = 0,
    n_dense: int = 0,
    unique_indices: bool = True,
    sorted_indices: bool = False,
    generator: Callable = random.uniform,
    **options: Any,
) -> BCOO:
    """Random elements at random places.

    Args:
      nse: the share of places in each batch, below 1, or their number.
      generator: of the elements: ``generator(key, shape, dtype)``.
    """
    shape = tuple(shape)
    batch, inner = shape[:n_batch], shape[n_batch : len(shape) - n_dense]
    places = functools.reduce(lambda a, b: a * b, inner, 1)
    count = int(-(-nse * places // 1)) if 0 < nse < 1 else int(nse)
    index_key, data_key = random.split(key)

    def one(own):
        draw = functools.partial(random.choice, own, places, (count,), replace=not unique_indices)
        flat = bnp.sort(draw()) if sorted_indices else draw()
        return bnp.stack(bnp.unravel_index(flat, inner), -1) if inner else bnp.zeros((count, 0), "int32")

    keys = random.split(index_key, batch) if batch else index_key
    indices = bcoo.mapped(one, n_batch)(keys).astype(indices_dtype or "int32")
    data = generator(data_key, (*batch, count, *shape[len(shape) - n_dense :]), dtype, **options)
    return BCOO((data, indices), shape=shape, indices_sorted=sorted_indices, unique_indices=unique_indices)


# -- derivatives ---------------------------------------------------------------------------------------------


def _of_data(transform: Callable) -> Callable:
    """A transform that differentiates in the elements of sparse arguments."""

    @functools.wraps(transform)
    def sparse_transform(fun: Callable, argnums: Any = 0, has_aux: bool = False, **options: Any) -> Callable:
        chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)

        @functools.wraps(fun)
        def differentiated(*args: Any, **kwargs: Any) -> Any:
            places = [i % len(args) for i in chosen]
            wrt = [args[i] for i in places]
            data = [tree.map(lambda x: x.data if _is_sparse(x) else x, a, is_leaf=_is_sparse) for a in wrt]

            def of_data(*given: Any) -> Any:
                whole = list(args)
                for i, sample, new in zip(places, wrt, given, strict=True):
                    whole[i] = _with_data(sample, new)
                return fun(*whole, **kwargs)

            every = tuple(range(len(places)))
            out = transform(of_data, argnums=every, has_aux=has_aux, **options)(*data)
            restore = lambda found: _restored(found, wrt, isinstance(argnums, int))
            if transform is dense_grad.value_and_grad:
                return out[0], restore(out[1])
            return (restore(out[0]), out[1]) if has_aux else restore(out)

        return differentiated

    return sparse_transform


def _with_data(sample: Any, data: Any) -> Any:
    """A pytree whose sparse arrays have other elements."""
    leaves, structure = tree.flatten(sample, is_leaf=_is_sparse)
    return tree.unflatten(
        structure, [_replaced(x, d) for x, d in zip(leaves, tree.leaves(data), strict=True)]
    )


def _replaced(x: Any, data: Any) -> Any:
    if not _is_sparse(x):
        return data
    children, structure = tree.flatten(x)
    return tree.unflatten(structure, [data, *children[1:]])


def _restored(found: Any, wrt: Sequence[Any], single: bool) -> Any:
    """Gradients of elements as sparse arrays with the indices of their arguments."""
    out = [_with_data(sample, g) for sample, g in zip(wrt, found, strict=True)]
    return out[0] if single else tuple(out)


grad = _of_data(dense_grad.grad)
value_and_grad = _of_data(dense_grad.value_and_grad)


def _jacobian(transform: Callable) -> Callable:
    @functools.wraps(transform)
    def sparse_jacobian(fun: Callable, argnums: Any = 0, has_aux: bool = False, **options: Any) -> Callable:
        def differentiated(*args: Any, **kwargs: Any) -> Any:
            chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)
            if not any(_is_sparse(args[i]) for i in chosen):
                return transform(fun, argnums, has_aux=has_aux, **options)(*args, **kwargs)
            if len(chosen) > 1 or has_aux:
                raise refused("a Jacobian in several arguments, some sparse", "one of argnums at a time")
            (place,) = chosen
            sample = args[place]

            def of_data(data: Any) -> Any:
                whole = list(args)
                whole[place] = _replaced(sample, data)
                return fun(*whole, **kwargs)

            found = transform(of_data, **options)(sample.data)
            return tree.map(lambda rows: _rows(rows, sample), found)

        return differentiated

    return sparse_jacobian


def _rows(rows: Array, sample: BCOO) -> BCOO:
    """A Jacobian in elements as a sparse array: dimensions of results are batches."""
    outer = rows.shape[: rows.ndim - sample.data.ndim]
    indices = bnp.broadcast_to(sample.indices, (*outer, *sample.indices.shape))
    return BCOO((rows, indices), shape=(*outer, *sample.shape))


jacfwd, jacrev = _jacobian(dense_jacobian.jacfwd), _jacobian(dense_jacobian.jacrev)
jacobian = jacrev

# -- sparsify ------------------------------------------------------------------------------------------------


def sparsify(f: Callable, use_tracer: bool = False) -> Callable:
    """A function of arrays as one that takes and returns sparse arrays, too.

    Args:
      use_tracer: accepted for compatibility.
    Raises:
      UnsupportedError: an operation in it has no sparse form.
    """

    @functools.wraps(f)
    def sparse_function(*args: Any, **kwargs: Any) -> Any:
        args = tree.map(
            lambda x: x.to_bcoo() if _is_sparse(x) and not isinstance(x, BCOO) else x,
            args,
            is_leaf=_is_sparse,
        )
        kind = lambda x: ShapeDtypeStruct(x.shape, x.dtype) if _is_sparse(x) else x
        types = tree.map(kind, args, is_leaf=_is_sparse)
        jaxpr, shapes = make_jaxpr(lambda *xs: f(*xs, **kwargs), return_shape=True)(*types)
        leaves = tree.leaves(args, is_leaf=_is_sparse)
        outs = _evaluated(inline_calls(jaxpr), leaves)
        return tree.unflatten(tree.structure(shapes), outs)

    return sparse_function


def _evaluated(jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
    values = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True)) | dict(
        zip(jaxpr.invars, args, strict=True)
    )
    read = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]
    for eqn in jaxpr.eqns:
        operands = [read(a) for a in eqn.invars]
        if any(isinstance(x, BCOO) for x in operands):
            rule = RULES.get(eqn.prim.name)
            if rule is None:
                raise refused(
                    f"sparsify of a function with {eqn.prim.name} of a sparse array",
                    "todense(x) inside of it",
                )
            outs = [rule(*operands, **eqn.params)]
        else:
            found = eqn.prim.bind(*operands, **eqn.params)
            outs = list(found) if eqn.prim.multiple_results else [found]
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _keeping_zero(name: str) -> Callable:
    return lambda x, **params: x.with_data(getattr(lax, name)(x.data))


def _mul(x: Any, y: Any) -> Any:
    return x * y if isinstance(x, BCOO) else y * x


def _div(x: Any, y: Any) -> Any:
    if isinstance(y, BCOO):
        raise refused("division by a sparse array", "todense(x)")
    return x / y


def _dot(
    x: Any, y: Any, *, dimension_numbers: Any, preferred_element_type: Any = None, **options: Any
) -> Any:
    return products.bcoo_dot_general(
        x, y, dimension_numbers=dimension_numbers, preferred_element_type=preferred_element_type
    )


RULES: dict[str, Callable] = {
    **{
        name: _keeping_zero(name)
        for name in "abs asin asinh atan atanh ceil expm1 floor imag log1p neg real sign sin sinh sqrt tan tanh".split()
    },
    "add": lambda x, y: x + y if isinstance(x, BCOO) else y + x,
    "broadcast_in_dim": lambda x, *, shape, dims, **_: bcoo.bcoo_broadcast_in_dim(
        x, shape=shape, broadcast_dimensions=dims
    ),
    "concatenate": lambda *xs, dimension, **_: bcoo.bcoo_concatenate(xs, dimension=dimension),
    "convert": lambda x, *, dtype, **_: x.astype(dtype),
    "copy": lambda x: x,
    "div": _div,
    "dot_general": _dot,
    "integer_pow": lambda x, *, y: x.with_data(x.data**y),
    "mul": _mul,
    "reduce_sum": lambda x, *, axes: bcoo.bcoo_reduce_sum(x, axes=axes),
    "reshape": lambda x, **params: bcoo.bcoo_reshape(x, new_sizes=params["shape"]),
    "rev": lambda x, *, dimensions: bcoo.bcoo_rev(x, dimensions),
    "slice": lambda x, **params: bcoo.bcoo_slice(x, **params),
    "sub": lambda x, y: x - y if isinstance(x, BCOO) else (-y) + x,
    "transpose": lambda x, *, permutation: bcoo.bcoo_transpose(x, permutation=permutation),
}
"""The operations that ``sparsify`` knows, by the names of their primitives."""
