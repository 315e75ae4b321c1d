"""Plans on disk: what planning made of a program serves every later process that has the same program.

Kernels, around stages 5 to 7: ``backends/cuda/program.py`` and ``backends/cpu/program.py`` ask here before they plan.
In: a simplified jaxpr, what else planning reads, and a function that plans. Out: what that function returned, in this
  process or in
an earlier one. Plans lie in the folder of compiled kernels (``disk.py``: locking, sizes, what is cut short), each
under a hash of

- the program's spelling (``fingerprint.py``), with the user's lines, which labels and errors name;
- what the caller names: the device's kind and limits, what is donated, the budget;
- all flags of ``config`` that change plans, the sources of blufunc, and the versions of Python and NumPy.

So an entry is never out of date, but only found no more. What a process changes in blufunc itself, as a constant of a
module, is not in the key: who does so must switch ``config.plan_cache`` off. A program that has something without a
text, such as a user's primitive or a callback, is planned in every process; ``explain`` and ``BLUFUNC_DEBUG=cache`` say
so.

Entries are pickles, and loading one runs what it says: none is loaded from a folder that others own or may write
(``DiskCache.distrusted``), and what is loaded is made of the classes and functions that plans have, and of no others.
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
from blufunc.kernels.cache.fingerprint import Spelling, Unspelled
from blufunc.kernels.loopir.index import Index
from blufunc.kernels.loopir.ir import Kernel, Value, post_order
from blufunc.kernels.schedule import uncollected

T = TypeVar("T")

WORTH = 32
"""From how many equations on a plan is kept: fewer are planned as quickly as a file is read."""

_CHANGES_NO_PLAN = frozenset(("debug", "check", "plan_cache"))
"""Flags that are not in the key."""

_PROTOCOL = 5


def kept(jaxpr: Jaxpr, parts: Sequence[str], make: Callable[[], T], kind: type[T]) -> T:
    """``make()``, or what it returned in an earlier process for the same program.

    Whatever goes wrong here, the program is planned.

    Args:
      jaxpr: simplified, without constants: what ``make`` plans.
      parts: what else it reads, beside ``config``, as text.
      kind: the class of what it returns.
    """
    begin = time.perf_counter()
    reason = _why_not_asked(jaxpr)
    if reason is not None:
        if reason:
            _say(jaxpr, f"is not kept: {reason}")
        return make()
    spelled = _spelled(jaxpr)
    assert isinstance(spelled, Spelling)
    disk, key = _disk(default_folder()), key_of("plan", *_surroundings(), *parts, spelled.digest)
    try:
        binary = disk.get(key)
        found = None if binary is None else load(binary, spelled.codes, kind)
    except Exception as e:
        found = None
        _say(jaxpr, f"on disk cannot be read: {_told(e)}")
    if found is not None:
        _say(jaxpr, f"was found on disk, in {1e3 * (time.perf_counter() - begin):.0f} ms")
        return found
    made = make()
    reason = why_not(jaxpr) or _put(disk, key, made, jaxpr, spelled)
    if reason:
        _say(jaxpr, f"is not kept: {reason}")
    return made


def _put(disk: DiskCache, key: str, made: Any, jaxpr: Jaxpr, spelled: Spelling) -> str:
    """Keep a plan; why it is not kept, if it is not."""
    try:
        binary = dump(made, spelled.codes)
        if disk.put(key, binary, f"a plan of {_name(jaxpr)}, {len(jaxpr.eqns)} equations\n", ".plan") is None:
            return disk.refused
    except Exception as e:
        return _undumped.setdefault(spelled.digest, _told(e))
    _say(jaxpr, f"is kept, in {len(binary):,} bytes")
    return ""


_undumped: dict[str, str] = {}
"""Why plans could not be written, by the digests of their programs: they are not tried again, and ``explain`` tells."""


def why_not(jaxpr: Jaxpr) -> str | None:
    """Why plans of a program are not kept, as far as this process knows: empty if there is nothing to tell; None if
    they are.
    """
    reason = _why_not_asked(jaxpr)
    if reason is not None:
        return reason
    spelled = _spelled(jaxpr)
    assert isinstance(spelled, Spelling)
    return _disk(default_folder()).refused or _undumped.get(spelled.digest)


def _why_not_asked(jaxpr: Jaxpr) -> str | None:
    """Why plans of a program are not even looked for, as ``why_not`` has it."""
    if not config.plan_cache or len(jaxpr.eqns) < WORTH:
        return ""
    if any(isinstance(c, override) for c in state.context):  # other contexts are no part of a traced program
        return "rules of operations are replaced where it is compiled"
    if is_as_written():
        return "nothing is to be recognised where it is compiled"
    if not _sources():
        return "blufunc's sources cannot be read, or have changed since this process began"
    try:
        reason = _disk(default_folder()).distrusted()
    except RuntimeError as e:  # a folder of a user that there is not
        reason = _told(e)
    if reason:
        return reason
    found = _spelled(jaxpr)
    return found if isinstance(found, str) else None


def _told(e: Exception) -> str:
    return str(e) if isinstance(e, Unspelled) else f"{type(e).__name__}: {e}"


def _spelled(jaxpr: Jaxpr) -> Spelling | str:
    """The spelling of a program, or why it has none."""

    def spell() -> Spelling | str:
        try:
            return Spelling(jaxpr)
        except Exception as e:  # of any class: the program is there, and runs
            return _told(e)

    return jaxpr.memoised("spelling", spell)


def _name(jaxpr: Jaxpr) -> str:
    return jaxpr.name or "a program"


def _say(jaxpr: Jaxpr, what: str) -> None:
    if config.shows("cache"):
        config.show(f"cache: the plan of {_name(jaxpr)} {what}")


@functools.cache
def _disk(folder: Path | None) -> DiskCache:
    return DiskCache(folder)


# -- what planning reads besides the program -------------------------------------------------------


def _surroundings() -> tuple[str, ...]:
    flags = [(f.name, getattr(config, f.name)) for f in fields(config) if f.name not in _CHANGES_NO_PLAN]
    return sys.version, np.__version__, ml_dtypes.__version__, _sources(), repr(flags)


@functools.cache
def _sources() -> str:
    """A hash of all of blufunc's sources; empty if they are not there, or not those that this process runs."""
    found = hashlib.sha256()
    newest, root = 0.0, str(Path(__file__).parents[2])
    try:
        for path in sorted(_files(root)):
            with open(path, "rb") as f:
                text = f.read()
                status = os.fstat(f.fileno())
            # a copy may have the time of its original, but became this file when it was copied
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
def dump(made: Any, codes: Sequence[CodeType]) -> bytes:
    """A plan as bytes.

    Args:
      codes: the code objects of the user's lines: of these the numbers are written. An equation of a definition that
        was traced while planning may have a line of whoever called: it is written without.
    Raises:
      Unspelled: it has a primitive that has no name, or other code: written whole, that has the strings of its file.
    """
    numbers = {id(c): n for n, c in enumerate(codes)}

    def reduce_code(code: CodeType) -> tuple:
        number = numbers.get(id(code))
        if number is None:
            raise Unspelled(f"its plan has a line of {code.co_name}, which the program has not")
        return _code, (number,)

    def reduce_eqn(eqn: Eqn) -> tuple:
        line = eqn.source if eqn.source is not None and id(eqn.source[0]) in numbers else None
        params = {k: v if fingerprint.is_read(eqn.prim, k, v) else None for k, v in eqn.params.items()}
        return Eqn, (eqn.prim, eqn.invars, eqn.outvars, params, line)

    out = io.BytesIO()
    pickler = pickle.Pickler(out, _PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | _reducers() | {CodeType: reduce_code, Eqn: reduce_eqn}
    pickler.dump(made)
    return out.getvalue()


@uncollected()
def load(binary: bytes, codes: Sequence[CodeType], kind: type[T]) -> T:
    """The plan that ``dump`` made bytes of, with these code objects in the place of those.

    Raises:
      UnpicklingError: it has what no plan has, or is none of this class.
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
            # a module's own, not what it imports: else ``os.system`` is in all of ours that import ``os``
            if _is_of_plans(getattr(found, "__module__", module)) and not isinstance(found, ModuleType):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is in no plan")


_PACKAGES = frozenset(("blufunc", "numpy", "ml_dtypes", "copyreg", "functools", "builtins"))
_BUILTINS = frozenset((
    "bool", "bytearray", "bytes", "complex", "dict", "Ellipsis", "float", "frozenset", "int", "list", "object",
    "range", "set", "slice", "str", "tuple",
))  # fmt: skip
"""What there is in pickles of plans by name."""


def _is_of_plans(module: str) -> bool:
    return module.partition(".")[0] in _PACKAGES


def _code(number: int) -> CodeType:
    """Stands in pickles for what ``_Unpickler`` is given."""
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
    """A class and all that are derived from it."""
    yield cls
    for derived in cls.__subclasses__():
        yield from _classes(derived)


def _kernel_parts(k: Kernel) -> tuple:
    # values after those that they are made of: else, what is deep would be gone into deeply
    return _kernel, (post_order(k.roots()), k.name, k.buffers, k.grid, k.body, k.notes, k.finish, k.over)


def _reducers() -> dict[type, Callable[[Any], Any]]:
    """How to pickle what is not as it seems: memos and hashes are of a process, and many objects there are one."""
    return {
        **dict.fromkeys(_classes(Primitive), lambda p: (fingerprint.primitive, (fingerprint.name_of(p),))),
        **dict.fromkeys(map(type, dtypes.ALL), _dtype_parts),
        Jaxpr: _jaxpr_parts,
        Kernel: _kernel_parts,
        Literal: lambda a: (_literal, (np.asarray(a.array), a.aval.weak_type)),
        Value: lambda v: (Value, (v.op, v.args, v.attr, v.dtype)),
        Index: lambda i: (Index, (i.terms, i.constant)),
    }
