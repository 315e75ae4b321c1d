"""Primitives: one object holds all rules of an operation.

Core. ``bind`` sends an operation to the current trace (stage 1); each transform then asks the primitive for
its rule. There are no tables of rules elsewhere: all about ``sin`` is in ``sin_p``. Kinds
(``core/primitives/kinds.py``) supply the usual rules for whole families.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from blufunc import errors
from blufunc.config import config
from blufunc.core.arrays import backend, nan_check
from blufunc.core.arrays.array import ConcreteArray, lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import DEVICE, ShapedArray
from blufunc.core.ir.trace import Array, Trace, Tracer, leak_error, set_trace, state
from blufunc.core.primitives.rule_errors import checked_types, host_error

RULES = ("impl", "abstract", "jvp", "transpose", "batch")
"""The rules that the completeness test requires of every primitive."""

named: weakref.WeakValueDictionary[str, Primitive] = weakref.WeakValueDictionary()
"""All primitives by name; the first of several with one name."""

derived: dict[str, Callable] = {}
"""Rules derived from a definition: ``(prim, *arguments of the rule, params)``.
For ``impl``, ``jvp``, ``transpose`` and ``batch``. Each transform adds its own."""


_OF_BITS = frozenset({"shift_right_logical", "population_count"})
"""Operations that read the bits of an integer, of which a wider one has more."""


class NarrowOperands(Exception):
    """A use on integers of 2 or 4 bits, which ``bind`` repeats in 8 bits."""


class Primitive:
    """An operation and its rules: a subclass, or an instance of a kind.

    A rule that cannot exist is set to ``unsupported("reason")``, so that every gap is a decision.

    Attributes:
      name: name in printed jaxprs.
      kind: the family: elementwise, reduce, movement, contract, index, random, call, ...
      multiple_results: whether ``bind`` returns a list.
      fresh: whether ``impl`` always returns new storage, never a view of an operand.
      ufunc: the ``np.ufunc`` that ``impl`` is, if any: executors may then write over an operand.
      identity: whether the result is its single operand, unchanged.
      opaque: whether simplification neither folds uses nor merges equal ones.
      body: the parameter with the jaxpr that defines the whole use on all operands, if any.
      alternative: the parameter with an equivalent jaxpr of operations that some devices have kernels for;
        ``core/programs/alternatives.py`` chooses.
      by_platform: whether the alternative is the one for CUDA devices, whatever kernels they have.
      recomputed: whether the use recomputes values that were deliberately not stored.
      pointwise: whether the body is a few elementwise equations, which every program should inline.
      inline: whether it only names a call of ``params["jaxpr"]``, which programs inline.
      effects: actions besides computing results; programs never drop or reorder these.
      autocast_class: its class in mixed precision, one of ``kinds.AUTOCAST``; None: as traced.
      linear: groups of operands in which a use is jointly linear; ``linear_in`` where types or parameters decide.
      monoid: combines elements in reductions and scans; kernels compute those that have one.
      cost: of elementwise operations, approximate cost of one application, in float additions.
      has_definition: whether ``lower`` is a definition: a function that is traced.
      impl_on_arrays: whether ``impl`` is of arrays, not of buffers: programs have the definition in its place.
      check_impl: whether ``impl`` is the user's, and the types of its results are checked.
      widens: whether narrow integers are computed in 8 bits: of what computes, not of moves and calls.
      any_memory: whether operands may be in the memory of the host: of moves and of calls, not of computation.
    """

    name: str
    kind = "custom"
    multiple_results = False
    fresh = False
    ufunc: Any = None
    identity = False
    opaque = False
    impl_on_arrays = False
    body: str | None = None
    alternative: str | None = None
    by_platform = False
    recomputed = False
    pointwise = False
    inline = False
    effects: frozenset[str] = frozenset()
    autocast_class: str | None = None
    linear: tuple[frozenset[int], ...] = ()
    monoid = ""
    cost = 1
    any_memory = False
    widens = False

    def __init__(self, name: str | None = None):
        if name is not None:
            self.name = name
        if not isinstance(getattr(self, "name", None), str):
            raise errors.ArgumentError(
                f"{type(self).__name__} has no name: {getattr(self, 'name', None)!r:.60}.",
                where=source.here(),
                why="jaxprs and errors show a primitive by its name.",
                fix=f'class {type(self).__name__}(...): name = "..."',
            )
        named.setdefault(self.name, self)
        self._typed: dict[tuple, Any] = {}
        self.has_definition = self._has_definition()
        code = getattr(getattr(self, "_impl", None) or type(self).impl, "__code__", None)
        self.check_impl = code is not None and not source.is_internal(code)
        self.definitions: dict[tuple, Any] = {}  # traced definitions: ``core/programs/stage.py``

    def _has_definition(self) -> bool:
        return callable(self.lower) and not hasattr(self.lower, "reason")

    def __repr__(self) -> str:
        return self.name

    def bind(self, *args: Any, **params: Any) -> Any:
        """Apply the primitive under the current trace."""
        try:
            return state.trace.process(self, args, params)
        except NarrowOperands:
            return self._widened(args, params)

    def _widened(self, args: Sequence, params: dict) -> Any:
        """The primitive in 8 bits, on narrow integers; results are narrowed."""
        found = {x.aval.dtype for x in args if isinstance(x, Array)} | set(params.values() if params else ())
        (narrow,) = [d for d in dtypes.WIDE_OF_NARROW if d in found][:1]
        wide = dtypes.WIDE_OF_NARROW[narrow]
        convert = named["convert"].bind
        operands = [
            convert(x, dtype=dtypes.WIDE_OF_NARROW[x.aval.dtype])
            if isinstance(x, Array) and dtypes.is_narrow(x.aval.dtype)
            else x
            for x in args
        ]
        if self.name in _OF_BITS:  # the bits above are no copies of the sign
            mask = dtypes.iinfo(wide).dtype.type((1 << dtypes.iinfo(narrow).bits) - 1)
            operands = [named["and"].bind(x, mask) for x in operands]
        out = self.bind(*operands, **{k: wide if v == narrow else v for k, v in params.items()})
        given = [params[k] for k in ("dtype", "preferred_element_type") if params.get(k) is not None]
        target = given[0] if given else narrow

        def narrowed(x: Any) -> Any:
            return convert(x, dtype=target) if x.aval.dtype == wide and dtypes.is_narrow(target) else x

        return [narrowed(x) for x in out] if self.multiple_results else narrowed(out)

    def bind_with_trace(self, trace: Trace, args: Sequence[Any], *rest: Any) -> Any:
        """Apply the primitive under ``trace``.

        ``rest`` ends with the parameters; JAX has the types of ``args`` ahead of them.
        """
        with set_trace(trace):
            return self.bind(*args, **rest[-1])

    call_primitive = map_primitive = False

    def get_bind_params(self, params: dict[str, Any]) -> tuple[list, dict[str, Any]]:
        """Functions, of which there are none, and parameters to bind."""
        return [], params

    # -- rules ---------------------------------------------------------------------------------

    def impl(self, *args: Any, **params: Any) -> Any:
        """Reference implementation: NumPy arrays in, a NumPy array (or list of them) out.

        Without one of its own, a primitive with a definition evaluates that.
        """
        values = self._derived("impl")(self, args, params)
        return values if self.multiple_results else values[0]

    def abstract(self, *avals: ShapedArray, **params: Any) -> Any:
        """Check the argument types and return the result type (or list of them)."""
        raise self._missing("abstract")

    def jvp(self, primals: Sequence, tangents: Sequence, **params: Any) -> Any:
        """``(out, out_tangent)``; tangents may be symbolic ``Zero``s."""
        return self._derived("jvp")(self, primals, tangents, params)

    def transpose(self, ct: Any, *args: Any, **params: Any) -> None:
        """Transpose a linear use: add to the ``Accumulator`` of each linear argument."""
        self._derived("transpose")(self, ct, args, params)

    def batch(self, axis: Any, args: Sequence, dims: Sequence[int | None], **params: Any) -> Any:
        """``(out, out_dim)`` for arguments batched at ``dims`` (None: not batched)."""
        return self._derived("batch")(self, axis, args, dims, params)

    lower: Any = None
    """The *definition* by other operations, ``(*args, **params) -> result`` (or list).
    Compilers substitute it for every use, and it supplies missing rules. An elementwise primitive may have a
    ``CForm`` instead. None or ``unsupported("reason")``: ``impl`` computes it on the host."""

    @property
    def has_impl(self) -> bool:
        """True if there is an ``impl`` other than the definition."""
        return type(self).impl is not Primitive.impl

    own_definition: Callable | None = None
    """``(operand types, params) -> jaxpr``: the definition, not memoized.
    It is traced when a program is compiled: for primitives whose parameters need not be hashable
    (``as_jax/primitives.py``)."""

    linearize: Callable | None = None
    """``(trace, primals, tangents, **params) -> (outs, out_tangents)``.
    For primitives that call jaxprs, whose jvp rule cannot be split into primal and tangent operations."""

    split: Callable | None = None
    """``(trace, args, **params) -> outs`` for a use on both tangents and primals.
    Primitives that call jaxprs compute the primal results in the parent trace and stage the others."""

    rewrite: Callable | None = None
    """``(bodies, operands, **params) -> outs``: a use under a user-defined transform.
    For primitives that run jaxprs; ``transforms/extension/transform.py`` defines ``bodies``."""

    autocast: Callable | None = None
    """``(cells, dtype, **params) -> outs``: a use in mixed precision.
    For primitives with definitions that run in the low ``dtype``; ``transforms/precision/autocast.py`` defines
    cells."""

    reference: Callable | None = None
    """``(compile, **params) -> function`` of NumPy arrays, in place of ``impl``.
    For primitives that run jaxprs. ``compile(jaxpr)`` returns such a function for a body."""

    def ufunc_for(self, dtype: Any) -> Any:
        """The ufunc that implements ``impl`` for results of ``dtype``, or None."""
        return self.ufunc

    flops: Callable | None = None
    """``(*operand types, **params) -> int``: additions and multiplications of one use."""

    shard: Callable | None = None
    """``(operand types, result types, **params) -> Rule``: the sharding rule.
    See ``core/primitives/sharding.py``, and ``Factors`` for its einsum-like notation. Without one the definition
    is partitioned; without a definition, every device computes the whole."""

    home: Callable | None = None
    """``(**params) -> Device or None``: the required device of a use.
    For operations that shard values over a mesh."""

    def linear_in(self, avals: Sequence[ShapedArray], outs: Sequence[ShapedArray], **params: Any) -> tuple:
        """The groups of operands in which one use is jointly linear."""
        return self.linear

    drop_outputs: Callable | None = None
    """``(eqn, reads) -> Eqn`` without unread outputs, where they can be skipped."""

    def effects_of(self, params: dict) -> frozenset[str]:
        """The effects of one use."""
        return self.effects

    def sharding_of(self, n: int, **params: Any) -> Any:
        """The sharding of result ``n`` that the parameters state, or None."""
        return None

    def shown(self, params: dict) -> dict:
        """The parameters as a printed jaxpr shows them."""
        return params

    def axes_of(self, params: dict) -> tuple[str, ...]:
        """The named axes of one use of a collective."""
        return ()

    # -- mechanics -----------------------------------------------------------------------------

    def typed(self, avals: tuple[ShapedArray, ...], params: dict) -> Any:
        """``abstract``, memoized, with the user's line added to errors."""
        if self.reference is not None:  # a memo would keep the jaxprs, and all that they hold, alive forever
            return self._checked(avals, params)
        key = (avals, *params.items())
        try:
            return self._typed[key]
        except KeyError:
            pass
        except TypeError:
            bad = [k for k, v in params.items() if not _hashable(v)]
            raise errors.ArgumentError(
                f"parameters of {self.name} must be hashable: {', '.join(bad)} is not.", where=source.here()
            ) from None
        result = self._typed[key] = self._checked(avals, params)
        return result

    def _checked(self, avals: tuple[ShapedArray, ...], params: dict) -> Any:
        if self.widens and (
            any(a.dtype in dtypes.WIDE_OF_NARROW for a in avals)
            or params.get("dtype") in dtypes.WIDE_OF_NARROW
        ):
            raise NarrowOperands
        if not self.any_memory and any(a.memory != DEVICE for a in avals):
            raise host_error(self, avals)
        try:
            result = self.abstract(*avals, **params)
        except errors.BlufuncError as e:
            raise source.located(e) from None
        if result.__class__ is ShapedArray and not self.multiple_results:
            return result
        return checked_types(self, result)

    def evaluate(self, args: Sequence, params: dict) -> Any:
        """Evaluate eagerly, on the device of the arguments."""
        arrays = [a if a.__class__ is ConcreteArray else concrete(a) for a in args]
        outs = self.typed(tuple([a.aval for a in arrays]), params)
        device = device_of(arrays, self.name)
        results = device.backend.run(
            self, [a.buffer_on(device) for a in arrays], params, outs if self.multiple_results else (outs,)
        )
        if self.multiple_results:
            wrapped = [ConcreteArray(r, aval, device) for r, aval in zip(results, outs, strict=True)]
        else:
            wrapped = [ConcreteArray(results[0], outs, device)]
        if config.guards:
            nan_check.check_operation(self, arrays, params, wrapped)
        return wrapped if self.multiple_results else wrapped[0]

    def _derived(self, rule: str) -> Callable:
        """The derivation of a rule from the definition."""
        if not self.has_definition:
            raise self._missing(rule)
        return derived[rule]

    def _missing(self, rule: str) -> errors.UnsupportedError:
        return errors.UnsupportedError(
            f"the primitive {self.name} has no {rule} rule.",
            where=source.here(),
            fix=f"define {rule} in its class, give a definition (lower=), or set it to unsupported('reason')",
        )


