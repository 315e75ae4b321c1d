"""Matmuls in low precision: fp8 training, and emulated formats for studies.

A face, above ``blufunc.numpy``. Each is a transform of a function, which rewrites the matmuls in it and keeps their
types, so parameters and gradients stay as they are::

    loss = nn.low_precision.float8(bf.autocast(loss))  # matmuls in fp8, the rest in bfloat16
    loss = nn.low_precision.emulate(loss, nn.low_precision.MX(nn.low_precision.E2M1))
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.nn.low_precision.emulation import emulate as emulate
    from blufunc.nn.low_precision.float8 import DelayedFloat8 as DelayedFloat8
    from blufunc.nn.low_precision.float8 import Float8 as Float8
    from blufunc.nn.low_precision.float8 import History as History
    from blufunc.nn.low_precision.float8 import delayed_float8 as delayed_float8
    from blufunc.nn.low_precision.float8 import float8 as float8
    from blufunc.nn.low_precision.formats import E2M1 as E2M1
    from blufunc.nn.low_precision.formats import E2M3 as E2M3
    from blufunc.nn.low_precision.formats import E3M2 as E3M2
    from blufunc.nn.low_precision.formats import E4M3 as E4M3
    from blufunc.nn.low_precision.formats import E5M2 as E5M2
    from blufunc.nn.low_precision.formats import MX as MX
    from blufunc.nn.low_precision.formats import Format as Format
    from blufunc.nn.low_precision.rounding import round_to as round_to
