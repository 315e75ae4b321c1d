"""Custom derivatives inside ``shard_map``: rules traced with types over axes.

Parallel, stage 2, on ``typed_trace``. In: a call of a ``custom_jvp`` or ``custom_vjp`` function, and the types of its
operands. Out: the call with a typed body, and rules that are traced and typed for these types when a transform runs
them, and may hold collectives. A tangent has the type of its primal; a cotangent V for V, I for I, U for R. If a rule
returns the local part of the cotangent of an invariant argument, the parts are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, eval_jaxpr
from blufunc.core.ir.trace import new_trace, state
from blufunc.core.primitives.linear_ops import instantiate
from blufunc.core.primitives.tangents import Zero
from blufunc.parallel.collectives.axis_casts import Types
from blufunc.parallel.collectives.axis_types import RULES, Typer, typed
from blufunc.parallel.collectives.primitives import COTANGENT, psum_invariant_p
from blufunc.parallel.collectives.typed_trace import TypedTrace
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.transforms.autodiff.symbolic_zeros import SymbolicZero
from blufunc.transforms.batching.batch import MeshAxis
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp_call_p
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp_call_p, custom_vjp_linear_p


class _TypedRule:
    """Base of rules for known types.

    Attributes:
      rule: the rule as it was, of flat lists.
      ins, outs: the types of the operands and results of the function.
    """

    def __init__(self, rule: Callable, mesh: AbstractMesh, ins: Sequence[Types], outs: Sequence[Types]):
        self.rule, self.mesh, self.ins, self.outs = rule, mesh, tuple(ins), tuple(outs)
        self.__name__ = rule.__name__

    def staged(
        self, fun: Callable, avals: Sequence[ShapedArray], types: Sequence[Types]
    ) -> tuple[Jaxpr, list[Types]]:
        """Trace ``fun``, a function of its trace and operands; the result types."""
        trace = TypedTrace(self.mesh, self.__name__)
        with _over(self.mesh), new_trace(trace):
            ins = [trace.typed_parameter(a, t) for a, t in zip(avals, types, strict=True)]
            jaxpr = trace.finish(fun(trace, *ins), self.__name__)
        return jaxpr, [trace.typer.type_of(v) for v in jaxpr.outvars]


class _TypedJVP(_TypedRule):
    """A jvp rule: ``rule(primals, tangents) -> (outs, out_tangents)``."""

    def __call__(self, primals: Sequence, tangents: Sequence) -> tuple[list, list]:
        given = [t.__class__ is not Zero for t in tangents]
        n = len(primals)

        def both(trace, *xs):
            rest = iter(xs[n:])
            ts = [next(rest) if g else t for t, g in zip(tangents, given, strict=True)]
            outs, out_ts = self.rule(xs[:n], ts)
            pairs = zip([*outs, *map(instantiate, out_ts)], [*self.outs, *self.outs], strict=True)
            return [_cast(trace, x, t) for x, t in pairs]

        values = [t for t, g in zip(tangents, given, strict=True) if g]
        types = [*self.ins, *(t for t, g in zip(self.ins, given, strict=True) if g)]
        jaxpr, _ = self.staged(both, [x.aval for x in (*primals, *values)], types)
        results = eval_jaxpr(jaxpr, [*primals, *values])
        return results[: len(self.outs)], results[len(self.outs) :]


class _TypedFwd(_TypedRule):
    """A forward rule: ``rule(primals, perturbed) -> (outs, residuals, bwd)``."""

    def __call__(self, primals: Sequence, perturbed: Sequence[bool]) -> tuple[list, list, Callable]:
        bwd: Any = None

        def both(trace, *xs):
            nonlocal bwd
            outs, residuals, bwd = self.rule(xs, perturbed)
            return [*(_cast(trace, x, t) for x, t in zip(outs, self.outs, strict=True)), *residuals]

        jaxpr, types = self.staged(both, [p.aval for p in primals], self.ins)
        results, n = eval_jaxpr(jaxpr, primals), len(self.outs)
        return results[:n], results[n:], _TypedBwd(bwd, self.mesh, self.ins, self.outs, types[n:])


class _TypedBwd(_TypedRule):
    """A backward rule ``(residuals, cts) -> cts`` of residuals of types ``kept``."""

    def __init__(self, rule: Callable, mesh: AbstractMesh, ins: Any, outs: Any, kept: Sequence[Types]):
        super().__init__(rule, mesh, ins, outs)
        self.kept = kept

    def __call__(self, residuals: Sequence, cts: Sequence) -> list:
        given = [not isinstance(ct, (Zero, SymbolicZero)) for ct in cts]
        n, present = len(residuals), [False] * len(self.ins)

        def flat(trace, *xs):
            rest = iter(xs[n:])
            found = self.rule(xs[:n], [next(rest) if g else ct for ct, g in zip(cts, given, strict=True)])
            present[:] = [ct is not None for ct in found]
            pairs = zip(found, self.ins, strict=True)
            return [_contributed(trace, ct, cotangent_of(t)) for ct, t in pairs if ct is not None]

        values = [ct for ct, g in zip(cts, given, strict=True) if g]
        types = [*self.kept, *(cotangent_of(t) for t, g in zip(self.outs, given, strict=True) if g)]
        jaxpr, _ = self.staged(flat, [x.aval for x in (*residuals, *values)], types)
        results = iter(eval_jaxpr(jaxpr, [*residuals, *values]))
        return [next(results) if there else None for there in present]


def cotangent_of(types: Types) -> Types:
    """The types of the cotangent of a value."""
    return tuple(COTANGENT[t] for t in types)


@contextmanager
def _over(mesh: AbstractMesh) -> Iterator[None]:
    """Name the axes of the mesh, as they were named where the function was called."""
    before = state.context
    named = {e.name for e in before if isinstance(e, MeshAxis)}
    state.context = (*before, *(MeshAxis(a, n) for a, n in mesh.shape.items() if a not in named))
    try:
        yield
    finally:
        state.context = before


def _cast(trace: TypedTrace, x: Any, types: Types) -> Any:
    return trace.tracer_of(trace.typer.cast(trace.atom(x), types))


def _contributed(trace: TypedTrace, ct: Any, required: Types) -> Any:
    """A cotangent of the required types; of an invariant argument a part of it."""
    typer, atom = trace.typer, trace.atom(ct)
    axes = trace.mesh.axis_names
    for src, dst in (("V", "I"), ("U", "I"), ("V", "U")):
        pairs = zip(axes, typer.type_of(atom), required, strict=True)
        over = [a for a, have, want in pairs if (have, want) == (src, dst)]
        if over:
            atom = typer.convert(atom, over, src, dst, *(psum_invariant_p,) if dst == "I" else ())
    return trace.tracer_of(typer.cast(atom, required))


def _call(wrapper: type[_TypedRule]) -> Callable[[Typer, Eqn], None]:
    def step(typer: Typer, eqn: Eqn) -> None:
        """Type a call by its body; its rules get the types."""
        ins = [typer.type_of(a) for a in eqn.invars]
        kind, n_consts = eqn.prim.rule, eqn.params["n_consts"]
        rule = eqn.params[kind]
        if isinstance(rule, wrapper):  # typed by an earlier pass: its casts hold for these types at least
            ins[n_consts:] = [_varying(t, before) for t, before in zip(ins[n_consts:], rule.ins, strict=True)]
            rule = rule.rule
        jaxpr, outs = typed(eqn.params["jaxpr"], typer.mesh, ins)
        rule = wrapper(rule, typer.mesh, ins[n_consts:], outs)
        invars = [typer.cast_operand(a, t) for a, t in zip(eqn.invars, ins, strict=True)]
        typer.write(eqn.prim, invars, {**eqn.params, "jaxpr": jaxpr, kind: rule}, eqn.outvars, outs)

    return step


def _varying(types: Types, before: Types) -> Types:
    """Types that vary also where they did before."""
    return tuple("V" if (t, b) == ("I", "V") else t for t, b in zip(types, before, strict=True))


def _linear(typer: Typer, eqn: Eqn) -> None:
    """Type the unknown derivative of a function: as the function."""
    bwd = eqn.params["bwd"]
    if not isinstance(bwd, _TypedBwd):
        typer.operation(eqn)
        return
    invars = [typer.cast_operand(a, t) for a, t in zip(eqn.invars, [*bwd.kept, *bwd.ins], strict=True)]
    typer.write(eqn.prim, invars, eqn.params, eqn.outvars, bwd.outs)


RULES[custom_jvp_call_p] = _call(_TypedJVP)
RULES[custom_vjp_call_p] = _call(_TypedFwd)
RULES[custom_vjp_linear_p] = _linear
