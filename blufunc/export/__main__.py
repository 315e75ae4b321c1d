"""``python -m blufunc.export inspect FILE``: print an exported program.

The command line over ``files`` and ``exported``. The exit status is 1 if the file is damaged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from blufunc import errors
from blufunc.core.ir.jaxpr import Jaxpr, subjaxprs
from blufunc.export.exported import deserialize


def _n_equations(jaxpr: Jaxpr) -> int:
    return sum(1 + sum(map(_n_equations, subjaxprs(e.params))) for e in jaxpr.eqns)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser("python -m blufunc.export", description="Look at an exported program.")
    parser.add_argument("command", choices=("inspect",), help="print its types, size and jaxpr")
    parser.add_argument("path", help="a file with the bytes of Exported.serialize")
    options = parser.parse_args(arguments)
    try:
        exported = deserialize(Path(options.path).read_bytes())
    except (errors.BlufuncError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    size = sum(c.aval.nbytes for c in exported.jaxpr.consts)
    sys.stdout.write(f"{exported}\n")
    sys.stdout.write(
        f"{_n_equations(exported.jaxpr)} equations, {len(exported.jaxpr.consts)} constants of {size:,} bytes\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
