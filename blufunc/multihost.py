"""Multi-process operations, as in ``jax.experimental.multihost_utils``.

Face over ``parallel.runtime.multihost``.
"""

from blufunc.parallel.runtime.multihost import (
    assert_equal,
    broadcast_one_to_all,
    process_allgather,
    sync_global_devices,
)

__all__ = ["assert_equal", "broadcast_one_to_all", "process_allgather", "sync_global_devices"]
