"""Calls of native steps: their state in C, and the steps that C++ runs in Python.

Kernels, stage 8 on the CPU. In: the functions of a compiled library, and the equations that have no native form. Out:
results in planned memory. A native step runs without the interpreter lock. An exception of a step in Python ends it and
arrives at the caller, and so does a signal, such as Ctrl-C.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from blufunc.core.ir.jaxpr import Eqn, Literal
from blufunc.core.primitives.effects import eqn_calls_back
from blufunc.core.primitives.override import is_replaced
from blufunc.kernels.loopir.access_map import view
from blufunc.kernels.schedule import Schedule


class HostCall(NamedTuple):
    """A step that C++ runs in Python.

    Attributes:
      eqn: its equation.
      operands: for each operand an array, or a shape and dtype in memory and the equations that make a view of it.
    """

    eqn: Eqn
    operands: list[Any]


class Run(ctypes.Structure):
    """``Run`` of ``include/driver.h``: the state of one call."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("save", "restore", "signals", "call", "release")),
        ("steps", ctypes.py_object),
        ("state", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("threads", "left", "asked")),
        ("times", ctypes.c_void_p),
    ]


_ENTRY = ctypes.PYFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3, ctypes.POINTER(Run))


def entry(function: Any) -> Callable[..., int]:
    """A function of a library that releases the interpreter lock itself.

    After it, ctypes raises an exception that it set.
    """
    return _ENTRY(_address(function))


def _address(function: Any) -> int:
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


class Caller:
    """Calls native steps.

    C++ calls Python by its own interface: a callback of ctypes would lose the exception of a signal that arrives as the
    callback begins.

    Args:
      calls: the steps that run in Python, by their number in C++.
      function_of: from an equation to a function of a list of arrays.
    """

    def __init__(self, calls: Sequence[HostCall], function_of: Callable[[Eqn], Callable[[list], Sequence]]):
        self.steps = [_step(call, function_of(call.eqn)) for call in calls]
        python = ctypes.pythonapi
        self.addresses = [
            _address(f)
            for f in (
                python.PyEval_SaveThread,
                python.PyEval_RestoreThread,
                python.PyErr_CheckSignals,
                python.PyObject_CallFunction,
                python.Py_DecRef,
            )
        ]

    def __call__(self, function: Callable, operands: Any, results: Any, scratch: int, threads: int) -> None:
        run = self.run()
        run.threads = threads
        function(operands, results, scratch, ctypes.byref(run))

    def run(self) -> Run:
        """The state of a new call."""
        return Run(*self.addresses, self.step, None, 1, 0, 0, None)

    def step(self, number: int, addresses: int) -> None:
        """Run one step, given the address of a table.

        The table holds the addresses of its operands and results.
        """
        self.steps[number](addresses)


def _is_of_user(eqn: Eqn) -> bool:
    """True if it runs a user's function, which may keep what it is given."""
    prim = eqn.prim
    theirs = prim.kind == "custom" or prim.check_impl or is_replaced(prim, "impl")
    return theirs or eqn_calls_back(prim, eqn.params)


