"""Checkpoints: verified safetensors files, and asynchronous sharded saves.

A face, outside the path of a program. ``save`` and ``load`` are for one file: weights, a dataset's statistics.
``Checkpointer`` is for the state of a training run. ``python -m blufunc.io`` inspects and verifies both.
docs/checkpoints.md shows their use, and docs/design/018 the decisions.
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.io.checkpointer import Checkpointer as Checkpointer
    from blufunc.io.files import facts as facts
    from blufunc.io.files import load as load
    from blufunc.io.files import save as save
    from blufunc.io.inspection import verify as verify
    from blufunc.io.signals import STOPPED as STOPPED
    from blufunc.io.signals import stop_signals as stop_signals
