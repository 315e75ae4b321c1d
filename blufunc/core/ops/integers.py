"""Operations on integers that no short composition of others gives: the greatest common divisor.

Core operations, beside ``elementwise``. Euclid's algorithm takes a number of steps that depends on the values,
so that composed of other operations it would be a loop over whole arrays.
"""

from __future__ import annotations

import numpy as np

from blufunc.core.primitives.c_form import call
from blufunc.core.primitives.kinds import Elementwise

gcd_p = Elementwise("gcd", np.gcd, "integer", [None, None], lower=call("gcd", "i", 2), cost=20)
