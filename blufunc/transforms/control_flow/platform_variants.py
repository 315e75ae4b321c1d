"""``either``: a computation in two variants, chosen by the device.

Transforms, stage 2. In: a plain body, as the user wrote it, and a preferred one, with operations that some devices have
kernels for. Out: an equation with both. The device is known at compilation, long after differentiation, so both bodies
go through all transforms, and ``core/programs/alternatives.py`` selects one.

Linearization saves the residuals of either: the forward equation returns the common results, then residuals that only
the plain backward pass reads, then those of the preferred one (``parts``). Both bodies compute all of them, but dead
code elimination removes the residuals of the variant that is not taken, so that a device without kernels runs exactly
the program as written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var, eval_jaxpr
from blufunc.core.primitives.linear_ops import move_dim
from blufunc.core.primitives.tangents import Zero, is_linear, zero
from blufunc.core.programs.alternatives import as_written
from blufunc.core.programs.stage import stage
from blufunc.transforms.autodiff.jvp import jvp_jaxpr
from blufunc.transforms.autodiff.linearize import linearize_jaxpr
from blufunc.transforms.autodiff.transpose import transpose_jaxpr
from blufunc.transforms.batching.batch import batch_jaxpr
from blufunc.transforms.control_flow.calls import Call, forward_residuals, jit_p

Flags = tuple[bool, ...]


class Either(Call):
    """Params: jaxpr, the plain body; preferred, the other, of the same types;
    parts: the numbers of results of both, of the plain body alone, and of the preferred one alone; held: a flag per
    operand, True if the preferred body has no good derivative in it."""

    name, alternative = "either", "preferred"
    drop_outputs = None  # type: ignore[assignment]  # the results that are read select the body

    def both(
        self,
        bodies: Sequence[Jaxpr],
        args: Sequence,
        parts: tuple[int, int, int],
        held: Sequence[bool],
    ) -> list:
        """Bind bodies that a transform returned, which may have constants."""
        (first, consts), (second, more) = [body.hoist() for body in bodies]
        n, m = len(consts), len(more)
        mine, n_preferred = first.invars, second.invars
        pad = lambda like: [Var(v.aval) for v in like]
        params = {
            "jaxpr": first.replace(invars=[*mine[:n], *pad(n_preferred[:m]), *mine[n:]], arg_names=()),
            "preferred": second.replace(invars=[*pad(mine[:n]), *n_preferred], arg_names=()),
            "parts": parts,
            "held": (False,) * (n + m) + tuple(held),
        }
        return self.bind(*consts, *more, *args, **params)

    def call(self, jaxpr: Jaxpr, args: Sequence[Any], params: dict) -> list[Any]:
        """Other transforms see a plain call of the plain body."""
        closed, consts = jaxpr.hoist()
        return jit_p.bind(*consts, *args, jaxpr=closed, name=self.name)

    def evaluate(self, args, params):
        """Evaluate as a program of one equation, so that a device may select."""
        jaxpr: Jaxpr = params["jaxpr"]

        def alone() -> Jaxpr:
            ins, outs = [Var(v.aval) for v in jaxpr.invars], [Var(a.strong()) for a in jaxpr.out_avals]
            return Jaxpr(ins, [Eqn(self, ins, outs, params, None)], outs, name=self.name)

        single = jaxpr.memoised(("alone", params["preferred"], params["parts"]), alone)
        return super().evaluate(args, {**params, "jaxpr": single})

    def jvp(self, primals, tangents, *, jaxpr, preferred, parts, held):
        nonzeros = tuple(t.__class__ is not Zero for t in tangents)
        bodies, flags = _agreeing(
            lambda body, required: jvp_jaxpr(body, nonzeros, required), (jaxpr, preferred), len(jaxpr.outvars)
        )
        nonzero = [t for t in tangents if t.__class__ is not Zero]
        n = len(flags)
        flat = (n + sum(flags), 0, 0)
        outs = self.both(bodies, [*primals, *nonzero], flat, (*held, *(False,) * len(nonzero)))
        rest = iter(outs[n:])
        return outs[:n], [next(rest) if f else zero(o.aval) for o, f in zip(outs, flags, strict=False)]

    def linearize(self, trace, primals, tangents, *, jaxpr, preferred, parts, held):
        nonzeros = tuple(t.__class__ is not Zero for t in tangents)
        if any(h and nz for h, nz in zip(held, nonzeros, strict=True)):
            with as_written():
                return jit_p.linearize(trace, primals, tangents, jaxpr=jaxpr, name=self.name)
        n = len(jaxpr.outvars)
        halves, flags = _agreeing(
            lambda body, required: _halves(linearize_jaxpr(body, nonzeros, required)), (jaxpr, preferred), n
        )
        (plain, places), (better, other_places) = [forward_residuals(primal, n) for primal, _ in halves]
        n_plain, n_preferred = len(plain.outvars) - n, len(better.outvars) - n
        first = _computing(plain, better, n, plain_first=True)
        second = _computing(plain, better, n, plain_first=False)
        results = self.both([first, second], primals, (n, n_plain, n_preferred), held)
        shared = results[:n]
        own = [*shared, *results[n : n + n_plain]], [*shared, *results[n + n_plain :]]
        residuals = [
            [(primals if of_input else mine)[i] for of_input, i in found]
            for mine, found in zip(own, (places, other_places), strict=True)
        ]
        ts = [t for t in tangents if t.__class__ is not Zero]
        ins = [*residuals[0], *residuals[1], *ts]
        linears = _side_by_side(*[linear for _, linear in halves], *map(len, residuals))
        params = {
            "jaxpr": linears[0],
            "preferred": linears[1],
            "parts": (sum(flags), 0, 0),
            "held": (False,) * len(ins),
        }
        rest = iter(trace.tangents.process(self, ins, params))
        return results[:n], [next(rest) if f else zero(o.aval) for o, f in zip(shared, flags, strict=True)]

    def transpose(self, cts, *args, jaxpr, preferred, parts, held):
        linear = tuple(is_linear(a) for a in args)
        nonzeros = tuple(ct.__class__ is not Zero for ct in cts)
        bodies, flags = _agreeing(
            lambda body, required: transpose_jaxpr(body, linear, nonzeros, required),
            (jaxpr, preferred),
            sum(linear),
        )
        ins = [a for a in args if not is_linear(a)] + [ct for ct in cts if ct.__class__ is not Zero]
        outs = iter(self.both(bodies, ins, (sum(flags), 0, 0), (False,) * len(ins)))
        for a, f in zip([a for a in args if is_linear(a)], flags, strict=True):
            if f:
                a.add(next(outs))

    def batch(self, axis, args, dims, *, jaxpr, preferred, parts, held):
        batched = tuple(d is not None for d in dims)
        bodies, flags = _agreeing(
            lambda body, required: batch_jaxpr(body, axis, batched, required),
            (jaxpr, preferred),
            len(jaxpr.outvars),
        )
        ins = [a if d is None else move_dim(a, d, 0) for a, d in zip(args, dims, strict=True)]
        return self.both(bodies, ins, parts, held), [0 if f else None for f in flags]

    def rewrite(self, bodies, operands, *, jaxpr, **params):
        """Transform the plain body."""
        return bodies.inline(jaxpr, operands)


def _agreeing(
    transform: Callable[[Jaxpr, Flags], tuple[Any, Flags]], bodies: tuple[Jaxpr, Jaxpr], n: int
) -> tuple[list[Any], Flags]:
    """Transform both bodies with the union of their flags."""
    found = [tuple(transform(body, (False,) * n)[1]) for body in bodies]
    union = tuple([a or b for a, b in zip(*found, strict=True)])
    same = [flags == union for flags in found]
    return [transform(b, (False,) * n if s else union)[0] for b, s in zip(bodies, same, strict=True)], union


def _halves(divided: tuple) -> tuple[tuple[Jaxpr, Jaxpr], Flags]:
    primal, linear, flags, _ = divided
    return (primal, linear), flags


def _computing(plain: Jaxpr, better: Jaxpr, n: int, plain_first: bool) -> Jaxpr:
    """The forward body: its ``n`` results from one body, and the residuals of both."""

    def run(*xs: Any) -> list[Any]:
        mine, n_preferred = eval_jaxpr(plain, xs), eval_jaxpr(better, xs)
        return [*(mine if plain_first else n_preferred)[:n], *mine[n:], *n_preferred[n:]]

    key = ("either", better, n, plain_first)
    return plain.memoised(key, lambda: stage(run, plain.in_avals, plain.name))


def _side_by_side(plain: Jaxpr, better: Jaxpr, n_plain: int, n_preferred: int) -> tuple[Jaxpr, Jaxpr]:
    """Both linear jaxprs as functions of both lists of residuals and the tangents."""
    unused = [Var(v.aval) for v in better.invars[:n_preferred]]
    mine = [Var(v.aval) for v in plain.invars[:n_plain]]
    return (
        plain.replace(invars=[*plain.invars[:n_plain], *unused, *plain.invars[n_plain:]], arg_names=()),
        better.replace(invars=[*mine, *better.invars], arg_names=()),
    )


either_p = Either()
