"""Small programs on the CPU, under ``jit``, against JAX.

    python -m benchmarks.suites.small [--only matmul]

One source for both libraries (``small_programs.py``), the same arguments, results compared ahead of timing. A row has
the time of a call and of the first one, which includes compilation. The geometric mean of the ratios comes last.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from benchmarks.harness.gpu_tables import geometric_mean
from benchmarks.harness.timing import report
from benchmarks.suites.loops import compared
from benchmarks.suites.small_programs import programs


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="the programs with this in their names")
    parser.add_argument("--repeats", type=int, default=5, help="blocks of each side")
    options = parser.parse_args()
    import jax

    import blufunc

    made = [programs(lib) for lib in (blufunc, jax)]
    rows = [
        compared(name, [p[name] for p in made], options.repeats, agree)
        for name in made[0]
        if options.only in name
    ]
    means = [geometric_mean([r[k] for r in rows]) for k in ("ratio", "first_ratio")]
    print(f"geometric mean {means[0]:.3f}, of first calls {means[1]:.3f}")
    report("small", rows)


def agree(name: str, ours: list[Any], theirs: list[Any]) -> None:
    """Compare the results of both libraries."""
    for x, y in zip(ours, theirs, strict=True):
        a, b = np.asarray(x), np.asarray(y)
        assert a.shape == b.shape, (name, a.shape, b.shape)
        if name not in ("svd of 20 x 10",):  # its signs are free
            np.testing.assert_allclose(
                a.astype(np.complex128), b.astype(np.complex128), rtol=1e-3, atol=1e-3, err_msg=name
            )


if __name__ == "__main__":
    main()
