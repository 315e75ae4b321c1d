"""Integer operations without a short composition: the greatest common divisor.

Core operations, next to ``elementwise``. Euclid's algorithm takes a data-dependent number of steps, so a
composition would be a loop over whole arrays.
"""

from __future__ import annotations

import numpy as np

from blufunc.core.primitives.c_form import call
from blufunc.core.primitives.kinds import Elementwise

gcd_p = Elementwise("gcd", np.gcd, "integer", [None, None], lower=call("gcd", "i", 2), cost=20)
