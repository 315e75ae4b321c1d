"""``custom_vjp``: a function whose reverse-mode rule the user gives.

Transforms, stage 2. Linearizing runs the forward rule and stages one equation that stands for the
unknown derivative; transposing that equation runs the backward rule. A trace that does not
differentiate stages the function and keeps the rules with it; evaluation just calls it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core import dtypes, source, tree, treepath
from blufunc.core.avals import ShapedArray
from blufunc.core.primitive import Primitive, unsupported
from blufunc.core.stage import stage
from blufunc.core.structure import batched_front, instantiate, move_dim, reduce_sum
from blufunc.core.tangents import Zero, is_linear, zero
from blufunc.core.trace import EVAL, set_trace, state
from blufunc.errors import GradError, TreeError
from blufunc.transforms.arguments import (
    FlatFunction,
    as_values,
    bind_positional,
    check_structure,
    fix_static,
    labels_of,
    name_of,
)
from blufunc.transforms.batch import Axis, batch_flat, batch_jaxpr
from blufunc.transforms.calls import Call
from blufunc.transforms.jvp import JVPTrace
from blufunc.transforms.linearize import LinearizeTrace


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
            fix="define it with custom_jvp, which serves both modes",
        )

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
        self.fwd: Any = None
        self.bwd: Any = None

    def defvjp(self, fwd: Callable, bwd: Callable) -> None:
        """Set the rules: ``fwd(*args) -> (out, residuals)``, ``bwd(*nondiff, residuals, ct) -> cotangents``."""
        self.fwd, self.bwd = fwd, bwd

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        return self if obj is None else functools.partial(self, obj)

    def __call__(self, *args, **kwargs):
        name = name_of(self.fun)
        if self.fwd is None or self.bwd is None:
            raise GradError(
                f"{name} is a custom_vjp without rules.", where=source.here(), fix=f"{name}.defvjp(fwd, bwd)"
            )
        args = bind_positional(self.fun, args, kwargs)
        fun, dynamic, static = fix_static(self.fun, args, self.nondiff)
        fwd, _, _ = fix_static(self.fwd, args, self.nondiff)
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
                where=source.here(),
            )
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
                f"{type(found).__name__}.",
                where=source.here(),
                fix="return (ct,) for one argument",
            )
        skeleton = tree.unflatten(args_tree, [0] * len(self.avals))
        try:
            flat = _broadcast_nones(tuple(found), skeleton)
        except TreeError as e:
            raise GradError(
                f"the bwd rule of {self.name} returned cotangents of another structure than the arguments.",
                where=source.here(),
                why=e.what,
            ) from None
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
                f"the bwd rule of {self.name} returned {ct.aval} as the cotangent of argument {path}, which is {aval}.",
                where=source.here(),
                fix="give the cotangent the shape and dtype of the argument",
            )
        return ct


def _broadcast_nones(found: tuple, skeleton: Any) -> list:
    """Flatten cotangents, where None may stand for a whole subtree of zeros."""
    return tree.broadcast_prefix(found, skeleton, is_leaf=lambda x: x is None)
