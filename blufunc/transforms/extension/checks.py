"""``checkify``: checks as values of a program, in the place of exceptions.

Transforms, stage 2. In: a function with checks. Out: a function that also returns an ``Error``: which check failed
first, and the values for its message. Like ``autocast`` it evaluates a staged function equation by equation; the state
is the index of the first failed check (-1 for none) and, for each check, the values that its message shows. Loops carry
the state, branches return it, and calls pass it through. Functions with custom derivatives are called as they are, so
that they keep their rules, and their bodies are evaluated once more for the state alone: common subexpressions merge.

A check that no ``checkify`` surrounds is a report to the host: it raises there, eagerly and in compiled programs.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import from_numpy, lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal, eval_jaxpr, map_jaxprs, subjaxprs
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.dynamic import dynamic_index_in_dim, dynamic_slice_p, dynamic_update_slice_p
from blufunc.core.ops.gather_scatter import (
    gather_p,
    scatter_add_p,
    scatter_max_p,
    scatter_min_p,
    scatter_mul_p,
    scatter_p,
)
from blufunc.core.ops.reduce import argmax, reduce_or
from blufunc.core.ops.shape import concatenate
from blufunc.core.ops.windows import window_sizes
from blufunc.core.primitives import effects
from blufunc.core.primitives.linear_ops import batched_front, reshape
from blufunc.core.primitives.primitive import Primitive, unsupported
from blufunc.core.programs.stage import stage
from blufunc.core.pytree import nodes, tree
from blufunc.transforms.arguments import FlatFunction, as_values, check_callable, labels_of, name_of
from blufunc.transforms.control_flow.calls import Call
from blufunc.transforms.control_flow.cond import cond_p
from blufunc.transforms.control_flow.scan import scan_p
from blufunc.transforms.control_flow.while_loop import while_p
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp_call_p
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp_call_p

P = ParamSpec("P")
R = TypeVar("R")


class ErrorCategory(enum.Enum):
    """Kinds of checks."""

    USER = "a failed check"
    NAN = "a NaN"
    DIV = "a division by zero"
    INDEX = "an index out of bounds"


user_checks = frozenset({ErrorCategory.USER})
nan_checks = frozenset({ErrorCategory.NAN})
div_checks = frozenset({ErrorCategory.DIV})
index_checks = frozenset({ErrorCategory.INDEX})
float_checks = nan_checks | div_checks
automatic_checks = float_checks | index_checks
all_checks = automatic_checks | user_checks

# -- messages ----------------------------------------------------------------------------------------


class Message:
    """A format string and the structure of its arguments; strings are part of it."""

    def __init__(self, text: str, in_tree: tree.TreeDef, static: dict[int, Any], line: str, suffix: str):
        self.text, self.in_tree, self.static, self.line, self.suffix = text, in_tree, static, line, suffix

    def format(self, values: Sequence[np.ndarray]) -> str:
        """The text, with the values of the arrays."""
        rest = iter(values)
        n = self.in_tree.num_leaves
        leaves = [self.static[i] if i in self.static else _shown(next(rest)) for i in range(n)]
        args, kwargs = tree.unflatten(self.in_tree, leaves)
        return self.text.format(*args, **kwargs) + self.suffix


def _shown(x: Any) -> Any:
    x = np.asarray(x)
    return x if x.ndim else x[()]


class HostCheck:
    """The check of a program that is not functionalized: raises on the host.

    Attributes:
      message: what to say.
      depth: the number of leading batch axes of the operands.
      debug: whether it is left out.
    """

    outs: tuple[ShapedArray, ...] = ()
    __name__ = "check"

    def __init__(self, message: Message, depth: int, debug: bool):
        self.message, self.depth, self.debug = message, depth, debug

    def __call__(self, buffers: Sequence[np.ndarray]) -> list[np.ndarray]:
        pred, *values = map(np.asarray, buffers)
        if not self.debug and not pred.all():
            at = np.unravel_index(np.argmin(pred.reshape(-1)), pred.shape) if self.depth else ()
            raise errors.CheckError(
                self.message.format([v[at] for v in values]),
                where=self.message.line,
                fix="checkify.checkify(f) returns it as a value",
            )
        return []

    @functools.cached_property
    def mapped(self) -> HostCheck:
        """The check of a batch."""
        return HostCheck(self.message, self.depth + 1, self.debug)


class _Check(Primitive):
    """A condition, and the values of its message."""

    name, kind, multiple_results, fresh = "check", "callback", True, True
    shard = unsupported("its message shows whole values")

    def abstract(self, *avals, callback):
        return []

    def reference(self, compile, *, callback):
        return callback

    def effects_of(self, params):
        return frozenset({effects.DEBUG})

    def jvp(self, primals, tangents, **params):
        return self.bind(*primals, **params), []

    def transpose(self, cts, *args, **params):
        """A check of a tangent: reverse mode has no tangents, so it is dropped."""

    def batch(self, axis, args, dims, *, callback):
        ins = [batched_front(axis, a, d) for a, d in zip(args, dims, strict=True)]
        return self.bind(*ins, callback=callback.mapped), []


check_p = _Check()


def check(pred: Any, msg: str, *fmt_args: Any, debug: bool = False, **fmt_kwargs: Any) -> None:
    """Check a condition: raise ``CheckError``, or under ``checkify`` record it.

    Args:
      pred: a boolean of rank 0.
      msg: a format string.
      fmt_args, fmt_kwargs: its arguments, pytrees of arrays.
      debug: without ``checkify``, leave the check out.
    """
    if not isinstance(msg, str):
        raise errors.ArgumentError(f"check: the message is a string, not {msg!r:.60}.", where=source.here())
    pred = lift(pred, "the condition of a check")
    if pred.aval.shape or not dtypes.is_bool(pred.aval.dtype):
        raise errors.ArgumentError(
            f"check: the condition is {pred.aval}, and not one boolean.",
            where=source.here(),
            fix="check(jnp.all(x > 0), ...)",
        )
    leaves, in_tree = tree.flatten((fmt_args, fmt_kwargs))
    static = {i: x for i, x in enumerate(leaves) if isinstance(x, str)}
    dynamic = [x for i, x in enumerate(leaves) if i not in static]
    values = as_values(dynamic, lambda i: f"argument {i} of a check's message")
    line = source.here() or ""
    message = Message(msg, in_tree, static, line, " (`check` failed)")
    try:
        message.format([np.zeros(v.aval.shape, v.aval.dtype) for v in values])
    except (IndexError, KeyError, ValueError, TypeError) as e:
        raise errors.ArgumentError(
            f"check: {msg!r:.80} does not format its arguments: {e}.", where=source.here()
        ) from None
    check_p.bind(pred, *values, callback=HostCheck(message, 0, bool(debug)))


def debug_check(pred: Any, msg: str, *fmt_args: Any, **fmt_kwargs: Any) -> None:
    """``check``, which without ``checkify`` is left out."""
    check(pred, msg, *fmt_args, debug=True, **fmt_kwargs)


# -- the error ---------------------------------------------------------------------------------------


class Site:
    """One check of a program: its message, and the types of the values that it shows."""

    def __init__(self, index: int, message: Message, avals: tuple[ShapedArray, ...]):
        self.index, self.message, self.avals = index, message, avals


class Error:
    """The first failed check, or none; a pytree of arrays."""

    def __init__(self, code: Any, payloads: Sequence[Any], sites: tuple[Site, ...]):
        self._code, self._payloads, self._sites = code, tuple(payloads), sites

    def get(self) -> str | None:
        """The message of the first failed check; None if none failed."""
        codes = np.asarray(self._code)
        if not codes.ndim:
            return self._at(int(codes), ())
        lines = [
            f"at mapped index {', '.join(map(str, i))}: {self._at(int(codes[i]), i)}"
            for i in np.ndindex(codes.shape)
            if codes[i] >= 0
        ]
        return "\n".join(lines) or None

    def _at(self, code: int, position: tuple[int, ...]) -> str | None:
        if code < 0:
            return None
        start = sum(len(s.avals) for s in self._sites[:code])
        site = self._sites[code]
        own = self._payloads[start : start + len(site.avals)]
        return site.message.format([np.asarray(v)[position] for v in own])

    def get_exception(self) -> errors.CheckError | None:
        """The exception of the first failed check; None if none failed."""
        message = self.get()
        if message is None:
            return None
        codes = np.asarray(self._code)
        first = self._sites[int(codes[codes >= 0].flat[0])]
        return errors.CheckError(message, where=first.message.line or None)

    def throw(self) -> None:
        """Raise the exception, if a check failed."""
        if exception := self.get_exception():
            raise exception

    def __repr__(self) -> str:
        return f"Error({self._code!r} of {len(self._sites)} checks)"


nodes.register_node(
    Error,
    lambda e: ((e._code, *e._payloads), e._sites),
    lambda sites, children: Error(children[0], children[1:], sites),
)


def no_error() -> Error:
    """The error of a program that has none."""
    return Error(lift(np.int32(-1)), (), ())


def check_error(error: Error) -> None:
    """Check that an ``Error`` has no failure: the inverse of ``checkify``."""
    if not isinstance(error, Error):
        raise errors.ArgumentError(f"check_error: {error!r:.60} is no Error.", where=source.here())
    start = 0
    for site in error._sites:
        own = error._payloads[start : start + len(site.avals)]
        start += len(site.avals)
        code = lift(error._code)
        host = HostCheck(site.message, code.aval.ndim, False)
        check_p.bind(ew.ne(code, site.index), *map(lift, own), callback=host)


# -- the transform -----------------------------------------------------------------------------------


class _State:
    """The first failure so far, and the values of each site's message."""

    def __init__(self, code: Any, payloads: dict[Site, list[Any]]):
        self.code, self.payloads = code, payloads

    def fail(self, site: Site, bad: Any, values: Sequence[Any]) -> None:
        """Record a failure, unless there was one."""
        first = ew.bitwise_and(bad, ew.lt(self.code, 0))
        self.code = ew.select(first, ew.mul(ew.ones_of(self.code), site.index), self.code)
        before = self.payloads.get(site) or [_zeros(a) for a in site.avals]
        self.payloads[site] = [ew.select(first, lift(v), b) for v, b in zip(values, before, strict=True)]

    def flat(self, sites: Sequence[Site]) -> list[Any]:
        """The arrays of the state, for the given sites."""
        values = [self.payloads.get(s) or [_zeros(a) for a in s.avals] for s in sites]
        return [self.code, *(v for own in values for v in own)]

    @staticmethod
    def of(flat: Sequence[Any], sites: Sequence[Site]) -> _State:
        """The state from its arrays."""
        code, *rest = flat
        values = iter(rest)
        return _State(code, {s: [next(values) for _ in s.avals] for s in sites})


