"""Custom derivatives: ``custom_jvp`` and ``custom_vjp``.

Transforms, stage 2. A function with a rule of its own reaches a differentiating trace as a call to
the rule. A trace that does not differentiate stages the function, so that the rule is still there
for a transform further out; evaluation just calls it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core import dtypes, source, tree, treepath
from blufunc.core.avals import ShapedArray
from blufunc.core.primitive import Primitive, unsupported
from blufunc.core.stage import stage
from blufunc.core.structure import batched_front, instantiate, move_dim, reduce_sum, zeros
from blufunc.core.tangents import Zero, is_linear, zero
from blufunc.core.trace import EVAL, set_trace, state
from blufunc.errors import ArgumentError, GradError, TreeError
from blufunc.transforms.arguments import FlatFunction, as_values, check_structure, labels_of, name_of
from blufunc.transforms.batch import Axis, batch_flat, batch_jaxpr
from blufunc.transforms.calls import Call
from blufunc.transforms.jvp import JVPTrace
from blufunc.transforms.linearize import LinearizeTrace

# -- custom_jvp ------------------------------------------------------------------------------------


class _CustomJVPCall(Call):
    """A call that is differentiated by ``rule(primals, tangents) -> (outs, out_tangents)``, on flat lists."""

    name, inline = "custom_jvp_call", True
    linearize = None  # the rule splits by itself, as any jvp rule

    def jvp(self, primals, tangents, *, jaxpr, rule, name):
        return rule(primals, [instantiate(t) for t in tangents])

    transpose = unsupported("it is differentiated by its own jvp rule before anything is transposed")

    def batch(self, axis, args, dims, *, jaxpr, rule, name):
        batched = tuple(d is not None for d in dims)
        body, out_batched = batch_jaxpr(jaxpr, axis, batched)
        body, consts = body.hoist()
        ins = [a if d is None else move_dim(a, d, 0) for a, d in zip(args, dims, strict=True)]
        n = len(consts)
        rule = _BatchedRule(rule, axis, batched, out_batched, n)
        outs = self.bind(*consts, *ins, jaxpr=body, rule=rule, name=name)
        return outs, [0 if b else None for b in out_batched]


class _BatchedRule:
    """A jvp rule over a batch: batch axes in front, on the outputs named by ``out_batched``."""

    def __init__(self, rule: Callable, axis: Axis, batched: tuple, out_batched: tuple, n_consts: int):
        self.rule, self.axis, self.batched, self.out_batched, self.n = (
            rule,
            axis,
            batched,
            out_batched,
            n_consts,
        )

    def __call__(self, primals: Sequence, tangents: Sequence) -> tuple[list, list]:
        primals, tangents = primals[self.n :], tangents[self.n :]
        dims = [0 if b else None for b in self.batched]

        def both(*xs):
            outs, out_ts = self.rule(xs[: len(dims)], xs[len(dims) :])
            return [*outs, *map(instantiate, out_ts)]

        results, out_dims = batch_flat(both, self.axis, [*primals, *tangents], [*dims, *dims])
        placed = [
            batched_front(self.axis, x, d) if b else x
            for x, d, b in zip(results, out_dims, self.out_batched * 2, strict=True)
        ]
        n = len(self.out_batched)
        return placed[:n], placed[n:]


custom_jvp_call_p = _CustomJVPCall()


class custom_jvp:
    """A function whose forward-mode rule the user gives; reverse mode follows from it.

        @bf.custom_jvp
        def f(x, y): ...

        @f.defjvp
        def f_jvp(primals, tangents):
            x, y = primals
            x_dot, y_dot = tangents
            return f(x, y), ...   # the second of f's structure, linear in the tangents

    Args:
      fun: a function of pytrees of arrays.
      nondiff_argnums: positional arguments that are not differentiated: Python values or functions, handed to the
        rule first.
    """

    def __init__(self, fun: Callable, nondiff_argnums: Sequence[int] = ()):
        functools.update_wrapper(self, fun)
        self.fun = fun
        self.nondiff = tuple(nondiff_argnums)
        self.rule: Callable | None = None

    def defjvp(self, rule: Callable) -> Callable:
        """Set the rule: ``rule(*nondiff, primals, tangents) -> (out, out_tangent)``. Returns it."""
        self.rule = rule
        return rule

    def defjvps(self, *rules: Callable | None) -> None:
        """Set a rule for each argument: ``rule(tangent, out, *primals) -> tangent``; None for zero."""

        def rule(primals, tangents):
            out = self(*primals)
            terms = [r(t, out, *primals) for r, t in zip(rules, tangents, strict=True) if r is not None]
            nothing = tree.map(lambda x: zeros(x.aval), out)
            total = functools.reduce(lambda a, b: tree.map(lambda x, y: x + y, a, b), terms, nothing)
            return out, total

        self.rule = rule

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        return self if obj is None else functools.partial(self, obj)

    def __call__(self, *args, **kwargs):
        if self.rule is None:
            raise GradError(
                f"{name_of(self.fun)} is a custom_jvp without a rule.", where=source.here(),
                fix=f"@{name_of(self.fun)}.defjvp")  # fmt: skip
        args = _bound(self.fun, args, kwargs)
        fun, dynamic, static = _fix_static(self.fun, args, self.nondiff)
        return _call_custom_jvp(self, fun, dynamic, static)


def _call_custom_jvp(owner: custom_jvp, fun: Callable, args: tuple, static: tuple) -> Any:
    trace = state.trace
    if trace is EVAL:
        return fun(*args)
    leaves, in_tree = tree.flatten((args, {}))
    values = as_values(leaves, lambda i: f"the argument {labels_of(fun, in_tree)[i]}")
    rule = _FlatRule(owner, in_tree, static)
    if isinstance(trace, JVPTrace):
        pairs = [trace.pair(v) for v in values]
        primals, tangents = [p for p, _ in pairs], [t for _, t in pairs]
        if all(t.__class__ is Zero for t in tangents):
            with set_trace(trace.parent):
                return _call_custom_jvp(owner, fun, tree.unflatten(in_tree, primals)[0], static)
        inner = trace.split if isinstance(trace, LinearizeTrace) else trace.parent
        with set_trace(inner):
            outs, out_ts = rule(primals, [instantiate(t) for t in tangents])
        return tree.unflatten(rule.out_tree, trace.wrap(custom_jvp_call_p, outs, out_ts))
    flat = FlatFunction(fun, in_tree)
    jaxpr, consts = stage(flat, [v.aval for v in values], name_of(owner.fun)).hoist()
    rule.n_consts, rule.out_tree = len(consts), flat.out_tree
    outs = custom_jvp_call_p.bind(*consts, *values, jaxpr=jaxpr, rule=rule, name=name_of(owner.fun))
    return tree.unflatten(flat.out_tree, outs)


class _FlatRule:
    """The user's jvp rule on flat lists, its results checked. Closed-over values get no derivative from it."""

    def __init__(self, owner: custom_jvp, in_tree: tree.TreeDef, static: tuple):
        self.owner, self.in_tree, self.static = owner, in_tree, static
        self.n_consts = 0
        self.out_tree: Any = None

    @property
    def __name__(self) -> str:
        return name_of(self.owner.rule)

    def __call__(self, primals: Sequence, tangents: Sequence) -> tuple[list, list]:
        n = self.n_consts
        ps, _ = tree.unflatten(self.in_tree, primals[n:])
        ts, _ = tree.unflatten(self.in_tree, tangents[n:])
        pair = self.owner.rule(*self.static, ps, ts)
        name = name_of(self.owner.fun)
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise GradError(
                f"the jvp rule of {name} must return (out, out_tangent), it returned a {type(pair).__name__}.",
                where=source.here())  # fmt: skip
        outs, out_tree = tree.flatten(pair[0])
        out_ts, t_tree = tree.flatten(pair[1], is_leaf=lambda x: x is None)
        if self.out_tree is not None:
            check_structure(
                self.out_tree, out_tree, f"the jvp rule of {name}", ("the function's result", "out")
            )
        check_structure(out_tree, t_tree, f"the jvp rule of {name}", ("out", "out_tangent"))
        self.out_tree = out_tree
        outs = as_values(outs, lambda i: "out of the jvp rule")
        return outs, [_checked_tangent(o, t, name) for o, t in zip(outs, out_ts, strict=True)]


