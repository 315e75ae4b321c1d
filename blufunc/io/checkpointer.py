"""``Checkpointer``: asynchronous, sharded, verified checkpoints of a run.

A face over writing, manifests and restoring. ``save`` takes snapshots of the state and returns; a thread writes this
process's file, and in process 0 commits the checkpoint once the files of all are there, and removes old ones.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from blufunc import errors
from blufunc.core.arrays import process_info
from blufunc.core.ir import source
from blufunc.core.ir.axes import static_int
from blufunc.io import header as headers
from blufunc.io import manifest as manifests
from blufunc.io import reading, storage
from blufunc.io.leaves import Leaves, leaves_of
from blufunc.io.manifest import Entry
from blufunc.io.restoring import Source
from blufunc.io.writing import Written, write
from blufunc.parallel.runtime import bootstrap
from blufunc.parallel.runtime.store import DEADLINE

_FAILED = ".failed"
"""Ending of the file by which a process tells the others that it cannot write."""


_live: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
"""Those whose last save may be in progress."""

_unraised: dict[int, str] = {}
"""Errors of saves that no call has raised, by number of the save."""

_saves = itertools.count()


def _finish_before_exit(checkpointer: Checkpointer) -> None:
    """Let a program that ends without ``close`` wait for its last save.

    ``atexit`` is too late: executors take no work any more when its functions run.
    """
    _register()
    _live.add(checkpointer)


@functools.cache
def _register() -> None:
    threading._register_atexit(_finish)  # type: ignore[attr-defined]


def _finish() -> None:
    for checkpointer in list(_live):
        try:
            checkpointer.wait()
        except errors.BlufuncError as failed:
            sys.stderr.write(f"{failed}\n")
    for number in list(_unraised):  # of checkpointers that are gone
        _say_error(number)


@contextlib.contextmanager
def _noted(number: int) -> Iterator[None]:
    """Keep the text of an error only: its traceback would keep the state alive."""
    try:
        yield
    except BaseException as error:
        _unraised[number] = str(error)
        raise


def _clear_frames(error: BaseException | None) -> None:
    """Drop the variables of the frames that an error, or one before it, refers to."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _say_error(number: int) -> None:
    """Write the error of a save whose checkpointer was dropped."""
    if (text := _unraised.pop(number, None)) is not None:
        sys.stderr.write(f"{text}\n")


