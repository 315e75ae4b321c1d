"""PyTorch's ways to shard a step over processes, as its documentation says.

``WAYS`` names them: DDP; the same with a sharded optimizer (ZeRO-1); FSDP2, which reshards parameters after the
forward pass or not (ZeRO-3 and 2); tensor parallelism with sequences sharded between, of TorchTitan's plan; context
parallelism.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn as nn


class Way:
    """One process, and the base of the others.

    Attributes:
      batches: a step has as many times ``--batch`` sequences.
      divides_rows: each process has its own.
    """

    divides_rows = False

    def __init__(self, ranks: int):
        self.ranks, self.batches = ranks, ranks

    def distributed(self, model: nn.Module) -> nn.Module:
        """The model with its parameters replicated or sharded."""
        return model

    def compiled(self, model: nn.Module, mode: str | None) -> Any:
        """The model as one compiled function."""
        return torch.compile(model, mode=mode)

    def optimizer(self, parameters: Any, **settings: Any) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(parameters, **settings)

    def step(self, sides: list[torch.Tensor]) -> contextlib.AbstractContextManager:
        """Context manager of both passes; of inputs, targets and positions."""
        return contextlib.nullcontext()

    def local(self, loss: Any) -> torch.Tensor:
        """The loss as a tensor of this process."""
        return loss


class Ddp(Way):
    """Parameters replicated, gradients summed in buckets."""

    divides_rows = True

    def distributed(self, model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model)


class Zero1(Ddp):
    """The same with a shard of the optimizer state in each process."""

    def optimizer(self, parameters: Any, **settings: Any) -> torch.optim.Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, **settings)


class Fsdp(Way):
    """Parameters sharded by block, and gathered for each pass."""

    divides_rows, resharded = True, True

    def distributed(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, reshard_after_forward=self.resharded)
        fully_shard(model, reshard_after_forward=self.resharded)
        return model


class Zero2(Fsdp):
    """Gradients and state sharded; parameters stay gathered after the forward pass."""

    resharded = False


class Tensor(Way):
    """Heads, hidden units and the vocabulary sharded; between these, tokens."""

    def distributed(self, model: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        mesh = init_device_mesh(next(model.parameters()).device.type, (self.ranks,))
        for block in model.blocks:  # a process has queries, keys and values of its heads
            for p in (block.qkv.weight, block.qkv.bias):
                parts = p.data.reshape(3, self.ranks, -1, *p.shape[1:])
                p.data = parts.transpose(0, 1).reshape(p.shape).contiguous()
        embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
        whole = {"tokens": embedding, "positions": embedding, "norm": SequenceParallel(), "head": head}
        parallelize_module(model, mesh, whole)
        model.head.weight = model.tokens.weight
        columns = ColwiseParallel(input_layouts=Shard(1))
        rows = RowwiseParallel(output_layouts=Shard(1))
        plan = {"qkv": columns, "out": rows, "up": columns, "down": rows}
        for block in model.blocks:
            parallelize_module(block, mesh, plan | {f"norm{i}": SequenceParallel() for i in (1, 2)})
        return model

    def compiled(self, model: nn.Module, mode: str | None) -> Any:
        for block in model.blocks:  # as TorchTitan does
            block.compile(mode=mode)
        return model

    def step(self, sides: list[torch.Tensor]) -> contextlib.AbstractContextManager:
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()

    def local(self, loss: Any) -> torch.Tensor:
        return loss.full_tensor()


class Context(Ddp):
    """Tokens of each sequence sharded, in attention too; gradients as with DDP."""

    divides_rows = False

    def __init__(self, ranks: int):
        super().__init__(ranks)
        self.batches = 1

    def distributed(self, model: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh

        self.mesh = init_device_mesh(next(model.parameters()).device.type, (self.ranks,))
        return super().distributed(model)

    def step(self, sides: list[torch.Tensor]) -> contextlib.AbstractContextManager:
        from torch.distributed.tensor.experimental import context_parallel

        return context_parallel(
            self.mesh, buffers=sides, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(sides)
        )


WAYS: dict[str, type[Way]] = {
    "ddp": Ddp, "zero1": Zero1, "zero2": Zero2, "fsdp": Fsdp, "tensor": Tensor, "context": Context,
}  # fmt: skip
