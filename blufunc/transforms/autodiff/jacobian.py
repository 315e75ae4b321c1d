"""Jacobians and Hessians: ``jacfwd``, ``jacrev``, ``hessian``.

Transforms, stage 2. In: functions of pytrees. Out: the tree of the results with the tree of the arguments in place of
each leaf. A Jacobian applies the derivative to the standard basis as one batch: the basis of the inputs through ``jvp``
(columns), or the basis of the outputs through the pullback (rows). So the function is evaluated once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, overload

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ops.elementwise import add, convert, eq, weak_as
from blufunc.core.ops.shape import iota, slice_in_dim, squeeze
from blufunc.core.primitives.linear_ops import batched_front, move_dim, reshape, zeros
from blufunc.core.primitives.tangents import Zero, zero
from blufunc.core.pytree import paths, tree
from blufunc.transforms.arguments import Auxiliary, LazyLabels, as_values, check_callable, name_of
from blufunc.transforms.autodiff.grad import Chosen, check_argnums, check_inputs, split_aux
from blufunc.transforms.autodiff.jvp import jvp_flat
from blufunc.transforms.autodiff.linearize import differentiable, linearize_flat
from blufunc.transforms.autodiff.transpose import backward_pass
from blufunc.transforms.batching.batch import Axis, batch_flat

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.signatures import OfArray
    from blufunc.core.ir.trace import Array

P = ParamSpec("P")
A = TypeVar("A", bound="ArrayLike")


@overload
def jacfwd(
    fun: Callable[Concatenate[A, P], ArrayLike],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    holomorphic: bool = False,
) -> OfArray[A, P, Array]: ...
@overload
def jacfwd(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[P, Any]: ...


def jacfwd(
    fun: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False, holomorphic: bool = False
) -> Any:
    """Jacobian of a function by forward mode, for more results than arguments.

    Args:
      fun: any function of pytrees of arrays.
      argnums: the positional arguments to differentiate with respect to; default 0.
      has_aux: True if ``fun`` returns a pair of its result and auxiliary data.
      holomorphic: True if ``fun`` is holomorphic, from complex to complex.
    Returns:
        a function of the same arguments that returns the tree of the results, with the tree of the argument (a tuple
        for several ``argnums``) in place of each leaf: arrays of the result's shape followed by the argument's, in
        the result's dtype (float0 for integer results). With ``has_aux``, the pair of it and the auxiliary data.
    Raises (when called):
      GradError: an argument is not real floating (with ``holomorphic``: it or a result is not complex).
    """
    check_callable(fun, "jacfwd")
    check_argnums(argnums)

    @functools.wraps(fun)
    def jacobian_fun(*args, **kwargs):
        chosen = Chosen(fun, args, kwargs, argnums)
        primals = chosen.values
        check_inputs("jacfwd", chosen, holomorphic, real=True)
        avals = [p.aval for p in primals]
        axis = Axis(sum(a.size for a in avals))
        flat = _Results(chosen, has_aux)
        out_ts: list = []

        def columns(*tangents):
            outs, ts = jvp_flat(flat, primals, tangents, LazyLabels(chosen.labels, len(primals)))
            n = flat.out_tree.num_leaves
            out_ts[:] = ts[:n]
            return [*outs, *(t for t in out_ts if t.__class__ is not Zero)]

        found, dims = batch_flat(columns, axis, _basis(avals), [0] * len(avals))
        n_outs = len(found) - sum(t.__class__ is not Zero for t in out_ts)
        outs = [_unmapped(x, d) for x, d in zip(found[:n_outs], dims[:n_outs], strict=True)]
        rest = iter([(x, d) for x, d in zip(found[n_outs:], dims[n_outs:], strict=True)])
        n = len(out_ts)
        flat.check(outs[:n], "jacfwd", holomorphic, real=False)
        blocks = []
        for out, t in zip(outs[:n], out_ts, strict=True):
            if t.__class__ is Zero:
                row = [zeros(zero(out.aval).aval.with_shape((*out.shape, *a.shape))) for a in avals]
            else:
                x, d = next(rest)
                x = batched_front(axis, x, None) if d is None else x
                x = move_dim(x, 0 if d is None else d, out.ndim)
                row = _pieces(x, out.ndim, avals, lambda piece, a: (*piece.shape[:-1], *a.shape))
            blocks.append([weak_as(block, out.aval.tangent()) for block in row])
        return flat.finish(outs, [chosen.rebuild(b) for b in blocks])

    return jacobian_fun


@overload
def jacrev(
    fun: Callable[Concatenate[A, P], ArrayLike],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> OfArray[A, P, Array]: ...
@overload
def jacrev(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, Any]: ...


def jacrev(
    fun: Callable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Any:
    """Jacobian of a function by reverse mode, for more arguments than results.

    Args:
      fun: any function of pytrees of arrays.
      argnums: the positional arguments to differentiate with respect to; default 0.
      has_aux: True if ``fun`` returns a pair of its result and auxiliary data.
      holomorphic: True if ``fun`` is holomorphic, from complex to complex.
      allow_int: allow integer arguments; their derivatives have dtype float0.
    Returns:
      a function like the result of ``jacfwd``, except that arrays have the argument's dtype.
    Raises (when called):
      GradError: a result is not real floating (with ``holomorphic``: complex), or an argument is not floating or
        complex.
    """
    check_callable(fun, "jacrev")
    check_argnums(argnums)

    @functools.wraps(fun)
    def jacobian_fun(*args, **kwargs):
        chosen = Chosen(fun, args, kwargs, argnums)
        primals = chosen.values
        check_inputs("jacrev", chosen, holomorphic, allow_int)
        nonzeros = [dtypes.is_inexact(p.aval.dtype) for p in primals]
        flat = _Results(chosen, has_aux)
        outs, out_nonzeros, linear = linearize_flat(
            differentiable(flat, primals), primals, nonzeros, labels=LazyLabels(chosen.labels, len(primals))
        )
        n = flat.out_tree.num_leaves
        flat.check(outs[:n], "jacrev", holomorphic, real=True)
        avals = [o.aval for o in outs[:n]]
        axis = Axis(sum(a.size for a in avals))
        unused = [None] * sum(out_nonzeros[n:])
        found: list = []

        def rows(*cts):
            used = [ct for ct, nz in zip(cts, out_nonzeros, strict=False) if nz]
            found[:] = backward_pass(linear, [None] * len(linear.invars), [*used, *unused])
            return [g for g in found if g.__class__ is not Zero]

        results, dims = batch_flat(rows, axis, _basis(avals), [0] * n)
        filled = iter([batched_front(axis, x, d) for x, d in zip(results, dims, strict=True)])
        grads = iter(found)
        columns = []  # for each argument, its block for each result
        for p, nz in zip(primals, nonzeros, strict=True):
            if not nz or next(grads).__class__ is Zero:
                column = [zeros(p.aval.tangent().with_shape((*a.shape, *p.shape))) for a in avals]
            else:
                column = _pieces(next(filled), 0, avals, lambda piece, a: (*a.shape, *piece.shape[1:]))
            columns.append([weak_as(block, p.aval.tangent()) for block in column])
        blocks = [[column[i] for column in columns] for i in range(n)]
        return flat.finish(outs, [chosen.rebuild(b) for b in blocks])

    return jacobian_fun


jacobian = jacrev
"""Alias of ``jacrev``."""


@overload
def hessian(
    fun: Callable[Concatenate[A, P], ArrayLike],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    holomorphic: bool = False,
) -> OfArray[A, P, Array]: ...
@overload
def hessian(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[P, Any]: ...


def hessian(
    fun: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False, holomorphic: bool = False
) -> Any:
    """Matrix of second derivatives, forward over reverse: ``jacfwd(jacrev(fun))``.

    Args:
      fun, argnums, has_aux, holomorphic: as for ``jacrev``.
    Returns:
      a function of the same arguments that returns the tree of the results, with the tree of the argument in the
      place of each leaf, twice: arrays of the result's shape followed twice by the argument's.
    """
    check_callable(fun, "hessian")
    reverse = jacrev(fun, argnums, has_aux, holomorphic)
    return jacfwd(reverse, argnums, has_aux, holomorphic)


class _Results:
    """The function of the chosen leaves, with flat results, auxiliary ones last."""

    def __init__(self, chosen: Chosen, has_aux: bool):
        self.chosen, self.has_aux = chosen, has_aux
        self.out_tree: Any = None
        self.aux = Auxiliary(())

    def __call__(self, *xs: Any) -> list:
        name = name_of(self.chosen.fun)
        out = self.chosen.call(xs)
        if self.has_aux:
            out, rest = split_aux(self.chosen.fun, out)
            self.aux = Auxiliary(rest)
        leaves, self.out_tree = tree.flatten(out)
        outs = as_values(leaves, lambda i: f"the result of {name}{paths.leaf_paths(self.out_tree)[i]}")
        return [*outs, *self.aux.values]

    def check(self, outs: Sequence, transform: str, holomorphic: bool, real: bool) -> None:
        """Raise GradError unless the results are differentiable."""
        if not holomorphic and not real:
            return
        accepts = dtypes.is_complex if holomorphic else dtypes.is_floating
        for i, out in enumerate(outs):
            if not accepts(out.aval.dtype):
                raise errors.GradError(
                    f"{transform} needs {'complex' if holomorphic else 'real floating'} results, "
                    f"{name_of(self.chosen.fun)} returned {out.aval}{paths.leaf_paths(self.out_tree)[i]}.",
                    where=source.here(),
                    fix="convert the result, take its real part, or return it with has_aux=True",
                )

    def finish(self, outs: Sequence, jacobian: Sequence) -> Any:
        """Assemble the user's result."""
        whole = tree.unflatten(self.out_tree, jacobian)
        if not self.has_aux:
            return whole
        return whole, self.aux.rebuild(outs[self.out_tree.num_leaves :])


def _basis(avals: Sequence[ShapedArray]) -> list:
    """The standard basis of arrays of these types, as a batch along axis 0."""
    n = sum(a.size for a in avals)
    vectors, start = [], 0
    for a in avals:
        row, column = (iota(dtypes.int32, (n, a.size), d) for d in (0, 1))
        ones = eq(row, add(column, start) if start else column)
        vectors.append(reshape(convert(ones, a.dtype), (n, *a.shape)))
        start += a.size
    return vectors


def _pieces(x: Any, axis: int, avals: Sequence[ShapedArray], shape: Callable) -> list:
    """Split ``x`` along ``axis`` into a piece per type, each given its shape."""
    pieces, start = [], 0
    for a in avals:
        piece = slice_in_dim(x, start, start + a.size, axis=axis)
        pieces.append(reshape(piece, shape(piece, a)))
        start += a.size
    return pieces


def _unmapped(x: Any, d: int | None) -> Any:
    """A primal result without the batch axis, in case a rule broadcast it."""
    return x if d is None else squeeze(slice_in_dim(x, 0, 1, axis=d), (d,))
