"""Plan cache on disk: a program is planned once for all processes that run it.

Kernels, around stages 5 to 7: ``backends/cuda/program.py`` and ``backends/cpu/program.py`` ask here before they plan.
In: a simplified jaxpr, the other inputs of planning, and a function that plans. Out: the function's result, from this
process or an earlier one. Plans are in the folder of compiled kernels (``disk.py``), each under a hash of

- the program's fingerprint (``fingerprint.py``), with the user's lines, which labels and errors name;
- the caller's parts: the device's kind and limits, donation, the budget;
- all flags of ``config`` that change plans, the sources of blufunc, and the versions of Python and NumPy.

So entries never get stale. The key does not cover changes that a process makes in blufunc itself, such as a module's
constant: switch ``config.plan_cache`` off for these. A program with a part that has no fingerprint, such as a user's
primitive or a callback, is planned in every process; ``explain`` and ``BLUFUNC_DEBUG=cache`` say so.

Entries are pickles, and loading one runs code: none is loaded from a folder that other users own or may write to
(``DiskCache.distrusted``), and loading only builds classes and functions that plans consist of.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import io
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from blufunc._began import BEGAN
from blufunc.config import config
from blufunc.core.arrays import backend
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal
from blufunc.core.ir.trace import state
from blufunc.core.primitives.override import override
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.programs.alternatives import is_as_written
from blufunc.kernels.cache import fingerprint
from blufunc.kernels.cache.disk import DiskCache, default_folder, key_of
from blufunc.kernels.cache.fingerprint import Fingerprint, NoFingerprint
from blufunc.kernels.loopir.index import Index
from blufunc.kernels.loopir.ir import Kernel, Value, post_order
from blufunc.kernels.schedule import uncollected

T = TypeVar("T")

WORTH = 32
"""Minimum equations of a cached plan: planning fewer is as fast as reading a file."""

_CHANGES_NO_PLAN = frozenset(("debug", "check", "plan_cache", "simulated_network"))
"""Flags that are not in the key."""

_PROTOCOL = 5


def kept(jaxpr: Jaxpr, parts: Sequence[str], make: Callable[[], T], kind: type[T]) -> T:
    """``make()``, or its result in an earlier process for the same program.

    If the cache fails in any way, the program is planned.

    Args:
      jaxpr: simplified, without constants: the program that ``make`` plans.
      parts: the other inputs of ``make``, except ``config``, as text.
      make: plans the program.
      kind: the class of its result.
    """
    begin = time.perf_counter()
    reason = _why_not_asked(jaxpr)
    if reason is not None:
        if reason:
            _say(jaxpr, f"is not kept: {reason}")
        return make()
    identity = _fingerprint(jaxpr)
    assert isinstance(identity, Fingerprint)
    disk, key = _disk(default_folder()), key_of("plan", *_surroundings(), *parts, identity.digest)
    try:
        binary = disk.get(key)
        found = None if binary is None else load(binary, identity.codes, kind)
    except Exception as e:
        found = None
        _say(jaxpr, f"on disk cannot be read: {_reason(e)}")
    if found is not None:
        _say(jaxpr, f"was found on disk, in {1e3 * (time.perf_counter() - begin):.0f} ms")
        return found
    plan = make()
    reason = why_not(jaxpr) or _put(disk, key, plan, jaxpr, identity)
    if reason:
        _say(jaxpr, f"is not kept: {reason}")
    return plan


def _put(disk: DiskCache, key: str, plan: Any, jaxpr: Jaxpr, identity: Fingerprint) -> str:
    """Store a plan; the reason if it is not stored, else empty."""
    try:
        binary = dump(plan, identity.codes)
        if disk.put(key, binary, f"a plan of {_name(jaxpr)}, {len(jaxpr.eqns)} equations\n", ".plan") is None:
            return disk.refused
    except Exception as e:
        return _undumped.setdefault(identity.digest, _reason(e))
    _say(jaxpr, f"is kept, in {len(binary):,} bytes")
    return ""


_undumped: dict[str, str] = {}
"""Errors of plans that could not be pickled, by digest: they are not retried."""


def why_not(jaxpr: Jaxpr) -> str | None:
    """The reason that plans of a program are not cached, as far as this process knows.

    Empty if there is nothing to report; None if they are cached.
    """
    reason = _why_not_asked(jaxpr)
    if reason is not None:
        return reason
    identity = _fingerprint(jaxpr)
    assert isinstance(identity, Fingerprint)
    return _disk(default_folder()).refused or _undumped.get(identity.digest)


def _why_not_asked(jaxpr: Jaxpr) -> str | None:
    """The reason that plans are not even looked up, as in ``why_not``."""
    if not config.plan_cache or len(jaxpr.eqns) < WORTH:
        return ""
    if any(isinstance(c, override) for c in state.context):  # other contexts do not affect a traced program
        return "rules of operations are replaced where it is compiled"
    if is_as_written():
        return "nothing is to be recognised where it is compiled"
    if not _sources():
        return "blufunc's sources cannot be read, or have changed since this process began"
    try:
        reason = _disk(default_folder()).distrusted()
    except RuntimeError as e:  # ``~user`` of an unknown user
        reason = _reason(e)
    if reason:
        return reason
    found = _fingerprint(jaxpr)
    return found if isinstance(found, str) else None


def _reason(e: Exception) -> str:
    return str(e) if isinstance(e, NoFingerprint) else f"{type(e).__name__}: {e}"


def _fingerprint(jaxpr: Jaxpr) -> Fingerprint | str:
    """The fingerprint of a program, or why it has none."""

    def spell() -> Fingerprint | str:
        try:
            return Fingerprint(jaxpr)
        except Exception as e:  # any error: the program must still run
            return _reason(e)

    return jaxpr.memoised("spelling", spell)


def _name(jaxpr: Jaxpr) -> str:
    return jaxpr.name or "a program"


def _say(jaxpr: Jaxpr, what: str) -> None:
    if config.shows("cache"):
        config.show(f"cache: the plan of {_name(jaxpr)} {what}")


@functools.cache
def _disk(folder: Path | None) -> DiskCache:
    return DiskCache(folder)


# -- other inputs of planning ----------------------------------------------------------------------


def _surroundings() -> tuple[str, ...]:
    flags = [(f.name, getattr(config, f.name)) for f in fields(config) if f.name not in _CHANGES_NO_PLAN]
    return sys.version, np.__version__, ml_dtypes.__version__, _sources(), repr(flags)


@functools.cache
def _sources() -> str:
    """A hash of blufunc's sources; empty if unreadable, or changed since the start."""
    found = hashlib.sha256()
    newest, root = 0.0, str(Path(__file__).parents[2])
    try:
        for path in sorted(_files(root)):
            with open(path, "rb") as f:
                text = f.read()
                status = os.fstat(f.fileno())
            # a copy may have its original's mtime, but its ctime is that of the copy
            newest = max(newest, status.st_mtime, status.st_ctime)
            found.update(f"{path.removeprefix(root)}\0{len(text)}\0".encode())
            found.update(text)
    except OSError:  # it is imported from an archive
        return ""
    return found.hexdigest() if newest <= BEGAN else ""


