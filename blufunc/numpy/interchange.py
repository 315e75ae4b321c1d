"""Arrays from other libraries, bytes and files; files of arrays; printing.

Face at both ends of a program. Files are NumPy's. What states its dtype (a file, an array of another library, an
explicit ``dtype=``) keeps it; what does not becomes 32-bit, as everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import ConcreteArray, from_numpy
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.trace import Array
from blufunc.core.ops import foreign
from blufunc.numpy.creation import asarray, parse_device
from blufunc.numpy.promotion import as_value, static_int

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike

get_printoptions, printoptions, set_printoptions = np.get_printoptions, np.printoptions, np.set_printoptions


def from_dlpack(x: ArrayLike, /, *, device: Any = None, copy: bool | None = None) -> Array:
    """An array of another library, through the DLPack protocol, in its own dtype.

    The result is on the device of ``x``, unless ``device`` says otherwise, and shares its memory, which the owner must
    not write to from then on. ``copy=True`` makes it independent. With ``copy=False`` it is an error if the values have
    to be copied, because they move or are not dense in row-major order.
    """
    if isinstance(x, Array):
        return asarray(x, copy=copy, device=device)
    if not hasattr(x, "__dlpack__"):
        raise errors.ArgumentError(
            f"from_dlpack takes an array that has __dlpack__, not a {type(x).__name__}.",
            where=source.here(),
            fix="bnp.asarray(x)",
        )
    return foreign.imported(x, None, parse_device(device), copy)


def _held(host: np.ndarray, name: str) -> np.ndarray:
    """The values in a dtype that arrays have, native."""
    try:
        kind = dtypes.as_dtype(host.dtype)
    except errors.DtypeError as e:
        raise errors.DtypeError(f"{name}: {e.what}", where=source.here(), fix=e.fix) from None
    return host.astype(kind, copy=False)


def _read(name: str, dtype: Any, make: Any) -> Array:
    """Read with NumPy as ``dtype``, or as 32-bit floats; its errors become blufunc's."""
    kind = dtypes.as_dtype(dtype)
    try:
        host = make(kind)
    except (TypeError, ValueError, OSError, BufferError, DeprecationWarning, OverflowError) as e:
        raise errors.ArgumentError(
            f"{name}: {e}.", where=source.here(), fix="check the data and the dtype"
        ) from None
    return from_numpy(host)


def frombuffer(buffer: Any, dtype: DTypeLike = float, count: int = -1, offset: int = 0) -> Array:
    """A buffer as a vector: ``count`` elements of ``dtype`` from byte ``offset``."""
    count, offset = static_int(count, "frombuffer", "count"), static_int(offset, "frombuffer", "offset")
    return _read("frombuffer", dtype, lambda kind: np.frombuffer(buffer, kind, count, offset))


def fromfile(file: Any, dtype: DTypeLike = float, count: int = -1, sep: str = "", offset: int = 0) -> Array:
    """A file's bytes, or its text split at ``sep``, as a vector of ``dtype``."""
    if not isinstance(file, (str, bytes)) and not hasattr(file, "__fspath__") and not hasattr(file, "fileno"):
        raise errors.ArgumentError(
            f"fromfile: {file!r:.60} is not a file.", where=source.here(), fix="pass a path or an open file"
        )
    count, offset = static_int(count, "fromfile", "count"), static_int(offset, "fromfile", "offset")
    return _read("fromfile", dtype, lambda kind: np.fromfile(file, kind, count, sep, offset))


def fromiter(iter: Iterable, dtype: DTypeLike, count: int = -1) -> Array:
    """The items of an iterable as a vector of ``dtype``; the first ``count``, or all."""
    count = static_int(count, "fromiter", "count")
    return _read("fromiter", dtype, lambda kind: np.fromiter(iter, kind, count))


def fromstring(string: str, dtype: DTypeLike = float, count: int = -1, *, sep: str) -> Array:
    """Parse the numbers in a string, separated by ``sep``, as a vector."""
    if not isinstance(string, str) or not isinstance(sep, str) or not sep:
        raise errors.ArgumentError(
            "fromstring takes a text and its separator.", where=source.here(), fix="frombuffer reads bytes"
        )
    count = static_int(count, "fromstring", "count")
    parts = [p for p in (string.split() if sep.isspace() else string.split(sep)) if p.strip()]

    def make(kind: np.dtype) -> np.ndarray:
        number = complex if dtypes.is_complex(kind) else float if dtypes.is_floating(kind) else int
        return np.asarray([number(p) for p in (parts if count < 0 else parts[:count])], kind)

    if len(parts) < count:
        raise errors.ArgumentError(
            f"fromstring: {len(parts)} numbers, not {count}.", where=source.here(), fix="count=-1 takes all"
        )
    return _read("fromstring", dtype, make)


