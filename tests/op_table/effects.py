"""Rows of the identities for policies of ``checkpoint``."""

from __future__ import annotations

from blufunc.core.ops.offload import offload_p
from blufunc.transforms.checkpointing import policies
from tests.op_table.row import ANY, FLOATS, Arg, Op

M = Arg((2, 3))

ROWS = [
    Op(policies.name_p, (M,), lambda x: x, {"name": "h"}, grad=2, dtypes=(*FLOATS, *ANY[2:])),
    Op(
        offload_p,
        (M,),
        lambda x: x,
        {"src": "pinned_host", "dst": "device"},
        grad=2,
        dtypes=(*FLOATS, *ANY[2:]),
    ),
]
