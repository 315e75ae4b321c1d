"""Rematerialization in consumers: values cheaper to recompute than to store.

Kernels, stage 5, below ``fuse.py``. In: a jaxpr. Out: three sets of variables:

- ``computed_in_copies``: producers that only copies read (a ``concatenate``, a ``pad``, a change of layout) are not
  stored. A rotary embedding, whose halves are computed and joined, is one kernel; so is the gradient of a ``split``.
- ``computed_by_readers``: values computed from a buffer that is in memory anyway (a parameter, the result of a library
  call or a collective) and no larger. Each reader recomputes them: a softmax over a sharded vocabulary converts its
  logits to float32 for the maximum, for the sum and for the gradient. A residual with one reader, which comes after a
  library call, is computed there, too, if what it is computed from is as narrow: the forward pass does not store it.
- ``position_tables``: values of positions alone (``iota``) are usually computed by every reader; an element of a causal
  mask costs one comparison. Those that cost more, and that a reader with many times their elements would repeat, such
  as the angles of a rotary embedding, are stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.elementwise import (
    abs_p,
    add_p,
    convert_p,
    copy_p,
    eq_p,
    exp_p,
    ge_p,
    gt_p,
    le_p,
    logistic_p,
    lt_p,
    max_p,
    min_p,
    mul_p,
    ne_p,
    neg_p,
    select_p,
    square_p,
    sub_p,
)
from blufunc.core.ops.shape import concatenate_p, iota_p, pad_p
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p
from blufunc.kernels.fusion.iteration_space import Frame, reduces, role_of
from blufunc.kernels.loopir.access_map import is_widening, moves, same_order

# -- producers of copies ----------------------------------------------------------------------------


_MOST_OPERATIONS = 24
"""Most operations per element, in additions, of a memory-bound copy."""

_CHOICE = 4
"""Operations of a copy for each operand that an element may come from."""

_SMALL_RECIPE = 16
"""An operand this many times smaller stays in cache: reading it is free."""


COPIES = frozenset((concatenate_p, copy_p, pad_p))
"""Operations that can fuse producers that only they read."""


class _CopyRecipe(NamedTuple):
    """How a copy would compute a value: variables read, operations per element."""

    leaves: frozenset[Var]
    operations: int


def computed_in_copies(jaxpr: Jaxpr, stored: Set[Var] = frozenset()) -> set[Var]:
    """Variables that only copies read, through movement too, cheap to compute there.

    A result of the program whose elements are moved is a copy as well. Not storing a value saves its bytes twice, but
    each reader then reads its operands. These must be at most twice the value's bytes.

    Args:
      jaxpr: the program.
      stored: variables that are in memory in any case.
    """
    makers: dict[Any, Eqn] = {v: e for e in jaxpr.eqns for v in e.outvars}
    moved: set[Any] = {
        v for v in jaxpr.outvars if (e := makers.get(v)) and moves(e) and same_order(v, makers) is None
    }
    copied = _copied(jaxpr, moved)
    recipes = _recipes(jaxpr, stored, copied)
    inside: Counter[Any] = Counter()  # read by copies: how often
    outside: set[Any] = {*jaxpr.outvars, *stored}  # read by something else, or in memory
    found: set[Var] = set()
    for e in reversed(jaxpr.eqns):
        v = e.outvars[0] if len(e.outvars) == 1 else None
        able = v in inside and (v not in outside or is_widening(e)) and (v in copied or e.prim not in COPIES)
        if able and _is_cheap(v, recipes[v], inside[v]):
            found.add(v)  # type: ignore[arg-type]  # every reader of a widened value may widen it
        passes = v in found and v not in outside and (moves(e) or _is_elementwise(e))
        if passes or e.prim is copy_p or v in moved:
            inside.update(dict.fromkeys(e.invars, inside[v] if passes else 1))
        elif e.prim is pad_p or e.prim is concatenate_p:
            times = inside[v] if v in found else 1
            for a in e.invars:
                inside[a] += times * bool(a.aval.ndim)
            outside.update(a for a in e.invars if not a.aval.ndim)
        else:
            outside.update(e.invars)
    return found


def _copied(jaxpr: Jaxpr, moved: Set[Any]) -> set[Any]:
    """Copies that only copies read: one copy can do it all."""
    inside: set[Any] = set()
    outside: set[Any] = set(jaxpr.outvars)
    for e in reversed(jaxpr.eqns):
        v = e.outvars[0] if len(e.outvars) == 1 else None
        passes = e.prim in COPIES or v in moved or (moves(e) and v in inside and v not in outside)
        (inside if passes else outside).update(e.invars)
    return {e.outvars[0] for e in jaxpr.eqns if e.prim in COPIES and e.prim is not copy_p} & (
        inside - outside
    )


def _recipes(jaxpr: Jaxpr, stored: Set[Var], copied: Set[Any]) -> dict[Any, _CopyRecipe]:
    """Recipes, if readers computed elementwise values, and copies those of copies."""
    recipes: dict[Any, _CopyRecipe] = {v: _CopyRecipe(frozenset([v]), 0) for v in jaxpr.invars}
    for e in jaxpr.eqns:
        own = e.prim.cost if _is_elementwise(e) and e.prim is not copy_p else 0
        if e.outvars and e.outvars[0] in copied:
            own = _CHOICE * len(e.invars)
        if (own or _is_elementwise(e) or moves(e)) and e.outvars[0] not in stored:
            parts = [recipes[a] for a in e.invars if a.__class__ is not Literal]
            if moves(e) and _is_stored_small(e, parts):
                parts = [_CopyRecipe(frozenset(a for a in e.invars if isinstance(a, Var)), 0)]
            leaves = frozenset[Var]().union(*[p.leaves for p in parts])
            recipes[e.outvars[0]] = _CopyRecipe(leaves, own + sum(p.operations for p in parts))
        else:
            recipes.update((v, _CopyRecipe(frozenset([v]), 0)) for v in e.outvars)
    return recipes


def _is_stored_small(eqn: Eqn, parts: Sequence[_CopyRecipe]) -> bool:
    """True for movement of a value that is small and expensive: it is stored.

    So are the sines of angles that a rotary embedding of many rows reads.
    """
    x = eqn.invars[0].aval
    return (
        len(eqn.invars) == 1
        and x.size * _SMALL_RECIPE <= eqn.outvars[0].aval.size
        and sum(p.operations for p in parts) > _MOST_OPERATIONS // 2
    )


def _is_elementwise(eqn: Eqn) -> bool:
    return isinstance(eqn.prim, Elementwise) or eqn.prim is add_any_p


def _is_cheap(v: Any, recipe: _CopyRecipe, copies: int) -> bool:
    """True if reading an element of each operand costs no more than storing the value.

    Many copies, such as the terms of a window, repeat its operations as often.
    """
    if copies > 2 and recipe.operations * copies > _MOST_OPERATIONS:
        return False
    large = [x.aval for x in recipe.leaves if x.aval.size * _SMALL_RECIPE > v.aval.size]
    read = sum(min(x.size, v.aval.size) * x.dtype.itemsize for x in large)
    return recipe.operations <= _MOST_OPERATIONS and read <= 2 * v.aval.nbytes


# -- values of buffers that are read anyway ---------------------------------------------------------


LARGE = 1 << 22
"""Minimum size of such a value in bytes.

