"""Refs: cells that hold an array, and how programs carry them.

Core, stage 1. In: a program that reads and writes cells. Out: the program as a function of their values. A cell belongs
to the trace in which it was made: there, and in traces of ``grad`` and ``vmap`` inside, it is a Python object, and
reading it yields the value that was last written. A trace that stages (of ``jit``, or the body of a loop or a branch)
runs its function once for many executions, so a cell from outside must be an argument of it, and a result if it is
written. The first use raises a ``RefError``. ``jit``, ``scan``, ``while_loop`` and ``cond`` catch it, and trace again
in a ``Frame``, which has the values of cells in that trace and finds all that are missing. Frames are of a thread: the
cell itself keeps its value, for other threads that use it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import AbstractValue, ShapedArray
from blufunc.core.ir.trace import Trace, Tracer, set_trace, state

F = TypeVar("F", bound=Callable)


class RefError(errors.UnsupportedError):
    """A Ref is used where no transform carries it.

    Attributes:
      ref: the cell.
    """

    ref: Ref


class AbstractRef(AbstractValue):
    """The type of a cell: that of the array in it, ``inner_aval``."""

    def __init__(self, inner_aval: ShapedArray, memory_space: Any = None, kind: Any = None):
        self.inner_aval = inner_aval

    shape = property(lambda self: self.inner_aval.shape, doc="The shape of the array in the cell.")
    dtype = property(lambda self: self.inner_aval.dtype, doc="The dtype of the array in the cell.")
    ndim = property(lambda self: self.inner_aval.ndim, doc="The rank of the array in the cell.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AbstractRef) and self.inner_aval == other.inner_aval

    def __hash__(self) -> int:
        return hash((AbstractRef, self.inner_aval))

    def __repr__(self) -> str:
        return f"Ref{{{self.inner_aval}}}"


class Ref:
    """A cell that holds an array of one type.

    ``ref[...]`` reads it, and ``ref[...] = x`` writes it.

    Made by ``new_ref``. Functions may take cells under ``jit``, and close over them under ``jit``, ``scan``,
    ``while_loop``, ``fori_loop``, ``cond`` and ``switch``.
    """

    __slots__ = ("__weakref__", "_freed", "_trace", "_value", "inner_aval")

    def __init__(self, value: Any, aval: ShapedArray | None = None):
        self._value = value
        self._trace: Trace = state.trace
        self._freed = False
        self.inner_aval: ShapedArray = value.aval if aval is None else aval

    shape = property(lambda self: self.inner_aval.shape, doc="The shape of the array in the cell.")
    dtype = property(lambda self: self.inner_aval.dtype, doc="The dtype of the array in the cell.")
    ndim = property(lambda self: self.inner_aval.ndim, doc="The rank of the array in the cell.")
    size = property(lambda self: self.inner_aval.size, doc="The number of elements of the cell.")
    weak_type = property(lambda self: self.inner_aval.weak_type, doc="Whether the array is weakly typed.")
    aval = property(lambda self: AbstractRef(self.inner_aval), doc="The type of the cell.")

    @property
    def sharding(self) -> Any:
        """The layout of the value."""
        return self.value.sharding

    @property
    def at(self) -> _Views:
        """``ref.at[index]``: a part of the cell, which can be read and written."""
        return _Views(self)

    # -- the value -------------------------------------------------------------------------------------------

    @property
    def value(self) -> Any:
        """The array that was last written."""
        frame = self._frame(None)
        return self._value if frame is None else frame.values[self]

    @value.setter
    def value(self, value: Any) -> None:
        frame = self._frame(value)
        if frame is None:
            self._value = value
        else:
            frame.values[self] = value

    def _frame(self, written: Any) -> Frame | None:
        """The frame that has the value here; None if the cell itself has it.

        Raises:
          RefError: a trace without a frame is staged between the cell and the current trace.
        """
        if self._freed:
            raise errors.ArgumentError(
                "a Ref is used after freeze() or free_ref().", where=source.here(), fix="new_ref(value)"
            )
        trace = state.trace
        while True:
            frames = _frames.at(trace)
            for frame in frames:
                if self in frame.values:
                    return frame
            if trace is self._trace:
                return None
            for frame in frames:
                if frame.finds:
                    frame.find(self)
                    return frame
            if isinstance(written, Tracer) and written.trace is trace:
                raise errors.LeakedTracerError(
                    f"a value of {trace.name} is written into a Ref from outside of it.",
                    where=source.here(),
                    why="the value has no meaning where the Ref lives.",
                    fix="return the value, or make the Ref inside of the function",
                )
            parent = getattr(trace, "parent", None)
            if parent is None:
                error = RefError(
                    f"a Ref of {self.inner_aval} is used in {trace.name}, which does not carry it.",
                    where=source.here(),
                    why="it runs the function once, and its program many times.",
                    fix="use it under jit, scan, while_loop, fori_loop, cond or switch; elsewhere pass its value",
                )
                error.ref = self
                raise error
            trace = parent

    def __getitem__(self, index: Any) -> Any:
        value = self.value
        return value if index is Ellipsis else value[_static(index, value)]

    def __setitem__(self, index: Any, x: Any) -> None:
        self._update(index, x, "set")

    def addupdate(self, index: Any, x: Any) -> None:
        """Add to the part of the cell at an index."""
        self._update(index, x, "add")

    def _update(self, index: Any, x: Any, how: str) -> None:
        value = self.value
        x = lift(x, "the value written into a Ref")
        if (
            x.dtype != self.dtype
            and dtypes.promote((x.dtype, x.weak_type), (self.dtype, False))[0] != self.dtype
        ):
            raise errors.DtypeError(
                f"{x.aval} is written into a Ref of {self.inner_aval}.",
                where=source.here(),
                fix=f"x.astype('{self.dtype}')",
            )
        place = value.at[Ellipsis if index is Ellipsis else _static(index, value)]
        self.value = getattr(place, how)(x.astype(self.dtype))

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Ref({self.inner_aval})" if self._freed else f"Ref({self._value}, dtype={self.dtype})"

    def __blufunc_array__(self) -> Any:
        error = RefError(
            f"a Ref of {self.inner_aval} is given where an array is wanted.",
            where=source.here(),
            fix="ref[...]",
        )
        error.ref = self
        raise error


class Slice:
    """``size`` positions from ``start`` on, ``stride`` apart; made by ``ds``."""

    def __init__(self, start: Any, size: int, stride: int = 1):
        self.start, self.size, self.stride = start, size, stride


def ds(start: Any, size: Any = None, stride: int | None = None) -> slice | Slice:
    """The index of ``size`` positions from ``start`` on, for ``ref[...]``.

    Args:
      start: the first position, an integer or an int array of rank 0; None for all positions.
      size: an integer.
      stride: the distance of positions; default 1.
    """
    if start is None:
        return slice(None)
    if isinstance(start, int) and isinstance(size, int):
        return slice(start, start + size * (stride or 1), stride)
    return Slice(start, int(size), stride or 1)


def _static(index: Any, value: Any) -> Any:
    """An index in which ``Slice`` is an array of positions."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(p, Slice) for p in parts):
        return index
    positions = lambda p: lift(p.start) + lift(np.arange(p.size, dtype=np.int32) * p.stride)
    return tuple(positions(p) if isinstance(p, Slice) else p for p in parts)


