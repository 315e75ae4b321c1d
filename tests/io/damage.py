"""Flip bits and cut ends of a file: each is found, and the leaf named.

python -m tests.io.damage --flips 8000 --cuts 2000
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

from blufunc import errors, io
from blufunc.io import reading, seal, storage

LIKE = {
    "a": np.arange(100, dtype=np.int32),
    "b": {"c": np.ones(77, np.float64), "d": np.arange(9, dtype=np.int8)},
}


def check(path: Path, flips: int, cuts: int, seed: int) -> None:
    """Damage a file of arrays of several chunks again and again."""
    rng = np.random.default_rng(seed)
    io.save(path, LIKE | {"n": 5}, facts=[1])
    good = path.read_bytes()
    start = 8 + int.from_bytes(good[:8], "little")
    arrays = reading.opened(storage.Local(str(path.parent)), path.name).header.arrays
    for n in range(flips + cuts):
        if n < flips:  # half of the flips are in the header
            at = int(rng.integers(start)) if n % 2 else int(rng.integers(start, len(good)))
            bad = bytearray(good)
            bad[at] ^= 1 << int(rng.integers(8))
        else:
            at = int(rng.integers(len(good)))
            bad = good[:at]
        path.write_bytes(bad)
        try:
            io.load(path, LIKE | {"n": 0})
        except errors.DataError as error:
            message = str(error)
        else:
            raise AssertionError(f"damage {n} of seed {seed} at byte {at} was not found")
        assert str(path) in message
        if at >= start:
            leaf = next(a.leaf for a in arrays if a.start <= at - start < a.stop)
            expected = f"{leaf} is damaged" if n < flips else f"{leaf} and what follows are cut off"
            assert expected in message, message
    path.write_bytes(good)
    assert io.load(path, LIKE | {"n": 0})["n"] == 5


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--flips", type=int, default=8000)
    parser.add_argument("--cuts", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seal.CHUNK = 64
    with tempfile.TemporaryDirectory() as folder:
        check(Path(folder, "x"), options.flips, options.cuts, options.seed)
    print(f"{options.flips} flipped bits and {options.cuts} cuts: all found, the leaf named")


if __name__ == "__main__":
    main()
