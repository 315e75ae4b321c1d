"""``Transform``: a transform of the user's own, from rules for primitives.

Transforms, stage 2. A value under a transform is a *box*: a pytree of arrays that stands for the array that the
function sees (an interval's two ends, a value with its unit, a Taylor series). Each operation on a box is given to
the rule of its primitive, which runs under the parent trace, so that it is itself traced, differentiated and
batched. Primitives that run jaxprs (``jit``, ``scan``, ``cond``, ...) need no rules: they know how to ``rewrite``
themselves with transformed bodies, and ``Bodies`` is what they do it with.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift as lift_value
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr, eval_jaxpr, trace_scope
from blufunc.core.ir.trace import Array, Trace, Tracer, leak_error, new_trace, set_trace, state
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.programs.stage import stage
from blufunc.core.pytree import nodes, tree
from blufunc.core.pytree import paths as treepath
from blufunc.transforms.arguments import as_values, check_callable, name_of

Rule = Callable[..., Any]


class Transform:
    """A transform of functions, made of rules for primitives.

        interval = bf.Transform("interval", box=Interval, lift=lambda x: Interval(x, x))

        @interval.rule(lax.neg_p)
        def neg(x):
            return Interval(-x.hi, -x.lo)

        interval(f)(Interval(0.0, 1.0))

    Calling it with a function gives the transformed function: arguments may hold boxes in the place of arrays, and
    the results hold boxes wherever they depend on one. Arguments that are neither reach the function as they are.

    Args:
      name: what messages call it.
      box: the class of boxes, a pytree. None: any pytree is one, every argument is lifted, and every operation on
        what was computed from arguments is given to a rule.
      lift: ``array -> box`` for operands that are not boxed, next to ones that are; it may return the array as it is.
        Without it rules must take plain arrays among their operands.
      lower: ``(box, aval) -> result`` for the results of the transformed function; they are boxes by default.
      like: ``box -> array`` of the shape and dtype of the array that an argument stands for; by default its first
        leaf.
      settle: ``(box, aval) -> box`` for what loops carry and branches return. Every step and every branch must give
        boxes of one structure and types: here they are brought to it, where rules may give others.
    """

    def __init__(
        self,
        name: str,
        box: type | None = None,
        lift: Callable[[Any], Any] | None = None,
        lower: Callable[[Any, ShapedArray], Any] | None = None,
        like: Callable[[Any], Any] | None = None,
        settle: Callable[[Any, ShapedArray], Any] | None = None,
    ):
        if box is not None and not isinstance(box, type):
            raise errors.ArgumentError(
                f"Transform: box is the class of boxes, not {box!r:.60}.", where=source.here()
            )
        if not isinstance(name, str):
            raise errors.ArgumentError(
                f"Transform: its name is a string, not {name!r:.60}.",
                where=source.here(),
                fix='Transform("interval")',
            )
        for argument, value in (("lift", lift), ("lower", lower), ("like", like), ("settle", settle)):
            if value is not None:
                check_callable(value, f"Transform({argument}=)")
        self.name = name
        if dataclasses.is_dataclass(box) and not nodes.is_registered(box):
            nodes.register_dataclass(box)  # a class of boxes is a pytree
        self.box = box
        self.lift = lift if lift is not None or box is not None else lambda x: x
        self.lower = lower
        self.like = like
        self.settle = settle
        self.rules: dict[Primitive, Rule] = {}
        self.default_rule: Rule | None = None
        self._edition = 0  # of the rules: bodies are transformed anew when they change
        self._bodies: weakref.WeakKeyDictionary[Jaxpr, dict] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"Transform({self.name!r})"

    def rule(self, *prims: Primitive) -> Callable[[Rule], Rule]:
        """Decorator: the rule of some primitives, ``rule(*operands, **params) -> result``.

        Operands are boxes, or arrays where nothing is boxed; the result is a box or an array, or a list of them for
        a primitive with multiple results. For what runs jaxprs a rule takes precedence over its rewriting. A function
        that is compiled, ``jit(t(f))``, keeps the rules that it was traced with.
        """
        for p in prims:
            if not isinstance(p, Primitive):
                raise errors.ArgumentError(
                    f"a rule of {self.name} is for primitives, not {p!r:.60}.",
                    where=source.here(),
                    fix="their names end in _p: @transform.rule(lax.mul_p)",
                )

        def register(rule: Rule) -> Rule:
            check_callable(rule, f"{self.name}.rule")
            for p in prims:
                self.rules[p] = rule
            self._edition += 1
            return rule

        return register

    def leafwise(self, *prims: Primitive) -> None:
        """Apply primitives to each array of a box.

            interval.leafwise(lax.reshape_p, lax.reduce_sum_p, lax.exp_p)

        is the rule of what moves or adds elements and, for an interval, of increasing functions. Boxes among the
        operands must be of one structure; a plain array goes with each of their arrays.
        """
        for p in prims:
            self.rule(p)(functools.partial(self._each_leaf, p))

    def _each_leaf(self, prim: Primitive, *operands: Any, **params: Any) -> Any:
        boxed = [self.box is None or self._is_box(x) for x in operands]
        boxes = [tree.flatten(x) for x, b in zip(operands, boxed, strict=True) if b]
        structures = [structure for _, structure in boxes]
        for structure in structures[1:]:
            if structure != structures[0]:
                differences = treepath.diff(structures[0], structure, "one operand", "another")
                raise errors.TreeError(
                    f"{self.name}: {prim.name} was given boxes that differ.",
                    where=self.where(),
                    why="; ".join(differences[:3]),
                    fix=f"give it a rule that knows what to do, @{self.name}.rule(lax.{prim.name}_p)",
                )
        columns = iter([leaves for leaves, _ in boxes])
        n = structures[0].num_leaves
        rows = zip(
            *[next(columns) if b else [x] * n for x, b in zip(operands, boxed, strict=True)], strict=True
        )
        results = [prim.bind(*as_values(row, lambda i: f"operand {i}"), **params) for row in rows]
        if not prim.multiple_results:
            return tree.unflatten(structures[0], results)
        return [tree.unflatten(structures[0], column) for column in zip(*results, strict=True)]

    def default(self, rule: Rule) -> Rule:
        """Decorator: the default rule, ``rule(prim, *operands, **params) -> result``."""
        check_callable(rule, f"{self.name}.default")
        self.default_rule = rule
        self._edition += 1
        return rule

    def __call__(self, fun: Callable) -> Callable:
        """``fun`` as a function of boxes."""
        check_callable(fun, self.name)

        @functools.wraps(fun)
        def transformed(*args, **kwargs):
            given = {
                id(args),
                id(kwargs),
                id(call := (args, kwargs)),
            }  # no boxes, if tuples or dicts are such
            leaves, in_tree = tree.flatten(call, is_leaf=lambda x: self._is_box(x) and id(x) not in given)
            trace = TransformTrace(state.trace, self)
            with new_trace(trace):
                inputs = [self._argument(trace, x) for x in leaves]
                args, kwargs = tree.unflatten(in_tree, inputs)
                flat, out_tree = tree.flatten(fun(*args, **kwargs))
                paths = treepath.leaf_paths(out_tree)
                outs = as_values(flat, lambda i: f"the result of {name_of(fun)}{paths[i]}")
                outs = [trace.box_of(x) for x in outs]
            lowered = [self.lower(x.box, x.aval) if x.__class__ is Boxed and self.lower else x for x in outs]
            return tree.unflatten(out_tree, [x.box if x.__class__ is Boxed else x for x in lowered])

        return transformed

    def _is_box(self, x: Any) -> bool:
        return self.box is not None and isinstance(x, self.box)

    def _argument(self, trace: TransformTrace, x: Any) -> Any:
        """An argument inside: a tracer for a box, an array, or itself."""
        if self._is_box(x):
            return TransformTracer(trace, x, self._like(x).strong())
        if self.box is not None and not isinstance(x, (Array, np.ndarray, np.generic)):
            return x  # a number, a flag, a name: nothing that needs a box
        value = lift_value(x, f"an argument of a function under {self.name}")
        if self.box is None:
            return TransformTracer(trace, self.lift(value), value.aval)  # type: ignore[misc]
        return value

    def _like(self, box: Any) -> ShapedArray:
        """The type of the array that a box stands for."""
        if self.like is not None:
            return lift_value(self.like(box), f"what like says of {self.name}").aval
        leaves = tree.leaves(box)
        if not leaves:
            raise errors.ArgumentError(
                f"{self.name}: {box!r:.60} holds no array, so that it stands for none.",
                where=source.here(),
                fix="give the box an array, or give Transform(..., like=) the array that a box stands for",
            )
        return lift_value(leaves[0], f"leaf 0 of a box of {self.name}").aval

    def where(self) -> str | None:
        """The line of the transformed function, for the messages of rules."""
        return source.here()

    def missing(self, prim: Primitive) -> errors.UnsupportedError:
        """The error for a primitive without rule."""
        return errors.UnsupportedError(
            f"the transform {self.name} has no rule for {prim.name}.",
            where=self.where(),
            fix=f"define one, @{self.name}.rule(lax.{prim.name}_p), or a default for all, @{self.name}.default",
        )


class Boxed(NamedTuple):
    """A box, and the type of the array that it stands for."""

    box: Any
    aval: ShapedArray


class TransformTracer(Tracer):
    """An array under a user's transform: its box."""

    __slots__ = ("box",)

    def __init__(self, trace: Trace, box: Any, aval: ShapedArray, source=None):
        self.trace = trace
        self.box = box
        self.aval = aval
        self.source = source
        self.label = None


