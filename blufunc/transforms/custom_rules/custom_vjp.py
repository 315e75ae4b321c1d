"""``custom_vjp``: a function whose reverse-mode rule the user gives.

Transforms, stage 2. Linearizing runs the forward rule and stages one equation that stands for the
unknown derivative; transposing that equation runs the backward rule. ``custom_call`` has the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np

from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.trace import Tracer, set_trace, state
from blufunc.core.ops.elementwise import convert
from blufunc.core.primitives.linear_ops import all_front, batched_front, instantiate, move_dim, reduce_sum
from blufunc.core.primitives.primitive import Primitive, unsupported
from blufunc.core.primitives.tangents import Zero, is_linear, zero
from blufunc.core.pytree import paths as treepath
from blufunc.core.pytree import tree
from blufunc.errors import ArgumentError, GradError
from blufunc.transforms.arguments import (
    argument_indices,
    as_values,
    bind_positional,
    check_callable,
    fix_static,
    name_of,
)
from blufunc.transforms.autodiff.jvp import JVPTrace
from blufunc.transforms.autodiff.linearize import LinearizeTrace
from blufunc.transforms.autodiff.symbolic_zeros import CustomVJPPrimal, SymbolicZero, example_zero, for_rule
from blufunc.transforms.batching.batch import Axis, batch_flat
from blufunc.transforms.control_flow.calls import jit_p
from blufunc.transforms.custom_rules.custom_call import (
    CustomFunction,
    FlatRules,
    RuledCall,
    check_closure,
    expand_nones,
)

P = ParamSpec("P")
R = TypeVar("R")


class _CustomVJPLinear(Primitive):
    """The unknown derivative of a ``custom_vjp`` function.

    It is only ever transposed, by the user's rule. Operands are the residuals, then a tangent for each argument.
    """

    name, kind, multiple_results = "custom_vjp_linear", "call", True
    any_memory = True

    impl = unsupported("a custom_vjp function has no forward-mode derivative; use custom_jvp")
    jvp = unsupported("a custom_vjp function has no forward-mode derivative; use custom_jvp")
    shard = unsupported("it is transposed before anything runs")

    def abstract(self, *avals, bwd, n_res, outs, name):
        return list(outs)

    def reference(self, compile, *, bwd, n_res, outs, name):
        raise GradError(
            f"{name} has a custom_vjp, so its forward-mode derivative does not exist.",
            fix="define it with custom_jvp, which serves both modes",
        )

    def batch(self, axis, args, dims, *, bwd, n_res, outs, name):
        ts = [a if d is None else move_dim(a, d, 0) for a, d in zip(args[n_res:], dims[n_res:], strict=True)]
        bwd = _BatchedBwd(bwd, axis, tuple(d is not None for d in dims[n_res:]), list(dims[:n_res]))
        outs = tuple(ShapedArray((axis.size, *a.shape), a.dtype) for a in outs)
        return self.bind(*args[:n_res], *ts, bwd=bwd, n_res=n_res, outs=outs, name=name), [0] * len(outs)

    def transpose(self, cts, *args, bwd, n_res, outs, name):
        for arg, ct in zip(args[n_res:], bwd(args[:n_res], cts), strict=True):
            if is_linear(arg):
                arg.add(ct)


custom_vjp_linear_p = _CustomVJPLinear()


def linear_outputs(trace: LinearizeTrace, outs, residuals, tangents, bwd, name: str) -> list:
    """Stage the derivative's equation; its results are the tangents of ``outs``."""
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
    """The forward rule over a batch.

    Residuals keep the position of their batch axis, which the backward rule knows.
    """

    def __init__(self, fwd: Callable, axis: Axis, batched: tuple[bool, ...]):
        self.fwd, self.axis, self.batched = fwd, axis, batched
        self.__name__ = fwd.__name__

    def __call__(self, primals: Sequence, perturbed: Sequence[bool]) -> tuple[list, list, Callable]:
        n_outs, bwd = 0, None

        def both(*xs):
            nonlocal n_outs, bwd
            outs, residuals, bwd = self.fwd(xs, perturbed)
            n_outs = len(outs)
            return [*outs, *residuals]

        results, dims = batch_flat(both, self.axis, primals, [0 if b else None for b in self.batched])
        batched_bwd = _BatchedBwd(bwd, self.axis, self.batched, dims[n_outs:])
        return all_front(self.axis, results[:n_outs], dims[:n_outs]), results[n_outs:], batched_bwd


