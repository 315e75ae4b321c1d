"""Facts of a run: what its checkpoints say of it, as dataclasses.

Precedes training. In: the JSON facts that ``io.Checkpointer`` saved with the arrays. Out: the settings and losses of
the run that saved them, or an error if another version wrote them.
"""

from __future__ import annotations

import contextlib
import errno
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blufunc.errors import DataError


def fact(facts: Any, name: str, kind: type, where: Path) -> Any:
    """The fact of this name, as the dataclass that it was saved from.

    Args:
      where: of the checkpoint, for messages.
    """
    found = facts.get(name) if isinstance(facts, dict) else None
    wanted = typing.get_type_hints(kind)
    if not isinstance(found, dict):
        raise another_version(where, f"its facts have no {name}")
    both = (("lacks", wanted.keys() - found.keys()), ("also has", found.keys() - wanted.keys()))
    if differences := ", and ".join(f"{verb} {', '.join(sorted(keys))}" for verb, keys in both if keys):
        raise another_version(where, f"{name} in its facts {differences}")
    for key, hint in wanted.items():
        if not isinstance(found[key], typing.get_origin(hint) if typing.get_origin(hint) is list else hint):
            raise another_version(where, f"{name} in its facts has {found[key]!r} for {key}")
    return kind(**found)


def another_version(where: Path, why: str) -> DataError:
    return DataError(
        f"{where} was written by another version of this program",
        where=str(where),
        why=why,
        fix="continue it with the version that wrote it, or start a new run: --anew",
    )


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make the folder; turn a failure to write there into an error that explains it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise DataError(
            f"cannot write to {folder}",
            where=str(folder),
            why=str(error),
            fix=f"{'free some of the disk, or ' * full}choose another folder: --out DIR",
        ) from error