class TransformTrace(Trace):
    """Gives the operations on boxes to the rules of a transform."""

    __slots__ = ("name", "parent", "transform")

    def __init__(self, parent: Trace, transform: Transform):
        super().__init__()
        self.parent = parent
        self.transform = transform
        self.name = transform.name

    def box_of(self, x: Any) -> Any:
        """``Boxed`` for what has a box; the value itself for what has none."""
        if x.__class__ is TransformTracer:
            if x.trace is self:
                return Boxed(x.box, x.aval)
            if not x.trace.alive:
                raise leak_error(x)
        return x if isinstance(x, Array) else lift_value(x)

    def process(self, prim, args, params):
        operands = [self.box_of(a) for a in args]
        with set_trace(self.parent):
            if not any(x.__class__ is Boxed for x in operands):
                return self.parent.process(prim, operands, params)
            # what a rule computes stands at the line of the function, not at that of the rule
            line, previous = source.replay.line or source.current(), source.replay.line
            source.replay.line = line
            try:
                outs = self._results(prim, operands, params)
            finally:
                source.replay.line = previous
        tracers = [TransformTracer(self, *x, line) if x.__class__ is Boxed else x for x in outs]
        return tracers if prim.multiple_results else tracers[0]

    def _results(self, prim: Primitive, operands: list, params: dict) -> list:
        """The results, each ``Boxed`` or a value."""
        t = self.transform
        rule = t.rules.get(prim)
        if rule is None and prim.rewrite is not None:
            return prim.rewrite(Bodies(t), operands, **params)
        if rule is None:
            if t.default_rule is None:
                raise t.missing(prim)
            rule = functools.partial(t.default_rule, prim)
        avals = prim.typed(tuple([x.aval for x in operands]), params)
        ins = [x.box if x.__class__ is Boxed else x if t.lift is None else t.lift(x) for x in operands]
        result = rule(*ins, **params)
        if not prim.multiple_results:
            result, avals = [result], (avals,)
        elif not _is_list(result, len(avals), t.box):
            raise errors.ArgumentError(
                f"the rule of {t.name} for {prim.name} must return a list of {len(avals)} results, not {result!r:.60}.",
                where=t.where(),
            )
        return [self._result(x, aval, prim) for x, aval in zip(result, avals, strict=True)]

    def _result(self, x: Any, aval: ShapedArray, prim: Primitive) -> Any:
        if self.transform.box is None or isinstance(x, self.transform.box):
            return Boxed(x, aval.strong())
        value = lift_value(x, f"the result of the rule of {self.name} for {prim.name}")
        if not value.aval.same_type(aval):
            raise errors.ShapeError(
                f"the rule of {self.name} for {prim.name} returned an array {value.aval} for one of type {aval}.",
                where=self.transform.where(),
                fix=f"return it in a {self.transform.box.__name__}, or with that shape and dtype",
            )
        return value


