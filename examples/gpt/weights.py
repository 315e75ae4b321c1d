"""Files: pytrees of arrays as safetensors, written atomically.

Used by the training loop. In: a pytree and a few facts about it. Out: one file, in which every array has its key path
as its name (``blocks.0.mlp.up.weight``), and the header has the facts as JSON. Reading fills a tree of known shapes,
and reports the differences if the file belongs to another model.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import typing
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

import blufunc.numpy as bnp
from blufunc import tree
from blufunc.errors import DataError

FACTS = "blufunc.gpt"  # key of the facts in the header's metadata


def save(path: Path, values: Any, facts: dict) -> None:
    """Write the arrays of a pytree to ``path``, all or nothing.

    The bytes go to a temporary file next to it, reach the disk, and only then take the name. A run that is killed
    half-way leaves the previous file intact.
    """
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in _named_leaves(values)}
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    with writing(path.parent):
        try:
            with unfinished.open("wb") as file:
                file.write(safetensors.numpy.save(arrays, metadata={FACTS: json.dumps(facts)}))
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the name must reach the disk too, where the file system allows it
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make the folder; turn a failure to write there into an error that explains it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"cannot write to {folder}",
            where=str(folder),
            why=str(error),
            fix=_way_out(error),
        ) from error


def _way_out(error: Exception) -> str:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "a file is in the way: choose a folder: --out DIR"
    code = getattr(error, "errno", None)
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a folder that you may write to: --out DIR"
    if code in (errno.ENOSPC, errno.EDQUOT):
        return "free some of the disk, or choose a folder on another one: --out DIR"
    return "choose another folder: --out DIR"


def load(path: Path, like: Any) -> Any:
    """Read a pytree with the structure, shapes and dtypes of ``like``."""
    facts(path)  # this reports a broken file
    arrays = safetensors.numpy.load_file(path)
    wanted = dict(_named_leaves(like))
    _check(path, found=arrays, wanted=wanted)
    return tree.map_with_path(lambda where, _: bnp.asarray(arrays[_name(where)]), like)


def facts(path: Path) -> dict:
    """Facts saved with the arrays. Reads only the header."""
    if not path.is_file():
        raise DataError(f"there is no {path}", where=str(path), fix="name the folder of a run, or its file")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path} is not a whole safetensors file",
            where=str(path),
            why=str(error),
            fix="it may be cut short by a copy or download: fetch it again",
        ) from error
    if FACTS not in metadata:
        raise DataError(
            f"{path} was not written by this program",
            where=str(path),
            why=f"its header has no {FACTS!r}",
            fix="name a file that examples.gpt wrote",
        )
    try:
        found = json.loads(metadata[FACTS])
    except ValueError as error:
        raise another_version(path, f"{FACTS!r} in its header is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise another_version(path, f"{FACTS!r} in its header is {found!r}, not named facts")
    return found


def fact(path: Path, name: str, kind: type) -> Any:
    """The fact of this name, as the dataclass that it was saved from."""
    found, wanted = facts(path).get(name), typing.get_type_hints(kind)
    if not isinstance(found, dict):
        raise another_version(path, f"its header has no {name}")
    if differences := _differences(found.keys(), wanted.keys()):
        raise another_version(path, f"{name} in its header {differences}")
    for key, hint in wanted.items():
        if not isinstance(found[key], typing.get_origin(hint) if typing.get_origin(hint) is list else hint):
            raise another_version(path, f"{name} in its header has {found[key]!r} for {key}")
    return kind(**found)


def another_version(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is damaged, or was written by another version of this program",
        where=str(path),
        why=why,
        fix="continue it with the version that wrote it, or start a new run: leave out --resume",
    )


def _named_leaves(values: Any) -> list[tuple[str, Any]]:
    leaves, _ = tree.flatten_with_path(values)
    return [(_name(where), leaf) for where, leaf in leaves]


def _name(where) -> str:
    return tree.keystr(where, simple=True, separator=".")


def _check(path: Path, found: dict, wanted: dict) -> None:
    fix = "give the --preset and --vocab that the file was made with, or neither: --resume knows them"
    for name, leaf in wanted.items():
        if name in found and found[name].shape != tuple(leaf.shape):
            raise DataError(
                f"{path} is of a model of another size",
                where=str(path),
                why=f"{name} has shape {found[name].shape} in the file and {tuple(leaf.shape)} in this run",
                fix=fix,
            )
        if name in found and found[name].dtype != np.dtype(leaf.dtype):
            raise DataError(
                f"{path} holds numbers of another dtype",
                where=str(path),
                why=f"{name} is {found[name].dtype} in the file and {np.dtype(leaf.dtype)} in this run",
                fix=fix,
            )
    if differences := _differences(found.keys(), wanted.keys()):
        raise DataError(
            f"{path} holds another set of arrays than this run needs",
            where=str(path),
            why=f"it {differences}",
            fix="continue from the checkpoint.safetensors of the same model"
            if wanted.keys() - found
            else fix,
        )


def _differences(found: Set[str], wanted: Set[str]) -> str:
    both = (("lacks", sorted(wanted - found)), ("also has", sorted(found - wanted)))
    return ", and ".join(f"{verb} {_some(names)}" for verb, names in both if names)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