def _files(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):  # an editor's lock, which may point to no file
                continue
            if entry.name.endswith((".py", ".pyc", ".h", ".cuh")):
                yield entry.path
            elif entry.is_dir() and entry.name != "__pycache__":
                yield from _files(entry.path)


# -- pickles ---------------------------------------------------------------------------------------


@uncollected()
def dump(plan: Any, codes: Sequence[CodeType]) -> bytes:
    """A plan as bytes.

    Args:
      plan: the plan.
      codes: the code objects of the user's lines, which are pickled by position. An equation of a definition that was
        traced while planning may have a line of another caller: it is pickled without a line.

    Raises:
      NoFingerprint: it has a primitive without a global name, or a code object that is not in ``codes``, which would
        pickle the strings of its file.
    """
    numbers = {id(c): n for n, c in enumerate(codes)}

    def reduce_code(code: CodeType) -> tuple:
        number = numbers.get(id(code))
        if number is None:
            raise NoFingerprint(f"its plan has a line of {code.co_name}, which the program has not")
        return _code, (number,)

    def reduce_eqn(eqn: Eqn) -> tuple:
        line = eqn.source if eqn.source is not None and id(eqn.source[0]) in numbers else None
        params = {k: v if fingerprint.is_read(eqn.prim, k, v) else None for k, v in eqn.params.items()}
        return Eqn, (eqn.prim, eqn.invars, eqn.outvars, params, line)

    out = io.BytesIO()
    pickler = pickle.Pickler(out, _PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | _reducers() | {CodeType: reduce_code, Eqn: reduce_eqn}
    pickler.dump(plan)
    return out.getvalue()


@uncollected()
def load(binary: bytes, codes: Sequence[CodeType], kind: type[T]) -> T:
    """The plan that ``dump`` pickled, with these code objects.

    Raises:
      UnpicklingError: it contains other classes or functions than plans do, or is not of class ``kind``.
    """
    found = _Unpickler(io.BytesIO(binary), codes).load()
    if type(found) is not kind:
        raise pickle.UnpicklingError(f"a {type(found).__name__} instead of a {kind.__name__}")
    return found


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, codes: Sequence[CodeType]):
        super().__init__(file)
        self._codes = codes

    def find_class(self, module: str, name: str) -> Any:
        if name == "_code" and module == __name__:
            return self._codes.__getitem__
        if name in _BUILTINS if module == "builtins" else _is_of_plans(module):
            found = super().find_class(module, name)
            # only a module's own names: else ``os.system`` is reachable through modules that import ``os``
            if _is_of_plans(getattr(found, "__module__", module)) and not isinstance(found, ModuleType):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is in no plan")


