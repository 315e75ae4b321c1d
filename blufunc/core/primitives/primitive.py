"""Primitives: one object holds all that is known of an operation.

Core. ``bind`` sends an operation to the current trace (stage 1); each transform then asks the
primitive for its rule. There are no tables of rules elsewhere: to know what ``sin`` is, read
``sin_p``. Kinds (``core/primitives/kinds.py``) supply the usual rules for whole families.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from blufunc import errors
from blufunc.config import config
from blufunc.core.arrays import backend, nan_check
from blufunc.core.arrays.array import Array, lift
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.trace import Tracer, leak_error, state
from blufunc.core.primitives.rule_errors import checked_types

RULES = ("impl", "abstract", "jvp", "transpose", "batch")
"""The rules that the completeness test asks of every primitive."""

named: weakref.WeakValueDictionary[str, Primitive] = weakref.WeakValueDictionary()
"""All primitives by name; of several with one name the first."""

derived: dict[str, Callable] = {}
"""For ``impl``, ``jvp``, ``transpose`` and ``batch``: ``(prim, *arguments of the rule, params)``, which computes the
rule of a primitive from its definition. Modules above this one add them, each transform its own."""


class Primitive:
    """An operation and its rules. Subclass it, or make an instance of one of its kinds.

    A rule that cannot exist is set to ``unsupported("reason")``, so that a gap is a decision and
    never an accident.

    Attributes:
      name: as printed in jaxprs.
      kind: the family: elementwise, reduce, movement, contract, index, random, call, ...
      multiple_results: whether ``bind`` returns a list.
      fresh: whether ``impl`` always returns new storage, never a view of an operand.
      ufunc: the ``np.ufunc`` that ``impl`` is, if it is one: executors may then write over an operand.
      identity: whether the result is the one operand as it is, and nothing is computed.
      opaque: whether simplification leaves every use as it is: none is folded, or merged with an equal one.
      body: the name of the parameter with the jaxpr that a use computes on all operands, if it computes nothing else.
      alternative: the name of the parameter with a second jaxpr, which computes the same by operations that some
        devices have kernels for; ``core/programs/alternatives.py`` chooses.
      recomputed: True if it recomputes values that were deliberately not stored.
      pointwise: whether the body is a few elementwise equations, which every program is better off with.
      inline: whether it only names a call of ``params["jaxpr"]``, which programs put in its place.
      effects: what it does besides computing its results; programs never drop or reorder these.
      autocast_class: its class in mixed precision, a word of ``kinds.AUTOCAST``; None: as traced.
      linear: groups of operands in which a use is linear together; ``linear_in`` where types or parameters decide.
      monoid: of reductions and scans, what combines elements; kernels compute those that have one.
      cost: of elementwise operations, about how many additions of floats one application is worth.
      has_definition: whether ``lower`` is a definition: a function that is traced.
    """

    name: str
    kind = "custom"
    multiple_results = False
    fresh = False
    ufunc: Any = None
    identity = False
    opaque = False
    body: str | None = None
    alternative: str | None = None
    recomputed = False
    pointwise = False
    inline = False
    effects: frozenset[str] = frozenset()
    autocast_class: str | None = None
    linear: tuple[frozenset[int], ...] = ()
    monoid = ""
    cost = 1

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
        self.definitions: dict[tuple, Any] = {}  # traced: ``core/programs/stage.py``

    def _has_definition(self) -> bool:
        return callable(self.lower) and not hasattr(self.lower, "reason")

    def __repr__(self) -> str:
        return self.name

    def bind(self, *args: Any, **params: Any) -> Any:
        """Apply the primitive under the current trace."""
        return state.trace.process(self, args, params)

    # -- rules ---------------------------------------------------------------------------------

    def impl(self, *args: Any, **params: Any) -> Any:
        """The value: NumPy arrays in, NumPy array (or list of them) out. The reference for all other rules.

        Without one of its own, a primitive with a definition evaluates that.
        """
        values = self._derived("impl")(self, args, params)
        return values if self.multiple_results else values[0]

    def abstract(self, *avals: ShapedArray, **params: Any) -> Any:
        """The type of the result (or list of them) from the types of the arguments; checks both."""
        raise self._missing("abstract")

    def jvp(self, primals: Sequence, tangents: Sequence, **params: Any) -> Any:
        """``(out, out_tangent)`` from primals and tangents; a tangent may be a symbolic ``Zero``."""
        return self._derived("jvp")(self, primals, tangents, params)

    def transpose(self, ct: Any, *args: Any, **params: Any) -> None:
        """Reverse of a linear use: adds to the ``Accumulator`` that stands for each linear argument."""
        self._derived("transpose")(self, ct, args, params)

    def batch(self, axis: Any, args: Sequence, dims: Sequence[int | None], **params: Any) -> Any:
        """``(out, out_dim)`` for arguments with an extra axis at ``dims`` (None: not batched)."""
        return self._derived("batch")(self, axis, args, dims, params)

    lower: Any = None
    """``(*args, **params) -> result`` (or list of them) by other operations: the *definition* of the primitive.
    Compilers put it in the place of every use, and it supplies the rules that the primitive has not. For an elementwise
    primitive alternatively a ``CForm``. None or ``unsupported("reason")``: ``impl`` computes it, on the host."""

    @property
    def has_impl(self) -> bool:
        """Whether there is an ``impl`` besides the definition."""
        return type(self).impl is not Primitive.impl

    def lowered(self, args: Sequence, params: dict) -> list:
        """The results of the definition under the current trace, always a list."""
        out = self.lower(*args, **params)
        return list(out) if self.multiple_results else [out]

    linearize: Callable | None = None
    """``(trace, primals, tangents, **params) -> (outs, out_tangents)`` where the jvp rule, split into its
    primal and its tangent operations, would not do: primitives that call jaxprs."""

    split: Callable | None = None
    """``(trace, args, **params) -> outs`` for a use among whose operands are tangents and primals of one linearization:
    primitives that call jaxprs compute the primal results in the parent trace and stage the others."""

    rewrite: Callable | None = None
    """``(bodies, operands, **params) -> outs``: the use under a user's transform, of primitives that run jaxprs;
    ``transforms/extension/transform.py`` says what ``bodies`` can do."""

    autocast: Callable | None = None
    """``(cells, dtype, **params) -> outs``: the use in mixed precision, of primitives that are computed in the low
    ``dtype`` though they hold definitions; of a cell, ``transforms/precision/autocast.py`` has the methods."""

    reference: Callable | None = None
    """``(compile, **params) -> function`` from a list of NumPy arrays to a sequence of them: the definition, in the
    place of ``impl``, of primitives that run jaxprs. ``compile(jaxpr)`` gives such a function for a body."""

    def ufunc_for(self, dtype: Any) -> Any:
        """The ufunc that ``impl`` is for results of ``dtype``, or None."""
        return self.ufunc

    flops: Callable | None = None
    """``(*operand types, **params) -> int``: multiplications and additions of one use, of operations whose arithmetic
    is not that of their kind."""

    shard: Callable | None = None
    """``(operand types, result types, **params) -> Rule``: how dimensions go together where the operation is divided
    among devices; ``core/primitives/sharding.py`` has rules, and ``Factors``, which writes them in words. Without one
    the definition is partitioned, and what has no definition either is computed whole on every device."""

    home: Callable | None = None
    """``(**params) -> Device or None``: the one device on which programs with this use run, wherever their arguments
    are: of operations that lay values out on a mesh."""

    def linear_in(self, avals: Sequence[ShapedArray], outs: Sequence[ShapedArray], **params: Any) -> tuple:
        """The groups of operands in which one use is linear together."""
        return self.linear

    drop_outputs: Callable | None = None
    """``(eqn, reads) -> Eqn`` without the outputs that nobody reads, for primitives that can do without computing
    them."""

    def effects_of(self, params: dict) -> frozenset[str]:
        """The effects of one use."""
        return self.effects

    def axes_of(self, params: dict) -> tuple[str, ...]:
        """The named axes that one use refers to: those of collectives."""
        return ()

    # -- mechanics -----------------------------------------------------------------------------

    def typed(self, avals: tuple[ShapedArray, ...], params: dict) -> Any:
        """``abstract``, memoised, with the user's line added to errors."""
        if self.reference is not None:  # a memo would keep the jaxprs, and all that they hold, for ever
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
        try:
            result = self.abstract(*avals, **params)
        except errors.BlufuncError as e:
            raise source.located(e) from None
        if result.__class__ is ShapedArray and not self.multiple_results:
            return result
        return checked_types(self, result)

    def evaluate(self, args: Sequence, params: dict) -> Any:
        """Compute now, on the device of the arguments."""
        arrays = [a if a.__class__ is Array else concrete(a) for a in args]
        outs = self.typed(tuple([a.aval for a in arrays]), params)
        device = device_of(arrays, self.name)
        results = device.backend.run(
            self, [a.buffer_on(device) for a in arrays], params, outs if self.multiple_results else (outs,)
        )
        if self.multiple_results:
            wrapped = [Array(r, aval, device) for r, aval in zip(results, outs, strict=True)]
        else:
            wrapped = [Array(results[0], outs, device)]
        if config.guards:
            nan_check.check_operation(self, arrays, params, wrapped)
        return wrapped if self.multiple_results else wrapped[0]

    def _derived(self, rule: str) -> Callable:
        """What computes a rule from the definition."""
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
    """A rule that does not exist, and why: set it in the place of the rule."""

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


def concrete(x: Any) -> Array:
    """``x`` as an ``Array``; a tracer here has outlived its trace."""
    if isinstance(x, Tracer):
        raise leak_error(x)
    value = lift(x)
    if isinstance(value, Tracer):
        raise leak_error(value)
    return value  # type: ignore[return-value]


def device_of(arrays: Sequence[Array], name: str, home: backend.Device | None = None) -> Any:
    """The device on which to compute with these arguments: ``home``, if there is one.

    Numbers go wherever arrays are: they have no place of their own. So do arrays on the default device, which are there
    because nothing was said. The default device itself serves where all are numbers on the host, or there are none.
    Devices that hold an array together draw in all that is on single ones.

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
