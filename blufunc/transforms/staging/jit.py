"""``jit``: trace once per signature, compile, run.

Transforms. In: a function and its arguments. Out: results, by way of all stages:

    s = bf.jit(f).trace(*args)    # stages 1 and 2: s.jaxpr
    l = s.lower()                 # stage 4: l.jaxpr, simplified; and 5 to 7 without compiling:
                                  # l.fusion, l.source(), l.memory, l.cost
    c = l.compile()               # stages 5 to 7
    c(*args)                      # stage 8; c.timings(*args)

Inside another transform a jitted function becomes a ``jit`` equation with its jaxpr.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from blufunc import errors
from blufunc.config import config
from blufunc.core.arrays import backend, nan_check, recording
from blufunc.core.arrays.array import ConcreteArray, Donated, arrays_of
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.axes import static_int
from blufunc.core.ir.jaxpr import exact
from blufunc.core.ir.trace import EVAL, Tracer, state
from blufunc.core.primitives import effects
from blufunc.core.primitives.primitive import concrete, device_of
from blufunc.core.programs import simplify
from blufunc.core.programs.cache_key import Key, difference
from blufunc.core.programs.refs import RefError
from blufunc.core.programs.stage import TraceTypes, stage
from blufunc.core.pytree import nodes, tree
from blufunc.transforms.arguments import (
    FlatFunction,
    abstract,
    argument_indices,
    argument_names,
    argument_numbers,
    as_values,
    check_callable,
    labels_of,
    name_of,
    signature_of,
)
from blufunc.transforms.batching.batch import MeshAxis
from blufunc.transforms.control_flow.calls import jit_p
from blufunc.transforms.staging.memory_sizes import budget_in_bytes
from blufunc.transforms.staging.ref_carrier import RefCarrier
from blufunc.transforms.staging.stages import Entry, Lowered, Traced, donate, mark_donated

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")


@overload
def jit(
    fun: Callable[P, R],
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    max_traces: int | None = None,
    memory_budget: int | str | None = None,
    inline: bool = False,
    keep_unused: bool = False,
    in_shardings: Any = None,
    out_shardings: Any = None,
    device: None = None,
    backend: None = None,
    compiler_options: None = None,
) -> Jitted[P, R]: ...
@overload
def jit(
    fun: None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    max_traces: int | None = None,
    memory_budget: int | str | None = None,
    inline: bool = False,
    keep_unused: bool = False,
    in_shardings: Any = None,
    out_shardings: Any = None,
    device: None = None,
    backend: None = None,
    compiler_options: None = None,
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    max_traces: int | None = None,
    memory_budget: int | str | None = None,
    inline: bool = False,
    keep_unused: bool = False,
    in_shardings: Any = None,
    out_shardings: Any = None,
    device: None = None,
    backend: None = None,
    compiler_options: None = None,
) -> Any:
    """Compile ``fun`` as one program per combination of argument types.

    Args:
      fun: a pure function of pytrees of arrays. Without it, a decorator is returned.
      static_argnums, static_argnames: arguments that are hashable Python values, not arrays; a new value means a new
        trace.
      donate_argnums, donate_argnames: arguments whose memory the results may reuse. The caller's arrays become
        invalid.
      max_traces: the number of traces after which another one is an error; default None, no limit.
      memory_budget: the limit on the planned peak of each device, arguments and results included: bytes, or a string
        such as ``"12GB"`` or ``"11.5GiB"``. If the plan exceeds it, values are rematerialized instead of kept in
        memory, cheapest per freed byte first, matmuls included; ``lower(...).memory.bought`` lists them with their
        cost. Results are the same up to rounding. If the plan fits, the program is unchanged. A call inside another
        program is inlined, and uses that program's budget.
      inline, keep_unused: no effect. A call inside another program is always inlined, and unused parameters are free.
      in_shardings: the shardings of dynamic arguments: a ``NamedSharding``, a ``PartitionSpec`` on the current mesh, or
        None to keep an argument's sharding; or a pytree prefix of the tuple of arguments of these. Uncommitted arrays
        are moved; others must have that sharding.
      out_shardings: the same for the results; None to let propagation decide.
      device, backend, compiler_options: None.
    Returns:
      a function like ``fun``, with the stages ``trace`` and ``lower``, ``clear_cache`` and ``trace_count``.
    Raises:
      ArgumentError: ``fun`` is not a function, ``inline`` or ``keep_unused`` not a bool, or ``memory_budget`` not a
        size.
      MemoryBudgetError: at a call, if no plan within ``memory_budget`` was found.
      ShardingError: at a call, if an argument has another sharding than ``in_shardings``, or a spec does not fit.
      TreeError: at a call, if shardings are not a prefix of arguments or results.
      UnsupportedError: one of the options that must be None is not.
    """
    _check_options(
        {"inline": inline, "keep_unused": keep_unused},
        {"device": device, "backend": backend, "compiler_options": compiler_options},
    )
    if fun is None:
        return functools.partial(
            jit,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            max_traces=max_traces,
            memory_budget=memory_budget,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
        )
    check_callable(fun, "jit")
    budget = None if memory_budget is None else budget_in_bytes(memory_budget)
    options = (static_argnums, static_argnames, donate_argnums, donate_argnames, max_traces, budget)
    if in_shardings is None and out_shardings is None:
        return Jitted(fun, *options)
    return _sharded[-1](fun, *options, in_shardings=in_shardings, out_shardings=out_shardings)


_sharded: list[Callable[..., Jitted]] = []


def register_sharded(make: Callable[..., Jitted]) -> None:
    """Register the class for ``jit`` with shardings: meshes are above this module."""
    _sharded.append(make)


_OF_ARGUMENTS = "a program runs on the device of its arguments", "put them there: f(bf.device_put(x, device))"
_NOT_HERE = {
    "device": _OF_ARGUMENTS,
    "backend": _OF_ARGUMENTS,
    "compiler_options": ("no compiler takes options", "leave it out; see bf.config for settings"),
}


def _check_options(flags: dict[str, Any], absent: dict[str, Any]) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise errors.ArgumentError(
                f"jit: {name} is True or False, not {flag!r:.60}.", where=source.here(), fix=f"{name}=False"
            )
    for name, value in absent.items():
        if value is not None:
            why, fix = _NOT_HERE[name]
            raise errors.UnsupportedError(
                f"jit takes no {name}, which is {value!r:.60}.", where=source.here(), why=f"{why}.", fix=fix
            )


_DISABLED = "jit is disabled"
_MAX_SCOPES = 16


@contextlib.contextmanager
def disable_jit(disable: bool = True) -> Iterator[None]:
    """Context manager: run functions under ``jit`` eagerly in this thread.

    Bodies of ``scan``, ``cond`` and ``while_loop`` are traced all the same: use ``debug.print`` there.
    """
    before = state.context
    others = tuple(e for e in before if e != _DISABLED)
    state.context = (*others, _DISABLED) if disable else others
    try:
        yield
    finally:
        state.context = before


def _runs_in_place() -> bool:
    """Whether functions under ``jit`` run as operations of what surrounds them.

    Inside ``shard_map`` values have types, which a separately traced body would not know.
    """
    return any(e is _DISABLED or e.__class__ is MeshAxis for e in state.context)


_jitted: weakref.WeakSet[Jitted] = weakref.WeakSet()


def clear_caches() -> None:
    """Drop the traces and programs of all jitted functions."""
    for function in list(_jitted):
        function.clear_cache()


def swap_caches() -> None:
    """Swap the traces of one mode of dtypes for those of the other.

    ``dtypes.set_wide`` changes the types of numbers, so that each mode has its traces.
    """
    for function in list(_jitted):
        function.swap_caches()


class Jitted(Generic[P, R]):
    """The result of ``jit``."""

    if TYPE_CHECKING:
        __wrapped__: Callable[P, R]

    def __init__(
        self, fun, static_argnums, static_argnames, donate_argnums, donate_argnames, max_traces, budget
    ):
        functools.update_wrapper(self, fun)
        self.fun = fun
        self.name = name_of(fun)
        self.static_nums, self.static_names = _positions(fun, static_argnums, static_argnames, "static")
        self.donate_nums, self.donate_names = _positions(fun, donate_argnums, donate_argnames, "donate")
        self.max_traces = None if max_traces is None else static_int(max_traces, "jit", "max_traces")
        self.budget = budget
        self.counter = [0]  # of traces; shared with the function that carries cells
        self._entries: dict[Key, Entry] = {}
        self._by_sharding: set[Key] = set()  # keys whose traces asked how their arguments are sharded
        self._carrier: RefCarrier | None = None  # of a function of cells, once one was found
        self.carries_refs = True
        self._plain = not self.static_nums and not self.static_names
        self._fast: dict[tuple, Entry] = {}
        self._of_other_mode: tuple[dict[Key, Entry], dict[tuple, Entry]] = {}, {}
        # The structure of the last call's arguments, and of the positional ones if there were only these.
        self._last = tree.LEAF, tree.LEAF
        _jitted.add(self)

    def __repr__(self) -> str:
        return f"<jit of {self.name}>"

    @property
    def trace_count(self) -> int:
        """The number of traces so far."""
        return self.counter[0]

    if not TYPE_CHECKING:  # it would allow any attribute

        def __getattr__(self, name: str) -> Any:
            if name == "__signature__":  # read without following __wrapped__, too, and seldom
                return inspect.signature(self.fun)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @overload
    def __get__(self, obj: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: Callable[Concatenate[Any, Q], R], obj: object, owner: type | None = None
    ) -> Callable[Q, R]: ...
    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        return self if obj is None else functools.partial(self, obj)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if self._plain and state.trace is EVAL and not state.context:
                arrays: Sequence = args
                key: list = [a.aval for a in args if a.__class__ is ConcreteArray]
                if kwargs or len(key) != len(args):
                    arrays, in_tree = self._flatten(args, kwargs)
                    key = [in_tree, *[a.aval for a in arrays if a.__class__ is ConcreteArray]]
                    if len(key) != 1 + len(arrays):
                        arrays = self._values(arrays, in_tree)
                        key[1:] = [a.aval for a in arrays if a.__class__ is ConcreteArray]
                entry = self._fast.get(tuple(key))  # tracers make the key too short to be found
                if entry is not None:
                    return self._run(entry, arrays)
            if self._carrier is None or not self._carrier.closed or _runs_in_place():
                return self._call(args, kwargs)
        except RefError:
            if not self.carries_refs or _runs_in_place():
                raise
        return self._ref_carrier()(args, kwargs)

    def _ref_carrier(self) -> RefCarrier:
        if self._carrier is None:
            self._carrier = RefCarrier(self, jit)
        return self._carrier

    def _run(self, entry: Entry, arrays: Sequence[ConcreteArray]) -> Any:
        """Run a program on arrays; donated ones lose their buffers."""
        if config.guards:
            return self._run_guarded(entry, arrays)
        device, program, precision = entry.ran
        buffers = [  # no loop variable outlives this line: references are counted
            b for a in arrays if a.device is device for b in (a._buffer,) if b.__class__ is not Donated
        ]
        if len(buffers) != len(arrays) or not buffers or precision != config.matmul_precision:
            device, precision = entry.place(arrays, self.name), config.matmul_precision
            buffers = [a.buffer_on(device) for a in arrays]
            program = entry.program_on(device)
            entry.ran = device, program, precision
        if entry.consts:
            arrays = [*entry.constants(device), *arrays]
            buffers = [*[c.buffer for c in entry.constants(device)], *buffers]
        if entry.donates:
            donate(arrays, buffers, entry.donates, device, self.name)
        return self._results(entry, program(buffers), device)

    def _run_guarded(self, entry: Entry, arrays: Sequence[ConcreteArray]) -> Any:
        """Run a program, check results for NaN, and find the first equation with one.

        Arguments must outlive the call, since it may have to run again.
        """
        device = entry.place(arrays, self.name)
        inputs = [*entry.constants(device), *arrays]
        outs = entry.program_on(device, donating=False)([a.buffer_on(device) for a in inputs])
        shown = effects.silenced(simplify.inline_calls(entry.jaxpr))
        nan_check.check_program(self.name, shown, inputs, outs, device)
        mark_donated(inputs, entry.donates, self.name)
        return self._results(entry, outs, device)

    def _results(self, entry: Entry, outs: Sequence, device: backend.Device) -> Any:
        if entry.single:
            return ConcreteArray(outs[0], entry.out_avals[0], device)
        return tree.unflatten(entry.out_tree, arrays_of(outs, entry.out_avals, device))

    def _call(self, args: tuple, kwargs: dict) -> Any:
        if state.context and _runs_in_place():
            return self.fun(*args, **kwargs)
        call = self._split(args, kwargs)
        values = self._values(call.leaves, call.in_tree)
        entry = self._entry(call, [v.aval for v in values], values)
        values = self._placed(call, values)
        if state.trace is not EVAL:
            outs = jit_p.bind(*entry.consts, *values, jaxpr=entry.jaxpr, name=self.name)
            return tree.unflatten(entry.out_tree, outs)
        return self._run(entry, [*map(concrete, values)])

    # -- stages --------------------------------------------------------------------------------

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced:
        """Trace for the types of the arguments (arrays or ``ShapeDtypeStruct``)."""
        call = self._split(args, kwargs)
        entry = self._entry(call, [abstract(x) for x in call.leaves], call.leaves)
        arrays = [x for x in call.leaves if isinstance(x, ConcreteArray) and x.aval.ndim]
        device = device_of(arrays, self.name, entry.home) if arrays else entry.home
        return Traced(self, entry, call.in_tree, device, self._layouts(call), call.static)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """``trace(*args).lower()``."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The results as ``ShapeDtypeStruct``, without computing anything."""
        try:
            if self._carrier is None or not self._carrier.closed:
                return self.trace(*args, **kwargs).out_info
        except RefError:
            if not self.carries_refs:
                raise
        return self._ref_carrier().eval_shape(args, kwargs)

    def clear_cache(self) -> None:
        """Drop all traces and programs."""
        for cache in (self._entries, self._fast, *self._of_other_mode):
            cache.clear()
        if self._carrier is not None:
            self._carrier.explicit.clear_cache()

    def swap_caches(self) -> None:
        """Swap the traces of this mode of dtypes for those of the other."""
        kept = self._entries, self._fast
        (self._entries, self._fast), self._of_other_mode = self._of_other_mode, kept

    # -- tracing -------------------------------------------------------------------------------

    def _split(self, args: tuple, kwargs: dict) -> _CallArguments:
        """Split the arguments into dynamic leaves and static values."""
        if self._plain:
            return _CallArguments(*self._flatten(args, kwargs), (), args, kwargs)
        n = len(args)
        static_nums = {i for i in self.static_nums if i < n}
        static = [("arg", i, args[i]) for i in sorted(static_nums)]
        static += [("kwarg", k, v) for k, v in sorted(kwargs.items()) if k in self.static_names]
        for _, where, value in static:
            if isinstance(value, Tracer):
                raise errors.StaticArgumentError(
                    f"the static argument {self._name(where)} of {self.name} is a traced value ({value.aval}).",
                    where=source.here(),
                    fix="make it static in the outer transform too, or make it dynamic here",
                )
            try:
                hash(value)
            except TypeError:
                raise errors.StaticArgumentError(
                    f"the static argument {self._name(where)} of {self.name} is a {type(value).__name__}, "
                    "which is not hashable.",
                    where=source.here(),
                    why="traces are cached by the values of static arguments.",
                    fix="pass a tuple, a frozen dataclass or another hashable value; or make it dynamic",
                ) from None
        dynamic = tuple(_STATIC if i in static_nums else a for i, a in enumerate(args))
        dynamic_kw = {k: v for k, v in kwargs.items() if k not in self.static_names}
        leaves, in_tree = self._flatten(dynamic, dynamic_kw)
        key = tuple((kind, where, value.__class__, exact(value)) for kind, where, value in static)
        return _CallArguments(leaves, in_tree, key, dynamic, dynamic_kw, {w: v for _, w, v in static})

    def _flatten(self, args: tuple, kwargs: dict) -> tuple[list, tree.TreeDef]:
        """The leaves of arguments; fast if their structure is that of the previous call."""
        in_tree, args_tree = self._last
        leaves = tree.leaves_like(in_tree, (args, kwargs)) if kwargs else tree.leaves_like(args_tree, args)
        if leaves is None:
            leaves, in_tree = tree.flatten((args, kwargs))
            hash(in_tree)  # raises for unhashable static data, which need not be comparable either
            self._last = in_tree, tree.LEAF if kwargs else in_tree.children()[0]
        return leaves, in_tree

    def _values(self, leaves: list, in_tree: tree.TreeDef) -> list:
        """The leaves of arguments as values."""
        return as_values(leaves, lambda i: f"the argument {labels_of(self.fun, in_tree)[i]}")

    def _donated(self, in_tree: tree.TreeDef) -> tuple[bool, ...]:
        """A flag per leaf of the arguments, True if donated."""
        args, kwargs = in_tree.children()
        _, names = kwargs.node_data()  # type: ignore[misc]
        flags = [i in self.donate_nums for i in range(len(args.children()))]
        flags += [name in self.donate_names for name in names]
        counts = [t.num_leaves for t in (*args.children(), *kwargs.children())]
        return tuple(flag for flag, n in zip(flags, counts, strict=True) for _ in range(n))

    def _name(self, where: int | str) -> str:
        """The parameter name of an argument, passed by position or by name."""
        signature = signature_of(self.fun)
        names = list(signature.parameters) if signature else []
        return str(names[where] if isinstance(where, int) and where < len(names) else where)

    # Overridden by a subclass that knows the shardings of arguments and results.

    def _flat(self, call: _CallArguments) -> FlatFunction:
        """The function to trace for a call."""
        return FlatFunction(call.rebuild(self.fun), call.in_tree)

    def _placed(self, call: _CallArguments, values: list) -> list:
        """The arguments, moved to where the program needs them."""
        return values

    def _layouts(self, call: _CallArguments) -> Sequence[Any]:
        """Each argument, or its future sharding, for ``Device.layouts``."""
        return call.leaves

    def _entry(self, call: _CallArguments, avals: Sequence[ShapedArray], values: Sequence[Any]) -> Entry:
        key = Key(call.in_tree, tuple(avals), call.static_key, state.context)
        if key in self._by_sharding:
            key = key._replace(shardings=TraceTypes(values, avals).key)
        entry = self._entries.get(key)
        if entry is not None and entry.alive():
            return entry
        if config.shows("retrace"):
            self._show_retrace(call, key)
        if self.max_traces is not None and self.trace_count >= self.max_traces:
            last = next(reversed(self._entries.values())).key if self._entries else key
            raise errors.RetraceError(
                f"{self.name} was traced {self.trace_count} times already (max_traces={self.max_traces}).",
                where=source.here(),
                why=difference(last, key, labels_of(self.fun, call.in_tree)),
                fix="keep shapes, dtypes and static arguments the same, or raise max_traces",
            )
        types = TraceTypes(values, avals)
        entry = self._trace(call, key, types)
        if types.asked:  # the trace is for these shardings alone
            self._by_sharding.add(key._replace(shardings=()))
            key = entry.key = key._replace(shardings=types.key)
        self._entries[key] = entry
        if key.context:  # keep the last few: there may be any number of scopes
            for old in [k for k in self._entries if k.context][:-_MAX_SCOPES]:
                del self._entries[old]
        if (
            self._plain
            and not key.context
            and not types.asked
            and not any(isinstance(c, Tracer) for c in entry.consts)
        ):
            self._fast[(call.in_tree, *key.types)] = entry
            if not call.kwargs and all(a.__class__ is ConcreteArray for a in call.args):
                self._fast[key.types] = entry
        return entry

    def _show_retrace(self, call: _CallArguments, key: Key) -> None:
        """Say why this is not the first trace, of this function or its source."""
        if self._entries:
            last = next(reversed(self._entries.values())).key
            config.show(f"retrace of {self.name}: {difference(last, key, labels_of(self.fun, call.in_tree))}")
        made_by = _source_of(self.fun)
        if made_by is None:
            return
        traced, types = _traced.setdefault(made_by, {}), hash(key)
        if not self._entries and types in traced and traced[types]() is not self.fun:
            where = f"{Path(made_by[0]).name}:{made_by[1].co_firstlineno}"
            config.show(
                f"retrace of {self.name}: {where} made a new function object, which has no traces. Make the function "
                "and jit it once, outside of the loop, and pass what changes as arguments"
            )
        traced[types] = weakref.ref(self.fun)

    def _trace(self, call: _CallArguments, key: Key, types: TraceTypes) -> Entry:
        flat = self._flat(call)
        labels = labels_of(self.fun, call.in_tree)
        with to.span(f"trace {self.name}", "compilation") if (to := recording.active) else recording.OFF:
            jaxpr = stage(flat, key.types, self.name, labels, None, types)
        closed, consts = simplify.merge_constants(jaxpr).hoist()
        if config.shows("jaxpr"):
            config.show(closed)
        self.counter[0] += 1
        out_avals = tuple(closed.out_avals)
        donated = self._donated(call.in_tree)
        home, single = simplify.home_of(closed), flat.out_tree is tree.LEAF
        return Entry(closed, consts, flat.out_tree, out_avals, key, donated, single, home, self.budget)


