"""The files: pytrees of arrays as safetensors, written so that a good file is never lost.

Stands beside the training loop. In: a pytree and a few facts about it. Out: one file, in which every array
bears the name of its place in the tree (``blocks.0.mlp.up.weight``), and the header has the facts as JSON.
The way back fills a tree of known shapes, and says exactly what differs when the file is of another model.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

import blufunc.numpy as bnp
from blufunc import tree
from blufunc.errors import DataError

FACTS = "blufunc.gpt"  # the key of our facts among the header's metadata


def save(path: Path, values: Any, facts: dict) -> None:
    """Write the arrays of a pytree to ``path``, all or nothing.

    The bytes go to a file beside it, reach the disk, and only then take the name. A run that is killed
    half-way leaves the file of that name as it was.
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


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make the folder, and turn what stops us from writing there into an error that says so."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"cannot write to {folder}",
            where=str(folder),
            why=str(error),
            fix="check the disk's free space and your permission, or choose another folder: --out DIR",
        ) from error


def load(path: Path, like: Any) -> Any:
    """The pytree in ``path``, of the structure, shapes and dtypes that ``like`` has (see ``eval_shape``)."""
    facts(path)  # a broken file is reported there
    arrays = safetensors.numpy.load_file(path)
    wanted = dict(_named_leaves(like))
    _check(path, found=arrays, wanted=wanted)
    return tree.map_with_path(lambda where, _: bnp.asarray(arrays[_name(where)]), like)


def facts(path: Path) -> dict:
    """The facts that were saved with the arrays. Reads the header only."""
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
    return json.loads(metadata[FACTS])


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
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or extra:
        both = (("lacks", missing), ("also has", extra))
        lists = [f"{verb} {_some(names)}" for verb, names in both if names]
        raise DataError(
            f"{path} holds another set of arrays than this run needs",
            where=str(path),
            why="it " + ", and ".join(lists),
            fix="continue from the checkpoint.safetensors of the same model" if missing else fix,
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
