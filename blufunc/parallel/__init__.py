"""Programs on many devices: meshes, shardings, partitioning, collectives, engines and recipes.

In: global programs with shardings, or functions of shards. Out: local programs whose collectives are equations, and
ranks that run them. Packages, bottom first: ``mesh``, ``runtime``, ``collectives``, ``partition``, ``programs``,
``reports``; ``recipes`` stands above ``nn``, and its functions are found here too: ``bf.parallel.pipeline``.
"""

import importlib as _importlib

# Names of ``recipes``, written out: an import of a submodule asks for its name here first, and must not import
# ``recipes``, which imports that submodule.
_RECIPES = (
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
    if name in _RECIPES:
        return getattr(_importlib.import_module("blufunc.parallel.recipes"), name)
    raise AttributeError(f"module 'blufunc.parallel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_RECIPES})
