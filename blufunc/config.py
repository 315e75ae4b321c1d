"""The flags of blufunc: few, typed, each also an environment variable ``BLUFUNC_<NAME>``.

Stands before the path of a program: every layer may read it, nothing here imports the rest.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields
from typing import Any


@dataclass
class Config:
    """Process-wide settings; assign to the attributes of ``blufunc.config.config`` to change them.

    Attributes:
      debug: comma-separated stages to print to stderr as programs pass them: ``jaxpr``, ``source``, ``retrace``.
      debug_key_reuse: raise ``KeyReuseError`` where a random key is used twice.
      check: run ``check_jaxpr`` on every jaxpr that a trace or transform produces. Slow; the tests set it.
    """

    debug: str = ""
    check: bool = False
    debug_key_reuse: bool = False

    def shows(self, stage: str) -> bool:
        """Whether ``debug`` asks for ``stage``."""
        return stage in self.debug.split(",")

    def show(self, text: object) -> None:
        """Print what ``shows`` said was wanted."""
        sys.stderr.write(f"{text}\n")


def from_environment(environ=os.environ) -> Config:
    """A ``Config`` with the values that ``BLUFUNC_*`` variables give."""
    values: dict[str, Any] = {}
    for f in fields(Config):
        text = environ.get(f"BLUFUNC_{f.name.upper()}")
        if text is not None:
            values[f.name] = text.lower() in ("1", "true", "yes", "on") if f.type == "bool" else text
    return Config(**values)


config = from_environment()