def _step(call: HostCall, function: Callable[[list], Sequence]) -> Callable[[int], None]:
    """The step as a function of the address of a table of addresses."""
    eqn = call.eqn
    keeps = _is_of_user(eqn)
    places = [
        None if isinstance(o, np.ndarray) else (*o, _Arrays(o[0].shape, o[0].dtype)) for o in call.operands
    ]
    made = [_Arrays(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    first = sum(p is not None for p in places)
    table = ctypes.c_void_p * (first + len(made))

    def run(at_table: int) -> None:
        addresses = table.from_address(at_table)
        operands, at = [], 0
        for given, place in zip(call.operands, places, strict=True):
            if place is None:
                operands.append(given)
                continue
            _, movements, arrays = place
            x = arrays(addresses[at])
            for movement in movements:
                x = view(movement, x)
            operands.append(x.copy() if keeps else x)
            at += 1
        for n, (arrays, result) in enumerate(zip(made, function(operands), strict=True)):
            address = addresses[first + n]
            if address:  # otherwise nothing reads it
                arrays(address)[...] = result

    return run


class Whole:
    """Calls the function of a whole program.

    Args:
      function: ``program`` of its library.
      made: its schedule.
      caller: of its steps in Python.
      threads: gives the maximum number of threads of a call; None: one.
    """

    def __init__(self, function: Any, made: Schedule, caller: Caller, threads: Callable[[], int] | None):
        self.call, self.caller, self.threads = entry(function), caller, threads
        self.arguments = ctypes.c_void_p * max(len(made.inputs), 1)
        self.results = ctypes.c_void_p * max(len(made.outputs), 1)
        self.makers = [_maker(made, o) for o in made.outputs]
        first = {o: n for n, o in reversed([*enumerate(made.outputs)]) if isinstance(o, int)}
        self.repeated = [
            (n, first[o]) for n, o in enumerate(made.outputs) if isinstance(o, int) and first[o] != n
        ]
        self.arena_bytes = made.plan.arena_bytes
        self.free: list[_State] = []  # of calls that have ended; concurrent ones make more

    def __call__(self, arrays: list[np.ndarray], times: Any = None) -> tuple:
        """Run the program; ``times``, an array of ``int64``, receives those of its steps."""
        made = [make(arrays) for make in self.makers]
        try:
            state = self.free.pop()
        except IndexError:
            state = _State(self.caller.run(), self.arena_bytes)
        if self.threads is not None:
            state.run.threads = self.threads()
        arguments, results = self.arguments(*map(id, arrays)), self.results(*map(id, made))
        if times is not None:
            state.run.times = ctypes.addressof(times)
        self.call(arguments, results, state.address, state.pointer)
        if times is not None:
            state.run.times = None
        if not self.free:
            self.free.append(state)
        for n, first in self.repeated:
            made[n] = made[first].copy()
        return tuple(made)


class _State:
    """State of a call besides its arguments: an arena and the run."""

    __slots__ = ("address", "arena", "pointer", "run")

    def __init__(self, run: Run, arena_bytes: int):
        self.run, self.pointer = run, ctypes.byref(run)
        self.arena = aligned(arena_bytes)
        self.address = address_of(self.arena)


def aligned(nbytes: int) -> np.ndarray:
    """Bytes aligned to 64."""
    raw = np.empty(nbytes + 64, np.uint8)
    start = -address_of(raw) % 64
    return raw[start : start + nbytes]


def address_of(x: np.ndarray) -> int:
    """Address of an array's first element."""
    return x.__array_interface__["data"][0]


def _maker(made: Schedule, o: Literal | int) -> Callable[[list[np.ndarray]], np.ndarray]:
    """From the arguments to the array of a result, before the program runs."""
    if isinstance(o, Literal):
        value = np.asarray(o.array)
        return lambda arguments: np.array(value)
    if o in made.inputs:
        which = made.inputs.index(o)
        return lambda arguments: np.array(arguments[which], order="C")
    place, aval = made.place(o), made.values[o].aval  # type: ignore[union-attr]
    assert place is not None
    shape, dtype = aval.shape, aval.dtype
    if place.space == "output":
        return lambda arguments: np.empty(shape, dtype)
    which = made.inputs.index(place.owner)  # a donated argument, whose memory the result takes
    given = made.values[place.owner].aval  # type: ignore[union-attr]
    if given.shape == shape and given.dtype == dtype:
        return lambda arguments: arguments[which]
    return lambda arguments: arguments[which].reshape(-1).view(np.uint8).view(dtype).reshape(shape)


class _Arrays:
    """Arrays of one shape and dtype over raw memory; recent ones are kept."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype):
        self.shape, self.dtype = shape, dtype
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.local = threading.local()

    def __call__(self, address: int) -> np.ndarray:
        known: dict[int, np.ndarray] = self.local.__dict__.setdefault("arrays", {})
        found = known.get(address)
        if found is None:
            if len(known) > 64:
                known.clear()
            raw = (ctypes.c_uint8 * self.nbytes).from_address(address)
            found = known[address] = np.ndarray(self.shape, self.dtype, raw)  # type: ignore[arg-type]
        return found