class _Views:
    """``ref.at``."""

    def __init__(self, ref: Any):
        self.ref = ref

    def __getitem__(self, index: Any) -> View:
        return View(self.ref, index)


class View:
    """A part of a cell: it is read and written as a cell is."""

    def __init__(self, ref: Any, index: Any):
        self.ref, self.index = ref, index

    @property
    def at(self) -> _Views:
        """A part of this part."""
        return _Views(self)

    shape = property(lambda self: self[...].shape, doc="The shape of the array in the cell.")
    dtype = property(lambda self: self.ref.dtype, doc="The dtype of the array in the cell.")

    def __getitem__(self, index: Any) -> Any:
        value = self.ref[self.index]
        return value if index is Ellipsis else value[index]

    def __setitem__(self, index: Any, x: Any) -> None:
        part = self.ref[self.index]
        self.ref[self.index] = part.at[index].set(x)

    def addupdate(self, index: Any, x: Any) -> None:
        """Add to the part at an index."""
        part = self.ref[self.index]
        self.ref[self.index] = part.at[index].add(x)


# -- programs that carry cells ------------------------------------------------------------------------------


class _Frames(threading.local):
    """The frames of each trace in this thread, innermost first."""

    def __init__(self) -> None:
        self.of: dict[Trace, tuple[Frame, ...]] = {}

    def at(self, trace: Trace) -> tuple[Frame, ...]:
        """The frames of one trace."""
        return self.of.get(trace, ())


