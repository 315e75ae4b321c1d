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
    from blufunc.parallel.recipes.hierarchical import (
        hierarchical_all_gather,
        hierarchical_psum,
        hierarchical_psum_scatter,
    )
    from blufunc.parallel.recipes.pipelines.pipeline import (
        deinterleave_layers,
        interleave_layers,
        pipeline,
        pipeline_value_and_grad,
    )
    from blufunc.parallel.recipes.pipelines.plan import plan_pipeline
    from blufunc.parallel.recipes.pipelines.schedule import PipelineCosts, pipeline_schedule
    from blufunc.parallel.recipes.quantized import quantized_all_gather, quantized_psum_scatter
    from blufunc.parallel.recipes.token_order import unzigzag, zigzag, zigzag_order, zigzag_positions
    from blufunc.parallel.recipes.turns import by_turns
    from blufunc.parallel.recipes.vocabulary_parallel import (
        pad_vocabulary,
        vocabulary_parallel_cross_entropy,
        vocabulary_parallel_embedding,
    )

__all__ = [
    "Mixture",
    "PipelineCosts",
    "accumulated_value_and_grad",
    "all_gather_matmul",
    "balanced_bias",
    "bucketed_psum",
    "by_turns",
    "context_parallel_attention",
    "deinterleave_layers",
    "dropless_experts",
    "expert_capacity",
    "hierarchical_all_gather",
    "hierarchical_psum",
    "hierarchical_psum_scatter",
    "interleave_layers",
    "matmul_reduce_scatter",
    "mixture_of_experts",
    "pad_vocabulary",
    "pipeline",
    "pipeline_schedule",
    "pipeline_value_and_grad",
    "plan_pipeline",
    "quantized_all_gather",
    "quantized_psum_scatter",
    "unzigzag",
    "vocabulary_parallel_cross_entropy",
    "vocabulary_parallel_embedding",
    "zigzag",
    "zigzag_order",
    "zigzag_positions",
]