def _checked_tangent(out: Any, t: Any, name: str) -> Any:
    expected = out.aval.tangent()
    if t is None or expected.dtype == dtypes.float0:
        return zero(out.aval)
    (t,) = as_values([t], lambda i: f"the tangent from the jvp rule of {name}")
    if not expected.same_type(t.aval):
        raise GradError(
            f"the jvp rule of {name} returned a tangent {t.aval} for a result {out.aval}.", where=source.here(),
            fix="give the tangent the shape and dtype of the result")  # fmt: skip
    return t


# -- custom_vjp ------------------------------------------------------------------------------------


class _CustomVJPLinear(Primitive):
    """The unknown derivative of a ``custom_vjp`` function: it is only ever transposed, by the user's rule.

    Operands are the residuals, then a tangent for each argument.
    """

    name, kind, multiple_results = "custom_vjp_linear", "call", True

    impl = unsupported("a custom_vjp function has no forward-mode derivative; use custom_jvp")
    jvp = unsupported("a custom_vjp function has no forward-mode derivative; use custom_jvp")
    batch = unsupported("batch the function before it is differentiated, not its derivative")

    def abstract(self, *avals, bwd, n_res, outs, name):
        return list(outs)

    def reference(self, compile, *, bwd, n_res, outs, name):
        raise GradError(
            f"{name} has a custom_vjp, so its forward-mode derivative does not exist.",
            fix="define it with custom_jvp, which serves both modes")  # fmt: skip

    def transpose(self, cts, *args, bwd, n_res, outs, name):
        for arg, ct in zip(args[n_res:], bwd(args[:n_res], [instantiate(ct) for ct in cts]), strict=True):
            if is_linear(arg):
                arg.add(ct)


