"""The kernels in PyTorch, eager or compiled, on the same data as other libraries.

    python -m benchmarks.peers.kernels_torch --compile

Needs only torch and NumPy. Device times are from Triton's ``do_bench``: events around each call, with L2 overwritten in
between.
"""

from __future__ import annotations

import argparse
import functools
import math

import numpy as np
import torch
import torch._dynamo
import torch._functorch.config
import torch.nn.functional as F

from benchmarks.peers import clock, kernel_shapes
from benchmarks.suites.kernel_cases import ADAMW_PASSES

FUNCTIONS = {  # the function, its operands, and the passes over memory forward and backward
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), ("x",), (2, 3)),
    "layer norm": (lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), ("x", "row", "row"), (2, 3)),
    "cross-entropy": (F.cross_entropy, ("x", "labels"), (1, 2)),
    "sum of rows": (lambda x: x.sum(-1), ("x",), (1, 0)),
    "sum of columns": (lambda x: x.sum(0), ("x",), (1, 0)),
}


def main() -> None:
    """Emit one row per kernel."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--platform", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    clock.emit_versions("torch", "triton")
    torch._dynamo.config.cache_size_limit = 256
    torch._functorch.config.donated_buffer = False  # backward runs many times on one graph
    for name, shape in kernel_shapes.cases(options.tiny, options.only):
        clock.attempt(kernel_shapes.label(name, shape), functools.partial(time_kernel, name, shape, options))
        if options.platform == "cuda":
            torch.cuda.empty_cache()
    if options.only in "adamw":
        shapes = kernel_shapes.ADAMW_TINY if options.tiny else kernel_shapes.ADAMW
        clock.attempt(kernel_shapes.adamw_label(shapes), lambda: time_adamw(shapes, options))


def time_kernel(name: str, shape: tuple[int, ...], options: argparse.Namespace) -> None:
    """Time of one kernel, and a sample of its results."""
    both = name.endswith(" and gradient")  # recomputed, as in libraries that save nothing between
    function, operands, passes = FUNCTIONS[name.removesuffix(" backward").removesuffix(" and gradient")]
    f = torch.compile(function, dynamic=False) if options.compile else function
    args = [operand(o, shape, i, options.platform) for i, o in enumerate(operands)]
    backward = name.endswith(" backward")
    if backward:
        wanted = [x.requires_grad_() for x in args if x.is_floating_point()]
        out = f(*args)
        ct = operand("x", shape, len(operands), options.platform) if out.ndim else torch.ones_like(out)
        call = lambda: torch.autograd.grad(out, wanted, ct, retain_graph=True)
    elif both:
        x = args[0].requires_grad_()

        def call():
            out = f(*args)
            return out.detach(), *torch.autograd.grad(out, x)
    else:
        call = lambda: (f(*args),)
    check = sample(call())
    ms = milliseconds(call, options.platform)
    nbytes = 4 * math.prod(shape) * passes[backward or both]
    clock.emit(
        what=kernel_shapes.label(name, shape),
        ms=ms,
        event_ms=ms,
        GB_s=nbytes / ms / 1e6,
        bytes=nbytes,
        check=check,
    )


def time_adamw(shapes: dict, options: argparse.Namespace) -> None:
    """AdamW over a model's parameters."""
    rng = np.random.default_rng(0)
    params, grads = (
        {
            name: torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(options.platform)
            for name, shape in shapes.items()
        }
        for _ in range(2)
    )
    for name, param in params.items():
        param.requires_grad_().grad = grads[name]
    optimizer = torch.optim.AdamW(params.values(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    step = torch.compile(optimizer.step) if options.compile else optimizer.step
    step()
    check = sample([params["tokens"]])
    ms = milliseconds(step, options.platform)
    nbytes = 4 * sum(map(math.prod, shapes.values())) * ADAMW_PASSES
    what = kernel_shapes.adamw_label(shapes)
    clock.emit(what=what, ms=ms, event_ms=ms, GB_s=nbytes / ms / 1e6, bytes=nbytes, check=check)


def milliseconds(call, platform: str) -> float:
    """Median time of a call."""
    if platform == "cpu":
        return clock.wall_ms(lambda _: call(), lambda _: None)
    from triton.testing import do_bench

    return do_bench(call, warmup=50, rep=200, return_mode="median")


def operand(name: str, shape: tuple[int, ...], seed: int, platform: str) -> torch.Tensor:
    """An operand, by its name in the table of kernels."""
    if name == "labels":
        return torch.from_numpy(kernel_shapes.labels(shape)).long().to(platform)
    if name == "row":
        return torch.from_numpy(kernel_shapes.row(shape, seed)).to(platform)
    rows, repeats = kernel_shapes.block(shape, seed)
    return torch.from_numpy(rows).to(platform).repeat(repeats, *(1,) * (rows.ndim - 1))


def sample(results) -> list[float]:
    """Sampled elements of each result."""
    found = []
    for x in results:
        where = torch.from_numpy(kernel_shapes.sampled(x.numel())).long().to(x.device)
        found += x.detach().reshape(-1)[where].tolist()
    return found


if __name__ == "__main__":
    main()
