"""Primitives that call jaxprs: ``jit``, and the rules shared by all plain calls.

Transforms, stage 2. In: a call equation, which holds a closed jaxpr. Out: calls of transformed jaxprs (memoized on the
original), so that the program keeps the structure the user gave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blufunc.config import config
from blufunc.core.arrays import nan_check
from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.arrays.backend import Device
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, eval_jaxpr
from blufunc.core.ir.trace import EVAL, state
from blufunc.core.primitives import effects
from blufunc.core.primitives.linear_ops import move_dim
from blufunc.core.primitives.primitive import Primitive, concrete, device_of
from blufunc.core.primitives.tangents import Zero, is_linear, zero
from blufunc.core.programs import simplify
from blufunc.transforms.autodiff.jvp import jvp_jaxpr
from blufunc.transforms.autodiff.linearize import LinearizeTrace, linearize_jaxpr, with_recognised
from blufunc.transforms.autodiff.transpose import transpose_jaxpr
from blufunc.transforms.batching.batch import batch_jaxpr


class Call(Primitive):
    """Base of calls of ``params["jaxpr"]``, without constants, on all operands."""

    kind = "call"
    multiple_results = any_memory = True
    body = "jaxpr"

    def reference(self, compile, *, jaxpr: Jaxpr, **params):
        """The body."""
        return compile(jaxpr)

    def abstract(self, *avals, jaxpr: Jaxpr, **params):
        return jaxpr.out_avals

    def effects_of(self, params):
        return params["jaxpr"].effects

    def derived(self, params: dict, jaxpr: Jaxpr, n_args: int) -> dict:
        """Parameters of the call of a transformed jaxpr with ``n_args`` operands."""
        return {**params, "jaxpr": jaxpr}

    def call(self, jaxpr: Jaxpr, args: Sequence[Any], params: dict) -> list[Any]:
        """Call a jaxpr that a transform returned, constants first."""
        closed, consts = jaxpr.hoist()
        ins = [*consts, *args]
        return self.bind(*ins, **self.derived(params, closed, len(ins)))

    def evaluate(self, args, params):
        arrays = [a if a.__class__ is ConcreteArray else concrete(a) for a in args]
        jaxpr = params["jaxpr"]
        device = device_of(arrays, self.name, simplify.home_of(jaxpr))
        program = jaxpr.memoised(
            ("program", device, config.matmul_precision),
            lambda: device.backend.compile(jaxpr, (False,) * len(arrays)),
        )
        outs = program([a.buffer_on(device) for a in arrays])
        if config.guards:
            shown = effects.silenced(simplify.inline_calls(jaxpr))
            nan_check.check_program(params.get("name", self.name), shown, arrays, outs, device)
        return [ConcreteArray(b, v.aval, device) for b, v in zip(outs, jaxpr.outvars, strict=True)]

    def jvp(self, primals, tangents, **params):
        nonzeros = tuple(t.__class__ is not Zero for t in tangents)
        jaxpr, out_nonzeros = jvp_jaxpr(params["jaxpr"], nonzeros, (False,) * len(params["jaxpr"].outvars))
        outs = self.call(jaxpr, [*primals, *(t for t in tangents if t.__class__ is not Zero)], params)
        n = len(out_nonzeros)
        rest = iter(outs[n:])
        return outs[:n], [
            next(rest) if nz else zero(p.aval) for p, nz in zip(outs, out_nonzeros, strict=False)
        ]

    def linearize(self, trace: LinearizeTrace, primals, tangents, **params):
        nonzeros = tuple(t.__class__ is not Zero for t in tangents)
        primal, linear, out_nonzeros, _ = linearize_jaxpr(params["jaxpr"], nonzeros)
        n = len(out_nonzeros)
        # A residual that is a parameter or a result need not be returned: the caller has it.
        primal, places = forward_residuals(primal, n)
        results = self.call(primal, primals, params)
        outs, residuals = results[:n], [(primals if of_input else results)[i] for of_input, i in places]
        ins = [*residuals, *(t for t in tangents if t.__class__ is not Zero)]
        rest = iter(trace.tangents.process(self, ins, self.derived(params, linear, len(ins))))
        return outs, [next(rest) if nz else zero(p.aval) for p, nz in zip(outs, out_nonzeros, strict=True)]

    def split(self, trace, args, *, jaxpr: Jaxpr, **params):
        """Split the body, and inline its equations on their sides."""
        return eval_jaxpr(jaxpr, args)

    def transpose(self, cts, *args, **params):
        linear = tuple(is_linear(a) for a in args)
        nonzeros = tuple(ct.__class__ is not Zero for ct in cts)
        jaxpr, out_nonzeros = transpose_jaxpr(params["jaxpr"], linear, nonzeros)
        ins = [a for a in args if not is_linear(a)] + [ct for ct in cts if ct.__class__ is not Zero]
        outs = iter(self.call(jaxpr, ins, params))
        for a, nz in zip([a for a in args if is_linear(a)], out_nonzeros, strict=True):
            if nz:
                a.add(next(outs))

    def batch(self, axis, args, dims, **params):
        batched = tuple(d is not None for d in dims)
        jaxpr, out_batched = batch_jaxpr(params["jaxpr"], axis, batched)
        ins = [a if d is None else move_dim(a, d, 0) for a, d in zip(args, dims, strict=True)]
        return self.call(jaxpr, ins, params), [0 if b else None for b in out_batched]

    def rewrite(self, bodies, operands, **params):
        """Call the transformed body."""
        body = params["jaxpr"]
        jaxpr, kinds = bodies.body(body, [bodies.kind(x) for x in operands])
        return bodies.boxes(self.call(jaxpr, bodies.leaves(operands), params), kinds, body.out_avals)

    def drop_outputs(self, eqn: Eqn, reads: list[bool]) -> Eqn:
        """Drop results that are not read, and operands that only they need."""
        key = ("drop", tuple(reads))
        body = eqn.params["jaxpr"]
        jaxpr: Jaxpr = body.memoised(key, lambda: simplify.dce(body, reads))
        used = simplify.used(jaxpr)
        keep = [v in used for v in jaxpr.invars]
        if not all(keep):
            jaxpr = body.memoised(
                (*key, "args"),
                lambda: jaxpr.replace(
                    invars=[v for v, k in zip(jaxpr.invars, keep, strict=True) if k], arg_names=()
                ),
            )
        invars = [a for a, k in zip(eqn.invars, keep, strict=True) if k]
        outvars = [v for v, r in zip(eqn.outvars, reads, strict=True) if r]
        return Eqn(eqn.prim, invars, outvars, self.derived(eqn.params, jaxpr, len(invars)), eqn.source)


def forward_residuals(primal: Jaxpr, n: int) -> tuple[Jaxpr, list[tuple[bool, int]]]:
    """Drop residuals (outputs from ``n`` on) that the caller already has.

    Also returns where each residual is: ``(True, i)`` is argument i, ``(False, i)`` is result i.
    """
    return primal.memoised(("forwarded", n), lambda: _forwarded(primal, n))


def _forwarded(primal: Jaxpr, n: int) -> tuple[Jaxpr, list[tuple[bool, int]]]:
    inputs = {v: i for i, v in enumerate(primal.invars)}
    outvars = list(primal.outvars[:n])
    results = {v: i for i, v in reversed(list(enumerate(outvars)))}
    places = []
    for v in primal.outvars[n:]:
        if v in inputs:
            places.append((True, inputs[v]))
            continue
        if v not in results:
            results[v] = len(outvars)
            outvars.append(v)
        places.append((False, results[v]))
    return primal.replace(outvars=outvars), places


class _Jit(Call):
    """A function compiled as one program; inlined into an enclosing program."""

    name, inline = "jit", True

    def linearize(self, trace, primals, tangents, *, jaxpr, **params):
        if state.trace is EVAL:  # two programs on a known device: their residuals are for one variant only
            jaxpr = _in_forms_of(
                device_of([*map(concrete, primals)], self.name, simplify.home_of(jaxpr)), jaxpr
            )
        else:
            jaxpr = with_recognised(jaxpr)
        return super().linearize(trace, primals, tangents, jaxpr=jaxpr, **params)


def _in_forms_of(device: Device, jaxpr: Jaxpr) -> Jaxpr:
    """Select the variants of a jaxpr that a device prefers."""

    def choose() -> tuple[Jaxpr | None]:
        selected = device.backend.chosen(jaxpr)
        return (None if selected is jaxpr else selected,)  # memoizing itself would keep it alive

    (found,) = jaxpr.memoised(("in forms of", device, config.matmul_precision), choose)
    return found or jaxpr


jit_p = _Jit()