custom_vjp_linear_p = _CustomVJPLinear()


class _CustomVJPCall(Call):
    """A call differentiated by ``fwd(args) -> (outs, residuals)`` and ``bwd(residuals, cts) -> cts``, on flat lists."""

    name, inline = "custom_vjp_call", True

    def linearize(self, trace, primals, tangents, *, jaxpr, fwd, bwd, name):
        outs, residuals = fwd(primals)
        return outs, linear_outputs(trace, outs, residuals, tangents, bwd, name)

    def jvp(self, primals, tangents, *, jaxpr, fwd, bwd, name):
        raise forward_mode_error(name)

    transpose = unsupported("it is differentiated by its own rules before anything is transposed")

    def batch(self, axis, args, dims, *, jaxpr, fwd, bwd, name):
        batched = tuple(d is not None for d in dims)
        body, out_batched = batch_jaxpr(jaxpr, axis, batched)
        body, consts = body.hoist()
        ins = [a if d is None else move_dim(a, d, 0) for a, d in zip(args, dims, strict=True)]
        batched_fwd = _BatchedFwd(fwd, axis, batched, out_batched, len(consts))
        batched_bwd = _BatchedBwd(bwd, batched_fwd)
        outs = self.bind(*consts, *ins, jaxpr=body, fwd=batched_fwd, bwd=batched_bwd, name=name)
        return outs, [0 if b else None for b in out_batched]


custom_vjp_call_p = _CustomVJPCall()


def linear_outputs(trace: LinearizeTrace, outs, residuals, tangents, bwd, name: str) -> list:
    """Stage the equation that stands for the derivative, and return its results as tangents of ``outs``."""
    avals = tuple(o.aval.tangent() for o in outs)
    with set_trace(trace.tangents):
        ts = [instantiate(t) for t in tangents]
    params = {"bwd": bwd, "n_res": len(residuals), "outs": avals, "name": name}
    out_ts = trace.tangents.process(custom_vjp_linear_p, [*residuals, *ts], params)
    return [
        zero(o.aval) if a.dtype == dtypes.float0 else t for o, a, t in zip(outs, avals, out_ts, strict=True)
    ]


def forward_mode_error(name: str) -> GradError:
    """The error for forward mode through ``custom_vjp``."""
    return GradError(
        f"forward-mode differentiation (jvp) of {name}, which has a custom_vjp.",
        where=source.here(),
        why="custom_vjp gives a rule for reverse mode only.",
        fix="use grad or vjp, or define the function with custom_jvp, which serves both modes",
    )


class _BatchedFwd:
    """The forward rule over a batch; remembers where the residuals of its last run have their batch axis."""

    def __init__(self, fwd: Callable, axis: Axis, batched: tuple, out_batched: tuple, n_consts: int):
        self.fwd, self.axis, self.batched, self.out_batched, self.n = (
            fwd,
            axis,
            batched,
            out_batched,
            n_consts,
        )
        self.res_dims: list[int | None] = []

    def __call__(self, primals: Sequence) -> tuple[list, list]:
        n_outs = len(self.out_batched)

        def both(*xs):
            outs, residuals = self.fwd(xs)
            return [*outs, *residuals]

        dims = [0 if b else None for b in self.batched]
        results, out_dims = batch_flat(both, self.axis, primals[self.n :], dims)
        outs = [
            batched_front(self.axis, x, d) if b else x
            for x, d, b in zip(results, out_dims, self.out_batched, strict=False)
        ]
        self.res_dims = out_dims[n_outs:]
        return outs, results[n_outs:]


