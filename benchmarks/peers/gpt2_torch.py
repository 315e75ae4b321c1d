"""GPT-2's training step in idiomatic PyTorch, eager or compiled.

    python -m benchmarks.peers.gpt2_torch --compile --mode reduce-overhead --precision bf16
    torchrun --nproc-per-node 2 -m benchmarks.peers.gpt2_torch --parallel ddp --compile

Needs only torch and NumPy. ``--batch`` is per GPU. ``gpt2_torch_parallel.py`` has the ways to divide the step.
"""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.peers import clock, gpt2, gpt2_torch_parallel


class Block(nn.Module):
    """Attention and the two-layer MLP, each after a norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x))  # of a device's heads
        B, T, _ = qkv.shape
        D = self.norm1.normalized_shape[0] // self.heads
        q, k, v = (t.reshape(B, T, -1, D).transpose(1, 2) for t in qkv.chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Loss of a batch."""

    def __init__(self, o):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(o.vocab, o.width), nn.Embedding(o.context, o.width)
        self.blocks = nn.ModuleList(Block(o.width, o.heads) for _ in range(o.layers))
        self.norm = nn.LayerNorm(o.width)
        self.head = nn.Linear(o.width, o.vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, inputs, targets, places):
        x = self.tokens(inputs) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))


def state(weights: dict) -> dict[str, torch.Tensor]:
    """Shared initial weights by PyTorch's names; its matrices are [outputs, inputs]."""
    found = {of_torch(name): torch.from_numpy(matrix(name, x)) for name, x in gpt2.named(weights).items()}
    return found | {"head.weight": found["tokens.weight"]}


def of_torch(name: str) -> str:
    """PyTorch's name of a parameter: this file's modules, a norm's scale as weight."""
    name = name.replace("attention.", "").replace("mlp.", "").replace(".scale", ".weight")
    return f"{name}.weight" if name in ("tokens", "positions") else name


def matrix(name: str, x: np.ndarray) -> np.ndarray:
    """Transpose matrices between [inputs, outputs] and [outputs, inputs]."""
    return np.ascontiguousarray(x.T) if name.endswith(".weight") else x


def main() -> None:
    """Emit one row."""
    parser = gpt2.parser()
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--mode", help="of torch.compile: reduce-overhead, max-autotune")
    parser.add_argument("--float64", action="store_true", help="compute in float64, with --precision fp32")
    ways = gpt2_torch_parallel.WAYS
    parser.add_argument("--parallel", choices=list(ways), help="one of several processes of torchrun")
    o = parser.parse_args()
    on_gpu, rank, ranks = o.platform == "cuda", 0, 1
    if o.parallel:
        dist.init_process_group("nccl" if on_gpu else "gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    way = ways[o.parallel](ranks) if o.parallel else gpt2_torch_parallel.Way(ranks)
    rows = slice(rank * o.batch, (rank + 1) * o.batch) if way.divides_rows else slice(None)
    o.batch *= way.batches
    if not rank:
        clock.emit_versions("torch", "triton")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = o.precision != "fp32"
    dtype = torch.float64 if o.float64 else torch.float32
    initial = state(gpt2.weights(o))
    model = GPT(o).to(dtype)
    model.load_state_dict(initial)
    model = way.distributed(model.to(o.platform))
    assert o.parallel or sum(p.numel() for p in model.parameters()) == gpt2.count(o)
    forward = way.compiled(model, o.mode) if o.compile else model
    low = torch.autocast(o.platform, torch.bfloat16, enabled=o.precision == "bf16")
    optimizers, batches, a = [], [], gpt2.ADAMW

    def start():
        if optimizers:  # an earlier run has trained
            assert not o.parallel
            model.load_state_dict(initial)
        settings = {"lr": gpt2.LEARNING_RATE, "betas": (a["b1"], a["b2"]), "eps": a["eps"], "fused": True}
        optimizers[:] = [way.optimizer(model.parameters(), **settings, weight_decay=a["weight_decay"])]

    def load(tokens):
        batches[:] = torch.from_numpy(tokens).long().to(o.platform)

    def differentiated(batch):
        """The loss of this process, of which parameters have the gradients."""
        places = torch.arange(o.context, device=o.platform)[None]
        sides = [batch[:, :-1].contiguous(), batch[:, 1:].contiguous(), places]
        with way.step(sides):
            with low:
                loss = forward(*sides)
            loss.backward()
        return way.local(loss.detach())

    def step(i):
        torch.compiler.cudagraph_mark_step_begin()
        loss = differentiated(batches[i % len(batches)][rows])
        optimizers[0].step()
        optimizers[0].zero_grad(set_to_none=True)
        if ranks > 1:
            dist.all_reduce(loss)
        wait()
        return loss / ranks

    def wait():
        if on_gpu:
            torch.cuda.synchronize()

    def gradients():
        loss = differentiated(batches[0])
        found = {name: p.grad.cpu().numpy() for name, p in model.named_parameters()}
        return loss.item(), {
            name: matrix(name, found[of_torch(name)]) for name in gpt2.named(gpt2.weights(o))
        }

    def memory():
        if not on_gpu:
            return {}
        free, total = torch.cuda.mem_get_info()
        return {
            "peak_GB": torch.cuda.max_memory_allocated() / 1e9,
            "held_GB": torch.cuda.max_memory_reserved() / 1e9,
            "device_GB": (total - free) / 1e9,
        }

    gpt2.run(o, gpt2.Trainer(start, load, step, wait, gradients, memory), leads=not rank)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
