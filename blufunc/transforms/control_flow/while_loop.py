"""``while_loop``: a loop with a data-dependent trip count, as one primitive.

Transforms, stage 2. In: closed condition and body, and as operands their constants and the initial carry. Out: the last
carry. Forward mode is a loop over values and tangents. Reverse mode saves residuals of each step, so it requires a
bound: with ``max_steps`` the loop is differentiated as a scan of that length whose steps are conds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import static_int
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, eval_jaxpr
from blufunc.core.ir.trace import set_trace
from blufunc.core.ops.elementwise import convert, select
from blufunc.core.ops.reduce import reduce_or
from blufunc.core.primitives import effects
from blufunc.core.primitives.linear_ops import batched_front, broadcast_in_dim, instantiate, move_dim
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.primitives.tangents import is_nonzero, zero
from blufunc.core.programs import simplify
from blufunc.core.programs.refs import carried
from blufunc.core.programs.stage import stage, stage_body
from blufunc.core.pytree import paths as treepath
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import as_values, check_callable, name_of
from blufunc.transforms.autodiff.jvp import jvp_jaxpr
from blufunc.transforms.autodiff.linearize import split_jaxpr
from blufunc.transforms.batching.batch import batch_jaxpr
from blufunc.transforms.control_flow import loop_carry
from blufunc.transforms.control_flow.carried_refs import while_with
from blufunc.transforms.control_flow.cond import cond_p, is_inexact, where_taken
from blufunc.transforms.control_flow.scan import scan_p

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

T = TypeVar("T")


def _parts(xs: Iterable, n_cond: int, n_body: int) -> tuple[list, list, list]:
    """Split operands into constants of the condition, of the body, and carry."""
    xs = list(xs)
    return xs[:n_cond], xs[n_cond : n_cond + n_body], xs[n_cond + n_body :]


class _While(Primitive):
    """``carry = body(carry)`` while ``cond(carry)``, at most ``max_steps`` times.

    Params: cond, body, closed, whose first n_cond and n_body parameters are constants; max_steps.
    """

    name, kind, multiple_results = "while", "control", True
    any_memory = True

    def effects_of(self, params):
        return params["cond"].effects | params["body"].effects

    def abstract(self, *avals, cond: Jaxpr, body: Jaxpr, n_cond, n_body, max_steps):
        c_consts, b_consts, carry = _parts(avals, n_cond, n_body)
        for jaxpr, expected in ((cond, [*c_consts, *carry]), (body, [*b_consts, *carry])):
            for got, want in zip(jaxpr.in_avals, expected, strict=True):
                if not got.same_type(want):
                    raise errors.ShapeError(f"while: a jaxpr takes {got} where the operands give {want}.")
        (verdict,) = cond.out_avals
        if verdict.shape or not dtypes.is_bool(verdict.dtype):
            raise errors.ArgumentError(f"while: the condition is a boolean of rank 0, not {verdict}.")
        for before, after in zip(carry, body.out_avals, strict=True):
            if not before.same_type(after):
                raise errors.CarryError(f"while: the carry goes in as {before} and comes out as {after}.")
        return [a.weak_as(b) for a, b in zip(carry, body.out_avals, strict=True)]

    def reference(self, compile, *, cond: Jaxpr, body: Jaxpr, n_cond, n_body, max_steps):
        holds, step = compile(cond), compile(body)

        def run(buffers):
            c_consts, b_consts, carry = _parts(buffers, n_cond, n_body)
            steps = 0
            while steps != max_steps and holds([*c_consts, *carry])[0]:
                carry = step([*b_consts, *carry])
                steps += 1
            return list(carry)

        return run

    def _loop(
        self,
        cond: Jaxpr,
        body: Jaxpr,
        c_consts: Sequence,
        b_consts: Sequence,
        carry: Sequence,
        max_steps: Any,
    ) -> list[Any]:
        """Bind a loop."""
        counts = {"n_cond": len(c_consts), "n_body": len(b_consts)}
        operands = (*c_consts, *b_consts, *carry)
        return self.bind(*operands, cond=cond, body=body, **counts, max_steps=max_steps)

    def jvp(self, primals, tangents, *, body: Jaxpr, cond: Jaxpr, n_cond, n_body, max_steps):
        _, b_ts, c_ts = _parts(tangents, n_cond, n_body)
        nz_consts, nz_carry = tuple(map(is_nonzero, b_ts)), tuple(map(is_nonzero, c_ts))
        while (of_body := jvp_jaxpr(body, (*nz_consts, *nz_carry), nz_carry))[1] != nz_carry:
            nz_carry = of_body[1]
        derived = of_body[0]
        n, m, k = len(nz_carry), sum(nz_consts), sum(nz_carry)
        closed, extra = derived.hoist()

        def reorder():
            own, rest = list(closed.invars[: len(extra)]), closed.invars[len(extra) :]
            (p_consts, p_carry), ts = (rest[:n_body], rest[n_body : n_body + n]), rest[n_body + n :]
            new_body = closed.replace(invars=[*own, *p_consts, *ts[:m], *p_carry, *ts[m:]], arg_names=())
            spare = [a for a, nz in zip(body.out_avals, nz_carry, strict=True) if nz]
            new_cond = stage(
                lambda *xs: eval_jaxpr(cond, xs[: n_cond + n]),
                [*cond.in_avals, *(a.tangent() for a in spare)],
                cond.name,
            )
            return new_cond, new_body

        new_cond, new_body = derived.memoised(("while jvp", cond), reorder)
        c_consts, b_consts, carry = _parts(primals, n_cond, n_body)
        t_consts = [t for t in b_ts if is_nonzero(t)]
        t_carry = [instantiate(t) for t, nz in zip(c_ts, nz_carry, strict=True) if nz]
        new_consts = [*extra, *b_consts, *t_consts]
        outs = self._loop(new_cond, new_body, c_consts, new_consts, [*carry, *t_carry], max_steps)
        rest = iter(outs[n : n + k])
        return outs[:n], [next(rest) if nz else zero(p.aval) for p, nz in zip(outs, nz_carry, strict=False)]

    def linearize(self, trace, primals, tangents, **params):
        if params["max_steps"] is not None:
            return scan_p.linearize(trace, primals, tangents, **_as_scan(**params))
        # without a bound residuals cannot be saved: the tangent loop recomputes the values
        with set_trace(trace.split):
            return self.jvp(primals, tangents, **params)

    def split(self, trace, args, *, cond: Jaxpr, body: Jaxpr, n_cond, n_body, max_steps):
        """Two loops: over values, and over values and tangents. A scan if bounded."""
        if max_steps is not None:
            return scan_p.split(trace, args, **_as_scan(cond, body, n_cond, n_body, max_steps))
        c_consts, b_consts, carry = _parts(args, n_cond, n_body)
        t_consts, t_carry = tuple(map(trace.is_tangent, b_consts)), tuple(map(trace.is_tangent, carry))
        while True:
            primal, _, flags = split_jaxpr(body, (*t_consts, *t_carry), t_carry)
            if flags == t_carry:
                break
            t_carry = flags
        n = flags.count(False)
        params = {"cond": cond, "body": body, "n_cond": n_cond, "n_body": n_body, "max_steps": None}
        out_ts = trace.tangents.process(self, args, self._repeatable(params))

        def values_only():
            keeps = simplify.dce(primal, (True,) * n + (False,) * (len(primal.outvars) - n)).hoist()
            sides = (*(False,) * n_cond, *flags)  # the condition does not read tangents
            invars = [v for v, t in zip(cond.invars, sides, strict=True) if not t]
            return cond.replace(invars=invars, arg_names=()), *keeps

        p_cond, p_body, extra = primal.memoised(("while split", cond), values_only)
        p_consts, p_carry = (
            [x for x, t in zip(xs, ts, strict=True) if not t]
            for xs, ts in ((b_consts, t_consts), (carry, flags))
        )
        with set_trace(trace.parent):
            outs = self._loop(p_cond, p_body, c_consts, [*extra, *p_consts], p_carry, None)
        values = iter(outs)
        return [t if is_t else next(values) for t, is_t in zip(out_ts, flags, strict=True)]

    def _repeatable(self, params: dict) -> dict:
        """Parameters of the loop that recomputes values; an error for side effects."""
        repeatable = effects.silenced_params(params)
        if self.effects_of(repeatable):
            raise errors.UnsupportedError(
                f"a while_loop with the effects {', '.join(sorted(self.effects_of(repeatable)))} is linearized.",
                where=source.here(),
                why="without a bound on its steps the tangent map recomputes the values, and its effects "
                "would happen twice.",
                fix="lax.while_loop(..., max_steps=n); or move the io_callback out of the loop",
            )
        return repeatable

    def transpose(self, cts, *args, max_steps, **params):
        raise errors.GradError(
            "reverse mode through a while_loop needs a bound on the number of steps.",
            where=source.here(),
            why="the backward pass visits the steps in reverse, and must save the residuals of each.",
            fix="lax.while_loop(cond_fun, body_fun, init, max_steps=1000); lax.fori_loop with static bounds; "
            "lax.scan; or forward mode: bf.jvp, bf.jacfwd",
        )

    def batch(self, axis, args, dims, *, cond: Jaxpr, body: Jaxpr, n_cond, n_body, max_steps):
        b_cond, b_body, b_carry = map(tuple, _parts([d is not None for d in dims], n_cond, n_body))
        while True:
            cond_b, (verdict_batched,) = batch_jaxpr(cond, axis, (*b_cond, *b_carry))
            required = (True,) * len(b_carry) if verdict_batched else b_carry
            body_b, out_batched = batch_jaxpr(body, axis, (*b_body, *required), required)
            if out_batched == b_carry:
                break
            b_carry = out_batched
        c_consts, b_consts, carry = _parts(zip(args, dims, strict=True), n_cond, n_body)
        guarded = verdict_batched and max_steps is not None  # it may be differentiated in reverse
        if guarded:
            b_consts = [(batched_front(axis, a, d), 0) if is_inexact(a) else (a, d) for a, d in b_consts]
            b_body = tuple(d is not None for _, d in b_consts)
            body_b, _ = batch_jaxpr(body, axis, (*b_body, *b_carry), b_carry)
        c_ins, b_ins = (
            [a if d is None else move_dim(a, d, 0) for a, d in part] for part in (c_consts, b_consts)
        )
        carry = [batched_front(axis, a, d) if b else a for (a, d), b in zip(carry, b_carry, strict=True)]
        (cond_b, c_extra), (body_b, b_extra) = cond_b.hoist(), body_b.hoist()
        c_ins, b_ins = [*c_extra, *c_ins], [*b_extra, *b_ins]
        if verdict_batched:
            effects.check_divergence(self, {"cond": cond, "body": body})
            cond_b, body_b = body_b.memoised(
                ("while batch", cond_b, guarded),
                lambda: _in_lock_step(cond_b, body_b, len(c_ins), len(b_ins), b_body if guarded else None),
            )
            b_ins = [*c_ins, *b_ins]
        outs = self._loop(cond_b, body_b, c_ins, b_ins, carry, max_steps)
        return outs, [0 if b else None for b in b_carry]

    def rewrite(self, bodies, operands, *, cond: Jaxpr, body: Jaxpr, n_cond, n_body, max_steps):
        """The loop of the transformed body."""
        c_consts, b_consts, carry = _parts(operands, n_cond, n_body)
        c_kinds, b_kinds = ([bodies.kind(x) for x in part] for part in (c_consts, b_consts))
        carry, new_body, kinds = loop_carry.boxed(
            "while_loop", bodies, body, carry, lambda carry_kinds: [*b_kinds, *carry_kinds]
        )
        new_cond, _ = bodies.body(cond, [*c_kinds, *kinds], plain_outs="the condition of a while_loop")
        (new_cond, c_extra), (new_body, b_extra) = new_cond.hoist(), new_body.hoist()
        c_ins, b_ins = [*c_extra, *bodies.leaves(c_consts)], [*b_extra, *bodies.leaves(b_consts)]
        outs = self._loop(new_cond, new_body, c_ins, b_ins, bodies.leaves(carry), max_steps)
        return bodies.boxes(outs, kinds, body.out_avals)

    def drop_outputs(self, eqn: Eqn, reads: list[bool]) -> Eqn:
        """Drop carries that are not read and that no step needs, and their operands."""
        params = eqn.params
        cond, body, n_cond, n_body = params["cond"], params["body"], params["n_cond"], params["n_body"]
        cond = simplify.dce(cond)
        compared = simplify.used(cond)
        keep = [r or v in compared for r, v in zip(reads, cond.invars[n_cond:], strict=True)]
        while True:
            step = simplify.dce(body, keep)
            used = simplify.used(step)
            needed = [k or v in used for k, v in zip(keep, body.invars[n_body:], strict=True)]
            if needed == keep:
                break
            keep = needed
        c_keep = [v in compared for v in cond.invars[:n_cond]]
        b_keep = [v in used for v in body.invars[:n_body]]

        def narrow(jaxpr, keeps):
            invars = [v for v, k in zip(jaxpr.invars, keeps, strict=True) if k]
            return jaxpr.replace(invars=invars, arg_names=())

        cond, body = body.memoised(
            ("while drop", params["cond"], tuple(keep)),
            lambda: (narrow(cond, [*c_keep, *keep]), narrow(step, [*b_keep, *keep])),
        )
        new = {**params, "cond": cond, "body": body, "n_cond": sum(c_keep), "n_body": sum(b_keep)}
        keeps = [*c_keep, *b_keep, *keep]
        invars = [a for a, k in zip(eqn.invars, keeps, strict=True) if k]
        return Eqn(self, invars, [v for v, k in zip(eqn.outvars, keep, strict=True) if k], new, eqn.source)


def _in_lock_step(
    cond: Jaxpr, body: Jaxpr, n_cond: int, n_body: int, guarded: Sequence[bool] | None
) -> tuple[Jaxpr, Jaxpr]:
    """Condition and body of a loop over a batch whose elements end at different steps.

    The loop runs while any element does, and finished elements are frozen. The body takes the constants of the
    condition before its own.

    Args:
      guarded: flags of the last constants of the body with the batch axis, if it may be differentiated in reverse:
        their derivatives then come from running elements only.
    """
    carry = cond.in_avals[n_cond:]

    def any_holds(*args):
        (verdicts,) = eval_jaxpr(cond, args)
        return [reduce_or(verdicts, (0,))]

    def step(*args):
        c_consts, b_consts, carry = _parts(args, n_cond, n_body)
        (verdicts,) = eval_jaxpr(cond, [*c_consts, *carry])
        ins = [*b_consts, *carry]
        if guarded is not None:
            flags = [*(False,) * (n_body - len(guarded)), *guarded, *(True,) * len(carry)]
            ins = [where_taken(verdicts, x) if g else x for x, g in zip(ins, flags, strict=True)]
        new = eval_jaxpr(body, ins)
        return [
            select(broadcast_in_dim(verdicts, x.aval.shape, (0,)), y, x)
            for x, y in zip(carry, new, strict=True)
        ]

    avals = [*cond.in_avals[:n_cond], *body.in_avals[:n_body], *carry]
    return stage(any_holds, cond.in_avals, cond.name), stage(step, avals, body.name)


def _as_scan(cond: Jaxpr, body: Jaxpr, n_cond: int, n_body: int, max_steps: int) -> dict:
    """Parameters of a scan of ``max_steps`` steps, idle after the end."""

    def make():
        idle = stage(lambda *xs: xs[n_body:], body.in_avals, body.name)

        def step(*args):
            c_consts, b_consts, carry = _parts(args, n_cond, n_body)
            (verdict,) = eval_jaxpr(cond, [*c_consts, *carry])
            return cond_p.bind(convert(verdict, np.dtype(np.int32)), *b_consts, *carry, branches=(idle, body))

        return stage(step, [*cond.in_avals[:n_cond], *body.in_avals], body.name)

    jaxpr = body.memoised(("while as scan", cond), make)
    counts = {"n_consts": n_cond + n_body, "n_carry": len(body.outvars)}
    return {"jaxpr": jaxpr, "length": max_steps, "reverse": False, "unroll": 1, **counts}


while_p = _While()


@overload
def while_loop(
    cond_fun: Callable[[Array], ArrayLike],
    body_fun: Callable[[Array], ArrayLike],
    init_val: ArrayLike,
    *,
    max_steps: int | None = None,
) -> Array: ...
@overload
def while_loop(
    cond_fun: Callable[[T], ArrayLike],
    body_fun: Callable[[T], T],
    init_val: T,
    *,
    max_steps: int | None = None,
) -> T: ...
@overload
def while_loop(
    cond_fun: Callable[[T], ArrayLike],
    body_fun: Callable[[T], T],
    init_val: Any,
    *,
    max_steps: int | None = None,
) -> T: ...


@carried(while_with)
def while_loop(
    cond_fun: Callable[..., Any], body_fun: Callable[..., Any], init_val: Any, *, max_steps: int | None = None
) -> Any:
    """``val = body_fun(val)`` while ``cond_fun(val)``, starting with ``init_val``.

    Forward mode always works. Reverse mode requires ``max_steps``, and memory for the residuals of that many steps.
    Under ``vmap`` the loop runs until every element has ended.

    Args:
      cond_fun: from the value to a boolean scalar.
      body_fun: from the value to the next, of the same structure, shapes and dtypes.
      init_val: the initial value, a pytree.
      max_steps: the maximum number of steps, after which the loop ends even if ``cond_fun`` holds; default None.
    Returns:
      the last value.
    Raises:
      CarryError: the body changes the type of the value.
    """
    check_callable(cond_fun, "while_loop")
    check_callable(body_fun, "while_loop")
    if max_steps is not None:
        max_steps = static_int(max_steps, "while_loop", "max_steps")
        if max_steps < 0:
            raise errors.ValueRangeError(
                f"while_loop: max_steps={max_steps} is negative.", where=source.here()
            )
    leaves, in_tree = tree.flatten(init_val)
    paths = treepath.leaf_paths(in_tree)
    carry = as_values(leaves, lambda i: f"init_val{paths[i]}")
    name, labels = name_of(body_fun), [f"val{p}" for p in paths]
    out_tree: Any = None

    def step(*args):
        nonlocal out_tree
        out_leaves, out_tree = tree.flatten(body_fun(tree.unflatten(in_tree, args)))
        return as_values(out_leaves, lambda i: f"the result{treepath.leaf_paths(out_tree)[i]} of {name}")

    holds = lambda *args: [_verdict(cond_fun(tree.unflatten(in_tree, args)), cond_fun)]
    restage = lambda avals: stage_body(step, avals, carry, name, labels, n_carry=len(carry), chosen_by=holds)
    body = restage([c.aval for c in carry])
    loop_carry.check_structure("while_loop", name, in_tree, out_tree)
    carry, body = loop_carry.settle(carry, body, restage)
    loop_carry.check_types("while_loop", name, paths, carry, body.out_avals)
    cond = stage_body(holds, [c.aval for c in carry], carry, name_of(cond_fun), labels)
    (cond, c_consts), (body, b_consts) = cond.hoist(), body.hoist()
    outs = while_p._loop(cond, body, c_consts, b_consts, carry, max_steps)
    return tree.unflatten(in_tree, outs)


def _verdict(x: Any, cond_fun: Callable) -> Any:
    """Check the result of a condition."""
    leaves, x_tree = tree.flatten(x)
    if x_tree is tree.LEAF:
        (value,) = as_values(leaves, lambda i: f"the result of {name_of(cond_fun)}")
        if not value.aval.ndim and dtypes.is_bool(value.aval.dtype):
            return value
        x = value.aval
    raise errors.ArgumentError(
        f"the condition of while_loop, {name_of(cond_fun)}, must return a boolean of rank 0; it returned {x!s:.80}.",
        where=source.here(),
        fix="compare, and reduce with .all() or .any()",
    )
