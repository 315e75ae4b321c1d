"""Pipelines: layers sharded over a mesh axis, by one of several schedules.

In: the parts of a model, and microbatches. Out: results, or loss and gradients; and before a job is started, tables and
plans of schedules. ``pipeline.py`` has the functions to call inside ``shard_map``.
"""
