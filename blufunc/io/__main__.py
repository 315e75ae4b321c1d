"""``python -m blufunc.io inspect|verify PATH``: look at files and checkpoints.

The command line over ``inspection``. The exit status is 1 if something is damaged or missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from blufunc import errors
from blufunc.io import inspection


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        "python -m blufunc.io", description="Look at safetensors files and the checkpoints of a Checkpointer."
    )
    parser.add_argument(
        "command", choices=("inspect", "verify"), help="list what is there; or compare all digests"
    )
    parser.add_argument("path", help="a file, the folder of a Checkpointer, a manifest in it, or a URL")
    options = parser.parse_args(arguments)
    try:
        if options.command == "verify":
            inspection.verify(options.path)
            sys.stdout.write(f"{options.path}: every digest is right\n")
        else:
            for line in inspection.described(options.path):
                sys.stdout.write(line.encode(errors="backslashreplace").decode() + "\n")
    except errors.BlufuncError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
