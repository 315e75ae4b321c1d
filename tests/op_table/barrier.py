"""Rows of ``optimization_barrier``, for ``tests/op_table/rows.py``."""

from blufunc.core.ops import barrier
from tests.op_table.row import ANY, Arg, Op

ROWS = [
    Op(barrier.optimization_barrier_p, (Arg(),), lambda x: [x], name="one", grad=2, dtypes=ANY),
    Op(
        barrier.optimization_barrier_p,
        (Arg(), Arg((4,)), Arg(())),
        lambda x, y, z: [x, y, z],
        name="several",
        grad=2,
        dtypes=("float64", "float32", "complex128"),
        mixes=True,
    ),
    Op(
        barrier.optimization_barrier_p,
        (Arg(), Arg((4,), -5, 5, "int32")),
        lambda x, i: [x, i],
        name="mixed",
        grad=2,
        dtypes=("float64",),
        mixes=True,
    ),
]