_frames = _Frames()


class Missing(Exception):
    """Cells must be operands of a body, which is traced again with them."""

    def __init__(self, refs: list[Ref]):
        self.refs = refs


class Frame:
    """The values of cells in one trace.

    A cell that is not among them is found: in the body of a loop or a branch, which is compiled with what surrounds it,
    it has its value outside. A program has a placeholder for it.

    Attributes:
      values: the last value of each cell.
      given: the first.
      carried: the cells that are operands of the body.
      outside: the trace around the body; None for a program, which outlives it.
      finds: whether it gives values to other cells; not if the function runs in place, in the trace outside.
    """

    def __init__(self, given: dict[Ref, Any], outside: Trace | None):
        self.trace: Any = state.trace
        self.values, self.given, self.carried = given.copy(), given, frozenset(given)
        self.outside = outside
        self.finds = outside is not self.trace

    def find(self, ref: Ref) -> None:
        """Give a cell its first value here."""
        if self.outside is None:
            value = self.trace.parameter(ref.inner_aval)  # of a trace that ends in ``Missing``
        else:
            with set_trace(self.outside):
                value = ref.value
        self.values[ref] = self.given[ref] = value

    def is_written(self, ref: Ref) -> bool:
        """Whether the body writes a cell."""
        return self.values[ref] is not self.given[ref]

    def missing(self) -> list[Ref]:
        """The cells that must be carried, and are not."""
        return [
            r for r in self.values if r not in self.carried and (self.outside is None or self.is_written(r))
        ]


@contextlib.contextmanager
def bound(refs: Sequence[Ref], values: Sequence[Any], outside: Trace | None) -> Iterator[Frame]:
    """Give cells the values of the current trace in a block.

    Args:
      refs, values: the cells that the trace carries, and their values.
      outside: the trace whose values others have if they are only read; None if each must be carried.
    Raises:
      Missing: at the end, if others must be carried.
    """
    frame = Frame(dict(zip(refs, values, strict=True)), outside)
    around = _frames.at(frame.trace)
    _frames.of[frame.trace] = (frame, *around)
    try:
        yield frame
    finally:
        if around:
            _frames.of[frame.trace] = around
        else:
            del _frames.of[frame.trace]
    if missing := frame.missing():
        raise Missing(missing)


def _check_carried_around(refs: Sequence[Ref]) -> None:
    """End the trace of a surrounding body that will have to carry cells as well.

    Its trace is in vain, so it ends here: else each level of loops would double the traces of the next.
    """
    found: Frame | None = None
    for ref in refs:
        frame = ref._frame(None)
        if frame is not None and ref not in frame.carried:
            frame.given[ref] = None  # the body writes it
            found = frame
    if found is not None:
        raise Missing(found.missing())


def carried(with_refs: Callable) -> Callable[[F], F]:
    """Decorator of control flow: carry the cells which its functions write.

    Args:
      with_refs: ``(control, refs, *args, **kwargs) -> result``, which runs a function such as ``scan`` with the values
        of cells as operands, and writes the last values back.
    """

    def decorate(control: F) -> F:
        @functools.wraps(control)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return control(*args, **kwargs)
            except RefError as e:
                _ = e.ref.value  # raises where it has none either: then a trace further out starts again
                refs: list[Ref] = []
            while True:
                try:
                    return with_refs(control, refs, *args, **kwargs)
                except Missing as e:
                    refs += e.refs
                _check_carried_around(refs)

        return cast("F", run)

    return decorate


def written_back(refs: Sequence[Ref], values: Sequence[Any]) -> None:
    """Write the last values into cells; None for those that were only read."""
    for ref, value in zip(refs, values, strict=True):
        if value is not None:
            ref.value = value
