"""Stages 2 and 8 of the path of a program on many devices: meshes, shardings, partitioning, engines.

What transformers are made of stands higher, in ``spmd``, and is found here too: ``bf.parallel.mixture_of_experts``.
"""

import importlib as _importlib

# Names of ``spmd``, written out: whoever imports a module of this package asks for its name here first, and that must
# not import ``spmd``, which imports that module.
_IN_SPMD = (
    "accumulated_value_and_grad",
    "all_gather_matmul",
    "bucketed_psum",
    "context_parallel_attention",
    "expert_capacity",
    "matmul_reduce_scatter",
    "mixture_of_experts",
    "pad_vocabulary",
    "pipeline",
    "pipeline_value_and_grad",
    "schedule_1f1b",
    "unzigzag",
    "vocabulary_parallel_cross_entropy",
    "vocabulary_parallel_embedding",
    "zigzag",
    "zigzag_order",
    "zigzag_positions",
)


def __getattr__(name: str):
    if name in _IN_SPMD:
        return getattr(_importlib.import_module("blufunc.spmd"), name)
    raise AttributeError(f"module 'blufunc.parallel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_IN_SPMD})