class unsupported:
    """Marker for a rule that does not exist, with the reason."""

    def __init__(self, reason: str):
        self.reason = reason

    def __set_name__(self, owner: type, rule: str) -> None:
        self.rule = rule

    def __get__(self, prim: Primitive | None, owner: type) -> Any:
        if prim is None:
            return self
        return self._refuse(prim)

    def _refuse(self, prim: Primitive) -> Callable[..., NoReturn]:
        def refuse(*args: Any, **params: Any) -> NoReturn:
            error = errors.GradError if self.rule in ("jvp", "transpose") else errors.UnsupportedError
            raise error(f"{prim.name} has no {self.rule}: {self.reason}.", where=source.here())

        refuse.reason = self.reason  # type: ignore[attr-defined]
        return refuse


def concrete(x: Any) -> ConcreteArray:
    """``x`` as an ``Array``; a tracer here has outlived its trace."""
    if isinstance(x, Tracer):
        raise leak_error(x)
    value = lift(x)
    if isinstance(value, Tracer):
        raise leak_error(value)
    return value  # type: ignore[return-value]


def device_of(arrays: Sequence[ConcreteArray], name: str, home: backend.Device | None = None) -> Any:
    """The device to compute on with these arguments: ``home``, if there is one.

    Scalars on the host follow the arrays, and so do arrays on the default device, where placement was
    implicit. The default device itself is used if all arguments are host scalars, or there are none. Devices
    that hold a sharded array attract arrays on single ones.

    Raises:
      ArgumentError: the arrays are on two devices, neither of them the default one.
    """
    device, extent = home, int(home is not None)
    for a in arrays:
        if device is None or (a.device.joint and not device.joint):
            device, extent = a.device, a.aval.ndim
        elif a.device is not device and a.device != device and not (device.joint and not a.device.joint):
            if not extent or (a.aval.ndim and device == backend.default_device()):
                device, extent = a.device, a.aval.ndim
            elif a.aval.ndim and a.device != backend.default_device():
                raise errors.ArgumentError(
                    f"{name} was given arrays on {device} and on {a.device}.",
                    where=source.here(),
                    fix="move one of them: bf.device_put(x, "
                    + ("NamedSharding(mesh, spec))" if device.joint else "device)"),
                )
    if device is None or (not extent and device is backend.host_device()):
        return backend.default_device()
    return device


def _hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True
