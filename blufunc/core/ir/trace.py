"""Tracing without a stack: one current trace, and tracers that know theirs.

Core, stage 1 of a program's path. ``Primitive.bind`` passes every operation to the current trace. A transform
makes its trace current while the user's function runs. While one of its rules runs, its parent is current, so
that outer transforms see the operations of the rule. A tracer belongs to a trace by identity; to every other
trace it is a constant.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray, Typed

if TYPE_CHECKING:  # with the operators and methods that blufunc.numpy installs
    from blufunc.core.ir.array_methods import ArrayMethods as _Base
else:
    _Base = Typed


class Array(_Base):
    """An immutable n-dimensional array: concrete, or traced.

    Made by ``blufunc.numpy`` functions and by transforms, not by calling this class. ``isinstance(x, Array)`` holds
    for tracers, too, so that a function takes the same branch while it is traced.
    """

    __slots__ = ()
    __array_priority__ = 100  # NumPy arrays on the left-hand side defer to these operators

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.aval.nbytes

    @property
    def weak_type(self) -> bool:
        """True if the dtype came from a Python scalar and yields in promotion."""
        return self.aval.weak_type

    def __setitem__(self, index, value) -> NoReturn:
        raise errors.ImmutableArrayError(
            f"in-place assignment to {self.aval}: arrays are immutable.",
            where=source.here(),
            why="transforms are only correct for functions that change nothing.",
            fix="x = x.at[index].set(value)   (also .add, .mul, .min, .max)",
        )

    def __len__(self) -> int:
        if not self.aval.shape:
            raise errors.ArgumentError(
                f"a sequence is wanted, but this array has rank 0 and no len(): {self.aval}.",
                where=source.here(),
                fix="pass a sequence of arrays, or give the array an axis: x[None]",
            )
        return self.aval.shape[0]


class UntypedError(errors.UnsupportedError):
    """In a ``shard_map``, a function asks for types that its trace does not have.

    The caller that traces it by itself traces it again with the types of its operands (``stage_body``).
    """


class Body(NamedTuple):
    """A function that a loop, a branch or a call runs on ``values``.

    Attributes:
      fun: takes values of ``avals``.
      avals: the types of its parameters.
      values: for each parameter the value it is of, or made of: an array of xs for an element.
      name: its name, for messages.
      labels: the path of each parameter, for messages; or None.
      n_carry: the number of leading parameters and results that are the carry of a loop.
      chosen_by: a value whose ranks choose whether the function runs; or, of the condition of a while loop, the
        function from the carry to that value; or None.
    """

    fun: Callable[..., Sequence[Any]]
    avals: Sequence[ShapedArray]
    values: Sequence[Any]
    name: str
    labels: Sequence[str] | None = None
    n_carry: int = 0
    chosen_by: Any = None


class Trace:
    """One run of a transform over the operations of a function."""

    __slots__ = ("alive",)
    name = "trace"

    def __init__(self) -> None:
        self.alive = True

    def process(self, prim, args, params):
        """Apply ``prim`` to ``args`` (values, tracers of this trace among them)."""
        raise NotImplementedError

    def typed(self, fun: Callable, primals: Sequence[Any]) -> Callable:
        """``fun`` ready to be differentiated at ``primals``, inside a ``shard_map``.

        There values have types over the mesh axes, and the casts that these need must be in the function
        before it is differentiated. The trace of the ``shard_map`` knows the types.
        """
        raise UntypedError(
            f"grad inside of {self.name}, which is traced by itself, inside of a shard_map.",
            where=source.here(),
            why="the types of its arguments over the axes of the mesh are not known.",
            fix="take the gradient outside of it: grad of a function that calls it is supported",
        )

    def typed_body(self, body: Body) -> Any:
        """Trace a function inside a ``shard_map`` with types over the mesh axes.

        None if the trace does not know the types of the operands.
        """
        return None

    def typed_cotangent(self, ct: Any, primal: Any) -> Any:
        """``ct`` with the types of a cotangent of ``primal`` over the mesh axes."""
        return ct

    def type_of(self, x: Tracer) -> ShapedArray:
        """The type of a tracer of this trace, as ``type_of`` gives it."""
        return x.aval

    def sharding_of(self, x: Tracer) -> Any:
        """The sharding of a tracer of this trace; None if it is not known."""
        return None

    @property
    def main(self) -> Trace:
        """Itself: what identifies it in JAX."""
        return self

    def invalidate(self) -> None:
        """End the trace: later uses of its tracers raise."""
        self.alive = False


class EvalTrace(Trace):
    """The outermost trace, which evaluates eagerly."""

    __slots__ = ()
    name = "eval"

    def process(self, prim, args, params):
        return prim.evaluate(args, params)

    def typed(self, fun, primals):
        return fun  # concrete values are replicated


EVAL = EvalTrace()


class _State(threading.local):
    trace: Trace = EVAL
    context: tuple = ()  # dependencies of a trace besides its arguments: named axes, overridden rules
    numbers: dict[int, Any] | None = None  # by id, rank-0 arrays made while ``make_jaxpr`` runs; else None


state = _State()


def type_of(x: Any) -> ShapedArray:
    """The type of an array.

    In a ``shard_map`` a ``LocalArray``, on explicit axes an ``ExplicitArray``.
    """
    return x.trace.type_of(x) if isinstance(x, Tracer) else x.full_type


class set_trace:
    """Context manager: makes ``trace`` current within its block."""

    __slots__ = ("previous", "trace")

    def __init__(self, trace: Trace):
        self.trace = trace

    def __enter__(self) -> Trace:
        self.previous = state.trace
        state.trace = self.trace
        return self.trace

    def __exit__(self, *exc) -> None:
        state.trace = self.previous


class new_trace(set_trace):
    """``set_trace`` that ends the trace with its block, to detect leaked tracers."""

    __slots__ = ()

    def __exit__(self, *exc) -> None:
        state.trace = self.previous
        self.trace.invalidate()


class Tracer(Array):
    """A stand-in for an array while a transform runs.

    Attributes:
      trace: the trace it belongs to.
      aval: its type.
      source: the user's line that made it (for arguments: the line that called the transform).
      label: for arguments, the path of the argument, as text.
    """

    __slots__ = ("__weakref__", "aval", "label", "source", "trace")  # caches of libraries hold tracers weakly

    def __init__(
        self, trace: Trace, aval: ShapedArray, source: source.Source | None = None, label: str | None = None
    ):
        self.trace = trace
        self.aval = aval
        self.source = source
        self.label = label

    @property
    def _trace(self) -> Trace:
        """The trace it belongs to: its name in JAX."""
        return self.trace

    @property
    def sharding(self) -> Any:
        """The ``NamedSharding``, where the program says it; else there is no attribute."""
        found = self.trace.sharding_of(self)
        if found is None:
            raise AttributeError(
                f"the sharding of {self._origin()} is not known while it is traced ({self.aval}): one program serves "
                "all shardings of its arguments, and the compiler chooses those of other values. "
                "`bf.constrain(x, spec)` states one, and `bf.jit(f).lower(...).per_device` shows all."
            )
        return found

    def __repr__(self) -> str:
        return f"Tracer<{self.trace.name}>({self.trace.type_of(self)})"

    def _origin(self) -> str:
        if self.label:
            return f"the argument {self.label}"
        if self.source:
            return f"the value made at {source.summary(self.source)}"
        return "the value"

    def _not_concrete(self, use: str, fix: str) -> errors.ConcretizationError:
        return errors.ConcretizationError(
            f"{use} needs a concrete value, but {self._origin()} is traced ({self.aval}, by {self.trace.name}).",
            where=source.here(),
            why="while a function is traced its arrays have a shape and a dtype but no value yet.",
            fix=fix,
        )

    def __bool__(self) -> bool:
        raise self._not_concrete(
            "a truth value (if, while, and, or, not, assert)",
            "use bnp.where(condition, a, b) to choose between values, or make the argument static "
            "(jit(f, static_argnums=...))",
        )

    def __int__(self) -> int:
        raise self._not_concrete("int()", "keep it an array (x.astype('int32')), or make the argument static")

    def __float__(self) -> float:
        raise self._not_concrete(
            "float()", "keep it an array (x.astype('float32')), or compute it outside the transform"
        )

    def __complex__(self) -> complex:
        raise self._not_concrete("complex()", "keep it an array (x.astype('complex64'))")

    def __index__(self) -> int:
        raise self._not_concrete(
            "a Python index, size or range()",
            "use lax.dynamic_slice or x[i] on a blufunc array for positions; make sizes static "
            "(jit(f, static_argnums=...)); use lax.scan for loops",
        )

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._not_concrete("a NumPy function", "use the function of the same name in blufunc.numpy")

    def __hash__(self) -> int:
        raise TypeError("blufunc arrays and tracers are not hashable: they compare elementwise")

    def __reduce__(self):
        raise TypeError("a tracer cannot be pickled: it has no value yet")


def leak_error(tracer: Tracer) -> errors.LeakedTracerError:
    """The error for a tracer used after its trace ended, or outside of it."""
    if tracer.trace.alive:
        return errors.LeakedTracerError(
            f"{tracer._origin()} ({tracer.aval}) is traced by {tracer.trace.name}, and was used where that trace "
            "does not see it.",
            where=source.here(),
            why="a rule of a custom derivative closed over it, or another thread got hold of it.",
            fix="pass the value to the function as an argument",
        )
    return errors.LeakedTracerError(
        f"{tracer._origin()} ({tracer.aval}) was used after the tracing of {tracer.trace.name} had ended.",
        where=source.here(),
        why="a traced value was stored outside the function (in a global, a list, an attribute or a closure).",
        fix="return the value from the function instead of storing it, and use what the transformed function returns",
    )