_traced: dict[tuple, dict[int, weakref.ref]] = {}
"""The last function traced for each source and kind of arguments, for reports."""

_OURS = str(Path(errors.__file__).parent)


def _source_of(fun: Any, seen: frozenset[int] = frozenset()) -> tuple | None:
    """File and code of the user's function, and of what it wraps or closes over."""
    if not isinstance(fun, FunctionType) or id(fun) in seen:
        return None
    seen |= {id(fun)}
    inner = [c.cell_contents for c in fun.__closure__ or () if c != _EMPTY]
    found = [_source_of(x, seen) for x in (getattr(fun, "__wrapped__", None), *inner)]
    parts = [part for part in found if part is not None]
    code = fun.__code__
    if code.co_filename.startswith(_OURS):
        return parts[0] if parts else None
    return (code.co_filename, code, *parts)


_EMPTY = CellType()


class _Static:
    """A placeholder for a static argument; a pytree without leaves."""

    def __repr__(self) -> str:
        return "<static>"


_STATIC = _Static()
nodes.register_node(_Static, lambda x: ((), None), lambda aux, children: _STATIC)


def dynamic_tree(in_tree: tree.TreeDef) -> tree.TreeDef:
    """The structure of arguments, ``(args, kwargs)``, without those that are static."""
    args, kwargs = in_tree.children()
    dynamic = [t for t in args.children() if t.node_type is not _Static]
    return tree.tuple_of([tree.tuple_of(dynamic), kwargs])


