"""The token of a job, without which its store answers no message.

Parallel, before stage 3. In: the environment. Out: the launcher's token, ``BLUFUNC_TOKEN``; or, in jobs that another
launcher has started, one that is derived from a secret of the user. The secret is a file that only its user can read,
in the cache folder: processes of this user have it on every host that shares the folder, and no other user has.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

from blufunc import errors
from blufunc.kernels.cache.disk import DiskCache

VARIABLE = "BLUFUNC_TOKEN"

_FILE = "job-secret"
_FIX = f"export {VARIABLE}=$(openssl rand -hex 32), the same for all ranks"


def made() -> str:
    """A token for a new job."""
    return secrets.token_hex(32)


def of_job(environ: Mapping[str, str], size: int, port: int, *, hosted: bool) -> str:
    """The token of this process's job.

    Args:
      size: the number of processes.
      port: of the store.
      hosted: True if a launcher runs the store.
    Raises:
      ArgumentError: there is none, and the user's secret cannot be kept safely.
    """
    if given := environ.get(VARIABLE):
        return given
    if hosted:
        raise errors.ArgumentError(
            f"BLUFUNC_STORE names the store of a launcher, and {VARIABLE} is missing.",
            fix=f"pass {VARIABLE} on to the ranks, or unset BLUFUNC_STORE",
        )
    if size == 1:
        return made()  # no other process needs it
    return hmac.new(_secret().encode(), f"job at {port}".encode(), hashlib.sha256).hexdigest()


def _secret() -> str:
    """The user's secret, made by the first process that asks."""
    cache = DiskCache()
    if cache.folder is None or (why := cache.distrusted()):
        reason = "there is no home folder" if cache.folder is None else why
        raise errors.ArgumentError(f"this job has no token: {reason}.", fix=_FIX)
    path = cache.folder / _FILE
    try:
        if not path.exists():
            _make(path)
        with path.open() as file:
            found = os.fstat(file.fileno())
            text = file.read()
    except OSError as e:
        raise errors.ArgumentError(
            f"this job has no token: {path} cannot be used: {e.strerror or e}.", fix=_FIX
        ) from e
    if hasattr(os, "geteuid") and (found.st_uid != os.geteuid() or found.st_mode & 0o077):
        raise errors.ArgumentError(
            f"this job has no token: others can read {path}.", fix=f"remove it; or {_FIX}"
        )
    return text


def _make(path: Path) -> None:
    """Write a new secret, unless another process is first."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(
        dir=path.parent, prefix="blufunc-", suffix=".tmp"
    )  # for this user alone
    try:
        with os.fdopen(handle, "w") as file:
            file.write(made())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