class Checkpointer:
    """The checkpoints of a run, in a folder.

    In a job of several processes all of them make one for the same folder, which they share, and call ``save`` and
    ``restore`` together. One run at a time writes to a folder.

    Args:
      folder: a path, or the URL of an object store (``pip install 'blufunc[fsspec]'``). Made by the first save.
      keep: number of checkpoints to keep, the latest ones; None keeps all.
      every: ``save`` takes steps that this divides.
      asynchronous: False makes ``save`` wait until the checkpoint is committed.
    Raises:
      ValueRangeError: ``keep`` or ``every`` is less than 1.

    Attributes:
      folder: the folder as it was given.
    """

    def __init__(self, folder: Any, *, keep: int | None = 2, every: int = 1, asynchronous: bool = True):
        for name, value in (("keep", keep), ("every", every)):
            if value is not None and static_int(value, "Checkpointer", name) < 1:
                raise errors.ValueRangeError(
                    f"Checkpointer({name}={value}).", where=source.here(), fix=f"{name} is 1 or more"
                )
        self.folder = folder
        self._folder = storage.folder_of(folder)
        self._keep, self._every, self._asynchronous = keep, every, asynchronous
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._watched: weakref.finalize | None = None  # says the error of the pending save if this is dropped
        self._lock: storage.Lock | None = None
        self._number = 0
        self._restored: Entry | None = None
        self._committed = 0

    # -- saving ----------------------------------------------------------------------------------------

    def save(self, step: int, tree: Any, *, facts: Any = None, force: bool = False) -> bool:
        """Save the state after a step, if it is one of ``every``.

        Returns as soon as the state may change: arrays may be donated, and NumPy arrays written to. One save is in
        progress at a time: this waits for the one before, and raises its error.

        Args:
          step: number of completed steps.
          tree: a pytree of arrays, NumPy arrays, numbers, strings and bytes. Of what is not sharded, and of facts,
            process 0's are saved.
          facts: anything that JSON expresses, for ``facts()``.
          force: save any step, such as the last one.
        Returns:
          True if the step is saved.
        Raises:
          ArgumentError: a leaf that no file can hold, named; or facts that are not JSON.
          DataError: this save cannot begin, or the one before failed. Earlier checkpoints are as they were.
        """
        step = static_int(step, "Checkpointer.save", "step")
        if step < 0:
            raise errors.ValueRangeError(f"save(step={step}).", where=source.here(), fix="steps count from 0")
        if step % self._every and not force:
            return False
        self.wait()
        facts = json.loads(headers.facts_text(facts))  # a copy: the caller's may change while this is written
        leaves = leaves_of(tree, together=True)
        if self._number == 0:
            self._begin()
        entry = Entry(self._number, step)
        self._number += 1
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "blufunc checkpoint")
            _finish_before_exit(self)
        save = next(_saves)
        self._pending = self._thread.submit(self._run, save, entry, [leaves], facts)
        self._watched = weakref.finalize(self, _say_error, save)
        self._watched.atexit = False  # _finish does that
        del leaves
        if not self._asynchronous:
            self.wait()
        return True

    def wait(self) -> None:
        """Wait until the save in progress is committed, in all processes.

        Raises:
          DataError: it failed. Earlier checkpoints are as they were.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            finally:
                if self._watched is not None and (found := self._watched.detach()):
                    _unraised.pop(found[2][0], None)

    def close(self) -> None:
        """Wait for the save in progress, and let another run write to the folder."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
            if self._lock is not None:
                self._lock.close()
                self._lock = None
            self._number = 0

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except errors.BlufuncError as failed:
            if error is None:
                raise
            error.add_note(f"The last checkpoint was not saved, either: {failed}")

    def _begin(self) -> None:
        """Lock the folder, and agree on the number of the next checkpoint."""

        def first() -> int:
            with storage.writing(storage.shown(self._folder.path)):
                self._folder.make()
                self._lock = self._folder.lock()
                return manifests.listing(self._folder).next_number

        self._number = _agreed("begin", first)

    def _run(self, save: int, entry: Entry, held: list[Leaves], facts: Any) -> None:
        """Write and commit a checkpoint, in the thread.

        If that fails, the error stays until a call raises it, and arrays must not stay with it.
        """
        try:
            with _noted(save):
                self._commit(entry, held.pop(), facts)
        except BaseException as error:
            _clear_frames(error)
            raise

    def _commit(self, entry: Entry, leaves: Leaves, facts: Any) -> None:
        us = process_info.current()
        inside = self._folder.below(entry.folder)
        if us.index == 0:
            with storage.writing(storage.shown(self._folder.path)):
                self._remove_remains(entry)
        try:
            with storage.writing(storage.shown(inside.path)):
                inside.make()
            written = write(inside, manifests.file_of(us.index), leaves, check=True)
            del leaves
            if us.index == 0:
                files = [written, *(_file_of_other(inside, p) for p in range(1, us.count))]
                commit = manifests.encoded(manifests.Manifest(entry.step, files, facts))
                with storage.writing(self._folder.text(entry.manifest)):
                    self._folder.write(entry.manifest, commit)
            else:
                _await(inside, lambda: self._is_settled(entry), "process 0 to commit")
        except BaseException:
            with contextlib.suppress(OSError, errors.BlufuncError):  # the first error is the one to see
                if us.count == 1:
                    manifests.discard(self._folder, entry)
                elif not _failed(inside):  # the first one is the one to name
                    inside.write(f"{us.index:05}{_FAILED}", b"")
            raise
        if us.index == 0:
            try:
                with storage.writing(storage.shown(self._folder.path)):
                    self._remove_remains(entry)  # those of processes that were late for the save before, too
                    for other in self._replaced():
                        manifests.discard(self._folder, other)
            except BaseException:
                with contextlib.suppress(OSError, errors.BlufuncError):
                    inside.write(f"{us.index:05}{_FAILED}", b"")  # the others wait for this, too
                raise
        self._committed += 1  # since the checkpoint that was restored

    def _replaced(self) -> list[Entry]:
        """Checkpoints that the one committed now replaces.

        The one that this run goes on from stays until ``keep`` newer ones are there: those after it may be damaged.
        """
        old = manifests.listing(self._folder).committed[: -self._keep] if self._keep else []
        return [e for e in old if e != self._restored or self._committed + 1 >= (self._keep or 0)]

    def _is_settled(self, entry: Entry) -> bool:
        """True if a checkpoint is committed and old ones are removed.

        All processes then have the same ``steps()``.
        """
        found = manifests.listing(self._folder)
        if entry in found.committed:
            return not self._replaced()
        if found.next_number > entry.number + 1 and entry not in manifests.listing(self._folder).committed:
            raise errors.DataError(  # process 0 has gone on, and removed what says the reason
                f"step {entry.step} was not saved: a process could not write its part",
                where=storage.shown(self._folder.path),
                why="its own error says the reason",
                fix="earlier checkpoints are as they were",
            )
        return False

    def _remove_remains(self, entry: Entry) -> None:
        """Remove what killed saves have left."""
        found = manifests.listing(self._folder)
        for name in found.parts:
            self._folder.remove(name)
        for other in found.started:
            if other.number < entry.number:
                self._folder.remove(other.folder)

    # -- restoring -------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps of the checkpoints, in the order in which they were saved."""
        return [entry.step for entry in manifests.listing(self._folder).committed]

    def latest(self) -> int | None:
        """The step that was saved last; None if there is no checkpoint."""
        found = self.steps()
        return found[-1] if found else None

    def facts(self, step: int | None = None) -> Any:
        """The facts that were saved with a step, by default the latest.

        Raises:
          DataError: there is no such checkpoint, or its manifest is damaged.
        """
        return manifests.read(self._folder, self._entry(step)).facts

    def restore(self, like: Any = None, step: int | None = None) -> Any:
        """Restore a checkpoint, by default the latest; all that is read is verified.

        Args:
          like: a pytree of the structure that was saved, whose leaves say what to make, as for ``io.load``: arrays on
            any mesh and with any sharding. Each process reads only what its devices hold. Default: a dict of NumPy
            arrays and scalars by name.
          step: a step of ``steps()``.
        Raises:
          DataError: there is no such checkpoint, it is damaged (the error names the leaf), or not like ``like``.
        """
        self.wait()

        def first() -> int:
            return self._entry(step).number

        number = _agreed("restore", first)
        entry = next(e for e in manifests.listing(self._folder).committed if e.number == number)
        path = self._folder.text(entry.folder)
        _, files = manifests.opened(self._folder, entry)
        with reading.reading(path):
            found = Source(files, path)
            made = found.flat() if like is None else found.restored(like)
        self._restored, self._committed = entry, 0
        return made

    def _entry(self, step: int | None) -> Entry:
        found = manifests.listing(self._folder).committed
        entry = next((e for e in reversed(found) if step is None or e.step == step), None)
        if entry is None:
            folder = storage.shown(self._folder.path)
            steps = ", ".join(str(e.step) for e in found)
            raise errors.DataError(
                f"there is no checkpoint in {folder}" + ("" if step is None else f" of step {step}"),
                where=folder,
                fix=f"step= one of {steps}" if found else "name the folder of a run",
            )
        return entry


