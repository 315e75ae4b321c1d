"""Run a program of ``programs`` on blufunc or on JAX, and save its results.

``python -m tests.ecosystem.run blufunc optax out.npz``
"""

import importlib
import sys

import numpy as np


def flat(found):
    """Each result under a name: those that are tuples or lists by position."""
    arrays = {}
    for name, value in found.items():
        parts = value if isinstance(value, (tuple, list)) else [value]
        for i, part in enumerate(_leaves(parts)):
            arrays[f"{name}[{i}]"] = np.asarray(part)
    return arrays


def _leaves(parts):
    for part in parts:
        if isinstance(part, (tuple, list)):
            yield from _leaves(part)
        else:
            yield part


def main(backend, program, path):
    if backend == "blufunc":
        from blufunc import as_jax

        as_jax.install()
    else:  # the substrate of distrax writes to names that JAX has moved
        import jax

        jax.interpreters.xla.pytype_aval_mappings = jax._src.core.pytype_aval_mappings
        jax.core.pytype_aval_mappings = jax._src.core.pytype_aval_mappings
    np.savez(path, **flat(importlib.import_module(f"tests.ecosystem.programs.{program}_program").results()))


if __name__ == "__main__":
    main(*sys.argv[1:])
