"""``offload``: move a value between the memory of a device and that of its host.

Core operation, for ``device_put`` to a memory and the offloading policies of ``checkpoint``. In: a value. Out: the
same value, whose type carries another ``memory``. It is the only computation on values in the memory of the host: all
others raise (``rule_errors.host_error``). Tangents and cotangents are in the memory of the device, so its
derivative moves nothing.

A device with one memory ignores it; CUDA programs plan it as a copy on a stream of its own
(``kernels/rewrites/loops/memories.py``, ``kernels/memory/overlap.py``).
"""

from __future__ import annotations

from typing import Any

from blufunc.core.ir.avals import DEVICE, ShapedArray
from blufunc.core.primitives.linear_ops import Linear, move_dim
from blufunc.core.primitives.sharding import FIRST, one_by_one


class _Offload(Linear):
    """The operand in memory ``dst``, where it was in ``src``."""

    name, kind, any_memory = "offload", "transfer", True
    linear, autocast_class = FIRST, "widest"

    shard = staticmethod(one_by_one)

    def impl(self, x, *, src, dst):
        return x

    def abstract(self, x: ShapedArray, *, src: str, dst: str):
        return x.in_memory(dst)

    def jvp(self, primals, tangents, **params):
        return self.bind(*primals, **params), tangents[0]

    def transpose(self, ct, x, **params):
        x.add(in_memory(ct, DEVICE))

    def batch(self, axis, args, dims, **params):
        (x,), (d,) = args, dims
        if x.aval.memory == DEVICE:  # in the other memory nothing can move the axis where calls need it
            x, d = move_dim(x, d, 0), 0
        return self.bind(x, **params), d


offload_p = _Offload()


def in_memory(x: Any, memory: str) -> Any:
    """A value in a kind of memory; itself if it is there."""
    here = x.aval.memory
    return x if here == memory else offload_p.bind(x, src=here, dst=memory)
