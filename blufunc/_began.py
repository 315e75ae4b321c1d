"""When this process began to import blufunc.

Stands before the path of a program: ``blufunc/__init__.py`` imports it before all else, so that a file of blufunc that
was changed since may differ from what runs. ``kernels/cache/plans.py`` asks.
"""

from __future__ import annotations

import time

BEGAN = time.time()