@dataclass
class _CallArguments:
    """The arguments of one call, split into dynamic and static."""

    leaves: list
    in_tree: tree.TreeDef
    static_key: tuple
    args: tuple
    kwargs: dict
    static: dict = field(default_factory=dict)

    def rebuild(self, fun: Callable) -> Callable:
        """``fun`` of the dynamic arguments, with the static ones bound."""
        if not self.static:
            return fun
        static = self.static

        def with_static(*args, **kwargs):
            full = [static[i] if a is _STATIC else a for i, a in enumerate(args)]
            return fun(*full, **kwargs, **{k: v for k, v in static.items() if isinstance(k, str)})

        functools.update_wrapper(with_static, fun)
        return with_static


def _positions(fun: Callable, nums: Any, names: Any, what: str) -> tuple[frozenset[int], frozenset[str]]:
    """Argument indices and names, each completed from the other by the signature."""
    nums = argument_numbers(nums, f"{what}_argnums")
    names = argument_names(names, f"{what}_argnames")
    signature = signature_of(fun)
    if signature is None:
        return frozenset(nums), frozenset(names)
    parameters = list(signature.parameters.values())
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    accepted = {p.name for p in parameters} | (
        {*names} if any(p.kind is p.VAR_KEYWORD for p in parameters) else set()
    )
    for name in names:
        if name not in accepted:
            raise errors.ValueRangeError(
                f"{what}_argnames: {name_of(fun)} has no parameter {name!r}.",
                where=source.here(),
                fix=f"its parameters are {', '.join(p.name for p in parameters)}",
            )
    if not variadic and nums:
        nums = argument_indices(nums, len(positional), f"{what}_argnums")
    all_nums = set(nums) | {positional.index(n) for n in names if n in positional}
    all_names = set(names) | {positional[i] for i in nums if i < len(positional)}
    return frozenset(all_nums), frozenset(all_names)
