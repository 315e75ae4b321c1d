"""Time at which this process began to import blufunc.

Before the path of a program: ``blufunc/__init__.py`` imports it first. ``kernels/cache/plans.py`` compares it
with file times, to detect files of blufunc that changed since.
"""

from __future__ import annotations

import time

BEGAN = time.time()