class _BatchedBwd:
    """The backward rule over a batch; cotangents of arguments that were not batched are summed over it."""

    def __init__(self, bwd: Callable, fwd: _BatchedFwd):
        self.bwd, self.fwd = bwd, fwd

    def __call__(self, residuals: Sequence, cts: Sequence) -> list:
        fwd = self.fwd
        n_res = len(residuals)
        dims = [*fwd.res_dims, *(0 if b else None for b in fwd.out_batched)]

        def flat(*xs):
            return [instantiate(ct) for ct in self.bwd(xs[:n_res], xs[n_res:])]

        results, out_dims = batch_flat(flat, fwd.axis, [*residuals, *cts], dims)
        summed: list[Any] = [None] * fwd.n
        for x, d, b in zip(results, out_dims, fwd.batched, strict=True):
            front = batched_front(fwd.axis, x, d)
            summed.append(front if b else reduce_sum(front, (0,)))
        return summed


class custom_vjp:
    """A function whose reverse-mode rule the user gives.

        @bf.custom_vjp
        def f(x, y): ...

        def f_fwd(x, y):
            return f(x, y), residuals          # any pytree of arrays

        def f_bwd(residuals, ct):
            return ct_x, ct_y                  # one for each argument; None for zero

        f.defvjp(f_fwd, f_bwd)

    Args:
      fun: a function of pytrees of arrays.
      nondiff_argnums: positional arguments that are not differentiated: Python values or functions. ``fwd`` takes
        them in their places, ``bwd`` takes them first.
    """

    def __init__(self, fun: Callable, nondiff_argnums: Sequence[int] = ()):
        functools.update_wrapper(self, fun)
        self.fun = fun
        self.nondiff = tuple(nondiff_argnums)
        self.fwd: Callable | None = None
        self.bwd: Callable | None = None

    def defvjp(self, fwd: Callable, bwd: Callable) -> None:
        """Set the rules: ``fwd(*args) -> (out, residuals)``, ``bwd(*nondiff, residuals, ct) -> cotangents``."""
        self.fwd, self.bwd = fwd, bwd

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        return self if obj is None else functools.partial(self, obj)

    def __call__(self, *args, **kwargs):
        name = name_of(self.fun)
        if self.fwd is None or self.bwd is None:
            raise GradError(f"{name} is a custom_vjp without rules.", where=source.here(),
                            fix=f"{name}.defvjp(fwd, bwd)")  # fmt: skip
        args = _bound(self.fun, args, kwargs)
        fun, dynamic, static = _fix_static(self.fun, args, self.nondiff)
        fwd, _, _ = _fix_static(self.fwd, args, self.nondiff)
        return _call_custom_vjp(self, fun, fwd, dynamic, static)


def _call_custom_vjp(owner: custom_vjp, fun: Callable, fwd: Callable, args: tuple, static: tuple) -> Any:
    trace = state.trace
    if trace is EVAL:
        return fun(*args)
    name = name_of(owner.fun)
    leaves, in_tree = tree.flatten((args, {}))
    values = as_values(leaves, lambda i: f"the argument {labels_of(fun, in_tree)[i]}")
    rules = _FlatRules(owner, fwd, in_tree, static, [v.aval for v in values])
    if isinstance(trace, JVPTrace):
        pairs = [trace.pair(v) for v in values]
        primals, tangents = [p for p, _ in pairs], [t for _, t in pairs]
        with set_trace(trace.parent):
            if all(t.__class__ is Zero for t in tangents):
                return _call_custom_vjp(owner, fun, fwd, tree.unflatten(in_tree, primals)[0], static)
            if not isinstance(trace, LinearizeTrace):
                raise forward_mode_error(name)
            outs, residuals = rules.forward(primals)
            out_ts = linear_outputs(trace, outs, residuals, tangents, rules.backward, name)
        return tree.unflatten(rules.out_tree, trace.wrap(custom_vjp_call_p, outs, out_ts))
    flat = FlatFunction(fun, in_tree)
    jaxpr, consts = stage(flat, [v.aval for v in values], name).hoist()
    rules.n_consts, rules.out_tree = len(consts), flat.out_tree
    outs = custom_vjp_call_p.bind(
        *consts, *values, jaxpr=jaxpr, fwd=rules.forward, bwd=rules.backward, name=name
    )
    return tree.unflatten(flat.out_tree, outs)