# -- files -----------------------------------------------------------------------------------------


def _host(x: Any, name: str) -> np.ndarray:
    value = as_value(x, name)
    if dtypes.is_key(value.aval.dtype):
        raise errors.DtypeError(f"{name} of {value.aval}.", where=source.here(), fix="random.key_data(k)")
    return np.asarray(value)


def _path(file: Any, name: str) -> Any:
    if (
        isinstance(file, str)
        or hasattr(file, "__fspath__")
        or hasattr(file, "write")
        or hasattr(file, "read")
    ):
        return file
    raise errors.ArgumentError(
        f"{name}: {file!r:.60} is not a file.", where=source.here(), fix="pass a path or an open file"
    )


def _written(x: Any, name: str) -> np.ndarray:
    """As ``_host``, but what is of NumPy or Python keeps its 64 bits."""
    return np.asarray(x) if isinstance(x, (np.ndarray, np.generic, int, float, complex)) else _host(x, name)


def save(file: Any, arr: ArrayLike, allow_pickle: bool = True) -> None:
    """Write an array to a ``.npy`` file.

    bfloat16 is written as two opaque bytes, which ``load`` reads as such.

    ``allow_pickle`` has no effect: arrays are never pickled.
    """
    _write(lambda: np.save(_path(file, "save"), _written(arr, "save"), allow_pickle=False), "save")


def savez(file: Any, *args: Any, allow_pickle: bool = True, **kwds: Any) -> None:
    """Write arrays to a ``.npz`` file, unnamed ones as ``arr_0``, ``arr_1``, ..."""
    path = _path(file, "savez")
    values = [_written(a, "savez") for a in args]
    named = {k: _written(v, "savez") for k, v in kwds.items()}
    _write(lambda: np.savez(path, *values, allow_pickle=False, **named), "savez")


def _write(write: Any, name: str) -> None:
    try:
        write()
    except (OSError, TypeError, ValueError) as e:
        raise errors.DataError(
            f"{name}: {e}.", where=source.here(), fix="check the path and the names"
        ) from None


def load(file: Any, mmap_mode: Any = None, allow_pickle: bool = False, **options: Any) -> Any:
    """The array of a ``.npy`` file, in its dtype, or a dict of a ``.npz`` file's.

    Raises:
      DataError: the file is missing, or of another format, or holds pickled objects.
    """
    path = _path(file, "load")
    if isinstance(path, (str, os.PathLike)) and os.path.exists(path) and not os.path.isfile(path):
        raise errors.DataError(  # to open a pipe would wait for a writer
            f"load: {os.fspath(path)!r} is no regular file.",
            where=source.here(),
            fix="write what a pipe delivers to a file first",
        )
    try:
        found = np.load(path, mmap_mode=mmap_mode, allow_pickle=allow_pickle, **options)
        if isinstance(found, np.lib.npyio.NpzFile):
            with found:
                return {name: _loaded(found[name]) for name in found.files}
    except (OSError, ValueError, EOFError, TypeError, OverflowError, MemoryError) as e:
        raise errors.DataError(
            f"load: {e}.", where=source.here(), fix="pass a .npy or .npz file that holds numbers"
        ) from None
    return _loaded(found)


def _loaded(host: np.ndarray) -> ConcreteArray:
    if host.dtype == np.dtype("V2"):  # NumPy's format does not know bfloat16
        host = host.view(dtypes.bfloat16)
    return from_numpy(_held(np.asarray(host), "load"))


# -- printing --------------------------------------------------------------------------------------


def array_repr(
    arr: Any,
    max_line_width: int | None = None,
    precision: int | None = None,
    suppress_small: bool | None = None,
) -> str:
    """``repr(arr)``, as the options, or ``printoptions``, say."""
    value = as_value(arr, "array_repr")
    with _options(max_line_width, precision, suppress_small):
        return repr(value)


def array_str(
    a: Any,
    max_line_width: int | None = None,
    precision: int | None = None,
    suppress_small: bool | None = None,
) -> str:
    """``str(a)``, as the options, or ``printoptions``, say."""
    value = as_value(a, "array_str")
    with _options(max_line_width, precision, suppress_small):
        return str(value)


def _options(width: Any, precision: Any, suppress: Any) -> Any:
    options: dict[str, Any] = {"suppress": None if suppress is None else bool(suppress)}
    for name, number in (("linewidth", width), ("precision", precision)):
        if number is not None and not 0 <= static_int(number, "array_repr", name) < 1000:
            raise errors.ValueRangeError(
                f"array_repr: {name} is {number}.", where=source.here(), fix="use 0 to 999"
            )
        options[name] = number
    return np.printoptions(**{k: v for k, v in options.items() if v is not None})
