"""Signals that ask a run to end, as a flag between steps.

A face, outside the path of a program. In: SIGTERM and SIGINT. Out: an event that a training loop reads after each step,
to save and exit with ``STOPPED``.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from blufunc.parallel.runtime.watchdog import STOPPED as STOPPED


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Turn SIGTERM and Ctrl-C into an event; a second raises ``KeyboardInterrupt``.

    with io.stop_signals() as stop:
        for step in range(first, n):
            state = train(state)
            if stop.is_set():
                checkpointer.save(step + 1, state, force=True)
                checkpointer.close()
                sys.exit(io.STOPPED)

    Outside the main thread, which alone may handle signals, the event is never set.
    """
    stop = threading.Event()

    def note(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
