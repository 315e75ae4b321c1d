"""Reports on memory: ``live_arrays``, ``memory_stats``, ``snapshot``."""

import json

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors


@pytest.mark.slow
def test_live_arrays_are_those_that_python_holds():
    x, y = (
        bnp.ones((3, 1, 5, 1, 1)),
        bnp.zeros((7, 1, 1, 1, 1)),
    )  # other tests leave no arrays of these shapes
    own = lambda: [a for a in bf.live_arrays() if a.shape in ((3, 1, 5, 1, 1), (7, 1, 1, 1, 1))]
    assert {id(a) for a in own()} == {id(x), id(y)}
    y.delete()
    assert {id(a) for a in own()} == {id(x)}
    assert any(a is x for a in bf.live_arrays("cpu"))
    with pytest.raises(errors.ValueRangeError):
        bf.live_arrays("abacus")
    del x
    assert own() == []


def test_a_snapshot_lists_the_largest_first(tmp_path):
    x = [bnp.ones((1 << 10, 3, 1, 1)), bnp.ones((1 << 10, 3, 1, 1)), bnp.ones((5, 1, 1, 1), bnp.int32)]
    s = bf.memory.snapshot()
    rows = [a for a in s.allocations if a.type in ("f32[1024,3,1,1]", "i32[5,1,1,1]")]
    assert [(a.nbytes, a.count, a.memory) for a in rows] == [(3 << 13, 2, "device"), (20, 1, "device")]
    text = str(s)
    assert text.startswith("cpu:0: ") and "f32[1024,3,1,1]" in text
    s.save(tmp_path / "memory.json")
    found = json.loads((tmp_path / "memory.json").read_text())
    assert found["device"] == "cpu:0" and found["stats"] == s.stats
    assert found["allocations"][0]["nbytes"] == s.allocations[0].nbytes
    del x


def test_stats_of_the_cpu_are_those_of_the_process():
    stats = bf.devices("cpu")[0].memory_stats()
    assert 0 < stats["bytes_in_use"] <= stats["peak_bytes_in_use"] < stats["bytes_limit"]
    held = np.ones(1 << 25)
    assert bf.devices("cpu")[0].memory_stats()["bytes_in_use"] > stats["bytes_in_use"] + held.nbytes // 2