class _BatchedBwd:
    """The backward rule over a batch.

    Cotangents of arguments without a batch axis are summed over it.
    """

    def __init__(self, bwd: Any, axis: Axis, batched: tuple[bool, ...], res_dims: Sequence[int | None]):
        self.bwd, self.axis, self.batched, self.res_dims = bwd, axis, batched, res_dims
        self.__name__ = bwd.__name__

    def __call__(self, residuals: Sequence, cts: Sequence) -> list:
        axis, n_res = self.axis, len(residuals)
        found: list[Any] = []

        def flat(*xs):
            rest = iter(xs[n_res:])
            given = [example_zero(ct) if ct.__class__ is Zero else next(rest) for ct in cts]
            found[:] = self.bwd(xs[:n_res], given)
            return [ct for ct in found if ct is not None]

        values = [ct for ct in cts if ct.__class__ is not Zero]
        results, dims = batch_flat(flat, axis, [*residuals, *values], [*self.res_dims, *[0] * len(values)])
        placed = iter(zip(results, dims, strict=True))
        whole = [(None, None) if ct is None else next(placed) for ct in found]
        return [self._of_argument(ct, d, b) for (ct, d), b in zip(whole, self.batched, strict=True)]

    def _of_argument(self, ct: Any, d: int | None, batched: bool) -> Any:
        """The cotangent of one argument.

        One that is the same for all examples has been summed by a collective.
        """
        if ct is None or batched:
            return ct if ct is None else batched_front(self.axis, ct, d)
        return ct if d is None else reduce_sum(ct, (d,))


class _CustomVJPCall(RuledCall):
    """A call with forward and backward rules on flat lists.

    The forward rule is ``fwd(args, perturbed) -> (outs, residuals, bwd)``.
    ``bwd(residuals, cts) -> cts`` belongs to this run of the forward rule and its residuals. The first ``n_consts``
    operands are what the function closes over: the rules do not take them.
    """

    name, rule, batched_rule = "custom_vjp_call", "fwd", _BatchedFwd

    def linearize(self, trace, primals, tangents, *, jaxpr, fwd, n_consts, name, forward_mode):
        check_closure(tangents[:n_consts], name)
        tangents = tangents[n_consts:]
        outs, residuals, bwd = fwd(primals[n_consts:], [t.__class__ is not Zero for t in tangents])
        return outs, linear_outputs(trace, outs, residuals, tangents, bwd, name)

    def jvp(self, primals, tangents, *, jaxpr, fwd, n_consts, name, forward_mode):
        if not forward_mode:
            raise forward_mode_error(name)
        return jit_p.jvp(primals, tangents, jaxpr=jaxpr, name=name)

    transpose = unsupported("it is differentiated by its own rules before anything is transposed")


custom_vjp_call_p = _CustomVJPCall()


class custom_vjp(CustomFunction[P, R]):
    """A function whose reverse-mode rule the user gives.

        @bf.custom_vjp
        def f(x, y): ...

        def f_fwd(x, y):
            return f(x, y), residuals          # any pytree; what is no array reaches the rule unchanged

        def f_bwd(residuals, ct):
            return ct_x, ct_y                  # one for each argument; None for zero

        f.defvjp(f_fwd, f_bwd)

    Args:
      fun: a function of pytrees of arrays.
      nondiff_argnums: positional arguments that are not differentiated: Python values or functions, nothing traced.
        ``fwd`` takes them in their places, ``bwd`` takes them first, in the order of the parameters.
      nondiff_argnames: such arguments by name.
    """

    symbolic_zeros = forward_mode = False
    fwd: Any = None
    bwd: Any = None

    def defvjp(
        self,
        fwd: Callable,
        bwd: Callable,
        symbolic_zeros: bool = False,
        optimize_remat: bool = False,
        *,
        forward_mode: bool = False,
    ) -> None:
        """Set the rules.

        Args:
          fwd: ``fwd(*args) -> (out, residuals)``.
          bwd: ``bwd(*nondiff, residuals, ct) -> cotangents``, a tuple with one for each differentiable argument, of
            its structure, shapes and dtypes; None stands for zeros, of a whole subtree too.
          symbolic_zeros: whether the rules are to be told what is zero by construction: ``fwd`` then gets a
            ``CustomVJPPrimal`` (``value``, ``perturbed``) for each leaf of the differentiable arguments, and ``bwd`` a
            ``SymbolicZero`` for each cotangent that is zero, which it may return as well.
          optimize_remat: accepted, and without effect: rules are staged as any function is, so under ``checkpoint``
            the first pass never computes what only the residuals need.
          forward_mode: whether ``jvp`` differentiates the function itself, of which the rules then are another way to
            compute the same derivative; by default it is an error, as in JAX.
        """
        check_callable(fwd, "defvjp")
        check_callable(bwd, "defvjp")
        self.fwd, self.bwd = fwd, bwd
        self.symbolic_zeros, self.forward_mode = bool(symbolic_zeros), bool(forward_mode)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.fwd is None or self.bwd is None:
            raise self.undefined("rules", "{}.defvjp(fwd, bwd)")
        args = bind_positional(self.fun, args, kwargs)
        if self.nondiff:
            for i in argument_indices(self.nondiff, len(args), "nondiff_argnums"):
                if isinstance(args[i], Tracer):
                    raise GradError(
                        f"the argument {i} of {name_of(self.fun)}, which is not differentiated, is traced "
                        f"({args[i].aval}).",
                        where=source.here(),
                        why="the backward rule is given that argument later, when the trace may have ended.",
                        fix="make it a differentiable argument: fwd keeps it among the residuals, and bwd returns "
                        "None for it",
                    )
        fun, dynamic, static = fix_static(self.fun, args, self.nondiff)
        fwd, _, _ = fix_static(self.fwd, args, self.nondiff)
        return self.run(fun, dynamic, functools.partial(_FlatRules, self, fwd, static))

    def run(self, fun, args, rules_of):
        trace = state.trace
        if self.forward_mode and isinstance(trace, JVPTrace) and not isinstance(trace, LinearizeTrace):
            return fun(*args)
        return super().run(fun, args, rules_of)


