"""``scan``: a loop with a carry, as one primitive with all rules.

Transforms, stage 2. In: a closed body ``(consts, carry, x) -> (carry, y)``, and as operands the constants, the initial
carry and the stacked inputs. Out: the last carry and the stacked ys. Derivatives and batches of a scan are scans of
transformed bodies; the carries with a tangent (or a batch axis) are found by iteration to a fixpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.axes import static_int
from blufunc.core.ir.jaxpr import Eqn, Jaxpr
from blufunc.core.ir.trace import set_trace
from blufunc.core.primitives.linear_ops import add_tangents, batched_front, instantiate, move_dim, zeros
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.primitives.tangents import is_linear, is_nonzero, zero
from blufunc.core.programs import simplify
from blufunc.core.programs.refs import carried
from blufunc.core.programs.stage import stage, stage_body
from blufunc.core.pytree import paths as treepath
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import as_values, check_callable, name_of
from blufunc.transforms.autodiff.jvp import jvp_jaxpr
from blufunc.transforms.autodiff.linearize import linearize_jaxpr, split_jaxpr, with_recognised
from blufunc.transforms.autodiff.transpose import backward_pass
from blufunc.transforms.batching.batch import batch_jaxpr
from blufunc.transforms.control_flow import loop_carry
from blufunc.transforms.control_flow.carried_refs import scan_with

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

C = TypeVar("C")
X = TypeVar("X")
Y = TypeVar("Y")


def _parts(xs: Iterable, n_consts: int, n_carry: int) -> tuple[list, list, list]:
    """Split operands (or a list parallel to them) into constants, carry, inputs."""
    xs = list(xs)
    return xs[:n_consts], xs[n_consts : n_consts + n_carry], xs[n_consts + n_carry :]


class _Scan(Primitive):
    """``length`` steps of ``jaxpr``.

    Params: jaxpr, closed; length; reverse: iterate from the last input to the first; n_consts, n_carry: the counts of
    leading operands; unroll: a hint to compilers, the number of steps to unroll.
    """

    name, kind, multiple_results = "scan", "control", True
    any_memory = True

    def effects_of(self, params):
        return params["jaxpr"].effects

    def abstract(self, *avals, jaxpr: Jaxpr, length, reverse, n_consts, n_carry, unroll):
        consts, carry, xs = _parts(avals, n_consts, n_carry)
        expected = [*consts, *carry, *(x.with_shape(x.shape[1:]) for x in xs)]
        for got, want in zip(jaxpr.in_avals, expected, strict=True):
            if not got.same_type(want):
                raise errors.ShapeError(f"scan: the body takes {got} where the operands give {want}.")
        for before, after in zip(carry, jaxpr.out_avals, strict=False):
            if not before.same_type(after):
                raise errors.CarryError(f"scan: the carry goes in as {before} and comes out as {after}.")
        ys = [a.with_shape((length, *a.shape)) for a in jaxpr.out_avals[n_carry:]]
        return [*(a.weak_as(b) for a, b in zip(carry, jaxpr.out_avals, strict=False)), *ys]

    def reference(self, compile, *, jaxpr: Jaxpr, length, reverse, n_consts, n_carry, unroll):
        body = compile(jaxpr)
        ys_avals = jaxpr.out_avals[n_carry:]

        def run(buffers):
            consts, carry, xs = _parts(buffers, n_consts, n_carry)
            ys = [np.empty((length, *a.shape), a.dtype) for a in ys_avals]
            for i in range(length - 1, -1, -1) if reverse else range(length):
                outs = body([*consts, *carry, *[x[i] for x in xs]])
                carry = outs[:n_carry]
                for y, out in zip(ys, outs[n_carry:], strict=True):
                    y[i] = out
            return [*carry, *ys]

        return run

    def _loop(self, jaxpr: Jaxpr, consts: Sequence, carry: Sequence, xs: Sequence, params: dict) -> list[Any]:
        """Bind a scan; ``params`` are length, reverse and unroll."""
        counts = {"n_consts": len(consts), "n_carry": len(carry)}
        return self.bind(*consts, *carry, *xs, jaxpr=jaxpr, **counts, **params)

    def jvp(self, primals, tangents, *, jaxpr: Jaxpr, n_consts, n_carry, **params):
        nz_consts, nz_carry, nz_xs = _parts(map(is_nonzero, tangents), n_consts, n_carry)
        while True:
            nonzeros = (*nz_consts, *nz_carry, *nz_xs)
            required = (*nz_carry, *(False,) * (len(jaxpr.outvars) - n_carry))
            derived, out_nonzeros = jvp_jaxpr(jaxpr, nonzeros, required)
            if list(out_nonzeros[:n_carry]) == nz_carry:
                break
            nz_carry = list(out_nonzeros[:n_carry])
        closed, extra = derived.hoist()
        k, n_in, n_out = len(extra), len(jaxpr.invars), len(jaxpr.outvars)
        ps = _parts(closed.invars[k : k + n_in], n_consts, n_carry)
        ts = _parts(closed.invars[k + n_in :], sum(nz_consts), sum(nz_carry))
        outs, out_ts = closed.outvars[:n_out], closed.outvars[n_out:]
        m = sum(nz_carry)
        body = closed.replace(
            invars=[*closed.invars[:k], *ps[0], *ts[0], *ps[1], *ts[1], *ps[2], *ts[2]],
            outvars=[*outs[:n_carry], *out_ts[:m], *outs[n_carry:], *out_ts[m:]],
            arg_names=(),
        )
        body = derived.memoised("scan jvp", lambda: body)
        p_ops, t_ops = _parts(primals, n_consts, n_carry), _parts(tangents, n_consts, n_carry)
        t_consts, t_xs = [t for t in t_ops[0] if is_nonzero(t)], [t for t in t_ops[2] if is_nonzero(t)]
        t_carry = [instantiate(t) for t, nz in zip(t_ops[1], nz_carry, strict=True) if nz]
        consts = [*extra, *p_ops[0], *t_consts]
        results = self._loop(body, consts, [*p_ops[1], *t_carry], [*p_ops[2], *t_xs], params)
        carry, carry_t, rest = results[:n_carry], results[n_carry : n_carry + m], results[n_carry + m :]
        ys, ys_t = rest[: n_out - n_carry], rest[n_out - n_carry :]
        outs, nonzero_ts = [*carry, *ys], iter([*carry_t, *ys_t])
        return outs, [
            next(nonzero_ts) if nz else zero(p.aval) for p, nz in zip(outs, out_nonzeros, strict=True)
        ]

    def linearize(self, trace, primals, tangents, *, jaxpr: Jaxpr, n_consts, n_carry, **params):
        jaxpr = with_recognised(jaxpr)
        nz_consts, nz_carry, nz_xs = _parts(map(is_nonzero, tangents), n_consts, n_carry)
        while True:
            nonzeros = (*nz_consts, *nz_carry, *nz_xs)
            required = (*nz_carry, *(False,) * (len(jaxpr.outvars) - n_carry))
            primal, linear, out_nonzeros, _ = linearize_jaxpr(jaxpr, nonzeros, required)
            if list(out_nonzeros[:n_carry]) == nz_carry:
                break
            nz_carry = list(out_nonzeros[:n_carry])
        t_consts, t_carry, t_xs = _parts(tangents, n_consts, n_carry)
        with set_trace(trace.tangents):  # zeros made here are not residuals
            t_carry = [instantiate(t) for t, nz in zip(t_carry, nz_carry, strict=True) if nz]
        ts = [*filter(is_nonzero, t_consts)], t_carry, [*filter(is_nonzero, t_xs)]
        outs, *second = self._two_scans(
            primal, linear, _parts(primals, n_consts, n_carry), ts, len(jaxpr.outvars), params
        )
        rest = iter(trace.tangents.process(self, *second))
        return outs, [next(rest) if nz else zero(p.aval) for p, nz in zip(outs, out_nonzeros, strict=True)]

    def split(self, trace, args, *, jaxpr: Jaxpr, n_consts, n_carry, **params):
        """Two scans, if the carry mixes values and tangents."""
        tangents = tuple(map(trace.is_tangent, args))
        primal, linear, flags, sides = _divide(jaxpr, tangents, n_consts, n_carry)
        ps, ts = _by_side(args, sides, n_consts, n_carry)
        with set_trace(trace.parent):
            outs, *second = self._two_scans(primal, linear, ps, ts, flags.count(False), params)
        results = iter(outs), iter(trace.tangents.process(self, *second))
        return [next(results[t]) for t in flags]

    def _two_scans(
        self, primal: Jaxpr, linear: Jaxpr, ps: Sequence[list], ts: Sequence[list], n_out: int, params
    ) -> tuple[list, list, dict]:
        """Scan a split body over values ``ps``; prepare the scan over tangents ``ts``.

        Returns:
          the ``n_out`` results of the first scan, without the residuals; operands and parameters of the second.
        """
        closed, extra = primal.hoist()
        consts, carry, xs = [*extra, *ps[0]], ps[1], ps[2]
        p_consts, _, p_xs = _parts(closed.invars, len(consts), len(carry))
        residuals = closed.outvars[n_out:]
        # A residual that is a constant, an input or a result of the body need not be stacked.
        of_const: dict[Any, Any] = dict(zip(p_consts, consts, strict=True))
        at_hand = {*p_consts, *p_xs, *closed.outvars[len(carry) : n_out]}
        stacked = [v for v in residuals if v not in at_hand]
        body = primal.memoised(
            ("scan primal", n_out), lambda: closed.replace(outvars=[*closed.outvars[:n_out], *stacked])
        )
        results = self._loop(body, consts, carry, xs, params)
        varying: dict[Any, Any] = dict(zip(body.outvars[len(carry) :], results[len(carry) :], strict=True))
        varying.update(zip(p_xs, xs, strict=True))

        places = tuple(0 if v in of_const else 1 for v in residuals)
        linear_body = linear.memoised(
            ("scan linear", places), lambda: _linear_body(linear, places, len(ts[0]), len(ts[1]))
        )
        invariant = [of_const[v] for v in residuals if v in of_const]
        linear_params = {
            "jaxpr": linear_body,
            "n_consts": len(invariant) + len(ts[0]),
            "n_carry": len(ts[1]),
            **params,
        }
        ins = [*invariant, *ts[0], *ts[1], *ts[2], *(varying[v] for v in residuals if v not in of_const)]
        return results[:n_out], ins, linear_params

    def transpose(self, cts, *args, jaxpr: Jaxpr, n_consts, n_carry, reverse, length, unroll):
        consts, carry, xs = _parts(args, n_consts, n_carry)
        linear = tuple(map(is_linear, args))
        if not _reaches_every_carry(
            jaxpr, linear, n_consts, n_carry
        ):  # such as a counter, whose steps run forward
            primal, derived, flags, sides = _divide(jaxpr, linear, n_consts, n_carry)
            ps, ts = _by_side(args, sides, n_consts, n_carry)
            params = {"reverse": reverse, "length": length, "unroll": unroll}
            _, ins, divided = self._two_scans(primal, derived, ps, ts, flags.count(False), params)
            self.transpose([ct for ct, f in zip(cts, flags, strict=True) if f], *ins, **divided)
            return
        lin_consts, lin_xs = tuple(map(is_linear, consts)), tuple(map(is_linear, xs))
        ct_nonzeros = tuple(map(is_nonzero, cts[n_carry:]))
        res_consts = [c for c in consts if not is_linear(c)]
        res_xs = [x for x in xs if not is_linear(x)]
        key = ("scan transpose", n_carry, lin_consts, lin_xs, ct_nonzeros)
        body, extra = jaxpr.memoised(
            key, lambda: _backward_body(jaxpr, n_carry, lin_consts, lin_xs, ct_nonzeros)
        )
        ct_consts = [zeros(c.aval) for c in consts if is_linear(c)]
        ct_carry = [*ct_consts, *map(instantiate, cts[:n_carry])]
        ct_xs = [ct for ct in cts[n_carry:] if is_nonzero(ct)]
        params = {"reverse": not reverse, "length": length, "unroll": unroll}
        results = self._loop(body, [*extra, *res_consts], ct_carry, [*ct_xs, *res_xs], params)
        targets = [c for c in consts if is_linear(c)] + carry + [x for x in xs if is_linear(x)]
        for target, ct in zip(targets, results, strict=True):
            if is_linear(target):
                target.add(ct)

    def batch(self, axis, args, dims, *, jaxpr: Jaxpr, n_consts, n_carry, **params):
        b_consts, b_carry, b_xs = _parts([d is not None for d in dims], n_consts, n_carry)
        while True:
            required = (*b_carry, *(False,) * (len(jaxpr.outvars) - n_carry))
            derived, out_batched = batch_jaxpr(jaxpr, axis, (*b_consts, *b_carry, *b_xs), required)
            if list(out_batched[:n_carry]) == b_carry:
                break
            b_carry = list(out_batched[:n_carry])
        body, extra = derived.hoist()
        consts, carry, xs = _parts(zip(args, dims, strict=True), n_consts, n_carry)
        ins = [a if d is None else move_dim(a, d, 0) for a, d in consts]
        ins += [batched_front(axis, a, d) if b else a for (a, d), b in zip(carry, b_carry, strict=True)]
        ins += [a if d is None else move_dim(a, d, 1) for a, d in xs]
        outs = self.bind(*extra, *ins, jaxpr=body, n_consts=len(extra) + n_consts, n_carry=n_carry, **params)
        return outs, [None if not b else 0 if i < n_carry else 1 for i, b in enumerate(out_batched)]

    def rewrite(self, bodies, operands, *, jaxpr: Jaxpr, n_consts, n_carry, **params):
        """The scan of the transformed body, with boxed carries wherever a step boxes them."""
        consts, carry, xs = _parts(operands, n_consts, n_carry)
        const_kinds = [bodies.kind(x) for x in consts]
        x_kinds = [k and k.of_element("scan") for k in map(bodies.kind, xs)]
        carry, body, kinds = loop_carry.boxed(
            "scan", bodies, jaxpr, carry, lambda carry_kinds: [*const_kinds, *carry_kinds, *x_kinds]
        )
        closed, extra = body.hoist()
        flat_consts, flat_carry, flat_xs = map(bodies.leaves, (consts, carry, xs))
        outs = self._loop(closed, [*extra, *flat_consts], flat_carry, flat_xs, params)
        ys = [a.with_shape((params["length"], *a.shape)) for a in jaxpr.out_avals[n_carry:]]
        return bodies.boxes(outs, kinds, [*jaxpr.out_avals[:n_carry], *ys])

    def drop_outputs(self, eqn: Eqn, reads: list[bool]) -> Eqn:
        """Drop outputs that are not read, their carries, and their operands."""
        params = eqn.params
        jaxpr, n_consts, n_carry = params["jaxpr"], params["n_consts"], params["n_carry"]
        keep_carry, keep_ys = list(reads[:n_carry]), reads[n_carry:]
        while True:
            body = simplify.dce(jaxpr, [*keep_carry, *keep_ys])
            used = simplify.used(body)
            needed = [k or v in used for k, v in zip(keep_carry, jaxpr.invars[n_consts:], strict=False)]
            if needed == keep_carry:
                break
            keep_carry = needed
        v_consts, v_carry, v_xs = _parts(jaxpr.invars, n_consts, n_carry)
        keep = [*(v in used for v in v_consts), *keep_carry, *(v in used for v in v_xs)]
        body = body.replace(invars=[v for v, k in zip(jaxpr.invars, keep, strict=True) if k], arg_names=())
        body = jaxpr.memoised(("scan drop", tuple(keep), tuple(keep_ys)), lambda: body)
        new = {**params, "jaxpr": body, "n_consts": sum(keep[:n_consts]), "n_carry": sum(keep_carry)}
        outvars = [v for v, k in zip(eqn.outvars, [*keep_carry, *keep_ys], strict=True) if k]
        return Eqn(self, [a for a, k in zip(eqn.invars, keep, strict=True) if k], outvars, new, eqn.source)


def _divide(
    jaxpr: Jaxpr, tangents: Sequence[bool], n_consts: int, n_carry: int
) -> tuple[Jaxpr, Jaxpr, tuple, tuple]:
    """Split a body with tangent operands; flags of tangent results and parameters."""
    consts, carry, xs = _parts(tangents, n_consts, n_carry)
    while True:
        required = (*carry, *(False,) * (len(jaxpr.outvars) - n_carry))
        primal, linear, flags = split_jaxpr(jaxpr, (*consts, *carry, *xs), required)
        if list(flags[:n_carry]) == carry:
            return primal, linear, flags, (*consts, *carry, *xs)
        carry = list(flags[:n_carry])


def _by_side(args: Sequence, sides: Sequence[bool], n_consts: int, n_carry: int) -> tuple[list, list]:
    """Split operands into values and tangents, each as constants, carry and inputs."""
    pairs = _parts(zip(args, sides, strict=True), n_consts, n_carry)
    values, tangents = ([[x for x, t in part if t is side] for part in pairs] for side in (False, True))
    return values, tangents


def _reaches_every_carry(jaxpr: Jaxpr, linear: Sequence[bool], n_consts: int, n_carry: int) -> bool:
    """True if each carry depends, after enough steps, on the linear operands."""
    flags = list(linear)
    while not all(flags[n_consts : n_consts + n_carry]):
        reached = {v for v, f in zip(jaxpr.invars, flags, strict=True) if f}
        for eqn in jaxpr.eqns:
            if any(a in reached for a in eqn.invars):
                reached.update(eqn.outvars)
        found = [v in reached for v in jaxpr.outvars[:n_carry]]
        after = [a or b for a, b in zip(flags[n_consts : n_consts + n_carry], found, strict=True)]
        if after == flags[n_consts : n_consts + n_carry]:
            return False
        flags[n_consts : n_consts + n_carry] = after
    return True


def _linear_body(linear: Jaxpr, places: tuple[int, ...], n_consts: int, n_carry: int) -> Jaxpr:
    """The body of the tangent scan; residuals at place 0 are constants, at 1 inputs."""
    n_res = len(places)
    residuals = linear.invars[:n_res]
    t_consts, t_carry, t_xs = _parts(linear.invars[n_res:], n_consts, n_carry)
    invariant = [v for v, p in zip(residuals, places, strict=True) if p == 0]
    varying = [v for v, p in zip(residuals, places, strict=True) if p == 1]
    return linear.replace(invars=[*invariant, *t_consts, *t_carry, *t_xs, *varying], arg_names=())


def _backward_body(
    jaxpr: Jaxpr, n_carry: int, lin_consts: tuple, lin_xs: tuple, ct_nonzeros: tuple
) -> tuple[Jaxpr, tuple]:
    """The body of the transposed scan, and its leading constants.

    It maps residual constants, accumulated cotangents of the linear constants, cotangents of the carry and of the
    outputs, and residual inputs to the cotangents of the linear constants, the carry and the linear inputs.
    """
    consts, carry, xs = _parts(jaxpr.in_avals, len(lin_consts), n_carry)
    res_consts = [a for a, lin in zip(consts, lin_consts, strict=True) if not lin]
    sums = [a for a, lin in zip(consts, lin_consts, strict=True) if lin]
    ct_ys = [a for a, nz in zip(jaxpr.out_avals[n_carry:], ct_nonzeros, strict=True) if nz]
    res_xs = [a for a, lin in zip(xs, lin_xs, strict=True) if not lin]

    def step(*args):
        rest = iter(args)
        take = lambda avals: [next(rest) for _ in avals]
        r_consts, totals, c_carry, c_ys, r_xs = map(take, (res_consts, sums, carry, ct_ys, res_xs))
        r_consts, c_ys, r_xs = iter(r_consts), iter(c_ys), iter(r_xs)
        operands = [
            *(None if lin else next(r_consts) for lin in lin_consts),
            *(None for _ in carry),
            *(None if lin else next(r_xs) for lin in lin_xs),
        ]
        cts = [*c_carry, *(next(c_ys) if nz else None for nz in ct_nonzeros)]
        found = backward_pass(jaxpr, operands, cts)
        n = len(sums)
        totals = [add_tangents(t, ct) for t, ct in zip(totals, found[:n], strict=True)]
        return [*totals, *map(instantiate, found[n:])]

    return stage(step, [*res_consts, *sums, *carry, *ct_ys, *res_xs], jaxpr.name).hoist()


scan_p = _Scan()


@overload
def scan(
    f: Callable[[Array, X], tuple[Array, Y]],
    init: ArrayLike,
    xs: X | None = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Array, Y]: ...
@overload
def scan(
    f: Callable[[C, X], tuple[C, Y]],
    init: C,
    xs: X | None = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[C, Y]: ...
@overload
def scan(
    f: Callable[[C, X], tuple[C, Y]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[C, Y]: ...


@carried(scan_with)
def scan(
    f: Callable[..., Any],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """Loop with a carry: ``carry, y = f(carry, x)`` for each x of ``xs``.

    The body is traced once in each call of ``scan``; under ``jit``, once for all.

    Args:
        f: the body, from (carry, x) to (carry, y), all pytrees; the carry keeps its structure, shapes and dtypes.
        init: the initial carry.
        xs: a pytree of arrays with one leading axis size, or None.
        length: the number of steps; required if ``xs`` has no arrays.
        reverse: iterate from the last x to the first (ys keep the order of xs); default False.
        unroll: a hint to compilers: the number of steps to unroll; default 1.
    Returns:
      the last carry, and the ys stacked along a new first axis.
    Raises:
      CarryError: the body changes the type of the carry.
      ShapeError: the leading sizes of ``xs`` differ.
    """
    check_callable(f, "scan")
    steps_in_a_row = int(unroll) if isinstance(unroll, bool) else static_int(unroll, "scan", "unroll")
    x_leaves, x_tree = tree.flatten(xs)
    x_paths = treepath.leaf_paths(x_tree)
    x_values = as_values(x_leaves, lambda i: f"xs{x_paths[i]}")
    length = _length(x_values, x_paths, length)
    init_leaves, init_tree = tree.flatten(init)
    paths = treepath.leaf_paths(init_tree)
    carry = as_values(init_leaves, lambda i: f"init{paths[i]}")
    name = name_of(f)
    out_tree: Any = None

    def body(*leaves):
        nonlocal out_tree
        c = tree.unflatten(init_tree, leaves[: len(carry)])
        out = f(c, tree.unflatten(x_tree, leaves[len(carry) :]))
        if not (isinstance(out, tuple) and len(out) == 2):
            raise errors.CarryError(
                f"the body of scan, {name}, must return (carry, y); it returned a {type(out).__name__}.",
                where=source.here(),
                fix="return carry, y   (y may be None)",
            )
        out_leaves, out_tree = tree.flatten(out)
        return as_values(out_leaves, lambda i: f"the result of {name}")

    x_avals = [x.aval.with_shape(x.aval.shape[1:]) for x in x_values]
    labels = [f"carry{p}" for p in paths] + [f"x{p}" for p in x_paths]
    restage = lambda avals: stage_body(
        body, [*avals, *x_avals], [*carry, *x_values], name, labels, n_carry=len(carry)
    )
    jaxpr = restage([c.aval for c in carry])
    skeleton = tree.unflatten(out_tree, range(out_tree.num_leaves))
    carry_tree, y_tree = tree.structure(skeleton[0]), tree.structure(skeleton[1])
    loop_carry.check_structure("scan", name, init_tree, carry_tree)
    carry, jaxpr = loop_carry.settle(carry, jaxpr, restage)
    loop_carry.check_types("scan", name, paths, carry, jaxpr.out_avals)
    closed, consts = jaxpr.hoist()
    params = {"length": length, "reverse": bool(reverse), "unroll": steps_in_a_row}
    outs = scan_p._loop(closed, consts, carry, x_values, params)
    n = len(carry)
    return tree.unflatten(init_tree, outs[:n]), tree.unflatten(y_tree, outs[n:])


def _length(xs: Sequence[Any], paths: Sequence[str], length: int | None) -> int:
    if length is not None:
        if isinstance(length, bool) or not isinstance(length, (int, np.integer)):
            raise errors.ArgumentError(
                f"scan: length is an int, not {length!r}.", where=source.here(), fix="length=int(n)"
            )
        if length < 0:
            raise errors.ValueRangeError(f"scan: length={length} is negative.", where=source.here())
        length = int(length)
    for x, path in zip(xs, paths, strict=True):
        if not x.aval.shape:
            raise errors.ShapeError(
                f"scan: xs{path} has rank 0; it needs a leading axis to loop over.", where=source.here()
            )
    sizes = {path: x.aval.shape[0] for x, path in zip(xs, paths, strict=True)}
    distinct = set(sizes.values()) | ({length} if length is not None else set())
    if len(distinct) > 1:
        listed = [f"xs{p} has {n}" for p, n in sizes.items()] + (
            [f"length is {length}"] if length is not None else []
        )
        raise errors.ShapeError(
            "scan: the leading sizes differ.", where=source.here(), why="; ".join(listed[:6])
        )
    if not distinct:
        raise errors.ArgumentError(
            "scan: there are no xs, so the number of steps is not known.",
            where=source.here(),
            fix="give length=",
        )
    return distinct.pop()