def _is_list(result: Any, n: int, box: type | None) -> bool:
    """True for a list of n results, not a box that is a tuple of n arrays."""
    is_box = box not in (None, tuple, list) and isinstance(result, box)  # type: ignore[arg-type]
    return isinstance(result, (list, tuple)) and not is_box and len(result) == n


class Kind(NamedTuple):
    """The static part of a box, as bodies are traced for it."""

    structure: tree.TreeDef
    leaves: tuple[ShapedArray, ...]
    aval: ShapedArray

    def __str__(self) -> str:
        return f"{self.structure} of {', '.join(map(str, self.leaves)) or 'no arrays'}, for {self.aval}"

    def of_element(self, what: str) -> Kind:
        """The kind of the elements along the first axis."""
        for a in (*self.leaves, self.aval):
            if not a.shape or a.shape[0] != self.aval.shape[0]:
                raise errors.ShapeError(
                    f"{what} takes the elements of {self.aval} apart, and its box holds an array of type {a}.",
                    where=source.here(),
                    fix="give the arrays of boxes the leading axes of the value, and keep what is static in a field "
                    "that is not an array",
                )
        element = lambda a: ShapedArray(a.shape[1:], a.dtype)
        return Kind(self.structure, tuple(map(element, self.leaves)), element(self.aval))


