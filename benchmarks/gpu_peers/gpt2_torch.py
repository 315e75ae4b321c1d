"""GPT-2's training step in PyTorch, as its users write it; eager, or compiled. Needs nothing but torch and NumPy.

    python -m benchmarks.gpu_peers.gpt2_torch --compile --mode reduce-overhead --precision bf16
    torchrun --nproc-per-node 2 -m benchmarks.gpu_peers.gpt2_torch --parallel ddp --compile

``--batch`` is that of one GPU.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.gpu_peers import clock, gpt2


class Block(nn.Module):
    """Attention and the two-layer network, each after a norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (
            t.view(B, T, self.heads, C // self.heads).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).split(C, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """The loss of a batch."""

    def __init__(self, o):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(o.vocab, o.width), nn.Embedding(o.context, o.width)
        self.blocks = nn.ModuleList(Block(o.width, o.heads) for _ in range(o.layers))
        self.norm = nn.LayerNorm(o.width)
        self.head = nn.Linear(o.width, o.vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, inputs, targets):
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def state(weights: dict) -> dict[str, torch.Tensor]:
    """The common initial weights under PyTorch's names; its matrices are [outputs, inputs]."""

    def norm(name, p):
        return {f"{name}.weight": p["scale"], f"{name}.bias": p["bias"]}

    def linear(name, p):
        return {f"{name}.weight": p["weight"].T.copy(), f"{name}.bias": p["bias"]}

    found = {
        "tokens.weight": weights["tokens"],
        "positions.weight": weights["positions"],
        "head.weight": weights["tokens"],
    } | norm("norm", weights["norm"])
    for i, block in enumerate(weights["blocks"]):
        at = f"blocks.{i}."
        found |= norm(at + "norm1", block["norm1"]) | norm(at + "norm2", block["norm2"])
        found |= linear(at + "qkv", block["attention"]["qkv"]) | linear(at + "out", block["attention"]["out"])
        found |= linear(at + "up", block["mlp"]["up"]) | linear(at + "down", block["mlp"]["down"])
    return {name: torch.from_numpy(x) for name, x in found.items()}


def main() -> None:
    """Tell one row."""
    parser = gpt2.parser()
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--mode", help="of torch.compile: reduce-overhead, max-autotune")
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], help="one of several processes of torchrun")
    o = parser.parse_args()
    on_gpu, rank, ranks = o.platform == "cuda", 0, 1
    if o.parallel:
        dist.init_process_group("nccl" if on_gpu else "gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rows = slice(rank * o.batch, (rank + 1) * o.batch)
    o.batch *= ranks
    if not rank:
        clock.emit_versions("torch", "triton")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = o.precision != "fp32"
    model = GPT(o)
    model.load_state_dict(state(gpt2.weights(o)))
    model = model.to(o.platform)
    assert sum(p.numel() for p in model.parameters()) == gpt2.count(o)
    model = distributed(model, o.parallel)
    a = gpt2.ADAMW
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=gpt2.LEARNING_RATE,
        betas=(a["b1"], a["b2"]),
        eps=a["eps"],
        weight_decay=a["weight_decay"],
        fused=True,
    )
    forward = torch.compile(model, mode=o.mode) if o.compile else model
    tokens = torch.from_numpy(gpt2.tokens(o)).long().to(o.platform)
    low = torch.autocast(o.platform, torch.bfloat16, enabled=o.precision == "bf16")

    def step(i):
        torch.compiler.cudagraph_mark_step_begin()
        batch = tokens[i % gpt2.BATCHES, rows]
        with low:
            loss = forward(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = loss.detach()
        if ranks > 1:
            dist.all_reduce(loss)
        if on_gpu:
            torch.cuda.synchronize()
        return loss / ranks

    def memory():
        if not on_gpu:
            return {}
        free, total = torch.cuda.mem_get_info()
        return {
            "peak_GB": torch.cuda.max_memory_allocated() / 1e9,
            "held_GB": torch.cuda.max_memory_reserved() / 1e9,
            "device_GB": (total - free) / 1e9,
        }

    if rank:
        gpt2.take(o, step)
    else:
        gpt2.measure(o, step, memory)
    if ranks > 1:
        dist.destroy_process_group()


def distributed(model: GPT, parallel: str | None) -> nn.Module:
    """The model with its parameters on every GPU, or divided among them block by block."""
    if parallel == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if parallel == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model


if __name__ == "__main__":
    main()