A GPU stores and reads fewer in the time of a launch, 2 us.
"""

_SMALL = 16
"""An operand this many times smaller, such as a scalar per row, is free to read."""

_MOST = 64
"""Operations that readers may repeat while they wait for memory."""

_BIT_STABLE = frozenset((convert_p, neg_p, abs_p, add_p, sub_p, add_any_p, max_p, min_p, exp_p))
"""Operations with equal bits in every kernel; a product may become an FMA."""

_OF_NARROW = frozenset((mul_p, square_p, select_p, ge_p, gt_p, le_p, lt_p, logistic_p))
"""Operations that readers may repeat too, of large arrays of 16 bits.

Float32 that kernels compute from those is more exact than they are, fused or not.
"""

_COMPARES = frozenset((eq_p, ne_p, lt_p, le_p, gt_p, ge_p))
"""Comparisons: they must see the very bits that another kernel reduced."""


class _Recipe(NamedTuple):
    """The variables that a value is computed from, and by which equations.

    Attributes:
      large: those that are not much smaller than the value.
      stable: whether bits are equal in every kernel.
    """

    leaves: frozenset[Var]
    eqns: frozenset[Eqn]
    large: frozenset[Var]
    stable: bool

    @property
    def bytes(self) -> int:
        """Bytes of the large ones."""
        return sum(x.aval.nbytes for x in self.large)

    def is_cheap(self, v: Any) -> bool:
        """True if reading the variables moves no more bytes than reading the value."""
        return v.aval.nbytes >= LARGE and 0 < self.bytes <= v.aval.nbytes


def computed_by_readers(jaxpr: Jaxpr, sorts: Mapping[Eqn, str]) -> set[Var]:
    """Values made and read on different sides of opaque steps, and cheap to recompute.

    Args:
      jaxpr: the program.
      sorts: ``sort_of`` of all equations.
    """
    if not any(v.aval.nbytes >= LARGE for e in jaxpr.eqns for v in e.outvars):
        return set()
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    in_rows = _found_in_rows(jaxpr, sorts)
    recipes: dict[Var, _Recipe] = {}
    for e in jaxpr.eqns:
        recipe = _recipe(e, makers, recipes, sorts, in_rows)
        if recipe is not None:
            recipes[e.outvars[0]] = recipe
    if not recipes:
        return set()
    depths = _depths(jaxpr, makers, sorts)
    readers: dict[Any, set[tuple[int, int] | None]] = {v: {None} for v in jaxpr.outvars if v.__class__ is Var}
    found: set[Var] = set()
    for e in reversed(jaxpr.eqns):
        v = e.outvars[0] if len(e.outvars) == 1 else None
        at = readers.get(v, set())
        if v in recipes and recipes[v].is_cheap(v) and _are_apart({depths[e], *at}, recipes[v].stable):
            found.add(v)  # type: ignore[arg-type]
        exact = e.prim in _COMPARES and v not in recipes
        if sorts[e] == "opaque" or exact or "index_dtype" in e.params:
            at = {None}
        elif sorts[e] == "node" and v not in found:
            at = {depths[e], _ALONE} if _is_alone(e) else {depths[e]}
        for a in e.invars:
            if a.__class__ is Var:
                readers.setdefault(a, set()).update(at)
    return found


def _are_apart(readers: Set[tuple[int, int] | None], stable: bool) -> bool:
    """True if readers have kernels of their own.

    Values with other bits in every kernel need a reduction that ends one in between.
    """
    if None in readers:
        return False
    return len(readers if stable else {sums for _, sums in readers}) > 1  # type: ignore[misc]


def _recipe(
    eqn: Eqn,
    makers: Mapping[Any, Eqn],
    recipes: Mapping[Any, _Recipe],
    sorts: Mapping[Eqn, str],
    in_rows: Set[Var],
) -> _Recipe | None:
    """The recipe of a result in its readers; None if not worth it or not bit-stable."""
    stable = eqn.prim in _BIT_STABLE
    if sorts[eqn] != "node" or not (stable or eqn.prim in _OF_NARROW):
        return None
    out = eqn.outvars[0].aval
    if out.size * 4 < LARGE:
        return None
    leaves: set[Var] = set()
    eqns = {eqn}
    for a in eqn.invars:
        x = _moved_from(a, makers)
        if x.__class__ is Literal:
            continue
        if x not in makers or sorts[makers[x]] == "opaque":
            leaves.add(x)
        elif x in recipes and not (_is_narrow(x) and recipes[x].bytes > x.aval.nbytes):
            leaves |= recipes[x].leaves
            eqns |= recipes[x].eqns
            stable &= recipes[x].stable
        elif x in in_rows:
            return None  # the kernel that reduces a row and the one that reads the result could not fuse
        elif x.aval.size * _SMALL <= out.size or _is_narrow(x):  # stored, instead of a wider value
            leaves.add(x)
        else:
            return None
    large = frozenset(x for x in leaves if x.aval.size * _SMALL > out.size)
    if sum(e.prim.cost for e in eqns) > _MOST or not (stable or all(map(_is_narrow, large))):
        return None
    return _Recipe(frozenset(leaves), frozenset(eqns), large, stable)


def _is_narrow(x: Any) -> bool:
    return dtypes.is_floating(x.aval.dtype) and x.aval.dtype.itemsize == 2


def _moved_from(atom: Any, makers: Mapping[Any, Eqn]) -> Any:
    while atom in makers and moves(makers[atom]):
        atom = makers[atom].invars[0]
    return atom


def _found_in_rows(jaxpr: Jaxpr, sorts: Mapping[Eqn, str]) -> set[Var]:
    """Fused results that are not elementwise, and all that depends on them."""
    found: set[Var] = set()
    for e in jaxpr.eqns:
        if sorts[e] != "opaque":
            elementwise = (
                _is_elementwise(e) or moves(e) or e.prim in COPIES or _ends_kernel(e) or _is_small(e)
            )
            if not elementwise or any(a in found for a in e.invars):
                found.update(e.outvars)
    return found


def _depths(jaxpr: Jaxpr, makers: Mapping[Any, Eqn], sorts: Mapping[Eqn, str]) -> dict[Eqn, tuple[int, int]]:
    """Maximum opaque steps, and ends of kernels, on a path to each equation.

    What reads a reduction that ends a kernel runs after its last element.
    """
    depths: dict[Eqn, tuple[int, int]] = {}
    for e in jaxpr.eqns:
        before = [makers[a] for a in e.invars if a in makers]
        steps = max((depths[m][0] + (sorts[m] == "opaque") for m in before), default=0)
        depths[e] = steps, max((depths[m][1] + _ends_kernel(m) for m in before), default=0)
    return depths


_ALONE = (-1, -1)
"""Where reductions read that no kernel computes with their operand."""


def _is_alone(eqn: Eqn) -> bool:
    """True for a reduction over axes with others in between, or over rows of images.

    Those of a group norm are either; the sums of its gradient over all rows have a kernel of their own.
    """
    if not reduces(eqn.prim):
        return False
    found = role_of(eqn, Frame(eqn.invars[0].aval.size))
    return found is None or (found[0] == "column" and found[1].outer != 1)


def _is_small(eqn: Eqn) -> bool:
    """True for a reduction whose kernel is not that of a large reader of the result."""
    return bool(reduces(eqn.prim)) and eqn.invars[0].aval.size * 4 < LARGE


def _ends_kernel(eqn: Eqn) -> bool:
    """True for a reduction of a large array whose readers are not in its kernel.

    Rows are reduced where they are read again. Columns are not, as in batch norm.
    """
    if not reduces(eqn.prim) or _is_small(eqn):
        return False
    found = role_of(eqn, Frame(eqn.invars[0].aval.size))
    return found is None or found[0] == "column"


# -- tables of positions ----------------------------------------------------------------------------


_WORTH = 16
"""Operations, in additions, that a memory-bound reader repeats for free."""

_REPEATS = 16
"""Minimum ratio of a reader's elements to the table's: it then stays in cache."""


def position_tables(jaxpr: Jaxpr) -> set[Var]:
    """Expensive values of positions alone, worth storing for much larger readers."""
    operations: dict[Any, int] = {}  # of values that depend on positions alone
    for e in jaxpr.eqns:
        if e.prim is iota_p:
            operations[e.outvars[0]] = 0
        elif isinstance(e.prim, Elementwise) or moves(e):
            variables = [a for a in e.invars if a.__class__ is not Literal]
            if variables and all(a in operations for a in variables):
                own = 0 if moves(e) else e.prim.cost
                operations[e.outvars[0]] = own + sum(operations[a] for a in variables)
    expensive = {v for v, cost in operations.items() if cost > _WORTH}
    if not expensive:
        return set()
    largest: dict[Any, int] = {}  # by variable: the elements of its largest reader that is not a table itself
    for e in reversed(jaxpr.eqns):
        out = e.outvars[0] if e.outvars else None
        size = (
            largest.get(out, 0)
            if moves(e)
            else 0
            if out in operations
            else max(v.aval.size for v in e.outvars)
        )
        for a in e.invars:
            largest[a] = max(largest.get(a, 0), size)
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    return {v for v in expensive if not moves(makers[v]) and largest.get(v, 0) >= _REPEATS * v.aval.size}