def _is_array(x: Any) -> bool:
    """False for residuals that the rule gets unchanged: Python scalars, objects."""
    if isinstance(x, (bool, int, float, complex)) and not isinstance(x, np.generic):
        return False
    try:
        lift(x)
    except ArgumentError:
        return False
    return True


class _FlatRules(FlatRules):
    """The user's rules on flat lists, with their results checked.

    A call is the forward rule, and returns the backward rule.
    """

    prim = custom_vjp_call_p

    def __init__(self, owner: custom_vjp, fwd: Callable, static: tuple, in_tree: tree.TreeDef, values: list):
        super().__init__(owner, in_tree, static)
        self.fwd, self.avals = fwd, [v.aval for v in values]

    def differentiate(self, trace, primals, tangents):
        if not isinstance(trace, LinearizeTrace):
            raise forward_mode_error(self.name)
        with set_trace(trace.parent):
            outs, residuals, bwd = self(primals, [t.__class__ is not Zero for t in tangents])
            return outs, linear_outputs(trace, outs, residuals, tangents, bwd, self.name)

    def params(self, n_consts):
        return {"fwd": self, "n_consts": n_consts, "name": self.name, "forward_mode": self.owner.forward_mode}

    @property
    def __name__(self) -> str:
        return name_of(self.owner.fwd)

    def __call__(self, primals: Sequence, perturbed: Sequence[bool]) -> tuple[list, list, Callable]:
        """Results, residuals, and the backward rule ``(residuals, cts) -> cts``."""
        if self.owner.symbolic_zeros:
            primals = [CustomVJPPrimal(x, p) for x, p in zip(primals, perturbed, strict=True)]
        args, _ = tree.unflatten(self.in_tree, primals)
        with source.own_lines():
            pair = self.fwd(*args)
        outs, found = self.results(pair, "fwd", "residuals")
        leaves, res_tree = tree.flatten(found)
        static = {i: x for i, x in enumerate(leaves) if not _is_array(x)}
        arrays = [x for i, x in enumerate(leaves) if i not in static]
        residuals = as_values(arrays, lambda i: f"a residual of {self.name}")

        def bwd(residuals: Sequence, cts: Sequence) -> list:
            values = iter(residuals)
            whole = [static[i] if i in static else next(values) for i in range(len(leaves))]
            return self._backward(tree.unflatten(res_tree, whole), cts)

        bwd.__name__ = name_of(self.owner.bwd)
        return outs, residuals, bwd

    def _backward(self, residuals: Any, cts: Sequence) -> list:
        """For each argument its cotangent, or None for zero."""
        ct = tree.unflatten(self.out_tree, for_rule(cts, self.owner.symbolic_zeros))
        with source.own_lines():
            found = self.owner.bwd(*self.static, residuals, ct)
        args_tree = tree.structure(tree.unflatten(self.in_tree, [0] * len(self.avals))[0])
        if not isinstance(found, (tuple, list)):
            raise GradError(
                f"the bwd rule of {self.name} must return a tuple with a cotangent for each argument, it returned a "
                f"{type(found).__name__}.",
                where=source.here(),
                fix="return (ct,) for one argument",
            )
        rule = f"the bwd rule of {self.name}"
        flat = expand_nones(tuple(found), args_tree, rule, ("the arguments", "the tuple of cotangents"))
        paths = treepath.leaf_paths(args_tree)
        return [self._checked(ct, aval, path) for ct, aval, path in zip(flat, self.avals, paths, strict=True)]

    def _checked(self, ct: Any, aval: ShapedArray, path: str) -> Any:
        expected = aval.tangent()
        if ct is None or ct.__class__ is SymbolicZero or expected.dtype == dtypes.float0:
            return None
        (ct,) = as_values([ct], lambda i: f"the cotangent {path} from the bwd rule of {self.name}")
        if aval.weak_type and not ct.aval.shape and ct.aval.dtype.kind == expected.dtype.kind:
            # a Python number has no precision of its own, and computing with it gave the other operand's
            ct = convert(ct, expected.dtype)
        if not expected.same_type(ct.aval):
            raise GradError(
                f"the bwd rule of {self.name} returned {ct.aval} as the cotangent of argument {path}, which is {aval}.",
                where=source.here(),
                fix="give the cotangent the shape and dtype of the argument",
            )
        return ct