# -- between processes -----------------------------------------------------------------------------


def _agreed(name: str, first: Callable[[], int]) -> int:
    """The result of ``first`` in process 0, in all processes; its error likewise.

    Raises:
      DataError: ``first`` has raised it.
    """
    world = bootstrap.world()
    if world is None or world.size == 1:
        return first()
    answer: dict[str, Any] = {}
    if world.rank == 0:
        try:
            answer = {"value": first()}
        except errors.DataError as error:
            answer = {"what": error.what, "where": error.where, "why": error.why, "fix": error.fix}
    found = json.loads(world.gather(f"checkpointer {name}", json.dumps(answer).encode())[0])
    if "what" in found:
        raise errors.DataError(found.pop("what"), **found)
    return found["value"]


def _file_of_other(inside: storage.Folder, process: int) -> Written:
    """The file of another process, once it is there."""
    name = manifests.file_of(process)
    _await(inside, lambda: name in inside.names(), f"process {process} to write {name}")
    file = reading.opened(inside, name)
    last = file.header.arrays[-1].stop if file.header.arrays else 0
    return Written(name, file.header.size + last, file.header.digest)


def _failed(inside: storage.Folder) -> list[int]:
    """The processes that could not write."""
    return [int(name[:5]) for name in inside.names() if name.endswith(_FAILED)]


def _await(inside: storage.Folder, there: Callable[[], bool], what: str) -> None:
    """Wait for another process.

    Raises:
      DataError: one has failed, or the deadline is over.
    """
    world = bootstrap.world()
    seconds = DEADLINE if world is None else world.deadline
    end, pause = time.monotonic() + seconds, 0.005
    path = storage.shown(inside.path)
    while not there():
        if failed := _failed(inside):
            raise errors.DataError(
                f"process {failed[0]} could not write its part of {path}",
                where=path,
                why="its own error says the reason",
                fix="earlier checkpoints are as they were",
            )
        if time.monotonic() > end:
            raise errors.DataError(
                f"waited {seconds:g} s for {what} in {path}",
                where=path,
                why="it is stuck or slow, or the folder is not shared by all hosts",
                fix="a folder that all processes see; or a longer deadline: BLUFUNC_DEADLINE=seconds",
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
