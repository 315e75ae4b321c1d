"""Programs on many devices: meshes, partitioning, collectives, engines, recipes.

In: global programs with shardings, or functions of shards. Out: local programs whose collectives are equations, and
ranks that run them. Packages, bottom first: ``mesh``, ``runtime``, ``collectives``, ``partition``, ``programs``,
``reports``, ``layouts``; ``recipes`` stands above ``nn``, and its functions are found here too:
``bf.parallel.pipeline``.
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.parallel.layouts.activations import annotated as annotated
    from blufunc.parallel.layouts.search import search as search
    from blufunc.parallel.recipes import *  # noqa: F403 - each by its own name
