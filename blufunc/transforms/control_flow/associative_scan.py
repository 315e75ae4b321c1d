"""``associative_scan``: prefix scan with a user's function in O(log n) steps.

Transforms, stage 2: the pytree version of ``core/ops/prefix.py``. In: a function and arrays. Out: all prefixes. Within
programs, a scan by a pointwise function of arrays of one shape is one operation (``recurrence.py``), for which devices
may have a kernel. Otherwise derivatives and batches come from the operations of the function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from blufunc import _lazy, errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import axis_in
from blufunc.core.ops.prefix import prefix_scan
from blufunc.core.programs.stage import is_staging, stage_body
from blufunc.core.pytree import paths as treepath
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import as_values, check_callable, name_of

with _lazy.modules(globals()):  # for scans within programs
    from blufunc.transforms.control_flow import recurrence

T = TypeVar("T")


@overload
def associative_scan(fn: Callable[[T, T], T], elems: T, reverse: bool = False, axis: int = 0) -> T: ...
@overload
def associative_scan(fn: Callable[[T, T], T], elems: Any, reverse: bool = False, axis: int = 0) -> T: ...


def associative_scan(fn: Callable[..., Any], elems: Any, reverse: bool = False, axis: int = 0) -> Any:
    """Combine all prefixes of ``elems`` along ``axis`` by ``fn``.

    Args:
      fn: ``fn(earlier, later)``, associative, of pytrees like ``elems`` with any size along ``axis``; returns one of
        the same structure, shapes and dtypes.
      elems: a pytree of arrays with one size along ``axis``.
      reverse: combine suffixes, from the end; default False.
      axis: the axis of every array; a negative one counts from the end of the first. Default 0.
    Returns:
      a pytree like ``elems``: element i combines the elements up to i.
    """
    check_callable(fn, "associative_scan")
    leaves, in_tree = tree.flatten(elems)
    paths = treepath.leaf_paths(in_tree)
    values = as_values(leaves, lambda i: f"elems{paths[i]}")
    if not values:
        return elems
    axis = axis_in(axis, values[0].aval.ndim, "associative_scan")
    if len({v.aval.shape[axis] if axis < v.aval.ndim else None for v in values}) > 1:
        listed = ", ".join(f"elems{p} {v.aval}" for p, v in zip(paths, values, strict=True))
        raise errors.ShapeError(
            f"associative_scan: the arrays differ in size along axis {axis}: {listed}.", where=source.here()
        )

    def combine(a, b):
        out, out_tree = tree.flatten(fn(tree.unflatten(in_tree, a), tree.unflatten(in_tree, b)))
        results = as_values(out, lambda i: f"the result of {name_of(fn)}")
        if out_tree != in_tree or any(not r.aval.same_type(x.aval) for r, x in zip(results, a, strict=True)):
            raise errors.CarryError(
                f"the function of associative_scan, {name_of(fn)}, must return the types of its arguments: "
                f"{', '.join(str(x.aval) for x in a)}, not {', '.join(str(r.aval) for r in results)}.",
                where=source.here(),
            )
        return results

    found = _recurrence(combine, values, axis, bool(reverse)) if is_staging() else None
    return tree.unflatten(in_tree, found or prefix_scan(combine, values, axis, bool(reverse)))


def _recurrence(combine: Callable, values: Sequence[Any], axis: int, reverse: bool) -> list[Any] | None:
    """The scan as one operation.

    None if ``combine`` is not pointwise, or reads outer values.
    """
    shape = values[0].aval.shape
    avals = [v.aval.strong() for v in values]
    k = len(avals)
    if any(a.shape != shape or not dtypes.is_numeric(a.dtype) or dtypes.is_complex(a.dtype) for a in avals):
        return None
    if len({a.dtype for a in avals if dtypes.is_floating(a.dtype)}) > 1:
        return None  # its derivative mixes them
    if shape[axis] < 2 or 0 in shape:
        return None
    half = (*shape[:axis], shape[axis] // 2, *shape[axis + 1 :])  # as in the first level of a prefix scan
    pairs = [a.with_shape(half) for a in avals] * 2
    jaxpr = stage_body(lambda *xs: combine(list(xs[:k]), list(xs[k:])), pairs, [*values, *values], "combine")
    points = recurrence.of_points(jaxpr, half)
    if points is None or [a.dtype for a in points.out_avals] != [a.dtype for a in avals]:
        return None
    return recurrence.recurrence(points, values, axis, reverse)
