"""Stages 2 and 8 of the path of a program on many devices: meshes, shardings, partitioning, engines.

What models are made of stands higher, in ``spmd``, and is found here too: ``bf.parallel.context_parallel_attention``.
"""

import importlib as _importlib


def __getattr__(name: str):
    spmd = _importlib.import_module("blufunc.spmd")  # not above: it imports modules of this package
    if name in spmd.__all__:
        return getattr(spmd, name)
    raise AttributeError(f"module 'blufunc.parallel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_importlib.import_module("blufunc.spmd").__all__})
