"""``python -m blufunc.as_jax script.py [arguments]``: a JAX program on blufunc.

Face. ``-m module`` runs a module in place of a script, as Python itself does.
"""

from __future__ import annotations

import os
import runpy
import sys

from blufunc import as_jax

USAGE = "usage: python -m blufunc.as_jax (script.py | -m module) [arguments]"


def main(arguments: list[str]) -> None:
    """Install the name, and run the script or module that the arguments begin with."""
    if not arguments or arguments == ["-m"] or arguments[0] in ("-h", "--help"):
        raise SystemExit(USAGE)
    as_jax.install()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
