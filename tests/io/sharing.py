"""Several processes that save and restore together: see ``test_processes.py``."""

import os
import sys

import numpy as np

import blufunc as bf
from blufunc import NamedSharding, P, errors, io

folder, n = sys.argv[1], 8
bf.distributed.initialize()
us, count = bf.process_index(), bf.process_count()
mesh = bf.make_mesh((count,), ("data",))
x = np.arange(n * 3, dtype=np.float32).reshape(n, 3)


def put(spec, x=x):
    return bf.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def own(array):
    """The values of this process's shard, and those that it should have."""
    (shard,) = array.addressable_shards
    return np.asarray(shard.data), x[shard.index]


tree = {
    "rows": put(P("data")),
    "columns": put(P(None, "data")),
    "same": [put(P()) for _ in range(4)],
    "step": 1,
}
saves = io.Checkpointer(folder, keep=1)
saves.save(1, tree, facts={"from": 0})
saves.save(2, tree | {"step": 2})
saves.wait()
assert saves.steps() == [2]
like = {
    "rows": bf.ShapeDtypeStruct((n, 3), "float32", sharding=NamedSharding(mesh, P(None, "data"))),
    "columns": tree["rows"],
    "same": [tree["rows"], tree["same"][0], np.zeros((n, 3), np.float32), tree["columns"]],
    "step": 0,
}
found = saves.restore(like)
for array in (found["rows"], found["columns"], found["same"][0], found["same"][1], found["same"][3]):
    np.testing.assert_array_equal(*own(array))
assert found["step"] == 2 and np.array_equal(found["same"][2], x)

# One process cannot write: all get an error, and the last checkpoint is as it was.
pwrite = os.pwrite
if us == 1:
    os.pwrite = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
saves.save(3, tree)
try:
    saves.wait()
except errors.DataError as error:
    expected = "No space left on device" if us == 1 else "could not write its part"
    print("refused" if expected in str(error) else error)
os.pwrite = pwrite
assert saves.steps() == [2]
saves.save(4, tree | {"step": 4})
saves.close()
assert saves.steps() == [4] and saves.restore(like)["step"] == 4
try:
    io.Checkpointer(f"{folder}/nothing").restore(like)
except errors.DataError as error:
    print("none" if "there is no checkpoint" in str(error) else error)
sys.exit(io.STOPPED)