_PACKAGES = frozenset(("blufunc", "numpy", "ml_dtypes", "copyreg", "functools", "builtins"))
_BUILTINS = frozenset((
    "bool", "bytearray", "bytes", "complex", "dict", "Ellipsis", "float", "frozenset", "int", "list", "object",
    "range", "set", "slice", "str", "tuple",
))  # fmt: skip
"""Names of builtins in pickles of plans."""


def _is_of_plans(module: str) -> bool:
    return module.partition(".")[0] in _PACKAGES


def _code(number: int) -> CodeType:
    """Stands in pickles for the lookup that ``_Unpickler`` provides."""
    raise AssertionError("plans are loaded by load")


def _literal(value: np.ndarray, weak: bool) -> Literal:
    return Literal(from_numpy(value, backend.host_device(), weak))


def _kernel(values: list[Value], *parts: Any) -> Kernel:
    return Kernel(*parts)


def _dtype_parts(d: np.dtype) -> Any:
    return (dtypes.named, (dtypes.short_name(d),)) if d in dtypes.ALL else d.__reduce__()


def _jaxpr_parts(j: Jaxpr) -> tuple:
    return Jaxpr, (j.invars, j.eqns, j.outvars, j.constvars, j.consts, j.name, j.arg_names)


def _classes(cls: type) -> Iterator[type]:
    """A class and all its subclasses."""
    yield cls
    for derived in cls.__subclasses__():
        yield from _classes(derived)


def _kernel_parts(k: Kernel) -> tuple:
    # values after their operands: pickling deep graphs would recurse too deeply otherwise
    return _kernel, (post_order(k.roots()), k.name, k.buffers, k.grid, k.body, k.notes, k.finish, k.over)


def _reducers() -> dict[type, Callable[[Any], Any]]:
    """How to pickle objects with per-process memos and hashes, and shared singletons."""
    return {
        **dict.fromkeys(_classes(Primitive), lambda p: (fingerprint.primitive, (fingerprint.name_of(p),))),
        **dict.fromkeys(map(type, dtypes.ALL), _dtype_parts),
        Jaxpr: _jaxpr_parts,
        Kernel: _kernel_parts,
        Literal: lambda a: (_literal, (np.asarray(a.array), a.aval.weak_type)),
        Value: lambda v: (Value, (v.op, v.args, v.attr, v.dtype)),
        Index: lambda i: (Index, (i.terms, i.constant)),
    }