class _FlatRules:
    """The user's rules on flat lists, their results checked. Closed-over values get no derivative from them."""

    def __init__(
        self, owner: custom_vjp, fwd: Callable, in_tree: tree.TreeDef, static: tuple, avals: list[ShapedArray]
    ):
        self.owner, self.fwd, self.in_tree, self.static, self.avals = owner, fwd, in_tree, static, avals
        self.name = name_of(owner.fun)
        self.n_consts = 0
        self.out_tree: Any = None
        self.res_tree: Any = None

    def forward(self, primals: Sequence) -> tuple[list, list]:
        """Results and residuals."""
        args, _ = tree.unflatten(self.in_tree, primals[self.n_consts :])
        pair = self.fwd(*args)
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise GradError(
                f"the fwd rule of {self.name} must return (out, residuals), it returned a {type(pair).__name__}.",
                where=source.here())  # fmt: skip
        outs, out_tree = tree.flatten(pair[0])
        if self.out_tree is not None:
            check_structure(
                self.out_tree,
                out_tree,
                f"the fwd rule of {self.name}",
                ("the function's result", "fwd's result"),
            )
        self.out_tree = out_tree
        residuals, self.res_tree = tree.flatten(pair[1])
        name = f"a residual of {self.name}"
        return as_values(outs, lambda i: f"the result of {self.name}"), as_values(residuals, lambda i: name)

    def backward(self, residuals: Sequence, cts: Sequence) -> list:
        """A cotangent, or None, for each operand of the call."""
        ct = tree.unflatten(self.out_tree, cts)
        found = self.owner.bwd(*self.static, tree.unflatten(self.res_tree, residuals), ct)
        args_tree = tree.structure(tree.unflatten(self.in_tree, [0] * len(self.avals))[0])
        if not isinstance(found, (tuple, list)):
            raise GradError(
                f"the bwd rule of {self.name} must return a tuple with a cotangent for each argument, it returned a "
                f"{type(found).__name__}.", where=source.here(), fix="return (ct,) for one argument")  # fmt: skip
        skeleton = tree.unflatten(args_tree, [0] * len(self.avals))
        try:
            flat = _broadcast_nones(tuple(found), skeleton)
        except TreeError as e:
            raise GradError(
                f"the bwd rule of {self.name} returned cotangents of another structure than the arguments.",
                where=source.here(), why=e.what)  # fmt: skip
        paths = treepath.leaf_paths(args_tree)
        return [None] * self.n_consts + [
            self._checked(ct, aval, path) for ct, aval, path in zip(flat, self.avals, paths, strict=True)
        ]

    def _checked(self, ct: Any, aval: ShapedArray, path: str) -> Any:
        expected = aval.tangent()
        if ct is None or expected.dtype == dtypes.float0:
            return zero(aval)
        (ct,) = as_values([ct], lambda i: f"the cotangent {path} from the bwd rule of {self.name}")
        if not expected.same_type(ct.aval):
            raise GradError(
                f"the bwd rule of {self.name} returned {ct.aval} as the cotangent of the argument {path}, which is {aval}.",
                where=source.here(), fix="give the cotangent the shape and dtype of the argument")  # fmt: skip
        return ct


def _broadcast_nones(found: tuple, skeleton: Any) -> list:
    """Flatten cotangents, where None may stand for a whole subtree of zeros."""
    return tree.broadcast_prefix(found, skeleton, is_leaf=lambda x: x is None)


# -- shared ----------------------------------------------------------------------------------------


def _bound(fun: Callable, args: tuple, kwargs: dict) -> tuple:
    """Positional arguments, keyword arguments put in their places."""
    if not kwargs:
        return args
    bound = inspect.signature(fun).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.kwargs:
        raise ArgumentError(
            f"{name_of(fun)} has custom derivatives, so its arguments are positional: {', '.join(bound.kwargs)} is not.",
            where=source.here())  # fmt: skip
    return bound.args


def _fix_static(fun: Callable, args: tuple, nondiff: tuple[int, ...]) -> tuple[Callable, tuple, tuple]:
    """``fun`` of the differentiable arguments only, those arguments, and the others."""
    if not nondiff:
        return fun, args, ()
    static = {i % len(args): args[i] for i in nondiff}

    def with_static(*dynamic):
        rest = iter(dynamic)
        return fun(*[static[i] if i in static else next(rest) for i in range(len(args))])

    functools.update_wrapper(with_static, fun)
    return with_static, tuple(a for i, a in enumerate(args) if i not in static), tuple(static.values())