Kinds = Sequence[Kind | None]


class Bodies:
    """Transformed bodies, for primitives that run jaxprs.

    Operands and results are ``Boxed`` or values; a kind is None for a value.
    """

    def __init__(self, transform: Transform):
        self.transform = transform

    def lifted(self, x: Any) -> Any:
        """A value as ``Boxed``, of the kind that loops carry and branches return.

        Raises:
          UnsupportedError: the transform has no ``lift``, or leaves such values as they are.
        """
        t = self.transform
        if x.__class__ is Boxed:
            return x if t.settle is None else Boxed(t.settle(x.box, x.aval), x.aval)
        box = x if t.lift is None else t.lift(x)
        if t.box is not None and not isinstance(box, t.box):
            raise errors.UnsupportedError(
                f"{t.name} meets a plain {x.aval} where another branch or step has a box.",
                where=source.here(),
                why="the branches of a cond, and the steps of a loop, give results of one kind.",
                fix=f"have lift={'...' if t.lift is None else 'the function that was given'} make a box of it",
            )
        return Boxed(box if t.settle is None else t.settle(box, x.aval), x.aval.strong())

    def plain(self, x: Any, what: str) -> Any:
        """An operand that decides which jaxpr runs, as an array: what its box lowers to.

        Raises:
          UnsupportedError: its box is no such array, and the transform has no ``lower``, or one that gives none.
        """
        if x.__class__ is not Boxed:
            return x
        t = self.transform
        value = x.box if t.lower is None else t.lower(x.box, x.aval)
        if not isinstance(value, Array) or not value.aval.same_type(x.aval):
            raise errors.UnsupportedError(
                f"under {t.name} {what} is a box, {value!r:.80}, and which way it goes is not known.",
                where=source.here(),
                fix=f"give {t.name} a lower that makes an array of such boxes, or a rule for the primitive",
            )
        return value

    def kind(self, x: Any) -> Kind | None:
        """The kind of an operand."""
        if x.__class__ is not Boxed:
            return None
        leaves, structure = tree.flatten(x.box)
        return Kind(structure, tuple([v.aval.strong() for v in as_values(leaves, self._leaf)]), x.aval)

    def leaves(self, xs: Sequence[Any]) -> list[Any]:
        """The arrays of operands, one after the other."""
        flat: list[Any] = []
        for x in xs:
            flat += as_values(tree.leaves(x.box), self._leaf) if x.__class__ is Boxed else [x]
        return flat

    def boxes(self, leaves: Sequence[Any], kinds: Kinds, avals: Sequence[ShapedArray]) -> list[Any]:
        """Operands or results from their arrays, for the types that they stand for."""
        rest = iter(leaves)
        return [
            next(rest)
            if k is None
            else Boxed(tree.unflatten(k.structure, [next(rest) for _ in k.leaves]), aval)
            for k, aval in zip(kinds, avals, strict=True)
        ]

    def body(
        self,
        jaxpr: Jaxpr,
        kinds: Kinds,
        boxed_outs: Sequence[bool] | None = None,
        plain_outs: str | None = None,
    ) -> tuple[Jaxpr, tuple[Kind | None, ...]]:
        """A jaxpr transformed for kinds of operands, a jaxpr of their arrays.

        Its constants stay attached.

        Args:
          boxed_outs: which results must be boxed, lifted if need be.
          plain_outs: have all results lowered to arrays, and call them so in errors.
        Returns:
          the jaxpr, and the kinds of its results.
        """
        t = self.transform
        wanted = tuple(boxed_outs or (False,) * len(jaxpr.outvars))

        def make():
            out_kinds: tuple[Kind | None, ...] = ()

            def fun(*leaves):
                nonlocal out_kinds
                trace = TransformTrace(state.trace, t)
                operands = self.boxes(leaves, kinds, jaxpr.in_avals)
                with new_trace(trace):
                    ins = [TransformTracer(trace, *x) if x.__class__ is Boxed else x for x in operands]
                    outs = [trace.box_of(x) for x in eval_jaxpr(jaxpr, ins)]
                outs = [self.lifted(x) if w else x for x, w in zip(outs, wanted, strict=True)]
                if plain_outs:
                    outs = [self.plain(x, plain_outs) for x in outs]
                out_kinds = tuple(map(self.kind, outs))
                return self.leaves(outs)

            avals = [
                a
                for k, own in zip(kinds, jaxpr.in_avals, strict=True)
                for a in ([own] if k is None else k.leaves)
            ]
            return stage(fun, avals, jaxpr.name), out_kinds

        memo = t._bodies.setdefault(
            jaxpr, {}
        )  # there and not with the jaxpr, which may outlive the transform
        key = (t._edition, tuple(kinds), wanted, plain_outs, trace_scope())
        if key not in memo:
            memo[key] = make()
        return memo[key]

    def agreeing(self, kinds: Sequence[tuple[Kind | None, ...]], what: str) -> tuple[Kind | None, ...]:
        """The kinds that several bodies with the same results boxed have in common.

        Raises:
          BranchError: boxes differ in structure or types.
        """
        for other in kinds[1:]:
            for a, b in zip(kinds[0], other, strict=True):
                if a != b:
                    raise errors.BranchError(
                        f"{self.transform.name}: {what} have boxes that differ: {a} and {b}.",
                        where=source.here(),
                    )
        return kinds[0]

    def inline(self, jaxpr: Jaxpr, operands: Sequence[Any]) -> list[Any]:
        """Apply the rules to the equations of a jaxpr, here and now."""
        trace = TransformTrace(state.trace, self.transform)
        with new_trace(trace):
            ins = [TransformTracer(trace, *x) if x.__class__ is Boxed else x for x in operands]
            return [trace.box_of(x) for x in eval_jaxpr(jaxpr, ins)]

    def _leaf(self, i: int) -> str:
        return f"leaf {i} of a box of {self.transform.name}"
