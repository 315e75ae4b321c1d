"""Rows of ``core.ops.integers``, for ``tests/op_table/rows.py``."""

import math

from blufunc.core.ops import integers
from tests.op_table.references import integers as of_integers
from tests.op_table.row import INTS, KEY, Arg, Op

PAIR = (Arg((2, 3), -60, 60), Arg((2, 3), -60, 60))


def _gcd(x, y, bits):
    return math.gcd(x, y)


ROWS = [
    Op(
        integers.gcd_p,
        PAIR,
        of_integers(_gcd),
        grad=0,
        dtypes=INTS,
        refuses=("float32", "complex64", "bool", KEY),
    ),
]
