"""Parallel transformers: functions to call inside ``shard_map``.

A face; also found as ``bf.parallel``. Each module is one way to shard a model, and is self-contained.
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.parallel.recipes.collective_matmul import all_gather_matmul, matmul_reduce_scatter
    from blufunc.parallel.recipes.context_parallel import context_parallel_attention
    from blufunc.parallel.recipes.dropless_experts import Mixture, balanced_bias, dropless_experts
    from blufunc.parallel.recipes.expert_parallel import expert_capacity, mixture_of_experts
    from blufunc.parallel.recipes.gradients import accumulated_value_and_grad, bucketed_psum
    from blufunc.parallel.recipes.pipeline import pipeline, pipeline_value_and_grad, schedule_1f1b
    from blufunc.parallel.recipes.token_order import unzigzag, zigzag, zigzag_order, zigzag_positions
    from blufunc.parallel.recipes.vocabulary_parallel import (
        pad_vocabulary,
        vocabulary_parallel_cross_entropy,
        vocabulary_parallel_embedding,
    )

__all__ = [
    "Mixture",
    "accumulated_value_and_grad",
    "all_gather_matmul",
    "balanced_bias",
    "bucketed_psum",
    "context_parallel_attention",
    "dropless_experts",
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
]
