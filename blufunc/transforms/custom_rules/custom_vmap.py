"""``custom_vmap``: a function whose batching rule the user gives.

Transforms, stage 2. The function is staged as a call that keeps the rule; ``vmap`` of the call runs the rule in
the place of batching the body. Derivatives are calls too, of the derivative's jaxpr, and their batching rules are
made from the user's: the jvp over a batch is the jvp of the rule, and the transpose over a batch is its transpose.
Reverse mode keeps the arguments and recomputes the inside, as ``checkpoint`` does: what the inside of a rule
keeps is not what the inside of one example keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np

from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr, eval_jaxpr
from blufunc.core.ir.trace import EVAL, state
from blufunc.core.primitives import effects
from blufunc.core.primitives.linear_ops import batched_front, instantiate, move_dim
from blufunc.core.primitives.tangents import Zero, is_linear, zero
from blufunc.core.programs.simplify import dce
from blufunc.core.programs.stage import stage
from blufunc.core.pytree import paths as treepath
from blufunc.core.pytree import tree
from blufunc.errors import ArgumentError, ShapeError, TreeError, UnsupportedError
from blufunc.transforms.arguments import (
    FlatFunction,
    as_values,
    bind_positional,
    check_callable,
    check_structure,
    name_of,
)
from blufunc.transforms.autodiff.jvp import jvp_flat, jvp_jaxpr
from blufunc.transforms.autodiff.transpose import backward_pass, transpose_jaxpr
from blufunc.transforms.batching.batch import Axis
from blufunc.transforms.control_flow.scan import scan
from blufunc.transforms.custom_rules.custom_call import (
    CustomFunction,
    RuledCall,
    check_pair,
    flat_arguments,
    staged,
)

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class _CustomVmapCall(RuledCall):
    """A call that is batched by ``rule``."""

    name = "custom_vmap_call"

    def jvp(self, primals, tangents, *, jaxpr, rule, name):
        nonzeros = tuple(t.__class__ is not Zero for t in tangents)
        derived, out_nonzeros = _derivative(jaxpr, nonzeros)
        closed, extra = derived.hoist()
        ins = [*extra, *primals, *(t for t in tangents if t.__class__ is not Zero)]
        derived_rule = _JVPRule(rule, nonzeros, out_nonzeros, len(extra))
        outs = self.bind(*ins, jaxpr=closed, rule=derived_rule, name=name)
        rest = iter(outs[len(out_nonzeros) :])
        outs = outs[: len(out_nonzeros)]
        return outs, [next(rest) if nz else zero(o.aval) for o, nz in zip(outs, out_nonzeros, strict=True)]

    def linearize(self, trace, primals, tangents, *, jaxpr, rule, name):
        outs = self.bind(*primals, jaxpr=jaxpr, rule=rule, name=name)
        nonzeros = tuple(t.__class__ is not Zero for t in tangents)
        derived, out_nonzeros = _derivative(_silent(jaxpr, name), nonzeros)
        if not any(out_nonzeros):
            return outs, [zero(o.aval) for o in outs]
        used = (*(False,) * len(outs), *(True,) * sum(out_nonzeros))
        closed, extra = derived.memoised("tangents", lambda: dce(derived, used)).hoist()
        ins = [*extra, *primals, *(t for t in tangents if t.__class__ is not Zero)]
        derived_rule = _JVPRule(rule, nonzeros, out_nonzeros, len(extra), tangents_only=True)
        rest = iter(trace.tangents.process(self, ins, {"jaxpr": closed, "rule": derived_rule, "name": name}))
        return outs, [next(rest) if nz else zero(o.aval) for o, nz in zip(outs, out_nonzeros, strict=True)]

    def transpose(self, cts, *args, jaxpr, rule, name):
        linear = tuple(map(is_linear, args))
        nonzeros = tuple(ct.__class__ is not Zero for ct in cts)
        transposed, out_nonzeros = transpose_jaxpr(jaxpr, linear, nonzeros)
        closed, extra = transposed.hoist()
        ins = [a for a in args if not is_linear(a)] + [ct for ct in cts if ct.__class__ is not Zero]
        avals = [a.aval for a in args if is_linear(a)]
        rule = _TransposedRule(rule, linear, avals, nonzeros, out_nonzeros, len(extra))
        outs = iter(self.bind(*extra, *ins, jaxpr=closed, rule=rule, name=name))
        for a, nz in zip([a for a in args if is_linear(a)], out_nonzeros, strict=True):
            if nz:
                a.add(next(outs))

    def batch(self, axis, args, dims, *, jaxpr, rule, name):
        fronts = [a if d is None else move_dim(a, d, 0) for a, d in zip(args, dims, strict=True)]
        outs, out_batched = rule(axis, [d is not None for d in dims], fronts)
        return outs, [0 if b else None for b in out_batched]


custom_vmap_call_p = _CustomVmapCall()


def _derivative(jaxpr: Jaxpr, nonzeros: tuple[bool, ...]) -> tuple[Jaxpr, tuple[bool, ...]]:
    """The jaxpr of the jvp, with tangents for all inexact results."""
    return jvp_jaxpr(jaxpr, nonzeros, tuple(dtypes.is_inexact(a.dtype) for a in jaxpr.out_avals))


def _silent(jaxpr: Jaxpr, name: str) -> Jaxpr:
    """The jaxpr to recompute in the backward pass: without effects."""
    silent = effects.silenced(jaxpr)
    if silent.effects:
        raise UnsupportedError(
            f"reverse mode through {name}, a custom_vmap with the effects {', '.join(sorted(silent.effects))}.",
            where=source.here(),
            why="it is recomputed in the backward pass, which would repeat them.",
            fix="move the io_callback out of it",
        )
    return silent


class Rule:
    """A batching rule on flat lists, batch axes in front.

    ``rule(axis, batched, args)`` returns ``(outs, out_batched)``.

    Attributes:
      closed: for each operand of the call whether the function closes over it; the user's rule is not given these.
    """

    def __init__(self, name: str, closed: Sequence[bool]):
        self.__name__ = name
        self.closed = tuple(closed)

    def __call__(self, axis: Axis, batched: Sequence[bool], args: Sequence) -> tuple[list, list[bool]]:
        for x, b, c in zip(args, batched, self.closed, strict=True):
            if b and c:
                raise self._refuse(f"mapped by vmap ({x.aval} with the mapped axis)")
        return self.run(axis, list(batched), list(args))

    def run(self, axis: Axis, batched: list[bool], args: list) -> tuple[list, list[bool]]:
        """The rule, where nothing that is closed over is batched."""
        raise NotImplementedError

    def _refuse(self, how: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.__name__} has a batching rule of its own and closes over a value that is {how}.",
            where=source.here(),
            why="its rule is given the arguments only.",
            fix="pass the value as an argument",
        )


class _UserRule(Rule):
    """The rule that the user gave, its results checked."""

    def __init__(
        self, owner: custom_vmap, in_tree: tree.TreeDef, n_consts: int, flat: FlatFunction, jaxpr: Jaxpr
    ):
        super().__init__(name_of(owner.fun), [i < n_consts for i in range(len(jaxpr.invars))])
        self.rule, self.in_tree, self.n_consts = owner.rule, in_tree, n_consts
        self.out_tree, self.out_avals = flat.out_tree, jaxpr.out_avals

    def run(self, axis, batched, args):
        n, text = self.n_consts, f"the batching rule of {self.__name__}"
        flags, _ = tree.unflatten(self.in_tree, batched[n:])
        values, _ = tree.unflatten(self.in_tree, args[n:])
        with source.own_lines():
            pair = self.rule(axis.size, flags, *values)
        out, flags_out = check_pair(
            pair, text, "(out, out_batched)", TreeError, "return out, tree.map(lambda _: True, out)"
        )
        leaves, structure = tree.flatten(out)
        check_structure(self.out_tree, structure, text, ("the function's result", "out"))
        outs = as_values(leaves, lambda i: f"out of {text}")
        out_batched = self._flags(flags_out, text)
        paths = treepath.leaf_paths(structure)
        for path, out, b, aval in zip(paths, outs, out_batched, self.out_avals, strict=True):
            want = aval.with_shape((axis.size, *aval.shape)) if b else aval
            if not out.aval.same_type(want):
                raise ShapeError(
                    f"{text} returned out{path} as {out.aval}, where {want} is expected.",
                    where=source.here(),
                    why=f"the function returns {aval}, and out_batched{path} is {b}.",
                    fix=f"put the batch axis, of size {axis.size}, first in results that are batched",
                )
        return outs, out_batched

    def _flags(self, given: Any, text: str) -> list[bool]:
        flags, structure = tree.flatten(given)
        check_structure(self.out_tree, structure, text, ("out", "out_batched"))
        for b in flags:
            if not isinstance(b, (bool, np.bool_)):
                raise ArgumentError(
                    f"{text} returned out_batched with {b!r:.60}.",
                    where=source.here(),
                    fix="a bool for each result: whether it has the batch axis, first",
                )
        return [bool(b) for b in flags]


class _JVPRule(Rule):
    """The rule of the jvp, which is the jvp of the rule.

    Operands are ``n_extra`` constants, the primals, and the nonzero tangents. An argument counts as batched where its
    primal or its tangent is: the other is repeated.
    """

    def __init__(
        self,
        rule: Rule,
        nonzeros: tuple[bool, ...],
        out_nonzeros: tuple[bool, ...],
        n_extra: int,
        tangents_only: bool = False,
    ):
        self.differentiates_closure = any(c and nz for c, nz in zip(rule.closed, nonzeros, strict=True))
        of_tangents = [c for c, nz in zip(rule.closed, nonzeros, strict=True) if nz]
        super().__init__(rule.__name__, [*(True,) * n_extra, *rule.closed, *of_tangents])
        self.rule, self.nonzeros, self.out_nonzeros = rule, nonzeros, out_nonzeros
        self.n_extra, self.tangents_only = n_extra, tangents_only

    def run(self, axis, batched, args):
        if self.differentiates_closure:
            raise self._refuse("differentiated")
        start, stop = self.n_extra, self.n_extra + len(self.nonzeros)
        given = iter(zip(args[stop:], batched[stop:], strict=True))
        primals, tangents, together = [], [], []
        for p, p_batched, nz in zip(args[start:stop], batched[start:stop], self.nonzeros, strict=True):
            t, t_batched = next(given) if nz else (zero(p.aval), False)
            both = p_batched or t_batched
            primals.append(p if p_batched == both else batched_front(axis, p, None))
            if nz and t_batched != both:
                t = batched_front(axis, t, None)
            tangents.append(t if nz else zero(primals[-1].aval))
            together.append(both)
        out_batched: list[bool] = []

        def flat(*xs):
            outs, out_batched[:] = self.rule(axis, together, xs)
            return outs

        fun: Callable = flat
        if self.tangents_only:  # values are recomputed
            recomputed = _silent(stage(flat, [p.aval for p in primals], self.__name__), self.__name__)
            fun = lambda *xs: eval_jaxpr(recomputed, xs)
        outs, out_ts = jvp_flat(fun, primals, tangents)
        out_ts = [instantiate(t) for t, nz in zip(out_ts, self.out_nonzeros, strict=True) if nz]
        t_batched = [b for b, nz in zip(out_batched, self.out_nonzeros, strict=True) if nz]
        return (out_ts, t_batched) if self.tangents_only else ([*outs, *out_ts], [*out_batched, *t_batched])


class _TransposedRule(Rule):
    """The rule of the transpose: the transpose of the rule.

    Every linear operand is batched. Operands are ``n_extra`` constants, nonlinear operands, and nonzero cotangents.
    """

    def __init__(
        self,
        rule: Rule,
        linear: tuple[bool, ...],
        linear_avals: Sequence[ShapedArray],
        ct_nonzeros: tuple[bool, ...],
        out_nonzeros: tuple[bool, ...],
        n_extra: int,
    ):
        self.differentiates_closure = any(c and lin for c, lin in zip(rule.closed, linear, strict=True))
        of_others = [c for c, lin in zip(rule.closed, linear, strict=True) if not lin]
        super().__init__(rule.__name__, [*(True,) * n_extra, *of_others, *(False,) * sum(ct_nonzeros)])
        self.rule, self.linear, self.linear_avals = rule, linear, linear_avals
        self.ct_nonzeros, self.out_nonzeros, self.n_extra = ct_nonzeros, out_nonzeros, n_extra

    def run(self, axis, batched, args):
        if self.differentiates_closure:
            raise self._refuse("differentiated")
        start, stop = self.n_extra, self.n_extra + self.linear.count(False)
        given = iter(
            [
                batched_front(axis, ct, 0 if b else None)
                for ct, b in zip(args[stop:], batched[stop:], strict=True)
            ]
        )
        cts = [next(given) if nz else None for nz in self.ct_nonzeros]
        flags = iter(batched[start:stop])
        together = [lin or next(flags) for lin in self.linear]

        def flat(*xs):
            others, ts = iter(args[start:stop]), iter(xs)
            operands = [next(ts) if lin else next(others) for lin in self.linear]
            outs, out_batched = self.rule(axis, together, operands)
            return [batched_front(axis, x, 0 if b else None) for x, b in zip(outs, out_batched, strict=True)]

        jaxpr = stage(flat, [a.with_shape((axis.size, *a.shape)) for a in self.linear_avals], self.__name__)
        found = backward_pass(jaxpr, [None] * len(self.linear_avals), cts)
        kept = [instantiate(ct) for ct, nz in zip(found, self.out_nonzeros, strict=True) if nz]
        return kept, [True] * len(kept)


class custom_vmap(CustomFunction[P, R]):
    """A function whose batching rule the user gives.

        @bf.custom_batching.custom_vmap
        def f(x, y): ...

        @f.def_vmap
        def f_vmap(axis_size, in_batched, x, y):
            x_batched, y_batched = in_batched
            ...
            return out, out_batched

    Under ``vmap`` the rule runs in the function's place, once for each ``vmap`` around. Derivatives are those of the
    function, and over a batch those of the rule; in reverse mode the function is evaluated again in the backward
    pass. Transforms other than plain evaluation trace the function.

    Args:
      fun: a function of pytrees of arrays.
    """

    def __init__(self, fun: Callable[P, R]):
        super().__init__(fun)
        self.rule: Any = None

    def def_vmap(self, rule: F) -> F:
        """Set the rule, and return it.

        Args:
          rule: ``rule(axis_size, in_batched, *args) -> (out, out_batched)``. ``in_batched`` is the tuple of arguments
            with a bool for each array: whether it has the batch axis, which then is axis 0. ``out`` is like the
            function's result, and ``out_batched`` has a bool for each of its arrays.
        """
        check_callable(rule, "def_vmap")
        self.rule = rule
        return rule

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.rule is None:
            raise self.undefined("a rule", "@{}.def_vmap", ArgumentError)
        args = bind_positional(self.fun, args, kwargs)
        if state.trace is EVAL:
            return self.fun(*args)
        in_tree, values = flat_arguments(self.fun, args)
        flat, jaxpr, consts = staged(self.fun, in_tree, values)
        rule = _UserRule(self, in_tree, len(consts), flat, jaxpr)
        outs = custom_vmap_call_p.bind(*consts, *values, jaxpr=jaxpr, rule=rule, name=name_of(self.fun))
        return tree.unflatten(flat.out_tree, outs)


def sequential_vmap(fun: Callable[P, R]) -> custom_vmap[P, R]:
    """A function that ``vmap`` maps by a loop, one element at a time.

    Args:
      fun: a function of pytrees of arrays.
    Returns:
      a function with the same results.
    """
    check_callable(fun, "sequential_vmap")
    mapped: Any = custom_vmap(fun)

    @mapped.def_vmap
    def rule(axis_size, in_batched, *args):
        leaves, structure = tree.flatten(args)
        flags = tree.leaves(in_batched)

        def step(_, xs):
            each = iter(xs)
            whole = [next(each) if b else x for x, b in zip(leaves, flags, strict=True)]
            return (), mapped(*tree.unflatten(structure, whole))

        xs = [x for x, b in zip(leaves, flags, strict=True) if b]
        _, out = scan(step, (), xs, length=axis_size)
        return out, tree.map(lambda _: True, out)

    return mapped