def _zeros(aval: ShapedArray) -> Any:
    return from_numpy(np.zeros(aval.shape, aval.dtype))


def _avals(sites: Sequence[Site]) -> list[ShapedArray]:
    return [ShapedArray((), dtypes.int32), *(a for s in sites for a in s.avals)]


class _Checker:
    """One use of ``checkify``: the enabled categories, and the sites found."""

    def __init__(self, enabled: frozenset[ErrorCategory]):
        self.enabled = enabled
        self.sites: dict[tuple, Site] = {}
        self._eqns: list[Eqn] = []  # kept, as sites are found by identity

    def site(self, eqn: Eqn, what: str, make: Callable[[], Message], values: Sequence[Any]) -> Site:
        """The site of one check of an equation."""
        key = (id(eqn), what)
        if key not in self.sites:
            self._eqns.append(eqn)
            avals = tuple([lift(v).aval.strong() for v in values])
            self.sites[key] = Site(len(self.sites), make(), avals)
        return self.sites[key]

    # -- evaluation --

    def run(self, jaxpr: Jaxpr, args: Sequence[Any], state: _State) -> list[Any]:
        """Evaluate a jaxpr under the current trace; the state is updated in place."""
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        read = lambda a: a.array if a.__class__ is Literal else env[a]
        previous = source.replay.line
        try:
            for eqn in jaxpr.eqns:
                source.replay.line = eqn.source
                outs = self._equation(eqn, [read(a) for a in eqn.invars], state)
                env.update(zip(eqn.outvars, outs, strict=True))
        finally:
            source.replay.line = previous
        return [read(a) for a in jaxpr.outvars]

    def _equation(self, eqn: Eqn, ins: list[Any], state: _State) -> list[Any]:
        prim, params = eqn.prim, eqn.params
        if prim is check_p:
            if ErrorCategory.USER in self.enabled:
                self._user(eqn, ins, state)
            return []
        if prim in (custom_jvp_call_p, custom_vjp_call_p):
            return self._custom(eqn, ins, state)
        if isinstance(prim, Call) and "jaxpr" in params:
            return self._call(eqn, ins, state)
        if prim in (scan_p, while_p, cond_p):
            return {scan_p: self._scan, while_p: self._while, cond_p: self._cond}[prim](eqn, ins, state)
        if any(map(_has_checks, subjaxprs(params))):
            raise errors.UnsupportedError(
                f"a check in the body of {prim.name} under checkify.",
                where=source.here(),
                fix="move the check out of it",
            )
        if ErrorCategory.DIV in self.enabled and prim.name in ("div", "rem"):
            zero = _any(ew.eq(ins[1], 0))
            state.fail(self._automatic(eqn, "div", "division by zero"), zero, ())
        if ErrorCategory.INDEX in self.enabled and prim in _INDEXED:
            self._index(eqn, ins, state)
        out = prim.bind(*ins, **params)
        outs = list(out) if prim.multiple_results else [out]
        if ErrorCategory.NAN in self.enabled:
            floats = [x for x in outs if dtypes.is_inexact(x.aval.dtype)]
            if floats:
                bad = functools.reduce(ew.bitwise_or, [_any(ew.ne(x, x)) for x in floats])
                text = f"nan generated by primitive: {prim.name}."
                state.fail(self._automatic(eqn, "nan", text), bad, ())
        return outs

    # -- checks --

    def _user(self, eqn: Eqn, ins: list[Any], state: _State) -> None:
        host = eqn.params["callback"]
        pred, *values = ins
        bad = ew.bitwise_not(pred)
        if host.depth:  # the first failure of a batch
            d = host.depth
            n = int(np.prod(bad.aval.shape))
            bad = reshape(bad, (n,))
            at = argmax(ew.convert(bad, dtypes.int32), 0)
            values = [
                dynamic_index_in_dim(reshape(v, (n, *v.aval.shape[d:])), at, 0, keepdims=False)
                for v in values
            ]
            bad = _any(bad)
        state.fail(self.site(eqn, "user", lambda: host.message, values), bad, values)

    def _automatic(self, eqn: Eqn, what: str, text: str, values: Sequence[Any] = ()) -> Site:
        def make() -> Message:
            line = source.describe(eqn.source) or ""
            structure = tree.structure((tuple(values), {}))
            return Message(text, structure, {}, line, f"\nOccurred at {line}" if line else "")

        return self.site(eqn, what, make, values)

    def _index(self, eqn: Eqn, ins: list[Any], state: _State) -> None:
        """Starts of windows, against those at which windows lie inside."""
        prim, params = eqn.prim, eqn.params
        shape = ins[0].aval.shape
        if prim in (dynamic_slice_p, dynamic_update_slice_p):
            starts = ins[1:] if prim is dynamic_slice_p else ins[2:]
            sizes = params["slice_sizes"] if prim is dynamic_slice_p else ins[1].aval.shape
            axes = tuple(range(len(shape)))
            if not axes:
                return
            index = concatenate([reshape(ew.convert(s, dtypes.int32), (1, 1)) for s in starts], 1)
        else:
            numbers = params["dimension_numbers"]
            if prim is gather_p:
                axes, sizes = numbers.start_index_map, params["slice_sizes"]
            else:
                axes = numbers.scatter_dims_to_operand_dims
                sizes = window_sizes(shape, ins[2].aval.shape, numbers)
            index = ins[1]
            if not index.aval.size or not axes:
                return
            index = ew.convert(reshape(index, (index.aval.size // len(axes), len(axes))), dtypes.int32)
        last = np.array([shape[a] - sizes[a] for a in axes], np.int32)
        limit = from_numpy(np.broadcast_to(last, index.aval.shape).copy())
        outside = ew.bitwise_or(ew.lt(index, 0), ew.gt(index, limit))
        n = outside.aval.size
        flat = reshape(outside, (n,))
        at = argmax(ew.convert(flat, dtypes.int32), 0)
        chosen = dynamic_index_in_dim(reshape(index, (n,)), at, 0, keepdims=False)
        of_axis = lambda xs: dynamic_index_in_dim(
            from_numpy(np.tile(np.asarray(xs, np.int32), n // len(axes))), at, 0, keepdims=False
        )
        values = (chosen, of_axis(axes), of_axis([shape[a] for a in axes]))
        text = f"out-of-bounds indexing for array of shape {shape}: "
        text += "index {} is out of bounds for axis {} with size {}."
        state.fail(self._automatic(eqn, "index", text, values), _any(flat), values)

    # -- equations that hold jaxprs --

    def _body(self, jaxpr: Jaxpr, state_sites: Sequence[Site] | None) -> tuple[Jaxpr, list[Site]]:
        """A body that takes and returns the state ahead of its own operands and results.

        Without ``state_sites``, only the sites that it has are found.
        """
        touched: list[Site] = []
        known = list(state_sites or ())
        n = len(_avals(known))

        def fun(*flat):
            state = _State.of(flat[:n], known)
            outs = self.run(jaxpr, flat[n:], state)
            touched[:] = list(state.payloads)
            return [*state.flat(known), *outs]

        staged = stage(fun, [*_avals(known), *jaxpr.in_avals], jaxpr.name)
        return staged, touched

    def _with_state(self, jaxprs: Sequence[Jaxpr], state: _State) -> tuple[list[Jaxpr], list[Site]]:
        """Bodies that share one state: that which flows in, and all sites of any of them."""
        sites = list(state.payloads)
        for jaxpr in jaxprs:
            sites += [s for s in self._body(jaxpr, None)[1] if s not in sites]
        return [self._body(j, sites)[0] for j in jaxprs], sites

    def _leave(self, outs: Sequence[Any], sites: list[Site], state: _State) -> list[Any]:
        """Take the state off the results of a body."""
        n = len(_avals(sites))
        after = _State.of(outs[:n], sites)
        state.code, state.payloads = after.code, after.payloads
        return list(outs[n:])

    def _call(self, eqn: Eqn, ins: list[Any], state: _State) -> list[Any]:
        (body,), sites = self._with_state([eqn.params["jaxpr"]], state)
        return self._leave(eqn.prim.call(body, [*state.flat(sites), *ins], eqn.params), sites, state)

    def _cond(self, eqn: Eqn, ins: list[Any], state: _State) -> list[Any]:
        index, *operands = ins
        bodies, sites = self._with_state(eqn.params["branches"], state)
        return self._leave(cond_p._call(index, bodies, [*state.flat(sites), *operands]), sites, state)

    def _scan(self, eqn: Eqn, ins: list[Any], state: _State) -> list[Any]:
        params = dict(eqn.params)
        jaxpr, n_consts, n_carry = (params.pop(k) for k in ("jaxpr", "n_consts", "n_carry"))
        consts, carry, xs = ins[:n_consts], ins[n_consts : n_consts + n_carry], ins[n_consts + n_carry :]
        (body,), sites = self._with_state([jaxpr], state)
        n = len(_avals(sites))
        # the state is part of the carry, which follows the constants
        order = (*range(n, n + n_consts), *range(n), *range(n + n_consts, len(body.invars)))
        moved = body.replace(invars=[body.invars[i] for i in order], arg_names=())
        closed, extra = moved.hoist()
        outs = scan_p._loop(closed, [*extra, *consts], [*state.flat(sites), *carry], xs, params)
        return self._leave(outs, sites, state)

    def _while(self, eqn: Eqn, ins: list[Any], state: _State) -> list[Any]:
        params = eqn.params
        cond, body, n_cond, n_body = params["cond"], params["body"], params["n_cond"], params["n_body"]
        c_consts, b_consts, carry = ins[:n_cond], ins[n_cond : n_cond + n_body], ins[n_cond + n_body :]
        # checks of the condition: those of the first one here, those of the others at the end of a step
        self.run(cond, [*c_consts, *carry], state)
        step_avals = [*cond.in_avals[:n_cond], *body.in_avals]
        n_consts = n_cond + n_body

        def step(*args):
            outs = eval_jaxpr(body, args[n_cond:])
            return [*outs, *eval_jaxpr(cond, [*args[:n_cond], *outs])]

        joined = stage(step, step_avals, body.name)
        (new_body,), sites = self._with_state([joined], state)
        n = len(_avals(sites))
        order = (*range(n, n + n_consts), *range(n), *range(n + n_consts, len(new_body.invars)))
        new_body = new_body.replace(
            invars=[new_body.invars[i] for i in order], outvars=new_body.outvars[:-1], arg_names=()
        )
        plain = _stripped(cond)
        new_cond = stage(
            lambda *args: eval_jaxpr(plain, [*args[:n_cond], *args[n_cond + n :]]),
            [*cond.in_avals[:n_cond], *_avals(sites), *cond.in_avals[n_cond:]],
            cond.name,
        )
        (new_cond, c_extra), (new_body, b_extra) = new_cond.hoist(), new_body.hoist()
        outs = while_p._loop(
            new_cond,
            new_body,
            [*c_extra, *c_consts],
            [*b_extra, *c_consts, *b_consts],
            [*state.flat(sites), *carry],
            params["max_steps"],
        )
        return self._leave(outs, sites, state)

    def _custom(self, eqn: Eqn, ins: list[Any], state: _State) -> list[Any]:
        jaxpr = eqn.params["jaxpr"]
        params = {**eqn.params, "jaxpr": _stripped(jaxpr)}
        self.run(jaxpr, [ew.stop_gradient(x) for x in ins], state)
        return list(eqn.prim.bind(*ins, **params))


def _any(x: Any) -> Any:
    return reduce_or(x, tuple(range(x.aval.ndim))) if x.aval.ndim else x


def _has_checks(jaxpr: Jaxpr) -> bool:
    return any(e.prim is check_p or any(map(_has_checks, subjaxprs(e.params))) for e in jaxpr.eqns)


def _stripped(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr without checks."""
    if not _has_checks(jaxpr):
        return jaxpr

    def make() -> Jaxpr:
        eqns = [
            Eqn(e.prim, e.invars, e.outvars, map_jaxprs(_stripped, e.params), e.source)
            for e in jaxpr.eqns
            if e.prim is not check_p
        ]
        return jaxpr.replace(eqns=eqns)

    return jaxpr.memoised("without checks", make)


_INDEXED = (
    gather_p, scatter_p, scatter_add_p, scatter_mul_p, scatter_min_p, scatter_max_p, dynamic_slice_p,
    dynamic_update_slice_p,
)  # fmt: skip


def checkify(
    f: Callable[P, R], errors: Collection[ErrorCategory] = user_checks
) -> Callable[P, tuple[Error, R]]:
    """``f`` as a function that returns ``(error, result)``.

        error, y = bf.jit(checkify(f, errors=all_checks))(x)
        error.throw()

    Args:
      f: a function of pytrees of arrays, which may call ``check``.
      errors: the categories to check, such as ``user_checks | float_checks``.
    Returns:
      a function of the same arguments; ``error`` is an ``Error`` with the first failure.
    """
    check_callable(f, "checkify")
    enabled = _enabled(errors)  # the parameter, not the module

    @functools.wraps(f)
    def checked(*args, **kwargs):
        leaves, in_tree = tree.flatten((args, kwargs))
        labels = functools.cache(lambda: labels_of(f, in_tree))
        values = as_values(leaves, lambda i: f"the argument {labels()[i]}")
        flat = FlatFunction(f, in_tree)
        jaxpr = stage(flat, [v.aval for v in values], name_of(f), labels())
        checker = _Checker(enabled)
        state = _State(lift(np.int32(-1)), {})
        outs = checker.run(jaxpr, values, state)
        sites = tuple(checker.sites.values())
        code, *payloads = state.flat(sites)
        return Error(code, payloads, sites), tree.unflatten(flat.out_tree, outs)

    return checked


def _enabled(categories: Any) -> frozenset[ErrorCategory]:
    given = frozenset(categories) if isinstance(categories, (set, frozenset, tuple, list)) else None
    if given is None or not all(isinstance(c, ErrorCategory) for c in given):
        raise errors.ArgumentError(
            f"checkify: errors are a set of categories, not {categories!r:.60}.",
            where=source.here(),
            fix="errors=checkify.user_checks | checkify.float_checks",
        )
    return given
