"""``cond`` and ``switch``: a primitive that runs one of several jaxprs.

Transforms, stage 2. In: the index of the branch, and the operands of all branches, which are closed jaxprs of one type.
Out: the results of the branch. Derivatives and batches of a cond are conds of transformed branches. Constants and
residuals of branches are merged: each branch takes, or returns, the union.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift, scalar
from blufunc.core.arrays.memories import move_to
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal, Var, eval_jaxpr, subjaxprs
from blufunc.core.ir.trace import set_trace
from blufunc.core.ops.elementwise import clamp, convert, eq, ne, select, stop_gradient
from blufunc.core.ops.offload import in_memory
from blufunc.core.ops.reduce import reduce_or_p
from blufunc.core.primitives import effects
from blufunc.core.primitives.linear_ops import batched_front, broadcast_in_dim, broadcast_to, move_dim, zeros
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.primitives.tangents import Zero, is_linear, zero
from blufunc.core.programs import simplify
from blufunc.core.programs.refs import carried
from blufunc.core.programs.stage import stage, stage_body
from blufunc.core.pytree import paths as treepath
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import as_values, check_callable, name_of
from blufunc.transforms.autodiff.jvp import jvp_jaxpr
from blufunc.transforms.autodiff.linearize import linearize_jaxpr, split_jaxpr, with_recognised
from blufunc.transforms.autodiff.transpose import transpose_jaxpr
from blufunc.transforms.batching.batch import batch_jaxpr
from blufunc.transforms.control_flow import guards
from blufunc.transforms.control_flow.carried_refs import cond_with, switch_with

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike

R = TypeVar("R")

Branches = tuple[Jaxpr, ...]
Flags = tuple[bool, ...]


class _Cond(Primitive):
    """Runs branch ``index`` (clamped) of ``branches`` on the other operands."""

    name, kind, multiple_results = "cond", "control", True
    any_memory = True

    def effects_of(self, params):
        return frozenset().union(*[b.effects for b in params["branches"]])

    def abstract(self, index, *avals, branches: Branches):
        if index.shape or index.dtype != np.int32:
            raise errors.ArgumentError(f"cond: the index of the branch is an int32 of rank 0, not {index}.")
        first = branches[0]
        for b in branches:
            for got, want in zip(b.in_avals, avals, strict=True):
                if not got.same_type(want):
                    raise errors.ShapeError(f"cond: a branch takes {got} where the operands give {want}.")
            for got, want in zip(b.out_avals, first.out_avals, strict=True):
                if not got.same_type(want):
                    raise errors.BranchError(f"cond: one branch returns {want} where another returns {got}.")
        return list(first.out_avals)

    def reference(self, compile, *, branches: Branches):
        bodies = [compile(b) for b in branches]

        def run(buffers):
            index, *operands = buffers
            return bodies[min(max(int(index), 0), len(bodies) - 1)](operands)

        return run

    def jvp(self, primals, tangents, *, branches: Branches):
        nonzeros = tuple(t.__class__ is not Zero for t in tangents[1:])
        derived, out_nonzeros = _agree(
            branches, lambda b, required: jvp_jaxpr(b, nonzeros, required), len(branches[0].outvars)
        )
        ts = [t for t in tangents[1:] if t.__class__ is not Zero]
        results = self._call(primals[0], derived, [*primals[1:], *ts])
        n = len(out_nonzeros)
        rest = iter(results[n:])
        return results[:n], [
            next(rest) if nz else zero(p.aval) for p, nz in zip(results, out_nonzeros, strict=False)
        ]

    def linearize(self, trace, primals, tangents, *, branches: Branches):
        branches = tuple(map(with_recognised, branches))
        index, *operands = primals
        ts = [t for t in tangents[1:] if t.__class__ is not Zero]
        nonzeros = tuple(t.__class__ is not Zero for t in tangents[1:])
        parts, flags = _agree(
            branches,
            lambda b, required: _halves(linearize_jaxpr(b, nonzeros, required)),
            len(branches[0].outvars),
        )
        outs, out_ts = self._two_conds(trace.tangents, index, parts, operands, ts)
        rest = iter(out_ts)
        return outs, [next(rest) if nz else zero(p.aval) for p, nz in zip(outs, flags, strict=True)]

    def split(self, trace, args, *, branches: Branches):
        """Two conds, if operands mix values and tangents."""
        index, *operands = args
        tangents = tuple(map(trace.is_tangent, operands))
        parts, flags = _agree(
            branches,
            lambda b, required: _halves(split_jaxpr(b, tangents, required)),
            len(branches[0].outvars),
        )
        ps = [x for x, t in zip(operands, tangents, strict=True) if not t]
        ts = [x for x, t in zip(operands, tangents, strict=True) if t]
        with set_trace(trace.parent):
            outs, out_ts = self._two_conds(trace.tangents, index, parts, ps, ts)
        sides = iter(outs), iter(out_ts)
        return [next(sides[t]) for t in flags]

    def _two_conds(
        self, tangents, index: Any, halves: Sequence[tuple[Jaxpr, Jaxpr]], ps: Sequence, ts: Sequence
    ) -> tuple[list, list]:
        """Run split branches: primal halves on ``ps``, linear ones on tangents ``ts``.

        Returns:
          the results of the first without the residuals, and those of the second.
        """
        primals, linears = [p for p, _ in halves], [linear for _, linear in halves]
        n_res = [len(linear.invars) - len(ts) for linear in linears]
        n_out = len(primals[0].outvars) - n_res[0]
        primals, linears, used, slots = primals[0].memoised(
            ("cond halves", *primals[1:]), lambda: _join_residuals(primals, linears, n_res)
        )
        results = self._call(index, primals, ps)
        residuals = [ps[i] for i in used] + results[n_out : n_out + slots]
        joined, consts = _joined(linears)
        ins = [index, *consts, *residuals, *ts]
        return results[:n_out], tangents.process(self, ins, {"branches": joined})

    def transpose(self, cts, index, *args, branches: Branches):
        linear = tuple(map(is_linear, args))
        ct_nonzeros = tuple(ct.__class__ is not Zero for ct in cts)
        derived, nonzeros = _agree(
            branches, lambda b, required: transpose_jaxpr(b, linear, ct_nonzeros, required), sum(linear)
        )
        ins = [a for a in args if not is_linear(a)] + [ct for ct in cts if ct.__class__ is not Zero]
        outs = iter(self._call(index, derived, ins))
        for a, nz in zip([a for a in args if is_linear(a)], nonzeros, strict=True):
            if nz:
                a.add(next(outs))

    def batch(self, axis, args, dims, *, branches: Branches):
        (index, *operands), (index_dim, *dims) = args, dims
        batched = tuple(d is not None for d in dims)
        ins = [a if d is None else move_dim(a, d, 0) for a, d in zip(operands, dims, strict=True)]
        if index_dim is None:
            derived, out_batched = _agree(
                branches,
                lambda b, required: batch_jaxpr(b, axis, batched, required),
                len(branches[0].outvars),
            )
            return self._call(index, derived, ins), [0 if b else None for b in out_batched]
        # each element has its own branch: those that an element takes run, and a select chooses
        effects.check_divergence(self, {"branches": branches})
        everywhere = (True,) * len(branches[0].outvars)
        index = clamp(0, index, len(branches) - 1)
        batched = tuple(b or is_inexact(a) for a, b in zip(operands, batched, strict=True))

        def run(branch, chosen, *xs):
            fronts = [
                batched_front(axis, x, 0 if d is not None else None) if is_inexact(x) else x
                for x, d in zip(xs, dims, strict=True)
            ]
            mine = [where_taken(chosen, x) if b else x for x, b in zip(fronts, batched, strict=True)]
            return eval_jaxpr(batch_jaxpr(branch, axis, batched, everywhere)[0], mine)

        choices = []
        for i, branch in enumerate(branches):
            chosen = eq(index, i)
            work = functools.partial(run, branch)
            if guards.pays(batch_jaxpr(branch, axis, batched, everywhere)[0]):
                choices.append(self._unless_unused(work, chosen, ins))
            else:
                choices.append(work(chosen, *ins))
        outs, out_dims = (
            [_choose(index, xs) for xs in zip(*choices, strict=True)],
            [0] * len(branches[0].outvars),
        )
        for i, j in _forwarded(branches).items():  # the same for each element, if the operand is
            outs[i], out_dims[i] = operands[j], dims[j]
        return outs, out_dims

    def _unless_unused(self, work: Callable, chosen: Any, ins: Sequence[Any]) -> list[Any]:
        """The results of a branch for a batch; zeros if no element chose it."""
        any_chosen = reduce_or_p.bind(chosen, axes=(0,))
        jaxpr, consts = stage(work, [chosen.aval, *(x.aval for x in ins)], "cond").hoist()
        operands = [*consts, chosen, *ins]
        unused = stage(lambda *_: [_filler(a) for a in jaxpr.out_avals], jaxpr.in_avals, "cond")
        return self._call(convert(any_chosen, dtypes.int32), (unused, jaxpr), operands)

    def rewrite(self, bodies, operands, *, branches: Branches):
        """The cond of transformed branches."""
        index, *operands = operands
        index = bodies.plain(index, "the predicate of a cond")
        kinds = [bodies.kind(x) for x in operands]
        derived, _ = _agree(
            branches,
            lambda b, required: _with_flags(bodies.body(b, kinds, required)),
            len(branches[0].outvars),
        )
        jaxprs = [jaxpr for jaxpr, _ in derived]
        out_kinds = bodies.agreeing([kinds for _, kinds in derived], "the branches of a cond")
        outs = self._call(index, jaxprs, bodies.leaves(operands))
        return bodies.boxes(outs, out_kinds, branches[0].out_avals)

    def _call(self, index: Any, branches: Sequence[Jaxpr], operands: Sequence[Any]) -> list[Any]:
        """Bind a cond of jaxprs that a transform returned, constants first."""
        joined, consts = _joined(branches)
        return self.bind(index, *consts, *operands, branches=joined)

    def drop_outputs(self, eqn: Eqn, reads: list[bool]) -> Eqn:
        """Drop results that are not read, and operands that only they need."""
        branches = eqn.params["branches"]

        def narrow():
            bodies = [simplify.dce(b, reads) for b in branches]
            used = [simplify.used(b) for b in bodies]
            places = zip(
                *[[v in u for v in b.invars] for b, u in zip(bodies, used, strict=True)], strict=True
            )
            keep = list(map(any, places))
            return keep, tuple(
                b.replace(invars=[v for v, k in zip(b.invars, keep, strict=True) if k], arg_names=())
                for b in bodies
            )

        keep, narrowed = branches[0].memoised(("cond drop", tuple(reads), *branches[1:]), narrow)
        index, *operands = eqn.invars
        invars = [index, *(a for a, k in zip(operands, keep, strict=True) if k)]
        outvars = [v for v, r in zip(eqn.outvars, reads, strict=True) if r]
        return Eqn(self, invars, outvars, {"branches": narrowed}, eqn.source)


def _agree(
    branches: Sequence[Jaxpr], transform: Callable[[Jaxpr, Flags], tuple[Any, Flags]], n: int
) -> tuple[list[Any], Flags]:
    """Transform branches so that they have one type.

    Args:
      transform: gives ``(transformed, flags)`` from a branch and the flags to set in any case.
      n: the number of flags.
    Returns:
      the transformed branches, and the union of their flags, which all of them have.
    """
    flags = [transform(b, (False,) * n)[1] for b in branches]
    union = tuple(map(any, zip(*flags, strict=True)))
    return [transform(b, union)[0] for b in branches], union


def _halves(divided: tuple) -> tuple[tuple[Jaxpr, Jaxpr], Flags]:
    """The two jaxprs of ``linearize_jaxpr`` or ``split_jaxpr``, and the flags."""
    return divided[:2], divided[2]


def _with_flags(transformed: tuple) -> tuple[tuple, Flags]:
    """A transformed body with the kinds of its results, and a flag per boxed one."""
    return transformed, tuple(k is not None for k in transformed[1])


def _joined(branches: Sequence[Jaxpr]) -> tuple[Branches, tuple]:
    """Closed branches with the deduplicated constants of all leading; the constants."""
    if not any(b.constvars for b in branches):
        return tuple(branches), ()
    consts = {id(c): c for b in branches for c in b.consts}

    def join():
        joined = []
        for b in branches:
            own = {id(c): v for v, c in zip(b.constvars, b.consts, strict=True)}
            leading = [own[i] if i in own else Var(c.aval) for i, c in consts.items()]
            joined.append(b.replace(invars=[*leading, *b.invars], constvars=(), consts=(), arg_names=()))
        return tuple(joined)

    # memoized by identity: constants are part of a jaxpr
    return branches[0].memoised(("cond joined", *branches[1:]), join), tuple(consts.values())


def _join_residuals(
    primals: Sequence[Jaxpr], linears: Sequence[Jaxpr], n_res: Sequence[int]
) -> tuple[list[Jaxpr], list[Jaxpr], list[int], int]:
    """Give split branches the same residuals.

    A residual that is an operand is read from there. Others are returned in slots, which branches share by type; a
    branch fills the slots it does not use with zeros. In the body of a ``shard_map`` no slot is shared: of the
    residuals in it one could be the same on all ranks, as what follows takes it to be, and the other not.

    Returns:
      primal branches that return the results and then the slots; linear branches that take operands, slots and
      tangents; the indices of these operands; the number of slots.
    """
    n_out = len(primals[0].outvars) - n_res[0]
    over_ranks = any(map(_has_collective, (*primals, *linears)))
    operands: list[int] = []
    slots: list[ShapedArray] = []
    places: list[list[tuple[bool, int]]] = []
    for primal in primals:
        inputs = {v: i for i, v in enumerate(primal.invars)}
        free = [] if over_ranks else list(range(len(slots)))
        mine = []
        for atom in primal.outvars[n_out:]:
            if atom.__class__ is not Literal and atom in inputs:
                if inputs[atom] not in operands:
                    operands.append(inputs[atom])
                mine.append((True, inputs[atom]))
                continue
            slot = next((s for s in free if slots[s].same_type(atom.aval)), None)
            if slot is None:
                slot = len(slots)
                slots.append(atom.aval.strong())
            else:
                free.remove(slot)
            mine.append((False, slot))
        places.append(mine)

    def primal_branch(primal, mine):
        def fun(*args):
            outs = eval_jaxpr(primal, args)
            filled = {s: x for (is_operand, s), x in zip(mine, outs[n_out:], strict=True) if not is_operand}
            return [*outs[:n_out], *(filled[s] if s in filled else _filler(a) for s, a in enumerate(slots))]

        return stage(fun, primal.in_avals, primal.name)

    def linear_branch(linear, mine):
        def fun(*args):
            chosen, rest = args[: len(operands)], args[len(operands) :]
            residuals = [chosen[operands.index(i)] if is_operand else rest[i] for is_operand, i in mine]
            return eval_jaxpr(linear, [*residuals, *rest[len(slots) :]])

        avals = [primals[0].in_avals[i] for i in operands] + slots + linear.in_avals[len(mine) :]
        return stage(fun, avals, linear.name)

    return (
        [primal_branch(p, m) for p, m in zip(primals, places, strict=True)],
        [linear_branch(p, m) for p, m in zip(linears, places, strict=True)],
        operands,
        len(slots),
    )


def _has_collective(jaxpr: Jaxpr) -> bool:
    return any(
        e.prim.kind == "collective" or any(map(_has_collective, subjaxprs(e.params))) for e in jaxpr.eqns
    )


def _filler(aval: ShapedArray) -> Any:
    """The filler of an unused slot, in the memory of the slot."""
    if dtypes.is_key(aval.dtype):
        value = broadcast_to(scalar(np.zeros((), aval.dtype)[()], aval.dtype), aval.shape)
    else:
        value = zeros(aval)
    return in_memory(value, aval.memory)


def is_inexact(x: Any) -> bool:
    """True if a value is differentiable."""
    return dtypes.is_inexact(x.aval.dtype)


def where_taken(chosen: Any, x: Any) -> Any:
    """Operands of a batched branch, without derivatives at other elements.

    The derivative of a branch at an element that does not take it may be infinite, and zero times that is NaN.
    """
    if not is_inexact(x):
        return x
    return select(broadcast_in_dim(chosen, x.aval.shape, (0,)), x, stop_gradient(x))


def _forwarded(branches: Branches) -> dict[int, int]:
    """The results that are an operand in all branches, and which."""
    places = [{v: j for j, v in enumerate(b.invars)} for b in branches]
    found: dict[int, int] = {}
    for i, atoms in enumerate(zip(*(b.outvars for b in branches), strict=True)):
        ways = {p.get(a) if isinstance(a, Var) else None for p, a in zip(places, atoms, strict=True)}
        (way,) = ways if len(ways) == 1 else (None,)
        if way is not None:
            found[i] = way
    return found


def _choose(index: Any, choices: Sequence[Any]) -> Any:
    """Select for each element of a batch the choice at its index."""
    shape = choices[0].aval.shape
    result = choices[-1]
    for i in range(len(choices) - 2, -1, -1):
        result = select(broadcast_in_dim(eq(index, i), shape, (0,)), choices[i], result)
    return result


cond_p = _Cond()

# -- functions -------------------------------------------------------------------------------------


_NO_OPERAND = object()  # None is an operand: a pytree of nothing


@overload
def cond(
    pred: ArrayLike,
    true_fun: Callable[..., R],
    false_fun: Callable[..., R],
    *operands: Any,
    operand: Any = ...,
) -> R: ...
@overload
def cond(
    pred: ArrayLike,
    true_fun: Any,
    false_fun: Callable[[Any], R],
    false_operand: Any,
    branch: Callable[[Any], R],
    /,
) -> R: ...


@carried(cond_with)
def cond(pred: Any, true_fun: Any, false_fun: Any, *operands: Any, operand: Any = _NO_OPERAND) -> Any:
    """``true_fun(*operands)`` if ``pred`` holds, else ``false_fun(*operands)``.

    Both are traced, one runs. Under ``vmap`` with a mapped ``pred`` both run, and a select chooses.
    ``cond(pred, x, true_fun, y, false_fun)``, an operand for each function, is ``true_fun(x)`` or ``false_fun(y)``.

    Args:
      pred: a boolean or numeric scalar; a number holds unless it is zero.
      true_fun, false_fun: functions of the operands with results of one structure and type.
      operands: pytrees.
      operand: a single operand, by name, instead of ``operands``.
    Raises:
      BranchError: the results of the branches differ in structure or type.
    """
    if not callable(true_fun) and callable(false_fun) and len(operands) == 2 and callable(operands[1]):
        on_true, on_false, operands = false_fun, operands[1], (true_fun, operands[0])
        true_fun, false_fun = (lambda x, y: on_true(x)), (lambda x, y: on_false(y))
    for f in (true_fun, false_fun):
        check_callable(f, "cond")
    pred = lift(pred, "the predicate of cond")
    if pred.aval.ndim or not (dtypes.is_bool(pred.aval.dtype) or dtypes.is_numeric(pred.aval.dtype)):
        raise errors.ArgumentError(
            f"the predicate of cond is a boolean of rank 0, not {pred.aval}.",
            where=source.here(),
            fix="reduce it: pred.all() or pred.any(); or choose elementwise: bnp.where(pred, x, y)",
        )
    if not dtypes.is_bool(pred.aval.dtype):
        pred = ne(pred, 0)
    operands = _operands("cond", operands, operand)
    return _branch("cond", convert(pred, np.dtype(np.int32)), (false_fun, true_fun), operands)


@carried(switch_with)
def switch(
    index: ArrayLike, branches: Sequence[Callable[..., R]], *operands: Any, operand: Any = _NO_OPERAND
) -> R:
    """``branches[index](*operands)``; an index out of range takes the nearest branch.

    All are traced, one runs. Under ``vmap`` with a mapped ``index`` all run, and a select chooses.

    Args:
      index: an integer scalar; clamped to the range.
      branches: functions of the operands with results of one structure and type.
      operands: pytrees.
      operand: a single operand, by name, instead of ``operands``.
    Raises:
      BranchError: the results of the branches differ in structure or type.
    """
    if not isinstance(branches, Sequence) or not branches:
        raise errors.ArgumentError(
            f"switch takes a non-empty sequence of functions, not {branches!r:.60}.", where=source.here()
        )
    for f in branches:
        check_callable(f, "switch")
    index = lift(index, "the index of switch")
    if index.aval.ndim or not dtypes.is_integer(index.aval.dtype):
        raise errors.ArgumentError(
            f"the index of switch is an integer of rank 0, not {index.aval}.", where=source.here()
        )
    operands = _operands("switch", operands, operand)
    dtype = (
        index.aval.dtype
    )  # clamped in int64, since an index may exceed 32 bits, and a small dtype may not reach all branches
    bound = scalar(min(len(branches) - 1, int(dtypes.iinfo(dtype).max)), dtype)
    index = convert(clamp(scalar(0, dtype), index, bound), np.dtype(np.int32))
    return _branch("switch", index, tuple(branches), operands)


def _operands(what: str, operands: tuple, operand: Any) -> tuple:
    """The operands, positional or the single one by name."""
    if operand is _NO_OPERAND:
        return operands
    if operands:
        raise errors.ArgumentError(
            f"{what} got positional operands and another by name.",
            where=source.here(),
            fix="pass all by place",
        )
    return (operand,)


def _branch(what: str, index: Any, functions: Sequence[Callable], operands: tuple) -> Any:
    """Trace the functions on the operands, and bind the cond."""
    leaves, in_tree = tree.flatten(operands)
    paths = treepath.leaf_paths(in_tree)
    values = as_values(leaves, lambda i: f"operands{paths[i]}")
    traced = [_trace(f, in_tree, values, index) for f in functions]
    out_tree, first_name = traced[0][1], name_of(functions[0])
    for f, (_, other_tree) in zip(functions[1:], traced[1:], strict=True):
        if other_tree != out_tree:
            raise errors.BranchError(
                f"the branches of {what} return different structures.",
                where=source.here(),
                why="; ".join(treepath.diff(out_tree, other_tree, first_name, name_of(f))[:4]),
            )
    out_paths = treepath.leaf_paths(out_tree)
    common = []
    for path, outs in zip(out_paths, zip(*[j.out_avals for j, _ in traced], strict=True), strict=True):
        strong = [a for a in outs if not a.weak_type] or outs
        required = strong[0]
        for f, a in zip(functions, outs, strict=True):
            joins = (
                a.weak_type and dtypes.promote((a.dtype, True), (required.dtype, False))[0] == required.dtype
            )
            if a.shape != required.shape or (a.dtype != required.dtype and not joins):
                i = outs.index(required)
                raise errors.BranchError(
                    f"the branches of {what} return different types: the result{path} is {required} from "
                    f"{name_of(functions[i])} and {a} from {name_of(f)}.",
                    where=source.here(),
                    fix="make them agree: .astype(dtype), or bnp.broadcast_to(x, shape)",
                )
            if a.memory != required.memory:
                raise errors.BranchError(
                    f"the branches of {what} return a value in different memories: the result{path} is {required} "
                    f"from {name_of(functions[outs.index(required)])} and {a} from {name_of(f)}.",
                    where=source.here(),
                    why="where a value is belongs to its type; only device_put moves one.",
                    fix=f"{move_to(required.memory)} in {name_of(f)}",
                )
        common.append(required.dtype)
    jaxprs = [_with_dtypes(j, common) for j, _ in traced]
    outs = cond_p._call(index, jaxprs, values)
    return tree.unflatten(out_tree, outs)


def _trace(f: Callable, in_tree: tree.TreeDef, values: Sequence[Any], index: Any) -> tuple[Jaxpr, Any]:
    """Trace a branch; its jaxpr, and the structure of its results."""
    out_tree: Any = None
    name = name_of(f)

    def flat(*leaves):
        nonlocal out_tree
        out_leaves, out_tree = tree.flatten(f(*tree.unflatten(in_tree, leaves)))
        return as_values(out_leaves, lambda i: f"the result{treepath.leaf_paths(out_tree)[i]} of {name}")

    return stage_body(flat, [v.aval for v in values], values, name, chosen_by=index), out_tree


def _with_dtypes(jaxpr: Jaxpr, required: Sequence[np.dtype]) -> Jaxpr:
    """Convert weakly typed results of the jaxpr to the common dtypes of the branches."""
    if all(a.dtype == d for a, d in zip(jaxpr.out_avals, required, strict=True)):
        return jaxpr
    return stage(
        lambda *xs: [convert(x, d) for x, d in zip(eval_jaxpr(jaxpr, xs), required, strict=True)],
        jaxpr.in_avals,
        jaxpr.name,
    )
